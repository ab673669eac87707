"""PrefixStore: open or create a store, match, begin a query, insert, scrub, close.

The one door to a store: it joins the index (`live`), the reader, the memory of queries and the
publisher. Changes are `publish`'s, deletions `maintenance`'s, a query is a `QueryRun`'s.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from store import maintenance
from store.access import AccessStats
from store.chunk_load import LoadPart
from store.disk.io import IOOptions
from store.disk.layout import PROBE_PREFIX
from store.disk.reader import ChunkReader
from store.disk.sidecar import SidecarFiles
from store.disk.sidecar_layout import NodeFacts
from store.disk.verify import VerifyReport
from store.disk.writer import LayerKV, group_bytes, sync_dir
from store.errors import ChunkLoadError, InvalidValueError, NotAStoreError, ReadOnlyStoreError
from store.fetch import Observer
from store.files import FileTable, NodeRows
from store.identity import ModelIdentity
from store.index.catalog import Catalog
from store.index.ids import Ids, prefix_id
from store.index.radix import PrefixMatch, PrefixNode
from store.index.rows import NodeRow, PrefixRow, ProbeRow, QuarantineRow
from store.info import CATALOG, StoreInfo, is_free, new_info, read_info, write_info
from store.itf.options import SparseOptions
from store.live import LiveIndex
from store.maintenance import GcReport
from store.prepare import EvidenceMaker
from store.probes import ProbeSettings, Sidecars, write_settings
from store.publish import InsertResult, Publisher, RemoveReport
from store.query_run import QueryRun
from store.rebuild import RepairReport, rebuild_store
from store.recorder import RunRecorder
from store.resident import SketchCache
from store.run_maker import MemoryNeed, MemoryOptions, RunMaker, RunRequest
from store.types import KVShape
from store.warm import NodeProgress, WarmReport, wanted_nodes, warm_node

__all__ = ["PrefixStore", "RepairReport", "rebuild_store"]

log = logging.getLogger(__name__)


class PrefixStore:
    """One open store; a context manager.

    Attributes
    ----------
    path, info, shape
        Where it is, its fixed facts, the KV shape of its model.
    access
        What past queries found important.
    memory
        What may stay in memory between queries.
    """

    def __init__(
        self,
        path: Path,
        info: StoreInfo,
        io: IOOptions,
        device: str = "cpu",
        memory: MemoryOptions | None = None,
    ) -> None:
        self.path, self.info = path, info
        self.memory = memory or MemoryOptions()
        self.shape: KVShape = info.identity.shape
        self._files = FileTable(path, info, info.identity.digest())
        self._index = LiveIndex(path, self._files)
        self._reader = ChunkReader(io)
        self.access = AccessStats(path, self.shape, read_only=self._index.read_only)
        self._sidecars = Sidecars(path, info, self._index)
        self._runs = RunMaker(
            self.shape,
            info.chunk_tokens,
            self._reader,
            torch.device(device),
            self.memory,
            RunRecorder(self.access),
            self._evidence_maker,
            self.quarantine,
            self._end_run,
            self._sidecars.sketch_bytes(),
        )
        self._publisher = Publisher(
            path,
            info,
            self._index.catalog,
            lambda: self._index.tree,
            self._files,
            self._reader,
            self._sidecars,
            self.access,
        )

    @property
    def read_only(self) -> bool:
        """True where the folder can't be written: queries work, nothing is kept."""
        return self._index.read_only

    @property
    def notes(self) -> list[str]:
        """Things to tell the user once, one sentence each."""
        return self._index.notes

    @classmethod
    def create(
        cls,
        path: Path,
        *,
        identity: ModelIdentity,
        model_spec: str,
        chunk_tokens: int = 16,
        codec: str = "none",
        probes: ProbeSettings | None = None,
        io: IOOptions | None = None,
        device: str = "cpu",
        memory: MemoryOptions | None = None,
    ) -> Self:
        """Make an empty store in a new or empty folder and open it.

        Raises
        ------
        NotAStoreError
            The folder holds something else.
        InvalidValueError
            ``chunk_tokens``, ``codec`` or ``probes`` is not allowed.
        """
        path = Path(path)
        info = new_info(identity, model_spec, chunk_tokens, codec)
        settings = probes or ProbeSettings()
        settings.check(identity.shape)
        if path.exists() and not is_free(path):
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
        with Catalog.open(path / CATALOG, readonly=False, create=True) as catalog:
            write_settings(catalog, settings)
        write_info(path, info)
        sync_dir(path.parent)
        return cls(path, info, io or IOOptions(), device, memory)

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        identity: ModelIdentity | None = None,
        io: IOOptions | None = None,
        device: str = "cpu",
        memory: MemoryOptions | None = None,
    ) -> Self:
        """Open a store; loads metadata only.

        Parameters
        ----------
        identity
            Identity of the model that will use it; None for commands that touch no KV.
        memory
            What may stay in memory between queries.

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
        return cls(path, info, io or IOOptions(), device, memory)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading, drop the lease and close the catalog; a second call does nothing."""
        self.access.flush()
        self._reader.close()
        self._index.close()

    def refresh(self) -> None:
        """Take over what other processes published."""
        self._index.refresh()

    def writing(self, timeout_s: float = 0.0) -> AbstractContextManager[None]:
        """Hold the writer lock; see `LiveIndex.writing`."""
        return self._index.writing(timeout_s)

    def match(self, ids: Ids) -> PrefixMatch:
        """Longest usable stored beginning of ``ids`` (uint32 [n]); changes nothing."""
        self.refresh()
        return self._index.tree.match(ids)

    def begin(
        self,
        ids: Ids,
        *,
        max_new_tokens: int,
        load: bool = True,
        max_match: int | None = None,
        sparse: SparseOptions | None = None,
        observer: Observer | None = None,
        record: bool = True,
        internal: bool = False,
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
        sparse
            What to load of what matches; everything by default.
        observer
            Sees each layer's queries and keys in a run that loads everything; see
            `store.fetch.Observer`.
        record
            Whether the tokens that a sparse run selects count in the access statistics.
        internal
            Nobody asked: the run counts in no statistics, and not for what stays in memory.

        Returns
        -------
        The run, which the caller closes, and the match it uses (cut where a node could not be
        opened; ``stop`` is then ``unreadable``).

        Raises
        ------
        InvalidValueError
            No token, or evidence that was asked for by name is not stored.
        """
        if len(ids) == 0:
            raise InvalidValueError("a run needs at least one token; the prompt is empty")
        self.refresh()
        limit = len(ids) - 1 if load else 0
        limit = limit if max_match is None else min(limit, max_match)
        match = self._index.tree.match(ids[:limit])
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
        capacity, options = len(ids) + max_new_tokens, sparse or SparseOptions()
        counts = "none" if internal else "record" if record else "use"
        request = RunRequest(match.nodes, parts, capacity, options, observer, counts)
        run = self._runs.make(request)
        self._index.begin_run()
        return run, match

    def _evidence_maker(self, sketches: SketchCache) -> EvidenceMaker:
        find = self._sidecars.get
        return EvidenceMaker(
            self.shape,
            self._reader,
            find,
            sketches,
            self.access,
            self._sidecars.how_to_add,
            self._sidecars.withdrawn,
        )

    def _end_run(self) -> None:
        """Let go of what a run kept from being deleted, and of chunks of what is gone."""
        if self._files.dropped and self._runs.tier is not None:
            # By the catalog: the tree may not know yet what another process has added.
            keep = {f"{row.node_id}/g{row.generation}" for row in self.nodes()}
            self._files.dropped = not self._runs.tier.forget(keep)
        self._index.end_run()

    def warm(self, prefixes: int, progress: NodeProgress | None = None) -> WarmReport:
        """Fill the tiers from the prefixes that most queries used, the newest first among equals.

        Nothing happens without tiers. A node that can't be read is quarantined and passed over.
        """
        tier = self._runs.tier
        if tier is None:
            return WarmReport()
        self.refresh()
        nodes = wanted_nodes(self._index.tree, self.prefixes(), self.access, prefixes)
        report = WarmReport()
        for number, node in enumerate(nodes):
            try:
                files = self._files.get(node)
                report = report.plus(warm_node(tier, self._reader, self.access, files))
            except ChunkLoadError as error:
                self.quarantine(error)
            if progress is not None:
                progress(number + 1, len(nodes))
        return report

    def memory_need(self) -> MemoryNeed:
        """What a tier must hold to be of use, and what the host has for it."""
        longest = max((row.length for row in self.prefixes()), default=1)
        layer = 2 * self._files.layout(longest).data_bytes
        return MemoryNeed(longest, layer, *self._runs.host_shares)

    def resident_bytes(self) -> tuple[int, int]:
        """Bytes of chunks that stay in memory, on the device and in host memory."""
        return (0, 0) if self._runs.tier is None else self._runs.tier.used_bytes()

    def io_note(self) -> str | None:
        """Why reads don't use O_DIRECT, where that was asked for; known after the first read."""
        return self._reader.note

    def quarantine(self, error: ChunkLoadError) -> None:
        """Remember data that failed to load, so that later matches end before it.

        A sidecar is withdrawn instead: the node's tokens stay usable.
        """
        if error.array.startswith(PROBE_PREFIX):
            self._sidecars.quarantine(error)
        else:
            self._index.quarantine(error)

    def release(self, bad: set[str]) -> int:
        """Use quarantined nodes again that a scrub found sound; see `LiveIndex.release`."""
        return self._index.release(bad)

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
            return self._publisher.replace(self._index.tree.get(node_id), layers)

    def reorder(self, node_id: str, rows: np.ndarray | None) -> int:
        """Publish a generation of a node with its rows in another order; see `Publisher.reorder`.

        ``rows`` int32 [layers, n] is the mapping list, None for token order. Queries under way
        finish on the generation they began with.
        """
        with self.writing():
            return self._publisher.reorder(self._index.tree.get(node_id), rows)

    def order(self, node_id: str) -> np.ndarray | None:
        """Mapping list of a node, int32 [layers, n], None for token order.

        Raises `ChunkLoadError`.
        """
        return self._files.get(self._index.tree.get(node_id)).rows

    def remove(self, row: PrefixRow) -> RemoveReport:
        """Delete a prefix and what only it needed."""
        with self.writing():
            return self._publisher.remove(row)

    def prefixes(self) -> list[PrefixRow]:
        """All prefixes, oldest first."""
        return self._index.catalog.prefixes()

    def prefix(self, key: str) -> PrefixRow:
        """One prefix by id, unique beginning of it, or name. Raises `PrefixNotFoundError`."""
        return self._index.catalog.prefix(key)

    def has_prefix(self, ids: Ids) -> PrefixRow | None:
        """The listed prefix with exactly these tokens, if all of it can be used."""
        row = self._index.catalog.find_prefix(prefix_id(ids))
        whole = row is not None and self._index.tree.match(ids).matched_len == len(ids)
        return row if whole else None

    def prefix_ids(self, row: PrefixRow) -> Ids:
        """Token ids of a prefix, uint32 [length]. Raises `ChunkLoadError`."""
        return self._index.tree.path_ids(self._index.tree.get(row.node_id))[: row.length]

    def node_rows(self, node_id: str) -> NodeRows:
        """Reader of a node's rows in token order."""
        return NodeRows(self._reader, self._files.get(self._index.tree.get(node_id)))

    def node(self, node_id: str) -> PrefixNode:
        """One node by its full id. Raises `PrefixNotFoundError`."""
        return self._index.tree.get(node_id)

    def nodes(self) -> list[NodeRow]:
        """All nodes as the catalog has them."""
        return self._index.catalog.nodes()

    def path_ids(self, node_id: str) -> Ids:
        """All token ids from position 0 to a node's end. Raises `ChunkLoadError`."""
        return self._index.tree.path_ids(self._index.tree.get(node_id))

    def quarantined(self) -> list[QuarantineRow]:
        """Data known to be bad."""
        return self._index.catalog.quarantined()

    def add_counters(self, amounts: dict[str, float]) -> None:
        """Add to the lifetime statistics; does nothing where the store can't be written."""
        if not self.read_only:
            self._index.catalog.add_counters(amounts)

    def add_verdict(self, verdict: dict[str, Any]) -> None:
        """Remember what an evaluation found (JSON values), beside those of earlier ones."""
        with self.writing(), self._index.catalog.transaction() as txn:
            txn.put_verdict(json.dumps(verdict, ensure_ascii=False))

    def verdicts(self) -> list[dict[str, Any]]:
        """What evaluations found, oldest first."""
        return [json.loads(text) for text in self._index.catalog.verdicts()]

    def counters(self) -> dict[str, float]:
        """Lifetime statistics of queries."""
        return self._index.catalog.counters()

    def verify(self, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
        """Scrub every published generation and sidecar; ``progress(done, total)`` in nodes."""
        self.refresh()
        rows = self._index.catalog.nodes()
        layout_of, sidecars_of = self._files.layout, self._sidecars.bad
        return maintenance.verify_nodes(self.path, rows, layout_of, sidecars_of, progress)

    def probes(self) -> ProbeSettings:
        """Which sidecars every node gets when it is written."""
        return self._sidecars.settings

    def set_probes(self, settings: ProbeSettings) -> None:
        """Change which sidecars nodes get; those that are stored keep what they have.

        Raises `InvalidValueError`, `StoreLockedError`, `ReadOnlyStoreError`.
        """
        with self.writing():
            self._sidecars.set_settings(settings)

    def probe_rows(self) -> list[ProbeRow]:
        """All published sidecars."""
        return self._sidecars.rows()

    def sidecar(self, node: NodeFacts, kind: str) -> SidecarFiles | None:
        """A node's sidecar (``sketch``, ``heads``); None without one, or where it can't be opened.

        One that can't is withdrawn: evidence is lost, the query is not.
        """
        try:
            return self._sidecars.get(node, kind)
        except ChunkLoadError as error:
            log.warning("going on without a sidecar: %s", error)
            self.quarantine(error)
            return None

    def add_probe(self, node_id: str, kind: str) -> int:
        """Give a node the sidecar of the store's setting; returns bytes written, 0 if it has it.

        Raises `InvalidValueError` for a kind that the setting lacks, `ChunkLoadError`.
        """
        with self.writing():
            node = self._index.tree.get(node_id)
            return self._sidecars.add(node, kind, lambda: self.node_rows(node_id).keys)

    def drop_probe(self, node_id: str, kind: str) -> int:
        """Take a sidecar from a node; returns the bytes that become free."""
        with self.writing():
            return self._sidecars.drop(node_id, kind)

    def gc(self) -> GcReport:
        """Delete orphans and retired generations that no reader needs."""
        report = self._index.gc()
        with self.writing():
            freed = self.access.sweep({row.node_id for row in self.nodes()})
        return report._replace(freed_bytes=report.freed_bytes + freed)

    def used_bytes(self) -> int:
        """Bytes on disk by the catalog's own sums; see `LiveIndex.used_bytes`."""
        return self._index.used_bytes() + self.access.bytes()

    def size_bytes(self) -> int:
        """Bytes the store takes on disk, as ``du`` counts them; looks at every file."""
        return maintenance.tree_bytes(self.path)

    def insert_bytes(self, ids: Ids) -> int:
        """Most bytes that inserting ``ids`` would add, the halves of a split included."""
        match = self._index.tree.match(ids, ignore_quarantine=True)
        sizes = [len(ids) - match.matched_len]
        if match.nodes and match.nodes[-1].used < match.nodes[-1].node.length:
            node, used = match.nodes[-1]
            sizes += [used, node.length - used]
        nodes = sum(group_bytes(self._files.layout(size)) for size in sizes if size)
        return nodes + self._sidecars.disk_bytes(sizes)
