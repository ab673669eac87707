"""``impress bench ttft``: how long until the first token, for several systems side by side.

Owns the options; the measurement is `pipelines.bench_ttft`'s.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from impress_cli.bench_inputs import PrefixesOption, QueriesOption, QueryTokensOption, words
from impress_cli.options import (
    BandwidthOption,
    DeviceOption,
    DiskSettings,
    DtypeOption,
    IoMode,
    JsonOption,
    LatencyOption,
    ModelOption,
    ThreadsOption,
)
from impress_cli.ui import ui_of
from impress_cli.units import parse_retention
from store.errors import InvalidValueError

if TYPE_CHECKING:
    from pipelines.ttft_values import TtftOptions


def ttft(
    ctx: typer.Context,
    documents: Annotated[
        Path,
        typer.Option(
            "--documents",
            metavar="DIR",
            help="Folder of .txt and .md files: a prefix is the beginning of one (short ones are "
            "joined), its queries are what follows.",
        ),
    ],
    model: ModelOption = None,
    prefix_tokens: Annotated[
        int, typer.Option("--prefix-tokens", metavar="N", help="Length of a prefix.")
    ] = 4096,
    prefixes: PrefixesOption = 16,
    requests: Annotated[
        int, typer.Option("--requests", metavar="N", help="Requests that are measured.")
    ] = 48,
    warm_up: Annotated[
        int,
        typer.Option(
            "--warm-up", metavar="N", help="Requests before them, which only fill the memory."
        ),
    ] = 32,
    popularity: Annotated[
        str,
        typer.Option(
            "--popularity",
            metavar="NAME",
            help="How often a prefix is asked: zipf, few often and many rarely; uniform, all "
            "alike.",
        ),
    ] = "zipf",
    zipf: Annotated[
        float, typer.Option("--zipf", metavar="S", help="Exponent of zipf; 0 is uniform.")
    ] = 1.0,
    query_tokens: QueryTokensOption = 64,
    queries: QueriesOption = None,
    systems: Annotated[
        str | None,
        typer.Option(
            "--systems",
            metavar="NAME,…",
            help="Of recompute, as-like, as-h2o-lru, as-h2o-lfu, impress-paper, impress, diy. All "
            "but recompute and diy take a chunk size (@16), and toggles: +itf, +reorder, +score, "
            "+lfu, +lru, +aged, +sketch, +loaded, +ahead. Default: all.",
            show_default=False,
        ),
    ] = None,
    retention: Annotated[
        str,
        typer.Option("--retention", metavar="R", help="Share of the prefix to select."),
    ] = "0.25",
    budget_share: Annotated[
        str,
        typer.Option(
            "--budget-share",
            metavar="R",
            help="Memory of each system, device and host together, as a share of the data.",
        ),
    ] = "0.3",
    device_share: Annotated[
        float,
        typer.Option("--device-share", metavar="R", help="Share of that which is the device's."),
    ] = 0.25,
    bandwidth: BandwidthOption = None,
    latency: LatencyOption = None,
    recompute_sample: Annotated[
        int,
        typer.Option(
            "--recompute-sample",
            metavar="N",
            help="Requests that are also recomputed, which takes long.",
        ),
    ] = 8,
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", help="Decides who asks what, and when.")
    ] = 1,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            metavar="DIR",
            help="Folder for temporary stores. Default: the system's.",
            show_default=False,
        ),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            "--keep",
            metavar="DIR",
            help="Folder where the stores stay, for runs on the same prefixes and queries to use "
            "again: computing them takes long.",
            show_default=False,
        ),
    ] = None,
    dtype: DtypeOption = None,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    json_output: JsonOption = False,
) -> None:
    """Measure the time to the first token of systems side by side, with little memory.

    Requests go to many prefixes, some more often than others. Each is answered by every system in
    turn, with reads past the page cache and the same memory for all. Queries that are measured
    were never asked before.
    """
    from impress_cli.envelope import envelope
    from impress_cli.session import DEFAULT_MODEL, loaded_model
    from impress_cli.ttft_tables import disk_lines, reference_line, ttft_object, ttft_table
    from pipelines.bench_ttft import bench_ttft
    from pipelines.fidelity_texts import read_questions, text_files
    from pipelines.ttft_stores import folder_warnings, free_bytes
    from pipelines.ttft_values import DEFAULT_SYSTEMS, TtftOptions

    ui, disk = ui_of(ctx), DiskSettings.parse(bandwidth, latency, IoMode.DIRECT)
    options = TtftOptions(
        systems=DEFAULT_SYSTEMS if systems is None else words(systems, "--systems"),
        prefix_tokens=prefix_tokens,
        prefixes=prefixes,
        requests=requests,
        warm_up=warm_up,
        popularity=popularity,
        zipf=zipf,
        query_tokens=query_tokens,
        retention=parse_retention(retention, "--retention"),
        budget_share=parse_retention(budget_share, "--budget-share"),
        device_share=device_share,
        seed=seed,
        queries=queries,
        recompute_sample=recompute_sample,
        io=disk.io_options(),
    )
    if directory is not None and keep is not None:
        raise InvalidValueError(
            f"--dir {directory} is for stores that are deleted, --keep {keep} for those that stay; "
            "give one of them"
        )
    text_files(documents)
    if queries is not None:
        read_questions(queries)
    folder = keep or directory or Path(tempfile.gettempdir())
    free_bytes(folder, keep=keep is not None)
    for text in _idle(ctx, options):
        ui.note(text)
    said = folder_warnings(folder, keep=keep is not None)
    for text in said:
        ui.warn(text)
    loaded = loaded_model(
        ui,
        model or DEFAULT_MODEL,
        dtype="auto" if dtype is None else dtype.value,
        device=device,
        threads=threads,
    )
    with ui.progress() as progress:
        report = bench_ttft(loaded, options, documents, folder, progress, keep=keep is not None)
    for text in report.warnings:
        if text not in said:
            ui.warn(text)
    if json_output:
        body = {
            **ttft_object(report, options, loaded.spec),
            "documents": str(documents),
            "model": loaded.spec,
            "dtype": loaded.identity.dtype,
            "synthetic": loaded.synthetic,
        }
        ui.json(envelope("bench-ttft", body, device=str(loaded.device), disk=disk))
        return
    ui.show(ttft_table(report, options))
    for line in [*disk_lines(report, options), reference_line(report), *report.notes]:
        if line is not None:
            ui.line(line)


def _idle(ctx: typer.Context, options: TtftOptions) -> list[str]:
    """Options that were given and change nothing beside the others, one sentence each."""
    from pipelines.ttft_values import RECOMPUTE

    rules = (
        ("zipf", options.popularity == "uniform", "with popularity uniform"),
        ("query_tokens", options.queries is not None, "with questions from a file"),
        ("recompute_sample", RECOMPUTE not in options.systems, "without the system recompute"),
    )
    return [
        f"{name.replace('_', '-')} has no effect {why}"
        for name, idle, why in rules
        if idle and _given(ctx, name)
    ]


def _given(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"
