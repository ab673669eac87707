"""Table, lines and JSON object of ``impress reorder``: plain values in. Nothing here prints."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from impress_cli.render import table_of
from impress_cli.units import format_bytes, format_count, format_percent

if TYPE_CHECKING:
    from rich.table import Table

    from pipelines.probes import ProbePlan, ProbeReport
    from pipelines.reorder_plan import NodePlan, ReorderPlan

_SHOWN_NAMES = 2


def reorder_object(
    rows: ReorderPlan, probes: dict[str, int], warnings: list[str], order: str
) -> dict[str, Any]:
    """Keys of the JSON object (docs/json.md); ``bytes_written`` counts rows and probe layouts."""
    return {
        "nodes": probes["nodes"],
        "order": order,
        "rewritten": rows.rewritten,
        "bytes_written": rows.bytes + probes["bytes_written"],
        "chunks_before": rows.chunks_before,
        "chunks_after": rows.chunks_after,
        "probes_added": probes["added"],
        "probes_dropped": probes["dropped"],
        "probe_bytes_written": probes["bytes_written"],
        "warnings": warnings,
        "rows": [_row(node) for node in rows.nodes],
    }


def _row(node: NodePlan) -> dict[str, Any]:
    return {
        "node_id": node.node_id,
        "name": node.names[0] if len(node.names) == 1 else None,
        "prefixes": len(node.names),
        "tokens": node.tokens,
        "chunks": node.chunks,
        "chunks_before": node.before,
        "chunks_after": node.after,
        "gain": node.gain,
        "bytes": node.bytes,
        "left_alone": node.why,
    }


def planned_probes(plan: ProbePlan, nodes: int) -> dict[str, int]:
    """Figures of probe layouts that a dry run would change."""
    added, dropped = len(plan.add), len(plan.drop)
    return {"nodes": nodes, "added": added, "dropped": dropped, "bytes_written": plan.bytes}


def changed_probes(report: ProbeReport) -> dict[str, int]:
    """Figures of probe layouts that were changed."""
    names = ("nodes", "added", "dropped", "bytes_written")
    return {name: getattr(report, name) for name in names}


def reorder_table(rows: ReorderPlan) -> Table:
    """Table of ``--dry-run``: what each node would gain, or why it is left alone."""
    table = table_of(
        "node", "of", ">tokens", ">chunks", ">read now", ">after", ">gain", ">to write", ""
    )
    for node in rows.nodes:
        table.add_row(
            node.node_id,
            _names(node.names),
            format_count(node.tokens),
            format_count(node.chunks),
            _chunks(node.before),
            _chunks(node.after),
            "–" if node.gain is None else _signed_percent(node.gain),
            format_bytes(node.bytes) if node.why is None else "–",
            "" if node.why is None else f"left alone: {node.why}",
        )
    table.caption = (
        "read now, after: chunks per layer that a question is expected to read of the node, by how "
        "often past questions selected each token"
    )
    table.caption_justify = "left"
    return table


def _names(names: tuple[str, ...]) -> str:
    if len(names) > _SHOWN_NAMES:
        return f"{format_count(len(names))} prefixes"
    return ", ".join(names)


def _chunks(expected: float | None) -> str:
    return "–" if expected is None else f"{expected:.1f}"


def _signed_percent(ratio: float) -> str:
    return f"{'-' if ratio < 0 else ''}{format_percent(abs(ratio))}"


def row_lines(rows: ReorderPlan, order: str, *, dry_run: bool = False) -> list[str]:
    """What was done with the rows of nodes, or would be."""
    left = Counter(node.why for node in rows.nodes if node.why is not None)
    would, written = ("would be ", "to write") if dry_run else ("", "written")
    where = "back in token order" if order == "original" else "in order of importance"
    text = f"{_nodes(rows.rewritten)} {would}put {where} ({format_bytes(rows.bytes)} {written})"
    if left:
        why = ", ".join(f"{format_count(count)} {reason}" for reason, count in left.items())
        text += f"; left alone: {why}"
    return [text, *_saving(rows)]


def _saving(rows: ReorderPlan) -> list[str]:
    before, after = rows.chunks_before, rows.chunks_after
    if not rows.rewritten or not before or after is None:
        return []
    change = f"{format_percent(abs(1 - after / before))} {'fewer' if after <= before else 'more'}"
    return [
        f"estimate, summed over nodes: a question reads {after:.1f} chunks per layer instead of "
        f"{before:.1f} ({change})"
    ]


def probe_line(body: dict[str, Any]) -> str:
    """What was done with probe layouts, or would be."""
    would = "would be " if body.get("dry_run") else ""
    return (
        f"{_nodes(body['nodes'])}: {format_count(body['probes_added'])} probe layouts "
        f"{would}added ({format_bytes(body['probe_bytes_written'])}), "
        f"{format_count(body['probes_dropped'])} {would}dropped"
    )


def _nodes(count: int) -> str:
    return f"{format_count(count)} {'node' if count == 1 else 'nodes'}"
