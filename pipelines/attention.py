"""Run a transformers model on a QueryRun: the only module that knows its attention interface.

No transformers cache is involved: the run holds keys and values, positions are passed
explicitly, and the run reaches the attention function as a keyword argument of the forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, PreTrainedModel

from pipelines.quiet import quiet_transformers
from store.attend import can_split
from store.query_run import QueryRun

ATTENTION = "impress"

#: Tokens that run through the model at once where attention needs a mask: longer segments need
#: larger masks, shorter ones leave the matrix products inefficient (docs/decisions.md).
SEGMENT_TOKENS = 1024
#: Memory for the activations of a segment whose attention needs no mask.
ACTIVATION_BYTES = 1 << 30


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    impress_run: QueryRun | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over the run's prefix and the new tokens.

    ``query`` (1, num_heads, m, head_dim), ``key`` and ``value`` (1, num_kv_heads, m, head_dim),
    after the position encoding; returns (1, m, num_heads, head_dim).
    """
    assert impress_run is not None, "the model was called without its QueryRun"
    assert attention_mask is None, "an attention mask reached the engine, which makes its own"
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    out = impress_run.attend(layer, query[0], key[0], value[0], scaling)
    return out.transpose(0, 1)[None], None


AttentionInterface.register(ATTENTION, _attend)


def use_attention(model: PreTrainedModel, implementation: str = ATTENTION) -> None:
    """Select the attention implementation: the engine's, or ``sdpa`` for a plain forward."""
    if model.config._attn_implementation != implementation:
        with quiet_transformers():
            model.set_attn_implementation(implementation)


@torch.inference_mode()
def forward(
    model: PreTrainedModel, run: QueryRun, ids: np.ndarray, *, logits: int
) -> torch.Tensor | None:
    """Run tokens through the model, after those the run has.

    Parameters
    ----------
    ids
        uint32 [m], m ≥ 1.
    logits
        Of how many of the last positions logits are wanted; no other position's are computed.

    Returns
    -------
    float [logits, vocab], or None for 0.

    Raises
    ------
    ChunkLoadError
        A layer's stored KV could not be loaded; the run is of no further use.
    """
    use_attention(model)
    device = next(model.parameters()).device
    tokens = torch.from_numpy(ids.astype(np.int64)).to(device)
    positions = torch.arange(run.position, run.position + len(ids), device=device)
    # Without logits the head is left out altogether.
    target: Callable[..., Any] = model if logits else model.base_model
    extra = {"logits_to_keep": logits} if logits else {}
    out = target(
        input_ids=tokens[None],
        position_ids=positions[None],
        use_cache=False,
        impress_run=run,
        **extra,
    )
    run.advance(len(ids))
    return out.logits[0] if logits else None


def prefill(
    model: PreTrainedModel,
    run: QueryRun,
    ids: np.ndarray,
    *,
    logits: int,
    on_segment: Callable[[int], None] | None = None,
) -> torch.Tensor | None:
    """`forward` in segments; ``on_segment`` gets the tokens of each when it is done.

    ``logits`` counts positions of the last segment; more than it has are not available.
    """
    out, done = None, 0
    while done < len(ids):
        unmasked = run.position == 0 or can_split(model.device)
        size = long_segment_tokens(model) if unmasked else SEGMENT_TOKENS
        part = ids[done : done + size]
        done += len(part)
        out = forward(model, run, part, logits=logits if done == len(ids) else 0)
        if on_segment is not None:
            on_segment(len(part))
    return out


def long_segment_tokens(model: PreTrainedModel) -> int:
    """Tokens whose activations take about `ACTIVATION_BYTES`."""
    config = model.config
    inner = getattr(config, "intermediate_size", None) or getattr(config, "ffn_dim", 0)
    # At most about this many vectors of a token are alive at once in a layer.
    values = 8 * int(config.hidden_size) + 3 * int(inner or 0)
    return max(SEGMENT_TOKENS, ACTIVATION_BYTES // (values * model.dtype.itemsize))
