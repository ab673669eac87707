"""Who may write, and which old generations are still being read.

A store has one writer lock (``writer.lock``) and one lease per open reader
(``leases/<epoch>-<random>.lock``, held as long as the process lives; the kernel lets go of it
when the process dies). A generation retired at epoch e may be deleted once every live lease
has an epoch of e or later.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path

from filelock import FileLock, Timeout

from store.errors import ReadOnlyStoreError, StoreLockedError

WRITER_LOCK = "writer.lock"
LEASES = "leases"


class WriterLock:
    """Re-entrant lock of the one process that may publish or delete."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self._lock = FileLock(store / WRITER_LOCK, thread_local=False)

    def acquire(self, timeout_s: float) -> bool:
        """Take the lock; True where it was not held before.

        Raises
        ------
        StoreLockedError
            Another process still holds it after ``timeout_s`` seconds.
        """
        first = not self._lock.is_locked
        try:
            self._lock.acquire(timeout=timeout_s)
        except Timeout as error:
            raise StoreLockedError(
                f"another process is writing to {self._store}; wait for it to end, "
                "then run the command again"
            ) from error
        except OSError as error:
            raise ReadOnlyStoreError(
                f"{self._store} can't be written ({error.strerror}); copy the store, or mount it "
                "writable"
            ) from error
        return first

    def release(self) -> None:
        """Give the lock back (once per `acquire`)."""
        self._lock.release()


class ReaderLease:
    """States that this process may read every generation alive at ``epoch``."""

    def __init__(self, store: Path, epoch: int) -> None:
        self._folder = store / LEASES
        self._folder.mkdir(exist_ok=True)
        self.epoch = epoch
        self._lock = self._take(epoch)

    def _take(self, epoch: int) -> FileLock:
        name = f"{epoch}-{os.getpid()}-{uuid.uuid4().hex[:8]}.lock"
        lock = FileLock(self._folder / name)
        lock.acquire()
        return lock

    def renew(self, epoch: int) -> None:
        """Move on to a later epoch; the new lease is taken before the old one is dropped."""
        if epoch == self.epoch:
            return
        old, self._lock = self._lock, self._take(epoch)
        self.epoch = epoch
        _drop(old)

    def release(self) -> None:
        """Drop the lease."""
        _drop(self._lock)


def _drop(lock: FileLock) -> None:
    path = Path(lock.lock_file)
    path.unlink(missing_ok=True)
    lock.release()


def oldest_lease(store: Path) -> int | None:
    """Smallest epoch of a live lease, None without one; leases of dead processes are removed."""
    oldest: int | None = None
    for path in sorted((store / LEASES).glob("*.lock")):
        number = path.name.split("-")[0]
        if not number.isdigit():
            continue  # not one of ours
        probe = FileLock(path)
        # A lease that another user holds can't even be tried: it counts as live.
        with contextlib.suppress(Timeout, PermissionError):
            probe.acquire(timeout=0)
            _drop(probe)
            continue
        oldest = int(number) if oldest is None else min(oldest, int(number))
    return oldest
