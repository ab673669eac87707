"""The demonstration: build the ``demo`` recipe's store, ask its questions three ways, compare.

Each question is answered by recomputing the prefix, by loading all of it, and by loading what
matters (``impress``, at the recipe's retention), one after the other. Who comes first rotates, so
that drift of the machine hits all ways alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.ask import Prefix, ask
from pipelines.build import BuildReport, build_store
from pipelines.generate import QueryOptions
from pipelines.prefixes import source_from_recipe
from pipelines.probes import first_heads, match_probes
from pipelines.progress import Progress, ProgressEvent, silent
from pipelines.recipe import Recipe, load_recipe, shipped_folder
from store.disk.io import IOOptions
from store.engine import PrefixStore
from store.errors import SourceError
from store.itf.options import SparseOptions
from store.run_maker import MemoryOptions

if TYPE_CHECKING:
    from pipelines.generate import Answer
    from pipelines.models import LoadedModel
    from pipelines.prefixes import PrefixItem

RECIPE = "demo"
WAYS = ("recompute", "load", "impress")
_SKETCH_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class DemoRow:
    """One question, answered three ways."""

    question: str
    recomputed: Answer
    loaded: Answer
    impress: Answer

    @property
    def same_text(self) -> bool:
        """Whether a full load says what recomputing says."""
        return self.loaded.text == self.recomputed.text

    @property
    def impress_same_text(self) -> bool:
        """Whether impress says what recomputing says."""
        return self.impress.text == self.recomputed.text

    @property
    def ratio(self) -> float:
        """How many times faster than recomputing a full load was."""
        return self.recomputed.stats.ttft_s / self.loaded.stats.ttft_s

    @property
    def impress_ratio(self) -> float:
        """How many times faster than recomputing impress was."""
        return self.recomputed.stats.ttft_s / self.impress.stats.ttft_s

    @property
    def gain(self) -> float:
        """How many times faster than a full load impress was; below 1 it was slower."""
        return self.loaded.stats.ttft_s / self.impress.stats.ttft_s


@dataclass(frozen=True, slots=True)
class DemoReport:
    """What the demonstration measured; ``build`` counts what was stored or found.

    ``sparse`` is what the third way loads.
    """

    store: Path
    prefix_name: str
    prefix_tokens: int
    build: BuildReport
    sparse: SparseOptions
    rows: tuple[DemoRow, ...]
    notes: tuple[str, ...]

    @property
    def ratio(self) -> float:
        """Median of the rows' ratios."""
        return statistics.median(row.ratio for row in self.rows)

    @property
    def impress_ratio(self) -> float:
        """Median of the rows' ratios of impress."""
        return statistics.median(row.impress_ratio for row in self.rows)

    @property
    def gain(self) -> float:
        """Median of the rows' gains."""
        return statistics.median(row.gain for row in self.rows)


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
        _add_probes(store, chosen, progress)
        build = build_store(store, model, source, progress=progress)
        item = _first_with_questions(source.items(model.tokenizer, model.prefix_limit), chosen)
        prefix = Prefix(item.ids, item.name, item.source["template"], "stored")
        questions = list(item.source["queries"])
        ask(store, model, Prefix(item.ids[:0]), "warm up", QueryOptions(max_new_tokens=1))
        rows: list[DemoRow] = []
        options = _options(chosen)
        for number, question in enumerate(questions):
            progress(ProgressEvent("questions", number, len(questions), "", question))
            row = _compare(store, model, prefix, question, number, options)
            rows.append(row)
            if on_row is not None:
                on_row(row)
        progress(ProgressEvent("questions", len(questions), len(questions), ""))
        notes = tuple(store.notes)
    sparse = options["impress"].sparse
    return DemoReport(store_path, item.name, len(item.ids), build, sparse, tuple(rows), notes)


def _opened(
    path: Path, model: LoadedModel, recipe: Recipe, io: IOOptions
) -> AbstractContextManager[PrefixStore]:
    # Each answer reads from the disk: what stays in memory would make the second one a gift.
    memory = MemoryOptions(host_bytes=_SKETCH_BYTES, sketch_bytes=_SKETCH_BYTES)
    if path.exists() and any(path.iterdir()):
        return PrefixStore.open(
            path, identity=model.identity, io=io, device=str(model.device), memory=memory
        )
    return PrefixStore.create(
        path,
        identity=model.identity,
        model_spec=model.spec,
        chunk_tokens=recipe.store.chunk_tokens,
        codec=recipe.store.codec,
        io=io,
        device=str(model.device),
        memory=memory,
    )


def _first_with_questions(items: Iterable[PrefixItem], recipe: Recipe) -> PrefixItem:
    for item in items:
        if item.source.get("queries"):
            return item
    raise SourceError(f"recipe {recipe.name!r} has no prefix with queries; add some under it")


def _add_probes(store: PrefixStore, recipe: Recipe, progress: Progress) -> None:
    """Give the store the probe layouts that the recipe asks for; one built before has none.

    What it has beside them stays.
    """
    have = store.probes()
    wanted = replace(
        have,
        sketch_bits=have.sketch_bits or (2 if recipe.store.probe in ("sketch", "both") else None),
        heads=have.heads
        or (first_heads(store.shape) if recipe.store.probe in ("heads", "both") else None),
    )
    if wanted != have:
        store.set_probes(wanted)
    match_probes(store, progress, drop=False)


def _options(recipe: Recipe) -> dict[str, QueryOptions]:
    """Options of each way to answer."""
    load = QueryOptions(
        max_new_tokens=recipe.query.max_new_tokens, plan="force-load", insert="never"
    )
    return {
        "recompute": replace(load, plan="force-recompute"),
        "load": load,
        "impress": replace(load, sparse=recipe.query.sparse()),
    }


def _compare(
    store: PrefixStore,
    model: LoadedModel,
    prefix: Prefix,
    question: str,
    number: int,
    options: dict[str, QueryOptions],
) -> DemoRow:
    """Answer one question all ways; question ``number`` begins with another way than the last."""
    first = number % len(WAYS)
    order = WAYS[first:] + WAYS[:first]
    given = {way: ask(store, model, prefix, question, options[way]) for way in order}
    return DemoRow(question, given["recompute"], given["load"], given["impress"])
