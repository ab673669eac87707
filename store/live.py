"""The index as this process sees it: catalog, tree in memory, reader's lease, writer lock.

Owns keeping them in step with what other processes publish and with what this one was
interrupted in. It reads no KV; changes are `publish`'s, deletions `maintenance`'s.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from store import maintenance
from store.errors import (
    CatalogError,
    ChunkLoadError,
    ReadOnlyStoreError,
    StoreError,
    StoreFullError,
)
from store.files import FileTable
from store.index.catalog import Catalog
from store.index.radix import RadixTree
from store.index.rows import QuarantineRow
from store.info import CATALOG
from store.locks import ReaderLease, WriterLock
from store.maintenance import GcReport

log = logging.getLogger(__name__)


class LiveIndex:
    """Catalog and tree of an open store.

    Attributes
    ----------
    catalog, tree
        The durable table, and the radix tree loaded from it.
    probes
        Published sidecars by (node id, kind); another dictionary whenever the index is read anew.
    read_only
        True where the folder can't be written.
    notes
        Things to tell the user once, one sentence each.
    """

    def __init__(self, path: Path, files: FileTable) -> None:
        self.path, self._files = path, files
        self.read_only = not os.access(path, os.W_OK)
        self.notes: list[str] = []
        try:
            self.catalog = Catalog.open(path / CATALOG, readonly=self.read_only)
        except StoreFullError as error:
            # What is stored can still be read; only nothing can be added or deleted.
            self.read_only = True
            self.notes.append(str(error))
            self.catalog = Catalog.open(path / CATALOG, readonly=True)
        self._file_id = _file_id(path)
        self._lock = WriterLock(path)
        self._swept = self._retired = False
        self._runs = 0
        self._lease = None if self.read_only else self._take_lease()
        self.reload()
        if self.read_only:
            self.notes.append(f"{path} can't be written; statistics and new prefixes are not kept")
        elif self.catalog.journal_note:
            self.notes.append(self.catalog.journal_note)

    def close(self) -> None:
        """Drop the lease and close the catalog; a second call does nothing."""
        if self._lease is not None:
            self._lease.release()
            self._lease = None
        self.catalog.close()

    def _take_lease(self) -> ReaderLease | None:
        try:
            return ReaderLease(self.path, self.catalog.epoch)
        except OSError as error:
            # Such as a full disk: queries work all the same, and nothing can be written anyway.
            self.read_only = True
            self.notes.append(f"no lease can be taken in {self.path} ({error.strerror})")
            return None

    def reload(self) -> None:
        """Read the index anew."""
        with self.catalog.snapshot():
            rows, quarantined = self.catalog.nodes(), self.catalog.quarantined()
            self.probes = {(row.node_id, row.kind): row for row in self.catalog.probes()}
        self._files.clear()
        self.tree = RadixTree.from_rows(rows, self._files.load_ids)
        for bad in quarantined:
            known = bad.node_id in self.tree
            # What was found in a generation since replaced says nothing of the one in use.
            if known and self.tree.get(bad.node_id).generation == bad.generation:
                self.tree.quarantine(bad.node_id, bad.first_token)

    def refresh(self) -> None:
        """Take over what other processes published."""
        if self.catalog.changed():
            epoch = self.catalog.epoch
            self.reload()
            # A query under way still reads generations of the epoch it began in.
            if self._lease is not None and self._runs == 0:
                self._lease.renew(epoch)

    @contextlib.contextmanager
    def writing(self, timeout_s: float = 0.0) -> Iterator[None]:
        """Hold the writer lock (re-entrant); sweeps orphans the first time.

        Raises `StoreLockedError` or `ReadOnlyStoreError`.
        """
        if self.read_only:
            raise ReadOnlyStoreError(
                f"{self.path} can't be written; copy the store, or mount it writable"
            )
        first = self._lock.acquire(timeout_s)
        try:
            if first:
                self._require_same_catalog()
                self.refresh()
            if not self._swept:
                maintenance.collect_garbage(self.path, self.catalog, orphans=True)
                self._swept = True
            yield
            self._retired = True
            self._collect()
        except BaseException:
            # Whether or not the last change was committed, the catalog knows and the tree may not.
            self.reload()
            raise
        finally:
            self._lock.release()

    def _require_same_catalog(self) -> None:
        """Refuse to write through a catalog that is no longer the store's.

        Its view of what is garbage would delete what the new one holds.
        """
        if _file_id(self.path) != self._file_id:
            raise CatalogError(
                f"the store at {self.path} was rebuilt by another process since it was opened; "
                "open it again (restart this command)"
            )

    def _collect(self) -> None:
        """Delete what this process retired, once none of its own queries may be reading it."""
        if self._runs == 0 and self._retired and self._lease is not None:
            self._retired = False
            self._lease.renew(self.catalog.epoch)
            maintenance.collect_garbage(self.path, self.catalog, orphans=False)

    def begin_run(self) -> None:
        """A query begins to read: generations of this epoch stay until it ends."""
        self._runs += 1

    def end_run(self) -> None:
        """A query is done; what it kept from being deleted is deleted now."""
        self._runs -= 1
        if self._retired and self._runs == 0:
            try:
                with self.writing():
                    pass
            except StoreError as error:
                # Deleting can wait for the next writer; the answer is there already.
                log.info("old generations were not deleted: %s", error)

    def quarantine(self, error: ChunkLoadError) -> None:
        """Remember data that failed to load, so that later matches end before it."""
        if error.node_id not in self.tree:
            return
        node = self.tree.get(error.node_id)
        self.tree.quarantine(error.node_id, error.first_token)
        self._files.forget(error.node_id)
        if self.read_only:
            return
        row = QuarantineRow(
            error.node_id,
            node.generation,
            error.array,
            error.layer,
            error.chunk,
            error.first_token,
            error.reason,
            time.time(),
        )
        try:
            with self.catalog.transaction() as txn:
                txn.quarantine(row)
        except StoreError as error_now:
            # This process remembers it all the same, and the next one will find it again.
            log.warning("damage was not recorded: %s", error_now)

    def release(self, bad: set[str]) -> int:
        """Use quarantined nodes again that a scrub found sound (all but ``bad``); returns how many.

        What failed once for another reason than its bytes, such as a disk that came back, would
        otherwise be recomputed for ever.
        """
        sound = {row.node_id for row in self.catalog.quarantined()} - bad
        if not sound:
            return 0
        with self.writing(), self.catalog.transaction() as txn:
            for node_id in sound:
                txn.clear_quarantine(node_id)
        self.reload()
        return len(sound)

    def gc(self) -> GcReport:
        """Delete orphans and retired generations that no reader needs."""
        with self.writing():
            if self._lease is not None and self._runs == 0:
                self._lease.renew(self.catalog.epoch)
            return maintenance.collect_garbage(self.path, self.catalog, orphans=True)

    def used_bytes(self) -> int:
        """The same from the catalog's own sums, without walking through the nodes."""
        nodes = sum(row.bytes for row in self.catalog.nodes())
        nodes += sum(row.bytes for row in self.catalog.probes())
        retired = maintenance.retired_bytes(self.path, self.catalog)
        top = sum(path.stat().st_blocks * 512 for path in self.path.iterdir())
        return nodes + retired + top


def _file_id(store: Path) -> tuple[int, int] | None:
    """Which file the catalog is, None where there is none."""
    try:
        found = (store / CATALOG).stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
