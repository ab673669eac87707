"""What people write themselves: transformers' own cache in a safetensors file, loaded whole.

The only module that knows transformers' cache. It shares nothing with the store: no chunks, no
index, no tiers, no checksums. Attention is transformers' ``sdpa``.
"""

from __future__ import annotations

import mmap
import os
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from pipelines.attention import use_attention
from store.disk.io import Throttle
from store.disk.writer import disk_errors
from store.types import KVShape

if TYPE_CHECKING:
    from pipelines.models import LoadedModel

#: Gives keys and values of a layer, [n, kv_heads, head_dim] in the storage dtype.
LayerKV = Callable[[int], tuple[np.ndarray, np.ndarray]]
#: Ending of a file that is still being written.
PART = ".tmp"


class DiyAnswer(NamedTuple):
    """``logits`` float [vocab] of the first token; seconds to it, and of loading the file."""

    logits: torch.Tensor
    ttft_s: float
    load_s: float
    file_bytes: int


def save_cache(path: Path, layers: LayerKV, shape: KVShape) -> None:
    """Write a prefix's keys and values, [1, kv_heads, n, head_dim] each, to disk.

    Raises
    ------
    StoreFullError, StoreWriteError
        Nothing of it is left.
    """
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(shape.num_layers):
        for name, rows in zip(("keys", "values"), layers(layer), strict=True):
            raw = torch.from_numpy(np.ascontiguousarray(rows).view(np.uint8))
            kv = raw.view(shape.torch_dtype).reshape(rows.shape)
            tensors[f"{name}.{layer}"] = kv.transpose(0, 1)[None].contiguous()
    made = path.with_suffix(PART)
    try:
        with disk_errors(path):
            _save(tensors, made)
            # Only what is on disk can leave the page cache.
            with made.open("rb") as file:
                os.fsync(file.fileno())
            made.replace(path)
    finally:
        made.unlink(missing_ok=True)


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write a file. Raises OSError, which safetensors hides in a text of its own."""
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        code = re.search(r"os error (\d+)", str(error))
        if code is None:
            raise OSError(str(error)) from error
        raise OSError(int(code[1]), os.strerror(int(code[1]))) from error


def drop_pages(path: Path) -> None:
    """Take a file out of the page cache, where the system can, so that it is read from disk."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_pages(tensors: Iterable[torch.Tensor]) -> None:
    """Have tensors of a mapped file read now: a byte of each page that they lie in."""
    for tensor in tensors:
        raw = tensor.view(torch.uint8).flatten()
        # A tensor begins anywhere in its first page, and at the start of all others.
        second = -raw.data_ptr() % mmap.PAGESIZE
        int(raw[:1].sum() + raw[second :: mmap.PAGESIZE].sum())


@torch.inference_mode()
def answer_diy(
    path: Path, model: LoadedModel, query: np.ndarray, throttle: Throttle | None = None
) -> DiyAnswer:
    """Answer a query of uint32 [m] behind the prefix in ``path``, which is read cold.

    ``throttle`` emulates a slower disk: the file is there no sooner than that had read it in one
    request.
    """
    drop_pages(path)
    use_attention(model.model, "sdpa")
    size, layers = path.stat().st_size, model.shape.num_layers
    began = time.perf_counter()
    slower = throttle if throttle is not None and throttle.active else None
    ready = slower.reserve(size) if slower is not None else began
    held = load_file(path, device=str(model.device))
    # The file is only mapped so far: what is not read here, its first use would wait for.
    read_pages(held.values())
    if slower is not None:
        slower.wait_until(ready)
    cache = DynamicCache([(held[f"keys.{n}"], held[f"values.{n}"]) for n in range(layers)])
    load_s = time.perf_counter() - began
    tokens = torch.from_numpy(query.astype(np.int64))[None].to(model.device)
    call: Any = model.model
    logits = call(input_ids=tokens, cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
    int(logits.argmax())  # the first token: the clock stops when it is known
    return DiyAnswer(logits, time.perf_counter() - began, load_s, size)
