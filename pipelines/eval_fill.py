"""Put an evaluation's prefixes into its stores, and their rows in order.

A prefix is computed once, or taken from a store that has it. Rows are ordered by questions that
are not evaluated; orders that a store had before stay. Which stores there are is `eval_stores`'.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pipelines.attention import prefill
from pipelines.eval_answers import Results
from pipelines.eval_stores import EvalStores
from pipelines.eval_tasks import EvalTask
from pipelines.progress import Progress, ProgressEvent
from pipelines.reorder_plan import order_rows
from store.access import AccessStats
from store.errors import ChunkLoadError
from store.files import IMPORTANCE
from store.itf.options import SparseOptions
from store.recorder import RunRecorder
from store.sparse import SparseFetch

if TYPE_CHECKING:
    from pipelines.models import LoadedModel
    from store.disk.writer import LayerKV
    from store.engine import PrefixStore
    from store.index.radix import PrefixNode

#: Share of tokens that the questions select which decide an order.
_RETENTION = 0.25
#: Fact about a node whose rows are being put in order, by whoever holds `Results.ordering`.
_UNDER_WAY = "under way"


def fill_stores(stores: EvalStores, tasks: Sequence[EvalTask], progress: Progress) -> None:
    """Put each prefix where it is not yet, from KV that is there or computed once.

    Raises
    ------
    StoreLockedError, ReadOnlyStoreError, StoreFullError
        What was stored before stays.
    """
    total, done = sum(len(task.prefix.ids) for task in tasks), 0
    for task in tasks:
        progress(ProgressEvent("prefixes", done, total, "tokens", task.name))
        _put(stores, task)
        done += len(task.prefix.ids)
    progress(ProgressEvent("prefixes", total, total, "tokens"))


def _put(stores: EvalStores, task: EvalTask) -> None:
    ids, targets = task.prefix.ids, list(dict.fromkeys(stores.paths.values()))
    with ExitStack() as stack:
        # The named store may have the prefix even where its layout serves nobody.
        paths = dict.fromkeys([*targets, stores.base])
        opened = {path: stack.enter_context(stores.open(path)) for path in paths}
        whole = [one for one in opened.values() if one.match(ids).matched_len == len(ids)]
        lacking = [opened[path] for path in targets if opened[path] not in whole]
        if lacking and not (whole and _copied(whole[0], lacking, task)):
            _compute(lacking[0], stores.model, lacking, task)
        stores.events += [f"{task.prefix.name} was stored in {one.path}" for one in lacking]


def _copied(source: PrefixStore, targets: Sequence[PrefixStore], task: EvalTask) -> bool:
    """Insert the rows that one store has; False where they can't be read."""
    nodes = source.match(task.prefix.ids).nodes
    try:
        readers = [(source.node_rows(one.node.node_id), one.used) for one in nodes]

        def layers(layer: int) -> tuple[np.ndarray, np.ndarray]:
            parts = [reader.head(layer, used) for reader, used in readers]
            return np.concatenate([k for k, _ in parts]), np.concatenate([v for _, v in parts])

        _insert(targets, layers, task)
    except ChunkLoadError as error:
        source.quarantine(error)
        return False
    return True


def _compute(
    through: PrefixStore, model: LoadedModel, targets: Sequence[PrefixStore], task: EvalTask
) -> None:
    ids = task.prefix.ids
    run, _ = through.begin(ids, max_new_tokens=0, load=False, record=False)
    with run:
        prefill(model.model, run, ids, logits=0)
        _insert(targets, lambda layer: run.kv(layer, 0, len(ids)), task)


def _insert(targets: Sequence[PrefixStore], layers: LayerKV, task: EvalTask) -> None:
    prefix = task.prefix
    for store in targets:
        store.insert(prefix.ids, layers, 0, name=prefix.name, source=prefix.source)


class OrderReport(NamedTuple):
    """By task how many questions decided the order of its rows, and what is not as it should be.

    0 questions: no store is to be by importance, or one had its rows in another order before.
    """

    questions: dict[str, int]
    warnings: list[str]


def order_stores(
    stores: EvalStores, tasks: Sequence[EvalTask], results: Results, progress: Progress
) -> OrderReport:
    """Put rows in order in the stores that are to be by importance.

    A row that was in order before stays where it is: the store's owner may have learned its place
    from other queries.
    """
    report = OrderReport({}, [])
    wanted = [path for layout, path in stores.paths.items() if layout.order == IMPORTANCE]
    jobs = [(path, task) for path in wanted for task in tasks]
    for done, (path, task) in enumerate(jobs):
        progress(ProgressEvent("order", done, len(jobs), "prefixes", task.name))
        with stores.open(path) as store, results.ordering(store.info.store_id):
            asked = _Ordering(store, stores.model, task, results).run(report.warnings)
        report.questions[task.name] = min(asked, report.questions.get(task.name, asked))
    progress(ProgressEvent("order", len(jobs), len(jobs), "prefixes"))
    return report


class _Ordering:
    """One prefix of one store."""

    def __init__(
        self, store: PrefixStore, model: LoadedModel, task: EvalTask, results: Results
    ) -> None:
        self._store, self._model, self._task = store, model, task
        self._facts = results.of_store(store.path.name, store.info.store_id)
        self._nodes = [one.node for one in store.match(task.prefix.ids).nodes]

    def run(self, warnings: list[str]) -> int:
        """Order what was never ordered; returns how many questions decided, and adds warnings."""
        name, questions = self._task.prefix.name, self._task.order_questions()
        found = any(self._is_found(node) for node in self._nodes)
        if found:
            warnings.append(
                f"{name}: its rows in {self._store.path} are in an order that this folder of "
                "results knows nothing of, and stay there; unless an evaluation with another "
                "folder (or one since deleted) gave it, the queries behind that order may be those "
                "evaluated"
            )
        todo = [node for node in self._nodes if self._is_todo(node)]
        forgetful = any(not remembers(self._store, node) for node in self._nodes)
        if questions and (todo or forgetful):
            self._order(todo, questions, remember=forgetful)
        elif not questions and not found:
            warnings.append(
                f"{name}: no document is left to order rows by, so that they stay in token order; "
                "give fewer shots with --num-fewshot"
            )
        return 0 if found else len(questions)

    def _noted(self, node: PrefixNode) -> Any:
        return self._facts.get("order", node.node_id)

    def _note(self, node: PrefixNode, value: str) -> None:
        self._facts.note("order", node.node_id, value)

    def _is_todo(self, node: PrefixNode) -> bool:
        noted = self._noted(node)
        if noted == _UNDER_WAY:
            return True
        if self._store.order(node.node_id) is not None:
            return False
        # One whose best order is that of its tokens is done, too.
        return bool(noted != node_order(self._store, node))

    def _is_found(self, node: PrefixNode) -> bool:
        noted = self._noted(node)
        if noted == _UNDER_WAY or self._store.order(node.node_id) is None:
            return False
        return bool(noted != node_order(self._store, node))

    def _order(
        self, todo: Sequence[PrefixNode], questions: Sequence[np.ndarray], *, remember: bool
    ) -> None:
        for node in todo:
            self._note(node, _UNDER_WAY)
            if self._store.order(node.node_id) is not None:
                # Stopped half-way: the questions must meet what they met the first time.
                self._store.reorder(node.node_id, None)
        access = self._asked(questions, remember=remember)
        if remember:
            self._store.access.flush()
        for node in todo:
            known = access.get(node.node_id, node.length)
            assert known is not None, "the questions went through every node of the prefix"
            self._store.reorder(node.node_id, order_rows(known))
        self._nodes = [one.node for one in self._store.match(self._task.prefix.ids).nodes]
        done = {node.node_id for node in todo}
        for node in self._nodes:
            if node.node_id in done:
                self._note(node, node_order(self._store, node))

    def _asked(self, questions: Sequence[np.ndarray], *, remember: bool) -> AccessStats:
        """What the questions found important, by all keys.

        With ``remember`` the store's own statistics learn it, too: those of a store whose rows are
        ordered, and what the control `static` goes by.
        """
        # What lies in no file would be lost for good if it were dropped for its size.
        access = AccessStats(None, self._store.shape, cache_bytes=sys.maxsize)
        recorders = [RunRecorder(access)]
        if remember:
            recorders.append(RunRecorder(self._store.access))
        sparse = SparseOptions(retention=_RETENTION, evidence="full")
        prefix_tokens = len(self._task.prefix.ids)
        for ids in questions:
            run, match = self._store.begin(
                ids, max_new_tokens=0, max_match=prefix_tokens, sparse=sparse, record=False
            )
            with run:
                prefill(self._model.model, run, ids[match.matched_len :], logits=0)
                assert isinstance(run.fetch, SparseFetch)
                for recorder in recorders:
                    recorder.add(run.fetch)
        return access


def remembers(store: PrefixStore, node: PrefixNode) -> bool:
    """Whether a store knows what of a node past queries found important."""
    known = store.access.get(node.node_id, node.length)
    return known is not None and known.observed_tokens > 0


def prefix_history(store: PrefixStore, ids: np.ndarray) -> str:
    """Digest of what past queries found of a prefix: it decides what is read ahead."""
    digest = hashlib.blake2b(digest_size=8)
    for one in store.match(ids).nodes:
        known = store.access.get(one.node.node_id, one.node.length)
        if known is not None:
            digest.update(repr((one.node.start, known.queries, known.observed_tokens)).encode())
            digest.update(known.importance.tobytes() + known.selected.tobytes())
    return digest.hexdigest()


def node_order(store: PrefixStore, node: PrefixNode) -> str:
    """Digest of the order of a node's rows."""
    rows = store.order(node.node_id)
    raw = b"" if rows is None else np.ascontiguousarray(rows, dtype="<i4").tobytes()
    return hashlib.blake2b(raw, digest_size=8).hexdigest()


def node_orders(store: PrefixStore, ids: np.ndarray) -> list[tuple[int, str]]:
    """First token of each node of a prefix and the digest of its order."""
    return [(one.node.start, node_order(store, one.node)) for one in store.match(ids).nodes]


def prefix_order(store: PrefixStore, ids: np.ndarray) -> str:
    """Digest of where a store has the rows of a prefix: it decides which chunks hold which."""
    parts = node_orders(store, ids)
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()
