"""An evaluation in words: its table's cells, its headline rows, its Markdown. Computes nothing.

The table in the README is `markdown`'s output; `impress eval` shows the same cells.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from pipelines.eval_values import AVERAGE, EvalReport, EvalRow
from store.errors import InvalidValueError, StoreWriteError

#: What stands where there is nothing to show.
NOTHING = "–"
#: A mean divergence up to this is rounding.
NO_DIVERGENCE = 1e-9
#: Heads of the table's columns; those that begin with ``>`` are aligned to the right.
COLUMNS = (
    "task",
    "system",
    ">asked",
    ">selected",
    ">loaded",
    ">probe",
    ">fell back",
    ">TTFT",
    ">disk",
    ">KL",
    "metric",
    ">value",
    ">difference",
    ">95 %",
    ">flips",
    ">p",
)
#: What the columns mean.
LEGEND = (
    "asked: share of the prefix to select (random and static load as much as impress at that "
    "share); selected, loaded, probe: shares of the prefix's tokens, of its chunks and of its KV's "
    "bytes; fell back: layers that read all keys; TTFT: mean time to the first token; disk: "
    "mean bytes from disk of a document; KL: mean divergence of the answers' distribution from "
    "recompute's in nats; value: with its standard error, in % where it is a share; difference: to "
    "recompute on the same documents, in points where the value is in %; flips: answers that got "
    "worse/better; p: McNemar's, exact"
)
#: Columns that are the same for all metrics of a way to answer, shown once.
_OF_THE_WAY = slice(3, 10)
#: Beginnings of the names of metrics that lie between 0 and 1.
_SHARES = ("acc", "exact_match", "em", "f1")


def table_rows(report: EvalReport) -> Iterator[list[str]]:
    """Texts of all rows, one per column of `COLUMNS`; shares and times once per way to answer."""
    for _, rows in itertools.groupby(
        report.rows, lambda row: (row.task, row.system, row.retention)
    ):
        for number, row in enumerate(rows):
            texts = cells(row)
            if number:
                texts[_OF_THE_WAY] = [""] * len(texts[_OF_THE_WAY])
            yield texts


def is_share(metric: str) -> bool:
    """Whether a metric lies between 0 and 1, so that it is told in % and points."""
    return metric.startswith(_SHARES)


def cells(row: EvalRow) -> list[str]:
    """Texts of a row, one per column of `COLUMNS`."""
    share = is_share(row.metric)
    flips = row.flips_worse is not None and row.flips_better is not None
    return [
        row.task,
        row.system,
        _known(row.retention, lambda asked: f"{100 * asked:.4g} %"),
        percent(row.selected_ratio),
        percent(row.loaded_ratio),
        percent(row.probe_ratio),
        percent(row.fallback_ratio),
        _known(row.ttft_mean_s, _seconds),
        _megabytes(row.disk_bytes),
        _known(row.kl_mean, lambda kl: f"{kl:.2g}" if kl > NO_DIVERGENCE else "0"),
        row.metric,
        _value(row, share),
        _known(row.difference, lambda value: _signed(value, share)),
        _interval(row.interval, share),
        f"{row.flips_worse}/{row.flips_better}" if flips else NOTHING,
        _known(row.mcnemar_p, "{:.2g}".format),
    ]


def _known(value: float | None, text: Callable[[float], str]) -> str:
    return NOTHING if value is None else text(value)


def _value(row: EvalRow, share: bool) -> str:
    if share:
        return f"{100 * row.value:.1f}{_known_error(row.stderr, 100, '.1f')}"
    return f"{row.value:.4g}{_known_error(row.stderr, 1, '.2g')}"


def _known_error(error: float | None, factor: float, form: str) -> str:
    return "" if error is None else f" ± {factor * error:{form}}"


def _signed(value: float, share: bool) -> str:
    return f"{100 * value:+.2f}" if share else f"{value:+.3g}"


def _interval(interval: Sequence[float] | None, share: bool) -> str:
    if interval is None or not all(math.isfinite(end) for end in interval):
        return NOTHING
    low, high = interval
    return f"{_signed(low, share)} … {_signed(high, share)}"


def percent(ratio: float) -> str:
    """A share such as ``31 %``, with a decimal below 10 %."""
    value = 100 * ratio
    return f"{value:.0f} %" if value >= 9.95 or value == 0 else f"{value:.1f} %"


def _seconds(time_s: float) -> str:
    return f"{1000 * time_s:.0f} ms" if time_s < 0.9995 else f"{time_s:.2f} s"


def _megabytes(size: float) -> str:
    return f"{size / 1e6:.1f} MB" if size else "0"


def headline_rows(report: EvalReport) -> list[EvalRow]:
    """The rows that a system is judged by; each task is covered by one of them.

    Averages of the metrics that tasks name first, as few as cover all tasks that have one; then
    tasks that none of them covers, by their first metric.
    """
    known = {row.metric for row in report.rows if row.task == AVERAGE}
    averaged: list[str] = []
    for task in report.tasks:
        if task.metrics[0] in known and not set(averaged) & set(task.metrics):
            averaged.append(task.metrics[0])
    alone = {
        task.name: task.metrics[0] for task in report.tasks if not set(averaged) & set(task.metrics)
    }
    return [
        *(
            row
            for name in averaged
            for row in report.rows
            if (row.task, row.metric) == (AVERAGE, name)
        ),
        *(row for row in report.rows if row.metric == alone.get(row.task)),
    ]


def markdown(report: EvalReport, title: str, facts: Mapping[str, str]) -> str:
    """A report as Markdown.

    Parameters
    ----------
    title
        Its heading.
    facts
        What belongs to every figure, by name: the command, the model, versions, the machine.
    """
    parts = [
        [f"# {title}"],
        [f"- {name}: {value}" for name, value in facts.items()],
        [*_task_table(report)],
        [*_grid(COLUMNS, table_rows(report))],
        [f"{LEGEND}."],
        [f"- {_one_line(text)}" for text in (*report.notes, *report.warnings)],
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"


def _task_table(report: EvalReport) -> Iterator[str]:
    heads = ("task", "split", ">documents", ">of", ">shots", ">prefix tokens", ">order questions")
    rows = (
        [task.name, task.split]
        + [str(n) for n in (task.n, task.documents, task.shots, task.prefix_tokens)]
        + [str(task.order_questions)]
        for task in report.tasks
    )
    return _grid(heads, rows)


def _grid(heads: Sequence[str], rows: Iterator[list[str]]) -> Iterator[str]:
    """Lines of a Markdown table."""
    yield _line([head.lstrip(">") for head in heads])
    yield _line(["---:" if head.startswith(">") else "---" for head in heads])
    for row in rows:
        yield _line(row)


def _line(texts: Sequence[str]) -> str:
    # A bar in a name would begin a new column.
    return f"| {' | '.join(_one_line(text).replace('|', chr(92) + '|') for text in texts)} |"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def require_markdown(path: Path) -> None:
    """Raise `InvalidValueError` where no text could be written to ``path``.

    To be asked before a long evaluation, so that its result isn't lost at the end.
    """
    folder = path.absolute().parent
    if path.is_dir():
        raise InvalidValueError(f"--markdown {path} is a folder; name a file")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise InvalidValueError(
            f"--markdown {path}: can't write into {folder}; name a file in a folder that is there"
        )


def write_markdown(path: Path, text: str) -> None:
    """Write a report. Raises `StoreWriteError`."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StoreWriteError(
            f"{path} could not be written ({error.strerror}); give --markdown another place"
        ) from error
