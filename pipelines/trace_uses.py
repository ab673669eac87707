"""What a request of a trace uses of each node: how many selected tokens lie in which chunk.

Owns the order of rows inside a node. In order of importance a node's tokens are sorted by their
weights, over the whole node and in each layer: what `impress reorder` would arrive at after many
queries, here from the first on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pipelines.trace_importance import ImportanceModel
from pipelines.trace_index import TraceIndex
from store.index.node import MatchedNode, PrefixMatch, PrefixNode
from store.tier.tiered import Access

#: Bound on the maps from token to chunk that are kept.
_MAP_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class TraceNode:
    """What the tiers know of a node: its name, and chunks of one layer of one array."""

    name: str
    num_chunks: int


class NodeUse(NamedTuple):
    """What a request uses of a node.

    ``important`` counts the selected tokens in each chunk, int64 [layers, chunks]; a chunk that
    has any is used. ``access`` says the same to the tiers; it is made once for all caches.
    """

    important: np.ndarray
    access: Access

    @classmethod
    def of(cls, node: TraceNode, important: np.ndarray, chunk_tokens: int) -> NodeUse:
        """The use of a node. Keys and values are one entry, that of keys; see `trace_caches`."""
        used = np.zeros((len(important), 2, node.num_chunks), dtype=bool)
        used[:, 0] = important > 0
        ratio = (important / chunk_tokens).astype(np.float32)
        return cls(important, Access(node, used, ratio))


class TraceUses:
    """Turns matches into uses, for each order of rows from the same selection.

    Parameters
    ----------
    orders
        Of `store.files.ORDERS`.
    chunk_tokens
        Divides the model's tokens per block, so that nodes begin and end with a chunk.
    """

    def __init__(
        self, index: TraceIndex, model: ImportanceModel, orders: Sequence[str], chunk_tokens: int
    ) -> None:
        self._index, self._model, self._orders = index, model, tuple(orders)
        self._chunk_tokens, self._block_tokens = chunk_tokens, model.weights.shape[2]
        assert self._block_tokens % chunk_tokens == 0
        self._maps: OrderedDict[str, np.ndarray] = OrderedDict()
        self._map_bytes = 0

    def uses(self, request: int, match: PrefixMatch) -> dict[str, list[NodeUse]]:
        """Per order, what request number ``request`` uses of the nodes that it matched."""
        if not match.nodes:
            return {order: [] for order in self._orders}
        parts = [self._index.ids_of(node)[:used] for node, used in match.nodes]
        selected = self._model.select(request, np.concatenate(parts))
        found: dict[str, list[NodeUse]] = {order: [] for order in self._orders}
        at = 0
        for matched in match.nodes:
            end = at + matched.used * self._block_tokens
            for order, uses in found.items():
                uses.append(self._use(matched, selected[:, at:end], order))
            at = end
        return found

    def _use(self, matched: MatchedNode, selected: np.ndarray, order: str) -> NodeUse:
        """Count selected tokens, bool [layers, used tokens], by chunk."""
        chunks = matched.node.length * self._block_tokens // self._chunk_tokens
        important = np.zeros((len(selected), chunks), dtype=np.int64)
        if order == "original":
            counts = selected.reshape(len(selected), -1, self._chunk_tokens).sum(2)
            important[:, : counts.shape[1]] = counts
        else:
            chunk_of = self._chunk_of(matched.node)[:, : selected.shape[1]]
            for layer, (places, chosen) in enumerate(zip(chunk_of, selected, strict=True)):
                important[layer] = np.bincount(places[chosen], minlength=chunks)
        node = TraceNode(matched.node.node_id, chunks)
        return NodeUse.of(node, important, self._chunk_tokens)

    def _chunk_of(self, node: PrefixNode) -> np.ndarray:
        """Chunk that each token of a node lies in, sorted by weight; int32 [layers, tokens]."""
        found = self._maps.pop(node.node_id, None)
        if found is None:
            weights = self._model.weights_of(self._index.ids_of(node))
            by_weight = np.argsort(-weights, axis=1, kind="stable")
            found = np.empty(weights.shape, dtype=np.int32)
            chunk = np.arange(weights.shape[1], dtype=np.int32) // self._chunk_tokens
            np.put_along_axis(found, by_weight, chunk[None], axis=1)
            self._map_bytes += found.nbytes
        self._maps[node.node_id] = found
        while self._map_bytes > _MAP_BYTES and len(self._maps) > 1:
            self._map_bytes -= self._maps.popitem(last=False)[1].nbytes
        return found
