from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

from store.errors import CatalogError, ChunkLoadError, InvalidValueError, PrefixNotFoundError
from store.index.radix import (
    Ids,
    PrefixNode,
    RadixTree,
    as_ids,
    ids_digest,
    node_id,
    pack_ids,
    unpack_ids,
)
from store.index.rows import NodeRow
from tests.store.index.radix_machine import RadixMachine

TestRadixMachine = RadixMachine.TestCase
TestRadixMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)

GOLDEN = [
    (node_id("ident", np.array([1, 2, 3], np.uint32), 0), "ff7f516fd182ed5637b3"),
    (node_id("ident", np.array([1, 2, 3], np.uint32), 2), "65cdf7e9e15e7c17fb34"),
    (ids_digest(np.array([1, 2, 70000], np.uint32)), "64add97e97a8e23d60a4ea405258b5c1"),
]


def ids(*values: int) -> Ids:
    return np.array(values, dtype=np.uint32)


class Files:
    """Token files that count how often they are read and can be made to fail."""

    def __init__(self) -> None:
        self.ids: dict[str, Ids] = {}
        self.loads: list[str] = []
        self.broken: set[str] = set()

    def load(self, node: PrefixNode) -> Ids:
        self.loads.append(node.node_id)
        if node.node_id in self.broken:
            raise ChunkLoadError(node.node_id, "tokens", -1, -1, node.start, "missing")
        return self.ids[node.node_id]

    def add(self, tree: RadixTree, name: str, parent: str | None, start: int, own: Ids) -> None:
        self.ids[name] = own
        tree.add(name, parent, start, len(own), own[:16], ids_digest(own), 0)


@pytest.fixture
def files() -> Files:
    return Files()


@pytest.fixture
def tree(files: Files) -> RadixTree:
    """Node a holds tokens 0-99; b and c follow it and part at their first token."""
    tree = RadixTree(files.load)
    files.add(tree, "a", None, 0, np.arange(100, dtype=np.uint32))
    files.add(tree, "b", "a", 100, np.arange(500, 540, dtype=np.uint32))
    files.add(tree, "c", "a", 100, np.arange(600, 640, dtype=np.uint32))
    return tree


def row(name: str, parent: str | None, start: int, own: Ids) -> NodeRow:
    return NodeRow(name, parent, start, len(own), pack_ids(own[:16]), ids_digest(own), 0, "", 0)


@pytest.mark.parametrize(("found", "expected"), GOLDEN)
def test_ids_have_their_golden_values(found: str, expected: str) -> None:
    assert found == expected


@pytest.mark.parametrize("seed", ["1", "77"])
def test_another_process_with_another_hash_seed_makes_the_same_ids(seed: str) -> None:
    program = (
        "import tests.store.index.test_radix as t, numpy as np;"
        "print(*[found for found, _ in t.GOLDEN])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [expected for _, expected in GOLDEN]


def test_a_prompt_that_parts_within_the_first_ids_reads_no_token_file(
    tree: RadixTree, files: Files
) -> None:
    match = tree.match(np.r_[np.arange(9), 77777])
    assert (match.matched_len, match.stop, files.loads) == (9, "diverged", [])


def test_a_prompt_that_ends_within_the_first_ids_reads_no_token_file(
    tree: RadixTree, files: Files
) -> None:
    match = tree.match(np.arange(16))
    assert (match.matched_len, match.stop, files.loads) == (16, "complete", [])


def test_a_match_reads_each_token_file_on_its_way_once_and_no_other(
    tree: RadixTree, files: Files
) -> None:
    prompt = np.r_[np.arange(100), np.arange(600, 640), 1]
    match = tree.match(prompt)
    assert [node.node_id for node, _ in match.nodes] == ["a", "c"]
    assert (match.matched_len, match.stop) == (140, "end_of_tree")
    tree.match(prompt)
    assert files.loads == ["a", "c"]


def test_equal_first_ids_are_not_taken_for_equal_nodes(tree: RadixTree) -> None:
    match = tree.match(np.r_[np.arange(60), 5, np.arange(61, 100)])
    assert (match.matched_len, match.stop) == (60, "diverged")
    assert match.nodes[-1].used == 60


def test_a_token_file_that_belongs_to_other_tokens_is_a_miss_and_not_a_hit(
    tree: RadixTree, files: Files
) -> None:
    prompt = np.arange(100, dtype=np.uint32)
    prompt[50] = 4
    files.ids["a"] = prompt
    match = tree.match(prompt)
    assert (match.nodes, match.matched_len, match.stop) == ((), 0, "unreadable")
    assert match.error is not None
    assert (match.error.node_id, match.error.reason) == ("a", "corrupt")


def test_a_match_stops_before_a_node_whose_tokens_cant_be_read(
    tree: RadixTree, files: Files
) -> None:
    files.broken.add("b")
    match = tree.match(np.r_[np.arange(100), np.arange(500, 540)])
    assert (match.matched_len, match.stop) == (100, "unreadable")
    assert match.error is not None
    assert match.error.node_id == "b"


def test_a_node_quarantined_from_its_start_is_no_part_of_a_match(
    tree: RadixTree, files: Files
) -> None:
    tree.quarantine("b", 100)
    prompt = np.r_[np.arange(100), np.arange(500, 540)]
    match = tree.match(prompt)
    assert [node.node_id for node, _ in match.nodes] == ["a"]
    assert (match.matched_len, match.stop) == (100, "quarantined")
    assert files.loads == ["a"]
    assert tree.match(prompt, ignore_quarantine=True).matched_len == 140


def test_the_lowest_quarantined_position_counts(tree: RadixTree) -> None:
    for position in (30, 20, 25, 200):
        tree.quarantine("a", position)
    assert tree.match(np.arange(100)).matched_len == 20


def test_a_split_that_cant_read_the_tokens_changes_nothing(tree: RadixTree, files: Files) -> None:
    files.broken.add("a")
    with pytest.raises(ChunkLoadError):
        tree.split("a", 50, "upper", "lower")
    tree.check_integrity()
    assert [node.node_id for node in tree.nodes()] == ["a", "b", "c"]


def test_a_node_that_was_split_stays_usable_for_who_holds_it(tree: RadixTree, files: Files) -> None:
    held = tree.match(np.r_[np.arange(100), np.arange(500, 540)])
    tree.split("a", 50, "upper", "lower")
    a, b = (node for node, _ in held.nodes)
    assert (a.start, a.end, sorted(a.children)) == (0, 100, [500, 600])
    assert tree.ids_of(a).tolist() == list(range(100))
    assert [step.node_id for step in tree.path(b)] == ["upper", "lower", "b"]
    assert tree.path_ids(b).tolist() == [*range(100), *range(500, 540)]


@pytest.mark.parametrize(
    ("bad_from", "upper_bad_from", "lower_bad_from"),
    [(30, 30, 50), (50, None, 50), (70, None, 70), (None, None, None)],
)
def test_a_split_keeps_everything_quarantined_that_was(
    tree: RadixTree, bad_from: int | None, upper_bad_from: int | None, lower_bad_from: int | None
) -> None:
    if bad_from is not None:
        tree.quarantine("a", bad_from)
    upper, lower = tree.split("a", 50, "upper", "lower")
    assert (upper.bad_from, lower.bad_from) == (upper_bad_from, lower_bad_from)
    tree.check_integrity()


@pytest.mark.parametrize("at", [0, 100, 140])
def test_a_split_outside_the_node_is_refused(tree: RadixTree, at: int) -> None:
    with pytest.raises(InvalidValueError, match="from 1 to 99"):
        tree.split("a", at, "upper", "lower")


def test_only_leaves_can_be_removed(tree: RadixTree) -> None:
    with pytest.raises(InvalidValueError, match="2 children"):
        tree.remove("a")
    tree.remove("b")
    assert tree.match(np.r_[np.arange(100), 500]).matched_len == 100
    with pytest.raises(PrefixNotFoundError, match="'b'"):
        tree.get("b")


def test_cached_ids_stay_within_their_bytes_and_dropped_ids_are_read_again(files: Files) -> None:
    tree = RadixTree(files.load, cache_bytes=1000)
    for first in (1000, 2000, 3000):
        files.add(tree, str(first), None, 0, np.arange(first, first + 120, dtype=np.uint32))
    for first in (1000, 2000, 1000, 3000, 1000, 2000):
        assert tree.match(np.arange(first, first + 120)).matched_len == 120
        tree.check_integrity()
    assert files.loads == ["1000", "2000", "3000", "2000"]


def test_a_node_larger_than_the_cache_is_matched_and_not_kept(files: Files) -> None:
    tree = RadixTree(files.load, cache_bytes=100)
    files.add(tree, "a", None, 0, np.arange(120, dtype=np.uint32))
    assert tree.match(np.arange(120)).matched_len == 120
    assert tree.get("a").ids is None
    tree.check_integrity()


ROWS = [
    row("a", None, 0, np.arange(20, dtype=np.uint32)),
    row("b", "a", 20, ids(7)),
    row("c", "a", 20, ids(8, 9)),
    row("d", "c", 22, ids(7)),
]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_rows_may_come_in_any_order(files: Files, order: tuple[int, ...]) -> None:
    tree = RadixTree.from_rows([ROWS[index] for index in order], files.load)
    assert [node.node_id for node in tree.nodes()] == ["a", "b", "c", "d"]
    assert tree.orphans == []
    tree.check_integrity()


@pytest.mark.parametrize(
    ("rows", "orphans"),
    [
        ([ROWS[0], ROWS[3], row("e", "d", 23, ids(1))], ["d", "e"]),  # c is missing
        ([ROWS[0], ROWS[1]._replace(start=21)], ["b"]),  # a gap
        ([ROWS[0], ROWS[1], row("z", "a", 20, ids(7, 1))], ["z"]),  # same place as b
        ([ROWS[0], ROWS[1]._replace(parent_id="b")], ["b"]),  # its own parent
        ([ROWS[0], ROWS[2]._replace(first_ids=b"\x01\x02\x03")], ["c"]),  # cut bytes
        ([ROWS[0], ROWS[2]._replace(length=0, first_ids=b"")], ["c"]),  # empty
    ],
)
def test_rows_without_a_place_are_reported_and_the_rest_is_usable(
    files: Files, rows: list[NodeRow], orphans: list[str]
) -> None:
    tree = RadixTree.from_rows(rows[::-1], files.load)
    assert tree.orphans == orphans
    assert {node.node_id for node in tree.nodes()} == {r.node_id for r in rows} - set(orphans)
    tree.check_integrity()


def test_integrity_names_what_is_broken(tree: RadixTree) -> None:
    tree.get("b").start = 90
    with pytest.raises(CatalogError, match=r"1 problems, first: node b: it starts at 90"):
        tree.check_integrity()


def test_ids_survive_packing(tree: RadixTree) -> None:
    values = ids(0, 1, 2**32 - 1)
    assert pack_ids(values) == b"\0\0\0\0\1\0\0\0\xff\xff\xff\xff"
    assert unpack_ids(pack_ids(values)).tolist() == values.tolist()


@pytest.mark.parametrize("bad", [[-1], [2**32], [[1, 2]], [0.5], ["a"]])
def test_values_that_are_no_token_ids_are_refused(bad: list[object]) -> None:
    with pytest.raises(InvalidValueError):
        as_ids(bad)  # type: ignore[arg-type]


def test_an_empty_prompt_matches_nothing_and_is_complete(tree: RadixTree) -> None:
    match = tree.match([])
    assert (match.nodes, match.matched_len, match.stop) == ((), 0, "complete")
