"""``impress repair``: rebuild the catalog from what lies on disk."""

from __future__ import annotations

import typer

from impress_cli.options import JsonOption, StoreOption
from impress_cli.ui import ui_of


def command(ctx: typer.Context, store: StoreOption, json_output: JsonOption = False) -> None:
    """Rebuild a lost or damaged catalog from the nodes.

    Removed prefixes stay removed.
    """
    from impress_cli.envelope import envelope
    from store.engine import rebuild_store

    ui = ui_of(ctx)
    report = rebuild_store(store)
    body = {"nodes": report.nodes, "dropped": report.dropped}
    if json_output:
        ui.json(envelope("repair", body))
        return
    ui.line(f"catalog rebuilt: {report.nodes} nodes kept, {report.dropped} dropped")
