"""Rows of an evaluation from its answers: metrics, differences, averages, what controls say.

Metrics are lm-eval's (`eval_metrics`), statistics `eval_stats`'. Nothing here answers anything.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from pipelines.eval_metrics import MetricValues
from pipelines.eval_stats import (
    Interval,
    Paired,
    answer_kl,
    average_interval,
    average_stderr,
    known_mean,
    mcnemar_exact,
    normal_interval,
    paired,
    separation,
)
from pipelines.eval_values import AVERAGE, CONTROLS, NO_PREFIX, OURS, EvalRow, Scored, Way


class Answered(NamedTuple):
    """A task's documents as answered in one way, with lm-eval's metrics of the answers."""

    way: Way
    answers: tuple[Scored, ...]
    metrics: tuple[MetricValues, ...]

    @classmethod
    def of(cls, way: Way, answers: Sequence[Scored], metrics: Sequence[MetricValues]) -> Answered:
        """Join answers and metrics; each answer gets its document's values."""
        full = (
            replace(
                answer,
                metrics={
                    one.name: one.values[answer.document]
                    for one in metrics
                    if answer.document in one.values
                },
            )
            for answer in answers
        )
        return cls(way, tuple(full), tuple(metrics))

    def metric(self, name: str) -> MetricValues:
        """The metric of a name that the task has."""
        return next(one for one in self.metrics if one.name == name)


def primary_metric(metrics: Iterable[str]) -> str:
    """The metric that notes and verdicts go by first: accuracy where there is one."""
    names = list(metrics)
    return next((name for name in names if name.partition(",")[0] == "acc"), names[0])


def task_rows(found: Sequence[Answered]) -> list[EvalRow]:
    """Rows of one task; the first way is what the others are compared with."""
    reference = found[0]
    return [
        _row(one, metric, None if one is reference else reference)
        for one in found
        for metric in one.metrics
    ]


def _row(one: Answered, metric: MetricValues, reference: Answered | None) -> EvalRow:
    other = None if reference is None else _paired(reference.metric(metric.name), metric)
    answers = one.answers
    return EvalRow(
        *one.way,
        metric=metric.name,
        value=metric.value,
        stderr=metric.stderr,
        n=len(answers),
        difference=None if other is None else other.difference,
        interval=None if other is None else other.interval,
        flips_worse=None if other is None else other.flips_worse,
        flips_better=None if other is None else other.flips_better,
        mcnemar_p=None if other is None else other.mcnemar_p,
        kl_mean=None if reference is None else _kl(reference, one),
        asked_ratio=_asked(one),
        selected_ratio=statistics.fmean(answer.selected_ratio for answer in answers),
        loaded_ratio=statistics.fmean(answer.loaded_ratio for answer in answers),
        probe_ratio=statistics.fmean(answer.probe_ratio for answer in answers),
        fallback_ratio=statistics.fmean(answer.fallback_ratio for answer in answers),
        ttft_mean_s=known_mean([answer.ttft_s for answer in answers]),
        disk_bytes=statistics.fmean(answer.disk_bytes for answer in answers),
        control=one.way.system in CONTROLS,
        higher_is_better=metric.higher_is_better,
    )


def _paired(reference: MetricValues, system: MetricValues) -> Paired | None:
    """How two ways differ where both have a value; None where no document has."""
    both = sorted(reference.values.keys() & system.values.keys())
    if not both:
        return None
    return paired(
        [reference.values[number] for number in both],
        [system.values[number] for number in both],
        higher_is_better=system.higher_is_better,
    )


def _kl(reference: Answered, one: Answered) -> float | None:
    return known_mean(list(_divergences(reference, one).values()))


def _divergences(reference: Answered, one: Answered) -> dict[int, float]:
    """By document, in nats; without those that have no choices or no numbers."""
    # Beside each choice a task with this metric also asks for the choice alone.
    alone = any(metric.name.startswith("acc_mutual_info") for metric in reference.metrics)
    found = {}
    for before, after in zip(reference.answers, one.answers, strict=True):
        if before.loglikelihoods:
            choices = len(before.loglikelihoods) // (2 if alone else 1)
            kl = answer_kl(before.loglikelihoods[:choices], after.loglikelihoods[:choices])
            if kl is not None:
                found[before.document] = kl
    return found


def _asked(one: Answered) -> float | None:
    own = known_mean([answer.asked_ratio for answer in one.answers])
    return one.way.retention if own is None else own


def average_rows(rows: Sequence[EvalRow]) -> list[EvalRow]:
    """Plain means over the tasks, for each metric that two tasks or more have.

    Only of ways that answered all tasks with the metric: others' means would be of other tasks.
    """
    groups: dict[tuple[str, float | None, str], list[EvalRow]] = {}
    for row in rows:
        groups.setdefault((row.system, row.retention, row.metric), []).append(row)
    tasks: Counter[str] = Counter()
    for (_, _, metric), group in groups.items():
        tasks[metric] = max(tasks[metric], len(group))
    return [
        _average(group)
        for (_, _, metric), group in groups.items()
        if len(group) == tasks[metric] > 1
    ]


def _average(rows: Sequence[EvalRow]) -> EvalRow:
    differences = [row.difference for row in rows if row.difference is not None]
    intervals = [Interval(*row.interval) for row in rows if row.interval is not None]
    compared = len(differences) == len(rows)
    flips = [
        (row.flips_worse, row.flips_better)
        for row in rows
        if row.flips_worse is not None and row.flips_better is not None
    ]
    counted = len(flips) == len(rows)
    worse, better = (sum(counts) for counts in zip(*flips, strict=True)) if counted else (0, 0)
    return replace(
        rows[0],
        task=AVERAGE,
        value=statistics.fmean(row.value for row in rows),
        stderr=average_stderr([row.stderr for row in rows]),
        n=sum(row.n for row in rows),
        difference=statistics.fmean(differences) if compared else None,
        interval=average_interval(differences, intervals) if compared else None,
        flips_worse=worse if counted else None,
        flips_better=better if counted else None,
        mcnemar_p=mcnemar_exact(worse, better) if counted else None,
        kl_mean=known_mean([row.kl_mean for row in rows]),
        asked_ratio=known_mean([row.asked_ratio for row in rows]),
        selected_ratio=statistics.fmean(row.selected_ratio for row in rows),
        loaded_ratio=statistics.fmean(row.loaded_ratio for row in rows),
        probe_ratio=statistics.fmean(row.probe_ratio for row in rows),
        fallback_ratio=statistics.fmean(row.fallback_ratio for row in rows),
        ttft_mean_s=known_mean([row.ttft_mean_s for row in rows]),
        disk_bytes=statistics.fmean(row.disk_bytes for row in rows),
    )


def divergence_notes(tasks: Sequence[Sequence[Answered]]) -> list[str]:
    """How far answers of `OURS` are from recomputing's, beside everyone's at the same retention.

    One sentence per task and retention, and of two tasks or more one of their average. More and
    less are beyond chance: the 95 % interval of the paired difference has no 0 in it.
    """
    notes = []
    by_share: dict[float, list[dict[str, _Gap]]] = {}
    for found in tasks:
        for ours in (one for one in found if one.way.system == OURS and one.way.retention):
            gaps = _gaps(found, ours)
            if gaps and ours.way.retention is not None:
                notes.append(_gap_note(ours.way.task, ours.way.retention, gaps))
                by_share.setdefault(ours.way.retention, []).append(gaps)
    for share, several in by_share.items():
        if len(several) == len(tasks) > 1:
            notes.append(_gap_note(AVERAGE, share, _average_gaps(several)))
    return notes


class _Gap(NamedTuple):
    """Mean divergences of `OURS` and of another, and the difference other - ours."""

    ours: float
    other: float
    interval: Interval


def _gaps(found: Sequence[Answered], ours: Answered) -> dict[str, _Gap]:
    """By the name of whoever answered at the same retention, or without the prefix."""
    own, gaps = _divergences(found[0], ours), {}
    for one in found:
        other = _divergences(found[0], one)
        both = sorted(own.keys() & other.keys())
        rival = one.way.system != OURS and one.way.retention == ours.way.retention
        if both and (rival or one.way.system == NO_PREFIX):
            values = np.array([[own[number], other[number]] for number in both])
            mean = values.mean(0)
            interval = normal_interval(values[:, 1] - values[:, 0])
            gaps[one.way.system] = _Gap(float(mean[0]), float(mean[1]), interval)
    return gaps


def _average_gaps(several: Sequence[Mapping[str, _Gap]]) -> dict[str, _Gap]:
    """Means over tasks, of whoever answered all of them."""
    averaged = {}
    for name in several[0]:
        gaps = [one[name] for one in several if name in one]
        if len(gaps) == len(several):
            interval = average_interval(
                [gap.other - gap.ours for gap in gaps], [gap.interval for gap in gaps]
            )
            ours = statistics.fmean(gap.ours for gap in gaps)
            averaged[name] = _Gap(ours, statistics.fmean(gap.other for gap in gaps), interval)
    return averaged


def _gap_note(task: str, share: float, gaps: Mapping[str, _Gap]) -> str:
    ours = next(iter(gaps.values())).ours
    others = ", ".join(f"{name} {gap.other:.2g} ({_beyond(gap)})" for name, gap in gaps.items())
    return f"{task} at {share:.4g}: mean KL of {OURS} {ours:.2g}, beside {others}"


def _beyond(gap: _Gap) -> str:
    """How a divergence compares, and by which factor."""
    low, high = gap.interval
    if low > 0:
        if gap.ours <= 0:
            return "more"
        factor = gap.other / gap.ours
        return f"more: {factor:.1f} times" if factor < 9.95 else f"more: {factor:.0f} times"
    return "less" if high < 0 else "not told apart"


def control_notes(found: Sequence[Answered]) -> list[str]:
    """What the controls of one task say: a claim counts only where a control is worse."""
    notes = []
    for ours in (one for one in found if one.way.system == OURS):
        controls = [
            one
            for one in found
            if one.way.system in CONTROLS and one.way.retention in (None, ours.way.retention)
        ]
        alike = [control.way.system for control in controls if not _is_worse(control, ours)]
        if alike:
            share = "" if ours.way.retention is None else f" at {ours.way.retention:.4g}"
            notes.append(
                f"{ours.way.task} can't tell {OURS}{share} from {' and '.join(alike)}: they are "
                "not worse beyond chance, so that no claim about accuracy rests on this task"
            )
    return notes


def _is_worse(control: Answered, ours: Answered) -> bool:
    """Whether a control is worse than `OURS` in the first metric, beyond chance."""
    name = primary_metric(one.name for one in ours.metrics)
    values, other = ours.metric(name), control.metric(name)
    both = sorted(values.values.keys() & other.values.keys())
    if not both:
        return False
    found = separation(
        [values.values[number] for number in both],
        [other.values[number] for number in both],
        higher_is_better=values.higher_is_better,
    )
    return found.worse
