"""What a query is told of its accuracy: which verdicts are about it, and which of them is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from impress_cli.verdicts import Asked, keep_verdicts, unkept, verdict_notes, verdicts_of
from pipelines.eval_values import EvalReport, Scored, Way
from store.engine import PrefixStore
from store.itf.options import SparseOptions
from tests.pipelines.test_eval_report import ROW, RTE, report, three_tasks

KV = Path("kv")
VERDICT: dict[str, Any] = {
    "system": "impress",
    "retention": 0.1,
    "chunk_tokens": 16,
    "probe": "sketch",
    "evidence": "auto",
    "attend": "loaded",
    "order": "importance",
    "metric": "acc",
    "higher_is_better": True,
    "tasks": ["rte", "copa"],
    "n": 377,
    "value": 0.6,
    "difference": -0.021,
    "interval": [-0.04, -0.002],
}
GOOD = {**VERDICT, "difference": 0.001, "interval": [-0.01, 0.012]}
WIDE = {**VERDICT, "difference": -0.01, "interval": [-0.12, 0.09]}


def told(
    *verdicts: dict[str, Any],
    system: str = "impress",
    used: str = "sketch",
    beside: bool = False,
    **options: Any,
) -> list[str]:
    """What a query at retention 0.1 is told."""
    sparse = SparseOptions(**{"retention": 0.1, **options})
    return verdict_notes(verdicts, Asked(system, sparse, used, beside), KV)


def test_a_query_is_told_where_nothing_was_measured() -> None:
    [said] = told(VERDICT, retention=0.25)
    assert said.endswith("'impress eval --store kv --retention 0.25 --tasks NAMES' measures it")
    baseline = {"system": "as-h2o-lru", "evidence": "full", "used": "full", "attend": "selected"}
    [said] = told(VERDICT, **baseline)
    assert "--systems recompute,as-h2o-lru" in said
    [said] = told(beside=True)
    assert said.endswith("measures it, on a store beside it that has the layout of impress")
    assert told(retention=1.0) == []


@pytest.mark.parametrize(
    "options",
    [
        {"evidence": "random", "used": "random"},
        {"attend": "selected"},
        {"used": "full"},
        {"evidence": "random", "used": "random", "attend": "selected"},
    ],
)
def test_a_verdict_counts_for_the_evidence_and_attention_it_was_measured_with(
    options: dict[str, Any],
) -> None:
    [said] = told(VERDICT, **options)
    assert "never measured" in said
    assert "measured to cost" in told(VERDICT, evidence="sketch")[0]


@pytest.mark.parametrize("name", ["chunk_tokens", "probe", "evidence", "attend", "order"])
def test_a_verdict_that_does_not_say_what_decided_its_answers_counts_for_none(name: str) -> None:
    old = {key: value for key, value in VERDICT.items() if key != name}
    assert "never measured" in told(old)[0]


def test_all_keys_are_the_evidence_of_a_system_without_probe() -> None:
    own = {"system": "as-h2o-lru", "evidence": "full", "attend": "selected"}
    verdict = {**VERDICT, **own, "probe": "none", "chunk_tokens": 64}
    assert "measured to cost" in told(verdict, used="full", **own)[0]


def test_a_query_is_told_of_a_loss_that_is_no_chance_and_of_nothing_else() -> None:
    assert told(VERDICT) == [
        "retention 0.1 was measured to cost 2.1 points of acc on rte, copa (377 documents); "
        "95 %: -4.0 to -0.2"
    ]


def test_a_query_is_told_where_too_little_was_asked() -> None:
    [said] = told(WIDE)
    assert "too little to tell: acc on rte, copa (377 documents) changed by -1.0 points" in said
    [said] = told({**VERDICT, "interval": [None, None]})
    assert "too little to tell" in said
    assert said.endswith("its 95 % interval is not known")


def test_a_metric_that_is_no_share_is_told_on_its_own_scale() -> None:
    own = {"metric": "bleu_max", "value": 30.0}
    [said] = told({**VERDICT, **own, "difference": -2.5, "interval": [-4.0, -1.0]})
    assert "measured to cost 2.5 of bleu_max on" in said
    assert said.endswith("95 %: -4 to -1")
    assert told({**VERDICT, **own, "difference": -0.1, "interval": [-0.9, 0.7]}) == []
    [said] = told({**VERDICT, **own, "difference": -0.5, "interval": [-3.0, 2.0]})
    assert "too little to tell: bleu_max on rte, copa (377 documents) changed by -0.5;" in said


def test_a_metric_that_is_better_where_it_is_lower_loses_where_it_rises() -> None:
    own = {"metric": "brier_score", "higher_is_better": False, "value": 0.3}
    [said] = told({**VERDICT, **own, "difference": 0.1, "interval": [0.05, 0.15]})
    assert "measured to add 0.1 of brier_score" in said
    assert told({**VERDICT, **own, "difference": -0.1, "interval": [-0.15, -0.05]}) == []


def test_of_the_same_tasks_the_newest_verdict_counts_and_a_good_one_is_silent() -> None:
    assert told(VERDICT, GOOD) == []
    assert told(VERDICT, {**GOOD, "tasks": ["copa", "rte"]}) == []
    assert len(told(GOOD, VERDICT)) == 1


def test_a_verdict_of_other_tasks_hides_no_loss() -> None:
    loss = told(VERDICT)
    for later in (GOOD, WIDE):
        for tasks in (["piqa"], ["rte"]):
            assert told(VERDICT, {**later, "tasks": tasks}) == loss
            assert told({**later, "tasks": tasks}, VERDICT) == loss
    worse = {**VERDICT, "tasks": ["piqa"], "difference": -0.2, "interval": [-0.3, -0.1]}
    assert told(worse, VERDICT) == told(VERDICT, worse) == told(worse)
    assert "too little" in told(WIDE, {**GOOD, "tasks": ["piqa"]})[0]


def test_what_the_newest_verdict_says_already_is_not_kept_again(built: Path) -> None:
    def kept(*verdicts: dict[str, Any]) -> list[dict[str, Any]]:
        with PrefixStore.open(built) as store:
            identity = store.info.identity
        keep_verdicts(built, identity, verdicts)
        with PrefixStore.open(built) as store:
            return store.verdicts()

    before = kept()
    first, same = {**VERDICT, "date": "1"}, {**VERDICT, "date": "2"}
    other, good = {**VERDICT, "tasks": ["piqa"], "date": "3"}, {**GOOD, "date": "4"}
    assert kept(first) == [*before, first]
    assert kept(same, other) == [*before, first, other]
    assert kept(same) == [*before, first, other]
    assert kept(good) == [*before, first, other, good]
    assert kept(same) == [*before, first, other, good, same], "it is true again"


def scored(reused: int) -> Scored:
    return Scored(0, (-1.0,), (True,), None, 0.1, 0.25, 0.3, 0.1, 0.0, 9, 9, 5000, reused)


def answered(**reused: int) -> EvalReport:
    """The report of three tasks, with a document of each as answered at retention 0.25."""
    found = three_tasks()
    documents = {
        Way(name, "impress", 0.25): (scored(tokens), scored(4080))
        for name, tokens in reused.items()
    }
    return replace(found, documents=documents)


def of_impress(found: EvalReport) -> list[tuple[Any, ...]]:
    verdicts = verdicts_of(found, SparseOptions(), {"model": "tiny"})
    return [
        (verdict["retention"], verdict["metric"], *verdict["tasks"])
        for verdict in verdicts
        if verdict["system"] == "impress"
    ]


def test_an_evaluation_has_a_verdict_per_system_retention_and_headline() -> None:
    found = answered(rte=4050, piqa=4080, sums=4050)
    assert of_impress(found) == [
        (0.1, "acc", "rte", "piqa"),
        (0.25, "acc", "rte", "piqa"),
        (0.25, "exact_match", "sums"),
    ]
    assert unkept(found) == []
    first = verdicts_of(found, SparseOptions(), {"model": "tiny"})[0]
    own = {"system": "impress-paper", "evidence": "heads", "attend": "selected", "model": "tiny"}
    assert {**first, **own, "chunk_tokens": 64, "probe": "heads", "order": "importance"} == first


def test_documents_that_reused_less_than_the_prefix_make_no_verdict() -> None:
    found = answered(rte=4050, piqa=4079, sums=4050)
    assert of_impress(found) == [(0.1, "acc", "rte", "piqa"), (0.25, "exact_match", "sums")]
    assert unkept(found) == [
        "no verdict is kept of impress at retention 0.25: documents of piqa reused less than the "
        "prefix"
    ]
    alone = replace(
        report(ROW, tasks=(RTE,)), documents={Way("rte", "impress", 0.25): (scored(1),)}
    )
    assert of_impress(alone) == []
