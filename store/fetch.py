"""Bring stored rows into a run's buffers: the contract, and the full load.

A `Fetch` fills the front rows of a layer when attention asks for it. `FullFetch` submits every
read when the run begins, in layer order, so that layer l+1 is in flight while layer l computes
(paper section 2). The sparse one is in `sparse`.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError

import numpy as np
import torch

from store.buffers import RunBuffers
from store.chunk_load import ChunkLoad, LoadPart
from store.disk.reader import ChunkReader, ReadCount
from store.errors import ChunkLoadError
from store.stats import LayerReport, RunCounters
from store.tier.tiered import TieredCache

#: Gets (layer, q, keys [n, kv_heads, head_dim], k_new, scaling) before a layer's attention.
Observer = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float | None], None]


class Fetch(ABC):
    """Fills a run's buffers, layer by layer; used by one run.

    Attributes
    ----------
    selective
        Whether it loads a choice of the prefix's tokens.
    matched_len
        Tokens that the parts cover, from position 0 without gaps.
    reports, selected
        What a sparse fetch did per layer, and int64 [sets, k] positions it selected; else empty.
    loads
        Everything that was brought to the buffers, layer by layer.
    """

    selective = False

    def __init__(
        self,
        parts: Sequence[LoadPart],
        reader: ChunkReader,
        buffers: RunBuffers,
        counters: RunCounters | None = None,
        tier: TieredCache | None = None,
    ) -> None:
        self.parts, self.reader, self.buffers, self.tier = list(parts), reader, buffers, tier
        self.matched_len = sum(part.used for part in parts)
        self.counters = counters or RunCounters()
        self.reports: list[LayerReport] = []
        self.selected: list[np.ndarray] = []
        self.loads: list[ChunkLoad] = []

    @abstractmethod
    def layer(self, layer: int, q: torch.Tensor, k_new: torch.Tensor, scaling: float | None) -> int:
        """Fill a layer's front rows for these queries; returns how many prefix rows it keeps.

        Called once per layer, with the arguments of `QueryRun.attend`. Raises `ChunkLoadError`;
        nothing of the layer may be used then.
        """

    @abstractmethod
    def pending(self) -> list[Future[ReadCount]]:
        """Reads that may still write into the buffers."""

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk; 0 where nothing is fetched."""
        return self.parts[0].files.layout.chunk_bytes if self.parts else 0

    def kept_positions(self, _layer: int) -> np.ndarray:
        """Prefix positions that a layer keeps, int64 [kept] or [kv_heads, kept]."""
        return np.arange(self.matched_len)

    def loaded_positions(self, _layer: int) -> np.ndarray:
        """Prefix positions whose keys and values a layer fetched, int64."""
        return np.arange(self.matched_len)

    def count_important(self) -> None:  # noqa: B027 - nothing to count where all was loaded
        """Count where the rows that mattered lay, once the first token is out."""

    def close(self) -> bool:
        """Cancel or wait for reads; False where one hangs and keeps the buffers for ever."""
        running = [future for future in self.pending() if not future.cancel()]
        deadline, started = self.reader.options.deadline_s, time.perf_counter()
        hung = wait(running, timeout=deadline).not_done if running else ()
        waited = time.perf_counter() - started
        self.counters.load_wait_s += waited
        self.counters.read_wait_s += waited
        self.counters.fetch_s += waited
        return not hung

    def submit(self, loads: Sequence[ChunkLoad], jobs: int) -> list[Future[ReadCount]]:
        """Start reading what memory lacks of some loads, each in up to ``jobs`` jobs."""
        # Planned first, submitted at once: running jobs compete with this thread for Python.
        reads = [read for load in loads for read in load.reads(self.buffers, jobs)]
        return [self.reader.submit(read) for read in reads]

    def arrived(self, loads: Sequence[ChunkLoad]) -> None:
        """Complete loads whose reads are done: copy what memory has, bring all to the device."""
        self.loads += loads
        for load in loads:
            self.count_chunks(load.slots)
            if len(load.missing) == len(load.chunks):
                self.buffers.upload(load.layer, load.which, load.row, load.row + load.arriving)
                continue
            places, to = load.held()
            self.copy(load.layer, load.which, places, load.row, load.arriving, to)

    def copy(
        self,
        layer: int,
        which: int,
        places: np.ndarray,
        row: int,
        arriving: int,
        at: np.ndarray | None = None,
    ) -> None:
        """Complete rows ``row`` to ``row + arriving``: memory's rows ``places`` go to rows ``at``.

        By default to all of them, in order; `TierMemory.to_host` says more. Call it once the reads
        are done: one may be widened over rows that it does not bring.
        """
        assert self.tier is not None
        assert self.tier.memory is not None
        began, memory = time.perf_counter(), self.tier.memory
        host, rows = self.buffers.host(layer, which), self.buffers.rows(layer)[which]
        if at is None:
            host, rows = host[row : row + arriving], rows[row : row + arriving]
        memory.to_host(places, host, at)
        edge = self.tier.device_slots * memory.chunk_tokens
        # What the device has already needs no way there.
        if at is not None or int(places.max(initial=0)) >= edge:
            self.buffers.upload(layer, which, row, row + arriving)
        memory.to_device(places, rows, at)
        self.counters.copy_s += time.perf_counter() - began

    def count_chunks(self, slots: np.ndarray) -> None:
        """Count chunks by the tier they came from; ``slots`` below 0 are those read from disk."""
        counters, held = self.counters, int((slots >= 0).sum())
        edge = 0 if self.tier is None else self.tier.device_slots
        device = held - int((slots >= edge).sum())
        counters.device_chunks += device
        counters.host_chunks += held - device
        counters.disk_chunks += slots.size - held
        counters.chunk_bytes = self.chunk_bytes
        if not self.selective:
            counters.needed_bytes += (slots.size - held) * self.chunk_bytes

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Count all that happens inside as time that the query waits for its KV."""
        began, waited = time.perf_counter(), self.counters.load_wait_s
        try:
            yield
        finally:
            spent = time.perf_counter() - began
            self.counters.load_wait_s = waited + spent
            self.counters.fetch_s += spent

    def await_reads(self, layer: int, futures: Sequence[Future[ReadCount]]) -> None:
        """Block until reads are done and count them. Raises `ChunkLoadError`."""
        deadline, started = self.reader.options.deadline_s, time.perf_counter()
        try:
            for future in futures:
                left = deadline - (time.perf_counter() - started)
                self.counters.add_read(*future.result(timeout=max(left, 0.0)))
        except FutureTimeoutError as error:
            reason = f"slow: no answer in {deadline:g} s"
            raise ChunkLoadError("-", "k", layer, -1, 0, reason) from error
        finally:
            waited = time.perf_counter() - started
            self.counters.load_wait_s += waited
            self.counters.read_wait_s += waited


class FullFetch(Fetch):
    """Every row of every layer, in the order in which they are stored.

    Attention does not ask for the order of rows that all queries see. Only where a query leaves a
    reordered node half-way, rows that are not its own arrive among them: then all arrive aside,
    and its own are copied to the front.
    """

    def __init__(
        self,
        parts: Sequence[LoadPart],
        reader: ChunkReader,
        buffers: RunBuffers,
        observer: Observer | None = None,
        tier: TieredCache | None = None,
    ) -> None:
        began = time.perf_counter()
        super().__init__(parts, reader, buffers, tier=tier)
        self._observer = observer
        self._mixed = any(part.mixed for part in self.parts)
        layers, row = range(buffers.shape.num_layers), buffers.aside if self._mixed else 0
        self._planned = [[*whole_loads(self, layer, (0, 1), row)] for layer in layers]
        self._pending = [self.submit(loads, 1) for loads in self._planned]
        self.counters.fetch_s += time.perf_counter() - began

    def layer(self, layer: int, q: torch.Tensor, k_new: torch.Tensor, scaling: float | None) -> int:
        """Wait for the layer's chunks; all rows are kept."""
        with self.loading():
            self.await_reads(layer, self._pending[layer])
            self._pending[layer] = []
            self.arrived(self._planned[layer])
            if self._mixed:
                places = whole_places(self.parts, layer)
                for rows in self.buffers.rows(layer):
                    gather(rows[self.buffers.aside :], places, rows)
        count = self.matched_len
        if self._observer is not None and count:
            self._observer(layer, q, self._keys(layer), k_new, scaling)
        return count

    def _keys(self, layer: int) -> torch.Tensor:
        """The prefix's keys in token order, [n, kv_heads, head_dim]."""
        keys = self.buffers.rows(layer)[0][: self.matched_len]
        if self._mixed or all(part.files.rows is None for part in self.parts):
            return keys
        return keys[torch.from_numpy(whole_places(self.parts, layer)).to(keys.device)]

    def pending(self) -> list[Future[ReadCount]]:
        """Reads of layers that nobody has asked for yet."""
        return [future for futures in self._pending for future in futures]


def whole_loads(fetch: Fetch, layer: int, arrays: Sequence[int], row: int) -> Iterator[ChunkLoad]:
    """Loads of all chunks of all parts, part after part from ``row`` on."""
    for part in fetch.parts:
        chunks = part.whole(layer).chunks
        loads = [ChunkLoad.plan(part, layer, which, chunks, row, fetch.tier) for which in arrays]
        row += loads[0].arriving
        yield from loads


def whole_places(parts: Sequence[LoadPart], layer: int) -> np.ndarray:
    """Where each prefix token lies among the rows that `whole_loads` brings, int64 [n]."""
    places, base = [], 0
    for part in parts:
        found = part.whole(layer)
        places.append(base + found.places)
        past = (int(found.chunks[-1]) + 1) * part.chunk_tokens - part.stored
        base += len(found.chunks) * part.chunk_tokens - max(0, past)
    return np.concatenate(places)


def gather(source: torch.Tensor, places: np.ndarray, target: torch.Tensor) -> None:
    """Copy rows of ``source`` [rows, kv_heads, head_dim] to the front of ``target``.

    ``places``: int64 [k], or [kv_heads, k] where each head keeps other rows; [1, k] counts as [k].
    """
    index = torch.from_numpy(places).to(source.device)
    if places.ndim == 1 or len(places) == 1:
        flat = index.reshape(-1)
        torch.index_select(source, 0, flat, out=target[: len(flat)])
        return
    heads, k = places.shape
    # One flat gather of head rows: row r of head h is row r * heads + h of the flattened view.
    flat = (index.t() * heads + torch.arange(heads, device=source.device)).reshape(-1)
    torch.index_select(source.flatten(0, 1), 0, flat, out=target[:k].flatten(0, 1))
