"""How far sparse answers are from full ones, and at how many bytes (`impress bench fidelity`).

Every combination of evidence, rows, sets, attention and retention runs through the engine, on the
same stored prefixes and queries, against the same engine that loads everything. All comparisons
are paired: each row keeps its value for every query.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from pipelines.fidelity_cases import document_cases, stored_cases
from pipelines.fidelity_measure import compare, mean_nll, recall
from pipelines.fidelity_store import (
    BenchStores,
    Layout,
    Layouts,
    Outcome,
    layouts_of,
    run_query,
    temporary_stores,
)
from pipelines.fidelity_values import (
    EVIDENCE_ORDER,
    EXACT,
    BenchCase,
    Cases,
    Combination,
    FidelityOptions,
    FidelityReport,
    FidelityRow,
    Pair,
)
from pipelines.progress import Progress, ProgressEvent, silent
from store.errors import InvalidValueError
from store.files import ORDERS, ORIGINAL
from store.itf.importance import column_sums

if TYPE_CHECKING:
    from pipelines.models import LoadedModel
    from store.engine import PrefixStore

#: Of the history's runs, unless a larger one is compared: they should be close to full answers.
_HISTORY_RETENTION = 0.25


def bench_documents(
    model: LoadedModel,
    options: FidelityOptions,
    documents: Path,
    folder: Path,
    progress: Progress = silent,
) -> FidelityReport:
    """Compare on documents, in temporary stores that are gone afterwards.

    Parameters
    ----------
    documents
        Folder of text files.
    folder
        Where the temporary stores go.

    Raises
    ------
    SourceError, PromptError, InvalidValueError
        The documents or questions can't be used.
    StoreFullError
        ``folder`` has no room.
    """
    found = document_cases(model, documents, options.cases)
    layouts = layouts_of(model, options)
    with temporary_stores(model, layouts.values(), found.cases, folder) as stores:
        bench = _Bench(stores, layouts, options, found, progress)
        for number, case in enumerate(found.cases):
            bench.say(f"prefix {number + 1} of {len(found.cases)}: {case.name}")
            stores.put(case)
            bench.remember(case)
            bench.measure(case)
    return bench.report()


def bench_stored(
    model: LoadedModel, options: FidelityOptions, store: PrefixStore, progress: Progress = silent
) -> FidelityReport:
    """Compare on a store's own prefixes and probe data; nothing in the store changes.

    The evidence ``static`` uses what the store's queries so far left.

    Raises
    ------
    SourceError, PromptError, PrefixNotFoundError
        No prefix, or no question, can be used.
    InvalidValueError
        The store has no probe data for an evidence asked for.
    """
    _require_probes(store, options.evidence)
    bits = store.probes().sketch_bits
    found = stored_cases(model, store, options.cases)
    order = stored_order(store, found.cases)
    options = replace(
        options,
        # What a store was reordered by, its own queries left: no case needs a history.
        cases=replace(options.cases, history=max(1, options.cases.history)),
        chunk_tokens=(store.info.chunk_tokens,),
        sketch_bits=() if bits is None else (bits,),
        order=(order,),
    )
    layout = Layout(store.info.chunk_tokens, bits, order=order)
    stores = BenchStores(model, {layout: store.path})
    layouts = {(one.chunk_tokens, one.bits, order): layout for one in options.combinations()}
    bench = _Bench(stores, layouts, options, found, progress)
    for case in found.cases:
        bench.measure(case)
    return bench.report()


def stored_evidence(store: PrefixStore) -> tuple[str, ...]:
    """Evidence that a store has the data for."""
    settings = store.probes()
    lacks = {"sketch": settings.sketch_bits is None, "heads": settings.heads is None}
    return tuple(name for name in EVIDENCE_ORDER if not lacks.get(name, False))


def stored_order(store: PrefixStore, cases: Sequence[BenchCase]) -> str:
    """How the rows of a store's prefixes lie: ``importance`` where any node was reordered."""
    nodes = (node for case in cases for node, _ in store.match(case.prefix_ids).nodes)
    return ORDERS[any(store.order(node.node_id) is not None for node in nodes)]


def _require_probes(store: PrefixStore, evidence: Sequence[str]) -> None:
    for name in evidence:
        if name not in stored_evidence(store):
            raise InvalidValueError(
                f"the store at {store.path} holds no probe data of the kind {name!r}; add it with "
                f"'impress reorder --store {store.path} --probe {name}', or leave {name} out of "
                "--evidence"
            )


@dataclass(slots=True, eq=False)
class _Reference:
    """The full answer to a query; ``importance`` float32 [G, n] per layer, from all keys."""

    outcome: Outcome
    importance: list[torch.Tensor]
    nll: float | None


class _Bench:
    """One comparison under way."""

    def __init__(
        self,
        stores: BenchStores,
        layouts: Layouts,
        options: FidelityOptions,
        found: Cases,
        progress: Progress,
    ) -> None:
        self.stores, self.layouts, self.found = stores, layouts, found
        self.combinations, self.shared = options.combinations(), options.shared
        self.progress = progress
        compared = "static" in options.evidence or options.order != (ORIGINAL,)
        self.warnings = [*found.warnings, *(found.history_notes if compared else ())]
        self.exact: list[Pair] = []
        self.pairs: dict[Combination, list[Pair]] = {one: [] for one in self.combinations}
        self.done = 0
        queries = sum(len(case.queries) for case in found.cases)
        self.total = queries * len(self.combinations)

    def say(self, note: str) -> None:
        """Report progress."""
        self.progress(ProgressEvent("bench fidelity", self.done, self.total, "runs", note))

    def remember(self, case: BenchCase) -> None:
        """Run a case's history in every store whose order, or the evidence static, is by it."""
        known = [
            one for one in self.combinations if one.evidence == "static" or one.order != ORIGINAL
        ]
        retention = max([_HISTORY_RETENTION, *(r.retention for r in known if r.retention < 1.0)])
        for layout in dict.fromkeys(self._layout(one) for one in known):
            self.stores.remember(case, layout, retention)

    def measure(self, case: BenchCase) -> None:
        """Answer each query of a case fully and in every combination."""
        left_out = self._left_out(case)
        for number, query in enumerate(case.queries):
            reference = self._reference(case, query)
            self.exact.append(_exact_pair(case, number, reference))
            for one in self.combinations:
                if one in left_out:
                    continue
                self.say(f"{case.name} · {one.evidence}, {one.attend}, {one.retention:g}")
                pair = self._pair(case, number, query, one, reference)
                self.pairs[one].append(pair)
                self.done += 1
        self.say(case.name)

    def report(self) -> FidelityReport:
        """What was measured so far."""
        first = self.combinations[0]
        size, full = first.chunk_tokens, tuple(self.exact)
        exact = FidelityRow(EXACT, None, None, None, None, size, 1.0, first.order, full)
        rows = [FidelityRow(*one, tuple(pairs)) for one, pairs in self.pairs.items() if pairs]
        prefixes = [(case.name, len(case.prefix_ids)) for case in self.found.cases]
        source = self.found.history_from
        return FidelityReport([exact, *rows], prefixes, self.warnings, source)

    def _left_out(self, case: BenchCase) -> list[Combination]:
        """What needs an earlier query, where none tells what matters in this prefix.

        A store's own order is what it is: only that of temporary stores is by the case's history.
        """
        static = [one for one in self.combinations if one.evidence == "static"]
        if static and self._known(case, static[0]):
            static = []
        by_history = self.found.history_from is not None and not case.history
        ordered = [one for one in self.combinations if by_history and one.order != ORIGINAL]
        for name, left in (("static", static), ("order importance", ordered)):
            if left:
                why = f"{name} was left out, no earlier query is known"
                self.warnings.append(f"{case.name}: {why}")
        found = [one for one in self.combinations if one in static or one in ordered]
        self.total -= len(found) * len(case.queries)
        return found

    def _known(self, case: BenchCase, one: Combination) -> bool:
        """Whether statistics cover a prefix in the store of a combination."""
        with self.stores.open(self._layout(one)) as store:
            for node, used in store.match(case.prefix_ids).nodes:
                known = store.access.get(node.node_id, node.length)
                if known is None or known.observed_tokens < used:
                    return False
        return True

    def _layout(self, one: Combination) -> Layout:
        return self.layouts[one.chunk_tokens, one.bits, one.order]

    def _reference(self, case: BenchCase, query: np.ndarray) -> _Reference:
        importance: list[torch.Tensor] = []
        with self.stores.open(self._layout(self.combinations[0])) as store:
            outcome = run_query(
                store,
                self.stores.model,
                case.prefix_ids,
                query,
                observer=lambda _, *keys: importance.append(column_sums(*keys)),
            )
        return _Reference(outcome, importance, mean_nll(outcome.logits, query))

    def _pair(
        self,
        case: BenchCase,
        number: int,
        query: np.ndarray,
        one: Combination,
        reference: _Reference,
    ) -> Pair:
        sparse = one.sparse(self.shared, seed=len(self.exact))
        with self.stores.open(self._layout(one)) as store:
            outcome = run_query(store, self.stores.model, case.prefix_ids, query, sparse=sparse)
        kl, top1 = compare(reference.outcome.logits, outcome.logits)
        pair = _exact_pair(case, number, reference)._replace(
            kl=kl, top1=top1, nll=mean_nll(outcome.logits, query), bytes=outcome.bytes
        )
        return pair if not outcome.reports else self._with_costs(pair, outcome, reference, case)

    def _with_costs(
        self, pair: Pair, outcome: Outcome, reference: _Reference, case: BenchCase
    ) -> Pair:
        tokens, reports = len(case.prefix_ids), outcome.reports
        kv_bytes = tokens * self.stores.model.shape.token_bytes
        return pair._replace(
            recall=recall(outcome.selected, reference.importance),
            selected_ratio=sum(r.selected_tokens for r in reports) / (len(reports) * tokens),
            touched_ratio=sum(r.chunks_selected for r in reports) / sum(r.chunks for r in reports),
            loaded_ratio=sum(r.chunks_read for r in reports) / sum(2 * r.chunks for r in reports),
            probe_ratio=sum(r.probe_bytes for r in reports) / kv_bytes,
            fallback_ratio=sum(r.fell_back for r in reports) / len(reports),
        )


def _exact_pair(case: BenchCase, number: int, reference: _Reference) -> Pair:
    """A full answer: everything loaded, nothing identified."""
    outcome = reference.outcome
    return Pair(
        case.name, number, 0.0, 1.0, reference.nll, 1.0, 1.0, 1.0, 1.0, 0.0, outcome.bytes, 0.0
    )
