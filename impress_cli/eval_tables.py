"""Table and JSON object of ``impress eval``: plain values in. Nothing here prints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from impress_cli.envelope import versions
from impress_cli.render import table_of

if TYPE_CHECKING:
    from rich.table import Table

    from pipelines.eval_values import EvalOptions, EvalReport

#: Packages that decide, beside those of every object, what a task asks and how it is scored.
_DISTRIBUTIONS = ("lm-eval", "datasets", "tokenizers")
_OPTIONS = (
    "systems",
    "retention",
    "limit",
    "num_fewshot",
    "max_prefix_tokens",
    "data_dir",
    "include_path",
    "seed",
    "controls",
    "recompute_all",
)


def eval_versions() -> dict[str, str]:
    """Versions of what decides the answers and their scores."""
    found = versions()
    for name in _DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def eval_object(report: EvalReport, options: EvalOptions) -> dict[str, Any]:
    """JSON object of a report (docs/json.md, ``impress.eval/1``).

    What was done to stores in this run is left out, so that a run that was killed and resumed has
    the same object as one that was not.
    """
    value = {
        "rows": [asdict(row) for row in report.rows],
        "tasks": [asdict(task) for task in report.tasks],
        **{name: getattr(options, name) for name in _OPTIONS},
        "recompute": report.recompute._asdict(),
        "documents": [
            {**way._asdict(), "answers": [asdict(scored) for scored in answers]}
            for way, answers in report.documents.items()
        ],
        "notes": report.notes,
        "warnings": report.warnings,
    }
    found = json_value(value)
    assert isinstance(found, dict)
    return found


def json_value(value: Any) -> Any:
    """Return a value as JSON has it: paths as text; what is no finite number as null."""
    if isinstance(value, Mapping):
        return {name: json_value(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(one) for one in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None  # JSON has no infinity, and readers stop at one
    return value


def eval_table(report: EvalReport) -> Table:
    """Table of ``impress eval``: a line per way to answer and metric."""
    from pipelines.eval_report import COLUMNS, LEGEND, table_rows

    table = table_of(*COLUMNS, dense=True)
    before = None
    for texts in table_rows(report):
        if before not in (None, texts[0]):
            table.add_section()
        before = texts[0]
        table.add_row(*texts)
    table.caption = LEGEND
    table.caption_justify = "left"
    return table


def task_lines(report: EvalReport) -> list[str]:
    """Return what was asked, one line per task."""
    return [
        f"{task.name}: {task.n} of {task.documents} documents of {task.split} behind "
        f"{task.prefix_tokens} tokens with {task.shots} shots"
        for task in report.tasks
    ]
