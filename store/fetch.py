"""Bring stored rows into a run's buffers: the contract, and the full load.

A `Fetch` fills the front rows of a layer when attention asks for it. `FullFetch` submits every
read when the run begins, in layer order, so that layer l+1 is in flight while layer l computes
(paper section 2). The sparse one is in `sparse`.
"""

from __future__ import annotations

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
from store.tier.host import HostTier

#: Gets (layer, q, keys [n, kv_heads, head_dim], k_new, scaling) before a layer's attention.
Observer = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float | None], None]


class Fetch(ABC):
    """Fills a run's buffers, layer by layer; used by one run.

    Attributes
    ----------
    matched_len
        Tokens that the parts cover, from position 0 without gaps.
    reports, selected
        What a sparse fetch did per layer, and int64 [sets, k] positions it selected; else empty.
    loads
        Everything that was brought to the buffers, layer by layer.
    """

    def __init__(
        self,
        parts: Sequence[LoadPart],
        reader: ChunkReader,
        buffers: RunBuffers,
        counters: RunCounters | None = None,
        tier: HostTier | None = None,
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

    def kept_positions(self, _layer: int) -> np.ndarray:
        """Prefix positions that a layer keeps, int64 [kept] or [kv_heads, kept]."""
        return np.arange(self.matched_len)

    def loaded_positions(self, _layer: int) -> np.ndarray:
        """Prefix positions whose keys and values a layer fetched, int64."""
        return np.arange(self.matched_len)

    def close(self) -> bool:
        """Cancel or wait for reads; False where one hangs and keeps the buffers for ever."""
        running = [future for future in self.pending() if not future.cancel()]
        deadline, started = self.reader.options.deadline_s, time.perf_counter()
        hung = wait(running, timeout=deadline).not_done if running else ()
        self.counters.load_wait_s += time.perf_counter() - started
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
            if self.tier is not None and len(load.missing) < len(load.chunks):
                load.copy(self.buffers, self.tier)
                found = len(load.chunks) - len(load.missing)
                self.counters.host_bytes += found * load.part.files.layout.chunk_bytes
            self.buffers.upload(load.layer, load.which, load.row, load.row + load.tokens)

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
            self.counters.load_wait_s += time.perf_counter() - started


class FullFetch(Fetch):
    """Every row of every layer, in token order."""

    def __init__(
        self,
        parts: Sequence[LoadPart],
        reader: ChunkReader,
        buffers: RunBuffers,
        observer: Observer | None = None,
        tier: HostTier | None = None,
    ) -> None:
        super().__init__(parts, reader, buffers, tier=tier)
        self._observer = observer
        layers = range(buffers.shape.num_layers)
        self._planned = [[*whole_loads(self, layer, (0, 1), 0)] for layer in layers]
        self._pending = [self.submit(loads, 1) for loads in self._planned]

    def layer(self, layer: int, q: torch.Tensor, k_new: torch.Tensor, scaling: float | None) -> int:
        """Wait for the layer's chunks; all rows are kept."""
        futures, count = self._pending[layer], self.matched_len
        self.await_reads(layer, futures)
        self._pending[layer] = []
        self.arrived(self._planned[layer])
        if self._observer is not None and count:
            self._observer(layer, q, self.buffers.rows(layer)[0][:count], k_new, scaling)
        return count

    def pending(self) -> list[Future[ReadCount]]:
        """Reads of layers that nobody has asked for yet."""
        return [future for futures in self._pending for future in futures]


def whole_loads(fetch: Fetch, layer: int, arrays: Sequence[int], row: int) -> Iterator[ChunkLoad]:
    """Loads of all chunks of all parts, each at the rows of its own positions after ``row``."""
    for part in fetch.parts:
        for which in arrays:
            chunks, to = np.arange(part.chunks), row + part.start
            yield ChunkLoad.plan(part, layer, which, chunks, to, part.used, fetch.tier)
