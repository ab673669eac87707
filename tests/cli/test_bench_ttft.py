"""`impress bench ttft`: options, the documented object, the table, errors before a model loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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
        assert sorted(path.name for path in kept.iterdir()) == ["diy", "original-64-none"]
    other = run(
        "bench", "ttft", *given[:2], "--model", "random:tiny-mha", *given[4:], "--keep", kept
    )
    assert (other.code, other.out) == (1, "")
    assert "num_kv_heads" in other.err


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
