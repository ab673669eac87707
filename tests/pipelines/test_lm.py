"""The engine as a model of lm-eval: the same numbers as lm-eval's own model, with reuse."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("lm_eval", reason="lm-eval is an optional extra", exc_type=ImportError)

from pipelines.eval_score import Pair, Scorer, by_context
from pipelines.lm import EngineLM
from pipelines.models import LoadedModel
from pipelines.progress import ProgressEvent
from pipelines.sources.fewshot import FewshotSource, fewshot_pool
from pipelines.sources.lmtasks import load_task
from store.disk import layout as disk_layout
from store.engine import PrefixStore
from store.errors import InvalidValueError, PromptError
from store.itf.options import SparseOptions
from tests.helpers import compute_and_store, flip_bit, group_of, new_store
from tests.pipelines.small_tasks import WRITTEN, hf_model, run_lm_eval, write_tasks
from tests.tiny import make_tiny

SHOTS, LIMIT = 5, 6
CLOSE = 1e-4


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return make_tiny("gqa", positions=2048)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture
def store(tmp_path: Path, model: LoadedModel) -> Iterator[PrefixStore]:
    with new_store(tmp_path / "kv", model) as made:
        yield made


def task_of(name: str, data_dir: Path) -> Any:
    """A task whose documents have the first shots of the pool, as lm-eval itself writes them."""
    from lm_eval.api.samplers import FirstNSampler

    task = load_task(name, data_dir=data_dir, include_path=data_dir)
    task.sampler = FirstNSampler(list(fewshot_pool(task))[:SHOTS])
    task.config.num_fewshot = SHOTS
    return task


def store_prefix(store: PrefixStore, model: LoadedModel, name: str, data_dir: Path) -> np.ndarray:
    source = FewshotSource(name, shots=SHOTS, data_dir=data_dir, include_path=data_dir)
    [item] = source.items(model.tokenizer, model.prefix_limit)
    compute_and_store(store, model, item.ids, item.name)
    return item.ids


def instance(*args: Any) -> Any:
    return SimpleNamespace(args=args)


def numbers(sample: dict[str, Any]) -> list[tuple[float, bool]]:
    return [responses[0] for responses in sample["resps"]]


@pytest.mark.parametrize("name", ["rte", "copa", "piqa", "openbookqa"])
def test_scores_behind_a_stored_prefix_are_those_of_lm_evals_own_model(
    store: PrefixStore, model: LoadedModel, data_dir: Path, name: str
):
    expected = run_lm_eval(hf_model(model), task_of(name, data_dir), LIMIT)
    prefix = store_prefix(store, model, name, data_dir)
    ours = run_lm_eval(EngineLM(model, Scorer(store, model)), task_of(name, data_dir), LIMIT)
    assert len(ours["samples"]) == LIMIT
    for document, sample in expected["samples"].items():
        given = ours["samples"][document]
        assert given["arguments"] == sample["arguments"]
        for (value, greedy), (other, same) in zip(numbers(given), numbers(sample), strict=True):
            assert value == pytest.approx(other, abs=CLOSE)
            assert greedy == same
    assert ours["metrics"] == expected["metrics"]
    assert len(prefix) > 100


def test_it_serves_lm_evals_own_entry_point(store: PrefixStore, model: LoadedModel, data_dir: Path):
    from lm_eval import simple_evaluate

    expected = run_lm_eval(hf_model(model), task_of("copa", data_dir), LIMIT)
    store_prefix(store, model, "copa", data_dir)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = simple_evaluate(
            EngineLM(model, Scorer(store, model)),
            tasks=[task_of("copa", data_dir)],
            limit=LIMIT,
            bootstrap_iters=0,
        )
    assert found["results"]["copa"]["acc,none"] == expected["metrics"]["acc,none"]
    for sample in found["samples"]["copa"]:
        values = [value for value, _ in numbers(sample)]
        other = [value for value, _ in numbers(expected["samples"][sample["doc_id"]])]
        assert values == pytest.approx(other, abs=CLOSE)


def test_a_written_answer_is_that_of_lm_evals_own_model(
    store: PrefixStore, model: LoadedModel, data_dir: Path
):
    expected = run_lm_eval(hf_model(model), task_of(WRITTEN, data_dir), LIMIT)
    store_prefix(store, model, WRITTEN, data_dir)
    ours = run_lm_eval(EngineLM(model, Scorer(store, model)), task_of(WRITTEN, data_dir), LIMIT)
    texts = [sample["resps"][0][0] for sample in ours["samples"].values()]
    assert texts == [sample["resps"][0][0] for sample in expected["samples"].values()]
    assert any(texts)
    assert all("\n" not in text and "e" not in text for text in texts)


def test_whole_texts_score_as_in_lm_evals_own_model_in_windows_of_the_models_positions(
    tmp_path: Path,
):
    small = make_tiny("mha", positions=64)
    texts = ["The keeper lives by the pier. " * 7, "short", "x" * 64]
    expected = hf_model(small).loglikelihood_rolling([instance(text) for text in texts], True)
    with new_store(tmp_path / "kv", small) as store:
        lm = EngineLM(small, Scorer(store, small))
        assert lm.loglikelihood_rolling([instance(text) for text in texts]) == pytest.approx(
            expected, abs=CLOSE
        )


REQUESTS = [
    ("The river ", " is wide"),
    ("The river  \n", "is wide"),
    ("The river", " is wide"),
    ("", " is wide"),
    ("", "<|endoftext|>is wide"),
    ("<|endoftext|>The river", " is wide"),
    ("Zwölf", " Boxkämpfer"),
]


@pytest.mark.parametrize(("context", "continuation"), REQUESTS)
def test_requests_are_encoded_as_lm_eval_encodes_them(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, context: str, continuation: str
):
    seen: list[Any] = []
    hf = hf_model(model)
    monkeypatch.setattr(hf, "_loglikelihood_tokens", lambda requests, **_: seen.extend(requests))
    hf.loglikelihood([instance(context, continuation)], disable_tqdm=True)
    [(_, context_ids, continuation_ids)] = seen
    pair = EngineLM(model).encode(context, continuation)
    assert pair.context.tolist() == context_ids
    assert pair.continuation.tolist() == continuation_ids


def test_a_request_longer_than_the_model_keeps_its_end(tmp_path: Path):
    small = make_tiny("mha", positions=64)
    request = instance("a keeper " * 20, " lives by the pier")
    expected = hf_model(small).loglikelihood([request], disable_tqdm=True)
    with new_store(tmp_path / "kv", small) as store:
        [(value, greedy)] = EngineLM(small, Scorer(store, small)).loglikelihood([request])
    assert value == pytest.approx(expected[0][0], abs=CLOSE)
    assert greedy == expected[0][1]
    with pytest.raises(PromptError, match="continuation has 0 tokens"):
        EngineLM(small).encode("a", "")


def test_the_choices_of_a_document_share_one_run_of_its_context(
    store: PrefixStore, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
):
    begun: list[int] = []
    really = store.begin

    def begin(ids: np.ndarray, **given: Any) -> Any:
        begun.append(len(ids))
        return really(ids, **given)

    monkeypatch.setattr(store, "begin", begin)
    events: list[ProgressEvent] = []
    lm = EngineLM(model, Scorer(store, model), events.append)
    choices = [" wide", " wide and deep", " x", " wide"]
    first = lm.loglikelihood([instance("The river is", choice) for choice in choices])
    assert begun == [len("The river is")]
    assert [event.done for event in events] == [4]
    apart = [lm.loglikelihood([instance("The river is", choice)])[0] for choice in choices]
    assert [value for value, _ in first] == pytest.approx([value for value, _ in apart], abs=1e-5)
    assert first[0] == first[3]


def test_neighbours_with_one_context_are_one_group():
    one, other = (np.array(ids, dtype=np.uint32) for ids in ([1, 2], [1, 3]))
    pairs = [Pair(one, other), Pair(one, one), Pair(other, one), Pair(one, other)]
    assert [len(group) for group in by_context(pairs)] == [2, 1, 1]


def test_a_sparse_run_keeps_what_the_context_chose_for_every_choice(
    store: PrefixStore, model: LoadedModel, data_dir: Path
):
    prefix = store_prefix(store, model, "copa", data_dir)
    question = model.tokenizer.decode(prefix.tolist()) + " It was the stone because"
    sparse = SparseOptions(retention=0.2, evidence="full", attend="selected")
    lm = EngineLM(model, Scorer(store, model, sparse))
    whole = EngineLM(model, Scorer(store, model))
    choices = [" the river came", " nobody saw it"]
    requests = [instance(question, choice) for choice in choices]
    together, full = lm.loglikelihood(requests), whole.loglikelihood(requests)
    assert together != full
    for request, answer in zip(requests, together, strict=True):
        assert lm.loglikelihood([request])[0][0] == pytest.approx(answer[0], abs=1e-5)


def test_what_a_scorer_asks_counts_in_no_statistics(
    store: PrefixStore, model: LoadedModel, data_dir: Path
):
    prefix = store_prefix(store, model, "copa", data_dir)
    scorer = Scorer(store, model, SparseOptions(retention=0.2, evidence="full"))
    found = scorer.score(np.append(prefix, prefix[:4]), [prefix[:2]])
    assert found.stats.reused_tokens == len(prefix)
    assert 0.0 < found.stats.loaded_ratio < 1.0
    assert found.stats.ttft_s > 0.0
    [node] = store.nodes()
    assert store.access.get(node.node_id, node.length) is None
    assert len(store.prefixes()) == 1


def test_damage_in_the_store_costs_no_answer(
    store: PrefixStore, model: LoadedModel, data_dir: Path
):
    prefix = store_prefix(store, model, "copa", data_dir)
    context, choice = np.append(prefix, prefix[:4]), prefix[:6]
    expected = Scorer(store, model, load=False).score(context, [choice])
    flip_bit(disk_layout.shard_path(group_of(store), "v", 1), 7)
    given = Scorer(store, model).score(context, [choice])
    assert given.loglikelihoods == pytest.approx(expected.loglikelihoods, abs=CLOSE)
    assert given.stats.recovered_chunks > 0
    assert store.quarantined()


def test_random_answers_are_refused(model: LoadedModel):
    with pytest.raises(InvalidValueError, match="drawn at random"):
        EngineLM(model).written("a", {"do_sample": True, "temperature": 0.7})


def test_a_context_without_room_is_refused(tmp_path: Path):
    small = make_tiny("mha", positions=64)
    with new_store(tmp_path / "kv", small) as store:
        scorer = Scorer(store, small)
        ids = np.zeros(63, dtype=np.uint32)
        with pytest.raises(PromptError, match="63 tokens and 2 to follow, the model has 64"):
            scorer.score(ids, [ids[:3]])
        assert len(scorer.score(ids, [ids[:2]]).loglikelihoods) == 1


def test_long_continuations_are_scored_piece_by_piece(
    store: PrefixStore, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
):
    context, continuation = np.arange(9, dtype=np.uint32), np.arange(100, dtype=np.uint32) + 20
    whole = Scorer(store, model).score(context, [continuation])
    monkeypatch.setattr("pipelines.eval_score._LOGIT_TOKENS", 7)
    pieces = Scorer(store, model).score(context, [continuation])
    assert pieces.loglikelihoods == pytest.approx(whole.loglikelihoods, abs=CLOSE)
