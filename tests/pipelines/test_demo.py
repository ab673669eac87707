"""The demonstration on a tiny model: its order, its rows, and stores older than sketches."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines import demo
from pipelines.demo import WAYS, run_demo
from pipelines.recipe import Recipe, load_recipe
from store.itf.options import SparseOptions
from store.probes import ProbeSettings
from tests.helpers import open_store
from tests.tiny import make_tiny

MODEL = make_tiny("gqa", positions=1024)
QUESTIONS = ("who?", "where?", "why?")


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """A recipe like the shipped one, on a text of about 300 tokens."""
    text = tmp_path / "keepers.txt"
    text.write_text("Ada keeps the light. Ben keeps the boats. " * 7, encoding="utf-8")
    return Recipe.model_validate(
        {
            "name": "tiny",
            "prefixes": {"source": "documents", "path": str(text)},
            "queries": {"prompts": QUESTIONS},
            "store": {"probe": "sketch"},
            "query": {"retention": 0.25, "max_new_tokens": 2},
        }
    )


def test_each_question_is_answered_three_ways_and_each_way_comes_first_once(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str, float]] = []
    plain = demo.ask

    def noted(store, model, prefix, prompt, options, on_text=None):
        asked.append((prompt, options.plan, options.sparse.retention))
        return plain(store, model, prefix, prompt, options, on_text)

    monkeypatch.setattr("pipelines.demo.ask", noted)
    seen: list[str] = []
    report = run_demo(
        tmp_path / "kv", MODEL, recipe=recipe, on_row=lambda row: seen.append(row.question)
    )
    ways = {
        "recompute": ("force-recompute", 1.0),
        "load": ("force-load", 1.0),
        "impress": ("force-load", 0.25),
    }
    expected = [
        (question, *ways[WAYS[(number + turn) % 3]])
        for number, question in enumerate(QUESTIONS)
        for turn in range(3)
    ]
    assert asked[1:] == expected
    assert tuple(seen) == QUESTIONS
    assert report.sparse == SparseOptions(retention=0.25)


def test_a_row_holds_what_each_way_cost_and_whether_the_words_agree(
    recipe: Recipe, tmp_path: Path
) -> None:
    report = run_demo(tmp_path / "kv", MODEL, recipe=recipe)
    assert len(report.rows) == 3
    for row in report.rows:
        assert row.same_text
        assert row.recomputed.stats.reused_tokens == 0
        assert row.loaded.stats.reused_tokens == report.prefix_tokens
        assert row.impress.stats.retention == 0.25
        assert {layer.evidence for layer in row.impress.layers} == {"sketch"}
        assert row.gain == pytest.approx(row.impress_ratio / row.ratio)


def test_an_older_demo_store_without_a_sketch_gets_one(recipe: Recipe, tmp_path: Path) -> None:
    without = recipe.model_copy(update={"store": recipe.store.model_copy(update={"probe": "none"})})
    first = run_demo(tmp_path / "kv", MODEL, recipe=without)
    assert {layer.evidence for layer in first.rows[0].impress.layers} == {"full"}
    with open_store(tmp_path / "kv", MODEL) as store:
        assert store.probes() == ProbeSettings()
    second = run_demo(tmp_path / "kv", MODEL, recipe=recipe)
    assert {layer.evidence for layer in second.rows[0].impress.layers} == {"sketch"}
    assert second.build.prefixes_reused == 1
    with open_store(tmp_path / "kv", MODEL) as store:
        assert store.probes().sketch_bits == 2


def test_the_shipped_recipe_asks_for_a_sketch_and_a_quarter_of_the_prefix() -> None:
    recipe = load_recipe("demo")
    assert recipe.store.probe == "sketch"
    assert recipe.query.sparse() == SparseOptions(retention=0.25)
