"""Memory of one query: a region of rows per layer for keys and one for values.

One region, rows of [kv_heads, head_dim]; how many prefix rows a layer keeps differs in a sparse
run, so that each layer's suffix begins at its own row::

    | prefix rows the layer keeps | suffix: computed by this run | room for the answer | arrivals |
    0                           kept                                                 aside

Where a layer keeps other rows than arrive, these arrive aside and the kept ones are copied to the
front; else they arrive at the front.
"""

from __future__ import annotations

import torch

from store.disk.io import Arena
from store.types import MAX_CHUNK_TOKENS, KVShape

_ALIGN = 4096


def aside_row(capacity: int) -> int:
    """First row aside: a multiple of every usual chunk, so that reads there are aligned."""
    return -(-capacity // MAX_CHUNK_TOKENS) * MAX_CHUNK_TOKENS


def region_rows(capacity: int, arrivals: int) -> int:
    """Rows of a region."""
    return aside_row(capacity) + arrivals if arrivals else capacity


def region_bytes(shape: KVShape, rows: int) -> int:
    """Bytes of one layer of one array, rounded up so that the next one is aligned."""
    return -(-rows * shape.row_bytes // _ALIGN) * _ALIGN


def arena_bytes(shape: KVShape, capacity: int, arrivals: int = 0) -> int:
    """Bytes of host memory that buffers need."""
    return 2 * shape.num_layers * region_bytes(shape, region_rows(capacity, arrivals))


class RunBuffers:
    """Regions in an arena and, for another device than the CPU, their twins on it.

    Parameters
    ----------
    arena
        Host memory of at least `arena_bytes` bytes.
    capacity
        Rows at the front of a region: prompt and answer.
    arrivals
        Rows aside, for what is not kept where it arrives.

    Attributes
    ----------
    aside
        First of those rows.
    """

    def __init__(
        self,
        shape: KVShape,
        arena: Arena,
        capacity: int,
        device: torch.device,
        arrivals: int = 0,
    ) -> None:
        self.shape, self.arena, self.capacity, self.device = shape, arena, capacity, device
        self.aside = aside_row(capacity)
        self._total = region_rows(capacity, arrivals)
        self._host = [self._views(layer) for layer in range(shape.num_layers)]
        self._rows = self._host
        if device.type != "cpu":
            self._rows = [
                (torch.empty_like(k, device=device), torch.empty_like(v, device=device))
                for k, v in self._host
            ]

    def rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer where attention runs, [rows, kv_heads, head_dim]."""
        return self._rows[layer]

    def host(self, layer: int, which: int) -> torch.Tensor:
        """Keys (0) or values (1) of a layer where reads put them, [rows, kv_heads, head_dim]."""
        return self._host[layer][which]

    def upload(self, layer: int, which: int, lo: int, hi: int) -> None:
        """Bring rows ``lo`` to ``hi`` that were read to the device; nothing to do on a CPU."""
        if self.device.type != "cpu":
            target, source = self._rows[layer][which], self._host[layer][which]
            target[lo:hi].copy_(source[lo:hi], non_blocking=True)

    def room(self, layer: int, which: int, lo: int, hi: int) -> memoryview:
        """Host bytes of rows ``lo`` to ``hi`` of a region."""
        begin, row = self._begin(layer, which), self.shape.row_bytes
        return self.arena.view[begin + lo * row : begin + hi * row]

    def close(self) -> None:
        """Let go of the memory."""
        self._host, self._rows = [], []

    def _begin(self, layer: int, which: int) -> int:
        return (2 * layer + which) * region_bytes(self.shape, self._total)

    def _views(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape, views = self.shape, []
        for which in range(2):
            begin = self._begin(layer, which)
            raw = self.arena.array[begin : begin + self._total * shape.row_bytes]
            flat = torch.from_numpy(raw).view(shape.torch_dtype)
            views.append(flat.view(self._total, shape.num_kv_heads, shape.head_dim))
        return views[0], views[1]
