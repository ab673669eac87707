"""Guards of an evaluation: bytes of controls, stores that change, answers that are no numbers."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("lm_eval", reason="lm-eval is an optional extra", exc_type=ImportError)

from pipelines.eval_answers import Results
from pipelines.eval_lanes import _SEED_STEP, _SEEDS, Lane, Placed, corrected_share
from pipelines.eval_notes import (
    differs_warning,
    number_warnings,
    recompute_note,
    reuse_warnings,
    summed,
)
from pipelines.eval_score import apart
from pipelines.eval_stores import EvalStores
from pipelines.eval_tasks import EvalTask
from pipelines.eval_values import EvalOptions, EvalReport, RecomputeFacts, Scored, Way
from pipelines.evaluate import evaluate
from pipelines.models import LoadedModel
from pipelines.progress import ProgressEvent, silent
from pipelines.ttft_values import Layout
from store.engine import PrefixStore
from store.errors import StoreLockedError
from store.itf.evidence import Random
from tests.helpers import compute_and_store, new_store, set_probes
from tests.pipelines.small_tasks import write_tasks
from tests.tiny import make_tiny

NAN = math.nan
WAY = Way("copa", "impress", 0.25)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return make_tiny("gqa", positions=2048)


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> EvalOptions:
    root = write_tasks(tmp_path_factory.mktemp("tasks"), ["copa"])
    return EvalOptions(
        tasks=("copa",),
        systems=("impress",),
        retention=(0.2,),
        limit=3,
        num_fewshot=4,
        data_dir=root,
        include_path=root,
    )


def scored(*values: float, text: str | None = None, **other: Any) -> Scored:
    found = Scored(0, values, (True,) * len(values), text, 0.1, 0.2, 0.3, 0.1, 0.0, 9, 9, 70, 60)
    return replace(found, **other)


def shares(report: EvalReport) -> dict[str, float]:
    """Share of chunks loaded, by system."""
    return {row.system: row.loaded_ratio for row in report.rows if row.metric == "acc"}


# Controls


def test_a_share_is_corrected_by_what_was_seen_of_a_chunk():
    for tokens in (1.0, 3.5, 16.0):
        asked, wanted = 0.05, 0.6
        loaded = 1 - (1 - asked) ** tokens
        share = corrected_share(asked, loaded, wanted)
        assert 1 - (1 - share) ** tokens == pytest.approx(wanted)
    assert corrected_share(0.2, 0.2, 0.3) == pytest.approx(0.3)
    assert corrected_share(0.3, 0.5, 1.0) == 1.0
    assert 0 < corrected_share(1.0, 1.0, 0.5) <= 1.0
    assert 0 < corrected_share(0.5, 1.0, 0.9) <= 1.0
    assert corrected_share(0.5, 0.0, 0.9) == 0.5


def test_controls_load_as_much_where_the_prefix_ends_inside_a_longer_one(
    model: LoadedModel, options: EvalOptions, tmp_path: Path
):
    long = replace(options, num_fewshot=12, limit=1, controls=False)
    evaluate(tmp_path / "kv", model, long, tmp_path / "results")
    found = evaluate(tmp_path / "kv", model, options, tmp_path / "results")
    loaded = shares(found)
    asked = {row.system: row.asked_ratio for row in found.rows}["random"]
    assert asked is not None
    # The share that is right for a prefix of its own loads far too little of this one.
    assert 1 - (1 - asked) ** 16 > loaded["impress"] * 1.2
    off = max(abs(loaded[name] / loaded["impress"] - 1) for name in ("random", "static"))
    [note] = [note for note in found.notes if note.startswith("controls: random")]
    assert f"to within {max(1, math.ceil(100 * off))} %" in note
    warned = [text for text in found.warnings if "do not compare at equal bytes" in text]
    assert len(warned) == sum(
        abs(loaded[name] / loaded["impress"] - 1) > 0.05 for name in ("random", "static")
    )
    assert loaded["random"] == pytest.approx(loaded["impress"], rel=0.15)
    [mixed] = [text for text in found.warnings if "part of a longer one" in text]
    assert "another --store" in mixed
    again = evaluate(tmp_path / "kv", model, options, tmp_path / "results")
    assert replace(again, events=()) == replace(found, events=())


def test_controls_that_stay_off_are_said_with_both_figures(
    model: LoadedModel, options: EvalOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("pipelines.eval_run.CONTROL_TOLERANCE", -1.0)
    found = evaluate(tmp_path / "kv", model, options, tmp_path / "results")
    loaded = shares(found)
    for name in ("random", "static"):
        expected = f"copa: {name} at retention 0.2 loaded {loaded[name]:.3f} of the chunks and "
        assert any(f"{expected}impress {loaded['impress']:.3f}" in t for t in found.warnings)
    assert not any("part of a longer one" in text for text in found.warnings)


@pytest.mark.parametrize("seed", [1, 7, 123_456_789])
def test_seeds_that_worked_give_the_sets_they_gave(seed: int):
    assert (seed * _SEED_STEP + 5) % _SEEDS == seed * _SEED_STEP + 5


def test_any_seed_gives_a_random_set(model: LoadedModel, options: EvalOptions, tmp_path: Path):
    q = Random(4, _SEEDS - 1)
    import torch

    assert q.importance(29, torch.zeros(1), torch.zeros(1), None).shape == (1, 4)
    large = replace(options, seed=10**30, limit=1)
    found = evaluate(tmp_path / "kv", model, large, tmp_path / "results")
    assert "random" in shares(found)


# Stores that change


def reorder(path: Path, model: LoadedModel) -> None:
    """What ``impress reorder`` of another process does."""
    with PrefixStore.open(path, identity=model.identity) as store:
        [node] = store.nodes()
        rows = np.tile(np.arange(node.length, dtype=np.int32)[::-1], (3, 1))
        store.reorder(node.node_id, np.ascontiguousarray(rows))


def lines(results: Path) -> int:
    return sum(len(path.read_bytes().splitlines()) for path in results.glob("*.jsonl"))


def test_answers_from_a_store_that_was_reordered_meanwhile_are_not_kept(
    model: LoadedModel, options: EvalOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    alone = replace(options, controls=False, recompute_all=True)
    really, answered = Lane.answer, []

    def answer(lane: Lane, model: LoadedModel, number: int, document: Any) -> Scored:
        if lane.way.system == "impress" and number == 1:
            reorder(tmp_path / "kv", model)
        found = really(lane, model, number, document)
        answered.append((lane.way.system, number))
        return found

    monkeypatch.setattr(Lane, "answer", answer)
    with pytest.raises(StoreLockedError, match=r"reordered during the evaluation.*run the same"):
        evaluate(tmp_path / "kv", model, alone, tmp_path / "results")
    assert answered[-1] == ("impress", 1)
    assert lines(tmp_path / "results") == len(answered) - 1
    monkeypatch.setattr(Lane, "answer", really)
    found = evaluate(tmp_path / "kv", model, alone, tmp_path / "results")
    assert any("knows nothing of" in text for text in found.warnings)
    assert len(found.documents[Way("copa", "impress", 0.2)]) == 3


def test_whether_rows_were_moved_is_found_out_fast_and_repairs_are_no_move(
    model: LoadedModel, options: EvalOptions, tmp_path: Path
):
    task = EvalTask("copa", model, replace(options, num_fewshot=12))
    with new_store(tmp_path / "kv", model) as store:
        compute_and_store(store, model, task.prefix.ids, "copa-0")
        placed = Placed.of(store, task.prefix.ids)
        times = []
        for _ in range(20):
            began = time.perf_counter()
            assert placed.holds(store)
            times.append(time.perf_counter() - began)
        assert min(times) < 2e-3
        [node] = store.nodes()
        store.replace(node.node_id, store.node_rows(node.node_id).layer)
        assert placed.holds(store)
        reorder(tmp_path / "kv", model)
        assert not placed.holds(store)


def test_a_store_that_was_built_anew_keeps_its_order_beside_old_results(
    model: LoadedModel, options: EvalOptions, tmp_path: Path
):
    import shutil

    small = replace(options, limit=1, controls=False)
    evaluate(tmp_path / "kv", model, small, tmp_path / "results")
    shutil.rmtree(tmp_path / "kv")
    task = EvalTask("copa", model, small)
    with new_store(tmp_path / "kv", model) as store:
        set_probes(store, "sketch")
        compute_and_store(store, model, task.prefix.ids, task.prefix.name)
    evaluate(tmp_path / "kv", model, small, tmp_path / "results")
    with PrefixStore.open(tmp_path / "kv", identity=model.identity) as store:
        assert [store.order(node.node_id) for node in store.nodes()] == [None]


def test_what_an_earlier_version_noted_is_gone_on_with(
    model: LoadedModel, options: EvalOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    small = replace(options, limit=1, controls=False)
    first = evaluate(tmp_path / "kv", model, small, tmp_path / "results")
    file = tmp_path / "results" / "stores.json"
    facts = json.loads(file.read_text(encoding="utf-8"))
    store_id = facts["store kv"]
    old = {key.replace(store_id, "kv"): value for key, value in facts.items()}
    del old["store kv"]
    old |= {key: "kv" for key in old if key.startswith("layout")}
    file.write_text(json.dumps(old), encoding="utf-8")
    asked: list[int] = []
    monkeypatch.setattr("pipelines.eval_lanes.Lane.answer", lambda *_: asked.append(1))
    again = evaluate(tmp_path / "kv", model, small, tmp_path / "results")
    assert replace(again, events=()) == replace(first, events=())
    assert asked == []


def test_an_order_that_a_living_process_is_making_is_waited_for(
    model: LoadedModel, options: EvalOptions, tmp_path: Path
):
    """The second run meets the first in the middle of the questions, and then what it made."""
    import threading

    small = replace(options, limit=1, controls=False)
    evaluate(tmp_path / "kv", model, small, tmp_path / "results")
    with PrefixStore.open(tmp_path / "kv", identity=model.identity) as store:
        [node] = store.nodes()
        facts = Results(tmp_path / "results").of_store("kv", store.info.store_id)
        made, generation = facts.get("order", node.node_id), node.generation
    facts.note("order", node.node_id, "under way")
    reports: list[EvalReport] = []
    started = threading.Event()

    def progress(event: ProgressEvent) -> None:
        if event.task == "order":
            started.set()

    def run() -> None:
        reports.append(evaluate(tmp_path / "kv", model, small, tmp_path / "results", progress))

    with Results(tmp_path / "results").ordering(store.info.store_id):
        other = threading.Thread(target=run)
        other.start()
        assert started.wait(120)
        time.sleep(0.2)
        facts.note("order", node.node_id, made)
    other.join()
    assert reports[0].warnings == ()
    with PrefixStore.open(tmp_path / "kv", identity=model.identity) as store:
        assert [one.generation for one in store.nodes()] == [generation]


# Answers that are no numbers


def test_what_is_no_number_differs_wherever_it_stands():
    assert apart(scored(-1.0, -2.0), scored(-1.5, -2.0)) == 0.5
    assert apart(scored(-math.inf, -2.0), scored(-math.inf, -2.0)) == 0.0
    for first, second in (((NAN, -1.0), (-1.0, -1.0)), ((-1.0, -1.0), (-1.0, NAN))):
        assert math.isnan(apart(scored(*first), scored(*second)))
    assert apart(scored(text="a"), scored(text="b")) == 1.0


def test_what_is_no_number_stays_none_over_tasks_and_is_worded():
    facts = [RecomputeFacts(3, 3, value, 0) for value in (1e-5, NAN)]
    facts.append(RecomputeFacts(3, 3, 1e-6, 9))
    whole = summed(facts)
    assert whole.max_difference is not None
    assert math.isnan(whole.max_difference)
    assert "nan" not in recompute_note(whole)
    assert "some are no numbers" in differs_warning("copa", "float16", NAN)
    assert "by up to 0.5" in differs_warning("copa", "float16", 0.5)
    given = [scored(-1.0, NAN), scored(-1.0, -1.0), scored(NAN, NAN)]
    [text] = number_warnings(WAY, given)
    assert "copa: impress at retention 0.25: log-likelihoods of 2 documents are no num" in text
    assert number_warnings(WAY, given[1:2]) == []


def broken(system: str) -> Callable[..., Scored]:
    really = Lane.answer

    def answer(lane: Lane, model: LoadedModel, number: int, document: Any) -> Scored:
        found = really(lane, model, number, document)
        if lane.way.system == system and number == 1:
            found = replace(found, loglikelihoods=(found.loglikelihoods[0], NAN))
        return found

    return answer


def test_a_full_load_without_numbers_does_not_answer_for_recomputing(
    model: LoadedModel, options: EvalOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("pipelines.eval_run.RECOMPUTE_SAMPLE", 2)
    monkeypatch.setattr(Lane, "answer", broken("as-like"))
    small = replace(options, systems=("as-like",))
    found = evaluate(tmp_path / "kv", model, small, tmp_path / "results")
    assert found.recompute.recomputed == 3
    assert found.recompute.taken_over == 0
    assert any("every document was recomputed" in text for text in found.warnings)
    assert any("as-like: log-likelihoods of 1 documents" in text for text in found.warnings)


# Who answered from less than the prefix


def test_reasons_for_answers_from_less_than_the_prefix_are_told_apart():
    whole, failed = scored(-1.0), scored(-1.0, reused_tokens=16, recovered_chunks=2)
    cut = scored(-1.0, reused_tokens=0)
    assert reuse_warnings(WAY, [whole, whole], 60, True) == []
    [text] = reuse_warnings(WAY, [whole, failed, failed], 60, True)
    assert "2 documents reused less than the prefix of 60 tokens: chunks of 2 failed" in text
    assert "no more of it" not in text
    [text] = reuse_warnings(WAY, [cut, whole], 60, True)
    assert "for 1 the store had no more of it to use" in text
    assert "failed to load" not in text
    [text] = reuse_warnings(WAY, [cut, failed], 60, True)
    assert "chunks of 1 failed" in text
    assert "for 1 the store" in text
    blind = scored(-1.0, probe_ratio=0.0, loaded_ratio=0.6)
    [text] = reuse_warnings(WAY, [whole, blind], 60, True)
    assert "1 documents were answered without the stored evidence" in text
    assert reuse_warnings(WAY, [blind], 60, False) == []


def test_a_lost_sketch_is_said_as_that(
    model: LoadedModel, options: EvalOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    small = replace(options, controls=False, limit=2)
    task = EvalTask("copa", model, small)
    layout = Layout(16, "sketch", "importance")
    stores = EvalStores(
        tmp_path / "kv", model, [layout], [task.prefix.ids], Results(tmp_path / "results")
    )
    assert stores.paths == {layout: tmp_path / "kv"}
    really = Lane.answer

    def answer(lane: Lane, model: LoadedModel, number: int, document: Any) -> Scored:
        for file in (tmp_path / "kv").rglob("*"):
            if file.is_file() and "sketch" in str(file.relative_to(tmp_path)):
                file.write_bytes(b"")
        return really(lane, model, number, document)

    monkeypatch.setattr(Lane, "answer", answer)
    found = evaluate(tmp_path / "kv", model, small, tmp_path / "results", silent)
    assert any("answered without the stored evidence" in text for text in found.warnings)
    assert not any("reused less" in text for text in found.warnings)
