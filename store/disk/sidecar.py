"""Sidecars: second copies of a node's keys, from which queries tell what matters to them.

Owns opening, reading and scrubbing them; `sidecar_layout` says what they are, `sidecar_writer`
writes them. A sidecar belongs to a node whatever its generation, and lies in token order. Losing
one loses no KV: whatever is wrong with it is a `ChunkLoadError` of the array ``probe-<kind>``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import crc32c
import numpy as np

from store.disk import layout as disk_layout
from store.disk.io import ShortReadError
from store.disk.reader import ChunkReader, ReadCount
from store.disk.sidecar_layout import (
    PAGE,
    SKETCH_ARRAYS,
    NodeFacts,
    ProbeSpec,
    SidecarLayout,
    array_path,
    pages,
    sidecar_attributes,
    sketch_crc,
)
from store.errors import ChunkLoadError
from store.types import KVShape

if TYPE_CHECKING:
    from store.index.rows import ProbeRow
    from store.info import StoreInfo


@dataclass(frozen=True, slots=True)
class SidecarFiles:
    """A sidecar whose attributes were checked.

    ``start`` is the absolute position of the node's first token; ``heads`` int64 [layers, P];
    ``crc`` uint32 [layers] of a sketch; ``stamp`` tells the folder that was checked from another
    that takes its place.
    """

    node_id: str
    kind: str
    group: Path
    start: int
    tokens: int
    shape: KVShape
    bits: int | None
    heads: np.ndarray | None
    crc: np.ndarray | None = None
    stamp: tuple[int, int] | None = None

    @property
    def layout(self) -> SidecarLayout:
        """Its geometry."""
        probe_heads = 0 if self.heads is None else self.heads.shape[1]
        return SidecarLayout(self.shape, self.tokens, self.bits, probe_heads)

    def error(self, layer: int, reason: str) -> ChunkLoadError:
        """What to raise for a layer (-1: all) that can't be used."""
        array = f"{disk_layout.PROBE_PREFIX}{self.kind}"
        return ChunkLoadError(self.node_id, array, layer, -1, self.start, reason)


@dataclass(frozen=True, slots=True)
class SketchData:
    """A whole sketch in memory.

    ``code`` uint8 [layers, rows, kv_heads, head_dim]; ``scale`` and ``zero`` float16 [layers,
    groups, kv_heads, head_dim] (`store.itf.sketch`); ``bytes`` that all of it holds resident.
    """

    code: np.ndarray
    scale: np.ndarray
    zero: np.ndarray
    bytes: int
    count: ReadCount


def open_sidecar(
    store: Path, row: ProbeRow, node: NodeFacts, info: StoreInfo, identity_digest: str
) -> SidecarFiles:
    """Check that a sidecar is the one the catalog means, and load its checksums.

    Raises
    ------
    ChunkLoadError
        It is missing, or its metadata differs.
    """
    group, shape = disk_layout.sidecar_dir(store, row.node_id, row.kind), info.identity.shape
    files = SidecarFiles(row.node_id, row.kind, group, node.start, node.length, shape, None, None)
    with _load_errors(files, -1):
        spec = ProbeSpec.from_json(json.loads(row.detail))
        files = dataclasses.replace(files, stamp=_stamp(group))
        _require(group, row, sidecar_attributes(node, spec, info, identity_digest))
        if spec.heads is not None:
            return dataclasses.replace(files, heads=np.array(spec.heads, dtype=np.int64))
        crc = disk_layout.read_small(group, "crc", "<u4", (shape.num_layers,))
        return dataclasses.replace(files, bits=spec.bits, crc=crc)


def _require(group: Path, row: ProbeRow, expected: dict[str, Any]) -> None:
    found = disk_layout.read_attributes(group)
    for name, value in expected.items():
        if found.get(name) != value:
            raise ValueError(f"{name} is {found.get(name)}, expected {value}")
    if disk_layout.group_digest(group) != row.digest:
        raise ValueError("metadata digest differs")


def _stamp(group: Path) -> tuple[int, int]:
    found = (group / "zarr.json").stat()
    return found.st_ino, found.st_mtime_ns


@contextlib.contextmanager
def _load_errors(files: SidecarFiles, layer: int) -> Iterator[None]:
    """Turn what reading raises into a `ChunkLoadError`."""
    try:
        yield
    except ChunkLoadError:
        raise
    except FileNotFoundError as error:
        raise files.error(layer, "missing") from error
    except ShortReadError as error:
        raise files.error(layer, "short") from error
    except OSError as error:
        raise files.error(layer, f"io error {error.errno}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise files.error(layer, f"corrupt ({error})") from error


def read_sketch(files: SidecarFiles, reader: ChunkReader) -> SketchData:
    """Read a whole sketch into memory of its own and check it. Raises `ChunkLoadError`."""
    layout, layers = files.layout, files.shape.num_layers
    sizes = [layers * layout.layer_bytes(name) for name in SKETCH_ARRAYS]
    begins = np.cumsum([0, *(pages(size) for size in sizes)]).tolist()
    memory = aligned(begins[-1])
    counts, arrays = [], []
    with _load_errors(files, -1):
        for name, size, begin in zip(SKETCH_ARRAYS, sizes, begins, strict=False):
            room = memory[begin : begin + pages(size)]
            counts.append(reader.read_file(array_path(files.group, name), room.data, size))
            values = room[:size].view(layout.dtype(name))
            arrays.append(values.reshape(layers, *layout.dims(name)))
    for layer in range(layers):
        _check_sketch(files, layer, [array[layer] for array in arrays])
    return SketchData(arrays[0], arrays[1], arrays[2], memory.nbytes + PAGE, _sum(counts))


def _check_sketch(files: SidecarFiles, layer: int, parts: Sequence[np.ndarray]) -> None:
    assert files.crc is not None, "not a sketch"
    if sketch_crc(parts) != int(files.crc[layer]):
        raise files.error(layer, "corrupt")


def _sum(counts: Sequence[ReadCount]) -> ReadCount:
    return ReadCount(
        sum(count.wanted_bytes for count in counts),
        sum(count.read_bytes for count in counts),
        sum(count.requests for count in counts),
        min(count.started_s for count in counts),
        max(count.ended_s for count in counts),
    )


def heads_room(files: SidecarFiles) -> int:
    """Bytes of page-aligned memory that `read_heads` needs for a layer."""
    return pages(files.layout.layer_bytes("k") + 4)


def read_heads(
    files: SidecarFiles, reader: ChunkReader, layer: int, arena_view: memoryview | None = None
) -> tuple[np.ndarray, ReadCount]:
    """Read one layer's probe keys and check them.

    Parameters
    ----------
    arena_view
        Page-aligned memory of at least `heads_room` bytes; new memory without it.

    Returns
    -------
    keys, count
        ``keys`` [n, P, head_dim] in the storage dtype, in the memory given.

    Raises
    ------
    ChunkLoadError
    """
    layout, size = files.layout, files.layout.layer_bytes("k")
    room = aligned(heads_room(files)).data if arena_view is None else arena_view
    with _load_errors(files, layer):
        count = reader.read_file(array_path(files.group, "k", layer), room, size + 4)
        # Keys of other heads have a checksum that is as right as any: a writer may have put them
        # in place since the heads were looked up.
        if files.stamp != _stamp(files.group):
            raise files.error(layer, "replaced")
    if crc32c.crc32c(room[:size]) != struct.unpack("<I", room[size : size + 4])[0]:
        raise files.error(layer, "corrupt")
    keys = np.frombuffer(room[:size], dtype=layout.dtype("k"))
    return keys.reshape(layout.dims("k")), count


def scrub_sidecar(files: SidecarFiles) -> tuple[int, list[tuple[int, str]]]:
    """Compare every stored byte with its checksum, through the page cache.

    Returns
    -------
    bytes, bad
        Bytes that were checked, and (layer, reason) of what is bad; layer -1 for a whole array.
    """
    found: list[tuple[int, str]] = []
    check = _scrub_heads if files.bits is None else _scrub_sketch
    try:
        return check(files, found), found
    except FileNotFoundError:
        return 0, [*found, (-1, "missing")]
    except OSError as error:
        return 0, [*found, (-1, f"io error {error.errno}")]


def _scrub_heads(files: SidecarFiles, found: list[tuple[int, str]]) -> int:
    size = files.layout.layer_bytes("k")
    for layer in range(files.shape.num_layers):
        try:
            disk_layout.read_checked(array_path(files.group, "k", layer), "k", size)
        except ValueError as error:
            found.append((layer, str(error)))
    return files.shape.num_layers * size


def _scrub_sketch(files: SidecarFiles, found: list[tuple[int, str]]) -> int:
    layout, layers = files.layout, files.shape.num_layers
    sizes = {name: layout.layer_bytes(name) for name in SKETCH_ARRAYS}
    for name, size in sizes.items():
        here = array_path(files.group, name).stat().st_size
        if here != layers * size:
            found.append((-1, f"{name} has {here} bytes, expected {layers * size}"))
            return 0
    assert files.crc is not None, "not a sketch"
    for layer in range(layers):
        parts = [
            np.fromfile(array_path(files.group, name), np.uint8, size, offset=layer * size)
            for name, size in sizes.items()
        ]
        if sketch_crc(parts) != int(files.crc[layer]):
            found.append((layer, "checksum differs"))
    return layers * sum(sizes.values())


def aligned(size: int) -> np.ndarray:
    """Page-aligned memory, uint8 [size]."""
    raw = np.empty(size + PAGE, dtype=np.uint8)
    skip = -raw.ctypes.data % PAGE
    return raw[skip : skip + size]
