"""Open published generations: check that the files are those the index means, then read them.

Owns the cache of `NodeFiles` (checksum tables and mapping lists of nodes in use) and reading a
node's rows whole, which splitting and repair need.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from store.disk import layout as disk_layout
from store.disk.io import MAX_BLOCK, Arena
from store.disk.layout import KV_ARRAYS, NodeLayout
from store.disk.reader import ChunkReader, NodeFiles, ShardRead
from store.disk.runs import ChunkRuns, merge_chunks, one_run
from store.errors import ChunkLoadError
from store.index.ids import Ids
from store.index.mapping import Rows, check_rows, chunk_count, whereabouts
from store.index.radix import PrefixNode
from store.info import StoreInfo

_CACHED_NODES = 256
#: How a generation's rows are stored: in token order, or by a mapping list.
ORIGINAL, IMPORTANCE = ORDERS = ("original", "importance")


def order_name(rows: Rows | None) -> str:
    """The order that a mapping list makes, None for token order; one of `ORDERS`."""
    return ORIGINAL if rows is None else IMPORTANCE


class GroupFacts(NamedTuple):
    """Attributes that only rebuilding a lost catalog reads.

    ``supersedes`` lists the nodes this one was split from, ``prefixes`` [name, length, source] of
    the prefixes that end in it.
    """

    supersedes: list[str]
    prefixes: list[list[Any]]

    def split(self, node_id: str, at: int) -> tuple[GroupFacts, GroupFacts]:
        """Facts of the two halves of node ``node_id``, split at absolute position ``at``."""
        replaced = [node_id, *self.supersedes]
        above = [entry for entry in self.prefixes if entry[1] <= at]
        below = [entry for entry in self.prefixes if entry[1] > at]
        return GroupFacts(replaced, above), GroupFacts(replaced, below)


def node_attributes(
    node: PrefixNode, info: StoreInfo, identity_digest: str, facts: GroupFacts, order: str
) -> dict[str, Any]:
    """Attributes of a node generation's group (format.md); ``order`` is one of `ORDERS`."""
    return {
        "node_id": node.node_id,
        "generation": node.generation,
        "parent_id": node.parent.node_id if node.parent else None,
        "first_position": node.start,
        "token_digest": node.digest,
        "identity_digest": identity_digest,
        "layout_version": disk_layout.LAYOUT_VERSION,
        "kv_dtype": info.dtype,
        "order": order,
        **facts._asdict(),
    }


class FileTable:
    """Validated `NodeFiles` by node, least recently used first out.

    Attributes
    ----------
    dropped
        Set whenever generations may have gone; whoever keeps chunks of them clears it.
    """

    def __init__(self, store: Path, info: StoreInfo, identity_digest: str) -> None:
        self._store, self._info, self._identity_digest = store, info, identity_digest
        self._open: OrderedDict[tuple[str, int], NodeFiles] = OrderedDict()
        self.dropped = False

    def layout(self, tokens: int) -> NodeLayout:
        """Geometry of a node of ``tokens`` tokens in this store."""
        info = self._info
        return NodeLayout(info.identity.shape, tokens, info.chunk_tokens, info.codec)

    def get(self, node: PrefixNode) -> NodeFiles:
        """Files of a node's published generation. Raises `ChunkLoadError`."""
        key = (node.node_id, node.generation)
        files = self._open.get(key)
        if files is None:
            files = self._open[key] = self._load(node)
            if len(self._open) > _CACHED_NODES:
                self._open.popitem(last=False)
        else:
            self._open.move_to_end(key)
        return files

    def group(self, node: PrefixNode) -> Path:
        """Folder of a node's published generation."""
        return disk_layout.generation_dir(self._store, node.node_id, node.generation)

    def supersedes(self, node: PrefixNode) -> list[str]:
        """Nodes that a node was split from; nothing where its group can't be read."""
        group = disk_layout.generation_dir(self._store, node.node_id, node.generation)
        try:
            return [str(name) for name in disk_layout.read_attributes(group)["supersedes"]]
        except (OSError, ValueError, KeyError, TypeError):
            return []

    def clear(self) -> None:
        """Drop everything: the index was read anew."""
        self._open.clear()
        self.dropped = True

    def forget(self, node_id: str) -> None:
        """Drop what is known of a node whose generation was replaced or removed."""
        self.dropped = True
        for key in [key for key in self._open if key[0] == node_id]:
            del self._open[key]

    def _load(self, node: PrefixNode) -> NodeFiles:
        group = disk_layout.generation_dir(self._store, node.node_id, node.generation)
        layout = self.layout(node.length)
        try:
            order = self._check_attributes(group, node)
        except (OSError, ValueError, KeyError) as error:
            raise self._error(node, "zarr.json", error) from error
        table = (layout.shape.num_layers, layout.num_chunks)
        crcs = {}
        for name in KV_ARRAYS:
            try:
                crcs[name] = disk_layout.read_small(group, f"{name}_crc", "<u4", table)
            except (OSError, ValueError) as error:
                raise self._error(node, f"{name}_crc", error) from error
        rows = None if order == ORIGINAL else self._load_rows(group, node, layout)
        return NodeFiles(node.node_id, group, layout, node.start, crcs["k"], crcs["v"], rows)

    def _load_rows(self, group: Path, node: PrefixNode, layout: NodeLayout) -> Rows:
        dims = (layout.shape.num_layers, layout.tokens)
        try:
            return check_rows(disk_layout.read_small(group, "rows", "<i4", dims), *dims)
        except (OSError, ValueError) as error:
            raise self._error(node, "rows", error) from error

    def _check_attributes(self, group: Path, node: PrefixNode) -> str:
        """Compare the group's attributes with the index; returns the order of its rows.

        One that is unknown is refused: rows would be taken for other tokens' KV.
        """
        found = disk_layout.read_attributes(group)
        order = found.get("order")
        if order not in ORDERS:
            raise ValueError(f"order is {order}, expected one of {', '.join(ORDERS)}")
        identity, facts = self._identity_digest, GroupFacts([], [])
        expected = node_attributes(node, self._info, identity, facts, order)
        for name, value in expected.items():
            # A split above changes the parent; the facts are the group's own to say.
            own = ("parent_id", *GroupFacts._fields)
            if name not in own and found.get(name) != value:
                raise ValueError(f"{name} is {found.get(name)}, expected {value}")
        return str(order)

    @staticmethod
    def _error(node: PrefixNode, array: str, error: Exception) -> ChunkLoadError:
        reason = "missing" if isinstance(error, FileNotFoundError) else f"corrupt ({error})"
        return ChunkLoadError(node.node_id, array, -1, -1, node.start, reason)

    def load_ids(self, node: PrefixNode) -> Ids:
        """A node's own token ids, uint32 [length]. Raises `ChunkLoadError`."""
        group = disk_layout.generation_dir(self._store, node.node_id, node.generation)
        try:
            return disk_layout.read_small(group, "tokens", "<u4", (node.length,))
        except (OSError, ValueError) as error:
            raise self._error(node, "tokens", error) from error


class NodeRows:
    """All rows of one node in token order, one layer in memory at a time."""

    def __init__(self, reader: ChunkReader, files: NodeFiles) -> None:
        self._reader, self._files = reader, files
        # One block more than the data, so that the last read can be widened in place.
        size = files.layout.data_bytes + MAX_BLOCK
        self._arenas = [Arena(size) for _ in KV_ARRAYS]

    def layer(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values, each [n, kv_heads, head_dim] in storage dtype; valid until called next.

        Raises `ChunkLoadError`.
        """
        return self.head(layer, self._files.layout.tokens)

    def head(self, layer: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Like `layer`, of the node's first ``tokens`` tokens; reads only chunks that hold them."""
        k, v = (self._array(layer, which, tokens) for which in range(2))
        return k, v

    def keys(self, layer: int) -> np.ndarray:
        """Like `layer`, the keys alone; reads no values."""
        return self._array(layer, 0, self._files.layout.tokens)

    def _array(self, layer: int, which: int, tokens: int) -> np.ndarray:
        rows = self._files.rows
        if rows is None:
            runs = one_run(0, chunk_count(tokens, self._files.layout.chunk_tokens))
            return self._read(layer, which, runs, tokens)
        # Only the chunks that hold those tokens: the others may be what is damaged.
        found = whereabouts(rows[layer, :tokens], self._files.layout.chunk_tokens)
        arriving = int(found.places.max()) + 1
        return self._read(layer, which, merge_chunks(found.chunks), arriving)[found.places]

    def _read(self, layer: int, which: int, runs: ChunkRuns, arriving: int) -> np.ndarray:
        """The first ``arriving`` stored rows of some chunks."""
        shape, arena = self._files.layout.shape, self._arenas[which]
        valid = arriving * shape.row_bytes
        self._reader.read(ShardRead(self._files, KV_ARRAYS[which], layer, runs, arena.view, valid))
        stored = arena.array[:valid].view(shape.np_dtype)
        return stored.reshape(arriving, shape.num_kv_heads, shape.head_dim)
