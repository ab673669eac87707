"""What makes KV reusable: the model identity.

Owns the list of fields, their digest, and the error that names the field that differs. It does
not know where the values come from (``pipelines.models`` computes them from a model folder).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from store.errors import ModelMismatchError
from store.types import KVShape


class FieldDifference(NamedTuple):
    """One identity field that differs, values as text."""

    field: str
    stored: str
    given: str


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Everything that decides the value of a key or a value vector at a position.

    ``rope`` is the canonical JSON of the position encoding (``{"type": "learned"}`` for OPT);
    ``config`` the canonical JSON of the other configuration fields that change KV (hidden size,
    norms, activation, biases); ``weights``, ``tokenizer`` and ``adapter`` are hex digests
    (``adapter`` is ``"none"`` without one); ``dtype`` is the resolved dtype, never ``auto``.
    """

    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rope: str
    dtype: str
    config: str
    weights: str
    tokenizer: str
    adapter: str = "none"

    @property
    def shape(self) -> KVShape:
        """The KV shape that follows from the identity."""
        return KVShape(
            self.num_layers, self.num_heads, self.num_kv_heads, self.head_dim, self.dtype
        )

    def digest(self) -> str:
        """Hex digest (blake2b, 16 bytes) over all fields; equal in every process."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Fields as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ModelIdentity:
        """Inverse of `to_json`. Raises KeyError or TypeError for another set of fields."""
        return cls(**{field.name: data[field.name] for field in fields(cls)})

    def differences(self, given: ModelIdentity) -> list[FieldDifference]:
        """Fields in which ``given`` differs from this (the stored) identity, in field order."""
        return [
            FieldDifference(f.name, str(getattr(self, f.name)), str(getattr(given, f.name)))
            for f in fields(self)
            if getattr(self, f.name) != getattr(given, f.name)
        ]

    def require(self, given: ModelIdentity, where: str) -> None:
        """Raise `ModelMismatchError` unless ``given`` equals this (the stored) identity."""
        found = self.differences(given)
        if not found:
            return
        first = found[0]
        rest = f" (also: {', '.join(d.field for d in found[1:])})" if found[1:] else ""
        raise ModelMismatchError(
            f"the store at {where} was built with {first.field} {first.stored}, the model given "
            f"has {first.field} {first.given}{rest}; use the model it was built with, or build a "
            "new store with --store NEW"
        )
