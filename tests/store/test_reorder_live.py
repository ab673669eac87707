"""Invariant 1 while another process reorders: every answer is exact, none fails."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import numpy as np
import pytest

from store.itf.options import SparseOptions
from tests.helpers import ask, compute_and_store, ids_of, new_store, open_store, shuffle, worst
from tests.sparse import worst_sparse
from tests.tiny import make_tiny

PREFIX = ids_of(120)
ASKED = (PREFIX, PREFIX[:70])
QUESTION = np.concatenate([[(PREFIX[70] + 1) % 256], ids_of(5, seed=7)]).astype(np.uint32)


def reorder_until(path: Path, stop, passes) -> None:
    """In a process of its own: give all nodes one order after the other."""
    model = make_tiny("gqa")
    with open_store(path, model) as store:
        while not stop.is_set():
            shuffle(store, seed=passes.value)
            passes.value += 1


@pytest.mark.slow
def test_answers_stay_exact_while_another_process_reorders(tmp_path: Path):
    model, path = make_tiny("gqa"), tmp_path / "kv"
    with new_store(path, model, probes="sketch") as store:
        compute_and_store(store, model, PREFIX[:50], "beginning")
        compute_and_store(store, model, PREFIX, "p")
    context = multiprocessing.get_context("spawn")
    stop, passes = context.Event(), context.Value("i", 0)
    child = context.Process(target=reorder_until, args=(path, stop, passes))
    child.start()
    try:
        with open_store(path, model) as store:
            seen, options = set(), SparseOptions(retention=0.2, evidence="sketch")
            for _ in range(4000):
                for asked in ASKED:
                    given = ask(store, model, asked, QUESTION)
                    assert given.stats.reused_tokens == len(asked)
                    assert given.stats.recovered_chunks == 0
                    assert worst(given, model, asked, QUESTION) <= 1e-4
                    assert worst_sparse(store, model, asked, QUESTION, options)[0] <= 1e-4
                seen.add(tuple(row.generation for row in store.nodes()))
                if passes.value >= 25:
                    break
            assert passes.value >= 25, "the other process does not get on"
            assert len(seen) >= 10, "the orders changed while nobody asked"
    finally:
        stop.set()
        child.join(60)
    assert child.exitcode == 0
    with open_store(path, model) as store:
        assert store.verify().bad == []
        store.gc()
        groups = [path for path in (path / "nodes").glob("*/*/g*") if path.is_dir()]
        assert len(groups) == len(store.nodes()), "old generations stay"
