"""Hypothesis machine: the radix tree against a plain dict of token tuples.

The model knows no tree. ``ends`` maps the tuple of all tokens from the root to a node's end to
the position where that node starts; every answer is derived from it by scanning.
"""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from store.index.radix import Ids, PrefixMatch, PrefixNode, RadixTree, ids_digest, node_id

IDENTITY = "test-identity"
Tokens = tuple[int, ...]

# Few different tokens, so that sequences share beginnings; whole blocks, so that they also part
# after more than the 16 tokens the catalog keeps.
BLOCKS = st.sampled_from([(0,), (1,), (2, 1), (0,) * 7, (1,) * 16, (0, 1, 2) * 6, (2,) * 33])
SEQUENCES = st.lists(BLOCKS, min_size=1, max_size=6).map(lambda blocks: sum(blocks, ()))


def array(tokens: Tokens) -> Ids:
    return np.array(tokens, dtype=np.uint32)


def name_of(path: Tokens, start: int) -> str:
    return node_id(IDENTITY, array(path), start)


class Model:
    """What must be true, told from tuples alone."""

    def __init__(self) -> None:
        self.ends: dict[Tokens, int] = {}
        self.bad: set[Tokens] = set()

    def stored(self) -> set[Tokens]:
        return {end[:size] for end in self.ends for size in range(1, len(end) + 1)}

    def match(self, wanted: Tokens, ignore_quarantine: bool) -> tuple[int, str]:
        stored = self.stored()
        for size in range(len(wanted)):
            longer = wanted[: size + 1]
            if longer not in stored:
                goes_on = any(len(s) == size + 1 and s[:size] == wanted[:size] for s in stored)
                return size, "diverged" if goes_on else "end_of_tree"
            if longer in self.bad and not ignore_quarantine:
                return size, "quarantined"
        return len(wanted), "complete"

    def node_around(self, path: Tokens) -> Tokens | None:
        """End of the node that ``path`` stops inside of; None when it stops between nodes."""
        inside = [
            end
            for end, start in self.ends.items()
            if start < len(path) < len(end) and end[: len(path)] == path
        ]
        assert len(inside) <= 1
        return inside[0] if inside else None

    def split(self, end: Tokens, at: int) -> None:
        start = self.ends[end]
        if any(len(bad) <= at for bad in self.bad_within(end)):
            self.bad.add(end[: at + 1])
        self.ends[end[:at]], self.ends[end] = start, at

    def bad_within(self, end: Tokens) -> set[Tokens]:
        return {end[:size] for size in range(self.ends[end] + 1, len(end) + 1)} & self.bad

    def leaves(self) -> list[Tokens]:
        return sorted(
            end
            for end in self.ends
            if not any(other[: len(end)] == end for other in self.ends if other != end)
        )


class RadixMachine(RuleBasedStateMachine):
    """Insert, match, remove and quarantine in any order."""

    left_nodes: Bundle[tuple[PrefixNode, Tokens]] = Bundle("left_nodes")

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.files: dict[str, Ids] = {}
        # Room for a few nodes only, so that ids are dropped and loaded again.
        self.tree = RadixTree(lambda node: self.files[node.node_id], cache_bytes=600)

    def insert_tail(self, tokens: Tokens, match: PrefixMatch) -> None:
        start = match.matched_len
        own, name = array(tokens[start:]), name_of(tokens, start)
        parent = match.nodes[-1].node.node_id if match.nodes else None
        self.files[name] = own
        self.tree.add(name, parent, start, len(own), own[:16], ids_digest(own), 0)
        self.model.ends[tokens] = start

    def split_at(self, match: PrefixMatch) -> tuple[PrefixNode, Tokens]:
        old, at = match.nodes[-1].node, match.matched_len
        path = tuple(self.tree.path_ids(old).tolist())
        ids = self.files[old.node_id]
        upper_id, lower_id = name_of(path[:at], old.start), name_of(path, at)
        self.files[upper_id], self.files[lower_id] = ids[: at - old.start], ids[at - old.start :]
        upper, lower = self.tree.split(old.node_id, at, upper_id, lower_id, lower_generation=3)
        assert (upper.end, lower.start, lower.generation) == (at, at, 3)
        assert old.node_id not in self.tree
        return old, path

    @rule(target=left_nodes, tokens=SEQUENCES)
    def insert(self, tokens: Tokens) -> tuple[PrefixNode, Tokens]:
        return self.insert_tokens(tokens)

    def insert_tokens(self, tokens: Tokens) -> tuple[PrefixNode, Tokens]:
        """Insert as the engine does; gives a node that is held on to, and all its tokens."""
        match = self.tree.match(array(tokens), ignore_quarantine=True)
        around = self.model.node_around(tokens[: match.matched_len])
        halfway = bool(match.nodes) and match.nodes[-1].used < match.nodes[-1].node.length
        assert halfway == (around is not None)
        left = None
        if around is not None:
            left = self.split_at(match)
            self.model.split(around, match.matched_len)
            match = self.tree.match(array(tokens), ignore_quarantine=True)
        if match.matched_len < len(tokens):
            self.insert_tail(tokens, match)
        return left or (self.tree.match(tokens, ignore_quarantine=True).nodes[-1].node, tokens)

    @rule(data=st.data(), tail=st.lists(st.integers(0, 3), max_size=3))
    def insert_beside_a_stored_node(self, data: st.DataObject, tail: list[int]) -> None:
        if self.model.ends:
            path = data.draw(st.sampled_from(sorted(self.model.ends)))
            size = data.draw(st.integers(1, len(path)))
            self.insert_tokens(path[:size] + tuple(tail))

    @rule(tokens=SEQUENCES, ignore=st.booleans())
    def match_any_sequence(self, tokens: Tokens, ignore: bool) -> None:
        self.check_match(tokens, ignore)

    @rule(data=st.data(), tail=st.lists(st.integers(0, 3), max_size=3))
    def match_halfway_into_a_node(self, data: st.DataObject, tail: list[int]) -> None:
        if self.model.ends:
            path = data.draw(st.sampled_from(sorted(self.model.ends)))
            size = data.draw(st.integers(0, len(path)))
            self.check_match(path[:size] + tuple(tail), ignore=False)

    @rule(data=st.data())
    def remove_a_leaf(self, data: st.DataObject) -> None:
        if self.model.ends:
            leaf = data.draw(st.sampled_from(self.model.leaves()))
            self.model.bad -= self.model.bad_within(leaf)
            self.tree.remove(name_of(leaf, self.model.ends.pop(leaf)))

    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        if self.model.ends:
            end = data.draw(st.sampled_from(sorted(self.model.ends)))
            start = self.model.ends[end]
            first_bad = data.draw(st.integers(start, len(end) - 1))
            self.tree.quarantine(name_of(end, start), first_bad)
            self.model.bad.add(end[: first_bad + 1])

    @rule(data=st.data())
    def clear_quarantine(self, data: st.DataObject) -> None:
        if self.model.ends:
            end = data.draw(st.sampled_from(sorted(self.model.ends)))
            self.tree.clear_quarantine(name_of(end, self.model.ends[end]))
            self.model.bad -= self.model.bad_within(end)

    @rule(held=consumes(left_nodes))
    def a_held_node_keeps_its_facts(self, held: tuple[PrefixNode, Tokens]) -> None:
        node, path = held
        assert tuple(self.tree.path_ids(node).tolist()) == path[: node.end]
        steps = self.tree.path(node)
        assert [step.start for step in steps] == [0] + [step.end for step in steps[:-1]]

    def check_match(self, tokens: Tokens, ignore: bool) -> None:
        match = self.tree.match(array(tokens), ignore_quarantine=ignore)
        assert (match.matched_len, match.stop) == self.model.match(tokens, ignore)
        assert sum(used for _, used in match.nodes) == match.matched_len
        assert all(used >= 1 for _, used in match.nodes)
        assert all(used == node.length for node, used in match.nodes[:-1])
        taken = [self.files[node.node_id][:used] for node, used in match.nodes]
        together = np.concatenate([array(()), *taken]).tolist()
        assert tuple(together) == tokens[: match.matched_len]

    @invariant()
    def the_tree_is_sound_and_holds_what_the_model_holds(self) -> None:
        self.tree.check_integrity()
        nodes = list(self.tree.nodes())
        assert len(nodes) == len(self.tree)
        held = {
            tuple(np.concatenate([self.files[s.node_id] for s in self.tree.path(n)]).tolist()): n
            for n in nodes
        }
        assert {path: node.start for path, node in held.items()} == self.model.ends
        assert all(name_of(path, node.start) == node.node_id for path, node in held.items())
