"""Waiting for evidence; what each kind computes is covered by `tests.test_sparse_exactness`."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import pytest

from store.errors import ChunkLoadError
from store.itf.evidence import awaited
from store.stats import RunCounters


def test_the_deadline_holds_for_all_reads_of_a_layer_together():
    # One after the other, each well within the deadline, and too slow in sum.
    futures: list[Future[int]] = [Future() for _ in range(4)]
    timers = [
        threading.Timer(0.2 * (number + 1), future.set_result, (number,))
        for number, future in enumerate(futures)
    ]
    for timer in timers:
        timer.start()
    counters, started = RunCounters(), time.perf_counter()
    with pytest.raises(ChunkLoadError, match="slow"):
        awaited(futures, counters, 0.3)
    took = time.perf_counter() - started
    assert took < 0.6
    assert counters.probe_wait_s == pytest.approx(took, abs=0.1)
    for timer in timers:
        timer.join()


def test_results_come_in_order():
    futures: list[Future[int]] = [Future() for _ in range(3)]
    for number, future in enumerate(futures):
        future.set_result(number)
    assert awaited(futures, RunCounters(), 1.0) == [0, 1, 2]
