"""What the tiers are told and what they answer: values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from store.errors import InvalidValueError


class ChunkedNode(Protocol):
    """A node generation as the tiers see it."""

    @property
    def name(self) -> str:
        """Unique for a generation."""

    @property
    def num_chunks(self) -> int:
        """Chunks of one layer of one array (keys or values)."""


class Fetched(NamedTuple):
    """Chunks that a query read from disk and still has in memory.

    ``which`` is 0 for keys, 1 for values; chunk ``chunks[i]`` (int64 [k]) lies in ``rows``
    [capacity, kv_heads, head_dim] from row ``first_rows[i]`` (int64 [k]) on. Tiers without memory
    need no rows.
    """

    node: ChunkedNode
    layer: int
    which: int
    chunks: np.ndarray
    rows: torch.Tensor | None
    first_rows: np.ndarray


class Access(NamedTuple):
    """What a query used of a node: bool [layers, 2, chunks] and, of each chunk, the share of
    its tokens that was important, float32 [layers, chunks]."""

    node: ChunkedNode
    used: np.ndarray
    ratio: np.ndarray


class Moves(NamedTuple):
    """Chunks that one request moved.

    ``to_device`` and ``to_host`` came from disk; ``promoted`` went from host to device,
    ``demoted`` from device to host; ``evicted`` left memory from either.
    """

    to_device: int = 0
    to_host: int = 0
    promoted: int = 0
    demoted: int = 0
    evicted: int = 0


@dataclass(frozen=True, slots=True)
class Budgets:
    """Hard limits of the tiers in bytes; a tier of less than one chunk holds nothing."""

    device_bytes: int = 0
    host_bytes: int = 0

    def __post_init__(self) -> None:
        for tier, size in (("device", self.device_bytes), ("host", self.host_bytes)):
            if size < 0:
                raise InvalidValueError(
                    f"{tier} budget of {size} bytes is not allowed; use 0 for none, or more"
                )
