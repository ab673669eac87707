"""Read chunks of published generations into memory the caller owns.

Owns the thread pool, byte ranges, checksums, decoding and the byte counters. It reads nothing it
was not asked for beyond widening to the O_DIRECT block, which is counted. Every chunk's CRC is
checked before the caller sees it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeVar

import crc32c
import numpy as np
from numcodecs.abc import Codec

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
from store.disk.runs import ChunkRuns, group_runs, run_chunks
from store.errors import ChunkLoadError

T = TypeVar("T")

#: One request reads at most this much, so that a deadline or a slow device is noticed.
REQUEST_BYTES = 8 << 20
#: Scratch requests stay small enough to be checked and copied out of the cache.
SCRATCH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class NodeFiles:
    """What the reader needs to know of one published generation.

    ``start`` is the absolute position of the node's first token; ``k_crc`` and ``v_crc`` uint32
    [layers, chunks]; ``rows`` int32 [layers, n] the stored row of each token, None where they are
    stored in token order. ``name`` says which generation it is.
    """

    node_id: str
    group: Path
    layout: NodeLayout
    start: int
    k_crc: np.ndarray
    v_crc: np.ndarray
    rows: np.ndarray | None = None

    @property
    def name(self) -> str:
        """Node and generation."""
        return f"{self.node_id}/{self.group.name}"

    @property
    def num_chunks(self) -> int:
        """Chunks of one layer of one array."""
        return self.layout.num_chunks

    def first_token(self, layer: int, chunks: np.ndarray) -> int:
        """Absolute position of the first token that any of these chunks of a layer holds."""
        size = self.layout.chunk_tokens
        if self.rows is None:
            return self.start + int(chunks.min()) * size
        return self.start + int(np.flatnonzero(np.isin(self.rows[layer] // size, chunks))[0])


@dataclass(frozen=True, slots=True)
class ShardRead:
    """Read runs of chunks of one layer of one array.

    ``into`` receives the rows of all chunks back to back, or, with ``at``, each run's as the
    chunks ``at[i]`` and after of ``into`` (ascending, without overlap); at least ``valid_bytes``
    of it, the bytes the caller will use, and any more is room that may be overwritten.
    """

    node: NodeFiles
    array: str
    layer: int
    runs: ChunkRuns
    into: memoryview
    valid_bytes: int
    at: np.ndarray | None = None

    @property
    def first(self) -> int:
        """The first chunk."""
        return int(self.runs.start[0])


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

    def run(self, work: Callable[[], T]) -> Future[T]:
        """Do other reading work on the pool."""
        return self._pool.submit(work)

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
            raise self._error(read, None, "missing") from error
        except ShortReadError as error:
            raise self._error(read, None, "short") from error
        except _BadChunkError as error:
            raise self._error(read, error.chunk, "corrupt") from error
        except OSError as error:
            raise self._error(read, None, f"io error {error.errno}") from error
        return ReadCount(job.wanted, job.moved, job.requests, started, time.perf_counter())

    @staticmethod
    def _error(read: ShardRead, chunk: int | None, reason: str) -> ChunkLoadError:
        """A failure of one chunk, or, with None, of the read."""
        node, known = read.node, read.first if chunk is None else chunk
        failed = run_chunks(read.runs) if chunk is None else np.array([chunk])
        first = node.first_token(read.layer, failed)
        return ChunkLoadError(node.node_id, read.array, read.layer, known, first, reason)

    def read_file(self, path: Path, view: memoryview, need: int) -> ReadCount:
        """Read the first ``need`` bytes of a file that is no shard.

        ``view`` is page-aligned and holds ``need`` rounded up to 4 096 bytes. Raises OSError;
        what the bytes are worth is the caller's to check.
        """
        started = time.perf_counter()
        block = self.block_for(path)
        direct = getattr(os, "O_DIRECT", 0) if block > 1 else 0
        fd = os.open(path, os.O_RDONLY | direct)
        moved = requests = 0
        try:
            for done in range(0, need, REQUEST_BYTES):
                want = min(need - done, REQUEST_BYTES)
                part = view[done : done + -(-want // block) * block]
                moved += self.request(fd, part, done, want, block)
                requests += 1
        finally:
            os.close(fd)
        return ReadCount(need, moved, requests, started, time.perf_counter())

    def scratch(self, size: int) -> memoryview:
        """This thread's aligned scratch memory, at least ``size`` bytes."""
        arena: Arena | None = getattr(self._local, "arena", None)
        if arena is None or arena.size < size:
            arena = self._local.arena = Arena(max(size, 2 * SCRATCH_BYTES))
        return arena.view

    def scatter(self, fd: int, views: Sequence[memoryview], offset: int, block: int) -> int:
        """One request over neighbouring bytes of a file, at the emulated device's pace."""
        need = sum(map(len, views))
        ready = self._throttle.reserve(need) if self._throttle.active else None
        if os.preadv(fd, views, offset) != need:
            for view in views:
                pread_full(fd, view, offset, len(view), block)
                offset += len(view)
        if ready is not None:
            self._throttle.wait_until(ready)
        return need

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
        table = read.node.k_crc if read.array == "k" else read.node.v_crc
        self.chunks: list[int] = run_chunks(read.runs).tolist()
        self.crcs: list[int] = table[read.layer, self.chunks].tolist()
        sizes = read.runs.stop - read.runs.start
        before = np.cumsum(sizes) - sizes
        self.at = before if read.at is None else read.at
        # Where in ``into`` each chunk goes, counted in chunks.
        self.spots: list[int] = run_chunks(ChunkRuns(self.at, self.at + sizes)).tolist()
        self.wanted = self.moved = self.requests = 0

    def plain(self) -> None:
        """Stored bytes are the rows: straight into place where alignment allows, else copied.

        ::

            into   |<------------- room ------------------->|
            file   |<- direct: whole blocks, whole chunks ->|<- scratch: the rest ->|
        """
        self.wanted = len(self.chunks) * self.size
        done = self._straight()
        if done == 0:
            self._by_runs()
        else:
            for index in range(done, len(self.chunks)):
                self._via_scratch(index, 1)

    def _by_runs(self) -> None:
        index, runs = 0, self.task.runs
        for first, stop in zip(runs.start.tolist(), runs.stop.tolist(), strict=True):
            self._run(index, stop - first)
            index += stop - first

    def _straight(self) -> int:
        """Read all chunks that fit whole into place; returns how many.

        The common case with as little Python per run as possible: chunks are whole blocks, memory
        is aligned. Returns 0 where that does not hold.
        """
        task, size, block = self.task, self.size, self.block
        room, runs = len(task.into) // size, task.runs
        lengths = np.minimum(runs.stop - runs.start, room - self.at)
        if (
            room == 0
            or size % block
            or address_of(task.into) % block
            or int(lengths.max()) * size > REQUEST_BYTES
        ):
            return 0
        # Only the last run can reach past the room, with a chunk that is not whole.
        count = len(lengths) - int(lengths[-1] <= 0)
        lengths = lengths[:count]
        first = runs.start[:count]
        gap = self.reader.options.bridged_bytes // size if block > 1 else 0
        bounds = group_runs(ChunkRuns(first, first + lengths), gap, REQUEST_BYTES // size).tolist()
        offsets, ends = (first * size).tolist(), ((first + lengths) * size).tolist()
        starts, into = (self.at[:count] * size).tolist(), task.into
        spare = self.reader.scratch(gap * size)
        for begin, stop in pairwise(bounds):
            views, at = [], offsets[begin]
            for run in range(begin, stop):
                if offsets[run] > at:
                    views.append(spare[: offsets[run] - at])
                at = ends[run]
                views.append(into[starts[run] : starts[run] + at - offsets[run]])
            self.moved += self.reader.scatter(self.fd, views, offsets[begin], block)
            self.requests += 1
        done = int(lengths.sum())
        self._check_spots(done)
        return done

    def _run(self, index: int, chunks: int) -> None:
        """Deliver ``chunks`` chunks of one run, the task's ``index`` and after."""
        first, at = self.chunks[index], self.spots[index]
        room = self.task.into[at * self.size :]
        direct = self._direct_chunks(first, chunks, room)
        if direct:
            want = direct * self.size
            whole = len(room) - len(room) % self.block
            view = room[: min(whole, -(-want // self.block) * self.block)]
            self._fetch(view, first * self.size, want)
            self._check(view, index, index + direct)
        step = max(1, SCRATCH_BYTES // self.size)
        for done in range(direct, chunks, step):
            self._via_scratch(index + done, min(step, chunks - done))

    def _direct_chunks(self, first: int, chunks: int, room: memoryview) -> int:
        """How many leading chunks of a run can be read into place."""
        if first * self.size % self.block or not room or address_of(room) % self.block:
            return 0
        return min(chunks, (len(room) - len(room) % self.block) // self.size)

    def _via_scratch(self, index: int, chunks: int) -> None:
        """Deliver chunks of one run, the task's ``index`` and after, through scratch."""
        task, at = self.task, self.spots[index]
        begin, want = self.chunks[index] * self.size, chunks * self.size
        lead = begin % self.block
        span = -(-(lead + want) // self.block) * self.block
        view = self.reader.scratch(span)[:span]
        self._fetch(view, begin - lead, lead + want)
        self._check(view[lead:], index, index + chunks)
        keep = min(task.valid_bytes - at * self.size, want)
        if keep > 0:
            task.into[at * self.size : at * self.size + keep] = view[lead : lead + keep]

    def _fetch(self, view: memoryview, offset: int, need: int) -> None:
        for done in range(0, need, REQUEST_BYTES):
            part = view[done : done + REQUEST_BYTES]
            want = min(need - done, len(part))
            self.moved += self.reader.request(self.fd, part, offset + done, want, self.block)
            self.requests += 1

    def _check(self, view: memoryview, lo: int, hi: int) -> None:
        """Compare the CRC of the task's chunks ``lo`` to ``hi``, back to back in ``view``."""
        size, checksum = self.size, crc32c.crc32c
        for i, expected in enumerate(self.crcs[lo:hi]):
            if checksum(view[i * size : (i + 1) * size]) != expected:
                raise _BadChunkError(self.chunks[lo + i])

    def _check_spots(self, count: int) -> None:
        """Compare the CRC of the first ``count`` chunks, each where it was delivered."""
        into, size, checksum = self.task.into, self.size, crc32c.crc32c
        for spot, chunk, expected in zip(self.spots[:count], self.chunks, self.crcs, strict=False):
            if checksum(into[spot * size : (spot + 1) * size]) != expected:
                raise _BadChunkError(chunk)

    def coded(self) -> None:
        """Chunks of a codec: read the index, then each run's stored bytes, then decode."""
        task, layout = self.task, self.task.node.layout
        end = os.fstat(self.fd).st_size
        try:
            raw = self._range(end - layout.index_bytes, layout.index_bytes)
            table = disk_layout.unpack_index(bytes(raw)).astype(int)
        except ValueError as error:
            raise _BadChunkError(task.first) from error
        codec, index = disk_layout.make_codec(layout.codec), 0
        assert codec is not None
        runs = task.runs
        for first, stop in zip(runs.start.tolist(), runs.stop.tolist(), strict=True):
            self._decode_run(codec, table[first:stop], index)
            index += stop - first

    def _decode_run(self, codec: Codec, table: np.ndarray, index: int) -> None:
        """Read and decode chunks whose (offset, size) are ``table``, the task's ``index`` and on.

        They are taken to lie one after the other, as they are written.
        """
        task, begin = self.task, int(table[0, 0])
        stored = self._range(begin, int(table[-1].sum()) - begin)
        self.wanted += len(stored)
        for i, (offset, size) in enumerate(table.tolist(), index):
            part = stored[offset - begin : offset - begin + size]
            if crc32c.crc32c(part) != self.crcs[i]:
                raise _BadChunkError(self.chunks[i])
            at = self.spots[i] * self.size
            keep = min(self.size, task.valid_bytes - at)
            if keep > 0:
                rows = memoryview(codec.decode(part)).cast("B")
                task.into[at : at + keep] = rows[:keep]

    def _range(self, begin: int, want: int) -> memoryview:
        """Any byte range, through scratch. Raises `ShortReadError` for one outside the file."""
        if begin < 0:
            raise ShortReadError(5, "file is shorter than its index")
        lead = begin % self.block
        span = -(-(lead + want) // self.block) * self.block
        view = self.reader.scratch(span)[:span]
        self._fetch(view, begin - lead, lead + want)
        return view[lead : lead + want]
