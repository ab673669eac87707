"""Randomly initialised models of known shapes, for speed tests and for tests without downloads.

Owns the shapes, the ``random:<shape>?option=…`` syntax, the weights (a function of the shape and
the seed alone) and a tokenizer of bytes. Their text is meaningless.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any
from urllib.parse import parse_qsl

import psutil
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TokenizersBackend,
)
from transformers.initialization import no_init_weights

from pipelines.identify import canonical, digest_of
from store.errors import InvalidValueError
from store.types import KV_DTYPES

# transformers annotates neither of these.
_MODELS: Any = AutoModelForCausalLM
_TOKENIZERS: Any = TokenizersBackend

PREFIX = "random:"

#: Bytes 0–255, then the end of text.
BYTE_VOCAB = 257
_END_OF_TEXT = "<|endoftext|>"
_OPTIONS = ("kv_heads", "layers", "positions", "seed")


@dataclass(frozen=True, slots=True)
class RandomShape:
    """Shape of a random model; sizes as in the family's configuration."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int
    positions: int
    theta: float = 10000.0
    tied: bool = False
    seed: int = 0

    def to_config(self) -> dict[str, Any]:
        """Keyword arguments of the family's configuration class."""
        common = {
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "max_position_embeddings": self.positions,
            "bos_token_id": None,
            "eos_token_id": BYTE_VOCAB - 1,
            "pad_token_id": None,
            "tie_word_embeddings": self.tied,
        }
        if self.family == "opt":
            return {**common, "ffn_dim": self.inner, "word_embed_proj_dim": self.hidden}
        rope = {"rope_type": "default", "rope_theta": self.theta}
        if self.family == "mistral":
            common["sliding_window"] = None  # the class's default is a window of 4096
        return {
            **common,
            "intermediate_size": self.inner,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.hidden // self.heads,
            "rope_parameters": rope,
        }


def _opt(layers: int, hidden: int, heads: int) -> RandomShape:
    return RandomShape("opt", layers, hidden, heads, heads, 4 * hidden, 50272, 2048, tied=True)


def _tiny(family: str, kv_heads: int, *, tied: bool = False) -> RandomShape:
    return RandomShape(family, 3, 64, 4, kv_heads, 128, BYTE_VOCAB, 1024, tied=tied)


#: Every shape by name. ``tiny-*`` are for tests: one per kind of attention and family.
SHAPES: dict[str, RandomShape] = {
    "opt-125m": _opt(12, 768, 12),
    "opt-1.3b": _opt(24, 2048, 32),
    "opt-2.7b": _opt(32, 2560, 32),
    "opt-6.7b": _opt(32, 4096, 32),
    "opt-13b": _opt(40, 5120, 40),
    "opt-30b": _opt(48, 7168, 56),
    "llama-2-7b": RandomShape("llama", 32, 4096, 32, 32, 11008, 32000, 4096),
    "llama-2-13b": RandomShape("llama", 40, 5120, 40, 40, 13824, 32000, 4096),
    "llama-3.2-1b": RandomShape("llama", 16, 2048, 32, 8, 8192, 128256, 8192, 5e5, tied=True),
    "llama-3-8b": RandomShape("llama", 32, 4096, 32, 8, 14336, 128256, 8192, 5e5),
    "smollm2-135m": RandomShape("llama", 30, 576, 9, 3, 1536, 49152, 8192, 1e5, tied=True),
    "qwen2-0.5b": RandomShape("qwen2", 24, 896, 14, 2, 4864, 151936, 32768, 1e6, tied=True),
    "tiny-mha": _tiny("llama", 4),
    "tiny-gqa": _tiny("llama", 2),
    "tiny-mqa": _tiny("llama", 1),
    "tiny-opt": _tiny("opt", 4, tied=True),
    "tiny-qwen2": _tiny("qwen2", 2),
    "tiny-qwen3": _tiny("qwen3", 2),
    "tiny-mistral": _tiny("mistral", 2),
}


def parse_random(spec: str) -> RandomShape:
    """Shape meant by ``random:<shape>[?layers=…&positions=…&seed=…&kv_heads=…]``.

    Raises
    ------
    InvalidValueError
        Names the unknown shape or option, or the value out of range, and what is allowed.
    """
    name, _, query = spec.removeprefix(PREFIX).partition("?")
    if name not in SHAPES:
        close = get_close_matches(name, SHAPES, n=1)
        hint = f"did you mean {PREFIX}{close[0]}? " if close else ""
        raise InvalidValueError(
            f"no random model shape {name!r}; {hint}shapes: {', '.join(SHAPES)}"
        )
    options = _parse_options(query, spec)
    shape = replace(SHAPES[name], **options)
    if shape.heads % shape.kv_heads or (shape.family == "opt" and shape.kv_heads != shape.heads):
        allowed = [n for n in range(1, shape.heads + 1) if shape.heads % n == 0]
        allowed = allowed if shape.family != "opt" else [shape.heads]
        raise InvalidValueError(
            f"kv_heads={shape.kv_heads} does not fit {name} with {shape.heads} heads; "
            f"use one of {', '.join(map(str, allowed))}"
        )
    return shape


def _parse_options(query: str, spec: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for key, text in parse_qsl(query, keep_blank_values=True):
        if key not in _OPTIONS:
            raise InvalidValueError(
                f"unknown option {key!r} in {spec}; options: {', '.join(_OPTIONS)}"
            )
        least = 0 if key == "seed" else 1
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise InvalidValueError(
                f"{key}={text!r} in {spec} must be a whole number from {least} up, "
                f"as in {PREFIX}opt-1.3b?{key}={max(least, 4)}"
            )
        options[key] = int(text)
    return options


def build_random(shape: RandomShape, dtype: str, device: torch.device) -> PreTrainedModel:
    """Model of this shape with random weights, equal for a seed on every device.

    Raises InvalidValueError if the weights would not fit the memory that is free.
    """
    config = AutoConfig.for_model(shape.family, **shape.to_config())
    torch_dtype = KV_DTYPES[dtype][1]
    with torch.device("meta"):
        skeleton = _MODELS.from_config(config, dtype=torch_dtype)
    _require_memory(sum(p.nbytes for p in skeleton.parameters()), shape, device)
    with no_init_weights(), device:
        model: PreTrainedModel = _MODELS.from_config(config, dtype=torch_dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_random_tensor(name, parameter.shape, shape.seed))
    return model


def _require_memory(needed: int, shape: RandomShape, device: torch.device) -> None:
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
    else:
        free = psutil.virtual_memory().available
    if needed > free:
        raise InvalidValueError(
            f"a random {shape.family} of {shape.layers} layers needs {needed / 1e9:.1f} GB, "
            f"{free / 1e9:.1f} GB are free on {device}; use fewer layers (?layers=4) or "
            "--dtype bfloat16"
        )


def _random_tensor(name: str, size: torch.Size, seed: int) -> torch.Tensor:
    """Float32 values for one parameter, drawn from its own generator.

    Variances keep activations near 1 at any depth, so that attention is neither flat nor a
    single peak: norms near 1, biases small, matrices 1 / sqrt(inputs). The generator depends on
    the parameter's name, not on the order in which transformers lists them.
    """
    text = f"{seed}:{name}".encode()
    number = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")
    values = torch.empty(size, dtype=torch.float32)
    values.normal_(generator=torch.Generator().manual_seed(number))
    if len(size) > 1:
        return values.div_(size[-1] ** 0.5)
    return values.mul_(0.1).add_(1.0 if name.endswith("weight") else 0.0)


def weights_text_digest(shape: RandomShape) -> str:
    """Digest that stands for the weights: shape and seed decide every one of them."""
    return digest_of({"random": canonical({"seed": shape.seed, **shape.to_config()})})


def tokenizer_text_digest() -> str:
    """Digest that stands for `byte_tokenizer`."""
    return digest_of({"bytes": str(BYTE_VOCAB)})


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """Tokenizer whose token ids are the text's UTF-8 bytes, and 256 for the end of text."""
    # GPT-2's byte alphabet: printable bytes stand for themselves, the others for 256, 257, …
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + place) for place, byte in enumerate(others)}
    vocab = {letters[byte]: byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_END_OF_TEXT])
    made: PreTrainedTokenizerBase = _TOKENIZERS(tokenizer_object=tokenizer, eos_token=_END_OF_TEXT)
    return made
