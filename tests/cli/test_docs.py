"""The docs and the command agree: every ``impress …`` line parses, every example runs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from impress_cli.app import GLOBAL_FLAGS, app, hoist_global_flags

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(impress [^`]+)`")


def command_lines(text: str) -> Iterator[str]:
    """Lines that begin with ``impress`` in code blocks, and inline code that does."""
    for _, block in FENCE.findall(text):
        yield from (line for line in block.splitlines() if line.startswith("impress "))
    for line in INLINE.findall(FENCE.sub("", text)):
        yield " ".join(line.split())


def commands() -> dict[str, Any]:
    """Every command by its full name: ``query``, ``bench disk``."""
    group: Any = typer.main.get_command(app)
    found = {}
    for name, command in group.commands.items():
        below = getattr(command, "commands", {})
        found |= {f"{name} {part}": one for part, one in below.items()} or {name: command}
    return found


def command_of(words: list[str]) -> str:
    """Name of the command that ``words`` begin with: two words if there is one, else the first."""
    two = " ".join(words[:2])
    return two if two in commands() else words[0]


def options_of(command: Any) -> set[str]:
    return {name for parameter in command.params for name in parameter.opts if name[0] == "-"}


def problem(line: str) -> str | None:
    """What is wrong with a documented command line, or None."""
    words = hoist_global_flags(shlex.split(line.replace("…", ""))[1:])
    while words and words[0] in (*GLOBAL_FLAGS, "--version"):
        words.pop(0)
    if not words:
        return None
    name = command_of(words)
    if name not in commands():
        return f"no command {name!r}"
    allowed = options_of(commands()[name]) | {"--help", "-h"}
    used = [word.partition("=")[0] for word in words[1:] if re.match(r"--?[a-z]", word)]
    wrong = [option for option in used if option not in allowed]
    return f"{name} has no {', '.join(wrong)}" if wrong else None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_line_in_the_docs_parses(page: Path) -> None:
    lines = command_lines(page.read_text(encoding="utf-8"))
    wrong = {line: why for line in lines if (why := problem(line))}
    assert wrong == {}


def test_the_check_sees_a_command_or_an_option_that_does_not_exist() -> None:
    assert problem("impress query --store kv --retentoin 1.0") == "query has no --retentoin"
    assert problem("impress qurey --store kv") == "no command 'qurey'"
    assert problem("impress query --store kv --explain -q") is None
    assert problem("impress bench dsik") == "no command 'bench'"
    assert problem("impress bench disk --sise 1MB") == "bench disk has no --sise"


def test_the_readme_shows_every_command() -> None:
    lines = command_lines(PAGES[0].read_text(encoding="utf-8"))
    shown = {command_of(line.split()[1:]) for line in lines}
    assert set(commands()) - {"demo"} <= shown


def test_every_command_documents_its_json_object() -> None:
    text = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    documented = {name for heading in headings for name in re.split(r", ", heading)}
    assert set(commands()) <= documented
    assert all("--json" in options_of(command) for command in commands().values())


def test_every_file_in_the_readmes_tree_exists_and_no_module_is_missing() -> None:
    (tree,) = [
        block
        for _, block in FENCE.findall(PAGES[0].read_text(encoding="utf-8"))
        if block.startswith("impress_cli/")
    ]
    for package in ("impress_cli", "pipelines", "store"):
        below = tree.split(f"{package}/", 1)[1]
        section = re.split(r"^\S", below, maxsplit=1, flags=re.MULTILINE)[0]
        named = set(re.findall(r"\w+\.py", section))
        here = {path.name for path in (ROOT / package).glob("*.py")} - {"__init__.py"}
        assert named == here, f"README's tree of {package} differs from the folder"


def test_the_python_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    for number, (language, block) in enumerate(FENCE.findall(text)):
        if language == "python":
            exec(compile(block, f"python.md, block {number}", "exec"), names)
    assert names["second"].stats.reused_tokens == len(names["prefix_ids"])


def test_the_example_of_the_format_page_opens_a_store(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kv").symlink_to(built)
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
    (block,) = [block for language, block in FENCE.findall(text) if language == "python"]
    exec(compile(block, "format.md", "exec"), {})
    assert "random:tiny-gqa" in capsys.readouterr().out
