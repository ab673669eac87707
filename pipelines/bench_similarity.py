"""How alike heads choose, layer by layer, and how full of wanted tokens chunks are.

The paper's observations behind its identification and its reordering (`impress bench similarity`),
from one full run per query: nothing is left out, importance is computed on the side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pipelines.fidelity_cases import document_cases, stored_cases
from pipelines.fidelity_store import BenchStores, Layout, run_query, temporary_stores
from pipelines.fidelity_values import BenchCase, CaseOptions, Cases, require_chunk_tokens
from pipelines.progress import Progress, ProgressEvent, silent
from pipelines.similarity_rows import Part, SimilarityRow, head_sums, layer_row, mean_row
from store.itf.options import SparseOptions

if TYPE_CHECKING:
    from pipelines.models import LoadedModel
    from store.engine import PrefixStore
    from store.fetch import Observer


@dataclass(frozen=True, slots=True)
class SimilarityOptions:
    """What is looked at; raises `InvalidValueError` for a value that is not allowed.

    Parameters
    ----------
    retention
        Shares of the prefix that each head selects.
    alpha
        Of the threshold shown beside the agreement.
    chunk_tokens
        Chunk sizes to count wanted tokens in; nothing is stored in them.
    """

    cases: CaseOptions = field(default_factory=CaseOptions)
    retention: tuple[float, ...] = (0.05, 0.1, 0.25, 0.5)
    alpha: float = 0.6
    chunk_tokens: tuple[int, ...] = (16, 64)

    def __post_init__(self) -> None:
        for value in self.retention:
            SparseOptions(retention=value, alpha=self.alpha)
        require_chunk_tokens(self.chunk_tokens)


@dataclass(frozen=True, slots=True)
class SimilarityReport:
    """Result: ``rows`` by layer and retention, ``totals`` by retention.

    ``prefixes`` are names and lengths in tokens.
    """

    rows: list[SimilarityRow]
    totals: list[SimilarityRow]
    prefixes: list[tuple[str, int]]
    warnings: list[str]


def bench_documents(
    model: LoadedModel,
    options: SimilarityOptions,
    documents: Path,
    folder: Path,
    progress: Progress = silent,
) -> SimilarityReport:
    """Look at documents, through a temporary store in ``folder`` that is gone afterwards.

    Raises
    ------
    SourceError, PromptError, InvalidValueError
        The documents can't be used.
    StoreFullError
        ``folder`` has no room.
    """
    found = document_cases(model, documents, options.cases)
    layout = Layout(options.chunk_tokens[0])
    bench = _Bench(options, found, progress)
    with temporary_stores(model, [layout], found.cases, folder) as stores:
        for case in found.cases:
            bench.say(case.name)
            stores.put(case)
            bench.measure(stores, layout, case)
    return bench.report()


def bench_stored(
    model: LoadedModel, options: SimilarityOptions, store: PrefixStore, progress: Progress = silent
) -> SimilarityReport:
    """Look at a store's own prefixes; nothing in the store changes.

    Raises
    ------
    SourceError, PromptError
        No prefix can be used.
    """
    found = stored_cases(model, store, options.cases)
    layout = Layout(store.info.chunk_tokens)
    stores = BenchStores(model, {layout: store.path})
    bench = _Bench(options, found, progress)
    for case in found.cases:
        bench.say(case.name)
        bench.measure(stores, layout, case)
    return bench.report()


class _Bench:
    """One look under way; ``seen`` has one row per query for each layer and retention."""

    def __init__(self, options: SimilarityOptions, found: Cases, progress: Progress) -> None:
        self.options, self.found, self.progress = options, found, progress
        self.seen: dict[tuple[int, float], list[SimilarityRow]] = {}
        self.done = 0

    def say(self, note: str) -> None:
        """Report progress."""
        total = len(self.found.cases)
        self.progress(ProgressEvent("bench similarity", self.done, total, "prefixes", note))

    def measure(self, stores: BenchStores, layout: Layout, case: BenchCase) -> None:
        """Run a case's queries fully and look at every layer."""
        with stores.open(layout) as store:
            parts = [(part.node.start, part.used) for part in store.match(case.prefix_ids).nodes]
            for query in case.queries:
                see = self._observer(parts)
                run_query(store, stores.model, case.prefix_ids, query, observer=see)
        self.done += 1
        self.say(case.name)

    def _observer(self, parts: Sequence[Part]) -> Observer:
        def observe(
            layer: int,
            q: torch.Tensor,
            keys: torch.Tensor,
            k_new: torch.Tensor,
            scaling: float | None,
        ) -> None:
            options, sums = self.options, head_sums(q, keys, k_new, scaling)
            for share in options.retention:
                row = layer_row(
                    layer, share, sums, keys.shape[1], parts, options.alpha, options.chunk_tokens
                )
                self.seen.setdefault((layer, share), []).append(row)

        return observe

    def report(self) -> SimilarityReport:
        """Means over queries, and over layers."""
        queries = sum(len(case.queries) for case in self.found.cases)
        rows = [mean_row(layer, rows, queries) for (layer, _), rows in sorted(self.seen.items())]
        totals = [
            mean_row(None, [row for row in rows if row.retention == share], queries)
            for share in self.options.retention
        ]
        prefixes = [(case.name, len(case.prefix_ids)) for case in self.found.cases]
        return SimilarityReport(rows, totals, prefixes, self.found.warnings)
