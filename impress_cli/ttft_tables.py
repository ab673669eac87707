"""Table and JSON object of ``impress bench ttft``: plain values in. Nothing here prints."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from impress_cli.render import table_of
from impress_cli.units import format_bytes, format_percent, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

    from pipelines.systems import System
    from pipelines.ttft_values import TtftOptions, TtftReport, TtftRow

_MEANS = (
    "hidden_io_s",
    "bookkeeping_s",
    "selected_ratio",
    "loaded_ratio",
    "probe_ratio",
    "fallback_ratio",
)
_OPTIONS = (
    "query_tokens",
    "requests",
    "warm_up",
    "popularity",
    "zipf",
    "retention",
    "budget_share",
    "device_share",
    "seed",
)


def ttft_object(report: TtftReport, options: TtftOptions, model: str) -> dict[str, Any]:
    """JSON object of a report (docs/json.md, ``impress.bench-ttft/1``)."""
    workload = report.workload
    asked = [request.prefix for request in workload.measured]
    return {
        "rows": [_row(row, report, model) for row in report.rows],
        **{name: getattr(options, name) for name in _OPTIONS},
        "queries": None if options.queries is None else str(options.queries),
        "prefixes": [
            {
                "name": prefix.name,
                "tokens": len(prefix.ids),
                "requests": asked.count(number),
                "history": len(prefix.history),
            }
            for number, prefix in enumerate(workload.prefixes)
        ],
        "query_sources": [request.query.source for request in workload.measured],
        "kv_bytes": report.kv_bytes,
        "budget": report.budget._asdict(),
        "reference": report.reference._asdict(),
        "notes": list(report.notes),
        "warnings": list(report.warnings),
    }


def _row(row: TtftRow, report: TtftReport, model: str) -> dict[str, Any]:
    from pipelines.ttft_rows import (
        known_mean,
        mean_of,
        means_of,
        paired_ratio,
        read_amplification,
        ttft_figures,
    )

    samples, ours = row.samples, _ours(report)
    return {
        "system": row.system,
        "model": model,
        **_configuration(row.configuration),
        "disk": row.disk,
        "n": len(samples),
        "ttft_s": ttft_figures(samples),
        "stages_s": means_of(samples, "stages_s"),
        "bytes": means_of(samples, "bytes"),
        "hit": means_of(samples, "hit"),
        "important": means_of(samples, "important"),
        "important_hit": known_mean(sample.important_hit for sample in samples),
        "kl_mean": mean_of(samples, "kl"),
        "kl_max": max(sample.kl for sample in samples),
        "top1": mean_of(samples, "top1"),
        **{name: mean_of(samples, name) for name in _MEANS},
        "read_amplification": read_amplification(samples),
        "ratio_to_impress": None if ours is None else paired_ratio(row, ours),
        "budgets": None if row.budget is None else row.budget._asdict(),
        "layout": None if row.layout is None else row.layout._asdict(),
        "samples": [asdict(sample) for sample in samples],
    }


def _configuration(system: System | None) -> dict[str, Any]:
    """What tells systems of the same layout apart; None for what one has none of."""
    chooses = system if system is not None and system.sparse else None
    return {
        **{name: getattr(chooses, name, None) for name in ("evidence", "attend", "ahead")},
        **{name: getattr(system, name, None) for name in ("policy", "half_life")},
    }


def _ours(report: TtftReport) -> TtftRow | None:
    """The row that the others are compared with, if it was measured."""
    from pipelines.ttft_values import OURS

    return next((row for row in report.rows if row.system == OURS), None)


def ttft_table(report: TtftReport, options: TtftOptions) -> Table:
    """Table of ``impress bench ttft``: one line per system."""
    ours = _ours(report)
    table = table_of(
        "system",
        ">n",
        ">mean",
        ">p50",
        ">p95",
        ">p99",
        *((">ratio",) if ours is not None else ()),
        ">I/O wait",
        ">compute",
        ">disk",
        ">host",
        ">device",
        ">hit",
        ">important",
        ">loaded",
        ">KL",
        ">top-1",
        dense=True,
    )
    for row in report.rows:
        table.add_row(*_cells(row, ours))
    budget, shape = report.budget, report.workload
    ratio = "" if ours is None else "ratio: median of the time as a multiple of impress's; "
    table.caption = (
        f"time to the first token after {len(shape.prefixes)} prefixes with "
        f"{format_bytes(report.kv_bytes)} of KV, {format_percent(options.retention)} kept where "
        f"something is left out; memory of each system {format_bytes(budget.device_bytes)} device "
        f"and {format_bytes(budget.host_bytes)} host; {ratio}I/O wait: for evidence and KV; disk, "
        "host, device: bytes of a request by tier; hit: share of the KV that memory had; "
        "important: of the keys and values of selected tokens; KL: divergence of the first token "
        "from a full load's in nats"
    )
    table.caption_justify = "left"
    return table


def _cells(row: TtftRow, ours: TtftRow | None) -> list[str]:
    from pipelines.ttft_rows import known_mean, mean_of, means_of, paired_ratio, ttft_figures

    samples = row.samples
    times, stages = ttft_figures(samples), means_of(samples, "stages_s")
    amounts, hit = means_of(samples, "bytes"), means_of(samples, "hit")
    ratio = None if ours is None else paired_ratio(row, ours)
    reads, important = bool(hit), known_mean(sample.important_hit for sample in samples)
    return [
        row.system,
        str(len(samples)),
        *(format_seconds(times[name]) for name in ("mean", "p50", "p95", "p99")),
        *([] if ours is None else ["n/a" if ratio is None else f"{ratio:.2f}"]),
        format_seconds(stages["probe"] + stages["load"]),
        format_seconds(stages["compute"] + stages["identify"]),
        *(format_bytes(amounts[tier]) if reads else "–" for tier in ("disk", "host", "device")),
        format_percent(hit["host"] + hit["device"]) if reads else "–",
        "–" if important is None else format_percent(important),
        format_percent(mean_of(samples, "loaded_ratio")) if reads else "–",
        f"{mean_of(samples, 'kl'):.2g}",
        f"{mean_of(samples, 'top1'):.2f}",
    ]


def reference_line(report: TtftReport) -> str | None:
    """How far recomputing is from the full load that the others are compared with."""
    reference = report.reference
    if reference.max_difference is None or reference.kl_max is None:
        return None
    return (
        f"recomputed on {reference.n} requests: logits differ from the full load's by "
        f"{reference.max_difference:.2g} at most, KL {reference.kl_max:.2g} at most"
    )


def disk_lines(report: TtftReport, options: TtftOptions) -> list[str]:
    """What was read otherwise than past the page cache from the disk that is there."""
    io, found = options.io, []
    rate, latency = io.bandwidth_bytes_s, io.latency_s
    slower = [] if rate is None else [f"{format_bytes(rate)}/s"]
    slower += [f"{1000 * latency:g} ms per read"] if latency else []
    if slower:
        found.append(f"a slower disk is emulated: {', '.join(slower)}")
    # The file of diy is read through the page cache by choice, and its pages are dropped before.
    stores = [row for row in report.rows if row.layout is not None]
    cached = [row.system for row in stores if (row.disk or "").startswith("page cache")]
    if cached:
        found.append(
            f"O_DIRECT does not work on this file system: {', '.join(cached)} read through the "
            "page cache, and disk times may be those of memory"
        )
    return found
