"""A dense reference for sparse runs: everything is computed, and what a run left out is masked."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface

from pipelines.attention import prefill, use_attention
from pipelines.models import LoadedModel
from store.engine import PrefixStore
from store.itf.options import SparseOptions
from store.query_run import QueryRun

REFERENCE = "masked-reference"


def _masked(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    seen: list[torch.Tensor] | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Plain attention in float64; ``seen[layer]`` is bool [kv_heads, tokens, tokens]."""
    assert seen is not None
    groups = key.shape[1]
    q = query[0].double().unflatten(0, (groups, -1))
    scores = torch.einsum("ghqd,gkd->ghqk", q, key[0].double())
    scores = scores * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    visible = seen[int(module.layer_idx)][:, None]  # type: ignore[arg-type]
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    out = torch.einsum("ghqk,gkd->ghqd", weights, value[0].double()).flatten(0, 1)
    return out.to(query.dtype).transpose(0, 1)[None], None


AttentionInterface.register(REFERENCE, _masked)


@torch.inference_mode()
def masked_logits(model: LoadedModel, ids: np.ndarray, kept: list[np.ndarray], n: int) -> Any:
    """Logits [len(ids) - n, vocab] where tokens from n on see only ``kept`` of the prefix.

    ``kept``: per layer int64 [kv_heads, k]. The prefix itself is computed with full attention.
    """
    total = len(ids)
    seen = []
    for positions in kept:
        visible = torch.ones(len(positions), total, total, dtype=torch.bool).tril_()
        visible[:, n:, :n] = False
        for head, places in enumerate(positions):
            visible[head, n:, torch.from_numpy(places.copy())] = True
        seen.append(visible)
    use_attention(model.model, REFERENCE)
    tokens = torch.from_numpy(ids.astype(np.int64))[None]
    return model.model(tokens, use_cache=False, seen=seen).logits[0, n:]


def sparse_run(
    store: PrefixStore,
    model: LoadedModel,
    prefix: np.ndarray,
    question: np.ndarray,
    options: SparseOptions,
    **begin: Any,
) -> tuple[QueryRun, torch.Tensor]:
    """Run a question; returns the open run and its logits [len(ids) - matched, vocab]."""
    ids = np.concatenate([prefix, question])
    run, match = store.begin(ids, max_new_tokens=4, sparse=options, **begin)
    rest = ids[match.matched_len :]
    logits = prefill(model.model, run, rest, logits=len(rest))
    assert logits is not None
    return run, logits


def worst_sparse(
    store: PrefixStore,
    model: LoadedModel,
    prefix: np.ndarray,
    question: np.ndarray,
    options: SparseOptions,
) -> tuple[float, QueryRun]:
    """Largest difference between a sparse run's logits and the masked reference's."""
    run, logits = sparse_run(store, model, prefix, question, options)
    with run:
        kept = [run.kept(layer) for layer in range(run.shape.num_layers)]
        ids = np.concatenate([prefix, question])
        expected = masked_logits(model, ids, kept, run.matched_len)
        return float((logits - expected).abs().max()), run
