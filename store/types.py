"""Small frozen values shared by the store's modules: shapes and dtypes of KV.

Owns the mapping from a KV dtype's name to its storage (numpy) and compute (torch) dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from store.errors import InvalidValueError

#: KV dtype name -> (storage dtype, torch dtype). zarr-python 3.1 has no bfloat16, so its bits
#: are stored as uint16 and the group says so in ``kv_dtype``.
KV_DTYPES: dict[str, tuple[np.dtype, torch.dtype]] = {
    "float32": (np.dtype("<f4"), torch.float32),
    "float16": (np.dtype("<f2"), torch.float16),
    "bfloat16": (np.dtype("<u2"), torch.bfloat16),
}

MIN_CHUNK_TOKENS, MAX_CHUNK_TOKENS = 16, 256


@dataclass(frozen=True, slots=True)
class KVShape:
    """Shape of one token's keys and values in a model.

    ``num_heads`` (query heads) is a multiple of ``num_kv_heads``: equal in MHA, larger in GQA,
    ``num_kv_heads == 1`` in MQA.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in KV_DTYPES:
            raise InvalidValueError(
                f"dtype {self.dtype!r} is not supported; use one of {', '.join(KV_DTYPES)}"
            )

    @property
    def np_dtype(self) -> np.dtype:
        """Storage dtype (bfloat16 is stored as uint16)."""
        return KV_DTYPES[self.dtype][0]

    @property
    def torch_dtype(self) -> torch.dtype:
        """Compute dtype."""
        return KV_DTYPES[self.dtype][1]

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's keys (or values) in one layer."""
        return self.num_kv_heads * self.head_dim * self.np_dtype.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return 2 * self.num_layers * self.row_bytes
