"""Moving statistics of nodes: what a run changes, what a file keeps, what damage costs."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from store import access, node_access
from store.access import AccessStats, NodeAccess
from store.types import KVShape
from tests.helpers import flip_bit

LAYERS, TOKENS = 3, 20
SHAPE = KVShape(LAYERS, 4, 2, 8, "float32")
NODE, OTHER, THIRD = "ab" + "0" * 18, "ab" + "1" * 18, "cd" + "2" * 18

Run = tuple[np.ndarray | None, np.ndarray, np.ndarray]


def run_of(used: int = TOKENS, seed: int = 0) -> Run:
    """Importance of any scale, selected and loaded tokens of a run; [LAYERS, used] each."""
    generator = np.random.default_rng(seed)
    table = (LAYERS, used)
    importance = 5 * generator.random(table, dtype=np.float32)
    loaded = generator.random(table) < 0.6
    return importance, loaded & (generator.random(table) < 0.5), loaded


def stats_of(store: Path | None = None, *, runs: int = 0, **options: bool | int) -> AccessStats:
    stats = AccessStats(store, SHAPE, **options)
    for seed in range(runs):
        stats.record(NODE, TOKENS, *run_of(seed=seed))
    return stats


def file_of(store: Path, node_id: str = NODE) -> Path:
    return store / "stats" / node_id[:2] / f"{node_id}.npy"


def same(a: NodeAccess | None, b: NodeAccess | None) -> bool:
    assert a is not None
    assert b is not None
    counts = (a.queries, a.observed_tokens) == (b.queries, b.observed_tokens)
    tables = ("importance", "selected", "loaded")
    return counts and all(np.array_equal(getattr(a, t), getattr(b, t)) for t in tables)


def test_a_node_that_no_query_used_has_no_statistics(tmp_path: Path) -> None:
    assert stats_of().get(NODE, TOKENS) is None
    stats = stats_of(tmp_path)
    assert stats.get(NODE, TOKENS) is None
    stats.flush()
    assert list(tmp_path.iterdir()) == []
    assert stats.bytes() == 0


def test_the_first_run_sets_the_importance_and_later_ones_move_it() -> None:
    stats = stats_of()
    expected = np.zeros((LAYERS, TOKENS))
    for seed in range(5):
        importance, selected, loaded = run_of(seed=seed)
        stats.record(NODE, TOKENS, importance, selected, loaded)
        latest = importance / importance.sum(1, keepdims=True)
        expected = latest if seed == 0 else 0.8 * expected + 0.2 * latest
        found = stats.get(NODE, TOKENS)
        assert found is not None
        assert found.importance.dtype == np.float32
        np.testing.assert_allclose(found.importance, expected, rtol=1e-5)
        np.testing.assert_allclose(found.importance.sum(1), 1, rtol=1e-5)


def test_runs_selected_and_loaded_tokens_are_counted() -> None:
    found = stats_of(runs=4).get(NODE, TOKENS)
    assert found is not None
    assert (found.queries, found.observed_tokens) == (4, TOKENS)
    for at, counts in ((1, found.selected), (2, found.loaded)):
        assert counts.dtype == np.uint32
        assert np.array_equal(counts, sum(run_of(seed=seed)[at].astype(int) for seed in range(4)))


def test_what_was_got_does_not_change_and_cannot_be_changed() -> None:
    stats = stats_of(runs=1)
    before = stats.get(NODE, TOKENS)
    assert before is not None
    kept = before.importance.copy()
    stats.record(NODE, TOKENS, *run_of(seed=9))
    assert np.array_equal(before.importance, kept)
    with pytest.raises(ValueError, match="read-only"):
        before.selected[0, 0] = 7


def test_tokens_that_a_run_did_not_reach_keep_their_statistics() -> None:
    stats = stats_of(runs=2)
    before = stats.get(NODE, TOKENS)
    stats.record(NODE, TOKENS, *run_of(used=6, seed=5))
    after = stats.get(NODE, TOKENS)
    assert before is not None
    assert after is not None
    assert after.queries == 3
    for name in ("importance", "selected", "loaded"):
        old, new = getattr(before, name), getattr(after, name)
        assert np.array_equal(new[:, 6:], old[:, 6:])
        assert not np.array_equal(new[:, :6], old[:, :6])
    # The first tokens divide anew what they held together: no more, no less.
    np.testing.assert_allclose(after.importance.sum(1), 1, rtol=1e-5)


def test_the_order_of_tokens_not_reached_stands_against_many_short_runs() -> None:
    stats = stats_of()
    importance = np.ones((LAYERS, TOKENS), np.float32)
    importance[:, 15] = 30
    everything = np.ones((LAYERS, TOKENS), bool)
    stats.record(NODE, TOKENS, importance, everything, everything)
    for _ in range(50):
        stats.record(NODE, TOKENS, importance[:, :4], everything[:, :4], everything[:, :4])
    found = stats.get(NODE, TOKENS)
    assert found is not None
    assert (found.importance.argmax(1) == 15).all()


def test_a_short_first_run_sets_its_tokens_and_the_next_one_the_rest() -> None:
    stats = stats_of()
    short, whole = run_of(used=5, seed=1), run_of(seed=2)
    stats.record(NODE, TOKENS, *short)
    found = stats.get(NODE, TOKENS)
    assert found is not None
    assert found.observed_tokens == 5
    np.testing.assert_allclose(found.importance.sum(1), 5 / TOKENS, rtol=1e-5)
    assert (found.importance[:, 5:] == 0).all()
    stats.record(NODE, TOKENS, *whole)
    after = stats.get(NODE, TOKENS)
    assert after is not None
    assert after.observed_tokens == TOKENS
    latest = whole[0] / whole[0].sum(1, keepdims=True)
    np.testing.assert_allclose(after.importance[:, 5:], latest[:, 5:], rtol=1e-5)
    blended = 0.8 * found.importance[:, :5] + 0.2 * latest[:, :5]
    np.testing.assert_allclose(after.importance[:, :5], blended, rtol=1e-5)


def test_a_longer_short_run_gives_new_tokens_their_part_of_an_even_share() -> None:
    stats = stats_of()
    stats.record(NODE, TOKENS, *run_of(used=5, seed=1))
    longer = run_of(used=8, seed=2)
    stats.record(NODE, TOKENS, *longer)
    found = stats.get(NODE, TOKENS)
    assert found is not None
    expected = 8 / TOKENS * longer[0] / longer[0].sum(1, keepdims=True)
    np.testing.assert_allclose(found.importance[:, 5:8], expected[:, 5:], rtol=1e-5)


def test_tokens_that_held_nothing_can_gain_importance_by_a_short_run() -> None:
    stats = stats_of()
    importance, selected, loaded = run_of(seed=1)
    importance[1] = 0
    stats.record(NODE, TOKENS, importance, selected, loaded)
    stats.record(NODE, TOKENS, *run_of(used=5, seed=2))
    found = stats.get(NODE, TOKENS)
    assert found is not None
    assert found.importance[1].sum() == pytest.approx(0.2 * 5 / TOKENS)


def test_a_run_without_importance_changes_only_the_counts() -> None:
    stats = stats_of(runs=2)
    before = stats.get(NODE, TOKENS)
    _, selected, loaded = run_of(seed=7)
    stats.record(NODE, TOKENS, None, selected, loaded)
    after = stats.get(NODE, TOKENS)
    assert before is not None
    assert after is not None
    assert np.array_equal(after.importance, before.importance)
    assert np.array_equal(after.loaded, before.loaded + loaded)
    assert after.queries == 3
    fresh = stats_of()
    fresh.record(NODE, TOKENS, None, selected, loaded)
    found = fresh.get(NODE, TOKENS)
    assert found is not None
    assert found.observed_tokens == 0


@pytest.mark.parametrize("nothing", [0.0, np.nan, np.inf])
def test_a_layer_without_a_finite_sum_is_left_out(nothing: float) -> None:
    stats = stats_of(runs=1)
    before = stats.get(NODE, TOKENS)
    importance, selected, loaded = run_of(seed=3)
    assert importance is not None
    importance[1] = nothing
    stats.record(NODE, TOKENS, importance, selected, loaded)
    after = stats.get(NODE, TOKENS)
    assert before is not None
    assert after is not None
    assert np.array_equal(after.importance[1], before.importance[1])
    assert not np.array_equal(after.importance[[0, 2]], before.importance[[0, 2]])
    assert np.isfinite(after.importance).all()


@settings(deadline=None)
@given(
    used=st.lists(st.integers(1, TOKENS), min_size=1, max_size=12),
    at=st.none() | st.integers(1, TOKENS - 1),
)
def test_any_runs_leave_shares_that_add_up(used: list[int], at: int | None) -> None:
    stats = stats_of()
    for seed, count in enumerate(used):
        stats.record(NODE, TOKENS, *run_of(count, seed))
    found = stats.get(NODE, TOKENS)
    assert found is not None
    assert found.observed_tokens == max(used)
    assert found.queries == len(used)
    assert (found.importance[:, max(used) :] == 0).all()
    assert (found.importance[:, : max(used)] > 0).all()
    assert np.isfinite(found.importance).all()
    for half in found.split(at) if at else ():
        share = half.observed_tokens / half.tokens
        np.testing.assert_allclose(half.importance.sum(1), share, rtol=1e-4)


def test_flushed_statistics_come_back_the_same(tmp_path: Path) -> None:
    stats = stats_of(tmp_path, runs=3)
    stats.record(THIRD, 7, *run_of(used=4))
    stats.flush()
    again = stats_of(tmp_path)
    assert same(again.get(NODE, TOKENS), stats.get(NODE, TOKENS))
    assert same(again.get(THIRD, 7), stats.get(THIRD, 7))
    again.record(NODE, TOKENS, *run_of(seed=3))
    assert same(again.get(NODE, TOKENS), stats_of(runs=4).get(NODE, TOKENS))


def test_nothing_is_written_before_a_flush_and_nothing_again_after_it(tmp_path: Path) -> None:
    stats = stats_of(tmp_path, runs=20)
    assert not file_of(tmp_path).exists()
    stats.flush()
    file_of(tmp_path).unlink()
    stats.flush()
    assert not file_of(tmp_path).exists()
    stats.record(NODE, TOKENS, *run_of())
    stats.flush()
    assert file_of(tmp_path).exists()


def test_numpy_reads_the_file(tmp_path: Path) -> None:
    stats = stats_of(tmp_path, runs=2)
    stats.flush()
    record = np.load(file_of(tmp_path), allow_pickle=False)
    found = stats.get(NODE, TOKENS)
    assert found is not None
    assert record.shape == ()
    assert record["queries"] == 2
    for name in ("importance", "selected", "loaded"):
        assert np.array_equal(record[name], getattr(found, name))
    # In the file the data begin at a multiple of 64, as numpy's own do.
    assert (file_of(tmp_path).stat().st_size - record.dtype.itemsize) % 64 == 0


def write_npy(path: Path, array: np.ndarray, **options: bool) -> None:
    with path.open("wb") as handle:
        np.save(handle, array, **options)


def damage(path: Path, kind: str) -> None:
    size = path.stat().st_size
    if kind == "empty":
        path.write_bytes(b"")
    elif kind == "torn header":
        os.truncate(path, 40)
    elif kind == "torn":
        os.truncate(path, size - 5)
    elif kind == "longer":
        path.write_bytes(path.read_bytes() + b"\0")
    elif kind == "zeros":
        path.write_bytes(bytes(size))
    elif kind == "zeros after the header":
        path.write_bytes(path.read_bytes()[:512] + bytes(size - 512))
    elif kind == "text":
        path.write_text("importance", encoding="utf-8")
    elif kind == "another array":
        write_npy(path, np.arange(30))
    elif kind == "pickle":
        write_npy(path, np.array([{"importance": 1}]), allow_pickle=True)
    elif kind == "other layers":
        stats = AccessStats(path.parents[2], KVShape(LAYERS + 1, 4, 2, 8, "float32"))
        path.unlink()
        table = (LAYERS + 1, TOKENS)
        stats.record(NODE, TOKENS, None, np.ones(table, bool), np.ones(table, bool))
        stats.flush()
    elif kind == "other length":
        path.unlink()
        stats = stats_of(path.parents[2])
        stats.record(NODE, TOKENS + 1, *run_of())
        stats.flush()
    elif kind == "claims gigabytes":
        raw = path.read_bytes()
        path.write_bytes(raw.replace(b"(3, 20)", b"(3, 999999999)"))
    elif kind == "folder":
        path.unlink()
        path.mkdir()


KINDS = [
    "empty",
    "torn header",
    "torn",
    "longer",
    "zeros",
    "zeros after the header",
    "text",
    "another array",
    "pickle",
    "other layers",
    "other length",
    "claims gigabytes",
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_not_ours_or_not_whole_counts_as_none_and_is_replaced(
    tmp_path: Path, kind: str
) -> None:
    stats_of(tmp_path, runs=2).flush()
    damage(file_of(tmp_path), kind)
    stats = stats_of(tmp_path)
    assert stats.get(NODE, TOKENS) is None
    stats.record(NODE, TOKENS, *run_of())
    stats.flush()
    assert same(stats_of(tmp_path).get(NODE, TOKENS), stats_of(runs=1).get(NODE, TOKENS))


def test_no_flipped_bit_goes_unseen(tmp_path: Path) -> None:
    stats_of(tmp_path, runs=2).flush()
    path = file_of(tmp_path)
    size = path.stat().st_size
    for at in [*range(0, 400, 3), *range(400, size, 41), size - 1]:
        flip_bit(path, at)
        assert stats_of(tmp_path).get(NODE, TOKENS) is None, f"byte {at}"
        flip_bit(path, at)
    assert stats_of(tmp_path).get(NODE, TOKENS) is not None


def test_a_folder_in_the_place_of_a_file_is_lived_with(tmp_path: Path) -> None:
    stats_of(tmp_path, runs=1).flush()
    damage(file_of(tmp_path), "folder")
    stats = stats_of(tmp_path, runs=1)
    stats.flush()
    assert stats.get(NODE, TOKENS) is not None
    stats.remove(NODE)
    assert stats.get(NODE, TOKENS) is None
    assert stats.sweep(set()) == 0
    assert [path.name for path in file_of(tmp_path).parent.iterdir()] == [f"{NODE}.npy"]


def test_a_store_that_is_only_read_is_read_and_not_written(tmp_path: Path) -> None:
    stats_of(tmp_path, runs=1).flush()
    before = file_of(tmp_path).read_bytes()
    stats = stats_of(tmp_path, read_only=True)
    assert stats.get(NODE, TOKENS) is not None
    stats.record(NODE, TOKENS, *run_of(seed=1))
    stats.record(OTHER, TOKENS, *run_of())
    stats.flush()
    stats.split(OTHER, 5, THIRD, "ef" + "3" * 18)
    stats.remove(NODE)
    assert stats.sweep(set()) == 0
    assert file_of(tmp_path).read_bytes() == before
    assert len(list(tmp_path.rglob("*.npy"))) == 1


def test_a_full_disk_is_said_once_and_the_statistics_are_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    stats = stats_of(tmp_path, runs=2)
    stats.record(OTHER, TOKENS, *run_of())
    tried = []

    def full(path: Path, target: Path) -> None:
        tried.append(target)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        stats.flush()
        stats.flush()
        stats.split(OTHER, 5, THIRD, "ef" + "3" * 18)
    assert len(caplog.records) == 1
    assert "were not written: [Errno 28] No space left" in caplog.text
    assert len(tried) == 4  # one a flush, as the second node would fail just so; two of the split
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    stats.flush()
    assert same(stats_of(tmp_path).get(NODE, TOKENS), stats.get(NODE, TOKENS))
    assert same(stats_of(tmp_path).get(THIRD, 5), stats.get(THIRD, 5))


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "stats").write_text("in the way", encoding="utf-8")
    stats = stats_of(tmp_path, runs=1)
    stats.flush()
    stats.remove(OTHER)
    assert stats.sweep({NODE}) == 0
    assert stats.bytes() == 0
    assert stats.get(NODE, TOKENS) is not None


def test_the_halves_of_a_split_take_over_what_is_known_of_their_tokens(tmp_path: Path) -> None:
    stats = stats_of(tmp_path, runs=3)
    stats.flush()
    whole = stats.get(NODE, TOKENS)
    stats.split(NODE, 8, OTHER, THIRD)
    assert whole is not None
    assert stats.get(NODE, TOKENS) is None
    assert not file_of(tmp_path).exists()
    for reader in (stats, stats_of(tmp_path)):
        for node_id, own in ((OTHER, slice(0, 8)), (THIRD, slice(8, TOKENS))):
            half = reader.get(node_id, own.stop - own.start)
            assert half is not None
            assert half.queries == 3
            assert half.observed_tokens == half.tokens
            assert np.array_equal(half.selected, whole.selected[:, own])
            assert np.array_equal(half.loaded, whole.loaded[:, own])
            part = whole.importance[:, own]
            expected = part / part.sum(1, keepdims=True)
            np.testing.assert_allclose(half.importance, expected, rtol=1e-5)


def test_a_half_that_no_run_reached_knows_nothing() -> None:
    stats = stats_of()
    stats.record(NODE, TOKENS, *run_of(used=6))
    stats.split(NODE, 10, OTHER, THIRD)
    upper, lower = stats.get(OTHER, 10), stats.get(THIRD, 10)
    assert upper is not None
    assert lower is not None
    assert (upper.queries, upper.observed_tokens) == (1, 6)
    assert (lower.queries, lower.observed_tokens) == (0, 0)
    assert (lower.importance == 0).all()
    np.testing.assert_allclose(upper.importance.sum(1), 0.6, rtol=1e-5)


def test_a_split_reads_a_node_that_is_not_in_memory(tmp_path: Path) -> None:
    stats_of(tmp_path, runs=1).flush()
    stats = stats_of(tmp_path)
    stats.split(NODE, 8, OTHER, THIRD)
    assert stats.get(OTHER, 8) is not None
    assert stats.get(THIRD, 12) is not None


@pytest.mark.parametrize("at", [0, TOKENS, TOKENS + 3])
def test_a_split_that_fits_no_file_drops_it(tmp_path: Path, at: int) -> None:
    stats = stats_of(tmp_path, runs=1)
    stats.flush()
    stats.split(NODE, at, OTHER, THIRD)
    stats.split(OTHER, 4, NODE, THIRD)  # nothing is known of it
    assert list(tmp_path.rglob("*.npy")) == []
    assert stats.get(OTHER, 8) is None


def test_a_removed_node_leaves_nothing_even_if_it_was_not_flushed(tmp_path: Path) -> None:
    stats = stats_of(tmp_path, runs=1)
    stats.flush()
    stats.record(NODE, TOKENS, *run_of())
    stats.remove(NODE)
    stats.flush()
    assert stats.get(NODE, TOKENS) is None
    assert list(tmp_path.rglob("*.npy")) == []


def test_a_sweep_deletes_unknown_nodes_and_what_killed_writers_left(tmp_path: Path) -> None:
    stats = stats_of(tmp_path, runs=1)
    stats.record(OTHER, TOKENS, *run_of())
    stats.record(THIRD, TOKENS, *run_of())
    stats.flush()
    stats.record(OTHER, TOKENS, *run_of())
    folder = file_of(tmp_path).parent
    old, young, foreign = (
        folder / name for name in (f"{NODE}.1.tmp", f"{NODE}.2.tmp", "notes.txt")
    )
    for path in (old, young, foreign):
        path.write_bytes(b"x" * 5000)
    hours_ago = time.time() - 2 * 3600
    os.utime(old, (hours_ago, hours_ago))
    before = stats.bytes()
    freed = stats.sweep({NODE})
    stats.flush()
    assert {path.name for path in folder.iterdir()} == {f"{NODE}.npy", young.name, foreign.name}
    assert not file_of(tmp_path, THIRD).exists()
    assert freed == before - stats.bytes() > 0
    assert stats.get(OTHER, TOKENS) is None
    assert stats.get(NODE, TOKENS) is not None


def test_memory_is_bounded_and_what_is_dropped_was_written_first(tmp_path: Path) -> None:
    node_bytes = 12 * LAYERS * TOKENS
    stats = stats_of(tmp_path, cache_bytes=2 * node_bytes)
    names = [f"{number:02x}" + "0" * 18 for number in range(5)]
    for number, node_id in enumerate(names):
        for seed in range(number + 1):
            stats.record(node_id, TOKENS, *run_of(seed=seed))
    written = {path.stem for path in tmp_path.rglob("*.npy")}
    assert written == set(names[:3])
    for number, node_id in enumerate(names):
        found = stats.get(node_id, TOKENS)
        assert found is not None
        assert found.queries == number + 1


def test_asking_writes_nothing_even_beyond_the_bound(tmp_path: Path) -> None:
    stats_of(tmp_path, runs=1).flush()
    stats = stats_of(tmp_path, cache_bytes=0)
    stats.record(OTHER, TOKENS, *run_of())
    assert stats.get(NODE, TOKENS) is not None
    assert not file_of(tmp_path, OTHER).exists()
    stats.flush()
    assert file_of(tmp_path, OTHER).exists()


def test_the_bound_holds_where_nothing_can_be_written() -> None:
    stats = stats_of(None, cache_bytes=0)
    stats.record(NODE, TOKENS, *run_of())
    stats.record(OTHER, TOKENS, *run_of())
    assert stats.get(NODE, TOKENS) is None
    assert stats.get(OTHER, TOKENS) is not None


def test_of_two_writers_the_last_one_wins(tmp_path: Path) -> None:
    first, second = stats_of(tmp_path, runs=1), stats_of(tmp_path, runs=3)
    second.flush()
    first.flush()
    assert same(stats_of(tmp_path).get(NODE, TOKENS), first.get(NODE, TOKENS))


def test_bytes_are_what_files_and_their_folders_take(tmp_path: Path) -> None:
    stats = stats_of(tmp_path, runs=1)
    stats.record(THIRD, TOKENS, *run_of())
    stats.flush()
    found = list((tmp_path / "stats").rglob("*"))
    assert len([path for path in found if path.is_file()]) == 2
    assert stats.bytes() == sum(path.stat().st_blocks * 512 for path in found)


def write_for_ever(store: Path) -> None:
    """In a process of its own, until it is killed."""
    stats = stats_of(store)
    while True:
        stats.record(NODE, TOKENS, *run_of())
        stats.flush()


def queries_of(store: Path) -> int:
    """Runs that the file counts; it must be whole whenever it is looked at."""
    found = stats_of(store).get(NODE, TOKENS)
    assert found is not None
    return found.queries


def test_a_writer_killed_at_any_time_leaves_whole_statistics(tmp_path: Path) -> None:
    stats_of(tmp_path, runs=1).flush()
    fork = multiprocessing.get_context("fork")
    known = 1
    for delay_s in (0.0, 0.001, 0.003, 0.007, 0.013):
        process = fork.Process(target=write_for_ever, args=(tmp_path,))
        process.start()
        before, give_up = known, time.monotonic() + 20
        while known == before and time.monotonic() < give_up:
            known = queries_of(tmp_path)
        time.sleep(delay_s)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert queries_of(tmp_path) >= known > before
        known = queries_of(tmp_path)


@pytest.mark.parametrize("step", ["open", "writelines", "replace"])
def test_a_writer_stopped_at_a_step_leaves_the_old_statistics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    stats = stats_of(tmp_path, runs=1)
    stats.flush()
    before = file_of(tmp_path).read_bytes()
    stats.record(NODE, TOKENS, *run_of())

    def stop(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    if step == "writelines":
        monkeypatch.setattr(node_access.struct, "pack", stop)
    else:
        monkeypatch.setattr(Path, step, stop)
    with pytest.raises(KeyboardInterrupt):
        stats.flush()
    monkeypatch.undo()
    assert file_of(tmp_path).read_bytes() == before
    assert [path.name for path in file_of(tmp_path).parent.iterdir()] == [f"{NODE}.npy"]
    stats.flush()
    assert same(stats_of(tmp_path).get(NODE, TOKENS), stats.get(NODE, TOKENS))


def test_the_files_lie_where_the_format_says(tmp_path: Path) -> None:
    stats_of(tmp_path, runs=1).flush()
    assert access.STATS_DIR == "stats"
    assert (tmp_path / "stats" / "ab" / f"{NODE}.npy").is_file()


def test_what_others_know_of_a_node_is_taken_over_and_kept(tmp_path: Path):
    learnt, here = stats_of(runs=3), stats_of(tmp_path, runs=1)
    here.adopt(learnt, NODE, TOKENS)
    here.adopt(learnt, OTHER, TOKENS)
    here.flush()
    again = AccessStats(tmp_path, SHAPE)
    assert same(again.get(NODE, TOKENS), learnt.get(NODE, TOKENS))
    assert again.get(OTHER, TOKENS) is None
