"""Ways to answer a task, ready to run: a system on its own open store, with its kept answers.

Owns what a system means for an answer, and what an answer depends on: the key that it is kept
under. Who answers which document when is `evaluate`'s.
"""

from __future__ import annotations

import math
import platform
from contextlib import ExitStack
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pipelines.eval_answers import Answers, Results
from pipelines.eval_fill import node_orders, prefix_history, prefix_order, remembers
from pipelines.eval_score import Pair, Scorer, Written, score_document, write_document
from pipelines.eval_stores import NOTHING_KEPT, EvalStores
from pipelines.eval_tasks import EvalTask
from pipelines.eval_values import (
    NO_PREFIX,
    OURS,
    RANDOM,
    RECOMPUTE,
    STATIC,
    EvalOptions,
    Scored,
    Way,
)
from pipelines.systems import SYSTEMS, System, make_system
from pipelines.ttft_values import Layout
from store.disk.io import IOOptions
from store.errors import StoreLockedError
from store.itf.options import SparseOptions
from store.run_maker import MemoryOptions

if TYPE_CHECKING:
    import numpy as np

    from pipelines.models import LoadedModel
    from store.engine import PrefixStore

#: The way that may answer for `RECOMPUTE`.
FULL_LOAD = "full-load"
#: Evidence that lies in the store beside the keys.
_PROBED = ("auto", "heads", "sketch")
#: Distributions whose versions decide what an answer is.
_DISTRIBUTIONS = ("impress-kv", "torch", "transformers")
#: Apart from each other by more than there are documents: each gets a random set of its own.
_SEED_STEP = 1_000_003
#: Seeds of a random set, which are multiplied by 100 003 for a generator that takes 64 bits.
_SEEDS = 2**64 // 100_003 + 1


class Placed(NamedTuple):
    """Where a store had a prefix when its lane was made: an answer is kept for just that.

    ``nodes`` are ids and generations, ``orders`` what `node_orders` found. In a ``mixed`` one
    chunks hold rows of the prefix among those of a longer one that was stored before.
    """

    ids: np.ndarray
    nodes: list[tuple[str, int]]
    orders: list[tuple[int, str]]
    mixed: bool

    @classmethod
    def of(cls, store: PrefixStore, ids: np.ndarray) -> Placed:
        """Look at the store as it is."""
        # Nodes first: what changes in between is then found to have changed.
        nodes, orders = _nodes(store, ids), node_orders(store, ids)
        mixed = any(
            one.used < one.node.good_tokens and store.order(one.node.node_id) is not None
            for one in store.match(ids).nodes
        )
        return cls(ids, nodes, orders, mixed)

    def holds(self, store: PrefixStore) -> bool:
        """Whether the rows lie where they lay; no file is read unless something was written.

        A match that ends earlier, as damage was met, is no change of the order.
        """
        now = _nodes(store, self.ids)
        if now == self.nodes[: len(now)]:
            return True
        orders = node_orders(store, self.ids)  # a repair leaves them as they were
        return orders == self.orders[: len(orders)]


def _nodes(store: PrefixStore, ids: np.ndarray) -> list[tuple[str, int]]:
    return [(one.node.node_id, one.node.generation) for one in store.match(ids).nodes]


class Lane(NamedTuple):
    """One way to answer a task.

    Parameters
    ----------
    load
        Whether anything stored is used.
    alone
        Whether the question is asked without the prefix.
    asked
        The share asked for, where it is not the way's own.
    placed
        Where the prefix lies; None where no answer depends on that.
    """

    way: Way
    store: PrefixStore
    sparse: SparseOptions
    load: bool
    alone: bool
    asked: float | None
    answers: Answers
    placed: Placed | None = None

    def require_same_order(self) -> None:
        """Raise `StoreLockedError` where rows were moved since the lane was made.

        Answers are kept by the order that rows had then.
        """
        if self.placed is not None and not self.placed.holds(self.store):
            raise StoreLockedError(
                f"the store {self.store.path} was reordered during the evaluation; what was "
                "answered before is kept, run the same command again"
            )

    @property
    def shows_evidence(self) -> bool:
        """Whether an answer that reads no evidence tells that it was lost.

        Not with memory, where evidence may stay.
        """
        kept = self.store.memory.host_bytes or self.store.memory.device_bytes
        return self.sparse.sparse and self.sparse.evidence in _PROBED and not kept

    def answer(self, model: LoadedModel, number: int, document: list[Pair] | Written) -> Scored:
        """Answer a document."""
        sparse = self.sparse
        if self.way.system == RANDOM:
            sparse = replace(sparse, seed=(sparse.seed * _SEED_STEP + number) % _SEEDS)
        scorer = Scorer(self.store, model, sparse, load=self.load)
        scored = (
            write_document(scorer, number, document)
            if isinstance(document, Written)
            else score_document(scorer, number, document)
        )
        selected = 0.0 if self.alone else scored.selected_ratio
        return replace(scored, selected_ratio=selected, asked_ratio=self.asked)


class LaneMaker:
    """Makes lanes; each system's store is opened once, with its policy, and closed by ``stack``."""

    def __init__(
        self,
        stack: ExitStack,
        stores: EvalStores,
        options: EvalOptions,
        results: Results,
        io: IOOptions | None,
        memory: MemoryOptions | None,
    ) -> None:
        self._stack, self._stores, self._options = stack, stores, options
        self._results, self._io, self._memory = results, io or IOOptions(), memory
        self._open: dict[str, PrefixStore] = {}
        self._fixed = {
            "model": stores.model.identity.digest(),
            "device": str(stores.model.device),
            "versions": _versions(),
        }

    def recompute(self, task: EvalTask) -> Lane:
        """Everything is computed, document by document."""
        return self._plain(task, RECOMPUTE, load=False, alone=False)

    def no_prefix(self, task: EvalTask) -> Lane:
        """The question alone."""
        return self._plain(task, NO_PREFIX, load=False, alone=True)

    def full_load(self, task: EvalTask) -> Lane:
        """Everything is loaded."""
        return self._plain(task, FULL_LOAD, load=True, alone=False)

    def _plain(self, task: EvalTask, name: str, *, load: bool, alone: bool) -> Lane:
        store = self._store(FULL_LOAD, self._stores.plainest, SYSTEMS["as-like"])
        key = {"prefix": None if alone else task.prefix_digest, "load": load}
        if load:
            key |= self._conditions()
        return self._lane(Way(task.name, name, None), store, SparseOptions(), key, load, alone)

    def system(self, task: EvalTask, system: System, retention: float | None) -> Lane:
        """A system that uses what is stored; ``retention`` is None for one that loads it all."""
        sparse = system.options(1.0 if retention is None else retention, self._options.base)
        way = Way(task.name, system.name, retention)
        return self._sparse(task, way, system, sparse, None)

    def control(self, task: EvalTask, name: str, retention: float, asked: float) -> Lane:
        """A control of `OURS` at a retention, asked for a share of its own."""
        sparse = replace(
            self._options.base,
            retention=asked,
            evidence=name,
            attend="loaded",
            ahead=False,
            seed=self._options.seed,
        )
        way = Way(task.name, name, retention)
        return self._sparse(task, way, SYSTEMS[OURS], sparse, asked)

    def _sparse(
        self, task: EvalTask, way: Way, system: System, sparse: SparseOptions, asked: float | None
    ) -> Lane:
        layout = Layout.of(system)
        store = self._store(way.system, self._stores.paths[layout], system)
        placed = Placed.of(store, task.prefix.ids)
        key = {
            "prefix": task.prefix_digest,
            "load": True,
            "sparse": asdict(sparse),
            "layout": layout.name,
            "order": prefix_order(store, task.prefix.ids),
            "policy": [system.policy, system.half_life],
            **self._conditions(),
        }
        if sparse.ahead or sparse.evidence == STATIC:
            key["history"] = prefix_history(store, task.prefix.ids)
        lane = self._lane(way, store, sparse, key, True, False, asked)
        return lane._replace(placed=placed)

    def remembers(self, task: EvalTask) -> bool:
        """Whether the store of `OURS` knows what past queries found important of a prefix."""
        system = make_system(OURS)
        store = self._store(OURS, self._stores.paths[Layout.of(system)], system)
        return all(remembers(store, one.node) for one in store.match(task.prefix.ids).nodes)

    def _conditions(self) -> dict[str, Any]:
        """What decides times and bytes of whoever loads."""
        return {"io": asdict(self._io), "memory": asdict(self._memory or NOTHING_KEPT)}

    def _lane(
        self,
        way: Way,
        store: PrefixStore,
        sparse: SparseOptions,
        key: dict[str, Any],
        load: bool,
        alone: bool,
        asked: float | None = None,
    ) -> Lane:
        answers = self._results.answers(way, {**self._fixed, **key})
        return Lane(way, store, sparse, load, alone, asked, answers)

    def _store(self, user: str, path: Path, system: System) -> PrefixStore:
        """The store of a user, opened for it alone, with the memory that everyone gets."""
        if user not in self._open:
            memory = self._memory or NOTHING_KEPT
            memory = replace(memory, policy=system.policy, half_life=system.half_life)
            opened = self._stores.open(path, io=self._io, memory=memory)
            self._open[user] = self._stack.enter_context(opened)
        return self._open[user]


def corrected_share(asked: float, loaded: float, wanted: float) -> float:
    """Share to ask a control for so that it loads ``wanted``, if ``asked`` gave ``loaded``.

    With c tokens of the prefix in a chunk, 1 - (1 - asked)^c of the chunks are loaded: what was
    seen tells c. Where everything was loaded nothing does, and less is asked for in proportion.
    """
    if wanted >= 1.0:
        return 1.0
    if not (0.0 < loaded < 1.0 and asked < 1.0):
        return min(1.0, asked * wanted / loaded) if loaded else asked
    tokens = math.log1p(-loaded) / math.log1p(-asked)
    return -math.expm1(math.log1p(-wanted) / tokens)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
