"""Few-shot prefixes: the token prefix that all requests of an lm-eval task begin with."""

from __future__ import annotations

import builtins
import json
from pathlib import Path

import numpy as np
import pytest

from pipelines.prefixes import source_from_recipe
from pipelines.recipe import Recipe, load_recipe, shipped_folder
from pipelines.sources.fewshot import FewshotSource, TaskRequests, fewshot_pool, shot_order
from pipelines.sources.lmtasks import load_task
from pipelines.text import encode_text
from store.errors import SourceError
from tests.pipelines.tiny_tokenizers import CHATML, tiny_tokenizer

WORDS = ["the", "mother", "other", "river", "father", "weather", "there", "over", "under", "ever"]


def rte(i: int) -> dict:
    return {"sentence1": f"Yes, {WORDS[i % 10]} {i}.", "sentence2": WORDS[i % 7], "label": i % 2}


def copa(i: int) -> dict:
    return {
        "premise": f"It was the {WORDS[i % 10]}.",
        "choice1": f"Then {i} came.",
        "choice2": f"Nobody saw {i}.",
        "question": ("cause", "effect")[i % 2],
        "label": i % 2,
    }


def piqa(i: int) -> dict:
    return {"goal": f"find {WORDS[i % 10]}", "sol1": f"look {i}", "sol2": "ask", "label": i % 2}


def openbookqa(i: int) -> dict:
    choices = {"text": [f"{word} {i}" for word in WORDS[:4]], "label": list("ABCD")}
    return {"question_stem": f"What is {i}?", "choices": choices, "answerKey": "ABCD"[i % 4]}


ROWS = {"rte": rte, "copa": copa, "piqa": piqa, "openbookqa": openbookqa}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    pytest.importorskip("lm_eval", reason="lm-eval is an optional extra", exc_type=ImportError)
    root = tmp_path_factory.mktemp("tasks")
    for task, make in ROWS.items():
        (root / task).mkdir()
        for split, first, count in (("train", 0, 12), ("validation", 50, 5), ("test", 80, 5)):
            rows = [json.dumps(make(first + i)) for i in range(count)]
            (root / task / f"{split}.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return root


def request_texts(task_name: str, data_dir: Path, shots: list[int]) -> list[str]:
    """All requests, written by lm-eval itself with these shots."""
    from lm_eval.api.samplers import FirstNSampler

    task = load_task(task_name, data_dir=data_dir)
    pool = fewshot_pool(task)
    task.sampler = FirstNSampler([pool[i] for i in shots])
    task.config.num_fewshot = len(shots)
    task.build_all_requests()
    return ["".join(request.args) for request in task.instances]


def common(arrays: list[np.ndarray]) -> np.ndarray:
    size = min(map(len, arrays))
    same = np.all([a[:size] == arrays[0][:size] for a in arrays], axis=0)
    return arrays[0][: size if same.all() else int(np.argmin(same))]


@pytest.mark.parametrize("task", ROWS)
@pytest.mark.parametrize("bos", [False, True])
def test_a_prefix_is_the_common_token_prefix_of_all_requests(data_dir, task, bos):
    tokenizer = tiny_tokenizer(CHATML, bos=bos)
    source = FewshotSource(task, shots=3, variants=2, seed=5, data_dir=data_dir)
    assert source.count() == 2
    first, second = source.items(tokenizer, 10_000)
    for variant, item in enumerate((first, second)):
        shots = shot_order(12, variant, 5)[:3]
        texts = request_texts(task, data_dir, shots)
        shared = common([encode_text(tokenizer, text, special=True) for text in texts])
        # Questions of a task may begin alike; the prefix ends where the shots end.
        assert np.array_equal(item.ids, shared[: len(item.ids)])
        assert len(tokenizer.decode(shared)) - len(tokenizer.decode(item.ids)) < 30
        assert item.source["template"] == "none"
        assert item.source["shots"] == 3
    assert not np.array_equal(first.ids, second.ids)
    assert source.warnings == []


def test_the_last_blank_line_is_left_to_the_requests_where_its_tokens_change(data_dir):
    tokenizer = tiny_tokenizer()
    [item] = FewshotSource("rte", shots=2, data_dir=data_dir).items(tokenizer, 10_000)
    text = tokenizer.decode(item.ids)
    assert text.endswith(("True", "False"))
    assert "\n\n" in text


def test_shots_are_left_off_until_the_prefix_fits(data_dir):
    tokenizer = tiny_tokenizer()
    whole = {}
    for shots in (4, 5):
        [item] = FewshotSource("rte", shots=shots, data_dir=data_dir).items(tokenizer, 10_000)
        whole[shots] = item.ids
    source = FewshotSource("rte", shots=9, data_dir=data_dir)
    [item] = source.items(tokenizer, len(whole[5]) - 1)
    assert item.source["shots"] == 4
    assert np.array_equal(item.ids, whole[4])
    assert source.warnings == [f"rte-0: 4 of 9 shots fit in {len(whole[5]) - 1} tokens"]
    unasked = FewshotSource("rte", data_dir=data_dir, max_tokens=len(whole[5]) - 1)
    [filled] = unasked.items(tokenizer, 10_000)
    assert np.array_equal(filled.ids, whole[4])
    assert unasked.warnings == []


def test_all_shots_are_used_where_fewer_exist_than_asked_for(data_dir):
    source = FewshotSource("copa", shots=40, data_dir=data_dir)
    [item] = source.items(tiny_tokenizer(), 10_000)
    assert item.source["shots"] == 12
    assert source.warnings == ["copa-0: the task has only 12 of the 40 shots asked"]


def test_a_shot_that_does_not_fit_is_an_error(data_dir):
    with pytest.raises(SourceError, match="rte-0: one shot is longer than 5 tokens"):
        list(FewshotSource("rte", data_dir=data_dir).items(tiny_tokenizer(), 5))


def test_a_shot_that_equals_an_evaluated_document_stays(data_dir, tmp_path):
    # rte has no test split, so lm-eval would drop the document from its own shots.
    (tmp_path / "rte").mkdir()
    rows = "\n".join(json.dumps(rte(i)) for i in range(3))
    for split in ("train", "validation"):
        (tmp_path / "rte" / f"{split}.jsonl").write_text(rows, encoding="utf-8")
    task = load_task("rte", data_dir=tmp_path)
    seam = TaskRequests(task).seam(fewshot_pool(task))
    assert all(f"{rte(i)['sentence1']}\nQuestion" in seam.head for i in range(3))


def test_the_order_of_shots_depends_on_seed_and_variant_alone():
    assert shot_order(6, 0, 1) == [0, 1, 2, 3, 4, 5]
    # Golden values: the same in every process and Python version.
    assert shot_order(6, 1, 1) == [1, 4, 0, 2, 3, 5]
    assert shot_order(6, 1, 2) != [1, 4, 0, 2, 3, 5]
    assert shot_order(6, 2, 1) != [1, 4, 0, 2, 3, 5]


def test_a_recipe_takes_one_folder_of_tasks(data_dir, tmp_path):
    source = source_from_recipe(load_recipe("copa"), shipped_folder(), [data_dir])
    assert isinstance(source, FewshotSource)
    assert source.data_dir == data_dir
    with pytest.raises(SourceError, match=r"takes one folder that holds copa/\*\.jsonl"):
        source_from_recipe(load_recipe("copa"), shipped_folder(), [data_dir / "copa/train.jsonl"])
    own = Recipe.model_validate(
        {"name": "a", "prefixes": {"source": "fewshot", "task": "rte", "data_dir": "none"}}
    )
    with pytest.raises(SourceError, match="none: no such file"):
        source_from_recipe(own, tmp_path)


def test_missing_splits_and_folders_are_named(data_dir, tmp_path):
    with pytest.raises(SourceError, match=r"no folder 'rte' \(there: none\).*rte/train\.jsonl"):
        load_task("rte", data_dir=tmp_path)
    (tmp_path / "rte").mkdir()
    with pytest.raises(SourceError, match=r"no \.jsonl files.*rte/train\.jsonl"):
        load_task("rte", data_dir=tmp_path)
    (tmp_path / "rte" / "train.jsonl").write_text(json.dumps(rte(1)), encoding="utf-8")
    with pytest.raises(SourceError, match=r"no validation\.jsonl \(found: train\.jsonl\)"):
        load_task("rte", data_dir=tmp_path)


def test_rows_of_another_shape_are_named_with_the_task(data_dir, tmp_path):
    (tmp_path / "copa").mkdir()
    for split in ("train", "validation"):
        (tmp_path / "copa" / f"{split}.jsonl").write_text('{"a": 1}', encoding="utf-8")
    with pytest.raises(SourceError, match=r"task 'copa' can't be built.*check the rows' fields"):
        load_task("copa", data_dir=tmp_path)


def test_a_later_row_of_another_shape_is_an_error_too(data_dir, tmp_path):
    (tmp_path / "copa").mkdir()
    broken = {**copa(2), "choice1": None}
    for split in ("train", "validation"):
        rows = "\n".join(json.dumps(row) for row in (copa(0), copa(1), broken))
        (tmp_path / "copa" / f"{split}.jsonl").write_text(rows, encoding="utf-8")
    with pytest.raises(SourceError, match="task 'copa' can't be built"):
        list(FewshotSource("copa", data_dir=tmp_path).items(tiny_tokenizer(), 1000))


def test_a_task_of_the_users_own_is_found_first(data_dir, tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "task: mytask\noutput_type: multiple_choice\ntraining_split: train\n"
        "validation_split: validation\ndoc_to_text: '{{sentence1}} so'\ndoc_to_target: label\n"
        "doc_to_choice: ['no', 'yes']\n",
        encoding="utf-8",
    )
    (tmp_path / "mytask").symlink_to(data_dir / "rte")
    source = FewshotSource("mytask", shots=2, data_dir=tmp_path, include_path=tmp_path)
    [item] = source.items(tiny_tokenizer(), 1000)
    assert tiny_tokenizer().decode(item.ids).startswith("Yes, the 0. so no\n\nYes, mother 1. so")


def test_without_lm_eval_the_error_says_how_to_install_it(monkeypatch):
    real = builtins.__import__

    def no_lm_eval(name, *args, **kwargs):
        if name.startswith("lm_eval"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_lm_eval)
    with pytest.raises(SourceError, match=r"pip install impress-kv\[eval\]"):
        load_task("rte")
