"""The two lines after an answer, from hand-made statistics."""

from __future__ import annotations

from dataclasses import replace

from impress_cli.ttft import ttft_lines
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
    selected_ratio=0.25,
    loaded_ratio=0.31,
    bytes={"disk": 21_300_000, "host": 5_900_000, "device": 1_900_000},
    fallback_layers=2,
)


def test_the_time_line_names_every_stage_and_the_other_ways() -> None:
    line, _ = ttft_lines(STATS, recompute_s=5.9, full_load_s=0.41)
    assert line == (
        "TTFT 142 ms  = match 0.4 + probe 6 + identify 18 + load 31 + compute 84 + other 2.6"
        "   (recompute would take 5.90 s, full load 410 ms)"
    )


def test_the_reuse_line_says_what_was_asked_loaded_and_from_where() -> None:
    _, line = ttft_lines(STATS, layers=30)
    assert line == (
        "prefix 4 096 of 4 160 tokens reused · kept 25 % asked, 31 % loaded · "
        "29.1 MB read (disk 21.3 MB, host 5.90 MB, device 1.90 MB) · 2 of 30 layers fell back"
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
    assert ttft_lines(slow) == [
        "TTFT 5.90 s  = compute 5.80 + other 0.10",
        "prefix 0 of 4 160 tokens reused · everything recomputed",
    ]


def test_chunks_that_could_not_be_used_are_reported() -> None:
    _, line = ttft_lines(replace(STATS, recovered_chunks=3))
    assert "3 chunks could not be used and were recomputed" in line


def test_a_selected_share_that_differs_and_evidence_that_was_read_are_named() -> None:
    _, line = ttft_lines(replace(STATS, selected_ratio=0.28, probe_ratio=0.078), layers=30)
    assert "kept 25 % asked, 28 % selected, 31 % loaded, 7.8 % probe · " in line


def test_without_a_number_of_layers_only_those_that_fell_back_are_counted() -> None:
    assert ttft_lines(STATS)[1].endswith(" · 2 layers fell back")


def test_a_full_load_shows_nothing_of_choosing() -> None:
    full = replace(
        STATS,
        retention=1.0,
        selected_ratio=1.0,
        loaded_ratio=1.0,
        probe_ratio=0.0,
        fallback_layers=0,
    )
    assert ttft_lines(full)[1] == (
        "prefix 4 096 of 4 160 tokens reused · kept 100 % asked, 100 % loaded · "
        "29.1 MB read (disk 21.3 MB, host 5.90 MB, device 1.90 MB)"
    )
