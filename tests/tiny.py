"""Tiny random models: every kind of attention and family, no downloads, built in milliseconds."""

from __future__ import annotations

from pathlib import Path

from pipelines.models import LoadedModel, load_model

#: Family in test tables -> shape in ``pipelines.random_models.SHAPES``. All have 3 layers,
#: hidden size 64, 4 heads of 16, 257 tokens (256 bytes and the end of text).
TINY_SHAPES = {
    "mha": "tiny-mha",
    "gqa": "tiny-gqa",
    "mqa": "tiny-mqa",
    "opt": "tiny-opt",
    "qwen2": "tiny-qwen2",
    "qwen3": "tiny-qwen3",
    "mistral": "tiny-mistral",
}


def make_tiny(
    family: str = "gqa",
    *,
    layers: int = 3,
    positions: int = 1024,
    seed: int = 0,
    dtype: str = "float32",
) -> LoadedModel:
    """A tiny model of one of `TINY_SHAPES`, on the CPU; weights depend on ``seed`` alone."""
    options = f"layers={layers}&positions={positions}&seed={seed}"
    return load_model(f"random:{TINY_SHAPES[family]}?{options}", dtype=dtype, device="cpu")


def save_tiny(folder: Path, family: str = "gqa", **options: int) -> Path:
    """Write a tiny model and its tokenizer as transformers does; returns ``folder``."""
    tiny = make_tiny(family, **options)
    tiny.model.save_pretrained(folder)
    tiny.tokenizer.save_pretrained(folder)
    return folder
