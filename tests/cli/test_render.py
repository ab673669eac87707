from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from impress_cli import progress, render
from impress_cli.progress import ProgressView, describe
from pipelines.demo import DemoReport, DemoRow
from pipelines.progress import ProgressEvent
from tests.cli.conftest import plain


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


def answer(ttft_s: float, loaded: float = 1.0, text: str = "Ada") -> SimpleNamespace:
    return SimpleNamespace(stats=SimpleNamespace(ttft_s=ttft_s, loaded_ratio=loaded), text=text)


def demo_report(impress_s: float, impress_text: str = "Ada") -> Any:
    impress = answer(impress_s, 0.52, impress_text)
    row = DemoRow("who?", answer(6.0), answer(0.3), impress)  # type: ignore[arg-type]
    sparse = SimpleNamespace(retention=0.25)
    return DemoReport(Path("kv"), "p", 3000, None, sparse, (row,), ())  # type: ignore[arg-type]


def test_the_demo_table_shows_three_times_two_ratios_and_what_was_loaded() -> None:
    text = plain(render.demo_table(demo_report(0.2)))
    for shown in (
        "who?",
        "6.00 s",
        "300 ms (20.0×)",
        "200 ms (30.0×)",
        "52 %",
        "yes",
        "impress at 25 %",
    ):
        assert shown in text
    assert "3 000 tokens" in text


@pytest.mark.parametrize(
    ("impress_s", "says"),
    [
        (0.2, "impress was 1.5× faster than the full load"),
        (0.3, "impress was as fast as the full load: here, reading less saves no time"),
        (0.29, "as fast as the full load"),
        (0.4, "impress was slower than the full load (0.75×): here, choosing costs more"),
    ],
)
def test_the_demo_says_plainly_what_impress_was_against_a_full_load(
    impress_s: float, says: str
) -> None:
    (line,) = render.demo_lines(demo_report(impress_s))
    assert says in line
    assert "full load 20.0× faster than recomputing" in line


def test_the_demo_counts_the_answers_of_impress_that_have_other_words() -> None:
    report = demo_report(0.2, "Bob")
    assert "full load only" in plain(render.demo_table(report))
    assert "1 of 1 answers of impress have other words" in render.demo_lines(report)[1]
