"""Reading ahead: what past queries wanted comes early, and no answer is another for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from store.ahead import LIKELY, Forecast
from store.chunk_load import LoadPart
from store.disk.io import IOOptions
from store.engine import PrefixStore
from store.itf.options import SparseOptions
from store.node_access import NodeAccess
from store.run_maker import MemoryOptions
from tests.helpers import ask, compute_and_store, flip_bit, group_of, ids_of, new_store, shuffle
from tests.sparse import worst_sparse
from tests.tiny import make_tiny

MODEL = make_tiny("gqa")
PREFIX = ids_of(300, seed=5)
QUESTION = ids_of(6, seed=7)
LAYERS = MODEL.shape.num_layers
NONE = MemoryOptions(host_bytes=1 << 20, sketch_bytes=1 << 20)


def used(store: PrefixStore, wanted: np.ndarray, queries: int = 5) -> None:
    """Queries that selected the same tokens of every node, bool [tokens of the prefix]."""
    for row in store.nodes():
        own = np.tile(wanted[row.start : row.start + row.length], (LAYERS, 1))
        for _ in range(queries):
            importance = own.astype(np.float32) + 1e-3
            store.access.record(row.node_id, row.length, importance, own, own)


@pytest.fixture(params=["one node", "two nodes", "reordered"])
def store(request, tmp_path: Path):
    # Without bridged gaps the bytes that are read are those that were planned.
    io = IOOptions(poison=True, bridge_bytes=0)
    with new_store(tmp_path / "kv", MODEL, probes="sketch", memory=NONE, io=io) as made:
        if request.param == "two nodes":
            compute_and_store(made, MODEL, PREFIX[:140], "beginning")
        compute_and_store(made, MODEL, PREFIX, "p")
        if request.param == "reordered":
            shuffle(made)
        wanted = np.zeros(300, dtype=bool)
        wanted[[3, 70, 71, 200, 299]] = True
        used(made, wanted)
        yield made


@pytest.mark.parametrize("sets", ["one", "per-head"])
@pytest.mark.parametrize("attend", ["loaded", "selected"])
def test_an_answer_is_the_same_and_only_comes_earlier(store: PrefixStore, attend: str, sets: str):
    options = SparseOptions(retention=0.05, evidence="sketch", attend=attend, sets=sets)
    gap, run = worst_sparse(store, MODEL, PREFIX, QUESTION, options)
    assert gap <= 1e-4
    plain = worst_sparse(store, MODEL, PREFIX, QUESTION, replace(options, ahead=False))[1]
    more = 0
    for layer in range(LAYERS):
        np.testing.assert_array_equal(run.selected[layer], plain.selected[layer])
        for one, other in zip(run.kept(layer), plain.kept(layer), strict=True):
            assert sorted(one.tolist()) == sorted(other.tolist())
        more += run.reports[layer].chunks_read - plain.reports[layer].chunks_read
        assert run.reports[layer].chunks_selected == plain.reports[layer].chunks_selected
    assert more > 0, "something that nobody wanted was read"


def test_planned_bytes_are_read_bytes_and_no_chunk_comes_twice(store: PrefixStore):
    options = SparseOptions(retention=0.05, evidence="sketch")
    for _ in range(2):
        stats = ask(store, MODEL, PREFIX, QUESTION, sparse=options)
        planned = sum(layer.kv_bytes + layer.probe_bytes for layer in stats.layers)
        assert sum(stats.stats.bytes.values()) == planned
        assert stats.stats.read_bytes == stats.stats.bytes["disk"]


def test_what_memory_has_is_not_read_ahead(tmp_path: Path):
    memory = MemoryOptions(host_bytes=1 << 24)
    with new_store(tmp_path / "kv", MODEL, probes="sketch", memory=memory) as store:
        compute_and_store(store, MODEL, PREFIX, "p")
        used(store, np.arange(300) < 20)
        options = SparseOptions(retention=0.05, evidence="sketch")
        first = ask(store, MODEL, PREFIX, QUESTION, sparse=options)
        again = ask(store, MODEL, PREFIX, QUESTION, sparse=options)
        assert first.stats.chunks["disk"] > again.stats.chunks["disk"] == 0


def test_damage_in_a_chunk_that_nobody_asked_for_costs_no_answer(tmp_path: Path):
    with new_store(tmp_path / "kv", MODEL, probes="sketch", memory=NONE) as store:
        compute_and_store(store, MODEL, PREFIX, "p")
        used(store, np.arange(300) >= 284)
        flip_bit(group_of(store) / "v" / "c.1.0.0.0", 18 * 16 * MODEL.shape.row_bytes + 3)
        options = SparseOptions(retention=0.02, evidence="sketch")
        given = ask(store, MODEL, PREFIX, QUESTION, sparse=options)
        assert given.stats.reused_tokens == 288, "what is damaged is damaged, wanted or not"
        assert not bool(given.logits.isnan().any())


def part_of(tmp_path: Path, used_tokens: int = 300) -> LoadPart:
    with new_store(tmp_path / "kv", MODEL) as store:
        compute_and_store(store, MODEL, PREFIX, "p")
        files = store._files.get(store.node(store.nodes()[0].node_id))
        return LoadPart(files, used_tokens)


def known(selected: np.ndarray, queries: int) -> NodeAccess:
    counts = np.tile(selected.astype(np.uint32), (LAYERS, 1))
    return NodeAccess(queries, 300, counts.astype(np.float32), counts, counts.copy())


def test_a_chunk_is_likely_if_most_queries_selected_a_token_of_it(tmp_path: Path):
    part, counts = part_of(tmp_path), np.zeros(300)
    counts[0], counts[16], counts[32:34] = 10, 6, 6
    likely = Forecast().chunks(part, known(counts, 10), 1.0)
    assert likely is not None
    assert LIKELY == 0.7
    # 1.0; 0.6; 1 - 0.4 * 0.4 = 0.84; nothing.
    assert likely[0, :4].tolist() == [True, False, True, False]
    # This query selects a fraction of what those did.
    fewer = Forecast().chunks(part, known(counts, 10), float(counts.mean() / 10) / 4)
    assert fewer is not None
    assert not fewer.any()


def test_nothing_is_expected_of_few_queries_or_of_half_a_reordered_node(tmp_path: Path):
    part, counts = part_of(tmp_path), np.full(300, 2)
    assert Forecast().chunks(part, None, 0.5) is None
    assert Forecast().chunks(part, known(counts, 2), 0.5) is None
    cut = part_of(tmp_path / "other", used_tokens=100)
    half = Forecast().chunks(cut, known(counts, 4), 0.5)
    assert half is not None
    assert half.shape == (LAYERS, 7)
