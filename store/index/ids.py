"""Token ids: their one array type, their bytes, their digests and the names of nodes.

Everything here is a pure function and gives the same result in every process.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from store.errors import InvalidValueError

#: Token ids, uint32 [n].
Ids: TypeAlias = npt.NDArray[np.uint32]

#: Number of leading token ids of a node that the catalog keeps, so that a prompt which parts
#: from a node early is answered without reading the node's token file.
FIRST_IDS = 16


def as_ids(values: npt.ArrayLike) -> Ids:
    """Token ids as uint32 [n]; raises `InvalidValueError` for anything that would be changed."""
    array = np.asarray(values)
    if array.dtype == np.uint32 and array.ndim == 1:
        return array
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidValueError(
            f"token ids have shape {array.shape} and dtype {array.dtype}; give one row of integers"
        )
    if array.size and not 0 <= int(array.min()) <= int(array.max()) < 1 << 32:
        raise InvalidValueError(
            f"token ids reach from {array.min()} to {array.max()}; give values from 0 to 2**32 - 1"
        )
    return array.astype(np.uint32)


def pack_ids(ids: Ids) -> bytes:
    """Token ids as little-endian uint32 bytes, the form that is hashed and kept in the catalog."""
    return ids.astype("<u4", copy=False).tobytes()


def unpack_ids(data: bytes) -> Ids:
    """Inverse of `pack_ids`; bytes after the last whole id are dropped. Read-only."""
    return np.frombuffer(data, dtype="<u4", count=len(data) // 4)


def ids_digest(ids: Ids) -> str:
    """Hex blake2b (16 bytes) of a node's own ids."""
    return hashlib.blake2b(pack_ids(ids), digest_size=16).hexdigest()


def node_id(identity_digest: str, path_ids: Ids, start: int) -> str:
    """Name of a node: equal in every process and on every machine.

    Parameters
    ----------
    identity_digest
        `ModelIdentity.digest()`.
    path_ids
        uint32 [end]; all tokens from the root to the node's end.
    start
        Absolute position of the node's first token. Without it, a node and the lower half of its
        split would have the same name.

    Returns
    -------
    str
        20 hex digits.
    """
    digest = hashlib.blake2b(identity_digest.encode(), digest_size=10)
    digest.update(struct.pack("<q", start))
    digest.update(pack_ids(path_ids))
    return digest.hexdigest()


def prefix_id(ids: Ids) -> str:
    """Name of a prefix: 12 hex digits that follow from its tokens."""
    return ids_digest(ids)[:12]


def common_length(left: Ids, right: Ids) -> int:
    """Count the equal leading elements of two arrays, [n] and [m]."""
    size = min(len(left), len(right))
    if size == 0:
        return 0
    different = left[:size] != right[:size]
    first = int(different.argmax())
    return first if different[first] else size
