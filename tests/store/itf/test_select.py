"""Selection: the paper's worked example, agreement and fallback, chunks and ranges."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from store.itf.options import SparseOptions
from store.itf.select import (
    choose,
    choose_by_probes,
    plan_part,
    vectors_loaded,
)


@dataclass(frozen=True)
class Part:
    start: int
    used: int
    chunk_tokens: int = 16
    tokens: int = 0
    order: np.ndarray | None = None

    @property
    def stored(self) -> int:
        return self.used if self.order is None else self.tokens

    def rows(self, _layer: int) -> np.ndarray | None:
        return self.order


def never() -> torch.Tensor:
    raise AssertionError("all keys were asked for")


def alike(heads: int, tokens: int, best: int) -> torch.Tensor:
    """Heads that find the same token most important."""
    importance = torch.rand(heads, tokens, generator=torch.Generator().manual_seed(0))
    importance[:, best] += 5.0
    return importance


def test_the_papers_example_loads_76_vectors_with_probes_and_160_without():
    # 4 prefix tokens, 1 of them important, 32 heads, 3 probe heads.
    importance = alike(32, 4, best=2)
    options = SparseOptions(retention=0.25)
    choice = choose_by_probes(importance[:3], 1, options, never)
    assert choice.sets.tolist() == [[2]]
    assert choice.jaccard == 1.0
    assert vectors_loaded(choice, n=4, kv_heads=32, probe_heads=3) == 76
    always = SparseOptions(retention=0.25, fallback="always")
    without = choose_by_probes(importance[:0], 1, always, lambda: importance)
    assert without.sets.tolist() == [[2]] * 32
    assert vectors_loaded(without, n=4, kv_heads=32, probe_heads=0) == 160


def test_probes_that_disagree_read_all_keys_and_choose_per_head():
    probes = torch.eye(3, 30)
    every = torch.eye(8, 30)
    choice = choose_by_probes(probes, 1, SparseOptions(retention=0.1), lambda: every)
    assert choice.fell_back
    assert choice.jaccard == 0.0
    assert choice.sets.tolist() == [[head] for head in range(8)]


def test_fallback_can_be_forbidden_and_forced():
    probes = torch.eye(3, 30)
    choice = choose_by_probes(probes, 1, SparseOptions(fallback="never"), never)
    assert not choice.fell_back
    assert choice.sets.shape == (1, 1)
    agreed = alike(3, 30, best=7)
    forced = choose_by_probes(agreed, 1, SparseOptions(fallback="always"), lambda: agreed)
    assert forced.fell_back
    assert forced.jaccard == 1.0


def test_alpha_zero_always_falls_back_because_nothing_exceeds_one():
    agreed = alike(3, 30, best=7)
    choice = choose_by_probes(agreed, 1, SparseOptions(alpha=0.0), lambda: agreed)
    assert choice.threshold == 1.0
    assert choice.fell_back


def test_a_fixed_threshold_replaces_the_formula():
    # Two of three probes share their set: the mean Jaccard is 1/3.
    probes = torch.eye(3, 30)
    probes[1] = probes[0]
    below = choose_by_probes(probes, 1, SparseOptions(threshold=0.3), never)
    assert below.jaccard == pytest.approx(1 / 3)
    assert not below.fell_back
    above = choose_by_probes(probes, 1, SparseOptions(threshold=0.4), lambda: probes)
    assert above.threshold == 0.4
    assert above.fell_back


def test_a_single_probe_has_no_agreement_and_no_fallback_of_its_own():
    choice = choose_by_probes(alike(1, 30, best=3), 1, SparseOptions(alpha=0.0), never)
    assert choice.jaccard is None
    assert choice.threshold is None
    assert not choice.fell_back
    forced = choose_by_probes(torch.eye(1, 30), 1, SparseOptions(fallback="always"), never_no_more)
    assert forced.fell_back


def never_no_more() -> torch.Tensor:
    return torch.eye(2, 30)


def test_one_set_takes_the_sum_and_per_head_sets_their_own():
    importance = torch.tensor([[0.0, 3.0, 0.0, 2.0], [4.0, 0.0, 0.0, 3.0]])
    assert choose(importance, 1, SparseOptions()).sets.tolist() == [[3]]
    each = choose(importance, 1, SparseOptions(sets="per-head"))
    assert each.sets.tolist() == [[1], [0]]


@given(
    st.integers(0, 40),
    st.integers(1, 120),
    st.sampled_from([16, 32]),
    st.randoms(use_true_random=False),
)
def test_a_plan_holds_every_selected_token_and_says_where_each_row_comes_from(
    start, used, size, random
):
    part = Part(start, used, size)
    chosen = sorted(random.sample(range(start + used + 10), random.randint(0, used)))
    plan = plan_part(np.array(chosen, dtype=np.int64), part, 0)
    own = {t for t in chosen if start <= t < start + used}
    chunks = plan.chunks.tolist()
    expected = [
        start + chunk * size + i for chunk in chunks for i in range(size) if chunk * size + i < used
    ]
    assert plan.tokens.tolist() == expected
    assert plan.arriving == len(expected)
    assert plan.places is None
    assert own <= set(expected)
    assert plan.wanted.sum() == len({(t - start) // size for t in own})
    assert len(chunks) == plan.wanted.sum()


@given(
    st.integers(0, 40),
    st.integers(1, 120),
    st.integers(0, 60),
    st.sampled_from([16, 32]),
    st.randoms(use_true_random=False),
)
def test_a_plan_of_a_reordered_node_says_which_rows_are_its_own(start, used, beyond, size, random):
    n = used + beyond
    token_at = random.sample(range(n), n)
    stored = np.empty(n, dtype=np.int32)
    stored[token_at] = np.arange(n)
    chosen = sorted(random.sample(range(start + used + 10), random.randint(0, used)))
    plan = plan_part(np.array(chosen, dtype=np.int64), Part(start, used, size, n, stored), 0)
    own = {t - start for t in chosen if start <= t < start + used}
    rows = [c * size + i for c in plan.chunks.tolist() for i in range(size) if c * size + i < n]
    assert plan.arriving == len(rows)
    assert plan.wanted.sum() == len({stored[t] // size for t in own})
    places = range(plan.arriving) if plan.places is None else plan.places.tolist()
    assert plan.tokens.tolist() == [start + token_at[rows[place]] for place in places]
    assert sorted(plan.tokens - start) == sorted(token_at[r] for r in rows if token_at[r] < used)
    assert own <= set((plan.tokens - start).tolist())
