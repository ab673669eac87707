"""``impress bench trace``: what a request trace would find in memory, by policy and size.

Owns its options, its JSON object and its table. The replay is `pipelines.bench_trace`'s.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from impress_cli.bench_inputs import words
from impress_cli.options import JsonOption
from impress_cli.ui import Ui, ui_of
from impress_cli.units import (
    format_bytes,
    format_count,
    format_percent,
    format_seconds,
    parse_rate,
    parse_retention,
    parse_size,
)
from store.errors import InvalidValueError

if TYPE_CHECKING:
    from rich.table import Table

    from pipelines.trace_caches import TraceRow
    from pipelines.trace_values import TierSizes, TraceBenchOptions, TraceReport

_MEASURED = "measured"


def trace(
    ctx: typer.Context,
    file: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE", help="JSON lines with hash_ids: equal ids, equal blocks of tokens."
        ),
    ],
    shape: Annotated[
        str,
        typer.Option(
            "--shape",
            metavar="SHAPE",
            help="Whose KV: opt-30b, llama-3-8b, … (a wrong name lists all), or a model's folder.",
        ),
    ] = "opt-30b",
    policies: Annotated[
        str, typer.Option("--policies", metavar="NAME,…", help="Of lru, lfu, score.")
    ] = "lru,lfu,score",
    sizes: Annotated[
        str,
        typer.Option(
            "--sizes",
            metavar="DEVICE+HOST,…",
            help="Memory for chunks; 0 for no tier, one size alone is host memory.",
        ),
    ] = "2.5GB+8GB,10GB+32GB,40GB+128GB",
    order: Annotated[
        str,
        typer.Option(
            "--order",
            metavar="NAME,…",
            help="Rows of a node: importance (reordered), original (token order), or both.",
        ),
    ] = "importance",
    retention: Annotated[
        str, typer.Option("--retention", metavar="R", help="Share of the matched tokens to select.")
    ] = "0.25",
    importance: Annotated[
        str,
        typer.Option(
            "--importance",
            metavar="MODEL",
            help="Which tokens matter: zipf, uniform, or measured:STORE, as that store's "
            "statistics say.",
        ),
    ] = "zipf",
    half_life: Annotated[
        float | None,
        typer.Option(
            "--half-life",
            metavar="N",
            help="Requests after which an access counts half in the policy score. Default: never.",
            show_default=False,
        ),
    ] = None,
    evidence_share: Annotated[
        str | None,
        typer.Option(
            "--evidence-share",
            metavar="R",
            help="Share of the matched KV that each request reads from disk to choose by. "
            "Default: that of probe heads; 0 where sketches lie in memory.",
            show_default=False,
        ),
    ] = None,
    disk_bandwidth: Annotated[
        str, typer.Option("--disk-bandwidth", metavar="RATE", help="From disk to host memory.")
    ] = "5GB/s",
    host_bandwidth: Annotated[
        str, typer.Option("--host-bandwidth", metavar="RATE", help="From there to the device.")
    ] = "25GB/s",
    chunk_tokens: Annotated[
        int, typer.Option("--chunk-tokens", metavar="N", help="Tokens of a chunk.")
    ] = 64,
    block_tokens: Annotated[
        int, typer.Option("--block-tokens", metavar="N", help="Tokens of a block of the trace.")
    ] = 512,
    layers_sampled: Annotated[
        int,
        typer.Option("--layers-sampled", metavar="N", help="Layers to replay, scaled to all."),
    ] = 2,
    requests: Annotated[
        int | None,
        typer.Option(
            "--requests",
            metavar="N",
            help="Replay the first N requests. Default: all.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the model of importance.")] = 1,
    json_output: JsonOption = False,
) -> None:
    """Replay a request trace through the index, the tiers and the policies, without a model.

    Hit rates, bytes and modelled I/O time for each policy and cache size, at any scale: no KV is
    computed or stored. Which tokens of a prefix matter to a request comes from a model of
    importance, or from the statistics of a store.
    """
    from impress_cli.envelope import envelope
    from pipelines.trace_shapes import kv_shape
    from pipelines.trace_values import TraceBenchOptions

    ui = ui_of(ctx)
    model, _, store = importance.partition(":")
    if (model == _MEASURED) != bool(store):
        raise InvalidValueError(
            f"--importance {importance!r} is not known; use zipf, uniform or measured:STORE"
        )
    options = TraceBenchOptions(
        kv_shape(shape),
        chunk_tokens=chunk_tokens,
        block_tokens=block_tokens,
        retention=parse_retention(retention, "--retention"),
        policies=words(policies, "--policies"),
        sizes=tuple(parse_tiers(text) for text in words(sizes, "--sizes")),
        orders=words(order, "--order"),
        layers_sampled=layers_sampled,
        evidence_share=None if evidence_share is None else _share(evidence_share),
        disk_bytes_s=parse_rate(disk_bandwidth, "--disk-bandwidth"),
        host_bytes_s=parse_rate(host_bandwidth, "--host-bandwidth"),
        importance=model,
        half_life=half_life,
        requests=requests,
        seed=seed,
    )
    report = _replay(ui, file, options, Path(store) if store else None)
    for text in report.notes:
        ui.warn(text)
    if json_output:
        given = {"trace": str(file), "shape": shape, "store": store or None}
        ui.json(envelope("bench-trace", {**trace_object(report, options), **given}))
        return
    ui.show(trace_table(report))
    for text in trace_lines(report, options, shape):
        ui.line(text)


def _replay(ui: Ui, file: Path, options: TraceBenchOptions, store: Path | None) -> TraceReport:
    from impress_cli.session import opened_store
    from pipelines.bench_trace import bench_trace

    opening = nullcontext() if store is None else opened_store(ui, store)
    with opening as opened, ui.progress() as progress:
        return bench_trace(file, options, opened, progress)


def parse_tiers(text: str) -> TierSizes:
    """Bytes of both tiers from ``10GB+32GB`` or ``32GB``. Raises InvalidValueError."""
    from pipelines.trace_values import TierSizes

    parts = [part.strip() for part in text.split("+")]
    if len(parts) > 2:
        raise InvalidValueError(
            f"--sizes {text!r} has {len(parts)} tiers; write device and host, as in 10GB+32GB"
        )
    host, device = parts[-1], parts[0] if len(parts) == 2 else "0"
    tiers = (0 if part == "0" else parse_size(part, "--sizes") for part in (device, host))
    return TierSizes(*tiers)


def _share(text: str) -> float:
    """A fraction from 0 to 1."""
    zero = text.strip().removesuffix("%").strip("0.") == "" and "0" in text
    return 0.0 if zero else parse_retention(text, "--evidence-share")


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
        "every request counts, from empty caches on; what a request adds is written to disk alone",
    ]
