"""Where a measurement's temporary files lie: enough room, always deleted, on which file system."""

from __future__ import annotations

import contextlib
import errno
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from store.errors import InvalidValueError, StoreFullError

#: File systems whose files are in memory.
IN_MEMORY = ("tmpfs", "ramfs")


def require_space(folder: Path, need_bytes: int) -> None:
    """Raise `StoreFullError` where ``folder`` lacks room, `InvalidValueError` where it is none."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise _bad_folder(folder, error) from error
    if need_bytes > free:
        why = f"has {free / 1e6:.1f} MB free, of {need_bytes / 1e6:.1f} MB needed"
        raise _no_room(folder, why)


@contextlib.contextmanager
def temporary_folder(folder: Path) -> Iterator[Path]:
    """A new folder in ``folder``, deleted in the end; running out of space in it is one line.

    Raises
    ------
    InvalidValueError
        ``folder`` can't be written.
    StoreFullError
        What was done inside ran out of space.
    """
    try:
        made = tempfile.TemporaryDirectory(prefix=".impress-bench-", dir=folder)
    except OSError as error:
        raise _bad_folder(folder, error) from error
    with made as name:
        try:
            yield Path(name)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            if full or isinstance(error, StoreFullError):
                raise _no_room(folder, "ran full") from error
            raise


def _no_room(folder: Path, why: str) -> StoreFullError:
    return StoreFullError(f"{folder} {why}; give a smaller --size or another --dir")


def _bad_folder(folder: Path, error: OSError) -> InvalidValueError:
    return InvalidValueError(
        f"can't put a test file into {folder} ({error.strerror}); give --dir a folder that is "
        "there and can be written"
    )


def file_system(folder: Path) -> str | None:
    """Type of the file system that holds ``folder``, such as ``ext4``; None where unknown."""
    path = str(folder.resolve())
    mounts = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    around = [m for m in mounts if path == m or path.startswith(m.rstrip("/") + "/")]
    return mounts[max(around, key=len)] or None if around else None
