"""What sidecars hold and where their bytes lie: specs, geometry, Zarr v3 metadata.

Owns names and sizes; it reads and writes no evidence. Files of n tokens, each array in C order::

    probe-sketch/code/c.0.0.0.0    | layer 0: rows x kv_heads x head_dim bytes | layer 1 | ...
    probe-sketch/scale, zero       | layer 0: groups x kv_heads x head_dim halves | layer 1 | ...
    probe-sketch/crc/c.0           CRC-32C of code[l], scale[l], zero[l] as one, per layer l
    probe-heads/k/c.<l>.0.0.0      | n x probe_heads x head_dim keys | their CRC-32C |
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import crc32c
import numpy as np
import zarr
from zarr.codecs import Crc32cCodec

from store.disk import layout as disk_layout
from store.errors import InvalidValueError
from store.itf.sketch import check_bits, code_rows, group_count
from store.types import KVShape

if TYPE_CHECKING:
    from store.info import StoreInfo

PROBE_KINDS = ("sketch", "heads")
#: What the checksum of a sketch covers, in this order.
SKETCH_ARRAYS = ("code", "scale", "zero")
PAGE = 4096


class NodeFacts(Protocol):
    """What a sidecar must agree with: a node of the tree, or its row in the catalog."""

    @property
    def node_id(self) -> str:
        """Its id."""

    @property
    def start(self) -> int:
        """Absolute position of its first token."""

    @property
    def length(self) -> int:
        """Its tokens."""

    @property
    def digest(self) -> str:
        """Digest of its own token ids."""


@dataclass(frozen=True, slots=True)
class ProbeSpec:
    """What a sidecar is made of: ``bits`` of a sketch, or ``heads`` of each layer, ascending."""

    bits: int | None = None
    heads: tuple[tuple[int, ...], ...] | None = None

    @property
    def kind(self) -> str:
        """``sketch`` or ``heads``."""
        return "sketch" if self.heads is None else "heads"

    def to_json(self) -> dict[str, Any]:
        """Attribute of the group and of the store's setting."""
        if self.heads is None:
            return {"bits": self.bits}
        return {"heads": [list(layer) for layer in self.heads]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ProbeSpec:
        """Inverse of `to_json`. Raises KeyError, TypeError or ValueError for anything else."""
        if "heads" in data:
            return cls(heads=tuple(tuple(int(head) for head in layer) for layer in data["heads"]))
        return cls(bits=check_bits(int(data["bits"])))

    @property
    def detail(self) -> str:
        """Canonical JSON text, equal for equal sidecars."""
        return json.dumps(self.to_json(), separators=(",", ":"))

    def check(self, shape: KVShape) -> None:
        """Raise `InvalidValueError` unless a store of this shape can have the sidecar."""
        if self.heads is None:
            check_bits(self.bits or 0)
            return
        if len(self.heads) != shape.num_layers or len({len(layer) for layer in self.heads}) != 1:
            raise InvalidValueError(
                f"probe heads are given for {len(self.heads)} layers; give the same number of "
                f"heads for each of the {shape.num_layers} layers"
            )
        for layer in self.heads:
            if not layer or any(b <= a for a, b in itertools.pairwise(layer)):
                raise InvalidValueError(
                    f"probe heads {list(layer)} are not allowed; name one or more, ascending, "
                    "none twice"
                )
            if layer[0] < 0 or layer[-1] >= shape.num_kv_heads:
                raise InvalidValueError(
                    f"probe heads {list(layer)} are out of range; the model has KV heads 0 to "
                    f"{shape.num_kv_heads - 1}"
                )


@dataclass(frozen=True, slots=True)
class SidecarLayout:
    """Geometry of one sidecar; ``bits`` of a sketch, else ``probe_heads`` keys per token."""

    shape: KVShape
    tokens: int
    bits: int | None
    probe_heads: int

    @classmethod
    def of(cls, shape: KVShape, tokens: int, spec: ProbeSpec) -> SidecarLayout:
        """Geometry for a node of ``tokens`` tokens."""
        return cls(shape, tokens, spec.bits, len(spec.heads[0]) if spec.heads else 0)

    def dims(self, array: str) -> tuple[int, ...]:
        """Shape of a layer of an array that holds evidence."""
        head = (self.shape.num_kv_heads, self.shape.head_dim)
        if self.bits is None:
            return (self.tokens, self.probe_heads, self.shape.head_dim)
        rows = code_rows(self.tokens, self.bits) if array == "code" else group_count(self.tokens)
        return (rows, *head)

    def dtype(self, array: str) -> np.dtype:
        """Storage dtype of an array that holds evidence."""
        if self.bits is None:
            return self.shape.np_dtype
        return np.dtype("u1") if array == "code" else np.dtype("<f2")

    @property
    def arrays(self) -> tuple[str, ...]:
        """Arrays that hold evidence."""
        return SKETCH_ARRAYS if self.bits is not None else ("k",)

    def layer_bytes(self, array: str) -> int:
        """Bytes of one layer of an array, its checksum left out."""
        return int(np.prod(self.dims(array))) * self.dtype(array).itemsize

    @property
    def data_bytes(self) -> int:
        """Bytes of evidence in all layers, without checksums, folders and metadata."""
        return self.shape.num_layers * sum(self.layer_bytes(name) for name in self.arrays)

    @property
    def disk_bytes(self) -> int:
        """What the sidecar takes on disk at most, as ``du`` counts it."""
        layers, names = self.shape.num_layers, len(self.arrays)
        if self.bits is None:
            files = layers * pages(self.layer_bytes("k") + 4)
            # zarr writes each number of the heads on a line of its own.
            metadata = pages(1024 + 32 * layers * (self.probe_heads + 2))
        else:
            files = sum(pages(layers * self.layer_bytes(name)) for name in self.arrays)
            files += pages(4 * layers + 4)
            metadata, names = PAGE, names + 1
        # The group's folder and, for each array, a folder and its zarr.json.
        return files + metadata + PAGE * (1 + 2 * names)


def sidecar_attributes(
    node: NodeFacts, spec: ProbeSpec, info: StoreInfo, identity_digest: str
) -> dict[str, Any]:
    """Attributes of a sidecar's group (format.md)."""
    return {
        "node_id": node.node_id,
        "kind": spec.kind,
        "first_position": node.start,
        "token_digest": node.digest,
        "identity_digest": identity_digest,
        "layout_version": disk_layout.LAYOUT_VERSION,
        "kv_dtype": info.dtype,
        **spec.to_json(),
    }


def create_sidecar(path: Path, layout: SidecarLayout, attributes: dict[str, Any]) -> None:
    """Create the group's metadata at ``path`` (which must not exist); no chunk is written."""
    layers = layout.shape.num_layers
    group = zarr.create_group(path, zarr_format=3, attributes=attributes)
    for name in layout.arrays:
        whole = layout.bits is not None
        group.create_array(
            name,
            shape=(layers, *layout.dims(name)),
            chunks=(layers if whole else 1, *layout.dims(name)),
            dtype=layout.dtype(name),
            compressors=None if whole else [Crc32cCodec()],
            **disk_layout.ARRAY_OPTIONS,
        )
    if layout.bits is not None:
        group.create_array(
            "crc",
            shape=(layers,),
            chunks=(layers,),
            dtype="uint32",
            compressors=[Crc32cCodec()],
            **disk_layout.ARRAY_OPTIONS,
        )


def array_path(group: Path, array: str, layer: int = 0) -> Path:
    """File of an array; ``k`` has one per layer."""
    return group / array / f"c.{layer}.0.0.0"


def sketch_crc(parts: Sequence[np.ndarray]) -> int:
    """CRC-32C of a layer's code, scale and zero as if they lay one after the other."""
    value = 0
    for part in parts:
        value = crc32c.crc32c(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data, value)
    return int(value)


def pages(size: int) -> int:
    """``size`` rounded up to whole pages."""
    return -(-size // PAGE) * PAGE
