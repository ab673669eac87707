"""Timed reads for `bench_disk`: a test file at the disk's pace, and one node in two ways.

Owns the clocks and the memory that is read into. What is measured, and against what, is
`bench_disk`'s.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipelines.progress import Progress, ProgressEvent
from store.disk import layout as disk_layout
from store.disk.io import MAX_BLOCK, Arena, IOOptions, pread_full
from store.disk.layout import KV_ARRAYS, NodeLayout
from store.disk.reader import REQUEST_BYTES, ChunkReader, NodeFiles, ShardRead
from store.disk.runs import one_run
from store.disk.writer import write_generation
from store.types import KVShape

KINDS = ("sequential", "random")
_WRITE_BYTES = 4 << 20
#: Memory for the node's rows; of a larger node only the first layers are read.
NODE_BYTES = 1 << 30
_SEED = 7


class Pattern(NamedTuple):
    """How a file is read: ``kind`` of `KINDS`, bytes per request, requests in flight."""

    kind: str
    request_bytes: int
    depth: int


class Speed(NamedTuple):
    """Bytes that arrived, and the seconds until all of them had."""

    bytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        """The rate."""
        return self.bytes / self.seconds


def write_test_file(path: Path, size: int, progress: Progress) -> None:
    """Fill a new file with ``size`` random bytes (nothing on the way can compress them); fsync."""
    rng = np.random.default_rng(_SEED)
    with path.open("xb") as file:
        for done in range(0, size, _WRITE_BYTES):
            progress(ProgressEvent("write test file", done, size, "bytes"))
            file.write(rng.bytes(min(_WRITE_BYTES, size - done)))
        file.flush()
        os.fsync(file.fileno())
    progress(ProgressEvent("write test file", size, size, "bytes"))


def random_layer(shape: KVShape, tokens: int, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of a layer, random bits [tokens, kv_heads, head_dim] in storage dtype."""
    rng = np.random.default_rng((_SEED, layer))
    size = tokens * shape.row_bytes
    dims = (tokens, shape.num_kv_heads, shape.head_dim)
    k, v = (np.frombuffer(rng.bytes(size), shape.np_dtype).reshape(dims) for _ in KV_ARRAYS)
    return k, v


def write_random_node(store: Path, layout: NodeLayout, progress: Progress) -> NodeFiles:
    """Write a node of random rows below ``store`` as the store would, and open it."""
    node_id, layers = "0" * 20, layout.shape.num_layers

    def rows_of(layer: int) -> tuple[np.ndarray, np.ndarray]:
        progress(ProgressEvent("write node", layer, layers, "", "layers"))
        return random_layer(layout.shape, layout.tokens, layer)

    group = disk_layout.generation_dir(store, node_id, 0)
    write_generation(group, layout, np.arange(layout.tokens, dtype="<u4"), rows_of, {})
    progress(ProgressEvent("write node", layers, layers, "", "layers"))
    table = (layers, layout.num_chunks)
    k_crc, v_crc = (disk_layout.read_small(group, f"{a}_crc", "<u4", table) for a in KV_ARRAYS)
    return NodeFiles(node_id, group, layout, 0, k_crc, v_crc)


def _advise(fd: int, *advices: str) -> None:
    """Pass advice on a whole file to the kernel, where it takes any."""
    for name in advices:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, getattr(os, name))


def drop_cached(paths: Sequence[Path]) -> None:
    """Ask the kernel to forget what it holds of these (synced) files."""
    for path in paths:
        # A missing file is the reader's to name.
        with contextlib.suppress(FileNotFoundError), opened(path, 1) as fd:
            _advise(fd, "POSIX_FADV_DONTNEED")


@contextlib.contextmanager
def opened(path: Path, block: int) -> Iterator[int]:
    """Descriptor for reading, with O_DIRECT where ``block`` (its block size) is above 1."""
    fd = os.open(path, os.O_RDONLY | (getattr(os, "O_DIRECT", 0) if block > 1 else 0))
    try:
        yield fd
    finally:
        os.close(fd)


class FileReads:
    """Reads of one open test file of ``size`` bytes, by pattern.

    ``patterns`` are those that `run` will be called with: memory for them is laid out, and
    touched, beforehand.
    """

    def __init__(self, fd: int, size: int, block: int, patterns: Sequence[Pattern]) -> None:
        self._fd, self._size, self._block = fd, size, block
        self._arena = Arena(max(p.request_bytes * p.depth for p in patterns))
        self._arena.array.fill(0)

    def run(self, pattern: Pattern, limit_s: float) -> Speed:
        """Read the file once, each byte at most once, but start no request after ``limit_s``."""
        numbers, request = itertools.count(), pattern.request_bytes
        offsets = self._offsets(pattern)
        advice = "RANDOM" if pattern.kind == "random" else "SEQUENTIAL"
        _advise(self._fd, "POSIX_FADV_DONTNEED", f"POSIX_FADV_{advice}")
        started = time.perf_counter()

        def work(buffer: memoryview) -> int:
            done = 0
            # next() on a shared counter is one step of the interpreter: each number goes out once.
            while (number := next(numbers)) < len(offsets):
                done += pread_full(self._fd, buffer, offsets[number], request, self._block)
                if time.perf_counter() - started > limit_s:
                    break
            return done

        with ThreadPoolExecutor(pattern.depth) as pool:
            spans = [slice(i * request, (i + 1) * request) for i in range(pattern.depth)]
            total = sum(pool.map(work, [self._arena.view[span] for span in spans]))
            return Speed(total, time.perf_counter() - started)

    def _offsets(self, pattern: Pattern) -> list[int]:
        count = self._size // pattern.request_bytes
        numbers = np.arange(count)
        if pattern.kind == "random":
            numbers = np.random.default_rng(_SEED).permutation(count)
        return [int(offset) for offset in numbers * pattern.request_bytes]


class NodeReads:
    """All chunks of a node (of its first layers, if it is large) into the same memory, two ways.

    Reads go layer by layer, keys then values, as a query's do, each array to an aligned place.
    Use as a context manager.
    """

    def __init__(self, files: NodeFiles, options: IOOptions) -> None:
        self.files, layout = files, files.layout
        # A codec may make chunks larger; one block more lets the last read be widened in place.
        sizes = [path.stat().st_size for path in files.group.glob("[kv]/c.*")]
        self._region = (max([layout.data_bytes, *sizes]) // MAX_BLOCK + 2) * MAX_BLOCK
        self.layers = min(layout.shape.num_layers, max(1, NODE_BYTES // (2 * self._region)))
        self._shards = [(array, layer) for layer in range(self.layers) for array in KV_ARRAYS]
        self._paths = [disk_layout.shard_path(files.group, *shard) for shard in self._shards]
        self.reader = ChunkReader(options)
        self.block = self.reader.block_for(self._paths[0])
        self._arena = Arena(len(self._shards) * self._region)
        self._pool = ThreadPoolExecutor(options.threads)

    def __enter__(self) -> NodeReads:
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.close()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def place(self, shard: int) -> memoryview:
        """Where the rows of shard number ``shard`` go: k of layer 0, v of layer 0, k of layer 1."""
        return self._arena.view[shard * self._region : (shard + 1) * self._region]

    def with_reader(self) -> Speed:
        """The store's reader: bytes asked for, checked, decoded, in place. ChunkLoadError."""
        files = self.files
        chunks, valid = files.layout.num_chunks, files.layout.tokens * files.layout.shape.row_bytes
        reads = [
            ShardRead(files, array, layer, one_run(0, chunks), self.place(shard), valid)
            for shard, (array, layer) in enumerate(self._shards)
        ]

        def run() -> int:
            futures = [self.reader.submit(read) for read in reads]
            return sum(future.result().wanted_bytes for future in futures)

        return self._timed(run)

    def with_preadv(self) -> Speed:
        """The same bytes with as many threads that only open, ``preadv`` and close."""
        return self._timed(lambda: sum(self._pool.map(self._bare, range(len(self._shards)))))

    def _timed(self, run: Callable[[], int]) -> Speed:
        drop_cached(self._paths)
        started = time.perf_counter()
        done = run()
        return Speed(done, time.perf_counter() - started)

    def _bare(self, shard: int) -> int:
        view = self.place(shard)
        with opened(self._paths[shard], self.block) as fd:
            need = os.fstat(fd).st_size - self.files.layout.index_bytes
            for done in range(0, need, REQUEST_BYTES):
                want = min(REQUEST_BYTES, need - done)
                span = -(-want // self.block) * self.block
                pread_full(fd, view[done : done + span], done, want, self.block)
        return need
