"""Replacement on arrays against a sort of everything, and policies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.errors import InvalidValueError
from store.tier.policy import LFU, LRU, POLICIES, ChunkFacts, Score, make_policy
from store.tier.replace import FreeSlots, exchange

FEW = st.integers(0, 4).map(float)


def by_sorting(
    newcomers: list[float], residents: list[float], order: list[int], free: int, locked: list[bool]
) -> tuple[list[int], list[int]]:
    best = sorted(range(len(newcomers)), key=lambda i: (-newcomers[i], i))
    lowest = sorted(
        (i for i in range(len(residents)) if not locked[i]), key=lambda i: (residents[i], order[i])
    )
    enter, leave = best[:free], []
    for comer, resident in zip(best[free:], lowest, strict=False):
        if newcomers[comer] <= residents[resident]:
            break
        enter.append(comer)
        leave.append(resident)
    return enter, leave


@given(st.lists(FEW, max_size=9), st.lists(st.tuples(FEW, st.booleans())), st.data())
def test_an_exchange_is_what_sorting_all_residents_would_give(newcomers, residents, data):
    priority = [value for value, _ in residents]
    locked = [lock for _, lock in residents]
    order = data.draw(st.permutations(range(len(residents))))
    free = data.draw(st.integers(0, 5))
    arrays = np.array(newcomers), np.array(priority), np.array(order, dtype=np.int64)
    got = exchange(*arrays, free, np.array(locked, dtype=bool))
    wanted = by_sorting(newcomers, priority, list(order), free, locked)
    assert (got.enter.tolist(), got.leave.tolist()) == wanted
    if not any(locked):
        assert exchange(*arrays, free).leave.tolist() == wanted[1]


def test_free_slots_are_looked_up_before_they_are_taken():
    free = FreeSlots(4, 3)
    assert free.next(2).tolist() == [4, 5]
    free.take(2)
    assert free.held().tolist() == [6]
    free.put_back(np.array([5, 4]))
    assert free.next(3).tolist() == [5, 4, 6]
    assert free.count == 3


def facts(*rows: tuple[float, float, int]) -> ChunkFacts:
    accesses, ratio, last = zip(*rows, strict=True)
    return ChunkFacts(
        np.array(accesses, np.float32), np.array(ratio, np.float32), np.array(last, np.int64)
    )


def test_policies_order_chunks_as_they_say():
    known = facts((5, 0.1, 1), (1, 1.0, 3), (3, 0.5, 2))
    order = {name: np.argsort(make_policy(name).priority(known)).tolist() for name in POLICIES}
    assert order == {"lru": [0, 2, 1], "lfu": [1, 2, 0], "score": [0, 1, 2]}


@pytest.mark.parametrize("now", [10, 1000, 10**7])
def test_an_aged_score_orders_chunks_as_their_scores_of_now(now):
    known = facts((5, 0.5, now), (9, 0.9, now - 12), (30, 0.2, now - 3), (0, 0.0, 0), (2, 0.0, now))
    policy = Score(half_life=3.0)
    left = known.accesses * 2.0 ** ((known.last - now) / 3.0) * known.ratio
    priority = policy.priority(known)
    assert np.argsort(priority, kind="stable").tolist() == np.argsort(left, kind="stable").tolist()


def test_only_an_aged_score_lets_accesses_fade():
    accesses, requests = np.array([8, 8], np.float32), np.array([0, 6])
    assert Score(3.0).faded(accesses, requests).tolist() == [8, 2]
    for policy in (Score(), LRU(), LFU()):
        assert policy.faded(accesses, requests).tolist() == [8, 8]


@pytest.mark.parametrize("half_life", [0, -1.0, float("inf"), float("nan")])
def test_a_half_life_that_is_none_is_refused(half_life):
    with pytest.raises(InvalidValueError, match="requests is not allowed; give a number above 0"):
        make_policy("score", half_life)


def test_policies_without_a_half_life_say_so():
    with pytest.raises(InvalidValueError, match="policy 'lru' has no half-life, got 5"):
        make_policy("lru", 5)


def test_an_unknown_policy_names_those_that_exist():
    with pytest.raises(InvalidValueError, match="'fifo' is not known; use one of score, lru, lfu"):
        make_policy("fifo", 3)
