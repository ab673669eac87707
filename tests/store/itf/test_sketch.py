"""The sketch against naive loops, and how far from the keys it may be."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from store.errors import InvalidValueError
from store.itf import sketch
from store.itf.sketch import GROUP_TOKENS, SKETCH_BITS, Codes, quantise, unpack

#: Spread of the values of a channel: usual, tiny, where scales are subnormal, below float16, large.
SPREADS = [1.0, 1e-3, 1e-6, 1e-9, 3e3]
OFFSETS = [0.0, -0.0, 0.5, -40.0, 3e4, 1e-7]


@st.composite
def keys(draw: st.DrawFn) -> torch.Tensor:
    """Keys of one layer within what float16 reaches: channels of all kinds side by side."""
    n, heads, dim = draw(st.integers(1, 150)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = (n, heads, dim)
    values = generator.standard_normal(shape)
    values[generator.random(shape) < draw(st.sampled_from([0.0, 0.05]))] *= 8  # outliers
    spread = generator.choice(draw(st.sampled_from([SPREADS, [1.0]])), shape[1:])
    offset = generator.choice(draw(st.sampled_from([OFFSETS, [0.0]])), shape[1:])
    values = values * spread + offset
    values[:, generator.random(shape[1:]) < 0.1] = draw(st.sampled_from([0.0, -0.0, 1.7]))
    return torch.from_numpy(values.clip(-6e4, 6e4).astype(np.float32))


def grouped(values: torch.Tensor) -> np.ndarray:
    """Float64 [groups, 64, heads, dim], the last token repeated to the end of its group."""
    rows = np.arange(sketch.group_count(len(values)) * GROUP_TOKENS).clip(max=len(values) - 1)
    return values.double().numpy()[rows].reshape(-1, GROUP_TOKENS, *values.shape[1:])


def halves(codes: Codes) -> tuple[np.ndarray, np.ndarray]:
    """Scale and zero as float64."""
    return codes.scale.double().numpy(), codes.zero.double().numpy()


def naive_unpack(codes: Codes, bits: int) -> np.ndarray:
    """Token by token, as format.md has it: low bits first."""
    code, scale, zero = (part.numpy() for part in codes)
    per_byte = 8 // bits
    out = np.zeros((len(code) * per_byte, *code.shape[1:]), np.float32)
    for token in range(len(out)):
        group = token // GROUP_TOKENS
        for at in np.ndindex(code.shape[1:]):
            value = int(code[(token // per_byte, *at)]) >> bits * (token % per_byte) & 2**bits - 1
            scaled = np.float32(value) * np.float32(scale[(group, *at)])
            out[(token, *at)] = scaled + np.float32(zero[(group, *at)])
    return out


def plain_error(values: np.ndarray, bits: int) -> np.ndarray:
    """Squared error of each group and channel where codes span the whole range."""
    levels = 2**bits - 1
    low, high = values.min(1), values.max(1)
    scale = ((high - low) / levels).astype(np.float16).astype(np.float64)
    zero = low.astype(np.float16).astype(np.float64)
    step = np.where(scale > 0, scale, 1.0)
    codes = np.rint((values - zero[:, None]) / step[:, None]).clip(0, levels)
    return ((codes * scale[:, None] + zero[:, None] - values) ** 2).sum(1)


def value_bound(values: np.ndarray, bits: int) -> np.ndarray:
    """Most that one value may be off by where codes span the whole range, [groups, heads, dim].

    Half a step within the range of the codes; beyond its ends, what float16 moved them by: zero
    by its own rounding, the upper end also by that of the scale, ``levels`` times.
    """
    levels = 2**bits - 1
    low, high = values.min(1), values.max(1)
    exact = (high - low) / levels
    scale, zero = (part.astype(np.float16).astype(np.float64) for part in (exact, low))
    return scale / 2 + np.abs(zero - low) + levels * np.abs(scale - exact)


def within(error: np.ndarray, bound: np.ndarray, values: np.ndarray) -> bool:
    """Whether an error keeps to its bound but for float32's own rounding of the values."""
    return bool((error <= bound * (1 + 1e-4) + 4e-7 * np.abs(values).max(1)).all())


@pytest.mark.parametrize("bits", SKETCH_BITS)
@settings(deadline=None, max_examples=60)
@given(values=keys())
def test_no_channel_of_a_group_is_worse_than_with_its_whole_range(
    bits: int, values: torch.Tensor
) -> None:
    codes = quantise(values, bits)
    expected = grouped(values)
    decoded = unpack(codes, bits).double().numpy().reshape(expected.shape)
    root = np.sqrt(((decoded - expected) ** 2).sum(1))
    assert within(root, np.sqrt(plain_error(expected, bits)), expected)
    assert within(root, np.sqrt(GROUP_TOKENS) * value_bound(expected, bits), expected)


@pytest.mark.parametrize("bits", SKETCH_BITS)
@settings(deadline=None, max_examples=60)
@given(values=keys())
def test_no_value_is_off_by_more_than_half_a_step_where_the_whole_range_was_taken(
    bits: int, values: torch.Tensor
) -> None:
    codes = quantise(values, bits)
    expected = grouped(values)
    decoded = unpack(codes, bits).double().numpy().reshape(expected.shape)
    scale, zero = halves(codes)
    low, high = expected.min(1), expected.max(1)
    exact = ((high - low) / (2**bits - 1)).astype(np.float32).astype(np.float16)
    whole = (scale == exact) & (zero == low.astype(np.float16))
    bound = np.where(whole, value_bound(expected, bits), np.inf)
    assert within(np.abs(decoded - expected).max(1), bound, expected)


def test_only_a_group_that_fills_its_range_takes_all_of_it() -> None:
    # The bound of a single value would say nothing if no group did.
    filled = torch.arange(4.0).repeat(GROUP_TOKENS // 4)
    spread = torch.linspace(0, 3, GROUP_TOKENS)
    codes = quantise(torch.stack([filled, spread], 1)[:, None], 2)
    assert (codes.scale[0, 0, 0], codes.zero[0, 0, 0]) == (1.0, 0.0)
    assert codes.scale[0, 0, 1] < 1.0


@pytest.mark.parametrize("bits", SKETCH_BITS)
def test_what_is_clipped_is_clipped_alike_at_both_ends(bits: int) -> None:
    values = torch.randn(640, 2, 16)
    scale, zero = halves(quantise(values, bits))
    rows = grouped(values)
    centre = (rows.min(1) + rows.max(1)) / 2
    np.testing.assert_allclose(zero + scale * (2**bits - 1) / 2, centre, atol=5e-3)


@pytest.mark.parametrize("bits", SKETCH_BITS)
@settings(deadline=None, max_examples=40)
@given(values=keys())
def test_codes_lie_low_bits_first_and_name_the_nearest_level(
    bits: int, values: torch.Tensor
) -> None:
    codes = quantise(values, bits)
    scale, zero = (part.float().numpy()[:, None] for part in (codes.scale, codes.zero))
    rows = grouped(values).astype(np.float32)
    step = np.where(scale > 0, scale, np.float32(1))
    levels = np.rint((rows - zero) / step).clip(0, 2**bits - 1).astype(int)
    levels = levels.reshape(-1, *values.shape[1:])
    expected = np.zeros(codes.code.shape, np.uint8)
    for token, level in enumerate(levels):
        for at in np.ndindex(level.shape):
            expected[(token // (8 // bits), *at)] |= level[at] << bits * (token % (8 // bits))
    assert np.array_equal(codes.code.numpy(), expected)


@pytest.mark.parametrize("bits", SKETCH_BITS)
@settings(deadline=None, max_examples=40)
@given(groups=st.integers(1, 3), seed=st.integers(0, 999), into=st.booleans())
def test_any_code_unpacks_as_a_loop_over_its_bits_says(
    bits: int, groups: int, seed: int, into: bool
) -> None:
    generator = np.random.default_rng(seed)
    rows = groups * GROUP_TOKENS * bits // 8
    code = torch.from_numpy(generator.integers(0, 256, (rows, 2, 3), dtype=np.uint8))
    halves = (torch.from_numpy(generator.standard_normal((groups, 2, 3))).half() for _ in range(2))
    codes = Codes(code, *halves)
    out = torch.full((groups * GROUP_TOKENS, 2, 3), torch.nan) if into else None
    found = unpack(codes, bits, out)
    assert found.dtype == torch.float32
    assert out is None or found.data_ptr() == out.data_ptr()
    assert np.array_equal(found.numpy(), naive_unpack(codes, bits))


@pytest.mark.parametrize("bits", SKETCH_BITS)
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 128, 130])
def test_shapes_follow_from_the_number_of_tokens(bits: int, tokens: int) -> None:
    codes = quantise(torch.randn(tokens, 2, 5), bits)
    groups = -(-tokens // 64)
    assert codes.code.shape == (groups * 8 * bits, 2, 5) == (sketch.code_rows(tokens, bits), 2, 5)
    assert codes.scale.shape == codes.zero.shape == (groups, 2, 5)
    assert (codes.code.dtype, codes.scale.dtype) == (torch.uint8, torch.float16)
    assert unpack(codes, bits).shape == (groups * 64, 2, 5)


@pytest.mark.parametrize("bits", SKETCH_BITS)
def test_groups_do_not_know_of_each_other_nor_channels(bits: int) -> None:
    values = torch.randn(150, 2, 3)
    whole = quantise(values, bits)
    last = quantise(values[128:], bits)
    one = quantise(values[:, 1:, 2:], bits)
    assert all(torch.equal(a[-len(b) :], b) for a, b in zip(whole, last, strict=True))
    assert all(torch.equal(a[:, 1:, 2:], b) for a, b in zip(whole, one, strict=True))


@pytest.mark.parametrize("bits", SKETCH_BITS)
@pytest.mark.parametrize("tokens", [1, 7, 64, 100])
def test_padding_repeats_the_last_token(bits: int, tokens: int) -> None:
    values = torch.randn(tokens, 1, 4)
    padded = torch.cat([values, values[-1:].expand(-tokens % 64, -1, -1)])
    found, expected = quantise(values, bits), quantise(padded, bits)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("bits", SKETCH_BITS)
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -1.7, 3.3e-5, 6e-8, -1e-9, 1e-40, 65504.0, -6e4])
def test_a_constant_channel_is_what_float16_makes_of_it(bits: int, value: float) -> None:
    codes = quantise(torch.full((70, 1, 1), value), bits)
    assert (codes.scale == 0).all()
    assert (codes.code == 0).all()
    assert unpack(codes, bits).unique().tolist() == [float(np.float16(value))]


@pytest.mark.parametrize("bits", SKETCH_BITS)
def test_a_group_of_as_many_values_as_codes_comes_back_exactly(bits: int) -> None:
    levels = torch.arange(2.0**bits) * 0.5 - 3
    values = levels.repeat(GROUP_TOKENS // len(levels))[:, None, None]
    assert torch.equal(unpack(quantise(values, bits), bits), values)


@pytest.mark.parametrize("bits", SKETCH_BITS)
@pytest.mark.parametrize(
    ("low", "high"),
    [
        (-3e38, 3e38),
        (-torch.inf, torch.inf),
        (0.0, torch.inf),
        (-torch.inf, -1.0),
        (1e30, 2e30),
        (-7e4, 7e4),
        (0.0, 1e6),
        (-1e-45, 1e-45),
        (0.0, 1e-8),
        (6e4, 6e4 + 0.01),
    ],
)
def test_whatever_the_keys_their_copies_are_finite(bits: int, low: float, high: float) -> None:
    # The middle token is 0 or the bound nearest to it.
    values = torch.tensor([low, min(max(0.0, low), high), high])[:, None, None]
    codes = quantise(values, bits)
    assert torch.isfinite(codes.scale).all()
    assert torch.isfinite(codes.zero).all()
    decoded = unpack(codes, bits)[:3, 0, 0]
    assert torch.isfinite(decoded).all()
    assert decoded[0] <= decoded[1] <= decoded[2]


@pytest.mark.parametrize("bits", SKETCH_BITS)
def test_values_beyond_float16_are_as_close_as_a_code_can_be(bits: int) -> None:
    values = torch.tensor([0.0, 150_000.0])[:, None, None]
    decoded = unpack(quantise(values, bits), bits)[:2, 0, 0]
    assert decoded[1] == pytest.approx(150_000, rel=0.2)


@pytest.mark.parametrize("bits", SKETCH_BITS)
def test_a_key_that_is_not_a_number_does_not_spread(bits: int) -> None:
    values = torch.randn(128, 1, 2)
    values[3, 0, 1] = torch.nan
    codes = quantise(values, bits)
    clean = quantise(values[64:], bits)
    assert (unpack(codes, bits)[:64, 0, 1] == 0).all()
    assert torch.equal(unpack(codes, bits)[64:], unpack(clean, bits))
    assert torch.equal(
        unpack(codes, bits)[:64, :, 0], unpack(quantise(values[:64], bits), bits)[..., 0]
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_keys_of_half_precision_are_quantised_by_value(dtype: torch.dtype) -> None:
    values = torch.randn(100, 2, 8).to(dtype)
    found, expected = quantise(values, 2), quantise(values.float(), 2)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_keys_in_another_layout_give_codes_in_the_order_of_the_file() -> None:
    values = torch.randn(2, 130, 8)
    found = quantise(values.transpose(0, 1), 2)
    expected = quantise(values.transpose(0, 1).contiguous(), 2)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert all(part.is_contiguous() for part in found)


def test_the_callers_keys_stay_as_they_were() -> None:
    values = torch.randn(64, 2, 4)
    before = values.clone()
    quantise(values, 2)
    assert torch.equal(values, before)


def test_more_bits_come_closer() -> None:
    values = torch.randn(640, 2, 16)
    errors = [
        float((unpack(quantise(values, bits), bits) - values).square().mean()) for bits in (2, 4)
    ]
    assert errors[1] < errors[0] / 8
    assert errors[0] < 0.13  # of a variance of 1; the whole range would give 0.17


@pytest.mark.parametrize("bits", [0, 1, 3, 8])
def test_other_widths_are_refused(bits: int) -> None:
    with pytest.raises(
        InvalidValueError, match=f"a sketch of {bits} bits is not known; use 2 or 4"
    ):
        quantise(torch.zeros(1, 1, 1), bits)
