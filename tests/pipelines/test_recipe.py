"""Recipes: what fits the schema, and what is said about what does not."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from pipelines.prefixes import source_from_recipe
from pipelines.recipe import (
    FewshotSpec,
    QuerySpec,
    Recipe,
    load_recipe,
    recipe_path,
    shipped_folder,
    shipped_recipes,
)
from store.errors import SourceError
from store.itf import options
from store.itf.options import SparseOptions
from tests.pipelines.tiny_tokenizers import tiny_tokenizer

EXPECTED = ["chat", "copa", "demo", "documents", "openbookqa", "paper-scale", "piqa", "rag", "rte"]
NEED_FILES = ["chat", "documents", "paper-scale", "rag"]


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_these_recipes_are_shipped():
    assert shipped_recipes() == EXPECTED


@pytest.mark.parametrize("name", EXPECTED)
def test_every_shipped_recipe_loads_and_is_called_like_its_file(name):
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.model
    assert recipe.description


@pytest.mark.parametrize("name", NEED_FILES)
def test_a_recipe_without_data_of_its_own_asks_for_files(name):
    with pytest.raises(SourceError, match=f"impress build-store {name} FILE"):
        source_from_recipe(load_recipe(name), shipped_folder())


@pytest.mark.parametrize("name", sorted(set(EXPECTED) - set(NEED_FILES)))
def test_the_other_recipes_make_a_source_as_they_are(name):
    recipe = load_recipe(name)
    source = source_from_recipe(recipe, shipped_folder())
    assert source.count() == getattr(recipe.prefixes, "variants", 1)


def test_the_example_of_the_design_loads(tmp_path):
    text = """
name: rte
model: smollm2-135m
prefixes: {source: fewshot, task: rte, shots: 40, variants: 8, seed: 1, max_tokens: 4096}
queries:  {split: validation, limit: 100}
store:    {chunk_tokens: 16, probe: sketch}
query:    {system: impress, retention: 0.25, alpha: 0.6}
"""
    recipe = load_recipe(write(tmp_path, text))
    assert recipe.prefixes == FewshotSpec(
        source="fewshot", task="rte", shots=40, variants=8, seed=1, max_tokens=4096
    )
    assert recipe.query.choice() == {"retention": 0.25, "alpha": 0.6}
    assert recipe.query.sparse() == SparseOptions(retention=0.25, alpha=0.6)
    assert recipe.store.probe == "sketch"


def test_a_recipe_that_says_nothing_of_queries_leaves_everything_to_the_engine():
    assert load_recipe("documents").query.choice() == {}
    assert load_recipe("documents").query.sparse() == SparseOptions()


def test_a_recipe_knows_the_names_the_engine_knows():
    for name, known in (
        ("evidence", options.EVIDENCE),
        ("attend", options.ATTEND),
        ("sets", options.SETS),
        ("rows", options.ROWS),
        ("fallback", options.FALLBACK),
    ):
        for value in known:
            query = QuerySpec.model_validate({name: value})
            assert getattr(query.sparse(), name) == value


def test_prefixes_carry_what_their_recipe_says_of_queries(tmp_path):
    (tmp_path / "a.txt").write_text("Some text.")
    query = {"retention": 0.25, "evidence": "full", "max_new_tokens": 3}
    for spec, expected in (({"query": query}, {"retention": 0.25, "evidence": "full"}), ({}, None)):
        prefixes = {"source": "documents", "path": "a.txt"}
        recipe = Recipe.model_validate({"name": "a", "prefixes": prefixes, **spec})
        (item,) = source_from_recipe(recipe, tmp_path).items(tiny_tokenizer(), 100)
        assert item.source.get("query") == expected


def test_a_recipe_can_not_be_changed():
    recipe = load_recipe("demo")
    with pytest.raises(ValidationError):
        recipe.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "key", "nearest"),
    [
        ("name: a\nprefixes: {source: fewshot, task: rte, shot: 4}", "prefixes.shot", "shots"),
        ("name: a\nprefixes: {source: documents, paths: x.txt}", "prefixes.paths", "path"),
        ("name: a\nprefixes: {source: chat}\nstores: {}", "stores", "store"),
        ("name: a\nprefixes: {source: chat}\nstore: {chunk: 16}", "store.chunk", "chunk_tokens"),
        ("nam: a\nprefixes: {source: chat}", "nam", "name"),
    ],
)
def test_an_unknown_key_is_named_with_its_path_and_the_nearest_known_one(
    tmp_path, text, key, nearest
):
    with pytest.raises(SourceError) as caught:
        load_recipe(write(tmp_path, text))
    assert f"unknown key {key!r}; did you mean {nearest!r}?" in str(caught.value)
    assert "mine.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name: a", "key 'prefixes' is missing"),
        ("name: a\nprefixes: {source: fewshot}", "key 'prefixes.task' is missing"),
        ("name: a\nprefixes: {source: fewshots, task: rte}", "use one of documents, jsonl"),
        ("name: a\nprefixes: {path: x}", "use one of documents, jsonl"),
        ("name: a\nprefixes: {source: fewshot, task: rte, shots: 0}", "prefixes.shots is 0"),
        ("name: a\nprefixes: {source: chat}\nquery: {retention: 1.5}", "query.retention is 1.5"),
        ("name: a\nprefixes: {source: chat}\nquery: {evidence: best}", "query.evidence is 'best'"),
        ("name: a\nprefixes: {source: chat}\nquery: {attend: all}", "'loaded' or 'selected'"),
        ("name: a\nprefixes: {source: chat}\nstore: {chunk_tokens: 8}", "store.chunk_tokens is 8"),
        ("name: a\nprefixes: {source: documents, template: yes}", "prefixes.template is True"),
        ("- a\n- b", "must be a mapping"),
        ("", "must be a mapping"),
        ("name: [a\nprefixes: {}", "not YAML"),
    ],
)
def test_what_is_wrong_with_a_recipe_is_said_in_one_line(tmp_path, text, says):
    with pytest.raises(SourceError) as caught:
        load_recipe(write(tmp_path, text))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_recipe_that_is_not_utf8_names_the_byte(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"name: caf\xe9\n")
    with pytest.raises(SourceError, match="0xe9 at offset 9"):
        load_recipe(path)


def test_an_unknown_name_lists_the_shipped_recipes_and_the_nearest():
    with pytest.raises(SourceError, match=r"did you mean 'openbookqa'\?.*paper-scale"):
        load_recipe("openbook-qa")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(SourceError, match="no recipe"):
        load_recipe(tmp_path / "none.yaml")


def test_a_shipped_name_wins_over_a_folder_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    assert recipe_path("demo").parent == shipped_folder()


def test_one_path_may_be_written_without_a_list():
    one = Recipe.model_validate({"name": "a", "prefixes": {"source": "chat", "path": "x.json"}})
    assert one.prefixes.path == ("x.json",)  # type: ignore[union-attr]
