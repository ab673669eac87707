"""Divergence, likelihood, recall and chunk shares against plain, independent computations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from pipelines import fidelity_measure
from pipelines.fidelity_measure import compare, mean_nll, recall
from pipelines.similarity_rows import chunk_share, head_sums, layer_row, mean_row
from store.itf.importance import column_sums, threshold


def logits_of(rows: int, vocab: int = 11, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def naive_kl(reference: list[float], other: list[float]) -> float:
    p = np.exp(np.array(reference) - max(reference))
    q = np.exp(np.array(other) - max(other))
    p, q = p / p.sum(), q / q.sum()
    return float((p * (np.log(p) - np.log(q))).sum())


def test_divergence_is_the_mean_over_positions():
    full, sparse = logits_of(5), logits_of(5, seed=1)
    pairs = list(zip(full.double().tolist(), sparse.double().tolist(), strict=True))
    found = compare(full, sparse)
    assert found.kl == pytest.approx(np.mean([naive_kl(a, b) for a, b in pairs]))
    assert found.top1 == np.mean([np.argmax(a) == np.argmax(b) for a, b in pairs])


def test_equal_logits_diverge_by_exactly_nothing():
    full = logits_of(7)
    assert compare(full, full.clone()) == (0.0, 1.0)
    # A constant is no difference in distribution, and never a negative divergence.
    assert 0.0 <= compare(full, full + 1000.0).kl < 1e-6


def test_extreme_logits_give_finite_figures():
    found = compare(torch.tensor([[1e4, -1e4]]), torch.tensor([[-1e4, 1e4]]))
    assert found == (pytest.approx(2e4), 0.0)


@pytest.mark.parametrize("rows", [1, 2, 9])
def test_blocks_of_positions_change_nothing(rows: int, monkeypatch: pytest.MonkeyPatch):
    full, sparse = logits_of(rows), logits_of(rows, seed=1)
    ids = np.arange(rows, dtype=np.uint32)
    whole = compare(full, sparse), mean_nll(full, ids)
    monkeypatch.setattr(fidelity_measure, "BLOCK_BYTES", 1)
    assert compare(full, sparse) == pytest.approx(whole[0])
    assert mean_nll(full, ids) == pytest.approx(whole[1])


def test_likelihood_is_of_the_token_after_each_position():
    logits, ids = logits_of(4), np.array([9, 2, 5, 7], np.uint32)
    expected = -np.mean([
        math.log(torch.softmax(logits[i].double(), -1)[int(ids[i + 1])]) for i in range(3)
    ])  # fmt: skip
    assert mean_nll(logits, ids) == pytest.approx(expected)
    assert mean_nll(logits[:1], ids[:1]) is None


def test_recall_compares_with_the_oracle_of_as_many_sets():
    # Head 0 wants 0 and 1, head 1 wants 4 and 5, together they want 0 and 4.
    sums = torch.tensor([[9.0, 3, 0, 0, 2, 0], [1, 0, 0, 0, 9, 3]])
    one, per_head = np.array([[0, 3]]), np.array([[0, 1], [2, 4]])
    assert recall([one], [sums]) == 0.5
    assert recall([per_head], [sums]) == 0.75
    assert recall([one, per_head], [sums, sums]) == pytest.approx((0.5 + 0.75) / 2)
    assert recall([np.zeros((1, 0), np.int64)], [sums]) == 1.0


def test_every_query_head_is_summed_with_the_keys_it_shares():
    generator = torch.Generator().manual_seed(3)
    q, keys = (
        torch.randn(4, 5, 8, generator=generator),
        torch.randn(12, 2, 8, generator=generator),
    )
    k_new = torch.randn(2, 5, 8, generator=generator)
    sums = head_sums(q, keys, k_new, 0.3)
    for head in range(4):
        own = slice(head // 2, head // 2 + 1)
        alone = column_sums(q[head : head + 1], keys[:, own], k_new[own], 0.3)
        torch.testing.assert_close(sums[head : head + 1], alone)
    torch.testing.assert_close(sums.view(2, 2, -1).sum(1), column_sums(q, keys, k_new, 0.3))


def test_one_layer_says_how_alike_heads_choose():
    # KV head 0: query heads agree fully; KV head 1: they share one of two tokens.
    sums = torch.zeros(4, 10)
    for head, (a, b) in enumerate([(0, 1), (0, 1), (0, 2), (0, 3)]):
        sums[head, a], sums[head, b] = 5.0, 1.0 + head
    row = layer_row(7, 0.2, sums, 2, [(0, 10)], 0.6, [4])
    assert (row.layer, row.n) == (7, 1)
    assert row.jaccard_within == pytest.approx((1 + 1 / 3) / 2)
    # Pairs of query heads: one equal, five that share token 0 alone.
    assert row.jaccard_heads == pytest.approx((1 + 5 / 3) / 6)
    assert row.jaccard_kv_heads == pytest.approx(1 / 3)
    assert row.threshold == threshold(2, 10, 0.6)
    assert row.random == pytest.approx(0.2 / 1.8)
    assert row.above_ratio == float(row.threshold < 1 / 3)
    # All heads together want tokens 0 and 3, in the first chunk of 4, 4 and 2 tokens.
    assert row.chunks == ((4, 0.5, 1 / 3),)


def test_a_single_head_has_nothing_to_agree_with():
    row = layer_row(0, 0.5, torch.rand(1, 6), 1, [(0, 6)], 0.6, [16])
    assert (row.jaccard_heads, row.jaccard_kv_heads, row.jaccard_within) == (None, None, None)
    assert row.above_ratio is None
    assert mean_row(None, [row, row], 1).jaccard_heads is None


def test_chunks_begin_anew_in_each_node_and_the_last_one_may_be_short():
    # Node 0 holds tokens 0 to 4 (chunks of 4 and 1), node 1 tokens 5 to 11 (chunks of 4 and 3).
    found = chunk_share(np.array([4, 5, 6, 9]), [(0, 5), (5, 7)], 4)
    assert found.touched_ratio == 3 / 4
    assert found.useful_ratio == pytest.approx((1 / 1 + 2 / 4 + 1 / 3) / 3)
    assert chunk_share(np.array([], np.int64), [(0, 5)], 4) == (4, 0.0, 0.0)


def test_means_over_rows_keep_retention_and_chunk_sizes():
    sums = [torch.rand(4, 40, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    rows = [layer_row(i, 0.25, s, 2, [(0, 40)], 0.6, [16, 64]) for i, s in enumerate(sums)]
    total = mean_row(None, rows, 1)
    assert (total.layer, total.retention, total.n) == (None, 0.25, 1)
    assert total.jaccard_heads == pytest.approx(np.mean([row.jaccard_heads for row in rows]))
    assert [share.chunk_tokens for share in total.chunks] == [16, 64]
    assert total.chunks[1].touched_ratio == 1.0
