"""What many tests need: references by plain transformers, stores, token ids, damage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipelines.attention import prefill, use_attention
from pipelines.generate import Answer, QueryOptions, answer
from pipelines.models import LoadedModel
from store.disk.io import IOOptions
from store.engine import PrefixStore
from store.itf.options import SparseOptions
from store.probes import ProbeSettings

SHARED = Path(__file__).parents[2] / "shared" / "data"


def ids_of(count: int, seed: int = 0) -> np.ndarray:
    """Random token ids of the tiny vocabulary, uint32 [count]; no end-of-text token."""
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint32)


def new_store(path: Path, model: LoadedModel, **options: Any) -> PrefixStore:
    """An empty store for ``model`` whose unread memory is NaN."""
    io, probes = options.pop("io", IOOptions(poison=True)), options.pop("probes", "none")
    store = PrefixStore.create(
        path, identity=model.identity, model_spec=model.spec, io=io, **options
    )
    if probes != "none":
        set_probes(store, probes)
    return store


def set_probes(store: PrefixStore, kinds: str, bits: int = 2) -> None:
    """Say which sidecars nodes that are stored from now on get: heads, sketch or both."""
    shape = store.shape
    probed = tuple(range(max(1, min(3, shape.num_kv_heads // 2))))
    store.set_probes(
        ProbeSettings(
            sketch_bits=bits if kinds in ("sketch", "both") else None,
            heads=(probed,) * shape.num_layers if kinds in ("heads", "both") else None,
        )
    )


def open_store(path: Path, model: LoadedModel, **io: Any) -> PrefixStore:
    """Open a store with NaN in unread memory."""
    return PrefixStore.open(path, identity=model.identity, io=IOOptions(poison=True, **io))


def put(store: PrefixStore, model: LoadedModel, ids: np.ndarray, name: str = "p") -> Answer:
    """Store a prefix by asking a question about it."""
    return ask(store, model, ids, ids_of(3, seed=99), insert="exact", name=name)


def compute_and_store(store: PrefixStore, model: LoadedModel, ids: np.ndarray, name: str) -> None:
    """Store a prefix as `build` does: prefilled by itself, without a question."""
    run, match = store.begin(ids, max_new_tokens=0)
    with run:
        start = match.matched_len
        prefill(model.model, run, ids[start:], logits=0)
        store.insert(ids, lambda layer: run.kv(layer, start, len(ids)), start, name=name)


def shuffle(store: PrefixStore, seed: int = 0) -> None:
    """Reorder every node, each layer by a permutation of its own; the same for the same seed."""
    layers = store.shape.num_layers
    for node in store.nodes():
        drawn = np.random.default_rng([seed, node.start, node.length])
        rows = [drawn.permutation(node.length) for _ in range(layers)]
        store.reorder(node.node_id, np.array(rows, dtype=np.int32))


def ask(
    store: PrefixStore,
    model: LoadedModel,
    prefix: np.ndarray,
    question: np.ndarray,
    *,
    tokens: int = 1,
    insert: str = "never",
    plan: str = "auto",
    name: str | None = None,
    sparse: SparseOptions | None = None,
) -> Answer:
    """Answer ``question`` after ``prefix``."""
    options = QueryOptions(
        max_new_tokens=tokens, insert=insert, plan=plan, sparse=sparse or SparseOptions()
    )
    return answer(store, model, prefix, question, options=options, name=name, source={})


@torch.inference_mode()
def reference_logits(model: LoadedModel, ids: np.ndarray) -> torch.Tensor:
    """Logits [vocab] of the last position by transformers' own full prefill."""
    use_attention(model.model, "sdpa")
    tokens = torch.from_numpy(ids.astype(np.int64))[None]
    return model.model(tokens, use_cache=False, logits_to_keep=1).logits[0, -1]


def worst(given: Answer, model: LoadedModel, prefix: np.ndarray, question: np.ndarray) -> float:
    """Largest absolute difference between an answer's logits and the reference's."""
    expected = reference_logits(model, np.concatenate([prefix, question]))
    return float((given.logits - expected).abs().max())


def flip_bit(path: Path, at: int) -> None:
    """Flip the lowest bit of byte ``at``."""
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def group_of(store: PrefixStore, node_id: str | None = None) -> Path:
    """Folder of a node's published generation (of the only node by default)."""
    rows = [row for row in store.nodes() if node_id in (None, row.node_id)]
    assert len(rows) == 1
    row = rows[0]
    return store.path / "nodes" / row.node_id[:2] / row.node_id / f"g{row.generation}"
