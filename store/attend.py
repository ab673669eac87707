"""Bottom-right causal attention of new tokens over a prefix and themselves.

Pure tensor code: it knows nothing of stores or runs. Keys and values are views of [rows,
kv_heads, head_dim] buffers; no path copies them, and none repeats a KV head for its query heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

#: From this many new tokens on, prefix and suffix are attended to apart and merged: a mask would
#: be large, and SDPA computes what a mask hides (docs/decisions.md).
SPLIT_TOKENS = 256
#: Masks larger than this are broadcast over a group's query heads instead of repeated for them.
MASK_BYTES = 64 << 20


def _flash() -> torch._ops.OpOverloadPacket | None:
    """The CPU kernel behind SDPA, which also gives the log-sum-exp; None in a torch without it."""
    return getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


def can_split(device: torch.device) -> bool:
    """Whether long suffixes need no mask on this device."""
    return device.type == "cpu" and _flash() is not None


class CausalAttention:
    """Attention of one run; keeps the mask of the current forward for its other layers."""

    def __init__(self) -> None:
        self._mask: tuple[tuple[int, int], torch.Tensor] | None = None

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """Attend; the last m of the n keys belong to the queries.

        Parameters
        ----------
        q
            [num_heads, m, head_dim]
        k, v
            [kv_heads, n, head_dim], n ≥ m
        scaling
            Factor of the scores, None for head_dim ** -0.5.

        Returns
        -------
        [num_heads, m, head_dim]
        """
        m, n = q.shape[1], k.shape[1]
        if m == n:
            return _grouped(q, k, v, None, scaling, causal=True)
        if m == 1:
            return _folded(q, k, v, None, scaling)
        if m > SPLIT_TOKENS and can_split(q.device):
            return _split(q, k, v, scaling)
        repeats = q.shape[0] // k.shape[0]
        if repeats * m * n * q.element_size() > MASK_BYTES:
            return _grouped(q, k, v, self._causal_mask(m, n, 1, q), scaling, causal=False)
        return _folded(q, k, v, self._causal_mask(m, n, repeats, q), scaling)

    def _causal_mask(self, m: int, n: int, repeats: int, q: torch.Tensor) -> torch.Tensor:
        """Additive mask [repeats * m, n]: row i sees columns up to n - m + i.

        ::

            columns   prefix, n - m     suffix, m
            row 0     0 0 0 0 0 0       0 - -        (- is minus infinity)
            row 1     0 0 0 0 0 0       0 0 -
        """
        key = (m, repeats)
        if self._mask is None or self._mask[0] != key or self._mask[1].shape[1] < n:
            mask = torch.zeros(m, n, dtype=q.dtype, device=q.device)
            future = torch.ones(m, m, dtype=torch.bool, device=q.device).triu_(1)
            mask[:, n - m :].masked_fill_(future, float("-inf"))
            self._mask = (key, mask.repeat(repeats, 1))
        # Layers that keep fewer prefix rows see the end of the same mask. Kernels of other devices
        # may want it aligned.
        part = self._mask[1][:, self._mask[1].shape[1] - n :]
        return part if part.device.type == "cpu" else part.contiguous()


def _folded(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
) -> torch.Tensor:
    """Fold the query heads of a KV head into the query length: each KV head is read once."""
    folded = q.reshape(1, k.shape[0], -1, q.shape[2])
    out = F.scaled_dot_product_attention(folded, k[None], v[None], mask, scale=scaling)
    return out.reshape(q.shape)


def _grouped(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    *,
    causal: bool,
) -> torch.Tensor:
    """Let the query heads of a KV head share it through a stride of zero."""
    grouped, shared_k, shared_v = _views(q, k, v)
    out = F.scaled_dot_product_attention(
        grouped, shared_k, shared_v, attn_mask=mask, is_causal=causal, scale=scaling
    )
    return out.reshape(q.shape)


def _views(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    groups, per_group = k.shape[0], q.shape[0] // k.shape[0]
    grouped = q.reshape(groups, per_group, *q.shape[1:])
    return (
        grouped,
        k[:, None].expand(-1, per_group, -1, -1),
        v[:, None].expand(-1, per_group, -1, -1),
    )


def _split(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """Attend to prefix and suffix apart, then weigh both by their share of the softmax.

    ::

        out = (e^a * prefix + e^b * suffix) / (e^a + e^b)    a, b: each part's log-sum-exp
    """
    flash = _flash()
    assert flash is not None
    prefix = k.shape[1] - q.shape[1]
    folded = q.reshape(1, k.shape[0], -1, q.shape[2])
    seen, a = flash(folded, k[None, :, :prefix], v[None, :, :prefix], 0.0, False, scale=scaling)
    grouped, own_k, own_v = _views(q, k[:, prefix:], v[:, prefix:])
    own, b = flash(grouped, own_k, own_v, 0.0, True, scale=scaling)
    share = torch.sigmoid(a.reshape(q.shape[:2]) - b.reshape(q.shape[:2]))[..., None]
    return torch.lerp(own.reshape(q.shape), seen.reshape(q.shape), share.to(q.dtype))
