"""Prefixes, queries and histories from documents, question files and stores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.fidelity_cases import CaseOptions, document_cases, stored_cases
from pipelines.fidelity_texts import document_streams, read_questions
from pipelines.models import LoadedModel
from pipelines.random_models import byte_tokenizer
from store.errors import ImpressError, InvalidValueError, PromptError, SourceError
from tests.helpers import compute_and_store, ids_of, new_store
from tests.tiny import make_tiny


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return make_tiny("gqa")


def text_of(length: int, letter: str = "a") -> str:
    """Text of as many bytes, which are the tokens of a random model; no two places alike."""
    words = "".join(f"{letter}{number:05d} " for number in range(length // 7 + 1))
    return words[:length]


def write(folder: Path, **texts: str) -> Path:
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return folder


def options_of(**values: Any) -> CaseOptions:
    return CaseOptions(**{"prefix_tokens": 50, "query_tokens": 8, "history": 2, **values})


def test_a_document_is_cut_into_prefix_query_and_history(model: LoadedModel, tmp_path: Path):
    text = text_of(100)
    found = document_cases(model, write(tmp_path, a=text), options_of(prefixes=1))
    (case,) = found.cases
    read = [bytes(part.tolist()).decode() for part in (case.prefix_ids, *case.queries)]
    assert read == [text[:50], text[50:58]]
    assert [bytes(part.tolist()).decode() for part in case.history] == [text[58:66], text[66:74]]
    assert (case.name, found.warnings) == ("a", [])


def test_long_documents_come_first_and_short_ones_are_joined(model: LoadedModel, tmp_path: Path):
    write(tmp_path, a=text_of(40, "a"), b=text_of(200, "b"), c=text_of(40, "c"), d="  \n")
    found = document_cases(model, tmp_path, options_of())
    assert [case.name for case in found.cases] == ["b", "a+c"]
    joined = f"{text_of(40, 'a')}\n\n{text_of(40, 'c')}"
    assert bytes(found.cases[1].prefix_ids.tolist()).decode() == joined[:50]
    assert len(found.cases[1].prefix_ids) == 50
    assert "2 of the 8 prefixes" in found.warnings[-1]


def test_a_text_that_ends_early_has_less_history_and_says_so(model: LoadedModel, tmp_path: Path):
    found = document_cases(model, write(tmp_path, a=text_of(69)), options_of(prefixes=1))
    assert [len(case.history) for case in found.cases] == [1]
    assert found.warnings == ["a: 1 of 2 history queries, its text ends"]


def test_no_more_documents_are_read_than_are_needed(tmp_path: Path):
    write(tmp_path, a=text_of(80), b=text_of(80))
    paths = [tmp_path / "a.txt", tmp_path / "missing.txt"]
    streams = document_streams(paths, byte_tokenizer(), 60, 60)
    assert next(streams).name == "a"
    with pytest.raises(SourceError, match=r"missing\.txt"):
        next(streams)


@pytest.mark.parametrize(
    ("values", "error", "says"),
    [
        ({"prefix_tokens": 5000}, InvalidValueError, "5008 positions"),
        ({"prefix_tokens": 200}, SourceError, "fewer than the 208 tokens"),
        ({"prefix_tokens": 0}, InvalidValueError, "--prefix-tokens 0"),
        ({"query_tokens": 0}, InvalidValueError, "--query-tokens 0"),
        ({"prefixes": 0}, InvalidValueError, "--prefixes 0"),
        ({"history": -1}, InvalidValueError, "--history -1"),
    ],
)
def test_what_does_not_fit_is_named(
    model: LoadedModel, tmp_path: Path, values: dict[str, int], error: type[Exception], says: str
):
    write(tmp_path, a=text_of(100))
    with pytest.raises(error, match=says):
        document_cases(model, tmp_path, options_of(**values))


def test_missing_and_empty_folders_are_named(model: LoadedModel, tmp_path: Path):
    with pytest.raises(SourceError, match="no such folder"):
        document_cases(model, tmp_path / "none", options_of())
    with pytest.raises(SourceError, match=r"no \.txt or \.md files"):
        document_cases(model, tmp_path, options_of())


def questions_file(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "questions.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


def test_questions_without_a_prefix_are_asked_of_every_document(model: LoadedModel, tmp_path: Path):
    write(tmp_path, a=text_of(90, "a"), b=text_of(90, "b"))
    path = questions_file(tmp_path, *({"prompt": f"Why {n}?"} for n in range(4)))
    found = document_cases(model, tmp_path, options_of(queries=path, prefixes=2))
    assert [(case.name, len(case.queries), len(case.history)) for case in found.cases] == [
        ("a", 2, 2),
        ("b", 2, 2),
    ]
    assert bytes(found.cases[0].queries[1].tolist()).decode() == "Why 1?"
    assert bytes(found.cases[0].history[0].tolist()).decode() == "Why 2?"


def test_questions_that_name_documents_are_asked_of_those_alone(model: LoadedModel, tmp_path: Path):
    write(tmp_path, a=text_of(90, "a"), b=text_of(30, "b"))
    path = questions_file(tmp_path, {"prefix": "b.txt", "prompt": "Who?"}, {"prompt": "Why?"})
    (case,) = document_cases(model, tmp_path, options_of(queries=path, prefixes=1)).cases
    assert (case.name, len(case.prefix_ids), len(case.queries), len(case.history)) == (
        "b",
        30,
        1,
        1,
    )


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": " "}, "no text under 'prompt'"),
        ({"prompt": "a", "prefx": "b"}, "unknown key 'prefx'"),
        ({"prompt": "a", "prefix": 3}, "'prefix' is not text"),
        ({"prompt": "a", "prefix": "zz"}, "no document 'zz'"),
        ({"prompt": "a" * 2000}, "more than the 1024 positions"),
    ],
)
def test_wrong_questions_are_named(
    model: LoadedModel, tmp_path: Path, row: dict[str, Any], says: str
):
    write(tmp_path, a=text_of(90))
    path = questions_file(tmp_path, row)
    with pytest.raises((SourceError, PromptError), match=says):
        document_cases(model, tmp_path, options_of(queries=path))


def test_an_empty_file_of_questions_is_named(tmp_path: Path):
    with pytest.raises(SourceError, match="holds no questions"):
        read_questions(questions_file(tmp_path))


def test_a_stored_prefix_gives_its_own_questions_or_else_its_last_tokens(
    model: LoadedModel, tmp_path: Path
):
    with new_store(tmp_path / "kv", model) as store:
        compute_and_store(store, model, ids_of(40), "plain")
        compute_and_store(store, model, ids_of(40, seed=1), "asked")
        compute_and_store(store, model, ids_of(6, seed=2), "short")
        store.add_prefix(ids_of(30, seed=1), "recipe", {"queries": ["Who?", "Why?"]})
        found = stored_cases(model, store, options_of())
        assert [case.name for case in found.cases] == ["plain", "asked", "recipe"]
        plain, _, recipe = found.cases
        np.testing.assert_array_equal(plain.prefix_ids, ids_of(40)[:32])
        np.testing.assert_array_equal(plain.queries[0], ids_of(40)[32:])
        assert [bytes(query.tolist()).decode() for query in recipe.queries] == ["Who?", "Why?"]
        assert "short was left out: it has 6 tokens" in found.warnings[0]
        path = questions_file(tmp_path, {"prefix": "asked", "prompt": "What?"})
        (case,) = stored_cases(model, store, options_of(queries=path, prefixes=1)).cases
        assert (case.name, len(case.prefix_ids)) == ("asked", 40)


def test_a_store_without_usable_prefixes_is_named(model: LoadedModel, tmp_path: Path):
    with (
        new_store(tmp_path / "kv", model) as store,
        pytest.raises(ImpressError, match="holds no prefix that can be measured"),
    ):
        stored_cases(model, store, options_of())
