from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.errors import InvalidValueError
from store.index import mapping


@st.composite
def mappings(draw: st.DrawFn) -> mapping.Rows:
    layers, length = draw(st.integers(1, 4)), draw(st.integers(1, 70))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    return np.array([generator.permutation(length) for _ in range(layers)], dtype=np.int32)


def test_a_new_node_is_stored_in_token_order() -> None:
    rows = mapping.identity_rows(2, 5)
    assert rows.dtype == np.int32
    assert rows.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert mapping.is_identity(rows)


def test_one_swapped_pair_in_the_last_layer_is_no_identity() -> None:
    rows = mapping.identity_rows(3, 5)
    rows[2, [3, 4]] = rows[2, [4, 3]]
    assert not mapping.is_identity(rows)


@given(rows=mappings())
def test_the_inverse_gives_the_token_at_each_row(rows: mapping.Rows) -> None:
    tokens = mapping.invert_rows(rows)
    for layer in range(len(rows)):
        for token in range(rows.shape[1]):
            assert tokens[layer, rows[layer, token]] == token
    assert mapping.invert_rows(tokens).tolist() == rows.tolist()


@given(rows=mappings())
def test_stored_arrays_come_back_in_token_order(rows: mapping.Rows) -> None:
    values = np.arange(rows.size).reshape(rows.shape)
    stored = np.take_along_axis(values, mapping.invert_rows(rows), axis=1)
    assert np.take_along_axis(stored, rows, axis=1).tolist() == values.tolist()


@given(rows=mappings(), chunk_tokens=st.sampled_from([1, 3, 16, 64]), data=st.data())
def test_tokens_lie_in_the_chunks_named_for_them(
    rows: mapping.Rows, chunk_tokens: int, data: st.DataObject
) -> None:
    length = rows.shape[1]
    chosen = data.draw(st.lists(st.integers(0, length - 1), max_size=2 * length))
    chunks = mapping.chunks_of_tokens(rows[0], np.array(chosen, dtype=np.int64), chunk_tokens)
    assert chunks.tolist() == sorted({int(rows[0, token]) // chunk_tokens for token in chosen})
    held = mapping.tokens_in_chunks(mapping.invert_rows(rows)[0], chunks, chunk_tokens)
    assert set(chosen) <= set(held.tolist())
    assert {int(rows[0, token]) // chunk_tokens for token in held} == set(chunks.tolist())
    assert len(set(held.tolist())) == len(held)


@given(rows=mappings(), chunk_tokens=st.sampled_from([3, 16]), data=st.data())
def test_the_chunk_mask_agrees_with_the_chunk_lists_of_each_layer(
    rows: mapping.Rows, chunk_tokens: int, data: st.DataObject
) -> None:
    generator = np.random.default_rng(data.draw(st.integers(0, 99)))
    tokens = generator.random(rows.shape) < 0.2
    mask = mapping.chunk_mask(rows, tokens, chunk_tokens)
    assert mask.shape == (len(rows), mapping.chunk_count(rows.shape[1], chunk_tokens))
    for layer in range(len(rows)):
        chosen = np.flatnonzero(tokens[layer])
        wanted = mapping.chunks_of_tokens(rows[layer], chosen, chunk_tokens)
        assert np.flatnonzero(mask[layer]).tolist() == wanted.tolist()


@pytest.mark.parametrize(
    ("length", "chunks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (200, 13)]
)
def test_the_last_chunk_may_be_partly_filled(length: int, chunks: int) -> None:
    assert mapping.chunk_count(length, 16) == chunks


@given(rows=mappings())
def test_a_permutation_of_any_integer_dtype_is_accepted_as_int32(rows: mapping.Rows) -> None:
    checked = mapping.check_rows(rows.astype(np.uint64), *rows.shape)
    assert checked.dtype == np.int32
    assert checked.tolist() == rows.tolist()


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ([0, 1, 1, 3], "layer 1 is no permutation"),
        ([0, 1, 2, 4], "layer 1 is no permutation"),
        ([-1, 1, 2, 3], "layer 1 is no permutation"),
        ([1, 2, 3, -4], "layer 1 is no permutation"),
    ],
)
def test_a_layer_that_misses_a_row_is_refused_by_number(layer: list[int], message: str) -> None:
    rows = np.array([[3, 2, 1, 0], layer], dtype=np.int32)
    with pytest.raises(InvalidValueError, match=message):
        mapping.check_rows(rows, 2, 4)


@pytest.mark.parametrize("rows", [np.zeros((1, 4), np.int32), np.zeros((2, 4), np.float32)])
def test_another_shape_or_dtype_is_refused(rows: np.ndarray) -> None:
    with pytest.raises(InvalidValueError, match=r"\(2, 4\) integers are needed"):
        mapping.check_rows(rows, 2, 4)
