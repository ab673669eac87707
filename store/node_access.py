"""The statistics of one node: what a run changes in them, and the file they lie in.

Values and bytes only; which node, when to read and when to write is `access`'s.
"""

from __future__ import annotations

import os
import re
import secrets
import struct
from dataclasses import dataclass
from pathlib import Path

import crc32c
import numpy as np

#: Weight of the newest query in the moving importance.
BETA = 0.2
_FIELDS = ("queries", "observed_tokens", "importance", "selected", "loaded", "crc")
_TABLE = re.compile(rb"'importance', '<f4', \((\d{1,9}), (\d{1,9})\)")
#: The header of a file ends before this.
_HEAD_BYTES = 512


@dataclass(frozen=True, slots=True)
class NodeAccess:
    """Statistics of one node, in token order and so shared by all its generations.

    Parameters
    ----------
    queries
        Runs that used the node. After a split, the lower half knows only a lower bound.
    observed_tokens
        How many of the first tokens have an importance: a run uses a node from its start on.
    importance
        float32 [layers, n], read-only; moving average of each token's share of the attention that
        the node gets (paper section on reordering). A layer sums to about 1 once the whole node
        was observed; 0 for what never was.
    selected, loaded
        uint32 [layers, n], read-only; runs that selected a token, and that loaded it.
    """

    queries: int
    observed_tokens: int
    importance: np.ndarray
    selected: np.ndarray
    loaded: np.ndarray

    def __post_init__(self) -> None:
        for array in (self.importance, self.selected, self.loaded):
            array.flags.writeable = False

    @classmethod
    def empty(cls, layers: int, tokens: int) -> NodeAccess:
        """A node that no query has used."""
        shape = (layers, tokens)
        counts = (np.zeros(shape, np.uint32) for _ in range(2))
        return cls(0, 0, np.zeros(shape, np.float32), *counts)

    @property
    def tokens(self) -> int:
        """Length of the node."""
        return int(self.importance.shape[1])

    @property
    def nbytes(self) -> int:
        """Memory of the arrays."""
        return self.importance.nbytes + self.selected.nbytes + self.loaded.nbytes

    def after(
        self, importance: np.ndarray | None, selected: np.ndarray, loaded: np.ndarray
    ) -> NodeAccess:
        """The statistics after one more run; see `AccessStats.record`."""
        used = selected.shape[1]
        observed = self.observed_tokens
        weights = self.importance
        if importance is not None:
            weights, observed = self._blended(importance), max(observed, used)
        return NodeAccess(
            self.queries + 1,
            observed,
            weights,
            _counted(self.selected, selected),
            _counted(self.loaded, loaded),
        )

    def _blended(self, importance: np.ndarray) -> np.ndarray:
        """``w + rate * (share * a / sum(a) - w)`` over the first tokens; the rest is untouched.

        A run that leaves the node half-way compares its first tokens with each other and says
        nothing of the others. Taking its absence of attention for unimportance would sort the
        others down for every question that parts early; so they keep their importance, and the
        first tokens divide among them the share that they hold, not the whole.
        """
        used = importance.shape[1]
        total = importance.sum(1, dtype=np.float64)
        sound = np.isfinite(total) & (total > 0)
        factor = self._share(used) / np.where(sound, total, 1.0)
        rate = np.where(np.arange(used) < self.observed_tokens, BETA, 1.0).astype(np.float32)
        weights = self.importance.copy()
        front = weights[sound, :used]
        latest = importance[sound] * factor[sound, None].astype(np.float32)
        weights[sound, :used] = front + rate * (latest - front)
        return weights

    def _share(self, used: int) -> np.ndarray:
        """Part of the node's importance that its first ``used`` tokens divide, [layers]."""
        expected = np.full(len(self.importance), used / self.tokens)
        if used == self.tokens or used > self.observed_tokens:
            return expected
        held = self.importance[:, :used].sum(1, dtype=np.float64)
        return np.where(held > 0, held, expected)

    def split(self, at: int) -> tuple[NodeAccess, NodeAccess]:
        """Statistics of the node's first ``at`` tokens and of the rest."""
        return self._part(0, at), self._part(at, self.tokens)

    def _part(self, lo: int, hi: int) -> NodeAccess:
        observed = min(max(self.observed_tokens - lo, 0), hi - lo)
        weights = self.importance[:, lo:hi]
        # Runs to come are normalised over the part, so the past must be too, or it would fade.
        total = weights.sum(1, dtype=np.float64, keepdims=True)
        factor = observed / (hi - lo) / np.where(total > 0, total, 1.0)
        loaded = self.loaded[:, lo:hi].copy()
        return NodeAccess(
            self.queries if lo == 0 else int(loaded.max()),
            observed,
            weights * factor.astype(np.float32),
            self.selected[:, lo:hi].copy(),
            loaded,
        )


def _counted(counts: np.ndarray, hit: np.ndarray) -> np.ndarray:
    counts = counts.copy()
    counts[:, : hit.shape[1]] += hit
    return counts


def save(path: Path, access: NodeAccess) -> None:
    """Put a file in place that `numpy.load` reads as one record. Raises `OSError`.

    Not synced: what a crash of the machine leaves is told by the checksum.
    """
    record = np.zeros((), _dtype(*access.importance.shape))
    for name in _FIELDS[:-1]:
        record[name] = getattr(access, name)
    body = record.tobytes()[:-4]
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.with_name(f"{path.stem}.{secrets.token_hex(4)}.tmp")
    try:
        with temp.open("wb") as handle:
            handle.writelines((_header(record.dtype), body, struct.pack("<I", crc32c.crc32c(body))))
        temp.replace(path)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise


def load(path: Path, layers: int) -> NodeAccess:
    """Read what `save` wrote.

    Raises `OSError`, and `ValueError` for a file that is not ours, not whole or damaged.
    """
    with path.open("rb") as handle:
        head = handle.read(_HEAD_BYTES)
        table = _TABLE.search(head)
        if table is None or int(table[1]) != layers:
            raise ValueError(f"no statistics of {layers} layers")
        dtype = _dtype(layers, int(table[2]))
        header = _header(dtype)
        # Before reading: what a header claims and the file doesn't have takes no memory.
        if os.fstat(handle.fileno()).st_size != len(header) + dtype.itemsize:
            raise ValueError("not whole")
        raw = head + handle.read()
    record = np.frombuffer(raw, dtype, 1, len(header))[0]
    if not raw.startswith(header) or crc32c.crc32c(raw[len(header) : -4]) != record["crc"]:
        raise ValueError("damaged")
    queries, observed_tokens, *tables = (record[name] for name in _FIELDS[:-1])
    return NodeAccess(int(queries), int(observed_tokens), *tables)


def _dtype(layers: int, tokens: int) -> np.dtype:
    table = (layers, tokens)
    forms = (("<u4",), ("<u4",), ("<f4", table), ("<u4", table), ("<u4", table), ("<u4",))
    return np.dtype([(name, *form) for name, form in zip(_FIELDS, forms, strict=True)])


def _header(dtype: np.dtype) -> bytes:
    """Header of an .npy file, version 1.0, the same by every version of numpy.

    It is compared, not parsed: numpy's parser answers damage with many kinds of errors.
    """
    text = repr({"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": ()})
    size = -(-(len(text) + 11) // 64) * 64 - 10
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", size) + f"{text:<{size - 1}}\n".encode()
