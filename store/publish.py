"""Change what a store holds: insert, split, reorder, replace, remove; a transaction each.

Order of each change (format.md): write new groups beside the old ones, sync, rename; then one
catalog transaction publishes all of it; then the tree in memory follows. Killed anywhere, the
store shows the state before or after. Deleting what was retired is `maintenance`'s.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from store.access import AccessStats
from store.disk import layout as disk_layout
from store.disk.reader import ChunkReader
from store.disk.sidecar_layout import ProbeSpec
from store.disk.writer import LayerKV, disk_errors, sync_dir, write_generation
from store.errors import ChunkLoadError, StoreError
from store.files import FileTable, GroupFacts, NodeRows, node_attributes, order_name
from store.index.catalog import Catalog
from store.index.ids import Ids, ids_digest, node_id, prefix_id
from store.index.mapping import Rows, check_rows, is_identity, rows_of_part
from store.index.radix import MatchedNode, PrefixMatch, PrefixNode, RadixTree
from store.index.rows import PrefixRow
from store.info import StoreInfo
from store.probes import Sidecars
from store.written import Split, Written, retire

#: Beside a node's generations: a prefix that was removed while the node stayed.
UNLISTED_MARK = "unlisted-"


class InsertResult(NamedTuple):
    """What an insert did; ``duplicate`` where everything was stored already.

    ``bytes`` are those of the new node with its sidecars.
    """

    inserted_tokens: int
    bytes: int
    duplicate: bool
    prefix: PrefixRow | None


class RemoveReport(NamedTuple):
    """Nodes that no other prefix needed, and the bytes that become free."""

    nodes: int
    bytes: int


def _sliced(layers: LayerKV, lo: int, hi: int | None) -> LayerKV:
    """The same layers, tokens ``lo`` to ``hi`` of each."""

    def layer_rows(layer: int) -> tuple[np.ndarray, np.ndarray]:
        k, v = layers(layer)
        return k[lo:hi], v[lo:hi]

    return layer_rows


class Publisher:
    """Writes to one store; its caller holds the writer lock."""

    def __init__(
        self,
        store: Path,
        info: StoreInfo,
        catalog: Catalog,
        tree: Callable[[], RadixTree],
        files: FileTable,
        reader: ChunkReader,
        sidecars: Sidecars,
        access: AccessStats,
    ) -> None:
        self._store, self._info, self._catalog = store, info, catalog
        self._get_tree, self._files, self._reader = tree, files, reader
        self._sidecars, self._access = sidecars, access
        self._identity_digest = info.identity.digest()

    def insert(
        self, ids: Ids, layers: LayerKV, start: int, name: str | None, source: dict[str, Any]
    ) -> InsertResult:
        """Store the KV of ``ids`` that is not stored yet.

        Parameters
        ----------
        ids
            uint32 [n], all tokens from position 0.
        layers
            KV of positions ``start`` to n, computed with full attention.
        name, source
            Where ``name`` is given, the prefix is listed under it, in the same transaction.

        Raises
        ------
        StoreError
            What lies before ``start`` is not stored (any more), or a damaged node is in the way.
        """
        tree = self._get_tree()
        match = tree.match(ids, ignore_quarantine=True)
        if match.error is not None:
            raise match.error
        healed = self._heal(match, layers, start)
        at = match.matched_len
        if at == len(ids):
            row = self.name_prefix(ids, name, source) if name is not None else None
            return InsertResult(healed, 0, healed == 0, row)
        if at < start:
            raise StoreError(
                f"tokens {at} to {start} of the prefix are no longer stored; "
                "build it again with 'impress build-store'"
            )
        parent, split = self._parent_at(match)
        new_id = node_id(self._identity_digest, ids, at)
        node = self._planned(new_id, parent, at, ids[at:])
        listed = [[name, len(ids), source]] if name is not None else []
        facts = GroupFacts([], listed)
        written = self._write(node, _sliced(layers, at - start, None), ids[at:], facts)
        row = self._prefix_row(ids, new_id, name, source) if name is not None else None
        with self._catalog.transaction() as txn:
            if split is not None:
                split.publish(txn)
            written.publish(txn, node)
            if row is not None:
                txn.put_prefix(row)
        if split is not None:
            self._split_tree(split)
        self._add_to_tree(node)
        self._sidecars.published(written.sidecars)
        return InsertResult(len(ids) - at, written.size_bytes, False, row)

    def name_prefix(self, ids: Ids, name: str, source: dict[str, Any]) -> PrefixRow:
        """List stored tokens as a prefix. Raises `StoreError` unless all of them are stored."""
        match = self._get_tree().match(ids, ignore_quarantine=True)
        if match.matched_len < len(ids) or not match.nodes:
            raise StoreError(
                f"only {match.matched_len} of {len(ids)} tokens of {name!r} are stored; "
                "insert them before naming the prefix"
            )
        listed = self._catalog.find_prefix(prefix_id(ids))
        if listed is not None:
            return listed
        row = self._prefix_row(ids, match.nodes[-1].node.node_id, name, source)
        with self._catalog.transaction() as txn:
            txn.put_prefix(row)
        mark = disk_layout.node_dir(self._store, row.node_id) / f"{UNLISTED_MARK}{row.prefix_id}"
        mark.unlink(missing_ok=True)
        return row

    def reorder(self, node: PrefixNode, rows: Rows | None) -> int:
        """Publish a generation of a node with its rows in another order; returns its bytes.

        0 where the published one has that order. Raises `ChunkLoadError`, and `InvalidValueError`
        unless ``rows`` is a mapping list of the node, or None for token order.
        """
        files = self._files.get(node)
        if rows is not None:
            rows = check_rows(rows, files.layout.shape.num_layers, node.length)
            rows = None if is_identity(rows) else rows
        if rows is None or files.rows is None:
            if rows is files.rows:
                return 0
        elif (rows == files.rows).all():
            return 0
        return self._replace(node, NodeRows(self._reader, files).layer, rows)

    def replace(self, node: PrefixNode, layers: LayerKV) -> int:
        """Publish a new generation of a node, in the order it has; returns its bytes.

        ``layers`` gives all rows of the node in token order; quarantine entries are cleared.
        Sidecars stay, as they are in token order too; damaged ones are written again.
        """
        try:
            rows = self._files.get(node).rows
        except ChunkLoadError:
            rows = None
        return self._replace(node, layers, rows)

    def _replace(self, node: PrefixNode, layers: LayerKV, rows: Rows | None) -> int:
        ids = self._get_tree().ids_of(node)
        successor = self._planned(node.node_id, node.parent, node.start, ids)
        specs = self._sidecars.to_rewrite(node)
        written = self._write(successor, layers, ids, self._facts(node), specs, rows)
        old = node.generation
        with self._catalog.transaction() as txn:
            txn.replace_generation(
                node.node_id, successor.generation, written.group.digest, written.group.size_bytes
            )
            written.publish_sidecars(txn)
            retire(txn, node.node_id, old)
            txn.clear_quarantine(node.node_id)
        self._get_tree().clear_quarantine(node.node_id)
        node.generation = successor.generation
        self._files.forget(node.node_id)
        self._sidecars.published(written.sidecars)
        return written.size_bytes

    def remove(self, row: PrefixRow) -> RemoveReport:
        """Delete a prefix and the nodes that only it needed."""
        tree = self._get_tree()
        doomed = self._only_for(row, tree)
        gone = {node.node_id for node in doomed}
        freed = sum(r.bytes for r in self._catalog.nodes() if r.node_id in gone)
        freed += sum(r.bytes for name in gone for r in self._sidecars.rows(name))
        with self._catalog.transaction() as txn:
            txn.delete_prefix(row.prefix_id)
            for node in doomed:
                retire(txn, node.node_id, node.generation)
                txn.delete_node(node.node_id)
        if not doomed:
            self._mark_unlisted(row)
        for node in doomed:
            tree.remove(node.node_id)
            self._files.forget(node.node_id)
            self._sidecars.forget(node.node_id)
            self._access.remove(node.node_id)
        return RemoveReport(len(doomed), freed)

    def _only_for(self, row: PrefixRow, tree: RadixTree) -> list[PrefixNode]:
        """Nodes, leaf first, that no other prefix and no other branch needs."""
        others = {r.node_id for r in self._catalog.prefixes() if r.prefix_id != row.prefix_id}
        doomed: list[PrefixNode] = []
        for node in reversed(tree.path(tree.get(row.node_id))):
            kept = [c for c in node.children.values() if not doomed or c is not doomed[-1]]
            if kept or node.node_id in others:
                break
            doomed.append(node)
        return doomed

    def _mark_unlisted(self, row: PrefixRow) -> None:
        """Say beside the node, which stays, that `impress repair` must not list the prefix."""
        folder = disk_layout.node_dir(self._store, row.node_id)
        with disk_errors(folder):
            (folder / f"{UNLISTED_MARK}{row.prefix_id}").touch()
            sync_dir(folder)

    def _heal(self, match: PrefixMatch, layers: LayerKV, start: int) -> int:
        """Rewrite quarantined nodes whose KV ``layers`` has again; returns the tokens rewritten.

        Raises `StoreError` for a damaged node that ``layers`` does not cover to its end.
        """
        healed = 0
        for node, used in match.nodes:
            if node.bad_from is None:
                continue
            if used < node.length or start > node.bad_from:
                raise StoreError(
                    f"node {node.node_id} is damaged from token {node.bad_from} on and in the way; "
                    "run 'impress verify --repair' to rebuild it"
                )
            healed += node.end - node.bad_from
            self.replace(node, self._patched(node, layers, start))
        return healed

    def _patched(self, node: PrefixNode, layers: LayerKV, start: int) -> LayerKV:
        """The node's rows: stored ones before ``start``, given ones after."""
        keep = max(0, start - node.start)
        if keep == 0:
            return _sliced(layers, node.start - start, node.end - start)
        files = self._files.get(node)
        stored = NodeRows(self._reader, files)

        def layer_rows(layer: int) -> tuple[np.ndarray, np.ndarray]:
            old, new = stored.head(layer, keep), layers(layer)
            rest = node.end - start
            k, v = (np.concatenate([a[:keep], b[:rest]]) for a, b in zip(old, new, strict=True))
            return k, v

        return layer_rows

    def _parent_at(self, match: PrefixMatch) -> tuple[PrefixNode | None, Split | None]:
        """The node a new one hangs below; splits the last matched one where it parts half-way."""
        if not match.nodes:
            return None, None
        last = match.nodes[-1]
        if last.used == last.node.length:
            return last.node, None
        split = self._prepare_split(last)
        return split.upper, split

    def _prepare_split(self, matched: MatchedNode) -> Split:
        """Write both halves of a node; nothing is published yet."""
        node, cut = matched
        tree = self._get_tree()
        ids, path = tree.ids_of(node), tree.path_ids(node)
        at = node.start + cut
        upper_id = node_id(self._identity_digest, path[:at], node.start)
        lower_id = node_id(self._identity_digest, path, at)
        upper = self._planned(upper_id, node.parent, node.start, ids[:cut])
        lower = self._planned(lower_id, upper, at, ids[cut:])
        files = self._files.get(node)
        stored = NodeRows(self._reader, files)
        above, below = self._facts(node).split(node.node_id, at)

        def written(half: PrefixNode, lo: int, hi: int, facts: GroupFacts) -> Written:
            rows = None if files.rows is None else rows_of_part(files.rows, lo, hi)
            rows = None if rows is None or is_identity(rows) else rows
            return self._write(half, _sliced(stored.layer, lo, hi), ids[lo:hi], facts, rows=rows)

        halves = written(upper, 0, cut, above), written(lower, cut, node.length, below)
        return Split(node, upper, lower, halves)

    def _split_tree(self, split: Split) -> None:
        upper, lower = split.upper, split.lower
        self._get_tree().split(
            split.old.node_id,
            upper.end,
            upper.node_id,
            lower.node_id,
            upper_generation=upper.generation,
            lower_generation=lower.generation,
        )
        self._files.forget(split.old.node_id)
        self._sidecars.forget(split.old.node_id)
        self._access.split(split.old.node_id, upper.length, upper.node_id, lower.node_id)
        for half in split.written:
            self._sidecars.published(half.sidecars)

    def _add_to_tree(self, node: PrefixNode) -> None:
        parent = node.parent.node_id if node.parent else None
        self._get_tree().add(
            node.node_id,
            parent,
            node.start,
            node.length,
            node.first_ids,
            node.digest,
            node.generation,
        )

    def _planned(self, name: str, parent: PrefixNode | None, start: int, ids: Ids) -> PrefixNode:
        """Facts of a node that is about to be written, outside the tree."""
        generation = self._next_generation(name)
        return PrefixNode(name, parent, start, len(ids), ids[:16], ids_digest(ids), generation)

    def _facts(self, node: PrefixNode) -> GroupFacts:
        """What a new group of this node says for a rebuild: its past, and who is listed now."""
        listed = [
            [row.name, row.length, json.loads(row.source)]
            for row in self._catalog.prefixes()
            if row.node_id == node.node_id
        ]
        return GroupFacts(self._files.supersedes(node), listed)

    def _next_generation(self, name: str) -> int:
        """A generation that no folder of this node has had, so that files never change."""
        published = self._catalog.published_generation(name)
        return max(published, self._catalog.tombstoned_generation(name)) + 1

    def _write(
        self,
        node: PrefixNode,
        layers: LayerKV,
        ids: Ids,
        facts: GroupFacts,
        specs: Iterable[ProbeSpec] | None = None,
        rows: Rows | None = None,
    ) -> Written:
        """Write a generation and, from the same keys, sidecars: by default all that are set."""
        if specs is None:
            specs = self._sidecars.settings.specs.values()
        order = order_name(rows)
        attributes = node_attributes(node, self._info, self._identity_digest, facts, order)
        target = disk_layout.generation_dir(self._store, node.node_id, node.generation)
        layout = self._files.layout(node.length)
        with self._sidecars.writing(node, specs) as sidecars:
            group = write_generation(target, layout, ids, sidecars.tee(layers), attributes, rows)
            return Written(group, sidecars.finish())

    @staticmethod
    def _prefix_row(ids: Ids, node: str, name: str, source: dict[str, Any]) -> PrefixRow:
        text = json.dumps(source, ensure_ascii=False, sort_keys=True)
        return PrefixRow(prefix_id(ids), name, len(ids), node, ids_digest(ids), time.time(), text)
