"""``--explain``: the table and the JSON of hand-made layer reports."""

from __future__ import annotations

import json

import pytest

from impress_cli.explain import layer_rows, layer_table, layer_totals
from store.stats import LayerReport
from tests.cli.conftest import plain

#: A token's keys (or values) in one layer: 3 KV heads of 64 in 16 bits.
ROW_BYTES = 3 * 64 * 2
AGREED = LayerReport(
    layer=0,
    evidence="heads",
    jaccard=0.512,
    threshold=0.31,
    fell_back=False,
    sets=1,
    selected_tokens=1024,
    chunks=256,
    chunks_selected=128,
    chunks_read=256,
    loaded_tokens=2048,
    kept_tokens=2048,
    kv_bytes=256 * 16 * ROW_BYTES,
    probe_bytes=1_000_000,
)
FELL_BACK = AGREED._replace(
    layer=1,
    evidence="full",
    jaccard=0.2,
    fell_back=True,
    sets=3,
    chunks_read=256 + 200,
    chunks_selected=200,
    kv_bytes=456 * 16 * ROW_BYTES,
    host_chunks=7,
)
SKETCH = AGREED._replace(layer=2, evidence="sketch", jaccard=None, threshold=None, probe_bytes=0)


def test_the_table_has_a_line_per_layer_and_one_for_all() -> None:
    lines = [
        line.split()
        for line in plain(layer_table([AGREED, FELL_BACK, SKETCH], ROW_BYTES)).splitlines()
    ]
    by_layer = {line[0]: line[1:] for line in lines if line}
    first = "heads 0.51 0.31 no 1 024 128/256 256 0+0 1.57 MB 1.00 MB 2.00×"
    assert by_layer["0"] == first.split()
    second = "full 0.20 0.31 yes 3 × 1 024 200/256 456 0+7 2.80 MB 1.00 MB 3.56×"
    assert by_layer["1"] == second.split()
    third = "sketch n/a n/a no 1 024 128/256 256 0+0 1.57 MB 0 B 2.00×"
    assert by_layer["2"] == third.split()
    total = "mixed 0.36 1 3 072 456/768 968 0+7 5.95 MB 2.00 MB 2.52×"
    assert by_layer["all"] == total.split()


def test_amplification_is_bytes_read_over_bytes_of_the_selected_tokens() -> None:
    (row,) = layer_rows([AGREED], ROW_BYTES)
    assert row["amplification"] == 256 * 16 / (2 * 1024)
    assert set(row) == {*LayerReport._fields, "amplification"}
    none = AGREED._replace(selected_tokens=0, kv_bytes=0)
    assert layer_rows([none], ROW_BYTES)[0]["amplification"] is None
    assert "n/a" in plain(layer_table([none], ROW_BYTES))


def test_totals_are_sums_and_nothing_where_everything_was_loaded() -> None:
    totals = layer_totals([AGREED, FELL_BACK, SKETCH], ROW_BYTES)
    assert totals is not None
    assert (totals["fell_back"], totals["chunks_read"]) == (1, 968)
    assert totals["jaccard"] == pytest.approx((0.512 + 0.2) / 2)
    assert totals["probe_bytes"] == 2_000_000
    assert layer_totals([SKETCH], ROW_BYTES)["jaccard"] is None  # type: ignore[index]
    assert layer_totals([], ROW_BYTES) is None


def test_rows_and_totals_are_json() -> None:
    value = {"layers": layer_rows([AGREED], ROW_BYTES), "totals": layer_totals([AGREED], ROW_BYTES)}
    assert json.loads(json.dumps(value)) == value
