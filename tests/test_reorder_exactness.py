"""Invariants 1 and 2 on reordered nodes: another order of stored rows changes no answer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from store.engine import MemoryOptions, rebuild_store
from store.itf.options import SparseOptions
from tests import test_exactness, test_sparse_exactness
from tests.helpers import (
    ask,
    compute_and_store,
    flip_bit,
    group_of,
    ids_of,
    new_store,
    open_store,
    put,
    shuffle,
    worst,
)
from tests.sparse import worst_sparse
from tests.tiny import make_tiny

TOLERANCE = 1e-4
QUESTION = ids_of(9, seed=7)


@pytest.mark.parametrize("scene", test_exactness.SCENES, ids=lambda scene: scene.__name__)
@pytest.mark.parametrize("length", [17, 200])
@pytest.mark.parametrize("chunk_tokens", [16, 64])
@pytest.mark.parametrize("family", ["mha", "gqa", "mqa", "opt"])
def test_a_full_load_of_reordered_nodes_is_exact(
    family, chunk_tokens, length, scene, tmp_path: Path, monkeypatch
):
    def put_reordered(store, *args) -> None:
        put(store, *args)
        shuffle(store)

    monkeypatch.setattr(test_exactness, "put", put_reordered)
    model = make_tiny(family)
    with new_store(tmp_path / "kv", model, chunk_tokens=chunk_tokens) as store:
        scene(store, model, ids_of(length, seed=length), chunk_tokens)
        assert all(store.order(row.node_id) is not None for row in store.nodes() if row.length > 1)


@pytest.mark.parametrize("scene", test_sparse_exactness.SCENES)
@pytest.mark.parametrize("attend", ["loaded", "selected"])
@pytest.mark.parametrize("evidence", ["full", "heads", "sketch"])
@pytest.mark.parametrize("family", ["mha", "gqa", "mqa", "opt"])
def test_a_sparse_run_on_reordered_nodes_equals_its_masked_reference(
    family, evidence, attend, scene, tmp_path: Path
):
    model = make_tiny(family)
    prefix = ids_of(200, seed=5)
    with new_store(tmp_path / "kv", model, probes="both") as store:
        asked, matched = test_sparse_exactness.fill(store, model, prefix, scene)
        shuffle(store)
        question = QUESTION.copy()
        question[0] = (prefix[matched % 200] + 1) % 256
        for fallback in ("never", "always"):
            options = SparseOptions(
                retention=0.2 if attend == "selected" else 0.03,
                evidence=evidence,
                attend=attend,
                fallback=fallback,
            )
            gap, run = worst_sparse(store, model, asked, question, options)
            assert run.matched_len == matched
            assert gap <= TOLERANCE


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("sets", ["one", "per-head"])
def test_codecs_and_sets_make_no_difference_to_reordered_nodes(codec, sets, tmp_path: Path):
    model = make_tiny("gqa")
    with new_store(tmp_path / "kv", model, probes="both", codec=codec) as store:
        asked, _ = test_sparse_exactness.fill(store, model, ids_of(300, seed=2), "leaving half-way")
        shuffle(store)
        for attend in ("loaded", "selected"):
            options = SparseOptions(retention=0.05, evidence="sketch", attend=attend, sets=sets)
            assert worst_sparse(store, model, asked, QUESTION, options)[0] <= TOLERANCE
        assert worst(ask(store, model, asked, QUESTION), model, asked, QUESTION) <= TOLERANCE


def test_the_order_changes_which_chunks_are_read_and_not_what_is_selected(tmp_path: Path):
    model = make_tiny("gqa")
    # Attention to chunks would let the order tell on the layers above.
    options = SparseOptions(retention=0.1, evidence="full", attend="selected")
    prefix = ids_of(400, seed=5)
    with new_store(tmp_path / "kv", model) as store:
        compute_and_store(store, model, prefix, "p")
        before = worst_sparse(store, model, prefix, QUESTION, options)[1]
        rows = np.empty((model.shape.num_layers, 400), dtype=np.int32)
        for layer, sets in enumerate(before.selected):
            rest = np.setdiff1d(np.arange(400), sets[0])
            rows[layer, np.concatenate([sets[0], rest])] = np.arange(400)
        store.reorder(store.nodes()[0].node_id, rows)
        gap, after = worst_sparse(store, model, prefix, QUESTION, options)
        assert gap <= TOLERANCE
        for layer, report in enumerate(after.reports):
            np.testing.assert_array_equal(after.selected[layer], before.selected[layer])
            # The 40 selected tokens lie in the first three chunks of 16.
            assert report.chunks_selected == 3 < before.reports[layer].chunks_selected


@pytest.mark.parametrize("retention", [1.0, 0.1])
def test_what_memory_has_of_a_reordered_node_is_used_rightly(retention, tmp_path: Path):
    model, prefix = make_tiny("gqa"), ids_of(300, seed=5)
    memory = MemoryOptions(host_bytes=1 << 24)
    with new_store(tmp_path / "kv", model, probes="sketch", memory=memory) as store:
        compute_and_store(store, model, prefix, "p")
        shuffle(store)
        for asked in (prefix, prefix[:130], prefix):
            options = SparseOptions(retention=retention, evidence="sketch")
            for _ in range(2):
                gap, run = worst_sparse(store, model, asked, ids_of(6, seed=77), options)
                assert gap <= TOLERANCE
        assert run.counters.host_chunks > 0
        assert run.counters.disk_chunks == 0
        # The next generation's chunks lie elsewhere: none of the old ones may be taken for them.
        shuffle(store, seed=1)
        gap, run = worst_sparse(store, model, prefix, ids_of(6, seed=77), options)
        assert gap <= TOLERANCE
        assert run.counters.disk_chunks > 0


def test_reordering_keeps_kv_tokens_and_probe_layouts(tmp_path: Path):
    model, prefix = make_tiny("gqa"), ids_of(150)
    with new_store(tmp_path / "kv", model, probes="both") as store:
        compute_and_store(store, model, prefix, "p")
        name = store.nodes()[0].node_id
        before = [tuple(a.copy() for a in store.node_rows(name).layer(i)) for i in range(3)]
        assert store.order(name) is None
        shuffle(store)
        order = store.order(name)
        assert order is not None
        shuffle(store)
        assert store.nodes()[0].generation == 1, "the same order is written once"
        after = [tuple(a.copy() for a in store.node_rows(name).layer(i)) for i in range(3)]
        np.testing.assert_array_equal(np.array(before), np.array(after))
        np.testing.assert_array_equal(store.node_rows(name).head(1, 40)[0], before[1][0][:40])
        assert store.verify().bad == []
        assert {row.kind for row in store.probe_rows()} == {"sketch", "heads"}
        assert store.reorder(name, None) > 0
        assert store.order(name) is None
        assert store.reorder(name, np.tile(np.arange(150, dtype=np.int32), (3, 1))) == 0


def test_a_list_that_is_no_mapping_is_refused_and_nothing_changes(tmp_path: Path):
    from store.errors import InvalidValueError

    model = make_tiny("gqa")
    with new_store(tmp_path / "kv", model) as store:
        compute_and_store(store, model, ids_of(40), "p")
        name = store.nodes()[0].node_id
        for rows in (np.zeros((3, 40), np.int32), np.tile(np.arange(39, dtype=np.int32), (3, 1))):
            with pytest.raises(InvalidValueError):
                store.reorder(name, rows)
        assert store.nodes()[0].generation == 0


def test_a_split_keeps_the_order_of_both_halves(tmp_path: Path):
    model, prefix = make_tiny("gqa"), ids_of(100)
    with new_store(tmp_path / "kv", model) as store:
        compute_and_store(store, model, prefix, "p")
        shuffle(store)
        whole = store.order(store.nodes()[0].node_id)
        assert whole is not None
        other = prefix.copy()
        other[60:] = (other[60:] + 1) % 256
        compute_and_store(store, model, other, "other")
        for row in store.nodes():
            half = store.order(row.node_id)
            if row.start == 60 and half is None:
                continue  # the new branch
            lo = row.start
            assert half is not None
            np.testing.assert_array_equal(
                half.argsort(axis=1), whole[:, lo : lo + row.length].argsort(axis=1)
            )
        for ids in (prefix, other):
            assert worst(ask(store, model, ids, QUESTION), model, ids, QUESTION) <= TOLERANCE


@pytest.mark.parametrize("retention", [1.0, 0.2])
def test_damage_in_a_reordered_node_costs_time_and_never_the_answer(retention, tmp_path: Path):
    model, prefix = make_tiny("gqa"), ids_of(200)
    with new_store(tmp_path / "kv", model) as store:
        compute_and_store(store, model, prefix, "p")
        shuffle(store)
        group, name = group_of(store), store.nodes()[0].node_id
        order = store.order(name)
        assert order is not None
    flip_bit(group / "v" / "c.1.0.0.0", 5 * 16 * model.shape.row_bytes + 3)
    with open_store(tmp_path / "kv", model) as store:
        options = SparseOptions(retention=retention, evidence="full", attend="selected")
        given = ask(store, model, prefix, QUESTION, sparse=options)
        if retention == 1.0:
            assert worst(given, model, prefix, QUESTION) <= TOLERANCE
        # Every token of the damaged chunk is out of use, wherever in the prefix it stands.
        lost = np.flatnonzero(order[1] // 16 == 5)
        assert given.stats.reused_tokens == lost.min()
        assert given.stats.recovered_chunks == 1


def test_a_missing_file_of_a_reordered_node_is_a_miss_from_its_start(tmp_path: Path):
    model, prefix = make_tiny("gqa"), ids_of(100)
    with new_store(tmp_path / "kv", model) as store:
        compute_and_store(store, model, prefix, "p")
        shuffle(store)
        group = group_of(store)
    (group / "k" / "c.2.0.0.0").unlink()
    with open_store(tmp_path / "kv", model) as store:
        given = ask(store, model, prefix, QUESTION)
        assert given.stats.reused_tokens == 0
        assert worst(given, model, prefix, QUESTION) <= TOLERANCE


@pytest.mark.parametrize("damage", ["flip", "missing"])
def test_a_damaged_mapping_list_is_a_miss(damage, tmp_path: Path):
    model, prefix = make_tiny("gqa"), ids_of(100)
    with new_store(tmp_path / "kv", model) as store:
        compute_and_store(store, model, prefix, "p")
        shuffle(store)
        rows = group_of(store) / "rows" / "c.0.0"
    rows.unlink() if damage == "missing" else flip_bit(rows, 9)
    with open_store(tmp_path / "kv", model) as store:
        given = ask(store, model, prefix, QUESTION)
        assert given.stats.reused_tokens == 0
        assert worst(given, model, prefix, QUESTION) <= TOLERANCE
        assert any(bad.array == "rows" for bad in store.verify().bad)


def test_repaired_and_rebuilt_stores_keep_the_order(tmp_path: Path):
    from pipelines.mend import mend

    model, prefix = make_tiny("gqa"), ids_of(200)
    with new_store(tmp_path / "kv", model) as store:
        compute_and_store(store, model, prefix, "p")
        shuffle(store)
        group, name = group_of(store), store.nodes()[0].node_id
        order = store.order(name)
    flip_bit(group / "k" / "c.0.0.0.0", 7)
    with open_store(tmp_path / "kv", model) as store:
        mend(store, model, store.verify().bad)
        np.testing.assert_array_equal(store.order(name), order)
        assert store.verify().bad == []
        assert ask(store, model, prefix, QUESTION).stats.reused_tokens == 200
    rebuild_store(tmp_path / "kv")
    with open_store(tmp_path / "kv", model) as store:
        np.testing.assert_array_equal(store.order(name), order)
        assert worst(ask(store, model, prefix, QUESTION), model, prefix, QUESTION) <= TOLERANCE


def test_a_query_under_way_finishes_on_the_generation_it_began_with(tmp_path: Path):
    from pipelines.attention import prefill

    model, prefix = make_tiny("gqa"), ids_of(200)
    with new_store(tmp_path / "kv", model, probes="sketch") as store:
        compute_and_store(store, model, prefix, "p")
        ids = np.concatenate([prefix, QUESTION])
        options = SparseOptions(retention=0.1, evidence="sketch", attend="selected")
        run, match = store.begin(ids, max_new_tokens=1, sparse=options)
        old = group_of(store)
        with run:
            shuffle(store)
            assert old.exists(), "the run still reads it"
            logits = prefill(model.model, run, ids[match.matched_len :], logits=1)
        assert not old.exists()
        again, match = store.begin(ids, max_new_tokens=1, sparse=options)
        with again:
            other = prefill(model.model, again, ids[match.matched_len :], logits=1)
        assert logits is not None
        assert other is not None
        for layer in range(model.shape.num_layers):
            np.testing.assert_array_equal(run.selected[layer], again.selected[layer])
