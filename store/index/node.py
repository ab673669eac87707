"""Nodes of the radix tree, what a match returns, and the bounded cache of full token ids."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from store.errors import ChunkLoadError
from store.index.ids import Ids, ids_digest

#: Default bound on the full token ids kept in memory, in bytes.
CACHE_BYTES = 64 << 20


@dataclass(slots=True, eq=False)
class PrefixNode:
    """One stored run of tokens. A node that left the tree keeps its facts for who holds it.

    ``ids`` is None until needed and may become None again: read it through `RadixTree.ids_of`.
    ``bad_from`` is the absolute position from which the KV is quarantined, None when all is good.
    """

    node_id: str
    parent: PrefixNode | None = field(repr=False)
    start: int
    length: int
    first_ids: Ids = field(repr=False)
    digest: str
    generation: int
    children: dict[int, PrefixNode] = field(default_factory=dict, repr=False)
    ids: Ids | None = field(default=None, repr=False)
    bad_from: int | None = None

    @property
    def end(self) -> int:
        """Absolute position after the node's last token."""
        return self.start + self.length

    @property
    def good_tokens(self) -> int:
        """Tokens of the node before its quarantine begins, 0 .. length."""
        return self.length if self.bad_from is None else max(0, self.bad_from - self.start)


class MatchedNode(NamedTuple):
    """A node and how many of its tokens (1 .. length) are part of a match."""

    node: PrefixNode
    used: int


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest usable stored beginning of a prompt.

    ``stop`` says why it is not longer: ``complete`` (all ids matched), ``diverged`` (other tokens
    are stored here), ``end_of_tree`` (nothing is stored beyond), ``quarantined`` (known bad KV) or
    ``unreadable`` (the node's tokens could not be loaded; ``error`` says why and which node).
    """

    nodes: tuple[MatchedNode, ...]
    matched_len: int
    stop: str
    error: ChunkLoadError | None = None


class IdsCache:
    """Full token ids of nodes, checked when loaded, kept up to a hard bound in bytes.

    Parameters
    ----------
    load_ids
        Returns a node's own token ids, uint32 [length]; raises `ChunkLoadError`.
    limit_bytes
        Ids used least recently are dropped first; the arrays live on the nodes themselves.
    """

    def __init__(self, load_ids: Callable[[PrefixNode], Ids], limit_bytes: int) -> None:
        self._load_ids = load_ids
        self._limit_bytes = limit_bytes
        self._sizes: OrderedDict[PrefixNode, int] = OrderedDict()
        self._total_bytes = 0

    def get(self, node: PrefixNode, *, keep: bool) -> Ids:
        """Return a node's ids, uint32 [length]; ``keep`` them if they had to be loaded.

        Raises
        ------
        ChunkLoadError
            The ids can't be read, or are not the node's: a stale file must not decide a hit.
        """
        if node.ids is not None:
            if node in self._sizes:
                self._sizes.move_to_end(node)
            return node.ids
        if node.length == len(node.first_ids):
            return node.first_ids
        ids = self._load_ids(node)
        if len(ids) != node.length or ids_digest(ids) != node.digest:
            raise ChunkLoadError(node.node_id, "tokens", -1, -1, node.start, "corrupt")
        if keep:
            self.keep(node, ids)
        return ids

    def keep(self, node: PrefixNode, ids: Ids) -> None:
        """Put a read-only copy of ``ids`` on the node, dropping others to stay in the bound."""
        own = ids.astype(np.uint32, copy=True)
        own.setflags(write=False)
        node.ids = own
        self._sizes[node] = own.nbytes
        self._total_bytes += own.nbytes
        while self._total_bytes > self._limit_bytes:
            oldest, nbytes = self._sizes.popitem(last=False)
            oldest.ids = None
            self._total_bytes -= nbytes

    def forget(self, node: PrefixNode) -> None:
        """Stop counting a node that left the tree; who still holds it keeps its ids."""
        self._total_bytes -= self._sizes.pop(node, 0)

    def problems(self, known: set[PrefixNode]) -> Iterator[str]:
        """Say what is wrong with the accounting, given the nodes of the tree."""
        if sum(self._sizes.values()) != self._total_bytes:
            yield f"cached ids are counted as {self._total_bytes} bytes"
        if self._total_bytes > self._limit_bytes:
            yield f"{self._total_bytes} bytes of ids are cached, {self._limit_bytes} allowed"
        holders = {node for node in known if node.ids is not None}
        if holders != set(self._sizes):
            yield f"{len(holders)} nodes hold ids, {len(self._sizes)} are counted"
        for node in holders:
            if node.ids is not None and ids_digest(node.ids) != node.digest:
                yield f"node {node.node_id} holds ids that differ from its digest"
