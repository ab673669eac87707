"""An index of 20 000 nodes. What is asserted is counted work; times are for a benchmark."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from store.index.catalog import Catalog, NodeRow
from store.index.radix import Ids, PrefixNode, RadixTree, ids_digest, pack_ids

NODES = 20_000
PROMPT_TOKENS = 4_096


class SyntheticIndex:
    """Rows of a random tree with nodes of 64 to 4 096 tokens; the tokens are made when asked for.

    Node i begins with token i, so siblings differ there; no prefix is longer than 16 384 tokens.
    """

    def __init__(self, nodes: int = NODES, seed: int = 0) -> None:
        generator = np.random.default_rng(seed)
        self.loads = 0
        self.lengths = np.exp2(generator.uniform(6, 12, nodes)).astype(int)
        self.parents = np.full(nodes, -1)
        self.ends = self.lengths.copy()
        for index in range(1, nodes):
            parent = int(generator.integers(index))
            if generator.random() < 0.9 and self.ends[parent] + self.lengths[index] <= 16_384:
                self.parents[index] = parent
                self.ends[index] += self.ends[parent]

    def ids(self, index: int) -> Ids:
        own = np.random.default_rng(index).integers(49_152, size=self.lengths[index])
        own[0] = index
        return own.astype(np.uint32)

    def load(self, node: PrefixNode) -> Ids:
        self.loads += 1
        return self.ids(int(node.node_id, 16))

    def row(self, index: int) -> NodeRow:
        own, parent = self.ids(index), int(self.parents[index])
        return NodeRow(
            f"{index:020x}",
            None if parent < 0 else f"{parent:020x}",
            int(self.ends[index] - self.lengths[index]),
            int(self.lengths[index]),
            pack_ids(own[:16]),
            ids_digest(own),
            0,
            "0" * 32,
            int(self.lengths[index]) * 23_040,
        )

    def rows(self) -> list[NodeRow]:
        return [self.row(index) for index in range(len(self.lengths))]

    def path(self, index: int) -> list[int]:
        path = [index]
        while self.parents[path[-1]] >= 0:
            path.append(int(self.parents[path[-1]]))
        return path[::-1]

    def long_path(self) -> list[int]:
        """The path with most nodes among those that hold a whole prompt."""
        deep = np.flatnonzero(self.ends >= PROMPT_TOKENS)
        return max((self.path(int(index)) for index in deep), key=len)

    def prompt(self, path: list[int]) -> Ids:
        return np.concatenate([self.ids(index) for index in path])[:PROMPT_TOKENS]


@pytest.fixture(scope="module")
def index() -> SyntheticIndex:
    return SyntheticIndex()


@pytest.fixture(scope="module")
def catalog_path(index: SyntheticIndex, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scale") / "catalog.sqlite"
    with (
        Catalog.open(path, readonly=False, create=True) as catalog,
        catalog.transaction() as txn,
    ):
        txn.put_nodes(index.rows())
    return path


@pytest.fixture
def tree(index: SyntheticIndex, catalog_path: Path) -> RadixTree:
    index.loads = 0
    with Catalog.open(catalog_path, readonly=True) as catalog:
        return RadixTree.from_rows(catalog.nodes(), index.load)


def test_opening_twenty_thousand_nodes_reads_no_token_file(
    tree: RadixTree, index: SyntheticIndex
) -> None:
    assert (len(tree), tree.orphans, index.loads) == (NODES, [], 0)
    tree.check_integrity()


def test_a_long_match_loads_the_nodes_on_its_path_once(
    tree: RadixTree, index: SyntheticIndex
) -> None:
    path = index.long_path()
    prompt = index.prompt(path)
    match = tree.match(prompt)
    assert (match.matched_len, match.stop) == (PROMPT_TOKENS, "complete")
    met = [int(node.node_id, 16) for node, _ in match.nodes]
    assert met == path[: len(met)]
    assert len(met) >= 5
    assert index.loads == len(met)
    tree.match(prompt)
    assert index.loads == len(met)


def test_a_prompt_that_only_begins_like_a_node_loads_nothing(
    tree: RadixTree, index: SyntheticIndex
) -> None:
    prompt = index.prompt(index.long_path())
    prompt[3] += 1
    assert tree.match(prompt).matched_len == 3
    assert index.loads == 0


def test_sixty_four_short_nodes_in_a_row_are_matched_with_one_load_each() -> None:
    index = SyntheticIndex(nodes=64)
    index.lengths[:] = 64
    index.ends = 64 * np.arange(1, 65)
    index.parents = np.arange(-1, 63)
    tree = RadixTree.from_rows(index.rows(), index.load)
    match = tree.match(index.prompt(list(range(64))))
    assert (match.matched_len, len(match.nodes), index.loads) == (PROMPT_TOKENS, 64, 64)
