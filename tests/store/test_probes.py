"""Sidecars of a store: written with nodes, kept with them, lost without losing a token."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import numpy as np
import pytest

from store.disk import layout as disk_layout
from store.disk.sidecar import SidecarFiles, read_heads, read_sketch
from store.disk.sidecar_layout import array_path
from store.disk.sidecar_writer import as_tensor
from store.engine import PrefixStore, rebuild_store
from store.errors import (
    CatalogError,
    ChunkLoadError,
    InvalidValueError,
    ReadOnlyStoreError,
    StoreFullError,
)
from store.index.catalog import Catalog
from store.itf.options import SparseOptions
from store.itf.sketch import quantise
from store.maintenance import tree_bytes
from store.probes import META_KEY, ProbeSettings
from tests.helpers import (
    ask,
    compute_and_store,
    flip_bit,
    group_of,
    ids_of,
    new_store,
    open_store,
    worst,
)
from tests.tiny import make_tiny

MODEL = make_tiny("gqa")
QUESTION = ids_of(4, seed=50)
HEADS = ((0,), (1,), (0,))
BOTH = ProbeSettings(2, HEADS)
SKETCH = ProbeSettings(2)
GOLDEN = Path(__file__).parents[1] / "golden"


def store_with(path: Path, settings: ProbeSettings = BOTH) -> PrefixStore:
    store = new_store(path, MODEL)
    store.set_probes(settings)
    return store


def put(store: PrefixStore, ids: np.ndarray, name: str = "p") -> None:
    compute_and_store(store, MODEL, ids, name)


def two_branches() -> tuple[np.ndarray, np.ndarray]:
    """Two prefixes of 150 tokens that share their first 70."""
    first, second = ids_of(150), ids_of(150)
    second[70:] = ids_of(80, seed=9)
    second[70] = (first[70] + 1) % 256
    return first, second


def check(store: PrefixStore, prefix: np.ndarray) -> None:
    """A full load of the prefix is right."""
    given = ask(store, MODEL, prefix, QUESTION)
    assert given.stats.reused_tokens == len(prefix)
    assert worst(given, MODEL, prefix, QUESTION) <= 1e-4


def opened(store: PrefixStore, node_id: str, kind: str) -> SidecarFiles:
    files = store.sidecar(store.node(node_id), kind)
    assert files is not None
    return files


def read_first(store: PrefixStore, files: SidecarFiles) -> None:
    """Read the first layer of probe heads, or a whole sketch."""
    if files.kind == "heads":
        read_heads(files, store._reader, 0)
    else:
        read_sketch(files, store._reader)


def check_sidecars(store: PrefixStore, bits: int = 2, heads=HEADS) -> None:
    """Every node has the sidecars that follow from its keys."""
    reader = store._reader
    for row in store.nodes():
        sketch = read_sketch(opened(store, row.node_id, "sketch"), reader)
        probed = opened(store, row.node_id, "heads")
        assert (probed.start, probed.tokens) == (row.start, row.length)
        for layer in range(store.shape.num_layers):
            k, _ = store.node_rows(row.node_id).layer(layer)
            code, scale, zero = quantise(as_tensor(k, store.shape), bits)
            np.testing.assert_array_equal(sketch.code[layer], code)
            np.testing.assert_array_equal(sketch.scale[layer], scale)
            np.testing.assert_array_equal(sketch.zero[layer], zero)
            keys, _ = read_heads(probed, reader, layer)
            np.testing.assert_array_equal(keys, k[:, heads[layer]])


def folders(path: Path) -> list[str]:
    """Names of all that lies in the nodes' folders."""
    return sorted(p.name for p in (path / "nodes").glob("*/*/*") if p.is_dir())


def lose_catalog(path: Path) -> None:
    for file in path.glob("catalog.sqlite*"):
        file.unlink()


def code_file(store: PrefixStore, node_id: str) -> Path:
    return array_path(disk_layout.sidecar_dir(store.path, node_id, "sketch"), "code")


def test_nodes_get_the_sidecars_of_the_setting_when_they_are_inserted(tmp_path: Path):
    with store_with(tmp_path / "kv") as store:
        expected = store.insert_bytes(ids_of(150))
        put(store, ids_of(150))
        check_sidecars(store)
        (node,), probes = store.nodes(), store.probe_rows()
        assert expected == node.bytes + sum(row.bytes for row in probes)
        assert {row.kind for row in probes} == {"heads", "sketch"}
        assert abs(store.used_bytes() - store.size_bytes()) <= 8 * 4096
    with open_store(tmp_path / "kv", MODEL) as store:
        assert store.probes() == BOTH
        check_sidecars(store)
        assert store.verify().bad == []


def test_a_store_without_a_setting_has_no_sidecars_and_no_table_of_them(tmp_path: Path):
    with new_store(tmp_path / "kv", MODEL) as store:
        put(store, ids_of(40))
        assert store.probes() == ProbeSettings()
        assert store.probe_rows() == []
        assert store.sidecar(store.node(store.nodes()[0].node_id), "sketch") is None
        assert folders(store.path) == ["g0"]
        tables = store._index.catalog._rows("SELECT name FROM sqlite_master")
        assert ("probes",) not in tables


def test_a_store_is_created_with_its_setting(tmp_path: Path):
    identity = MODEL.identity
    with PrefixStore.create(
        tmp_path / "kv", identity=identity, model_spec=MODEL.spec, probes=BOTH
    ) as store:
        assert store.probes() == BOTH
    bad = ProbeSettings(heads=((5,),) * 3)
    with pytest.raises(InvalidValueError, match="KV heads 0 to 1"):
        PrefixStore.create(tmp_path / "x", identity=identity, model_spec=MODEL.spec, probes=bad)
    assert not (tmp_path / "x").exists()


def test_both_halves_of_a_split_get_their_own(tmp_path: Path):
    first, second = two_branches()
    with store_with(tmp_path / "kv") as store:
        put(store, first, "first")
        put(store, second, "second")
        assert len(store.nodes()) == 3
        check_sidecars(store)
        check(store, first)
        check(store, second)
        assert len(folders(store.path)) == 9, "the old node's sidecars are gone with it"
        assert store.verify().bad == []


def test_sidecars_of_a_node_that_is_read_stay_as_long_as_it_does(tmp_path: Path):
    first, second = two_branches()
    with store_with(tmp_path / "kv") as store:
        put(store, first, "first")
    with open_store(tmp_path / "kv", MODEL) as reader, open_store(tmp_path / "kv", MODEL) as writer:
        name = reader.nodes()[0].node_id
        run, _ = reader.begin(np.concatenate([first, QUESTION]), max_new_tokens=1)
        with run:
            put(writer, second, "second")
            writer.gc()
            read_sketch(opened(reader, name, "sketch"), reader._reader)
            assert len(folders(tmp_path / "kv")) == 12
            assert abs(writer.used_bytes() - writer.size_bytes()) <= 12 * 4096
        reader.refresh()
        writer.gc()
        assert len(folders(tmp_path / "kv")) == 9


def test_removing_a_prefix_removes_its_sidecars_and_counts_their_bytes(tmp_path: Path):
    first, second = two_branches()
    with store_with(tmp_path / "kv") as store:
        put(store, first, "first")
        put(store, second, "second")
        used = tree_bytes(store.path / "nodes")
        report = store.remove(store.prefix("first"))
        assert len(store.probe_rows()) == 4
        assert len(folders(store.path)) == 6
        assert abs(used - tree_bytes(store.path / "nodes") - report.bytes) <= 4096
        store.remove(store.prefix("second"))
        assert folders(store.path) == []
        assert list((store.path / "nodes").iterdir()) == []
        put(store, first, "again")
        check_sidecars(store)


@pytest.mark.parametrize("kind", ["sketch", "heads"])
def test_a_damaged_sidecar_costs_evidence_and_no_token(kind, tmp_path: Path):
    with store_with(tmp_path / "kv") as store:
        put(store, ids_of(150))
        (row,) = store.nodes()
        group = disk_layout.sidecar_dir(store.path, row.node_id, kind)
        flip_bit(array_path(group, "k" if kind == "heads" else "code"), 3)
        files = opened(store, row.node_id, kind)
        with pytest.raises(ChunkLoadError) as caught:
            read_first(store, files)
        (bad,) = store.verify().bad
        assert (bad.node, bad.array, bad.layer) == (row.node_id, f"probe-{kind}", 0)
        store.quarantine(caught.value)
        assert store.sidecar(store.node(row.node_id), kind) is None
        assert store.quarantined() == []
        check(store, ids_of(150))
    with open_store(tmp_path / "kv", MODEL) as store:
        assert store.sidecar(store.node(row.node_id), kind) is None
        check(store, ids_of(150))
        assert store.add_probe(row.node_id, kind) > 0
        check_sidecars(store)


@pytest.mark.parametrize("kind", ["sketch", "heads"])
def test_evidence_asked_for_by_name_may_be_damaged_in_every_query(kind, tmp_path: Path):
    sparse = SparseOptions(retention=0.2, evidence=kind)
    with store_with(tmp_path / "kv") as store:
        put(store, ids_of(150))
        (row,) = store.nodes()
        group = disk_layout.sidecar_dir(store.path, row.node_id, kind)
        flip_bit(array_path(group, "k" if kind == "heads" else "code"), 3)
        for _ in range(2):
            given = ask(store, MODEL, ids_of(150), ids_of(4, seed=9), sparse=sparse)
            assert given.stats.reused_tokens == 150
            assert {report.evidence for report in given.layers} == {"full"}
        store.add_probe(row.node_id, kind)
        given = ask(store, MODEL, ids_of(150), ids_of(4, seed=9), sparse=sparse)
        assert given.layers[0].evidence == kind


@pytest.mark.parametrize("array", ["zarr.json", "crc"])
def test_a_sidecar_that_cannot_be_opened_is_withdrawn(array, tmp_path: Path):
    with store_with(tmp_path / "kv", SKETCH) as store:
        put(store, ids_of(150))
        node = store.node(store.nodes()[0].node_id)
        group = disk_layout.sidecar_dir(store.path, node.node_id, "sketch")
        damaged = group / "zarr.json" if array == "zarr.json" else group / "crc" / "c.0"
        flip_bit(damaged, 5)
        assert store.sidecar(node, "sketch") is None
        assert store.probe_rows() == []
        check(store, ids_of(150))
        store.gc()
        assert folders(store.path) == ["g0"]


def test_what_failed_before_another_process_wrote_it_again_stays(tmp_path: Path):
    with store_with(tmp_path / "kv", SKETCH) as store:
        put(store, ids_of(150))
        node = store.node(store.nodes()[0].node_id)
        late = opened(store, node.node_id, "sketch").error(0, "corrupt")
        with open_store(tmp_path / "kv", MODEL) as other:
            other.set_probes(ProbeSettings(4))
            assert other.add_probe(node.node_id, "sketch") > 0
        store.quarantine(late)  # this process has not seen the new one yet
        store.refresh()
        assert opened(store, node.node_id, "sketch").bits == 4


def test_another_process_sees_what_is_added_and_dropped(tmp_path: Path):
    with store_with(tmp_path / "kv", SKETCH) as store:
        put(store, ids_of(150))
        node = store.node(store.nodes()[0].node_id)
        with open_store(tmp_path / "kv", MODEL) as other:
            other.set_probes(BOTH)
            other.add_probe(node.node_id, "heads")
            store.refresh()
            assert opened(store, node.node_id, "heads").heads.tolist() == [[0], [1], [0]]
            assert other.drop_probe(node.node_id, "heads") > 0
            store.refresh()
            assert store.sidecar(node, "heads") is None


def test_adding_is_done_once_and_follows_the_setting(tmp_path: Path):
    with new_store(tmp_path / "kv", MODEL) as store:
        put(store, ids_of(150))
        name = store.nodes()[0].node_id
        with pytest.raises(InvalidValueError, match="keeps no probe layout 'sketch'"):
            store.add_probe(name, "sketch")
        store.set_probes(BOTH)
        assert store.add_probe(name, "sketch") > 0
        assert store.add_probe(name, "heads") > 0
        assert store.add_probe(name, "sketch") == 0
        check_sidecars(store)
        other = ProbeSettings(4, ((1,), (0,), (1,)))
        store.set_probes(other)
        assert store.add_probe(name, "sketch") > 0
        assert store.add_probe(name, "heads") > 0
        check_sidecars(store, bits=4, heads=other.heads)
        assert folders(store.path) == ["g0", "probe-heads", "probe-sketch"]
        assert store.drop_probe(name, "sketch") > 0
        assert store.drop_probe(name, "sketch") == 0
        assert folders(store.path) == ["g0", "probe-heads"]


def test_adding_reads_no_damaged_keys(tmp_path: Path):
    with new_store(tmp_path / "kv", MODEL) as store:
        put(store, ids_of(150))
        name = store.nodes()[0].node_id
        flip_bit(disk_layout.shard_path(group_of(store), "k", 1), 4)
        store.set_probes(SKETCH)
        with pytest.raises(ChunkLoadError):
            store.add_probe(name, "sketch")
        assert folders(store.path) == ["g0"]


def test_a_new_generation_keeps_sound_sidecars_and_writes_damaged_ones_again(tmp_path: Path):
    with store_with(tmp_path / "kv") as store:
        put(store, ids_of(150))
        name = store.nodes()[0].node_id
        before = {row.kind: row for row in store.probe_rows()}
        heads = disk_layout.sidecar_dir(store.path, name, "heads")
        untouched = array_path(heads, "k").stat().st_ino
        flip_bit(code_file(store, name), 9)
        store.replace(name, store.node_rows(name).layer)
        assert array_path(heads, "k").stat().st_ino == untouched
        assert {row.kind: row for row in store.probe_rows()} == before
        check_sidecars(store)
        assert store.verify().bad == []
        assert folders(store.path) == ["g1", "probe-heads", "probe-sketch"]
    with open_store(tmp_path / "kv", MODEL) as store:
        check_sidecars(store)


def test_a_full_disk_while_a_sidecar_is_written_leaves_the_store_as_it_was(
    tmp_path: Path, monkeypatch
):
    from store.disk import sidecar_writer

    with store_with(tmp_path / "kv") as store:

        def full(*_args):
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(sidecar_writer, "write_all", full)
            with pytest.raises(StoreFullError):
                put(store, ids_of(150))
        assert store.nodes() == []
        assert not any(".tmp-" in name for name in folders(store.path))
        put(store, ids_of(150))
        check_sidecars(store)


def test_a_lost_catalog_finds_sidecars_again_by_their_attributes(tmp_path: Path):
    first, second = two_branches()
    kv = tmp_path / "kv"
    with store_with(kv) as store:
        put(store, first, "first")
        put(store, second, "second")
        rows = [row._replace(bytes=0) for row in store.probe_rows()]
        nodes = [row.node_id for row in store.nodes()]
    # One that another node's is taken for, one that can't be read, and one of no known kind.
    sidecars = [disk_layout.sidecar_dir(kv, name, "sketch") for name in nodes]
    shutil.rmtree(sidecars[0])
    shutil.copytree(sidecars[1], sidecars[0])
    (sidecars[2] / "zarr.json").write_text("{")
    shutil.copytree(sidecars[1], sidecars[1].with_name("probe-other"))
    lose_catalog(kv)
    assert rebuild_store(kv).nodes == 3
    with open_store(kv, MODEL) as store:
        found = [row._replace(bytes=0) for row in store.probe_rows()]
        lost = {(name, "sketch") for name in (nodes[0], nodes[2])}
        assert found == [row for row in rows if (row.node_id, row.kind) not in lost]
        assert store.probes() == BOTH
        for name, ids in (("first", first), ("second", second)):
            np.testing.assert_array_equal(store.prefix_ids(store.prefix(name)), ids)
            check(store, ids)
        store.gc()
        assert len(folders(kv)) == 3 + len(found)
        for name, kind in lost:
            store.add_probe(name, kind)
        check_sidecars(store)


def test_orphans_are_swept_by_a_writer_and_never_by_a_reader(tmp_path: Path):
    with store_with(tmp_path / "kv", SKETCH) as store:
        put(store, ids_of(40))
        orphans = [group_of(store).parent / name for name in ("probe-heads", ".tmp-probe-heads-1")]
    for path in orphans:
        path.mkdir()
        (path / "x").write_bytes(b"1" * 5000)
    with open_store(tmp_path / "kv", MODEL) as store:
        check(store, ids_of(40))
        assert all(path.exists() for path in orphans)
        put(store, ids_of(40, seed=1))
        assert not any(path.exists() for path in orphans)
        assert len(store.probe_rows()) == 2


def test_a_store_that_cannot_be_written_serves_its_sidecars(tmp_path: Path):
    with store_with(tmp_path / "kv") as store:
        put(store, ids_of(150))
    with open_store(tmp_path / "kv", MODEL) as store:
        store._index.read_only = True
        check_sidecars(store)
        for change in (
            lambda: store.set_probes(SKETCH),
            lambda: store.drop_probe(store.nodes()[0].node_id, "sketch"),
        ):
            with pytest.raises(ReadOnlyStoreError):
                change()
        name = store.nodes()[0].node_id
        store.quarantine(opened(store, name, "sketch").error(-1, "corrupt"))
        assert store.sidecar(store.node(name), "sketch") is None
    with open_store(tmp_path / "kv", MODEL) as store:
        check_sidecars(store)


def test_a_store_older_than_sidecars_is_read_and_can_get_them(tmp_path: Path):
    shutil.copytree(GOLDEN / "format-1-none", tmp_path / "kv")
    with Catalog.open(tmp_path / "kv/catalog.sqlite", readonly=True) as catalog:
        assert catalog.probes() == []
        assert catalog.meta(META_KEY) is None
    with open_store(tmp_path / "kv", MODEL) as store:
        assert store.probe_rows() == []
        store.set_probes(BOTH)
        for row in store.nodes():
            store.add_probe(row.node_id, "sketch")
            store.add_probe(row.node_id, "heads")
        check_sidecars(store)
        assert store.verify().bad == []


def test_the_golden_store_with_sidecars_stays_readable(tmp_path: Path):
    shutil.copytree(GOLDEN / "format-1-probes", tmp_path / "kv")
    with open_store(tmp_path / "kv", MODEL) as store:
        assert store.probes() == BOTH
        assert len(store.probe_rows()) == 2 * len(store.nodes()) > 2
        for row in store.nodes():
            sketch = read_sketch(opened(store, row.node_id, "sketch"), store._reader)
            for layer in range(3):
                k, _ = store.node_rows(row.node_id).layer(layer)
                keys, _ = read_heads(opened(store, row.node_id, "heads"), store._reader, layer)
                np.testing.assert_array_equal(keys, k[:, HEADS[layer]])
                assert sketch.code[layer].any()


def test_a_setting_comes_back_from_its_text_and_a_damaged_one_is_said():
    for settings in (ProbeSettings(), BOTH, SKETCH, ProbeSettings(4, None, calibrate=2)):
        assert ProbeSettings.from_text(settings.to_text()) == settings
    assert ProbeSettings.from_text(None) == ProbeSettings()
    for text in ("[", '{"sketch": {"bits": 3}}', '{"heads": 1}'):
        with pytest.raises(CatalogError, match="impress reorder --probe"):
            ProbeSettings.from_text(text)


def test_heads_that_are_still_to_be_chosen_count_before_they_are_written(tmp_path: Path):
    with store_with(tmp_path / "kv", ProbeSettings(2, None, calibrate=1)) as store:
        put(store, ids_of(150))
        assert {row.kind for row in store.probe_rows()} == {"sketch"}
        owed = store.insert_bytes(ids_of(40, seed=1))
        store.set_probes(BOTH)
        assert owed == store.insert_bytes(ids_of(40, seed=1)) + store.add_probe(
            store.nodes()[0].node_id, "heads"
        )
