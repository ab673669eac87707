"""KV shapes by name, for a replay that needs sizes and no model.

A name is one of the random models', with or without ``random:``, or a model's folder, of which the
configuration alone is read.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from pipelines.identify import make_identity
from pipelines.models import read_config
from pipelines.random_models import PREFIX, SHAPES, parse_random
from store.errors import InvalidValueError
from store.types import KVShape


def kv_shape(spec: str, dtype: str = "bfloat16") -> KVShape:
    """KV shape that ``spec`` names.

    Parameters
    ----------
    spec
        ``opt-30b``, ``random:opt-30b?layers=4``, or a folder with a ``config.json``.
    dtype
        Number format of the KV, of `store.types.KV_DTYPES`.

    Raises
    ------
    InvalidValueError
        Nothing has this name; the message lists the names.
    ModelLoadError, UnsupportedModelError
        The folder holds no configuration that can be used.
    """
    name = spec.removeprefix(PREFIX)
    if name.partition("?")[0] in SHAPES:
        found = parse_random(PREFIX + name)
        head_dim = found.hidden // found.heads
        return KVShape(found.layers, found.heads, found.kv_heads, head_dim, dtype)
    if Path(spec).is_dir():
        config = read_config(Path(spec), spec)
        return make_identity(config, dtype=dtype, weights="", tokenizer="").shape
    close = get_close_matches(name, SHAPES, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise InvalidValueError(
        f"no KV shape {spec!r}; {hint}use a model's folder or one of {', '.join(SHAPES)}"
    )
