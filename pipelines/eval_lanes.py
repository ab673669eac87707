"""Ways to answer a task, ready to run: a system on its own open store, with its kept answers.

Owns what a system means for an answer, and what an answer depends on: the key that it is kept
under. Who answers which document when is `evaluate`'s.
"""

from __future__ import annotations

import platform
from contextlib import ExitStack
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pipelines.eval_answers import Answers, Results
from pipelines.eval_fill import prefix_history, prefix_order, remembers
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
from store.itf.options import SparseOptions
from store.run_maker import MemoryOptions

if TYPE_CHECKING:
    from pipelines.models import LoadedModel
    from store.engine import PrefixStore

#: The way that may answer for `RECOMPUTE`.
FULL_LOAD = "full-load"
#: Distributions whose versions decide what an answer is.
_DISTRIBUTIONS = ("impress-kv", "torch", "transformers")
#: Apart from each other by more than there are documents: each gets a random set of its own.
_SEED_STEP = 1_000_003


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
    """

    way: Way
    store: PrefixStore
    sparse: SparseOptions
    load: bool
    alone: bool
    asked: float | None
    answers: Answers

    def answer(self, model: LoadedModel, number: int, document: list[Pair] | Written) -> Scored:
        """Answer a document."""
        sparse = self.sparse
        if self.way.system == RANDOM:
            sparse = replace(sparse, seed=sparse.seed * _SEED_STEP + number)
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
        return self._lane(way, store, sparse, key, True, False, asked)

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


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
