"""Fill the tiers before anybody asks, by what past queries found important (`query --warm`).

Reads chunks of whole nodes, a layer at a time, and offers them; which of them stay is the tiers'.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from store.access import AccessStats
from store.chunk_load import LoadPart
from store.disk.io import MAX_BLOCK, Arena
from store.disk.layout import KV_ARRAYS
from store.disk.reader import ChunkReader, NodeFiles, ShardRead
from store.disk.runs import merge_chunks
from store.index.radix import PrefixNode, RadixTree
from store.index.rows import PrefixRow
from store.settle import introduce
from store.tier.tiered import Fetched, TieredCache

#: Told after each node: nodes done, nodes in all.
NodeProgress = Callable[[int, int], None]


class WarmReport(NamedTuple):
    """Nodes that were offered, those of them that queries had used, bytes read."""

    nodes: int = 0
    known: int = 0
    bytes: int = 0

    def plus(self, other: WarmReport) -> WarmReport:
        """Both together."""
        return WarmReport(*(a + b for a, b in zip(self, other, strict=True)))


def wanted_nodes(
    tree: RadixTree, prefixes: list[PrefixRow], access: AccessStats, count: int
) -> list[PrefixNode]:
    """Nodes of the ``count`` prefixes that most queries used, each once; the newest among equals.

    From the root on, as a query needs them.
    """

    def wanted(row: PrefixRow) -> tuple[int, float]:
        known = access.get(row.node_id, tree.get(row.node_id).length)
        return (0 if known is None else known.queries), row.created

    # Another process may have added one since the tree was read.
    here = [row for row in prefixes if row.node_id in tree]
    rows = sorted(here, key=wanted, reverse=True)[:count]
    paths = (tree.path(tree.get(row.node_id)) for row in rows)
    return list({node.node_id: node for path in paths for node in path}.values())


def warm_node(
    tier: TieredCache, reader: ChunkReader, access: AccessStats, files: NodeFiles
) -> WarmReport:
    """Offer a node: the chunks that queries used, or all where none is known to have.

    Raises `ChunkLoadError`; what was offered before stays.
    """
    known = access.get(files.node_id, files.layout.tokens)
    introduce(tier, LoadPart(files, files.layout.tokens), known)
    used, read = None if known is None else known.loaded > 0, 0
    for layer in range(files.layout.shape.num_layers):
        chunks = _chunks(files, layer, used)
        chunks = chunks[(tier.slots(files, layer)[:, chunks] < 0).any(axis=0)]
        if len(chunks):
            tier.warm([_fetched(reader, files, layer, which, chunks) for which in (0, 1)])
            read += 2 * len(chunks) * files.layout.chunk_bytes
    return WarmReport(1, int(known is not None), read)


def _chunks(files: NodeFiles, layer: int, used: np.ndarray | None) -> np.ndarray:
    """Chunks of a layer that hold a token that was ever loaded; all of them if none is known."""
    if used is None:
        return np.arange(files.num_chunks)
    tokens = np.flatnonzero(used[layer])
    rows = tokens if files.rows is None else files.rows[layer][tokens]
    return np.unique(rows // files.layout.chunk_tokens)


def _fetched(
    reader: ChunkReader, files: NodeFiles, layer: int, which: int, chunks: np.ndarray
) -> Fetched:
    layout, shape = files.layout, files.layout.shape
    size = len(chunks) * layout.chunk_bytes
    # One block more than the data, so that the last read can be widened in place.
    arena = Arena(size + MAX_BLOCK)
    runs = merge_chunks(chunks)
    reader.read(ShardRead(files, KV_ARRAYS[which], layer, runs, arena.view, size))
    flat = torch.from_numpy(arena.array[:size]).view(shape.torch_dtype)
    rows = flat.view(-1, shape.num_kv_heads, shape.head_dim)
    first_rows = np.arange(len(chunks)) * layout.chunk_tokens
    return Fetched(files, layer, which, chunks, rows, first_rows)
