"""Rows of the catalog as plain values; no SQLite here."""

from __future__ import annotations

from typing import NamedTuple


class NodeRow(NamedTuple):
    """One node of the index at its published generation.

    ``start`` and ``length`` are in tokens, ``first_ids`` up to 16 little-endian uint32 ids,
    ``digest`` that of the node's own ids, ``group_digest`` that of the generation's zarr.json,
    ``bytes`` what the generation takes on disk.
    """

    node_id: str
    parent_id: str | None
    start: int
    length: int
    first_ids: bytes
    digest: str
    generation: int
    group_digest: str
    bytes: int


class PrefixRow(NamedTuple):
    """A named prefix: the first ``length`` tokens on the path to ``node_id``.

    ``created`` is unix time in seconds, ``source`` JSON text.
    """

    prefix_id: str
    name: str
    length: int
    node_id: str
    digest: str
    created: float
    source: str


class QuarantineRow(NamedTuple):
    """Stored data known to be bad; ``first_token`` is absolute, ``chunk`` -1 for a whole array."""

    node_id: str
    generation: int
    array: str
    layer: int
    chunk: int
    first_token: int
    reason: str
    created: float


class GarbageRow(NamedTuple):
    """A generation nobody should open any more, since the transaction with this epoch."""

    node_id: str
    generation: int
    retired_epoch: int


class ProbeRow(NamedTuple):
    """A published sidecar of a node.

    ``kind`` is ``sketch`` or ``heads``, ``digest`` that of the sidecar's zarr.json files,
    ``bytes`` what it takes on disk, ``detail`` canonical JSON of its bits or its heads.
    """

    node_id: str
    kind: str
    digest: str
    bytes: int
    detail: str
