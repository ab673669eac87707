"""`bench ttft`: who asks what, equal terms for all systems, and figures that can be checked."""

from __future__ import annotations

import contextlib
import statistics
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipelines.bench_ttft import bench_ttft, layouts_of
from pipelines.diy import answer_diy
from pipelines.models import LoadedModel
from pipelines.progress import ProgressEvent, silent
from pipelines.systems import SYSTEMS
from pipelines.ttft_rows import (
    mean_of,
    means_of,
    paired_ratio,
    read_amplification,
    ttft_figures,
)
from pipelines.ttft_runners import DiyRunner, EngineRunner
from pipelines.ttft_stores import TtftStores, bench_folder
from pipelines.ttft_values import (
    DEFAULT_SYSTEMS,
    OTHERS,
    OWN,
    QUESTION,
    Budget,
    Layout,
    Query,
    Sample,
    TtftOptions,
    TtftPrefix,
    TtftReport,
    TtftRow,
    Workload,
)
from pipelines.ttft_workload import HISTORY, make_workload, turns
from store.disk.io import IOOptions, Throttle
from store.engine import PrefixStore
from store.errors import InvalidValueError, PromptError, SourceError, StoreFullError
from store.recorder import RunRecorder
from store.run_maker import MemoryOptions
from store.sparse import SparseFetch
from tests.helpers import ids_of
from tests.tiny import make_tiny

PREFIX, QUERY = 200, 9
SYSTEMS_HERE = (*DEFAULT_SYSTEMS, "as-h2o-lfu+itf", "as-like@16")
SMALL = {
    "prefix_tokens": PREFIX,
    "prefixes": 3,
    "requests": 10,
    "warm_up": 4,
    "query_tokens": QUERY,
    "recompute_sample": 2,
}


def options_of(**values: Any) -> TtftOptions:
    return TtftOptions(**{**SMALL, **values})


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return make_tiny("gqa")


def write_documents(folder: Path, names: str, tokens: int) -> Path:
    """Text files of about as many byte tokens each, no two windows of them alike."""
    folder.mkdir()
    rng = np.random.default_rng(5)
    for name in names:
        words = (f"{name} keeper {rng.integers(10**6)} lives by pier {n}. " for n in range(tokens))
        text = "".join(words)[:tokens]
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("texts") / "documents", "abc", 600)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept") / "stores"


@pytest.fixture(scope="module")
def opened() -> list[tuple[str, MemoryOptions]]:
    """Name of each store that was opened in the run of `report`, and its memory."""
    return []


@pytest.fixture(scope="module")
def report(
    model: LoadedModel, documents: Path, kept: Path, opened: list[tuple[str, MemoryOptions]]
) -> TtftReport:
    really = PrefixStore.open

    def spy(path: Path, **given: Any) -> PrefixStore:
        opened.append((path.name, given["memory"]))
        return really(path, **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrefixStore, "open", spy)
        return bench_ttft(model, options_of(systems=SYSTEMS_HERE), documents, kept, keep=True)


def row_of(report: TtftReport, system: str) -> TtftRow:
    (found,) = [row for row in report.rows if row.system == system]
    return found


def test_every_system_answers_every_request_but_recompute(report: TtftReport):
    assert tuple(row.system for row in report.rows) == SYSTEMS_HERE
    for row in report.rows:
        wanted = [0, 9] if row.system == "recompute" else list(range(10))
        assert [sample.request for sample in row.samples] == wanted
        for sample in row.samples:
            assert sample.prefix == report.workload.measured[sample.request].prefix
            assert sample.reused_tokens == (0 if row.system == "recompute" else PREFIX)
            assert sum(sample.stages_s.values()) == pytest.approx(sample.ttft_s)


def test_each_request_is_answered_in_an_order_of_its_own(report: TtftReport):
    orders = []
    for request in range(10):
        place = {
            sample.turn: row.system
            for row in report.rows
            for sample in row.samples
            if sample.request == request
        }
        asked = [n for n in SYSTEMS_HERE if n != "recompute" or request in (0, 9)]
        orders.append([place[turn] for turn in range(len(place))])
        assert orders[-1] == [asked[number] for number in turns(1, request, len(asked))]
    assert len({tuple(order) for order in orders}) == 10


def test_every_system_takes_every_place_and_follows_every_other_equally_often():
    drawn = [turns(1, request, 6) for request in range(3000)]
    places = np.array([np.bincount(column, minlength=6) for column in np.array(drawn).T])
    follows = np.zeros((6, 6))
    for order in drawn:
        assert sorted(order) == list(range(6))
        for one, other in pairwise(order):
            follows[one, other] += 1
    # 500 each, if a little more or less by chance (standard deviation about 20).
    assert np.abs(places - 500).max() < 100
    assert np.abs(follows[~np.eye(6, dtype=bool)] - 500).max() < 100
    assert drawn == [turns(1, request, 6) for request in range(3000)]
    assert drawn != [turns(2, request, 6) for request in range(3000)]
    assert turns(1, 0, 0) == []


def test_every_system_has_the_same_memory_and_its_own_store(
    report: TtftReport, opened: list[tuple[str, MemoryOptions]]
):
    token_bytes = 3 * 2 * 2 * 16 * 4
    assert report.kv_bytes == 3 * PREFIX * token_bytes
    total = int(0.3 * report.kv_bytes)
    assert report.budget == Budget(int(total * 0.25), total - int(total * 0.25))
    budgets = {row.system: row.budget for row in report.rows}
    for name, budget in budgets.items():
        assert budget == (None if name in ("recompute", "diy") else report.budget)
    given = [
        (memory.policy, memory.device_bytes, memory.host_bytes)
        for _, memory in opened
        if memory.host_bytes
    ]
    assert given == [
        (policy, *report.budget) for policy in ("lru", "lru", "lfu", "score", "score", "lfu", "lru")
    ]


def test_systems_of_the_same_layout_share_a_store_on_disk(report: TtftReport, kept: Path):
    assert sorted(path.name for path in kept.iterdir()) == [
        "bench-ttft.json",
        "diy",
        "importance-16-sketch",
        "importance-64-heads",
        "original-16-none",
        "original-64-heads",
        "original-64-none",
    ]
    assert row_of(report, "as-h2o-lru").layout == row_of(report, "as-like").layout
    assert len(list((kept / "diy").iterdir())) == 3


def test_only_layouts_by_importance_are_reordered_and_know_what_queries_wanted(
    report: TtftReport, model: LoadedModel, kept: Path
):
    for path in kept.glob("*-*-*"):
        assert (path / "stats").exists() == path.name.startswith("importance")
        with PrefixStore.open(path, identity=model.identity) as store:
            orders = [store.order(node.node_id) for node in store.nodes()]
        assert len(orders) >= 3
        long = [rows for rows in orders if rows is None or rows.shape[1] > 64]
        assert all((rows is not None) == path.name.startswith("importance") for rows in long)


def test_whole_loads_are_exact_and_sparse_ones_read_less(report: TtftReport):
    for name in ("as-like", "as-like@16", "diy", "recompute"):
        row = row_of(report, name)
        assert max(sample.kl for sample in row.samples) <= 1e-9
        assert all(sample.top1 for sample in row.samples)
        assert mean_of(row.samples, "loaded_ratio") == 1.0
    assert row_of(report, "as-like").samples[0].kl == 0.0
    for name in ("impress", "impress-paper", "as-h2o-lfu"):
        row = row_of(report, name)
        assert mean_of(row.samples, "selected_ratio") == pytest.approx(0.25)
        assert mean_of(row.samples, "kl") > 1e-6
    assert mean_of(row_of(report, "impress").samples, "loaded_ratio") < 0.9
    assert report.reference.n == 2
    assert report.reference.max_difference is not None
    assert report.reference.max_difference < 1e-4


def test_bytes_hit_and_fallback_tell_systems_apart(report: TtftReport):
    like, diy = row_of(report, "as-like"), row_of(report, "diy")
    chunked = -(-PREFIX // 64) * 64
    for sample in like.samples:
        # The last chunk of a node is padded.
        assert sum(sample.bytes.values()) == chunked * report.kv_bytes // (3 * PREFIX)
        assert sum(sample.hit.values()) == pytest.approx(1.0)
    assert means_of(diy.samples, "hit") == {"device": 0.0, "host": 0.0, "disk": 1.0}
    assert means_of(row_of(report, "recompute").samples, "hit") == {}
    for name in ("as-h2o-lfu", "impress-paper", "impress"):
        samples = row_of(report, name).samples
        hit = means_of(samples, "hit")
        assert hit["device"] > 0
        assert hit["host"] > 0
        assert 0 < sum(one.important_hit or 0 for one in samples) / len(samples) < 1
        for one in samples:
            assert sum(one.important.values()) == pytest.approx(1.0)
            assert one.important_hit == pytest.approx(1.0 - one.important["disk"])
    assert means_of(like.samples, "important") == means_of(like.samples, "hit")
    assert means_of(row_of(report, "recompute").samples, "important") == {}
    # One of two KV heads is probed: half of the keys, and nobody to agree with.
    paper = row_of(report, "impress-paper").samples
    assert mean_of(paper, "probe_ratio") == pytest.approx(1 / 4, rel=0.02)
    assert mean_of(paper, "fallback_ratio") == 0.0
    assert (like.disk, diy.disk) == ("direct", "page cache") or like.disk == "page cache"
    assert row_of(report, "recompute").disk is None


def test_what_was_kept_is_used_again(
    report: TtftReport, model: LoadedModel, documents: Path, kept: Path
):
    def files() -> dict[str, int]:
        found = [*(kept / "diy").iterdir(), *(kept / "original-64-none" / "nodes").rglob("*")]
        return {str(path): path.stat().st_mtime_ns for path in found}

    before, events = files(), list[ProgressEvent]()
    options = options_of(systems=("as-like", "diy"), requests=1, warm_up=0)
    again = bench_ttft(model, options, documents, kept, events.append, keep=True)
    assert files() == before
    assert [row.samples[0].kl for row in again.rows] == pytest.approx([0.0, 0.0], abs=1e-9)
    assert "history" not in {event.task for event in events}


def test_what_another_run_kept_is_refused_before_anything_is_added(
    report: TtftReport, model: LoadedModel, documents: Path, kept: Path
):
    before = sorted(kept.rglob("*"))
    for values, says in (
        ({"systems": ("as-like@32",), "prefixes": 2}, "other prefixes"),
        ({"systems": ("as-like@32",), "prefix_tokens": PREFIX - 1}, "other prefixes"),
        ({"systems": ("impress@32",), "seed": 2}, "other queries"),
        ({"systems": ("impress@32",), "retention": 0.3}, "other queries"),
    ):
        with pytest.raises(InvalidValueError, match=f"{says}.* give another folder, or delete"):
            bench_ttft(model, options_of(**values), documents, kept, keep=True)
    assert sorted(kept.rglob("*")) == before


def test_nodes_in_order_are_counted_whether_or_not_they_were_rewritten_now(
    model: LoadedModel, documents: Path, tmp_path: Path
):
    options = options_of(systems=("impress",), requests=2, warm_up=1)
    notes = [bench_ttft(model, options, documents, tmp_path, keep=True).notes for _ in range(2)]
    counted = [note for note in notes[0] if "nodes lie in order of importance" in note]
    assert int(counted[0].split()[0]) >= 3
    assert notes[0] == notes[1]


def test_each_kind_of_store_learns_its_order_by_its_own_evidence(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    used: list[str] = []
    really = RunRecorder.add

    def spy(self: RunRecorder, fetch: SparseFetch) -> None:
        used.append(fetch.reports[0].evidence)
        really(self, fetch)

    monkeypatch.setattr(RunRecorder, "add", spy)
    asked = tuple(Query(ids_of(20, seed=n), OWN) for n in range(4))
    prefixes = (TtftPrefix("p", ids_of(PREFIX, seed=9), asked),)
    layouts = [
        Layout(16, probe, order)
        for order in ("original", "importance")
        for probe in ("none", "heads", "sketch")
    ]
    stores = TtftStores(model, [*layouts, Layout(64, "heads", "importance")], tmp_path, diy=False)
    stores.fill(prefixes, silent)
    assert stores.reorder(Workload(prefixes, (), ()), 0.25, silent) == 4
    assert {name: used.count(name) for name in used} == {"full": 4, "heads": 4, "sketch": 4}
    orders = []
    for layout in (*layouts, Layout(64, "heads", "importance")):
        with stores.open(layout) as store:
            (node,) = store.nodes()
            orders.append(store.order(node.node_id))
    assert orders[:3] == [None] * 3
    full, heads, sketch, coarse = orders[3:]
    assert np.array_equal(heads, coarse)
    assert not np.array_equal(heads, full)
    assert not np.array_equal(sketch, full)
    again = stores.reorder(Workload(prefixes, (), ()), 0.25, silent)
    assert again == 4
    with stores.open(layouts[4]) as store:
        assert np.array_equal(store.order(node.node_id), heads), "an order changes nothing learnt"


def test_what_a_killed_run_left_half_written_is_removed(model: LoadedModel, tmp_path: Path):
    (tmp_path / "diy").mkdir()
    (tmp_path / "diy" / "x.tmp").write_bytes(b"part")
    (tmp_path / "diy" / "x.safetensors").write_bytes(b"whole")
    TtftStores(model, [Layout(64, "none", "original")], tmp_path, diy=True)
    assert [path.name for path in (tmp_path / "diy").iterdir()] == ["x.safetensors"]


def test_temporary_stores_are_gone_and_progress_covers_every_phase(
    model: LoadedModel, documents: Path, tmp_path: Path
):
    events: list[ProgressEvent] = []
    options = options_of(systems=("impress",), requests=2, warm_up=1)
    made = bench_ttft(model, options, documents, tmp_path, events.append)
    assert list(tmp_path.iterdir()) == []
    tasks = dict.fromkeys(event.task for event in events)
    assert list(tasks) == ["prefixes", "history", "reorder", "reference", "warm up", "requests"]
    for task in tasks:
        last = [event for event in events if event.task == task][-1]
        assert last.done == last.total
    assert made.reference == (0, None, None)


@pytest.mark.parametrize("task", ["prefixes", "history", "reorder", "warm up", "requests"])
def test_an_interrupted_bench_leaves_nothing(
    model: LoadedModel, documents: Path, tmp_path: Path, task: str
):
    def interrupt(event: ProgressEvent) -> None:
        if event.task == task:
            raise KeyboardInterrupt

    options = options_of(systems=("impress", "diy"), requests=2, warm_up=1)
    with pytest.raises(KeyboardInterrupt):
        bench_ttft(model, options, documents, tmp_path, interrupt)
    assert list(tmp_path.iterdir()) == []


def test_systems_that_reuse_nothing_need_a_reference_all_the_same(
    model: LoadedModel, documents: Path, tmp_path: Path
):
    options = options_of(systems=("recompute",), requests=1, warm_up=1)
    made = bench_ttft(model, options, documents, tmp_path)
    assert made.rows[0].layout is None
    assert made.rows[0].samples[0].kl <= 1e-9
    assert layouts_of(options) == [Layout(64, "none", "original")]


def test_the_reference_comes_from_a_store_in_the_original_order():
    made = layouts_of(TtftOptions(systems=("impress", "as-like@16", "impress-paper")))
    assert [layout.order for layout in made] == ["original", "importance", "importance"]


@pytest.mark.parametrize("family", ["gqa", "mha", "opt"])
def test_the_do_it_yourself_row_gives_the_same_logits_as_a_full_load(family: str, tmp_path: Path):
    model, prefix, query = make_tiny(family), ids_of(90), ids_of(7, seed=4)
    options = options_of()
    stores = TtftStores(model, [Layout.of(SYSTEMS["as-like"])], tmp_path, diy=True)
    stores.fill([TtftPrefix("p", prefix)], lambda event: None)
    budget = Budget(0, 1 << 20)
    with stores.open_system(SYSTEMS["as-like"], budget, IOOptions()) as store:
        full = EngineRunner(SYSTEMS["as-like"], store, model, options, budget)
        given = full.answer(prefix, query)
    made = DiyRunner(stores, model, IOOptions()).answer(prefix, query)
    assert float((given.logits - made.logits).abs().max()) < 1e-3
    assert made.stats.bytes["disk"] == stores.diy_file(prefix).stat().st_size
    assert sum(made.stats.stages_s.values()) == pytest.approx(made.stats.ttft_s)


def test_a_slower_disk_is_emulated_for_the_file_too(tmp_path: Path):
    model, prefix = make_tiny("gqa"), ids_of(40)
    stores = TtftStores(model, [Layout(64, "none", "original")], tmp_path, diy=True)
    stores.fill([TtftPrefix("p", prefix)], lambda event: None)
    waits: list[tuple[str, float]] = []

    class Recorded(Throttle):
        def reserve(self, size: int) -> float:
            waits.append(("reserve", size))
            return 12.5

        @staticmethod
        def wait_until(ready: float) -> None:
            waits.append(("wait", ready))

    path, query = stores.diy_file(prefix), ids_of(3)
    emulated = answer_diy(path, model, query, Recorded(1e6, 0.0))
    assert waits == [("reserve", path.stat().st_size), ("wait", 12.5)]
    plain = answer_diy(path, model, query, Recorded(None, 0.0))
    assert len(waits) == 2
    assert torch.equal(plain.logits, emulated.logits)
    io = IOOptions(bandwidth_bytes_s=1e9)
    assert DiyRunner(stores, model, io).disk == "page cache, emulated"


def test_a_latency_that_systems_do_not_pay_alike_is_said(
    model: LoadedModel, documents: Path, tmp_path: Path
):
    for latency_s in (0.0, 1e-6):
        io = IOOptions(latency_s=latency_s)
        options = options_of(systems=("diy", "as-like"), requests=1, warm_up=0, io=io)
        notes = bench_ttft(model, options, documents, tmp_path).notes
        assert any("latency counts once per file for diy" in note for note in notes) == (
            latency_s > 0
        )


def queries_of(workload: Workload) -> tuple[list[tuple[int, bytes]], list[tuple[int, bytes]]]:
    """Measured queries by prefix, and all that was asked before."""
    measured = [(one.prefix, one.query.ids.tobytes()) for one in workload.measured]
    before = [(one.prefix, one.query.ids.tobytes()) for one in workload.warm_up]
    for number, prefix in enumerate(workload.prefixes):
        before += [(number, query.ids.tobytes()) for query in prefix.history]
    return measured, before


def test_no_measured_query_was_asked_before(model: LoadedModel, documents: Path):
    made = make_workload(model, documents, options_of(requests=30, warm_up=20), history=True)
    measured, before = queries_of(made)
    assert len(set(measured)) == len(measured) == 30
    assert not set(measured) & set(before)
    assert len(made.warm_up) == 20


def test_every_prefix_has_a_history_and_what_warms_up_is_part_of_it(
    model: LoadedModel, documents: Path
):
    made = make_workload(model, documents, options_of(), history=True)
    warmed = {(one.prefix, one.query.ids.tobytes()) for one in made.warm_up}
    for number, prefix in enumerate(made.prefixes):
        asked = {query.ids.tobytes() for query in prefix.history}
        assert len(asked) == len(prefix.history) >= HISTORY
        assert {ids for owner, ids in warmed if owner == number} <= asked
    none = make_workload(model, documents, options_of(), history=False)
    assert [prefix.history for prefix in none.prefixes] == [(), (), ()]


def test_queries_follow_their_prefix_in_the_text_as_long_as_there_is_some(
    model: LoadedModel, documents: Path
):
    options = options_of(requests=3, warm_up=0)
    made = make_workload(model, documents, options, history=False)
    for request in made.measured:
        assert request.query.source == OWN
        name = made.prefixes[request.prefix].name
        text = (documents / f"{name}.txt").read_bytes()
        assert text.index(request.query.ids.astype(np.uint8).tobytes()) >= PREFIX
    assert made.warnings == ()


def test_text_of_others_serves_where_there_is_too_little_and_that_is_said(
    model: LoadedModel, tmp_path: Path
):
    short = write_documents(tmp_path / "short", "ab", PREFIX + 2 * QUERY)
    options = options_of(prefixes=2, requests=20, warm_up=0)
    made = make_workload(model, short, options, history=False)
    sources = [request.query.source for request in made.measured]
    assert sources.count(OWN) == 4
    assert (
        f"{sources.count(OTHERS)} of 20 measured queries are of other documents"
        in (made.warnings[0])
    )
    measured, _ = queries_of(made)
    assert len(set(measured)) == 20


def test_fewer_documents_than_asked_for_are_said(model: LoadedModel, documents: Path):
    made = make_workload(model, documents, options_of(prefixes=8), history=True)
    assert len(made.prefixes) == 3
    assert "there are 3 of the 8 prefixes asked for" in made.warnings
    assert {one.prefix for one in made.measured} <= {0, 1, 2}


def test_short_documents_are_joined_no_further_than_the_number_of_prefixes_allows(
    model: LoadedModel, tmp_path: Path
):
    # Six of 120 make three prefixes of 200, though only with little text behind each.
    folder = write_documents(tmp_path / "many", "abcdef", 120)
    made = make_workload(model, folder, options_of(requests=40), history=True)
    assert [prefix.name for prefix in made.prefixes] == ["a+b", "c+d", "e+f"]
    # Where there are too few in any case, none of the text behind them is given up.
    few = make_workload(model, folder, options_of(prefixes=9, requests=4, warm_up=0), history=False)
    assert {one.query.source for one in few.measured} == {OWN}


def test_popularity_is_seeded_and_falls_with_rank(model: LoadedModel, documents: Path):
    def counts(**values: Any) -> list[int]:
        options = options_of(requests=60, warm_up=0, **values)
        made = make_workload(model, documents, options, history=False)
        return sorted(np.bincount([one.prefix for one in made.measured], minlength=3).tolist())

    assert counts(seed=3) == counts(seed=3)
    assert counts(zipf=4.0)[-1] > 48
    assert counts(popularity="uniform", zipf=4.0)[0] > 10
    orders = [
        [
            one.prefix
            for one in make_workload(
                model, documents, options_of(seed=seed), history=False
            ).measured
        ]
        for seed in (1, 2)
    ]
    assert orders[0] != orders[1]


def test_questions_from_a_file_are_divided_between_measured_and_before(
    model: LoadedModel, documents: Path, tmp_path: Path
):
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(f'{{"prompt": "Who is {n}?"}}\n' for n in range(5)))
    made = make_workload(model, documents, options_of(queries=path), history=True)
    measured, before = queries_of(made)
    assert measured
    assert before
    assert not set(measured) & set(before)
    assert {one.query.source for one in made.measured} == {QUESTION}
    assert any("measured requests repeat a query" in text for text in made.warnings)


def test_one_question_is_too_few_to_have_asked_another_before(
    model: LoadedModel, documents: Path, tmp_path: Path
):
    path = tmp_path / "questions.jsonl"
    path.write_text('{"prompt": "Who?"}\n')
    with pytest.raises(SourceError, match=r"only one query .* more questions"):
        make_workload(model, documents, options_of(queries=path), history=True)
    made = make_workload(model, documents, options_of(queries=path, warm_up=0), history=False)
    assert len(made.measured) == 10


def test_what_does_not_fit_the_model_s_positions_is_refused(documents: Path):
    tight = make_tiny("gqa", positions=PREFIX + QUERY)
    with pytest.raises(PromptError, match=r"need more than the 209 positions .* --prefix-tokens"):
        make_workload(tight, documents, options_of(), history=False)
    tighter = make_tiny("gqa", positions=PREFIX)
    with pytest.raises(InvalidValueError, match="209 positions"):
        make_workload(tighter, documents, options_of(), history=False)


def test_too_little_text_for_one_prefix_is_refused(model: LoadedModel, tmp_path: Path):
    folder = write_documents(tmp_path / "short", "a", 50)
    with pytest.raises(SourceError, match="fewer than the 209 tokens"):
        bench_ttft(model, options_of(), folder, tmp_path)


def test_too_little_disk_or_memory_is_said_before_anything_is_computed(
    model: LoadedModel, documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "temporary"
    folder.mkdir()
    with pytest.raises(InvalidValueError, match="give --dir a folder"):
        bench_ttft(model, options_of(), documents, tmp_path / "none")
    with monkeypatch.context() as patch:
        patch.setattr("pipelines.ttft_stores._SPACE_FACTOR", 1e12)
        with pytest.raises(StoreFullError, match="MB free, of"):
            bench_ttft(model, options_of(), documents, folder)
    with monkeypatch.context() as patch:
        patch.setattr("pipelines.bench_ttft._free_bytes", lambda: 1e5)
        with pytest.raises(InvalidValueError, match=r"5 systems .* smaller --budget-share"):
            bench_ttft(model, options_of(), documents, folder)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("order", "diy", "copies"),
    [("original", False, 1), ("original", True, 2), ("importance", False, 2)],
)
def test_room_is_asked_for_what_is_written_and_no_more(
    model: LoadedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    order: str,
    diy: bool,
    copies: int,
):
    workload = Workload((TtftPrefix("p", ids_of(PREFIX)),), (), ())
    need = workload.kv_bytes(model.shape) * copies * 1.3
    given = (model, [Layout(64, "none", order)], workload, tmp_path)
    for free in (int(need) - 1, int(need) + 1):
        monkeypatch.setattr("pipelines.ttft_stores.free_bytes", lambda *_, free=free, **__: free)
        with contextlib.ExitStack() as stack:
            if free < need:
                stack.enter_context(pytest.raises(StoreFullError, match="MB free, of"))
            stack.enter_context(bench_folder(*given, keep=False, diy=diy))
    assert list(tmp_path.iterdir()) == []


def test_what_is_kept_already_needs_no_more_room(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    workload = Workload((TtftPrefix("p", ids_of(PREFIX)),), (), ())
    monkeypatch.setattr("pipelines.ttft_stores.free_bytes", lambda *_, **__: 0)
    given = (model, [Layout(64, "none", "original")], workload, tmp_path)
    size = workload.kv_bytes(model.shape) * 2
    for name in ("original-16-none", "original-64-none"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "kv").write_bytes(bytes(size))
    with bench_folder(*given, keep=True, diy=False) as place:
        assert place == tmp_path
    (tmp_path / "original-64-none" / "kv").unlink()
    with pytest.raises(StoreFullError), bench_folder(*given, keep=True, diy=False):
        pass


def test_a_disk_that_fills_up_on_the_way_is_named_with_what_helps(
    model: LoadedModel, documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pipelines.diy.save_file", full)
    for keep in (False, True):
        says = f"ran full; give fewer --prefixes, .* another --{'keep' if keep else 'dir'}"
        with pytest.raises(StoreFullError, match=says):
            bench_ttft(model, options_of(systems=("diy",)), documents, tmp_path, keep=keep)
        assert keep or list(tmp_path.iterdir()) == []
    assert list((tmp_path / "diy").iterdir()) == []


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"systems": ("impres",)}, "'impres' is not known; use one of .* there is 'diy'"),
        ({"systems": ("as-like+itf",)}, "no effect on 'as-like'"),
        ({"systems": ()}, "no system is named"),
        ({"systems": ("impress", "diy", "impress")}, "'impress' is named twice"),
        ({"budget_share": 0.0}, "--budget-share 0 is out of range"),
        ({"budget_share": 1.5}, "--budget-share 1.5 is out of range"),
        ({"device_share": -0.1}, "--device-share -0.1 is out of range"),
        ({"retention": 0.0}, "retention 0 is out of range"),
        ({"popularity": "even"}, "popularity 'even' is not known; use one of zipf, uniform"),
        ({"zipf": -1.0}, "--zipf -1 is not allowed"),
        ({"requests": 0}, "--requests 0 is not allowed"),
        ({"warm_up": -1}, "--warm-up -1 is not allowed"),
        ({"recompute_sample": 0}, "--recompute-sample 0 is not allowed"),
        ({"prefixes": 0}, "--prefixes 0 is not allowed"),
    ],
)
def test_values_that_are_not_allowed_are_named(values: dict[str, Any], says: str):
    with pytest.raises(InvalidValueError, match=says):
        options_of(**values)


def sample(request: int, ttft_s: float, **values: Any) -> Sample:
    """A sample of a full load, with other values where given."""
    plain = Sample(
        request=request,
        prefix=0,
        turn=0,
        ttft_s=ttft_s,
        stages_s={"load": ttft_s},
        hidden_io_s=0.0,
        bookkeeping_s=0.0,
        bytes={"disk": 10, "host": 0, "device": 0},
        read_bytes=10,
        needed_bytes=10,
        hit={},
        important_hit=None,
        kl=0.0,
        top1=True,
        selected_ratio=1.0,
        loaded_ratio=1.0,
        probe_ratio=0.0,
        fallback_ratio=0.0,
        reused_tokens=5,
    )
    return replace(plain, **values)


def test_percentiles_are_interpolated_and_ratios_paired_by_request():
    samples = [sample(n, float(n + 1)) for n in range(5)]
    figures = ttft_figures(samples)
    assert figures == {"mean": 3.0, "p50": 3.0, "p95": pytest.approx(4.8), "p99": figures["p99"]}
    assert figures["p99"] == pytest.approx(4.96)
    row = TtftRow("a", None, None, None, tuple(samples))
    other = TtftRow("b", None, None, None, (sample(4, 1.0), sample(1, 4.0), sample(9, 1.0)))
    assert paired_ratio(row, other) == statistics.median([5.0 / 1.0, 2.0 / 4.0])
    assert paired_ratio(row, TtftRow("c", None, None, None, (sample(7, 1.0),))) is None


def test_read_amplification_is_of_all_that_was_read():
    some = sample(0, 1.0, read_bytes=90, needed_bytes=30)
    assert read_amplification([some, sample(1, 1.0)]) == 100 / 40
    assert read_amplification([sample(0, 1.0, read_bytes=0, needed_bytes=0)]) is None


def test_means_leave_out_samples_without_the_figure():
    samples = [sample(0, 1.0), sample(1, 1.0, hit={"disk": 1.0}), sample(2, 1.0, hit={"disk": 0.5})]
    assert means_of(samples, "hit") == {"disk": 0.75}


def test_the_budget_is_split_to_the_byte():
    assert options_of(budget_share=1.0, device_share=0.3).budget(1001) == Budget(300, 701)
    assert options_of(device_share=0.0).budget(1000) == Budget(0, 300)
    assert options_of(device_share=1.0).budget(1000) == Budget(300, 0)
