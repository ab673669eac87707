"""``impress bench``: measurements of this machine and of the store on it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from impress_cli import bench_importance, bench_trace, bench_ttft
from impress_cli.options import DiskSettings, IoMode, IoOption, JsonOption
from impress_cli.ui import Ui, ui_of
from impress_cli.units import format_bytes, format_count, format_percent, parse_size

if TYPE_CHECKING:
    from pipelines.bench_disk import DiskBenchOptions, DiskReport

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def root(ctx: typer.Context) -> None:
    """Measure what this machine can do, and what the store makes of it."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


@app.command("disk")
def disk(
    ctx: typer.Context,
    size: Annotated[
        str, typer.Option("--size", metavar="SIZE", help="Size of the temporary test file.")
    ] = "1GB",
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            metavar="DIR",
            help="Folder for temporary files. Default: the store's, else the system's.",
            show_default=False,
        ),
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(
            "--store",
            metavar="DIR",
            help="Store whose largest node the reader reads. Default: a synthetic node.",
            show_default=False,
        ),
    ] = None,
    io: IoOption = IoMode.DIRECT,
    json_output: JsonOption = False,
) -> None:
    """Measure the disk's ceiling, and the store's reader as a share of it.

    Writes a temporary file and reads it sequentially and at random, in several request sizes and
    depths; then reads a node with the store's reader and with bare preadv calls in turns.
    """
    import tempfile

    from impress_cli.envelope import envelope
    from impress_cli.render import disk_table
    from pipelines.bench_disk import DiskBenchOptions

    folder = directory or store or Path(tempfile.gettempdir())
    size_bytes = parse_size(size, "--size")
    options = DiskBenchOptions(folder, size_bytes, direct=io is IoMode.DIRECT)
    ui = ui_of(ctx)
    report = _measure(ui, options, store)
    if json_output:
        settings = DiskSettings(direct=report.direct)
        ui.json(envelope("bench-disk", disk_object(report), disk=settings))
        return
    for text in report.notes:
        ui.warn(text)
    ui.show(disk_table(report))
    for text in reader_lines(report):
        ui.line(text)


def _measure(ui: Ui, options: DiskBenchOptions, store: Path | None) -> DiskReport:
    from impress_cli.session import opened_store
    from pipelines.bench_disk import bench_disk

    if store is None:
        with ui.progress() as progress:
            return bench_disk(options, None, progress)
    with opened_store(ui, store) as opened, ui.progress() as progress:
        return bench_disk(options, opened, progress)


def disk_object(report: DiskReport) -> dict[str, Any]:
    """JSON object of a report (docs/json.md, ``impress.bench-disk/1``)."""
    return {
        "rows": [row._asdict() for row in report.rows],
        "ceiling": report.ceiling._asdict(),
        "reader": report.reader._asdict(),
        "direct": report.direct,
        "size_bytes": report.size_bytes,
        "folder": str(report.folder),
        "file_system": report.file_system,
        "notes": report.notes,
    }


def reader_lines(report: DiskReport) -> list[str]:
    """Lines below the table: the ceiling, and the reader beside it."""
    reader, ceiling = report.reader, report.ceiling
    node = "a synthetic node" if reader.kind == "synthetic" else "the store's largest node"
    return [
        f"ceiling {format_bytes(ceiling.bytes_per_s)}/s: {ceiling.kind}, "
        f"{format_count(ceiling.request_bytes / 1024)} KiB, {ceiling.depth} in flight",
        f"store reader {format_bytes(reader.bytes_per_s)}/s, checksums included: "
        f"{format_percent(reader.share_of_preadv)} of bare preadv, "
        f"{format_percent(reader.share_of_ceiling)} of the ceiling measured beside it",
        f"it read {node} of {format_count(reader.tokens)} tokens, {format_bytes(reader.bytes)}, "
        f"with {reader.threads} threads; medians of {reader.rounds} rounds in turns",
    ]


app.command("fidelity")(bench_importance.fidelity)
app.command("similarity")(bench_importance.similarity)
app.command("ttft")(bench_ttft.ttft)
app.command("trace")(bench_trace.trace)
