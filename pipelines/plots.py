"""PNG pictures of measurements; needs matplotlib, the extra ``plots``.

With `eval_plots` the only module that imports matplotlib, and only when a picture is asked for.
Figures are drawn without a display and without pyplot's global state.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.fidelity_values import EXACT
from store.errors import InvalidValueError, StoreWriteError

if TYPE_CHECKING:
    from pipelines.bench_similarity import SimilarityReport
    from pipelines.fidelity_values import FidelityReport, FidelityRow

_INCHES = (9.0, 5.0)
_DPI = 150
_MARKERS = "osD^vP*X"


def require_plots(path: Path) -> None:
    """Raise `InvalidValueError` where no picture could be written to ``path``.

    To be asked before a long measurement, so that it isn't lost at the end.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise InvalidValueError(
            f"--plot needs matplotlib ({error}); install it with: pip install impress-kv[plots], "
            "or leave --plot out"
        ) from error
    if path.suffix.lower() != ".png":
        raise InvalidValueError(f"--plot {path} does not end in .png; only PNG is written")
    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InvalidValueError(
            f"--plot {path}: can't write into {folder}; name a folder that is there"
        )


def plot_fidelity(report: FidelityReport, path: Path, title: str) -> None:
    """Divergence against bytes read: a line per evidence and kind of attention.

    Rows that don't diverge at all have no place on a logarithmic axis and are left out.
    """
    figure, axes = _figure("bytes read, evidence included (% of KV)", "mean KL to the full answer")
    drawn = [row for row in report.rows if row.evidence != EXACT and row.mean("kl") > 0]
    retentions = sorted({row.retention for row in drawn})
    colours: dict[str, str] = {}
    for (label, attend), rows in _series(report, drawn).items():
        colour = colours.setdefault(label, f"C{len(colours)}")
        points = sorted((100 * row.read_ratio, row.mean("kl"), row.retention) for row in rows)
        style = {"color": colour, "ls": "-" if attend == "loaded" else "--"}
        axes.plot(
            [p[0] for p in points], [p[1] for p in points], label=f"{label}, {attend}", **style
        )
        for x, y, retention in points:
            axes.plot([x], [y], color=colour, marker=_marker(retentions, retention))
    for retention in retentions:
        shape = _marker(retentions, retention)
        axes.plot([], [], "k", ls="", marker=shape, label=f"{100 * retention:g} % selected")
    if drawn:
        axes.set_yscale("log")
    else:
        axes.text(0.5, 0.5, "no row differs from the full answer", ha="center")
    _save(figure, axes, path, _title(title, report.rows[0].n, len(report.prefixes)))


def _marker(retentions: list[float], retention: float) -> str:
    return _MARKERS[retentions.index(retention) % len(_MARKERS)]


def _series(
    report: FidelityReport, rows: Iterable[FidelityRow]
) -> dict[tuple[str, str | None], list[FidelityRow]]:
    """Rows by (label, attend), all but the retention; labels leave out what never differs."""
    compared = [row for row in report.rows if row.evidence != EXACT]
    some_rows = len({row.rows for row in compared if row.rows is not None}) > 1
    some_sets = len({row.sets for row in compared}) > 1
    some_sizes = len({row.chunk_tokens for row in compared}) > 1
    some_orders = len({row.order for row in compared}) > 1
    found: dict[tuple[str, str | None], list[FidelityRow]] = {}
    for row in rows:
        parts = [row.evidence if row.bits is None else f"{row.evidence} {row.bits} bits"]
        parts += [f"rows {row.rows}"] if some_rows and row.rows else []
        parts += [f"sets {row.sets}"] if some_sets else []
        parts += [f"chunks of {row.chunk_tokens}"] if some_sizes else []
        parts += [f"order {row.order}"] if some_orders else []
        found.setdefault((", ".join(parts), row.attend), []).append(row)
    return found


def plot_similarity(report: SimilarityReport, path: Path, title: str) -> None:
    """Agreement of query heads by layer: a line per retention, its threshold dashed."""
    figure, axes = _figure("layer", "mean pairwise Jaccard of the query heads' tokens")
    for total in report.totals:
        rows = [row for row in report.rows if row.retention == total.retention]
        points = [(row.layer, row.jaccard_heads) for row in rows if row.jaccard_heads is not None]
        label = f"{100 * total.retention:g} % kept"
        (line,) = axes.plot([x for x, _ in points], [y for _, y in points], "o-", ms=3, label=label)
        axes.axhline(total.threshold, color=line.get_color(), ls="--", lw=1)
    axes.plot([], [], "k--", lw=1, label="threshold")
    axes.set_ylim(0, 1)
    _save(figure, axes, path, _title(title, report.totals[0].n, len(report.prefixes)))


def _title(title: str, queries: int, prefixes: int) -> str:
    return f"{title}: {queries} queries behind {prefixes} prefixes"


def _figure(x: str, y: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(visible=True, alpha=0.3)
    return figure, axes


def _save(figure: Any, axes: Any, path: Path, title: str) -> None:
    axes.set_title(title, fontsize="medium")
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        # Outside, where it hides no point.
        figure.legend(handles, labels, loc="outside right upper", fontsize="small")
    save_figure(figure, path)


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure as PNG. Raises `StoreWriteError`."""
    try:
        figure.savefig(path, dpi=_DPI)
    except OSError as error:
        raise StoreWriteError(
            f"{path} could not be written ({error.strerror}); give --plot another place"
        ) from error
