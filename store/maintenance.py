"""Delete what nobody needs. Its caller holds the writer lock."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from store.disk import layout as disk_layout
from store.disk.layout import PROBE_PREFIX, NodeLayout
from store.disk.verify import BadChunk, GroupCheck, VerifyReport, verify_group
from store.disk.writer import DISK_BLOCK, TEMP_PREFIX, sync_dir
from store.index.catalog import Catalog
from store.index.rows import GarbageRow, NodeRow
from store.locks import oldest_lease

#: Beside a node's generations: one that is garbage and still read by somebody.
RETIRED_MARK = "retired-"


class GcReport(NamedTuple):
    """Groups deleted and the bytes that became free; groups kept for readers of old ones."""

    removed_groups: int
    freed_bytes: int
    kept_groups: int


def collect_garbage(store: Path, catalog: Catalog, *, orphans: bool) -> GcReport:
    """Delete retired generations that no lease needs and, with ``orphans``, unknown folders."""
    lease = oldest_lease(store)
    freed = 0
    garbage = catalog.garbage()
    kept = [row for row in garbage if lease is not None and lease < row.retired_epoch]
    gone = [row for row in garbage if row not in kept]
    sidecars = _known_sidecars(store, catalog, kept)
    for row in kept:
        _mark_retired(disk_layout.generation_dir(store, row.node_id, row.generation))
    for row in gone:
        group = disk_layout.generation_dir(store, row.node_id, row.generation)
        freed += _delete(group)
        for sidecar in set(group.parent.glob(f"{PROBE_PREFIX}*")) - sidecars:
            freed += _delete(sidecar)
        _drop_empty(group.parent)
    removed = len(gone)
    if gone:
        with catalog.transaction() as txn:
            for row in gone:
                txn.forget_garbage(row.node_id, row.generation)
    if orphans:
        for folder in list(_orphans(store, catalog, sidecars)):
            freed += _delete(folder)
            _drop_empty(folder.parent)
            removed += 1
    return GcReport(removed, freed, len(kept))


def _known_sidecars(store: Path, catalog: Catalog, kept: list[GarbageRow]) -> set[Path]:
    """Sidecars that are published, and all of nodes that somebody still reads."""
    known = {disk_layout.sidecar_dir(store, row.node_id, row.kind) for row in catalog.probes()}
    for row in kept:
        known |= set(disk_layout.node_dir(store, row.node_id).glob(f"{PROBE_PREFIX}*"))
    return known


def _mark_retired(group: Path) -> None:
    """Say beside a group that outlives its catalog row that `impress repair` must leave it out."""
    mark = group.parent / f"{RETIRED_MARK}{group.name}"
    if group.is_dir() and not mark.exists():
        mark.touch()
        sync_dir(group.parent)


def is_retired(group: Path, generation: int) -> bool:
    """Whether this or a later generation of the node was retired."""
    marks = group.parent.glob(f"{RETIRED_MARK}g*")
    numbers = [path.name.removeprefix(f"{RETIRED_MARK}g") for path in marks]
    return any(number.isdigit() and int(number) >= generation for number in numbers)


def _delete(folder: Path) -> int:
    size = tree_bytes(folder)
    shutil.rmtree(folder, ignore_errors=True)
    return size


def _drop_empty(folder: Path) -> None:
    """Remove a node's folder once only marks are left in it, and its fan-out folder if empty.

    A mark is of no use without its group: what is gone can't be brought back.
    """
    if not folder.is_dir() or any(path.is_dir() for path in folder.iterdir()):
        return
    shutil.rmtree(folder, ignore_errors=True)
    if folder.parent.is_dir() and not any(folder.parent.iterdir()):
        folder.parent.rmdir()


def tree_bytes(folder: Path) -> int:
    """Bytes that a folder takes on disk, as ``du`` counts them."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_blocks * 512
        except FileNotFoundError:
            continue  # deleted by its owner meanwhile
    return total


def retired_bytes(store: Path, catalog: Catalog) -> int:
    """What generations and sidecars that wait for their readers take on disk."""
    published = _known_sidecars(store, catalog, [])
    folders: set[Path] = set()
    for row in catalog.garbage():
        group = disk_layout.generation_dir(store, row.node_id, row.generation)
        folders |= {group, *(set(group.parent.glob(f"{PROBE_PREFIX}*")) - published)}
    return sum(tree_bytes(folder) for folder in folders)


def group_bytes_on_disk(group: Path) -> int:
    """What a published generation takes, its own, the node's and the fan-out folder counted in."""
    return tree_bytes(group) + 3 * DISK_BLOCK


def group_folders(store: Path) -> Iterator[Path]:
    """Every folder that a node's folder holds: generations, sidecars, temporary ones, others."""
    for fan_out in sorted((store / "nodes").glob("*")):
        for node in sorted(path for path in fan_out.iterdir() if path.is_dir()):
            yield from sorted(path for path in node.iterdir() if path.is_dir())


def _orphans(store: Path, catalog: Catalog, sidecars: set[Path]) -> Iterator[Path]:
    known = sidecars | {
        disk_layout.generation_dir(store, row.node_id, row.generation) for row in catalog.nodes()
    }
    known |= {
        disk_layout.generation_dir(store, row.node_id, row.generation) for row in catalog.garbage()
    }
    for folder in group_folders(store):
        is_group = folder.name.startswith(("g", TEMP_PREFIX, PROBE_PREFIX))
        if is_group and folder not in known:
            yield folder


def verify_nodes(
    store: Path,
    rows: list[NodeRow],
    layout_of: Callable[[int], NodeLayout],
    sidecars_of: Callable[[NodeRow], tuple[int, list[BadChunk]]],
    progress: Callable[[int, int], None] | None,
) -> VerifyReport:
    """Scrub every published generation and, with ``sidecars_of``, the nodes' sidecars.

    ``progress(done, total)`` in nodes.
    """
    chunks = size = 0
    bad: list[BadChunk] = []
    for done, row in enumerate(rows, 1):
        group = disk_layout.generation_dir(store, row.node_id, row.generation)
        layout = layout_of(row.length)
        one = verify_group(GroupCheck(row.node_id, group, layout, row.group_digest, row.digest))
        beside, bad_beside = sidecars_of(row)
        chunks, size = chunks + one.chunks, size + one.bytes + beside
        bad += [*one.bad, *bad_beside]
        if progress is not None:
            progress(done, len(rows))
    return VerifyReport(len(rows), chunks, size, bad)
