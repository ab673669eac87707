"""Convert a GGUF file, once, into a transformers folder in the cache.

Owns the cache's layout (``<name>-<content digest>-v<n>/``), the lock between processes, and the
checks that a GGUF file needs on top of its family's: transformers reads only part of a GGUF's
metadata and would silently load a model with other positions.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers.modeling_gguf_pytorch_utils
from filelock import FileLock, Timeout
from gguf import GGUFReader
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from pipelines.families import require_supported
from pipelines.identify import DigestCache
from pipelines.progress import Progress, ProgressEvent
from store.errors import ModelLoadError, UnsupportedModelError

_LOADER: Any = transformers.modeling_gguf_pytorch_utils

#: Part of the folder's name: raised when a conversion would write something else.
CONVERSION = 1

_TASK = "convert GGUF"


def convert_gguf(gguf: Path, models_dir: Path, digests: DigestCache, progress: Progress) -> Path:
    """Folder with the float32 weights, configuration and tokenizer of a GGUF file.

    Converts on the first call for a content; later calls, and other processes that waited for
    the lock, reuse the folder. It appears in one rename, after it was written and synced.

    Raises
    ------
    ModelLoadError
        The file can't be read, or the cache can't be written.
    UnsupportedModelError
        The model is of a kind that can't be used; nothing was written.
    """
    try:
        digest = digests.digest(gguf)
        target = models_dir / f"{gguf.stem}-{digest[:12]}-v{CONVERSION}"
        if target.is_dir():
            return target
        _require_convertible(gguf, models_dir)
        models_dir.mkdir(parents=True, exist_ok=True)
        with _locked(models_dir / f".{target.name}.lock", progress):
            if not target.is_dir():
                _build(gguf, target, digest, progress)
    except (ModelLoadError, UnsupportedModelError):
        raise
    except OSError as error:
        raise ModelLoadError(
            f"can't convert {gguf} in the cache {models_dir} ({error}); free space or make it "
            "writable, or set XDG_CACHE_HOME to another folder"
        ) from error
    return target


def _require_convertible(gguf: Path, models_dir: Path) -> None:
    """Refuse what transformers can't convert faithfully, and a disk that is too small."""
    try:
        reader = GGUFReader(gguf)
    except (ValueError, IndexError, KeyError) as error:
        raise ModelLoadError(f"{gguf} is no readable GGUF file ({error}); get it again") from error
    fields = {
        name: field.contents() for name, field in reader.fields.items() if len(field.data) < 2
    }
    require_supported({"model_type": fields.get("general.architecture")}, str(gguf))
    _require_plain(fields, [tensor.name for tensor in reader.tensors], gguf)
    needed = 4 * sum(int(tensor.n_elements) for tensor in reader.tensors)
    free = shutil.disk_usage(_existing(models_dir)).free
    if needed > free:
        raise ModelLoadError(
            f"converting {gguf} needs {needed / 1e9:.1f} GB in {models_dir}, {free / 1e9:.1f} GB "
            "are free; free space or set XDG_CACHE_HOME to another folder"
        )


def _require_plain(fields: dict[str, Any], tensors: Iterable[str], gguf: Path) -> None:
    """Refuse metadata that changes keys and that transformers drops when it reads a GGUF."""
    architecture = fields["general.architecture"]
    dropped = [
        ("a sliding window", fields.get(f"{architecture}.attention.sliding_window")),
        ("experts", fields.get(f"{architecture}.expert_count")),
        ("RoPE factors (rope_freqs)", "rope_freqs.weight" in set(tensors)),
    ]
    scaling = fields.get(f"{architecture}.rope.scaling.type")
    if scaling not in (None, "none"):
        dropped.append((f"RoPE scaling {scaling!r}", True))
    for what, present in dropped:
        if present:
            raise UnsupportedModelError(
                f"{gguf} can't be used: {what} would be lost in conversion; use the model's "
                "safetensors folder or hub id"
            )


def _existing(path: Path) -> Path:
    """``path`` or its nearest ancestor that exists."""
    return next(p for p in (path, *path.absolute().parents) if p.exists())


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        progress(ProgressEvent(_TASK, 0, None, "", "waiting for another process"))
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _build(gguf: Path, target: Path, digest: str, progress: Progress) -> None:
    """Write the folder under a temporary name, sync it and rename it to ``target``."""
    # The lock is held, so a folder of this name was left by a process that was killed.
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        _write_folder(gguf, part, progress)
        source = {"gguf": gguf.name, "digest": digest, "conversion": CONVERSION}
        (part / "impress-source.json").write_text(json.dumps(source), encoding="utf-8")
        for file in [*part.iterdir(), part]:
            _sync(file)
        part.rename(target)
        _sync(target.parent)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _write_folder(gguf: Path, folder: Path, progress: Progress) -> None:
    """Weights, configuration and tokenizer of ``gguf`` as transformers writes them.

    ``save_pretrained`` refuses a model that came from a GGUF, because it can't quantise back.
    """
    with _tensor_progress(progress):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, output_loading_info=True
        )
    model, info = loaded
    if info["missing_keys"]:
        names = ", ".join(sorted(info["missing_keys"])[:3])
        raise ModelLoadError(f"{gguf} lacks weights ({names}); get the file again")
    require_supported({**model.config.to_dict(), "quantization_config": None}, str(gguf))
    progress(ProgressEvent(_TASK, 0, None, "", "writing"))
    save_file(_untied_state(model), folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict()
    for key in ("quantization_config", "_name_or_path"):
        config.pop(key, None)
    config["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    model.generation_config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    progress(ProgressEvent(_TASK, 1, 1, ""))


def _untied_state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """State dict without second names of one tensor, which safetensors can't hold."""
    seen: set[int] = set()
    state = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            state[name] = tensor.contiguous()
        seen.add(tensor.data_ptr())
    return state


@contextmanager
def _tensor_progress(progress: Progress) -> Iterator[None]:
    """Send the loader's own progress bar to ``progress``: it offers no other way to follow it."""
    original = getattr(_LOADER, "tqdm", None)

    def follow(items: Iterable[Any], **_options: Any) -> Iterator[Any]:
        known = list(items)
        for done, item in enumerate(known):
            progress(ProgressEvent(_TASK, done, len(known), "tensors"))
            yield item

    replacement: Callable[..., Iterator[Any]] = follow
    if original is not None:
        _LOADER.tqdm = replacement
    try:
        yield
    finally:
        if original is not None:
            _LOADER.tqdm = original


def _sync(path: Path) -> None:
    """Force a file or directory to disk, so that a power cut can't leave half of it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
