"""What the tiers do in every configuration and under every policy.

Subclass `TierSuite` with a ``setup``; all requests go through a `Twin`, which compares residency,
moves, budgets and bytes with the plain reference after each.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from store.tier.tiered import Moves
from tests.store.tier.model import Use
from tests.store.tier.twin import CHUNK, Setup, Twin, access, fetched

POLICY_CASES = [("score", None), ("score", 2.7), ("lru", None), ("lfu", None)]


def random_uses(rng: random.Random, twin: Twin, share: float) -> list[Use]:
    """Chunks of some nodes, as a sparse query uses them; ratios are eighths, so that some tie.

    Keys and values of a chunk have one ratio.
    """
    names = rng.sample(sorted(twin.nodes), rng.randint(1, len(twin.nodes)))
    salt = rng.randrange(1000)
    return [
        use._replace(ratio=(salt * (7 * use.layer + use.chunk + 1)) % 9 / 8)
        for name in names
        for use in twin.nodes[name].uses()
        if rng.random() < share
    ]


class TierSuite:
    """Every test runs over every policy."""

    setup: Setup

    @pytest.fixture(params=POLICY_CASES, ids=lambda case: f"{case[0]}-{case[1]}")
    def twin(self, request: pytest.FixtureRequest) -> Twin:
        return Twin(self.setup, *request.param)

    @property
    def room(self) -> int:
        return self.setup.device + self.setup.host

    def test_what_is_read_stays_while_there_is_room(self, twin):
        uses = twin.add("a").uses()[: self.room]
        moves = twin.request(uses)
        assert (moves.to_device, moves.to_host) == (self.setup.device, self.setup.host)
        assert twin.absent(uses) == []
        assert twin.request(uses) == Moves()

    def test_budgets_hold_when_more_is_read_than_fits(self, twin):
        twin.request(twin.add("a").uses() + twin.add("b", 40).uses())
        device, host = twin.cache.used_bytes()
        assert (device, host) == (self.setup.device * CHUNK, self.setup.host * CHUNK)

    def test_a_chunk_no_better_than_the_lowest_is_not_admitted(self, twin):
        uses = twin.add("a").uses()[: self.room]
        for _ in range(3):
            twin.request(uses)
        before = twin.cache.residency(twin.nodes["a"]).copy()
        # Two accesses never beat three, and what was not used is older than what was.
        others = twin.add("b").uses(0.5)
        moves = twin.request(uses, beside=others)
        assert moves == Moves()
        np.testing.assert_array_equal(twin.cache.residency(twin.nodes["a"]), before)

    def test_better_chunks_take_the_place_of_the_lowest(self, twin):
        low = twin.add("a").uses(0.25)[: self.room]
        twin.request(low)
        high = twin.add("b").uses()[: self.room - 1]
        for _ in range(4):
            twin.request(high)
        assert twin.absent(high) == []
        assert len(twin.absent(low)) == len(high)

    def test_chunks_of_a_pinned_node_neither_leave_nor_move(self, twin):
        uses = twin.add("a").uses(0.25)[: self.room]
        twin.request(uses)
        before = twin.cache.residency(twin.nodes["a"]).copy()
        others = twin.add("b").uses()
        twin.pin("a", "a")
        twin.unpin("a")
        for _ in range(3):
            assert twin.request(others + uses[-1:]) == Moves()
            np.testing.assert_array_equal(twin.cache.residency(twin.nodes["a"]), before)
        twin.unpin("a")
        moves = twin.request(others)
        assert moves.evicted > 0
        assert len(twin.absent(uses)) > 0

    def test_forgotten_nodes_leave_their_slots_to_others(self, twin):
        first, second = twin.add("a"), twin.add("b")
        twin.request(first.uses()[: self.room - 1])
        twin.request(second.uses()[:1])
        assert twin.keep("b")
        assert not twin.cache.known(first)
        assert (twin.cache.residency(first) == -1).all()
        assert sum(twin.cache.used_bytes()) == CHUNK
        moves = twin.request(twin.add("c").uses()[: self.room - 1])
        assert (moves.to_device + moves.to_host, moves.evicted) == (self.room - 1, 0)

    def test_a_pinned_node_is_forgotten_once_its_query_ends(self, twin):
        twin.add("a")
        twin.pin("a")
        assert not twin.keep()
        twin.request(twin.nodes["a"].uses()[:2])
        assert not twin.keep()
        assert sum(twin.cache.used_bytes()) == 2 * CHUNK
        twin.unpin("a")
        assert twin.keep()
        assert twin.cache.used_bytes() == (0, 0)

    def test_facts_of_a_forgotten_node_do_not_come_back(self, twin):
        uses = twin.add("a").uses()[: self.room]
        for _ in range(5):
            twin.request(uses)
        twin.keep()
        twin.request(uses[:1])
        fresh = twin.add("b").uses()[: self.room]
        for _ in range(2):
            twin.request(fresh)
        assert twin.absent(uses[:1]) == uses[:1]

    def test_statistics_decide_what_warms_the_tiers(self, twin):
        node = twin.add("a", 40)
        accesses = np.zeros(node.dims())
        accesses[1] = 3
        twin.introduce("a", accesses, np.ones((2, node.num_chunks)))
        assert twin.cache.known(node)
        moves = twin.warm(node.uses())
        assert moves.to_device + moves.to_host == self.room
        assert moves.evicted == 0
        if twin.policy != "lru":
            assert not (twin.cache.residency(node)[0] >= 0).any()

    def test_statistics_of_a_node_in_use_change_nothing(self, twin):
        node = twin.add("a")
        twin.request(node.uses(0.5)[:3])
        twin.introduce("a", np.full(node.dims(), 99), np.ones((2, node.num_chunks)))
        # The same again: it would be another priority than the one that is kept.
        twin.compare()
        twin.request(node.uses()[3:6])

    def test_reading_the_tables_of_an_unknown_node_does_not_make_it_known(self, twin):
        node = twin.add("a")
        twin.pin("a")
        assert (twin.cache.slots(node, 1) == -1).all()
        assert twin.cache.residency(node).shape == node.dims()
        assert not twin.cache.known(node)

    def test_slots_of_a_layer_are_a_part_of_the_residency(self, twin):
        node = twin.add("a")
        twin.request(node.uses()[: self.room])
        whole = twin.cache.residency(node)
        assert whole.dtype == np.int32
        for layer in range(2):
            np.testing.assert_array_equal(twin.cache.slots(node, layer), whole[layer])

    def test_a_chunk_that_was_read_twice_is_admitted_once(self, twin):
        node = twin.add("a")
        load = fetched(node, 0, 1, [1, 3], self.setup.memory)
        moves = twin.cache.settle([access(node, node.uses()[:1])], [load, load])
        assert moves.to_device + moves.to_host == 2
        twin.cache.check_integrity()
        assert twin.cache.warm([load]) == Moves()

    def test_a_request_of_nothing_moves_nothing(self, twin):
        assert twin.request([]) == Moves()
        assert twin.warm([]) == Moves()

    @pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
    def test_any_requests_end_as_one_comparison_after_the_other_would(self, twin, share):
        rng = random.Random(f"{twin.policy}{share}")
        for name, tokens in (("a", 14), ("b", 3), ("c", 27)):
            twin.add(name, tokens)
        total = dict.fromkeys(Moves._fields, 0)
        for step in range(25):
            if step == 8:
                twin.pin("b", "c")
            if step == 14:
                twin.unpin("b", "c")
                twin.keep("a", "c")
            uses = random_uses(rng, twin, share)
            moves = twin.request(uses, beside=random_uses(rng, twin, 0.1))
            total = {name: total[name] + moves._asdict()[name] for name in total}
        if share == 1:
            return
        both = self.setup.device and self.setup.host
        expected = {"to_device": self.setup.device, "to_host": self.setup.host}
        expected |= {"promoted": both, "demoted": both, "evicted": self.room}
        assert {name for name in total if total[name]} == {n for n in expected if expected[n]}

    def test_the_same_requests_give_the_same_slots(self, twin):
        again = Twin(self.setup, twin.policy, twin.half_life)
        for one in (twin, again):
            rng = random.Random(3)
            for name in ("a", "b"):
                one.add(name)
            for _ in range(10):
                one.request(random_uses(rng, one, 0.4))
        for node in twin.nodes.values():
            slots = (one.cache.residency(node) for one in (twin, again))
            np.testing.assert_array_equal(*slots)
