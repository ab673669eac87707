"""The tiers: every configuration through the suite, and what is special to two of them."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from store.errors import InvalidValueError
from store.tier import tiered
from store.tier.tiered import Budgets, Moves
from tests.store.tier.model import Use
from tests.store.tier.tier_suite import TierSuite, random_uses
from tests.store.tier.twin import CHUNK, Node, Setup, Twin, access, fetched


class TestDeviceOnly(TierSuite):
    setup = Setup(device=7, host=0)


class TestHostOnly(TierSuite):
    setup = Setup(device=0, host=7)


class TestBothJoined(TierSuite):
    setup = Setup(device=4, host=6)


class TestBothApart(TierSuite):
    setup = Setup(device=5, host=3, joined=False)


class TestTablesOnly(TierSuite):
    setup = Setup(device=4, host=6, memory=False)


def twin_of(device: int, host: int, policy: str = "lfu", half_life: float | None = None) -> Twin:
    return Twin(Setup(device, host, joined=False), policy, half_life)


def keys(name: str, *chunks: int, ratio: float = 1.0) -> list[Use]:
    """Chunks of the first layer's keys."""
    return [Use(name, 0, 0, chunk, ratio) for chunk in chunks]


def tiers(twin: Twin, uses: list[Use]) -> list[str]:
    return [twin.tier(use) for use in uses]


def test_a_used_chunk_of_the_host_goes_up_where_the_device_has_room():
    twin = twin_of(2, 3)
    uses = keys("a", 0, 1, 2, 3)
    twin.add("a")
    twin.add("b")
    twin.request(uses)
    assert tiers(twin, uses) == ["device", "device", "host", "host"]
    twin.keep()
    twin.request(keys("b", 0, 1, 2))
    twin.keep("a")
    twin.request(keys("a", 0))
    assert tiers(twin, uses) == ["device", "disk", "disk", "disk"]


def test_a_host_hit_better_than_the_devices_lowest_swaps_with_it():
    twin = twin_of(2, 2)
    uses = keys("a", 0, 1, 2, 3)
    twin.add("a")
    twin.request(uses)
    moves = twin.request(keys("a", 3))
    assert moves == Moves(promoted=1, demoted=1)
    # Of two that are alike, the first in the store had to leave.
    assert tiers(twin, uses) == ["host", "device", "host", "device"]


def test_a_host_chunk_that_was_not_used_stays_though_it_is_better():
    twin = twin_of(1, 1)
    twin.add("a")
    twin.request(keys("a", 0))
    twin.pin("a")
    for _ in range(3):
        twin.request(keys("a", 1))
    assert tiers(twin, keys("a", 0, 1)) == ["device", "host"]
    twin.unpin("a")
    assert twin.request(keys("a", 0)) == Moves()
    assert twin.request(keys("a", 1)) == Moves(promoted=1, demoted=1)


def test_a_chunk_displaced_from_the_device_is_dropped_if_the_host_holds_better_ones():
    twin = twin_of(1, 1)
    twin.add("a")
    twin.request(keys("a", 0))
    for _ in range(2):
        twin.request(keys("a", 0, 1))
    assert tiers(twin, keys("a", 0, 1)) == ["device", "host"]
    moves = [twin.request(keys("a", 2)) for _ in range(4)]
    assert moves[-2:] == [Moves(to_host=1, evicted=1), Moves(promoted=1, demoted=1)]


def test_a_chunk_that_is_not_admitted_counts_its_accesses_all_the_same():
    twin = twin_of(0, 1)
    twin.add("a")
    for _ in range(2):
        twin.request(keys("a", 0))
    assert [twin.request(keys("a", 1)) for _ in range(3)] == [
        Moves(),
        Moves(),
        Moves(to_host=1, evicted=1),
    ]


def test_ties_keep_residents_then_admit_the_first_in_the_store():
    twin = twin_of(0, 3)
    for name in ("a", "b"):
        twin.add(name)
    twin.request(keys("a", 0, 1, 2))
    assert twin.request(keys("b", 0, 1, 2)) == Moves()
    twin.request(keys("b", 2, 1))
    assert tiers(twin, keys("a", 0, 1, 2)) == ["disk", "disk", "host"]
    assert twin.request(keys("b", 0, 3)) == Moves(to_host=1, evicted=1)
    assert tiers(twin, keys("b", 0, 3)) == ["host", "disk"]


def test_the_paper_lets_no_access_fade():
    twin = twin_of(0, 1, "score")
    for name in ("old", "new"):
        twin.add(name)
    for _ in range(5):
        twin.request(keys("old", 0))
    for _ in range(5):
        assert twin.request(keys("new", 0)) == Moves()
    assert twin.request(keys("new", 0)) == Moves(to_host=1, evicted=1)


def test_with_a_half_life_what_was_used_often_long_ago_gives_way():
    twin = twin_of(0, 1, "score", half_life=2.0)
    for name in ("old", "new", "other"):
        twin.add(name)
    for _ in range(5):
        twin.request(keys("old", 0))
    # 2.59 accesses are left of 5; two requests later 1.30, and one access is less than that.
    assert twin.request(keys("other", 0)) == Moves()
    assert twin.request(keys("other", 1)) == Moves()
    assert twin.request(keys("new", 0)) == Moves(to_host=1, evicted=1)


def test_statistics_fade_from_when_they_were_introduced():
    twin = twin_of(0, 1, "score", half_life=1.0)
    node = twin.add("a")
    twin.add("b")
    for _ in range(20):
        twin.request(keys("b", 0))
    twin.introduce("a", np.full(node.dims(), 9), np.ones((2, node.num_chunks)))
    assert twin.warm(keys("a", 0)) == Moves(to_host=1, evicted=1)


@pytest.mark.parametrize("setup", [Setup(6, 9, joined=True), Setup(9, 6, joined=False)])
def test_bytes_are_right_when_moves_are_cut_into_many(setup, monkeypatch):
    monkeypatch.setattr(tiered, "_MOVE_BYTES", 2 * CHUNK)
    twin, rng = Twin(setup, "score"), random.Random(5)
    for name in ("a", "b", "c"):
        twin.add(name, 13)
    moves = [twin.request(random_uses(rng, twin, 0.3)) for _ in range(60)]
    # Swaps beside chunks that leave memory, from either tier.
    assert sum(min(one.promoted, one.demoted) > 1 and one.evicted > 0 for one in moves) > 5


def test_a_budget_of_less_than_a_chunk_holds_nothing():
    twin = twin_of(0, 0)
    twin.add("a")
    assert (twin.cache.device_slots, twin.cache.host_slots) == (0, 0)
    assert twin.request(twin.nodes["a"].uses()) == Moves()
    assert twin.cache.used_bytes() == (0, 0)


def test_the_tiers_share_their_memory_on_the_cpu_unless_told_otherwise():
    assert Setup(1, 1).cache().memory.joined
    assert not Setup(1, 1, joined=False).cache().memory.joined
    assert Setup(1, 1, memory=False).cache().memory is None


@pytest.mark.parametrize("step", ["put", "move"])
def test_a_copy_that_fails_costs_chunks_and_shows_no_wrong_ones(step, monkeypatch):
    twin = twin_of(2, 2, "lru")
    node, other = twin.add("a"), twin.add("b")
    twin.request(keys("a", 0, 1, 2, 3))
    if step == "put":
        request = [access(other, keys("b", 0, 1))], [fetched(other, 0, 0, [0, 1])]
    else:
        request = [access(node, keys("a", 2, 3))], []

    def fails(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(twin.cache.memory, step, fails)
    with pytest.raises(MemoryError):
        twin.cache.settle(*request)
    twin.cache.check_integrity()
    twin.compare_bytes()
    assert sum(twin.cache.used_bytes()) < 4 * CHUNK


def test_places_stay_right_while_nodes_come_and_go():
    twin = twin_of(6, 9, "lru")
    for step in range(24):
        name = f"n{step}"
        twin.add(name, 200)
        twin.request([*keys(name, 0, 49), Use(name, 1, 1, 7)])
        if step % 5 == 4:
            twin.keep(*(f"n{kept}" for kept in range(step - 2, step + 1)))
    assert twin.tier(keys("n23", 49)[0]) == "device"


def test_a_run_of_hits_in_both_tiers_moves_only_what_changes_place():
    twin = twin_of(3, 3)
    uses = keys("a", 0, 1, 2, 3)
    twin.add("a")
    twin.request(uses)
    for _ in range(3):
        assert twin.request(uses) == Moves()


@pytest.mark.parametrize("budgets", [{"device_bytes": -1}, {"host_bytes": -1}])
def test_a_negative_budget_is_refused(budgets):
    with pytest.raises(InvalidValueError, match="budget of -1 bytes is not allowed; use 0"):
        Budgets(**budgets)


def test_a_node_needs_no_more_than_a_name_and_a_count_of_chunks():
    cache = Setup(2, 2, memory=False).cache()
    node = Node("a", 9)
    used = np.ones(node.dims(), dtype=bool)
    ratio = np.ones((2, 3), dtype=np.float32)
    moves = cache.settle([tiered.Access(node, used, ratio)], [fetched(node, 1, 0, [0, 2], False)])
    assert moves == Moves(to_device=2)
    assert cache.slots(node, 1).tolist() == [[0, -1, 1], [-1, -1, -1]]
    assert torch.equal(torch.from_numpy(cache.residency(node)[0]), torch.full((2, 3), -1).int())
