"""How far a sparse answer is from the full one: pure numbers from logits and index sets.

It runs no model and knows no store. m is the number of query tokens, L the layers, G the KV heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from store.itf.importance import top_k

#: Logits that are in float64 at once; a long query times a large vocabulary would not fit.
BLOCK_BYTES = 64 << 20


class Comparison(NamedTuple):
    """Means over the query's positions: divergence in nats, share of equal first choices."""

    kl: float
    top1: float


def compare(reference: torch.Tensor, logits: torch.Tensor) -> Comparison:
    """Compare next-token distributions position by position.

    ``KL(reference || sparse) = sum over tokens of p_ref * (log p_ref - log p_sparse)``, in float64.

    Parameters
    ----------
    reference, logits
        float [m, vocab], m ≥ 1.
    """
    assert reference.shape == logits.shape, "both must hold the same positions"
    total, equal = 0.0, 0
    for part, other in zip(_blocks(reference), _blocks(logits), strict=True):
        full, sparse = _log_softmax(part), _log_softmax(other)
        kl = (full.exp() * (full - sparse)).sum(-1)
        # The sum of many small terms may miss zero by rounding, never by more.
        total += float(kl.clamp_min(0.0).sum())
        equal += int((part.argmax(-1) == other.argmax(-1)).sum())
    return Comparison(total / len(reference), equal / len(reference))


def mean_nll(logits: torch.Tensor, ids: np.ndarray) -> float | None:
    """Mean negative log-likelihood of a query's own tokens, in nats per token.

    Parameters
    ----------
    logits
        float [m, vocab]; position i predicts token i + 1.
    ids
        uint32 [m]; the first token is predicted by no position of the query.

    Returns
    -------
    None for a query of one token.
    """
    targets = torch.from_numpy(ids[1:].astype(np.int64)).to(logits.device)
    if len(targets) == 0:
        return None
    total = 0.0
    for part, wanted in zip(_blocks(logits[:-1]), _blocks(targets, logits.shape[1]), strict=True):
        total -= float(_log_softmax(part).gather(1, wanted[:, None]).sum())
    return total / len(targets)


def recall(selected: Sequence[np.ndarray], importance: Sequence[torch.Tensor]) -> float:
    """Share of the oracle's tokens that were selected, mean over layers and sets.

    Parameters
    ----------
    selected
        Per layer int64 [sets, k] of prefix positions: one set, or one per KV head.
    importance
        Per layer float32 [G, n] from all keys: the oracle takes the k largest of their sum over
        KV heads for one set, of each KV head's own for several.
    """
    shares = [_layer_recall(sets, sums) for sets, sums in zip(selected, importance, strict=True)]
    return float(np.mean(shares))


def _layer_recall(sets: np.ndarray, sums: torch.Tensor) -> float:
    count, k = sets.shape
    if k == 0:
        return 1.0
    oracle = top_k(sums.sum(0, keepdim=True) if count == 1 else sums, k).cpu().numpy()
    found = [len(np.intersect1d(a, b)) for a, b in zip(sets, oracle, strict=True)]
    return float(np.mean(found) / k)


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits.double(), -1)


def _blocks(values: torch.Tensor, width: int | None = None) -> tuple[torch.Tensor, ...]:
    """Split along positions so that ``width`` float64 values of each position stay in bounds."""
    row_bytes = 8 * (values.shape[1] if width is None else width)
    return torch.split(values, max(1, BLOCK_BYTES // row_bytes))
