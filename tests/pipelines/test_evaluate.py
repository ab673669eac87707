"""`evaluate`: the same prompts as lm-eval, every answer through the store, and runs that resume."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("lm_eval", reason="lm-eval is an optional extra", exc_type=ImportError)

import pipelines.eval_run
from pipelines.eval_answers import Answers, Results
from pipelines.eval_stores import EvalStores
from pipelines.eval_tasks import ORDER_QUESTIONS, EvalTask, load_tasks
from pipelines.eval_values import (
    AVERAGE,
    EvalOptions,
    EvalReport,
    EvalRow,
    Scored,
    Way,
)
from pipelines.evaluate import evaluate
from pipelines.models import LoadedModel
from pipelines.progress import ProgressEvent, silent
from pipelines.sources.fewshot import FewshotSource, fewshot_pool
from pipelines.sources.lmtasks import load_task
from pipelines.ttft_values import Layout
from store.engine import PrefixStore
from store.errors import (
    InvalidValueError,
    ModelMismatchError,
    PromptError,
    SourceError,
)
from store.run_maker import MemoryOptions
from tests.helpers import SHARED, compute_and_store, new_store, set_probes
from tests.pipelines.small_tasks import WRITTEN, copa, hf_model, run_lm_eval, write_tasks
from tests.tiny import make_tiny

SHOTS, LIMIT = 6, 5
SYSTEMS = ("recompute", "as-like", "impress-paper", "impress")
CLOSE = 1e-4


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return make_tiny("gqa", positions=2048)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def options(data_dir: Path) -> EvalOptions:
    return EvalOptions(
        tasks=("copa", "piqa"),
        systems=SYSTEMS,
        retention=(0.5, 0.2),
        limit=LIMIT,
        num_fewshot=SHOTS,
        data_dir=data_dir,
        include_path=data_dir,
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("evaluated")


@pytest.fixture(scope="module")
def report(model: LoadedModel, options: EvalOptions, place: Path) -> EvalReport:
    return evaluate(place / "kv", model, options, place / "results")


def row_of(report: EvalReport, *way: Any, metric: str = "acc") -> EvalRow:
    [found] = [
        row
        for row in report.rows
        if (row.task, row.system, row.retention, row.metric) == (*way, metric)
    ]
    return found


def timeless(report: EvalReport) -> dict[str, Any]:
    """Everything of a report that a result is, without what a clock decides."""
    rows = [replace(row, ttft_mean_s=None) for row in report.rows]
    documents = {
        way: [replace(answer, ttft_s=None) for answer in answers]
        for way, answers in report.documents.items()
    }
    return asdict(replace(report, rows=tuple(rows), documents=documents, events=()))


# What is asked


def with_shots(name: str, data_dir: Path) -> Any:
    """A task with its shots as lm-eval writes them."""
    from lm_eval.api.samplers import FirstNSampler

    task = load_task(name, data_dir=data_dir, include_path=data_dir)
    task.sampler = FirstNSampler(list(fewshot_pool(task))[:SHOTS])
    task.config.num_fewshot = SHOTS
    return task


@pytest.mark.parametrize("name", ["copa", "rte", "piqa", "openbookqa", WRITTEN])
def test_requests_are_those_that_lm_eval_makes_with_the_same_shots(
    model: LoadedModel, options: EvalOptions, data_dir: Path, name: str
):
    task = EvalTask(name, model, options)
    expected = with_shots(name, data_dir)
    expected.build_all_requests(limit=LIMIT)
    made = [request for number in range(task.count) for request in task.requests(number)]
    assert [request.args for request in made] == [one.args for one in expected.instances]
    alone = [
        request for number in range(task.count) for request in task.requests(number, alone=True)
    ]
    expected.config.num_fewshot = 0
    expected.build_all_requests(limit=LIMIT)
    assert [request.args for request in alone] == [one.args for one in expected.instances]


def test_the_prefix_is_the_one_that_build_store_builds(
    model: LoadedModel, options: EvalOptions, data_dir: Path
):
    task = EvalTask("copa", model, options)
    source = FewshotSource("copa", shots=SHOTS, variants=3, data_dir=data_dir)
    first = next(iter(source.items(model.tokenizer, model.prefix_limit)))
    assert np.array_equal(task.prefix.ids, first.ids)
    assert task.prefix.name == first.name
    assert (task.shots, task.count, task.documents, task.split) == (SHOTS, LIMIT, 30, "validation")


def test_without_a_number_of_shots_the_prefix_is_filled(model: LoadedModel, options: EvalOptions):
    free = replace(options, num_fewshot=None, max_prefix_tokens=700)
    task = EvalTask("copa", model, free)
    more = EvalTask("copa", model, replace(options, num_fewshot=task.shots + 1))
    assert len(task.prefix.ids) <= 700 < len(more.prefix.ids)


def test_questions_that_order_rows_are_neither_shots_nor_evaluated(
    model: LoadedModel, options: EvalOptions
):
    task = EvalTask("copa", model, options)
    texts = [model.tokenizer.decode(ids.tolist()) for ids in task.order_questions()]
    assert len(texts) == ORDER_QUESTIONS
    for number, text in enumerate(texts, start=SHOTS):
        tail = text[len(model.tokenizer.decode(task.prefix.ids.tolist())) :]
        assert copa(number)["premise"][:-1] in tail
        assert copa(number)["choice1"] not in tail
    evaluated = [request.args[0] for n in range(30) for request in task.requests(n)]
    assert not set(texts) & set(evaluated)


def test_documents_that_are_evaluated_order_nothing_and_are_named_among_shots(
    model: LoadedModel, options: EvalOptions, tmp_path: Path
):
    (tmp_path / "copa").mkdir()
    for split, count in (("train", 12), ("validation", 10)):
        rows = "\n".join(json.dumps(copa(i)) for i in range(count))
        (tmp_path / "copa" / f"{split}.jsonl").write_text(rows, encoding="utf-8")
    task = EvalTask("copa", model, replace(options, data_dir=tmp_path))
    assert len(task.order_questions()) == 2
    assert f"{LIMIT} of the evaluated documents are among the shots" in task.warnings[-1]


# What comes out


def test_recompute_gives_the_numbers_of_lm_evals_own_model(
    report: EvalReport, model: LoadedModel, data_dir: Path
):
    for name in ("copa", "piqa"):
        expected = run_lm_eval(hf_model(model), with_shots(name, data_dir), LIMIT)
        answers = report.documents[Way(name, "recompute", None)]
        for document, answer in enumerate(answers):
            sample = expected["samples"][document]
            pairs = [responses[0] for responses in sample["resps"]]
            assert answer.document == document
            assert answer.loglikelihoods == pytest.approx([one for one, _ in pairs], abs=CLOSE)
            assert list(answer.greedy) == [greedy for _, greedy in pairs]
            assert answer.metrics == {key: sample[key] for key in sample["metrics"]}
        for metric in ("acc", "acc_norm") if name == "piqa" else ("acc",):
            row = row_of(report, name, "recompute", None, metric=metric)
            assert row.value == expected["metrics"][f"{metric},none"]
            values = [answer.metrics[metric] for answer in answers]
            deviation = np.std(values, ddof=1) / math.sqrt(LIMIT)
            assert row.stderr == pytest.approx(deviation)


def test_a_full_load_answers_as_recomputing_does(report: EvalReport):
    for name in ("copa", "piqa"):
        row = row_of(report, name, "as-like", None)
        assert row.difference == 0.0
        assert (row.flips_worse, row.flips_better, row.mcnemar_p) == (0, 0, 1.0)
        assert row.kl_mean == pytest.approx(0.0, abs=1e-6)
        assert (row.loaded_ratio, row.selected_ratio) == (1.0, 1.0)
    assert report.recompute.max_difference is not None
    assert report.recompute.max_difference < CLOSE


def test_every_way_has_its_rows(report: EvalReport):
    expected = [("recompute", None), ("as-like", None)]
    expected += [(name, share) for name in ("impress-paper", "impress") for share in (0.5, 0.2)]
    expected += [(name, share) for share in (0.5, 0.2) for name in ("random", "static")]
    expected.append(("no-prefix", None))
    for name in ("copa", "piqa", AVERAGE):
        rows = [row for row in report.rows if row.task == name and row.metric == "acc"]
        assert [(row.system, row.retention) for row in rows] == expected
        assert [row.control for row in rows] == [False] * 6 + [True] * 5
    assert [row.task for row in report.rows if row.metric == "acc_norm"] == ["piqa"] * 11
    assert [(task.name, task.metrics) for task in report.tasks] == [
        ("copa", ("acc",)),
        ("piqa", ("acc", "acc_norm")),
    ]
    assert report.rows[-1].task == AVERAGE


def test_rows_hold_the_means_of_their_documents(report: EvalReport):
    row = row_of(report, "piqa", "impress", 0.2)
    answers = report.documents[Way("piqa", "impress", 0.2)]
    assert row.n == len(answers) == LIMIT
    for name in ("selected_ratio", "loaded_ratio", "probe_ratio", "fallback_ratio", "disk_bytes"):
        assert getattr(row, name) == pytest.approx(np.mean([getattr(a, name) for a in answers]))
    assert row.ttft_mean_s == pytest.approx(np.mean([answer.ttft_s for answer in answers]))
    reference = report.documents[Way("piqa", "recompute", None)]
    change = [a.metrics["acc"] - b.metrics["acc"] for a, b in zip(answers, reference, strict=True)]
    assert row.difference == pytest.approx(np.mean(change))
    average = row_of(report, AVERAGE, "impress", 0.2)
    copa_row = row_of(report, "copa", "impress", 0.2)
    assert average.value == pytest.approx((row.value + copa_row.value) / 2)
    assert average.n == 2 * LIMIT


def test_systems_load_what_they_ask_for_and_less_of_less(report: EvalReport):
    for name in ("impress-paper", "impress"):
        half, fifth = (row_of(report, "copa", name, share) for share in (0.5, 0.2))
        assert half.selected_ratio == pytest.approx(0.5, abs=0.01)
        assert fifth.selected_ratio == pytest.approx(0.2, abs=0.01)
        assert half.disk_bytes > fifth.disk_bytes > 0
        assert half.probe_ratio > 0
    full = row_of(report, "copa", "as-like", None)
    assert full.disk_bytes > row_of(report, "copa", "impress", 0.5).disk_bytes
    recompute = row_of(report, "copa", "recompute", None)
    assert (recompute.disk_bytes, recompute.loaded_ratio) == (0, 0.0)
    assert recompute.ttft_mean_s is not None


def test_controls_load_as_much_as_impress(report: EvalReport):
    for share in (0.5, 0.2):
        ours = row_of(report, "copa", "impress", share)
        for name in ("random", "static"):
            control = row_of(report, "copa", name, share)
            # Chunks are few in a prefix as short as this one.
            assert control.loaded_ratio == pytest.approx(ours.loaded_ratio, abs=0.08)
            assert control.probe_ratio == 0.0
        static = row_of(report, "copa", "static", share)
        assert static.asked_ratio == pytest.approx(ours.loaded_ratio)
        chance = row_of(report, "copa", "random", share).asked_ratio
        assert chance is not None
        assert 1 - (1 - chance) ** 16 == pytest.approx(ours.loaded_ratio)
    alone = row_of(report, "copa", "no-prefix", None)
    assert (alone.selected_ratio, alone.loaded_ratio, alone.disk_bytes) == (0.0, 0.0, 0)


def test_each_document_meets_another_random_set(report: EvalReport):
    lengths = {a.loaded_ratio for a in report.documents[Way("copa", "random", 0.2)]}
    assert len(lengths) > 1


def test_without_the_prefix_the_numbers_are_those_of_no_shots(
    report: EvalReport, model: LoadedModel, data_dir: Path
):
    task = load_task("copa", data_dir=data_dir)
    expected = run_lm_eval(hf_model(model), task, LIMIT)
    for document, answer in enumerate(report.documents[Way("copa", "no-prefix", None)]):
        pairs = [responses[0] for responses in expected["samples"][document]["resps"]]
        assert answer.loglikelihoods == pytest.approx([one for one, _ in pairs], abs=CLOSE)


def test_a_random_model_is_told_apart_from_nothing(report: EvalReport):
    said = [note for note in report.notes if "can't tell impress" in note]
    assert any(note.startswith("copa") and "random" in note for note in said)
    assert report.warnings == ()


# Stores


def test_the_store_is_made_with_the_layout_of_impress_and_others_lie_beside_it(
    report: EvalReport, place: Path, model: LoadedModel
):
    names = {path.name for path in place.iterdir()}
    expected = {"kv", "kv-importance-64-heads", "kv-original-64-none", "results"}
    assert names == expected
    for name in expected - {"results"}:
        with PrefixStore.open(place / name, identity=model.identity) as store:
            assert {row.name for row in store.prefixes()} == {"copa-0", "piqa-0"}
            ordered = [store.order(node.node_id) is not None for node in store.nodes()]
            assert all(ordered) if "original" not in name else not any(ordered)
    assert any("impress-paper answered from kv-importance-64-heads" in n for n in report.notes)
    assert any("kv was made" in event for event in report.events)


def test_a_prefix_is_computed_once_and_never_where_a_store_has_it(
    model: LoadedModel, options: EvalOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import pipelines.eval_fill as fill

    computed: list[int] = []
    really = fill._compute

    def compute(*given: Any) -> None:
        computed.append(len(given[2]))
        really(*given)

    monkeypatch.setattr(fill, "_compute", compute)
    small = replace(options, tasks=("copa",), limit=1, controls=False)
    evaluate(tmp_path / "kv", model, small, tmp_path / "results")
    assert computed == [3]
    evaluate(tmp_path / "kv", model, replace(small, systems=("as-like@32",)), tmp_path / "results")
    assert computed == [3]
    rows = {}
    for name in ("kv", "kv-original-32-none"):
        with PrefixStore.open(tmp_path / name, identity=model.identity) as store:
            [node] = store.nodes()
            k, v = store.node_rows(node.node_id).layer(1)
            rows[name] = k.tobytes() + v.tobytes()
    assert len(set(rows.values())) == 1


def build(path: Path, model: LoadedModel, task: EvalTask) -> None:
    """A store as ``build-store`` makes it."""
    with new_store(path, model) as store:
        set_probes(store, "sketch")
        compute_and_store(store, model, task.prefix.ids, task.prefix.name)


def test_a_built_store_keeps_its_order_and_impress_answers_beside_it(
    model: LoadedModel, options: EvalOptions, tmp_path: Path
):
    small = replace(options, tasks=("copa",), systems=("impress",), limit=1, controls=False)
    build(tmp_path / "kv", model, EvalTask("copa", model, small))
    found = evaluate(tmp_path / "kv", model, small, tmp_path / "results")
    with PrefixStore.open(tmp_path / "kv", identity=model.identity) as store:
        assert [store.order(node.node_id) for node in store.nodes()] == [None]
    assert any("impress answered from kv-importance-16-sketch" in note for note in found.notes)


def test_an_order_that_a_store_had_before_stays_and_is_said(
    model: LoadedModel, options: EvalOptions, tmp_path: Path
):
    small = replace(options, tasks=("copa",), systems=("impress",), limit=2)
    task = EvalTask("copa", model, small)
    build(tmp_path / "kv", model, task)
    with PrefixStore.open(tmp_path / "kv", identity=model.identity) as store:
        [node] = store.nodes()
        rows = np.tile(np.arange(node.length, dtype=np.int32)[::-1], (3, 1))
        store.reorder(node.node_id, np.ascontiguousarray(rows))
    found = evaluate(tmp_path / "kv", model, small, tmp_path / "results")
    assert "knows nothing of, and stay there" in found.warnings[0]
    assert found.tasks[0].order_questions == 0
    assert row_of(found, "copa", "static", 0.2).n == 2
    with PrefixStore.open(tmp_path / "kv", identity=model.identity) as store:
        assert np.array_equal(store.order(node.node_id), rows)
    assert not (tmp_path / "kv-importance-16-sketch").exists()


def test_a_store_of_another_layout_in_the_way_is_named(
    model: LoadedModel, options: EvalOptions, tmp_path: Path
):
    small = replace(options, tasks=("copa",), systems=("impress-paper", "impress"), limit=1)
    with new_store(tmp_path / "kv-importance-64-heads", model, chunk_tokens=32):
        pass
    with pytest.raises(InvalidValueError, match="another layout than importance-64-heads"):
        evaluate(tmp_path / "kv", model, small, tmp_path / "results")


# Going on


class _Killed(BaseException):
    pass


def killed_after(answers: int) -> Callable[[ProgressEvent], None]:
    """Progress that ends the run after so many answers of a task."""

    def progress(event: ProgressEvent) -> None:
        if event.unit == "answers" and event.done == answers:
            raise _Killed

    return progress


@pytest.mark.slow
@pytest.mark.parametrize("answers", [1, 17, 43])
def test_a_run_that_was_killed_and_resumed_gives_what_an_unbroken_one_does(
    report: EvalReport,
    model: LoadedModel,
    options: EvalOptions,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answers: int,
):
    with pytest.raises(_Killed):
        evaluate(tmp_path / "kv", model, options, tmp_path / "results", killed_after(answers))
    lines = sum(len(p.read_bytes().splitlines()) for p in (tmp_path / "results").glob("*.jsonl"))
    assert lines == answers
    resumed = evaluate(tmp_path / "kv", model, options, tmp_path / "results")
    assert timeless(resumed) == timeless(report)
    asked: list[int] = []
    monkeypatch.setattr("pipelines.eval_lanes.Lane.answer", lambda *_: asked.append(1))
    again = evaluate(tmp_path / "kv", model, options, tmp_path / "results")
    assert asked == []
    assert replace(again, events=()) == replace(resumed, events=())


@pytest.mark.slow
def test_a_run_killed_while_rows_were_put_in_order_puts_them_in_the_same(
    report: EvalReport,
    model: LoadedModel,
    options: EvalOptions,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    really = PrefixStore.reorder
    calls: list[str] = []

    def reorder(store: PrefixStore, node_id: str, rows: Any) -> int:
        done = really(store, node_id, rows)
        calls.append(node_id)
        if len(calls) == 2:
            raise _Killed
        return done

    with monkeypatch.context() as patch:
        patch.setattr(PrefixStore, "reorder", reorder)
        with pytest.raises(_Killed):
            evaluate(tmp_path / "kv", model, options, tmp_path / "results")
    resumed = evaluate(tmp_path / "kv", model, options, tmp_path / "results")
    assert timeless(resumed) == timeless(report)


def test_more_documents_and_systems_take_over_what_was_answered(
    model: LoadedModel, options: EvalOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import pipelines.eval_lanes as lanes

    asked: list[tuple[str, int]] = []
    really = lanes.Lane.answer

    def answer(lane: Any, model: Any, number: int, document: Any) -> Scored:
        asked.append((lane.way.system, number))
        return really(lane, model, number, document)

    monkeypatch.setattr(lanes.Lane, "answer", answer)
    small = replace(options, tasks=("copa",), systems=("impress",), retention=(0.2,), limit=2)
    small = replace(small, controls=False)
    evaluate(tmp_path / "kv", model, small, tmp_path / "results")
    expected = {(name, n) for name in ("recompute", "full-load", "impress") for n in (0, 1)}
    assert set(asked) == expected
    assert len(asked) == 6
    asked.clear()
    more = replace(small, limit=3, systems=("impress", "as-h2o-lfu"))
    evaluate(tmp_path / "kv", model, more, tmp_path / "results")
    expected = {(name, 2) for name in ("recompute", "full-load", "impress")}
    assert set(asked) == expected | {("as-h2o-lfu", n) for n in range(3)}


def scored(document: int, value: float = -1.5) -> Scored:
    return Scored(document, (value, -2.0), (True, False), None, 0.1, 0.5, 0.4, 0.1, 0.0, 9, 9, 7, 5)


def test_a_torn_last_line_is_dropped_and_the_file_goes_on_behind_the_last_whole_one(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    answers = Answers(path)
    for number in range(3):
        answers.add(scored(number), f"r{number}")
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    again = Answers(path)
    assert again.get(1, "r1") == scored(1)
    assert again.get(2, "r2") is None
    again.add(scored(2), "r2")
    assert path.read_bytes() == whole


def test_an_answer_is_good_for_its_requests_alone_and_comes_back_exactly(tmp_path: Path):
    answers = Answers(tmp_path / "a.jsonl")
    value = -math.pi * 1e-7
    answers.add(scored(4, value), "request")
    again = Answers(tmp_path / "a.jsonl")
    assert again.get(4, "request") == scored(4, value)
    assert again.get(4, "another") is None
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('{"request": "x", "document": 5}\n[1]\n')
    assert Answers(tmp_path / "a.jsonl").get(4, "request") is not None


def test_what_decides_an_answer_is_in_the_name_of_its_file(tmp_path: Path):
    results, way = Results(tmp_path / "results"), Way("copa", "impress", 0.25)
    results.answers(way, {"prefix": "a"}).add(scored(0), "r")
    assert results.answers(way, {"prefix": "a"}).get(0, "r") is not None
    assert results.answers(way, {"prefix": "b"}).get(0, "r") is None
    assert results.answers(way._replace(retention=0.1), {"prefix": "a"}).get(0, "r") is None
    results.note("x", {"y": 1})
    assert Results(tmp_path / "results").fact("x") == {"y": 1}


def test_results_that_cannot_be_kept_are_an_error_with_the_option(tmp_path: Path):
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(InvalidValueError, match="--results"):
        Results(tmp_path / "file" / "results")


# Recomputing


def small_sample(monkeypatch: pytest.MonkeyPatch, tolerance: float) -> None:
    monkeypatch.setattr(pipelines.eval_run, "RECOMPUTE_SAMPLE", 2)
    monkeypatch.setattr(pipelines.eval_run, "RECOMPUTE_TOLERANCE", tolerance)


@pytest.mark.slow
def test_a_full_load_answers_for_recomputing_once_a_sample_was_equal(
    report: EvalReport,
    model: LoadedModel,
    options: EvalOptions,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    small_sample(monkeypatch, 1e-3)
    found = evaluate(tmp_path / "kv", model, options, tmp_path / "results")
    assert found.recompute.recomputed == found.recompute.compared == 2 * 2
    assert found.recompute.taken_over == 2 * (LIMIT - 2)
    for name in ("copa", "piqa"):
        way = Way(name, "recompute", None)
        answers, every = found.documents[way], report.documents[way]
        assert [answer.ttft_s is None for answer in answers] == [False] * 2 + [True] * 3
        for answer, other in zip(answers, every, strict=True):
            assert answer.loglikelihoods == pytest.approx(other.loglikelihoods, abs=CLOSE)
        row = row_of(found, name, "recompute", None)
        times = [answer.ttft_s for answer in answers[:2]]
        assert row.ttft_mean_s == pytest.approx(np.mean(times))
        assert row.value == row_of(report, name, "recompute", None).value
        assert row.disk_bytes == 0
    assert any("stand for the other 6" in note for note in found.notes)


def test_everything_is_recomputed_where_a_full_load_differs(
    model: LoadedModel, options: EvalOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    small_sample(monkeypatch, -1.0)
    small = replace(options, tasks=("copa",), systems=("as-like",))
    found = evaluate(tmp_path / "kv", model, small, tmp_path / "results")
    assert found.recompute[:2] == (LIMIT, LIMIT)
    assert found.recompute.taken_over == 0
    assert "every document was recomputed" in found.warnings[0]
    assert all(one.ttft_s for one in found.documents[Way("copa", "recompute", None)])


def test_everything_is_recomputed_on_request(
    model: LoadedModel, options: EvalOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    small_sample(monkeypatch, 1e-3)
    small = replace(options, tasks=("copa",), systems=("recompute",), recompute_all=True)
    found = evaluate(tmp_path / "kv", model, small, tmp_path / "results")
    assert found.recompute == (LIMIT, 0, None, 0)
    assert [row.system for row in found.rows] == ["recompute"]


# Kinds of tasks, and what goes wrong


def test_texts_are_written_and_judged_by_the_task(
    model: LoadedModel, options: EvalOptions, data_dir: Path, tmp_path: Path
):
    small = replace(options, tasks=(WRITTEN,), systems=("as-like", "impress"), retention=(0.2,))
    found = evaluate(tmp_path / "kv", model, small, tmp_path / "results")
    expected = run_lm_eval(hf_model(model), with_shots(WRITTEN, data_dir), LIMIT)
    answers = found.documents[Way(WRITTEN, "recompute", None)]
    texts = [sample["resps"][0][0] for _, sample in sorted(expected["samples"].items())]
    assert [answer.text for answer in answers] == texts
    row = row_of(found, WRITTEN, "as-like", None, metric="exact_match")
    assert row.value == expected["metrics"]["exact_match,none"]
    assert row.kl_mean is None
    assert row.difference == 0.0


def test_a_group_stands_for_its_tasks(
    model: LoadedModel, options: EvalOptions, monkeypatch: pytest.MonkeyPatch
):
    import lm_eval.tasks

    # The index of all of lm-eval's own tasks takes many seconds.
    really = lm_eval.tasks.TaskManager
    own = Path(lm_eval.tasks.__file__).parent / "super_glue" / "copa"

    def few(include_path: str | None = None, **_: Any) -> Any:
        return really(include_path=include_path or str(own), include_defaults=False)

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", few)
    tasks = load_tasks(model, replace(options, tasks=("both", "copa")), silent)
    assert [task.name for task in tasks] == ["copa", WRITTEN]
    with pytest.raises(SourceError, match="'nothing' is no task, group or tag of lm-eval"):
        load_tasks(model, replace(options, tasks=("nothing",)), silent)


def test_a_document_that_does_not_fit_is_an_error_before_anything_is_computed(
    options: EvalOptions, tmp_path: Path
):
    small = make_tiny("gqa", positions=600)
    with pytest.raises(PromptError, match=r"task 'copa'.*--max-prefix-tokens"):
        evaluate(
            tmp_path / "kv",
            small,
            replace(options, tasks=("copa",), num_fewshot=5, data_dir=long_document(tmp_path)),
            tmp_path / "results",
        )
    assert not (tmp_path / "kv").exists()


def long_document(root: Path) -> Path:
    (root / "copa").mkdir()
    for split in ("train", "validation"):
        rows = [copa(i) for i in range(20)]
        if split == "validation":
            rows[3]["premise"] = "It was long ago " * 20
        text = "\n".join(json.dumps(row) for row in rows)
        (root / "copa" / f"{split}.jsonl").write_text(text, encoding="utf-8")
    return root


def test_rows_that_lack_a_field_are_an_error_that_names_the_task(
    model: LoadedModel, options: EvalOptions, tmp_path: Path
):
    (tmp_path / "copa").mkdir()
    for split in ("train", "validation"):
        rows = [copa(i) for i in range(20)]
        del rows[7]["choice2"]
        text = "\n".join(json.dumps(row) for row in rows)
        (tmp_path / "copa" / f"{split}.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(SourceError, match=r"task 'copa' can't be built.*rows' fields"):
        load_tasks(model, replace(options, tasks=("copa",), data_dir=tmp_path), silent)


def test_the_store_of_another_model_is_refused_at_once(options: EvalOptions, tmp_path: Path):
    with new_store(tmp_path / "kv", make_tiny("mha")):
        pass
    with pytest.raises(ModelMismatchError, match="use the model it was built with"):
        evaluate(tmp_path / "kv", make_tiny("gqa"), options, tmp_path / "results")
    assert not (tmp_path / "results").exists()


def test_a_pool_without_other_documents_leaves_rows_in_token_order_and_says_so(
    model: LoadedModel, options: EvalOptions, tmp_path: Path
):
    (tmp_path / "copa").mkdir()
    for split, first, count in (("train", 0, SHOTS), ("validation", 50, LIMIT)):
        rows = "\n".join(json.dumps(copa(first + i)) for i in range(count))
        (tmp_path / "copa" / f"{split}.jsonl").write_text(rows, encoding="utf-8")
    small = replace(options, tasks=("copa",), systems=("impress",), retention=(0.2,))
    found = evaluate(
        tmp_path / "kv", model, replace(small, data_dir=tmp_path), tmp_path / "results"
    )
    assert "no document is left to order rows by" in found.warnings[0]
    assert "no control static" in found.warnings[1]
    assert not any(row.system == "static" for row in found.rows)
    assert found.tasks[0].order_questions == 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tasks": ()}, "--tasks names nothing"),
        ({"systems": ("impress", "impress")}, "--systems has impress twice"),
        ({"systems": ("nobody",)}, "'nobody' is not known"),
        ({"retention": (0.0,)}, "retention 0 is out of range"),
        ({"limit": 0}, "--limit 0 is not allowed; give 1 or more"),
        ({"num_fewshot": 0}, "--num-fewshot 0"),
        ({"seed": -1}, "--seed -1"),
    ],
)
def test_values_that_are_not_allowed_are_named(values: dict[str, Any], message: str):
    with pytest.raises(InvalidValueError, match=message):
        EvalOptions(**{"tasks": ("copa",), **values})


def test_memory_that_stays_is_said_and_kept_apart(
    model: LoadedModel, options: EvalOptions, tmp_path: Path
):
    small = replace(options, tasks=("copa",), systems=("impress",), retention=(0.2,), limit=3)
    small = replace(small, controls=False)
    cold = evaluate(tmp_path / "kv", model, small, tmp_path / "results")
    kept = MemoryOptions(host_bytes=64 << 20)
    warm = evaluate(tmp_path / "kv", model, small, tmp_path / "results", memory=kept)
    way = Way("copa", "impress", 0.2)
    assert warm.documents[way][-1].disk_bytes < cold.documents[way][-1].disk_bytes
    for one, other in zip(warm.documents[way], cold.documents[way], strict=True):
        assert one.loglikelihoods == pytest.approx(other.loglikelihoods, abs=CLOSE)
    assert any("64 MB in host memory" in note or "67 MB" in note for note in warm.notes)


@pytest.mark.skipif(
    not (SHARED / "tasks" / "copa").is_dir(), reason="the tasks of ../shared/data are not here"
)
def test_real_data_of_the_papers_tasks_is_read(model: LoadedModel, options: EvalOptions):
    real = replace(
        options,
        tasks=("copa", "rte"),
        data_dir=SHARED / "tasks",
        num_fewshot=2,
        limit=3,
        include_path=None,
    )
    tasks = load_tasks(make_tiny("gqa", positions=8192), real, silent)
    assert [(task.name, task.documents, task.split) for task in tasks] == [
        ("copa", 100, "validation"),
        ("rte", 277, "validation"),
    ]
    for task in tasks:
        assert task.warnings == []
        assert len(task.order_questions()) == ORDER_QUESTIONS


def test_a_store_that_was_named_for_a_layout_serves_it_again(
    model: LoadedModel, options: EvalOptions, tmp_path: Path
):
    task = EvalTask("copa", model, options)
    importance = Layout(16, "sketch", "importance")
    original = Layout(16, "sketch", "original")
    ids = [task.prefix.ids]
    results = Results(tmp_path / "results")
    made = EvalStores(tmp_path / "kv", model, [original, importance], ids, results)
    assert made.paths[importance] == tmp_path / "kv"
    assert made.paths[original] == tmp_path / "kv-original-16-sketch"
    # Filled and stopped before its rows were in order, it looks like one of token order.
    with made.open(tmp_path / "kv") as store:
        compute_and_store(store, model, task.prefix.ids, "copa-0")
    again = EvalStores(tmp_path / "kv", model, [original, importance], ids, results)
    assert again.paths == made.paths
    other = EvalStores(
        tmp_path / "kv", model, [original, importance], ids, Results(tmp_path / "other")
    )
    assert other.paths[original] == tmp_path / "kv"
