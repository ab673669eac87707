"""What is known of every chunk: facts, and the slot that holds it.

One flat table for all nodes, so that a request over many nodes is a few array operations. A chunk
is known by its place in it; a node's chunks are neighbours::

    place    | node 0: layer 0 keys | layer 0 values | layer 1 keys | ... | node 1: ...
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from store.tier.chunks import Access, ChunkedNode
from store.tier.policy import RATIO_BETA, ChunkFacts, EvictionPolicy

ABSENT = -1
_MIN_PLACES = 1024


class _Span(NamedTuple):
    """A node's part of the table: first place, places, chunks of a layer of one array."""

    base: int
    size: int
    chunks: int


class ChunkTable:
    """Facts and slots of chunks by place, and the place of the chunk in each slot.

    Nodes keep the order in which they were added. Places change when a node is added.

    Attributes
    ----------
    slots
        int32 [places]: slot of each chunk; -1 where it is in none.
    accesses, ratio, last
        [places], see `ChunkFacts`.
    place
        int64 [slots]: chunk in each slot; -1 where there is none.
    """

    def __init__(self, num_layers: int, num_slots: int) -> None:
        self._num_layers = num_layers
        self._spans: dict[str, _Span] = {}
        self._end = 0
        self.slots = np.empty(0, dtype=np.int32)
        self.accesses = np.empty(0, dtype=np.float32)
        self.ratio = np.empty(0, dtype=np.float32)
        self.last = np.empty(0, dtype=np.int64)
        self.place = np.full(num_slots, ABSENT, dtype=np.int64)

    def __contains__(self, name: str) -> bool:
        return name in self._spans

    def names(self) -> list[str]:
        """All nodes, in the order in which they were added."""
        return list(self._spans)

    def add(self, nodes: Iterable[ChunkedNode]) -> None:
        """Make room for the chunks of nodes that are not known yet."""
        for node in nodes:
            if node.name in self._spans:
                continue
            size = self._num_layers * 2 * node.num_chunks
            if self._end + size > len(self.slots):
                self._rebuild(size)
            self._spans[node.name] = _Span(self._end, size, node.num_chunks)
            # Facts are 0 already: a place is used once, until the table is made anew.
            self.slots[self._end : self._end + size] = ABSENT
            self._end += size

    def base(self, node: ChunkedNode, layer: int = 0, which: int = 0) -> int:
        """Place of the first chunk of a layer's keys (0) or values (1)."""
        span = self._spans[node.name]
        return span.base + (layer * 2 + which) * span.chunks

    def of(self, name: str) -> slice:
        """Places of a node."""
        span = self._spans[name]
        return slice(span.base, span.base + span.size)

    def facts(self, places: np.ndarray) -> ChunkFacts:
        """Facts of chunks."""
        return ChunkFacts(self.accesses[places], self.ratio[places], self.last[places])

    def touch(self, accesses: Iterable[Access], now: int, policy: EvictionPolicy) -> np.ndarray:
        """Update the facts of all that a request used; gives their places."""
        used = [self._used(access) for access in accesses]
        if not used:
            return np.empty(0, dtype=np.int64)
        places = np.concatenate([own for own, _ in used])
        ratio = np.concatenate([own for _, own in used])
        count, known = self.accesses[places], self.ratio[places]
        rate = np.where(count == 0, 1.0, RATIO_BETA)
        self.ratio[places] = known + (rate * (ratio - known)).astype(np.float32)
        self.accesses[places] = policy.faded(count, now - self.last[places]) + 1
        self.last[places] = now
        return places

    def hold(self, places: np.ndarray, slots: np.ndarray) -> None:
        """Note that chunks lie in slots."""
        self.slots[places], self.place[slots] = slots, places

    def vacate(self, slots: np.ndarray) -> None:
        """Note that slots hold nothing."""
        self.slots[self.place[slots]] = ABSENT
        self.place[slots] = ABSENT

    def remove(self, name: str) -> np.ndarray:
        """Forget a node; gives the slots, int64, that held its chunks."""
        held = self.slots[self.of(name)]
        slots = held[held >= 0].astype(np.int64)
        self.vacate(slots)
        del self._spans[name]
        return slots

    def _used(self, access: Access) -> tuple[np.ndarray, np.ndarray]:
        """Places of what a request used of a node, and their ratios of now."""
        span = self._spans[access.node.name]
        assert access.used.size == span.size
        own = np.flatnonzero(access.used)
        layer, chunk = own // (2 * span.chunks), own % span.chunks
        return span.base + own, access.ratio[layer, chunk]

    def _rebuild(self, more: int) -> None:
        """Close the gaps of removed nodes and make room, at least twice what is needed."""
        spans = self._spans
        kept = [np.arange(span.base, span.base + span.size) for span in spans.values()]
        old = np.concatenate([np.empty(0, dtype=np.int64), *kept])
        room = max(2 * (len(old) + more), _MIN_PLACES)
        for name in ("slots", "accesses", "ratio", "last"):
            array = getattr(self, name)
            new = np.zeros(room, dtype=array.dtype)
            new[: len(old)] = array[old]
            setattr(self, name, new)
        self._end = 0
        for name, span in spans.items():
            spans[name] = span._replace(base=self._end)
            self._end += span.size
        held = np.flatnonzero(self.slots[: self._end] >= 0)
        self.place[self.slots[held]] = held
