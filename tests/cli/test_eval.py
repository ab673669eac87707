"""`impress eval`: options, the documented object, what is written and kept, failures in a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from impress_cli.verdicts import verdict_notes
from store.engine import PrefixStore
from tests.cli.conftest import MODEL, Run

WORDS = ("pier", "river", "mother", "weather", "keeper", "tower", "under")
SMALL = ("--model", MODEL, "--max-prefix-tokens", 400, "--limit", 3)


def rte(i: int) -> dict[str, Any]:
    return {"sentence1": f"Yes, {WORDS[i % 7]} {i}.", "sentence2": WORDS[i % 5], "label": i % 2}


def copa(i: int) -> dict[str, Any]:
    return {
        "premise": f"It was the {WORDS[i % 7]}.",
        "choice1": f"Then {i} came.",
        "choice2": f"Nobody saw {i}.",
        "question": ("cause", "effect")[i % 2],
        "label": i % 2,
    }


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("lm_eval", reason="lm-eval is an optional extra", exc_type=ImportError)
    root = tmp_path_factory.mktemp("tasks")
    for task, make in (("rte", rte), ("copa", copa)):
        (root / task).mkdir()
        for split, first, count in (("train", 0, 30), ("validation", 50, 5)):
            rows = [json.dumps(make(first + i)) for i in range(count)]
            (root / task / f"{split}.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return root


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a model fails the test."""

    def load(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("pipelines.models.load_model", load)


@pytest.fixture
def few_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval's index of all tasks, which takes it half a minute, has none."""
    lm_tasks = pytest.importorskip("lm_eval.tasks", exc_type=ImportError)
    whole = lm_tasks.TaskManager

    def manager(*, include_path: str | None = None, **_: object) -> Any:
        return whole(include_defaults=False, include_path=include_path)

    monkeypatch.setattr(lm_tasks, "TaskManager", manager)


def keys_of(value: Any) -> Iterator[str]:
    """Names of all keys of an object and of those below, but of metrics and versions."""
    if isinstance(value, list):
        for one in value:
            yield from keys_of(one)
    elif isinstance(value, dict):
        for name, one in value.items():
            yield name
            if name not in ("metrics", "versions", "environment"):
                yield from keys_of(one)


@pytest.mark.slow
def test_it_makes_the_store_answers_and_prints_the_documented_object(
    run: Run, data_dir: Path, tmp_path: Path
) -> None:
    store = tmp_path / "kv"
    asked = ("--store", store, "--tasks", "rte,copa", "--data-dir", data_dir, *SMALL)
    done = run("eval", *asked, "--retention", "0.5,25%", "--retention", "0.25", "--json")
    assert done.code == 0
    assert str(store) in done.err
    value = done.json
    assert value["schema"] == "impress.eval/1"
    assert value["retention"] == [0.5, 0.25]
    assert value["synthetic"] is True
    assert {"impress-kv", "torch", "lm-eval"} <= set(value["versions"])
    assert [(task["name"], task["n"]) for task in value["tasks"]] == [("rte", 3), ("copa", 3)]
    ways = {(row["task"], row["system"], row["retention"]) for row in value["rows"]}
    for task in ("rte", "copa", "average"):
        assert (task, "recompute", None) in ways
        for system in ("impress", "random", "static"):
            assert {(task, system, 0.5), (task, system, 0.25)} <= ways
    for row in value["rows"]:
        if row["system"] == "impress":
            assert row["interval"][0] <= row["difference"] <= row["interval"][1]
            assert 0 < row["loaded_ratio"] <= 1
    for way in value["documents"]:
        assert [answer["document"] for answer in way["answers"]] == [0, 1, 2]
        assert all(len(answer["loglikelihoods"]) == 2 for answer in way["answers"])
    text = (Path(__file__).parents[2] / "docs" / "json.md").read_text(encoding="utf-8")
    section = text.split("## eval\n")[1].split("\n## ")[0]
    keys = set(keys_of(value)) - {"schema", "versions", "environment", "model", "synthetic"}
    assert [key for key in sorted(keys) if f"`{key}`" not in section] == []


def test_run_again_it_asks_nothing_and_says_the_same(
    run: Run, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("eval", "--store", tmp_path / "kv", "--tasks", "copa", "--data-dir", data_dir, *SMALL)
    first = run(*asked, "--json").json

    def score(*_: object, **__: object) -> None:
        raise AssertionError("a document was asked again")

    monkeypatch.setattr("pipelines.generate.prefill", score)
    monkeypatch.setattr("pipelines.eval_fill.prefill", score)
    second = run(*asked, "--json").json
    for value in (first, second):
        value.pop("environment")
    assert second == first
    assert (tmp_path / "kv.eval").is_dir()


def test_a_table_a_page_and_a_picture_show_the_result(
    run: Run, data_dir: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    page, picture = tmp_path / "costs.md", tmp_path / "costs.png"
    asked = ("--store", tmp_path / "kv", "--tasks", "rte", "--data-dir", data_dir, *SMALL)
    done = run("eval", *asked, "--no-controls", "--markdown", page, "--plot", picture)
    assert done.code == 0
    lines = [line.split() for line in done.out.splitlines() if line.startswith(" rte ")]
    assert [line[1] for line in lines] == ["recompute", "impress"]
    assert "rte: 3 of 5 documents of validation behind" in done.out
    for text in ("asked", "fell back", "95 %", "McNemar's, exact"):
        assert text in done.out
    text = page.read_text(encoding="utf-8")
    assert "| rte | impress | 25 % |" in text
    assert "- command: `impress eval --store " in text
    assert "--no-controls" in text
    assert "random:tiny-gqa" in text
    assert "(random weights)" in text
    assert picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_the_store_keeps_a_verdict_and_a_query_needs_no_warning(
    run: Run, data_dir: Path, tmp_path: Path
) -> None:
    store = tmp_path / "kv"
    asked = ("eval", "--store", store, "--tasks", "rte,copa", "--data-dir", data_dir, *SMALL)
    for _ in range(2):
        assert run(*asked, "--retention", 0.5).code == 0
    with PrefixStore.open(store) as opened:
        [verdict] = opened.verdicts()
    assert (verdict["system"], verdict["retention"], verdict["n"]) == ("impress", 0.5, 6)
    assert verdict["tasks"] == ["rte", "copa"]
    assert (verdict["metric"], verdict["model"]) == ("acc", MODEL)
    assert verdict["interval"][0] <= verdict["difference"] <= verdict["interval"][1]
    assert "never measured" not in " ".join(verdict_notes([verdict], "impress", 0.5, store))
    assert "never measured" in verdict_notes([verdict], "impress", 0.25, store)[0]


def test_a_verdict_that_can_not_be_kept_costs_a_warning_alone(
    run: Run, data_dir: Path, tmp_path: Path
) -> None:
    store = tmp_path / "kv"
    asked = ("eval", "--store", store, "--tasks", "copa", "--data-dir", data_dir, *SMALL)
    assert run(*asked, "--limit", 2).code == 0
    with PrefixStore.open(store) as other, other.writing():
        done = run(*asked)
    assert done.code == 0
    assert "copa: 3 of 5 documents" in done.out
    [warning] = [line for line in done.err.splitlines() if "no verdict" in line]
    assert warning.startswith("warning: the store keeps no verdict: ")
    with PrefixStore.open(store) as opened:
        assert [verdict["n"] for verdict in opened.verdicts()] == [2]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "Missing option '--store'"),
        (("--store", "{none}"), "Missing option '--tasks'"),
        (("--store", "{none}", "--tasks", ","), "--tasks ',' names nothing"),
        (("{asked}", "--systems", "fast"), "system 'fast' is not known; use one of recompute"),
        (("{asked}", "--retention", "0"), "--retention '0' is out of range"),
        (("{asked}", "--retention", "0.5,2"), "--retention '2' is out of range"),
        (("{asked}", "--limit", "0"), "--limit 0 is not allowed; give 1 or more"),
        (("{asked}", "--num-fewshot", "0"), "--num-fewshot 0 is not allowed"),
        (("{asked}", "--max-prefix-tokens", "0"), "--max-prefix-tokens 0 is not allowed"),
        (("{asked}", "--recompute", "some"), "'some' is not one of 'sample', 'all'"),
        (("{asked}", "--data-dir", "{none}"), "no such folder; give one with <task>/<split>.jsonl"),
        (("{asked}", "--include-path", "{none}"), "no such folder; give one with task files"),
        (("{asked}", "--markdown", "{here}"), "is a folder; name a file"),
        (("{asked}", "--plot", "{here}"), "does not end in .png"),
        (("{asked}", "--disk-latency", "9"), "--disk-latency '9' is not a time"),
        (("{asked}", "--host-budget", "much"), "--host-budget 'much' is not a size"),
    ],
)
@pytest.mark.usefixtures("no_model")
def test_wrong_usage_is_one_line_before_a_model_is_loaded(
    run: Run, tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    places = {"none": tmp_path / "none", "here": tmp_path}
    given: list[object] = []
    for text in arguments:
        asked = ["--store", tmp_path / "kv", "--tasks", "rte"]
        given += asked if text == "{asked}" else [text.format(**places)]
    done = run("eval", *given)
    assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 1)
    assert says in done.err


@pytest.mark.usefixtures("no_model")
def test_a_folder_that_is_no_store_is_refused_before_a_model_is_loaded(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    done = run("eval", "--store", tmp_path, "--tasks", "rte")
    assert (done.code, done.out) == (1, "")
    assert "is not an impress store" in done.err


@pytest.mark.usefixtures("no_model")
def test_a_budget_that_is_of_no_use_to_the_store_is_refused_before_a_model_is_loaded(
    run: Run, built: Path
) -> None:
    done = run("eval", "--store", built, "--tasks", "rte", "--host-budget", "10")
    assert (done.code, done.out) == (2, "")
    assert "--host-budget 10 B is too small" in done.err


def failure(done: Any) -> str:
    """The one line that a failed evaluation ends with, after what it had to say before."""
    assert (done.code, done.out) == (1, "")
    errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert done.err.splitlines()[-1] == errors[0]
    return errors[0]


@pytest.mark.usefixtures("few_tasks")
def test_a_task_that_does_not_exist_is_named(run: Run, data_dir: Path, tmp_path: Path) -> None:
    asked = ("--store", tmp_path / "kv", "--tasks", "copa,rtee", "--data-dir", data_dir, *SMALL)
    said = failure(run("eval", *asked))
    assert "task 'rtee'" in said
    assert "lm-eval ls tasks" in said
    assert not (tmp_path / "kv").exists()


def test_data_that_lacks_a_field_is_named_with_its_task(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is an optional extra", exc_type=ImportError)
    folder = tmp_path / "data" / "rte"
    folder.mkdir(parents=True)
    rows = "\n".join(json.dumps({"sentence1": f"Yes {i}.", "label": 0}) for i in range(9))
    for split in ("train", "validation"):
        (folder / f"{split}.jsonl").write_text(rows, encoding="utf-8")
    asked = ("--store", tmp_path / "kv", "--tasks", "rte", "--data-dir", tmp_path / "data", *SMALL)
    said = failure(run("eval", *asked))
    assert "task 'rte'" in said
    assert "sentence2" in said
    assert "check the rows' fields" in said


def test_data_without_a_split_is_named_with_what_was_found(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is an optional extra", exc_type=ImportError)
    folder = tmp_path / "data" / "copa"
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text(json.dumps(copa(1)), encoding="utf-8")
    asked = ("--store", tmp_path / "kv", "--tasks", "copa", "--data-dir", tmp_path / "data", *SMALL)
    assert "no validation.jsonl (found: train.jsonl)" in failure(run("eval", *asked))


def test_a_store_of_another_model_is_refused(run: Run, data_dir: Path, built: Path) -> None:
    asked = ("--store", built, "--tasks", "copa", "--data-dir", data_dir)
    said = failure(run("eval", *asked, "--model", "random:tiny-mha", *SMALL[2:]))
    assert str(built) in said
    assert "num_kv_heads" in said


@pytest.mark.usefixtures("few_tasks")
def test_without_network_the_error_says_how_to_do_without(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets", reason="lm-eval is an optional extra")

    def offline(*_: object, **__: object) -> None:
        raise ConnectionError("couldn't reach the hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    said = failure(run("eval", "--store", tmp_path / "kv", "--tasks", "copa", *SMALL))
    assert "task 'copa'" in said
    assert "data_dir" in said.replace("-", "_")
    assert "network" in said


VERDICT = {
    "system": "impress",
    "retention": 0.1,
    "metric": "acc",
    "higher_is_better": True,
    "tasks": ["rte", "copa"],
    "n": 377,
    "difference": -0.021,
    "interval": [-0.04, -0.002],
}


def test_a_query_is_told_where_nothing_was_measured() -> None:
    [said] = verdict_notes([VERDICT], "impress", 0.25, Path("kv"))
    assert "'impress eval --store kv --retention 0.25 --tasks NAMES'" in said
    [said] = verdict_notes([VERDICT], "as-h2o-lru", 0.1, Path("kv"))
    assert "--systems recompute,as-h2o-lru" in said
    assert verdict_notes([], "impress", 1.0, Path("kv")) == []


def test_a_query_is_told_of_a_loss_that_is_no_chance() -> None:
    [said] = verdict_notes([VERDICT], "impress", 0.1, Path("kv"))
    assert "cost 2.1 points of acc on rte, copa (377 documents)" in said
    assert "-4.0 to -0.2" in said
    assert "too little to tell" not in said


def test_a_query_is_told_where_too_little_was_asked() -> None:
    wide = {**VERDICT, "interval": [-0.12, 0.09]}
    [said] = verdict_notes([wide], "impress", 0.1, Path("kv"))
    assert "too little to tell" in said
    assert verdict_notes([{**VERDICT, "interval": None}], "impress", 0.1, Path("kv")) == []


def test_the_newest_verdict_counts_and_a_good_one_is_silent() -> None:
    good = {**VERDICT, "difference": 0.001, "interval": [-0.01, 0.012]}
    assert verdict_notes([VERDICT, good], "impress", 0.1, Path("kv")) == []
    assert len(verdict_notes([good, VERDICT], "impress", 0.1, Path("kv"))) == 1
