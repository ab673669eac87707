"""`impress bench ttft`: options, the documented object, the table, errors before a model loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipelines.systems import SYSTEMS, TOGGLES
from pipelines.ttft_values import DEFAULT_SYSTEMS
from store.engine import PrefixStore
from store.errors import ModelLoadError
from tests.cli.conftest import MODEL, Run

SMALL = (
    "--prefix-tokens", 200, "--prefixes", 2, "--query-tokens", 9, "--requests", 4, "--warm-up", 2,
)  # fmt: skip
FEW = ("--systems", "recompute,as-like,impress", "--recompute-sample", 1)


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    folder = tmp_path / "documents"
    folder.mkdir()
    for name in "ab":
        text = "".join(f"{name} keeper {n} lives by pier {n * 37 % 11}. " for n in range(20))
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return folder


def test_it_prints_the_documented_object_and_leaves_nothing(
    run: Run, documents: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    given = ("--documents", documents, "--model", MODEL, *SMALL, "--dir", folder, "--json")
    done = run("bench", "ttft", *given, "--disk-bandwidth", "50MB/s", "--seed", 3)
    assert done.code == 0
    value = done.json
    assert value["schema"] == "impress.bench-ttft/1"
    assert [row["system"] for row in value["rows"]] == [
        "recompute",
        "as-like",
        "as-h2o-lru",
        "as-h2o-lfu",
        "impress-paper",
        "impress",
        "diy",
    ]
    for row in value["rows"]:
        assert {"mean", "p50", "p95", "p99"} == set(row["ttft_s"])
        assert row["n"] == len(row["samples"]) == 4
        assert row["model"] == MODEL
        assert row["ratio_to_impress"] > 0
    by_name = {row["system"]: row for row in value["rows"]}
    assert by_name["impress"]["ratio_to_impress"] == 1.0
    assert by_name["impress"]["budgets"] == by_name["as-like"]["budgets"] == value["budget"]
    assert by_name["recompute"]["budgets"] is by_name["recompute"]["hit"].get("disk") is None
    assert by_name["diy"]["disk"] == "page cache, emulated"
    names = ("evidence", "attend", "ahead", "policy", "half_life")
    assert {name: [row[key] for key in names] for name, row in by_name.items()} == {
        "recompute": [None] * 5,
        "as-like": [None, None, None, "lru", None],
        "as-h2o-lru": ["full", "selected", False, "lru", None],
        "as-h2o-lfu": ["full", "selected", False, "lfu", None],
        "impress-paper": ["heads", "selected", False, "score", None],
        "impress": ["auto", "loaded", SYSTEMS["impress"].ahead, "score", None],
        "diy": [None] * 5,
    }
    assert set(by_name["impress"]["important"]) == {"device", "host", "disk"}
    assert sum(by_name["impress"]["important"].values()) == pytest.approx(1.0)
    assert by_name["recompute"]["important"] == {}
    assert value["environment"]["emulation"]["disk_bandwidth_bytes_s"] == 50e6
    assert (value["seed"], value["requests"], value["retention"]) == (3, 4, 0.25)
    assert [prefix["tokens"] for prefix in value["prefixes"]] == [200, 200]
    assert sum(prefix["requests"] for prefix in value["prefixes"]) == 4
    assert value["reference"]["n"] == 4
    assert value["synthetic"] is True
    assert "random weights" in done.err
    assert list(folder.iterdir()) == []


def test_every_key_is_documented(run: Run, documents: Path) -> None:
    value = run("bench", "ttft", "--documents", documents, "--model", MODEL, *SMALL, "--json").json
    text = (Path(__file__).parents[2] / "docs" / "json.md").read_text(encoding="utf-8")
    section = text.split("## bench ttft")[1].split("\n## ")[0]
    keys = set(value) - {"schema", "versions", "environment", "model", "synthetic"}
    for row in value["rows"]:
        keys |= set(row) | {key for sample in row["samples"] for key in sample}
        keys |= set(row["layout"] or {}) | set(row["budgets"] or {})
    keys |= {key for prefix in value["prefixes"] for key in prefix} | set(value["reference"])
    assert [key for key in sorted(keys) if f"`{key}`" not in section] == []


def test_a_table_compares_the_systems(run: Run, documents: Path) -> None:
    done = run("bench", "ttft", "--documents", documents, "--model", MODEL, *SMALL, *FEW)
    assert done.code == 0
    firsts = [line.split()[0] for line in done.out.splitlines() if line.split()]
    for name in ("recompute", "as-like", "impress"):
        assert name in firsts
    for text in ("p99", "ratio", "I/O wait", "important", "top-1", "25 % kept", "full load"):
        assert text in done.out
    assert "recomputed on 1 requests: logits differ from the full load's by" in done.out
    alone = run(
        "bench", "ttft", "--documents", documents, "--model", MODEL, *SMALL, "--systems", "as-like"
    )
    assert "ratio" not in alone.out


def test_stores_can_be_kept_and_used_again(run: Run, documents: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    given = ("--documents", documents, "--model", MODEL, *SMALL, "--systems", "as-like,diy")
    for _ in range(2):
        assert run("bench", "ttft", *given, "--keep", kept).code == 0
        names = sorted(path.name for path in kept.iterdir())
        assert names == ["bench-ttft.json", "diy", "original-64-none"]
    other = run(
        "bench", "ttft", *given[:2], "--model", "random:tiny-mha", *given[4:], "--keep", kept
    )
    assert (other.code, other.out) == (2, "")
    assert f"--keep {kept} holds the KV of another model; give another folder" in other.err


def test_help_lists_every_system_and_every_toggle(run: Run) -> None:
    words = run("bench", "ttft", "--help").out.replace(",", " ").replace(".", " ").split()
    wanted = {*DEFAULT_SYSTEMS, *(f"+{toggle}" for toggle in TOGGLES)}
    assert wanted - set(words) == set()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--popularity", "uniform", "--zipf", 2), "zipf has no effect with popularity uniform"),
        (("--queries", "{file}", "--query-tokens", 9), "query-tokens has no effect with questions"),
        (("--recompute-sample", 8), "recompute-sample has no effect without the system recompute"),
    ],
)
def test_an_option_without_effect_gets_a_note_where_it_was_given(
    run: Run, documents: Path, tmp_path: Path, arguments: Any, says: str
) -> None:
    (tmp_path / "questions.jsonl").write_text('{"prompt": "Who?"}\n{"prompt": "Why?"}\n')
    asked = [str(text).format(file=tmp_path / "questions.jsonl") for text in arguments]
    given = ("--documents", documents, "--model", MODEL, "--prefix-tokens", 200, "--prefixes", 2)
    few = ("--requests", 1, "--warm-up", 0, "--systems", "as-like")
    done = run("bench", "ttft", *given, *few, *asked)
    assert done.code == 0
    notes = [line for line in done.err.splitlines() if "has no effect" in line]
    assert len(notes) == 1
    assert notes[0].startswith(f"note: {says}")
    assert "has no effect" not in run("bench", "ttft", *given, *few, *asked[:-2]).err


def test_text_names_a_slower_disk_and_reads_through_the_page_cache(
    run: Run, documents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("--documents", documents, "--model", MODEL, *SMALL, "--systems", "as-like,diy")
    slow = ("--disk-bandwidth", "50MB/s", "--disk-latency", "20us")
    monkeypatch.setattr(PrefixStore, "io_note", lambda self: None)
    plain = run("bench", "ttft", *given)
    assert "emulated" not in plain.out
    assert "O_DIRECT" not in plain.out
    monkeypatch.setattr(PrefixStore, "io_note", lambda self: "no direct I/O")
    done = run("bench", "ttft", *given, *slow)
    assert "a slower disk is emulated: 50.0 MB/s, 0.02 ms per read" in done.out
    assert "O_DIRECT does not work on this file system: as-like read through the page" in done.out


def test_a_file_system_in_memory_is_said_once_and_before_anything_is_measured(
    run: Run, documents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("--documents", documents, "--model", MODEL, *SMALL, "--systems", "as-like", "--json")
    monkeypatch.setattr("pipelines.ttft_stores.file_system", lambda folder: "tmpfs")
    done = run("bench", "ttft", *given)
    assert done.err.count("is on a file system in memory") == 1
    assert "is on a file system in memory" in done.json["warnings"][0]

    def load(*_: object, **__: object) -> None:
        raise ModelLoadError("stop here")

    monkeypatch.setattr("pipelines.models.load_model", load)
    stopped = run("bench", "ttft", *given)
    assert "is on a file system in memory" in stopped.err
    assert "stop here" in stopped.err


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ((), 2, "Missing option '--documents'"),
        (("--documents", "{none}"), 1, "no such folder"),
        (("--documents", "{empty}"), 1, "no .txt or .md files"),
        (("--documents", "{here}", "--systems", "fast"), 2, "system 'fast' is not known; use"),
        (("--documents", "{here}", "--systems", "impress+big"), 2, "toggle 'big' of system"),
        (("--documents", "{here}", "--systems", ","), 2, "--systems ',' names nothing"),
        (("--documents", "{here}", "--budget-share", "0"), 2, "--budget-share '0' is out of range"),
        (("--documents", "{here}", "--budget-share", "2"), 2, "--budget-share '2' is out of range"),
        (("--documents", "{here}", "--device-share", "2"), 2, "--device-share 2 is out of range"),
        (("--documents", "{here}", "--retention", "0"), 2, "--retention '0' is out of range"),
        (("--documents", "{here}", "--popularity", "even"), 2, "use one of zipf, uniform"),
        (("--documents", "{here}", "--requests", "0"), 2, "--requests 0 is not allowed"),
        (("--documents", "{here}", "--disk-bandwidth", "9"), 2, "--disk-bandwidth '9'"),
        (("--documents", "{here}", "--queries", "{none}"), 1, "none"),
        (("--documents", "{here}", "--dir", "{none}"), 2, "give --dir a folder"),
        (("--documents", "{here}", "--dir", "{here}", "--keep", "{none}"), 2, "give one of them"),
    ],
)
def test_wrong_usage_is_one_line_before_a_model_is_loaded(
    run: Run,
    documents: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: Any,
    code: int,
    says: str,
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("pipelines.models.load_model", load)
    (tmp_path / "empty").mkdir()
    places = {"here": documents, "none": tmp_path / "none", "empty": tmp_path / "empty"}
    done = run("bench", "ttft", *(text.format(**places) for text in arguments))
    assert (done.code, done.out, len(done.err.splitlines())) == (code, "", 1)
    assert says in done.err


def test_documents_that_are_too_short_are_refused(run: Run, documents: Path) -> None:
    (documents / "b.txt").unlink()
    given = ("--documents", documents, "--model", MODEL, "--prefix-tokens")
    done = run("bench", "ttft", *given, 900)
    assert (done.code, done.out) == (1, "")
    assert "fewer than the 964 tokens" in done.err
    far = run("bench", "ttft", *given, 5000)
    assert (far.code, far.out) == (2, "")
    assert "5064 positions" in far.err
