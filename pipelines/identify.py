"""Compute a model's identity from its folder: digests of files, canonical configuration.

Owns what goes into each field of `store.identity.ModelIdentity` and the cache of file digests.
It loads no weights into a model and decides nothing about what is supported (`families`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipelines.families import rope_parameters
from pipelines.progress import Progress, ProgressEvent, silent
from store.errors import ModelLoadError
from store.identity import ModelIdentity

_LOG = logging.getLogger(__name__)

#: (single file, index of shards), in the order in which transformers looks for them.
_WEIGHTS = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
_TOKENIZER_FILES = (
    "added_tokens.json",
    "merges.txt",
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
)
#: Settings in tokenizer_config.json that change token ids. The chat template is not one of
#: them: it only writes text, and hits compare token ids.
_TOKENIZER_SETTINGS = (
    "add_bos_token",
    "add_eos_token",
    "add_prefix_space",
    "bos_token",
    "eos_token",
    "legacy",
    "unk_token",
)
#: Configuration fields that change keys or values, over all supported families. A list of what
#: counts rather than of what doesn't: a new transformers release that adds a field must not
#: make every store look foreign.
_CONFIG_FIELDS = (
    "_remove_final_layer_norm",
    "activation_function",
    "attention_bias",
    "do_layer_norm_before",
    "enable_bias",
    "ffn_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "layer_norm_elementwise_affine",
    "mlp_bias",
    "rms_norm_eps",
    "tie_word_embeddings",
    "vocab_size",
    "word_embed_proj_dim",
)
_READ_BYTES = 4 << 20


def hash_file(path: Path, on_bytes: Callable[[int], None] = lambda _n: None) -> str:
    """Hex blake2b (16 bytes) of a file's content; ``on_bytes`` gets each read's length."""
    state = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            state.update(block)
            on_bytes(len(block))
    return state.hexdigest()


class DigestCache:
    """File digests remembered by path, size and times, so that opening a model is fast.

    ``ctime`` counts as well as ``mtime``, because copying tools set the latter back. A file
    changed less than ``racy_s`` seconds ago is not remembered: a second change within the file
    system's time resolution would go unseen. The cache can be lost or damaged at any time.

    Parameters
    ----------
    path
        The JSON file; it need not exist, nor be writable.
    """

    def __init__(
        self, path: Path, *, racy_s: float = 2.0, clock: Callable[[], float] = time.time
    ) -> None:
        self._path = path
        self._racy_s = racy_s
        self._clock = clock

    def digest(self, file: Path, on_bytes: Callable[[int], None] = lambda _n: None) -> str:
        """Hex digest of ``file``'s content. Raises OSError if it can't be read."""
        real = file.resolve()
        stat = real.stat()
        key = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
        entry = self._read().get(str(real))
        if isinstance(entry, list) and len(entry) == 4 and entry[:3] == key:
            on_bytes(stat.st_size)
            return str(entry[3])
        value = hash_file(real, on_bytes)
        if self._clock() - max(stat.st_mtime, stat.st_ctime) > self._racy_s:
            self._remember(str(real), [*key, value])
        return value

    def _read(self) -> dict[str, Any]:
        try:
            data = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return data if isinstance(data, dict) else {}

    def _remember(self, name: str, entry: list[Any]) -> None:
        entries = {k: v for k, v in self._read().items() if Path(k).exists()}
        entries[name] = entry
        part = self._path.with_name(f"{self._path.name}.{os.getpid()}.part")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(entries, indent=1), encoding="utf-8")
            part.replace(self._path)
        except OSError as error:
            _LOG.info("digest of %s not remembered: %s", name, error)


def weight_files(folder: Path) -> list[Path]:
    """Files that hold the weights transformers would load from ``folder``, in name order.

    Raises
    ------
    ModelLoadError
        There are none, or the index names a shard that isn't there.
    """
    for single, index in _WEIGHTS:
        if (folder / single).is_file():
            return [folder / single]
        if (folder / index).is_file():
            return _shards(folder, index)
    raise ModelLoadError(
        f"no weights in {folder}: expected model.safetensors or pytorch_model.bin (or their "
        "index and shards); copy them there or name another model"
    )


def _shards(folder: Path, index: str) -> list[Path]:
    names = set(read_json(folder / index).get("weight_map", {}).values())
    missing = sorted(name for name in names if not (folder / name).is_file())
    if missing or not names:
        raise ModelLoadError(
            f"{folder / index} names weight files that are missing ({', '.join(missing) or 'all'}"
            "); download the model again"
        )
    return sorted(folder / name for name in names)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model's folder. Raises ModelLoadError if it can't be read."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(
            f"can't read {path} ({error}); name a folder with a complete transformers model"
        ) from error
    if not isinstance(data, dict):
        raise ModelLoadError(f"{path} holds no JSON object; download the model again")
    return data


def weights_digest(folder: Path, cache: DigestCache, progress: Progress = silent) -> str:
    """Hex digest over names and contents of the weight files, in name order."""
    files = weight_files(folder)
    total = sum(file.stat().st_size for file in files)
    done = 0

    def count(size: int) -> None:
        nonlocal done
        done += size
        progress(ProgressEvent("check weights", done, total, "bytes"))

    return digest_of({file.name: cache.digest(file, count) for file in files})


def has_tokenizer(folder: Path) -> bool:
    """Whether ``folder`` holds any tokenizer file."""
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def tokenizer_digest(folder: Path, cache: DigestCache) -> str:
    """Hex digest over everything in ``folder`` that decides token ids."""
    parts = {n: cache.digest(folder / n) for n in _TOKENIZER_FILES if (folder / n).is_file()}
    if not parts:
        raise ModelLoadError(
            f"no tokenizer in {folder}: expected tokenizer.json, tokenizer.model or vocab.json; "
            "copy it there or name another model"
        )
    settings = folder / "tokenizer_config.json"
    if settings.is_file():
        values = read_json(settings)
        parts["settings"] = canonical({k: values[k] for k in _TOKENIZER_SETTINGS if k in values})
    return digest_of(parts)


def digest_of(parts: Mapping[str, str]) -> str:
    """Hex blake2b (16 bytes) of a mapping of names to texts, whatever its order."""
    return hashlib.blake2b(canonical(parts).encode(), digest_size=16).hexdigest()


def canonical(value: Any) -> str:
    """JSON text that is equal for equal values: sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def rope_json(config: Mapping[str, Any]) -> str:
    """Canonical position encoding; ``10000`` and ``10000.0`` are the same theta."""
    if config.get("model_type") == "opt":
        return canonical({"type": "learned"})
    rope = rope_parameters(config)
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type", "default")
    return canonical({k: _as_float(v) for k, v in rope.items() if v is not None})


def _as_float(value: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else value


def make_identity(
    config: Mapping[str, Any], *, dtype: str, weights: str, tokenizer: str
) -> ModelIdentity:
    """Identity of a model from its full configuration (``PretrainedConfig.to_dict()``).

    ``dtype`` is resolved; ``weights`` and ``tokenizer`` are hex digests. ``adapter`` is always
    ``"none"``: folders with an unmerged adapter are refused when they are loaded.
    """
    heads = int(config["num_attention_heads"])
    return ModelIdentity(
        architecture=str(config["model_type"]),
        num_layers=int(config["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
        max_positions=int(config["max_position_embeddings"]),
        rope=rope_json(config),
        dtype=dtype,
        config=canonical({k: config[k] for k in _CONFIG_FIELDS if k in config}),
        weights=weights,
        tokenizer=tokenizer,
    )
