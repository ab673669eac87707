"""transformers' cache in a file: all of it is read while loading; a failed write leaves none."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from pipelines.diy import answer_diy, read_pages, save_cache
from store.errors import StoreFullError, StoreWriteError
from store.types import KVShape
from tests.helpers import ids_of

SHAPE = KVShape(num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16, dtype="float32")
MAPS = Path("/proc/self/smaps")
needs_maps = pytest.mark.skipif(not MAPS.exists(), reason="no list of mapped pages here")


def resident(path: Path) -> int:
    """Bytes of a mapped file that this process has pages of."""
    total, ours = 0, False
    for line in MAPS.read_text().splitlines():
        head = line.split()
        if "-" in head[0] and not head[0].endswith(":"):
            ours = line.endswith(str(path))
        elif ours and head[0] == "Rss:":
            total += 1024 * int(head[1])
    return total


def kv(tokens: int) -> Any:
    rng = np.random.default_rng(3)
    rows = [rng.standard_normal((2, tokens, 2, 16)).astype(np.float32) for _ in range(3)]
    return lambda layer: (rows[layer][0], rows[layer][1])


@needs_maps
def test_a_file_is_in_memory_before_anything_is_made_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = tmp_path / "cache.safetensors", list[int]()
    save_cache(path, kv(2000), SHAPE)

    def take(layers: Any) -> None:
        seen.append(resident(path))

    def forward(**_: Any) -> Any:
        return SimpleNamespace(logits=torch.zeros(1, 1, 5))

    monkeypatch.setattr("pipelines.diy.DynamicCache", take)
    monkeypatch.setattr("pipelines.diy.use_attention", lambda model, name: None)
    model: Any = SimpleNamespace(model=forward, shape=SHAPE, device=torch.device("cpu"))
    answer_diy(path, model, ids_of(3))
    assert len(seen) == 1
    assert seen[0] > 0.98 * path.stat().st_size > 1e6


@needs_maps
@pytest.mark.parametrize("sizes", [(1, 5000, 3, 40_000), (4096, 4096), (700_001,)])
def test_every_page_is_touched_wherever_a_tensor_begins(
    tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    path = tmp_path / "bytes.safetensors"
    save_file({f"{n}": torch.ones(size, dtype=torch.uint8) for n, size in enumerate(sizes)}, path)
    held = load_file(path)
    before = resident(path)
    read_pages(held.values())
    assert resident(path) >= sum(sizes)
    assert before < 700_000


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_fails_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    with largest_file(50_000), pytest.raises(StoreWriteError, match="File too large"):
        save_cache(path, kv(200), SHAPE)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StoreWriteError, match="No such file"):
        save_cache(tmp_path / "none" / "cache.safetensors", kv(20), SHAPE)


def test_a_full_disk_is_told_from_other_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tensors: object, path: Path) -> None:
        path.write_bytes(b"part")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("pipelines.diy.save_file", full)
    with pytest.raises(StoreFullError, match="no space left"):
        save_cache(tmp_path / "cache.safetensors", kv(20), SHAPE)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_write_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(tensors: object, path: Path) -> None:
        path.write_bytes(b"part")
        raise KeyboardInterrupt

    monkeypatch.setattr("pipelines.diy.save_file", stop)
    with pytest.raises(KeyboardInterrupt):
        save_cache(tmp_path / "cache.safetensors", kv(20), SHAPE)
    assert list(tmp_path.iterdir()) == []
