"""Prefixes, queries and histories from documents, question files and stores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.fidelity_cases import document_cases, stored_cases
from pipelines.fidelity_history import from_others
from pipelines.fidelity_texts import document_streams, read_questions
from pipelines.fidelity_values import CaseOptions
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


def said(parts: tuple[np.ndarray, ...]) -> list[str]:
    return [bytes(part.tolist()).decode() for part in parts]


def options_of(**values: Any) -> CaseOptions:
    return CaseOptions(**{"prefix_tokens": 50, "query_tokens": 8, "history": 2, **values})


def test_a_document_is_cut_into_prefix_query_and_history(model: LoadedModel, tmp_path: Path):
    text = text_of(100)
    options = options_of(prefixes=1, history_from="same")
    found = document_cases(model, write(tmp_path, a=text), options)
    (case,) = found.cases
    assert said((case.prefix_ids, *case.queries)) == [text[:50], text[50:58]]
    assert said(case.history) == [text[58:66], text[66:74]]
    assert (case.name, found.warnings) == ("a", [])
    assert (found.history_from, found.history_notes) == ("same", ())


def test_a_history_is_what_other_documents_are_asked(model: LoadedModel, tmp_path: Path):
    texts = {name: text_of(100, name) for name in "abcd"}
    write(tmp_path, **texts)
    found = document_cases(model, tmp_path, options_of(prefixes=4))
    asked = {name: text[50:58] for name, text in texts.items()}
    histories = {case.name: said(case.history) for case in found.cases}
    assert histories == {
        "a": [asked["b"], asked["c"]],
        "b": [asked["c"], asked["d"]],
        "c": [asked["d"], asked["a"]],
        "d": [asked["a"], asked["b"]],
    }
    assert (found.history_from, found.history_notes) == ("others", ())
    few = document_cases(model, tmp_path, options_of(prefixes=4, history=6))
    assert [len(case.history) for case in few.cases] == [3, 3, 3, 3]
    assert few.history_notes == ("3 of 6 history queries, the other prefixes have no more",)
    # No document is joined with another for the sake of a history.
    assert [case.name for case in few.cases] == ["a", "b", "c", "d"]


def test_what_is_measured_does_not_depend_on_where_a_history_comes_from(
    model: LoadedModel, tmp_path: Path
):
    write(tmp_path, a=text_of(60, "a"), b=text_of(200, "b"), c=text_of(60, "c"))

    def measured(history_from: str) -> list[tuple[Any, ...]]:
        options = options_of(prefixes=3, history_from=history_from)
        cases = document_cases(model, tmp_path, options).cases
        return [(case.name, *said((case.prefix_ids, *case.queries))) for case in cases]

    assert measured("others") == measured("same")


def test_a_single_prefix_has_nobody_elses_history_and_says_so(model: LoadedModel, tmp_path: Path):
    text = text_of(100)
    found = document_cases(model, write(tmp_path, a=text), options_of(prefixes=1))
    assert said(found.cases[0].history) == [text[58:66], text[66:74]]
    assert found.history_from == "same"
    assert found.history_notes == (
        "static learns from further queries of the same prefix: there is only one",
    )


def test_without_a_history_it_comes_from_nowhere(model: LoadedModel, tmp_path: Path):
    write(tmp_path, a=text_of(100, "a"), b=text_of(100, "b"))
    found = document_cases(model, tmp_path, options_of(history=0, prefixes=2))
    assert [case.history for case in found.cases] == [(), ()]
    assert (found.history_from, found.history_notes) == (None, ())


def ids(*texts: str) -> list[np.ndarray]:
    return [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) for text in texts]


def test_one_query_of_each_other_prefix_comes_before_a_second_one():
    queries = [ids("own"), ids("b1", "b2"), ids("c1", "c2", "c3")]
    (first, second, _) = from_others(queries, [9, 9, 9], 4) or []
    assert said(first) == ["b1", "c1", "b2", "c2"]
    assert said(second) == ["c1", "own", "c2", "c3"]


def test_a_history_holds_no_query_twice_none_of_its_own_and_none_that_is_too_long():
    queries = [ids("who?"), ids("who?", "where?"), ids("where?", "why?", "what of that?")]
    found = from_others(queries, [9, 9, 20], 9) or []
    assert [said(one) for one in found] == [["where?", "why?"], ["why?"], ["who?"]]


@pytest.mark.parametrize(
    "queries", [[ids("a")], [ids("who?"), ids("who?")], [ids("who?"), ids("a", "who?")]]
)
def test_a_prefix_that_would_get_no_history_is_told_of(queries: list[list[np.ndarray]]):
    assert from_others(queries, [9] * len(queries), 2) is None


def test_long_documents_come_first_and_short_ones_are_joined(model: LoadedModel, tmp_path: Path):
    write(tmp_path, a=text_of(40, "a"), b=text_of(200, "b"), c=text_of(40, "c"), d="  \n")
    found = document_cases(model, tmp_path, options_of())
    assert [case.name for case in found.cases] == ["b", "a+c"]
    joined = f"{text_of(40, 'a')}\n\n{text_of(40, 'c')}"
    assert bytes(found.cases[1].prefix_ids.tolist()).decode() == joined[:50]
    assert len(found.cases[1].prefix_ids) == 50
    assert "2 of the 8 prefixes" in found.warnings[-1]


def test_a_text_that_ends_early_has_less_history_and_says_so(model: LoadedModel, tmp_path: Path):
    options = options_of(prefixes=1, history_from="same")
    found = document_cases(model, write(tmp_path, a=text_of(69)), options)
    assert [len(case.history) for case in found.cases] == [1]
    assert found.history_notes == ("a: 1 of 2 history queries, it has no more",)
    assert found.warnings == []


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
        ({"history_from": "all"}, InvalidValueError, "--history-from 'all' .* others, same"),
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
    options = options_of(queries=path, prefixes=2, history_from="same")
    found = document_cases(model, tmp_path, options)
    assert [(case.name, len(case.queries), len(case.history)) for case in found.cases] == [
        ("a", 2, 2),
        ("b", 2, 2),
    ]
    assert said(found.cases[0].queries) == ["Why 0?", "Why 1?"]
    assert said(found.cases[0].history) == ["Why 2?", "Why 3?"]


def test_questions_asked_of_all_documents_are_no_history_of_others(
    model: LoadedModel, tmp_path: Path
):
    write(tmp_path, a=text_of(90, "a"), b=text_of(90, "b"))
    path = questions_file(tmp_path, *({"prompt": f"Why {n}?"} for n in range(3)))
    found = document_cases(model, tmp_path, options_of(queries=path, prefixes=2))
    assert found.history_from == "same"
    assert [(len(case.queries), len(case.history)) for case in found.cases] == [(1, 2)] * 2
    assert "the others have no queries of their own" in found.history_notes[0]


def test_all_questions_about_a_document_are_measured_where_others_make_the_history(
    model: LoadedModel, tmp_path: Path
):
    write(tmp_path, a=text_of(90, "a"), b=text_of(90, "b"))
    asked = {"a": ["Who?", "Why?"], "b": ["Where?", "Who?", "When?"]}
    rows = [{"prefix": name, "prompt": text} for name in asked for text in asked[name]]
    options = options_of(queries=questions_file(tmp_path, *rows), prefixes=2)
    found = document_cases(model, tmp_path, options)
    assert found.history_from == "others"
    assert {case.name: said(case.queries) for case in found.cases} == asked
    assert [said(case.history) for case in found.cases] == [["Where?", "When?"], ["Why?"]]


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
        assert (found.history_from, found.cases[0].history) == (None, ())
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
