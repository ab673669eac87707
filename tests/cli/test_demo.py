"""``impress demo`` on a tiny random model: the shape of what it reports, not the figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.recipe import load_recipe
from tests.cli.conftest import Run

MODEL = "random:tiny-gqa?positions=16384"


@pytest.mark.slow
def test_the_demo_asks_three_questions_both_ways_and_reuses_its_store(
    run: Run, tmp_path: Path
) -> None:
    demo = ("demo", "--store", tmp_path / "kv", "--model", MODEL)
    first = run(*demo, "--json")
    assert first.code == 0
    value = first.json
    assert value["schema"] == "impress.demo/1"
    assert len(value["rows"]) == 3
    for row in value["rows"]:
        assert row["same_text"] is True
        assert row["load"]["plan"] == "load"
        assert row["ratio"] == pytest.approx(row["recompute_ttft_s"] / row["load_ttft_s"])
    second = run(*demo)
    assert second.code == 0
    assert "recompute" in second.out
    assert "impress query --store" in second.out
    assert len(run("ls", "--store", tmp_path / "kv", "--json").json["prefixes"]) == 1


def test_the_demo_recipe_has_three_questions() -> None:
    assert len(load_recipe("demo").queries.prompts) == 3
