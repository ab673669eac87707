"""The error boundary, global flags and exit codes; always through ``main``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from impress_cli import app, ls
from impress_cli.ui import Ui
from store.errors import (
    InvalidValueError,
    ModelMismatchError,
    PrefixNotFoundError,
    StoreNotFoundError,
)

ROOT = Path(__file__).parents[2]


def run_failing(monkeypatch: pytest.MonkeyPatch, error: BaseException, *more: str) -> int:
    """Run `impress ls` with an opening that fails."""

    def fail(*_args: object, **_options: object) -> object:
        raise error

    monkeypatch.setattr("impress_cli.session.opened_store", fail)
    return app.main(["ls", "--store", "kv", *more])


def test_importing_the_command_leaves_heavy_packages_out() -> None:
    code = (
        "import sys, impress_cli.app; "
        "print([m for m in ('torch', 'transformers', 'zarr', 'numpy', 'rich', 'sqlite3', 'yaml')"
        " if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_help_answers_without_heavy_packages_and_lists_every_command() -> None:
    code = (
        "import sys, impress_cli.app as a; c = a.main(['--help']); "
        "print(c, [m for m in ('torch', 'transformers', 'zarr', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip().endswith("0 []")
    for name in ("demo", "build-store", "query", "ls", "inspect", "stats", "verify", "repair"):
        assert f"\n  {name}" in done.stdout


def test_a_known_error_is_one_line_on_stderr_and_exit_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run_failing(monkeypatch, StoreNotFoundError("no store at kv;\nbuild one"))
    out, err = capsys.readouterr()
    assert (code, out, err) == (1, "", "error: no store at kv; build one\n")


def test_a_missing_prefix_is_shown_without_quotes_around_the_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_failing(monkeypatch, PrefixNotFoundError("no prefix 'x'")) == 1
    assert capsys.readouterr().err == "error: no prefix 'x'\n"


@pytest.mark.parametrize(
    ("error", "code"), [(InvalidValueError("bad"), 2), (ModelMismatchError("other"), 1)]
)
def test_only_values_out_of_range_count_as_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    assert run_failing(monkeypatch, error) == code


def test_an_unexpected_error_names_its_type_and_debug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_failing(monkeypatch, ZeroDivisionError("oops")) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: unexpected ZeroDivisionError: oops")
    assert "--debug" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("before", [True, False])
def test_debug_shows_the_traceback_before_or_after_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], before: bool
) -> None:
    def fail(*_args: object, **_options: object) -> object:
        raise StoreNotFoundError("gone")

    monkeypatch.setattr("impress_cli.session.opened_store", fail)
    arguments = ["ls", "--store", "kv"]
    arguments = ["--debug", *arguments] if before else [*arguments, "--debug"]
    assert app.main(arguments) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("error: gone\n")


def test_an_interrupt_says_that_the_store_is_consistent_and_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_failing(monkeypatch, KeyboardInterrupt()) == 130
    err = capsys.readouterr().err
    assert "consistent" in err
    assert "run the same command again" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["query"], "Missing option '--store'"),
        (["querry"], "Did you mean 'query'"),
        (["ls", "--store", "kv", "--nonsense"], "--nonsense"),
        (["query", "--store", "kv", "hi", "--plan", "guess"], "'force-load'"),
        (["query", "--store", "kv", "hi", "--evidence", "guess"], "sketch"),
        (["query", "--store", "kv", "hi", "--retention", "1.5"], "out of range"),
        (["query", "--store", "kv", "hi", "--prompts", "p.jsonl"], "not both"),
        (["query", "--store", "kv", "hi", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["query", "--store", "kv", "hi", "--disk-bandwidth", "250"], "250MB/s"),
        (["query", "--store", "kv", "hi", "--disk-latency", "200"], "200us"),
        (["build-store", "--store", "kv"], "RECIPE|FILES"),
        (["build-store", "a.txt", "--store", "kv", "--probe", "some"], "'sketch'"),
        (["build-store", "a.txt", "--store", "kv", "--max-size", "0"], "no room"),
        (["build-store", "a.txt", "--store", "kv", "--max-size", "big"], "not a size"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert app.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    assert says in err


def test_an_empty_prompt_fails_before_any_model_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert app.main(["query", "--store", "nowhere", "  "]) == 1
    assert "the prompt is empty" in capsys.readouterr().err


def test_global_flags_move_to_the_front_but_not_what_follows_two_dashes() -> None:
    moved = app.hoist_global_flags(["query", "-q", "--store", "kv", "--", "--debug"])
    assert moved == ["-q", "query", "--store", "kv", "--", "--debug"]


def test_a_closed_pipe_ends_the_command_quietly() -> None:
    code = (
        "import sys, impress_cli.ls as ls, impress_cli.app as a\n"
        "import impress_cli.session as s\n"
        "def fail(*_a, **_k): raise BrokenPipeError\n"
        "s.opened_store = fail\n"
        "sys.exit(a.main(['ls', '--store', 'kv']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == ""


def test_the_command_without_arguments_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main([]) == 0
    assert "Usage: impress" in capsys.readouterr().out


def test_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("impress ")


def test_bytes_of_a_prefix_count_every_node_on_its_path() -> None:
    node = SimpleNamespace
    nodes = [
        node(node_id="a", parent_id=None, bytes=100),
        node(node_id="b", parent_id="a", bytes=10),
        node(node_id="c", parent_id="a", bytes=1),
    ]
    row = SimpleNamespace(prefix_id="p", name="n", length=5, node_id="b", created=0.0)
    probes = [node(node_id=name, bytes=size) for name, size in (("a", 7), ("b", 2), ("b", 3))]
    probes.append(node(node_id="c", bytes=50))
    (found,) = ls.prefix_objects([row], nodes, probes)  # type: ignore[list-item,arg-type]
    assert (found["bytes"], found["probe_bytes"], found["nodes"]) == (110, 12, 2)


def test_json_of_models_carries_schema_versions_and_environment(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert app.main(["models", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["schema"] == "impress.models/1"
    assert {"python", "torch", "transformers", "zarr"} <= set(value["versions"])
    assert {"cores", "load_average", "device", "page_cache", "emulation"} <= set(
        value["environment"]
    )
    assert any(entry["kind"] == "random" for entry in value["models"])


def test_a_note_about_a_store_that_is_opened_twice_is_said_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ui = Ui()
    for text in ("it can't be written", "it can't be written", "another"):
        ui.note_once(text)
    assert capsys.readouterr().err == "note: it can't be written\nnote: another\n"
