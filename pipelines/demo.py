"""The demonstration: build the ``demo`` recipe's store, ask its questions both ways, compare.

Each question is answered once by recomputing the prefix and once by loading it, one after the
other and in alternating order, so that drift of the machine hits both ways alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.ask import Prefix, ask
from pipelines.build import BuildReport, build_store
from pipelines.generate import QueryOptions
from pipelines.prefixes import source_from_recipe
from pipelines.progress import Progress, ProgressEvent, silent
from pipelines.recipe import Recipe, load_recipe, shipped_folder
from store.disk.io import IOOptions
from store.engine import PrefixStore
from store.errors import SourceError

if TYPE_CHECKING:
    from pipelines.models import LoadedModel
    from pipelines.prefixes import PrefixItem
    from store.stats import QueryStats

RECIPE = "demo"


@dataclass(frozen=True, slots=True)
class DemoRow:
    """One question: its answer from loaded KV, and the time to the first token both ways."""

    question: str
    answer: str
    recompute_ttft_s: float
    load_ttft_s: float
    same_text: bool
    load_stats: QueryStats

    @property
    def ratio(self) -> float:
        """How many times faster loading was."""
        return self.recompute_ttft_s / self.load_ttft_s


@dataclass(frozen=True, slots=True)
class DemoReport:
    """What the demonstration measured; ``build`` counts what was stored or found."""

    store: Path
    prefix_name: str
    prefix_tokens: int
    build: BuildReport
    rows: tuple[DemoRow, ...]
    notes: tuple[str, ...]

    @property
    def ratio(self) -> float:
        """Median of the rows' ratios."""
        return statistics.median(row.ratio for row in self.rows)


def run_demo(
    store_path: Path,
    model: LoadedModel,
    progress: Progress = silent,
    *,
    recipe: Recipe | None = None,
    io: IOOptions | None = None,
    on_row: Callable[[DemoRow], None] | None = None,
) -> DemoReport:
    """Build (or reuse) the demo store at ``store_path`` and ask its questions.

    Parameters
    ----------
    recipe
        The shipped ``demo`` recipe unless given.
    on_row
        Called after each question.

    Raises
    ------
    SourceError
        The recipe has no question to ask.
    ImpressError
        What building and querying raise.
    """
    chosen = recipe or load_recipe(RECIPE)
    source = source_from_recipe(chosen, shipped_folder())
    with _opened(store_path, model, chosen, io or IOOptions()) as store:
        build = build_store(store, model, source, progress=progress)
        item = _first_with_questions(source.items(model.tokenizer, model.prefix_limit), chosen)
        prefix = Prefix(item.ids, item.name, item.source["template"], "stored")
        questions = list(item.source["queries"])
        ask(store, model, Prefix(item.ids[:0]), "warm up", QueryOptions(max_new_tokens=1))
        rows: list[DemoRow] = []
        longest = chosen.query.max_new_tokens
        for number, question in enumerate(questions):
            progress(ProgressEvent("questions", number, len(questions), "", question))
            row = _compare(store, model, prefix, question, number % 2 == 0, longest)
            rows.append(row)
            if on_row is not None:
                on_row(row)
        progress(ProgressEvent("questions", len(questions), len(questions), ""))
        notes = tuple(store.notes)
    return DemoReport(store_path, item.name, len(item.ids), build, tuple(rows), notes)


def _opened(
    path: Path, model: LoadedModel, recipe: Recipe, io: IOOptions
) -> AbstractContextManager[PrefixStore]:
    if path.exists() and any(path.iterdir()):
        return PrefixStore.open(path, identity=model.identity, io=io, device=str(model.device))
    return PrefixStore.create(
        path,
        identity=model.identity,
        model_spec=model.spec,
        chunk_tokens=recipe.store.chunk_tokens,
        codec=recipe.store.codec,
        io=io,
        device=str(model.device),
    )


def _first_with_questions(items: Iterable[PrefixItem], recipe: Recipe) -> PrefixItem:
    for item in items:
        if item.source.get("queries"):
            return item
    raise SourceError(f"recipe {recipe.name!r} has no prefix with queries; add some under it")


def _compare(
    store: PrefixStore,
    model: LoadedModel,
    prefix: Prefix,
    question: str,
    load_first: bool,
    max_new_tokens: int,
) -> DemoRow:
    plans = ("force-load", "force-recompute")
    answers = {}
    for plan in plans if load_first else plans[::-1]:
        options = QueryOptions(max_new_tokens=max_new_tokens, plan=plan, insert="never")
        answers[plan] = ask(store, model, prefix, question, options)
    loaded, recomputed = answers["force-load"], answers["force-recompute"]
    return DemoRow(
        question,
        loaded.text,
        recomputed.stats.ttft_s,
        loaded.stats.ttft_s,
        loaded.text == recomputed.text,
        loaded.stats,
    )
