"""Which chunks are worth their memory: LRU, LFU and the paper's score behind one interface.

A policy turns what is known of a chunk into a priority; the tier keeps the highest. Everything
is arrays: one entry per chunk.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np

from store.errors import InvalidValueError

#: Weight of the newest observation in a chunk's important ratio.
RATIO_BETA = 0.2


class ChunkFacts(NamedTuple):
    """Per chunk: float32 accesses and moving important ratio, int64 request of the last access.

    Accesses are as of the last one: what has faded since is for the policy to say.
    """

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
        """Priority of each chunk, float64 of the shape of the facts; deterministic.

        Which of two chunks is higher must not change while neither is used: the tiers compute
        a priority when a chunk is used and keep it.
        """

    def faded(self, accesses: np.ndarray, requests: np.ndarray) -> np.ndarray:  # noqa: ARG002
        """What is left of ``accesses`` so many ``requests`` later; all, unless a policy ages."""
        return accesses


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
    """Access frequency times the share of the chunk that was important (paper, score cache).

    Parameters
    ----------
    half_life
        Requests after which an access counts half; None (the paper) lets none fade.
    """

    name = "score"

    def __init__(self, half_life: float | None = None) -> None:
        if half_life is not None and not 0 < half_life < math.inf:
            raise InvalidValueError(
                f"half-life of {half_life} requests is not allowed; give a number above 0, "
                f"or none for accesses that never fade"
            )
        self.half_life = half_life

    def priority(self, facts: ChunkFacts) -> np.ndarray:
        """Accesses times moving important ratio; with a half-life, its logarithm and age.

        All scores fade alike, by ``2^(-1/half_life)`` a request. So their order is that of
        ``log2(score at the last access) + last / half_life``, which no request changes.
        """
        score: np.ndarray = facts.accesses.astype(np.float64) * facts.ratio
        if self.half_life is None:
            return score
        with np.errstate(divide="ignore"):
            aged: np.ndarray = np.log2(score) + facts.last / self.half_life
        return aged

    def faded(self, accesses: np.ndarray, requests: np.ndarray) -> np.ndarray:
        """Accesses times ``2^(-requests / half_life)``."""
        if self.half_life is None:
            return accesses
        left: np.ndarray = accesses * np.exp2(-requests / self.half_life)
        return left


POLICIES: dict[str, type[EvictionPolicy]] = {kind.name: kind for kind in (Score, LRU, LFU)}


def make_policy(name: str, half_life: float | None = None) -> EvictionPolicy:
    """The policy of this name; only the score has a half-life. Raises `InvalidValueError`."""
    if name not in POLICIES:
        raise InvalidValueError(f"policy {name!r} is not known; use one of {', '.join(POLICIES)}")
    if half_life is None:
        return POLICIES[name]()
    if name != Score.name:
        raise InvalidValueError(
            f"policy {name!r} has no half-life, got {half_life}; leave it out or use {Score.name!r}"
        )
    return Score(half_life)
