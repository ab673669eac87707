"""Which nodes to store in another order, and what that is estimated to save. Writes nothing.

The paper's section on reordering: tokens of a node are stored by how important past queries found
them, so that what the next query wants lies in fewer chunks. What that saves is estimated from
how often each token was selected, taking tokens as selected independently of each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from store.access import AccessStats, NodeAccess
from store.errors import ChunkLoadError, InvalidValueError, PrefixNotFoundError
from store.files import IMPORTANCE, ORDERS, ORIGINAL
from store.index.mapping import Rows, chunk_count, invert_rows, is_identity

if TYPE_CHECKING:
    from store.engine import PrefixStore
    from store.index.rows import NodeRow

#: Why a node is left alone.
NO_STATISTICS, LOW_GAIN, DAMAGED, AS_ASKED = (
    "no statistics",
    "gain below min-gain",
    "damaged",
    "as asked",
)
MIN_GAIN = 0.05


@dataclass(frozen=True, slots=True)
class ReorderOptions:
    """What order nodes are to have; raises `InvalidValueError` for a value that is not allowed.

    Parameters
    ----------
    order
        ``importance`` by statistics, or ``original``: token order.
    min_gain
        Least share of the chunks touched so far that rewriting a node by importance must save.
    """

    order: str = IMPORTANCE
    min_gain: float = MIN_GAIN

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise InvalidValueError(
                f"order {self.order!r} is not known; use one of {', '.join(ORDERS)}"
            )
        if not 0.0 <= self.min_gain < 1.0:
            raise InvalidValueError(
                f"min-gain {self.min_gain:g} is out of range; use a fraction from 0 up to, not "
                "including, 1, such as 0.05"
            )


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One node: what another order would save, and whether it gets it.

    Parameters
    ----------
    names
        Prefixes that go through the node.
    tokens, chunks
        Its length, and how many chunks that makes in one layer of one array.
    before, after
        Chunks of one layer that a query is expected to touch, mean over the layers: in the
        published order and in the one asked for. None where no query was recorded.
    bytes
        What rewriting takes on disk; 0 where the node is left alone.
    why
        Why it is left alone, None where it is rewritten.
    """

    node_id: str
    names: tuple[str, ...]
    tokens: int
    chunks: int
    before: float | None = None
    after: float | None = None
    bytes: int = 0
    why: str | None = None

    @property
    def gain(self) -> float | None:
        """Share of the touched chunks that the other order saves; negative where it adds some."""
        if self.before is None or self.after is None:
            return None
        return 1.0 - self.after / self.before if self.before > 0 else 0.0


@dataclass(frozen=True, slots=True)
class ReorderPlan:
    """What is to be done, or was done, with each node."""

    nodes: tuple[NodePlan, ...]

    @property
    def rewritten(self) -> int:
        """Nodes that get another order."""
        return sum(node.why is None for node in self.nodes)

    @property
    def bytes(self) -> int:
        """Bytes that this writes."""
        return sum(node.bytes for node in self.nodes)

    @property
    def chunks_before(self) -> float | None:
        """Sum of the nodes' estimates as they are stored; None where no query was recorded."""
        return _total(node.before for node in self.nodes)

    @property
    def chunks_after(self) -> float | None:
        """The same once this is done; a node that is left alone counts as it is."""
        return _total(node.after if node.why is None else node.before for node in self.nodes)


def _total(estimates: Iterable[float | None]) -> float | None:
    known = [estimate for estimate in estimates if estimate is not None]
    return sum(known) if known else None


class Decision(NamedTuple):
    """The plan of a node, and the mapping list it would get: None for token order."""

    plan: NodePlan
    rows: Rows | None


def order_rows(access: NodeAccess) -> Rows:
    """Mapping list that puts what matters first, int32 [layers, n]; ties in token order.

    By moving importance: how many queries selected a token believes too much of the few there are
    (docs/decisions.md).
    """
    order = np.argsort(-access.importance, axis=-1, kind="stable")
    return invert_rows(order.astype(np.int32))


def expected_chunks(access: NodeAccess, rows: Rows | None, chunk_tokens: int) -> float:
    """Chunks of one layer that a query is expected to touch, mean over the layers.

    A chunk is touched unless none of its tokens is selected: ``1 - prod(1 - p)``, with ``p`` the
    share of queries that selected a token, the past ones and one that selects all alike.

    Parameters
    ----------
    rows
        Mapping list, int32 [layers, n]; None for token order.
    """
    # One more query of average tokens: few queries say little about the next one.
    counts = access.selected.astype(np.float64)
    queries = max(access.queries, 1)
    usual = counts.mean(axis=1, keepdims=True) / queries
    # After a split, a node knows only a lower bound of its queries.
    share = np.minimum((counts + usual) / (queries + 1), 1.0)
    with np.errstate(divide="ignore"):  # always selected: never missed
        missed = np.log1p(-share)
    if rows is not None:
        missed = np.take_along_axis(missed, invert_rows(rows).astype(np.int64), axis=1)
    starts = np.arange(0, access.tokens, chunk_tokens)
    touched = -np.expm1(np.add.reduceat(missed, starts, axis=1))
    return float(touched.sum(axis=1).mean())


def plan_reorder(
    store: PrefixStore, options: ReorderOptions, access: AccessStats | None = None
) -> ReorderPlan:
    """What `pipelines.reorder.reorder_store` would do now.

    Parameters
    ----------
    access
        Statistics to go by; those of the store by default.
    """
    store.refresh()
    rows, names = store.nodes(), prefix_names(store)
    stats = store.access if access is None else access
    plans = []
    for row in rows:
        users = names.get(row.node_id, ())
        try:
            plans.append(plan_node(store, row, users, options, stats).plan)
        except ChunkLoadError:
            plans.append(damaged_node(store, row, users))
        except PrefixNotFoundError:
            continue  # removed or split by another process just now
    return ReorderPlan(tuple(plans))


def plan_node(
    store: PrefixStore,
    row: NodeRow,
    names: tuple[str, ...],
    options: ReorderOptions,
    access: AccessStats,
) -> Decision:
    """What to do with one node.

    Raises
    ------
    ChunkLoadError
        Its present order can't be read.
    PrefixNotFoundError
        The node is gone.
    """
    if store.node(row.node_id).bad_from is not None:
        return Decision(damaged_node(store, row, names), None)
    size = store.info.chunk_tokens
    stored = store.order(row.node_id)
    found = access.get(row.node_id, row.length)
    if found is not None and not (found.queries and found.observed_tokens):
        found = None
    wanted = None if options.order == ORIGINAL or found is None else order_rows(found)
    if wanted is not None and is_identity(wanted):
        wanted = None
    before = after = None
    if found is not None:
        before = expected_chunks(found, stored, size)
        after = before if _same(stored, wanted) else expected_chunks(found, wanted, size)
    plan = NodePlan(
        row.node_id, names, row.length, chunk_count(row.length, size), before, after, row.bytes
    )
    return Decision(_decided(plan, options, as_asked=_same(stored, wanted)), wanted)


def _decided(plan: NodePlan, options: ReorderOptions, *, as_asked: bool) -> NodePlan:
    """The plan with why the node is left alone, if it is."""
    why = None
    if options.order == IMPORTANCE and plan.gain is None:
        why = NO_STATISTICS
    elif as_asked:
        why = AS_ASKED
    elif options.order == IMPORTANCE and not _pays(plan.gain, options.min_gain):
        why = LOW_GAIN
    return plan if why is None else replace(plan, bytes=0, why=why)


def _pays(gain: float | None, min_gain: float) -> bool:
    return gain is not None and gain > 0 and gain >= min_gain


def _same(stored: Rows | None, wanted: Rows | None) -> bool:
    """Whether two orders are one; None is token order."""
    if stored is None or wanted is None:
        return stored is wanted
    return np.array_equal(stored, wanted)


def damaged_node(store: PrefixStore, row: NodeRow, names: tuple[str, ...]) -> NodePlan:
    """The plan of a node that can't be read."""
    chunks = chunk_count(row.length, store.info.chunk_tokens)
    return NodePlan(row.node_id, names, row.length, chunks, why=DAMAGED)


def prefix_names(store: PrefixStore) -> Mapping[str, tuple[str, ...]]:
    """Names of the prefixes that go through each node, oldest first."""
    parents = {row.node_id: row.parent_id for row in store.nodes()}
    names: dict[str, list[str]] = {}
    for prefix in store.prefixes():
        node: str | None = prefix.node_id
        while node is not None:
            names.setdefault(node, []).append(prefix.name)
            node = parents.get(node)
    return {node: tuple(users) for node, users in names.items()}
