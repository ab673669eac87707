"""What evaluations of a store found: a short verdict kept in it, looked up when a query is sparse.

Owns what a verdict holds and the sentences about it; `pipelines.evaluate` does the evaluation and
`PrefixStore.add_verdict` keeps it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelines.eval_values import EvalReport, EvalRow

#: An interval that reaches further below 0 than this says too little: 5 points.
_TELLING = 0.05
#: Figures of a row that a verdict takes over.
_FIGURES = (
    "system",
    "retention",
    "metric",
    "higher_is_better",
    "value",
    "n",
    "difference",
    "interval",
    "flips_worse",
    "flips_better",
    "mcnemar_p",
    "kl_mean",
    "loaded_ratio",
)


def verdicts_of(report: EvalReport, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a report's verdicts: one per sparse system and retention, compared with recomputing.

    Parameters
    ----------
    facts
        What holds for all of them: model, date, versions.
    """
    from pipelines.eval_report import headline_rows

    return [
        {**facts, "tasks": _tasks_of(report, row), **_figures(row)}
        for row in headline_rows(report)
        if row.difference is not None and row.retention is not None and not row.control
    ]


def _tasks_of(report: EvalReport, row: EvalRow) -> list[str]:
    """Tasks that a row is about: of an average, those that have its metric."""
    names = [task.name for task in report.tasks if row.metric in task.metrics]
    return [row.task] if row.task in names else names


def _figures(row: EvalRow) -> dict[str, Any]:
    from impress_cli.eval_tables import json_value

    values = asdict(row)
    return {name: json_value(values[name]) for name in _FIGURES}


def verdict_notes(
    verdicts: Iterable[Mapping[str, Any]], system: str, retention: float, store: Path
) -> list[str]:
    """Return what should be said of the accuracy of a query, one sentence each.

    Parameters
    ----------
    verdicts
        Those of the store, oldest first; the newest counts.
    system, retention
        Who answers, and the share of the prefix that it selects; at 1.0 nothing is lost.
    """
    if retention >= 1.0:
        return []
    found = [verdict for verdict in verdicts if _is_about(verdict, system, retention)]
    if not found:
        systems = "" if system == "impress" else f" --systems recompute,{system}"
        return [
            f"what retention {retention:g} costs in accuracy was never measured on this store; "
            f"'impress eval --store {store} --retention {retention:g} --tasks NAMES{systems}' "
            "measures it"
        ]
    return _cost(found[-1])


def _is_about(verdict: Mapping[str, Any], system: str, retention: float) -> bool:
    known = verdict.get("retention")
    return (
        verdict.get("system") == system
        and isinstance(known, int | float)
        and math.isclose(known, retention, abs_tol=1e-9)
    )


def _cost(verdict: Mapping[str, Any]) -> list[str]:
    """Say what was lost, where chance is no explanation, or that too little was asked to tell."""
    low, high = verdict.get("interval") or (None, None)
    if low is None or high is None or not verdict.get("higher_is_better"):
        return []
    asked = f"{', '.join(verdict['tasks'])} ({verdict['n']} documents)"
    span = f"95 %: {100 * low:+.1f} to {100 * high:+.1f}"
    share, metric = verdict["retention"], verdict["metric"]
    change = 100 * verdict["difference"]
    if high < 0:
        return [
            f"retention {share:g} was measured to cost {-change:.1f} points of "
            f"{metric} on {asked}; {span}; a larger one costs less"
        ]
    if low < -_TELLING:
        return [
            f"what retention {share:g} costs was measured on too little to tell: {metric} on "
            f"{asked} changed by {change:+.1f} points; {span}"
        ]
    return []
