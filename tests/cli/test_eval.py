"""`impress eval`: options, the documented object, what is written and kept, failures in a line."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

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
def hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub answers, whether there is a network or not."""
    monkeypatch.setattr("pipelines.sources.hub.hub_problem", lambda: None)


@pytest.fixture
def no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking for lm-eval's index of all tasks, which takes it half a minute, fails the test."""

    def index(*_: object) -> None:
        raise AssertionError("the index was built")

    monkeypatch.setattr("pipelines.sources.lmtasks.task_index", index)


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
def test_the_store_keeps_one_verdict_of_what_is_asked_twice(
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


@pytest.mark.slow
def test_a_verdict_is_about_the_store_that_answered_and_the_options_it_answered_with(
    run: Run, data_dir: Path, tmp_path: Path
) -> None:
    store, beside = tmp_path / "kv", tmp_path / "kv-importance-16-sketch"
    asked = ("eval", "--store", store, "--tasks", "copa", "--data-dir", data_dir, *SMALL)
    assert run(*asked, "--systems", "as-like").code == 0
    assert run(*asked, "--no-controls").code == 0
    with PrefixStore.open(store) as opened:
        assert opened.verdicts() == []
    with PrefixStore.open(beside) as opened:
        [verdict] = opened.verdicts()
        [prefix] = opened.prefixes()
    layout = ("chunk_tokens", "probe", "evidence", "attend", "order")
    assert [verdict[name] for name in layout] == [16, "sketch", "auto", "loaded", "importance"]

    query = ("query", "why?", "--prefix", prefix.name, "--max-new-tokens", 1, "--retention", 0.25)
    said = run(*query, "--store", store).err
    assert "never measured on this store" in said
    assert "on a store beside it that has the layout of impress" in said
    for same in ((), ("--evidence", "sketch")):
        done = run(*query, "--store", beside, *same)
        assert (done.code, "never measured" in done.err) == (0, False)
    other = run(*query, "--store", beside, "--evidence", "random", "--attend", "selected").err
    assert "with evidence random and attend selected was never measured" in other
    assert "impress with evidence auto and attend loaded" in other


@pytest.mark.slow
def test_the_command_on_the_page_asks_for_the_same_answers(
    run: Run, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = tmp_path / "first.md", tmp_path / "second.md"
    asked = ("--store", tmp_path / "kv", "--tasks", "copa", "--data-dir", data_dir, *SMALL)
    machine = ("--dtype", "float32", "--device", "cpu", "--threads", 1, "--include-path", tmp_path)
    disk = ("--io", "buffered", "--disk-bandwidth", "2GB/s", "--disk-latency", "10us")
    budgets = ("--host-budget", "64MB", "--device-budget", 0, "--results", tmp_path / "answers")
    rest = ("--retention", "0.3333333333", "--no-controls", "--recompute", "all", "--seed", 7)
    given = (*asked, *machine, *disk, *budgets, *rest)
    assert run("eval", *given, "--markdown", pages[0]).code == 0
    [command] = [
        line.removeprefix("- command: `").removesuffix("`")
        for line in pages[0].read_text(encoding="utf-8").splitlines()
        if line.startswith("- command: ")
    ]
    program, *arguments = shlex.split(command)
    assert program == "impress"
    for name in (word for word in given if isinstance(word, str) and word.startswith("--")):
        assert name in arguments
    assert arguments[arguments.index("--model") + 1] == MODEL

    def score(*_: object, **__: object) -> None:
        raise AssertionError("something else was asked for")

    monkeypatch.setattr("pipelines.generate.prefill", score)
    monkeypatch.setattr("pipelines.eval_fill.prefill", score)
    assert run(*arguments, "--markdown", pages[1]).code == 0
    first, second = (page.read_text(encoding="utf-8").splitlines() for page in pages)
    assert [line for line in second if not line.startswith("- date: ")] == [
        line for line in first if not line.startswith("- date: ")
    ]


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
@pytest.mark.usefixtures("no_model", "hub")
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


@pytest.mark.usefixtures("no_model", "hub")
def test_a_folder_that_is_no_store_is_refused_before_a_model_is_loaded(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    done = run("eval", "--store", tmp_path, "--tasks", "rte")
    assert (done.code, done.out) == (1, "")
    assert "is not an impress store" in done.err


@pytest.mark.usefixtures("no_model", "hub")
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


@pytest.mark.usefixtures("no_model", "no_index")
def test_a_task_that_does_not_exist_is_named_with_those_most_like_it(
    run: Run, data_dir: Path, tmp_path: Path
) -> None:
    asked = ("--store", tmp_path / "kv", "--tasks", "copa,rtee", "--data-dir", data_dir, *SMALL)
    said = failure(run("eval", *asked))
    assert "task 'rtee'" in said
    assert "did you mean rte" in said
    assert "lm-eval ls tasks" in said
    assert not (tmp_path / "kv").exists()
    said = failure(run("eval", "--store", tmp_path / "kv", "--tasks", "coppa", *SMALL))
    assert "task 'coppa'" in said
    assert "did you mean copa" in said


@pytest.mark.usefixtures("no_model")
def test_what_is_wrong_with_names_and_data_is_said_without_torch_or_lm_eval(
    data_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "copa").mkdir()
    (tmp_path / "copa" / "train.jsonl").write_text(json.dumps(copa(1)), encoding="utf-8")
    asked = [["--tasks", "rtee", "--data-dir", data_dir], ["--tasks", "copa"]]
    asked += [["--tasks", name, "--data-dir", tmp_path] for name in ("copa", "rte")]
    arguments = [[str(word) for word in ("eval", "--store", tmp_path / "kv", *a)] for a in asked]
    code = f"""
import sys
from impress_cli.app import main
print([main(one) for one in {arguments}])
print([name for name in ("torch", "lm_eval", "datasets", "transformers") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
        check=True,
    )
    assert done.stdout.splitlines() == ["[1, 1, 1, 1]", "[]"]
    said = done.stderr.splitlines()
    assert [line.partition(": ")[0] for line in said] == ["error"] * 4
    assert "did you mean rte?" in said[0]
    assert "HF_HUB_OFFLINE is set" in said[1]
    assert "--data-dir DIR" in said[1]
    assert "no validation.jsonl (found: train.jsonl)" in said[2]
    assert "no folder 'rte' (there: copa)" in said[3]


@pytest.mark.usefixtures("no_model", "no_index")
def test_a_line_that_is_not_json_is_named_before_a_model_is_loaded(
    run: Run, data_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "copa").mkdir()
    for split in ("train", "validation"):
        text = (data_dir / "copa" / f"{split}.jsonl").read_text(encoding="utf-8")
        (tmp_path / "copa" / f"{split}.jsonl").write_text(text, encoding="utf-8")
    with (tmp_path / "copa" / "validation.jsonl").open("a", encoding="utf-8") as file:
        file.write('\n{"premise": "It')
    asked = ("--store", tmp_path / "kv", "--tasks", "copa", "--data-dir", tmp_path)
    said = failure(run("eval", *asked))
    assert f"{tmp_path / 'copa' / 'validation.jsonl'}:6: not JSON at column 13" in said


@pytest.mark.usefixtures("no_model")
def test_a_row_that_lacks_what_a_function_of_the_task_reads_is_named(
    run: Run, data_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "copa").mkdir()
    (tmp_path / "copa" / "train.jsonl").symlink_to(data_dir / "copa" / "train.jsonl")
    rows = [copa(i) for i in range(6)]
    del rows[4]["choice2"]
    text = "\n".join(json.dumps(row) for row in rows)
    (tmp_path / "copa" / "validation.jsonl").write_text(text, encoding="utf-8")
    asked = ("--store", tmp_path / "kv", "--tasks", "copa", "--data-dir", tmp_path)
    said = failure(run("eval", *asked))
    assert "task 'copa'" in said
    assert "validation.jsonl:5 has no 'choice2'" in said


@pytest.mark.usefixtures("no_model", "no_index")
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


@pytest.mark.usefixtures("no_model", "no_index")
def test_data_without_a_split_is_named_with_what_was_found(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is an optional extra", exc_type=ImportError)
    folder = tmp_path / "data" / "copa"
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text(json.dumps(copa(1)), encoding="utf-8")
    asked = ("--store", tmp_path / "kv", "--tasks", "copa", "--data-dir", tmp_path / "data", *SMALL)
    assert "no validation.jsonl (found: train.jsonl)" in failure(run("eval", *asked))


def test_a_store_of_another_model_is_refused(run: Run, data_dir: Path, built: Path) -> None:
    asked = ("--store", built, "--tasks", "copa", "--data-dir", data_dir)
    done = run("eval", *asked, "--model", "random:tiny-mha", *SMALL[2:])
    said = failure(done)
    assert str(built) in said
    assert "num_kv_heads" in said
    assert "answers are kept" not in done.err, "there are none to go on with"


@pytest.mark.usefixtures("no_model", "hub")
def test_another_dtype_or_configuration_is_refused_before_a_model_is_loaded(
    run: Run, built: Path, tmp_path: Path
) -> None:
    with PrefixStore.open(built) as opened:
        other = "float16" if opened.info.dtype == "float32" else "float32"
    said = failure(run("eval", "--store", built, "--tasks", "rte", "--dtype", other))
    assert f"the model given has dtype {other}" in said
    folder = tmp_path / "model"
    folder.mkdir()
    values = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64}
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    said = failure(run("eval", "--store", built, "--tasks", "rte", "--model", folder))
    assert "the model given has num_layers 2" in said


@pytest.mark.usefixtures("no_model", "hub")
def test_without_network_the_error_says_how_to_do_without(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets", reason="lm-eval is an optional extra")

    def offline(*_: object, **__: object) -> None:
        raise ConnectionError("couldn't reach the hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    asked = ("eval", "--store", tmp_path / "kv", "--tasks", "copa", *SMALL)
    said = failure(run(*asked))
    assert "task 'copa'" in said
    assert "data_dir" in said.replace("-", "_")
    assert "network" in said

    monkeypatch.setattr("pipelines.sources.hub.hub_problem", lambda: "no route")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    said = failure(run(*asked))
    assert "task 'copa' takes its data (aps/super_glue) from the hub" in said
    assert "can't be reached (no route)" in said
    assert "copa/<split>.jsonl (--data-dir DIR)" in said
