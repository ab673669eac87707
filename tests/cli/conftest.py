"""A small store built by the command itself, and a way to run the command."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from rich.console import Console

from impress_cli.app import main

MODEL = "random:tiny-gqa"
#: About 300 tokens for the byte tokenizer of random models: several chunks of 16.
DOCUMENT = "\n".join(f"Keeper {n} lives in house {n} near the old pier." for n in range(7))


class Output(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value


Run = Callable[..., Output]


def plain(renderable: Any) -> str:
    """What a terminal of 160 columns shows of a table."""
    out = io.StringIO()
    Console(file=out, width=160, no_color=True).print(renderable)
    return out.getvalue()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run ``impress`` with arguments (and text on stdin); returns code, stdout, stderr."""

    def invoke(*arguments: object, stdin: str | None = None) -> Output:
        if stdin is not None:
            monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Output(code, captured.out, captured.err)

    return invoke


@pytest.fixture(scope="session")
def document(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("documents") / "keepers.txt"
    path.write_text(DOCUMENT, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def built(document: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the one document; tests that change it take ``store``."""
    path = tmp_path_factory.mktemp("built") / "kv"
    assert main(["-q", "build-store", str(document), "--store", str(path), "--model", MODEL]) == 0
    return path


@pytest.fixture
def store(document: Path, tmp_path: Path) -> Path:
    """A store of its own for one test."""
    path = tmp_path / "kv"
    assert main(["-q", "build-store", str(document), "--store", str(path), "--model", MODEL]) == 0
    return path
