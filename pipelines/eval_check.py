"""Refuse an evaluation whose tasks or data are wrong before anything that takes long is imported.

Names, folders, splits and rows are read from files as they are, by `sources.taskfiles`. What only
lm-eval can tell is left to `eval_tasks.prepare_tasks`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta

from pipelines.sources.hub import require_hub
from pipelines.sources.jsonfiles import iter_jsonl, require_object
from pipelines.sources.lmtasks import require_lm_eval, task_names
from pipelines.sources.taskfiles import (
    eval_split,
    is_function,
    may_be_named,
    single_task,
    split_files,
    unknown_task,
)
from store.errors import SourceError

_TEMPLATES = ("doc_to_text", "doc_to_target", "doc_to_choice")
#: Words of a template that may make a field one that a row need not have.
_OPTIONAL = re.compile(r"{%|{{[^}]*\b(?:if|or|and|is|in|default|d)\b")


def check_tasks(names: Sequence[str], *, data_dir: Path | None, include_path: Path | None) -> None:
    """Raise for tasks that can't be evaluated, as far as files and the hub tell.

    Neither torch nor lm-eval is imported, but where a name may be a group's or tag's.

    Parameters
    ----------
    names
        Of tasks, groups and tags.
    data_dir, include_path
        As in `EvalOptions`.

    Raises
    ------
    SourceError
        lm-eval is not installed, a name is unknown, data is missing or of another shape, or the
        hub that has it can't be reached.
    """
    root = require_lm_eval(names[0])
    later = []
    for name in names:
        config = single_task(name, include_path, root)
        if config is not None:
            _check_data(name, config, data_dir)
        elif may_be_named(name, include_path, root):
            later.append(name)
        else:
            raise unknown_task(name, data_dir=data_dir, include_path=include_path)
    members = [member for name in later for member in task_names(name, include_path)]
    for member in members:
        config = single_task(member, include_path, root)
        if config is not None:
            _check_data(member, config, data_dir)


def _check_data(name: str, config: dict[str, Any], data_dir: Path | None) -> None:
    if data_dir is None:
        require_hub(name, config)
        return
    fields = _fields(config)
    # Shots may be written in another way than the evaluated documents.
    other = config.get("fewshot_config") or {}
    shots = None if any(key in other for key in ("split", "samples", *_TEMPLATES)) else "training"
    splits = {eval_split(config), config.get("fewshot_split") or config.get(f"{shots}_split")}
    for file in split_files(config, data_dir / name):
        needed = fields if file.stem in splits else ()
        rows = _check_rows(name, file, needed)
        if not rows and file.stem == eval_split(config):
            raise SourceError(
                f"{file}: no rows; task {name!r} has its questions there, one JSON object a line"
            )


def _check_rows(name: str, file: Path, fields: Sequence[str]) -> int:
    """Rows of a file. Raises `SourceError` for one that is no object or lacks a field.

    lm-eval writes "None" for a field that later rows lack, so that nothing else would tell.
    """
    rows = 0
    for rows, row in enumerate(iter_jsonl(file), start=1):  # noqa: B007
        found = require_object(row)
        missing = next((field for field in fields if field not in found), None)
        if missing is not None:
            raise SourceError(
                f"{row.where}: no field {missing!r} (there: {', '.join(found) or 'none'}), which "
                f"task {name!r} needs in each row; check the rows' fields"
            )
    return rows


def _fields(config: dict[str, Any]) -> list[str]:
    """Fields that every row must have: those that the task's templates write whatever a row is."""
    if config.get("process_docs") is not None:
        return []  # rows are changed before the templates see them
    found: dict[str, None] = {}
    for key in _TEMPLATES:
        value = config.get(key)
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and not is_function(text):
                found.update(dict.fromkeys(_written(text)))
    return list(found)


def _written(text: str) -> Iterator[str]:
    if "{{" not in text or _OPTIONAL.search(text):
        return
    try:
        yield from sorted(jinja2.meta.find_undeclared_variables(jinja2.Environment().parse(text)))
    except jinja2.TemplateError:
        return
