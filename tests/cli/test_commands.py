"""The commands that build and look after a store, on a tiny random model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import MODEL, Run


def shard(store: Path, array: str) -> Path:
    """The first layer's file of an array of the only node."""
    (path,) = store.glob(f"nodes/*/*/g*/{array}/c.0.*")
    return path


def flip_a_bit(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


def test_building_twice_computes_nothing_the_second_time(
    run: Run, document: Path, tmp_path: Path
) -> None:
    build = ("build-store", document, "--store", tmp_path / "kv", "--json")
    first = run(*build, "--model", MODEL).json
    second = run(*build).json
    assert first["schema"] == "impress.build-store/1"
    assert (first["prefixes"], first["prefixes_reused"]) == (1, 0)
    assert first["computed_tokens"] == first["tokens"] > 0
    assert (second["prefixes"], second["prefixes_reused"]) == (1, 1)
    assert (second["computed_tokens"], second["bytes"]) == (0, 0)
    assert {"tokens_per_s", "warnings", "versions", "environment"} <= set(first)


def test_a_new_store_is_announced(run: Run, document: Path, tmp_path: Path) -> None:
    done = run("build-store", document, "--store", tmp_path / "kv", "--model", MODEL)
    assert "created a store" in done.err
    assert "1 prefixes stored" in done.out


def test_quiet_keeps_notes_but_not_warnings_away(run: Run, document: Path, tmp_path: Path) -> None:
    done = run("build-store", document, "--store", tmp_path / "kv", "--model", MODEL, "-q")
    assert "note:" not in done.err
    assert "random weights" in done.err


def test_a_dry_run_writes_nothing_and_shows_tokens_bytes_time_and_space(
    run: Run, document: Path, tmp_path: Path
) -> None:
    path = tmp_path / "kv"
    done = run("build-store", document, "--store", path, "--model", MODEL, "--dry-run", "--json")
    assert done.code == 0
    assert {"prefixes", "tokens", "bytes", "duration_s", "free_bytes"} <= set(done.json)
    assert done.json["tokens"] > 0
    assert not path.exists()


def test_a_dry_run_with_fresh_deletes_nothing(run: Run, store: Path, document: Path) -> None:
    run("build-store", document, "--store", store, "--model", MODEL, "--dry-run", "--fresh")
    assert len(run("ls", "--store", store, "--json").json["prefixes"]) == 1


def test_fresh_starts_anew_but_deletes_only_stores(run: Run, store: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("Something else entirely, at some length.", encoding="utf-8")
    build = ("build-store", other, "--model", MODEL, "--fresh", "--store")
    assert run(*build, store).code == 0
    names = [prefix["name"] for prefix in run("ls", "--store", store, "--json").json["prefixes"]]
    assert names == ["other"]
    refused = run(*build, tmp_path)
    assert refused.code == 1
    assert "does not delete it" in refused.err
    assert other.exists()


@pytest.mark.parametrize(("option", "value"), [("--chunk-tokens", "64"), ("--codec", "zstd")])
def test_a_layout_other_than_the_stores_own_is_refused(
    run: Run, built: Path, document: Path, option: str, value: str
) -> None:
    done = run("build-store", document, "--store", built, option, value)
    assert done.code == 2
    assert option in done.err
    assert "--fresh" in done.err


@pytest.mark.parametrize("value", ["15", "512"])
def test_chunk_tokens_out_of_range_is_wrong_usage(
    run: Run, document: Path, tmp_path: Path, value: str
) -> None:
    build = ("build-store", document, "--store", tmp_path / "kv", "--model", MODEL)
    done = run(*build, "--chunk-tokens", value)
    assert done.code == 2
    assert value in done.err


def test_a_missing_input_file_and_an_unknown_recipe_say_what_to_do(
    run: Run, tmp_path: Path
) -> None:
    missing = run("build-store", "none.txt", "--store", tmp_path / "kv", "--model", MODEL)
    recipe = run("build-store", "demmo", "--store", tmp_path / "kv")
    assert (missing.code, recipe.code) == (1, 1)
    assert "none.txt" in missing.err
    assert "demo" in recipe.err


def test_a_size_limit_leaves_prefixes_out_with_a_warning(
    run: Run, document: Path, tmp_path: Path
) -> None:
    build = ("build-store", document, "--store", tmp_path / "kv", "--model", MODEL)
    done = run(*build, "--max-size", "10kB", "--json")
    assert done.json["dropped"] == 1
    assert done.json["warnings"]


def test_ls_lists_id_name_tokens_bytes_and_date(run: Run, built: Path) -> None:
    (prefix,) = run("ls", "--store", built, "--json").json["prefixes"]
    assert {"prefix_id", "name", "tokens", "bytes", "probe_bytes", "created"} <= set(prefix)
    shown = run("ls", "--store", built).out
    assert prefix["prefix_id"] in shown
    assert "keepers" in shown


def test_ls_shows_probe_layouts_beside_the_kv(run: Run, store: Path) -> None:
    (before,) = run("ls", "--store", store, "--json").json["prefixes"]
    sizes = run("stats", "--store", store, "--json").json["bytes"]
    assert (before["bytes"], before["probe_bytes"]) == (sizes["kv"], sizes["probe"])
    assert before["probe_bytes"] > 0
    run("reorder", "--store", store, "--probe", "none")
    (after,) = run("ls", "--store", store, "--json").json["prefixes"]
    assert after == {**before, "probe_bytes": 0}
    shown = run("ls", "--store", store).out
    header = next(line for line in shown.splitlines() if "name" in line).split()
    assert header == ["prefix", "name", "tokens", "KV", "probe", "created"]


def test_inspect_shows_the_tree_and_one_node_by_a_beginning_of_its_id(
    run: Run, built: Path
) -> None:
    (node,) = run("inspect", "--store", built, "--json").json["nodes"]
    assert node["node_id"] in run("inspect", "--store", built).out
    detail = run("inspect", node["node_id"][:6], "--store", built, "--json").json["node"]
    assert detail["node_id"] == node["node_id"]
    assert detail["prefixes"] == ["keepers"]
    missing = run("inspect", "zz", "--store", built)
    assert (missing.code, "'zz'" in missing.err) == (1, True)


def test_stats_have_the_documented_keys_and_count_hits(run: Run, store: Path) -> None:
    before = run("stats", "--store", store, "--json").json
    assert before["hit"] == {"device": None, "host": None, "disk": None}
    run("query", "who?", "--prefix", "keepers", "--store", store, "--max-new-tokens", 1)
    after = run("stats", "--store", store, "--json").json
    keys = {"bytes", "hit", "important_hit", "read_amplification", "wasted_bytes", "probe_share"}
    assert keys <= set(after)
    assert set(after["bytes"]) == {"kv", "probe", "total"}
    assert 0.9 < after["hit"]["disk"] <= 1.0
    assert after["counters"]["queries"] == 1


@pytest.mark.parametrize("array", ["k", "v"])
def test_verify_names_the_damaged_chunk_and_repair_rebuilds_it(
    run: Run, store: Path, array: str
) -> None:
    assert run("verify", "--store", store).code == 0
    before = run("query", "who?", "--prefix", "keepers", "--store", store, "--json").json
    flip_a_bit(shard(store, array), 5)
    found = run("verify", "--store", store, "--json")
    (bad,) = found.json["bad"]
    assert found.code == 1
    assert (bad["array"], bad["layer"], bad["chunk"]) == (array, 0, 0)
    assert bad["node"] in run("verify", "--store", store).out
    mended = run("verify", "--repair", "--store", store, "--json")
    assert mended.code == 0
    assert mended.json["repaired"] == [bad["node"]]
    assert run("verify", "--store", store).code == 0
    after = run("query", "who?", "--prefix", "keepers", "--store", store, "--json").json
    assert after["tokens"] == before["tokens"]
    assert after["reused_tokens"] == before["reused_tokens"]


def test_a_node_whose_tokens_are_damaged_is_reported_as_not_repaired(run: Run, store: Path) -> None:
    (path,) = store.glob("nodes/*/*/g*/tokens/c.0")
    flip_a_bit(path, 90)
    done = run("verify", "--repair", "--store", store, "--json")
    assert done.code == 1
    assert len(done.json["not_repaired"]) == 1


def test_repair_rebuilds_a_lost_catalog(run: Run, store: Path) -> None:
    (store / "catalog.sqlite").write_bytes(b"not a database")
    assert run("ls", "--store", store).code == 1
    done = run("repair", "--store", store, "--json")
    assert (done.code, done.json["nodes"]) == (0, 1)
    assert len(run("ls", "--store", store, "--json").json["prefixes"]) == 1


def test_rm_removes_a_prefix_by_name_and_gc_frees_its_bytes(run: Run, store: Path) -> None:
    removed = run("rm", "keepers", "--store", store, "--json").json
    assert (removed["name"], removed["nodes"]) == ("keepers", 1)
    assert run("ls", "--store", store, "--json").json["prefixes"] == []
    assert run("gc", "--store", store).code == 0
    assert list(store.glob("nodes/*/*/g*")) == []
    again = run("rm", "keepers", "--store", store)
    assert (again.code, "keepers" in again.err) == (1, True)


def test_a_store_of_a_newer_format_is_refused_with_both_versions(run: Run, store: Path) -> None:
    info = json.loads((store / "impress.json").read_text(encoding="utf-8"))
    (store / "impress.json").write_text(json.dumps({**info, "format_version": 99}))
    done = run("ls", "--store", store)
    assert done.code == 1
    assert "99" in done.err
    assert "format 1" in done.err
