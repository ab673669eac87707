"""Bring given chunks of a node into consecutive rows of a layer, from memory or from disk.

One load; chunks that a tier has are copied, the others read::

    rows     | chunk 3 | chunk 4 | chunk 9 | chunk 17, used tokens only |
             row       memory    disk      disk                        row + arriving
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from store.buffers import RunBuffers
from store.disk.layout import KV_ARRAYS
from store.disk.reader import NodeFiles, ShardRead
from store.disk.runs import merge_chunks
from store.index.mapping import Whereabouts, chunk_count, whereabouts
from store.tier.tiered import Fetched, TieredCache


@dataclass(frozen=True, slots=True)
class LoadPart:
    """The first ``used`` tokens of a node, at the node's own position."""

    files: NodeFiles
    used: int

    @property
    def start(self) -> int:
        """Absolute position of the part's first token."""
        return self.files.start

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk."""
        return self.files.layout.chunk_tokens

    @property
    def chunks(self) -> int:
        """Chunks of one array that the part's tokens fill."""
        return chunk_count(self.used, self.chunk_tokens)

    @property
    def stored(self) -> int:
        """Stored rows that may arrive: its own in token order, else all of the node."""
        return self.used if self.files.rows is None else self.files.layout.tokens

    @property
    def mixed(self) -> bool:
        """Whether rows of tokens that it does not use may arrive among its own."""
        return self.used < self.stored

    def rows(self, layer: int) -> np.ndarray | None:
        """Stored row of each of the node's tokens, int32 [n]; None for token order."""
        return None if self.files.rows is None else self.files.rows[layer]

    def rows_of(self, layer: int, tokens: np.ndarray) -> np.ndarray:
        """Stored rows of tokens that count from the node's start."""
        rows = self.rows(layer)
        return tokens if rows is None else rows[tokens]

    def whole(self, layer: int) -> Whereabouts:
        """Chunks that hold all of its tokens, and the place of each token among their rows."""
        rows = self.rows(layer)
        if rows is None:
            return Whereabouts(np.arange(self.chunks), np.arange(self.used))
        return whereabouts(rows[: self.used], self.chunk_tokens)


class ChunkLoad(NamedTuple):
    """Chunks of one array (``which``: 0 keys, 1 values) of a part, to rows ``row`` and after.

    ``chunks`` int64 ascending; ``arriving`` rows arrive, of the last chunk those that are stored
    or, in token order, used. ``slots`` int32 says where memory has each chunk, below 0 where it
    has not; ``missing`` are the places in ``chunks`` that it lacks, int64 ascending.
    """

    part: LoadPart
    layer: int
    which: int
    chunks: np.ndarray
    row: int
    arriving: int
    slots: np.ndarray
    missing: np.ndarray

    @classmethod
    def plan(
        cls,
        part: LoadPart,
        layer: int,
        which: int,
        chunks: np.ndarray,
        row: int,
        tier: TieredCache | None,
    ) -> ChunkLoad:
        """A load of chunks, at least one, wherever they are now."""
        past = (int(chunks[-1]) + 1) * part.chunk_tokens - part.stored
        arriving = len(chunks) * part.chunk_tokens - max(0, past)
        if tier is None:
            slots = np.full(len(chunks), -1, dtype=np.int32)
        else:
            slots = tier.slots(part.files, layer)[which][chunks]
        missing = np.flatnonzero(slots < 0)
        return cls(part, layer, which, chunks, row, arriving, slots, missing)

    def reads(self, buffers: RunBuffers, jobs: int) -> list[ShardRead]:
        """Reads of what memory lacks, in up to ``jobs`` jobs; none writes past its own rows."""
        if len(self.missing) == 0:
            return []
        size, end, out = self.part.chunk_tokens, self.row + self.arriving, []
        for places in np.array_split(self.missing, max(1, min(jobs, len(self.missing)))):
            if len(places) == 0:
                continue
            first = int(places[0])
            stop = min(self.row + (int(places[-1]) + 1) * size, end)
            room = buffers.room(self.layer, self.which, self.row + first * size, stop)
            chunks = self.chunks[places]
            # Neighbours on disk are neighbours here, as both ascend.
            runs = merge_chunks(chunks)
            at = places[np.searchsorted(chunks, runs.start)] - first
            array = KV_ARRAYS[self.which]
            out.append(ShardRead(self.part.files, array, self.layer, runs, room, len(room), at))
        return out

    def held(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Rows that memory has, as it numbers them, and the rows of the buffers they go to.

        Both int64 [k]; None where they go to all of the load's rows, in order.
        """
        size = self.part.chunk_tokens
        inside = np.arange(size)
        if len(self.missing) == 0:
            places = self.slots.astype(np.int64)[:, None] * size + inside
            return places.reshape(-1)[: self.arriving], None
        have = np.flatnonzero(self.slots >= 0)
        places = self.slots[have].astype(np.int64)[:, None] * size + inside
        to = (have[:, None] * size + inside).reshape(-1)
        kept = to < self.arriving
        return places.reshape(-1)[kept], self.row + to[kept]

    def fetched(self, buffers: RunBuffers) -> Fetched:
        """What was read from disk and holds whole chunks, for the tier to consider."""
        part, size = self.part, self.part.chunk_tokens
        chunks = self.chunks[self.missing]
        whole = (chunks + 1) * size <= part.stored
        # A node's last chunk is whole with fewer tokens, unless the part leaves the node before.
        whole |= part.stored == part.files.layout.tokens
        rows = self.row + self.missing[whole] * size
        host = buffers.host(self.layer, self.which)
        return Fetched(part.files, self.layer, self.which, chunks[whole], host, rows)
