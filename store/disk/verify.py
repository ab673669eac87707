"""Scrub published generations: compare every stored byte with its checksum.

Reads files whole through the page cache; it decides nothing about what happens to bad data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import crc32c
import numpy as np

from store.disk import layout as disk_layout
from store.disk.layout import KV_ARRAYS, PROBE_PREFIX, NodeLayout
from store.errors import InvalidValueError
from store.index.ids import ids_digest
from store.index.mapping import check_rows


class BadChunk(NamedTuple):
    """One damaged place; ``layer`` and ``chunk`` are -1 where a whole array or shard is meant."""

    node: str
    array: str
    layer: int
    chunk: int
    reason: str


def kv_damage(bad: Iterable[BadChunk]) -> list[BadChunk]:
    """What of the damage is KV or its metadata, and not a sidecar's."""
    return [place for place in bad if not place.array.startswith(PROBE_PREFIX)]


class VerifyReport(NamedTuple):
    """Result of a scrub: what was checked and what is bad."""

    nodes: int
    chunks: int
    bytes: int
    bad: list[BadChunk]


class GroupCheck(NamedTuple):
    """What a group must be: its folder, geometry, and the digests the catalog holds."""

    node_id: str
    group: Path
    layout: NodeLayout
    group_digest: str
    token_digest: str


def verify_group(check: GroupCheck) -> VerifyReport:
    """Check one generation; raises nothing for damage, which is the report's content."""
    bad = [*_check_metadata(check)]
    tables = {name: _check_small(check, f"{name}_crc", bad) for name in KV_ARRAYS}
    tokens = _check_small(check, "tokens", bad)
    if tokens is not None and ids_digest(tokens) != check.token_digest:
        bad.append(BadChunk(check.node_id, "tokens", -1, -1, "token digest differs"))
    rows = _check_small(check, "rows", bad)
    if rows is not None:
        try:
            check_rows(rows, *rows.shape)
        except InvalidValueError:
            bad.append(BadChunk(check.node_id, "rows", -1, -1, "not a permutation"))
    chunks = size = 0
    for name, table in tables.items():
        for layer in range(check.layout.shape.num_layers):
            path = disk_layout.shard_path(check.group, name, layer)
            crcs = None if table is None else table[layer]
            count, found = _check_shard(path, check.layout, crcs)
            size += count
            chunks += check.layout.num_chunks
            bad += [BadChunk(check.node_id, name, layer, chunk, why) for chunk, why in found]
    return VerifyReport(1, chunks, size, bad)


def _check_metadata(check: GroupCheck) -> Iterator[BadChunk]:
    try:
        digest = disk_layout.group_digest(check.group)
    except OSError:
        yield BadChunk(check.node_id, "zarr.json", -1, -1, "missing")
        return
    if digest != check.group_digest:
        yield BadChunk(check.node_id, "zarr.json", -1, -1, "digest differs")


def _check_small(check: GroupCheck, array: str, bad: list[BadChunk]) -> np.ndarray | None:
    layout = check.layout
    dims: dict[str, tuple[str, tuple[int, ...]]] = {
        "tokens": ("<u4", (layout.tokens,)),
        "rows": ("<i4", (layout.shape.num_layers, layout.tokens)),
    }
    table = ("<u4", (layout.shape.num_layers, layout.num_chunks))
    dtype, shape = dims.get(array, table)
    try:
        return disk_layout.read_small(check.group, array, dtype, shape)
    except FileNotFoundError:
        bad.append(BadChunk(check.node_id, array, -1, -1, "missing"))
    except (OSError, ValueError) as error:
        bad.append(BadChunk(check.node_id, array, -1, -1, str(error)))
    return None


def _check_shard(
    path: Path, layout: NodeLayout, crcs: np.ndarray | None
) -> tuple[int, list[tuple[int, str]]]:
    """Bytes of a shard file, and (chunk, reason) of what is bad in it."""
    try:
        raw = memoryview(path.read_bytes())
    except FileNotFoundError:
        return 0, [(-1, "missing")]
    except OSError as error:
        return 0, [(-1, f"io error {error.errno}")]
    if len(raw) < layout.index_bytes:
        return len(raw), [(-1, "short")]
    try:
        index = disk_layout.unpack_index(raw[-layout.index_bytes :])
        problem = _index_problem(index, len(raw), layout)
    except ValueError as error:
        # For uncompressed chunks the places are known without the index: name the chunks too.
        index, problem = _plain_index(layout), str(error)
    found = [(-1, problem)] if problem else []
    if crcs is None or (problem and layout.codec != "none"):
        return len(raw), found
    for chunk, (offset, size) in enumerate(index.tolist()):
        if crc32c.crc32c(raw[offset : offset + size]) != int(crcs[chunk]):
            found.append((chunk, "checksum differs"))
    return len(raw), found


def _plain_index(layout: NodeLayout) -> np.ndarray:
    offsets = np.arange(layout.num_chunks, dtype=np.int64) * layout.chunk_bytes
    return np.stack([offsets, np.full_like(offsets, layout.chunk_bytes)], axis=1)


def _index_problem(index: np.ndarray, size: int, layout: NodeLayout) -> str:
    """Why an index can't be right, or an empty string."""
    ends = np.cumsum(index[:, 1].astype(np.int64))
    if (index[:, 0].astype(np.int64) != ends - index[:, 1].astype(np.int64)).any():
        return "chunks do not lie in order"
    if int(ends[-1]) + layout.index_bytes != size:
        return f"shard has {size} bytes, expected {int(ends[-1]) + layout.index_bytes}"
    return ""
