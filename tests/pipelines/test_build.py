"""Building a store: shared work, resuming, limits, and a kill at any moment."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pipelines.build import build_store, new_tokens, plan_build
from pipelines.progress import ProgressEvent
from pipelines.sources.base import PrefixSource, RawPrefix
from store.engine import PrefixStore
from store.errors import ReadOnlyStoreError
from tests.helpers import ask, ids_of, new_store, open_store, worst
from tests.tiny import make_tiny

MODEL = make_tiny("gqa")
QUESTION = ids_of(4, seed=50)
SHARED = ids_of(70, seed=1)


class Listed(PrefixSource):
    """Prefixes given as arrays."""

    def __init__(self, *prefixes: np.ndarray) -> None:
        super().__init__()
        self.prefixes = prefixes

    def raw_count(self) -> int:
        return len(self.prefixes)

    def raw_items(self, _tokenizer, _longest) -> Iterator[RawPrefix]:
        for i, ids in enumerate(self.prefixes):
            yield RawPrefix(f"p{i}", f"prefix {i}", ids, {"kind": "test"})


def with_shared(count: int, tokens: int = 60) -> list[np.ndarray]:
    """Prefixes that share `SHARED`, one after the other."""
    parts = [np.concatenate([SHARED, ids_of(tokens, seed=100 + i)]) for i in range(count)]
    for i, part in enumerate(parts):
        part[len(SHARED)] = i
    return [part.astype(np.uint32) for part in parts]


def check(store: PrefixStore, prefixes: list[np.ndarray]) -> None:
    for prefix in prefixes:
        given = ask(store, MODEL, prefix, QUESTION)
        assert given.stats.reused_tokens == len(prefix)
        assert worst(given, MODEL, prefix, QUESTION) <= 1e-4


def test_shared_beginnings_are_computed_and_stored_once(tmp_path: Path):
    prefixes = with_shared(5)
    with new_store(tmp_path / "kv", MODEL) as store:
        report = build_store(store, MODEL, Listed(*prefixes))
        assert report.tokens == 5 * 130
        assert report.computed_tokens == 70 + 5 * 60
        assert sum(row.length for row in store.nodes()) == 70 + 5 * 60
        check(store, prefixes)


def test_a_build_that_ran_before_computes_nothing(tmp_path: Path):
    prefixes = with_shared(3)
    with new_store(tmp_path / "kv", MODEL) as store:
        build_store(store, MODEL, Listed(*prefixes[:2]))
    with open_store(tmp_path / "kv", MODEL) as store:
        report = build_store(store, MODEL, Listed(*prefixes))
        assert (report.prefixes, report.prefixes_reused) == (3, 2)
        assert report.computed_tokens == 60


def test_duplicates_are_counted_and_stored_once(tmp_path: Path):
    prefixes = with_shared(2)
    with new_store(tmp_path / "kv", MODEL) as store:
        report = build_store(store, MODEL, Listed(*prefixes, prefixes[0], prefixes[0]))
        assert (report.prefixes, report.duplicates) == (4, 2)
        assert len(store.prefixes()) == 2


def test_a_prefix_of_another_prefix_is_listed_without_computing(tmp_path: Path):
    (long,) = with_shared(1)
    with new_store(tmp_path / "kv", MODEL) as store:
        report = build_store(store, MODEL, Listed(long, long[:33]))
        assert report.computed_tokens == len(long)
        assert [row.length for row in store.prefixes()] == [130, 33]


def test_a_prefix_too_long_for_the_model_is_cut_with_a_warning_that_says_how_much(tmp_path: Path):
    model = make_tiny("gqa", positions=64)
    with new_store(tmp_path / "kv", model) as store:
        report = build_store(store, model, Listed(ids_of(80)))
        assert [row.length for row in store.prefixes()] == [48]
        assert any("32" in text for text in report.warnings)


def test_the_size_limit_counts_what_is_there_and_says_what_was_left_out(tmp_path: Path):
    prefixes = with_shared(4)
    with new_store(tmp_path / "kv", MODEL) as store:
        build_store(store, MODEL, Listed(prefixes[0]))
        limit = store.size_bytes() + 600_000
        report = build_store(store, MODEL, Listed(*prefixes), max_size_bytes=limit)
        assert 0 < report.dropped < 4
        assert sum("left out" in text for text in report.warnings) == report.dropped
        assert store.size_bytes() <= limit


def test_a_damaged_beginning_is_computed_again(tmp_path: Path):
    from store.disk import layout as disk_layout
    from tests.helpers import flip_bit, group_of

    prefixes = with_shared(2)
    with new_store(tmp_path / "kv", MODEL) as store:
        build_store(store, MODEL, Listed(prefixes[0]))
        flip_bit(disk_layout.shard_path(group_of(store), "k", 1), 10)
        # The damage is in the way of what comes next; the first prefix again heals it.
        stopped = build_store(store, MODEL, Listed(prefixes[1], ids_of(40, seed=77)))
        assert stopped.failed == 1
        assert any("verify --repair" in text for text in stopped.warnings)
        assert [row.length for row in store.prefixes()] == [130, 40]
        report = build_store(store, MODEL, Listed(*prefixes))
        assert report.prefixes_reused == 0
        assert store.verify().bad == []
        check(store, prefixes)


def test_progress_covers_every_token_once(tmp_path: Path):
    events: list[ProgressEvent] = []
    prefixes = [*with_shared(3), with_shared(1)[0]]
    with new_store(tmp_path / "kv", MODEL) as store:
        build_store(store, MODEL, Listed(*prefixes), progress=events.append)
    done = [event.done for event in events]
    assert done == sorted(done)
    assert done[-1] == events[-1].total == 4 * 130
    assert done[-2] == 4 * 130


def test_a_plan_writes_nothing_and_foresees_the_tokens(tmp_path: Path):
    prefixes = with_shared(4)
    plan = plan_build(MODEL, Listed(*prefixes, prefixes[0]), None, path=tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert plan.computed_tokens == 70 + 4 * 60
    assert plan.bytes >= plan.computed_tokens * MODEL.shape.token_bytes
    assert plan.seconds > 0
    assert plan.free_bytes > 0
    with new_store(tmp_path / "kv", MODEL) as store:
        build_store(store, MODEL, Listed(*prefixes[:2]))
        again = plan_build(MODEL, Listed(*prefixes), store, path=store.path)
        assert again.computed_tokens == 2 * 60


def test_new_tokens_counts_shared_beginnings_once():
    a, b = ids_of(20), ids_of(20)
    b[7] += 1
    assert new_tokens([a, b, a[:5], a], [0, 0, 0, 0]) == 20 + 13
    assert new_tokens([a, b], [20, 7]) == 13
    assert new_tokens([], []) == 0


def test_a_store_that_cannot_be_written_is_refused(tmp_path: Path):
    with new_store(tmp_path / "kv", MODEL) as store:
        store._index.read_only = True
        with pytest.raises(ReadOnlyStoreError):
            build_store(store, MODEL, Listed(*with_shared(1)))


CHILD = """
import sys
from tests.pipelines.test_build import *
path = Path(sys.argv[1])
store = open_store(path, MODEL)
print("ready", flush=True)
build_store(store, MODEL, Listed(*with_shared(60)))
print("done", flush=True)
"""


def killed_build(path: Path, delay_s: float) -> bool:
    """Run a build in another process and kill it; True where it had not finished."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    time.sleep(delay_s)
    child.send_signal(signal.SIGKILL)
    rest = child.stdout.read()
    child.wait()
    child.stdout.close()
    return "done" not in rest


@pytest.mark.slow
def test_a_build_killed_at_random_moments_resumes_to_the_same_store(tmp_path: Path):
    prefixes = with_shared(60)
    new_store(tmp_path / "kv", MODEL).close()
    rng, finished = random.Random(7), 0
    for _ in range(5):
        assert killed_build(tmp_path / "kv", 0.05 + 0.6 * rng.random())
        with open_store(tmp_path / "kv", MODEL) as store:
            assert store.verify().bad == []
            assert len(store.prefixes()) >= finished
            finished = len(store.prefixes())
    assert 0 < finished < 60
    with open_store(tmp_path / "kv", MODEL) as store:
        report = build_store(store, MODEL, Listed(*prefixes))
        assert report.prefixes_reused == finished
        check(store, prefixes[:3])
        broken = catalog_of(store)
        assert store.gc().removed_groups == 0
    with new_store(tmp_path / "whole", MODEL) as store:
        build_store(store, MODEL, Listed(*prefixes))
        assert catalog_of(store) == broken


def catalog_of(store: PrefixStore) -> list:
    """What the catalog says, but for times and generations."""
    nodes = [(n.node_id, n.parent_id, n.start, n.length, n.digest) for n in store.nodes()]
    return nodes + sorted((p.prefix_id, p.name, p.length, p.node_id) for p in store.prefixes())
