"""An evaluation in words and pictures, from a report made by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipelines.eval_plots import plot_eval
from pipelines.eval_report import (
    COLUMNS,
    cells,
    headline_rows,
    markdown,
    require_markdown,
    table_rows,
    write_markdown,
)
from pipelines.eval_values import (
    AVERAGE,
    CONTROLS,
    EvalReport,
    EvalRow,
    RecomputeFacts,
    TaskFacts,
)
from store.errors import InvalidValueError, StoreWriteError

ROW = EvalRow(
    task="rte",
    system="impress",
    retention=0.25,
    metric="acc",
    value=0.614,
    stderr=0.0293,
    n=277,
    difference=-0.0072,
    interval=(-0.0251, 0.0098),
    flips_worse=5,
    flips_better=3,
    mcnemar_p=0.7265625,
    kl_mean=0.00123,
    asked_ratio=0.25,
    selected_ratio=0.25,
    loaded_ratio=0.344,
    probe_ratio=0.078,
    fallback_ratio=0.0,
    ttft_mean_s=0.142,
    disk_bytes=29_140_000,
)
REFERENCE = replace(
    ROW,
    system="recompute",
    retention=None,
    value=0.6212,
    difference=None,
    interval=None,
    flips_worse=None,
    flips_better=None,
    mcnemar_p=None,
    kl_mean=None,
    asked_ratio=None,
    selected_ratio=1.0,
    loaded_ratio=1.0,
    probe_ratio=0.0,
    ttft_mean_s=5.9,
    disk_bytes=0,
)
RTE = TaskFacts("rte", "validation", 277, 277, 25, 4050, "ab", ("acc",), 12)
PIQA = TaskFacts("piqa", "validation", 300, 1838, 40, 4080, "cd", ("acc", "acc_norm"), 12)


def report(*rows: EvalRow, tasks: tuple[TaskFacts, ...] = (RTE,)) -> EvalReport:
    return EvalReport(
        rows,
        tasks,
        RecomputeFacts(20, 20, 1e-5, 257),
        ("intervals hold 95 %", "copa | random: no worse"),
        ("rte: 3 documents\nare among the shots",),
        {},
    )


def two_tasks() -> EvalReport:
    """Two systems at two retentions on rte and piqa, with averages and a control."""
    rows: list[EvalRow] = []
    for task, metrics in (("rte", ("acc",)), ("piqa", ("acc", "acc_norm")), (AVERAGE, ("acc",))):
        for metric in metrics:
            rows.append(replace(REFERENCE, task=task, metric=metric))
        for system in ("impress-paper", "impress", *CONTROLS):
            for share in (0.1, 0.25) if system != "no-prefix" else (None,):
                rows += [
                    replace(
                        ROW,
                        task=task,
                        system=system,
                        retention=share,
                        metric=metric,
                        kl_mean=0.01 / (share or 0.01),
                        loaded_ratio=share or 0.0,
                        control=system in CONTROLS,
                    )
                    for metric in metrics
                ]
    return report(*rows, tasks=(RTE, PIQA))


def by_column(row: EvalRow) -> dict[str, str]:
    return dict(zip((name.lstrip(">") for name in COLUMNS), cells(row), strict=True))


def test_a_row_reads_in_per_cent_and_points() -> None:
    assert by_column(ROW) == {
        "task": "rte",
        "system": "impress",
        "asked": "25 %",
        "selected": "25 %",
        "loaded": "34 %",
        "probe": "7.8 %",
        "fell back": "0 %",
        "TTFT": "142 ms",
        "disk": "29.1 MB",
        "KL": "0.0012",
        "metric": "acc",
        "value": "61.4 ± 2.9",
        "difference": "-0.72",
        "95 %": "-2.51 … +0.98",
        "flips": "5/3",
        "p": "0.73",
    }


def test_what_is_not_known_is_a_dash_and_what_is_zero_is_not() -> None:
    found = by_column(replace(REFERENCE, stderr=None, ttft_mean_s=None))
    dashes = {name for name, text in found.items() if text == "–"}
    assert dashes == {"asked", "TTFT", "KL", "difference", "95 %", "flips", "p"}
    assert (found["value"], found["disk"], found["fell back"]) == ("62.1", "0", "0 %")
    assert by_column(replace(ROW, difference=0.0, mcnemar_p=1.0))["difference"] == "+0.00"
    assert by_column(replace(ROW, kl_mean=0.0))["KL"] == "0"
    assert by_column(replace(ROW, kl_mean=2e-15))["KL"] == "0"
    assert by_column(replace(ROW, kl_mean=2e-5))["KL"] == "2e-05"


def test_a_metric_that_is_no_share_keeps_its_own_scale() -> None:
    row = replace(ROW, metric="word_perplexity", value=23.456, stderr=0.51, difference=0.0123)
    found = by_column(replace(row, interval=(float("-inf"), float("inf"))))
    assert (found["value"], found["difference"]) == ("23.46 ± 0.51", "+0.0123")
    assert found["95 %"] == "–"


def test_shares_and_times_are_shown_once_for_all_metrics_of_a_way() -> None:
    norm = replace(ROW, metric="acc_norm", value=0.7, kl_mean=0.5)
    other = replace(ROW, retention=0.1)
    first, second, third = table_rows(report(ROW, norm, other))
    assert first == cells(ROW)
    assert [COLUMNS[n] for n, text in enumerate(second) if not text] == [
        ">selected",
        ">loaded",
        ">probe",
        ">fell back",
        ">TTFT",
        ">disk",
        ">KL",
    ]
    assert (second[0], second[1], second[2], second[11]) == ("rte", "impress", "25 %", "70.0 ± 2.9")
    assert third == cells(other)


def test_the_average_is_the_headline_of_several_tasks() -> None:
    found = headline_rows(two_tasks())
    assert {row.task for row in found} == {AVERAGE}
    assert {row.metric for row in found} == {"acc"}
    assert [(row.system, row.retention) for row in found][:3] == [
        ("recompute", None),
        ("impress-paper", 0.1),
        ("impress-paper", 0.25),
    ]


def test_one_task_is_its_own_headline_by_its_first_metric() -> None:
    rows = [replace(ROW, task="piqa", metric=metric) for metric in ("acc", "acc_norm")]
    assert headline_rows(report(*rows, tasks=(PIQA,))) == rows[:1]
    only = replace(PIQA, metrics=("acc_norm", "acc"))
    assert headline_rows(report(*rows, tasks=(only,))) == rows[1:]


def test_tasks_that_share_no_metric_are_headlines_each() -> None:
    other = replace(RTE, name="sums", metrics=("exact_match",))
    rows = [ROW, replace(ROW, task="sums", metric="exact_match")]
    assert headline_rows(report(*rows, tasks=(RTE, other))) == rows


def three_tasks() -> EvalReport:
    """An average of rte and piqa, and a task with a metric of its own."""
    found, sums = two_tasks(), replace(RTE, name="sums", metrics=("exact_match",))
    own = replace(ROW, task="sums", metric="exact_match")
    norm = replace(own, metric="acc_norm")
    return report(*found.rows, own, norm, tasks=(RTE, sums, PIQA))


def test_a_task_that_no_average_covers_is_a_headline_beside_it() -> None:
    found = headline_rows(three_tasks())
    assert found[:-1] == headline_rows(two_tasks())
    assert (found[-1].task, found[-1].metric) == ("sums", "exact_match")


def test_each_metric_that_tasks_name_first_has_its_average_as_headline() -> None:
    tasks = [replace(RTE, name=name) for name in "ab"]
    tasks += [replace(RTE, name=name, metrics=("exact_match", "f1")) for name in "cd"]
    averages = [replace(ROW, task=AVERAGE, metric=name) for name in ("f1", "exact_match", "acc")]
    assert headline_rows(report(*averages, tasks=tuple(tasks))) == averages[:0:-1]


def test_markdown_holds_what_was_asked_every_row_and_every_note() -> None:
    text = markdown(report(REFERENCE, ROW), "Costs", {"model": "tiny", "versions": "impress 1"})
    lines = text.splitlines()
    assert lines[0] == "# Costs"
    assert "- versions: impress 1" in lines
    assert "| rte | validation | 277 | 277 | 25 | 4050 | 12 |" in lines
    assert f"| {' | '.join(cells(ROW))} |" in lines
    assert f"| {' | '.join(cells(REFERENCE))} |" in lines
    assert "- copa | random: no worse" in lines
    assert "- rte: 3 documents are among the shots" in lines
    assert "selected, loaded, probe: shares" in text
    assert text.endswith("\n")
    assert not text.endswith("\n\n")


def test_markdown_tables_have_as_many_cells_in_every_line() -> None:
    text = markdown(report(replace(ROW, system="odd|name"), REFERENCE), "Costs", {})
    grid = [line for line in text.splitlines() if line.startswith("| ")]
    wide = [line.replace("\\|", "") for line in grid][-4:]
    assert {line.count("|") for line in wide} == {len(COLUMNS) + 1}
    assert "odd\\|name" in text
    assert ("---:" in wide[1]) == any(name.startswith(">") for name in COLUMNS)


def test_a_place_that_can_not_be_written_is_refused_beforehand(tmp_path: Path) -> None:
    require_markdown(tmp_path / "a.md")
    assert not list(tmp_path.iterdir()), "asking leaves nothing"
    with pytest.raises(InvalidValueError, match="is a folder; name a file"):
        require_markdown(tmp_path)
    with pytest.raises(InvalidValueError, match=r"can't write into .*none; name a file"):
        require_markdown(tmp_path / "none" / "a.md")
    with pytest.raises(StoreWriteError, match="give --markdown another place"):
        write_markdown(tmp_path, "text")


def test_a_picture_shows_systems_retentions_and_levels(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "a.png"
    plot_eval(two_tasks(), path, "tiny")
    assert path.read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(StoreWriteError, match="give --plot another place"):
        plot_eval(two_tasks(), tmp_path / "none" / "a.png", "tiny")


def test_a_picture_of_answers_that_are_all_equal_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "a.png"
    plot_eval(report(REFERENCE, replace(ROW, kl_mean=0.0, stderr=None)), path, "tiny")
    assert path.stat().st_size > 5000


def test_a_picture_of_an_average_names_the_tasks_that_it_is_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    titles: list[str] = []
    monkeypatch.setattr(
        figure.Figure, "suptitle", lambda _self, text, **_options: titles.append(text)
    )
    plot_eval(three_tasks(), tmp_path / "a.png", "tiny")
    assert titles == ["tiny: average of rte, piqa, 277 documents"]
