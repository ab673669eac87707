"""The folder of results with several processes, and facts about stores that come and go."""

from __future__ import annotations

import json
import multiprocessing
import threading
from pathlib import Path

import pytest

from pipelines.eval_answers import Results
from store.errors import InvalidValueError

FACTS = "stores.json"


def note_many(folder: Path, name: str) -> None:
    results = Results(folder)
    for number in range(20):
        results.note(f"{name} {number}", number)


def hold(folder: Path, held: multiprocessing.synchronize.Event) -> None:  # type: ignore[name-defined]
    """Be in the middle of putting a store's rows in order, for good."""
    with Results(folder).ordering("a"):
        held.set()
        threading.Event().wait()


def test_facts_that_another_process_noted_are_seen_and_stay(tmp_path: Path):
    first, second = Results(tmp_path), Results(tmp_path)
    first.note("a", 1)
    second.note("b", 2)
    first.note("c", 3)
    assert [second.fact(name) for name in "abc"] == [1, 2, 3]
    assert Results(tmp_path).fact("b") == 2
    first.note("b", 4)
    assert second.fact("b") == 4


def test_two_processes_lose_none_of_each_others_facts(tmp_path: Path):
    context = multiprocessing.get_context("fork")
    others = [context.Process(target=note_many, args=(tmp_path, name)) for name in "xyz"]
    for one in others:
        one.start()
    for one in others:
        one.join()
        assert one.exitcode == 0
    assert len(json.loads((tmp_path / FACTS).read_text(encoding="utf-8"))) == 60


def test_a_file_of_facts_that_is_damaged_is_written_anew(tmp_path: Path):
    (tmp_path / FACTS).write_text("{", encoding="utf-8")
    results = Results(tmp_path)
    assert results.fact("a") is None
    results.note("a", 1)
    assert Results(tmp_path).fact("a") == 1


def test_one_process_at_a_time_puts_a_store_in_order_and_death_ends_its_turn(tmp_path: Path):
    context = multiprocessing.get_context("fork")
    held = context.Event()
    other = context.Process(target=hold, args=(tmp_path, held))
    other.start()
    assert held.wait(60)
    results, got = Results(tmp_path), threading.Event()

    def take() -> None:
        with results.ordering("a"):
            got.set()

    with results.ordering("another"):
        pass
    waiting = threading.Thread(target=take)
    waiting.start()
    assert not got.wait(0.3)
    other.kill()
    other.join()
    assert got.wait(60)
    waiting.join()


def test_a_folder_that_cannot_be_written_is_an_error_with_the_option(tmp_path: Path):
    results = Results(tmp_path / "results")
    results.note("a", 1)
    (tmp_path / "results" / f".{FACTS}.tmp").mkdir()
    results.note("a", 1)  # nothing new: nothing is written
    with pytest.raises(InvalidValueError, match="--results"):
        results.note("a", 2)


def test_facts_of_a_store_are_no_facts_of_the_next_one_of_its_name(tmp_path: Path):
    results = Results(tmp_path)
    first = results.of_store("kv", "id1")
    first.note("layout", "x", ".")
    assert results.of_store("kv", "id1").get("layout", "x") == "."
    assert results.of_store("moved", "id1").get("layout", "x") == "."
    assert results.of_store("kv", "id2").get("layout", "x") is None


def test_facts_of_earlier_versions_count_for_the_store_that_is_there(tmp_path: Path):
    (tmp_path / FACTS).write_text(
        json.dumps({"layout kv x": "kv", "order kv n": "under way"}), encoding="utf-8"
    )
    first = Results(tmp_path).of_store("kv", "id1")
    assert (first.get("layout", "x"), first.get("order", "n")) == ("kv", "under way")
    first.note("order", "n", "digest")
    assert Results(tmp_path).of_store("kv", "id1").get("order", "n") == "digest"
    second = Results(tmp_path).of_store("kv", "id2")
    assert (second.get("layout", "x"), second.get("order", "n")) == (None, None)
