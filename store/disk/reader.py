"""Read chunks of published generations into memory the caller owns.

Owns the thread pool, byte ranges, checksums, decoding and the byte counters. It reads nothing it
was not asked for beyond widening to the O_DIRECT block, which is counted. Every chunk's CRC is
checked before the caller sees it.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import crc32c
import numpy as np

from store.disk import layout as disk_layout
from store.disk.io import (
    Arena,
    IOOptions,
    ReadPool,
    ShortReadError,
    Throttle,
    address_of,
    pread_full,
    probe_direct,
)
from store.disk.layout import NodeLayout
from store.errors import ChunkLoadError

#: One request reads at most this much, so that a deadline or a slow device is noticed.
REQUEST_BYTES = 8 << 20
#: Scratch requests stay small enough to be checked and copied out of the cache.
SCRATCH_BYTES = 1 << 20


class ChunkRuns(NamedTuple):
    """Merged runs of chunks: run i covers chunks ``start[i]`` up to, not including, ``stop[i]``."""

    start: np.ndarray
    stop: np.ndarray


def merge_chunks(chunks: np.ndarray, max_gap: int = 1) -> ChunkRuns:
    """Merge sorted, distinct chunk numbers into runs, bridging gaps of up to ``max_gap`` chunks.

    ::

        chunks   2 3 . 5 . . 8      max_gap 1
        runs    [2 . . 5]   [8]     -> start [2, 8], stop [6, 9]
    """
    if len(chunks) == 0:
        empty = np.empty(0, dtype=np.int64)
        return ChunkRuns(empty, empty)
    breaks = np.flatnonzero(np.diff(chunks) > max_gap + 1)
    start = chunks[np.concatenate(([0], breaks + 1))]
    stop = chunks[np.concatenate((breaks, [len(chunks) - 1]))] + 1
    return ChunkRuns(start.astype(np.int64), stop.astype(np.int64))


@dataclass(frozen=True, slots=True)
class NodeFiles:
    """What the reader needs to know of one published generation.

    ``start`` is the absolute position of the node's first token; ``k_crc`` and ``v_crc`` uint32
    [layers, chunks].
    """

    node_id: str
    group: Path
    layout: NodeLayout
    start: int
    k_crc: np.ndarray
    v_crc: np.ndarray


@dataclass(frozen=True, slots=True)
class ShardRead:
    """Read chunks ``first`` up to ``stop`` of one layer of one array.

    ``into`` receives the rows of the chunks back to back; at least ``valid_bytes`` of it, the
    bytes the caller will use, and any more is room that may be overwritten.
    """

    node: NodeFiles
    array: str
    layer: int
    first: int
    stop: int
    into: memoryview
    valid_bytes: int


class ReadCount(NamedTuple):
    """What one read cost: bytes asked of the store, bytes moved, requests, seconds."""

    wanted_bytes: int
    read_bytes: int
    requests: int
    started_s: float
    ended_s: float


class ChunkReader:
    """A pool of reading threads over one store.

    ``note`` says once why O_DIRECT is not used, where it was asked for.
    """

    def __init__(self, options: IOOptions) -> None:
        self.options = options
        self.note: str | None = None
        self._pool = ReadPool(options.threads)
        self._throttle = Throttle(options.bandwidth_bytes_s, options.latency_s)
        self._local = threading.local()
        self._probe_lock = threading.Lock()
        self._block: int | None = None if options.direct else 1

    def close(self) -> None:
        """Stop the threads; reads not yet started are dropped."""
        self._pool.close()

    def submit(self, read: ShardRead) -> Future[ReadCount]:
        """Start a read; the future raises `ChunkLoadError`."""
        return self._pool.submit(lambda: self.read(read))

    def block_for(self, path: Path) -> int:
        """O_DIRECT block size of the store's file system, 1 for buffered reads."""
        with self._probe_lock:
            if self._block is None:
                self._block = probe_direct(path) or 1
                if self._block == 1:
                    self.note = (
                        f"O_DIRECT does not work on {path.parent}; reading through the page cache"
                    )
            return self._block

    def read(self, read: ShardRead) -> ReadCount:
        """Read, check and deliver; see `ShardRead`. Raises `ChunkLoadError`."""
        node = read.node
        path = disk_layout.shard_path(node.group, read.array, read.layer)
        started = time.perf_counter()
        try:
            block = self.block_for(path)
            direct = getattr(os, "O_DIRECT", 0) if block > 1 else 0
            fd = os.open(path, os.O_RDONLY | direct)
            try:
                job = _Job(self, read, fd, block)
                if node.layout.codec == "none":
                    job.plain()
                else:
                    job.coded()
            finally:
                os.close(fd)
        except FileNotFoundError as error:
            raise self._error(read, read.first, "missing") from error
        except ShortReadError as error:
            raise self._error(read, read.first, "short") from error
        except _BadChunkError as error:
            raise self._error(read, error.chunk, "corrupt") from error
        except OSError as error:
            raise self._error(read, read.first, f"io error {error.errno}") from error
        return ReadCount(job.wanted, job.moved, job.requests, started, time.perf_counter())

    @staticmethod
    def _error(read: ShardRead, chunk: int, reason: str) -> ChunkLoadError:
        node = read.node
        first = node.start + chunk * node.layout.chunk_tokens
        return ChunkLoadError(node.node_id, read.array, read.layer, chunk, first, reason)

    def scratch(self, size: int) -> memoryview:
        """This thread's aligned scratch memory, at least ``size`` bytes."""
        arena: Arena | None = getattr(self._local, "arena", None)
        if arena is None or arena.size < size:
            arena = self._local.arena = Arena(max(size, 2 * SCRATCH_BYTES))
        return arena.view

    def request(self, fd: int, view: memoryview, offset: int, need: int, block: int) -> int:
        """One request, at the emulated device's pace."""
        if not self._throttle.active:
            return pread_full(fd, view, offset, need, block)
        ready = self._throttle.reserve(len(view))
        done = pread_full(fd, view, offset, need, block)
        self._throttle.wait_until(ready)
        return done


class _BadChunkError(Exception):
    def __init__(self, chunk: int) -> None:
        super().__init__(chunk)
        self.chunk = chunk


class _Job:
    """One `ShardRead` under way: counters and the two ways to deliver."""

    def __init__(self, reader: ChunkReader, read: ShardRead, fd: int, block: int) -> None:
        self.reader, self.task, self.fd, self.block = reader, read, fd, block
        self.size = read.node.layout.chunk_bytes
        crcs = read.node.k_crc if read.array == "k" else read.node.v_crc
        self.crcs: list[int] = crcs[read.layer, read.first : read.stop].tolist()
        self.wanted = self.moved = self.requests = 0

    def plain(self) -> None:
        """Stored bytes are the rows: straight into place where alignment allows, else copied.

        ::

            into   |<------------- room ------------------->|
            file   |<- direct: whole blocks, whole chunks ->|<- scratch: the rest ->|
        """
        task, chunks = self.task, self.task.stop - self.task.first
        self.wanted = chunks * self.size
        direct = self._direct_chunks(chunks)
        if direct:
            room = len(task.into) - len(task.into) % self.block
            want = direct * self.size
            view = task.into[: min(room, -(-want // self.block) * self.block)]
            self._fetch(view, task.first * self.size, want)
            self._check(view, 0, direct)
        step = max(1, SCRATCH_BYTES // self.size)
        for done in range(direct, chunks, step):
            self._via_scratch(done, min(done + step, chunks))

    def _direct_chunks(self, chunks: int) -> int:
        """How many leading chunks can be read into place."""
        into, block = self.task.into, self.block
        offset = self.task.first * self.size
        if offset % block or address_of(into) % block:
            return 0
        return min(chunks, (len(into) - len(into) % block) // self.size)

    def _via_scratch(self, lo: int, hi: int) -> None:
        """Deliver chunks ``lo`` to ``hi`` (counted from the task's first) through scratch."""
        task = self.task
        begin, want = (task.first + lo) * self.size, (hi - lo) * self.size
        lead = begin % self.block
        span = -(-(lead + want) // self.block) * self.block
        view = self.reader.scratch(span)[:span]
        self._fetch(view, begin - lead, lead + want)
        self._check(view[lead:], lo, hi)
        keep = min(task.valid_bytes - lo * self.size, want)
        if keep > 0:
            task.into[lo * self.size : lo * self.size + keep] = view[lead : lead + keep]

    def _fetch(self, view: memoryview, offset: int, need: int) -> None:
        for done in range(0, need, REQUEST_BYTES):
            part = view[done : done + REQUEST_BYTES]
            want = min(need - done, len(part))
            self.moved += self.reader.request(self.fd, part, offset + done, want, self.block)
            self.requests += 1

    def _check(self, view: memoryview, lo: int, hi: int) -> None:
        """Compare the CRC of chunks ``lo`` to ``hi``, which lie back to back in ``view``."""
        size, checksum = self.size, crc32c.crc32c
        for i, expected in enumerate(self.crcs[lo:hi]):
            if checksum(view[i * size : (i + 1) * size]) != expected:
                raise _BadChunkError(self.task.first + lo + i)

    def coded(self) -> None:
        """Chunks of a codec: read the index, then their stored bytes, then decode each."""
        task, layout = self.task, self.task.node.layout
        end = os.fstat(self.fd).st_size
        try:
            raw = self._range(end - layout.index_bytes, layout.index_bytes)
            index = disk_layout.unpack_index(bytes(raw))
        except ValueError as error:
            raise _BadChunkError(task.first) from error
        offsets, sizes = index[:, 0].astype(int), index[:, 1].astype(int)
        begin = int(offsets[task.first])
        stop = int(offsets[task.stop - 1] + sizes[task.stop - 1])
        self.wanted = stop - begin
        stored = self._range(begin, stop - begin)
        codec = disk_layout.make_codec(layout.codec)
        assert codec is not None
        for i, expected in enumerate(self.crcs):
            at = int(offsets[task.first + i]) - begin
            part = stored[at : at + int(sizes[task.first + i])]
            if crc32c.crc32c(part) != expected:
                raise _BadChunkError(task.first + i)
            keep = min(self.size, task.valid_bytes - i * self.size)
            if keep > 0:
                rows = memoryview(codec.decode(part)).cast("B")
                task.into[i * self.size : i * self.size + keep] = rows[:keep]

    def _range(self, begin: int, want: int) -> memoryview:
        """Any byte range, through scratch. Raises `ShortReadError` for one outside the file."""
        if begin < 0:
            raise ShortReadError(5, "file is shorter than its index")
        lead = begin % self.block
        span = -(-(lead + want) // self.block) * self.block
        view = self.reader.scratch(span)[:span]
        self._fetch(view, begin - lead, lead + want)
        return view[lead : lead + want]
