"""The dependency direction impress_cli → pipelines → store, read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("store", "pipelines", "impress_cli")
#: What each package must not import.
FORBIDDEN = {
    "store": {"pipelines", "impress_cli", "transformers", "lm_eval", "typer", "rich"},
    "pipelines": {"impress_cli", "typer", "rich", "prompt_toolkit"},
    "impress_cli": {"lm_eval", "sqlite3"},
}
#: Modules that may be imported when ``impress_cli.app`` is: nothing that takes long.
LIGHT = {"store.errors", "pipelines.progress"}


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported(tree: ast.AST) -> Iterator[str]:
    """Full names of imported modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or ""


def violations(package: str, source: str) -> set[str]:
    found = {name.partition(".")[0] for name in imported(ast.parse(source))}
    return found & FORBIDDEN[package]


def prints(source: str) -> list[int]:
    """Lines that call print or write to a standard stream."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            lines += [node.lineno] if node.func.id == "print" else []
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            stream = node.value.id == "sys" and node.attr in ("stdout", "stderr")
            lines += [node.lineno] if stream else []
    return lines


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_lies_below_it(package: str) -> None:
    assert modules(package), "the package has modules"
    wrong = {
        str(path.relative_to(ROOT)): sorted(bad)
        for path in modules(package)
        if (bad := violations(package, path.read_text(encoding="utf-8")))
    }
    assert wrong == {}


@pytest.mark.parametrize("package", ["store", "pipelines"])
def test_store_and_pipelines_never_print(package: str) -> None:
    wrong = {
        str(path.relative_to(ROOT)): lines
        for path in modules(package)
        if (lines := prints(path.read_text(encoding="utf-8")))
    }
    assert wrong == {}


def test_importing_the_command_reaches_only_light_modules() -> None:
    wrong = {}
    for path in modules("impress_cli"):
        top = ast.Module(
            body=_at_import(ast.parse(path.read_text(encoding="utf-8"))), type_ignores=[]
        )
        heavy = {
            name
            for name in imported(top)
            if name.partition(".")[0] in ("store", "pipelines") and name not in LIGHT
        }
        if heavy:
            wrong[path.name] = sorted(heavy)
    assert wrong == {}


def _at_import(tree: ast.Module) -> list[ast.stmt]:
    """Statements that run when the module is imported: no functions, no TYPE_CHECKING blocks."""
    return [
        node
        for node in tree.body
        if not isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    ]


def test_the_checks_see_a_violation() -> None:
    assert violations("store", "def f():\n    from transformers import AutoModel") == {
        "transformers"
    }
    assert violations("pipelines", "import rich.table") == {"rich"}
    assert prints("import sys\nprint('x')\nsys.stdout.write('y')") == [2, 3]
