"""Low-bit copies of keys: quantise, pack, unpack.

Per channel (KV head and dimension) and group of 64 tokens, counted from the node's start:
``key = code * scale + zero`` with codes of 2 or 4 bits, scale and zero in float16 (format.md).
A byte holds the codes of ``8 / bits`` tokens that follow each other, low bits first::

    2 bits, byte r of a channel:   bits 0-1: token 4r   2-3: 4r+1   4-5: 4r+2   6-7: 4r+3
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from store.errors import InvalidValueError

GROUP_TOKENS = 64
SKETCH_BITS = (2, 4)
#: Parts of the full range that are tried; what lies outside is clipped. A group of 64 values has
#: few at its ends, and four levels are better spent on the middle.
_RANGES = {2: (1.0, 0.85, 0.7), 4: (1.0, 0.9)}
_HALF_MAX = 65504.0
#: Beyond what 15 steps of the largest scale reach; a range of such values is still finite.
_FARTHEST = 2.0**20


class Codes(NamedTuple):
    """A packed copy of keys.

    ``code`` uint8 [groups * 64 * bits / 8, kv_heads, head_dim]; ``scale`` and ``zero`` float16
    [groups, kv_heads, head_dim].
    """

    code: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor


def check_bits(bits: int) -> int:
    """Return ``bits`` or raise `InvalidValueError`."""
    if bits not in SKETCH_BITS:
        raise InvalidValueError(f"a sketch of {bits} bits is not known; use 2 or 4")
    return bits


def group_count(tokens: int) -> int:
    """Groups of a node of ``tokens`` tokens."""
    return -(-tokens // GROUP_TOKENS)


def code_rows(tokens: int, bits: int) -> int:
    """Rows of ``code`` for a node of ``tokens`` tokens."""
    return group_count(tokens) * GROUP_TOKENS * bits // 8


def quantise(keys: torch.Tensor, bits: int) -> Codes:
    """Pack keys [n, kv_heads, head_dim] of one layer; the last group repeats the last token.

    Of a few ranges, each channel and group takes the one with the least squared error.
    """
    levels = 2 ** check_bits(bits) - 1
    values = _padded(keys.float()).contiguous().view(-1, GROUP_TOKENS, *keys.shape[1:])
    work = torch.empty_like(values)
    scale, zero = _best_range(values, bits, work)
    codes = _encode(values, scale, zero, levels, out=work)
    return Codes(_packed(codes, bits), scale.half(), zero.half())


def unpack(codes: Codes, bits: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """Approximate keys, float32 [groups * 64, kv_heads, head_dim]; the tail past n is padding.

    ``out`` takes the result without a new allocation.
    """
    code, per_byte = codes.code, 8 // bits
    rows, heads, dim = code.shape
    keys = torch.empty(rows * per_byte, heads, dim) if out is None else out
    planes = keys.view(rows, per_byte, heads, dim)
    for part in range(per_byte):
        plane = torch.bitwise_right_shift(code, part * bits)
        planes[:, part] = plane.bitwise_and_(2**bits - 1)
    grouped = keys.view(-1, GROUP_TOKENS, heads, dim)
    grouped.mul_(codes.scale.float()[:, None]).add_(codes.zero.float()[:, None])
    return keys


def _padded(keys: torch.Tensor) -> torch.Tensor:
    missing = -len(keys) % GROUP_TOKENS
    return keys if missing == 0 else torch.cat([keys, keys[-1:].expand(missing, -1, -1)])


def _best_range(
    values: torch.Tensor, bits: int, work: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero, float32 [groups, kv_heads, head_dim] with values that float16 has.

    ``values`` and the scratch ``work`` are [groups, 64, kv_heads, head_dim].
    """
    levels = 2**bits - 1
    low, high = (_finite(bound) for bound in (values.amin(1), values.amax(1)))
    best: list[torch.Tensor] = []
    for part in _RANGES[bits]:
        scale = ((high - low) * part / levels).clamp_(max=_HALF_MAX).half().float()
        zero = low + (high - low) * (1 - part) / 2
        zero = zero.clamp_(-_HALF_MAX, _HALF_MAX).half().float()
        decoded = _encode(values, scale, zero, levels, out=work)
        decoded.mul_(scale[:, None]).add_(zero[:, None])
        found = [decoded.sub_(values).square_().sum(1), scale, zero]
        if best:
            better = found[0] < best[0]
            pairs = zip(found, best, strict=True)
            found = [torch.where(better, new, old) for new, old in pairs]
        best = found
    return best[1], best[2]


def _finite(bound: torch.Tensor) -> torch.Tensor:
    """A group's end, as far out as a code can reach at all; not a number counts as 0."""
    return bound.nan_to_num_(nan=0.0).clamp_(-_FARTHEST, _FARTHEST)


def _encode(
    values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, levels: int, out: torch.Tensor
) -> torch.Tensor:
    """Codes as whole float32 numbers, in ``out``: memory at hand halves the time."""
    step = torch.where(scale > 0, scale, torch.ones_like(scale))
    torch.sub(values, zero[:, None], out=out)
    return out.div_(step[:, None]).round_().clamp_(0, levels)


def _packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Bytes [groups * 64 * bits / 8, kv_heads, head_dim]; summed in float32, which has them all."""
    parts = codes.reshape(-1, 8 // bits, *codes.shape[2:])
    packed = parts[:, -1].clone()
    for part in reversed(parts.unbind(1)[:-1]):
        packed.mul_(2**bits).add_(part)
    return packed.to(torch.uint8)
