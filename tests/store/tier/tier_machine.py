"""Hypothesis machine: the tiers against a plain reference, in any order of what may happen.

`TierMachine` drives a `Twin`, which compares residency, moves, budgets and the bytes of every
resident chunk after each step. Rules name nodes, so that a machine over a real store can add its
own and reuse these.
"""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from store.tier.tiered import Moves
from tests.store.tier.model import Use
from tests.store.tier.tier_suite import POLICY_CASES
from tests.store.tier.twin import Node, Setup, Twin

SETUPS = [
    Setup(device=0, host=5),
    Setup(device=4, host=0),
    Setup(device=3, host=6),
    Setup(device=3, host=2, joined=False),
    Setup(device=4, host=5, memory=False),
    Setup(device=0, host=0),
]
RATIOS = st.sampled_from([0.0, 0.25, 0.5, 1.0])
#: Which of a node's chunks, as bits; a few patterns of which requests share parts.
PATTERNS = st.one_of(st.just(-1), st.integers(0, (1 << 16) - 1))


def chosen(node: Node, pattern: int, ratio: float) -> list[Use]:
    return [use for i, use in enumerate(node.uses(ratio)) if pattern >> i % 16 & 1]


class TierMachine(RuleBasedStateMachine):
    """Insert, use, press, pin, reorder and delete nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.twin = Twin(SETUPS[0])
        #: Published name of each node, and names that queries under way have pinned.
        self.published: dict[int, str] = {}
        self.pinned: list[list[str]] = []
        self.count = 0

    @initialize(setup=st.sampled_from(SETUPS), policy=st.sampled_from(POLICY_CASES))
    def open(self, setup: Setup, policy: tuple[str, float | None]) -> None:
        self.twin = Twin(setup, *policy)

    @property
    def names(self) -> list[str]:
        return list(self.published.values())

    def publish(self, number: int, generation: int, tokens: int) -> None:
        name = f"node{number}/{generation}"
        self.twin.add(name, tokens)
        self.published[number] = name

    def draw_number(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.published)), label="node")

    @precondition(lambda self: len(self.published) < 4)
    @rule(tokens=st.integers(1, 14))
    def insert(self, tokens: int) -> None:
        self.publish(self.count, 0, tokens)
        self.count += 1

    @precondition(lambda self: self.published)
    @rule(data=st.data(), pattern=PATTERNS, ratio=RATIOS, beside=PATTERNS)
    def use(self, data: st.DataObject, pattern: int, ratio: float, beside: int) -> None:
        names = data.draw(st.lists(st.sampled_from(self.names), min_size=1, unique=True))
        uses = [use for name in names for use in chosen(self.twin.nodes[name], pattern, ratio)]
        others = chosen(self.twin.nodes[names[0]], beside if beside >= 0 else 0, 1.0)
        self.twin.request(uses, beside=others)

    @precondition(lambda self: self.published)
    @rule(data=st.data(), times=st.integers(2, 4))
    def press(self, data: st.DataObject, times: int) -> None:
        """Use one node again and again, so that it drives others out."""
        node = self.twin.nodes[self.published[self.draw_number(data)]]
        for _ in range(times):
            self.twin.request(node.uses())

    @precondition(lambda self: self.published)
    @rule(data=st.data())
    def repeat_without_admission(self, data: st.DataObject) -> None:
        """A request that reads nothing lets nothing in from disk."""
        node = self.twin.nodes[self.published[self.draw_number(data)]]
        uses = [use for use in node.uses(0.5) if self.twin.slot(use) >= 0]
        moves = self.twin.request(uses)
        assert (moves.to_device, moves.to_host) == (0, 0)

    @precondition(lambda self: self.published)
    @rule(data=st.data())
    def begin_a_query(self, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from(self.names), min_size=1, unique=True))
        self.twin.pin(*names)
        self.pinned.append(names)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def end_a_query(self, data: st.DataObject) -> None:
        which = data.draw(st.integers(0, len(self.pinned) - 1))
        self.twin.unpin(*self.pinned.pop(which))

    @precondition(lambda self: self.published)
    @rule(data=st.data(), tell=st.booleans(), accesses=st.integers(0, 3), ratio=RATIOS)
    def reorder(self, data: st.DataObject, tell: bool, accesses: int, ratio: float) -> None:
        """A new generation: another name for the same tokens; the old one is forgotten."""
        number = self.draw_number(data)
        old = self.twin.nodes[self.published[number]]
        generation = int(old.name.partition("/")[2]) + 1
        self.publish(number, generation, old.tokens)
        node = self.twin.nodes[self.published[number]]
        if tell:
            counts = np.arange(np.prod(node.dims())).reshape(node.dims()) % (accesses + 1)
            self.twin.introduce(node.name, counts, np.full((2, node.num_chunks), ratio))
        self.forget()
        if tell:
            assert self.twin.cache.known(node)

    @precondition(lambda self: self.published)
    @rule(data=st.data(), pattern=PATTERNS)
    def warm(self, data: st.DataObject, pattern: int) -> None:
        node = self.twin.nodes[self.published[self.draw_number(data)]]
        moves = self.twin.warm(chosen(node, pattern, 1.0))
        assert moves.promoted == 0

    @precondition(lambda self: self.published)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        del self.published[self.draw_number(data)]
        self.forget()

    @rule()
    def forget(self) -> None:
        done = self.twin.keep(*self.names)
        held = {name for names in self.pinned for name in names}
        assert done == held.issubset(self.names)

    @rule()
    def settle_nothing(self) -> None:
        assert self.twin.request([]) == Moves()

    @invariant()
    def the_tiers_hold_what_the_reference_holds(self) -> None:
        self.twin.compare()

    @invariant()
    def no_chunk_is_in_both_tiers(self) -> None:
        assert not self.twin.reference.device & self.twin.reference.host
