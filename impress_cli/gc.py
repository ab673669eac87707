"""``impress gc``: delete what nothing refers to any more."""

from __future__ import annotations

import typer

from impress_cli.options import JsonOption, StoreOption
from impress_cli.ui import ui_of
from impress_cli.units import format_bytes


def command(ctx: typer.Context, store: StoreOption, json_output: JsonOption = False) -> None:
    """Delete what nothing refers to any more.

    Unfinished writes, old generations and removed nodes.
    """
    from impress_cli.envelope import envelope
    from impress_cli.session import opened_store

    ui = ui_of(ctx)
    with opened_store(ui, store) as opened:
        report = opened.gc()
    body = {
        "removed_groups": report.removed_groups,
        "freed_bytes": report.freed_bytes,
        "kept_groups": report.kept_groups,
    }
    if json_output:
        ui.json(envelope("gc", body))
        return
    kept = f"; {report.kept_groups} kept for readers at work" if report.kept_groups else ""
    ui.line(
        f"{report.removed_groups} groups deleted, {format_bytes(report.freed_bytes)} freed{kept}"
    )
