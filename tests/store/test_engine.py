"""PrefixStore: publishing, identity, verify and quarantine, removal, other processes."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pipelines.attention import prefill
from store.disk import layout as disk_layout
from store.engine import PrefixStore, rebuild_store
from store.errors import (
    CatalogError,
    InvalidValueError,
    ModelMismatchError,
    NotAStoreError,
    PrefixNotFoundError,
    ReadOnlyStoreError,
    StoreError,
    StoreFullError,
    StoreLockedError,
    StoreNotFoundError,
)
from tests.helpers import (
    ask,
    flip_bit,
    group_of,
    ids_of,
    new_store,
    open_store,
    put,
    reference_logits,
    worst,
)
from tests.tiny import make_tiny

MODEL = make_tiny("gqa")
QUESTION = ids_of(4, seed=50)


def two_branches() -> tuple[np.ndarray, np.ndarray]:
    """Two prefixes of 60 tokens that share their first 25."""
    first, second = ids_of(60), ids_of(60)
    second[25:] = ids_of(35, seed=9)
    second[25] = (first[25] + 1) % 256
    return first, second


def check(store: PrefixStore, prefix: np.ndarray, matched: int | None = None) -> None:
    given = ask(store, MODEL, prefix, QUESTION)
    assert given.stats.reused_tokens == (len(prefix) if matched is None else matched)
    assert worst(given, MODEL, prefix, QUESTION) <= 1e-4


def test_what_was_stored_is_there_after_reopening_in_another_process(tmp_path: Path):
    with new_store(tmp_path / "kv", MODEL) as store:
        put(store, MODEL, ids_of(60), "essay")
    code = (
        "from tests.store.test_engine import *\n"
        f"store = open_store(Path({str(tmp_path / 'kv')!r}), MODEL)\n"
        "check(store, ids_of(60)); check(store, ids_of(60))\n"
        "print(store.prefix('essay').length)"
    )
    env = os.environ | {"PYTHONHASHSEED": "12345"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=env,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert done.stdout.strip() == "60", done.stderr


def test_a_split_keeps_both_branches_and_their_names(tmp_path: Path):
    first, second = two_branches()
    with new_store(tmp_path / "kv", MODEL) as store:
        put(store, MODEL, first, "first")
        put(store, MODEL, second, "second")
        assert sorted((r.start, r.length) for r in store.nodes()) == [(0, 25), (25, 35), (25, 35)]
        for name, ids in (("first", first), ("second", second)):
            np.testing.assert_array_equal(store.prefix_ids(store.prefix(name)), ids)
            check(store, ids)
        assert store.verify().bad == []
        assert store.gc().removed_groups == 0, "the insert left garbage behind"


def test_shared_beginnings_are_stored_once(tmp_path: Path):
    first, second = two_branches()
    with new_store(tmp_path / "kv", MODEL) as store:
        put(store, MODEL, first)
        put(store, MODEL, second)
        assert sum(row.length for row in store.nodes()) == 95


def test_a_prefix_inside_another_is_listed_without_new_nodes(tmp_path: Path):
    with new_store(tmp_path / "kv", MODEL) as store:
        put(store, MODEL, ids_of(60), "long")
        before = store.nodes()
        row = store.add_prefix(ids_of(60)[:30], "short", {})
        assert store.nodes() == before
        assert row.length == 30
        with pytest.raises(StoreError, match="only 0 of 10 tokens"):
            store.add_prefix(ids_of(10, seed=77), "unknown", {})


def test_kv_that_follows_tokens_that_are_not_stored_is_refused(tmp_path: Path):
    with (
        new_store(tmp_path / "kv", MODEL) as store,
        pytest.raises(StoreError, match="tokens 0 to 5 of the prefix are no longer stored"),
    ):
        store.insert(ids_of(10), lambda _: pytest.fail("KV was asked for"), 5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weights", "other"),
        ("rope", '{"rope_theta": 1.0}'),
        ("dtype", "bfloat16"),
        ("tokenizer", "other"),
        ("num_layers", 4),
        ("adapter", "lora"),
        ("config", "{}"),
        ("max_positions", 17),
    ],
)
def test_another_identity_is_refused_by_the_field_that_differs(field, value, tmp_path: Path):
    new_store(tmp_path / "kv", MODEL).close()
    other = dataclasses.replace(MODEL.identity, **{field: value})
    with pytest.raises(ModelMismatchError) as caught:
        PrefixStore.open(tmp_path / "kv", identity=other)
    message = str(caught.value)
    assert f"built with {field} {getattr(MODEL.identity, field)}" in message
    assert f"has {field} {value}" in message
    assert "--store" in message


def test_paths_that_are_no_store_are_told_apart(tmp_path: Path):
    with pytest.raises(StoreNotFoundError, match="build-store"):
        PrefixStore.open(tmp_path / "missing")
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x").touch()
    for name in ("file", "folder"):
        with pytest.raises(NotAStoreError):
            PrefixStore.open(tmp_path / name)
        with pytest.raises(NotAStoreError, match="choose another --store"):
            new_store(tmp_path / name, MODEL)


@pytest.mark.parametrize(("option", "value"), [("chunk_tokens", 8), ("codec", "rar")])
def test_a_layout_outside_what_is_allowed_writes_nothing(option, value, tmp_path: Path):
    with pytest.raises(InvalidValueError, match=str(value)):
        new_store(tmp_path / "kv", MODEL, **{option: value})
    assert not (tmp_path / "kv").exists()


ARRAYS = ("tokens", "k_crc", "v_crc", "rows", "k", "v", "zarr.json")


def damage(group: Path, array: str) -> None:
    if array in ("k", "v"):
        flip_bit(disk_layout.shard_path(group, array, 1), 40)
    elif array == "zarr.json":
        flip_bit(group / "k" / "zarr.json", 30)
    else:
        flip_bit(disk_layout.small_array_path(group, array), 2)


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("array", ARRAYS)
def test_verify_finds_one_flipped_bit_in_any_array_of_any_node(array, which, tmp_path: Path):
    first, second = two_branches()
    with new_store(tmp_path / "kv", MODEL) as store:
        put(store, MODEL, first)
        put(store, MODEL, second)
        row = store.nodes()[which]
        damage(group_of(store, row.node_id), array)
        (bad, *more) = store.verify().bad
        assert (bad.node, bad.array) == (row.node_id, array)
        if array in ("k", "v"):
            assert (bad.layer, bad.chunk) == (1, 0)
        assert more == [] or array in ("k_crc", "v_crc", "tokens")


def test_verify_finds_a_flipped_bit_in_a_shard_index_and_a_missing_file(tmp_path: Path):
    with new_store(tmp_path / "kv", MODEL) as store:
        put(store, MODEL, ids_of(60))
        shard = disk_layout.shard_path(group_of(store), "v", 2)
        flip_bit(shard, shard.stat().st_size - 10)
        disk_layout.shard_path(group_of(store), "k", 0).unlink()
        found = {(bad.array, bad.layer, bad.chunk) for bad in store.verify().bad}
        assert found == {("v", 2, -1), ("k", 0, -1)}


@pytest.mark.parametrize("array", ["k", "v", "k_crc", "tokens"])
def test_a_query_that_needs_damaged_data_recomputes_and_reports(array, tmp_path: Path):
    first, second = two_branches()
    with new_store(tmp_path / "kv", MODEL) as store:
        put(store, MODEL, first)
        put(store, MODEL, second)
    with open_store(tmp_path / "kv", MODEL) as store:
        lower = store.match(second).nodes[-1].node
        assert lower.start == 25
        damage(group_of(store, lower.node_id), array)
    with open_store(tmp_path / "kv", MODEL) as store:
        given = ask(store, MODEL, second, QUESTION)
        assert worst(given, MODEL, second, QUESTION) <= 1e-4
        assert given.stats.reused_tokens == 25
        assert any(lower.node_id in reason for reason in given.stats.miss_reasons)
        # Without the damaged node nothing fails any more, in this process or the next.
        check(store, second, matched=25)
        check(store, first)
    with open_store(tmp_path / "kv", MODEL) as store:
        check(store, second, matched=25)


def test_a_damaged_chunk_costs_only_what_follows_it(tmp_path: Path):
    with new_store(tmp_path / "kv", MODEL) as store:
        put(store, MODEL, ids_of(100))
        chunk = store.info.chunk_tokens * store.shape.row_bytes
        flip_bit(disk_layout.shard_path(group_of(store), "k", 2), 3 * chunk + 1)
        given = ask(store, MODEL, ids_of(100), QUESTION)
        assert worst(given, MODEL, ids_of(100), QUESTION) <= 1e-4
        assert given.stats.reused_tokens == 48
        assert given.stats.recovered_chunks == 1
        assert any("layer 2 chunk 3" in reason for reason in given.stats.miss_reasons)


def test_asking_with_insert_heals_a_damaged_node(tmp_path: Path):
    with new_store(tmp_path / "kv", MODEL) as store:
        put(store, MODEL, ids_of(100), "p")
        chunk = store.info.chunk_tokens * store.shape.row_bytes
        flip_bit(disk_layout.shard_path(group_of(store), "k", 2), 3 * chunk + 1)
        given = ask(store, MODEL, ids_of(100), QUESTION, insert="exact")
        assert given.inserted_tokens == 52
        assert store.verify().bad == []
        assert store.quarantined() == []
        check(store, ids_of(100))
    with open_store(tmp_path / "kv", MODEL) as store:
        check(store, ids_of(100))


def test_a_damaged_node_in_the_way_of_an_insert_is_said_and_kept(tmp_path: Path):
    first, second = two_branches()
    with new_store(tmp_path / "kv", MODEL) as store:
        put(store, MODEL, first)
        damage(group_of(store), "v")
        given = ask(store, MODEL, second, QUESTION, insert="exact")
        assert worst(given, MODEL, second, QUESTION) <= 1e-4
        assert "verify --repair" in given.insert_note
        assert len(store.nodes()) == 1


def test_removing_a_prefix_keeps_what_others_need(tmp_path: Path):
    first, second = two_branches()
    with new_store(tmp_path / "kv", MODEL) as store:
        put(store, MODEL, first, "first")
        put(store, MODEL, second, "second")
        report = store.remove(store.prefix("first"))
        assert report.nodes == 1
        check(store, second)
        check(store, first, matched=25)
        with pytest.raises(PrefixNotFoundError):
            store.prefix("first")
        groups = [path for path in (tmp_path / "kv" / "nodes").glob("*/*/g*") if path.is_dir()]
        assert len(groups) == 2
        store.remove(store.prefix("second"))
        assert store.nodes() == []
        put(store, MODEL, first, "first again")
        check(store, first)


def test_a_lost_catalog_is_rebuilt_from_the_groups_alone(tmp_path: Path):
    first, second = two_branches()
    with new_store(tmp_path / "kv", MODEL) as store:
        put(store, MODEL, first, "first")
        put(store, MODEL, second, "second")
        put(store, MODEL, ids_of(30, seed=3), "gone")
        store.remove(store.prefix("gone"))
        third = np.concatenate([first[:10], second[5:30]]).astype(np.uint32)
        put(store, MODEL, third, "third")
        nodes = store.nodes()
    for damage_catalog in (
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b"not a database, at all" * 300),
    ):
        for extra in (tmp_path / "kv").glob("catalog.sqlite*"):
            if extra.name != "catalog.sqlite":
                extra.unlink()
        damage_catalog(tmp_path / "kv" / "catalog.sqlite")
        with pytest.raises(CatalogError, match="impress repair"):
            open_store(tmp_path / "kv", MODEL)
        report = rebuild_store(tmp_path / "kv")
        assert report.nodes == len(nodes)
        with open_store(tmp_path / "kv", MODEL) as store:
            assert [n._replace(bytes=0) for n in store.nodes()] == [
                n._replace(bytes=0) for n in nodes
            ]
            assert {row.name for row in store.prefixes()} == {"first", "second", "third"}
            for ids in (first, second, third):
                check(store, ids)


def lose_catalog(path: Path) -> None:
    for file in path.glob("catalog.sqlite*"):
        file.unlink()


def test_repair_does_not_bring_back_what_a_reader_kept_alive(tmp_path: Path):
    first, second = two_branches()
    kv = tmp_path / "kv"
    with new_store(kv, MODEL) as store:
        put(store, MODEL, first, "first")
        put(store, MODEL, ids_of(30, seed=3), "gone")
    with open_store(kv, MODEL) as reader:
        run, _ = reader.begin(first, max_new_tokens=1)  # its lease keeps every generation
        with run, open_store(kv, MODEL) as writer:
            put(writer, MODEL, second, "second")
            writer.remove(writer.prefix("gone"))
            writer.remove(writer.prefix("first"))
            shutil.copytree(kv, tmp_path / "copy")
    groups = [path for path in (tmp_path / "copy/nodes").glob("*/*/g*") if path.is_dir()]
    assert len(groups) == 5, "the reader's lease kept the split and removed nodes"
    lose_catalog(tmp_path / "copy")
    assert rebuild_store(tmp_path / "copy").nodes == 2
    with open_store(tmp_path / "copy", MODEL) as store:
        assert [row.name for row in store.prefixes()] == ["second"]
        check(store, second)


def test_repair_does_not_list_a_removed_prefix_whose_node_stays(tmp_path: Path):
    kv = tmp_path / "kv"
    with new_store(kv, MODEL) as store:
        put(store, MODEL, ids_of(30), "short")
        put(store, MODEL, ids_of(60), "long")
        assert store.remove(store.prefix("short")).nodes == 0
    lose_catalog(kv)
    rebuild_store(kv)
    with open_store(kv, MODEL) as store:
        assert [row.name for row in store.prefixes()] == ["long"]
        store.add_prefix(ids_of(60)[:30], "short again", {})
        check(store, ids_of(60))


def test_a_repair_that_is_stopped_leaves_the_old_catalog(tmp_path: Path, monkeypatch):
    from store import rebuild

    kv = tmp_path / "kv"
    with new_store(kv, MODEL) as store:
        put(store, MODEL, ids_of(30), "kept")

    def stopped(*_args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rebuild, "_place", stopped)
        with pytest.raises(KeyboardInterrupt):
            rebuild_store(kv)
    with open_store(kv, MODEL) as store:
        check(store, ids_of(30))
    assert rebuild_store(kv).nodes == rebuild_store(kv).nodes == 1
    assert len(list(kv.glob("catalog.sqlite.before-repair-?"))) == 2


def test_a_session_does_not_delete_what_a_rebuilt_catalog_holds(tmp_path: Path):
    kv = tmp_path / "kv"
    with new_store(kv, MODEL) as store:
        put(store, MODEL, ids_of(30), "kept")
    with open_store(kv, MODEL) as session:
        rebuild_store(kv)
        with open_store(kv, MODEL) as other:
            put(other, MODEL, ids_of(30, seed=1), "new")
        given = put(session, MODEL, ids_of(30, seed=2))
        assert "rebuilt by another process" in given.insert_note
    with open_store(kv, MODEL) as store:
        assert store.verify().bad == []
        check(store, ids_of(30, seed=1))


def test_an_interrupt_after_the_commit_leaves_tree_and_catalog_agreeing(
    tmp_path: Path, monkeypatch
):
    from store.publish import Publisher

    first, second = two_branches()
    with new_store(tmp_path / "kv", MODEL) as store:
        put(store, MODEL, first, "first")

        def interrupted(*_args):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Publisher, "_split_tree", interrupted)
            with pytest.raises(KeyboardInterrupt):
                put(store, MODEL, second, "second")
        check(store, second)
        third = np.concatenate([first[:10], ids_of(20, seed=4)]).astype(np.uint32)
        put(store, MODEL, third, "third")
        assert store.verify().bad == []
        for ids in (first, second, third):
            check(store, ids)


def test_generation_numbers_are_not_used_twice(tmp_path: Path):
    first, second = two_branches()
    with new_store(tmp_path / "kv", MODEL) as store:
        put(store, MODEL, first, "first")
        name = store.nodes()[0].node_id
        put(store, MODEL, second, "second")
        for row in store.prefixes():
            store.remove(row)
        put(store, MODEL, first, "first")
        assert [(row.node_id, row.generation) for row in store.nodes()] == [(name, 1)]
        check(store, first)


def test_damage_found_in_a_replaced_generation_says_nothing_of_the_new_one(tmp_path: Path):
    from store.errors import ChunkLoadError

    with new_store(tmp_path / "kv", MODEL) as store:
        put(store, MODEL, ids_of(60))
        row = store.nodes()[0]
        late = ChunkLoadError(row.node_id, "k", 0, 1, 16, "corrupt")
        with open_store(tmp_path / "kv", MODEL) as other:
            rows = other.node_rows(row.node_id)
            other.replace(row.node_id, rows.layer)
        store.quarantine(late)  # this process has not seen the new generation yet
    with open_store(tmp_path / "kv", MODEL) as store:
        assert len(store.quarantined()) == 1
        check(store, ids_of(60))


def test_a_group_in_an_unknown_order_is_not_read_as_if_it_were_in_the_original(tmp_path: Path):
    import json

    with new_store(tmp_path / "kv", MODEL) as store:
        put(store, MODEL, ids_of(60))
        meta = group_of(store) / "zarr.json"
    data = json.loads(meta.read_text())
    data["attributes"]["order"] = "by length"
    meta.write_text(json.dumps(data))
    with open_store(tmp_path / "kv", MODEL) as store:
        given = ask(store, MODEL, ids_of(60), QUESTION)
        assert given.stats.reused_tokens == 0
        assert worst(given, MODEL, ids_of(60), QUESTION) <= 1e-4


def test_a_query_that_finds_damage_answers_while_the_catalog_is_busy_or_full(
    tmp_path: Path, monkeypatch
):
    from store.index.catalog import Catalog

    with new_store(tmp_path / "kv", MODEL) as store:
        put(store, MODEL, ids_of(60))
        damage(group_of(store), "k")

        def busy(*_args):
            raise StoreLockedError("busy")

        monkeypatch.setattr(Catalog, "transaction", busy)
        monkeypatch.setattr(Catalog, "add_counters", busy)
        given = ask(store, MODEL, ids_of(60), QUESTION, insert="exact")
        assert worst(given, MODEL, ids_of(60), QUESTION) <= 1e-4
        assert given.stats.recovered_chunks == 1
        assert "busy" in given.insert_note
        check(store, ids_of(60), matched=0)


def test_any_failed_write_after_an_answer_is_a_note(tmp_path: Path, monkeypatch):
    import errno

    from store.disk import writer

    def broken(*_args):
        raise OSError(errno.EIO, "Input/output error")

    with new_store(tmp_path / "kv", MODEL) as store:
        monkeypatch.setattr(writer.os, "pwrite", broken)
        given = put(store, MODEL, ids_of(30))
        assert "Input/output error" in given.insert_note


def test_a_store_whose_creation_was_killed_can_be_created_again(tmp_path: Path, monkeypatch):
    from store import engine

    def killed(*_args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine, "write_info", killed)
        with pytest.raises(KeyboardInterrupt):
            new_store(tmp_path / "kv", MODEL)
    with new_store(tmp_path / "kv", MODEL) as store:
        put(store, MODEL, ids_of(30))
        check(store, ids_of(30))


def test_damaged_token_ids_are_healed_by_storing_the_prefix_again(tmp_path: Path):
    with new_store(tmp_path / "kv", MODEL) as store:
        put(store, MODEL, ids_of(60), "p")
    with open_store(tmp_path / "kv", MODEL) as store:
        damage(group_of(store), "tokens")
        assert ask(store, MODEL, ids_of(60), QUESTION).stats.reused_tokens == 0
        given = ask(store, MODEL, ids_of(60), QUESTION, insert="exact")
        assert given.inserted_tokens == 60
        assert store.verify().bad == []
    with open_store(tmp_path / "kv", MODEL) as store:
        check(store, ids_of(60))


def test_what_failed_once_and_is_sound_is_used_again_after_a_scrub(tmp_path: Path):
    from store.errors import ChunkLoadError

    with new_store(tmp_path / "kv", MODEL) as store:
        put(store, MODEL, ids_of(60))
        name = store.nodes()[0].node_id
        store.quarantine(ChunkLoadError(name, "k", 0, 1, 16, "io error 5"))
        check(store, ids_of(60), matched=16)
        assert store.release({bad.node for bad in store.verify().bad}) == 1
        check(store, ids_of(60))


def test_orphans_are_swept_by_a_writer_and_never_by_a_reader(tmp_path: Path):
    with new_store(tmp_path / "kv", MODEL) as store:
        put(store, MODEL, ids_of(30))
        orphans = [group_of(store).parent / ".tmp-g1-1", tmp_path / "kv/nodes/zz/zzzz/g0"]
    for path in orphans:
        path.mkdir(parents=True)
        (path / "x").write_bytes(b"1" * 5000)
    with open_store(tmp_path / "kv", MODEL) as store:
        check(store, ids_of(30))
        assert all(path.exists() for path in orphans)
        put(store, MODEL, ids_of(30, seed=1))
        assert not any(path.exists() for path in orphans)


def test_two_writers_are_kept_apart_and_a_query_answers_all_the_same(tmp_path: Path):
    new_store(tmp_path / "kv", MODEL).close()
    with open_store(tmp_path / "kv", MODEL) as one, open_store(tmp_path / "kv", MODEL) as two:
        with one.writing():
            with pytest.raises(StoreLockedError, match="another process is writing"), two.writing():
                pass
            given = put(two, MODEL, ids_of(30))
            assert "another process is writing" in given.insert_note
            assert worst(given, MODEL, ids_of(30), ids_of(3, seed=99)) <= 1e-4
        put(two, MODEL, ids_of(30))
        # The first store sees what the second published.
        check(one, ids_of(30))


def test_a_reader_of_an_old_generation_finishes_on_it(tmp_path: Path):
    first, second = two_branches()
    with new_store(tmp_path / "kv", MODEL) as store:
        put(store, MODEL, first)
    with open_store(tmp_path / "kv", MODEL) as reader, open_store(tmp_path / "kv", MODEL) as writer:
        old = group_of(reader)
        ids = np.concatenate([first, QUESTION])
        run, match = reader.begin(ids, max_new_tokens=1)
        with run:
            put(writer, MODEL, second)  # splits the node that is being read
            assert old.exists(), "files of a generation in use were deleted"
            assert match.matched_len == 60
            logits = prefill(MODEL.model, run, QUESTION, logits=1)
            assert float((logits[0] - reference_logits(MODEL, ids)).abs().max()) <= 1e-4
        check(reader, second)  # takes over the new tree and lets go of the old one
        writer.gc()
        assert not old.exists()
        check(reader, first)


def test_a_store_on_a_read_only_path_answers_and_keeps_nothing(tmp_path: Path, monkeypatch):
    with new_store(tmp_path / "kv", MODEL) as store:
        put(store, MODEL, ids_of(30))
    real = os.access
    closed = str(tmp_path / "kv")
    monkeypatch.setattr(
        os, "access", lambda p, mode: real(p, mode) and not (mode & os.W_OK and closed in str(p))
    )
    before = names(tmp_path / "kv")
    with open_store(tmp_path / "kv", MODEL) as store:
        assert store.read_only
        assert sum("can't be written" in note for note in store.notes) == 1
        check(store, ids_of(30))
        given = put(store, MODEL, ids_of(30, seed=2))
        assert "not stored" in given.insert_note
        with pytest.raises(ReadOnlyStoreError):
            store.remove(store.prefixes()[0])
        assert store.counters()["queries"] == 1
    assert names(tmp_path / "kv") == before


def names(folder: Path) -> list[str]:
    """Every name in a store but those of SQLite's own working files."""
    return sorted(p.name for p in folder.rglob("*") if not p.name.startswith("catalog.sqlite-"))


def test_a_store_on_a_read_only_mount_answers(tmp_path: Path):
    target = tmp_path / "mnt"
    target.mkdir()
    with new_store(tmp_path / "kv", MODEL) as store:
        put(store, MODEL, ids_of(30))
    bind = ["mount", "--bind", str(tmp_path / "kv"), str(target)]
    if os.geteuid() != 0 or subprocess.run(bind, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root and the right to mount")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(target)], check=True)
        with open_store(target, MODEL) as store:
            assert store.read_only
            check(store, ids_of(30))
    finally:
        subprocess.run(["umount", str(target)], check=True)


def test_a_full_disk_is_said_and_leaves_the_store_as_it_was(tmp_path: Path, monkeypatch):
    import errno

    from store.disk import writer

    with new_store(tmp_path / "kv", MODEL) as store:
        put(store, MODEL, ids_of(30))
        real, calls = os.pwrite, []

        def full(fd, data, at):
            calls.append(1)
            if len(calls) > 3:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(fd, data, at)

        monkeypatch.setattr(writer.os, "pwrite", full)
        given = put(store, MODEL, ids_of(30, seed=1))
        assert "no space left" in given.insert_note
        with pytest.raises(StoreFullError):
            store.insert(ids_of(8, seed=1), lambda _: (zeros(8), zeros(8)), 0)
        monkeypatch.undo()
        assert [p.name for p in (tmp_path / "kv/nodes").glob("*/*/*")] == ["g0"]
        assert store.verify().bad == []
        put(store, MODEL, ids_of(30, seed=1))
        check(store, ids_of(30, seed=1))


def zeros(tokens: int) -> np.ndarray:
    shape = MODEL.shape
    return np.zeros((tokens, shape.num_kv_heads, shape.head_dim), shape.np_dtype)


def test_a_read_that_hangs_is_a_miss(tmp_path: Path, monkeypatch):
    import threading

    with new_store(tmp_path / "kv", MODEL) as store:
        put(store, MODEL, ids_of(30))
    gate = threading.Event()
    real = os.preadv

    def hanging(*args):
        gate.wait(20)
        return real(*args)

    with open_store(tmp_path / "kv", MODEL, deadline_s=0.2) as store:
        monkeypatch.setattr(os, "preadv", hanging)
        given = ask(store, MODEL, ids_of(30), QUESTION)
        gate.set()
        assert given.stats.reused_tokens == 0
        assert any("slow" in reason for reason in given.stats.miss_reasons)
        assert worst(given, MODEL, ids_of(30), QUESTION) <= 1e-4
        # Slow once is not damaged for ever.
        assert store.quarantined() == []


def test_sizes_kept_in_the_catalog_are_what_du_says(tmp_path: Path):
    first, second = two_branches()
    with new_store(tmp_path / "kv", MODEL) as store:
        expected = store.insert_bytes(first)
        put(store, MODEL, first)
        assert expected == store.nodes()[0].bytes
        put(store, MODEL, second)
        # Fan-out folders may be shared, and the lease's own files come and go.
        assert abs(store.used_bytes() - store.size_bytes()) <= 8 * 4096
