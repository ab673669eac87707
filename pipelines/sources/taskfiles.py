"""lm-eval's task files read as text: which names there are, and what a task's data must hold.

Importing lm-eval takes seconds and its index of all tasks half a minute. What is read here is
enough to refuse a wrong name or folder at once. Loading a task is `lmtasks`'.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from store.errors import SourceError

_YAML = ".yaml"
_IGNORED = {"__pycache__", ".ipynb_checkpoints"}
#: Files that may be included by a task file have any name, but none of these endings.
_NO_TASKS = (".py", ".pyc", ".md", ".json", ".jsonl", ".csv", ".tsv", ".sh")
_SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")
_NAMED = re.compile(rb"""^["']?(task|group|tag)["']?: *["']?([^\s"'#\[{]+)["']? *\r?$""", re.M)
#: What is larger and no .yaml is data that lies beside task files.
_LARGE_BYTES = 1 << 20
#: Similar names that a message lists, and names of folders.
_NEAREST, _LISTED = 3, 12


class _Loader(yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader):  # type: ignore[misc]
    """Reads task files without running the functions that some of them name."""


_Loader.add_constructor("!function", lambda _loader, node: _Function(node.value))


class _Function(str):
    """Name of a function that a task file leaves something to."""

    __slots__ = ()


def is_function(value: Any) -> bool:
    """Whether a setting names a function instead of being a template."""
    return isinstance(value, _Function)


class TaskFiles(NamedTuple):
    """Files by the single task that a line of theirs names, and every name that is one's line."""

    tasks: dict[str, tuple[Path, ...]]
    names: frozenset[str]


def own_root() -> Path | None:
    """Folder of lm-eval's own task files; None where lm-eval is not installed."""
    found = importlib.util.find_spec("lm_eval")
    places = None if found is None else found.submodule_search_locations
    return Path(next(iter(places))) / "tasks" if places else None


def read_folder(root: Path) -> TaskFiles:
    """Names in the task files (.yaml) below a folder, files in order of their paths."""
    tasks: dict[str, tuple[Path, ...]] = {}
    names: set[str] = set()
    for file in sorted(file for file in _walk(root) if file.suffix == _YAML):
        for key, value in _NAMED.findall(_bytes(file)):
            name = value.decode(errors="replace")
            names.add(name)
            if key == b"task":
                tasks[name] = (*tasks.get(name, ()), file)
    return TaskFiles(tasks, frozenset(names))


# The installed package does not change while it runs; it has thousands of files.
read_own_folder = functools.lru_cache(maxsize=2)(read_folder)


def files_with_task(name: str, include_path: Path | None, root: Path) -> list[Path]:
    """Task files with a line that names a single task, the user's before lm-eval's in ``root``."""
    mine = () if include_path is None else read_folder(include_path).tasks.get(name, ())
    return [*mine, *read_own_folder(root).tasks.get(name, ())]


def single_task(name: str, include_path: Path | None, root: Path) -> dict[str, Any] | None:
    """Settings of a single task as its file has them; None where only lm-eval can tell.

    Functions are named, not resolved.
    """
    for file in files_with_task(name, include_path, root):
        config = _config(file, ())
        if config is not None and config.get("task") == name and "group" not in config:
            return config
    return None


def may_be_named(name: str, include_path: Path | None, root: Path) -> bool:
    """Whether a file could give a task, group or tag this name; False only where none can."""
    if name in read_own_folder(root).names or _is_in_own(name, root):
        return True
    return include_path is not None and _is_in(name, include_path)


def _is_in(name: str, root: Path) -> bool:
    """Whether a line of a file below a folder could name a task, group or tag so."""
    word = re.escape(name.encode())
    line = re.compile(
        rb"""^\s*(?:-\s*)?["']?(?:(?:task|group|tag)["']?\s*:.*(?<![\w-]))?["']?"""
        + word
        + rb"(?![\w-])",
        re.MULTILINE,
    )
    return any(line.search(_bytes(file)) for file in _walk(root))


_is_in_own = functools.lru_cache(maxsize=64)(_is_in)


def unknown_task(
    name: str, *, data_dir: Path | None = None, include_path: Path | None = None
) -> SourceError:
    """The error for a name that is no task, group or tag, with the names most like it."""
    root = own_root()
    known: set[str] = set() if root is None else set(read_own_folder(root).names)
    if include_path is not None:
        known |= read_folder(include_path).names
    # A name that has data is the likelier one, though others are as near.
    here = [one for one in folders_of(data_dir) if one in known]
    near = dict.fromkeys(_near(name, here) + _near(name, sorted(known)))
    meant = f"did you mean {' or '.join(list(near)[:_NEAREST])}? " if near else ""
    return SourceError(
        f"task {name!r} is no task, group or tag of lm-eval; {meant}'lm-eval ls tasks' lists "
        "them all, and --include-path takes task files of your own"
    )


def _near(name: str, known: list[str]) -> list[str]:
    return difflib.get_close_matches(name, known, _NEAREST, 0.7)


def folders_of(root: Path | None) -> list[str]:
    """Names of the folders in a folder of data, sorted."""
    try:
        return [] if root is None else sorted(one.name for one in root.iterdir() if one.is_dir())
    except OSError:
        return []


def eval_split(config: dict[str, Any]) -> str | None:
    """Split whose documents are evaluated, as lm-eval chooses it."""
    return config.get("test_split") or config.get("validation_split")


def split_files(config: dict[str, Any], folder: Path) -> list[Path]:
    """The .jsonl files of a task's data, one per split.

    Raises
    ------
    SourceError
        There is no such folder, or a split that the task needs is not in it.
    """
    name, files = folder.name, sorted(folder.glob("*.jsonl"))
    needed = sorted({str(config[key]) for key in _SPLITS if config.get(key)})
    wanted = ", ".join(f"{name}/{split}.jsonl" for split in needed) or f"{name}/<split>.jsonl"
    if not folder.is_dir():
        raise SourceError(
            f"{folder.parent}: no folder {name!r} (there: {_listed(folders_of(folder.parent))}); "
            f"task {name!r} needs {wanted} in it; add them, or take the data from the hub by "
            "naming no folder of data"
        )
    if not files:
        raise SourceError(
            f"{folder}: no .jsonl files; the folder of data must hold {wanted}, "
            "one JSON object a line"
        )
    missing = sorted(set(needed) - {file.stem for file in files})
    if missing:
        raise SourceError(
            f"{folder}: no {missing[0]}.jsonl (found: {', '.join(f.name for f in files)}); "
            f"task {name!r} needs {wanted}; add the file"
        )
    return files


def _listed(names: list[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "") or "none"


def _config(file: Path, seen: tuple[Path, ...]) -> dict[str, Any] | None:
    """Settings of a task file with those it includes; None where it can't be read as that."""
    file = file.resolve()
    try:
        # A subclass of the safe loader, which builds plain values alone.
        own = yaml.load(file.read_bytes(), Loader=_Loader)
    except (OSError, yaml.YAMLError, ValueError):
        return None
    if file in seen or not isinstance(own, dict):
        return None
    included = own.pop("include", None) or []
    merged: dict[str, Any] = {}
    for one in included if isinstance(included, list) else [included]:
        other = _config(file.parent / str(one), (*seen, file))
        if other is None:
            return None
        other.pop("task_list", None)
        merged.update(other)
    return {**merged, **own}


def _walk(root: Path) -> Iterator[Path]:
    """Files below a folder that may be task files."""
    for folder, folders, files in os.walk(root):
        folders[:] = [one for one in folders if one not in _IGNORED]
        for name in files:
            file = Path(folder, name)
            if file.suffix == _YAML or not (name.endswith(_NO_TASKS) or _is_large(file)):
                yield file


def _is_large(file: Path) -> bool:
    try:
        return file.stat().st_size > _LARGE_BYTES
    except OSError:
        return True


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""
