"""Memory of one query: a region of rows per layer for keys and one for values.

One region, rows of [kv_heads, head_dim]; how many prefix rows a layer keeps differs in a sparse
run, so that each layer's suffix begins at its own row::

    | prefix rows the layer keeps | suffix: computed by this run | room for the answer |
    0                           kept                                              capacity
"""

from __future__ import annotations

import torch

from store.disk.io import Arena
from store.types import KVShape

_ALIGN = 4096


def region_bytes(shape: KVShape, capacity: int) -> int:
    """Bytes of one layer of one array: ``capacity`` rows, aligned, with room to widen a read."""
    return -(-capacity * shape.row_bytes // _ALIGN) * _ALIGN + _ALIGN


def arena_bytes(shape: KVShape, capacity: int) -> int:
    """Bytes of host memory a run of ``capacity`` tokens needs."""
    return 2 * shape.num_layers * region_bytes(shape, capacity)


class RunBuffers:
    """Regions in an arena and, for another device than the CPU, their twins on it.

    Parameters
    ----------
    arena
        Host memory of at least `arena_bytes` bytes.
    capacity
        Rows of a region.
    """

    def __init__(self, shape: KVShape, arena: Arena, capacity: int, device: torch.device) -> None:
        self.shape, self.arena, self.capacity, self.device = shape, arena, capacity, device
        self._host = [self._views(layer) for layer in range(shape.num_layers)]
        self._rows = self._host
        if device.type != "cpu":
            self._rows = [
                (torch.empty_like(k, device=device), torch.empty_like(v, device=device))
                for k, v in self._host
            ]

    def rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer where attention runs, [capacity, kv_heads, head_dim]."""
        return self._rows[layer]

    def upload(self, layer: int, which: int, count: int) -> None:
        """Bring the first ``count`` rows that were read to the device; nothing to do on a CPU."""
        if self.device.type != "cpu":
            target, source = self._rows[layer][which], self._host[layer][which]
            target[:count].copy_(source[:count], non_blocking=True)

    def room(self, layer: int, which: int, lo: int, hi: int | None) -> memoryview:
        """Host bytes of rows ``lo`` to ``hi`` of a region; None: to its end and the slack."""
        begin, end = self._region(layer, which)
        row = self.shape.row_bytes
        return self.arena.view[begin + lo * row : end if hi is None else begin + hi * row]

    def close(self) -> None:
        """Let go of the memory."""
        self._host, self._rows = [], []

    def _region(self, layer: int, which: int) -> tuple[int, int]:
        size = region_bytes(self.shape, self.capacity)
        begin = (2 * layer + which) * size
        return begin, begin + size

    def _views(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape, views = self.shape, []
        for which in range(2):
            begin, _ = self._region(layer, which)
            raw = self.arena.array[begin : begin + self.capacity * shape.row_bytes]
            flat = torch.from_numpy(raw).view(shape.torch_dtype)
            views.append(flat.view(self.capacity, shape.num_kv_heads, shape.head_dim))
        return views[0], views[1]
