"""Rebuild a lost catalog from the groups on disk alone. Its caller holds the writer lock.

Node ids are digests of the identity, the position and every token from the root on, so that a
node's parent is the one under which its id comes out right; no stored link has to be trusted.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from store.disk import layout as disk_layout
from store.disk.sidecar import open_sidecar
from store.disk.sidecar_layout import NodeFacts, ProbeSpec
from store.disk.writer import DISK_BLOCK, disk_errors, sync_dir
from store.index.catalog import Catalog
from store.index.ids import FIRST_IDS, Ids, ids_digest, node_id, pack_ids, prefix_id
from store.index.rows import NodeRow, PrefixRow, ProbeRow
from store.info import CATALOG, StoreInfo, read_info
from store.locks import WriterLock
from store.maintenance import group_bytes_on_disk, group_folders, is_retired, tree_bytes
from store.probes import META_KEY, ProbeSettings
from store.publish import UNLISTED_MARK

log = logging.getLogger(__name__)


class RepairReport(NamedTuple):
    """Nodes taken over into the new catalog, and groups that could not be placed."""

    nodes: int
    dropped: int


class _Found(NamedTuple):
    """A group on disk that says it belongs to this store."""

    group: Path
    attributes: dict[str, Any]
    tokens: Ids

    @property
    def name(self) -> str:
        return str(self.attributes["node_id"])

    @property
    def supersedes(self) -> list[str]:
        return list(self.attributes["supersedes"])

    @property
    def start(self) -> int:
        return int(self.attributes["first_position"])

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class _Placed(NamedTuple):
    """A group with its parent and all token ids from the root to its end."""

    item: _Found
    parent: str | None
    path_ids: Ids


def rebuild_catalog(store: Path, info: StoreInfo, catalog: Catalog) -> RepairReport:
    """Fill an empty catalog from the groups' own attributes.

    The newest generation of each node wins. Nodes wholly superseded by present ones (a split)
    and nodes marked as removed stay out. Prefixes get their names back where the group has them,
    else each leaf is listed as ``recovered-<node>``. Sidecars whose attributes fit are taken over,
    and the store's setting from them.
    """
    found = {item.name: item for item in _newest(store, info)}
    placed = _place(_current(found), info.identity.digest())
    parents = {entry.parent for entry in placed.values()}
    rows = [_row(entry) for entry in placed.values()]
    sidecars = [found for row in rows for found in _sidecars(store, row, info)]
    with catalog.transaction() as txn:
        txn.put_nodes(rows)
        for sidecar in sidecars:
            txn.put_probe(sidecar)
        if sidecars:
            txn.set_meta(META_KEY, _settings(sidecars).to_text())
        for entry in placed.values():
            for row in _prefixes(entry, leaf=entry.item.name not in parents):
                txn.put_prefix(row)
    return RepairReport(len(placed), len(found) - len(placed))


def _newest(store: Path, info: StoreInfo) -> Iterator[_Found]:
    newest: dict[str, _Found] = {}
    for group in group_folders(store):
        item = _read_group(group, info.identity.digest())
        if item is None:
            continue
        known = newest.get(item.name)
        if known is None or known.attributes["generation"] < item.attributes["generation"]:
            newest[item.name] = item
    yield from newest.values()


def _read_group(group: Path, identity: str) -> _Found | None:
    """A usable group, None for a temporary, removed, foreign or unreadable one."""
    try:
        attributes = disk_layout.read_attributes(group)
        generation = int(attributes["generation"])
        size = disk_layout.small_array_path(group, "tokens").stat().st_size - 4
        tokens = disk_layout.read_small(group, "tokens", "<u4", (size // 4,))
        usable = (
            attributes["identity_digest"] == identity
            and attributes["layout_version"] == disk_layout.LAYOUT_VERSION
            and attributes["token_digest"] == ids_digest(tokens)
            and group.name == f"g{generation}"
            and not is_retired(group, generation)
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return _Found(group, attributes, tokens) if usable else None


def _current(found: dict[str, _Found]) -> list[_Found]:
    """Leave out nodes that a finished split replaced, and the halves of an unfinished one."""
    heirs: dict[str, list[_Found]] = {}
    for item in found.values():
        for old in item.supersedes:
            heirs.setdefault(old, []).append(item)
    replaced = {
        name
        for name, item in found.items()
        if any(heir.start == item.start for heir in heirs.get(name, []))
        and any(heir.end == item.end for heir in heirs.get(name, []))
    }
    return [
        item
        for name, item in found.items()
        if name not in replaced
        and not any(old in found and old not in replaced for old in item.supersedes)
    ]


def _place(items: list[_Found], identity: str) -> dict[str, _Placed]:
    """Nodes that have a place, parents before children."""
    placed: dict[str, _Placed] = {}
    by_end: dict[int, list[_Placed]] = {}
    root = _Placed(_Found(Path(), {}, np.empty(0, np.uint32)), None, np.empty(0, np.uint32))
    for item in sorted(items, key=lambda item: (item.start, item.name)):
        for above in by_end.get(item.start, []) if item.start else [root]:
            path = np.concatenate([above.path_ids, item.tokens])
            if node_id(identity, path, item.start) == item.name:
                parent = above.item.name if item.start else None
                entry = placed[item.name] = _Placed(item, parent, path)
                by_end.setdefault(item.end, []).append(entry)
                break
    return placed


def _row(entry: _Placed) -> NodeRow:
    item = entry.item
    return NodeRow(
        item.name,
        entry.parent,
        item.start,
        len(item.tokens),
        pack_ids(item.tokens[:FIRST_IDS]),
        str(item.attributes["token_digest"]),
        int(item.attributes["generation"]),
        disk_layout.group_digest(item.group),
        group_bytes_on_disk(item.group),
    )


def _prefixes(entry: _Placed, *, leaf: bool) -> Iterator[PrefixRow]:
    item = entry.item
    listed = [tuple(known) for known in item.attributes.get("prefixes", [])]
    if leaf and not listed:
        listed = [(f"recovered-{item.name[:8]}", item.end, {"kind": "recovered"})]
    for name, length, source in listed:
        ids = entry.path_ids[:length]
        if (item.group.parent / f"{UNLISTED_MARK}{prefix_id(ids)}").exists():
            continue
        text = json.dumps(source, ensure_ascii=False, sort_keys=True)
        yield PrefixRow(prefix_id(ids), name, length, item.name, ids_digest(ids), time.time(), text)


def _sidecars(store: Path, node: NodeFacts, info: StoreInfo) -> Iterator[ProbeRow]:
    """Sidecars on disk that belong to a node, by their attributes alone."""
    for group in sorted(disk_layout.node_dir(store, node.node_id).glob("probe-*")):
        kind = group.name.removeprefix(disk_layout.PROBE_PREFIX)
        try:
            spec = ProbeSpec.from_json(disk_layout.read_attributes(group))
            spec.check(info.identity.shape)
            if spec.kind != kind:
                raise ValueError(f"it holds {spec.kind}")
            digest, size = disk_layout.group_digest(group), tree_bytes(group) + DISK_BLOCK
            row = ProbeRow(node.node_id, kind, digest, size, spec.detail)
            open_sidecar(store, row, node, info, info.identity.digest())
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.info("%s is left out: %s", group, error)
            continue
        yield row


def _settings(rows: Iterable[ProbeRow]) -> ProbeSettings:
    """The setting that most of these sidecars were written under."""
    counts = Counter((row.kind, row.detail) for row in rows)
    most: dict[str, ProbeSpec] = {}
    for (kind, detail), _ in counts.most_common():
        most.setdefault(kind, ProbeSpec.from_json(json.loads(detail)))
    bits = most["sketch"].bits if "sketch" in most else None
    return ProbeSettings(bits, most["heads"].heads if "heads" in most else None)


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
                report = rebuild_catalog(path, info, catalog)
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
