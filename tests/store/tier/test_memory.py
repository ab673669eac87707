"""Memory of the tiers: rows by place, whole chunks, swaps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from store.tier.memory import TierMemory
from tests.store.tier.twin import CHUNK_TOKENS, SHAPE, noise

DEVICE_SLOTS, HOST_SLOTS = 3, 4
SLOTS = DEVICE_SLOTS + HOST_SLOTS
ROWS = SLOTS * CHUNK_TOKENS
EDGE = DEVICE_SLOTS * CHUNK_TOKENS


@pytest.fixture(params=[True, False], ids=["joined", "apart"])
def memory(request: pytest.FixtureRequest) -> TierMemory:
    """Slot s holds rows of ``full`` from ``s * CHUNK_TOKENS`` on."""
    made = TierMemory(
        SHAPE, CHUNK_TOKENS, DEVICE_SLOTS, HOST_SLOTS, torch.device("cpu"), request.param
    )
    made.put(np.arange(SLOTS), full(), np.arange(SLOTS) * CHUNK_TOKENS)
    return made


def full() -> torch.Tensor:
    return noise("full", ROWS)


def blank(rows: int = ROWS) -> torch.Tensor:
    return torch.full_like(full()[:1].expand(rows, -1, -1), torch.nan).contiguous()


def read(memory: TierMemory, places: np.ndarray, at: np.ndarray | None = None) -> torch.Tensor:
    target = blank()
    memory.to_host(places, target, at)
    memory.to_device(places, target, at)
    return target


def same(given: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(given, wanted, rtol=0, atol=0, equal_nan=True)


def test_rows_of_both_tiers_come_in_the_order_asked(memory):
    places = np.random.default_rng(1).permutation(ROWS)
    same(read(memory, places), full()[places])


def test_each_tier_copies_its_own_rows_and_leaves_others_alone(memory):
    places = np.array([1, EDGE, EDGE - 1, ROWS - 1])
    from_host, from_device = blank(4), blank(4)
    memory.to_host(places, from_host)
    memory.to_device(places, from_device)
    wanted = full()[places]
    mine = torch.tensor([memory.joined, True, memory.joined, True])
    same(from_host, torch.where(mine[:, None, None], wanted, torch.nan))
    same(from_device, torch.where(mine[:, None, None], torch.nan, wanted))


def test_rows_go_where_they_are_told(memory):
    places, at = np.array([5, EDGE + 3, 0]), np.array([7, 2, 4])
    wanted = blank()
    wanted[at] = full()[places]
    same(read(memory, places, at), wanted)


@pytest.mark.parametrize("at", [None, np.array([9, 0, 3, 1])])
def test_each_head_may_take_other_rows(memory, at):
    places = np.array([[0, EDGE, 2, ROWS - 1], [EDGE + 1, 1, 0, EDGE - 1]])
    to = np.arange(4) if at is None else at
    wanted = blank()
    for head, own in enumerate(places):
        wanted[to, head] = full()[own, head]
    same(read(memory, places, at), wanted)


def test_one_list_of_rows_serves_all_heads(memory):
    places = np.array([[3, EDGE]])
    same(read(memory, places)[:2], full()[places[0]])


def test_rows_below_zero_are_in_no_tier(memory):
    given = read(memory, np.array([-1, 4, -1, EDGE]))
    same(given[[1, 3]], full()[[4, EDGE]])
    assert given[[0, 2]].isnan().all()
    heads = read(memory, np.array([[-1, 4], [EDGE, -1]]))
    same(heads[0, 1], full()[EDGE, 1])
    same(heads[1, 0], full()[4, 0])
    assert heads[0, 0].isnan().all()
    assert heads[1, 1].isnan().all()


def test_a_short_last_chunk_keeps_the_rows_it_has(memory):
    source = noise("short", 6)
    memory.put(np.array([DEVICE_SLOTS, 0]), source, np.array([4, 1]))
    same(read(memory, np.arange(EDGE, EDGE + 2))[:2], source[4:6])
    same(read(memory, np.arange(4))[:4], source[1:5])


def test_chunks_swap_between_the_tiers(memory):
    memory.move(np.array([0, DEVICE_SLOTS, 2]), np.array([DEVICE_SLOTS, 0, SLOTS - 1]))
    order = np.arange(SLOTS)
    order[[DEVICE_SLOTS, 0, SLOTS - 1]] = [0, DEVICE_SLOTS, 2]
    wanted = full().unflatten(0, (SLOTS, CHUNK_TOKENS))[order].flatten(0, 1)
    same(read(memory, np.arange(ROWS)), wanted)


def test_a_cycle_through_all_slots_turns_every_chunk(memory):
    memory.move(np.arange(SLOTS), np.roll(np.arange(SLOTS), 1))
    wanted = full().unflatten(0, (SLOTS, CHUNK_TOKENS)).roll(-1, 0).flatten(0, 1)
    same(read(memory, np.arange(ROWS)), wanted)


def test_nothing_is_a_request_too(memory):
    none = np.empty(0, dtype=np.int64)
    memory.move(none, none)
    memory.put(none, full(), none)
    same(read(memory, none), blank())


def test_a_target_that_is_no_block_of_memory_is_refused_rather_than_missed(memory):
    target = blank().transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.raises(RuntimeError, match="view"):
        memory.to_host(np.zeros((2, 1), dtype=np.int64) + EDGE, target)
