"""PNG picture of an evaluation: what is lost against what is loaded; needs matplotlib.

Like `plots`, it imports matplotlib only when a picture is asked for, and draws without a display.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.eval_report import NO_DIVERGENCE, headline_rows, percent
from pipelines.eval_values import AVERAGE, NO_PREFIX, RECOMPUTE, EvalReport, EvalRow
from pipelines.plots import save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INCHES = (12.0, 5.0)
_MARKERS = "osD^vP*"
_X = "KV loaded, evidence included (% of the prefix's)"
#: Ways to answer that load no KV of a store's, drawn as lines across.
_LEVELS = {RECOMPUTE: "--", NO_PREFIX: ":"}


def plot_eval(report: EvalReport, path: Path, title: str) -> None:
    """Accuracy and divergence against what is loaded: a line per system, a marker per retention.

    Shows the first of what `headline_rows` gives: the average of the tasks that have its metric, of
    one task that task.
    What does not diverge has no place on a logarithmic axis and is left out there.

    Raises
    ------
    StoreWriteError
        The file can't be written.
    """
    from matplotlib.figure import Figure

    rows = _shown(report)
    figure = Figure(figsize=_INCHES, layout="constrained")
    left, right = figure.subplots(1, 2)
    colours: dict[str, str] = {}
    for row in rows:
        if row.system not in _LEVELS:
            colours.setdefault(row.system, f"C{len(colours)}")
    _draw_values(left, rows, colours)
    _draw_divergence(right, rows, colours)
    _add_markers(left, rows)
    figure.suptitle(f"{title}: {_about(report, rows)}", fontsize="medium")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize="small")
    save_figure(figure, path)


def _shown(report: EvalReport) -> list[EvalRow]:
    """Headline rows of the first average, else of the first task: one picture has one metric."""
    rows = headline_rows(report)
    return [row for row in rows if (row.task, row.metric) == (rows[0].task, rows[0].metric)]


def _about(report: EvalReport, rows: list[EvalRow]) -> str:
    tasks = ", ".join(task.name for task in report.tasks if rows[0].metric in task.metrics)
    of = f"average of {tasks}" if rows[0].task == AVERAGE else rows[0].task
    return f"{of}, {rows[0].n} documents"


def _draw_values(axes: Axes, rows: list[EvalRow], colours: dict[str, str]) -> None:
    """Values of the metric; bars are the intervals of what they differ from recompute by."""
    _prepare(axes, f"{rows[0].metric}, with the 95 % interval of its difference to recompute")
    for row in rows:
        if row.system in _LEVELS:
            axes.axhline(row.value, color="k", ls=_LEVELS[row.system], lw=1, label=row.system)
    for system, points in _lines(rows, colours):
        axes.plot(
            [_loaded(row) for row in points],
            [row.value for row in points],
            color=colours[system],
            label=system,
        )
        for row in points:
            axes.errorbar(
                [_loaded(row)],
                [row.value],
                yerr=_reach(row),
                color=colours[system],
                marker=_marker(rows, row),
                elinewidth=0.5,
            )


def _reach(row: EvalRow) -> list[list[float]]:
    """Lengths of a bar below and above its value."""
    if row.difference is None or row.interval is None or not all(map(math.isfinite, row.interval)):
        return [[0.0], [0.0]]
    low, high = row.interval
    return [[row.difference - low], [high - row.difference]]


def _draw_divergence(axes: Axes, rows: list[EvalRow], colours: dict[str, str]) -> None:
    """Mean divergence of the answers, on a logarithmic axis."""
    _prepare(axes, "mean KL of the answers to recompute's (nats)")
    drawn = [row for row in rows if _diverges(row)]
    if not drawn:
        axes.text(0.5, 0.5, "no answer diverges", ha="center", transform=axes.transAxes)
        return
    for row in drawn:
        if row.system in _LEVELS:
            axes.axhline(row.kl_mean or 0.0, color="k", ls=_LEVELS[row.system], lw=1)
    for system, points in _lines(drawn, colours):
        levels = [row.kl_mean or 0.0 for row in points]
        axes.plot([_loaded(row) for row in points], levels, color=colours[system])
        for row, level in zip(points, levels, strict=True):
            axes.plot([_loaded(row)], [level], color=colours[system], marker=_marker(rows, row))
    axes.set_yscale("log")


def _diverges(row: EvalRow) -> bool:
    """Whether there is a divergence to draw, beyond what rounding makes of equal answers."""
    return row.kl_mean is not None and NO_DIVERGENCE < row.kl_mean < math.inf


def _prepare(axes: Axes, y: str) -> None:
    axes.set_xlabel(_X)
    axes.set_ylabel(y)
    axes.grid(visible=True, alpha=0.3)


def _lines(rows: Iterable[EvalRow], colours: dict[str, str]) -> Iterable[tuple[str, list[EvalRow]]]:
    """Rows of each system that loads something, by what it loads."""
    every = list(rows)
    for system in colours:
        points = sorted((row for row in every if row.system == system), key=_loaded)
        if points:
            yield system, points


def _loaded(row: EvalRow) -> float:
    return 100 * (row.loaded_ratio + row.probe_ratio)


def _retentions(rows: Iterable[EvalRow]) -> list[float]:
    return sorted({row.retention for row in rows if row.retention is not None})


def _marker(rows: list[EvalRow], row: EvalRow) -> Any:
    """Marker of a row's retention; full loads, which have none, get a cross."""
    if row.retention is None:
        return "x"
    return _MARKERS[_retentions(rows).index(row.retention) % len(_MARKERS)]


def _add_markers(axes: Axes, rows: list[EvalRow]) -> None:
    """Say in the legend which marker is which retention."""
    for number, retention in enumerate(_retentions(rows)):
        shape: Any = _MARKERS[number % len(_MARKERS)]
        axes.plot([], [], "k", ls="", marker=shape, label=f"{percent(retention)} asked")
