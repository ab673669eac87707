"""Changes to the catalog: the tables, and every statement that writes to them."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable
from typing import Any

from store.errors import CatalogError, PrefixNotFoundError
from store.index.rows import NodeRow, PrefixRow, ProbeRow, QuarantineRow

#: Version of the tables below; it belongs to format version 1.
SCHEMA_VERSION = 1

# Links are checked at commit, so that the statements of a transaction may come in any order.
SCHEMA = (
    "CREATE TABLE catalog (version INTEGER NOT NULL, epoch INTEGER NOT NULL)",
    """CREATE TABLE nodes (
        node_id TEXT PRIMARY KEY,
        parent_id TEXT REFERENCES nodes DEFERRABLE INITIALLY DEFERRED,
        start INTEGER NOT NULL, length INTEGER NOT NULL, first_ids BLOB NOT NULL,
        digest TEXT NOT NULL, generation INTEGER NOT NULL, group_digest TEXT NOT NULL,
        bytes INTEGER NOT NULL) WITHOUT ROWID""",
    "CREATE INDEX nodes_parent ON nodes (parent_id)",
    """CREATE TABLE prefixes (
        prefix_id TEXT PRIMARY KEY, name TEXT NOT NULL, length INTEGER NOT NULL,
        node_id TEXT NOT NULL REFERENCES nodes DEFERRABLE INITIALLY DEFERRED,
        digest TEXT NOT NULL, created REAL NOT NULL, source TEXT NOT NULL) WITHOUT ROWID""",
    "CREATE INDEX prefixes_node ON prefixes (node_id)",
    """CREATE TABLE quarantine (
        node_id TEXT NOT NULL, generation INTEGER NOT NULL, array TEXT NOT NULL,
        layer INTEGER NOT NULL, chunk INTEGER NOT NULL, first_token INTEGER NOT NULL,
        reason TEXT NOT NULL, created REAL NOT NULL,
        PRIMARY KEY (node_id, generation, array, layer, chunk)) WITHOUT ROWID""",
    """CREATE TABLE garbage (
        node_id TEXT NOT NULL, generation INTEGER NOT NULL, retired_epoch INTEGER NOT NULL,
        PRIMARY KEY (node_id, generation)) WITHOUT ROWID""",
    """CREATE TABLE tombstones (
        node_id TEXT PRIMARY KEY, generation INTEGER NOT NULL) WITHOUT ROWID""",
    "CREATE TABLE verdicts (created REAL NOT NULL, json TEXT NOT NULL)",
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE counters (name TEXT PRIMARY KEY, value REAL NOT NULL) WITHOUT ROWID",
    f"INSERT INTO catalog VALUES ({SCHEMA_VERSION}, 0)",
)

# Made with the first sidecar, so that stores older than sidecars need no change. A version of
# impress that knows nothing of the table still empties it when it deletes nodes.
PROBES_SCHEMA = """CREATE TABLE IF NOT EXISTS probes (
    node_id TEXT NOT NULL
        REFERENCES nodes ON DELETE CASCADE DEFERRABLE INITIALLY DEFERRED,
    kind TEXT NOT NULL, digest TEXT NOT NULL, bytes INTEGER NOT NULL, detail TEXT NOT NULL,
    PRIMARY KEY (node_id, kind)) WITHOUT ROWID"""

# Not INSERT OR REPLACE: that deletes the old row first, and with it the links to it.
PUT_NODE = """INSERT INTO nodes VALUES (?,?,?,?,?,?,?,?,?) ON CONFLICT (node_id) DO UPDATE SET
    parent_id=excluded.parent_id, start=excluded.start, length=excluded.length,
    first_ids=excluded.first_ids, digest=excluded.digest, generation=excluded.generation,
    group_digest=excluded.group_digest, bytes=excluded.bytes"""
PUT_PREFIX = """INSERT INTO prefixes VALUES (?,?,?,?,?,?,?) ON CONFLICT (prefix_id) DO UPDATE SET
    name=excluded.name, length=excluded.length, node_id=excluded.node_id,
    digest=excluded.digest, created=excluded.created, source=excluded.source"""


class Transaction:
    """One atomic change of the catalog; made by `Catalog.transaction`, dead after its block.

    Methods raise `CatalogError` for a node and `PrefixNotFoundError` for a prefix that is not
    there; the whole transaction is then undone.

    Attributes
    ----------
    epoch
        The catalog's epoch once this transaction is committed.
    """

    def __init__(self, connection: sqlite3.Connection, epoch: int) -> None:
        self.epoch = epoch
        self._connection: sqlite3.Connection | None = connection

    def end(self) -> None:
        """Refuse further changes: outside the transaction each would be committed by itself."""
        self._connection = None

    def put_node(self, row: NodeRow) -> None:
        """Add a node, or replace the row with its id."""
        self._run(PUT_NODE, row)

    def put_nodes(self, rows: Iterable[NodeRow]) -> None:
        """Add many nodes in any order."""
        assert self._connection is not None, "the transaction has ended"
        self._connection.executemany(PUT_NODE, rows)

    def replace_generation(
        self, node_id: str, generation: int, group_digest: str, nbytes: int
    ) -> None:
        """Publish another generation of a node."""
        self._run_on_node(
            node_id,
            "UPDATE nodes SET generation=?, group_digest=?, bytes=? WHERE node_id=?",
            (generation, group_digest, nbytes, node_id),
        )

    def delete_node(self, node_id: str) -> None:
        """Delete a node with its sidecars' rows and quarantine.

        At commit no child and no prefix may be left on it.
        """
        self._run_on_node(node_id, "DELETE FROM nodes WHERE node_id=?", (node_id,))
        self.clear_quarantine(node_id)

    def reparent(self, old_parent: str, new_parent: str) -> None:
        """Hang all children of one node under another."""
        self._run("UPDATE nodes SET parent_id=? WHERE parent_id=?", (new_parent, old_parent))

    def put_prefix(self, row: PrefixRow) -> None:
        """Add a prefix, or replace the row with its id."""
        self._run(PUT_PREFIX, row)

    def delete_prefix(self, prefix_id: str) -> None:
        """Delete the prefix with exactly this id."""
        if self._run("DELETE FROM prefixes WHERE prefix_id=?", (prefix_id,)) == 0:
            raise PrefixNotFoundError(
                f"no prefix {prefix_id!r} is stored; 'impress ls' lists the prefixes"
            )

    def reassign_prefixes(self, old_node: str, at: int, upper: str, lower: str) -> None:
        """Move the prefixes of a node that was split at position ``at`` to its halves."""
        self._run(
            """UPDATE prefixes SET node_id = CASE WHEN length <= ? THEN ? ELSE ? END
            WHERE node_id = ?""",
            (at, upper, lower, old_node),
        )

    def retire(self, node_id: str, generation: int) -> None:
        """Mark a generation as garbage since this transaction."""
        self._run(
            "INSERT OR REPLACE INTO garbage VALUES (?,?,?)", (node_id, generation, self.epoch)
        )

    def forget_garbage(self, node_id: str, generation: int) -> None:
        """Drop a garbage row, after its files are gone."""
        self._run("DELETE FROM garbage WHERE node_id=? AND generation=?", (node_id, generation))

    def tombstone(self, node_id: str, generation: int) -> None:
        """Note that generations up to this one were removed on purpose; the highest counts."""
        self._run(
            """INSERT INTO tombstones VALUES (?,?) ON CONFLICT (node_id) DO UPDATE SET
            generation = max(generation, excluded.generation)""",
            (node_id, generation),
        )

    def quarantine(self, row: QuarantineRow) -> None:
        """Note bad data; a second report of the same chunk replaces the first."""
        self._run("INSERT OR REPLACE INTO quarantine VALUES (?,?,?,?,?,?,?,?)", row)

    def clear_quarantine(self, node_id: str) -> None:
        """Forget all bad data of a node, in all its generations."""
        self._run("DELETE FROM quarantine WHERE node_id=?", (node_id,))

    def put_probe(self, row: ProbeRow) -> None:
        """Publish a sidecar of a node, in the place of an earlier one of its kind."""
        self._run(PROBES_SCHEMA, ())
        self._run("INSERT OR REPLACE INTO probes VALUES (?,?,?,?,?)", row)

    def delete_probe(self, row: ProbeRow) -> None:
        """Withdraw a sidecar, unless another than this one was published meanwhile."""
        self._run(PROBES_SCHEMA, ())
        self._run(
            "DELETE FROM probes WHERE node_id=? AND kind=? AND digest=?",
            (row.node_id, row.kind, row.digest),
        )

    def set_meta(self, key: str, value: str) -> None:
        """Set a free value of the store."""
        self._run("INSERT OR REPLACE INTO meta VALUES (?,?)", (key, value))

    def put_verdict(self, json: str, created: float | None = None) -> None:
        """Add an evaluation's verdict (JSON text); ``created`` in unix seconds, now by default."""
        self._run(
            "INSERT INTO verdicts VALUES (?,?)", (time.time() if created is None else created, json)
        )

    def _run(self, sql: str, values: tuple[Any, ...]) -> int:
        assert self._connection is not None, "the transaction has ended"
        return self._connection.execute(sql, values).rowcount

    def _run_on_node(self, node_id: str, sql: str, values: tuple[Any, ...]) -> None:
        if self._run(sql, values) == 0:
            raise CatalogError(
                f"node {node_id} is not in the catalog; run 'impress verify' to check the store"
            )
