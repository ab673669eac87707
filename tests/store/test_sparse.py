"""Sparse runs on damaged, slow and hung data: a miss of KV or of evidence, never a wrong answer."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipelines.attention import prefill
from pipelines.generate import QueryOptions, first_logits
from pipelines.query_stats import Attempts
from store.disk import layout as disk_layout
from store.disk.reader import ChunkReader
from store.engine import PrefixStore
from store.errors import ChunkLoadError
from store.itf.options import SparseOptions
from tests.helpers import ask, compute_and_store, flip_bit, ids_of, new_store, open_store
from tests.sparse import masked_logits, worst_sparse
from tests.tiny import make_tiny

MODEL = make_tiny("gqa")
LAYERS = MODEL.shape.num_layers
PREFIX, ENDS = ids_of(300, seed=5), (70, 150, 300)
QUESTION = np.concatenate([[(PREFIX[0] + 1) % 256], ids_of(5, seed=3)]).astype(np.uint32)
IDS = np.concatenate([PREFIX, QUESTION])


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """A store of one prefix in three nodes, with both sidecars."""
    path = tmp_path_factory.mktemp("sound") / "kv"
    with new_store(path, MODEL, probes="both") as store:
        for end in ENDS:
            compute_and_store(store, MODEL, PREFIX[:end], f"to {end}")
    return path


@pytest.fixture
def copy(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "kv"))


def folder_of(store: PrefixStore, number: int) -> Path:
    """Folder of the node with this place on the prefix's path."""
    row = sorted(store.nodes(), key=lambda row: row.start)[number]
    return disk_layout.node_dir(store.path, row.node_id)


def answered(store: PrefixStore, options: SparseOptions) -> tuple[float, int, list[str], Attempts]:
    """Worst difference from the masked reference, tokens reused, evidence used, what it cost."""
    attempts = Attempts()
    run, match, logits = first_logits(
        store, MODEL, IDS, 2, QueryOptions(max_new_tokens=2, sparse=options), attempts
    )
    with run:
        # Where nothing was reused, nothing is masked.
        kept = [run.kept(layer) for layer in range(LAYERS)]
        expected = masked_logits(MODEL, IDS, kept, match.matched_len)[-1]
        used = [report.evidence for report in run.reports]
        return float((logits - expected).abs().max()), match.matched_len, used, attempts


def damage_every_chunk(folder: Path, array: str, layer: int) -> None:
    path = disk_layout.shard_path(folder / "g0", array, layer)
    raw = bytearray(path.read_bytes())
    for at in range(5, len(raw), 16 * MODEL.shape.row_bytes):
        raw[at] ^= 1
    path.write_bytes(raw)


DAMAGE: dict[str, tuple[int, Callable[[Path], None]]] = {
    "keys": (1, lambda folder: damage_every_chunk(folder, "k", 0)),
    "values": (2, lambda folder: damage_every_chunk(folder, "v", LAYERS - 1)),
    "missing": (1, lambda folder: disk_layout.shard_path(folder / "g0", "k", 2).unlink()),
    "checksums": (2, lambda folder: flip_bit(folder / "g0" / "k_crc" / "c.0.0", 3)),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize(
    ("evidence", "attend", "fallback"),
    [
        ("sketch", "loaded", "auto"),
        ("heads", "selected", "never"),
        ("heads", "loaded", "always"),
        ("full", "selected", "auto"),
        ("random", "loaded", "auto"),
    ],
)
def test_damaged_kv_shortens_what_is_reused(evidence, attend, fallback, damage, copy: Path):
    number, spoil = DAMAGE[damage]
    options = SparseOptions(retention=0.2, evidence=evidence, attend=attend, fallback=fallback)
    with open_store(copy, MODEL) as store:
        spoil(folder_of(store, number))
        for recovered in (1, 0):
            gap, reused, used, attempts = answered(store, options)
            assert gap <= 1e-4
            assert reused == ENDS[number - 1]
            assert used == ["full" if fallback == "always" else evidence] * LAYERS
            assert attempts.recovered == recovered


@pytest.mark.parametrize(
    ("evidence", "file"),
    [
        ("sketch", "probe-sketch/code/c.0.0.0.0"),
        ("sketch", "probe-sketch/zero/c.0.0.0.0"),
        ("heads", "probe-heads/k/c.0.0.0.0"),
        ("heads", f"probe-heads/k/c.{LAYERS - 1}.0.0.0"),
    ],
)
@pytest.mark.parametrize("how", ["flipped", "short", "gone"])
def test_a_damaged_sidecar_costs_evidence_and_no_token(evidence, file, how, copy: Path):
    options = SparseOptions(retention=0.2, evidence=evidence, fallback="never")
    with open_store(copy, MODEL) as store:
        path = folder_of(store, 1) / file
        if how == "flipped":
            flip_bit(path, 3)
        elif how == "short":
            path.write_bytes(path.read_bytes()[:-5])
        else:
            path.unlink()
        gap, reused, used, attempts = answered(store, options)
        assert gap <= 1e-4
        assert reused == 300
        assert used == ["full"] * LAYERS
        assert (attempts.recovered, len(attempts.reasons)) == (0, 1)
        assert store.quarantined() == []
        # The next query is told at once, and takes what every node still has.
        other = "heads" if evidence == "sketch" else "sketch"
        gap, reused, used, attempts = answered(
            store, SparseOptions(retention=0.2, fallback="never")
        )
        assert (reused, used, attempts.recovered) == (300, [other] * LAYERS, 0)
        assert gap <= 1e-4


def test_a_failed_try_counts_in_no_statistics(copy: Path):
    with open_store(copy, MODEL) as store:
        damage_every_chunk(folder_of(store, 2), "v", LAYERS - 1)
        _, reused, _, _ = answered(store, SparseOptions(retention=0.2, evidence="sketch"))
        assert reused == 150
        counts = {
            row.start: found.queries if (found := store.access.get(row.node_id, row.length)) else 0
            for row in store.nodes()
        }
        assert counts == {0: 1, 70: 1, 150: 0}


@pytest.mark.parametrize("record", [True, False])
def test_only_runs_that_ask_for_it_are_recorded(record, copy: Path):
    with open_store(copy, MODEL) as store:
        options = SparseOptions(retention=0.2)
        run, match = store.begin(IDS, max_new_tokens=1, sparse=options, record=record)
        with run:
            prefill(MODEL.model, run, IDS[match.matched_len :], logits=0)
        row = store.nodes()[0]
        assert (store.access.get(row.node_id, row.length) is not None) == record


@pytest.mark.parametrize("array", ["k", "v"])
def test_a_read_that_hangs_is_a_miss_and_its_memory_is_not_used_again(
    array, copy: Path, monkeypatch
):
    go, hung, read = threading.Event(), [], ChunkReader.read

    def slow(self, task):
        if task.array == array and task.layer == 1 and not hung:
            hung.append(task)
            go.wait(20)
        return read(self, task)

    monkeypatch.setattr(ChunkReader, "read", slow)
    with open_store(copy, MODEL, deadline_s=0.3, threads=2) as store:
        options = SparseOptions(retention=0.2)
        gap, reused, used, _ = answered(store, options)
        assert (reused, used) == (0, [])
        assert gap <= 1e-4
        written_late = np.frombuffer(hung[0].into, np.uint8)
        for arena in store._runs._arenas:
            assert not np.shares_memory(written_late, arena.array)
        go.set()
        gap, reused, _, _ = answered(store, options)
        assert reused == 300
        assert gap <= 1e-4


@pytest.mark.parametrize("kind", ["sketch", "heads"])
def test_evidence_that_hangs_leaves_all_keys(kind, copy: Path, monkeypatch):
    go, hung, read = threading.Event(), [], ChunkReader.read_file

    def slow(self, path, *rest):
        if f"probe-{kind}" in str(path) and not hung:
            hung.append(path)
            go.wait(20)
        return read(self, path, *rest)

    monkeypatch.setattr(ChunkReader, "read_file", slow)
    with open_store(copy, MODEL, deadline_s=0.3) as store:
        gap, reused, used, _ = answered(store, SparseOptions(retention=0.2, evidence=kind))
        assert gap <= 1e-4
        assert (reused, used) == (300, ["full"] * LAYERS)
        assert len(store.probe_rows()) == 6, "slow is not damaged"
        go.set()


def test_planned_bytes_are_the_counted_ones(copy: Path):
    with open_store(copy, MODEL) as store:
        for evidence in ("heads", "full", "random"):
            for fallback in ("never", "always"):
                options = SparseOptions(retention=0.05, evidence=evidence, fallback=fallback)
                given = ask(store, MODEL, PREFIX, QUESTION, sparse=options)
                planned = sum(layer.kv_bytes + layer.probe_bytes for layer in given.layers)
                assert sum(given.stats.bytes.values()) == planned
                assert given.stats.read_bytes >= given.stats.bytes["disk"]


def test_a_prefix_of_one_token_and_a_retention_that_rounds_to_nothing(tmp_path: Path):
    with new_store(tmp_path / "kv", MODEL, probes="both") as store:
        compute_and_store(store, MODEL, PREFIX[:1], "one")
        for evidence in ("sketch", "heads", "full", "random"):
            for attend in ("loaded", "selected"):
                options = SparseOptions(retention=1e-12, evidence=evidence, attend=attend)
                gap, run = worst_sparse(store, MODEL, PREFIX[:1], QUESTION, options)
                assert gap <= 1e-4
                assert run.reports[0].kept_tokens == 1


@pytest.mark.parametrize("attend", ["loaded", "selected"])
def test_a_question_in_several_segments_keeps_the_rows_of_the_first(
    attend, copy: Path, monkeypatch
):
    monkeypatch.setattr("pipelines.attention.long_segment_tokens", lambda _: 150)
    question = ids_of(400, seed=6)
    question[0] = (PREFIX[0] + 1) % 256
    ids = np.concatenate([PREFIX, question])
    with open_store(copy, MODEL) as store:
        options = SparseOptions(retention=0.05, attend=attend)
        run, match = store.begin(ids, max_new_tokens=1, sparse=options)
        with run:
            logits = prefill(MODEL.model, run, ids[match.matched_len :], logits=1)
            kept = [run.kept(layer) for layer in range(LAYERS)]
            assert len(run.reports) == LAYERS
            expected = masked_logits(MODEL, ids, kept, 300)[-1]
            assert float((logits[0] - expected).abs().max()) <= 1e-4


def test_nothing_of_a_sparse_run_can_be_taken_for_storing(copy: Path):
    with open_store(copy, MODEL) as store:
        run, match = store.begin(IDS, max_new_tokens=1, sparse=SparseOptions(retention=0.99))
        with run:
            prefill(MODEL.model, run, IDS[match.matched_len :], logits=0)
            with pytest.raises(AssertionError):
                run.kv(0, 300, len(IDS))


def test_a_sidecar_error_names_the_array(copy: Path):
    with open_store(copy, MODEL) as store:
        flip_bit(folder_of(store, 0) / "probe-heads" / "k" / "c.1.0.0.0", 3)
        run, match = store.begin(
            IDS, max_new_tokens=1, sparse=SparseOptions(retention=0.2, evidence="heads")
        )
        with run, pytest.raises(ChunkLoadError, match="array probe-heads layer 1"):
            prefill(MODEL.model, run, IDS[match.matched_len :], logits=0)
