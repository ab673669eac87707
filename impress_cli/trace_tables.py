"""Table, lines and JSON object of ``impress bench trace``: plain values in. Nothing here prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from impress_cli.units import format_bytes, format_count, format_percent, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

    from pipelines.trace_caches import TraceRow
    from pipelines.trace_values import TraceBenchOptions, TraceReport


def trace_object(report: TraceReport, options: TraceBenchOptions) -> dict[str, Any]:
    """JSON object of a report (docs/json.md, ``impress.bench-trace/1``)."""
    names = ("requests", "blocks", "matched_blocks", "stored_blocks", "nodes", "splits")
    sizes = ("data_bytes", "matched_bytes", "evidence_bytes")
    asked = ("chunk_tokens", "block_tokens", "retention", "layers_sampled", "importance")
    rates = ("half_life", "disk_bytes_s", "host_bytes_s", "seed")
    shape = options.shape
    return {
        "rows": [row._asdict() for row in report.rows],
        "endless": [{**row._asdict(), "held_bytes": held} for row, held in report.endless],
        "infinite_hit_ratio": report.infinite_hit_ratio,
        **{name: getattr(report, name) for name in (*names, *sizes)},
        "evidence_share": options.evidence,
        **{name: getattr(options, name) for name in (*asked, *rates)},
        "kv": {
            "layers": shape.num_layers,
            "kv_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "dtype": shape.dtype,
            "token_bytes": shape.token_bytes,
        },
        "warnings": list(report.notes),
    }


def trace_table(report: TraceReport) -> Table:
    """Table of ``impress bench trace``: one line per cache, sizes apart, then the bound."""
    from impress_cli.render import table_of

    table = table_of(
        ">device",
        ">host",
        "rows by",
        "policy",
        ">on device",
        ">in host",
        ">important",
        ">from disk",
        ">to device",
        ">I/O",
        ">I/O, p99",
    )
    before = None
    for row in (*report.rows, *(row for row, _ in report.endless)):
        size = (row.device_bytes, row.host_bytes)
        if before not in (None, size):
            table.add_section()
        before = size
        table.add_row(*_cells(row))
    table.caption = (
        "on device, in host: share of the chunks used that lay there; important: share of the "
        "selected tokens that lay in either; from disk, to device: bytes per request; I/O: "
        "modelled time per request, mean; endless: a cache that keeps all it ever used"
    )
    table.caption_justify = "left"
    return table


def _cells(row: TraceRow) -> list[str]:
    sizes = [row.device_bytes, row.host_bytes]
    hits = [row.hit_device, row.hit_host, row.important_hit]
    moved = [row.disk_bytes / row.requests, row.host_to_device_bytes / row.requests]
    return [
        *("" if size is None else format_bytes(size) for size in sizes),
        row.order,
        row.policy,
        *("n/a" if hit is None else f"{hit:.3f}" for hit in hits),
        *map(format_bytes, moved),
        *map(format_seconds, (row.io_s, row.io_p99_s)),
    ]


def trace_lines(report: TraceReport, options: TraceBenchOptions, shape: str) -> list[str]:
    """Lines below the table: the trace's own figures, and what was assumed."""
    kv, layers = options.shape, options.shape.num_layers
    rates = [format_bytes(rate) for rate in (options.disk_bytes_s, options.host_bytes_s)]
    loaded = [
        f"{format_percent(row.loaded_ratio)} in order {row.order}"
        for row, _ in report.endless
        if row.loaded_ratio is not None
    ]
    held = ", ".join(f"{format_bytes(held)} ({row.order})" for row, held in report.endless)
    return [
        f"infinite cache: block hit share {report.infinite_hit_ratio:.3f}, "
        f"{format_count(report.matched_blocks)} of {format_count(report.blocks)} blocks in "
        f"{format_count(report.requests)} requests were stored before",
        f"stored in the end: {format_bytes(report.data_bytes)} of KV, "
        f"{format_count(report.stored_blocks)} blocks in {format_count(report.nodes)} nodes; "
        f"{format_count(report.splits)} splits emptied a node; endless holds {held}",
        f"KV of {shape}: {layers} layers, {kv.num_kv_heads} KV heads of {kv.head_dim} in "
        f"{kv.dtype}, {format_bytes(kv.token_bytes)} per token; {options.layers_sampled} of "
        f"{layers} layers replayed, bytes scaled to all",
        f"importance {options.importance}, retention {format_percent(options.retention)}: used of "
        f"the matched KV {', '.join(loaded) or 'nothing'}",
        f"I/O time: bytes from disk at {rates[0]}/s, then bytes to the device, those from disk "
        f"included, at {rates[1]}/s; each request reads {format_percent(options.evidence)} of the "
        "matched KV from disk to choose by",
        "every request counts, from empty caches on; what a request adds is written to disk alone; "
        "a last block that is filled in part counts as a full one",
        *_order_lines(options),
    ]


def _order_lines(options: TraceBenchOptions) -> list[str]:
    if "importance" not in options.orders:
        return []
    return [
        "order importance: rows lie by the weights that requests draw by, from the first one on; a "
        "store has to learn them"
    ]
