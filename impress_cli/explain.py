"""``--explain``: where the match ended, and what each layer chose and read.

Plain values in; text, a table and JSON values out. Nothing here prints.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from impress_cli.render import table_of
from impress_cli.units import format_bytes, format_count

if TYPE_CHECKING:
    from rich.table import Table

    from pipelines.ask import Divergence
    from pipelines.generate import Answer
    from store.stats import LayerReport

_STOPS = {
    "complete": "all of it is stored",
    "diverged": "other tokens are stored there",
    "end_of_tree": "nothing is stored beyond",
    "quarantined": "what follows is damaged and waits for repair",
    "unreadable": "what follows could not be read",
}
#: Columns of the table that are sums in its last line.
_SUMS = (
    "selected_tokens",
    "chunks",
    "chunks_selected",
    "chunks_read",
    "device_chunks",
    "host_chunks",
    "loaded_tokens",
    "kept_tokens",
    "kv_bytes",
    "probe_bytes",
)


def explain_lines(answer: Answer, parting: Divergence, prefix_tokens: int) -> list[str]:
    """Lines of ``--explain``: matched nodes, and where and why the match ended."""
    matched = answer.matched
    lines = [
        f"matched node {part.node.node_id}: {format_count(part.used)} of "
        f"{format_count(part.node.length)} tokens, from token {format_count(part.node.start)}"
        for part in matched.nodes
    ] or ["matched no stored node"]
    if prefix_tokens and matched.matched_len >= prefix_tokens:
        lines.append(f"the whole prefix matched ({format_count(prefix_tokens)} tokens)")
    else:
        # After a failed load the match was cut on purpose, before what could not be read.
        cut = matched.stop == "complete" and answer.stats.recovered_chunks > 0
        why = _STOPS["unreadable"] if cut else _STOPS.get(matched.stop, matched.stop)
        lines.append(f"the match ended after {format_count(matched.matched_len)} tokens: {why}")
        lines.extend([] if cut else _parting_lines(parting))
    lines.extend(f"missed: {reason}" for reason in answer.stats.miss_reasons)
    return lines


def _parting_lines(parting: Divergence) -> list[str]:
    if parting.given is None:
        return []
    stored = "" if parting.stored is None else f", stored there is {parting.stored!r}"
    return [
        f"first token that parts: number {format_count(parting.position)}, "
        f"{parting.given!r} in the prefix{stored}"
    ]


def layer_rows(layers: Sequence[LayerReport], row_bytes: int) -> list[dict[str, Any]]:
    """Reports as JSON objects, with the amplification of each layer.

    Parameters
    ----------
    layers
        One report per layer; empty where everything was loaded.
    row_bytes
        Bytes of one token's keys (or values) in one layer, `KVShape.row_bytes`.
    """
    rows = [layer._asdict() for layer in layers]
    for row in rows:
        row["amplification"] = _amplification(row, row_bytes)
    return rows


def layer_totals(layers: Sequence[LayerReport], row_bytes: int) -> dict[str, Any] | None:
    """Sums over the layers, the mean agreement and the layers that fell back; None for none."""
    if not layers:
        return None
    totals: dict[str, Any] = {name: sum(getattr(row, name) for row in layers) for name in _SUMS}
    agreed = [row.jaccard for row in layers if row.jaccard is not None]
    return {
        **totals,
        "jaccard": sum(agreed) / len(agreed) if agreed else None,
        "fell_back": sum(row.fell_back for row in layers),
        "amplification": _amplification(totals, row_bytes),
    }


def _amplification(row: dict[str, Any], row_bytes: int) -> float | None:
    """Bytes fetched over the bytes of the selected tokens' keys and values.

    One set per KV head needs only that head's part of a token, so its k tokens per head come to
    the bytes of k whole tokens, as one set of k does.
    """
    needed = 2 * row["selected_tokens"] * row_bytes
    return row["kv_bytes"] / needed if needed else None


def layer_table(layers: Sequence[LayerReport], row_bytes: int) -> Table:
    """Table of ``--explain``: what each layer chose, and what was read for it."""
    table = table_of(
        "layer",
        "evidence",
        ">J",
        ">t",
        "fell\nback",
        ">tokens",
        ">chunks",
        ">read",
        ">device\n+host",
        ">KV",
        ">probe",
        ">ratio",
        dense=True,
    )
    for row in layer_rows(layers, row_bytes):
        table.add_row(*_cells(row))
    totals = layer_totals(layers, row_bytes)
    if totals is not None:
        table.add_section()
        kinds = {row.evidence for row in layers}
        kind = kinds.pop() if len(kinds) == 1 else "mixed"
        table.add_row(*_cells({**totals, "layer": "all", "evidence": kind, "threshold": None}))
    table.caption = (
        "J: agreement of the probe heads, which must exceed t; tokens: selected; chunks: those "
        "that hold one, of all; read: chunks of keys and of values; device+host: those of them "
        "that were in memory; ratio: read amplification, bytes of KV read over bytes of the "
        "selected tokens' KV"
    )
    table.caption_justify = "left"
    return table


def _cells(row: dict[str, Any]) -> list[str]:
    """Cells of a layer or, where ``fell_back`` counts them, of all layers."""
    fell = row["fell_back"]
    sets = f"{row['sets']} × " if row.get("sets", 1) > 1 else ""
    total = row["layer"] == "all"
    return [
        str(row["layer"]),
        row["evidence"],
        _fraction(row["jaccard"]),
        "" if total else _fraction(row["threshold"]),
        str(fell) if total else "yes" if fell else "no",
        sets + format_count(row["selected_tokens"]),
        f"{format_count(row['chunks_selected'])}/{format_count(row['chunks'])}",
        format_count(row["chunks_read"]),
        f"{format_count(row['device_chunks'])}+{format_count(row['host_chunks'])}",
        format_bytes(row["kv_bytes"]),
        format_bytes(row["probe_bytes"]),
        "n/a" if row["amplification"] is None else f"{row['amplification']:.2f}×",
    ]


def _fraction(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.2f}"
