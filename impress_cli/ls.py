"""``impress ls``: the stored prefixes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from impress_cli.options import JsonOption, StoreOption
from impress_cli.ui import ui_of

if TYPE_CHECKING:
    from store.index.rows import NodeRow, PrefixRow, ProbeRow


def command(ctx: typer.Context, store: StoreOption, json_output: JsonOption = False) -> None:
    """List the stored prefixes."""
    from impress_cli.envelope import envelope
    from impress_cli.render import prefix_table
    from impress_cli.session import opened_store

    ui = ui_of(ctx)
    with opened_store(ui, store) as opened:
        prefixes = prefix_objects(opened.prefixes(), opened.nodes(), opened.probe_rows())
        total_bytes = opened.size_bytes()
    if json_output:
        ui.json(envelope("ls", {"prefixes": prefixes, "bytes": total_bytes}))
        return
    if not prefixes:
        ui.line(f"no prefix is stored in {store}; add some with 'impress build-store'")
        return
    ui.show(prefix_table(prefixes, total_bytes))


def prefix_objects(
    prefixes: Sequence[PrefixRow], nodes: Sequence[NodeRow], probes: Sequence[ProbeRow]
) -> list[dict[str, Any]]:
    """JSON objects of prefixes, with what they share with others counted in full.

    ``bytes`` are those of the KV, ``probe_bytes`` those of the probe layouts beside it.
    """
    by_id = {node.node_id: node for node in nodes}
    beside: Counter[str] = Counter()
    for probe in probes:
        beside[probe.node_id] += probe.bytes
    objects = []
    for row in prefixes:
        path = []
        node = by_id.get(row.node_id)
        while node is not None:
            path.append(node)
            node = by_id.get(node.parent_id) if node.parent_id else None
        objects.append(
            {
                "prefix_id": row.prefix_id,
                "name": row.name,
                "tokens": row.length,
                "bytes": sum(node.bytes for node in path),
                "probe_bytes": sum(beside[node.node_id] for node in path),
                "nodes": len(path),
                "created": row.created,
            }
        )
    return objects
