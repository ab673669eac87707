"""How the catalog's SQLite file is opened: access mode, journal, and errors in our own words."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from store.errors import (
    CatalogError,
    ReadOnlyStoreError,
    StoreError,
    StoreFullError,
    StoreLockedError,
)

#: How long a statement waits for another process's commit, in seconds.
BUSY_S = 10.0

#: File systems on which the shared memory of WAL does not work between machines.
NETWORK_TYPES = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "fuse", "9p", "ceph", "glusterfs", "lustre", "afs"}
)


def filesystem_type(path: Path, mounts: str | None = None) -> str:
    """Type of the file system that holds ``path``, ``unknown`` where it can't be told.

    Parameters
    ----------
    mounts
        Text of ``/proc/mounts``; read from there by default.
    """
    try:
        text = Path("/proc/mounts").read_text() if mounts is None else mounts
    except OSError:
        return "unknown"
    target, best, found = path.resolve(), -1, "unknown"
    for line in text.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = Path(_unescape(fields[1]))
        # Later mounts cover earlier ones at the same place, so equal lengths win too.
        if target.is_relative_to(point) and len(point.parts) >= best:
            best, found = len(point.parts), fields[2]
    return found


def is_network(kind: str) -> bool:
    """Whether a file system type is served by another machine or by a user-space process."""
    return kind in NETWORK_TYPES or kind.startswith("fuse.")


def can_write(directory: Path) -> bool:
    """Whether this process may create files in ``directory`` (False on a read-only mount)."""
    return os.access(directory, os.W_OK | os.X_OK)


def is_full(directory: Path) -> bool:
    """Whether the file system has no block left for this process."""
    found = os.statvfs(directory)
    return (found.f_bfree if os.geteuid() == 0 else found.f_bavail) < 16


def connect(path: Path, *, readonly: bool, create: bool) -> tuple[sqlite3.Connection, str | None]:
    """Open the file and set its journal.

    Returns
    -------
    connection, note
        ``note`` is a sentence for the user when the journal is not the usual one, else None.
        Statements outside BEGIN commit by themselves.
    """
    if readonly:
        return _connect_readonly(path)
    try:
        connection = _open(path, "mode=rwc" if create else "mode=rw")
    except sqlite3.OperationalError as error:
        if not create and is_full(path.parent):
            raise StoreFullError(
                f"no space left on the disk of {path}; free some outside the store first"
            ) from error
        raise
    try:
        return connection, _set_journal(connection, filesystem_type(path.parent))
    except BaseException:
        connection.close()
        raise


def _connect_readonly(path: Path) -> tuple[sqlite3.Connection, str | None]:
    try:
        return _open(path, "mode=ro"), None
    except sqlite3.OperationalError:
        if can_write(path.parent) and not is_full(path.parent):
            raise
    # A WAL file needs its helper files beside it. Where they can't be made, there is no writer
    # either, so the file may be read as one that never changes.
    return _open(path, "mode=ro&immutable=1"), _immutable_note(path)


def _open(path: Path, query: str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?{query}",
        uri=True,
        timeout=BUSY_S,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA synchronous = FULL")
        # SQLite touches the file only when it must; ask for something that lies in it.
        connection.execute("PRAGMA schema_version").fetchone()
    except BaseException:
        connection.close()
        raise
    return connection


def _set_journal(connection: sqlite3.Connection, kind: str) -> str | None:
    wanted = "delete" if is_network(kind) else "wal"
    actual = str(connection.execute(f"PRAGMA journal_mode = {wanted}").fetchone()[0])
    if wanted == "delete":
        return (
            f"the store lies on a network file system ({kind}): its catalog keeps a "
            f"{actual} journal, and readers wait while a writer commits"
        )
    if actual != wanted:
        return f"the catalog keeps a {actual} journal, because this file system has no WAL"
    return None


def _immutable_note(path: Path) -> str:
    wal = path.with_name(path.name + "-wal")
    unmerged = wal.exists() and wal.stat().st_size > 0
    lost = "; changes in its -wal file can't be read, so some prefixes may be missed"
    return "the store's folder can't be written: the catalog is read as it is now" + (
        lost if unmerged else ""
    )


@contextmanager
def mapped_errors(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into `StoreError`; a misuse of the module stays a ProgrammingError."""
    try:
        yield
    except sqlite3.ProgrammingError:
        raise
    except sqlite3.DatabaseError as error:
        raise _mapped(error, path) from error


def _mapped(error: sqlite3.DatabaseError, path: Path) -> StoreError:
    # The low byte is the primary code, the rest says which of its cases it is.
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StoreLockedError(
            f"another process has been writing the catalog {path} for {BUSY_S:.0f} s; try again "
            "when it is done"
        )
    if code == sqlite3.SQLITE_FULL:
        return StoreFullError(f"no room to write the catalog {path}; free space on its disk")
    if code == sqlite3.SQLITE_READONLY:
        return ReadOnlyStoreError(
            f"the catalog {path} can't be written ({error}); allow writing to its folder and file"
        )
    if code == sqlite3.SQLITE_CONSTRAINT:
        return CatalogError(
            f"a change to the catalog {path} contradicts its other rows ({error}), so none of it "
            "was written; run 'impress verify' to check the store"
        )
    return CatalogError(
        f"the catalog {path} can't be read ({error}); run 'impress repair --store {path.parent}' "
        "to rebuild it"
    )


def _unescape(text: str) -> str:
    """Undo the octal escapes of ``/proc/mounts`` (a space is written as ``\\040``)."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
