"""Counting what a run cost."""

from __future__ import annotations

from store.stats import RunCounters


def counted(*spans: tuple[float, float], load_s: float = 0.0, probe_s: float = 0.0) -> float:
    counters = RunCounters(read_wait_s=load_s, probe_wait_s=probe_s)
    for started, ended in spans:
        counters.add_read(100, 4096, 1, started, ended)
    return counters.hidden_io_s()


def test_reads_that_overlap_are_hidden_once():
    assert counted((1.0, 4.0), (2.0, 3.0), (3.0, 6.0)) == 5.0
    assert counted((3.0, 6.0), (1.0, 4.0)) == 5.0


def test_time_in_which_nothing_was_read_is_not_hidden_reading():
    assert counted((1.0, 2.0), (10.0, 11.0)) == 2.0


def test_waiting_for_keys_values_or_evidence_is_not_hidden():
    assert counted((0.0, 4.0), load_s=1.0, probe_s=2.0) == 1.0
    assert counted((0.0, 4.0), load_s=3.0, probe_s=2.0) == 0.0


def test_without_reads_nothing_is_hidden():
    assert counted() == 0.0


def test_evidence_counts_in_both_sums():
    counters = RunCounters()
    counters.add_probe((100, 4096, 1, 0.0, 1.0))
    assert (counters.probe_bytes, counters.wanted_bytes, counters.read_bytes) == (100, 100, 4096)
