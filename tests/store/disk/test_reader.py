"""Reading chunks: plans, alignment, counting, emulation, and every way to fail."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.disk import layout as disk_layout
from store.disk import reader as reader_module
from store.disk.io import REQUEST_S, Arena, IOOptions, Throttle, probe_direct
from store.disk.layout import NodeLayout
from store.disk.reader import ChunkReader, NodeFiles, ShardRead
from store.disk.runs import ChunkRuns, group_runs, merge_chunks, one_run, run_chunks
from store.disk.writer import write_generation
from store.errors import ChunkLoadError, InvalidValueError
from store.types import KVShape
from tests.helpers import flip_bit

SHAPE = KVShape(num_layers=1, num_heads=3, num_kv_heads=3, head_dim=64, dtype="bfloat16")


@given(st.sets(st.integers(0, 60)))
def test_merged_runs_cover_every_chunk_and_no_other(chunks):
    runs = merge_chunks(np.array(sorted(chunks), dtype=np.int64))
    assert run_chunks(runs).tolist() == sorted(chunks)
    assert all(stop < begin for stop, begin in zip(runs.stop[:-1], runs.start[1:], strict=True))


@given(st.sets(st.integers(0, 60), min_size=1), st.integers(0, 3), st.integers(1, 70))
def test_groups_of_runs_bridge_only_small_gaps_and_end(chunks, gap, span):
    runs = merge_chunks(np.array(sorted(chunks), dtype=np.int64))
    bounds = group_runs(runs, gap, span).tolist()
    assert (bounds[0], bounds[-1]) == (0, len(runs.start))
    firsts = set(bounds[:-1])
    assert len(firsts) == len(bounds) - 1, "no group is empty"
    for run in range(1, len(runs.start)):
        begin, before = int(runs.start[run]), int(runs.start[run - 1])
        bridged = begin - int(runs.stop[run - 1]) <= gap and begin // span == before // span
        assert bridged == (run not in firsts)


def node(tmp_path: Path, tokens: int, codec: str = "none") -> tuple[NodeFiles, np.ndarray]:
    layout = NodeLayout(SHAPE, tokens, 16, codec)
    rng = np.random.default_rng(tokens)
    k, v = (rng.integers(0, 1 << 16, (tokens, 3, 64), dtype=np.uint16) for _ in range(2))
    group = tmp_path / "nodes" / "x" / "g0"
    write_generation(group, layout, np.arange(tokens, dtype=np.uint32), lambda _: (k, v), {})
    dims = (1, layout.num_chunks)
    crcs = [disk_layout.read_small(group, f"{a}_crc", "<u4", dims) for a in "kv"]
    return NodeFiles("x", group, layout, 100, *crcs), k


@pytest.mark.parametrize("codec", ["none", "zstd", "lz4"])
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("offset_rows", [0, 1, 13])
@pytest.mark.parametrize("span", [(0, 7), (2, 5), (3, 4), (6, 7)])
def test_rows_arrive_whatever_the_alignment(codec, direct, offset_rows, span, tmp_path: Path):
    files, k = node(tmp_path, 100, codec)
    first, stop = span
    wanted = k[first * 16 : min(stop * 16, 100)]
    arena = Arena(1 << 20)
    arena.poison()
    begin = offset_rows * SHAPE.row_bytes
    into = arena.view[begin : begin + wanted.nbytes]
    reader = ChunkReader(IOOptions(direct=direct))
    count = reader.read(ShardRead(files, "k", 0, one_run(first, stop), into, wanted.nbytes))
    got = arena.array[begin : begin + wanted.nbytes].view(np.uint16).reshape(wanted.shape)
    np.testing.assert_array_equal(got, wanted)
    after = arena.array[begin + wanted.nbytes :]
    assert (arena.array[:begin] == 0xFF).all()
    assert (after == 0xFF).all(), "bytes beyond the caller's room were written"
    assert count.read_bytes >= count.wanted_bytes > 0
    if not direct and codec == "none":
        assert count.read_bytes == count.wanted_bytes


@pytest.mark.parametrize("needed", [512, 4096])
@pytest.mark.parametrize("size", [132, 600, 5000, 20000])
def test_a_file_too_short_to_tell_is_read_in_the_largest_blocks(
    size, needed, tmp_path: Path, monkeypatch
):
    path = tmp_path / "file"
    path.write_bytes(bytes(size))
    if not probe_direct(path):
        pytest.skip("the file system of the temporary folder does not take O_DIRECT")

    def strict(fd: int, buffers: list[memoryview], at: int) -> int:
        """A device of ``needed`` bytes per block: nothing is refused past the end of a file."""
        if at < size and (at % needed or len(buffers[0]) % needed):
            raise OSError(errno.EINVAL, "Invalid argument")
        return max(0, min(len(buffers[0]), size - at))

    monkeypatch.setattr(os, "preadv", strict)
    assert probe_direct(path) == (4096 if size < 1024 else needed)


def test_counted_bytes_are_what_the_kernel_read(tmp_path: Path):
    files, _ = node(tmp_path, 4096)
    if not probe_direct(disk_layout.shard_path(files.group, "k", 0)):
        pytest.skip("the file system of the temporary folder does not take O_DIRECT")
    reader = ChunkReader(IOOptions())
    arena = Arena(4 << 20)

    def kernel() -> int:
        lines = Path("/proc/self/io").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("read_bytes")))

    reader.read(ShardRead(files, "k", 0, one_run(0, 16), arena.view, 256 * SHAPE.row_bytes))
    before = kernel()
    count = reader.read(
        ShardRead(files, "k", 0, one_run(0, 256), arena.view, 4096 * SHAPE.row_bytes)
    )
    assert abs(kernel() - before - count.read_bytes) <= 0.02 * count.read_bytes
    assert count.read_bytes <= 1.02 * count.wanted_bytes


def read_scattered(files: NodeFiles, runs: ChunkRuns, options: IOOptions):
    """Chunks of runs back to back, as rows, and what the read cost."""
    size, arena = files.layout.chunk_bytes, Arena(1 << 20)
    arena.poison()
    wanted = len(run_chunks(runs)) * size
    count = ChunkReader(options).read(ShardRead(files, "k", 0, runs, arena.view[:wanted], wanted))
    assert (arena.array[wanted:] == 0xFF).all(), "bytes beyond the caller's room were written"
    return arena.array[:wanted].view(np.uint16).reshape(-1, 3, 64), count


SOME = ChunkRuns(np.array([1, 4, 12, 25]), np.array([3, 5, 14, 32]))


@pytest.mark.parametrize("codec", ["none", "lz4"])
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("bridge", [0, 1, 2, 7, 11, 100])
def test_chunks_between_runs_save_requests_and_go_nowhere(codec, direct, bridge, tmp_path: Path):
    files, k = node(tmp_path, 512, codec)
    direct_works = bool(probe_direct(disk_layout.shard_path(files.group, "k", 0)))
    options = IOOptions(direct=direct, bridge_bytes=bridge * files.layout.chunk_bytes)
    got, count = read_scattered(files, SOME, options)
    wanted = (run_chunks(SOME)[:, None] * 16 + np.arange(16)).reshape(-1)
    np.testing.assert_array_equal(got, k[wanted])
    if codec == "none":
        assert count.wanted_bytes == len(wanted) * SHAPE.row_bytes
    if codec == "none" and direct and direct_works:
        gaps = np.array([1, 7, 11])
        bridged = gaps[gaps <= bridge]
        assert count.requests == 4 - len(bridged)
        between = int(bridged.sum()) * files.layout.chunk_bytes
        assert count.read_bytes == count.wanted_bytes + between


def test_a_request_that_comes_back_short_is_read_to_its_end(tmp_path: Path, monkeypatch):
    files, k = node(tmp_path, 512)
    if not probe_direct(disk_layout.shard_path(files.group, "k", 0)):
        pytest.skip("the file system of the temporary folder does not take O_DIRECT")
    whole = os.preadv

    def partly(fd: int, buffers, at: int) -> int:
        """Only the first block of what was asked for."""
        return whole(fd, [buffers[0][:4096]], at)

    monkeypatch.setattr(os, "preadv", partly)
    got, _ = read_scattered(files, SOME, IOOptions())
    wanted = (run_chunks(SOME)[:, None] * 16 + np.arange(16)).reshape(-1)
    np.testing.assert_array_equal(got, k[wanted])


def test_a_flipped_bit_between_runs_is_nobodys_error(tmp_path: Path):
    files, _ = node(tmp_path, 512)
    flip_bit(disk_layout.shard_path(files.group, "k", 0), 3 * files.layout.chunk_bytes + 5)
    read_scattered(files, SOME, IOOptions())
    flip_bit(disk_layout.shard_path(files.group, "k", 0), 4 * files.layout.chunk_bytes + 5)
    with pytest.raises(ChunkLoadError, match="layer 0 chunk 4: corrupt"):
        read_scattered(files, SOME, IOOptions())


def test_an_emulated_device_bridges_what_it_transfers_in_a_requests_time():
    assert IOOptions().bridged_bytes == IOOptions().bridge_bytes
    assert IOOptions(bandwidth_bytes_s=1e12).bridged_bytes == IOOptions().bridge_bytes
    slow = IOOptions(bandwidth_bytes_s=1e6, latency_s=0.001)
    assert slow.bridged_bytes == pytest.approx(1e6 * (0.001 + REQUEST_S), abs=1)
    assert IOOptions(bridge_bytes=0).bridged_bytes == 0


def read_all(files: NodeFiles, options: IOOptions | None = None) -> None:
    arena = Arena(1 << 20)
    reader = ChunkReader(options or IOOptions())
    reader.read(ShardRead(files, "k", 0, one_run(0, files.layout.num_chunks), arena.view, 1))


@pytest.mark.parametrize("direct", [True, False])
def test_a_flipped_bit_names_its_chunk_and_first_token(direct, tmp_path: Path):
    files, _ = node(tmp_path, 100)
    flip_bit(disk_layout.shard_path(files.group, "k", 0), 3 * files.layout.chunk_bytes + 5)
    with pytest.raises(ChunkLoadError, match="layer 0 chunk 3: corrupt") as caught:
        read_all(files, IOOptions(direct=direct))
    assert caught.value.first_token == 100 + 3 * 16


def test_a_truncated_shard_is_short(tmp_path: Path):
    files, _ = node(tmp_path, 100)
    path = disk_layout.shard_path(files.group, "k", 0)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ChunkLoadError, match=r"short|corrupt"):
        read_all(files)


def test_a_missing_shard_is_missing_not_zeros(tmp_path: Path):
    files, _ = node(tmp_path, 100)
    disk_layout.shard_path(files.group, "k", 0).unlink()
    with pytest.raises(ChunkLoadError, match="missing"):
        read_all(files)


def test_an_io_error_becomes_a_load_error(tmp_path: Path, monkeypatch):
    files, _ = node(tmp_path, 100)

    def broken(*_args):
        raise OSError(errno.EIO, "injected")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(ChunkLoadError, match=f"io error {errno.EIO}"):
        read_all(files)


def test_short_reads_by_the_kernel_are_continued(tmp_path: Path, monkeypatch):
    files, k = node(tmp_path, 100)
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, v, at: real(fd, [v[0][: 1 << 12]], at))
    arena = Arena(1 << 20)
    task = ShardRead(files, "k", 0, one_run(0, 7), arena.view, k.nbytes)
    ChunkReader(IOOptions()).read(task)
    np.testing.assert_array_equal(arena.array[: k.nbytes].view(np.uint16), k.reshape(-1))


def test_falling_back_from_direct_io_is_announced_once(tmp_path: Path, monkeypatch):
    files, _ = node(tmp_path, 100)
    monkeypatch.setattr(reader_module, "probe_direct", lambda _path: 0)
    reader = ChunkReader(IOOptions())
    arena = Arena(1 << 20)
    for _ in range(2):
        reader.read(ShardRead(files, "k", 0, one_run(0, 7), arena.view, 1))
    assert reader.note is not None
    assert "page cache" in reader.note


def test_an_emulated_device_is_reserved_in_turn():
    throttle = Throttle(1000.0, 0.5)
    begin = time.perf_counter()
    first, second = throttle.reserve(1000), throttle.reserve(2000)
    assert first - begin == pytest.approx(1.5, abs=0.2)
    assert second - first == pytest.approx(2.0, abs=0.01)
    assert not Throttle(None, 0.0).active


def test_an_emulated_device_is_used_for_every_request(tmp_path: Path, monkeypatch):
    files, _ = node(tmp_path, 100)
    sizes: list[int] = []
    monkeypatch.setattr(Throttle, "reserve", lambda self, size: sizes.append(size) or 0.0)
    read_all(files, IOOptions(bandwidth_bytes_s=1e12))
    assert sum(sizes) >= files.layout.data_bytes


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("threads", 0),
        ("bandwidth_bytes_s", 0.0),
        ("latency_s", -1.0),
        ("deadline_s", 0.0),
        ("bridge_bytes", -1),
    ],
)
def test_impossible_options_are_refused(option, value):
    with pytest.raises(InvalidValueError, match=str(value)):
        IOOptions(**{option: value})
