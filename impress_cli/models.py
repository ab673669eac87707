"""``impress models``: what can be loaded here."""

from __future__ import annotations

import typer

from impress_cli.options import JsonOption
from impress_cli.ui import ui_of


def command(ctx: typer.Context, json_output: JsonOption = False) -> None:
    """List the models that can be loaded here."""
    from impress_cli.envelope import envelope
    from impress_cli.render import model_table
    from pipelines.model_list import list_models

    ui = ui_of(ctx)
    entries = [
        {name: getattr(entry, name) for name in ("name", "kind", "available", "detail")}
        for entry in list_models()
    ]
    if json_output:
        ui.json(envelope("models", {"models": entries}))
        return
    ui.show(model_table(entries))
    ui.line("--model also takes a hub id, a local folder or a .gguf file.")
