"""`impress bench trace`: known hits, how policies differ, and the models of importance."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.bench_trace import bench_trace
from pipelines.progress import ProgressEvent
from pipelines.trace_caches import CacheReplay, EndlessCache, TraceRow, tiered
from pipelines.trace_importance import (
    ImportanceModel,
    sampled_layers,
    uniform_model,
    zipf_model,
)
from pipelines.trace_index import TraceIndex
from pipelines.trace_requests import read_trace
from pipelines.trace_shapes import kv_shape
from pipelines.trace_uses import NodeUse, TraceNode, TraceUses
from pipelines.trace_values import CacheCase, TierSizes, TraceBenchOptions, TraceReport
from store.engine import PrefixStore
from store.errors import InvalidValueError, ModelLoadError, SourceError
from store.index.ids import as_ids
from store.tier.memory import TierMemory
from store.types import KVShape
from tests.helpers import ids_of, new_store, put
from tests.tiny import make_tiny

#: 2 layers, 2 KV heads of 8 in float16: a chunk of 16 tokens takes 1 KiB of keys and values.
SHAPE = KVShape(num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8, dtype="float16")
CHUNK = 2 * 16 * SHAPE.row_bytes
#: A block is two chunks in each of two layers.
BLOCK = 32 * SHAPE.token_bytes


def options(**values: Any) -> TraceBenchOptions:
    """Everything is selected, so that hits can be counted by hand, unless told otherwise."""
    given: dict[str, Any] = {
        "chunk_tokens": 16,
        "block_tokens": 32,
        "retention": 1.0,
        "policies": ("lru",),
        "sizes": (TierSizes(0, 1 << 30),),
        "orders": ("original",),
        "evidence_share": 0.0,
        "disk_bytes_s": 1e6,
        "host_bytes_s": 2e6,
    }
    return TraceBenchOptions(SHAPE, **{**given, **values})


def write(folder: Path, requests: Sequence[Sequence[int]], *, tail: int = 0) -> Path:
    """A trace whose prompts lack ``tail`` tokens of their last block."""
    path = folder / "trace.jsonl"
    lines = [{"input_length": 32 * len(ids) - tail, "hash_ids": list(ids)} for ids in requests]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def replay(folder: Path, prompts: Sequence[Sequence[int]], **values: Any) -> TraceReport:
    return bench_trace(write(folder, prompts), options(**values))


def popular_and_scans(length: int, seed: int = 0) -> list[list[int]]:
    """Few prompts that come again and again, between others of which each comes twice."""
    random = np.random.default_rng(seed)
    found: list[list[int]] = []
    for number in range(length):
        hot = int(random.integers(4))
        found.append([hot * 10 + part for part in range(4)])
        once = [1000 + number * 10 + part for part in range(6)]
        found += [once, once]
    return found


def test_an_infinite_cache_finds_what_came_before_up_to_where_prompts_part(tmp_path: Path) -> None:
    report = replay(tmp_path, [[1, 2, 3], [1, 2, 3, 4], [1, 2, 5], [9], [1, 9]])
    assert report.blocks == 3 + 4 + 3 + 1 + 2
    assert report.matched_blocks == 0 + 3 + 2 + 0 + 1
    assert report.infinite_hit_ratio == 6 / 13
    assert (report.requests, report.stored_blocks) == (5, 7)
    assert report.data_bytes == 7 * BLOCK
    assert report.matched_bytes == 6 * BLOCK


def test_a_chunk_is_read_from_disk_once_and_then_found_in_memory(tmp_path: Path) -> None:
    (row,) = replay(tmp_path, [[1, 2]] * 4).rows
    # The first stores, the second reads from disk, the third and fourth find it in memory.
    assert (row.hit_device, row.hit_host) == (0.0, 2 / 3)
    assert row.important_hit == 2 / 3
    assert row.disk_bytes == 2 * BLOCK
    assert row.host_to_device_bytes == 6 * BLOCK
    assert (row.loaded_ratio, row.requests) == (1.0, 4)


def test_a_device_tier_takes_what_was_read_and_needs_no_more_transfer(tmp_path: Path) -> None:
    (row,) = replay(tmp_path, [[1, 2]] * 4, sizes=(TierSizes(1 << 20, 0),)).rows
    assert (row.hit_device, row.hit_host) == (2 / 3, 0.0)
    assert row.disk_bytes == row.host_to_device_bytes == 2 * BLOCK


def test_lru_of_one_block_keeps_the_block_used_last(tmp_path: Path) -> None:
    one_block = (TierSizes(0, BLOCK),)
    requests = [[1], [2], [1], [1], [2], [2], [1]]
    (row,) = replay(tmp_path, requests, sizes=one_block).rows
    # Matched from the third on: 1 read, 1 hit, 2 read, 2 hit, 1 read again.
    assert row.hit_host == 2 / 5
    assert row.disk_bytes == 3 * BLOCK


def test_lfu_keeps_a_popular_block_that_lru_gives_away(tmp_path: Path) -> None:
    requests = [[1], [1], [1], [1], [2], [2], [1], [3], [3], [1]]
    sizes = (TierSizes(0, BLOCK),)
    rows = replay(tmp_path, requests, sizes=sizes, policies=("lru", "lfu", "score")).rows
    lru, lfu, score = (row.disk_bytes / BLOCK for row in rows)
    # LRU loses block 1 to 2 and to 3 and reads it three times; the others keep it.
    assert (lru, lfu, score) == (1 + 2 + 2, 3, 3)


def test_score_keeps_the_chunk_of_which_more_matters_and_lfu_the_one_used_more() -> None:
    geometry = replace(options(), layers_sampled=1).geometry
    often_little, seldom_all = (
        NodeUse.of(TraceNode(name, 1), np.array([[tokens]]), 16)
        for name, tokens in (("a", 2), ("b", 16))
    )
    resident = {}
    for policy in ("lfu", "score"):
        # Half of the layers get half of the bytes: room for one chunk.
        cache = tiered(CacheCase(policy, "original", 0, 2 * CHUNK), geometry)
        bench = CacheReplay(cache, geometry)
        for use in (often_little, often_little, often_little, seldom_all, seldom_all):
            bench.ask([use], BLOCK, 0.0)
        resident[policy] = [
            bool((cache.residency(use.access.node) >= 0).any())
            for use in (often_little, seldom_all)
        ]
    assert resident == {"lfu": [True, False], "score": [False, True]}


def test_larger_caches_hit_more_and_none_beats_the_endless_one(tmp_path: Path) -> None:
    sizes = tuple(TierSizes(n * BLOCK, 3 * n * BLOCK) for n in (2, 8, 32))
    policies = ("lru", "lfu", "score")
    report = replay(
        tmp_path,
        popular_and_scans(40),
        sizes=sizes,
        policies=policies,
        retention=0.25,
        importance="zipf",
        orders=("original", "importance"),
    )
    read = {(row.policy, row.order, row.host_bytes): row.disk_bytes for row in report.rows}
    for order, (bound, held) in zip(("original", "importance"), report.endless, strict=True):
        for policy in policies:
            large_last = [read[policy, order, size.host_bytes] for size in sizes]
            assert large_last == sorted(large_last, reverse=True)
            assert large_last[-1] < large_last[0]
            assert large_last[-1] >= bound.disk_bytes
        assert bound.order == order
        # What it holds is what it has read, as it reads nothing twice.
        assert held == pytest.approx(bound.disk_bytes)
        assert held <= report.data_bytes


def test_policies_differ_where_scans_pass_through_a_small_cache(tmp_path: Path) -> None:
    sizes = (TierSizes(4 * BLOCK, 12 * BLOCK),)
    rows = replay(
        tmp_path,
        popular_and_scans(60),
        sizes=sizes,
        policies=("lru", "lfu", "score"),
        retention=0.25,
        importance="zipf",
    ).rows
    lru, lfu, score = (row.disk_bytes for row in rows)
    assert lfu < lru
    assert score < lru
    assert lfu != score


def test_the_same_seed_gives_the_same_report_and_another_one_does_not(tmp_path: Path) -> None:
    changes = {"retention": 0.25, "importance": "zipf", "orders": ("importance",)}
    trace = popular_and_scans(20)
    first, again, other = (replay(tmp_path, trace, seed=seed, **changes) for seed in (1, 1, 2))
    assert first == again
    assert first.rows != other.rows


def test_the_first_requests_alone_give_what_they_give_in_the_whole(tmp_path: Path) -> None:
    trace = popular_and_scans(10)
    changes = {"retention": 0.25, "importance": "zipf"}
    part = replay(tmp_path, trace, requests=12, **changes)
    assert part == replay(tmp_path, trace[:12], **changes)
    assert part.requests == 12


def test_sampled_layers_stand_for_all_of_them(tmp_path: Path) -> None:
    deep = replace(SHAPE, num_layers=8)
    path = write(tmp_path, popular_and_scans(20))
    size = (TierSizes(0, 64 * CHUNK * 8),)

    def read(layers: int) -> TraceRow:
        # All is selected: layers do alike, and no figure may depend on how many are replayed.
        asked = replace(options(sizes=size), shape=deep, layers_sampled=layers)
        return bench_trace(path, asked).rows[0]

    assert read(2) == read(4) == read(8)


def test_io_time_is_bytes_over_bandwidths_one_after_the_other(tmp_path: Path) -> None:
    report = replay(tmp_path, [[1, 2]] * 4, evidence_share=0.125)
    (row,) = report.rows
    assert report.evidence_bytes == 0.125 * report.matched_bytes == 0.125 * 6 * BLOCK
    assert row.disk_bytes == 2 * BLOCK + report.evidence_bytes
    assert row.host_to_device_bytes == 6 * BLOCK + report.evidence_bytes
    seconds = row.disk_bytes / 1e6 + row.host_to_device_bytes / 2e6
    assert row.io_s * row.requests == pytest.approx(seconds)
    # The slowest of the four is the one that read all: two blocks and their evidence.
    per_request = [0.0] + [2.25 * BLOCK / 1e6 + 2.25 * BLOCK / 2e6] + [0.0] * 2
    per_request[2] = per_request[3] = 0.25 * BLOCK / 1e6 + 2.25 * BLOCK / 2e6
    assert row.io_p99_s == pytest.approx(np.percentile(per_request, 99))


def test_evidence_is_that_of_probe_heads_unless_given() -> None:
    opt = kv_shape("opt-30b")
    assert TraceBenchOptions(opt).evidence == 3 / (2 * 56)
    assert TraceBenchOptions(opt, evidence_share=0.0).evidence == 0.0


def test_a_replay_has_no_bytes_of_kv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("memory for chunks was made")

    monkeypatch.setattr(TierMemory, "__init__", refuse)
    geometry = options().geometry
    assert tiered(CacheCase("score", "original", 10**9, 10**9), geometry).memory is None
    report = replay(tmp_path, [[1, 2]] * 3, sizes=(TierSizes(10**9, 10**9),))
    assert report.rows[0].hit_device == 0.5


def test_without_a_match_nothing_is_read_and_shares_are_unknown(tmp_path: Path) -> None:
    (row,) = replay(tmp_path, [[1], [2], []]).rows
    assert (row.hit_device, row.hit_host, row.important_hit, row.loaded_ratio) == (None,) * 4
    assert (row.disk_bytes, row.io_s, row.io_p99_s, row.requests) == (0.0, 0.0, 0.0, 3)


def test_progress_reaches_its_end(tmp_path: Path) -> None:
    events: list[ProgressEvent] = []
    bench_trace(write(tmp_path, [[1], [1]]), options(), None, events.append)
    last = {event.task: (event.done, event.total) for event in events}
    assert last == {"read trace": (2, 2), "replay": (2, 2)}


class TestIndex:
    """The tree of blocks."""

    def run(self, folder: Path, requests: Sequence[Sequence[int]], tail: int = 0) -> TraceIndex:
        index = TraceIndex()
        for request in read_trace(write(folder, requests, tail=tail), 32).requests:
            index.insert(request, index.match(request.blocks))
            index.check_integrity()
        return index

    def test_a_prompt_that_parts_inside_a_node_splits_it_and_names_what_is_gone(
        self, tmp_path: Path
    ) -> None:
        index = TraceIndex()
        first, second = read_trace(write(tmp_path, [[1, 2, 3], [1, 2, 4]]), 32).requests
        assert index.insert(first, index.match(first.blocks)) is None
        (old,) = index.names
        assert index.insert(second, index.match(second.blocks)) == old
        assert old not in index.names
        assert (len(index.names), index.blocks) == (3, 4)
        index.check_integrity()

    def test_the_next_turn_of_a_conversation_splits_nothing(self, tmp_path: Path) -> None:
        turns = [[1, 2, 3], [1, 2, 4, 5], [1, 2, 4, 6, 7]]
        # Two prompts end in part of a block: nodes 1+2, 3, 4, 5, 6, 7 (the last two of a prompt).
        assert len(self.run(tmp_path, turns, tail=1).names) == 6
        # Where they fill it, the same ids mean that prompts part there, and nodes are split.
        assert len(self.run(tmp_path, turns).names) == 5

    def test_a_split_empties_the_node_in_every_cache(self, tmp_path: Path) -> None:
        sizes = (TierSizes(0, 1 << 30), TierSizes(1 << 30, 0))
        same = [[1, 2, 3], [1, 2, 3], [1, 2, 3]]
        before = replay(tmp_path, [*same, [1, 2, 3]], sizes=sizes)
        after = replay(tmp_path, [*same, [1, 9], [1, 2, 3]], sizes=sizes)
        assert (before.splits, after.splits) == (0, 1)
        assert [row.disk_bytes for row in before.rows] == [3 * BLOCK] * 2
        assert [row.disk_bytes for row in after.rows] == [6 * BLOCK] * 2
        assert after.endless[0][0].disk_bytes == 6 * BLOCK


class TestTrace:
    """Reading the file."""

    def test_ids_may_be_any_numbers_or_texts_and_other_fields_are_left_alone(
        self, tmp_path: Path
    ) -> None:
        path = tmp_path / "t.jsonl"
        path.write_text('{"hash_ids": [-5, "x", 99999999999999]}\n\n{"hash_ids": ["x"], "a": 1}\n')
        trace = read_trace(path, 32)
        assert [request.blocks.tolist() for request in trace.requests] == [[0, 1, 2], [1]]
        assert [request.whole for request in trace.requests] == [3, 1]
        assert (trace.blocks, trace.notes) == (4, [])

    def test_a_length_that_does_not_fit_the_blocks_is_said(self, tmp_path: Path) -> None:
        path = write(tmp_path, [[1, 2], [3]])
        assert read_trace(path, 32).notes == []
        (note,) = read_trace(path, 64).notes
        assert "1 of 2 requests" in note
        assert "64 tokens a block" in note

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("", "holds no request"),
            ('{"hash_ids": [1]}\n{"hash_ids": [1}\n', ":2: not JSON"),
            ("[1, 2]\n", ":1: a JSON list"),
            ('{"ids": [1]}\n', "no field 'hash_ids' (fields: ids)"),
            ('{"hash_ids": 7}\n', "must be a list"),
            ('{"hash_ids": [1.5]}\n', "must be a list"),
            ('{"hash_ids": [true]}\n', "must be a list"),
            ('{"hash_ids": [1], "input_length": "9"}\n', "'input_length' is '9'"),
            ('{"hash_ids": [1], "input_length": -1}\n', "'input_length' is -1"),
        ],
    )
    def test_a_line_that_is_no_request_is_named(self, text: str, says: str, tmp_path: Path) -> None:
        path = tmp_path / "t.jsonl"
        path.write_text(text)
        with pytest.raises(SourceError) as caught:
            read_trace(path, 32)
        assert says in str(caught.value)
        assert str(path) in str(caught.value)

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(SourceError, match=r"none\.jsonl: can't be read"):
            read_trace(tmp_path / "none.jsonl", 32)


class TestImportance:
    """Which tokens a request selects."""

    BLOCKS = as_ids(np.arange(8))

    @pytest.mark.parametrize(
        ("retention", "chunk", "original", "importance"),
        [(0.25, 64, (0.90, 0.97), (0.55, 0.65)), (0.10, 64, (0.65, 0.80), (0.22, 0.36))],
    )
    def test_zipf_touches_about_as_many_chunks_as_were_measured(
        self,
        retention: float,
        chunk: int,
        original: tuple[float, float],
        importance: tuple[float, float],
    ) -> None:
        model = zipf_model(2, 512, retention, seed=1)
        by_weight = np.argsort(-model.weights_of(self.BLOCKS), axis=1)
        found = []
        for request in range(20):
            selected = model.select(request, self.BLOCKS)
            ordered = np.take_along_axis(selected, by_weight, axis=1)
            rows = (selected, ordered)
            found.append([row.reshape(2, -1, chunk).any(2).mean() for row in rows])
        in_tokens, by_importance = np.mean(found, axis=0)
        assert original[0] <= in_tokens <= original[1]
        assert importance[0] <= by_importance <= importance[1]

    def test_a_request_selects_as_many_tokens_as_asked_in_every_layer(self) -> None:
        selected = zipf_model(3, 512, 0.1, seed=1).select(5, self.BLOCKS)
        assert selected.shape == (3, 8 * 512)
        assert (selected.sum(1) == 410).all()

    def test_requests_agree_partly_and_a_request_is_the_same_again(self) -> None:
        def agreement(model: ImportanceModel) -> float:
            one, other = (model.select(request, self.BLOCKS) for request in (1, 2))
            assert (one == model.select(1, self.BLOCKS)).all()
            return float((one & other).sum() / (one | other).sum())

        assert 0.5 < agreement(zipf_model(2, 512, 0.25, seed=1)) < 0.9
        # Random sets of a quarter have a Jaccard of 1/7.
        assert 0.12 < agreement(uniform_model(2, 512, 0.25, seed=1)) < 0.17

    def test_blocks_and_layers_have_weights_of_their_own_from_the_seed(self) -> None:
        one, other = zipf_model(2, 512, 0.25, seed=1), zipf_model(2, 512, 0.25, seed=2)
        weights = one.weights_of(as_ids([7, 8, 7]))
        first, second, third = np.split(weights, 3, axis=1)
        assert (first == third).all()
        assert (first != second).any()
        assert (first[0] != first[1]).any()
        assert (one.weights != other.weights).any()

    def test_layers_are_spread_evenly(self) -> None:
        assert sampled_layers(48, 2) == [12, 36]
        assert sampled_layers(3, 3) == [0, 1, 2]

    def test_measured_weights_follow_how_often_tokens_were_selected(self, tmp_path: Path) -> None:
        model, ids = make_tiny("gqa"), ids_of(64)
        with new_store(tmp_path / "kv", model) as store:
            put(store, model, ids, name="p")
            record(store, 64, favourites=range(0, 64, 4))
            path = write(tmp_path, [[1, 2]] * 9)
            orders = ("original", "importance")
            asked = options(importance="measured", retention=0.25, orders=orders)
            report = bench_trace(path, asked, store)
        # Every fourth token is a favourite: in every chunk, or by importance all in one of four.
        in_tokens, by_importance = (row.loaded_ratio for row, _ in report.endless)
        assert in_tokens == 1.0
        assert by_importance == pytest.approx(0.25, abs=0.15)

    def test_measured_needs_a_store_with_statistics_and_enough_layers(self, tmp_path: Path) -> None:
        path = write(tmp_path, [[1]])
        with pytest.raises(InvalidValueError, match="measured:STORE"):
            bench_trace(path, options(importance="measured"))
        model = make_tiny("gqa")
        with new_store(tmp_path / "kv", model) as store:
            put(store, model, ids_of(64), name="p")
            with pytest.raises(InvalidValueError, match="statistics of 0 tokens"):
                bench_trace(path, options(importance="measured"), store)
            deep = replace(options(importance="measured"), shape=replace(SHAPE, num_layers=99))
            with pytest.raises(InvalidValueError, match="lower --layers-sampled"):
                bench_trace(path, replace(deep, layers_sampled=99), store)


def record(store: PrefixStore, tokens: int, favourites: Sequence[int]) -> None:
    """Tell a store's statistics that all of 50 queries selected the same tokens of its node."""
    (node,) = store.nodes()
    selected = np.zeros((store.shape.num_layers, tokens), dtype=bool)
    selected[:, list(favourites)] = True
    for _ in range(50):
        store.access.record(node.node_id, tokens, None, selected, selected)


class TestUses:
    """Selected tokens by chunk."""

    class Model(ImportanceModel):
        """Selects what it is told to."""

        chosen: np.ndarray

        def select(self, request: int, blocks: Any) -> np.ndarray:
            return self.chosen[:, : len(blocks) * 32]

    def uses(self, folder: Path, order: str, used: int) -> NodeUse:
        """Use the first ``used`` of three blocks; every even token is selected of them."""
        weights = np.arange(1, 97, dtype=np.float32).reshape(3, 1, 32)
        model = self.Model(weights, 1.0, 0)
        object.__setattr__(model, "chosen", np.arange(96)[None] % 2 == 0)
        index = TraceIndex()
        (request,) = read_trace(write(folder, [[1, 2, 3]]), 32).requests
        index.insert(request, index.match(request.blocks))
        (use,) = TraceUses(index, model, (order,), 16).uses(0, index.match(request.blocks[:used]))[
            order
        ]
        return use

    @pytest.mark.parametrize("order", ["original", "importance"])
    def test_a_node_has_the_chunks_of_all_its_blocks_and_counts_of_the_used_ones(
        self, order: str, tmp_path: Path
    ) -> None:
        for used in (1, 2, 3):
            use = self.uses(tmp_path, order, used)
            assert use.access.node.num_chunks == use.important.shape[1] == 6
            assert use.important.sum() == used * 16
            assert use.important.max() <= 16

    def test_token_order_counts_neighbours_and_leaves_the_rest_at_none(
        self, tmp_path: Path
    ) -> None:
        assert self.uses(tmp_path, "original", 2).important.tolist() == [[8, 8, 8, 8, 0, 0]]

    def test_order_of_importance_puts_the_heaviest_tokens_first(self, tmp_path: Path) -> None:
        model = zipf_model(1, 32, 0.25, seed=3)
        index = TraceIndex()
        (request,) = read_trace(write(tmp_path, [[1, 2, 3, 4]]), 32).requests
        index.insert(request, index.match(request.blocks))
        match = index.match(request.blocks)
        both = TraceUses(index, model, ("original", "importance"), 16)
        counts = np.zeros((2, 8))
        for number in range(200):
            found = both.uses(number, match)
            counts += [found[order][0].important[0] for order in ("original", "importance")]
        in_tokens, by_importance = counts
        assert in_tokens.sum() == by_importance.sum() == 200 * 32
        assert (np.diff(by_importance) < 0).all()
        assert by_importance[:2].sum() > in_tokens.max() * 2


def test_the_endless_cache_keeps_all_and_forgets_what_is_gone() -> None:
    geometry = options().geometry
    cache = EndlessCache(geometry)
    bench = CacheReplay(cache, geometry)
    important = np.array([[4, 0, 1], [0, 0, 2]])
    uses = [NodeUse.of(TraceNode(name, 3), important, 16) for name in ("a", "b")]
    bench.ask(uses, 100, 0.0)
    bench.ask(uses, 100, 0.0)
    row = bench.row("endless", "original")
    assert (row.hit_device, row.important_hit) == (0.5, 0.5)
    assert bench.held_bytes == row.disk_bytes == 6 * CHUNK
    cache.forget({"b"})
    assert bench.held_bytes == 3 * CHUNK


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"policies": ("fifo",)}, "'fifo'"),
        ({"orders": ("random",)}, "original, importance"),
        ({"importance": "flat"}, "zipf, uniform, measured"),
        ({"retention": 0.0}, "retention is 0.0"),
        ({"evidence_share": 1.5}, "evidence share 1.5"),
        ({"disk_bytes_s": 0.0}, "rates above 0"),
        ({"layers_sampled": 3}, "from 1 to 2"),
        ({"chunk_tokens": 8}, "from 16 to 256"),
        ({"chunk_tokens": 24}, "do not divide"),
        ({"requests": 0}, "at least one request"),
        ({"half_life": -1.0}, "half-life"),
        ({"sizes": (TierSizes(0, 0),)}, "less than one chunk"),
        ({"sizes": (TierSizes(2 * CHUNK - 1, 1 << 30),)}, f"{2 * CHUNK} bytes"),
    ],
)
def test_values_that_are_not_allowed_are_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        options(**values)
    assert says in str(caught.value)


def test_shapes_go_by_name_spec_or_folder(tmp_path: Path) -> None:
    assert kv_shape("opt-30b") == KVShape(48, 56, 56, 128, "bfloat16")
    assert kv_shape("llama-3-8b").num_kv_heads == 8
    assert kv_shape("random:opt-30b?layers=4", "float16") == KVShape(4, 56, 56, 128, "float16")
    tiny = make_tiny("gqa")
    tiny.model.config.save_pretrained(tmp_path)
    assert kv_shape(str(tmp_path), tiny.shape.dtype) == tiny.shape
    with pytest.raises(InvalidValueError, match=r"did you mean opt-30b\?.*llama-3-8b"):
        kv_shape("opt-30")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelLoadError):
        kv_shape(str(tmp_path / "empty"))
