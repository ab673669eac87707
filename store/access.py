"""What past queries found important: moving statistics of nodes, kept off the hot path.

Owns ``STORE/stats``, one file per node, and the nodes in use in memory. Losing a file loses no KV
and no answer, so nothing is synced and nothing here raises: a torn, foreign or older file counts
as none, a failed write is logged and tried again at the next flush. A file is renamed into place
and so is old or new, never half of each.

Processes don't share counts: each writes what it knows of a node, and the last one to write wins.
Used from one thread.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from store.node_access import NodeAccess, load, save
from store.types import KVShape

__all__ = ["AccessStats", "NodeAccess"]

log = logging.getLogger(__name__)

STATS_DIR = "stats"
#: Statistics kept in memory; a node of 4096 tokens and 30 layers takes 1.5 MB.
CACHE_BYTES = 64 << 20
#: A temporary file of this age has lost its writer.
_STALE_S = 3600.0


class AccessStats:
    """Statistics of a store's nodes: read when first asked for, written by `flush`.

    Parameters
    ----------
    store
        Folder of the store; None keeps everything in memory.
    shape
        KV shape of its model.
    read_only
        Never write; what is recorded lasts as long as this object.
    cache_bytes
        Bound of what stays in memory, least recently used first out (written first if it is new);
        the latest node always stays.
    """

    def __init__(
        self,
        store: Path | None,
        shape: KVShape,
        *,
        read_only: bool = False,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._folder = None if store is None else store / STATS_DIR
        self._layers, self._cache_bytes = shape.num_layers, cache_bytes
        self._writes = store is not None and not read_only
        self._nodes: OrderedDict[str, NodeAccess] = OrderedDict()
        self._dirty: set[str] = set()
        self._warned = False

    def get(self, node_id: str, length: int) -> NodeAccess | None:
        """What is known of a node of ``length`` tokens; None where nothing is. Writes nothing."""
        found = self._find(node_id)
        self._trim(write=False)
        return found if found is not None and found.tokens == length else None

    def record(
        self,
        node_id: str,
        length: int,
        importance: np.ndarray | None,
        selected: np.ndarray,
        loaded: np.ndarray,
    ) -> None:
        """Count one run that used the node's first ``used`` tokens; call it after the answer.

        Parameters
        ----------
        length
            Tokens of the node.
        importance
            float32 [layers, used], attention that each token got, of any scale; a layer that sums
            to nothing is left out. None where the run computed none of its own (all KV was loaded,
            or the importance came from these statistics): only the counts change.
        selected, loaded
            bool [layers, used]
        """
        assert selected.shape == loaded.shape == (self._layers, selected.shape[1])
        assert importance is None or importance.shape == selected.shape
        assert 0 < selected.shape[1] <= length
        known = self.get(node_id, length) or NodeAccess.empty(self._layers, length)
        self._put(node_id, known.after(importance, selected, loaded))
        self._trim(write=True)

    def adopt(self, other: AccessStats, node_id: str, length: int) -> None:
        """Take over what others know of a node, in place of what is known here."""
        found = other.get(node_id, length)
        if found is not None:
            self._put(node_id, found)
            self._trim(write=True)

    def flush(self) -> None:
        """Write the nodes that changed; stops at the first failure and keeps the rest for later."""
        for node_id in sorted(self._dirty):
            if not self._write(node_id):
                return

    def split(self, old: str, at: int, upper: str, lower: str) -> None:
        """Hand a node's statistics over to its halves, of which ``upper`` has ``at`` tokens."""
        found = self._find(old)
        if found is not None and 0 < at < found.tokens:
            for node_id, half in zip((upper, lower), found.split(at), strict=True):
                self._put(node_id, half)
                self._write(node_id)
            self._trim(write=True)
        self.remove(old)

    def remove(self, node_id: str) -> None:
        """Forget a node and delete its file."""
        self._forget(node_id)
        if self._writes:
            self._delete(self._path(node_id))

    def sweep(self, node_ids: set[str]) -> int:
        """Forget all nodes but these, with the files that killed writers left; bytes freed.

        Its caller holds the writer lock: nobody adds a node meanwhile.
        """
        for node_id in set(self._nodes) - node_ids:
            self._forget(node_id)
        if not self._writes:
            return 0
        oldest = time.time() - _STALE_S
        freed = 0
        for path, size, changed_s in list(self._files()):
            gone = path.suffix == ".npy" and path.stem not in node_ids
            if gone or (path.suffix == ".tmp" and changed_s < oldest):
                freed += size if self._delete(path) else 0
        return freed

    def bytes(self) -> int:
        """Bytes that the files and the folders they lie in take on disk, as ``du`` counts them."""
        return sum(size for pattern in ("??", "??/*") for _, size, _ in self._files(pattern))

    def _find(self, node_id: str) -> NodeAccess | None:
        found = self._nodes.get(node_id)
        if found is None and self._folder is not None:
            found = self._load(self._path(node_id))
        if found is not None:
            self._nodes[node_id] = found
            self._nodes.move_to_end(node_id)
        return found

    def _load(self, path: Path) -> NodeAccess | None:
        try:
            return load(path, self._layers)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            log.info("access statistics in %s are left out: %s", path, error)
            return None

    def _put(self, node_id: str, access: NodeAccess) -> None:
        self._nodes[node_id] = access
        self._nodes.move_to_end(node_id)
        self._dirty.add(node_id)

    def _forget(self, node_id: str) -> None:
        self._nodes.pop(node_id, None)
        self._dirty.discard(node_id)

    def _trim(self, *, write: bool) -> None:
        """Drop the oldest nodes beyond the bound; without ``write`` only those that lie on disk."""
        excess = sum(access.nbytes for access in self._nodes.values()) - self._cache_bytes
        for node_id in list(self._nodes)[:-1]:
            if excess <= 0:
                return
            if node_id in self._dirty and not write:
                continue
            if node_id in self._dirty:
                self._write(node_id)
            excess -= self._nodes[node_id].nbytes
            self._forget(node_id)

    def _path(self, node_id: str) -> Path:
        assert self._folder is not None
        return self._folder / node_id[:2] / f"{node_id}.npy"

    def _files(self, pattern: str = "??/*") -> Iterator[tuple[Path, int, float]]:
        """Every file with its bytes on disk and the time it was last changed."""
        for path in () if self._folder is None else self._folder.glob(pattern):
            try:
                found = path.stat()
            except OSError:
                continue  # renamed or deleted by its owner meanwhile
            yield path, found.st_blocks * 512, found.st_mtime

    def _write(self, node_id: str) -> bool:
        """Write one node; False where that failed or must not be."""
        if not self._writes:
            return False
        try:
            save(self._path(node_id), self._nodes[node_id])
        except OSError as error:
            level = logging.INFO if self._warned else logging.WARNING
            log.log(level, "access statistics were not written: %s", error)
            self._warned = True
            return False
        self._dirty.discard(node_id)
        return True

    def _delete(self, path: Path) -> bool:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.info("%s was not deleted: %s", path, error)
            return False
        return True
