"""``impress demo``: a small store, three questions, and the time to the first token both ways."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from impress_cli.options import (
    DeviceOption,
    DiskSettings,
    Dtype,
    DtypeOption,
    IoMode,
    IoOption,
    JsonOption,
    ModelOption,
    ThreadsOption,
)
from impress_cli.ui import Ui, ui_of

if TYPE_CHECKING:
    from pipelines.demo import DemoReport, DemoRow
    from pipelines.models import LoadedModel


def command(
    ctx: typer.Context,
    store: Annotated[
        Path | None,
        typer.Option(
            "--store",
            metavar="DIR",
            help="Folder of the demo store. Default: one in your cache folder, reused next time.",
            show_default=False,
        ),
    ] = None,
    model: ModelOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    io: IoOption = IoMode.DIRECT,
    json_output: JsonOption = False,
) -> None:
    """Build a small store, ask 3 questions, compare recompute and load."""
    from impress_cli.session import DEFAULT_MODEL, loaded_model
    from pipelines.demo import run_demo
    from pipelines.recipe import load_recipe

    ui = ui_of(ctx)
    recipe = load_recipe("demo")
    chosen = Dtype.AUTO if dtype is None else dtype
    loaded = loaded_model(
        ui,
        model or recipe.model or DEFAULT_MODEL,
        dtype=chosen.value,
        device=device,
        threads=threads,
    )
    path = store or demo_folder(loaded)
    disk = DiskSettings.parse(None, None, io)
    ui.note(f"demo store at {path}; the first run computes its prefix, later runs reuse it")
    show = None if json_output else lambda row: _show_row(ui, row)
    with ui.progress() as progress:
        report = run_demo(path, loaded, progress, recipe=recipe, io=disk.io_options(), on_row=show)
    for text in report.notes:
        ui.note(text)
    if json_output:
        ui.json(_json(report, loaded, disk))
    else:
        _show_table(ui, report)


def demo_folder(model: LoadedModel) -> Path:
    """Where the demo store of a model lies by default; another identity gets another folder."""
    from pipelines.model_files import cache_root

    return cache_root() / f"demo-{model.identity.digest()[:12]}"


def _show_row(ui: Ui, row: DemoRow) -> None:
    ui.line(f"? {row.question}")
    ui.line(f"  {' '.join(row.answer.split())}")
    ui.line()


def _show_table(ui: Ui, report: DemoReport) -> None:
    from impress_cli.render import demo_table, ttft_lines

    ui.show(demo_table(report))
    ui.line("last question, loaded:")
    for text in ttft_lines(report.rows[-1].load_stats):
        ui.line(f"  {text}")
    ui.line(f"try your own: impress query --store {report.store} --prefix {report.prefix_name}")


def _json(report: DemoReport, loaded: LoadedModel, disk: DiskSettings) -> dict[str, Any]:
    from impress_cli.envelope import envelope

    rows = [
        {
            "question": row.question,
            "answer": row.answer,
            "recompute_ttft_s": row.recompute_ttft_s,
            "load_ttft_s": row.load_ttft_s,
            "ratio": row.ratio,
            "same_text": row.same_text,
            "load": asdict(row.load_stats),
        }
        for row in report.rows
    ]
    body = {
        "store": str(report.store),
        "prefix": {"name": report.prefix_name, "tokens": report.prefix_tokens},
        "rows": rows,
        "ratio": report.ratio,
        "model": loaded.spec,
        "synthetic": loaded.synthetic,
        "notes": list(report.notes),
    }
    return envelope("demo", body, device=str(loaded.device), disk=disk)
