"""The host tier: exact answers whatever is resident, hard budgets, policies, pins."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipelines.attention import prefill
from store.disk.io import IOOptions
from store.engine import PrefixStore
from store.errors import InvalidValueError
from store.itf.options import SparseOptions
from store.run_maker import MemoryOptions
from store.tier.policy import POLICIES, ChunkFacts, make_policy
from tests.helpers import ask, compute_and_store, ids_of, new_store, open_store, worst
from tests.sparse import sparse_run, worst_sparse
from tests.tiny import make_tiny

MODEL = make_tiny("gqa")
CHUNK = 16 * MODEL.shape.row_bytes
QUESTIONS = [ids_of(9, seed=seed) for seed in (7, 8, 9)]


def reopened(path: Path, budget: int, policy: str = "score") -> PrefixStore:
    return PrefixStore.open(
        path,
        identity=MODEL.identity,
        io=IOOptions(poison=True),
        memory=MemoryOptions(tier_bytes=budget, policy=policy),
    )


def filled(path: Path) -> None:
    """Two prefixes that share their beginning: three nodes, none of whole chunks."""
    with new_store(path, MODEL, probes="both") as store:
        first = ids_of(200, seed=5)
        compute_and_store(store, MODEL, first, "one")
        compute_and_store(store, MODEL, np.concatenate([first[:101], ids_of(90)]), "two")


@pytest.mark.parametrize(
    ("budget_chunks", "policy"),
    [(1, "score"), (7, "lfu"), (60, "lru"), (60, "score"), (9999, "lru")],
)
@pytest.mark.parametrize("attend", ["loaded", "selected"])
@pytest.mark.parametrize("evidence", ["sketch", "heads", "full"])
def test_answers_are_exact_whatever_is_resident(
    evidence, attend, policy, budget_chunks, tmp_path: Path
):
    filled(tmp_path / "kv")
    prefixes = [ids_of(200, seed=5), ids_of(200, seed=5)[:130]]
    options = [
        SparseOptions(retention=r, evidence=evidence, attend=attend, sets=sets, fallback=fallback)
        for r, sets, fallback in ((0.05, "one", "never"), (0.3, "per-head", "always"))
    ]
    with reopened(tmp_path / "kv", budget_chunks * CHUNK, policy) as store:
        tier = store._runs.tier
        for question in QUESTIONS:
            question = np.concatenate([[5], question]).astype(np.uint32)
            for prefix in prefixes:
                for chosen in options:
                    gap, _ = worst_sparse(store, MODEL, prefix, question, chosen)
                    assert gap <= 1e-4
                    tier.check_integrity()
                    assert tier.used_bytes <= budget_chunks * CHUNK
            given = ask(store, MODEL, prefixes[0], question)
            assert worst(given, MODEL, prefixes[0], question) <= 1e-4


def test_with_room_for_all_the_second_query_reads_nothing_from_disk(tmp_path: Path):
    filled(tmp_path / "kv")
    prefix = ids_of(200, seed=5)
    for attend in ("loaded", "selected"):
        with reopened(tmp_path / "kv", 1 << 24) as store:
            first = ask(store, MODEL, prefix, QUESTIONS[0])
            assert first.stats.bytes["host"] == 0
            again = ask(store, MODEL, prefix, QUESTIONS[0])
            assert again.stats.bytes["disk"] == 0
            assert again.stats.bytes["host"] > 0
            assert again.stats.read_bytes == 0
            sparse = SparseOptions(retention=0.05, evidence="random", attend=attend)
            third = ask(store, MODEL, prefix, QUESTIONS[1], sparse=sparse)
            assert third.stats.bytes["disk"] == 0
            assert 0 < third.stats.bytes["host"] < again.stats.bytes["host"]


def test_a_budget_below_one_chunk_holds_nothing(tmp_path: Path):
    filled(tmp_path / "kv")
    with reopened(tmp_path / "kv", CHUNK - 1) as store:
        for _ in range(2):
            given = ask(store, MODEL, ids_of(200, seed=5), QUESTIONS[0])
            assert given.stats.bytes["host"] == 0
        assert store._runs.tier.used_bytes == 0


def test_a_node_in_use_is_not_evicted_by_another_query(tmp_path: Path):
    filled(tmp_path / "kv")
    prefix = ids_of(200, seed=5)
    with reopened(tmp_path / "kv", 60 * CHUNK, "lru") as store:
        ask(store, MODEL, prefix, QUESTIONS[0])
        ids = np.concatenate([prefix, QUESTIONS[1]])
        held = {
            files.node_id: store._runs.tier.slots(files, 0).copy()
            for files in store._files._open.values()
        }
        run, _ = store.begin(ids, max_new_tokens=1)
        with run:
            other = np.concatenate([prefix[:101], ids_of(90)])
            ask(store, MODEL, other, QUESTIONS[1])
            for part in run.fetch.parts:
                now = store._runs.tier.slots(part.files, 0)
                np.testing.assert_array_equal(now, held[part.files.node_id])
        store._runs.tier.check_integrity()


def test_chunks_of_generations_that_are_gone_leave_memory(tmp_path: Path):
    filled(tmp_path / "kv")
    with reopened(tmp_path / "kv", 1 << 24) as store:
        for prefix in (
            ids_of(200, seed=5),
            np.concatenate([ids_of(200, seed=5)[:101], ids_of(90)]),
        ):
            ask(store, MODEL, prefix, QUESTIONS[0])
        before = store._runs.tier.used_bytes
        store.remove(store.prefix("two"))
        ask(store, MODEL, ids_of(200, seed=5), QUESTIONS[0])
        store._runs.tier.check_integrity()
        assert 0 < store._runs.tier.used_bytes < before


def test_a_failed_run_offers_only_what_it_got(tmp_path: Path):
    filled(tmp_path / "kv")
    prefix = ids_of(200, seed=5)
    with reopened(tmp_path / "kv", 1 << 24) as store:
        ids = np.concatenate([prefix, QUESTIONS[0]])
        run, _ = store.begin(ids, max_new_tokens=1)
        run.close()
        assert store._runs.tier.used_bytes == 0
        run, _ = sparse_run(
            store, MODEL, prefix, QUESTIONS[0], SparseOptions(retention=0.1, evidence="full")
        )
        run.close()
        store._runs.tier.check_integrity()


@pytest.mark.parametrize("options", [SparseOptions(retention=0.2), SparseOptions()])
def test_a_run_ends_well_on_a_generation_that_was_replaced_meanwhile(options, tmp_path: Path):
    filled(tmp_path / "kv")
    prefix = ids_of(200, seed=5)
    question = np.concatenate([[5], QUESTIONS[0]]).astype(np.uint32)
    ids = np.concatenate([prefix, question])
    with reopened(tmp_path / "kv", 1 << 24) as store:
        ask(store, MODEL, prefix, question)
        run, match = store.begin(ids, max_new_tokens=1, sparse=options)
        with run:
            for row in store.nodes():
                store.replace(row.node_id, store.node_rows(row.node_id).layer)
            ask(store, MODEL, ids_of(20, seed=77), question)
            logits = prefill(MODEL.model, run, ids[match.matched_len :], logits=1)
            assert not bool(logits.isnan().any())
        store._runs.tier.check_integrity()
        given = ask(store, MODEL, prefix, question)
        assert worst(given, MODEL, prefix, question) <= 1e-4


def test_a_run_ends_well_when_another_process_added_a_node_meanwhile(tmp_path: Path):
    filled(tmp_path / "kv")
    prefix = ids_of(200, seed=5)
    ids = np.concatenate([prefix, QUESTIONS[0]])
    with reopened(tmp_path / "kv", 1 << 24) as store, open_store(tmp_path / "kv", MODEL) as other:
        compute_and_store(other, MODEL, ids_of(30, seed=40), "x")
        run, match = store.begin(ids, max_new_tokens=1)
        compute_and_store(other, MODEL, ids_of(30, seed=41), "y")
        with run:
            prefill(MODEL.model, run, ids[match.matched_len :], logits=1)
        assert store._index._runs == 0
        store._runs.tier.check_integrity()


def facts(*rows: tuple[float, float, int]) -> ChunkFacts:
    columns = list(zip(*rows, strict=True))
    return ChunkFacts(
        np.array(columns[0], np.float32),
        np.array(columns[1], np.float32),
        np.array(columns[2], np.int64),
    )


def test_policies_order_chunks_as_they_say():
    known = facts((5, 0.1, 1), (1, 1.0, 3), (3, 0.5, 2))
    order = {name: np.argsort(make_policy(name).priority(known)).tolist() for name in POLICIES}
    assert order == {"lru": [0, 2, 1], "lfu": [1, 2, 0], "score": [0, 1, 2]}


def test_an_unknown_policy_names_those_that_exist():
    with pytest.raises(InvalidValueError, match="'fifo' is not known; use one of score, lru, lfu"):
        make_policy("fifo")
