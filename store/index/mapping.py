"""Mapping lists: where a node's tokens lie in its stored arrays, per layer.

``rows`` is int32 [layers, n] and ``rows[layer, token]`` the stored row of a token, so each
``rows[layer]`` is a permutation of 0 .. n-1. It is the identity until the first reorder. Tokens
and rows count from the node's start, not from the prefix's::

    token   0 1 2 3 4 5           rows[layer] = [2 0 1 5 3 4]
    row     1 2 0 4 5 3           token at each row (the inverse)
            |chunk0| |chunk1|     row // chunk_tokens, here 3 tokens
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from store.errors import InvalidValueError

#: Mapping list, int32 [layers, n].
Rows: TypeAlias = npt.NDArray[np.int32]
#: Token, row or chunk numbers, any integer dtype.
Indices: TypeAlias = npt.NDArray[np.integer]


def identity_rows(num_layers: int, length: int) -> Rows:
    """Mapping list of a node in token order, int32 [num_layers, length]."""
    return np.tile(np.arange(length, dtype=np.int32), (num_layers, 1))


def is_identity(rows: Rows) -> bool:
    """Whether every layer is stored in token order, so that no lookup is needed."""
    return bool((rows == np.arange(rows.shape[1])).all())


def check_rows(rows: Indices, num_layers: int, length: int) -> Rows:
    """Return ``rows`` as int32 [num_layers, length]; raise unless each layer is a permutation.

    Raises
    ------
    InvalidValueError
        Another shape, no integers, or a layer (the first is named) that misses a row.
    """
    if rows.shape != (num_layers, length) or rows.dtype.kind not in "iu":
        raise InvalidValueError(
            f"a mapping list has shape {rows.shape} and dtype {rows.dtype}; "
            f"({num_layers}, {length}) integers are needed, so rewrite the node"
        )
    inside = (rows >= 0) & (rows < length)
    hit = np.zeros((num_layers, length), dtype=bool)
    np.put_along_axis(hit, np.where(inside, rows, 0).astype(np.int64), True, axis=1)
    bad = np.flatnonzero(~(inside & hit).all(axis=1))
    if bad.size:
        raise InvalidValueError(
            f"the mapping list of layer {bad[0]} is no permutation of its {length} tokens; "
            "rewrite the node"
        )
    return rows.astype(np.int32, copy=False)


def invert_rows(rows: Rows) -> Rows:
    """Token at each stored row, int32 [layers, n]; the inverse of the inverse is ``rows``."""
    tokens = np.empty_like(rows)
    np.put_along_axis(tokens, rows.astype(np.int64), identity_rows(*rows.shape), axis=1)
    return tokens


def rows_of_part(rows: Rows, lo: int, hi: int) -> Rows:
    """Mapping list of the tokens ``lo`` to ``hi`` alone, int32 [layers, hi - lo].

    They keep their order among themselves: what a split of the node needs.
    """
    inside = invert_rows(rows)
    held = (inside >= lo) & (inside < hi)
    # Every layer holds each of the tokens once, so that what is picked is rectangular.
    order = inside[held].reshape(rows.shape[0], hi - lo) - np.int32(lo)
    return invert_rows(order)


class Whereabouts(NamedTuple):
    """Chunks that hold some tokens of one layer, and where each token lies among their rows.

    ``chunks`` int64 ascending; ``places`` int64 [tokens]: the chunks' rows, back to back.
    """

    chunks: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]


def whereabouts(stored: Rows, chunk_tokens: int) -> Whereabouts:
    """Where the tokens with these stored rows (one layer, int32 [k]) are found.

    ::

        stored  9 2 8    4 per chunk    chunks [0 2]     rows 0 1 2 3 | 8 9 10 11
                                        places 5 2 4
    """
    chunk, inside = np.divmod(stored, np.int32(chunk_tokens))
    held = np.zeros(int(chunk.max(initial=-1)) + 1, dtype=bool)
    held[chunk] = True
    rank = np.cumsum(held) - 1
    return Whereabouts(np.flatnonzero(held), rank[chunk] * chunk_tokens + inside)


def chunk_count(length: int, chunk_tokens: int) -> int:
    """Chunks of one layer; the last may be partly filled."""
    return -(-length // chunk_tokens)


def chunks_of_tokens(layer_rows: Rows, tokens: Indices, chunk_tokens: int) -> npt.NDArray[np.int64]:
    """Chunks that hold the given tokens of one layer, ascending, each once.

    Parameters
    ----------
    layer_rows
        int32 [n], ``rows[layer]``.
    tokens
        Integers [k] in 0 .. n-1, in any order, repeats allowed.
    """
    return np.unique(layer_rows[tokens].astype(np.int64) // chunk_tokens)


def chunk_mask(
    rows: Rows, tokens: npt.NDArray[np.bool_], chunk_tokens: int
) -> npt.NDArray[np.bool_]:
    """Chunks that hold any chosen token, for all layers at once.

    Parameters
    ----------
    tokens
        bool [layers, n], True for a chosen token.

    Returns
    -------
    numpy.ndarray
        bool [layers, chunks].
    """
    num_layers, length = rows.shape
    mask = np.zeros((num_layers, chunk_count(length, chunk_tokens)), dtype=bool)
    layers, chosen = np.nonzero(tokens)
    mask[layers, rows[layers, chosen] // chunk_tokens] = True
    return mask


def tokens_in_chunks(
    layer_tokens: Rows, chunks: Indices, chunk_tokens: int
) -> npt.NDArray[np.int32]:
    """Tokens that the given chunks of one layer hold, in stored order.

    Parameters
    ----------
    layer_tokens
        int32 [n], one layer of `invert_rows`.
    chunks
        Integers [k]; the last chunk's padding holds no token.
    """
    starts = np.asarray(chunks, dtype=np.int64)[:, None] * chunk_tokens
    stored = (starts + np.arange(chunk_tokens)).ravel()
    held: npt.NDArray[np.int32] = layer_tokens[stored[stored < len(layer_tokens)]]
    return held
