"""Data of lm-eval's own tasks, made up, and of one task of ours that asks for texts."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipelines.attention import use_attention
from pipelines.models import LoadedModel

WORDS = ["mother", "river", "father", "weather", "bridge", "lantern", "garden", "winter", "stone"]
WRITTEN = "telling"


def rte(i: int) -> dict[str, Any]:
    return {"sentence1": f"A {WORDS[i % 9]} {i}.", "sentence2": WORDS[i % 7], "label": i % 2}


def copa(i: int) -> dict[str, Any]:
    return {
        "premise": f"It was the {WORDS[i % 9]} {i}.",
        "choice1": f"Then the {WORDS[(i + 3) % 9]} came.",
        "choice2": f"Nobody saw {i}.",
        "question": ("cause", "effect")[i % 2],
        "label": i % 2,
    }


def piqa(i: int) -> dict[str, Any]:
    return {
        "goal": f"find the {WORDS[i % 9]} {i}",
        "sol1": f"look at the {WORDS[i % 5]}",
        "sol2": "look at it, ask",
        "label": i % 2,
    }


def openbookqa(i: int) -> dict[str, Any]:
    choices = {"text": [f"{word} {i}" for word in WORDS[:4]], "label": list("ABCD")}
    return {"question_stem": f"What is {i}?", "choices": choices, "answerKey": "ABCD"[i % 4]}


def telling(i: int) -> dict[str, Any]:
    return {"question": f"Who saw the {WORDS[i % 9]} {i}?", "answer": WORDS[(i + 1) % 9]}


ROWS: dict[str, Callable[[int], dict[str, Any]]] = {
    "rte": rte,
    "copa": copa,
    "piqa": piqa,
    "openbookqa": openbookqa,
    WRITTEN: telling,
}
#: Documents of each split; shots come from train, questions from validation or test.
SPLITS = {"train": (0, 40), "validation": (50, 30), "test": (80, 30)}

_TASK = f"""task: {WRITTEN}
output_type: generate_until
training_split: train
validation_split: validation
doc_to_text: 'Q: {{{{question}}}} A:'
doc_to_target: '{{{{answer}}}}'
generation_kwargs:
  until: ["\\n", "e"]
  max_gen_toks: 12
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""
_GROUP = "group: both\ntask:\n  - copa\n  - telling\n"


def write_tasks(root: Path, names: list[str] | None = None) -> Path:
    """Write data of tasks below ``root``, and a task and a group of ours into it; returns it."""
    for name in names or ROWS:
        (root / name).mkdir()
        for split, (first, count) in SPLITS.items():
            rows = [json.dumps(ROWS[name](first + i)) for i in range(count)]
            (root / name / f"{split}.jsonl").write_text("\n".join(rows), encoding="utf-8")
    (root / "telling.yaml").write_text(_TASK, encoding="utf-8")
    (root / "both.yaml").write_text(_GROUP, encoding="utf-8")
    return root


def hf_model(model: LoadedModel) -> Any:
    """lm-eval's own ``hf`` model on the same weights, one request at a time."""
    from lm_eval.models.huggingface import HFLM

    use_attention(model.model, "sdpa")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return HFLM(
            pretrained=model.model,
            tokenizer=model.tokenizer,
            batch_size=1,
            max_length=model.max_positions,
            device="cpu",
        )


def run_lm_eval(lm: Any, task: Any, limit: int) -> dict[str, Any]:
    """lm-eval's results of a task that has its shots already: metrics, and samples by document."""
    from lm_eval.evaluator import evaluate

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = evaluate(
            lm, {"tasks": {task.task_name: task}}, limit=limit, bootstrap_iters=0, log_samples=True
        )
    return {
        "metrics": found["results"][task.task_name],
        "samples": {one["doc_id"]: one for one in found["samples"][task.task_name]},
    }
