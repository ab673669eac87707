"""Room for documents and their answers behind a prefix: nothing is cut without a word."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("lm_eval", reason="lm-eval is an optional extra", exc_type=ImportError)

from pipelines.eval_score import Pair, Written
from pipelines.eval_tasks import EvalTask
from pipelines.eval_values import EvalOptions, Way
from pipelines.evaluate import evaluate
from pipelines.lm import EngineLM, answer_tokens
from pipelines.models import LoadedModel
from store.errors import PromptError
from tests.pipelines.small_tasks import WRITTEN, write_tasks
from tests.tiny import make_tiny

POSITIONS, ANSWER = 600, 400


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return make_tiny("gqa", positions=POSITIONS)


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> EvalOptions:
    """The task of ours, with answers that take most of the model's positions."""
    root = write_tasks(tmp_path_factory.mktemp("tasks"), [WRITTEN])
    file = root / f"{WRITTEN}.yaml"
    text = file.read_text(encoding="utf-8")
    long = text.replace("max_gen_toks: 12", f"max_gen_toks: {ANSWER}")
    assert long != text
    file.write_text(long, encoding="utf-8")
    return EvalOptions(
        tasks=(WRITTEN,), systems=("as-like",), limit=2, data_dir=root, include_path=root
    )


def test_shots_that_leave_no_room_for_the_answer_are_an_error(
    model: LoadedModel, options: EvalOptions
):
    message = rf"'{WRITTEN}'.*answer of up to {ANSWER}.*{POSITIONS} positions.*--num-fewshot"
    with pytest.raises(PromptError, match=message):
        EvalTask(WRITTEN, model, replace(options, num_fewshot=8))


def test_a_filled_prefix_leaves_room_for_the_answer_and_is_used(
    model: LoadedModel, options: EvalOptions, tmp_path: Path
):
    task = EvalTask(WRITTEN, model, options)
    assert task.shots > 1
    assert task.warnings == []
    found = evaluate(tmp_path / "kv", model, options, tmp_path / "results")
    for answer in found.documents[Way(WRITTEN, "as-like", None)]:
        assert answer.reused_tokens == len(task.prefix.ids)
        assert answer.prompt_tokens + ANSWER <= POSITIONS
    assert found.warnings == ()


def test_a_filled_prefix_is_as_long_as_ever_where_the_answer_fits(options: EvalOptions):
    roomy = make_tiny("gqa", positions=2048)
    task = EvalTask(WRITTEN, roomy, replace(options, max_prefix_tokens=500))
    less = EvalTask(WRITTEN, roomy, replace(options, num_fewshot=task.shots))
    more = EvalTask(WRITTEN, roomy, replace(options, num_fewshot=task.shots + 1))
    assert np.array_equal(task.prefix.ids, less.prefix.ids)
    assert len(more.prefix.ids) > 500


def test_an_answer_longer_than_the_model_is_not_blamed_on_the_prefix(options: EvalOptions):
    small = make_tiny("gqa", positions=ANSWER)
    with pytest.raises(PromptError, match="use a model with more positions"):
        EvalTask(WRITTEN, small, options)


def test_a_context_that_would_be_cut_is_an_error_in_an_evaluation_alone(model: LoadedModel):
    long = "x" * (POSITIONS - 4)
    settings = {"until": ["\n"], "max_gen_toks": 12}
    cut = EngineLM(model).written(long, settings)
    assert len(cut.context) == POSITIONS - 12
    assert len(EngineLM(model).encode(long, " and so on").context) == POSITIONS - 9
    whole = EngineLM(model, whole="task 'telling': document 7")
    message = rf"'telling': document 7 has {POSITIONS - 4} tokens and {{}} to follow.*--max-prefix"
    with pytest.raises(PromptError, match=message.format(12)):
        whole.written(long, settings)
    with pytest.raises(PromptError, match=message.format(9)):
        whole.encode(long, " and so on")
    assert isinstance(whole.encode("It was", " so"), Pair)
    assert isinstance(whole.written("It was", settings), Written)
    # Exactly what fits is no error.
    assert len(whole.encode("x" * (POSITIONS - 9), " and so on").context) == POSITIONS - 9


def test_a_document_that_turns_out_too_long_is_named(
    model: LoadedModel, options: EvalOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(EvalTask, "_longest", lambda _: (20, 12))
    with pytest.raises(PromptError, match=rf"task '{WRITTEN}': document 0 has \d+ tokens"):
        evaluate(tmp_path / "kv", model, replace(options, num_fewshot=8), tmp_path / "results")


def test_tokens_of_an_answer_are_what_its_task_says_under_any_name():
    assert answer_tokens({"max_gen_toks": 7}) == 7
    assert answer_tokens({"max_new_tokens": 9}) == 9
    assert answer_tokens({"until": ["x"]}) == 256
