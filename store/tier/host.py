"""The host tier: chunks of stored KV that stay in memory between queries.

Alone knows which chunks are resident. Disk holds everything, so that dropping a chunk loses
nothing. Admission comes after the answer: what a query read from disk competes by priority with
what is resident, and a chunk no better than the lowest is not admitted (paper, score cache).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch

from store.disk.reader import NodeFiles
from store.tier.memory import Slab
from store.tier.policy import RATIO_BETA, ChunkFacts, EvictionPolicy
from store.types import KVShape

_ABSENT = -1


class Fetched(NamedTuple):
    """Chunks that a query read from disk and still has in memory.

    ``which`` is 0 for keys, 1 for values; chunk ``chunks[i]`` lies in ``rows`` [capacity,
    kv_heads, head_dim] from row ``first_rows[i]`` on.
    """

    files: NodeFiles
    layer: int
    which: int
    chunks: np.ndarray
    rows: torch.Tensor
    first_rows: np.ndarray


class Access(NamedTuple):
    """What a query used of a node: bool [layers, 2, chunks] and, of each chunk, the share of
    its tokens that was important, float32 [layers, chunks]."""

    files: NodeFiles
    used: np.ndarray
    ratio: np.ndarray


class _Node(NamedTuple):
    """Residency and facts of one generation's chunks, each [layers, 2, chunks]."""

    number: int
    slots: np.ndarray
    accesses: np.ndarray
    ratio: np.ndarray
    last: np.ndarray

    def facts(self, at: np.ndarray) -> ChunkFacts:
        """Facts of the chunks at flat indices ``at``."""
        arrays = (self.accesses, self.ratio, self.last)
        return ChunkFacts(*(array.reshape(-1)[at] for array in arrays))


class HostTier:
    """A slab of chunks and the table of what lies where; used from one thread.

    Parameters
    ----------
    budget_bytes
        Hard limit of the slab; less than one chunk holds nothing.
    """

    def __init__(
        self, shape: KVShape, chunk_tokens: int, budget_bytes: int, policy: EvictionPolicy
    ) -> None:
        self._shape, self._policy = shape, policy
        self.slab = Slab(shape, chunk_tokens, budget_bytes, torch.device("cpu"))
        self._nodes: dict[str, _Node] = {}
        self._names: list[str] = []
        # Per slot: number of its node, flat index in the node's table, priority.
        self._owner = np.full(self.slab.slots, _ABSENT, dtype=np.int64)
        self._place = np.zeros(self.slab.slots, dtype=np.int64)
        self._priority = np.zeros(self.slab.slots)
        self._pins: dict[int, int] = {}
        self._clock = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of resident chunks."""
        chunk = self.slab.chunk_tokens * self._shape.row_bytes
        return (self.slab.slots - self.slab.free) * chunk

    def slots(self, files: NodeFiles, layer: int) -> np.ndarray:
        """Slots of a layer's chunks, int32 [2, chunks] (keys, values); -1 where not resident."""
        slots: np.ndarray = self._node(files).slots[layer]
        return slots

    def pin(self, nodes: Iterable[NodeFiles]) -> None:
        """Keep the chunks of nodes until `unpin`: a query is about to use them."""
        for files in nodes:
            number = self._node(files).number
            self._pins[number] = self._pins.get(number, 0) + 1

    def unpin(self, nodes: Iterable[NodeFiles]) -> None:
        """Undo one `pin` of each node."""
        for files in nodes:
            number = self._node(files).number
            self._pins[number] -= 1
            if self._pins[number] == 0:
                del self._pins[number]

    def settle(self, accesses: Iterable[Access], fetched: Iterable[Fetched]) -> None:
        """Count one query's accesses, then admit of what it fetched whatever is worth its place."""
        self._clock += 1
        for access in accesses:
            self._touch(access)
        offers = [self._offer(one) for one in fetched if len(one.chunks)]
        if not offers or self.slab.slots == 0:
            return
        priority = np.concatenate([offer[0] for offer in offers])
        accepted = np.zeros(len(priority), dtype=bool)
        accepted[self._make_room(priority)] = True
        bounds = np.cumsum([0, *(len(offer[0]) for offer in offers)])
        for (values, number, places, one), lo in zip(offers, bounds[:-1].tolist(), strict=True):
            take = accepted[lo : lo + len(values)]
            if take.any():
                self._admit(one, number, places[take], values[take], one.first_rows[take])

    def forget(self, keep: set[str]) -> bool:
        """Drop every generation but those whose folder is in ``keep``; whether all could go.

        What a query under way has pinned stays until it ends.
        """
        gone = [name for name in self._nodes if name not in keep]
        free = [name for name in gone if self._nodes[name].number not in self._pins]
        for name in free:
            node = self._nodes.pop(name)
            slots = node.slots[node.slots >= 0].astype(np.int64)
            self._owner[slots] = _ABSENT
            self.slab.release(slots)
        return len(free) == len(gone)

    def check_integrity(self) -> None:
        """Assert that tables, owners and free slots agree; for tests."""
        held = 0
        for node in self._nodes.values():
            places = np.flatnonzero(node.slots.reshape(-1) >= 0)
            slots = node.slots.reshape(-1)[places]
            assert (self._owner[slots] == node.number).all()
            assert (self._place[slots] == places).all()
            held += len(places)
        assert held == int((self._owner >= 0).sum()) == self.slab.slots - self.slab.free

    def _node(self, files: NodeFiles) -> _Node:
        name = str(files.group)
        node = self._nodes.get(name)
        if node is None:
            dims = (self._shape.num_layers, 2, files.layout.num_chunks)
            node = self._nodes[name] = _Node(
                len(self._names),
                np.full(dims, _ABSENT, dtype=np.int32),
                np.zeros(dims, dtype=np.float32),
                np.zeros(dims, dtype=np.float32),
                np.zeros(dims, dtype=np.int64),
            )
            self._names.append(name)
        return node

    def _touch(self, access: Access) -> None:
        """Update facts of the chunks used, and priorities of those resident."""
        node, used = self._node(access.files), access.used
        ratio = np.broadcast_to(access.ratio[:, None], used.shape)
        rate = np.where(node.accesses == 0, 1.0, RATIO_BETA)
        node.ratio[used] += (rate * (ratio - node.ratio))[used].astype(np.float32)
        node.accesses[used] += 1
        node.last[used] = self._clock
        places = np.flatnonzero(used & (node.slots >= 0))
        self._priority[node.slots.reshape(-1)[places]] = self._policy.priority(node.facts(places))

    def _offer(self, one: Fetched) -> tuple[np.ndarray, int, np.ndarray, Fetched]:
        """Priorities and flat places of chunks that could be admitted."""
        node = self._node(one.files)
        chunks = node.slots.shape[2]
        absent = node.slots[one.layer, one.which, one.chunks] < 0
        if not absent.all():
            kept = (one.chunks[absent], one.rows, one.first_rows[absent])
            one = Fetched(one.files, one.layer, one.which, *kept)
        places = (one.layer * 2 + one.which) * chunks + one.chunks
        return self._policy.priority(node.facts(places)), node.number, places, one

    def _make_room(self, priority: np.ndarray) -> np.ndarray:
        """Indices of the offers to admit; frees as many slots as they need beyond the free ones.

        ::

            offers, best first     9 7 4 | 3 1        residents, lowest first   2 3 5 5
            free slots take        9                  swaps while better        7>2 4>3 3<5
        """
        best = np.argsort(-priority, kind="stable")
        free = min(self.slab.free, len(best))
        rest = best[free:]
        movable = np.flatnonzero(self._owner >= 0)
        if self._pins:
            movable = movable[~np.isin(self._owner[movable], list(self._pins))]
        # Ties leave in the order of node and place, whatever slots they got.
        keys = (self._place[movable], self._owner[movable], self._priority[movable])
        lowest = movable[np.lexsort(keys)]
        size = min(len(rest), len(lowest))
        swaps = int((priority[rest[:size]] > self._priority[lowest[:size]]).sum())
        self._evict(lowest[:swaps])
        return best[: free + swaps]

    def _evict(self, slots: np.ndarray) -> None:
        for number in np.unique(self._owner[slots]).tolist():
            mine = slots[self._owner[slots] == number]
            self._nodes[self._names[number]].slots.reshape(-1)[self._place[mine]] = _ABSENT
        self._owner[slots] = _ABSENT
        self.slab.release(slots)

    def _admit(
        self,
        one: Fetched,
        number: int,
        places: np.ndarray,
        priority: np.ndarray,
        first_rows: np.ndarray,
    ) -> None:
        slots = self.slab.allocate(len(places))
        self.slab.put(slots, one.rows, first_rows)
        self._nodes[self._names[number]].slots.reshape(-1)[places] = slots
        self._owner[slots], self._place[slots] = number, places
        self._priority[slots] = priority
