"""Sketches that stay in memory: what they take, which leave, what is read anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from store.disk.io import IOOptions
from store.disk.reader import ChunkReader
from store.disk.sidecar import SidecarFiles
from store.resident import SketchCache, sketch_bytes
from tests.helpers import compute_and_store, flip_bit, ids_of, new_store
from tests.tiny import make_tiny

MODEL = make_tiny("gqa")


@pytest.fixture
def files(tmp_path: Path):
    """Sketches of three nodes, of 1, 64 and 200 tokens."""
    with new_store(tmp_path / "kv", MODEL, probes="sketch") as store:
        for seed, length in ((1, 1), (2, 64), (3, 200)):
            compute_and_store(store, MODEL, ids_of(length, seed=seed), f"p{seed}")
        nodes = sorted(store.nodes(), key=lambda row: row.length)
        found = [store.sidecar(store.node(row.node_id), "sketch") for row in nodes]
        assert all(one is not None for one in found)
        yield found


@pytest.fixture
def reader():
    reader = ChunkReader(IOOptions())
    yield reader
    reader.close()


def used(cache: SketchCache, files: SidecarFiles) -> bool:
    """Take a sketch; returns whether it had to be read."""
    part = cache.take(files, files.tokens)
    part.data.result()
    return part.fresh


def test_what_is_counted_is_what_memory_takes(files, reader):
    for one in files:
        cache = SketchCache(reader, 1 << 30)
        resident = cache.take(one, one.tokens).data.result().bytes
        assert cache.used_bytes == sketch_bytes(one) == resident


def test_the_least_recently_used_leaves_and_the_budget_is_never_passed(files, reader):
    small, middle, large = files
    budget = sketch_bytes(middle) + sketch_bytes(large)
    cache = SketchCache(reader, budget)
    fresh = [used(cache, one) for one in (middle, large, middle, small, middle, large)]
    assert fresh == [True, True, False, True, False, True]
    assert cache.used_bytes <= budget


def test_a_sketch_larger_than_the_budget_is_read_and_not_kept(files, reader):
    cache = SketchCache(reader, sketch_bytes(files[2]) - 1)
    assert [used(cache, files[2]), used(cache, files[2])] == [True, True]
    assert cache.used_bytes == 0


def test_one_that_failed_is_read_again(files, reader):
    cache, code = SketchCache(reader, 1 << 30), files[1].group / "code" / "c.0.0.0.0"
    flip_bit(code, 5)
    assert cache.take(files[1], 64).data.exception() is not None
    flip_bit(code, 5)
    assert used(cache, files[1])
    assert not used(cache, files[1])
    assert cache.used_bytes == sketch_bytes(files[1])
