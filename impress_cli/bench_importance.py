"""``impress bench fidelity`` and ``impress bench similarity``: is what matters found, and how well?

Owns their options. The runs are `pipelines.bench_fidelity`'s and `bench_similarity`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from impress_cli.bench_inputs import (
    PREFIX_TOKENS,
    ComparedRowsOption,
    DocumentsOption,
    FolderOption,
    HistoryFrom,
    HistoryFromOption,
    HistoryOption,
    MeasuredStoreOption,
    PlotOption,
    PrefixesOption,
    PrefixTokensOption,
    QueriesOption,
    QueryTokensOption,
    Subject,
    numbers,
    picture_title,
    shares,
    words,
)
from impress_cli.options import (
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    ThreadsOption,
)
from impress_cli.retention import (
    AlphaOption,
    Choice,
    FallbackOption,
    ThresholdOption,
    idle,
)
from impress_cli.ui import Ui, ui_of

if TYPE_CHECKING:
    from rich.table import Table

    from pipelines.fidelity_values import FidelityReport
    from pipelines.models import LoadedModel
    from pipelines.progress import Progress
    from store.engine import PrefixStore

HISTORY = 6


def fidelity(
    ctx: typer.Context,
    documents: DocumentsOption = None,
    store: MeasuredStoreOption = None,
    model: ModelOption = None,
    prefix_tokens: PrefixTokensOption = None,
    prefixes: PrefixesOption = 8,
    query_tokens: QueryTokensOption = 64,
    queries: QueriesOption = None,
    history: HistoryOption = None,
    history_from: HistoryFromOption = None,
    retention: Annotated[
        str,
        typer.Option("--retention", metavar="R,…", help="Shares of the prefix to select."),
    ] = "0.1,0.25",
    evidence: Annotated[
        str | None,
        typer.Option(
            "--evidence",
            metavar="NAME,…",
            help="Of full, sketch, heads, static, random. Default: all; of a store, those that it "
            "has probe data for.",
            show_default=False,
        ),
    ] = None,
    sets: Annotated[
        str,
        typer.Option("--sets", metavar="NAME,…", help="one, per-head, or both."),
    ] = "one",
    rows: ComparedRowsOption = None,
    attend: Annotated[
        str,
        typer.Option("--attend", metavar="NAME,…", help="selected, loaded, or both."),
    ] = "selected,loaded",
    alpha: AlphaOption = None,
    threshold: ThresholdOption = None,
    fallback: FallbackOption = None,
    chunk_tokens: Annotated[
        str | None,
        typer.Option(
            "--chunk-tokens",
            metavar="N,…",
            help="Chunk sizes of the temporary stores. Default: 16.",
            show_default=False,
        ),
    ] = None,
    sketch_bits: Annotated[
        str | None,
        typer.Option(
            "--sketch-bits",
            metavar="N,…",
            help="2, 4, or both. Default: 2.",
            show_default=False,
        ),
    ] = None,
    order: Annotated[
        str | None,
        typer.Option(
            "--order",
            metavar="NAME,…",
            help="How rows of the temporary stores lie: original, in token order (default); "
            "importance, reordered by each prefix's history; or both.",
            show_default=False,
        ),
    ] = None,
    directory: FolderOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    plot: PlotOption = None,
    json_output: JsonOption = False,
) -> None:
    """Measure how far answers from part of the KV are from full ones, and the bytes they take.

    Every evidence runs at every retention, on the same prefixes and queries, beside an answer that
    loads everything. KL divergence, top-1 agreement and likelihood say how far; recall says how
    many of the tokens were chosen that all keys would have chosen. The controls know nothing of the
    query: random, and static, which knows what was important to others.
    """
    from impress_cli.importance_tables import fidelity_object, fidelity_table
    from pipelines.bench_fidelity import bench_documents, bench_stored, stored_evidence
    from pipelines.fidelity_values import EVIDENCE_ORDER, CaseOptions, FidelityOptions
    from pipelines.plots import plot_fidelity, require_plots

    ui, subject = ui_of(ctx), Subject(documents, store, model, dtype, device, threads, directory)
    choice = Choice(alpha=alpha, threshold=threshold, fallback=fallback)
    options = FidelityOptions(
        CaseOptions(
            prefix_tokens=PREFIX_TOKENS if prefix_tokens is None else prefix_tokens,
            prefixes=prefixes,
            query_tokens=query_tokens,
            history=HISTORY if history is None else history,
            history_from=(history_from or HistoryFrom.OTHERS).value,
            queries=queries,
        ),
        retention=shares(retention, "--retention"),
        evidence=EVIDENCE_ORDER if evidence is None else words(evidence, "--evidence"),
        sets=words(sets, "--sets"),
        attend=words(attend, "--attend"),
        chunk_tokens=numbers(chunk_tokens or "16", "--chunk-tokens"),
        sketch_bits=numbers(sketch_bits or "2", "--sketch-bits"),
        rows=words("auto" if rows is None else rows, "--rows"),
        order=words(order or "original", "--order"),
        shared=choice.options({}),
    )
    given = [*choice.given(), *([] if rows is None else ["rows"])]
    only_documents = {
        "prefix-tokens": prefix_tokens,
        "history": history,
        "history-from": history_from,
        "chunk-tokens": chunk_tokens,
        "sketch-bits": sketch_bits,
        "order": order,
        "dir": directory,
    }
    subject.check(only_documents)
    if plot is not None:
        require_plots(plot)

    def on_store(loaded: LoadedModel, opened: PrefixStore, progress: Progress) -> FidelityReport:
        held = stored_evidence(opened) if evidence is None else options.evidence
        for name in options.evidence:
            if name not in held:
                ui.note(f"the store holds no probe data of the kind {name!r}: it is left out")
        _note_idle(ui, given, held)
        return bench_stored(loaded, replace(options, evidence=held), opened, progress)

    if store is None:
        _note_idle(ui, given, options.evidence)
    loaded, report = subject.measure(
        ui,
        lambda loaded, texts, folder, progress: bench_documents(
            loaded, options, texts, folder, progress
        ),
        on_store,
    )
    value = subject.json("bench-fidelity", fidelity_object(report, options), loaded)
    _show(ui, report.warnings, value, [] if json_output else [fidelity_table(report)])
    if plot is not None:
        plot_fidelity(report, plot, picture_title(loaded))
        ui.note(f"drawn in {plot}")


def _note_idle(ui: Ui, given: Sequence[str], evidence: Sequence[str]) -> None:
    """Say which of the options given count with none of the evidence that is compared."""
    for text in idle(given, evidence):
        ui.note(text)


def similarity(
    ctx: typer.Context,
    documents: DocumentsOption = None,
    store: MeasuredStoreOption = None,
    model: ModelOption = None,
    prefix_tokens: PrefixTokensOption = None,
    prefixes: PrefixesOption = 8,
    query_tokens: QueryTokensOption = 64,
    retention: Annotated[
        str,
        typer.Option("--retention", metavar="R,…", help="Shares of the prefix each head selects."),
    ] = "0.05,0.1,0.25,0.5",
    alpha: Annotated[
        float, typer.Option("--alpha", metavar="A", help="Of the threshold shown beside.")
    ] = 0.6,
    chunk_tokens: Annotated[
        str,
        typer.Option("--chunk-tokens", metavar="N,…", help="Chunk sizes to count tokens in."),
    ] = "16,64",
    directory: FolderOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    plot: PlotOption = None,
    json_output: JsonOption = False,
) -> None:
    """Measure how alike heads choose, layer by layer, and how full of wanted tokens chunks are.

    Nothing is left out of the answers: each head's choice is computed from all keys. The paper's
    identification rests on heads that agree, its reordering on chunks that hold few wanted tokens.
    """
    from impress_cli.importance_tables import agreement_table, similarity_object, totals_table
    from pipelines.bench_similarity import SimilarityOptions, bench_documents, bench_stored
    from pipelines.fidelity_values import CaseOptions
    from pipelines.plots import plot_similarity, require_plots

    ui, subject = ui_of(ctx), Subject(documents, store, model, dtype, device, threads, directory)
    options = SimilarityOptions(
        CaseOptions(
            PREFIX_TOKENS if prefix_tokens is None else prefix_tokens,
            prefixes,
            query_tokens,
            history=0,
        ),
        shares(retention, "--retention"),
        alpha,
        numbers(chunk_tokens, "--chunk-tokens"),
    )
    subject.check({"prefix-tokens": prefix_tokens, "dir": directory})
    if plot is not None:
        require_plots(plot)
    loaded, report = subject.measure(
        ui,
        lambda loaded, texts, folder, progress: bench_documents(
            loaded, options, texts, folder, progress
        ),
        lambda loaded, opened, progress: bench_stored(loaded, options, opened, progress),
    )
    value = subject.json("bench-similarity", similarity_object(report, options), loaded)
    tables = [] if json_output else [agreement_table(report), totals_table(report)]
    _show(ui, report.warnings, value, tables)
    if plot is not None:
        plot_similarity(report, plot, picture_title(loaded))
        ui.note(f"drawn in {plot}")


def _show(ui: Ui, warnings: list[str], value: dict[str, Any], tables: list[Table]) -> None:
    """Print the tables, or the JSON object where there are none."""
    for text in warnings:
        ui.warn(text)
    for table in tables:
        ui.show(table)
    if not tables:
        ui.json(value)
