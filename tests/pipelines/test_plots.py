"""Pictures: what is drawn as one line, and what lines are called."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from pipelines.fidelity_values import EXACT, FidelityReport, FidelityRow, Pair
from pipelines.plots import plot_fidelity


def row(evidence: str, order: str, retention: float, kl: float) -> FidelityRow:
    pair = Pair("p", 0, kl, 1.0, None, 1.0, retention, 1.0, retention, 0.1, 10, 0.0)
    attend = None if evidence == EXACT else "loaded"
    return FidelityRow(evidence, None, None, None, attend, 16, retention, order, (pair,))


@pytest.mark.parametrize("orders", [("original",), ("original", "importance")])
def test_each_order_of_rows_is_a_line_of_its_own_and_named_where_there_are_several(
    monkeypatch: pytest.MonkeyPatch, orders: tuple[str, ...]
) -> None:
    pytest.importorskip("matplotlib")
    drawn: list[Any] = []
    monkeypatch.setattr("pipelines.plots._save", lambda figure, axes, *_: drawn.append(axes))
    rows = [
        row(evidence, order, retention, 0.5 * retention)
        for evidence, order, retention in product(("full", "random"), orders, (0.1, 0.25))
    ]
    report = FidelityReport([row(EXACT, "original", 1.0, 0.0), *rows], [("p", 70)], [])
    plot_fidelity(report, Path("unused.png"), "title")
    (axes,) = drawn
    lines = {line.get_label(): line for line in axes.lines if line.get_label()[0] != "_"}
    names = [name for name in lines if "selected" not in name]
    told = [f", order {order}" if len(orders) > 1 else "" for order in orders]
    assert names == [
        f"{evidence}{text}, loaded" for evidence in ("full", "random") for text in told
    ]
    assert all(len(lines[name].get_xdata()) == 2 for name in names)
