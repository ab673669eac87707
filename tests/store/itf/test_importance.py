"""Column sums, sets and thresholds against the plainest code that says the same."""

from __future__ import annotations

import itertools
import math
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from store.disk.sidecar import SketchData
from store.itf import importance
from store.itf.evidence import MAX_STRIDE, SAMPLED_TOKENS, Sketch, SketchPart
from store.itf.importance import agreement, column_sums, jaccard, keep_count, threshold, top_k
from store.itf.sketch import quantise, unpack
from store.stats import RunCounters
from store.types import KVShape

DIM = 8
#: name -> (KV heads, query heads of each)
HEADS = {"mha": (4, 1), "gqa": (2, 3), "mqa": (1, 4)}

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def tensors(
    kind: str = "gqa", n: int = 17, m: int = 5, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Tensors:
    """Queries [G * g, m, DIM], prefix keys [n, G, DIM], new keys [G, m, DIM]."""
    groups, per_group = HEADS[kind]
    generator = torch.Generator().manual_seed(seed)
    shapes = ((groups * per_group, m, DIM), (n, groups, DIM), (groups, m, DIM))
    q, k, k_new = (2 * torch.randn(shape, generator=generator) for shape in shapes)
    return q.to(dtype), k.to(dtype), k_new.to(dtype)


def naive_sums(
    q: torch.Tensor, k: torch.Tensor, k_new: torch.Tensor, scaling: float | None
) -> np.ndarray:
    """One query head and one query at a time, in float64."""
    queries, prefix, new = (part.double().numpy() for part in (q, k, k_new))
    n, groups = prefix.shape[:2]
    factor = queries.shape[2] ** -0.5 if scaling is None else scaling
    sums = np.zeros((groups, n))
    for head, rows in enumerate(queries):
        group = head // (len(queries) // groups)
        for i, row in enumerate(rows):
            visible = np.concatenate([prefix[:, group], new[group, : i + 1]])
            scores = visible @ row * factor
            weights = np.exp(scores - scores.max())
            sums[group] += (weights / weights.sum())[:n]
    return sums


def assert_sums(parts: Tensors, scaling: float | None = None) -> None:
    sums = column_sums(*parts, scaling)
    assert sums.dtype == torch.float32
    np.testing.assert_allclose(
        sums.double().numpy(), naive_sums(*parts, scaling), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize(("n", "m"), [(17, 5), (1, 1), (1, 6), (9, 1), (4, 30), (200, 3)])
def test_column_sums_equal_a_naive_softmax(kind: str, n: int, m: int) -> None:
    assert_sums(tensors(kind, n, m))


@pytest.mark.parametrize("scaling", [1.0, 0.05, DIM**-0.5])
def test_the_given_scaling_is_used(scaling: float) -> None:
    parts = tensors("mha")
    assert_sums(parts, scaling)
    default = torch.equal(column_sums(*parts, scaling), column_sums(*parts, None))
    assert default == (scaling == DIM**-0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_summed_in_float32(dtype: torch.dtype) -> None:
    assert_sums(tensors(n=60, m=11, dtype=dtype))


@pytest.mark.parametrize("rows", [0, 1, 3, 7])
def test_blocks_of_any_size_give_the_same_sums(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    parts = tensors(n=20, m=5)
    whole = column_sums(*parts, None)
    monkeypatch.setattr(importance, "BLOCK_BYTES", 4 * rows * (20 + 5))
    torch.testing.assert_close(column_sums(*parts, None), whole)
    assert_sums(parts)


def test_scores_far_beyond_what_exp_takes_stay_exact() -> None:
    # Whole numbers, so that float32 has every score exactly.
    q, k, k_new = (part.round() for part in tensors(n=12, m=4))
    parts = (q * 1000, k * 100, k_new * 100)
    assert float((parts[0] @ parts[2][0].t()).abs().max()) > 1e5
    assert_sums(parts, 1.0)
    assert torch.isfinite(column_sums(*parts, 1.0)).all()


def test_a_query_does_not_see_the_new_tokens_after_it() -> None:
    q, k, k_new = tensors(m=2)
    q = q.abs()
    k_new[:, 1] = 1e4  # takes all attention of whoever sees it: of the second query
    alone = column_sums(q[:, :1], k, k_new[:, :1], None)
    torch.testing.assert_close(column_sums(q, k, k_new, None), alone)


def test_what_the_new_tokens_do_not_get_goes_to_the_prefix() -> None:
    q, k, k_new = tensors("gqa", n=10, m=7)
    sums = column_sums(q, k, k_new, None)
    assert (sums >= 0).all()
    assert (sums.sum(1) < 3 * 7).all()
    sums = column_sums(q.abs(), k, torch.full_like(k_new, -1e4), None)
    torch.testing.assert_close(sums.sum(1), torch.full((2,), 21.0))


def test_inputs_that_are_views_of_another_layout_are_read_right() -> None:
    q, k, k_new = tensors("gqa")
    turned = (part.transpose(0, 1).contiguous().transpose(0, 1) for part in (q, k, k_new))
    torch.testing.assert_close(column_sums(*turned, None), column_sums(q, k, k_new, None))


def sampled_places(groups: int, per_group: int, m: int, stride: int) -> list[list[int]]:
    """[query head of the group, new token] of each sampled row; all groups sample alike."""
    places = torch.stack([torch.arange(per_group * m) // m, torch.arange(per_group * m) % m], 1)
    rows = places.float().expand(groups, -1, -1)
    taken, tokens = importance._sampled(rows, m, stride)
    assert all(torch.equal(taken[0], group) for group in taken)
    assert torch.equal(taken[0, :, 1].long(), tokens)
    return [[int(head), int(token)] for head, token in taken[0]]


@pytest.mark.parametrize("per_group", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("m", [1, 2, 5, 12, 30])
def test_every_new_token_is_seen_by_exactly_one_head_where_all_take_turns(
    per_group: int, m: int
) -> None:
    places = sampled_places(2, per_group, m, per_group)
    assert sorted(token for _, token in places) == list(range(m))
    # No head is asked more than once more often than another.
    turns = [sum(head == one for head, _ in places) for one in range(per_group)]
    assert max(turns) - min(turns) <= 1


@pytest.mark.parametrize(("per_group", "stride"), [(3, 2), (8, 4), (9, 4), (4, 3)])
def test_fewer_turns_than_heads_leave_no_new_token_and_no_head_out(
    per_group: int, stride: int
) -> None:
    m = 14
    places = sampled_places(1, per_group, m, stride)
    seen = [sum(token == one for _, token in places) for one in range(m)]
    # One in ``stride`` heads sees a token.
    assert set(seen) <= {per_group // stride, -(-per_group // stride)}
    assert {head for head, _ in places} == set(range(per_group))


@pytest.mark.parametrize("kind", HEADS)
def test_a_stride_of_one_gives_the_exact_sums(kind: str) -> None:
    parts = tensors(kind, n=40, m=17)
    assert torch.equal(column_sums(*parts, None, 1), column_sums(*parts, None))


def sums_of_places(parts: Tensors, stride: int) -> np.ndarray:
    """Sums over the rows (head + token) % stride == 0 alone, one by one in float64, scaled up."""
    q, k, k_new = parts
    n, groups = k.shape[:2]
    sums = np.zeros((groups, n))
    for head, i in itertools.product(range(len(q)), range(q.shape[1])):
        group, turn = divmod(head, len(q) // groups)
        if (turn + i) % stride == 0:
            before = torch.cat([k[:, group], k_new[group, :i]])[:, None]
            row, own = q[head : head + 1, i : i + 1], k_new[group : group + 1, i : i + 1]
            sums[group] += naive_sums(row, before, own, None)[0, :n]
    return stride * sums


@pytest.mark.parametrize(("kind", "stride"), [("gqa", 3), ("gqa", 2), ("mqa", 4), ("mqa", 3)])
@pytest.mark.parametrize("rows", [2, 5, 1000])
def test_a_sample_sees_what_its_own_tokens_see(
    monkeypatch: pytest.MonkeyPatch, kind: str, stride: int, rows: int
) -> None:
    parts = tensors(kind, n=20, m=9)
    monkeypatch.setattr(importance, "BLOCK_BYTES", 4 * rows * (20 + 9))
    found = column_sums(*parts, None, stride)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), sums_of_places(parts, stride), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "stride"), [("gqa", 3), ("mqa", 4)])
def test_heads_that_ask_the_same_are_estimated_without_an_error(kind: str, stride: int) -> None:
    q, k, k_new = tensors(kind, n=30, m=13)
    q = q[::stride].repeat_interleave(stride, 0)
    exact = column_sums(q, k, k_new, None)
    torch.testing.assert_close(column_sums(q, k, k_new, None, stride), exact)


@pytest.mark.parametrize(("kind", "stride"), [("gqa", 3), ("gqa", 2), ("mqa", 4)])
def test_an_estimate_is_as_large_as_the_exact_sums_on_average(kind: str, stride: int) -> None:
    exact, estimate = torch.zeros(2, 200, dtype=torch.float64)
    for seed in range(200):
        # 24 new tokens: as many rows of each head for every stride here.
        parts = tensors(kind, n=40, m=24, seed=seed)
        exact[seed] = column_sums(*parts, None).sum()
        estimate[seed] = column_sums(*parts, None, stride).sum()
    assert float((estimate / exact).mean()) == pytest.approx(1.0, abs=0.02)
    # And it is an estimate: no input gives the sums themselves.
    assert not torch.isclose(estimate, exact, rtol=1e-6).any()


@pytest.mark.parametrize(("kind", "stride"), [("gqa", 3), ("mqa", 4)])
def test_every_head_has_a_say_in_an_estimate(kind: str, stride: int) -> None:
    q, k, k_new = tensors(kind, n=30, m=stride)
    before = column_sums(q, k, k_new, None, stride)
    for head in range(len(q)):
        changed = q.clone()
        changed[head] *= -1
        after = column_sums(changed, k, k_new, None, stride)
        groups = (after != before).any(1)
        assert groups.nonzero().flatten().tolist() == [head // stride]


def sketch_of(k: torch.Tensor, sampled: bool) -> Sketch:
    """Evidence of one layer whose 4-bit sketch is in memory."""
    codes = quantise(k, 4)
    shape = KVShape(1, num_heads=k.shape[1], num_kv_heads=k.shape[1], head_dim=DIM, dtype="float32")
    arrays = [part[None].numpy() for part in (codes.code, codes.scale, codes.zero)]
    data: Future[SketchData] = Future()
    data.set_result(SketchData(*arrays, bytes=0, count=None))  # type: ignore[arg-type]
    part = SketchPart(data, len(k), 4, fresh=False)
    return Sketch([part], shape, RunCounters(), 1.0, sampled=sampled)


@pytest.mark.parametrize(
    ("kind", "m", "sampled", "stride"),
    [
        ("gqa", SAMPLED_TOKENS, True, 3),
        ("gqa", SAMPLED_TOKENS, False, 1),
        ("gqa", SAMPLED_TOKENS - 1, True, 1),
        ("mqa", 40, True, min(4, MAX_STRIDE)),
        ("mha", 40, True, 1),
    ],
)
def test_a_sketch_scores_a_sample_of_the_rows_only_where_there_are_enough(
    kind: str, m: int, sampled: bool, stride: int
) -> None:
    q, k, k_new = tensors(kind, n=70, m=m)
    unpacked = unpack(quantise(k, 4), 4)[: len(k)]
    expected = column_sums(q, unpacked, k_new, None, stride)
    torch.testing.assert_close(sketch_of(k, sampled).importance(0, q, k_new, None), expected)


@pytest.mark.parametrize(
    ("n", "retention", "expected"),
    [
        (30, 0.1, 3),  # the product is 3.0000000000000004
        (4096, 0.25, 1024),
        (4096, 0.1, 410),
        (2048, 0.1, 205),
        (100, 0.07, 7),
        (3, 0.5, 2),
        (1, 1e-12, 1),
        (10**6, 1e-9, 1),
        (5, 1.0, 5),
        (0, 0.5, 0),
        (0, 1.0, 0),
    ],
)
def test_the_number_of_kept_tokens_is_the_exact_product_rounded_up(
    n: int, retention: float, expected: int
) -> None:
    assert keep_count(n, retention) == expected


@given(n=st.integers(1, 10**5), percent=st.integers(1, 100))
def test_a_retention_in_percent_keeps_what_whole_numbers_say(n: int, percent: int) -> None:
    assert keep_count(n, percent / 100) == -(-n * percent // 100)


@given(
    n=st.integers(0, 10**5),
    retention=st.floats(0.0, 1.0, exclude_min=True, allow_subnormal=False),
)
def test_at_least_one_token_is_kept_and_never_more_than_there_are(n: int, retention: float) -> None:
    assert min(n, 1) <= keep_count(n, retention) <= n


@settings(deadline=None)
@given(
    rows=st.lists(
        st.lists(st.sampled_from([0.0, -0.0, 1.0, 2.5, 1e-30, math.inf]), min_size=9, max_size=9),
        min_size=1,
        max_size=3,
    ),
    k=st.integers(0, 12),
)
def test_top_k_takes_the_earlier_of_equal_tokens(rows: list[list[float]], k: int) -> None:
    found = top_k(torch.tensor(rows), k)
    assert found.dtype == torch.int64
    expected = [sorted(sorted(range(9), key=lambda at: (-row[at], at))[:k]) for row in rows]
    assert found.tolist() == expected


@pytest.mark.parametrize("k", [0, 1, 4, 5, 9])
def test_top_k_has_a_size_that_follows_from_k_alone(k: int) -> None:
    shape = (2, min(k, 5))
    for row in ([0.0] * 5, [math.nan] * 5, [math.nan, 1.0, math.nan, 2.0, -math.inf]):
        assert top_k(torch.tensor([row, row]), k).shape == shape
    assert top_k(torch.zeros(2, 0), k).shape == (2, 0)


def test_what_is_not_a_number_is_chosen_last() -> None:
    row = torch.tensor([[math.nan, 0.5, math.nan, 0.25, 1.0]])
    assert top_k(row, 3).tolist() == [[1, 3, 4]]
    assert top_k(row, 4).tolist() == [[0, 1, 3, 4]]
    assert row.isnan().sum() == 2  # the caller's tensor is as it was


def test_top_k_of_all_tokens_can_be_written_to() -> None:
    found = top_k(torch.zeros(2, 3), 3)
    found[0, 0] = 7
    assert found[1].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([], [], 1.0),
        ([1, 2], [], 0.0),
        ([1, 2, 3], [3, 2, 1], 1.0),
        ([1, 2], [3, 4], 0.0),
        ([1, 2, 3], [2, 3, 4], 0.5),
        ([1], [1, 2, 3, 4], 0.25),
    ],
)
def test_jaccard_is_what_two_sets_share(a: list[int], b: list[int], expected: float) -> None:
    left, right = np.array(a, dtype=np.int64), np.array(b, dtype=np.int64)
    assert jaccard(left, right) == expected
    assert jaccard(right, left) == expected


def as_sets(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64)


def test_a_single_set_has_nothing_to_agree_with() -> None:
    assert agreement(as_sets([0, 3]), 5) is None


def test_agreement_of_equal_disjoint_and_empty_sets() -> None:
    assert agreement(as_sets([0, 3], [0, 3], [0, 3]), 5) == 1.0
    assert agreement(as_sets([0, 1], [2, 3]), 5) == 0.0
    assert agreement(torch.zeros(3, 0, dtype=torch.int64), 5) == 1.0
    assert agreement(as_sets([0, 1], [0, 1], [2, 3]), 4) == pytest.approx(1 / 3)


@settings(deadline=None)
@given(sets=st.integers(2, 5), n=st.integers(1, 40), seed=st.integers(0, 999), data=st.data())
def test_agreement_is_the_mean_jaccard_of_all_pairs(
    sets: int, n: int, seed: int, data: st.DataObject
) -> None:
    k = data.draw(st.integers(0, n))
    generator = np.random.default_rng(seed)
    rows = [generator.choice(n, k, replace=False) for _ in range(sets)]
    pairs = [jaccard(a, b) for a, b in itertools.combinations(rows, 2)]
    found = agreement(torch.from_numpy(np.array(rows, dtype=np.int64).reshape(sets, k)), n)
    assert found == pytest.approx(np.mean(pairs))


@pytest.mark.parametrize("k", [1, 3, 10, 99])
def test_alpha_zero_asks_for_more_than_any_agreement(k: int) -> None:
    assert threshold(k, 100, 0.0) == 1.0  # J > t never holds


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, 2.0])
def test_keeping_everything_gives_one(alpha: float) -> None:
    assert threshold(7, 7, alpha) == 1.0
    assert threshold(0, 0, alpha) == 1.0


def test_a_larger_alpha_gives_a_lower_threshold() -> None:
    found = [threshold(25, 100, alpha) for alpha in (0.0, 0.3, 0.6, 1.0, 2.0, 50.0)]
    assert found == sorted(found, reverse=True)
    assert len(set(found)) == len(found)
    assert all(0.0 < one <= 1.0 for one in found)


def test_the_threshold_of_the_published_alpha() -> None:
    assert threshold(25, 100, 0.6) == pytest.approx((1 / 7) ** 0.6)
    assert threshold(10, 100, 0.6) == pytest.approx((1 / 19) ** 0.6)


def test_a_tiny_share_keeps_the_threshold_above_nothing() -> None:
    assert 0.0 < threshold(1, 10**7, 0.6) < 1e-4
    assert threshold(0, 100, 0.6) == 0.0


@pytest.mark.parametrize(("k", "n"), [(100, 1000), (250, 1000), (600, 1000)])
def test_at_alpha_one_it_is_the_agreement_of_random_sets(k: int, n: int) -> None:
    generator = torch.Generator().manual_seed(1)
    sets = top_k(torch.rand(30, n, generator=generator), k)
    assert agreement(sets, n) == pytest.approx(threshold(k, n, 1.0), rel=0.03)
