"""How alike heads choose in one layer, and how full of wanted tokens chunks are: numbers only.

H query heads, G KV heads, n prefix tokens; a *part* is a node's (first position, tokens used).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from store.itf.importance import agreement, column_sums, keep_count, threshold, top_k

Part = tuple[int, int]


class ChunkShare(NamedTuple):
    """Chunks of one size under one set of selected tokens.

    ``useful_ratio`` is the mean over touched chunks of the share of their tokens that were
    selected, ``touched_ratio`` the share of chunks that hold a selected token.
    """

    chunk_tokens: int
    useful_ratio: float
    touched_ratio: float


@dataclass(frozen=True, slots=True)
class SimilarityRow:
    """One layer (None: all layers) at one retention; means over ``n`` queries.

    Parameters
    ----------
    jaccard_heads, jaccard_kv_heads, jaccard_within
        Mean pairwise Jaccard of the tokens chosen by query heads, by KV heads (their query heads
        together), and by the query heads of the same KV head; None where there is only one.
    threshold, random
        What agreement has to exceed, and what random choices would agree on.
    above_ratio
        Share of layers and queries where the KV heads' agreement exceeds the threshold.
    chunks
        Per chunk size, for the tokens that all heads together find most important.
    """

    layer: int | None
    retention: float
    n: int
    jaccard_heads: float | None
    jaccard_kv_heads: float | None
    jaccard_within: float | None
    threshold: float
    random: float
    above_ratio: float | None
    chunks: tuple[ChunkShare, ...]


def head_sums(
    q: torch.Tensor, keys: torch.Tensor, k_new: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """H2O column sums of every query head by itself, float32 [H, n].

    Arguments as in `store.itf.importance.column_sums`; its KV heads are query heads here, each
    with a copy of the keys it shares.
    """
    per_group = q.shape[0] // keys.shape[1]
    return column_sums(
        q, keys.repeat_interleave(per_group, 1), k_new.repeat_interleave(per_group, 0), scaling
    )


def layer_row(
    layer: int,
    retention: float,
    sums: torch.Tensor,
    kv_heads: int,
    parts: Sequence[Part],
    alpha: float,
    chunk_tokens: Sequence[int],
) -> SimilarityRow:
    """One layer of one query; ``sums`` float32 [H, n] of `head_sums`."""
    n = sums.shape[1]
    k = keep_count(n, retention)
    by_head = top_k(sums, k)
    grouped = sums.view(kv_heads, -1, n).sum(1)
    between = agreement(top_k(grouped, k), n)
    limit = threshold(k, n, alpha)
    common = top_k(sums.sum(0, keepdim=True), k)[0].cpu().numpy()
    return SimilarityRow(
        layer=layer,
        retention=retention,
        n=1,
        jaccard_heads=agreement(by_head, n),
        jaccard_kv_heads=between,
        jaccard_within=_mean([agreement(own, n) for own in by_head.chunk(kv_heads)]),
        threshold=limit,
        random=threshold(k, n, 1.0),
        above_ratio=None if between is None else float(between > limit),
        chunks=tuple(chunk_share(common, parts, size) for size in chunk_tokens),
    )


def chunk_share(selected: np.ndarray, parts: Sequence[Part], chunk_tokens: int) -> ChunkShare:
    """How selected positions (int64, each once) fill chunks, which begin anew in each part."""
    shares: list[np.ndarray] = []
    for start, used in parts:
        own = selected[(selected >= start) & (selected < start + used)] - start
        counts = np.bincount(own // chunk_tokens, minlength=-(-used // chunk_tokens))
        sizes = np.full(len(counts), chunk_tokens)
        sizes[-1] = used - chunk_tokens * (len(counts) - 1)
        shares.append(counts / sizes)
    share = np.concatenate(shares)
    touched = share[share > 0]
    useful = float(touched.mean()) if len(touched) else 0.0
    return ChunkShare(chunk_tokens, useful, len(touched) / len(share))


def mean_row(layer: int | None, rows: Sequence[SimilarityRow], queries: int) -> SimilarityRow:
    """Means over rows of one retention; ``queries`` is how many they stand for."""
    sizes = zip(*(row.chunks for row in rows), strict=True)
    return SimilarityRow(
        layer=layer,
        retention=rows[0].retention,
        n=queries,
        jaccard_heads=_mean([row.jaccard_heads for row in rows]),
        jaccard_kv_heads=_mean([row.jaccard_kv_heads for row in rows]),
        jaccard_within=_mean([row.jaccard_within for row in rows]),
        threshold=float(np.mean([row.threshold for row in rows])),
        random=float(np.mean([row.random for row in rows])),
        above_ratio=_mean([row.above_ratio for row in rows]),
        chunks=tuple(
            ChunkShare(
                same[0].chunk_tokens,
                float(np.mean([one.useful_ratio for one in same])),
                float(np.mean([one.touched_ratio for one in same])),
            )
            for same in sizes
        ),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    """Mean of the values that there are; None without any."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
