"""Bring given chunks of a node into consecutive rows of a layer, from memory or from disk.

One load; chunks that the host tier has are copied, the others read::

    rows     | chunk 3 | chunk 4 | chunk 9 | chunk 17, used tokens only |
             row       memory    disk      disk                        row + tokens
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from store.buffers import RunBuffers
from store.disk.layout import KV_ARRAYS
from store.disk.reader import NodeFiles, ShardRead
from store.disk.runs import merge_chunks
from store.index.mapping import chunk_count
from store.tier.host import Fetched, HostTier


@dataclass(frozen=True, slots=True)
class LoadPart:
    """The first ``used`` tokens of a node, to be loaded at the node's own position."""

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
        """Chunks of one array that hold the part's tokens."""
        return chunk_count(self.used, self.chunk_tokens)


class ChunkLoad(NamedTuple):
    """Chunks of one array (``which``: 0 keys, 1 values) of a part, to rows ``row`` and after.

    ``chunks`` int64 ascending; ``tokens`` rows arrive, of the last chunk those that the part uses.
    ``missing`` are the places in ``chunks`` that memory lacks, int64 ascending.
    """

    part: LoadPart
    layer: int
    which: int
    chunks: np.ndarray
    row: int
    tokens: int
    missing: np.ndarray

    @classmethod
    def plan(
        cls,
        part: LoadPart,
        layer: int,
        which: int,
        chunks: np.ndarray,
        row: int,
        tokens: int,
        tier: HostTier | None,
    ) -> ChunkLoad:
        """A load of chunks wherever they are now."""
        if tier is None:
            missing = np.arange(len(chunks))
        else:
            missing = np.flatnonzero(tier.slots(part.files, layer)[which][chunks] < 0)
        return cls(part, layer, which, chunks, row, tokens, missing)

    def reads(self, buffers: RunBuffers, jobs: int) -> list[ShardRead]:
        """Reads of what memory lacks, in up to ``jobs`` jobs; none writes past its own rows."""
        size, end, out = self.part.chunk_tokens, self.row + self.tokens, []
        for places in np.array_split(self.missing, max(1, min(jobs, len(self.missing)))):
            if len(places) == 0:
                continue
            first = int(places[0])
            stop = min(self.row + (int(places[-1]) + 1) * size, end)
            room = buffers.room(self.layer, self.which, self.row + first * size, stop)
            chunks = self.chunks[places]
            # Neighbours on disk are neighbours here, as both ascend.
            runs = merge_chunks(chunks, 0)
            at = places[np.searchsorted(chunks, runs.start)] - first
            array = KV_ARRAYS[self.which]
            out.append(ShardRead(self.part.files, array, self.layer, runs, room, len(room), at))
        return out

    def copy(self, buffers: RunBuffers, tier: HostTier) -> None:
        """Copy the chunks that are in memory. Call it once the reads are done.

        A read may be widened over rows of a chunk that it does not bring.
        """
        have = np.ones(len(self.chunks), dtype=bool)
        have[self.missing] = False
        places = np.flatnonzero(have)
        if len(places) == 0:
            return
        inside = np.arange(self.part.chunk_tokens)
        to = (places[:, None] * self.part.chunk_tokens + inside).reshape(-1)
        slots = tier.slots(self.part.files, self.layer)[self.which][self.chunks[places]]
        source = tier.slab.row_index(slots[:, None], inside).reshape(-1)
        target = buffers.host(self.layer, self.which)[self.row : self.row + self.tokens]
        used = torch.from_numpy(to) < self.tokens
        if not bool(used[-1]):
            source, to = source[used], to[: int(used.sum())]
        if len(to) == self.tokens:
            torch.index_select(tier.slab.rows, 0, source, out=target)
        else:
            target.index_copy_(0, torch.from_numpy(to), tier.slab.rows.index_select(0, source))

    def fetched(self, buffers: RunBuffers) -> Fetched:
        """What was read from disk and holds whole chunks, for the tier to consider."""
        part, size = self.part, self.part.chunk_tokens
        chunks = self.chunks[self.missing]
        whole = (chunks + 1) * size <= part.used
        # A node's last chunk is whole with fewer tokens, unless the part leaves the node before.
        whole |= part.used == part.files.layout.tokens
        rows = self.row + self.missing[whole] * size
        host = buffers.host(self.layer, self.which)
        return Fetched(part.files, self.layer, self.which, chunks[whole], host, rows)
