"""What the disk can do, and how much of it the store's reader uses (`impress bench disk`).

Three things are read: a test file in several patterns, whose best is the ceiling; the files of
one node with bare ``preadv`` calls; the same files with the store's reader. The last two and the
ceiling's pattern take turns, so that a disk whose pace drifts moves all of them alike, and shares
are medians over the rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from pipelines.bench_folder import IN_MEMORY, file_system, require_space, temporary_folder
from pipelines.bench_reads import (
    KINDS,
    FileReads,
    NodeReads,
    Pattern,
    Speed,
    opened,
    write_random_node,
    write_test_file,
)
from pipelines.progress import Progress, ProgressEvent, silent
from store.disk.io import MAX_BLOCK, IOOptions, probe_direct
from store.disk.layout import NodeLayout
from store.disk.reader import NodeFiles
from store.disk.writer import group_bytes
from store.engine import PrefixStore
from store.errors import InvalidValueError, PrefixNotFoundError
from store.files import FileTable
from store.types import KVShape

#: The node read where no store is given: SmolLM2-135M's shape.
NODE_SHAPE = KVShape(num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64, dtype="bfloat16")
NODE_TOKENS, NODE_CHUNK_TOKENS = 4096, 16


@dataclass(frozen=True, slots=True)
class DiskBenchOptions:
    """What to measure.

    Parameters
    ----------
    folder
        Where the temporary files go.
    size_bytes
        Size of the test file.
    request_bytes, depths
        Request sizes (those larger than the file are left out) and requests in flight.
    direct
        Read past the page cache where possible.
    rounds, limit_s
        Turns of reader, ``preadv`` and ceiling; seconds for one pattern at most.
    """

    folder: Path
    size_bytes: int = 10**9
    request_bytes: tuple[int, ...] = (24 << 10, 256 << 10, 1 << 20, 4 << 20)
    depths: tuple[int, ...] = (1, 4, 16)
    direct: bool = True
    rounds: int = 5
    limit_s: float = 2.0

    def __post_init__(self) -> None:
        if any(size < 1 or size % MAX_BLOCK for size in self.request_bytes):
            raise InvalidValueError(
                f"request sizes must be multiples of {MAX_BLOCK} bytes, got {self.request_bytes}"
            )
        if self.size_bytes < min(self.request_bytes):
            raise InvalidValueError(
                f"the test file needs at least {min(self.request_bytes)} bytes, the smallest "
                f"request, got {self.size_bytes}; give a larger --size"
            )
        if min(*self.depths, self.rounds) < 1 or self.limit_s <= 0:
            raise InvalidValueError(
                "depths and rounds must be 1 or more and the limit above 0 s, "
                f"got {self.depths}, {self.rounds} and {self.limit_s}"
            )

    def patterns(self) -> list[Pattern]:
        """All ways to read the test file."""
        sizes = [size for size in self.request_bytes if size <= self.size_bytes]
        return [Pattern(k, size, depth) for k in KINDS for size in sizes for depth in self.depths]


class DiskRow(NamedTuple):
    """Pace of the test file in one pattern."""

    kind: str
    request_bytes: int
    depth: int
    bytes_per_s: float


class ReaderRow(NamedTuple):
    """The store's reader: medians over ``rounds``; shares are medians of each round's ratio."""

    kind: str
    bytes_per_s: float
    share_of_ceiling: float
    share_of_preadv: float
    preadv_bytes_per_s: float
    ceiling_bytes_per_s: float
    bytes: int
    tokens: int
    layers: int
    chunk_tokens: int
    codec: str
    threads: int
    rounds: int


@dataclass(frozen=True, slots=True)
class DiskReport:
    """Result; ``ceiling`` is the best of ``rows``, ``direct`` whether O_DIRECT was used."""

    rows: list[DiskRow]
    ceiling: DiskRow
    reader: ReaderRow
    direct: bool
    size_bytes: int
    folder: Path
    notes: list[str]

    @property
    def file_system(self) -> str | None:
        """Type of the folder's file system, such as ``ext4``."""
        return file_system(self.folder)


def bench_disk(
    options: DiskBenchOptions, store: PrefixStore | None = None, progress: Progress = silent
) -> DiskReport:
    """Measure; temporary files are gone afterwards, however it ends.

    Parameters
    ----------
    store
        The reader is measured on its largest node; on a synthetic node where None.

    Raises
    ------
    InvalidValueError
        The folder isn't there or can't be written.
    StoreFullError
        The folder has no room for the files.
    PrefixNotFoundError, ChunkLoadError
        The store holds no node, or the node can't be read.
    """
    node = None if store is None else _largest_node(store)
    layout = node.layout if node else _synthetic_layout(options)
    require_space(options.folder, options.size_bytes + (0 if node else group_bytes(layout)))
    with temporary_folder(options.folder) as folder:
        path = folder / "reads"
        write_test_file(path, options.size_bytes, progress)
        files = node or write_random_node(folder, layout, progress)
        block = (probe_direct(path) or 1) if options.direct else 1
        with opened(path, block) as fd, NodeReads(files, _io(options)) as node_reads:
            # Open files outlive their name, so that not even a kill leaves this one behind.
            path.unlink()
            # Touches the memory, and a damaged node shows before the long part.
            node_reads.with_reader()
            reads = FileReads(fd, options.size_bytes, block, options.patterns())
            rows = _measure_file(reads, options, progress)
            ceiling = max(rows, key=lambda row: row.bytes_per_s)
            reader = _measure_reader(reads, node_reads, ceiling, options, progress)
            reader = reader._replace(kind="node" if node else "synthetic")
            direct = block > 1 and node_reads.block > 1
        notes = _notes(options, files, direct=direct, read_layers=reader.layers)
    return DiskReport(rows, ceiling, reader, direct, options.size_bytes, options.folder, notes)


def _io(options: DiskBenchOptions) -> IOOptions:
    return IOOptions(direct=options.direct)


def _largest_node(store: PrefixStore) -> NodeFiles:
    rows = store.nodes()
    if not rows:
        raise PrefixNotFoundError(
            f"{store.path} holds no prefix to read; store one with 'impress build-store', or leave "
            "--store out to measure on a synthetic node"
        )
    largest = max(rows, key=lambda row: (row.bytes, row.node_id))
    table = FileTable(store.path, store.info, store.info.identity.digest())
    return table.get(store.node(largest.node_id))


def _synthetic_layout(options: DiskBenchOptions) -> NodeLayout:
    """Geometry of the synthetic node, which is at most about as large as the test file."""
    tokens = max(NODE_CHUNK_TOKENS, options.size_bytes // NODE_SHAPE.token_bytes)
    return NodeLayout(NODE_SHAPE, min(NODE_TOKENS, tokens), NODE_CHUNK_TOKENS, "none")


def _measure_file(reads: FileReads, options: DiskBenchOptions, progress: Progress) -> list[DiskRow]:
    patterns, rows = options.patterns(), []
    for done, pattern in enumerate(patterns):
        note = f"{pattern.kind}, {pattern.request_bytes >> 10} KiB, {pattern.depth} in flight"
        progress(ProgressEvent("read test file", done, len(patterns), "", note))
        rows.append(DiskRow(*pattern, reads.run(pattern, options.limit_s).bytes_per_s))
    progress(ProgressEvent("read test file", len(patterns), len(patterns), ""))
    return rows


def _measure_reader(
    reads: FileReads,
    node: NodeReads,
    ceiling: DiskRow,
    options: DiskBenchOptions,
    progress: Progress,
) -> ReaderRow:
    """Take turns; the order changes from round to round, so that none always comes first."""
    best = Pattern(*ceiling[:3])
    ways: list[Callable[[], Speed]] = [
        node.with_reader,
        node.with_preadv,
        lambda: reads.run(best, options.limit_s),
    ]
    speeds: list[list[Speed]] = [[], [], []]
    for done in range(options.rounds):
        progress(ProgressEvent("read node", done, options.rounds, "", "rounds"))
        for turn in range(len(ways)):
            way = (turn + done) % len(ways)
            speeds[way].append(ways[way]())
    progress(ProgressEvent("read node", options.rounds, options.rounds, "", "rounds"))
    reader, preadv, limit = ([speed.bytes_per_s for speed in one] for one in speeds)
    layout = node.files.layout
    return ReaderRow(
        kind="",
        bytes_per_s=median(reader),
        share_of_ceiling=median(r / c for r, c in zip(reader, limit, strict=True)),
        share_of_preadv=median(r / p for r, p in zip(reader, preadv, strict=True)),
        preadv_bytes_per_s=median(preadv),
        ceiling_bytes_per_s=median(limit),
        bytes=speeds[0][0].bytes,
        tokens=layout.tokens,
        layers=node.layers,
        chunk_tokens=layout.chunk_tokens,
        codec=layout.codec,
        threads=node.reader.options.threads,
        rounds=options.rounds,
    )


def _notes(
    options: DiskBenchOptions, files: NodeFiles, *, direct: bool, read_layers: int
) -> list[str]:
    """What a reader of the figures has to know."""
    notes, folder = [], options.folder
    if not direct:
        why = "as asked" if not options.direct else f"as O_DIRECT does not work in {folder}"
        notes.append(
            f"reads went through the page cache, {why}; it was told to drop the files before "
            "each measurement"
        )
    if (kind := file_system(folder)) in IN_MEMORY:
        notes.append(
            f"{folder} lies in memory ({kind}): these are not a disk's figures; give --dir a "
            "folder on the disk"
        )
    if files.group.stat().st_dev != folder.stat().st_dev:
        notes.append(f"{folder} and the store lie on different file systems: shares mean little")
    left_out = [size for size in options.request_bytes if size > options.size_bytes]
    if left_out:
        sizes = ", ".join(f"{size >> 10} KiB" for size in left_out)
        notes.append(f"requests of {sizes} are larger than the test file and were left out")
    if read_layers < files.layout.shape.num_layers:
        notes.append(
            f"the reader read {read_layers} of the node's {files.layout.shape.num_layers} layers"
        )
    return notes
