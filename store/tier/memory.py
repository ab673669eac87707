"""A slab of chunk slots on one torch device: memory, free slots, moving rows. No policy."""

from __future__ import annotations

import numpy as np
import torch

from store.disk.io import Arena
from store.types import KVShape


class Slab:
    """Slots of one chunk of keys or of values each, in one block of memory.

    Attributes
    ----------
    slots
        How many there are; ``slots * chunk_bytes`` is at most the budget.
    rows
        [slots * chunk_tokens, kv_heads, head_dim]; slot s holds rows from ``s * chunk_tokens`` on.
    """

    def __init__(
        self, shape: KVShape, chunk_tokens: int, budget_bytes: int, device: torch.device
    ) -> None:
        self.chunk_tokens = chunk_tokens
        self.slots = budget_bytes // (chunk_tokens * shape.row_bytes)
        dims = (self.slots * chunk_tokens, shape.num_kv_heads, shape.head_dim)
        if device.type == "cpu":
            # Pages of an arena are taken when they are first written.
            self._arena = Arena(dims[0] * shape.row_bytes)
            flat = torch.from_numpy(self._arena.array).view(shape.torch_dtype)
            self.rows = flat.view(dims)
        else:
            self.rows = torch.empty(dims, dtype=shape.torch_dtype, device=device)
        self._free = np.arange(self.slots - 1, -1, -1, dtype=np.int64)
        self._free_count = self.slots

    @property
    def free(self) -> int:
        """Slots that hold nothing."""
        return self._free_count

    def allocate(self, count: int) -> np.ndarray:
        """Take ``count`` free slots, int64; there must be as many."""
        assert count <= self._free_count
        self._free_count -= count
        return self._free[self._free_count : self._free_count + count].copy()

    def release(self, slots: np.ndarray) -> None:
        """Give slots back."""
        end = self._free_count + len(slots)
        self._free[self._free_count : end] = slots
        self._free_count = end

    def row_index(self, slots: np.ndarray, offsets: np.ndarray) -> torch.Tensor:
        """Rows at ``offsets`` inside ``slots``, int64 on the slab's device."""
        index = slots.astype(np.int64) * self.chunk_tokens + offsets
        return torch.from_numpy(index).to(self.rows.device)

    def put(self, slots: np.ndarray, source: torch.Tensor, first_rows: np.ndarray) -> None:
        """Copy whole chunks from ``source`` [rows, kv_heads, head_dim] at ``first_rows``."""
        inside = np.arange(self.chunk_tokens)
        to = self.row_index(slots[:, None], inside).reshape(-1)
        # A node's last chunk may be short; what follows its tokens is padding, whatever it holds.
        last = source.shape[0] - 1
        places = np.minimum(first_rows[:, None] + inside, last).reshape(-1)
        rows = torch.from_numpy(places).to(source.device)
        self.rows.index_copy_(0, to, source.index_select(0, rows).to(self.rows.device))
