from __future__ import annotations

import io
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from impress_cli import progress, render
from impress_cli.progress import ProgressView, describe
from pipelines.progress import ProgressEvent
from store.stats import QueryStats

STATS = QueryStats(
    ttft_s=0.142,
    stages_s={
        "match": 0.0004,
        "probe": 0.006,
        "identify": 0.018,
        "load": 0.031,
        "compute": 0.084,
        "other": 0.0026,
    },
    hidden_io_s=0.0,
    prompt_tokens=4160,
    reused_tokens=4096,
    forward_tokens=64,
    plan="load",
    retention=0.25,
    loaded_ratio=0.31,
    bytes={"disk": 21_300_000, "host": 5_900_000, "device": 1_900_000},
    fallback_layers=2,
)


def plain(renderable: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=160, no_color=True).print(renderable)
    return out.getvalue()


def test_the_time_line_names_every_stage_and_the_other_ways() -> None:
    line, _ = render.ttft_lines(STATS, recompute_s=5.9, full_load_s=0.41)
    assert line == (
        "TTFT 142 ms  = match 0.4 + probe 6 + identify 18 + load 31 + compute 84 + other 2.6"
        "   (recompute would take 5.90 s, full load 410 ms)"
    )


def test_the_reuse_line_says_what_was_asked_loaded_and_from_where() -> None:
    _, line = render.ttft_lines(STATS)
    assert line == (
        "prefix 4 096 of 4 160 tokens reused · kept 25 % asked, 31 % loaded · "
        "29.1 MB read (disk 21.3 MB, host 5.90 MB, device 1.90 MB) · 2 layers fell back"
    )


def test_a_long_time_is_shown_in_seconds_throughout_and_empty_stages_are_left_out() -> None:
    stages = {
        "match": 0.0,
        "probe": 0.0,
        "identify": 0.0,
        "load": 0.0,
        "compute": 5.8,
        "other": 0.1,
    }
    slow = replace(
        STATS, ttft_s=5.9, stages_s=stages, reused_tokens=0, plan="recompute", fallback_layers=0
    )
    assert render.ttft_lines(slow) == [
        "TTFT 5.90 s  = compute 5.80 + other 0.10",
        "prefix 0 of 4 160 tokens reused · everything recomputed",
    ]


def test_chunks_that_could_not_be_used_are_reported() -> None:
    _, line = render.ttft_lines(replace(STATS, recovered_chunks=3))
    assert "3 chunks could not be used and were recomputed" in line


def test_a_flat_table_shows_units_by_the_names_of_keys() -> None:
    text = plain(
        render.flat_table(
            {
                "bytes": {"kv": 94_371_840},
                "ttft_s": 0.142,
                "hit": {"disk": 0.5},
                "tokens": 4096,
                "important_hit": None,
                "children": ["a", "b"],
            }
        )
    )
    for shown in ("94.4 MB", "142 ms", "50 %", "4 096", "–", "a, b"):
        assert shown in text


def test_a_child_stands_below_its_parent_in_the_tree() -> None:
    def row(name: str, parent: str | None, start: int) -> SimpleNamespace:
        return SimpleNamespace(
            node_id=name, parent_id=parent, start=start, length=16, bytes=1000, generation=0
        )

    rows = [row("child", "root", 16), row("root", None, 0)]
    lines = plain(render.node_tree("kv", rows)).splitlines()  # type: ignore[arg-type]
    assert "root" in lines[1]
    assert "child" in lines[2]
    assert lines[2].index("child") > lines[1].index("root")


def test_verify_lines_name_the_place_and_what_to_do() -> None:
    bad = {"node": "n1", "array": "k", "layer": 3, "chunk": 7, "reason": "corrupt"}
    report = {"nodes": 1, "chunks": 10, "bytes": 1000, "bad": [bad]}
    first, last = render.verify_lines(report)
    assert first == "bad: node n1 array k layer 3 chunk 7: corrupt"
    assert "--repair" in last
    assert "all good" in render.verify_lines({**report, "bad": []})[0]


def test_progress_shows_amount_rate_and_time_left() -> None:
    event = ProgressEvent("build", 1500, 4000, "tokens", "a.txt")
    assert describe(event, 10.0, 500) == (
        "1 500 of 4 000 tokens · 100 tokens/s · 25.0 s left · a.txt"
    )
    assert describe(ProgressEvent("copy", 5e6, None, "bytes"), 2.0, 0) == "5.00 MB · 2.50 MB/s"


def test_short_work_shows_nothing_and_long_work_writes_plain_lines_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, out = [0.0], io.StringIO()
    monkeypatch.setattr("sys.stderr", out)
    with ProgressView(clock=lambda: now[0]) as view:
        for second in range(26):
            now[0] = float(second)
            view(ProgressEvent("build", second * 100, 4000, "tokens"))
            if second < progress.SHOW_AFTER_S:
                assert out.getvalue() == ""
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("build: 1 000 of 4 000 tokens")


def test_the_demo_table_shows_both_times_and_the_ratio() -> None:
    row = SimpleNamespace(
        question="who?", recompute_ttft_s=6.0, load_ttft_s=0.3, ratio=20.0, same_text=True
    )
    text = plain(render.demo_table(SimpleNamespace(rows=[row], prefix_tokens=3000, ratio=20.0)))  # type: ignore[arg-type]
    for shown in ("who?", "6.00 s", "300 ms", "20.0×", "yes", "3 000 tokens"):
        assert shown in text
