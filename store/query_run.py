"""QueryRun: one query on the store, from matched nodes to attention.

Owns the run's KV buffers and the reads that fill them. Per layer: wait for the layer's chunks,
append the new keys and values, attend over both. Layers are read in order, so that layer l+1 is
in flight while layer l computes (paper section 2; architecture.md "One query").

One layer's buffer of keys (values lie alike), rows of [kv_heads, head_dim]::

    | node 0 | node 1 | ... | suffix: computed by this run | room for the answer |
    0                       matched_len                    position              capacity
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass

import numpy as np
import torch

from store.attend import CausalAttention
from store.disk.io import Arena
from store.disk.layout import KV_ARRAYS
from store.disk.reader import ChunkReader, NodeFiles, ReadCount, ShardRead
from store.errors import ChunkLoadError
from store.index.mapping import chunk_count
from store.stats import RunCounters
from store.types import KVShape

_ALIGN = 4096


@dataclass(frozen=True, slots=True)
class LoadPart:
    """The first ``used`` tokens of a node, to be loaded at the node's own position."""

    files: NodeFiles
    used: int


def region_bytes(shape: KVShape, capacity: int) -> int:
    """Bytes of one layer of one array: ``capacity`` rows, aligned, with room to widen a read."""
    return -(-capacity * shape.row_bytes // _ALIGN) * _ALIGN + _ALIGN


def arena_bytes(shape: KVShape, capacity: int) -> int:
    """Bytes of host memory a run of ``capacity`` tokens needs."""
    return 2 * shape.num_layers * region_bytes(shape, capacity)


class QueryRun:
    """KV of one query; a context manager, closed by whoever began it.

    Parameters
    ----------
    shape
        KV shape of the model.
    parts
        Matched nodes in order; they cover tokens 0 to ``matched_len`` without gaps.
    reader
        Where their chunks are read.
    arena
        Host memory of at least `arena_bytes` bytes.
    capacity
        Most tokens the run can hold: prompt and answer.
    device
        Where attention runs.
    on_close
        Called once when the run ends, with the arena, or None where a read still writes to it.
    """

    def __init__(
        self,
        shape: KVShape,
        parts: Sequence[LoadPart],
        reader: ChunkReader,
        arena: Arena,
        capacity: int,
        device: torch.device,
        on_close: Callable[[Arena | None], None],
    ) -> None:
        self.shape = shape
        self.matched_len = sum(part.used for part in parts)
        self.position = self.matched_len
        self.capacity = capacity
        self.counters = RunCounters()
        self._device = device
        self._deadline_s = reader.options.deadline_s
        self._arena = arena
        self._on_close: Callable[[Arena | None], None] | None = on_close
        self._attention = CausalAttention()
        self._host = [self._layer_views(layer) for layer in range(shape.num_layers)]
        self._kv = self._device_views()
        self._pending = [self._submit(reader, parts, i) for i in range(shape.num_layers)]

    def __enter__(self) -> QueryRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for reads under way and give the memory back; further calls do nothing."""
        if self._on_close is None:
            return
        running = [f for futures in self._pending for f in futures if not f.cancel()]
        # A read under way writes into the arena, so that it must end before that is reused; one
        # that hangs keeps its arena for ever.
        hung = wait(running, timeout=self._deadline_s).not_done if running else ()
        self._host, self._kv = [], []
        on_close, self._on_close = self._on_close, None
        on_close(None if hung else self._arena)

    def _region(self, layer: int, which: int) -> tuple[int, int]:
        size = region_bytes(self.shape, self.capacity)
        begin = (2 * layer + which) * size
        return begin, begin + size

    def _layer_views(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer on the host, each [capacity, kv_heads, head_dim]."""
        shape, views = self.shape, []
        for which in range(2):
            begin, _ = self._region(layer, which)
            raw = self._arena.array[begin : begin + self.capacity * shape.row_bytes]
            flat = torch.from_numpy(raw).view(shape.torch_dtype)
            views.append(flat.view(self.capacity, shape.num_kv_heads, shape.head_dim))
        return views[0], views[1]

    def _device_views(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if self._device.type == "cpu":
            return self._host
        return [
            (torch.empty_like(k, device=self._device), torch.empty_like(v, device=self._device))
            for k, v in self._host
        ]

    def _submit(
        self, reader: ChunkReader, parts: Sequence[LoadPart], layer: int
    ) -> list[Future[ReadCount]]:
        """Start reading one layer of every part."""
        return [
            reader.submit(self._shard_read(part, layer, which, part is parts[-1]))
            for part in parts
            for which in range(2)
        ]

    def _shard_read(self, part: LoadPart, layer: int, which: int, last: bool) -> ShardRead:
        files, row = part.files, self.shape.row_bytes
        begin, end = self._region(layer, which)
        valid = part.used * row
        into = begin + files.start * row
        # Only the last part may spill over its own rows: what follows is written afterwards.
        room = self._arena.view[into : end if last else into + valid]
        stop = chunk_count(part.used, files.layout.chunk_tokens)
        return ShardRead(files, KV_ARRAYS[which], layer, 0, stop, room, valid)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k_new: torch.Tensor,
        v_new: torch.Tensor,
        scaling: float | None,
    ) -> torch.Tensor:
        """Attention of new tokens over the loaded prefix and themselves.

        Parameters
        ----------
        q
            [num_heads, m, head_dim], after the position encoding.
        k_new, v_new
            [num_kv_heads, m, head_dim]; appended to the run.
        scaling
            As the model passes it (OPT scales queries itself and passes 1.0).

        Returns
        -------
        [num_heads, m, head_dim]

        Raises
        ------
        ChunkLoadError
            The layer could not be loaded; nothing of it was used.
        """
        self.wait(layer)
        k, v = self._kv[layer]
        end = self.position + q.shape[1]
        k[self.position : end] = k_new.transpose(0, 1)
        v[self.position : end] = v_new.transpose(0, 1)
        return self._attention(q, k[:end].transpose(0, 1), v[:end].transpose(0, 1), scaling)

    def wait(self, layer: int) -> None:
        """Block until a layer's chunks are there. Raises `ChunkLoadError`."""
        futures = self._pending[layer]
        if not futures:
            return
        started = time.perf_counter()
        try:
            for future in futures:
                left = self._deadline_s - (time.perf_counter() - started)
                self.counters.add_read(*future.result(timeout=max(left, 0.0)))
        except FutureTimeoutError as error:
            raise self._slow(layer) from error
        finally:
            self.counters.load_wait_s += time.perf_counter() - started
        self._pending[layer] = []
        if self._device.type != "cpu":
            for target, source in zip(self._kv[layer], self._host[layer], strict=True):
                target[: self.matched_len].copy_(source[: self.matched_len], non_blocking=True)

    def _slow(self, layer: int) -> ChunkLoadError:
        return ChunkLoadError("-", "k", layer, -1, 0, f"slow: no answer in {self._deadline_s:g} s")

    def advance(self, tokens: int) -> None:
        """Tell the run that a forward of ``tokens`` tokens went through every layer."""
        self.position += tokens

    def kv(self, layer: int, lo: int, hi: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of positions ``lo`` to ``hi``, [hi - lo, kv_heads, head_dim].

        Storage dtype; views of the run's memory on a CPU run, valid until it is closed.
        """
        assert 0 <= lo <= hi <= self.position
        storage = self.shape.np_dtype
        parts = [t[lo:hi].cpu().contiguous() for t in self._kv[layer]]
        raw = [part.view(torch.uint8).numpy().view(storage) for part in parts]
        return raw[0].reshape(parts[0].shape), raw[1].reshape(parts[1].shape)
