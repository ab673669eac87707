"""Write a node generation so that it exists whole or not at all.

The only place that creates arrays. Order: temporary folder beside the target, metadata, shards
layer by layer, fsync of files and folders, rename. Publishing in the catalog is the engine's.

zarr-python creates the metadata; the shard bytes are written here, since its sharded write
takes 65 ms for one layer of 256 chunks where one write of the same bytes takes 1 ms
(docs/decisions.md). A test compares both byte for byte.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import crc32c
import numpy as np

from store.disk import layout as disk_layout
from store.disk.io import Arena
from store.disk.layout import NodeLayout
from store.errors import StoreError, StoreFullError, StoreWriteError
from store.index.mapping import Rows, identity_rows, invert_rows

#: KV of one layer: (k, v), each [tokens, kv_heads, head_dim] in the storage dtype.
LayerKV = Callable[[int], tuple[np.ndarray, np.ndarray]]

TEMP_PREFIX = ".tmp-"
_SYNC_THREADS = 4
_DIRECT_BYTES = 1 << 20
_ARRAYS = len(disk_layout.KV_ARRAYS) + len(disk_layout.SMALL_ARRAYS)
#: Unit in which file systems hand out space.
DISK_BLOCK = 4096


class WrittenGroup(NamedTuple):
    """A generation that lies on disk, renamed and synced, not yet published."""

    path: Path
    digest: str
    size_bytes: int


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Answer a failed write with one line."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFullError(
                f"no space left for {path}; free some, or use another --store"
            ) from error
        raise StoreWriteError(
            f"can't write {path} ({error.strerror or error}); check the folder and its disk"
        ) from error


def write_generation(
    target: Path,
    layout: NodeLayout,
    tokens: np.ndarray,
    layers: LayerKV,
    attributes: dict[str, Any],
    rows: Rows | None = None,
) -> WrittenGroup:
    """Write one generation at ``target``.

    Parameters
    ----------
    target
        Final folder; one left by a writer that was killed before it published is replaced.
    layout
        Geometry; ``layout.tokens == len(tokens)``.
    tokens
        uint32 [n], the node's own token ids.
    layers
        Called once per layer in order, so that only one layer needs to be in memory; rows in
        token order.
    attributes
        Group attributes (format.md).
    rows
        Mapping list to store the rows by, int32 [layers, n]; None for token order.

    Raises
    ------
    StoreFullError, StoreWriteError
        Nothing is left at ``target``.
    """
    temp = target.parent / f"{TEMP_PREFIX}{target.name}-{os.getpid()}"
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temp, ignore_errors=True)
        try:
            disk_layout.create_group(temp, layout, attributes)
            _write_arrays(temp, layout, tokens, layers, rows)
            digest = disk_layout.group_digest(temp)
            size = sync_tree(temp) + 2 * DISK_BLOCK  # the node's folder and its fan-out folder
            if target.exists():
                shutil.rmtree(target)
            temp.rename(target)
        except BaseException:
            shutil.rmtree(temp, ignore_errors=True)
            raise
        for folder in (target.parent, target.parent.parent, target.parent.parent.parent):
            sync_dir(folder)
    return WrittenGroup(target, digest, size)


def _write_arrays(
    group: Path,
    layout: NodeLayout,
    tokens: np.ndarray,
    layers: LayerKV,
    rows: Rows | None,
) -> None:
    order = None if rows is None else invert_rows(rows)
    crcs = {
        name: np.empty((layout.shape.num_layers, layout.num_chunks), dtype="<u4")
        for name in disk_layout.KV_ARRAYS
    }
    scratch = Arena(shard_room(layout))
    for layer in range(layout.shape.num_layers):
        for name, values in zip(disk_layout.KV_ARRAYS, layers(layer), strict=True):
            path = disk_layout.shard_path(group, name, layer)
            stored = values if order is None else values[order[layer]]
            crcs[name][layer] = write_shard(path, layout, stored, scratch)
    if rows is None:
        rows = identity_rows(layout.shape.num_layers, layout.tokens)
    disk_layout.write_small(group, "tokens", tokens.astype("<u4"))
    disk_layout.write_small(group, "rows", rows)
    for name, values in crcs.items():
        disk_layout.write_small(group, f"{name}_crc", values)


def write_shard(path: Path, layout: NodeLayout, values: np.ndarray, scratch: Arena) -> np.ndarray:
    """Write one layer's rows as a shard; returns uint32 [chunks], CRC-32C of the stored chunks.

    ``values``: [n, kv_heads, head_dim] in the storage dtype; the last chunk is zero padded.
    ``scratch`` holds the file on its way, at least `shard_room` bytes.
    """
    expected = (layout.tokens, layout.shape.num_kv_heads, layout.shape.head_dim)
    assert values.shape == expected, (values.shape, expected)
    assert values.dtype == layout.shape.np_dtype
    raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    size, file = layout.chunk_bytes, scratch.array
    file[: len(raw)] = raw
    file[len(raw) : layout.data_bytes] = 0
    sizes = [size] * layout.num_chunks
    if layout.codec != "none":
        sizes = _encode(layout, file)
    index = disk_layout.pack_index(sizes)
    end = sum(sizes) + len(index)
    file[end - len(index) : end] = np.frombuffer(index, np.uint8)
    begin = np.cumsum([0, *sizes]).tolist()
    crcs = [crc32c.crc32c(scratch.view[a:b]) for a, b in itertools.pairwise(begin)]
    write_file(path, scratch.view, end)
    return np.array(crcs, dtype="<u4")


def shard_room(layout: NodeLayout) -> int:
    """Bytes of scratch that `write_shard` needs; a codec may make chunks a little longer."""
    longest = layout.data_bytes * 17 // 16 + 1024 * layout.num_chunks
    stored = layout.data_bytes if layout.codec == "none" else longest
    return stored + layout.index_bytes + DISK_BLOCK


def _encode(layout: NodeLayout, file: np.ndarray) -> list[int]:
    """Replace the chunks in ``file`` by their encoded form, back to back; returns their sizes."""
    codec = disk_layout.make_codec(layout.codec)
    assert codec is not None
    # Blosc shuffles by element size, which it takes from the buffer's dtype.
    chunks = file[: layout.data_bytes].view(layout.shape.np_dtype).reshape(layout.num_chunks, -1)
    parts = [bytes(codec.encode(chunk)) for chunk in chunks]
    stored = b"".join(parts)
    file[: len(stored)] = np.frombuffer(stored, np.uint8)
    return [len(part) for part in parts]


def write_file(path: Path, data: memoryview, size: int) -> None:
    """Write a new file of ``size`` bytes from page-aligned memory that is longer by a block.

    Past the page cache where that works: what is stored would only push other pages out of it,
    and filling it takes longer than the disk does (docs/decisions.md).
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    # A small file waits longer for its own disk write than for its pages.
    attempts = (getattr(os, "O_DIRECT", 0), 0) if size >= _DIRECT_BYTES else (0,)
    for direct in attempts:
        try:
            fd = os.open(path, flags | direct)
        except OSError as error:
            if direct and error.errno == errno.EINVAL:
                continue
            raise
        try:
            write_all(fd, data[: _on_disk(size) if direct else size])
            if direct:
                os.ftruncate(fd, size)
            return
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            path.unlink()
        finally:
            os.close(fd)


def write_all(fd: int, data: memoryview, offset: int = 0) -> None:
    """Write all of ``data`` at ``offset``."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


def sync_tree(group: Path) -> int:
    """fsync every file and folder of ``group``; returns what it takes on disk, as ``du`` says."""
    paths = list(group.rglob("*"))
    with ThreadPoolExecutor(_SYNC_THREADS) as pool:
        total = sum(pool.map(_sync, (path for path in paths if path.is_file())))
    folders = [*(path for path in paths if path.is_dir()), group]
    return total + sum(_sync(folder) for folder in folders)


def _sync(path: Path) -> int:
    """fsync a file or folder; returns the bytes it takes on disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        return os.fstat(fd).st_blocks * 512
    finally:
        os.close(fd)


def sync_dir(path: Path) -> None:
    """fsync a folder, so that the names in it survive a power loss."""
    _sync(path)


def group_bytes(layout: NodeLayout) -> int:
    """What a generation takes on disk at most, as ``du`` counts it, before it is written."""
    shards = 2 * layout.shape.num_layers
    shard = _on_disk(layout.data_bytes + layout.index_bytes)
    table = 4 * layout.shape.num_layers
    small = _on_disk(4 * layout.tokens + 4) + _on_disk(table * layout.tokens + 4)
    small += 2 * _on_disk(table * layout.num_chunks + 4)
    # A zarr.json and a folder for the group and each array, the node's and the fan-out folder.
    return shards * shard + small + DISK_BLOCK * (2 * (1 + _ARRAYS) + 2)


def _on_disk(size: int) -> int:
    return -(-size // DISK_BLOCK) * DISK_BLOCK
