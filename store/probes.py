"""Sidecars of an open store: its setting, which nodes have which, adding and dropping them.

Owns the order of events of each change: write beside the place, sync, rename, then one catalog
transaction. A sidecar that no row of the catalog means is garbage; a row whose sidecar is gone or
another counts as absent. The bytes are `disk.sidecar`'s.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from store.disk import layout as disk_layout
from store.disk.sidecar import SidecarFiles, open_sidecar, scrub_sidecar
from store.disk.sidecar_layout import (
    PROBE_KINDS,
    NodeFacts,
    ProbeSpec,
    SidecarLayout,
    sidecar_attributes,
)
from store.disk.sidecar_writer import SidecarWriter
from store.disk.verify import BadChunk
from store.disk.writer import LayerKV
from store.errors import CatalogError, ChunkLoadError, InvalidValueError, StoreError
from store.index.catalog import Catalog
from store.index.rows import ProbeRow
from store.info import StoreInfo
from store.live import LiveIndex
from store.types import KVShape

log = logging.getLogger(__name__)

#: Keys of one layer, [n, kv_heads, head_dim] in the storage dtype.
KeysOf = Callable[[int], np.ndarray]
#: Key of the setting in the catalog.
META_KEY = "probes"


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """Which sidecars every node of a store gets.

    Parameters
    ----------
    sketch_bits
        2 or 4; None for no sketch.
    heads
        Probe heads of each layer, ascending KV head numbers; None for none.
    calibrate
        So many heads are to be chosen once prefixes are stored; until then nodes get none.
    """

    sketch_bits: int | None = None
    heads: tuple[tuple[int, ...], ...] | None = None
    calibrate: int | None = None

    @property
    def specs(self) -> dict[str, ProbeSpec]:
        """What to write, by kind."""
        found = {}
        if self.sketch_bits is not None:
            found["sketch"] = ProbeSpec(bits=self.sketch_bits)
        if self.heads is not None:
            found["heads"] = ProbeSpec(heads=self.heads)
        return found

    def to_text(self) -> str:
        """JSON text of the catalog."""
        body: dict[str, Any] = {kind: spec.to_json() for kind, spec in self.specs.items()}
        if self.calibrate is not None:
            body["calibrate"] = self.calibrate
        return json.dumps(body)

    @classmethod
    def from_text(cls, text: str | None) -> ProbeSettings:
        """Inverse of `to_text`; None is a store that never had a setting. Raises `CatalogError`."""
        try:
            body = json.loads(text or "{}")
            specs = {kind: ProbeSpec.from_json(body[kind]) for kind in body if kind != "calibrate"}
            bits = specs["sketch"].bits if "sketch" in specs else None
            heads = specs["heads"].heads if "heads" in specs else None
            return cls(bits, heads, body.get("calibrate"))
        except (ValueError, KeyError, TypeError) as error:
            raise CatalogError(
                f"the catalog's probe setting {text!r} can't be read; set it anew with "
                "'impress reorder --probe sketch'"
            ) from error

    def check(self, shape: KVShape) -> None:
        """Raise `InvalidValueError` unless a store of this shape can have them."""
        for spec in self.specs.values():
            spec.check(shape)
        if self.calibrate is not None and not 1 <= self.calibrate <= shape.num_kv_heads:
            raise InvalidValueError(
                f"{self.calibrate} probe heads are not allowed; use 1 to {shape.num_kv_heads}, "
                "the KV heads of the model"
            )


def write_settings(catalog: Catalog, settings: ProbeSettings) -> None:
    """Set the store's setting, unless it is that already."""
    if ProbeSettings.from_text(catalog.meta(META_KEY)) == settings:
        return
    with catalog.transaction() as txn:
        txn.set_meta(META_KEY, settings.to_text())


class NodeSidecars:
    """Sidecars of one node being written; made by `Sidecars.writing`."""

    def __init__(self, node_id: str, writers: Sequence[SidecarWriter]) -> None:
        self._node_id, self._writers = node_id, writers

    def add(self, layer: int, keys: np.ndarray) -> None:
        """Write one layer; ``keys`` [n, kv_heads, head_dim] in the storage dtype."""
        for writer in self._writers:
            writer.add(layer, keys)

    def tee(self, layers: LayerKV) -> LayerKV:
        """The same layers, each written here too when it is asked for."""

        def layer_rows(layer: int) -> tuple[np.ndarray, np.ndarray]:
            k, v = layers(layer)
            self.add(layer, k)
            return k, v

        return layer_rows

    def finish(self) -> list[ProbeRow]:
        """Move all into place; returns their rows, to be published."""
        written = [(writer.spec, writer.finish()) for writer in self._writers]
        return [
            ProbeRow(self._node_id, spec.kind, group.digest, group.size_bytes, spec.detail)
            for spec, group in written
        ]


class Sidecars:
    """The sidecars of one open store; whoever writes holds the writer lock."""

    def __init__(self, store: Path, info: StoreInfo, index: LiveIndex) -> None:
        self._store, self._info, self._index = store, info, index
        self._identity_digest = info.identity.digest()
        self._opened: dict[tuple[str, str], SidecarFiles] = {}
        self._opened_for = index.probes
        #: Sidecars that failed in this process, by (node id, kind).
        self.withdrawn: set[tuple[str, str]] = set()

    @property
    def settings(self) -> ProbeSettings:
        """What every node gets. Raises `CatalogError`."""
        return ProbeSettings.from_text(self._index.catalog.meta(META_KEY))

    def set_settings(self, settings: ProbeSettings) -> None:
        """Change what nodes written from now on get. Raises `InvalidValueError`."""
        settings.check(self._info.identity.shape)
        write_settings(self._index.catalog, settings)

    def how_to_add(self, kind: str) -> str:
        """Command that gives all nodes a kind, and leaves them what the store keeps besides."""
        others = set(self.settings.specs) - {kind}
        return f"'impress reorder --store {self._store} --probe {'both' if others else kind}'"

    def sketch_bytes(self) -> int | None:
        """Bytes of all stored sketches; None where there are none and none will come."""
        sizes = [row.bytes for row in self._index.probes.values() if row.kind == "sketch"]
        if sizes:
            return sum(sizes)
        try:
            return None if self.settings.sketch_bits is None else 0
        except CatalogError:
            return None  # a setting that can't be read must not keep the store from opening

    def rows(self, node_id: str | None = None) -> list[ProbeRow]:
        """Published sidecars of known kinds, of one node or of all, by node."""
        probes = self._index.probes
        names = sorted({name for name, _ in probes}) if node_id is None else [node_id]
        keys = [(name, kind) for name in names for kind in PROBE_KINDS]
        return [probes[key] for key in keys if key in probes]

    def get(self, node: NodeFacts, kind: str) -> SidecarFiles | None:
        """A node's sidecar, None where it has none. Raises `ChunkLoadError`."""
        row = self._index.probes.get((node.node_id, kind))
        if row is None:
            return None
        if self._opened_for is not self._index.probes:
            # The index was read anew: another process may have written any of them again.
            self._opened, self._opened_for = {}, self._index.probes
        key = (node.node_id, kind)
        if key not in self._opened:
            self._opened[key] = self._open(row, node)
        return self._opened[key]

    def _open(self, row: ProbeRow, node: NodeFacts) -> SidecarFiles:
        return open_sidecar(self._store, row, node, self._info, self._identity_digest)

    def has(self, node: NodeFacts, spec: ProbeSpec) -> bool:
        """Whether a node has exactly this sidecar, as far as its metadata says."""
        row = self._index.probes.get((node.node_id, spec.kind))
        if row is None or row.detail != spec.detail:
            return False
        try:
            return self.get(node, spec.kind) is not None
        except ChunkLoadError:
            return False

    @contextlib.contextmanager
    def writing(self, node: NodeFacts, specs: Iterable[ProbeSpec]) -> Iterator[NodeSidecars]:
        """Write sidecars of a node; what is not finished in the block is removed.

        The rows of `NodeSidecars.finish` become visible with `publish` or, inside a transaction
        of the caller's, with ``txn.put_probe`` and `published`.
        """
        shape, writers = self._info.identity.shape, []
        try:
            for spec in specs:
                target = disk_layout.sidecar_dir(self._store, node.node_id, spec.kind)
                attributes = sidecar_attributes(node, spec, self._info, self._identity_digest)
                writers.append(SidecarWriter(target, shape, node.length, spec, attributes))
            yield NodeSidecars(node.node_id, writers)
        finally:
            for writer in writers:
                writer.discard()

    def published(self, rows: Iterable[ProbeRow]) -> None:
        """Take over rows that a transaction has committed."""
        for row in rows:
            self._index.probes[row.node_id, row.kind] = row
            self._opened.pop((row.node_id, row.kind), None)
            self.withdrawn.discard((row.node_id, row.kind))

    def add(self, node: NodeFacts, kind: str, open_keys: Callable[[], KeysOf]) -> int:
        """Give a stored node the sidecar that the setting asks for; returns the bytes written.

        ``open_keys`` is called where the node lacks it, else 0 is returned. Raises
        `InvalidValueError` for a kind that is not in the setting, `ChunkLoadError`.
        """
        spec = self.settings.specs.get(kind)
        if spec is None:
            raise InvalidValueError(
                f"this store keeps no probe layout {kind!r}; set one with 'impress reorder --probe'"
            )
        if self.has(node, spec):
            return 0
        keys = open_keys()
        with self.writing(node, [spec]) as sidecars:
            for layer in range(self._info.identity.shape.num_layers):
                sidecars.add(layer, keys(layer))
            (row,) = sidecars.finish()
        with self._index.catalog.transaction() as txn:
            txn.put_probe(row)
        self.published([row])
        return row.bytes

    def drop(self, node_id: str, kind: str) -> int:
        """Take a sidecar from a node; returns the bytes that become free."""
        row = self._index.probes.get((node_id, kind))
        if row is None:
            return 0
        with self._index.catalog.transaction() as txn:
            txn.delete_probe(row)
        self.forget(node_id, kind)
        shutil.rmtree(disk_layout.sidecar_dir(self._store, node_id, kind), ignore_errors=True)
        return row.bytes

    def forget(self, node_id: str, kind: str | None = None) -> None:
        """Drop what this process knows of a node's sidecars, of one kind or all."""
        for row in self.rows(node_id):
            if kind in (None, row.kind):
                del self._index.probes[node_id, row.kind]
                self._opened.pop((node_id, row.kind), None)

    def quarantine(self, error: ChunkLoadError) -> None:
        """Withdraw a sidecar that failed to load; the node's tokens stay usable."""
        kind = error.array.removeprefix(disk_layout.PROBE_PREFIX)
        row = self._index.probes.get((error.node_id, kind))
        if row is None:
            return
        self.forget(error.node_id, kind)
        self.withdrawn.add((error.node_id, kind))
        if self._index.read_only:
            return
        try:
            with self._index.catalog.transaction() as txn:
                txn.delete_probe(row)
        except StoreError as error_now:
            # This process remembers it all the same, and the next one will find it again.
            log.warning("a damaged sidecar was not withdrawn: %s", error_now)

    def bad(self, node: NodeFacts) -> tuple[int, list[BadChunk]]:
        """Scrub a node's sidecars; returns the bytes checked and what is bad."""
        size, found = 0, []
        for row in self.rows(node.node_id):
            array = f"{disk_layout.PROBE_PREFIX}{row.kind}"
            try:
                checked, places = scrub_sidecar(self._open(row, node))
            except ChunkLoadError as error:
                checked, places = 0, [(-1, error.reason)]
            size += checked
            found += [BadChunk(node.node_id, array, layer, -1, why) for layer, why in places]
        return size, found

    def to_rewrite(self, node: NodeFacts) -> list[ProbeSpec]:
        """What the setting asks for and a node lacks, or has damaged."""
        damaged = {place.array for place in self.bad(node)[1]}
        return [
            spec
            for kind, spec in self.settings.specs.items()
            if f"{disk_layout.PROBE_PREFIX}{kind}" in damaged or not self.has(node, spec)
        ]

    def disk_bytes(self, sizes: Iterable[int]) -> int:
        """What the sidecars of new nodes of so many tokens each take at most.

        Where heads are still to be chosen, theirs and those of the nodes stored so far count too.
        """
        shape, settings = self._info.identity.shape, self.settings
        new = [size for size in sizes if size]
        layouts = [
            SidecarLayout.of(shape, size, spec) for spec in settings.specs.values() for size in new
        ]
        if settings.calibrate is not None:
            stored = [row.length for row in self._index.catalog.nodes()]
            layouts += [
                SidecarLayout(shape, size, None, settings.calibrate) for size in [*stored, *new]
            ]
        return sum(layout.disk_bytes for layout in layouts)
