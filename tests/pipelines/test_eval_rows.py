"""Rows and notes from answers: what is averaged over what, and whose answers are farther away."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

pytest.importorskip("lm_eval")

from pipelines.eval_metrics import MetricValues, _aggregated
from pipelines.eval_rows import Answered, average_rows, divergence_notes, task_rows
from pipelines.eval_values import AVERAGE, NO_PREFIX, OURS, RANDOM, RECOMPUTE, Scored, Way


def scored(number: int, loglikelihoods: tuple[float, ...]) -> Scored:
    return Scored(
        document=number,
        loglikelihoods=loglikelihoods,
        greedy=(False,) * len(loglikelihoods),
        text=None,
        ttft_s=0.1,
        selected_ratio=0.25,
        loaded_ratio=0.5,
        probe_ratio=0.0,
        fallback_ratio=0.0,
        disk_bytes=10,
        read_bytes=12,
        prompt_tokens=20,
        reused_tokens=10,
        recovered_chunks=0,
        asked_ratio=None,
    )


def answered(
    way: tuple[str, str, float | None],
    answers: list[tuple[float, ...]],
    right: list[float],
    metric: str = "acc",
) -> Answered:
    values = MetricValues(metric, sum(right) / len(right), None, dict(enumerate(right)), True)
    return Answered.of(Way(*way), [scored(i, one) for i, one in enumerate(answers)], [values])


def even(count: int, off: float = 0.0) -> list[tuple[float, ...]]:
    """Documents of two choices, the first ahead by ``off`` and a little that differs."""
    return [(-1.0 + off * (1 + 0.1 * (number % 3)), -1.0) for number in range(count)]


def task(name: str, *, ours: float = 0.2, other: float = 1.0) -> list[Answered]:
    right = [1.0, 0.0] * 6
    return [
        answered((name, RECOMPUTE, None), even(12), right),
        answered((name, OURS, 0.25), even(12, ours), right),
        answered((name, "impress-paper", 0.25), even(12, other), right),
        answered((name, "impress-paper", 0.5), even(12, 5.0), right),
        answered((name, RANDOM, 0.25), even(12, -ours), right),
        answered((name, NO_PREFIX, None), even(12, 2.0), right),
    ]


def test_a_note_says_whose_answers_are_farther_beyond_chance():
    (note,) = divergence_notes([task("copa")])
    head, _, rest = note.partition(", beside ")
    assert head.startswith(f"copa at 0.25: mean KL of {OURS} 0.00")
    named = {text.split()[0]: text for text in rest.split(", ")}
    assert list(named) == ["impress-paper", RANDOM, NO_PREFIX], "those at the same retention"
    assert "more: " in named["impress-paper"]
    assert "not told apart" in named[RANDOM], "as far on the other side is no farther"


def test_less_divergence_than_ours_is_said_as_plainly():
    (note,) = divergence_notes([task("copa", ours=1.0, other=0.1)])
    assert "impress-paper" in note
    assert "(less)" in note


def test_several_tasks_also_get_a_note_of_their_average():
    notes = divergence_notes([task("copa"), task("rte", ours=0.4)])
    assert [note.split(" at ")[0] for note in notes] == ["copa", "rte", AVERAGE]
    without_random = [one for one in task("rte") if one.way.system != RANDOM]
    last = divergence_notes([task("copa"), without_random])[-1]
    assert last.startswith(AVERAGE)
    assert RANDOM not in last, "a mean over fewer tasks is another mean"


def test_an_average_is_of_all_tasks_or_not_there():
    rows = [row for found in (task("copa"), task("rte")[:3]) for row in task_rows(found)]
    averaged = {(row.system, row.retention) for row in average_rows(rows)}
    assert averaged == {(RECOMPUTE, None), (OURS, 0.25), ("impress-paper", 0.25)}


def test_flips_are_counted_of_right_and_wrong_alone():
    right = [1.0, 0.0, 1.0]
    found = [
        answered(("t", RECOMPUTE, None), even(3), [0.5, 0.25, 1.0], "bleu"),
        answered(("t", OURS, 0.25), even(3), [0.5 + 1e-9, 0.2, 1.0], "bleu"),
    ]
    (_, ours) = task_rows(found)
    assert (ours.flips_worse, ours.flips_better, ours.mcnemar_p) == (None, None, None)
    assert ours.difference is not None
    binary = [
        answered(("u", RECOMPUTE, None), even(3), right, "bleu"),
        answered(("u", OURS, 0.25), even(3), [0.0, 0.0, 1.0], "bleu"),
    ]
    rows = [row for one in (found, binary) for row in task_rows(one)]
    ours = average_rows(rows)[1]
    assert ours.system == OURS
    assert ours.flips_worse is None
    assert ours.difference is not None


def test_choices_asked_for_alone_are_no_choices():
    reference = [(-1.0, -2.0, -9.0, -1.0)]
    found = [
        answered(("t", RECOMPUTE, None), reference, [1.0], "acc_mutual_info"),
        answered(("t", OURS, 0.25), [(-1.0, -2.0, -1.0, -9.0)], [1.0], "acc_mutual_info"),
    ]
    assert task_rows(found)[1].kl_mean == 0.0


def test_no_number_is_no_agreement():
    found = [
        answered(("t", RECOMPUTE, None), even(2), [1.0, 1.0]),
        answered(("t", OURS, 0.25), [(-1.0, math.nan), (-1.0, math.nan)], [1.0, 1.0]),
    ]
    assert task_rows(found)[1].kl_mean is None
    assert divergence_notes([found]) == []


def test_what_is_aggregated_to_no_mean_is_not_compared_by_document():
    perplexity = SimpleNamespace(
        aggregation=lambda: {"perplexity": lambda items: math.exp(-sum(items) / len(items))},
        higher_is_better=lambda: {"perplexity": False},
    )
    found = _aggregated(perplexity, "perplexity", "perplexity", {0: -1.0, 1: -2.0})
    assert found.value == pytest.approx(math.exp(1.5))
    assert (found.values, found.stderr, found.higher_is_better) == ({}, None, False)
