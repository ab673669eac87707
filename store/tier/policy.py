"""Which chunks are worth their memory: LRU, LFU and the paper's score behind one interface.

A policy turns what is known of a chunk into a priority; the tier keeps the highest. Everything
is arrays: one entry per chunk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np

from store.errors import InvalidValueError

#: Weight of the newest observation in a chunk's important ratio.
RATIO_BETA = 0.2


class ChunkFacts(NamedTuple):
    """Per chunk: float32 accesses and moving important ratio, int64 request of the last access."""

    accesses: np.ndarray
    ratio: np.ndarray
    last: np.ndarray


class EvictionPolicy(ABC):
    """Priority of chunks; the lowest leave first, ties in the order of their place in the store.

    Attributes
    ----------
    name
        As in `POLICIES`.
    """

    name: str

    @abstractmethod
    def priority(self, facts: ChunkFacts) -> np.ndarray:
        """Priority of each chunk, float64 of the shape of the facts; deterministic."""


class LRU(EvictionPolicy):
    """The request that used a chunk last."""

    name = "lru"

    def priority(self, facts: ChunkFacts) -> np.ndarray:
        """Number of the last request."""
        return facts.last.astype(np.float64)


class LFU(EvictionPolicy):
    """How many requests used a chunk."""

    name = "lfu"

    def priority(self, facts: ChunkFacts) -> np.ndarray:
        """Number of accesses."""
        return facts.accesses.astype(np.float64)


class Score(EvictionPolicy):
    """Access frequency times the share of the chunk that was important (paper, score cache)."""

    name = "score"

    def priority(self, facts: ChunkFacts) -> np.ndarray:
        """Accesses times moving important ratio."""
        score: np.ndarray = facts.accesses.astype(np.float64) * facts.ratio
        return score


POLICIES: dict[str, type[EvictionPolicy]] = {kind.name: kind for kind in (Score, LRU, LFU)}


def make_policy(name: str) -> EvictionPolicy:
    """The policy of this name. Raises `InvalidValueError`."""
    if name not in POLICIES:
        raise InvalidValueError(f"policy {name!r} is not known; use one of {', '.join(POLICIES)}")
    return POLICIES[name]()
