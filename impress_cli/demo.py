"""``impress demo``: a small store, three questions, each answered three ways."""

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
    """Build a small store, ask 3 questions, compare recompute, full load and impress."""
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
    ui.line(f"  {' '.join(row.loaded.text.split())}")
    if not row.impress_same_text:
        ui.line(f"  impress: {' '.join(row.impress.text.split())}")
    ui.line()


def _show_table(ui: Ui, report: DemoReport) -> None:
    from impress_cli.render import demo_lines, demo_table
    from impress_cli.ttft import ttft_lines

    ui.show(demo_table(report))
    for text in demo_lines(report):
        ui.line(text)
    last = report.rows[-1]
    for name, answer in (("full load", last.loaded), ("impress", last.impress)):
        ui.line(f"last question, {name}:")
        for text in ttft_lines(answer.stats, layers=len(answer.layers)):
            ui.line(f"  {text}")
    ui.line(f"try your own: impress query --store {report.store} --prefix {report.prefix_name}")


def _json(report: DemoReport, loaded: LoadedModel, disk: DiskSettings) -> dict[str, Any]:
    from impress_cli.envelope import envelope

    body = {
        "store": str(report.store),
        "prefix": {"name": report.prefix_name, "tokens": report.prefix_tokens},
        "rows": [_row_json(row) for row in report.rows],
        "ratio": report.ratio,
        "impress_ratio": report.impress_ratio,
        "gain": report.gain,
        "retention": report.sparse.retention,
        "sparse": asdict(report.sparse),
        "model": loaded.spec,
        "synthetic": loaded.synthetic,
        "notes": list(report.notes),
    }
    return envelope("demo", body, device=str(loaded.device), disk=disk)


def _row_json(row: DemoRow) -> dict[str, Any]:
    return {
        "question": row.question,
        "answer": row.loaded.text,
        "impress_answer": row.impress.text,
        "recompute_ttft_s": row.recomputed.stats.ttft_s,
        "load_ttft_s": row.loaded.stats.ttft_s,
        "impress_ttft_s": row.impress.stats.ttft_s,
        "ratio": row.ratio,
        "impress_ratio": row.impress_ratio,
        "gain": row.gain,
        "same_text": row.same_text,
        "impress_same_text": row.impress_same_text,
        "load": asdict(row.loaded.stats),
        "impress": asdict(row.impress.stats),
    }
