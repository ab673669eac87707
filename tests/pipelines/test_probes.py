"""Changing probe layouts of a store, choosing heads, and building with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipelines.build import build_store, plan_build
from pipelines.mend import mend, mend_probes
from pipelines.probes import (
    NoCalibrationError,
    best_heads,
    calibrate_heads,
    default_head_count,
    finish_probes,
    first_heads,
    match_probes,
    plan_probes,
)
from pipelines.progress import ProgressEvent
from store.disk import layout as disk_layout
from store.disk.sidecar_layout import array_path
from store.disk.verify import BadChunk
from store.engine import PrefixStore
from store.itf.importance import column_sums
from store.probes import ProbeSettings
from store.types import KVShape
from tests.helpers import compute_and_store, flip_bit, group_of, ids_of, new_store, open_store
from tests.pipelines.test_build import Listed, with_shared
from tests.tiny import make_tiny

MODEL = make_tiny("gqa")
MHA = make_tiny("mha")
SKETCH = ProbeSettings(2)
BOTH = ProbeSettings(2, first_heads(MODEL.shape))


def filled(path: Path, settings: ProbeSettings, prefixes: int = 2) -> PrefixStore:
    """A store of prefixes that share a beginning, one node more than there are prefixes."""
    store = new_store(path, MODEL)
    store.set_probes(settings)
    build_store(store, MODEL, Listed(*with_shared(prefixes)))
    return store


def kinds(store: PrefixStore) -> set[tuple[str, str]]:
    return {(row.kind, row.detail) for row in store.probe_rows()}


def shape_of(kv_heads: int) -> KVShape:
    return KVShape(2, 32, kv_heads, 64, "bfloat16")


@pytest.mark.parametrize(("kv_heads", "count"), [(32, 3), (12, 3), (8, 2), (4, 1), (3, 1), (1, 1)])
def test_the_default_is_the_published_three_heads_or_fewer(kv_heads, count):
    shape = shape_of(kv_heads)
    assert default_head_count(shape) == count
    assert first_heads(shape) == (tuple(range(count)),) * 2
    assert first_heads(shape, 1) == ((0,), (0,))


def test_nodes_are_made_to_match_the_setting_and_left_alone_once_they_do(tmp_path: Path):
    events: list[ProgressEvent] = []
    with filled(tmp_path / "kv", ProbeSettings()) as store:
        nodes = len(store.nodes())
        store.set_probes(BOTH)
        planned = plan_probes(store, BOTH)
        assert (len(planned.add), planned.drop) == (2 * nodes, [])
        report = match_probes(store, events.append)
        assert (report.nodes, report.added, report.dropped) == (nodes, 2 * nodes, 0)
        assert report.bytes_written == planned.bytes == sum(r.bytes for r in store.probe_rows())
        assert [event.done for event in events] == list(range(2 * nodes + 1))
        assert events[-1].total == 2 * nodes
        again = match_probes(store)
        assert (again.added, again.dropped, again.bytes_written) == (0, 0, 0)
        store.set_probes(ProbeSettings(4))
        report = match_probes(store)
        assert (report.added, report.dropped) == (nodes, nodes)
        assert kinds(store) == {("sketch", '{"bits":4}')}
        store.set_probes(ProbeSettings())
        assert match_probes(store).dropped == nodes
        assert store.probe_rows() == []


def test_what_was_stopped_goes_on_where_it_was(tmp_path: Path):
    with filled(tmp_path / "kv", ProbeSettings()) as store:
        store.set_probes(SKETCH)

        def stop(event: ProgressEvent) -> None:
            if event.done == 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            match_probes(store, stop)
        assert len(store.probe_rows()) == 2
        assert store.verify().bad == []
    with open_store(tmp_path / "kv", MODEL) as store:
        assert match_probes(store).added == len(store.nodes()) - 2


def test_a_node_whose_keys_are_damaged_is_left_without_and_said(tmp_path: Path):
    with filled(tmp_path / "kv", ProbeSettings()) as store:
        bad = store.nodes()[1].node_id
        flip_bit(disk_layout.shard_path(group_of(store, bad), "k", 1), 7)
        store.set_probes(SKETCH)
        report = match_probes(store)
        assert report.added == len(store.nodes()) - 1
        assert list(report.failures) == [bad]
        assert bad in report.warnings[0]
        assert [row.node_id for row in store.quarantined()] == [bad]


def test_damaged_and_missing_sidecars_are_written_again_without_a_model(tmp_path: Path):
    with filled(tmp_path / "kv", BOTH) as store:
        first, second, third = (row.node_id for row in store.nodes())
        flip_bit(array_path(disk_layout.sidecar_dir(store.path, first, "sketch"), "zero"), 7)
        flip_bit(array_path(disk_layout.sidecar_dir(store.path, second, "heads"), "k"), 7)
        store.drop_probe(third, "heads")
        bad = store.verify().bad
        assert {(place.node, place.array) for place in bad} == {
            (first, "probe-sketch"),
            (second, "probe-heads"),
        }
        assert mend_probes(store, bad).added == 3
        assert store.verify().bad == []
        assert store.quarantined() == []
        assert len(store.probe_rows()) == 6


def test_a_damaged_sidecar_of_a_node_that_is_gone_is_left_alone(tmp_path: Path):
    with filled(tmp_path / "kv", SKETCH) as store:
        gone = BadChunk("0" * 20, "probe-sketch", 0, -1, "checksum differs")
        assert mend_probes(store, [gone]).added == 0


def test_a_node_damaged_in_keys_and_sidecar_is_mended_whole(tmp_path: Path):
    with filled(tmp_path / "kv", SKETCH) as store:
        name = store.nodes()[0].node_id
        flip_bit(disk_layout.shard_path(group_of(store, name), "k", 1), 7)
        flip_bit(array_path(disk_layout.sidecar_dir(store.path, name, "sketch"), "code"), 7)
        bad = store.verify().bad
        assert mend(store, MODEL, bad).nodes == [name]
        assert mend_probes(store, store.verify().bad).failures == {}
        assert store.verify().bad == []
        assert len(store.probe_rows()) == len(store.nodes())


def importance(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows)


def test_the_head_that_tells_best_what_matters_to_all_is_chosen_first():
    # All heads together find tokens 6 and 7 most important, as head 1 does; head 0 finds others.
    sums = importance(
        [9.0, 9.0, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 8.0, 8.0],
        [0, 0, 0, 0, 0, 0, 3.0, 2.0],
    )
    assert best_heads([sums], 1) == (1,)
    assert best_heads([sums], 3) == (0, 1, 2)
    assert best_heads([sums], 9) == (0, 1, 2)


def test_ties_go_to_the_lower_head_and_every_prefix_counts():
    same = importance([1.0, 0, 0, 0], [1.0, 0, 0, 0], [1.0, 0, 0, 0])
    assert best_heads([same], 2) == (0, 1)
    one = importance([9.0, 0, 0, 0], [0, 1.0, 0, 0])
    two = importance([1.0, 0, 0, 0], [0, 9.0, 0, 0])
    assert best_heads([one, two], 1) == (0,)
    assert best_heads([one, two, two], 1) == (1,)


def test_calibration_uses_the_last_tokens_of_stored_prefixes_as_questions(tmp_path: Path):
    """Against the same choice made from keys and queries of a full forward."""
    ids = ids_of(100, seed=4)
    with new_store(tmp_path / "kv", MHA) as store:
        compute_and_store(store, MHA, ids, "p")
        seen = {}

        def see(layer, q, keys, k_new, scaling):
            seen[layer] = column_sums(q, keys, k_new, scaling)

        from pipelines.attention import prefill

        run, _ = store.begin(ids, max_new_tokens=0, max_match=75, observer=see, record=False)
        with run:
            prefill(MHA.model, run, ids[75:], logits=0)
        expected = tuple(best_heads([seen[layer]], 2) for layer in range(3))
        assert seen[0].shape == (4, 75)
        before = store.counters()
        assert calibrate_heads(store, MHA, 2) == expected
        assert calibrate_heads(store, MHA, 4) == ((0, 1, 2, 3),) * 3
        assert store.counters() == before


def test_calibration_needs_a_usable_prefix(tmp_path: Path):
    with new_store(tmp_path / "kv", MODEL) as store:
        compute_and_store(store, MODEL, ids_of(3), "short")
        with pytest.raises(NoCalibrationError, match="usable prefix of 4 tokens or more"):
            calibrate_heads(store, MODEL)
        compute_and_store(store, MODEL, ids_of(40, seed=1), "damaged")
        (row,) = (row for row in store.nodes() if row.length == 40)
        flip_bit(disk_layout.shard_path(group_of(store, row.node_id), "k", 0), 0)
        with pytest.raises(NoCalibrationError):
            calibrate_heads(store, MODEL)
        compute_and_store(store, MODEL, ids_of(40, seed=2), "sound")
        assert len(calibrate_heads(store, MODEL)) == 3


def test_a_build_chooses_heads_once_its_prefixes_are_stored(tmp_path: Path):
    with filled(tmp_path / "kv", ProbeSettings(2, None, calibrate=1)) as store:
        settings = store.probes()
        assert settings.calibrate is None
        assert settings.heads == calibrate_heads(store, MODEL, 1)
        assert len(store.probe_rows()) == 2 * len(store.nodes())
        assert finish_probes(store, MODEL) is None


def test_a_build_that_is_stopped_chooses_heads_when_it_is_run_again(tmp_path: Path):
    with new_store(tmp_path / "kv", MODEL) as store:
        store.set_probes(ProbeSettings(None, None, calibrate=1))

        def stop(event: ProgressEvent) -> None:
            if event.task == "calibrate heads":
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            build_store(store, MODEL, Listed(*with_shared(2)), progress=stop)
        assert store.probes().calibrate == 1
    with open_store(tmp_path / "kv", MODEL) as store:
        report = build_store(store, MODEL, Listed(*with_shared(2)))
        assert report.prefixes_reused == 2
        assert report.bytes == sum(row.bytes for row in store.probe_rows()) > 0


def test_an_empty_store_keeps_the_choice_for_later(tmp_path: Path):
    with new_store(tmp_path / "kv", MODEL) as store:
        store.set_probes(ProbeSettings(None, None, calibrate=1))
        report = build_store(store, MODEL, Listed())
        assert store.probes().calibrate == 1
        assert "no usable prefix" in " ".join(report.warnings)


def test_the_size_limit_and_the_plan_count_sidecars(tmp_path: Path):
    prefixes = with_shared(1)
    sizes = {}
    for settings in (ProbeSettings(), BOTH):
        plan = plan_build(MODEL, Listed(*prefixes), None, path=tmp_path, probes=settings)
        with new_store(tmp_path / f"kv{len(sizes)}", MODEL) as store:
            store.set_probes(settings)
            need = store.insert_bytes(prefixes[0])
            limit = store.used_bytes() + need + (128 << 10)
            short = build_store(store, MODEL, Listed(*prefixes), max_size_bytes=limit - 1)
            assert short.dropped == 1
            report = build_store(store, MODEL, Listed(*prefixes), max_size_bytes=limit)
            assert report.dropped == 0
            assert report.bytes == need
            assert store.size_bytes() <= limit
        sizes[settings] = (plan.bytes, need)
    assert sizes[BOTH] > sizes[ProbeSettings()]


def test_a_setting_that_changes_between_builds_changes_new_nodes_alone(tmp_path: Path):
    with filled(tmp_path / "kv", SKETCH) as store:
        store.set_probes(replace(SKETCH, sketch_bits=4))
        compute_and_store(store, MODEL, ids_of(40, seed=5), "new")
        assert kinds(store) == {("sketch", '{"bits":2}'), ("sketch", '{"bits":4}')}
        assert match_probes(store).added == 3
