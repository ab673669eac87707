"""The durable table of what a store holds: nodes, prefixes, quarantine, garbage (SQLite).

Owns ``catalog.sqlite`` and nothing else; it knows no tokens and no files of KV. One connection
per `Catalog`; a lock lets several threads share it. Whoever writes must hold the store's writer
lock, except for the counters.
"""

from __future__ import annotations

import difflib
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from store.errors import (
    CatalogError,
    FormatVersionError,
    PrefixNotFoundError,
    ReadOnlyStoreError,
)
from store.index.connection import connect, mapped_errors
from store.index.rows import GarbageRow, NodeRow, PrefixRow, ProbeRow, QuarantineRow
from store.index.transaction import SCHEMA, SCHEMA_VERSION, Transaction

__all__ = [
    "Catalog",
    "GarbageRow",
    "NodeRow",
    "PrefixRow",
    "ProbeRow",
    "QuarantineRow",
    "Transaction",
]

#: Shortest beginning of a prefix id that is looked up.
MIN_KEY_CHARS = 4


class Catalog:
    """An open catalog; a context manager.

    Attributes
    ----------
    path, readonly
        As given to `open`.
    journal_note
        A sentence for the user when the journal is not the usual one, else None.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        path: Path,
        *,
        readonly: bool,
        journal_note: str | None = None,
    ) -> None:
        self.path = path
        self.readonly = readonly
        self.journal_note = journal_note
        self._connection = connection
        self._lock = threading.RLock()
        self._seen_version = -1
        self._seen_epoch = -1

    @classmethod
    def open(cls, path: Path, *, readonly: bool, create: bool = False) -> Catalog:
        """Open ``catalog.sqlite``.

        Parameters
        ----------
        readonly
            Never write, not even where the file could be written.
        create
            Make the file and its tables where they are missing.

        Raises
        ------
        CatalogError
            The file is missing, damaged, or no catalog.
        FormatVersionError
            Its tables are of another version.
        """
        path = Path(path)
        if not create and not path.is_file():
            raise CatalogError(
                f"the catalog {path} is missing; run 'impress repair --store {path.parent}' to "
                "rebuild it"
            )
        with mapped_errors(path):
            connection, note = connect(path, readonly=readonly, create=create)
            catalog = cls(connection, path, readonly=readonly, journal_note=note)
            try:
                catalog._prepare(create)
            except BaseException:
                connection.close()
                raise
        return catalog

    def close(self) -> None:
        """Close the connection; a second call does nothing."""
        with self._lock:
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Change the catalog atomically: all of the block is committed, or nothing of it.

        The epoch grows by one at commit. An exception in the block undoes everything and goes on.

        Raises
        ------
        ReadOnlyStoreError, StoreLockedError, StoreFullError
            The catalog can't be written, or not now.
        CatalogError
            A node would be left without its parent, or a prefix without its node.
        """
        with self._writing() as connection:
            before = self._read_epoch()
            txn = Transaction(connection, before + 1)
            try:
                yield txn
            finally:
                txn.end()
            connection.execute("UPDATE catalog SET epoch = ?", (txn.epoch,))
            connection.execute("COMMIT")
            # Unless another process committed since the last look, nothing new is to be told.
            if before == self._seen_epoch:
                self._seen_epoch = txn.epoch

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Let all reads of the block see the same commit."""
        with self._lock, mapped_errors(self.path):
            self._connection.execute("BEGIN")
            try:
                yield
            finally:
                self._roll_back()

    @property
    def epoch(self) -> int:
        """Number of transactions committed so far, by any process."""
        with self._lock, mapped_errors(self.path):
            return self._read_epoch()

    def changed(self) -> bool:
        """Whether another process committed a transaction since the last call (or since `open`)."""
        with self._lock, mapped_errors(self.path):
            version = self._data_version()
            if version == self._seen_version:
                return False
            self._seen_version = version
            # Counters change the file too; only the epoch says that the index did.
            seen, self._seen_epoch = self._seen_epoch, self._read_epoch()
            return seen != self._seen_epoch

    def nodes(self) -> list[NodeRow]:
        """All nodes, by id."""
        return [NodeRow._make(row) for row in self._rows("SELECT * FROM nodes")]

    def prefixes(self) -> list[PrefixRow]:
        """All prefixes, oldest first."""
        rows = self._rows("SELECT * FROM prefixes ORDER BY created, prefix_id")
        return [PrefixRow._make(row) for row in rows]

    def prefix(self, key: str) -> PrefixRow:
        """Look up a prefix by its id, its exact name, or a beginning of its id (4 characters on).

        Raises
        ------
        PrefixNotFoundError
            None or several fit; the message lists up to three that do or that look alike.
        """
        for where in (
            "prefix_id = :key",
            "name = :key",
            f"length(:key) >= {MIN_KEY_CHARS} AND substr(prefix_id, 1, length(:key)) = lower(:key)",
        ):
            rows = self._rows(
                f"SELECT * FROM prefixes WHERE {where} ORDER BY prefix_id LIMIT 4", {"key": key}
            )
            if len(rows) == 1:
                return PrefixRow._make(rows[0])
            if rows:
                raise PrefixNotFoundError(_ambiguous(key, [PrefixRow._make(row) for row in rows]))
        raise PrefixNotFoundError(self._not_found(key))

    def find_prefix(self, prefix_id: str) -> PrefixRow | None:
        """The prefix with exactly this id, None where there is none."""
        rows = self._rows("SELECT * FROM prefixes WHERE prefix_id = ?", (prefix_id,))
        return PrefixRow._make(rows[0]) if rows else None

    def quarantined(self) -> list[QuarantineRow]:
        """All data known to be bad, by node."""
        return [QuarantineRow._make(row) for row in self._rows("SELECT * FROM quarantine")]

    def probes(self) -> list[ProbeRow]:
        """All published sidecars, by node; none in a store that never had one."""
        if not self._rows("SELECT 1 FROM sqlite_master WHERE name = 'probes'"):
            return []
        return [ProbeRow._make(row) for row in self._rows("SELECT * FROM probes")]

    def garbage(self) -> list[GarbageRow]:
        """Generations whose files may be deleted, by node."""
        return [GarbageRow._make(row) for row in self._rows("SELECT * FROM garbage")]

    def published_generation(self, node_id: str) -> int:
        """Generation of a node that is published; -1 where it is not in the catalog."""
        rows = self._rows("SELECT generation FROM nodes WHERE node_id = ?", (node_id,))
        return int(rows[0][0]) if rows else -1

    def tombstoned_generation(self, node_id: str) -> int:
        """Highest generation of a node that was retired on purpose; -1 when none was."""
        rows = self._rows("SELECT generation FROM tombstones WHERE node_id = ?", (node_id,))
        return int(rows[0][0]) if rows else -1

    def tombstones(self) -> dict[str, int]:
        """Highest generation removed on purpose, by node id."""
        return dict(self._rows("SELECT node_id, generation FROM tombstones"))

    def verdicts(self) -> list[str]:
        """Verdicts of evaluations as JSON text, oldest first."""
        return [row[0] for row in self._rows("SELECT json FROM verdicts ORDER BY created, rowid")]

    def meta(self, key: str) -> str | None:
        """A free value of the store; None when it was never set."""
        rows = self._rows("SELECT value FROM meta WHERE key = ?", (key,))
        return str(rows[0][0]) if rows else None

    def counters(self) -> dict[str, float]:
        """Lifetime statistics of queries."""
        return dict(self._rows("SELECT name, value FROM counters"))

    def add_counters(self, amounts: dict[str, float]) -> None:
        """Add to the lifetime statistics; not a change of the index, so the epoch stays."""
        with self._writing() as connection:
            connection.executemany(
                """INSERT INTO counters VALUES (?,?) ON CONFLICT (name) DO UPDATE SET
                value = value + excluded.value""",
                list(amounts.items()),
            )
            connection.execute("COMMIT")

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """Hold the write lock of SQLite; the block commits, anything else is undone."""
        if self.readonly:
            raise ReadOnlyStoreError(
                f"the catalog {self.path} was opened to be read only; open the store where it can "
                "be written"
            )
        with self._lock, mapped_errors(self.path):
            assert not self._connection.in_transaction, "transactions don't nest"
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
            finally:
                self._roll_back()

    def _roll_back(self) -> None:
        """Undo what is not committed; after a commit there is nothing to undo."""
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")

    def _prepare(self, create: bool) -> None:
        """Create the tables if asked to, check their version, and note what is there now."""
        if create:
            with self._writing() as connection:
                # Asked inside the transaction: another process may be creating them too.
                if not self._rows("SELECT 1 FROM sqlite_master WHERE name = 'catalog'"):
                    for statement in SCHEMA:
                        connection.execute(statement)
                connection.execute("COMMIT")
        version = self._number("SELECT version FROM catalog")
        if version != SCHEMA_VERSION:
            raise FormatVersionError(
                f"the catalog {self.path} has version {version}, this program knows version "
                f"{SCHEMA_VERSION}; use the version of impress that wrote it"
            )
        self._seen_version, self._seen_epoch = self._data_version(), self._read_epoch()

    def _read_epoch(self) -> int:
        return self._number("SELECT epoch FROM catalog")

    def _data_version(self) -> int:
        """A number that SQLite changes when another connection commits."""
        return self._number("PRAGMA data_version")

    def _number(self, sql: str) -> int:
        row = self._connection.execute(sql).fetchone()
        if row is None:
            raise CatalogError(
                f"the catalog {self.path} has lost its version; run 'impress repair --store "
                f"{self.path.parent}' to rebuild it"
            )
        return int(row[0])

    def _rows(
        self, sql: str, values: tuple[Any, ...] | dict[str, Any] = ()
    ) -> list[tuple[Any, ...]]:
        with self._lock, mapped_errors(self.path):
            return self._connection.execute(sql, values).fetchall()

    def _not_found(self, key: str) -> str:
        rows = self.prefixes()
        if not rows:
            return f"no prefix {key!r}: the store holds none; add some with 'impress build-store'"
        names = {row.name: row for row in rows}
        near = [_label(names[name]) for name in difflib.get_close_matches(key, list(names), n=3)]
        if near:
            return f"no prefix {key!r}; did you mean {', '.join(near)}?"
        return (
            f"no prefix {key!r}; give a name, or {MIN_KEY_CHARS} or more characters of an id from "
            "'impress ls'"
        )


def _label(row: PrefixRow) -> str:
    return f"{row.prefix_id} ({row.name})"


def _ambiguous(key: str, rows: list[PrefixRow]) -> str:
    more = ", …" if len(rows) > 3 else ""
    return (
        f"{key!r} fits several prefixes: {', '.join(map(_label, rows[:3]))}{more}; give more "
        "characters of one id"
    )
