"""Reordering: the order and its estimate by hand, what is rewritten, and going on where it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipelines import reorder
from pipelines.build import build_store
from pipelines.calibrate import calibrate
from pipelines.fidelity_texts import Question
from pipelines.progress import ProgressEvent
from pipelines.reorder import ReorderReport, reorder_store, watch
from pipelines.reorder_plan import (
    AS_ASKED,
    DAMAGED,
    LOW_GAIN,
    NO_STATISTICS,
    NodePlan,
    ReorderOptions,
    ReorderPlan,
    expected_chunks,
    order_rows,
    plan_reorder,
)
from store.access import AccessStats, NodeAccess
from store.disk import layout as disk_layout
from store.disk.sidecar_layout import array_path
from store.engine import PrefixStore
from store.errors import (
    InvalidValueError,
    PrefixNotFoundError,
    SourceError,
    StoreLockedError,
)
from store.itf.options import SparseOptions
from store.recorder import RunRecorder
from tests.helpers import compute_and_store, flip_bit, group_of, new_store, open_store
from tests.pipelines.test_build import Listed, with_shared
from tests.sparse import sparse_run
from tests.tiny import make_tiny

MODEL = make_tiny("gqa")
LAYERS = MODEL.shape.num_layers
BY_IMPORTANCE, ORIGINAL = ReorderOptions(), ReorderOptions("original")


def access_of(
    importance: list[list[float]], selected: list[list[int]], queries: int = 4
) -> NodeAccess:
    """Statistics by hand; whatever was selected counts as loaded."""
    counts = np.array(selected, np.uint32)
    weights = np.array(importance, np.float32)
    return NodeAccess(queries, counts.shape[1], weights, counts, counts.copy())


def filled(path: Path, prefixes: int = 2) -> PrefixStore:
    """A store of prefixes that share a beginning, one node more than there are prefixes."""
    store = new_store(path, MODEL)
    build_store(store, MODEL, Listed(*with_shared(prefixes)))
    return store


def remember(access: AccessStats, node_id: str, length: int, seed: int = 0) -> None:
    """Queries of a node that found tokens all over it important, other ones in each layer."""
    importance = np.random.default_rng(seed).random((LAYERS, length), dtype=np.float32)
    chosen = importance > np.quantile(importance, 0.75, axis=1, keepdims=True)
    for _ in range(50):
        access.record(node_id, length, importance, chosen, chosen)


def remember_all(store: PrefixStore) -> None:
    """Queries of every node, kept on disk."""
    for row in store.nodes():
        remember(store.access, row.node_id, row.length)
    store.access.flush()


def orders(store: PrefixStore) -> dict[str, bool]:
    """By node, whether it has another order than that of its tokens."""
    return {row.node_id: store.order(row.node_id) is not None for row in store.nodes()}


def listing(path: Path) -> dict[str, bytes]:
    """Every file of the nodes and statistics with its bytes."""
    folders = (path / "nodes", path / "stats")
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    return {str(file): file.read_bytes() for file in files}


def keys_of(store: PrefixStore) -> dict[str, np.ndarray]:
    """Keys of layer 1 of each node, in token order."""
    return {row.node_id: store.node_rows(row.node_id).keys(1).copy() for row in store.nodes()}


def test_what_matters_most_is_stored_first_and_ties_keep_their_order() -> None:
    access = access_of([[0.1, 0.4, 0.1, 0.4], [0.3, 0.0, 0.2, 0.5]], [[0] * 4, [0] * 4])
    rows = order_rows(access)
    assert rows.dtype == np.int32
    assert rows.tolist() == [[2, 0, 3, 1], [1, 3, 2, 0]]


def test_a_chunk_is_touched_unless_none_of_its_tokens_is_selected() -> None:
    # Selected by 4, 2 | 2, 2 | 1 of four queries, 0.55 of a query on average: with one more such
    # query by 0.91, 0.51 | 0.51, 0.51 | 0.31 of them. In the second layer by none.
    access = access_of([[0.0] * 5] * 2, [[4, 2, 2, 2, 1], [0] * 5])
    both = 1 - 0.49 * 0.49
    assert expected_chunks(access, None, 2) == pytest.approx((1 - 0.09 * 0.49 + both + 0.31) / 2)
    # Stored as tokens 0, 4 | 1, 2 | 3.
    rows = np.array([[0, 2, 3, 4, 1], [0, 1, 2, 3, 4]], np.int32)
    assert expected_chunks(access, rows, 2) == pytest.approx((1 - 0.09 * 0.69 + both + 0.51) / 2)
    whole = 1 - 0.09 * 0.49**3 * 0.69
    assert expected_chunks(access, rows, 16) == pytest.approx(whole / 2)


def test_one_query_promises_little() -> None:
    few, many = (access_of([[0.0] * 32], [[n] * 8 + [0] * 24], queries=n) for n in (1, 50))
    gains = []
    for access in (few, many):
        spread = np.arange(32, dtype=np.int32).reshape(4, 8).T.reshape(1, 32)
        now, packed = (expected_chunks(access, rows, 8) for rows in (spread, None))
        gains.append(1 - packed / now)
    assert 0 < gains[0] < 0.6 * gains[1]


def test_more_selections_than_known_queries_count_as_always() -> None:
    access = access_of([[0.0] * 3], [[9, 0, 0]], queries=4)
    assert expected_chunks(access, None, 2) == pytest.approx(1 + (0 + 9 / 3 / 4) / 5)


def test_importance_puts_what_is_selected_together_into_fewer_chunks() -> None:
    importance = [[0.0, 0.5, 0.0, 0.5, 0.0, 0.5, 0.0, 0.5]]
    access = access_of(importance, [[0, 4, 0, 4, 0, 4, 0, 4]])
    assert expected_chunks(access, None, 2) == pytest.approx(4 * (1 - 0.9 * 0.1))
    packed = 2 * (1 - 0.1 * 0.1) + 2 * (1 - 0.9 * 0.9)
    assert expected_chunks(access, order_rows(access), 2) == pytest.approx(packed)


def test_sums_count_nodes_that_are_left_alone_as_they_are() -> None:
    done = NodePlan("a", (), 40, 3, 3.0, 1.5, 100)
    left = NodePlan("b", (), 40, 3, 2.0, 1.0, 0, LOW_GAIN)
    unknown = NodePlan("c", (), 40, 3, why=NO_STATISTICS)
    plan = ReorderPlan((done, left, unknown))
    assert (plan.chunks_before, plan.chunks_after) == (5.0, 3.5)
    assert (plan.rewritten, plan.bytes) == (1, 100)
    assert done.gain == 0.5
    assert unknown.gain is None
    assert (ReorderPlan((unknown,)).chunks_before, ReorderPlan(()).chunks_after) == (None, None)


@pytest.mark.parametrize("values", [("token", 0.05), ("original", -0.1), ("importance", 1.0)])
def test_options_that_are_not_allowed_are_refused(values: tuple[str, float]) -> None:
    with pytest.raises(InvalidValueError, match="use"):
        ReorderOptions(*values)


def test_nodes_with_statistics_are_stored_by_importance_and_then_left_alone(tmp_path: Path) -> None:
    events: list[ProgressEvent] = []
    with filled(tmp_path / "kv") as store:
        first, *others = store.nodes()
        remember(store.access, first.node_id, first.length)
        before = keys_of(store)
        report = reorder_store(store, BY_IMPORTANCE, events.append)
        found = store.access.get(first.node_id, first.length)
        assert found is not None
        assert np.array_equal(store.order(first.node_id), order_rows(found))
        assert [node.why for node in report.nodes] == [None] + [NO_STATISTICS] * len(others)
        plan = report.plan
        assert (plan.rewritten, report.nodes[0].gain) == (1, plan.nodes[0].gain)
        assert plan.bytes == next(r.bytes for r in store.nodes() if r.node_id == first.node_id)
        assert plan.chunks_after is not None
        assert plan.chunks_before is not None
        assert plan.chunks_after < 0.6 * plan.chunks_before
        assert [event.done for event in events] == [0, 1, 2, 3]
        assert store.verify().bad == []
        after = keys_of(store)
        assert all(np.array_equal(before[name], after[name]) for name in before)
        again = reorder_store(store, BY_IMPORTANCE)
        assert [node.why for node in again.nodes] == [AS_ASKED] + [NO_STATISTICS] * len(others)
        assert again.plan.bytes == 0


def test_a_gain_below_the_least_is_not_worth_a_generation(tmp_path: Path) -> None:
    with filled(tmp_path / "kv") as store:
        remember_all(store)
        gain = min(node.gain for node in plan_reorder(store, BY_IMPORTANCE).nodes if node.gain)
        (worst,) = [n for n in plan_reorder(store, BY_IMPORTANCE).nodes if n.gain == gain]
        report = reorder_store(store, ReorderOptions(min_gain=gain + 1e-9))
        why = {node.node_id: node.why for node in report.nodes}
        assert why == {name: LOW_GAIN if name == worst.node_id else None for name in why}
        # From the order it has, a little more of the same changes too little.
        assert reorder_store(store, ReorderOptions(min_gain=gain)).plan.rewritten == 1


def test_a_change_of_order_that_saves_nothing_is_never_written(tmp_path: Path) -> None:
    with filled(tmp_path / "kv") as store:
        row = store.nodes()[0]
        everything = np.ones((LAYERS, row.length), bool)
        importance = np.random.default_rng(0).random(everything.shape, dtype=np.float32)
        store.access.record(row.node_id, row.length, importance, everything, everything)
        report = reorder_store(store, ReorderOptions(min_gain=0.0))
        assert report.nodes[0].why == LOW_GAIN
        assert report.nodes[0].gain == pytest.approx(0.0)


def test_original_puts_every_other_order_back(tmp_path: Path) -> None:
    with filled(tmp_path / "kv") as store:
        remember_all(store)
        before = keys_of(store)
        assert reorder_store(store, BY_IMPORTANCE).plan.rewritten == len(store.nodes())
        assert set(orders(store).values()) == {True}
        # Token order needs no statistics, and no gain.
        report = reorder_store(store, ORIGINAL, access=AccessStats(None, store.shape))
        assert (report.plan.rewritten, report.plan.chunks_before) == (len(store.nodes()), None)
        assert set(orders(store).values()) == {False}
        assert all(np.array_equal(keys, before[name]) for name, keys in keys_of(store).items())
        again = reorder_store(store, ORIGINAL)
        assert {node.why for node in again.nodes} == {AS_ASKED}
        assert again.plan.chunks_before == again.plan.chunks_after


def test_planning_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    with filled(path) as store:
        remember_all(store)
        before, epoch = listing(path), store.nodes()
        plan = plan_reorder(store, BY_IMPORTANCE)
        assert plan.bytes == sum(row.bytes for row in store.nodes())
        assert {name for node in plan.nodes for name in node.names} == {"p0", "p1"}
        assert sorted(len(node.names) for node in plan.nodes) == [1, 1, 2]
        assert (listing(path), store.nodes()) == (before, epoch)
        assert reorder_store(store, BY_IMPORTANCE).plan == plan


def test_a_run_that_is_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    with filled(tmp_path / "kv") as store:
        remember_all(store)
        asked = iter([False, True])
        report = reorder_store(store, BY_IMPORTANCE, stop=lambda: next(asked))
        assert (report.stopped, report.plan.rewritten) == (True, 1)

        def interrupt(event: ProgressEvent) -> None:
            if event.done == 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            reorder_store(store, BY_IMPORTANCE, interrupt)
        assert sum(orders(store).values()) == 2
    with open_store(tmp_path / "kv", MODEL) as store:
        assert store.verify().bad == []
        report = reorder_store(store, BY_IMPORTANCE)
        assert (report.stopped, report.plan.rewritten) == (False, len(store.nodes()) - 2)
        assert set(orders(store).values()) == {True}


def test_a_damaged_node_is_quarantined_and_said_and_the_others_go_on(tmp_path: Path) -> None:
    with filled(tmp_path / "kv") as store:
        remember_all(store)
        bad = store.nodes()[1].node_id
        flip_bit(disk_layout.shard_path(group_of(store, bad), "v", 1), 7)
        report = reorder_store(store, BY_IMPORTANCE)
        assert list(report.failures) == [bad]
        assert bad in report.warnings[0]
        assert [node.node_id for node in report.nodes if node.why == DAMAGED] == [bad]
        assert [row.node_id for row in store.quarantined()] == [bad]
        assert orders(store) == {row.node_id: row.node_id != bad for row in store.nodes()}
        assert report.plan.rewritten == len(store.nodes()) - 1
        # Known to be bad, it is not read again.
        again = reorder_store(store, BY_IMPORTANCE)
        assert again.failures == {}
        assert [node.why for node in again.nodes].count(DAMAGED) == 1


def test_a_mapping_list_that_cannot_be_read_is_damage_too(tmp_path: Path) -> None:
    with filled(tmp_path / "kv") as store:
        remember_all(store)
        reorder_store(store, BY_IMPORTANCE)
        bad = store.nodes()[1].node_id
        flip_bit(disk_layout.small_array_path(group_of(store, bad), "rows"), 3)
    with open_store(tmp_path / "kv", MODEL) as store:
        plan = plan_reorder(store, ORIGINAL)
        assert [node.node_id for node in plan.nodes if node.why == DAMAGED] == [bad]
        assert store.quarantined() == []
        assert list(reorder_store(store, ORIGINAL).failures) == [bad]


def parting(store: PrefixStore) -> tuple[str, np.ndarray]:
    """A leaf, and a prefix that parts from it half-way."""
    row = max(store.nodes(), key=lambda row: row.start)
    ids = store.path_ids(row.node_id).copy()
    cut = row.start + row.length // 2
    ids[cut:] = (ids[cut:] + 1) % 256
    return row.node_id, ids


def check_split(store: PrefixStore, old: str, report: ReorderReport) -> None:
    """The node that was split is gone, its halves are reordered, the new one is not."""
    seen = {node.node_id: node.why for node in report.nodes}
    assert old not in seen
    assert set(seen) == {row.node_id for row in store.nodes()}
    assert list(seen.values()).count(NO_STATISTICS) == 1
    assert report.plan.rewritten == len(seen) - 1
    assert report.failures == {}
    assert store.verify().bad == []


def test_nodes_that_another_process_adds_during_the_run_are_looked_at(tmp_path: Path) -> None:
    with filled(tmp_path / "kv") as store, open_store(tmp_path / "kv", MODEL) as other:
        remember_all(store)
        old, ids = parting(store)

        def insert(event: ProgressEvent) -> None:
            if event.done == 0:
                compute_and_store(other, MODEL, ids, "other")

        check_split(store, old, reorder_store(store, BY_IMPORTANCE, insert))


def test_a_node_that_is_split_between_plan_and_rewrite_is_planned_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with filled(tmp_path / "kv") as store, open_store(tmp_path / "kv", MODEL) as other:
        remember_all(store)
        old, ids = parting(store)
        todo, writing, order = [ids], store.writing, store.order

        def insert_first(timeout_s: float = 0.0) -> object:
            if asked[-1] == old and todo:
                compute_and_store(other, MODEL, todo.pop(), "other")
            return writing(timeout_s)

        asked: list[str] = []
        monkeypatch.setattr(store, "writing", insert_first)
        monkeypatch.setattr(store, "order", lambda name: asked.append(name) or order(name))
        report = reorder_store(store, BY_IMPORTANCE)
        assert todo == []
        monkeypatch.undo()
        check_split(store, old, report)


def test_a_node_that_another_process_reorders_meanwhile_is_judged_by_that_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other's order differs in two tokens that nobody selects, which saves nothing."""
    with filled(tmp_path / "kv") as store, open_store(tmp_path / "kv", MODEL) as other:
        remember_all(store)
        similar, writing = AccessStats(None, store.shape), store.writing
        for row in store.nodes():
            known = store.access.get(row.node_id, row.length)
            assert known is not None
            importance, last = known.importance.copy(), np.argsort(known.importance, axis=1)[:, :2]
            swapped = np.take_along_axis(importance, last[:, ::-1], axis=1)
            np.put_along_axis(importance, last, swapped, axis=1)
            chosen = known.selected > 0
            similar.record(row.node_id, row.length, importance, chosen, chosen)

        def reorder_first(timeout_s: float = 0.0) -> object:
            reorder_store(other, BY_IMPORTANCE, access=similar)
            return writing(timeout_s)

        monkeypatch.setattr(store, "writing", reorder_first)
        report = reorder_store(store, BY_IMPORTANCE)
        assert {node.why for node in report.nodes} == {LOW_GAIN}
        assert report.plan.bytes == 0
        assert {row.generation for row in store.nodes()} == {1}


def test_a_node_that_is_gone_is_left_out(tmp_path: Path) -> None:
    with filled(tmp_path / "kv") as store, open_store(tmp_path / "kv", MODEL) as other:
        remember_all(store)
        gone = store.prefix("p1")

        def remove(event: ProgressEvent) -> None:
            if event.done == 0:
                other.remove(gone)

        report = reorder_store(store, BY_IMPORTANCE, remove)
        assert gone.node_id not in {node.node_id for node in report.nodes}
        assert (report.failures, report.plan.rewritten) == ({}, len(store.nodes()))
        with pytest.raises(PrefixNotFoundError):
            store.node(gone.node_id)


def test_a_store_that_another_process_writes_to_is_waited_for_and_then_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reorder, "LOCK_WAIT_S", 0.05)
    with filled(tmp_path / "kv") as store, open_store(tmp_path / "kv", MODEL) as other:
        remember_all(store)
        with other.writing(), pytest.raises(StoreLockedError):
            reorder_store(store, BY_IMPORTANCE)
        assert set(orders(store).values()) == {False}


QUESTIONS = [Question("line 1", None, "who?"), Question("line 2", None, "where is it?")]


def test_calibration_collects_what_questions_select_and_records_nothing(tmp_path: Path) -> None:
    """Against the same runs, recorded by hand."""
    path = tmp_path / "kv"
    with filled(path) as store:
        prefixes = [(row, store.prefix_ids(row)) for row in store.prefixes()]
        expected = AccessStats(None, store.shape)
        for text in ("who?", "where is it?"):
            for _, ids in prefixes:
                question = np.frombuffer(text.encode(), np.uint8).astype(np.uint32)
                sparse = SparseOptions(retention=0.5)
                run, _ = sparse_run(store, MODEL, ids, question, sparse, record=False)
                with run:
                    RunRecorder(expected).add(run.fetch)  # type: ignore[arg-type]
        before, counters = listing(path), store.counters()
        events: list[ProgressEvent] = []
        found = calibrate(store, MODEL, QUESTIONS, 0.5, events.append)
        for row in store.nodes():
            one, other = (stats.get(row.node_id, row.length) for stats in (found, expected))
            assert one is not None
            assert other is not None
            assert one.queries == other.queries == 2 * (2 if row.start == 0 else 1)
            assert np.array_equal(one.selected, other.selected)
            np.testing.assert_allclose(one.importance, other.importance, rtol=1e-5)
            assert store.access.get(row.node_id, row.length) is None
        assert (listing(path), store.counters()) == (before, counters)
        assert [event.done for event in events] == [0, 1, 2, 3, 4]
        assert reorder_store(store, ReorderOptions(min_gain=0.0), access=found).plan.rewritten == 3


def test_a_question_with_a_prefix_is_asked_of_that_alone(tmp_path: Path) -> None:
    with filled(tmp_path / "kv") as store:
        found = calibrate(store, MODEL, [Question("line 1", "p1", "who?")])
        known = {r.node_id for r in store.nodes() if found.get(r.node_id, r.length) is not None}
        (root,) = (row.node_id for row in store.nodes() if row.start == 0)
        assert known == {root, store.prefix("p1").node_id}


def test_questions_that_cannot_be_asked_are_named_by_their_line(tmp_path: Path) -> None:
    with filled(tmp_path / "kv") as store:
        for question, said in (
            (Question("f.jsonl, line 2", "nobody", "who?"), "line 2.*nobody"),
            (Question("f.jsonl, line 3", None, "who? " * 300), "line 3.*positions"),
        ):
            with pytest.raises(SourceError, match=said):
                calibrate(store, MODEL, [question])
        with pytest.raises(InvalidValueError, match="below 1"):
            calibrate(store, MODEL, QUESTIONS, retention=1.0)


def test_questions_about_files_that_are_not_stored_teach_nothing(tmp_path: Path) -> None:
    text = tmp_path / "other.txt"
    text.write_text("Nobody has stored this.", encoding="utf-8")
    with filled(tmp_path / "kv") as store:
        with pytest.raises(SourceError, match="'impress ls'"):
            calibrate(store, MODEL, [Question("line 1", str(text), "who?")])
        # Beside one that met something, it is left out.
        both = [Question("line 1", str(text), "who?"), *QUESTIONS]
        assert calibrate(store, MODEL, both).get("none", 3) is None


def test_calibration_goes_on_past_damage_as_a_query_does(tmp_path: Path) -> None:
    with new_store(tmp_path / "kv", MODEL, probes="sketch") as store:
        build_store(store, MODEL, Listed(*with_shared(2)))
        (root,) = (row.node_id for row in store.nodes() if row.start == 0)
        leaf, other = (store.prefix(f"p{i}").node_id for i in range(2))
        flip_bit(array_path(disk_layout.sidecar_dir(store.path, other, "sketch"), "zero"), 7)
        flip_bit(disk_layout.shard_path(group_of(store, leaf), "k", 1), 7)
        flip_bit(disk_layout.shard_path(group_of(store, leaf), "v", 1), 7)
        found = calibrate(store, MODEL, QUESTIONS, 0.9)
        lengths = {row.node_id: row.length for row in store.nodes()}
        queries = {name: found.get(name, lengths[name]) for name in (root, other, leaf)}
        assert [None if a is None else a.queries for a in queries.values()] == [4, 2, None]
        assert [row.node_id for row in store.quarantined()] == [leaf]
        assert other not in {row.node_id for row in store.probe_rows()}


class Clock:
    """Time that passes only in `sleep`; ``events`` happen once their second has come."""

    def __init__(self, until: float, events: dict[float, Callable[[], None]] | None = None) -> None:
        self.now, self.until, self.events = 0.0, until, dict(events or {})

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds
        for at in [at for at in self.events if at <= self.now]:
            self.events.pop(at)()

    def over(self) -> bool:
        return self.now >= self.until


def watched(
    store: PrefixStore, clock: Clock, period_s: float = 60.0
) -> list[tuple[float, ReorderReport]]:
    """Passes until the clock's end, each with the second in which it was done."""
    passes: list[tuple[float, ReorderReport]] = []
    watch(
        store,
        BY_IMPORTANCE,
        period_s,
        clock=clock,
        sleep=clock.sleep,
        stop=clock.over,
        on_pass=lambda report: passes.append((clock.now, report)),
    )
    return passes


def test_watching_does_a_pass_every_period_with_what_others_have_recorded(tmp_path: Path) -> None:
    with filled(tmp_path / "kv") as store, open_store(tmp_path / "kv", MODEL) as other:
        first, *_ = store.nodes()
        remember(store.access, first.node_id, first.length)

        def recorded() -> None:
            for _ in range(9):
                remember(other.access, first.node_id, first.length, seed=1)
            other.access.flush()

        passes = watched(store, Clock(130.0, {30.0: recorded}))
        assert [at for at, _ in passes] == [5.0, 65.0, 125.0]
        assert [report.plan.rewritten for _, report in passes] == [1, 1, 0]
        latest = other.access.get(first.node_id, first.length)
        assert latest is not None
        assert latest.queries == 500
        assert np.array_equal(store.order(first.node_id), order_rows(latest))


def test_watching_waits_while_queries_come_in(tmp_path: Path) -> None:
    with filled(tmp_path / "kv") as store, open_store(tmp_path / "kv", MODEL) as other:

        def asked() -> None:
            other.add_counters({"queries": 1})

        # The last one at 13: the first pass may begin at 18. One shortly before the next is due.
        passes = watched(store, Clock(90.0, {3.0: asked, 8.0: asked, 13.0: asked, 76.0: asked}))
        assert [at for at, _ in passes] == [18.0, 83.0]


def test_watching_looks_for_queries_between_nodes_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with filled(tmp_path / "kv") as store, open_store(tmp_path / "kv", MODEL) as other:
        remember_all(store)
        clock, written, publish = Clock(60.0), [], store.reorder

        def published(node_id: str, rows: np.ndarray | None) -> int:
            written.append(clock.now)
            other.add_counters({"queries": 1})
            return publish(node_id, rows)

        monkeypatch.setattr(store, "reorder", published)
        assert len(watched(store, clock)) == 1
        assert written == [5.0, 10.0, 15.0]


def test_watching_ends_between_nodes_when_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with filled(tmp_path / "kv") as store:
        remember_all(store)
        clock, publish = Clock(60.0), store.reorder

        def published(node_id: str, rows: np.ndarray | None) -> int:
            clock.until = clock.now
            return publish(node_id, rows)

        monkeypatch.setattr(store, "reorder", published)
        ((_, report),) = watched(store, clock)
        assert (report.stopped, report.plan.rewritten) == (True, 1)
        assert watched(store, Clock(0.0)) == []


def test_a_pass_that_cannot_write_is_left_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reorder, "LOCK_WAIT_S", 0.0)
    with filled(tmp_path / "kv") as store, open_store(tmp_path / "kv", MODEL) as other:
        remember_all(store)
        building = other.writing()
        building.__enter__()
        clock = Clock(70.0, {20.0: lambda: building.__exit__(None, None, None)})
        ((at, report),) = watched(store, clock)
        assert (at, report.plan.rewritten) == (65.0, 3)


def test_a_period_of_nothing_is_refused(tmp_path: Path) -> None:
    with filled(tmp_path / "kv", 1) as store, pytest.raises(InvalidValueError, match="0 s"):
        watch(store, BY_IMPORTANCE, 0.0)
