"""Sketches that stay in host memory once a query has touched them.

Unit: a node's whole sketch. The least recently used ones leave when the budget is full; those of
one query may then be larger than the budget, and are dropped with the query.
"""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future

from store.disk.reader import ChunkReader
from store.disk.sidecar import SidecarFiles, SketchData, read_sketch
from store.disk.sidecar_layout import PAGE, pages
from store.itf.evidence import SketchPart


def sketch_bytes(files: SidecarFiles) -> int:
    """Bytes that a node's sketch takes in memory: whole pages per array, and one to align them."""
    layout = files.layout
    sizes = (files.shape.num_layers * layout.layer_bytes(name) for name in layout.arrays)
    return sum(pages(size) for size in sizes) + PAGE


class SketchCache:
    """Sketches by node, within a hard budget in bytes.

    Attributes
    ----------
    used_bytes
        What is held now, reads under way included.
    """

    def __init__(self, reader: ChunkReader, budget_bytes: int) -> None:
        self._reader, self._budget = reader, budget_bytes
        # A node's id says which tokens and model it is, so that what is held never goes stale.
        self._held: OrderedDict[tuple[str, int], tuple[Future[SketchData], int]] = OrderedDict()
        self.used_bytes = 0

    def take(self, files: SidecarFiles, used: int) -> SketchPart:
        """Return a node's sketch, resident or on its way; the node counts as just used."""
        assert files.bits is not None
        key = (files.node_id, files.bits)
        held = self._held.get(key)
        if held is not None and not _failed(held[0]):
            self._held.move_to_end(key)
            return SketchPart(held[0], used, files.bits, fresh=False)
        self._forget(key)
        future = self._reader.run(lambda: read_sketch(files, self._reader))
        self._keep(key, future, sketch_bytes(files))
        return SketchPart(future, used, files.bits, fresh=True)

    def _forget(self, key: tuple[str, int]) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            self.used_bytes -= held[1]

    def _keep(self, key: tuple[str, int], future: Future[SketchData], size: int) -> None:
        if size > self._budget:
            return
        while self.used_bytes + size > self._budget:
            self._forget(next(iter(self._held)))
        self._held[key] = (future, size)
        self.used_bytes += size


def _failed(future: Future[SketchData]) -> bool:
    return future.done() and (future.cancelled() or future.exception() is not None)
