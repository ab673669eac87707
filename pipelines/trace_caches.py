"""One cache of a trace replay: the store's own tiers without memory, and what they would cost.

Owns the tallies. Keys and values of a chunk are used, moved and dropped together here, so that one
entry of the tiers, of twice the bytes, stands for both: entries of "values" stay empty. The tiers
hold the sampled layers alone, in as large a part of their bytes; tallies are scaled back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch

from pipelines.trace_uses import NodeUse
from store.tier.policy import Score, make_policy
from store.tier.tiered import Access, Budgets, ChunkedNode, Fetched, TieredCache
from store.types import KVShape

_DEVICE, _HOST, _DISK = range(3)


@dataclass(frozen=True, slots=True)
class TraceGeometry:
    """Sizes and rates of a replay.

    Parameters
    ----------
    shape
        Of the whole model.
    layers
        How many of its layers are replayed.
    chunk_tokens
        Tokens of a chunk.
    disk_bytes_s, host_bytes_s
        Bytes per second from disk to host memory, and from there to the device.
    """

    shape: KVShape
    layers: int
    chunk_tokens: int
    disk_bytes_s: float
    host_bytes_s: float

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk's keys and values in one layer."""
        return 2 * self.chunk_tokens * self.shape.row_bytes

    @property
    def scale(self) -> float:
        """Layers of the model for each one that is replayed."""
        return self.shape.num_layers / self.layers

    def entries(self, size_bytes: int) -> int:
        """Bytes of the replayed layers' part of a tier."""
        return size_bytes * self.layers // self.shape.num_layers

    @property
    def entry_shape(self) -> KVShape:
        """The replayed layers, a row as wide as one of keys and one of values together."""
        return replace(self.shape, num_layers=self.layers, head_dim=2 * self.shape.head_dim)


class CacheCase(NamedTuple):
    """A policy, the order of rows, and the bytes of both tiers."""

    policy: str
    order: str
    device_bytes: int
    host_bytes: int


class TraceRow(NamedTuple):
    """What a cache did in all requests together.

    Hits are shares of the chunks used; ``important_hit`` is the share of the selected tokens that
    lay in either tier; ``loaded_ratio`` is the share of the matched KV that was used. None where
    nothing was. ``host_to_device_bytes`` counts what came from disk as well. ``io_s`` is the mean
    over the requests.
    """

    policy: str
    order: str
    device_bytes: int | None
    host_bytes: int | None
    hit_device: float | None
    hit_host: float | None
    important_hit: float | None
    loaded_ratio: float | None
    disk_bytes: float
    host_to_device_bytes: float
    io_s: float
    io_p99_s: float
    requests: int


class Cache(Protocol):
    """The part of `TieredCache` that a replay needs."""

    device_slots: int

    def residency(self, node: ChunkedNode) -> np.ndarray:
        """Slots, int32 [layers, 2, chunks]; -1 where not resident."""

    def settle(self, accesses: Sequence[Access], fetched: Sequence[Fetched]) -> object:
        """Take over what one request used."""

    def forget(self, keep: set[str]) -> bool:
        """Drop all nodes but those in ``keep``."""

    def used_bytes(self) -> tuple[int, int]:
        """Bytes of what is resident, by tier."""


class EndlessCache:
    """Keeps on the device whatever was used once: the bound of every policy."""

    device_slots = 1

    def __init__(self, geometry: TraceGeometry) -> None:
        self._layers, self._entry_bytes = geometry.layers, geometry.chunk_bytes
        self._slots: dict[str, np.ndarray] = {}

    def residency(self, node: ChunkedNode) -> np.ndarray:
        """0 for what was used before, else -1; int32 [layers, 2, chunks]."""
        if node.name not in self._slots:
            shape = (self._layers, 2, node.num_chunks)
            self._slots[node.name] = np.full(shape, -1, dtype=np.int32)
        return self._slots[node.name]

    def settle(self, accesses: Sequence[Access], fetched: Sequence[Fetched]) -> None:  # noqa: ARG002
        """Keep everything."""
        for access in accesses:
            self.residency(access.node)[access.used] = 0

    def forget(self, keep: set[str]) -> bool:
        """Drop all nodes but those in ``keep``."""
        for name in self._slots.keys() - keep:
            del self._slots[name]
        return True

    def used_bytes(self) -> tuple[int, int]:
        """Bytes held, on the device and in host memory."""
        return self._entry_bytes * sum(int((s >= 0).sum()) for s in self._slots.values()), 0


def tiered(case: CacheCase, geometry: TraceGeometry, half_life: float | None = None) -> TieredCache:
    """The engine's cache for a case, without memory."""
    budgets = Budgets(geometry.entries(case.device_bytes), geometry.entries(case.host_bytes))
    policy = make_policy(case.policy, half_life if case.policy == Score.name else None)
    shape, device = geometry.entry_shape, torch.device("cpu")
    return TieredCache(shape, geometry.chunk_tokens, budgets, policy, device, memory=False)


class CacheReplay:
    """Puts requests to one cache and counts."""

    def __init__(self, cache: Cache, geometry: TraceGeometry) -> None:
        self.cache, self._geometry = cache, geometry
        # By the tier they were found in: chunks used, and the selected tokens in them.
        self._chunks, self._important = np.zeros(3, np.int64), np.zeros(3, np.int64)
        self._matched_bytes = 0
        # Bytes of each request: from disk, and to the device.
        self._moved: list[tuple[float, float]] = []

    @property
    def held_bytes(self) -> int:
        """Bytes that the cache holds, scaled to all layers."""
        return round(sum(self.cache.used_bytes()) * self._geometry.scale)

    def ask(self, uses: Sequence[NodeUse], matched_bytes: int, evidence_bytes: float) -> None:
        """Replay one request: count where its chunks lie, then let the cache settle.

        Parameters
        ----------
        matched_bytes
            KV of all that the request matched.
        evidence_bytes
            Read from disk in any case, to choose by.
        """
        chunks = np.zeros(3, np.int64)
        accesses: list[Access] = []
        fetched: list[Fetched] = []
        for use in uses:
            used = use.access.used[:, 0]
            slots = self.cache.residency(use.access.node)[:, 0]
            tiers = np.where(slots < self.cache.device_slots, _DEVICE, _HOST)
            tiers[slots < 0] = _DISK
            chunks += np.bincount(tiers[used], minlength=3)
            selected = np.bincount(tiers[used], weights=use.important[used], minlength=3)
            self._important += selected.astype(np.int64)
            accesses.append(use.access)
            fetched += _fetched(use.access.node, used & (slots < 0))
        self._count(chunks, matched_bytes, evidence_bytes)
        self.cache.settle(accesses, fetched)

    def row(
        self,
        policy: str,
        order: str,
        device_bytes: int | None = None,
        host_bytes: int | None = None,
    ) -> TraceRow:
        """The sums, under the names of a `CacheCase`."""
        used, important = int(self._chunks.sum()), int(self._important.sum())
        moved = np.array(self._moved).reshape(-1, 2)
        rates = np.array([self._geometry.disk_bytes_s, self._geometry.host_bytes_s])
        seconds = (moved / rates).sum(1)
        return TraceRow(
            policy=policy,
            order=order,
            device_bytes=device_bytes,
            host_bytes=host_bytes,
            hit_device=_share(self._chunks[_DEVICE], used),
            hit_host=_share(self._chunks[_HOST], used),
            important_hit=_share(important - self._important[_DISK], important),
            loaded_ratio=_share(used * self._chunk_bytes, self._matched_bytes),
            disk_bytes=float(moved[:, 0].sum()),
            host_to_device_bytes=float(moved[:, 1].sum()),
            io_s=float(seconds.mean()) if len(seconds) else 0.0,
            io_p99_s=float(np.percentile(seconds, 99)) if len(seconds) else 0.0,
            requests=len(moved),
        )

    @property
    def _chunk_bytes(self) -> float:
        """Bytes that one chunk of a replayed layer stands for."""
        return self._geometry.chunk_bytes * self._geometry.scale

    def _count(self, chunks: np.ndarray, matched_bytes: int, evidence_bytes: float) -> None:
        """Add one request; ``chunks`` are counts by tier, int64 [3]."""
        self._chunks += chunks
        self._matched_bytes += matched_bytes
        disk = float(chunks[_DISK] * self._chunk_bytes + evidence_bytes)
        self._moved.append((disk, disk + float(chunks[_HOST] * self._chunk_bytes)))


def _fetched(node: ChunkedNode, absent: np.ndarray) -> list[Fetched]:
    """What was read from disk, bool [layers, chunks], as the tiers take it: without rows."""
    found = []
    for layer, row in enumerate(absent):
        chunks = np.flatnonzero(row)
        if len(chunks):
            found.append(Fetched(node, layer, 0, chunks, None, np.zeros_like(chunks)))
    return found


def _share(part: float, whole: float) -> float | None:
    return float(part) / whole if whole else None
