"""``impress demo`` on a tiny random model: the shape of what it reports, not the figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.recipe import Recipe, load_recipe
from tests.cli.conftest import MODEL, Run


@pytest.fixture
def small(document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the demo run a recipe like its own on a text of about 300 tokens."""
    recipe = Recipe.model_validate(
        {
            "name": "demo",
            "prefixes": {"source": "documents", "path": str(document)},
            "queries": {"prompts": ["who?", "where?", "why?"]},
            "store": {"probe": "sketch"},
            "query": {"retention": 0.25, "max_new_tokens": 4},
        }
    )
    monkeypatch.setattr("pipelines.recipe.load_recipe", lambda _name: recipe)


@pytest.mark.usefixtures("small")
def test_the_demo_asks_three_questions_three_ways_and_reuses_its_store(
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
        impress_s = row["impress_ttft_s"]
        assert row["impress_ratio"] == pytest.approx(row["recompute_ttft_s"] / impress_s)
        assert row["gain"] == pytest.approx(row["load_ttft_s"] / impress_s)
        assert (row["impress"]["plan"], row["impress"]["retention"]) == ("load", 0.25)
        assert row["load"]["retention"] == 1.0
        assert isinstance(row["impress_same_text"], bool)
    assert (value["retention"], value["sparse"]["retention"]) == (0.25, 0.25)
    second = run(*demo)
    assert second.code == 0
    for text in ("recompute", "full load", "impress at 25 %", "loaded", "medians: "):
        assert text in second.out
    assert "last question, impress:" in second.out
    assert "impress query --store" in second.out
    assert len(run("ls", "--store", tmp_path / "kv", "--json").json["prefixes"]) == 1


def test_the_demo_recipe_has_three_questions() -> None:
    assert len(load_recipe("demo").queries.prompts) == 3
