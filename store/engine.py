"""PrefixStore: open or create a store, match, begin a query, insert, scrub, close.

Owns the lifetime of everything below it (catalog, tree, reader, locks) and nothing else: changes
are `publish`'s, deletions `maintenance`'s, a query is a `QueryRun`'s.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import torch

from store import maintenance, rebuild
from store.disk import layout as disk_layout
from store.disk.io import Arena, IOOptions
from store.disk.reader import ChunkReader
from store.disk.verify import GroupCheck, VerifyReport, verify_group
from store.disk.writer import LayerKV, disk_errors, group_bytes, sync_dir
from store.errors import (
    CatalogError,
    ChunkLoadError,
    InvalidValueError,
    NotAStoreError,
    ReadOnlyStoreError,
    StoreError,
    StoreFullError,
)
from store.files import FileTable, NodeRows
from store.identity import ModelIdentity
from store.index.catalog import Catalog
from store.index.ids import Ids, prefix_id
from store.index.radix import PrefixMatch, PrefixNode, RadixTree
from store.index.rows import NodeRow, PrefixRow, QuarantineRow
from store.info import FILE_NAME as INFO_NAME
from store.info import StoreInfo, new_info, read_info, write_info
from store.locks import LEASES, WRITER_LOCK, ReaderLease, WriterLock
from store.maintenance import GcReport
from store.publish import InsertResult, Publisher, RemoveReport
from store.query_run import LoadPart, QueryRun, arena_bytes
from store.rebuild import RepairReport
from store.types import KVShape

log = logging.getLogger(__name__)

CATALOG = "catalog.sqlite"
#: Arenas kept for the next query; more would hold memory that one query at a time can't use.
_KEPT_ARENAS = 1


class PrefixStore:
    """One open store; a context manager.

    Attributes
    ----------
    path, info, shape
        Where it is, its fixed facts, the KV shape of its model.
    read_only
        True where the folder can't be written: queries work, nothing is kept.
    notes
        Things to tell the user once, one sentence each.
    """

    def __init__(self, path: Path, info: StoreInfo, io: IOOptions, device: str = "cpu") -> None:
        self.path, self.info = path, info
        self.shape: KVShape = info.identity.shape
        self.read_only = not os.access(path, os.W_OK)
        self.notes: list[str] = []
        try:
            self._catalog = Catalog.open(path / CATALOG, readonly=self.read_only)
        except StoreFullError as error:
            # What is stored can still be read; only nothing can be added or deleted.
            self.read_only = True
            self.notes.append(str(error))
            self._catalog = Catalog.open(path / CATALOG, readonly=True)
        self._file_id = _file_id(path)
        self._device = torch.device(device)
        self._reader = ChunkReader(io)
        self._files = FileTable(path, info, info.identity.digest())
        self._lock = WriterLock(path)
        self._swept = self._retired = False
        self._runs = 0
        self._arenas: list[Arena] = []
        self._lease = None if self.read_only else self._take_lease()
        self._load_tree()
        self._publisher = Publisher(
            path, info, self._catalog, lambda: self._tree, self._files, self._reader
        )
        if self.read_only:
            self.notes.append(f"{path} can't be written; statistics and new prefixes are not kept")
        if self._catalog.journal_note:
            self.notes.append(self._catalog.journal_note)

    @classmethod
    def create(
        cls,
        path: Path,
        *,
        identity: ModelIdentity,
        model_spec: str,
        chunk_tokens: int = 16,
        codec: str = "none",
        io: IOOptions | None = None,
        device: str = "cpu",
    ) -> Self:
        """Make an empty store in a new or empty folder and open it.

        Raises
        ------
        NotAStoreError
            The folder holds something else.
        InvalidValueError
            ``chunk_tokens`` or ``codec`` is not allowed.
        """
        path = Path(path)
        info = new_info(identity, model_spec, chunk_tokens, codec)
        if path.exists() and not _is_free(path):
            raise NotAStoreError(
                f"{path} exists and is not an empty folder; choose another --store"
            )
        try:
            (path / "nodes").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ReadOnlyStoreError(
                f"{path} can't be made ({error.strerror}); choose another --store"
            ) from error
        # impress.json comes last: without it the folder is no store, whatever else is in it.
        Catalog.open(path / CATALOG, readonly=False, create=True).close()
        write_info(path, info)
        sync_dir(path.parent)
        return cls(path, info, io or IOOptions(), device)

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        identity: ModelIdentity | None = None,
        io: IOOptions | None = None,
        device: str = "cpu",
    ) -> Self:
        """Open a store; loads metadata only.

        Parameters
        ----------
        identity
            Identity of the model that will use it; None for commands that touch no KV.

        Raises
        ------
        StoreNotFoundError, NotAStoreError, FormatVersionError, CatalogError
        ModelMismatchError
            The model differs; the message names the field and both values.
        """
        path = Path(path)
        info = read_info(path)
        if identity is not None:
            info.identity.require(identity, str(path))
        return cls(path, info, io or IOOptions(), device)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading, drop the lease and close the catalog; a second call does nothing."""
        self._reader.close()
        if self._lease is not None:
            self._lease.release()
            self._lease = None
        self._catalog.close()

    def _take_lease(self) -> ReaderLease | None:
        try:
            return ReaderLease(self.path, self._catalog.epoch)
        except OSError as error:
            # Such as a full disk: queries work all the same, and nothing can be written anyway.
            self.read_only = True
            self.notes.append(f"no lease can be taken in {self.path} ({error.strerror})")
            return None

    def _load_tree(self) -> None:
        with self._catalog.snapshot():
            rows, quarantined = self._catalog.nodes(), self._catalog.quarantined()
        self._files.clear()
        self._tree = RadixTree.from_rows(rows, self._files.load_ids)
        for bad in quarantined:
            known = bad.node_id in self._tree
            # What was found in a generation since replaced says nothing of the one in use.
            if known and self._tree.get(bad.node_id).generation == bad.generation:
                self._tree.quarantine(bad.node_id, bad.first_token)

    def refresh(self) -> None:
        """Take over what other processes published."""
        if self._catalog.changed():
            epoch = self._catalog.epoch
            self._load_tree()
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
                maintenance.collect_garbage(self.path, self._catalog, orphans=True)
                self._swept = True
            yield
            self._retired = True
            self._collect()
        except BaseException:
            # Whether or not the last change was committed, the catalog knows and the tree may not.
            self._load_tree()
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
            self._lease.renew(self._catalog.epoch)
            maintenance.collect_garbage(self.path, self._catalog, orphans=False)

    def match(self, ids: Ids) -> PrefixMatch:
        """Longest usable stored beginning of ``ids`` (uint32 [n]); changes nothing."""
        self.refresh()
        return self._tree.match(ids)

    def begin(
        self,
        ids: Ids,
        *,
        max_new_tokens: int,
        load: bool = True,
        max_match: int | None = None,
    ) -> tuple[QueryRun, PrefixMatch]:
        """Match a prompt, pin the matched nodes and start reading them.

        Parameters
        ----------
        ids
            uint32 [n], prefix and question; at most n - 1 tokens are matched, as one must run
            through the model to give logits.
        max_new_tokens
            Room for the answer.
        load
            False to use nothing that is stored.
        max_match
            Match no more tokens than this.

        Returns
        -------
        The run, which the caller closes, and the match it uses (cut where a node could not be
        opened; ``stop`` is then ``unreadable``).
        """
        if len(ids) == 0:
            raise InvalidValueError("a run needs at least one token; the prompt is empty")
        self.refresh()
        limit = len(ids) - 1 if load else 0
        limit = limit if max_match is None else min(limit, max_match)
        match = self._tree.match(ids[:limit])
        parts: list[LoadPart] = []
        if match.error is not None:
            self.quarantine(match.error)
        for index, (node, used) in enumerate(match.nodes):
            try:
                parts.append(LoadPart(self._files.get(node), used))
            except ChunkLoadError as error:
                self.quarantine(error)
                match = PrefixMatch(match.nodes[:index], node.start, "unreadable", error)
                break
        capacity = len(ids) + max_new_tokens
        run = QueryRun(
            self.shape,
            parts,
            self._reader,
            self._take_arena(arena_bytes(self.shape, capacity)),
            capacity,
            self._device,
            self._give_arena,
        )
        self._runs += 1
        return run, match

    def _take_arena(self, size: int) -> Arena:
        for arena in self._arenas:
            if arena.size >= size:
                self._arenas.remove(arena)
                break
        else:
            # One that is too small is dropped rather than kept beside a larger one.
            self._arenas.clear()
            arena = Arena(size)
        if self._reader.options.poison:
            arena.poison()
        return arena

    def _give_arena(self, arena: Arena | None) -> None:
        self._runs -= 1
        if arena is not None and len(self._arenas) < _KEPT_ARENAS:
            self._arenas.append(arena)
        if self._retired and self._runs == 0:
            try:
                with self.writing():
                    pass
            except StoreError as error:
                # Deleting can wait for the next writer; the answer is there already.
                log.info("old generations were not deleted: %s", error)

    def io_note(self) -> str | None:
        """Why reads don't use O_DIRECT, where that was asked for; known after the first read."""
        return self._reader.note

    def quarantine(self, error: ChunkLoadError) -> None:
        """Remember data that failed to load, so that later matches end before it."""
        if error.node_id not in self._tree:
            return
        node = self._tree.get(error.node_id)
        self._tree.quarantine(error.node_id, error.first_token)
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
            with self._catalog.transaction() as txn:
                txn.quarantine(row)
        except StoreError as error_now:
            # This process remembers it all the same, and the next one will find it again.
            log.warning("damage was not recorded: %s", error_now)

    def insert(
        self,
        ids: Ids,
        layers: LayerKV,
        start: int,
        *,
        name: str | None = None,
        source: dict[str, Any] | None = None,
        timeout_s: float = 0.0,
    ) -> InsertResult:
        """Store KV computed with full attention; see `Publisher.insert`."""
        with self.writing(timeout_s):
            return self._publisher.insert(ids, layers, start, name, source or {})

    def add_prefix(self, ids: Ids, name: str, source: dict[str, Any]) -> PrefixRow:
        """List tokens that are stored already under a name."""
        with self.writing():
            return self._publisher.name_prefix(ids, name, source)

    def replace(self, node_id: str, layers: LayerKV) -> int:
        """Publish a new generation of a node from its rows in token order; returns its bytes."""
        with self.writing():
            return self._publisher.replace(self._tree.get(node_id), layers)

    def remove(self, row: PrefixRow) -> RemoveReport:
        """Delete a prefix and what only it needed."""
        with self.writing():
            return self._publisher.remove(row)

    def prefixes(self) -> list[PrefixRow]:
        """All prefixes, oldest first."""
        return self._catalog.prefixes()

    def prefix(self, key: str) -> PrefixRow:
        """One prefix by id, unique beginning of it, or name. Raises `PrefixNotFoundError`."""
        return self._catalog.prefix(key)

    def has_prefix(self, ids: Ids) -> PrefixRow | None:
        """The listed prefix with exactly these tokens, if all of it can be used."""
        row = self._catalog.find_prefix(prefix_id(ids))
        whole = row is not None and self._tree.match(ids).matched_len == len(ids)
        return row if whole else None

    def prefix_ids(self, row: PrefixRow) -> Ids:
        """Token ids of a prefix, uint32 [length]. Raises `ChunkLoadError`."""
        return self._tree.path_ids(self._tree.get(row.node_id))[: row.length]

    def node_rows(self, node_id: str) -> NodeRows:
        """Reader of a node's rows in token order."""
        return NodeRows(self._reader, self._files.get(self._tree.get(node_id)))

    def node(self, node_id: str) -> PrefixNode:
        """One node by its full id. Raises `PrefixNotFoundError`."""
        return self._tree.get(node_id)

    def nodes(self) -> list[NodeRow]:
        """All nodes as the catalog has them."""
        return self._catalog.nodes()

    def path_ids(self, node_id: str) -> Ids:
        """All token ids from position 0 to a node's end. Raises `ChunkLoadError`."""
        return self._tree.path_ids(self._tree.get(node_id))

    def quarantined(self) -> list[QuarantineRow]:
        """Data known to be bad."""
        return self._catalog.quarantined()

    def release(self, bad: set[str]) -> int:
        """Use quarantined nodes again that a scrub found sound (all but ``bad``); returns how many.

        What failed once for another reason than its bytes, such as a disk that came back, would
        otherwise be recomputed for ever.
        """
        sound = {row.node_id for row in self._catalog.quarantined()} - bad
        if not sound:
            return 0
        with self.writing(), self._catalog.transaction() as txn:
            for node_id in sound:
                txn.clear_quarantine(node_id)
        self._load_tree()
        return len(sound)

    def add_counters(self, amounts: dict[str, float]) -> None:
        """Add to the lifetime statistics; does nothing where the store can't be written."""
        if not self.read_only:
            self._catalog.add_counters(amounts)

    def counters(self) -> dict[str, float]:
        """Lifetime statistics of queries."""
        return self._catalog.counters()

    def verify(self, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
        """Scrub every published generation; ``progress(done, total)`` in nodes."""
        self.refresh()
        rows = self._catalog.nodes()
        total = VerifyReport(0, 0, 0, [])
        for done, row in enumerate(rows, 1):
            group = disk_layout.generation_dir(self.path, row.node_id, row.generation)
            layout = self._files.layout(row.length)
            one = verify_group(GroupCheck(row.node_id, group, layout, row.group_digest, row.digest))
            total = VerifyReport(
                total.nodes + 1,
                total.chunks + one.chunks,
                total.bytes + one.bytes,
                [*total.bad, *one.bad],
            )
            if progress is not None:
                progress(done, len(rows))
        return total

    def gc(self) -> GcReport:
        """Delete orphans and retired generations that no reader needs."""
        with self.writing():
            if self._lease is not None and self._runs == 0:
                self._lease.renew(self._catalog.epoch)
            return maintenance.collect_garbage(self.path, self._catalog, orphans=True)

    def size_bytes(self) -> int:
        """Bytes the store takes on disk, as ``du`` counts them; looks at every file."""
        return maintenance.tree_bytes(self.path)

    def used_bytes(self) -> int:
        """The same from the catalog's own sums, without walking through the nodes."""
        nodes = sum(row.bytes for row in self._catalog.nodes())
        retired = sum(
            maintenance.tree_bytes(
                disk_layout.generation_dir(self.path, row.node_id, row.generation)
            )
            for row in self._catalog.garbage()
        )
        top = sum(path.stat().st_blocks * 512 for path in self.path.iterdir())
        return nodes + retired + top

    def insert_bytes(self, ids: Ids) -> int:
        """Most bytes that inserting ``ids`` would add, the halves of a split included."""
        match = self._tree.match(ids, ignore_quarantine=True)
        sizes = [len(ids) - match.matched_len]
        if match.nodes and match.nodes[-1].used < match.nodes[-1].node.length:
            node, used = match.nodes[-1]
            sizes += [used, node.length - used]
        return sum(group_bytes(self._files.layout(size)) for size in sizes if size)


def _file_id(store: Path) -> tuple[int, int] | None:
    """Which file the catalog is, None where there is none."""
    try:
        found = (store / CATALOG).stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _is_free(path: Path) -> bool:
    """Whether a folder is empty but for what a `create` that was killed leaves."""
    if not path.is_dir():
        return False
    ours = (CATALOG, f".{INFO_NAME}.", LEASES, WRITER_LOCK)
    return not (path / INFO_NAME).exists() and all(
        entry.name.startswith(ours) or (entry.name == "nodes" and not any(entry.iterdir()))
        for entry in path.iterdir()
    )


def rebuild_store(path: Path) -> RepairReport:
    """Rebuild the catalog of a store whose catalog is lost or damaged.

    The new one is made beside the old and takes its place when it is whole; the old one is kept
    as ``catalog.sqlite.before-repair-<n>``.

    Raises
    ------
    StoreLockedError, StoreFullError, StoreWriteError
        Nothing has changed.
    """
    path = Path(path)
    info = read_info(path)
    lock = WriterLock(path)
    lock.acquire(0.0)
    fresh = path / f"{CATALOG}.new"
    try:
        with disk_errors(path):
            for suffix in ("", "-wal", "-shm"):
                fresh.with_name(fresh.name + suffix).unlink(missing_ok=True)
            with Catalog.open(fresh, readonly=False, create=True) as catalog:
                report = rebuild.rebuild_catalog(path, info, catalog)
            _swap_catalog(path, fresh)
        return report
    finally:
        lock.release()


def _swap_catalog(path: Path, fresh: Path) -> None:
    """Put a whole new catalog in the place of the old one, which is kept aside."""
    number = 1 + len(list(path.glob(f"{CATALOG}.before-repair-*[0-9]")))
    aside = path / f"{CATALOG}.before-repair-{number}"
    if (path / CATALOG).exists():
        os.link(path / CATALOG, aside)
    # The journal belongs to the old file: beside the new one it would be replayed into it.
    for suffix in ("-wal", "-shm"):
        journal = path / f"{CATALOG}{suffix}"
        if journal.exists():
            journal.rename(aside.with_name(aside.name + suffix))
    fresh.rename(path / CATALOG)
    sync_dir(path)
