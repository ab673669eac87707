"""Store nodes by importance, or back in token order: one node at a time, once or now and then.

What is to be done with a node is `reorder_plan`'s to say; a generation is written and published by
the engine. The writer lock is held for one node at a time, so that other processes can insert what
they compute in between.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pipelines.progress import Progress, ProgressEvent, silent
from pipelines.reorder_plan import (
    NodePlan,
    ReorderOptions,
    ReorderPlan,
    damaged_node,
    plan_node,
    prefix_names,
)
from store.access import AccessStats
from store.errors import (
    ChunkLoadError,
    InvalidValueError,
    PrefixNotFoundError,
    StoreLockedError,
)

if TYPE_CHECKING:
    from store.engine import PrefixStore
    from store.index.rows import NodeRow

log = logging.getLogger(__name__)

#: How long another process may hold the writer lock before a node is given up.
LOCK_WAIT_S = 10.0
#: A store is idle once no query was counted for so long, looked at so often while waiting.
IDLE_S, _STEP_S = 5.0, 1.0


@dataclass(slots=True)
class ReorderReport:
    """What was done with each node that was looked at.

    Attributes
    ----------
    nodes
        Their plans as carried out, ``bytes`` as written.
    failures
        By node why its KV can't be read.
    stopped
        Whether nodes are left for the next run.
    """

    nodes: list[NodePlan] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    stopped: bool = False

    @property
    def plan(self) -> ReorderPlan:
        """The nodes with their sums."""
        return ReorderPlan(tuple(self.nodes))

    @property
    def warnings(self) -> list[str]:
        """One sentence for each node that could not be read."""
        return [f"not reordered: {why}" for why in self.failures.values()]


def reorder_store(
    store: PrefixStore,
    options: ReorderOptions,
    progress: Progress = silent,
    *,
    access: AccessStats | None = None,
    stop: Callable[[], bool] | None = None,
) -> ReorderReport:
    """Give every node the order asked for, where that pays.

    Each node is published by itself, so that what was stopped anywhere goes on where it was. Nodes
    that other processes add meanwhile are looked at too.

    Parameters
    ----------
    access
        Statistics to go by; those of the store by default.
    stop
        Asked before each node; True ends the run.

    Raises
    ------
    StoreLockedError, ReadOnlyStoreError, StoreFullError
        What was changed before stays.
    """
    job = _Job(store, options, store.access if access is None else access)
    seen: set[str] = set()
    store.refresh()
    while rows := [row for row in store.nodes() if row.node_id not in seen]:
        names = prefix_names(store)
        total = len(seen) + len(rows)
        for row in rows:
            users = names.get(row.node_id, ())
            note = users[0] if len(users) == 1 else row.node_id
            progress(ProgressEvent("reorder", len(seen), total, "nodes", note))
            if stop is not None and stop():
                job.report.stopped = True
                return job.report
            seen.add(row.node_id)
            job.run(row, users)
        progress(ProgressEvent("reorder", total, total, "nodes"))
        store.refresh()
    return job.report


class _Job:
    """One run over the nodes, with its report."""

    def __init__(self, store: PrefixStore, options: ReorderOptions, access: AccessStats) -> None:
        self._store, self._options, self._access = store, options, access
        self.report = ReorderReport()

    def run(self, row: NodeRow, names: tuple[str, ...]) -> None:
        """Plan one node and carry it out; a damaged one is quarantined and reported."""
        try:
            plan = self._plan(row, names)
        except PrefixNotFoundError:
            return  # removed or split by another process; the halves are listed by now
        except ChunkLoadError as error:
            self._store.quarantine(error)
            self.report.failures[row.node_id] = str(error)
            plan = damaged_node(self._store, row, names)
        self.report.nodes.append(plan)

    def _plan(self, row: NodeRow, names: tuple[str, ...]) -> NodePlan:
        """What was done with a node. Raises `ChunkLoadError`, `PrefixNotFoundError`."""
        decision = plan_node(self._store, row, names, self._options, self._access)
        if decision.plan.why is not None:
            return decision.plan
        with self._store.writing(LOCK_WAIT_S):
            # Read again: another process may have written before the lock was ours.
            row = self._published(row.node_id)
            plan, rows = plan_node(self._store, row, names, self._options, self._access)
            if plan.why is not None:
                return plan
            return replace(plan, bytes=self._store.reorder(row.node_id, rows))

    def _published(self, node_id: str) -> NodeRow:
        for row in self._store.nodes():
            if row.node_id == node_id:
                return row
        raise PrefixNotFoundError(f"node {node_id} is no longer stored")


def watch(
    store: PrefixStore,
    options: ReorderOptions,
    period_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    stop: Callable[[], bool] = lambda: False,
    on_pass: Callable[[ReorderReport], None] = lambda _report: None,
) -> None:
    """Reorder again and again, only while no queries come in; ends when ``stop`` says so.

    Queries of all processes count, as far as they are in the store's lifetime statistics. Before
    each node it is looked whether one was added during the last `IDLE_S` seconds; if so, the pass
    waits. A pass that another process keeps from writing is left to the next one.

    Parameters
    ----------
    period_s
        Seconds from the beginning of a pass to that of the next.
    clock, sleep
        Monotonic seconds, and how to wait for some of them.
    on_pass
        Gets the report of each pass.

    Raises
    ------
    InvalidValueError
        A period that is no time.
    ReadOnlyStoreError, StoreFullError
    """
    if not period_s > 0:
        raise InvalidValueError(f"a period of {period_s:g} s is not allowed; use more than 0")
    idle = _Idle(store, clock)

    def held_up() -> bool:
        """Wait for an idle store; True once it is time to end."""
        while not stop():
            if idle():
                return False
            sleep(_STEP_S)
        return True

    while not held_up():
        due = clock() + period_s
        try:
            on_pass(reorder_store(store, options, access=_latest(store), stop=held_up))
        except StoreLockedError as error:
            log.warning("this pass was given up: %s", error)
        while not stop() and clock() < due:
            sleep(min(_STEP_S, max(0.0, due - clock())))


def _latest(store: PrefixStore) -> AccessStats:
    """The store's statistics as they lie on disk now.

    What was read once stays in memory, and other processes' queries would never be seen.
    """
    store.access.flush()
    return AccessStats(store.path, store.shape, read_only=True)


class _Idle:
    """Tells whether no query was counted lately; unknown, and so False, in the beginning."""

    def __init__(self, store: PrefixStore, clock: Callable[[], float]) -> None:
        self._store, self._clock = store, clock
        self._queries, self._since = self._count(), clock()

    def __call__(self) -> bool:
        queries = self._count()
        if queries != self._queries:
            self._queries, self._since = queries, self._clock()
        return self._clock() - self._since >= IDLE_S

    def _count(self) -> float:
        return self._store.counters().get("queries", 0.0)
