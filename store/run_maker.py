"""Makes the runs of an open store and takes back what they used.

Owns the memory that queries share and keep: arenas, resident sketches, the tiers. Matching is
the engine's; what a run does is `query_run`'s and `fetch`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from store.ahead import Forecast
from store.buffers import RunBuffers, arena_bytes
from store.chunk_load import LoadPart
from store.disk.io import Arena
from store.disk.reader import ChunkReader
from store.errors import ChunkLoadError, InvalidValueError
from store.fetch import Fetch, FullFetch, Observer
from store.index.radix import MatchedNode
from store.itf.evidence import Evidence, Sketch
from store.itf.options import SparseOptions
from store.prepare import EvidenceMaker
from store.query_run import QueryRun
from store.recorder import RunRecorder
from store.resident import SketchCache
from store.settle import introduce, settle
from store.sparse import SparseFetch, rows_aside
from store.stats import RunCounters
from store.tier.policy import make_policy
from store.tier.tiered import Budgets, TieredCache
from store.types import KVShape

log = logging.getLogger(__name__)

#: Arenas kept for the next query; more would hold memory that one query at a time can't use.
_KEPT_ARENAS = 1


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """What a store may keep in memory between queries; hard limits in bytes.

    Parameters
    ----------
    device_bytes
        Chunks of KV where attention runs; 0 keeps none there.
    host_bytes
        Sketches, and chunks of KV with what they leave; 0 keeps neither.
    policy, half_life
        Which chunks stay: one of `store.tier.policy.POLICIES`, and after how many requests an
        access counts half (None: never).
    sketch_bytes
        Most of ``host_bytes`` that sketches take; None for what the store's sketches need, at
        least an eighth (new ones come) and at most half.
    """

    device_bytes: int = 0
    host_bytes: int = 1 << 30
    policy: str = "score"
    half_life: float | None = None
    sketch_bytes: int | None = None

    def __post_init__(self) -> None:
        sizes = {"device": self.device_bytes, "host": self.host_bytes, "sketch": self.sketch_bytes}
        for name, value in sizes.items():
            if value is not None and value < 0:
                raise InvalidValueError(
                    f"{name} memory of {value} bytes is not allowed; use 0 for none, or more"
                )
        make_policy(self.policy, self.half_life)

    def shares(self, stored_sketches: int | None) -> tuple[int, int]:
        """Bytes of the host for sketches and for chunks.

        ``stored_sketches``: bytes of all that the store holds; None where it keeps none.
        """
        if self.sketch_bytes is not None:
            sketches = min(self.sketch_bytes, self.host_bytes)
        elif stored_sketches is None:
            sketches = 0
        else:
            sketches = min(max(stored_sketches, self.host_bytes // 8), self.host_bytes // 2)
        return sketches, self.host_bytes - sketches


class MemoryNeed(NamedTuple):
    """What tiers need to be of use, in bytes.

    ``layer_bytes`` is one layer of the longest prefix, of ``tokens`` tokens, keys and values: a
    tier that holds less only ever has pieces. ``sketch_bytes`` and ``chunk_bytes`` are the host's.
    """

    tokens: int
    layer_bytes: int
    sketch_bytes: int
    chunk_bytes: int


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What a run is for: matched nodes, their parts, rows it needs, what to load of them.

    ``counts`` says what it counts for: ``record``, in the access statistics and for the tiers;
    ``use``, for the tiers alone; ``none``.
    """

    nodes: Sequence[MatchedNode]
    parts: Sequence[LoadPart]
    capacity: int
    options: SparseOptions
    observer: Observer | None
    counts: str


class RunMaker:
    """Runs of one store, made and ended.

    Parameters
    ----------
    evidence
        Called with the sketch cache, as the maker of evidence needs it.
    withdraw
        Takes a sidecar that failed to load out of use.
    on_end
        Called after each run.
    """

    def __init__(
        self,
        shape: KVShape,
        chunk_tokens: int,
        reader: ChunkReader,
        device: torch.device,
        memory: MemoryOptions,
        recorder: RunRecorder,
        evidence: Callable[[SketchCache], EvidenceMaker],
        withdraw: Callable[[ChunkLoadError], None],
        on_end: Callable[[], None],
        stored_sketches: int | None,
    ) -> None:
        self._shape, self._reader, self._device = shape, reader, device
        self._recorder, self._withdraw, self._on_end = recorder, withdraw, on_end
        self._arenas: list[Arena] = []
        self._forecast = Forecast()
        self.host_shares = sketches, chunks = memory.shares(stored_sketches)
        self._sketches = SketchCache(reader, sketches)
        self._evidence = evidence(self._sketches)
        self.tier: TieredCache | None = None
        budgets = Budgets(memory.device_bytes, chunks)
        if max(memory.device_bytes, chunks) >= chunk_tokens * shape.row_bytes:
            policy = make_policy(memory.policy, memory.half_life)
            self.tier = TieredCache(shape, chunk_tokens, budgets, policy, device)

    def make(self, request: RunRequest) -> QueryRun:
        """Begin a run: reads start now. Raises `InvalidValueError` for evidence not stored."""
        options, counters = request.options, RunCounters()
        sparse = options.sparse and bool(request.parts)
        evidence = self._make_evidence(request, counters) if sparse else None
        likely = self._likely(request) if isinstance(evidence, Sketch) else []
        ahead = any(mask is not None for mask in likely)
        arrivals = rows_aside(options, evidence, request.parts, ahead=ahead)
        arena = self._take_arena(arena_bytes(self._shape, request.capacity, arrivals))
        buffers = RunBuffers(self._shape, arena, request.capacity, self._device, arrivals)
        common = (request.parts, self._reader, buffers)
        fetch: Fetch
        if sparse:
            fetch = SparseFetch(*common, options, evidence, counters, self.tier, likely)
        else:
            fetch = FullFetch(*common, request.observer, self.tier)
        if self.tier is not None:
            self.tier.pin(part.files for part in request.parts)
        ends = {"record": self._end_recorded, "use": self._end, "none": self._end_internal}
        return QueryRun(buffers, fetch, ends[request.counts])

    def _likely(self, request: RunRequest) -> list[np.ndarray | None]:
        """Chunks of each part that the query will most likely want."""
        if not request.options.ahead:
            return []
        retention, known = request.options.retention, self._recorder.known
        return [self._forecast.chunks(p, known(p.files), retention) for p in request.parts]

    def _make_evidence(self, request: RunRequest, counters: RunCounters) -> Evidence | None:
        """Evidence of a query; a damaged sidecar is withdrawn, and what is left serves instead."""
        options = request.options
        while True:
            try:
                return self._evidence.make(options, list(request.nodes), counters)
            except ChunkLoadError as error:
                log.warning("going on without a sidecar: %s", error)
                self._withdraw(error)
                options = replace(options, evidence="auto")

    def _take_arena(self, size: int) -> Arena:
        for arena in self._arenas:
            if arena.size >= size:
                self._arenas.remove(arena)
                break
        else:
            # One that is too small is dropped rather than kept beside a larger one.
            self._arenas.clear()
            # Pinned, as every copy to a device begins here.
            arena = Arena(size, pinned=self._device.type == "cuda")
        if self._reader.options.poison:
            arena.poison()
        return arena

    def _end_recorded(self, run: QueryRun, arena: Arena | None) -> None:
        """Note what the run found to be important, then take its memory back."""
        try:
            # Before this run counts among them: settling counts it, too.
            self._introduce(run.fetch.parts)
            if isinstance(run.fetch, SparseFetch):
                self._recorder.add(run.fetch)
        finally:
            self._end(run, arena)

    def _end_internal(self, run: QueryRun, arena: Arena | None) -> None:
        """Take back the memory of a run that nobody asked for: it says nothing of what is asked."""
        self._end(run, arena, settled=False)

    def _introduce(self, parts: Sequence[LoadPart]) -> None:
        if self.tier is not None:
            for part in parts:
                if not self.tier.known(part.files):
                    introduce(self.tier, part, self._recorder.known(part.files))

    def _end(self, run: QueryRun, arena: Arena | None, *, settled: bool = True) -> None:
        try:
            if self.tier is not None:
                self.tier.unpin(part.files for part in run.fetch.parts)
                if arena is not None and settled:
                    self._introduce(run.fetch.parts)
                    settle(self.tier, run.fetch)
        except (MemoryError, torch.OutOfMemoryError) as error:
            # The answer is there; what memory holds is right, only less than it could be.
            log.warning("KV of this query does not stay in memory: %s", error)
        finally:
            if arena is not None and len(self._arenas) < _KEPT_ARENAS:
                self._arenas.append(arena)
            self._on_end()
