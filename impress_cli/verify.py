"""``impress verify``: read every chunk and check it."""

from __future__ import annotations

from typing import Annotated

import typer

from impress_cli.options import (
    DeviceOption,
    JsonOption,
    StoreOption,
    ThreadsOption,
)
from impress_cli.ui import ui_of


def command(
    ctx: typer.Context,
    store: StoreOption,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair", help="Recompute what is damaged with the store's model.", show_default=False
        ),
    ] = False,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    json_output: JsonOption = False,
) -> None:
    """Check every stored chunk; exit 1 if any is bad.

    Names node, array, layer and chunk of whatever is bad.
    """
    from impress_cli.envelope import envelope
    from impress_cli.render import verify_lines
    from impress_cli.session import opened_store
    from pipelines.progress import ProgressEvent

    ui = ui_of(ctx)
    with opened_store(ui, store) as opened, ui.progress() as progress:
        report = opened.verify(
            lambda done, total: progress(ProgressEvent("verify", done, total, "nodes"))
        )
    bad = [
        {name: getattr(chunk, name) for name in ("node", "array", "layer", "chunk", "reason")}
        for chunk in report.bad
    ]
    body = {"nodes": report.nodes, "chunks": report.chunks, "bytes": report.bytes, "bad": bad}
    if json_output:
        ui.json(envelope("verify", body))
    else:
        for text in verify_lines(body):
            ui.line(text)
    if bad:
        raise typer.Exit(1)
