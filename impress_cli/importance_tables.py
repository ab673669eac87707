"""Tables and JSON objects of the benches of importance: plain values in. Nothing here prints."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from impress_cli.render import table_of
from impress_cli.units import format_bytes, format_percent

if TYPE_CHECKING:
    from rich.table import Table

    from pipelines.bench_similarity import SimilarityOptions, SimilarityReport
    from pipelines.fidelity_values import (
        CaseOptions,
        FidelityOptions,
        FidelityReport,
        FidelityRow,
    )
    from pipelines.similarity_rows import SimilarityRow

_MEANS = (
    "top1",
    "nll",
    "recall",
    "selected_ratio",
    "touched_ratio",
    "loaded_ratio",
    "probe_ratio",
    "bytes",
    "fallback_ratio",
)


def fidelity_object(report: FidelityReport, options: FidelityOptions) -> dict[str, Any]:
    """JSON object of a report (docs/json.md, ``impress.bench-fidelity/1``)."""
    shared = options.shared
    return {
        "rows": [_fidelity_row(row) for row in report.rows],
        **_cases(report, options.cases),
        "history_from": report.history_from,
        **{name: getattr(shared, name) for name in ("alpha", "threshold", "fallback")},
    }


def _fidelity_row(row: FidelityRow) -> dict[str, Any]:
    names = (
        "evidence",
        "bits",
        "rows",
        "sets",
        "attend",
        "order",
        "chunk_tokens",
        "retention",
        "n",
    )
    return {
        **{name: getattr(row, name) for name in names},
        "kl_mean": row.mean("kl"),
        "kl_min": row.kl_min,
        "kl_max": row.kl_max,
        **{name: row.nll if name == "nll" else row.mean(name) for name in _MEANS},
        "pairs": [pair._asdict() for pair in row.pairs],
    }


def _cases(report: FidelityReport | SimilarityReport, cases: CaseOptions) -> dict[str, Any]:
    return {
        "prefixes": [{"name": name, "tokens": size} for name, size in report.prefixes],
        "query_tokens": cases.query_tokens,
        "history": cases.history,
        "queries": None if cases.queries is None else str(cases.queries),
        "warnings": list(report.warnings),
    }


def fidelity_table(report: FidelityReport) -> Table:
    """Table of ``impress bench fidelity``: one line per combination.

    Columns say which rows sketches scored and how rows are stored, where they differ in that.
    """
    some_rows = len({row.rows for row in report.rows if row.rows is not None}) > 1
    orders = {row.order for row in report.rows}
    some_orders = len(orders) > 1 or "original" not in orders
    table = table_of(
        "evidence",
        *(("rows",) if some_rows else ()),
        "sets",
        "attend",
        *(("order",) if some_orders else ()),
        ">chunk",
        ">asked",
        ">KL",
        ">min",
        ">max",
        ">top-1",
        ">NLL",
        ">recall",
        *((">touched",) if some_orders else ()),
        ">loaded",
        ">probe",
        ">read",
        ">fell back",
    )
    before = None
    for row in report.rows:
        group = (row.chunk_tokens, row.order, row.retention)
        if before not in (None, group):
            table.add_section()
        before = group
        cells = _fidelity_cells(row, some_orders=some_orders)
        table.add_row(cells[0], *((row.rows or "",) if some_rows else ()), *cells[1:])
    table.caption = (
        f"{report.rows[0].n} queries behind {len(report.prefixes)} prefixes; KL: divergence from "
        "the full answer in nats, mean, least and largest over queries; NLL: per token of the "
        "query; recall: share of the tokens that all keys would have chosen; touched, where shown: "
        "share of the chunks that hold a chosen one; loaded, probe: share of the KV read, as "
        "chunks and as evidence; fell back: share of layers"
    )
    table.caption_justify = "left"
    return table


def _fidelity_cells(row: FidelityRow, *, some_orders: bool) -> list[str]:
    bits = "" if row.bits is None else f", {row.bits} bits"
    return [
        row.evidence + bits,
        row.sets or "",
        row.attend or "",
        *((row.order,) if some_orders else ()),
        str(row.chunk_tokens),
        format_percent(row.retention),
        f"{row.mean('kl'):.3g}",
        f"{row.kl_min:.3g}",
        f"{row.kl_max:.3g}",
        f"{row.mean('top1'):.3f}",
        "n/a" if row.nll is None else f"{row.nll:.3f}",
        f"{row.mean('recall'):.3f}",
        *((format_percent(row.mean("touched_ratio")),) if some_orders else ()),
        format_percent(row.mean("loaded_ratio")),
        format_percent(row.mean("probe_ratio")),
        format_bytes(row.mean("bytes")),
        format_percent(row.mean("fallback_ratio")),
    ]


def similarity_object(report: SimilarityReport, options: SimilarityOptions) -> dict[str, Any]:
    """JSON object of a report (docs/json.md, ``impress.bench-similarity/1``)."""
    totals = [_similarity_row(row) for row in report.totals]
    for total in totals:
        del total["layer"]
    return {
        "rows": [_similarity_row(row) for row in report.rows],
        "totals": totals,
        "alpha": options.alpha,
        **_cases(report, options.cases),
    }


def _similarity_row(row: SimilarityRow) -> dict[str, Any]:
    return {**asdict(row), "chunks": [share._asdict() for share in row.chunks]}


def agreement_table(report: SimilarityReport) -> Table:
    """Agreement of query heads: a line per layer, a column per retention."""
    table = table_of(
        "layer", *(f">{format_percent(total.retention)} kept" for total in report.totals)
    )
    found = {(row.layer, row.retention): row for row in report.rows}
    for layer in sorted({row.layer for row in report.rows if row.layer is not None}):
        cells = [found[layer, total.retention].jaccard_heads for total in report.totals]
        table.add_row(str(layer), *map(_fraction, cells))
    table.add_section()
    table.add_row("threshold", *(_fraction(total.threshold) for total in report.totals))
    table.add_row("random sets", *(_fraction(total.random) for total in report.totals))
    table.caption = "mean pairwise Jaccard of the tokens that the query heads of a layer choose"
    table.caption_justify = "left"
    return table


def totals_table(report: SimilarityReport) -> Table:
    """Means over all layers, a line per retention; useful and touched chunks by size."""
    sizes = [share.chunk_tokens for share in report.totals[0].chunks]
    table = table_of(
        "kept",
        ">heads",
        ">KV heads",
        ">same KV head",
        ">random",
        ">threshold",
        ">above it",
        *(name for size in sizes for name in (f">useful, {size}", f">touched, {size}")),
    )
    for row in report.totals:
        table.add_row(*_total_cells(row))
    table.caption = (
        f"{report.totals[0].n} queries behind {len(report.prefixes)} prefixes, mean over layers: "
        "Jaccard between query heads, between KV heads (their query heads together), between the "
        "query heads of one KV head; above it: share of layers where KV heads agree more than "
        "the threshold; useful: share of a touched chunk's tokens that were chosen; touched: "
        "share of the chunks that hold one; by chunk size in tokens"
    )
    table.caption_justify = "left"
    return table


def _total_cells(row: SimilarityRow) -> list[str]:
    agreed = (row.jaccard_heads, row.jaccard_kv_heads, row.jaccard_within, row.random)
    shares = [(share.useful_ratio, share.touched_ratio) for share in row.chunks]
    return [
        format_percent(row.retention),
        *map(_fraction, agreed),
        _fraction(row.threshold),
        "n/a" if row.above_ratio is None else format_percent(row.above_ratio),
        *(format_percent(value) for pair in shares for value in pair),
    ]


def _fraction(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.2f}"
