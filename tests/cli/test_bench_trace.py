"""`impress bench trace`: options, the documented object, the table, errors in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from impress_cli.bench_trace import parse_tiers
from store.errors import InvalidValueError
from tests.cli.conftest import Run

#: Keys of a row, as docs/json.md lists them.
ROW = {
    "policy",
    "order",
    "device_bytes",
    "host_bytes",
    "hit_device",
    "hit_host",
    "important_hit",
    "loaded_ratio",
    "disk_bytes",
    "host_to_device_bytes",
    "io_s",
    "io_p99_s",
    "requests",
}
OTHERS = {
    "endless",
    "infinite_hit_ratio",
    "requests",
    "blocks",
    "matched_blocks",
    "stored_blocks",
    "nodes",
    "splits",
    "data_bytes",
    "matched_bytes",
    "evidence_bytes",
    "evidence_share",
    "chunk_tokens",
    "block_tokens",
    "retention",
    "layers_sampled",
    "importance",
    "half_life",
    "disk_bytes_s",
    "host_bytes_s",
    "seed",
    "kv",
    "warnings",
    "trace",
    "shape",
    "store",
}
SMALL = ("--shape", "smollm2-135m", "--sizes", "20MB+60MB,80MB,1GB+0")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    prompts = [[0, 1, 2], [0, 3], [0, 1, 2, 4], [0, 3], [0, 1, 2]]
    lines = [{"timestamp": 0, "input_length": 512 * len(p), "hash_ids": p} for p in prompts]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_the_documented_object_has_a_row_for_each_policy_and_size(run: Run, trace: Path) -> None:
    done = run("bench", "trace", trace, *SMALL, "--json")
    assert (done.code, done.err) == (0, "")
    value = done.json
    assert value["schema"] == "impress.bench-trace/1"
    assert OTHERS | {"rows", "versions", "environment", "schema"} == set(value)
    assert all(set(row) == ROW for row in value["rows"])
    found = [(row["policy"], row["device_bytes"], row["host_bytes"]) for row in value["rows"]]
    sizes = [(20_000_000, 60_000_000), (0, 80_000_000), (10**9, 0)]
    assert found == [(name, *size) for size in sizes for name in ("lru", "lfu", "score")]
    (endless,) = value["endless"]
    assert set(endless) == ROW | {"held_bytes"}
    assert value["infinite_hit_ratio"] == (1 + 3 + 2 + 3) / 14
    assert value["kv"] == {
        "layers": 30,
        "kv_heads": 3,
        "head_dim": 64,
        "dtype": "bfloat16",
        "token_bytes": 23040,
    }
    assert (value["trace"], value["shape"], value["store"]) == (str(trace), "smollm2-135m", None)
    assert value["data_bytes"] == 5 * 512 * 23040


def test_options_reach_the_replay(run: Run, trace: Path) -> None:
    value = run(
        "bench",
        "trace",
        trace,
        *SMALL,
        *("--policies", "score", "--half-life", "9", "--order", "original,importance"),
        *("--retention", "10%", "--importance", "uniform", "--evidence-share", "0"),
        *("--disk-bandwidth", "1GB/s", "--host-bandwidth", "2GB/s", "--chunk-tokens", "32"),
        *("--layers-sampled", "3", "--requests", "4", "--seed", "7", "--json"),
    ).json
    orders = [(row["policy"], row["order"]) for row in value["rows"]]
    assert orders == [("score", "original"), ("score", "importance")] * 3
    expected: dict[str, Any] = {
        "half_life": 9.0,
        "retention": 0.1,
        "importance": "uniform",
        "evidence_share": 0.0,
        "evidence_bytes": 0.0,
        "disk_bytes_s": 1e9,
        "host_bytes_s": 2e9,
        "chunk_tokens": 32,
        "layers_sampled": 3,
        "requests": 4,
        "seed": 7,
    }
    assert {name: value[name] for name in expected} == expected


def test_the_table_shows_each_cache_and_the_lines_what_was_assumed(run: Run, trace: Path) -> None:
    done = run("bench", "trace", trace, *SMALL)
    assert done.code == 0
    for text in ("20.0 MB", "lru", "lfu", "score", "endless", "block hit share 0.643"):
        assert text in done.out
    for text in ("9 of 14 blocks", "2 of 30 layers", "23.0 kB per token", "17 % of the matched KV"):
        assert text in done.out
    assert "importance zipf, retention 25 %" in done.out
    assert "a last block that is filled in part counts as a full one" in done.out
    assert "order importance: rows lie by the weights that requests draw by" in done.out
    original = run("bench", "trace", trace, *SMALL, "--order", "original")
    assert "order importance" not in original.out


def test_a_half_life_that_no_policy_has_gets_a_note_and_is_not_shown(run: Run, trace: Path) -> None:
    given = ("bench", "trace", trace, *SMALL, "--half-life", "300", "--json", "--policies")
    done = run(*given, "lru,lfu")
    assert done.err == "note: half-life has no effect with policies lru, lfu\n"
    assert done.json["half_life"] is None
    assert done.json["rows"] == run(*given[:-4], "--json", "--policies", "lru,lfu").json["rows"]
    aged = run(*given, "lru,score")
    assert (aged.err, aged.json["half_life"]) == ("", 300.0)
    bad = run("bench", "trace", trace, *SMALL, "--half-life", "-1", "--policies", "lru")
    assert bad.code == 2


def test_measured_importance_comes_from_a_store(run: Run, trace: Path, store: Path) -> None:
    asked = ("bench", "trace", trace, "--shape", "tiny-gqa", "--sizes", "1MB", "--block-tokens")
    asked = (*asked, "16", "--chunk-tokens", "16", "--importance", f"measured:{store}")
    none = run(*asked)
    assert none.code == 2
    assert "statistics of 0 tokens" in none.err
    question = ("query", "Where?", "--store", store, "--prefix", prefix_of(run, store))
    assert run(*question, "--retention", "0.25", "--max-new-tokens", "1").code == 0
    value = run(*asked, "--json").json
    assert (value["importance"], value["store"]) == ("measured", str(store))


def prefix_of(run: Run, store: Path) -> str:
    return str(run("ls", "--store", store, "--json").json["prefixes"][0]["prefix_id"])


def test_a_warning_says_that_blocks_have_another_size(run: Run, trace: Path) -> None:
    done = run("bench", "trace", trace, *SMALL, "--block-tokens", "256", "--json")
    assert done.code == 0
    assert "5 of 5 requests have another number of hash_ids" in done.err
    assert len(done.json["warnings"]) == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--shape", "opt-31b"], "opt-30b, llama-2-7b"),
        (["--sizes", "1kB"], "less than one chunk"),
        (["--sizes", "1GB+1GB+1GB"], "3 tiers"),
        (["--sizes", "0+0"], "0 for one of two"),
        (["--sizes", "much"], "not a size"),
        (["--policies", "fifo"], "score, lru, lfu"),
        (["--order", "random"], "original, importance"),
        (["--importance", "measured"], "measured:STORE"),
        (["--importance", "zipf:kv"], "measured:STORE"),
        (["--importance", "flat"], "zipf, uniform"),
        (["--evidence-share", "-1"], "--evidence-share"),
        (["--evidence-share", ""], "--evidence-share"),
        (["--retention", "2"], "--retention"),
        (["--disk-bandwidth", "fast"], "--disk-bandwidth"),
        (["--layers-sampled", "0"], "--layers-sampled"),
        (["--chunk-tokens", "48"], "--chunk-tokens"),
    ],
)
def test_wrong_values_are_one_line_and_exit_2(
    run: Run, trace: Path, arguments: list[str], says: str
) -> None:
    done = run("bench", "trace", trace, *arguments)
    assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 1)
    assert says in done.err


def test_a_trace_that_cannot_be_read_fails_with_one_line(run: Run, tmp_path: Path) -> None:
    missing = run("bench", "trace", tmp_path / "none.jsonl")
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"hash_ids": [1]}\n{"hash_ids": \n')
    bad = run("bench", "trace", broken)
    broken.write_text('{"prompt": "text"}\n')
    other = run("bench", "trace", broken)
    for done, says in ((missing, "can't be read"), (bad, ":2: not JSON"), (other, "hash_ids")):
        assert (done.code, done.out, len(done.err.splitlines())) == (1, "", 1)
        assert says in done.err


def test_sizes_name_both_tiers_or_the_host_alone() -> None:
    assert parse_tiers("10GB+32GB") == (10 * 10**9, 32 * 10**9)
    assert parse_tiers(" 1GiB ") == (0, 1 << 30)
    assert parse_tiers("5MB + 0") == (5 * 10**6, 0)
    with pytest.raises(InvalidValueError, match="no room"):
        parse_tiers("0.1B+1GB")
