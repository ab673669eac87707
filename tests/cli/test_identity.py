"""The same folder with something changed in it is another model: refused, with the field named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import save_tiny


def other_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    name = next(name for name in weights if "k_proj" in name)
    save_file(weights | {name: weights[name] + torch.eye(*weights[name].shape)}, path)


def edit(file: str, change: Callable[[dict], None]) -> Callable[[Path], None]:
    def edited(folder: Path) -> None:
        data = json.loads((folder / file).read_text())
        change(data)
        (folder / file).write_text(json.dumps(data))

    return edited


def fewer_layers(folder: Path) -> None:
    save_tiny(folder, layers=2)


CHANGES = {
    "weights": other_weights,
    "rope": edit("config.json", lambda c: c["rope_parameters"].update(rope_theta=5000.0)),
    "rope scaling": edit(
        "config.json", lambda c: c["rope_parameters"].update(rope_type="linear", factor=2.0)
    ),
    "tokenizer": edit(
        "tokenizer.json",
        lambda t: t.update(
            truncation={
                "direction": "Right",
                "max_length": 5,
                "strategy": "LongestFirst",
                "stride": 0,
            }
        ),
    ),
    "num_layers": fewer_layers,
}


@pytest.mark.parametrize("field", CHANGES)
def test_a_changed_model_folder_is_refused_by_the_field(field, run, tiny_folder, tmp_path: Path):
    text = tmp_path / "essay.txt"
    text.write_text("The harbour has two lamps and a bell. " * 4)
    kv = tmp_path / "kv"
    built = run("build-store", text, "--store", kv, "--model", tiny_folder)
    assert built.code == 0, built.err
    ask = ("query", "How many lamps?", "--prefix", "essay", "--store", kv, "--json")
    before = run(*ask)
    assert before.code == 0, before.err
    assert json.loads(before.out)["reused_tokens"] > 0
    CHANGES[field](tiny_folder)
    after = run(*ask)
    assert after.code == 1
    assert after.err.count("error:") == 1
    assert f"built with {field.split()[0]} " in after.err
