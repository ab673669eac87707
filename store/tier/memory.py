"""Memory of chunk slots on torch devices, and moving rows in it. No policy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from store.disk.io import Arena
from store.types import KVShape


class TierMemory:
    """Bytes of both tiers' chunks, one chunk of keys or of values a slot.

    Slots are numbered through both tiers, and so are rows: slot s holds rows from
    ``s * chunk_tokens`` on. One block of memory a tier, or, joined, one on the CPU for both::

        slot       0 ......... device_slots - 1 | device_slots ............ all - 1
        apart      block on the device          | block in host memory
        joined     block in host memory

    Parameters
    ----------
    device
        Where the device tier's block lies, unless joined.

    Attributes
    ----------
    chunk_tokens
        Rows of a slot.
    joined
        Whether host memory holds the device tier too, as where the device is the CPU.
    """

    def __init__(
        self,
        shape: KVShape,
        chunk_tokens: int,
        device_slots: int,
        host_slots: int,
        device: torch.device,
        joined: bool,
    ) -> None:
        self.chunk_tokens, self.joined = chunk_tokens, joined
        # The first slot that lies in host memory.
        self._edge = 0 if joined else device_slots
        dims = (self._edge * chunk_tokens, shape.num_kv_heads, shape.head_dim)
        if device.type == "cpu":
            self._device = _arena_rows(shape, dims[0])
        else:
            self._device = torch.empty(dims, dtype=shape.torch_dtype, device=device)
        self._host = _arena_rows(shape, (device_slots + host_slots) * chunk_tokens - dims[0])

    def to_host(
        self, places: np.ndarray, target: torch.Tensor, at: np.ndarray | None = None
    ) -> None:
        """Copy those of the rows ``places`` that lie in host memory; others are left alone.

        Parameters
        ----------
        places
            int64 [k], rows as numbered here; below 0 for none. Or [kv_heads, k], where each
            head takes other rows ([1, k] counts as [k]).
        target
            [rows, kv_heads, head_dim], contiguous.
        at
            int64 [k], rows of the target; the first k unless given.
        """
        _copy_rows(self._host, places - self._edge * self.chunk_tokens, target, at)

    def to_device(
        self, places: np.ndarray, target: torch.Tensor, at: np.ndarray | None = None
    ) -> None:
        """Copy the rest: rows of the device tier, to a target there. See `to_host`.

        Nothing to do where the tiers are joined.
        """
        _copy_rows(self._device, places, target, at)

    def put(self, slots: np.ndarray, source: torch.Tensor, first_rows: np.ndarray) -> None:
        """Copy whole chunks from ``source`` [rows, kv_heads, head_dim] at ``first_rows``."""
        # A node's last chunk may be short; what follows its tokens is padding, whatever it holds.
        rows = np.minimum(_whole(first_rows, self.chunk_tokens), source.shape[0] - 1)
        for block, inside, own in self._blocks(slots):
            chosen = source.index_select(0, _index(rows[inside], source.device))
            block.index_copy_(0, _index(self._rows(own), block.device), _brought(chosen, block))

    def move(self, from_slots: np.ndarray, to_slots: np.ndarray) -> None:
        """Copy chunks from slots to slots; all are read before any is written, so they may swap."""
        writes = []
        for source, inside, own in self._blocks(from_slots):
            for target, among, to in self._blocks(to_slots[inside]):
                rows = source.index_select(0, _index(self._rows(own[among]), source.device))
                writes.append((target, to, _brought(rows, target)))
        for target, to, rows in writes:
            target.index_copy_(0, _index(self._rows(to), target.device), rows)

    def _blocks(self, slots: np.ndarray) -> Iterator[tuple[torch.Tensor, np.ndarray, np.ndarray]]:
        """Blocks that hold any of ``slots``, which of them (bool), their numbers in the block."""
        on_host = slots >= self._edge
        for block, inside, first in (
            (self._device, ~on_host, 0),
            (self._host, on_host, self._edge),
        ):
            if inside.any():
                yield block, inside, slots[inside] - first

    def _rows(self, slots: np.ndarray) -> np.ndarray:
        """Rows of whole slots, int64 [slots, chunk_tokens]."""
        return _whole(slots.astype(np.int64) * self.chunk_tokens, self.chunk_tokens)


def _whole(first_rows: np.ndarray, chunk_tokens: int) -> np.ndarray:
    """Rows of whole chunks, int64 [chunks, chunk_tokens]."""
    rows: np.ndarray = first_rows[:, None] + np.arange(chunk_tokens)
    return rows


def _arena_rows(shape: KVShape, rows: int) -> torch.Tensor:
    """Host memory [rows, kv_heads, head_dim]; its pages are taken when they are first written."""
    flat = torch.from_numpy(Arena(rows * shape.row_bytes).array).view(shape.torch_dtype)
    return flat.view(rows, shape.num_kv_heads, shape.head_dim)


def _index(rows: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(rows.reshape(-1)).to(device)


def _brought(rows: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """Rows where ``block`` is. Only the way to a device may go on after the call: the device's
    own order has it done before the next use there."""
    return rows.to(block.device, non_blocking=block.device.type != "cpu")


def _copy_rows(
    source: torch.Tensor, places: np.ndarray, target: torch.Tensor, at: np.ndarray | None
) -> None:
    """Copy the rows ``places`` that ``source`` has; see `TierMemory.to_host`."""
    if places.ndim == 2 and len(places) == 1:
        places = places[0]
    to = np.arange(places.shape[-1]) if at is None else at
    if places.ndim == 2:
        # One flat copy of head rows: row r of head h is row r * heads + h of the flattened view.
        heads = np.arange(len(places))
        places = (places.T * len(heads) + heads).reshape(-1)
        to = (to[:, None] * len(heads) + heads).reshape(-1)
        source, target = (rows.view(-1, rows.shape[-1]) for rows in (source, target))
    inside = (places >= 0) & (places < len(source))
    if at is None and source.device == target.device and inside.all():
        torch.index_select(source, 0, _index(places, source.device), out=target[: len(places)])
    elif inside.any():
        rows = source.index_select(0, _index(places[inside], source.device))
        target.index_copy_(0, _index(to[inside], target.device), _brought(rows, target))
