"""Raw reads: options, O_DIRECT probing, aligned memory, device emulation.

Owns how bytes get from a file into memory. It knows nothing of chunks, nodes or checksums.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from store.errors import InvalidValueError

T = TypeVar("T")

#: Largest logical block size that is tried; every smaller power of two divides it.
MAX_BLOCK = 4096
_HUGE_PAGE = 2 << 20
#: What a request costs beside its bytes, about: see docs/decisions.md.
REQUEST_S = 60e-6
#: NaN in float32, float16 and bfloat16: what poisoned memory shows where nothing was loaded.
POISON = 0xFF


@dataclass(frozen=True, slots=True)
class IOOptions:
    """How the store reads.

    Parameters
    ----------
    threads
        Reads in flight.
    direct
        Use O_DIRECT where the file system allows it.
    bandwidth_bytes_s, latency_s
        Emulate a slower device: bytes per second over all reads, seconds per request.
    deadline_s
        A read that takes longer is a miss.
    bridge_bytes
        Bytes that a direct read may take in between two runs of chunks, and drop, to save a
        request.
    poison
        Fill buffers with NaN before use (tests): a row that was never loaded shows.
    """

    threads: int = 4
    direct: bool = True
    bandwidth_bytes_s: float | None = None
    latency_s: float = 0.0
    deadline_s: float = 30.0
    bridge_bytes: int = 48 << 10
    poison: bool = False

    def __post_init__(self) -> None:
        if self.bridge_bytes < 0:
            raise InvalidValueError(f"bytes to bridge must be 0 or more, got {self.bridge_bytes}")
        if self.threads < 1:
            raise InvalidValueError(f"I/O threads must be 1 or more, got {self.threads}")
        if self.bandwidth_bytes_s is not None and self.bandwidth_bytes_s <= 0:
            raise InvalidValueError(
                f"disk bandwidth must be above 0 bytes/s, got {self.bandwidth_bytes_s}"
            )
        if self.latency_s < 0 or self.deadline_s <= 0:
            raise InvalidValueError(
                f"disk latency must be 0 s or more and the deadline above 0 s, "
                f"got {self.latency_s} and {self.deadline_s}"
            )

    @property
    def bridged_bytes(self) -> int:
        """`bridge_bytes`, or what an emulated device transfers while a request is made, if less."""
        if self.bandwidth_bytes_s is None:
            return self.bridge_bytes
        return min(self.bridge_bytes, int(self.bandwidth_bytes_s * (REQUEST_S + self.latency_s)))


class Arena:
    """Page-aligned anonymous memory with huge pages asked for.

    ``view`` is a writable uint8 memoryview of ``size`` bytes. Fresh 4 KiB pages cost a fault
    each, 46 000 for a 4 096-token prefix; arenas are therefore large and reused. ``pinned``: known
    to CUDA, on which copies to a device need not wait.
    """

    def __init__(self, size: int, *, pinned: bool = False) -> None:
        self.size = size
        if pinned:
            # Page-locked by CUDA, so that copies to the device run beside everything else.
            whole = torch.empty(size + MAX_BLOCK, dtype=torch.uint8, pin_memory=True).numpy()
            skip = -whole.ctypes.data % MAX_BLOCK
            self.array = whole[skip : skip + size]
            self.view = self.array.data
            return
        self._map = mmap.mmap(-1, max(size, 1) + _HUGE_PAGE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # A kernel built without huge pages refuses; ordinary pages work, more slowly.
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(self._map, dtype=np.uint8)
        skip = -whole.ctypes.data % _HUGE_PAGE
        self.array = whole[skip : skip + size]
        self.view = self.array.data

    def poison(self) -> None:
        """Fill with NaN bits."""
        self.array.fill(POISON)


def address_of(view: memoryview) -> int:
    """Address of a writable buffer's first byte."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def probe_direct(path: Path) -> int:
    """Smallest O_DIRECT block size that reads ``path``; 0 where O_DIRECT does not work.

    Past the end of a file nothing is read and so nothing refused: one too short to tell is taken
    to need the largest.
    """
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return 0
    try:
        fd = os.open(path, os.O_RDONLY | flag)
    except OSError:
        return 0
    try:
        memory, size = Arena(2 * MAX_BLOCK), os.fstat(fd).st_size
        for block in (512, 1024, 2048, MAX_BLOCK):
            if size < 2 * block and block < MAX_BLOCK:
                continue
            try:
                # Offset, address and length all need the alignment: shift each by one block.
                at = block if size > block else 0
                os.preadv(fd, [memory.view[block : 2 * block]], at)
                return block
            except OSError as error:
                if error.errno != errno.EINVAL:
                    return 0
        return 0
    finally:
        os.close(fd)


class Throttle:
    """One emulated device shared by all reading threads."""

    def __init__(self, bandwidth_bytes_s: float | None, latency_s: float) -> None:
        self._bandwidth = bandwidth_bytes_s
        self._latency = latency_s
        self._lock = threading.Lock()
        self._free_at = 0.0
        self.active = bandwidth_bytes_s is not None or latency_s > 0

    def reserve(self, size: int) -> float:
        """Queue ``size`` bytes on the device; returns the clock time at which they are there."""
        now = time.perf_counter()
        with self._lock:
            start = max(now, self._free_at)
            self._free_at = start + (size / self._bandwidth if self._bandwidth else 0.0)
            return self._free_at + self._latency

    @staticmethod
    def wait_until(ready: float) -> None:
        """Sleep until the clock reaches ``ready``."""
        left = ready - time.perf_counter()
        if left > 0:
            time.sleep(left)


class ReadPool:
    """Threads that read. Unlike an executor's, they don't keep the process from ending.

    A read that hangs (a network file system that went away) can't be stopped, only left behind.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._queue = queue.SimpleQueue()
        self._started = False

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queue ``work``; the threads start with the first."""
        if not self._started:
            self._started = True
            for number in range(self._threads):
                name = f"impress-io-{number}"
                threading.Thread(target=self._serve, name=name, daemon=True).start()
        future: Future[T] = Future()
        self._queue.put((future, work))
        return future

    def close(self) -> None:
        """Let the threads end after what is queued."""
        if self._started:
            for _ in range(self._threads):
                self._queue.put(None)

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            future, work = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits
                future.set_exception(error)
            del item, future, work


class ShortReadError(OSError):
    """The file ended before the bytes asked for."""


def pread_full(fd: int, view: memoryview, offset: int, need: int, block: int) -> int:
    """Read at ``offset`` into ``view`` until ``need`` bytes are there; returns the bytes read.

    ``view`` may be longer than ``need`` (widened to the block size); a file that ends within the
    widening is fine. Raises `ShortReadError` where it ends before.
    """
    done = 0
    while done < need:
        count = os.preadv(fd, [view[done:]], offset + done)
        if count == 0:
            raise ShortReadError(errno.EIO, f"file ends {need - done} bytes early")
        done += count
        if done < need and done % block:
            # O_DIRECT can only go on at a block boundary: step back and read the rest again.
            done -= done % block
            if count < block:
                raise ShortReadError(errno.EIO, f"file ends {need - done} bytes early")
    return done
