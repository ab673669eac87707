"""The two lines after an answer: where the time went, and what of the prefix was used.

Plain values in, text out. Nothing here prints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from impress_cli.units import (
    format_bytes,
    format_count,
    format_ms,
    format_percent,
    format_seconds,
)

if TYPE_CHECKING:
    from store.stats import QueryStats

STAGES = ("match", "probe", "identify", "load", "compute", "other")
TIERS = ("disk", "host", "device")


def ttft_lines(
    stats: QueryStats,
    *,
    layers: int = 0,
    recompute_s: float | None = None,
    full_load_s: float | None = None,
) -> list[str]:
    """Two lines after an answer: where the time to the first token went, and what was reused.

    Stages that took no time are left out. ``layers`` is the number of layers that chose what to
    load, 0 where none did. ``recompute_s`` and ``full_load_s`` are estimates of the other ways to
    answer, shown where known.
    """
    return [_time_line(stats, recompute_s, full_load_s), _reuse_line(stats, layers)]


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


def _reuse_line(stats: QueryStats, layers: int) -> str:
    reused = f"{format_count(stats.reused_tokens)} of {format_count(stats.prompt_tokens)} tokens"
    parts = [f"prefix {reused} reused"]
    if stats.reused_tokens:
        parts.append(_kept_text(stats))
        parts.append(_read_text(stats.bytes))
    else:
        parts.append("everything recomputed")
    if stats.fallback_layers:
        of = f"{stats.fallback_layers} of {layers}" if layers else str(stats.fallback_layers)
        parts.append(f"{of} layers fell back")
    if stats.recovered_chunks:
        parts.append(f"{stats.recovered_chunks} chunks could not be used and were recomputed")
    return " · ".join(parts)


def _kept_text(stats: QueryStats) -> str:
    """Shares of the reused KV; what equals the share asked for, or is nothing, is left out."""
    asked, selected = format_percent(stats.retention), format_percent(stats.selected_ratio)
    parts = [f"kept {asked} asked"]
    if selected != asked:
        parts.append(f"{selected} selected")
    parts.append(f"{format_percent(stats.loaded_ratio)} loaded")
    if stats.probe_ratio:
        parts.append(f"{format_percent(stats.probe_ratio)} probe")
    return ", ".join(parts)


def _read_text(moved: Mapping[str, float]) -> str:
    split = ", ".join(f"{tier} {format_bytes(moved[tier])}" for tier in TIERS if moved.get(tier))
    total = format_bytes(sum(moved.get(tier, 0) for tier in TIERS))
    return f"{total} read" + (f" ({split})" if split else "")
