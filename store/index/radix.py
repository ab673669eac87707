"""Radix tree over token ids: which stored node holds which tokens.

Owns matching, adding and splitting. It knows neither files nor SQLite: full ids come from a
callback, rows come from the catalog. Not thread safe: the engine uses a tree from one thread.

A node covers absolute positions [start, end) of every prefix that runs through it::

    position   0            16             40        64
    root       |== node A ==|=== node B ===|
    children                |=== node C =============|     A has children B and C; their first
                                                           tokens differ
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt

from store.errors import CatalogError, ChunkLoadError, InvalidValueError, PrefixNotFoundError
from store.index.ids import (
    FIRST_IDS,
    Ids,
    as_ids,
    common_length,
    ids_digest,
    node_id,
    pack_ids,
    unpack_ids,
)
from store.index.node import CACHE_BYTES, IdsCache, MatchedNode, PrefixMatch, PrefixNode
from store.index.rows import NodeRow

__all__ = [
    "FIRST_IDS",
    "Ids",
    "MatchedNode",
    "PrefixMatch",
    "PrefixNode",
    "RadixTree",
    "as_ids",
    "ids_digest",
    "node_id",
    "pack_ids",
    "unpack_ids",
]


class RadixTree:
    """All nodes of a store, without KV.

    Parameters
    ----------
    load_ids
        Returns a node's own token ids, uint32 [length]; raises `ChunkLoadError`.
    cache_bytes
        Hard bound on the full ids kept, least recently used first out.

    Attributes
    ----------
    orphans
        Ids of rows that `from_rows` could not place: no parent, a gap, or a place already taken.
    """

    def __init__(
        self, load_ids: Callable[[PrefixNode], Ids], *, cache_bytes: int = CACHE_BYTES
    ) -> None:
        self.orphans: list[str] = []
        self._cache = IdsCache(load_ids, cache_bytes)
        self._nodes: dict[str, PrefixNode] = {}
        self._roots: dict[int, PrefixNode] = {}

    @classmethod
    def from_rows(
        cls,
        rows: Iterable[NodeRow],
        load_ids: Callable[[PrefixNode], Ids],
        *,
        cache_bytes: int = CACHE_BYTES,
    ) -> RadixTree:
        """Build a tree from catalog rows in any order; rows without a place become `orphans`."""
        tree = cls(load_ids, cache_bytes=cache_bytes)
        # A parent starts before its children, so this order links all nodes in one pass and makes
        # every descendant of an orphan an orphan. The id makes the result independent of the order.
        for row in sorted(rows, key=lambda row: (row.start, row.node_id)):
            try:
                tree.add(
                    row.node_id,
                    row.parent_id,
                    row.start,
                    row.length,
                    unpack_ids(row.first_ids),
                    row.digest,
                    row.generation,
                )
            except CatalogError:
                tree.orphans.append(row.node_id)
        return tree

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, node_id: object) -> bool:
        return node_id in self._nodes

    def get(self, node_id: str) -> PrefixNode:
        """Return the node with this id; raises `PrefixNotFoundError`."""
        try:
            return self._nodes[node_id]
        except KeyError:
            raise PrefixNotFoundError(
                f"the store has no node {node_id!r}; 'impress ls' lists what is stored"
            ) from None

    def nodes(self) -> Iterator[PrefixNode]:
        """All nodes, parents before children, children by first token."""
        stack = _by_token(self._roots)
        while stack:
            node = stack.pop()
            yield node
            stack.extend(_by_token(node.children))

    def path(self, node: PrefixNode) -> list[PrefixNode]:
        """Nodes from the root to ``node``, which may have left the tree."""
        path: list[PrefixNode] = []
        step: PrefixNode | None = node
        while step is not None:
            path.append(step)
            step = step.parent
        return path[::-1]

    def ids_of(self, node: PrefixNode) -> Ids:
        """A node's own ids, uint32 [length], read-only; raises `ChunkLoadError`."""
        return self._cache.get(node, keep=self._nodes.get(node.node_id) is node)

    def path_ids(self, node: PrefixNode) -> Ids:
        """All ids from the root to the node's end, uint32 [end]; raises `ChunkLoadError`."""
        return np.concatenate([self.ids_of(step) for step in self.path(node)])

    def match(self, ids: npt.ArrayLike, *, ignore_quarantine: bool = False) -> PrefixMatch:
        """Find the longest stored beginning of ``ids``, halfway into a node if need be.

        Changes nothing but the cache of ids. Compares token ids, at most one child per level.

        Parameters
        ----------
        ids
            uint32 [n].
        ignore_quarantine
            Match what is stored rather than what is usable: an insert needs it, as a quarantined
            node still occupies its place in the tree.
        """
        wanted = as_ids(ids)
        found: list[MatchedNode] = []
        children, at = self._roots, 0
        while at < len(wanted):
            child = children.get(int(wanted[at]))
            if child is None:
                return PrefixMatch(tuple(found), at, "diverged" if children else "end_of_tree")
            good = child.length if ignore_quarantine else child.good_tokens
            try:
                common = self._common(child, wanted[at:], good)
            except ChunkLoadError as error:
                if not (ignore_quarantine and self._restore(child, wanted[at:])):
                    return PrefixMatch(tuple(found), at, "unreadable", error)
                common = child.length
            used = min(common, good)
            if used:
                found.append(MatchedNode(child, used))
            at += used
            if common > good:
                return PrefixMatch(tuple(found), at, "quarantined")
            if common < child.length and at < len(wanted):
                return PrefixMatch(tuple(found), at, "diverged")
            children = child.children
        return PrefixMatch(tuple(found), at, "complete")

    def add(
        self,
        node_id: str,
        parent_id: str | None,
        start: int,
        length: int,
        first_ids: Ids,
        digest: str,
        generation: int,
    ) -> PrefixNode:
        """Add a node at the end of its parent.

        Raises
        ------
        CatalogError
            The id or the place is taken, the parent is missing, or the positions leave a gap.
        """
        parent = self._nodes.get(parent_id) if parent_id is not None else None
        # A copy, because a view would keep the caller's whole array alive.
        own = first_ids.astype(np.uint32, copy=True)
        node = PrefixNode(node_id, parent, start, length, own, digest, generation)
        if parent_id is not None and parent is None:
            problem: str | None = f"its parent {parent_id} is missing"
        else:
            problem = _misfit(node) or self._taken(node)
        if problem:
            raise CatalogError(
                f"node {node_id} can't be placed: {problem}; run 'impress repair' to rebuild the "
                "catalog"
            )
        self._link(node)
        return node

    def remove(self, node_id: str) -> PrefixNode:
        """Take a leaf out of the tree and return it."""
        node = self.get(node_id)
        if node.children:
            raise InvalidValueError(
                f"node {node_id} has {len(node.children)} children; remove them first"
            )
        self._unlink(node)
        return node

    def split(
        self,
        node_id: str,
        at: int,
        upper_id: str,
        lower_id: str,
        *,
        upper_generation: int = 0,
        lower_generation: int = 0,
    ) -> tuple[PrefixNode, PrefixNode]:
        """Replace a node by two; its children move to the lower one::

            node    [start ............... end)   -> children
            upper   [start .... at)
            lower              [at ....... end)   -> children

        Parameters
        ----------
        at
            Absolute position, start < at < end.

        Raises
        ------
        ChunkLoadError
            The node's tokens can't be read; nothing has changed.
        InvalidValueError
            ``at`` lies outside the node.
        """
        old = self.get(node_id)
        if not old.start < at < old.end:
            raise InvalidValueError(
                f"node {node_id} can't be split at {at}; choose a position from "
                f"{old.start + 1} to {old.end - 1}"
            )
        assert upper_id != lower_id
        assert upper_id not in self._nodes
        assert lower_id not in self._nodes
        ids = self.ids_of(old)
        cut = at - old.start
        self._unlink(old)
        upper = _node_of(upper_id, old.parent, old.start, ids[:cut], upper_generation)
        lower = _node_of(lower_id, upper, at, ids[cut:], lower_generation)
        lower.children = dict(old.children)
        for child in lower.children.values():
            child.parent = lower
        if old.bad_from is not None:
            upper.bad_from = old.bad_from if old.bad_from < at else None
            lower.bad_from = max(old.bad_from, at)
        for node, own in ((upper, ids[:cut]), (lower, ids[cut:])):
            self._link(node)
            self._cache.keep(node, own)
        return upper, lower

    def quarantine(self, node_id: str, first_token: int) -> None:
        """Let matches end before ``first_token`` (absolute); the lowest position counts."""
        node = self.get(node_id)
        position = max(first_token, node.start)
        if position < node.end:
            node.bad_from = position if node.bad_from is None else min(node.bad_from, position)

    def clear_quarantine(self, node_id: str) -> None:
        """Let matches use the whole node again."""
        self.get(node_id).bad_from = None

    def check_integrity(self) -> None:
        """Raise `CatalogError` naming the first broken rule of the tree, if there is one."""
        problems = list(self._problems())
        if problems:
            raise CatalogError(
                f"the index has {len(problems)} problems, first: {problems[0]}; run "
                "'impress repair' to rebuild the catalog"
            )

    def _siblings(self, parent: PrefixNode | None) -> dict[int, PrefixNode]:
        return self._roots if parent is None else parent.children

    def _link(self, node: PrefixNode) -> None:
        self._nodes[node.node_id] = node
        self._siblings(node.parent)[int(node.first_ids[0])] = node

    def _unlink(self, node: PrefixNode) -> None:
        del self._nodes[node.node_id]
        del self._siblings(node.parent)[int(node.first_ids[0])]
        self._cache.forget(node)

    def _taken(self, node: PrefixNode) -> str | None:
        """Say what already has a new node's name or place; None when nothing does."""
        if node.node_id in self._nodes:
            return "its id is taken"
        if int(node.first_ids[0]) in self._siblings(node.parent):
            return f"another node begins with token {int(node.first_ids[0])} there"
        return None

    def _common(self, node: PrefixNode, wanted: Ids, good: int) -> int:
        """Count the leading tokens that ``wanted`` and the node share, loading ids only if needed.

        The first ids decide when the prompt parts or ends within them, or when the ``good`` tokens
        end within them.
        """
        first = node.first_ids
        common = common_length(first, wanted)
        if common < len(first) or common in (len(wanted), node.length) or common > good:
            return common
        return common_length(self.ids_of(node), wanted)

    def _restore(self, node: PrefixNode, wanted: Ids) -> bool:
        """Take over tokens from ``wanted`` for a node whose own can't be read.

        Only an insert may: it has computed their KV itself and rewrites the node, so that a
        digest, where a query compares every id, is enough to see that they are the same.
        """
        ids = wanted[: node.length]
        if ids_digest(ids) != node.digest:
            return False
        self._cache.keep(node, ids)
        return True

    def _problems(self) -> Iterator[str]:
        reached = list(self.nodes())
        if len(reached) != len(self._nodes):
            yield f"{len(reached)} of {len(self._nodes)} nodes can be reached from the root"
        for node in reached:
            yield from self._node_problems(node)
        yield from self._cache.problems(set(reached))

    def _node_problems(self, node: PrefixNode) -> Iterator[str]:
        name, parent = f"node {node.node_id}", node.parent
        if self._nodes.get(node.node_id) is not node:
            yield f"{name} is linked but not known by its id"
        if parent is not None and self._nodes.get(parent.node_id) is not parent:
            yield f"{name} has a parent that left the tree"
        if self._siblings(parent).get(int(node.first_ids[0])) is not node:
            yield f"{name} is not found by its first token"
        misfit = _misfit(node)
        if misfit:
            yield f"{name}: {misfit}"
        if node.bad_from is not None and not node.start <= node.bad_from < node.end:
            yield f"{name} is quarantined from {node.bad_from}, outside itself"


def _misfit(node: PrefixNode) -> str | None:
    """Say which of a node's own facts contradict each other or its parent's; None when none do."""
    if node.length < 1 or len(node.first_ids) != min(FIRST_IDS, node.length):
        return f"it has {node.length} tokens and {len(node.first_ids)} first ids"
    expected = 0 if node.parent is None else node.parent.end
    if node.start != expected:
        return f"it starts at {node.start}, where {expected} is expected"
    return None


def _node_of(
    node_id: str, parent: PrefixNode | None, start: int, ids: Ids, generation: int
) -> PrefixNode:
    first_ids = ids[:FIRST_IDS].copy()
    return PrefixNode(node_id, parent, start, len(ids), first_ids, ids_digest(ids), generation)


def _by_token(children: dict[int, PrefixNode]) -> list[PrefixNode]:
    """Children as a stack: the smallest first token is popped first."""
    return [children[token] for token in sorted(children, reverse=True)]
