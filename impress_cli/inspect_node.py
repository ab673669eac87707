"""``impress inspect``: the tree of nodes, or one node in detail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from impress_cli.options import JsonOption, StoreOption
from impress_cli.ui import ui_of

if TYPE_CHECKING:
    from rich.console import RenderableType

    from store.index.rows import NodeRow


def command(
    ctx: typer.Context,
    store: StoreOption,
    node: Annotated[
        str | None,
        typer.Argument(metavar="[NODE]", help="Id of a node. Without: the tree of all nodes."),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Show the tree of stored nodes, or one node in detail."""
    from impress_cli.envelope import envelope
    from impress_cli.render import flat_table, node_tree
    from impress_cli.session import opened_store
    from pipelines.overview import node_detail

    ui = ui_of(ctx)
    body: dict[str, Any]
    shown: RenderableType
    with opened_store(ui, store) as opened:
        if node is not None:
            detail = node_detail(opened, node)
            body, shown = {"node": detail}, flat_table(detail)
        else:
            rows = opened.nodes()
            body = {"nodes": [node_object(row) for row in rows]}
            shown = node_tree(str(store), rows)
    if json_output:
        ui.json(envelope("inspect", body))
    else:
        ui.show(shown)


def node_object(row: NodeRow) -> dict[str, Any]:
    """JSON object of a catalog row of a node."""
    names = ("node_id", "parent_id", "start", "length", "generation", "bytes")
    return {name: getattr(row, name) for name in names}
