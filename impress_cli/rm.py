"""``impress rm``: remove one stored prefix."""

from __future__ import annotations

from typing import Annotated

import typer

from impress_cli.options import JsonOption, StoreOption
from impress_cli.ui import ui_of
from impress_cli.units import format_bytes


def command(
    ctx: typer.Context,
    prefix: Annotated[
        str, typer.Argument(metavar="PREFIX", help="Id, unique beginning of an id, or name.")
    ],
    store: StoreOption,
    json_output: JsonOption = False,
) -> None:
    """Remove a prefix and the nodes only it needs."""
    from impress_cli.envelope import envelope
    from impress_cli.session import opened_store

    ui = ui_of(ctx)
    with opened_store(ui, store) as opened:
        row = opened.prefix(prefix)
        report = opened.remove(row)
    body = {
        "prefix_id": row.prefix_id,
        "name": row.name,
        "nodes": report.nodes,
        "bytes": report.bytes,
    }
    if json_output:
        ui.json(envelope("rm", body))
        return
    ui.line(
        f"removed {row.name} ({row.prefix_id}): {report.nodes} nodes, {format_bytes(report.bytes)}"
    )
