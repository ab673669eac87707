"""The radix tree of a replayed trace: the store's own index, with one token per block.

Owns which blocks are stored under which node. Nodes are made as the engine makes them: what a
prompt lacks becomes a node below what it matched, and a node is split where prompts part inside
it. A split writes both halves as new nodes, so that whatever was resident of the old one is lost.

The last block of a prompt, unless the prompt fills it, becomes a node of its own::

    prompt      |=== A ===|=== B ===|= C (part)
    nodes       |-------- 1 --------|---- 2 ----|
    next turn   |=== A ===|=== B ===|=== D ===|      goes on behind node 1: no split

The engine matches tokens, not blocks: there the next turn goes on behind the prompt's last token
without a split. One node for all of A, B and C would lose its chunks at each turn instead.
"""

from __future__ import annotations

from pipelines.trace_requests import TraceRequest
from store.index.ids import Ids, ids_digest, node_id
from store.index.radix import FIRST_IDS, PrefixMatch, PrefixNode, RadixTree

#: Stands for the model's identity in the names of nodes.
_IDENTITY = "trace"


class TraceIndex:
    """A tree in memory; positions and lengths count blocks.

    Attributes
    ----------
    names
        Ids of all nodes that are stored now.
    """

    def __init__(self) -> None:
        self._ids: dict[str, Ids] = {}
        self._tree = RadixTree(lambda node: self._ids[node.node_id])

    @property
    def names(self) -> set[str]:
        """Ids of the nodes that are stored now."""
        return set(self._ids)

    @property
    def blocks(self) -> int:
        """Blocks stored."""
        return sum(len(ids) for ids in self._ids.values())

    def ids_of(self, node: PrefixNode) -> Ids:
        """Blocks of a node, uint32 [length]."""
        return self._tree.ids_of(node)

    def match(self, blocks: Ids) -> PrefixMatch:
        """Longest stored beginning of a prompt."""
        return self._tree.match(blocks)

    def insert(self, request: TraceRequest, match: PrefixMatch) -> str | None:
        """Store what a prompt lacks.

        Parameters
        ----------
        match
            Of this prompt, with nothing inserted since.

        Returns
        -------
        The id of the node that was split for it and is gone; None where none was.
        """
        blocks, at = request.blocks, match.matched_len
        if at == len(blocks):
            return None
        parent, gone = self._parent_at(blocks, match)
        for end in sorted({request.whole, len(blocks)}):
            if end > at:
                parent, at = self._add(parent, blocks, at, end), end
        return gone

    def check_integrity(self) -> None:
        """Raise `CatalogError` where the tree breaks its rules, or AssertionError; for tests."""
        self._tree.check_integrity()
        assert {node.node_id: node.length for node in self._tree.nodes()} == {
            name: len(ids) for name, ids in self._ids.items()
        }

    def _parent_at(self, blocks: Ids, match: PrefixMatch) -> tuple[PrefixNode | None, str | None]:
        """The node that new ones hang below; splits the last matched one if they part inside it."""
        if not match.nodes:
            return None, None
        node, used = match.nodes[-1]
        if used == node.length:
            return node, None
        ids, at = self.ids_of(node), node.start + used
        upper_id = node_id(_IDENTITY, blocks[:at], node.start)
        lower_id = node_id(_IDENTITY, self._tree.path_ids(node), at)
        upper, lower = self._tree.split(node.node_id, at, upper_id, lower_id)
        del self._ids[node.node_id]
        self._ids[upper.node_id], self._ids[lower.node_id] = ids[:used], ids[used:]
        return upper, node.node_id

    def _add(self, parent: PrefixNode | None, blocks: Ids, start: int, end: int) -> PrefixNode:
        own, name = blocks[start:end], node_id(_IDENTITY, blocks[:end], start)
        self._ids[name] = own
        above = None if parent is None else parent.node_id
        return self._tree.add(
            name, above, start, len(own), own[:FIRST_IDS], ids_digest(own), generation=1
        )
