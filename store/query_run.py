"""QueryRun: one query on the store, from matched nodes to attention.

Joins the rows that a `Fetch` brings, the keys and values this run computes, and attention over
both (architecture.md "One query"). What is fetched, and when, is the fetch's.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from store.attend import CausalAttention
from store.buffers import RunBuffers
from store.disk.io import Arena
from store.fetch import Fetch
from store.stats import LayerReport


class QueryRun:
    """KV of one query; a context manager, closed by whoever began it.

    Parameters
    ----------
    buffers
        Memory for prompt and answer.
    fetch
        What fills its front rows.
    on_close
        Called once when the run ends, with the run and its arena, or None where a read still
        writes to it.

    Attributes
    ----------
    matched_len, position, capacity
        Tokens that come from the store; tokens the run has; tokens it can hold.
    counters
        What fetching cost.
    """

    def __init__(
        self,
        buffers: RunBuffers,
        fetch: Fetch,
        on_close: Callable[[QueryRun, Arena | None], None],
    ) -> None:
        self.shape, self.capacity = buffers.shape, buffers.capacity
        self.matched_len = self.position = fetch.matched_len
        self.counters = fetch.counters
        self.fetch = fetch
        self._buffers = buffers
        self._on_close: Callable[[QueryRun, Arena | None], None] | None = on_close
        self._attention = CausalAttention()
        self._kept: list[int | None] = [None] * buffers.shape.num_layers

    def __enter__(self) -> QueryRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for reads under way and give the memory back; further calls do nothing."""
        if self._on_close is None:
            return
        # A read under way writes into the arena, so that it must end before that is reused; one
        # that hangs keeps its arena for ever.
        idle = self.fetch.close()
        on_close, self._on_close = self._on_close, None
        try:
            on_close(self, self._buffers.arena if idle else None)
        finally:
            self._buffers.close()

    @property
    def reports(self) -> list[LayerReport]:
        """What a sparse run did in each layer so far; empty for a full load."""
        return self.fetch.reports

    @property
    def selected(self) -> list[np.ndarray]:
        """Per layer so far, int64 [sets, k]: selected prefix positions; empty for a full load."""
        return self.fetch.selected

    def kept(self, layer: int) -> np.ndarray:
        """Prefix positions that each KV head attends to in a layer, int64 [kv_heads, kept]."""
        positions = np.atleast_2d(self.fetch.kept_positions(layer))
        return np.broadcast_to(positions, (self.shape.num_kv_heads, positions.shape[1]))

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k_new: torch.Tensor,
        v_new: torch.Tensor,
        scaling: float | None,
    ) -> torch.Tensor:
        """Attention of new tokens over the loaded prefix and themselves.

        The first call of a layer decides what of the prefix it keeps; later ones, the next
        segment of a long suffix or a decoded token, attend to the same rows.

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
        kept = self._kept[layer]
        if kept is None:
            kept = self._kept[layer] = self.fetch.layer(layer, q, k_new, scaling)
        k, v = self._buffers.rows(layer)
        begin = kept + self.position - self.matched_len
        end = begin + q.shape[1]
        k[begin:end] = k_new.transpose(0, 1)
        v[begin:end] = v_new.transpose(0, 1)
        return self._attention(q, k[:end].transpose(0, 1), v[:end].transpose(0, 1), scaling)

    def advance(self, tokens: int) -> None:
        """Tell the run that a forward of ``tokens`` tokens went through every layer."""
        self.position += tokens

    def rewind(self, position: int) -> None:
        """Forget what was computed from ``position`` on, to go on in another way from there.

        The prefix rows that a layer keeps were decided by the first forward, so that nothing of
        that one may be forgotten by a run that leaves any out.
        """
        assert self.matched_len <= position <= self.position
        self.position = position

    def kv(self, layer: int, lo: int, hi: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of positions ``lo`` to ``hi``, [hi - lo, kv_heads, head_dim].

        Storage dtype; views of the run's memory on a CPU run, valid until it is closed. Of a run
        that left prefix rows out, nothing may be taken: what it computed is not exact.
        """
        assert self.matched_len <= lo <= hi <= self.position
        assert self._kept[layer] == self.matched_len
        assert not self.reports
        storage = self.shape.np_dtype
        parts = [t[lo:hi].cpu().contiguous() for t in self._buffers.rows(layer)]
        raw = [part.view(torch.uint8).numpy().view(storage) for part in parts]
        return raw[0].reshape(parts[0].shape), raw[1].reshape(parts[1].shape)
