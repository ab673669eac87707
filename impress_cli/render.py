"""Tables and lines: plain values in, rich tables and text out. Nothing here prints."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from impress_cli.units import (
    format_bytes,
    format_count,
    format_percent,
    format_seconds,
)

if TYPE_CHECKING:
    from rich.table import Table
    from rich.tree import Tree

    from pipelines.bench_disk import DiskReport
    from pipelines.demo import DemoReport
    from store.index.catalog import NodeRow

#: Three questions on a busy machine tell no smaller difference than this from none.
_NOISE = 0.05


def table_of(*columns: str, title: str | None = None, dense: bool = False) -> Table:
    """Table whose headers starting with ``>`` are right-aligned columns.

    ``dense`` leaves less room between columns, for tables with many of them.
    """
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    if dense:
        table.padding = (0, 1, 0, 0)
    for name in columns:
        right = name.startswith(">")
        table.add_column(name.lstrip(">"), justify="right" if right else "left", overflow="fold")
    return table


def format_date(seconds: float) -> str:
    """Local date and time of a Unix time."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def prefix_table(prefixes: Iterable[Mapping[str, Any]], total_bytes: int) -> Table:
    """Table of ``impress ls``."""
    table = table_of("prefix", "name", ">tokens", ">KV", ">probe", "created")
    count = 0
    for prefix in prefixes:
        count += 1
        table.add_row(
            prefix["prefix_id"],
            prefix["name"],
            format_count(prefix["tokens"]),
            format_bytes(prefix["bytes"]),
            format_bytes(prefix["probe_bytes"]),
            format_date(prefix["created"]),
        )
    table.caption = (
        f"{count} prefixes; the store takes {format_bytes(total_bytes)} (what prefixes share is "
        "stored once, and counted here for each); probe: the data that questions choose by"
    )
    table.caption_justify = "left"
    return table


def model_table(entries: Iterable[Mapping[str, Any]]) -> Table:
    """Table of ``impress models``."""
    table = table_of("model", "kind", "here", "detail")
    for entry in entries:
        here = "yes" if entry["available"] else "no"
        table.add_row(entry["name"], entry["kind"], here, entry["detail"])
    return table


def flat_table(values: Mapping[str, Any]) -> Table:
    """Two columns, nested keys joined by dots; sizes, times and ratios in readable units."""
    table = table_of("what", ">value")
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
    share = {"hit", "hit_bytes", "important_hit"} & set(key.split("."))
    if share or last.endswith(("_ratio", "_share")):
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
        hint = "queries do without them meanwhile; 'impress verify --repair' rebuilds them"
        return [*lines, f"{checked}: {len(lines)} bad ({hint})"]
    lines.append(f"{checked}: {len(lines)} bad, {len(report['repaired'])} nodes repaired")
    lines += [
        f"not repaired: node {left['node']}: {left['reason']}; remove its prefix with "
        "'impress rm' and build it again"
        for left in report["not_repaired"]
    ]
    return lines


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
    """Table of ``impress demo``: time to first token three ways, and whether the words agree."""
    kept = format_percent(report.sparse.retention)
    table = table_of(
        "question", ">recompute", ">full load", f">impress at {kept}", ">loaded", "same words"
    )
    for row in report.rows:
        table.add_row(
            row.question,
            format_seconds(row.recomputed.stats.ttft_s),
            f"{format_seconds(row.loaded.stats.ttft_s)} ({row.ratio:.1f}×)",
            f"{format_seconds(row.impress.stats.ttft_s)} ({row.impress_ratio:.1f}×)",
            format_percent(row.impress.stats.loaded_ratio),
            _same_words(row.same_text, row.impress_same_text),
        )
    table.caption = (
        f"time to first token after a prefix of {format_count(report.prefix_tokens)} tokens, and "
        "how many times faster than recomputing; loaded: share of the prefix that impress read"
    )
    table.caption_justify = "left"
    return table


def _same_words(load: bool, impress: bool) -> str:
    """Which of the two said what recomputing said."""
    if load and impress:
        return "yes"
    return "full load only" if load else "impress only" if impress else "no"


def demo_lines(report: DemoReport) -> list[str]:
    """Sum of ``impress demo`` in words; a gain too small to tell from noise is not called one."""
    gain = report.gain
    if gain >= 1 + _NOISE:
        against = f"{gain:.1f}× faster than the full load"
    elif gain > 1 - _NOISE:
        against = "as fast as the full load: here, reading less saves no time"
    else:
        against = (
            f"slower than the full load ({gain:.2f}×): here, choosing costs more than it saves"
        )
    lines = [
        f"medians: full load {report.ratio:.1f}× faster than recomputing, impress "
        f"{report.impress_ratio:.1f}×; impress was {against}"
    ]
    other = sum(not row.impress_same_text for row in report.rows)
    if other:
        lines.append(
            f"{other} of {len(report.rows)} answers of impress have other words: below retention "
            "1.0 an answer is close to the exact one, not equal"
        )
    return lines


def disk_table(report: DiskReport) -> Table:
    """Table of ``impress bench disk``: one line per kind and request size, depths side by side."""
    depths = sorted({row.depth for row in report.rows})
    table = table_of("reads", ">request", *(f">{depth} in flight" for depth in depths))
    cells: dict[tuple[str, int], list[str]] = {}
    for row in sorted(report.rows, key=lambda row: row.depth):
        line = cells.setdefault((row.kind, row.request_bytes), [])
        line.append(f"{format_bytes(row.bytes_per_s)}/s")
    for (kind, size), line in cells.items():
        table.add_row(kind, f"{format_count(size / 1024)} KiB", *line)
    return table
