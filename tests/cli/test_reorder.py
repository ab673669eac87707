"""``impress reorder``, and the options of ``build-store`` that choose probe layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from impress_cli.units import format_percent
from tests.cli.conftest import MODEL, Run


def probes_of(run: Run, store: Path) -> dict[str, Any]:
    """Probe layouts that every node of a store has, by kind: nodes, bytes, kv_share."""
    stats = run("stats", "--store", store, "--json").json
    assert all(entry["nodes"] == stats["nodes"] for entry in stats["probes"].values())
    return dict(stats["probes"])


@pytest.fixture
def plain(run: Run, document: Path, tmp_path: Path) -> Path:
    """A store without probe layouts."""
    path = tmp_path / "plain"
    assert build(run, document, path, "--probe", "none").code == 0
    return path


def build(run: Run, document: Path, path: Path, *options: object) -> Any:
    return run("build-store", document, "--store", path, "--model", MODEL, *options)


def test_a_new_store_keeps_a_2_bit_sketch_unless_told_otherwise(
    run: Run, document: Path, tmp_path: Path
) -> None:
    for options, kinds in (
        ((), {"sketch"}),
        (("--probe", "none"), set()),
        (("--probe", "heads"), {"heads"}),
        (("--probe", "both", "--sketch-bits", 4), {"heads", "sketch"}),
    ):
        path = tmp_path / f"kv{len(kinds)}{len(options)}"
        done = build(run, document, path, *options, "--json")
        assert set(done.json["probe"]) == set(probes_of(run, path)) == kinds
    assert done.json["probe"] == {"sketch": {"bits": 4}, "heads": {"heads": [[0], [0], [0]]}}


def test_stats_show_the_share_of_probe_layouts(run: Run, store: Path) -> None:
    assert run("reorder", "--store", store, "--probe", "both").code == 0
    stats = run("stats", "--store", store, "--json").json
    heads, sketch = stats["probes"]["heads"], stats["probes"]["sketch"]
    assert heads["kv_share"] == 1 / (2 * 2)
    # Values of 4 bytes: half the share of a store in 16 bit, and the last group is padded.
    assert 0.039 < sketch["kv_share"] < 0.05
    assert stats["probe_share"] == pytest.approx(heads["kv_share"] + sketch["kv_share"])
    assert stats["bytes"]["probe"] == heads["bytes"] + sketch["bytes"] > 0
    assert "probe_share" in run("stats", "--store", store).out


def test_inspect_lists_a_nodes_probe_layouts(run: Run, store: Path) -> None:
    (node,) = run("inspect", "--store", store, "--json").json["nodes"]
    detail = run("inspect", node["node_id"], "--store", store, "--json").json["node"]
    assert detail["probes"]["sketch"]["bits"] == 2
    assert detail["probes"]["sketch"]["bytes"] > 0
    assert "probes.sketch.bits" in run("inspect", node["node_id"], "--store", store).out


def test_reorder_adds_and_drops_and_does_nothing_twice(run: Run, plain: Path) -> None:
    reorder = ("reorder", "--store", plain, "--json")
    added = run(*reorder, "--probe", "both").json
    assert added["schema"] == "impress.reorder/1"
    assert (added["nodes"], added["probes_added"], added["probes_dropped"]) == (1, 2, 0)
    assert (added["rewritten"], added["chunks_before"], added["chunks_after"]) == (0, None, None)
    assert added["bytes_written"] == sum(e["bytes"] for e in probes_of(run, plain).values())
    again = run(*reorder, "--probe", "both").json
    assert (again["probes_added"], again["bytes_written"]) == (0, 0)
    fewer = run(*reorder, "--probe", "sketch").json
    assert (fewer["probes_added"], fewer["probes_dropped"]) == (0, 1)
    wider = run(*reorder, "--sketch-bits", 4).json
    assert (wider["probe"], wider["probes_added"]) == ({"sketch": {"bits": 4}}, 1)
    assert run(*reorder).json["probes_added"] == 0
    none = run("reorder", "--store", plain, "--probe", "none")
    assert "1 dropped" in none.out
    assert probes_of(run, plain) == {}
    assert list(plain.glob("nodes/*/*/probe-*")) == []


def test_reorder_shows_first_what_it_would_do(run: Run, plain: Path) -> None:
    dry = run("reorder", "--store", plain, "--probe", "both", "--dry-run", "--json").json
    assert (dry["dry_run"], dry["probes_added"]) == (True, 2)
    assert probes_of(run, plain) == {}
    assert "would be" in run("reorder", "--store", plain, "--probe", "heads", "--dry-run").out
    done = run("reorder", "--store", plain, "--probe", "both", "--json").json
    assert done["bytes_written"] == dry["bytes_written"]


def test_a_dry_run_counts_heads_that_are_not_chosen_yet_for_every_node(
    run: Run, plain: Path
) -> None:
    assert run("reorder", "--store", plain, "--probe", "heads", "--probe-heads", 1).code == 0
    options = ("--store", plain, "--probe-heads", "auto", "--dry-run")
    dry = run("reorder", *options, "--json").json
    assert (dry["probes_added"], dry["probes_dropped"]) == (1, 0)
    assert dry["bytes_written"] > 0
    assert "which heads auto takes is known once it ran" in run("reorder", *options).err
    assert "probes.heads" in run("stats", "--store", plain).out


def test_a_store_that_keeps_none_is_told_how_to_get_some(run: Run, plain: Path) -> None:
    command = f"'impress reorder --store {plain} --probe sketch'"
    assert command in run("reorder", "--store", plain).err
    assert command not in run("reorder", "--store", plain, "--probe", "none").err


def test_heads_are_given_as_a_number_a_list_or_chosen_by_calibration(run: Run, plain: Path) -> None:
    reorder = ("reorder", "--store", plain, "--probe", "heads", "--json", "--probe-heads")
    for text, heads in (("2", [0, 1]), ("1,0", [0, 1]), ("1,", None), ("1", [0])):
        done = run(*reorder, text)
        if heads is None:
            assert done.code == 2
        else:
            assert done.json["probe"]["heads"]["heads"] == [heads] * 3
    auto = run(*reorder, "auto").json
    chosen = auto["probe"]["heads"]["heads"]
    assert [len(layer) for layer in chosen] == [1, 1, 1]
    assert run(*reorder, "auto").json["probe"]["heads"]["heads"] == chosen


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--probe", "heads", "--probe-heads", "3"), "1 to 2"),
        (("--probe", "heads", "--probe-heads", "0"), "1 to 2"),
        (("--probe", "heads", "--probe-heads", "0,7"), "KV heads 0 to 1"),
        (("--probe", "heads", "--probe-heads", "0,0"), "none twice"),
        (("--probe", "heads", "--probe-heads", "first"), "a list such as 0,2,5"),
        (("--probe", "sketch", "--sketch-bits", "3"), "3 bits"),
        (("--probe", "sketch", "--sketch-bits", "0"), "0 bits"),
        (("--probe", "heads", "--sketch-bits", "2"), "--probe sketch"),
        (("--probe", "sketch", "--probe-heads", "1"), "--probe heads"),
        (("--probe", "some"), "--probe"),
    ],
)
def test_values_that_are_not_allowed_are_wrong_usage(
    run: Run, built: Path, options: tuple[str, ...], said: str
) -> None:
    done = run("reorder", "--store", built, *options)
    assert done.code == 2
    assert said in done.err


@pytest.mark.parametrize(
    "options", [("--probe", "both"), ("--sketch-bits", 4), ("--probe", "none")]
)
def test_a_stores_probe_layouts_are_not_changed_by_building_more(
    run: Run, built: Path, document: Path, options: tuple[object, ...]
) -> None:
    refused = build(run, document, built, *options)
    assert refused.code == 2
    assert f"impress reorder --store {built}" in refused.err
    assert build(run, document, built, "--probe", "sketch", "--sketch-bits", 2).code == 0


def test_building_with_heads_chosen_by_calibration_can_be_run_again(
    run: Run, document: Path, tmp_path: Path
) -> None:
    options = ("--probe", "heads", "--probe-heads", "auto", "--json")
    first = build(run, document, tmp_path / "kv", *options).json
    again = build(run, document, tmp_path / "kv", *options).json
    assert first["probe"] == again["probe"]
    assert (again["prefixes_reused"], again["bytes"]) == (1, 0)
    assert set(probes_of(run, tmp_path / "kv")) == {"heads"}


def test_a_dry_run_counts_probe_layouts(run: Run, document: Path, tmp_path: Path) -> None:
    options = (tmp_path / "kv", "--dry-run", "--json")
    plain = build(run, document, *options, "--probe", "none").json["bytes"]
    assert build(run, document, *options).json["bytes"] > plain
    assert not (tmp_path / "kv").exists()


def test_verify_repairs_probe_layouts_without_loading_the_model(run: Run, store: Path) -> None:
    (path,) = store.glob("nodes/*/*/probe-sketch/code/c.0.0.0.0")
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
    found = run("verify", "--store", store, "--json")
    (bad,) = found.json["bad"]
    assert found.code == 1
    assert (bad["array"], bad["layer"], bad["chunk"]) == ("probe-sketch", 0, -1)
    mended = run("verify", "--repair", "--store", store, "--json")
    assert "random weights" not in mended.err
    assert mended.code == 0
    assert mended.json["repaired"] == [bad["node"]]
    assert (mended.json["not_repaired"], mended.json["probes_added"]) == ([], 1)
    assert run("verify", "--store", store).code == 0


def test_a_damaged_sketch_costs_evidence_and_verify_counts_it_as_missing(
    run: Run, store: Path, document: Path, tmp_path: Path
) -> None:
    longer = tmp_path / "longer.txt"
    longer.write_text(document.read_text(encoding="utf-8") + " And more.", encoding="utf-8")
    (path,) = store.glob("nodes/*/*/probe-sketch/code/c.0.0.0.0")
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
    ask = ("query", "who?", "--store", store, "--prefix", longer, "--retention", "0.25")
    done = run(*ask, "--insert", "never", "--max-new-tokens", 1, "--explain")
    assert "reading all keys after a failed load of evidence" in done.err
    assert f"'impress reorder --store {store}' adds what the store keeps" in done.err
    # No token was lost: where the match ended has nothing to do with the damage.
    assert "nothing is stored beyond" in done.out
    assert "could not be" not in done.out
    found = run("verify", "--store", store)
    assert found.code == 0
    assert "1 probe layouts of those that the store keeps are missing" in found.out
    assert run("verify", "--store", store, "--json").json["probes_missing"] == 1
    assert run("verify", "--repair", "--store", store, "--json").json["probes_added"] == 1
    assert run("verify", "--store", store, "--json").json["probes_missing"] == 0


def test_repair_keeps_probe_layouts(run: Run, store: Path) -> None:
    before = probes_of(run, store)
    (store / "catalog.sqlite").write_bytes(b"not a database")
    assert run("repair", "--store", store).code == 0
    assert probes_of(run, store) == before
    assert run("reorder", "--store", store, "--json").json["probes_added"] == 0


def test_an_interrupted_reorder_says_how_to_go_on(
    run: Run, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from store.probes import Sidecars

    def interrupted(*_args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Sidecars, "add", interrupted)
        done = run("reorder", "--store", plain, "--probe", "sketch")
    assert done.code == 130
    assert "run the same command again to go on" in done.err
    assert run("verify", "--store", plain).code == 0
    assert run("reorder", "--store", plain, "--json").json["probes_added"] == 1


ASK = ("--insert", "never", "--max-new-tokens", 1)


def ask(run: Run, store: Path, text: str = "who?") -> None:
    """A question that leaves statistics of every node."""
    (prefix,) = run("ls", "--store", store, "--json").json["prefixes"]
    options = ("--store", store, "--prefix", prefix["prefix_id"], "--retention", "0.25")
    assert run("query", text, *options, *ASK).code == 0


def generation(run: Run, store: Path) -> int:
    """Generation of the only node."""
    (node,) = run("inspect", "--store", store, "--json").json["nodes"]
    return int(node["generation"])


def files(store: Path) -> dict[Path, bytes]:
    """Everything that is stored of nodes and statistics."""
    paths = [path for part in ("nodes", "stats") for path in store.glob(f"{part}/**/*")]
    return {path: path.read_bytes() for path in paths if path.is_file()}


def test_rows_are_put_in_order_of_importance_and_back(run: Run, store: Path) -> None:
    ask(run, store)
    first = run("reorder", "--store", store, "--json").json
    assert (first["nodes"], first["rewritten"], first["order"]) == (1, 1, "importance")
    (row,) = first["rows"]
    assert first["bytes_written"] == row["bytes"] > 0
    assert (row["name"], row["prefixes"], row["left_alone"]) == ("keepers", 1, None)
    assert 0 < row["chunks_after"] < row["chunks_before"] <= row["chunks"]
    assert (first["chunks_before"], first["chunks_after"]) == (
        row["chunks_before"],
        row["chunks_after"],
    )
    assert row["gain"] == pytest.approx(1 - row["chunks_after"] / row["chunks_before"])
    assert generation(run, store) == 1
    again = run("reorder", "--store", store, "--json").json
    assert (again["rewritten"], again["bytes_written"]) == (0, 0)
    assert again["rows"][0]["left_alone"] == "as asked"
    assert again["chunks_before"] == again["chunks_after"] == first["chunks_after"]
    back = run("reorder", "--store", store, "--order", "original")
    assert "1 node put back in token order" in back.out
    assert "more)" in back.out
    assert run("verify", "--store", store).code == 0
    assert generation(run, store) == 2


def test_what_was_done_is_said_in_words(run: Run, store: Path) -> None:
    ask(run, store)
    done = run("reorder", "--store", store, "--min-gain", "5%")
    assert "1 node put in order of importance" in done.out
    assert "chunks per layer instead of" in done.out
    assert "fewer)" in done.out
    assert "1 node: 0 probe layouts added" in done.out
    assert done.err == ""
    again = run("reorder", "--store", store)
    assert "0 nodes put in order of importance (0 B written); left alone: 1 as asked" in again.out
    assert "instead of" not in again.out


def test_a_dry_run_shows_each_node_and_writes_nothing(run: Run, store: Path) -> None:
    ask(run, store)
    before = files(store)
    # One question promises little.
    any_gain = ("reorder", "--store", store, "--min-gain", "0")
    dry = run(*any_gain, "--dry-run")
    assert "keepers" in dry.out
    assert "1 node would be put in order of importance" in dry.out
    planned = run(*any_gain, "--dry-run", "--json").json
    assert (planned["dry_run"], planned["rewritten"]) == (True, 1)
    assert format_percent(planned["rows"][0]["gain"]) in dry.out
    assert files(store) == before
    done = run(*any_gain, "--json").json
    assert done["rows"] == planned["rows"]
    assert files(store) != before


def test_a_dry_run_says_why_a_node_is_left_alone(run: Run, store: Path) -> None:
    assert "left alone: no statistics" in run("reorder", "--store", store, "--dry-run").out
    ask(run, store)
    few = run("reorder", "--store", store, "--dry-run", "--min-gain", "0.99")
    assert "left alone: gain below min-gain" in few.out
    assert (
        "left alone: as asked"
        in run("reorder", "--store", store, "--order=original", "--dry-run").out
    )


def test_without_statistics_it_says_how_to_get_some(run: Run, store: Path) -> None:
    how = (f"impress query --store {store} --retention 0.25", "--calibrate FILE")
    for options in ((), ("--dry-run",), ("--order", "importance", "--probe", "both")):
        done = run("reorder", "--store", store, *options)
        assert done.code == 0
        assert all(text in done.err for text in how)
    assert run("reorder", "--store", store, "--json").json["chunks_before"] is None


def test_only_probe_layouts_were_asked_for_and_nothing_is_missed(run: Run, store: Path) -> None:
    done = run("reorder", "--store", store, "--probe", "both")
    assert (done.code, done.err) == (0, "")
    assert "order" not in done.out
    original = run("reorder", "--store", store, "--order", "original")
    assert (original.code, original.err) == (0, "")


def test_rows_and_probe_layouts_are_changed_in_one_run(run: Run, store: Path) -> None:
    ask(run, store)
    probes = run("reorder", "--store", store, "--probe", "heads", "--json").json
    assert (probes["rewritten"], probes["rows"], probes["probes_added"]) == (0, [], 1)
    rows = ("--min-gain", "0", "--probe", "both")
    done = run("reorder", "--store", store, *rows, "--json").json
    assert (done["rewritten"], done["probes_added"]) == (1, 1)
    assert done["bytes_written"] == done["rows"][0]["bytes"] + done["probe_bytes_written"]
    assert done["probe_bytes_written"] > 0


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"prompt": "who?"}\n{"prefix": "keepers", "prompt": "where?"}\n')
    return path


def test_questions_stand_for_those_nobody_has_asked(run: Run, store: Path, questions: Path) -> None:
    calibrate = ("reorder", "--store", store, "--calibrate", questions, "--json")
    before = files(store)
    dry = run(*calibrate, "--dry-run").json
    assert (dry["rewritten"], files(store)) == (1, before)
    done = run(*calibrate).json
    assert done["rows"] == dry["rows"]
    assert generation(run, store) == 1
    # The store itself has learned nothing of them.
    assert run("stats", "--store", store, "--json").json["counters"] == {}
    assert run("reorder", "--store", store, "--json").json["chunks_before"] is None


def test_questions_are_read_before_a_model_is_loaded(run: Run, store: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "who?"}\n{"question": "where?"}\n')
    done = run("reorder", "--store", store, "--calibrate", path)
    assert done.code == 1
    assert "bad.jsonl:2:" in done.err
    assert "random weights" not in done.err
    path.write_text('{"prefix": "nobody", "prompt": "who?"}\n')
    missing = run("reorder", "--store", store, "--calibrate", path)
    assert missing.code == 1
    assert "bad.jsonl:1:" in missing.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--watch", "10m", "--dry-run"), "--watch 10m and --dry-run exclude each other"),
        (("--watch", "10m", "--calibrate", "q"), "--watch 10m and --calibrate exclude each other"),
        (("--watch", "10m", "--json"), "--watch 10m and --json exclude each other"),
        (("--calibrate", "q", "--order", "original"), "token order needs no questions"),
        (("--watch", "soon"), "not a time"),
        (("--watch", "10"), "not a time"),
        (("--watch", "0"), "no time to wait"),
        (("--min-gain", "100%"), "a share from 0 to below 100%"),
        (("--min-gain", "-1%"), "a share from 0 to below 100%"),
        (("--min-gain", "some"), "'some'"),
        (("--order", "size"), "--order"),
    ],
)
def test_options_about_rows_that_are_not_allowed_are_wrong_usage(
    run: Run, built: Path, options: tuple[str, ...], said: str
) -> None:
    done = run("reorder", "--store", built, *options)
    assert done.code == 2
    assert said in done.err


def test_an_option_without_effect_is_said(run: Run, built: Path) -> None:
    done = run("reorder", "--store", built, "--order", "original", "--min-gain", "5%")
    assert "--min-gain has no effect" in done.err


def test_a_damaged_node_is_left_and_said(run: Run, store: Path) -> None:
    ask(run, store)
    (path,) = store.glob("nodes/*/*/g0/v/c.1.0.0.0")
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
    done = run("reorder", "--store", store)
    assert done.code == 0
    assert "warning: not reordered: node" in done.err
    assert "left alone: 1 damaged" in done.out


def test_watching_goes_on_until_ctrl_c_and_is_no_failure(
    run: Run, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipelines import reorder

    def sleep(_seconds: float) -> None:
        raise KeyboardInterrupt

    ask(run, store)
    monkeypatch.setattr(reorder, "IDLE_S", 0.0)
    assert reorder.watch.__kwdefaults__ is not None
    monkeypatch.setitem(reorder.watch.__kwdefaults__, "sleep", sleep)
    done = run("reorder", "--store", store, "--watch", "10m")
    assert done.code == 0
    assert "every 10 min 0 s" in done.err
    assert "1 node put in order of importance" in done.out
    assert "stopped watching" in done.err
    assert run("verify", "--store", store).code == 0


def test_an_interrupted_reorder_of_rows_says_how_to_go_on(
    run: Run, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from store.engine import PrefixStore

    def interrupted(*_args: object) -> None:
        raise KeyboardInterrupt

    ask(run, store)
    with monkeypatch.context() as patch:
        patch.setattr(PrefixStore, "reorder", interrupted)
        done = run("reorder", "--store", store)
    assert done.code == 130
    assert "run the same command again to go on" in done.err
    assert run("verify", "--store", store).code == 0
    assert run("reorder", "--store", store, "--json").json["rewritten"] == 1
