"""Sidecars on disk: their bytes, reading them back, and what is wrong with them is always said."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import NamedTuple

import google_crc32c  # zarr's own dependency: an independent implementation
import numpy as np
import pytest
import torch
import zarr

from store.disk import layout as disk_layout
from store.disk import sidecar_writer
from store.disk.io import Arena, IOOptions
from store.disk.reader import ChunkReader
from store.disk.sidecar import (
    SidecarFiles,
    heads_room,
    open_sidecar,
    read_heads,
    read_sketch,
    scrub_sidecar,
)
from store.disk.sidecar_layout import (
    ProbeSpec,
    SidecarLayout,
    array_path,
    sidecar_attributes,
)
from store.disk.sidecar_writer import SidecarWriter, as_tensor
from store.errors import ChunkLoadError, InvalidValueError, StoreFullError
from store.identity import ModelIdentity
from store.index.rows import ProbeRow
from store.info import StoreInfo, new_info
from store.itf.sketch import Codes, quantise, unpack
from store.maintenance import tree_bytes
from store.types import KVShape
from tests.helpers import flip_bit

HEADS = ((0, 2), (1, 3))
SKETCH2, SKETCH4 = ProbeSpec(bits=2), ProbeSpec(bits=4)
PROBED = ProbeSpec(heads=HEADS)
SPECS = {"sketch2": SKETCH2, "sketch4": SKETCH4, "heads": PROBED}


class Node(NamedTuple):
    node_id: str
    start: int
    length: int
    digest: str


def info_of(dtype: str) -> StoreInfo:
    identity = ModelIdentity("test", 2, 8, 4, 16, 512, "{}", dtype, "{}", "w", "t")
    return new_info(identity, "test", 16, "none")


class Written(NamedTuple):
    """A sidecar on disk, the keys it was made of, and how to open it."""

    store: Path
    info: StoreInfo
    node: Node
    row: ProbeRow
    keys: list[np.ndarray]

    @property
    def shape(self) -> KVShape:
        return self.info.identity.shape

    @property
    def group(self) -> Path:
        return disk_layout.sidecar_dir(self.store, self.node.node_id, self.row.kind)

    def open(self) -> SidecarFiles:
        digest = self.info.identity.digest()
        return open_sidecar(self.store, self.row, self.node, self.info, digest)


def write(store: Path, spec: ProbeSpec, tokens: int = 130, dtype: str = "bfloat16") -> Written:
    info, node = info_of(dtype), Node("ab" * 10, 7, tokens, "digest")
    shape, rng = info.identity.shape, np.random.default_rng(tokens)
    numbers = torch.from_numpy(rng.standard_normal((2, tokens, 4, 16)).astype("<f4"))
    raw = numbers.to(shape.torch_dtype).view(torch.uint8).numpy().view(shape.np_dtype)
    keys = list(raw.reshape(2, tokens, 4, 16))
    target = disk_layout.sidecar_dir(store, node.node_id, spec.kind)
    attributes = sidecar_attributes(node, spec, info, info.identity.digest())
    writer = SidecarWriter(target, shape, tokens, spec, attributes)
    for layer, values in enumerate(keys):
        writer.add(layer, values)
    group = writer.finish()
    row = ProbeRow(node.node_id, spec.kind, group.digest, group.size_bytes, spec.detail)
    return Written(store, info, node, row, keys)


def codes_of(written: Written, layer: int, bits: int) -> Codes:
    return quantise(as_tensor(written.keys[layer], written.shape), bits)


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def reader(request):
    reader = ChunkReader(IOOptions(direct=request.param))
    yield reader
    reader.close()


@pytest.mark.parametrize("tokens", [1, 63, 64, 130])
@pytest.mark.parametrize("bits", [2, 4])
def test_plain_zarr_opens_a_sketch_as_the_format_page_says(bits, tokens, tmp_path: Path):
    written = write(tmp_path, ProbeSpec(bits=bits), tokens)
    group, groups = zarr.open_group(written.group, mode="r"), -(-tokens // 64)
    assert group["code"].shape == (2, groups * 64 * bits // 8, 4, 16)
    assert group["scale"].shape == group["zero"].shape == (2, groups, 4, 16)
    assert (group["code"].dtype, group["scale"].dtype) == (np.uint8, np.float16)
    for layer in range(2):
        expected = codes_of(written, layer, bits)
        for name, values in zip(Codes._fields, expected, strict=True):
            np.testing.assert_array_equal(group[name][layer], values.numpy())
    assert group.attrs["bits"] == bits
    assert group.attrs["first_position"] == 7
    assert group.attrs["kv_dtype"] == "bfloat16"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_plain_zarr_opens_probe_heads(dtype, tmp_path: Path):
    written = write(tmp_path, PROBED, dtype=dtype)
    group = zarr.open_group(written.group, mode="r")
    for layer, keys in enumerate(written.keys):
        np.testing.assert_array_equal(group["k"][layer], keys[:, HEADS[layer]])
    assert group.attrs["heads"] == [[0, 2], [1, 3]]


def test_a_layer_of_a_sketch_is_one_range_of_each_file_and_its_checksum_covers_all_three(
    tmp_path: Path,
):
    written = write(tmp_path, SKETCH2)
    parts = {name: array_path(written.group, name).read_bytes() for name in Codes._fields}
    for layer in range(2):
        checked = b""
        for name, values in zip(Codes._fields, codes_of(written, layer, 2), strict=True):
            size = values.numpy().nbytes
            assert parts[name][layer * size : (layer + 1) * size] == values.numpy().tobytes()
            checked += values.numpy().tobytes()
        assert google_crc32c.value(checked) == written.open().crc[layer]
    assert len(parts["code"]) == 2 * 48 * 4 * 16


@pytest.mark.parametrize("tokens", [1, 64, 130])
def test_a_sketch_comes_back_whole(tokens, reader, tmp_path: Path):
    written = write(tmp_path, SKETCH4, tokens)
    data = read_sketch(written.open(), reader)
    stored = sum(part.nbytes for part in (data.code, data.scale, data.zero))
    for layer in range(2):
        expected = codes_of(written, layer, 4)
        for name, values in zip(Codes._fields, expected, strict=True):
            np.testing.assert_array_equal(getattr(data, name)[layer], values.numpy())
        read = Codes(*(torch.from_numpy(a[layer]) for a in (data.code, data.scale, data.zero)))
        np.testing.assert_array_equal(unpack(read, 4), unpack(expected, 4))
    assert data.count.wanted_bytes == stored
    assert stored <= data.count.read_bytes < stored + 3 * 4096
    assert stored <= data.bytes < stored + 5 * 4096


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_probe_heads_come_back_layer_by_layer_into_the_memory_given(dtype, reader, tmp_path: Path):
    written = write(tmp_path, PROBED, dtype=dtype)
    files = written.open()
    room = Arena(heads_room(files))
    for layer in (1, 0):
        keys, count = read_heads(files, reader, layer, room.view)
        np.testing.assert_array_equal(keys, written.keys[layer][:, HEADS[layer]])
        assert np.shares_memory(keys, room.array)
        assert count.wanted_bytes == keys.nbytes + 4
        other, _ = read_heads(files, reader, layer)
        np.testing.assert_array_equal(other, keys)


def damaged(written: Written, array: str, how: str) -> Path:
    """Damage one file of a sidecar and return it."""
    group = written.group
    path = {
        "zarr.json": group / "zarr.json",
        "crc": disk_layout.small_array_path(group, "crc"),
    }.get(array) or array_path(group, array, 1 if array == "k" else 0)
    if how == "missing":
        path.unlink()
    elif how == "short":
        path.write_bytes(path.read_bytes()[:-5])
    else:
        flip_bit(path, path.stat().st_size - 6)
    return path


def read_all(written: Written, reader: ChunkReader) -> None:
    files = written.open()
    if files.kind == "sketch":
        read_sketch(files, reader)
        return
    for layer in range(2):
        read_heads(files, reader, layer)


CASES = [
    (kind, array, how)
    for kind, arrays in (
        ("sketch2", ("code", "scale", "zero", "crc", "zarr.json")),
        ("heads", ("k", "zarr.json")),
    )
    for array in arrays
    for how in ("corrupt", "short", "missing")
]


@pytest.mark.parametrize(("kind", "array", "how"), CASES)
def test_whatever_is_wrong_is_a_failed_load_of_the_sidecar(
    kind, array, how, reader, tmp_path: Path
):
    written = write(tmp_path, SPECS[kind])
    damaged(written, array, how)
    with pytest.raises(ChunkLoadError) as caught:
        read_all(written, reader)
    error = caught.value
    assert (error.node_id, error.array) == (written.node.node_id, f"probe-{written.row.kind}")
    assert error.first_token == 7
    # A description or a checksum table that ends early is damage; rows that do are a short read.
    expected = "corrupt" if how == "short" and array in ("zarr.json", "crc") else how
    assert error.reason.startswith(expected)
    if array == "k":
        assert error.layer == 1


@pytest.mark.parametrize(("kind", "array", "how"), CASES)
def test_a_scrub_finds_it_too(kind, array, how, tmp_path: Path):
    written = write(tmp_path, SPECS[kind])
    size, bad = scrub_sidecar(written.open())
    assert (size, bad) == (written.open().layout.data_bytes, [])
    if array in ("zarr.json", "crc"):
        return  # checked when it is opened
    damaged(written, array, how)
    _, bad = scrub_sidecar(written.open())
    assert len(bad) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [("start", 8), ("digest", "other"), ("node_id", "cd" * 10)],
)
def test_a_sidecar_of_another_node_is_refused(field, value, tmp_path: Path):
    written = write(tmp_path, SKETCH2)
    node = written.node._replace(**{field: value})
    with pytest.raises(ChunkLoadError, match="corrupt"):
        written._replace(node=node).open()


@pytest.mark.parametrize(
    ("spec", "other"), [(SKETCH2, SKETCH4), (PROBED, ProbeSpec(heads=((0, 1), (1, 3))))]
)
def test_a_sidecar_other_than_the_catalog_means_is_refused(spec, other, tmp_path: Path):
    written = write(tmp_path, spec)
    meant = written.row._replace(detail=other.detail)
    with pytest.raises(ChunkLoadError, match="corrupt"):
        written._replace(row=meant).open()
    with pytest.raises(ChunkLoadError, match="digest"):
        written._replace(row=written.row._replace(digest="0")).open()


def test_writing_again_replaces_what_is_there_and_leaves_nothing_beside_it(tmp_path: Path):
    first = write(tmp_path, SKETCH2)
    second = write(tmp_path, SKETCH4)
    assert [path.name for path in second.group.parent.iterdir()] == ["probe-sketch"]
    assert second.open().bits == 4
    with pytest.raises(ChunkLoadError):
        first.open()


def test_a_writer_that_fails_leaves_what_was_there(tmp_path: Path):
    written = write(tmp_path, SKETCH2)
    writer = SidecarWriter(written.group, written.shape, 130, SKETCH4, {})
    writer.add(0, written.keys[0])
    writer.discard()
    assert [path.name for path in written.group.parent.iterdir()] == ["probe-sketch"]
    assert written.open().bits == 2


def test_keys_of_heads_put_in_place_since_the_sidecar_was_opened_are_refused(
    reader, tmp_path: Path
):
    # Their checksum is right, and they are other heads' keys.
    opened = write(tmp_path, ProbeSpec(heads=((0,), (1,)))).open()
    read_heads(opened, reader, 0)
    write(tmp_path, ProbeSpec(heads=((2,), (3,))))
    with pytest.raises(ChunkLoadError, match="replaced"):
        read_heads(opened, reader, 0)


def test_a_writer_that_cannot_even_begin_leaves_nothing_beside_its_place(
    tmp_path: Path, monkeypatch
):
    written = write(tmp_path, SKETCH2)

    def full(path: Path, *_: object) -> None:
        path.mkdir()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sidecar_writer, "create_sidecar", full)
    with pytest.raises(StoreFullError):
        SidecarWriter(written.group, written.shape, 130, SKETCH4, {})
    assert [path.name for path in written.group.parent.iterdir()] == ["probe-sketch"]


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("tokens", [1, 130, 500])
def test_bytes_foreseen_are_those_written(name, tokens, tmp_path: Path):
    written = write(tmp_path, SPECS[name], tokens)
    layout = SidecarLayout.of(written.shape, tokens, SPECS[name])
    assert written.row.bytes == layout.disk_bytes
    assert written.row.bytes == tree_bytes(written.group) + 4096


@pytest.mark.parametrize(("kv_heads", "probed"), [(32, 3), (8, 2), (3, 1), (1, 1)])
def test_probe_heads_take_their_share_of_kv_exactly(kv_heads, probed):
    shape = KVShape(4, 32, kv_heads, 64, "bfloat16")
    spec = ProbeSpec(heads=(tuple(range(probed)),) * 4)
    share = SidecarLayout.of(shape, 1000, spec).data_bytes / (1000 * shape.token_bytes)
    assert share == probed / (2 * kv_heads)


@pytest.mark.parametrize("tokens", [1024, 2048, 4096, 4876])
def test_a_2_bit_sketch_takes_less_than_85_thousandths_of_kv_in_16_bit(tokens):
    shape = KVShape(30, 9, 3, 64, "bfloat16")
    layout = SidecarLayout.of(shape, tokens, SKETCH2)
    assert layout.data_bytes <= 0.085 * tokens * shape.token_bytes
    assert layout.data_bytes >= 0.078 * tokens * shape.token_bytes


@pytest.mark.parametrize(
    "heads",
    [((0,),), ((0,), (0, 1)), ((0,), (4,)), ((1, 0), (0, 1)), ((0, 0), (0, 1)), ((), ())],
    ids=["a layer lacks", "not alike", "out of range", "not ascending", "twice", "none"],
)
def test_heads_that_a_model_cannot_have_are_refused(heads):
    with pytest.raises(InvalidValueError):
        ProbeSpec(heads=heads).check(info_of("float32").identity.shape)


def test_bits_that_are_not_known_are_refused():
    with pytest.raises(InvalidValueError, match="3 bits"):
        ProbeSpec(bits=3).check(info_of("float32").identity.shape)


@pytest.mark.parametrize("name", SPECS)
def test_what_a_sidecar_is_made_of_comes_back_from_its_text(name):
    spec = SPECS[name]
    assert ProbeSpec.from_json(json.loads(spec.detail)) == spec
