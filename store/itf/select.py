"""From importance to what is read: sets of tokens, the chunks that hold them, merged ranges.

Positions are absolute; a part's chunks count from its node's start. A chunk that holds one
selected token is read whole, keys and values alike::

    selected      x . . . | . . . . | . x x . | . . .      tokens of two parts, 4 per chunk
    chunks        [0]       .         [2]       .          -> runs, merged where they touch

In a reordered node the tokens of a chunk are any of its tokens, and some may lie past those that
the query uses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch

from store.itf.importance import agreement, threshold, top_k
from store.itf.options import SparseOptions


class Choice(NamedTuple):
    """Selected tokens of one layer, int64 [sets, k] ascending, and how they came about."""

    sets: torch.Tensor
    jaccard: float | None = None
    threshold: float | None = None
    fell_back: bool = False


def choose(importance: torch.Tensor, k: int, options: SparseOptions) -> Choice:
    """Select from importance of all KV heads (float32 [G, n]) or of one row for all of them."""
    if options.sets == "per-head":
        return Choice(top_k(importance, k))
    return Choice(top_k(importance.sum(0, keepdim=True), k))


def choose_by_probes(
    importance: torch.Tensor,
    k: int,
    options: SparseOptions,
    all_heads: Callable[[], torch.Tensor],
) -> Choice:
    """Select from probe heads if they agree, else from all keys (paper, ITF).

    Parameters
    ----------
    importance
        float32 [P, n] of the probed KV heads.
    all_heads
        Reads all keys of the layer and returns float32 [G, n]; called only on a fallback.

    Notes
    -----
    A single probe has nothing to agree with: it is believed unless ``fallback`` is ``always``.
    """
    n = importance.shape[1]
    agreed = agreement(top_k(importance, k), n)
    limit = None
    if agreed is not None:
        limit = options.threshold
        limit = threshold(k, n, options.alpha) if limit is None else limit
    believed = agreed is None or limit is None or agreed > limit
    if options.fallback == "always" or (options.fallback == "auto" and not believed):
        return Choice(top_k(all_heads(), k), agreed, limit, fell_back=True)
    return Choice(top_k(importance.sum(0, keepdim=True), k), agreed, limit)


def vectors_loaded(choice: Choice, n: int, kv_heads: int, probe_heads: int) -> int:
    """Vectors of head_dim values that a choice needs, token by token (the paper's count).

    Probe keys of all tokens; then keys and values of the selected tokens for every head. After a
    fallback instead all keys, and values of each head's own tokens.
    """
    sets, k = choice.sets.shape
    if choice.fell_back:
        return probe_heads * n + kv_heads * n + sets * k
    return probe_heads * n + 2 * kv_heads * k


class Extent(Protocol):
    """What selection needs to know of a part: its first position, tokens used, chunk size."""

    @property
    def start(self) -> int:
        """Absolute position of the first token."""

    @property
    def used(self) -> int:
        """Tokens of the part."""

    @property
    def stored(self) -> int:
        """Stored rows that may arrive: the part's own in token order, else all of the node."""

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk."""

    def rows(self, layer: int) -> np.ndarray | None:
        """Stored row of each of the node's tokens, int32 [n]; None for token order."""


class PartPlan(NamedTuple):
    """Chunks to read of one part.

    Parameters
    ----------
    chunks
        int64 ascending, all that are read.
    wanted
        bool [chunks of the part], those that hold a selected token, however they come.
    arriving
        Rows that arrive.
    tokens
        int64, absolute positions of those that the part uses, in the order in which they arrive.
    places
        int64, which of the arriving rows these are; None where it is all of them.
    """

    chunks: np.ndarray
    wanted: np.ndarray
    arriving: int
    tokens: np.ndarray
    places: np.ndarray | None = None


def plan_part(
    selected: np.ndarray,
    part: Extent,
    layer: int,
    without: np.ndarray | None = None,
) -> PartPlan:
    """Plan the chunks of one part in one layer.

    Parameters
    ----------
    selected
        int64, absolute positions of any parts, in any order, repeats allowed.
    without
        bool [chunks], chunks that come by another way and are not planned.
    """
    size, stored = part.chunk_tokens, part.rows(layer)
    own = selected - part.start
    if len(own) and not (int(own.min()) >= 0 and int(own.max()) < part.used):
        own = own[(own >= 0) & (own < part.used)]
    held = np.zeros(-(-part.stored // size), dtype=bool)
    held[(own if stored is None else stored[own]) // size] = True
    wanted = held
    if without is not None:
        held = held & ~without
    return plan_chunks(part, layer, held)._replace(wanted=wanted)


def plan_chunks(part: Extent, layer: int, held: np.ndarray) -> PartPlan:
    """Plan given chunks of one part, bool [chunks]; all of them count as wanted."""
    size, stored = part.chunk_tokens, part.rows(layer)
    chunks = np.flatnonzero(held)
    # The last chunk may go on past the tokens that this query uses, or that the node has.
    rows = np.flatnonzero(np.repeat(held, size)[: part.stored])
    if stored is None:
        return PartPlan(chunks, held, len(rows), rows + part.start)
    token = np.empty(len(stored), dtype=np.int64)
    token[stored] = np.arange(len(stored))
    tokens = token[rows]
    if part.used == part.stored:
        return PartPlan(chunks, held, len(rows), tokens + part.start)
    places = np.flatnonzero(tokens < part.used)
    return PartPlan(chunks, held, len(rows), tokens[places] + part.start, places)
