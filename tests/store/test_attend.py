"""Every path of the attention gives what a plain softmax gives."""

from __future__ import annotations

import pytest
import torch

from store import attend
from store.attend import CausalAttention


def expected(q, k, v, scaling):
    """Dense attention in float64 with a bottom-right causal mask."""
    repeats, m, n = q.shape[0] // k.shape[0], q.shape[1], k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(repeats, 0), v.double()
    scores = q @ k.transpose(1, 2) * scaling
    scores.masked_fill_(torch.ones(m, n, dtype=torch.bool).triu(n - m + 1), float("-inf"))
    return (scores.softmax(-1) @ v.repeat_interleave(repeats, 0)).float()


@pytest.mark.parametrize("scaling", [0.25, 1.0])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (1, 40), (7, 7), (7, 40), (39, 40), (60, 300)])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("path", ["folded", "grouped", "split", "no kernel"])
def test_all_paths_agree_with_a_plain_softmax(path, heads, groups, m, n, scaling, monkeypatch):
    if path == "grouped":
        monkeypatch.setattr(attend, "MASK_BYTES", 0)
    if path in ("split", "no kernel"):
        monkeypatch.setattr(attend, "SPLIT_TOKENS", 1)
    if path == "no kernel":
        monkeypatch.setattr(attend, "_flash", lambda: None)
    generator = torch.Generator().manual_seed(m * n)
    q = torch.randn(heads, m, 16, generator=generator)
    k, v = (torch.randn(n, groups, 16, generator=generator).transpose(0, 1) for _ in range(2))
    attention = CausalAttention()
    for _ in range(2):
        out = attention(q, k, v, scaling)
        assert out.shape == q.shape
        assert float((out - expected(q, k, v, scaling)).abs().max()) < 1e-5


def test_the_kernel_that_spares_the_mask_is_there():
    # Not a promise of torch: without it long suffixes take the masked path, more slowly.
    assert attend.can_split(torch.device("cpu"))
    assert not attend.can_split(torch.device("meta"))


def test_the_mask_is_made_anew_for_another_shape():
    attention = CausalAttention()
    for m, n in ((3, 9), (4, 9), (3, 9)):
        q, k = torch.randn(2, m, 16), torch.randn(2, n, 16)
        out = attention(q, k, k, 0.25)
        assert float((out - expected(q, k, k, 0.25)).abs().max()) < 1e-5
