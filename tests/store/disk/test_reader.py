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
from store.disk.io import Arena, IOOptions, Throttle, probe_direct
from store.disk.layout import NodeLayout
from store.disk.reader import ChunkReader, NodeFiles, ShardRead
from store.disk.runs import merge_chunks, one_run
from store.disk.writer import write_generation
from store.errors import ChunkLoadError, InvalidValueError
from store.types import KVShape
from tests.helpers import flip_bit

SHAPE = KVShape(num_layers=1, num_heads=3, num_kv_heads=3, head_dim=64, dtype="bfloat16")


@given(st.sets(st.integers(0, 60)), st.integers(0, 3))
def test_merged_runs_cover_every_chunk_and_bridge_only_small_gaps(chunks, gap):
    runs = merge_chunks(np.array(sorted(chunks), dtype=np.int64), gap)
    covered = [c for a, b in zip(runs.start, runs.stop, strict=True) for c in range(a, b)]
    assert set(covered) >= chunks
    assert len(covered) == len(set(covered))
    between = zip(runs.stop[:-1], runs.start[1:], strict=True)
    assert all(begin - stop > gap for stop, begin in between)
    # No run begins or ends with a chunk nobody asked for.
    assert all(a in chunks and b - 1 in chunks for a, b in zip(runs.start, runs.stop, strict=True))


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
    [("threads", 0), ("bandwidth_bytes_s", 0.0), ("latency_s", -1.0), ("deadline_s", 0.0)],
)
def test_impossible_options_are_refused(option, value):
    with pytest.raises(InvalidValueError, match=str(value)):
        IOOptions(**{option: value})
