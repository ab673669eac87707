"""Which tokens matter: H2O column sums, top-k sets, their agreement, the threshold.

Pure tensor code (paper section on similarity-guided identification). n is the prefix length, m
the number of new tokens, G the KV heads, g the query heads of each.
"""

from __future__ import annotations

import math

import numpy as np
import torch

#: Scores of one block of query rows; larger blocks fall out of the cache.
BLOCK_BYTES = 4 << 20


def keep_count(n: int, retention: float) -> int:
    """Tokens to select of ``n``: ceil(retention * n), at least one of any.

    A product that misses a whole number by rounding alone, such as 0.1 * 30, counts as that.
    """
    return min(n, max(1, math.ceil(round(retention * n, 9))))


def column_sums(
    q: torch.Tensor,
    k: torch.Tensor,
    k_new: torch.Tensor,
    scaling: float | None,
    stride: int = 1,
) -> torch.Tensor:
    """Attention that each prefix token gets from all new tokens (H2O's metric).

    ``a[h, j] = sum over queries i of softmax_i(q_i . K * scaling)[j]``, the softmax over the
    whole prefix and the causal suffix, in float32; summed over the query heads of a KV head.

    Parameters
    ----------
    q
        [G * g, m, head_dim], the query heads of a KV head side by side.
    k
        [n, G, head_dim], keys of the prefix.
    k_new
        [G, m, head_dim], keys of the new tokens.
    scaling
        Factor of the scores, None for head_dim ** -0.5.
    stride
        Estimate the sums from one in ``stride`` rows of each KV head, up to g: its query heads
        take turns, so that every new token is still seen by one of them::

            token         0 1 2 3 4 5        g = stride = 3
            head 0        x . . x . .
            head 1        . . x . . x
            head 2        . x . . x .

    Returns
    -------
    float32 [G, n]
    """
    n, groups = k.shape[:2]
    m, dim = q.shape[1], q.shape[2]
    factor = dim**-0.5 if scaling is None else scaling
    rows, tokens = _sampled((q.float() * factor).reshape(groups, -1, dim), m, stride)
    keys, own = k.float(), k_new.float()
    sums = torch.zeros(groups, n, device=q.device)
    step = max(1, BLOCK_BYTES // (4 * (n + m)))
    scores = torch.empty(min(step, rows.shape[1]), n + m, device=q.device)
    for lo in range(0, rows.shape[1], step):
        part = rows[:, lo : lo + step]
        block = scores[: part.shape[1]]
        # A new token sees those up to itself.
        future = torch.arange(m, device=q.device) > tokens[lo : lo + step, None]
        for head in range(groups):
            torch.mm(part[head], keys[:, head].t(), out=block[:, :n])
            torch.mm(part[head], own[head].t(), out=block[:, n:])
            block[:, n:].masked_fill_(future, float("-inf"))
            torch.softmax(block, -1, out=block)
            sums[head] += block[:, :n].sum(0)
    return sums if stride == 1 else sums.mul_(stride)


def _sampled(rows: torch.Tensor, m: int, stride: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One in ``stride`` rows of [G, g * m, head_dim], and the new token of each, int64."""
    place = torch.arange(rows.shape[1], device=rows.device)
    if stride == 1:
        return rows, place % m
    taken = ((place // m + place % m) % stride == 0).nonzero()[:, 0]
    return rows.index_select(1, taken), taken % m


def top_k(importance: torch.Tensor, k: int) -> torch.Tensor:
    """The k most important tokens of each row, ascending; ties go to the earlier token.

    What is not a number comes last, so that a set has its size whatever came in.

    Parameters
    ----------
    importance
        float32 [sets, n]
    k
        0 or more; all tokens where it is n or more.

    Returns
    -------
    int64 [sets, min(k, n)]
    """
    sets, n = importance.shape
    if k >= n or k == 0:
        return torch.arange(min(k, n), device=importance.device).repeat(sets, 1)
    importance = importance.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    threshold = torch.topk(importance, k, sorted=False).values.amin(1, keepdim=True)
    reached = importance >= threshold
    if int(reached.sum()) == sets * k:
        return reached.nonzero()[:, 1].reshape(sets, k)
    above = importance > threshold
    level = importance == threshold
    room = k - above.sum(1, keepdim=True)
    chosen = above | (level & (level.cumsum(1) <= room))
    return chosen.nonzero()[:, 1].reshape(-1, k)


def jaccard(a: np.ndarray, b: np.ndarray) -> float:
    """Shared over all members of two index sets; two empty sets agree: 1.0."""
    union = np.union1d(a, b)
    return 1.0 if len(union) == 0 else len(np.intersect1d(a, b)) / len(union)


def agreement(sets: torch.Tensor, n: int) -> float | None:
    """Mean pairwise Jaccard of sets of equal size (int64 [sets, k] of 0 .. n-1).

    None for a single set, which has nothing to agree with.
    """
    count, k = sets.shape
    if count < 2:
        return None
    if k == 0:
        return 1.0
    member = torch.zeros(count, n, device=sets.device)
    member.scatter_(1, sets, 1.0)
    shared = member @ member.t()
    upper = torch.triu_indices(count, count, offset=1, device=sets.device)
    both = shared[upper[0], upper[1]].double()
    return float((both / (2 * k - both)).mean())


def threshold(k: int, n: int, alpha: float) -> float:
    """Agreement above which probe heads are believed: ``(rho / (2 - rho)) ** alpha``, rho = k/n.

    The base is the expected Jaccard of two random k-subsets. ``alpha`` 0 gives 1.0, which no
    agreement exceeds; a larger alpha gives a lower threshold.
    """
    rho = k / n if n else 1.0
    return float((rho / (2.0 - rho)) ** alpha)
