"""The bytes on disk: any Zarr v3 reader reads them, and golden stores stay readable."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import zarr

from store.disk import layout as disk_layout
from store.disk.io import Arena
from store.disk.layout import CODECS, NodeLayout
from store.disk.writer import shard_room, write_generation, write_shard
from store.errors import FormatVersionError, NotAStoreError
from store.types import KVShape
from tests.helpers import ask, group_of, ids_of, new_store, open_store, put, worst
from tests.tiny import make_tiny

GOLDEN = Path(__file__).parents[2] / "golden"
SHAPE = KVShape(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, dtype="float32")


def rows(tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((tokens, 2, 8)).astype("<f4")


def write(path: Path, tokens: int, codec: str = "none", fill=rows) -> list:
    layers = [(fill(tokens, 2 * i), fill(tokens, 2 * i + 1)) for i in range(2)]
    layout = NodeLayout(SHAPE, tokens, 16, codec)
    write_generation(path, layout, ids_of(tokens), lambda i: layers[i], {"a": 1})
    return layers


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("tokens", [1, 16, 17, 100])
def test_plain_zarr_reads_every_array(codec, tokens, tmp_path: Path):
    layers = write(tmp_path / "n" / "x" / "g0", tokens, codec)
    group = zarr.open_group(tmp_path / "n" / "x" / "g0", mode="r")
    for layer, (k, v) in enumerate(layers):
        np.testing.assert_array_equal(group["k"][layer], k)
        np.testing.assert_array_equal(group["v"][layer], v)
    np.testing.assert_array_equal(group["tokens"][:], ids_of(tokens))
    np.testing.assert_array_equal(group["rows"][:], np.tile(np.arange(tokens), (2, 1)))
    assert group["k_crc"].shape == (2, -(-tokens // 16))
    assert dict(group.attrs) == {"a": 1}


@pytest.mark.parametrize("codec", CODECS)
def test_all_zero_chunks_are_stored_and_read(codec, tmp_path: Path):
    path = tmp_path / "n" / "x" / "g0"
    write(path, 40, codec, fill=lambda tokens, _seed: np.zeros((tokens, 2, 8), "<f4"))
    assert not zarr.open_group(path, mode="r")["k"][:].any()
    raw = disk_layout.shard_path(path, "k", 0).read_bytes()
    index = disk_layout.unpack_index(raw[-(3 * 16 + 4) :])
    assert (index[:, 1] > 0).all()


def test_an_uncompressed_shard_is_what_zarr_itself_writes(tmp_path: Path):
    path = tmp_path / "n" / "x" / "g0"
    layers = write(path, 40)
    other = tmp_path / "other"
    disk_layout.create_group(other, NodeLayout(SHAPE, 40, 16, "none"), {})
    zarr.open_group(other, mode="r+")["k"][0] = layers[0][0]
    ours = disk_layout.shard_path(path, "k", 0).read_bytes()
    assert ours == disk_layout.shard_path(other, "k", 0).read_bytes()


def test_crc_table_is_of_the_stored_chunks(tmp_path: Path):
    import google_crc32c  # zarr's own dependency: an independent implementation

    layout = NodeLayout(SHAPE, 20, 16, "none")
    crcs = write_shard(tmp_path / "shard", layout, rows(20), Arena(shard_room(layout)))
    raw = (tmp_path / "shard").read_bytes()
    size = layout.chunk_bytes
    assert [google_crc32c.value(raw[i * size : (i + 1) * size]) for i in range(2)] == list(crcs)


def test_no_folder_holds_more_than_a_few_hundred_names(tmp_path: Path):
    model = make_tiny("gqa")
    with new_store(tmp_path / "kv", model) as store:
        for seed in range(30):
            put(store, model, ids_of(20, seed=seed))
        nodes = {group_of(store, row.node_id).parent for row in store.nodes()}
        assert len(nodes) >= 30
        assert len({path.parent.name for path in nodes}) > 20
        assert all(len(path.parent.name) == 2 for path in nodes)


def test_any_zarr_reader_gets_a_stored_prefix_by_its_documented_path(tmp_path: Path):
    model = make_tiny("gqa")
    with new_store(tmp_path / "kv", model) as store:
        put(store, model, ids_of(50))
        group = zarr.open_group(group_of(store), mode="r")
        k, _ = store.node_rows(store.nodes()[0].node_id).layer(1)
        np.testing.assert_array_equal(group["k"][1], k)
        assert group.attrs["kv_dtype"] == "float32"


@pytest.mark.parametrize("folder", sorted(path.name for path in GOLDEN.glob("format-*")))
def test_golden_stores_answer_as_they_did(folder, tmp_path: Path):
    import shutil

    store_path = tmp_path / "kv"
    shutil.copytree(GOLDEN / folder, store_path)
    expected = json.loads((store_path / "expected.json").read_text())
    info = json.loads((store_path / "impress.json").read_text())
    model = make_tiny("gqa", dtype=info["dtype"])
    with open_store(store_path, model) as store:
        assert store.verify().bad == []
        (row, other) = store.prefixes()
        assert [row.name, other.name] == ["first", "second"]
        given = ask(store, model, store.prefix_ids(other), ids_of(5, seed=1))
        assert given.stats.reused_tokens == other.length
        if info["dtype"] == "float32":
            assert worst(given, model, store.prefix_ids(other), ids_of(5, seed=1)) <= 1e-4
        np.testing.assert_allclose(given.logits[:8].float(), expected["logits"], atol=0.05)


def test_golden_stores_of_format_1_exist():
    assert {path.name for path in GOLDEN.glob("format-1-*")} >= {"format-1-none", "format-1-zstd"}


def edit_info(path: Path, **changes) -> None:
    data = json.loads((path / "impress.json").read_text())
    (path / "impress.json").write_text(json.dumps(data | changes))


def test_a_newer_format_is_refused_with_both_versions(tmp_path: Path):
    model = make_tiny("gqa")
    new_store(tmp_path / "kv", model).close()
    edit_info(tmp_path / "kv", format_version=2)
    with pytest.raises(FormatVersionError, match=r"format 2, this version reads format 1"):
        open_store(tmp_path / "kv", model)


def test_a_damaged_description_is_named(tmp_path: Path):
    model = make_tiny("gqa")
    new_store(tmp_path / "kv", model).close()
    edit_info(tmp_path / "kv", identity={"architecture": "x"})
    with pytest.raises(NotAStoreError, match=r"impress\.json is damaged"):
        open_store(tmp_path / "kv", model)
