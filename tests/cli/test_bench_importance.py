"""`impress bench fidelity` and `similarity`: options, documented objects, tables, pictures."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import MODEL, Run

#: Two documents of about 250 tokens for the byte tokenizer of random models.
TEXTS = {
    name: "".join(f"{name} keeper {n} {name * 3} lives by pier {n * 37 % 11}. " for n in range(8))
    for name in "ab"
}
SMALL = ("--prefix-tokens", 70, "--query-tokens", 9, "--prefixes", 2)


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    folder = tmp_path / "documents"
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return folder


def test_fidelity_prints_the_documented_object_and_leaves_nothing(
    run: Run, documents: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    given = ("--documents", documents, "--model", MODEL, *SMALL, "--dir", folder)
    done = run("bench", "fidelity", *given, "--evidence", "full,random", "--json")
    assert done.code == 0
    value = done.json
    assert value["schema"] == "impress.bench-fidelity/1"
    assert {"versions", "environment", "model", "synthetic", "documents", "store"} <= set(value)
    assert (value["synthetic"], value["store"]) == (True, None)
    assert value["prefixes"] == [{"name": "a", "tokens": 70}, {"name": "b", "tokens": 70}]
    assert (value["query_tokens"], value["history"], value["queries"]) == (9, 6, None)
    assert (value["alpha"], value["threshold"], value["fallback"]) == (0.6, None, "auto")
    assert value["history_from"] == "others"
    assert [(row["evidence"], row["retention"], row["attend"]) for row in value["rows"]] == [
        ("exact", 1.0, None),
        *[
            (evidence, retention, attend)
            for retention in (0.1, 0.25)
            for evidence in ("full", "random")
            for attend in ("selected", "loaded")
        ],
    ]
    assert list(folder.iterdir()) == []
    assert "random weights" in done.err


def test_every_key_of_both_objects_is_documented(run: Run, documents: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "json.md").read_text(encoding="utf-8")
    for name in ("fidelity", "similarity"):
        given = ("--documents", documents, "--model", MODEL, *SMALL, "--retention", "0.2")
        value = run("bench", name, *given, "--json").json
        section = text.split(f"## bench {name}")[1].split("\n## ")[0]
        keys = set(value) - {"schema", "versions", "environment", "model", "synthetic"}
        keys |= {key for row in value["rows"] + value.get("totals", []) for key in row}
        for inner in ("pairs", "chunks"):
            keys |= {key for row in value["rows"] for one in row.get(inner, []) for key in one}
        assert [key for key in sorted(keys) if f"`{key}`" not in section] == []


def test_fidelity_shows_a_table(run: Run, documents: Path) -> None:
    given = ("--documents", documents, "--model", MODEL, *SMALL, "--retention", "20%")
    done = run("bench", "fidelity", *given, "--sets", "one,per-head", "--sketch-bits", "2,4")
    assert done.code == 0
    lines = [line.split() for line in done.out.splitlines()]
    firsts = [line[0] for line in lines if line]
    assert firsts[: firsts.index("random") + 1].count("exact") == 1
    for text in ("sketch, 4 bits", "per-head", "20 %", "recall", "2 queries behind 2 prefixes"):
        assert text in done.out


def test_rows_are_a_column_where_sketches_differ_in_them(run: Run, documents: Path) -> None:
    given = ("--documents", documents, "--model", MODEL, *SMALL, "--evidence", "sketch,random")
    headers = {}
    for rows in ("auto", "all,sampled"):
        done = run("bench", "fidelity", *given, "--retention", "0.2", "--rows", rows)
        assert done.code == 0
        headers[rows] = next(line for line in done.out.splitlines() if "evidence" in line).split()
        firsts = [line.split()[:4] for line in done.out.splitlines()]
        assert (["sketch,", "2", "bits", "sampled"] in firsts) == (rows == "all,sampled")
    assert "rows" not in headers["auto"]
    assert headers["all,sampled"][:3] == ["evidence", "rows", "sets"]


def test_the_object_says_where_a_history_came_from_and_how_heads_had_to_agree(
    run: Run, documents: Path
) -> None:
    given = ("--documents", documents, "--model", MODEL, *SMALL[:4], "--prefixes", 1, "--json")
    asked = ("--evidence", "static,heads", "--retention", "0.2", "--attend", "loaded")
    done = run("bench", "fidelity", *given, *asked, "--threshold", "0.3", "--fallback", "always")
    value = done.json
    assert (value["threshold"], value["fallback"]) == (0.3, "always")
    assert {row["evidence"]: row["fallback_ratio"] for row in value["rows"]}["heads"] == 1.0
    # There is one prefix: nobody else's queries, which is said.
    assert value["history_from"] == "same"
    assert "static learns from further queries of the same prefix" in done.err
    assert "has no effect" not in done.err
    same = run("bench", "fidelity", *given, *asked, "--history-from", "same")
    assert same.json["history_from"] == "same"
    assert "static learns from" not in same.err


def test_options_that_no_compared_evidence_uses_get_a_note(
    run: Run, documents: Path, store: Path
) -> None:
    given = ("--retention", "0.2", "--attend", "loaded", "--query-tokens", 9)
    of_documents = ("--documents", documents, "--model", MODEL, *SMALL[:2], "--prefixes", 1)
    done = run(
        "bench", "fidelity", *of_documents, *given, "--evidence", "full,random",
        "--rows", "all", "--alpha", "0.5", "--json",
    )  # fmt: skip
    assert "note: alpha and rows have no effect with evidence full, random" in done.err
    done = run("bench", "fidelity", "--store", store, *given, "--rows", "all", "--alpha", "1")
    assert "note: alpha has no effect with evidence full, sketch, static, random" in done.err


def test_similarity_prints_the_documented_object_and_tables(run: Run, documents: Path) -> None:
    given = ("--documents", documents, "--model", MODEL, *SMALL, "--retention", "0.1,0.5")
    value = run("bench", "similarity", *given, "--json").json
    assert value["schema"] == "impress.bench-similarity/1"
    assert [(row["layer"], row["retention"]) for row in value["rows"]] == [
        (layer, retention) for layer in range(3) for retention in (0.1, 0.5)
    ]
    assert [total["retention"] for total in value["totals"]] == [0.1, 0.5]
    assert [share["chunk_tokens"] for share in value["totals"][0]["chunks"]] == [16, 64]
    done = run("bench", "similarity", *given)
    for text in ("threshold", "random sets", "same KV head", "useful, 16", "touched, 64"):
        assert text in done.out


def test_a_store_is_measured_and_says_what_it_lacks(run: Run, store: Path) -> None:
    given = ("--store", store, "--query-tokens", 20, "--retention", 0.2)
    done = run("bench", "fidelity", *given, "--json")
    assert done.code == 0
    assert done.json["prefixes"][0]["name"] == "keepers"
    assert (done.json["documents"], done.json["history_from"]) == (None, None)
    assert "no probe data of the kind 'heads'" in done.err
    found = {row["evidence"] for row in done.json["rows"]}
    assert {"exact", "full", "random"} <= found
    assert "heads" not in found
    named = run("bench", "fidelity", *given, "--evidence", "heads")
    assert (named.code, named.out) == (2, "")
    assert "impress reorder --store" in named.err
    assert run("bench", "similarity", *given, "--json").code == 0


@pytest.mark.parametrize("retention", ["0.2,1.0", "1.0"])
@pytest.mark.parametrize("name", ["fidelity", "similarity"])
def test_a_picture_is_drawn(
    run: Run, documents: Path, tmp_path: Path, name: str, retention: str
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "picture.png"
    given = ("--documents", documents, "--model", MODEL, *SMALL, "--retention", retention)
    done = run("bench", name, *given, "--plot", path)
    assert done.code == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 5000
    assert f"drawn in {path}" in done.err


def test_a_picture_without_matplotlib_says_what_to_install(
    run: Run, documents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError("No module named 'matplotlib'")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    done = run("bench", "similarity", "--documents", documents, "--plot", "a.png")
    assert (done.code, len(done.err.splitlines())) == (2, 1)
    assert "pip install impress-kv[plots]" in done.err


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ((), 2, "give --documents DIR or --store DIR; neither is given"),
        (("--documents", "{here}", "--store", "kv"), 2, "both are given"),
        (("--documents", "{none}"), 1, "no such folder"),
        (("--documents", "{empty}"), 1, "no .txt or .md files"),
        (("--documents", "{here}", "--retention", "1.5"), 2, "--retention '1.5'"),
        (("--documents", "{here}", "--retention", ","), 2, "--retention ',' names nothing"),
        (("--documents", "{here}", "--chunk-tokens", "x"), 2, "list of whole numbers"),
        (("--documents", "{here}", "--chunk-tokens", "8"), 2, "chunks of 8 tokens"),
        (("--documents", "{here}", "--prefixes", "0"), 2, "--prefixes 0"),
        (("--documents", "{here}", "--plot", "a.pdf"), 2, "does not end in .png"),
        (("--documents", "{here}", "--plot", "none/a.png"), 2, "can't write into"),
        (("--store", "{none}"), 1, "no store at"),
        (("--store", "{none}", "--prefix-tokens", "64"), 2, "--prefix-tokens 64 has no effect"),
    ],
)
@pytest.mark.parametrize("name", ["fidelity", "similarity"])
def test_wrong_usage_is_one_line_before_a_model_is_loaded(
    run: Run, documents: Path, tmp_path: Path, name: str, arguments: Any, code: int, says: str
) -> None:
    (tmp_path / "empty").mkdir()
    places = {"here": documents, "none": tmp_path / "none", "empty": tmp_path / "empty"}
    done = run("bench", name, *(text.format(**places) for text in arguments))
    assert (done.code, done.out, len(done.err.splitlines())) == (code, "", 1)
    assert says in done.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--evidence", "fulll"), "evidence 'fulll' is not known; use one or more of full"),
        (("--sets", "two"), "sets 'two'"),
        (("--attend", "everything"), "attend 'everything'"),
        (("--sketch-bits", "3"), "3 bits"),
        (("--history", "-1"), "--history -1"),
        (
            ("--history", "0", "--order", "original,importance"),
            "history 0 leaves none; give --history",
        ),
        (("--history-from", "all"), "'all' is not one of 'others', 'same'"),
        (("--rows", "some"), "rows 'some' is not known; use one or more of auto, all, sampled"),
        (("--rows", ","), "--rows ',' names nothing"),
        (("--alpha", "0.5", "--threshold", "0.5"), "--alpha 0.5 and --threshold 0.5 exclude"),
        (("--threshold", "1.5"), "threshold 1.5"),
        (("--fallback", "maybe"), "maybe"),
    ],
)
def test_unknown_names_are_refused(
    run: Run, documents: Path, arguments: tuple[str, ...], says: str
) -> None:
    done = run("bench", "fidelity", "--documents", documents, *arguments)
    assert (done.code, len(done.err.splitlines())) == (2, 1)
    assert says in done.err


def test_where_a_stores_history_comes_from_is_no_question(run: Run, tmp_path: Path) -> None:
    done = run("bench", "fidelity", "--store", tmp_path / "none", "--history-from", "others")
    assert (done.code, len(done.err.splitlines())) == (2, 1)
    assert "--history-from others has no effect on a store" in done.err


def test_documents_that_are_too_short_are_refused(run: Run, documents: Path) -> None:
    given = ("--documents", documents, "--model", MODEL, "--prefix-tokens", 600)
    done = run("bench", "similarity", *given)
    assert done.code == 1
    assert "fewer than the 664 tokens" in done.err
    far = run("bench", "fidelity", *given[:4], "--prefix-tokens", 5000)
    assert far.code == 2
    assert "5064 positions" in far.err


def test_questions_come_from_a_file(run: Run, documents: Path, tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps({"prefix": "a", "prompt": "Who lives by the pier?"}))
    given = ("--documents", documents, "--model", MODEL, *SMALL, "--queries", path)
    value = run("bench", "fidelity", *given, "--evidence", "random", "--json").json
    assert value["queries"] == str(path)
    assert [pair["prefix"] for pair in value["rows"][1]["pairs"]] == ["a"]
