"""Write a sidecar layer by layer, beside its place, and move it there when it is whole.

Publishing in the catalog is `store.probes`'s. Killed on the way, it leaves a temporary folder, or
a sidecar that no row of the catalog means; either is swept.
"""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path
from typing import Any

import crc32c
import numpy as np
import torch

from store.disk import layout as disk_layout
from store.disk.io import Arena
from store.disk.sidecar_layout import (
    PAGE,
    ProbeSpec,
    SidecarLayout,
    array_path,
    create_sidecar,
    pages,
    sketch_crc,
)
from store.disk.writer import (
    TEMP_PREFIX,
    WrittenGroup,
    disk_errors,
    sync_dir,
    sync_tree,
    write_all,
    write_file,
)
from store.itf.sketch import quantise
from store.types import KVShape


class SidecarWriter:
    """One sidecar under way.

    Parameters
    ----------
    target
        Final folder, whose parent is there or can be made.
    shape, tokens
        Of the node.
    attributes
        Of the group (`sidecar_attributes`).

    Raises
    ------
    StoreFullError, StoreWriteError
        From any method; `discard` then removes what was written.
    """

    def __init__(
        self, target: Path, shape: KVShape, tokens: int, spec: ProbeSpec, attributes: dict[str, Any]
    ) -> None:
        self.spec = spec
        self._target, self._shape = target, shape
        self._layout = SidecarLayout.of(shape, tokens, spec)
        self._temp = target.parent / f"{TEMP_PREFIX}{target.name}-{os.getpid()}"
        self._crc = np.zeros(shape.num_layers, dtype="<u4")
        self._scratch: Arena | None = None
        with disk_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(self._temp, ignore_errors=True)
            try:
                create_sidecar(self._temp, self._layout, attributes)
            except BaseException:
                # Nobody has a writer yet that could discard it.
                self.discard()
                raise

    def add(self, layer: int, keys: np.ndarray) -> None:
        """Write one layer; ``keys`` [n, kv_heads, head_dim] in the storage dtype."""
        assert keys.dtype == self._shape.np_dtype
        assert len(keys) == self._layout.tokens
        with disk_errors(self._target):
            if self.spec.heads is None:
                self._add_sketch(layer, keys)
            else:
                self._add_heads(layer, keys[:, list(self.spec.heads[layer])])

    def _add_sketch(self, layer: int, keys: np.ndarray) -> None:
        codes = quantise(as_tensor(keys, self._shape), self._layout.bits or 0)
        parts = [np.ascontiguousarray(part.numpy()) for part in codes]
        self._crc[layer] = sketch_crc(parts)
        for name, part in zip(self._layout.arrays, parts, strict=True):
            assert part.nbytes == self._layout.layer_bytes(name)
            _write_at(array_path(self._temp, name), layer * part.nbytes, part)

    def _add_heads(self, layer: int, keys: np.ndarray) -> None:
        raw = np.ascontiguousarray(keys).reshape(-1).view(np.uint8)
        size = raw.nbytes + 4
        if self._scratch is None:
            self._scratch = Arena(pages(size) + PAGE)
        self._scratch.array[: raw.nbytes] = raw
        self._scratch.view[raw.nbytes : size] = struct.pack("<I", crc32c.crc32c(raw.data))
        write_file(array_path(self._temp, "k", layer), self._scratch.view, size)

    def finish(self) -> WrittenGroup:
        """Sync everything and move it to its place, in that of an earlier one."""
        with disk_errors(self._target):
            if self.spec.heads is None:
                disk_layout.write_small(self._temp, "crc", self._crc)
            digest = disk_layout.group_digest(self._temp)
            size = sync_tree(self._temp)
            _move(self._temp, self._target)
        return WrittenGroup(self._target, digest, size)

    def discard(self) -> None:
        """Remove what was written, unless it is in its place already."""
        shutil.rmtree(self._temp, ignore_errors=True)


def as_tensor(rows: np.ndarray, shape: KVShape) -> torch.Tensor:
    """Rows in the storage dtype as a tensor in the compute dtype, without a copy if possible."""
    raw = np.ascontiguousarray(rows)
    raw = raw if raw.flags.writeable else raw.copy()
    flat = torch.from_numpy(raw.reshape(-1).view(np.uint8))
    return flat.view(shape.torch_dtype).view(rows.shape)


def _write_at(path: Path, offset: int, values: np.ndarray) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        write_all(fd, values.reshape(-1).view(np.uint8).data, offset)
    finally:
        os.close(fd)


def _move(temp: Path, target: Path) -> None:
    """Rename, with a moment in which nothing is at ``target`` if something was there.

    A query that comes then goes on with other evidence.
    """
    aside = target.parent / f"{TEMP_PREFIX}old-{target.name}-{os.getpid()}"
    shutil.rmtree(aside, ignore_errors=True)
    if target.exists():
        target.rename(aside)
    temp.rename(target)
    for folder in (target.parent, target.parent.parent, target.parent.parent.parent):
        sync_dir(folder)
    shutil.rmtree(aside, ignore_errors=True)
