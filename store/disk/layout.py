"""Where the bytes of a node generation lie: paths, shard geometry, Zarr v3 metadata.

Owns names and offsets. It writes nothing but metadata (`create_group`) and reads nothing but
metadata (`read_attributes`, `group_digest`).

One shard of an uncompressed array, for a node of n tokens in chunks of c tokens::

    | chunk 0 | chunk 1 | ... | chunk N-1 (zero padded) | index: N x (offset, size) | crc |
    0         c*row               N = ceil(n / c)       N*c*row                      end
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import crc32c
import numpy as np
import zarr
from numcodecs.abc import Codec
from numcodecs.blosc import Blosc
from numcodecs.zstd import Zstd
from zarr.codecs import BloscCodec, Crc32cCodec, ZstdCodec

from store import errors
from store.errors import InvalidValueError
from store.index.mapping import chunk_count
from store.types import KVShape

LAYOUT_VERSION = 1
CODECS = ("none", "zstd", "lz4")
KV_ARRAYS = ("k", "v")
SMALL_ARRAYS = ("tokens", "k_crc", "v_crc", "rows")
INDEX_ENTRY = 16
MISSING = np.uint64(2**64 - 1)
#: Begins the name of a sidecar's folder and of the array that an error about it names.
PROBE_PREFIX = errors.PROBE_PREFIX
#: Every array is written with these: keys without folders per layer, and no chunk left out.
ARRAY_OPTIONS: dict[str, Any] = {
    "chunk_key_encoding": {"name": "default", "separator": "."},
    "config": {"write_empty_chunks": True},
    "filters": None,
    "fill_value": 0,
}


@dataclass(frozen=True, slots=True)
class NodeLayout:
    """Geometry of one node generation; all sizes in bytes."""

    shape: KVShape
    tokens: int
    chunk_tokens: int
    codec: str

    @property
    def num_chunks(self) -> int:
        """Chunks per layer and array."""
        return chunk_count(self.tokens, self.chunk_tokens)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one decoded chunk."""
        return self.chunk_tokens * self.shape.row_bytes

    @property
    def data_bytes(self) -> int:
        """Bytes of all decoded chunks of one layer of one array."""
        return self.num_chunks * self.chunk_bytes

    @property
    def index_bytes(self) -> int:
        """Bytes of a shard's index with its checksum."""
        return self.num_chunks * INDEX_ENTRY + 4


def node_dir(store: Path, node_id: str) -> Path:
    """Folder of a node; 256 fan-out folders keep each listing short."""
    return store / "nodes" / node_id[:2] / node_id


def generation_dir(store: Path, node_id: str, generation: int) -> Path:
    """Folder of one published generation."""
    return node_dir(store, node_id) / f"g{generation}"


def sidecar_dir(store: Path, node_id: str, kind: str) -> Path:
    """Folder of a node's sidecar of one kind, whatever the node's generation."""
    return node_dir(store, node_id) / f"{PROBE_PREFIX}{kind}"


def shard_path(group: Path, array: str, layer: int) -> Path:
    """File of one layer of ``k`` or ``v``."""
    return group / array / f"c.{layer}.0.0.0"


def small_array_path(group: Path, array: str) -> Path:
    """File of an array that is one chunk."""
    rank = 1 if array in ("tokens", "crc") else 2
    return group / array / ".".join(["c"] + ["0"] * rank)


def make_codec(name: str) -> Codec | None:
    """The chunk codec, or None for ``none``; raises `InvalidValueError` for another name."""
    if name == "none":
        return None
    if name == "zstd":
        return Zstd(level=3)
    if name == "lz4":
        return Blosc(cname="lz4", clevel=5, shuffle=Blosc.SHUFFLE)
    raise InvalidValueError(f"codec {name!r} is not known; use one of {', '.join(CODECS)}")


def _zarr_compressors(name: str, itemsize: int) -> list[Any]:
    if name == "zstd":
        return [ZstdCodec(level=3)]
    if name == "lz4":
        return [BloscCodec(cname="lz4", clevel=5, shuffle="shuffle", typesize=itemsize)]
    return []


def create_group(path: Path, layout: NodeLayout, attributes: dict[str, Any]) -> None:
    """Create the group's metadata at ``path`` (which must not exist); no chunk is written."""
    shape, n = layout.shape, layout.tokens
    group = zarr.create_group(path, zarr_format=3, attributes=attributes)
    head = (shape.num_kv_heads, shape.head_dim)
    for name in KV_ARRAYS:
        group.create_array(
            name,
            shape=(shape.num_layers, n, *head),
            chunks=(1, layout.chunk_tokens, *head),
            shards=(1, layout.num_chunks * layout.chunk_tokens, *head),
            dtype=shape.np_dtype,
            compressors=_zarr_compressors(layout.codec, shape.np_dtype.itemsize) or None,
            **ARRAY_OPTIONS,
        )
    table = (shape.num_layers, layout.num_chunks)
    small = {
        "tokens": ((n,), "uint32"),
        "k_crc": (table, "uint32"),
        "v_crc": (table, "uint32"),
        "rows": ((shape.num_layers, n), "int32"),
    }
    for name, (dims, dtype) in small.items():
        group.create_array(
            name, shape=dims, chunks=dims, dtype=dtype, compressors=[Crc32cCodec()], **ARRAY_OPTIONS
        )


def read_attributes(group: Path) -> dict[str, Any]:
    """Attributes of a group. Raises OSError or ValueError where they can't be read."""
    meta = json.loads((group / "zarr.json").read_bytes())
    attributes = meta["attributes"] if isinstance(meta, dict) else None
    if not isinstance(attributes, dict):
        raise ValueError(f"{group} has no attributes")
    return attributes


def group_digest(group: Path) -> str:
    """Hex digest over every ``zarr.json`` of the group, in name order."""
    digest = hashlib.blake2b(digest_size=16)
    for path in [group / "zarr.json", *sorted(group.glob("*/zarr.json"))]:
        digest.update(path.parent.name.encode() if path.parent != group else b".")
        digest.update(path.read_bytes())
    return digest.hexdigest()


def pack_index(sizes: list[int]) -> bytes:
    """Shard index for chunks of these stored sizes lying one after the other."""
    ends = np.cumsum(np.asarray(sizes, dtype="<u8"))
    table = np.stack([ends - np.asarray(sizes, dtype="<u8"), np.asarray(sizes, "<u8")], axis=1)
    raw = table.astype("<u8").tobytes()
    return raw + struct.pack("<I", crc32c.crc32c(raw))


def unpack_index(raw: bytes | memoryview) -> np.ndarray:
    """Index as uint64 [chunks, 2] (offset, size). Raises ValueError for a wrong checksum."""
    (stored,) = struct.unpack("<I", raw[-4:])
    if crc32c.crc32c(raw[:-4]) != stored:
        raise ValueError("shard index checksum differs")
    table = np.frombuffer(raw[:-4], dtype="<u8").reshape(-1, 2)
    if (table == MISSING).any():
        raise ValueError("shard index lacks a chunk")
    return table


def write_small(group: Path, array: str, values: np.ndarray) -> int:
    """Write a one-chunk array with its trailing CRC-32C; returns the bytes written."""
    raw = np.ascontiguousarray(values).tobytes()
    return small_array_path(group, array).write_bytes(raw + struct.pack("<I", crc32c.crc32c(raw)))


def read_small(group: Path, array: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Read a one-chunk array. Raises OSError (missing) or ValueError (short, checksum)."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = read_checked(small_array_path(group, array), array, size)
    return np.frombuffer(raw, dtype=dtype).reshape(shape)


def read_checked(path: Path, name: str, size: int) -> bytes:
    """``size`` bytes that their CRC-32C follows. Raises OSError or ValueError naming ``name``."""
    raw = path.read_bytes()
    if len(raw) != size + 4:
        raise ValueError(f"{name} has {len(raw)} bytes, expected {size + 4}")
    if crc32c.crc32c(raw[:-4]) != struct.unpack("<I", raw[-4:])[0]:
        raise ValueError(f"{name} checksum differs")
    return raw[:-4]
