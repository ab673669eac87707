"""``impress bench trace``: what a request trace would find in memory, by policy and size.

Owns its options. The replay is `pipelines.bench_trace`'s, what is shown of it `trace_tables`'.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from impress_cli.bench_inputs import words
from impress_cli.options import JsonOption
from impress_cli.ui import Ui, ui_of
from impress_cli.units import parse_rate, parse_retention, parse_size
from store.errors import InvalidValueError

if TYPE_CHECKING:
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
    from impress_cli.trace_tables import trace_lines, trace_object, trace_table
    from pipelines.trace_shapes import kv_shape
    from pipelines.trace_values import TraceBenchOptions
    from store.tier.policy import Score

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
    if half_life is not None and Score.name not in options.policies:
        ui.note(f"half-life has no effect with policies {', '.join(options.policies)}")
        options = replace(options, half_life=None)
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
