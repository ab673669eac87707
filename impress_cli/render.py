"""Tables and lines: plain values in, rich tables and text out. Nothing here prints."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from impress_cli.units import (
    format_bytes,
    format_count,
    format_ms,
    format_percent,
    format_seconds,
)

if TYPE_CHECKING:
    from rich.table import Table
    from rich.tree import Tree

    from pipelines.ask import Divergence
    from pipelines.bench_disk import DiskReport
    from pipelines.demo import DemoReport
    from pipelines.generate import Answer
    from store.index.catalog import NodeRow
    from store.stats import QueryStats

STAGES = ("match", "probe", "identify", "load", "compute", "other")
TIERS = ("disk", "host", "device")


def ttft_lines(
    stats: QueryStats, *, recompute_s: float | None = None, full_load_s: float | None = None
) -> list[str]:
    """Two lines after an answer: where the time to the first token went, and what was reused.

    Stages that took no time are left out. ``recompute_s`` and ``full_load_s`` are estimates of
    the other ways to answer, shown where known.
    """
    return [_time_line(stats, recompute_s, full_load_s), _reuse_line(stats)]


def _time_line(stats: QueryStats, recompute_s: float | None, full_load_s: float | None) -> str:
    in_ms = stats.ttft_s < 0.9995
    show = format_ms if in_ms else "{:.2f}".format
    stages = [(name, show(stats.stages_s.get(name, 0.0))) for name in STAGES]
    terms = " + ".join(f"{name} {text}" for name, text in stages if text not in ("0", "0.00"))
    total = f"{format_ms(stats.ttft_s)} ms" if in_ms else f"{stats.ttft_s:.2f} s"
    others = [
        f"{name} {format_seconds(value)}"
        for name, value in (("recompute would take", recompute_s), ("full load", full_load_s))
        if value is not None
    ]
    hidden = f", I/O behind compute {format_seconds(stats.hidden_io_s)}"
    return (
        f"TTFT {total}"
        + (f"  = {terms}" if terms else "")
        + (hidden if stats.hidden_io_s >= 0.0001 else "")
        + (f"   ({', '.join(others)})" if others else "")
    )


def _reuse_line(stats: QueryStats) -> str:
    reused = f"{format_count(stats.reused_tokens)} of {format_count(stats.prompt_tokens)} tokens"
    parts = [f"prefix {reused} reused"]
    if stats.reused_tokens:
        parts.append(
            f"kept {format_percent(stats.retention)} asked, "
            f"{format_percent(stats.loaded_ratio)} loaded"
        )
        parts.append(_read_text(stats.bytes))
    else:
        parts.append("everything recomputed")
    if stats.fallback_layers:
        parts.append(f"{stats.fallback_layers} layers fell back")
    if stats.recovered_chunks:
        parts.append(f"{stats.recovered_chunks} chunks could not be used and were recomputed")
    return " · ".join(parts)


def _read_text(moved: Mapping[str, float]) -> str:
    split = ", ".join(f"{tier} {format_bytes(moved[tier])}" for tier in TIERS if moved.get(tier))
    total = format_bytes(sum(moved.get(tier, 0) for tier in TIERS))
    return f"{total} read" + (f" ({split})" if split else "")


def _table(*columns: str, title: str | None = None) -> Table:
    """Table whose headers starting with ``>`` are right-aligned columns."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    for name in columns:
        right = name.startswith(">")
        table.add_column(name.lstrip(">"), justify="right" if right else "left", overflow="fold")
    return table


def format_date(seconds: float) -> str:
    """Local date and time of a Unix time."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def prefix_table(prefixes: Iterable[Mapping[str, Any]], total_bytes: int) -> Table:
    """Table of ``impress ls``."""
    table = _table("prefix", "name", ">tokens", ">bytes", "created")
    count = 0
    for prefix in prefixes:
        count += 1
        table.add_row(
            prefix["prefix_id"],
            prefix["name"],
            format_count(prefix["tokens"]),
            format_bytes(prefix["bytes"]),
            format_date(prefix["created"]),
        )
    table.caption = (
        f"{count} prefixes; the store takes {format_bytes(total_bytes)} "
        "(what prefixes share is stored once)"
    )
    table.caption_justify = "left"
    return table


def model_table(entries: Iterable[Mapping[str, Any]]) -> Table:
    """Table of ``impress models``."""
    table = _table("model", "kind", "here", "detail")
    for entry in entries:
        here = "yes" if entry["available"] else "no"
        table.add_row(entry["name"], entry["kind"], here, entry["detail"])
    return table


def flat_table(values: Mapping[str, Any]) -> Table:
    """Two columns, nested keys joined by dots; sizes, times and ratios in readable units."""
    table = _table("what", ">value")
    for key, value in _flatten(values):
        table.add_row(key, _humanise(key, value))
    return table


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _humanise(key: str, value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    last = key.rsplit(".", 1)[-1]
    if key.startswith("bytes") or "bytes" in last:
        return format_bytes(value)
    if last.endswith("_s") or key.startswith("stages_s."):
        return format_seconds(value)
    if key.startswith(("hit.", "important_hit")) or last.endswith(("_ratio", "_share")):
        return format_percent(value)
    return format_count(int(value)) if float(value).is_integer() else f"{value:.3g}"


def node_tree(title: str, rows: Sequence[NodeRow]) -> Tree:
    """Tree of ``impress inspect``: children below the node whose tokens they continue."""
    from rich.tree import Tree

    tree = Tree(f"{title}: {format_count(len(rows))} nodes")
    branches: dict[str | None, Tree] = {None: tree}
    # A parent ends where its child starts, so it starts earlier: this order visits it first.
    for row in sorted(rows, key=lambda row: (row.start, row.node_id)):
        text = (
            f"{row.node_id}  tokens {format_count(row.start)} to "
            f"{format_count(row.start + row.length)}  {format_bytes(row.bytes)}  "
            f"generation {row.generation}"
        )
        branches[row.node_id] = branches.get(row.parent_id, tree).add(text)
    return tree


def verify_lines(report: Mapping[str, Any]) -> list[str]:
    """Lines of ``impress verify``: one per bad chunk, then the sum."""
    lines = [
        f"bad: node {bad['node']} array {bad['array']} layer {bad['layer']} "
        f"chunk {bad['chunk']}: {bad['reason']}"
        for bad in report["bad"]
    ]
    checked = (
        f"{format_count(report['nodes'])} nodes, {format_count(report['chunks'])} chunks, "
        f"{format_bytes(report['bytes'])} checked"
    )
    if not lines:
        return [f"{checked}: all good"]
    if "repaired" not in report:
        hint = "queries recompute them meanwhile; 'impress verify --repair' rebuilds them"
        return [*lines, f"{checked}: {len(lines)} bad ({hint})"]
    lines.append(f"{checked}: {len(lines)} bad, {len(report['repaired'])} nodes repaired")
    lines += [
        f"not repaired: node {left['node']}: {left['reason']}; remove its prefix with "
        "'impress rm' and build it again"
        for left in report["not_repaired"]
    ]
    return lines


_STOPS = {
    "complete": "all of it is stored",
    "diverged": "other tokens are stored there",
    "end_of_tree": "nothing is stored beyond",
    "quarantined": "what follows is damaged and waits for repair",
    "unreadable": "what follows could not be read",
}


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


def build_lines(report: Mapping[str, Any], store: str) -> list[str]:
    """Lines at the end of ``impress build-store``."""
    gone = sum(report[name] for name in ("prefixes_reused", "duplicates", "dropped", "failed"))
    parts = [f"{format_count(report['prefixes'] - gone)} prefixes stored in {store}"]
    if report["prefixes_reused"]:
        parts.append(f"{format_count(report['prefixes_reused'])} were there already")
    if report["duplicates"]:
        parts.append(f"{format_count(report['duplicates'])} duplicates not stored twice")
    if report["dropped"]:
        parts.append(f"{format_count(report['dropped'])} left out for the size limit")
    if report["failed"]:
        parts.append(f"{format_count(report['failed'])} not stored (see the warnings)")
    lines = ["; ".join(parts)]
    if report["computed_tokens"]:
        lines.append(
            f"{format_count(report['computed_tokens'])} of {format_count(report['tokens'])} "
            f"tokens computed at {format_count(report['tokens_per_s'])} tokens/s, "
            f"{format_bytes(report['bytes'])} written"
        )
    return lines


def demo_table(report: DemoReport) -> Table:
    """Table of ``impress demo``: time to first token both ways, and whether the words agree."""
    table = _table("question", ">recompute", ">full load", ">ratio", "same words")
    for row in report.rows:
        table.add_row(
            row.question,
            format_seconds(row.recompute_ttft_s),
            format_seconds(row.load_ttft_s),
            f"{row.ratio:.1f}×",
            "yes" if row.same_text else "no",
        )
    table.caption = (
        f"time to first token after a prefix of {format_count(report.prefix_tokens)} tokens; "
        f"loading is {report.ratio:.1f}× faster (median)"
    )
    table.caption_justify = "left"
    return table


def disk_table(report: DiskReport) -> Table:
    """Table of ``impress bench disk``: one line per kind and request size, depths side by side."""
    depths = sorted({row.depth for row in report.rows})
    table = _table("reads", ">request", *(f">{depth} in flight" for depth in depths))
    cells: dict[tuple[str, int], list[str]] = {}
    for row in sorted(report.rows, key=lambda row: row.depth):
        line = cells.setdefault((row.kind, row.request_bytes), [])
        line.append(f"{format_bytes(row.bytes_per_s)}/s")
    for (kind, size), line in cells.items():
        table.add_row(kind, f"{format_count(size / 1024)} KiB", *line)
    return table
