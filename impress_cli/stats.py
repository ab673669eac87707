"""``impress stats``: sizes of a store and how its queries went so far."""

from __future__ import annotations

import typer

from impress_cli.options import JsonOption, StoreOption
from impress_cli.ui import ui_of


def command(ctx: typer.Context, store: StoreOption, json_output: JsonOption = False) -> None:
    """Show sizes and what the queries so far cost."""
    from impress_cli.envelope import envelope
    from impress_cli.render import flat_table
    from impress_cli.session import opened_store
    from pipelines.overview import store_stats

    ui = ui_of(ctx)
    with opened_store(ui, store) as opened:
        values = store_stats(opened)
    if json_output:
        ui.json(envelope("stats", values))
        return
    ui.show(flat_table(values))
