"""Bring stored rows into a run's buffers: the contract, and the full load.

A `Fetch` fills the front rows of a layer when attention asks for it. `FullFetch` submits every
read when the run begins, in layer order, so that layer l+1 is in flight while layer l computes
(paper section 2). The sparse one is in `sparse`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass

import numpy as np
import torch

from store.buffers import RunBuffers
from store.disk.layout import KV_ARRAYS
from store.disk.reader import ChunkReader, NodeFiles, ReadCount, ShardRead
from store.disk.runs import one_run
from store.errors import ChunkLoadError
from store.index.mapping import chunk_count
from store.stats import LayerReport, RunCounters

#: Gets (layer, q, keys [n, kv_heads, head_dim], k_new, scaling) before a layer's attention.
Observer = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float | None], None]


@dataclass(frozen=True, slots=True)
class LoadPart:
    """The first ``used`` tokens of a node, to be loaded at the node's own position."""

    files: NodeFiles
    used: int

    @property
    def start(self) -> int:
        """Absolute position of the part's first token."""
        return self.files.start

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk."""
        return self.files.layout.chunk_tokens

    @property
    def chunks(self) -> int:
        """Chunks of one array that hold the part's tokens."""
        return chunk_count(self.used, self.chunk_tokens)


class Fetch(ABC):
    """Fills a run's buffers, layer by layer; used by one run.

    Attributes
    ----------
    matched_len
        Tokens that the parts cover, from position 0 without gaps.
    reports, selected
        What a sparse fetch did per layer, and int64 [sets, k] positions it selected; else empty.
    """

    def __init__(
        self,
        parts: Sequence[LoadPart],
        reader: ChunkReader,
        buffers: RunBuffers,
        counters: RunCounters | None = None,
    ) -> None:
        self.parts, self.reader, self.buffers = list(parts), reader, buffers
        self.matched_len = sum(part.used for part in parts)
        self.counters = counters or RunCounters()
        self.reports: list[LayerReport] = []
        self.selected: list[np.ndarray] = []

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

    def close(self) -> bool:
        """Cancel or wait for reads; False where one hangs and keeps the buffers for ever."""
        running = [future for future in self.pending() if not future.cancel()]
        deadline = self.reader.options.deadline_s
        return not (wait(running, timeout=deadline).not_done if running else ())

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
    ) -> None:
        super().__init__(parts, reader, buffers)
        self._observer = observer
        layers = range(buffers.shape.num_layers)
        self._pending = [self._submit(layer) for layer in layers]

    def layer(self, layer: int, q: torch.Tensor, k_new: torch.Tensor, scaling: float | None) -> int:
        """Wait for the layer's chunks; all rows are kept."""
        futures, count = self._pending[layer], self.matched_len
        self.await_reads(layer, futures)
        self._pending[layer] = []
        for which in range(2):
            self.buffers.upload(layer, which, count)
        if self._observer is not None and count:
            self._observer(layer, q, self.buffers.rows(layer)[0][:count], k_new, scaling)
        return count

    def pending(self) -> list[Future[ReadCount]]:
        """Reads of layers that nobody has asked for yet."""
        return [future for futures in self._pending for future in futures]

    def _submit(self, layer: int) -> list[Future[ReadCount]]:
        return [
            self.reader.submit(whole_part(self.buffers, part, layer, which, part is self.parts[-1]))
            for part in self.parts
            for which in range(2)
        ]


def whole_part(
    buffers: RunBuffers, part: LoadPart, layer: int, which: int, last: bool
) -> ShardRead:
    """Read all of a part's chunks to the rows of its own positions.

    Only the last part may spill over its own rows: what follows it is written afterwards.
    """
    stop = part.start + part.used
    room = buffers.room(layer, which, part.start, None if last else stop)
    valid = part.used * buffers.shape.row_bytes
    return ShardRead(part.files, KV_ARRAYS[which], layer, one_run(0, part.chunks), room, valid)
