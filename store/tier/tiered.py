"""The memory tiers: chunks of stored KV that stay in memory between queries.

Alone knows where a chunk is. A chunk is in the device tier or in the host tier, never in both;
disk holds everything, so that dropping one loses nothing. What moves is decided after the answer,
for the whole request at once (paper section on the score-based cache)::

    disk ---> device    what was read, and what the request used of the host tier, against the
    host ---> device    device's residents
    device -> host      what had to leave there, and what of the read did not get in, against the
    disk ---> host      host's residents; the rest is dropped
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import torch

from store.tier.chunks import Access, Budgets, ChunkedNode, Fetched, Moves
from store.tier.memory import TierMemory
from store.tier.plan import Comers, Plan, Residents, plan_request
from store.tier.policy import EvictionPolicy
from store.tier.replace import FreeSlots
from store.tier.table import ABSENT, ChunkTable
from store.types import KVShape

__all__ = ["Access", "Budgets", "ChunkedNode", "Fetched", "Moves", "TieredCache"]

#: Bytes that are out of their slots at a time while chunks move between the tiers.
_MOVE_BYTES = 64 << 20


class TieredCache:
    """Device and host tiers of one store; used from one thread.

    Parameters
    ----------
    budgets
        Hard limits of the chunks' memory.
    memory
        False for tables alone: what would be where, without bytes.
    joined
        One block of memory for both tiers; unless given, where the device is the CPU.

    Attributes
    ----------
    device_slots, host_slots
        Chunks that fit in each tier. Slots of the device come first.
    chunk_bytes
        Of one chunk of keys or of values.
    """

    def __init__(
        self,
        shape: KVShape,
        chunk_tokens: int,
        budgets: Budgets,
        policy: EvictionPolicy,
        device: torch.device,
        *,
        memory: bool = True,
        joined: bool | None = None,
    ) -> None:
        self._layers, self._policy = shape.num_layers, policy
        self.chunk_bytes = chunk_tokens * shape.row_bytes
        self.device_slots = budgets.device_bytes // self.chunk_bytes
        self.host_slots = budgets.host_bytes // self.chunk_bytes
        sizes = (self.device_slots, self.host_slots)
        self.memory: TierMemory | None = None
        if memory:
            joined = device.type == "cpu" if joined is None else joined
            self.memory = TierMemory(shape, chunk_tokens, *sizes, device, joined)
        self._device, self._host = FreeSlots(0, sizes[0]), FreeSlots(*sizes)
        self._table = ChunkTable(shape.num_layers, sum(sizes))
        # Of the chunk in each slot; infinite where there is none, so that it never is the lowest.
        self._priority = np.full(sum(sizes), np.inf)
        self._pins: dict[str, int] = {}
        self._clock = 0

    def slots(self, node: ChunkedNode, layer: int) -> np.ndarray:
        """Slots of a layer's chunks, int32 [2, chunks] (keys, values); -1 where not resident.

        Below ``device_slots`` on the device, else in host memory. Good until the next request
        settles.
        """
        slots: np.ndarray = self._slots(node, layer, layer + 1)[0]
        return slots

    def residency(self, node: ChunkedNode) -> np.ndarray:
        """`slots` of all layers, int32 [layers, 2, chunks]."""
        return self._slots(node, 0, self._layers)

    def _slots(self, node: ChunkedNode, begin: int, end: int) -> np.ndarray:
        dims = (end - begin, 2, node.num_chunks)
        if node.name not in self._table:
            return np.full(dims, ABSENT, dtype=np.int32)
        lo, hi = (self._table.base(node, layer) for layer in (begin, end))
        return self._table.slots[lo:hi].reshape(dims)

    def known(self, node: ChunkedNode) -> bool:
        """Whether facts of the node are known: it was introduced, used or offered before."""
        return node.name in self._table

    def introduce(self, node: ChunkedNode, accesses: np.ndarray, ratio: np.ndarray) -> None:
        """Set the facts of a node from statistics, as if its last accesses were just now.

        Parameters
        ----------
        accesses
            float32 [layers, 2, chunks], requests that used each chunk.
        ratio
            float32 [layers, chunks], moving share of its tokens that was important.

        Notes
        -----
        Nothing happens if the node is known: what was seen here is newer.
        """
        if self.known(node):
            return
        self._table.add([node])
        own = self._table.of(node.name)
        self._table.accesses[own] = accesses.reshape(-1)
        self._table.ratio[own] = np.broadcast_to(ratio[:, None], accesses.shape).reshape(-1)
        self._table.last[own] = np.where(accesses.reshape(-1) > 0, self._clock, 0)

    def pin(self, nodes: Iterable[ChunkedNode]) -> None:
        """Keep chunks of nodes where they are until `unpin`: a query is about to use them."""
        for node in nodes:
            self._pins[node.name] = self._pins.get(node.name, 0) + 1

    def unpin(self, nodes: Iterable[ChunkedNode]) -> None:
        """Undo one `pin` of each node."""
        for node in nodes:
            self._pins[node.name] -= 1
            if self._pins[node.name] == 0:
                del self._pins[node.name]

    def settle(self, accesses: Iterable[Access], fetched: Iterable[Fetched]) -> Moves:
        """Count one request's accesses, then give every chunk the tier that it is worth.

        A node is in ``accesses`` once. Chunks fetched that are resident by now are passed over.
        """
        accesses, fetched = list(accesses), list(fetched)
        self._table.add([one.node for one in accesses] + [one.node for one in fetched])
        self._clock += 1
        used = self._table.touch(accesses, self._clock, self._policy)
        slots = self._table.slots[used]
        used, slots = used[slots >= 0], slots[slots >= 0].astype(np.int64)
        priority = self._priority[slots] = self._policy.priority(self._table.facts(used))
        hits = Comers(used, priority, slots)
        return self._replace(hits.at(slots >= self.device_slots), fetched)

    def warm(self, fetched: Iterable[Fetched]) -> Moves:
        """Offer chunks that no request used; they compete by the facts that are known."""
        fetched = list(fetched)
        self._table.add(one.node for one in fetched)
        return self._replace(Comers.none(), fetched)

    def forget(self, keep: set[str]) -> bool:
        """Drop every generation but those whose name is in ``keep``; whether all could go.

        What a query under way has pinned stays until it ends.
        """
        for name in self._table.names():
            if name not in keep and name not in self._pins:
                slots = self._table.remove(name)
                self._priority[slots] = np.inf
                self._device.put_back(slots[slots < self.device_slots])
                self._host.put_back(slots[slots >= self.device_slots])
        return keep.issuperset(self._pins)

    def used_bytes(self) -> tuple[int, int]:
        """Bytes of chunks on the device and in host memory."""
        device = (self.device_slots - self._device.count) * self.chunk_bytes
        return device, (self.host_slots - self._host.count) * self.chunk_bytes

    def check_integrity(self) -> None:
        """Assert that every slot is either free or holds one chunk that knows it; for tests."""
        table, slots = self._table, len(self._priority)
        known = [np.arange(table.of(name).start, table.of(name).stop) for name in table.names()]
        places = np.concatenate([np.empty(0, dtype=np.int64), *known])
        places = places[table.slots[places] >= 0]
        held = table.slots[places]
        free = np.concatenate([self._device.held(), self._host.held()])
        assert sorted([*held.tolist(), *free.tolist()]) == list(range(slots))
        assert (self._device.held() < self.device_slots).all()
        assert (self._host.held() >= self.device_slots).all()
        assert (table.place[held] == places).all()
        assert (table.place[free] == ABSENT).all()
        assert np.isposinf(self._priority[free]).all()
        assert (self._priority[held] == self._policy.priority(table.facts(places))).all()

    def _replace(self, hits: Comers, fetched: Sequence[Fetched]) -> Moves:
        """Let host residents in ``hits`` and what was fetched compete for slots."""
        comers = Comers.merged(hits, self._offers(fetched))
        if len(comers.places) == 0:
            return Moves()
        free = self._device.count, self._host.count
        residents = Residents(
            self._priority, self._table.place, self._locked(), self.device_slots, free
        )
        plan = plan_request(comers, residents)
        self._carry_out(plan, fetched)
        promoted, demoted = plan.device.moved, plan.host.moved
        return Moves(
            to_device=len(plan.device.places) - promoted,
            to_host=len(plan.host.places) - demoted,
            promoted=promoted,
            demoted=demoted,
            evicted=len(plan.device_out) + len(plan.host_out),
        )

    def _offers(self, fetched: Sequence[Fetched]) -> Comers:
        """What was fetched and is in no tier, each chunk once."""
        if not fetched:
            return Comers.none()
        bases = [self._table.base(one.node, one.layer, one.which) for one in fetched]
        every = [base + one.chunks for base, one in zip(bases, fetched, strict=True)]
        places, number = np.unique(np.concatenate(every), return_index=True)
        absent = self._table.slots[places] < 0
        places = places[absent]
        return Comers(places, self._policy.priority(self._table.facts(places)), ~number[absent])

    def _locked(self) -> np.ndarray:
        """Slots of pinned nodes, bool."""
        locked = np.zeros(len(self._priority), dtype=bool)
        for name in self._pins:
            if name in self._table:
                held = self._table.slots[self._table.of(name)]
                locked[held[held >= 0]] = True
        return locked

    def _carry_out(self, plan: Plan, fetched: Sequence[Fetched]) -> None:
        """Move bytes and say so.

        What leaves a slot is gone from the tables before its bytes are overwritten, and what
        comes is there once they are: a copy that fails costs chunks and never shows wrong ones.
        """
        ups, downs = plan.device, plan.host
        up, down = ups.moved, downs.moved
        # In this order, the first to go up and the first to go down get each other's slots.
        self._release(np.concatenate([downs.origin[:down], plan.device_out]), self._device)
        self._release(np.concatenate([ups.origin[:up], plan.host_out]), self._host)
        to_device = self._device.next(len(ups.places))
        to_host = self._host.next(len(downs.places))
        if self.memory is not None:
            self._move((ups.origin[:up], to_device[:up]), (downs.origin[:down], to_host[:down]))
            numbers = ~np.concatenate([ups.origin[up:], downs.origin[down:]])
            slots = np.concatenate([to_device[up:], to_host[down:]])
            _put(self.memory, fetched, numbers, slots)
        for free, comers, slots in ((self._device, ups, to_device), (self._host, downs, to_host)):
            free.take(len(slots))
            self._table.hold(comers.places, slots)
            self._priority[slots] = comers.priority

    def _release(self, slots: np.ndarray, free: FreeSlots) -> None:
        self._table.vacate(slots)
        self._priority[slots] = np.inf
        free.put_back(slots)

    def _move(self, *ways: tuple[np.ndarray, np.ndarray]) -> None:
        """Move chunks between slots, each way (from, to), a part of each at a time.

        Chunk i of one way may swap with chunk i of the other; none else needs another's slot.
        """
        assert self.memory is not None
        step = max(1, _MOVE_BYTES // (2 * self.chunk_bytes))
        for lo in range(0, max(len(way[0]) for way in ways), step):
            part = [np.concatenate([way[end][lo : lo + step] for way in ways]) for end in (0, 1)]
            self.memory.move(*part)


def _put(
    memory: TierMemory, fetched: Sequence[Fetched], numbers: np.ndarray, slots: np.ndarray
) -> None:
    """Copy chunks into slots; ``numbers`` count through all that was fetched."""
    order = np.argsort(numbers)
    numbers, slots = numbers[order], slots[order]
    firsts = np.cumsum([0, *(len(one.chunks) for one in fetched)])
    cuts = pairwise(np.searchsorted(numbers, firsts).tolist())
    for one, first, (lo, hi) in zip(fetched, firsts[:-1].tolist(), cuts, strict=True):
        if lo < hi:
            assert one.rows is not None
            memory.put(slots[lo:hi], one.rows, one.first_rows[numbers[lo:hi] - first])
