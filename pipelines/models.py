"""Load a model and its tokenizer, with the identity of its KV.

Owns the loaded model's value class and the loading itself. Finding files is `model_files`,
identity `identify`, random models `random_models`, the choice of dtype and device `devices`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from pipelines import random_models
from pipelines.devices import resolve_device, resolve_dtype, set_threads
from pipelines.families import require_supported
from pipelines.identify import make_identity, read_json, tokenizer_digest, weights_digest
from pipelines.model_files import ModelFolder, cache_root, digest_cache, locate
from pipelines.model_list import ModelEntry, list_models
from pipelines.progress import Progress, ProgressEvent, silent
from pipelines.quiet import quiet_transformers
from store.errors import ModelLoadError, UnsupportedModelError
from store.identity import ModelIdentity
from store.types import KV_DTYPES, KVShape

__all__ = ["LoadedModel", "ModelEntry", "list_models", "load_model", "resolve_dtype"]

#: Positions that a prefix cut at the model's limit leaves free, in tokens.
QUESTION_ROOM = 256
#: End-of-turn tokens of chat models; many list only the end of text as their end.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>")
#: What transformers raises for files it can't use.
_LOAD_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    RuntimeError,
    ImportError,
    SafetensorError,
)


@dataclass(slots=True, eq=False)
class LoadedModel:
    """A model ready to run: in eval mode, without gradients, on ``device``.

    ``spec`` finds the model again from any working directory. ``stop_ids`` end an answer.
    ``synthetic`` marks random weights: every output made with them must say so (``warnings``
    has the sentence). The attention implementation is the caller's to set.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    identity: ModelIdentity
    spec: str
    device: torch.device
    stop_ids: frozenset[int]
    warnings: list[str] = field(default_factory=list)
    synthetic: bool = False

    @property
    def shape(self) -> KVShape:
        """Shape of one token's KV."""
        return self.identity.shape

    @property
    def max_positions(self) -> int:
        """Most tokens (prompt and answer together) that have a position."""
        return self.identity.max_positions

    @property
    def prefix_limit(self) -> int:
        """Longest prefix that is stored: room is left for a question and its answer."""
        return self.max_positions - min(QUESTION_ROOM, self.max_positions // 4)


def load_model(
    spec: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    threads: int | None = None,
    progress: Progress | None = None,
    cache_dir: Path | None = None,
) -> LoadedModel:
    """Load what ``--model`` names.

    Parameters
    ----------
    spec
        ``smollm2-135m``, a folder, a ``.gguf`` file, a hub id, or ``random:<shape>?option=…``.
    dtype
        ``float32``, ``bfloat16``, ``float16``, or ``auto`` (see `resolve_dtype`).
    device
        ``cpu``, ``cuda``, ``cuda:<n>``, or ``auto``: the first CUDA device if there is one.
    threads
        Threads torch computes with in this process; None leaves them as they are.
    cache_dir
        Root for converted models and digests; by default ``impress`` in the user's cache.

    Raises
    ------
    InvalidValueError
        An argument outside what is allowed, or a spec that names nothing.
    ModelLoadError
        The model is missing or its files can't be used.
    UnsupportedModelError
        Its keys and values can't be reused; nothing was written.
    """
    target = resolve_device(device)
    resolved = resolve_dtype(dtype, target)
    set_threads(threads)
    root = cache_root(cache_dir)
    with quiet_transformers():
        if spec.startswith(random_models.PREFIX):
            return _load_random(spec, resolved, target)
        found = locate(spec, root, progress or silent)
        return _load_folder(found, resolved, target, root, progress or silent)


def _load_random(spec: str, dtype: str, device: torch.device) -> LoadedModel:
    shape = random_models.parse_random(spec)
    model = random_models.build_random(shape, dtype, device)
    identity = make_identity(
        model.config.to_dict(),
        dtype=dtype,
        weights=random_models.weights_text_digest(shape),
        tokenizer=random_models.tokenizer_text_digest(),
    )
    note = f"{spec} has random weights: its text means nothing, only its speed can be compared"
    tokenizer = random_models.byte_tokenizer()
    return _finish(model, tokenizer, identity, spec, device, [note], synthetic=True)


def _load_folder(
    found: ModelFolder, dtype: str, device: torch.device, root: Path, progress: Progress
) -> LoadedModel:
    """Check a folder, compute its identity, then load it."""
    folder, spec = found
    config = read_config(folder, spec)
    digests = digest_cache(root)
    try:
        identity = make_identity(
            config,
            dtype=dtype,
            weights=weights_digest(folder, digests, progress),
            tokenizer=tokenizer_digest(folder, digests),
        )
        progress(ProgressEvent("load model", 0, None, ""))
        model, tokenizer = _read_model(folder, dtype)
        _own_weights(model, device)
    except (ModelLoadError, UnsupportedModelError):
        raise
    except _LOAD_ERRORS as error:
        raise ModelLoadError(_load_failure(spec, error)) from error
    progress(ProgressEvent("load model", 1, 1, ""))
    return _finish(model, tokenizer, identity, spec, device, [], synthetic=False)


def read_config(folder: Path, spec: str) -> dict[str, Any]:
    """Full configuration of a model folder, after refusing what can't be used.

    Reads no weights, so that a model is refused before anything is written or computed.
    """
    if (folder / "adapter_config.json").is_file():
        raise UnsupportedModelError(
            f"{spec} holds an adapter, which changes keys and values; merge it into the model "
            "(merge_and_unload, then save_pretrained) and give that folder"
        )
    require_supported(read_json(folder / "config.json"), spec)
    try:
        config: dict[str, Any] = AutoConfig.from_pretrained(folder, local_files_only=True).to_dict()
    except _LOAD_ERRORS as error:
        raise ModelLoadError(_load_failure(spec, error)) from error
    require_supported(config, spec)
    return config


def _read_model(folder: Path, dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=KV_DTYPES[dtype][1], local_files_only=True, output_loading_info=True
    )
    model, info = loaded
    # transformers fills absent weights with random ones, anew in each process.
    absent = sorted(info["missing_keys"])
    if absent:
        raise ModelLoadError(
            f"the weights in {folder} lack {len(absent)} tensors ({', '.join(absent[:3])}); "
            "download the model again"
        )
    return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _own_weights(model: Any, device: torch.device) -> None:
    """Move the weights to ``device``, into memory of this process.

    transformers maps float32 files instead of reading them: a file rewritten in place would
    change the model under an identity that was computed before, and the first query would wait
    for page faults.
    """
    if device.type != "cpu":
        model.to(device)
        return
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def _load_failure(spec: str, error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return (
        f"can't load the model {spec}: {lines[0].rstrip('.')}; check that the folder is complete, "
        "or name another with --model"
    )


def _finish(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    identity: ModelIdentity,
    spec: str,
    device: torch.device,
    warnings: list[str],
    *,
    synthetic: bool,
) -> LoadedModel:
    model = model.eval().requires_grad_(False)
    stops = stop_ids(model, tokenizer)
    return LoadedModel(model, tokenizer, identity, spec, device, stops, warnings, synthetic)


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Token ids that end an answer: every end of text the model names, and the end of a turn."""
    generation = getattr(model, "generation_config", None)
    named = [
        *_as_ids(getattr(generation, "eos_token_id", None)),
        *_as_ids(getattr(model.config, "eos_token_id", None)),
        *_as_ids(tokenizer.eos_token_id),
    ]
    added = tokenizer.added_tokens_encoder
    return frozenset([*named, *(added[token] for token in _TURN_ENDS if token in added)])


def _as_ids(value: int | Iterable[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else [int(v) for v in value]
