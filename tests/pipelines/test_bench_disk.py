"""`impress bench disk`: what is read, how shares come about, and that nothing is left behind."""

from __future__ import annotations

import errno
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipelines import bench_disk, bench_folder, bench_reads
from pipelines.bench_disk import DiskBenchOptions, DiskReport, DiskRow
from pipelines.bench_reads import FileReads, NodeReads, Pattern, Speed
from pipelines.progress import ProgressEvent, silent
from store.disk.io import POISON, IOOptions, pread_full
from store.disk.layout import NodeLayout
from store.engine import PrefixStore
from store.errors import (
    ChunkLoadError,
    InvalidValueError,
    PrefixNotFoundError,
    StoreFullError,
)
from store.types import KVShape
from tests.helpers import flip_bit, group_of, ids_of, new_store, put
from tests.tiny import make_tiny

SIZE = 200_000
SMALL = {"size_bytes": SIZE, "request_bytes": (4096, 16384), "depths": (1, 3), "rounds": 3}
SHAPE = KVShape(num_layers=2, num_heads=4, num_kv_heads=3, head_dim=20, dtype="bfloat16")


def measure(folder: Path, store: PrefixStore | None = None, **options: Any) -> DiskReport:
    return bench_disk.bench_disk(DiskBenchOptions(folder, **{**SMALL, **options}), store)


@pytest.fixture
def kv(tmp_path: Path) -> Iterator[PrefixStore]:
    """A store of two prefixes that share nothing: the second is the larger node."""
    model = make_tiny("gqa")
    with new_store(tmp_path / "kv", model) as store:
        put(store, model, ids_of(20, seed=1), name="small")
        put(store, model, ids_of(70, seed=2), name="large")
        yield store


def test_every_pattern_has_a_row_and_the_ceiling_is_the_best_of_them(tmp_path: Path) -> None:
    report = measure(tmp_path)
    patterns = [row[:3] for row in report.rows]
    assert patterns == [
        (kind, size, depth)
        for kind in ("sequential", "random")
        for size in (4096, 16384)
        for depth in (1, 3)
    ]
    assert all(math.isfinite(row.bytes_per_s) and row.bytes_per_s > 0 for row in report.rows)
    assert report.ceiling.bytes_per_s == max(row.bytes_per_s for row in report.rows)
    assert report.reader.kind == "synthetic"
    assert report.reader.share_of_ceiling > 0
    assert report.reader.share_of_preadv > 0
    assert list(tmp_path.iterdir()) == []


def test_the_synthetic_node_is_about_as_large_as_the_file_and_never_larger_than_a_prefix() -> None:
    def tokens(size: int) -> int:
        options = DiskBenchOptions(Path(), size_bytes=size)
        return bench_disk._synthetic_layout(options).tokens

    assert (tokens(10**5), tokens(10**6), tokens(10**9)) == (16, 43, 4096)


def test_requests_larger_than_the_file_are_left_out_and_named(tmp_path: Path) -> None:
    report = measure(tmp_path, request_bytes=(4096, 1 << 20))
    assert {row.request_bytes for row in report.rows} == {4096}
    assert any("1024 KiB" in note and "left out" in note for note in report.notes)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("kind", ["sequential", "random"])
@pytest.mark.parametrize("depth", [1, 5])
def test_a_pass_reads_every_request_of_the_file_once(
    kind: str, depth: int, direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = tmp_path / "reads", {}
    bench_reads.write_test_file(path, SIZE, silent)
    content, order = path.read_bytes(), []

    def noting(fd: int, view: memoryview, offset: int, need: int, block: int) -> int:
        done = pread_full(fd, view, offset, need, block)
        order.append(offset)
        seen[offset] = bytes(view[:need])
        return done

    monkeypatch.setattr(bench_reads, "pread_full", noting)
    pattern = Pattern(kind, 16384, depth)
    block = (bench_disk.probe_direct(path) or 1) if direct else 1
    with bench_reads.opened(path, block) as fd:
        speed = FileReads(fd, SIZE, block, [pattern]).run(pattern, 60.0)
    expected = list(range(0, SIZE - 16384 + 1, 16384))
    assert len(content) == SIZE
    assert sorted(order) == expected
    assert all(seen[offset] == content[offset : offset + 16384] for offset in expected)
    assert speed.bytes == len(expected) * 16384
    if depth == 1:
        assert (order == expected) == (kind == "sequential")


def test_no_request_starts_after_the_limit(tmp_path: Path) -> None:
    path, pattern = tmp_path / "reads", Pattern("sequential", 4096, 1)
    bench_reads.write_test_file(path, SIZE, silent)
    with bench_reads.opened(path, 1) as fd:
        assert FileReads(fd, SIZE, 1, [pattern]).run(pattern, 1e-9).bytes == 4096


@pytest.mark.parametrize("way", ["with_reader", "with_preadv"])
@pytest.mark.parametrize("direct", [True, False])
def test_both_ways_deliver_the_rows_of_the_node(way: str, direct: bool, tmp_path: Path) -> None:
    layout = NodeLayout(SHAPE, 70, 16, "none")
    files = bench_reads.write_random_node(tmp_path, layout, silent)
    with NodeReads(files, IOOptions(direct=direct)) as reads:
        reads._arena.array.fill(POISON)
        speed = getattr(reads, way)()
        for layer in range(SHAPE.num_layers):
            for which, rows in enumerate(bench_reads.random_layer(SHAPE, 70, layer)):
                got = reads.place(2 * layer + which)[: rows.nbytes]
                assert bytes(got) == rows.tobytes()
    assert speed.bytes == 2 * SHAPE.num_layers * layout.data_bytes
    assert speed.seconds > 0


def test_a_codec_is_compared_by_the_bytes_stored(tmp_path: Path) -> None:
    files = bench_reads.write_random_node(tmp_path, NodeLayout(SHAPE, 70, 16, "zstd"), silent)
    with NodeReads(files, IOOptions()) as reads:
        assert reads.with_reader().bytes == reads.with_preadv().bytes
        reads.with_reader()
        rows = bench_reads.random_layer(SHAPE, 70, 1)[1]
        assert bytes(reads.place(3)[: rows.nbytes]) == rows.tobytes()


def test_of_a_node_too_large_for_memory_only_the_first_layers_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_reads, "NODE_BYTES", 1)
    report = measure(tmp_path)
    assert report.reader.layers == 1
    assert any("1 of the node's 30 layers" in note for note in report.notes)


def test_shares_are_medians_of_each_rounds_ratio() -> None:
    def turns(*rates: int) -> Iterator[Speed]:
        return iter([Speed(rate, 1.0) for rate in rates])

    reader, preadv, ceiling = turns(8, 1, 4), turns(10, 2, 4), turns(10, 10, 20)
    called: list[str] = []

    def way(name: str, speeds: Iterator[Speed]) -> Speed:
        called.append(name)
        return next(speeds)

    node = SimpleNamespace(
        with_reader=lambda: way("reader", reader),
        with_preadv=lambda: way("preadv", preadv),
        files=SimpleNamespace(layout=NodeLayout(SHAPE, 70, 16, "none")),
        layers=2,
        reader=SimpleNamespace(options=IOOptions()),
    )
    reads = SimpleNamespace(run=lambda pattern, limit_s: way("ceiling", ceiling))
    best, options = DiskRow("random", 4096, 3, 99.0), DiskBenchOptions(Path(), rounds=3)
    row = bench_disk._measure_reader(reads, node, best, options, silent)  # type: ignore[arg-type]
    # Ratios 0.8, 0.5, 1.0 and 0.8, 0.1, 0.2; the ratios of the medians would be 1.0 and 0.4.
    assert (row.share_of_preadv, row.share_of_ceiling) == (0.8, 0.2)
    assert (row.bytes_per_s, row.preadv_bytes_per_s, row.ceiling_bytes_per_s) == (4, 4, 10)
    assert sorted(called[:3]) == sorted(called[3:6]) == ["ceiling", "preadv", "reader"]
    assert {called[0], called[3], called[6]} == {"ceiling", "preadv", "reader"}


def test_with_a_store_the_reader_reads_its_largest_node(kv: PrefixStore, tmp_path: Path) -> None:
    before = sorted(path.name for path in kv.path.iterdir())
    report = measure(kv.path, kv)
    assert (report.reader.kind, report.reader.tokens) == ("node", 70)
    assert report.reader.bytes == 2 * 3 * 5 * 16 * kv.shape.row_bytes
    assert sorted(path.name for path in kv.path.iterdir()) == before


def test_a_damaged_node_is_named_before_anything_long_begins(
    kv: PrefixStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest = max(kv.nodes(), key=lambda row: row.length)
    flip_bit(group_of(kv, largest.node_id) / "v" / "c.1.0.0.0", 7)
    monkeypatch.setattr(FileReads, "run", lambda *_: pytest.fail("measured the file first"))
    with pytest.raises(ChunkLoadError, match=f"{largest.node_id} array v layer 1 chunk 0"):
        measure(tmp_path, kv)
    assert [path.name for path in tmp_path.iterdir()] == ["kv"]


def test_a_missing_shard_is_a_load_error(kv: PrefixStore, tmp_path: Path) -> None:
    largest = max(kv.nodes(), key=lambda row: row.length)
    for path in group_of(kv, largest.node_id).glob("[kv]/c.*"):
        path.unlink()
    with pytest.raises(ChunkLoadError, match="missing"):
        measure(tmp_path, kv)


def test_an_empty_store_says_what_to_do(tmp_path: Path) -> None:
    with (
        new_store(tmp_path / "kv", make_tiny("gqa")) as store,
        pytest.raises(PrefixNotFoundError, match="build-store"),
    ):
        measure(tmp_path, store)


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()])
def test_temporary_files_go_away_whatever_happens(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there: list[int] = []

    def fail(*_: object) -> Speed:
        there.append(len(list(tmp_path.rglob("c.*"))))
        raise error

    monkeypatch.setattr(FileReads, "run", fail)
    with pytest.raises(type(error)):
        measure(tmp_path)
    assert there[0] > 0, "the node was there"
    assert list(tmp_path.iterdir()) == []


def test_the_test_file_has_no_name_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, names = FileReads.run, []

    def look(self: FileReads, pattern: Pattern, limit_s: float) -> Speed:
        names.extend(tmp_path.rglob("reads"))
        return run(self, pattern, limit_s)

    monkeypatch.setattr(FileReads, "run", look)
    measure(tmp_path)
    assert names == []


@pytest.mark.parametrize("full", [OSError(errno.ENOSPC, "full"), StoreFullError("no space left")])
def test_a_disk_that_runs_full_is_one_line_and_leaves_nothing(
    full: OSError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise full

    monkeypatch.setattr(bench_disk, "write_random_node", fail)
    with pytest.raises(StoreFullError, match="ran full; give a smaller --size"):
        measure(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Room for the file but not for the synthetic node beside it.
    monkeypatch.setattr(
        bench_folder.shutil, "disk_usage", lambda _: SimpleNamespace(free=SIZE + 1000)
    )
    monkeypatch.setattr(bench_disk, "write_test_file", lambda *_: pytest.fail("wrote"))
    with pytest.raises(StoreFullError, match=r"0\.2 MB free, of 0\.8 MB.*--size"):
        measure(tmp_path)


@pytest.mark.parametrize("name", ["missing", "file"])
def test_a_folder_that_cannot_hold_files_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidValueError, match=f"{name} .*--dir"):
        measure(tmp_path / name)


@pytest.mark.parametrize(
    "wrong",
    [
        {"size_bytes": 4095},
        {"request_bytes": (5000,)},
        {"request_bytes": (0,)},
        {"depths": (0,)},
        {"rounds": 0},
        {"limit_s": 0.0},
    ],
)
def test_values_out_of_range_are_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError):
        DiskBenchOptions(tmp_path, **{**SMALL, **wrong})


def test_without_direct_io_the_report_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("store.disk.reader.probe_direct", lambda _: 0)
    monkeypatch.setattr(bench_disk, "probe_direct", lambda _: 0)
    fallen_back, asked = measure(tmp_path), measure(tmp_path, direct=False)
    assert (fallen_back.direct, asked.direct) == (False, False)
    assert any("O_DIRECT does not work" in note for note in fallen_back.notes)
    assert any("as asked" in note for note in asked.notes)


def test_figures_of_a_file_system_in_memory_are_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [
        SimpleNamespace(mountpoint="/", fstype="ext4"),
        SimpleNamespace(mountpoint=str(tmp_path), fstype="tmpfs"),
        SimpleNamespace(mountpoint=f"{tmp_path}x", fstype="xfs"),
    ]
    monkeypatch.setattr(bench_folder.psutil, "disk_partitions", lambda all: parts)
    report = measure(tmp_path)
    assert report.file_system == "tmpfs"
    assert any("lies in memory" in note for note in report.notes)
    assert bench_folder.file_system(Path("/")) == "ext4"


def test_progress_of_every_part_ends(tmp_path: Path) -> None:
    last: dict[str, ProgressEvent] = {}
    bench_disk.bench_disk(
        DiskBenchOptions(tmp_path, **SMALL), None, lambda event: last.update({event.task: event})
    )
    assert set(last) == {"write test file", "write node", "read test file", "read node"}
    assert all(event.done == event.total for event in last.values())


def test_layers_and_arrays_of_the_synthetic_node_differ() -> None:
    k, v = bench_reads.random_layer(SHAPE, 64, 0)
    other, _ = bench_reads.random_layer(SHAPE, 64, 1)
    assert k.shape == (64, 3, 20)
    assert not np.array_equal(k, v)
    assert not np.array_equal(k, other)
