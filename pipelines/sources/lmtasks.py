"""lm-eval tasks, with their data from local files or the hub. The only module that loads them.

lm-eval and datasets are an optional extra and slow to import, so both are imported when a task
is needed.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jinja2

from pipelines.sources.hub import require_hub
from pipelines.sources.jsonfiles import iter_jsonl, require_object
from pipelines.sources.taskfiles import (
    files_with_task,
    may_be_named,
    own_root,
    single_task,
    split_files,
    unknown_task,
)
from store.errors import ImpressError, SourceError

_DATASET_KEYS = ("dataset_path", "dataset_name", "dataset_kwargs")
_STRUCTURE_KEYS = ("tag", "group", "task_list")
#: What a group says of a member that changes nothing of what its tasks ask.
_MEMBER_KEYS = {
    "task",
    "task_alias",
    "group",
    "group_alias",
    "aggregate_metric_list",
    "weight_by_size",
    "metadata",
}
_DATA_ERRORS = (
    OSError,
    RuntimeError,
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
    jinja2.TemplateError,
)


def load_task(name: str, *, data_dir: Path | None = None, include_path: Path | None = None) -> Any:
    """An lm-eval task object (``ConfigurableTask``).

    Parameters
    ----------
    name
        The task's name in lm-eval.
    data_dir
        Folder with ``<name>/<split>.jsonl``, used instead of the task's own data set.
    include_path
        Folder with task YAML files of the user, searched first.

    Raises
    ------
    SourceError
        lm-eval is not installed, the task is unknown, or its data can't be loaded.
    """
    try:
        from lm_eval.api.task import ConfigurableTask
        from lm_eval.tasks._yaml_loader import load_yaml
    except ImportError as error:
        raise _no_lm_eval(name, str(error)) from error
    # lm-eval's own loader also resolves the !function entries that some tasks have.
    config = {**load_yaml(_task_file(name, include_path))}
    for key in _STRUCTURE_KEYS:
        config.pop(key, None)
    with task_errors(name, data_dir), _quiet("lm_eval"):
        if data_dir is not None:
            _use_files(config, data_dir / name)
        else:
            require_hub(name, config)
        return ConfigurableTask(config=config)


@contextmanager
def task_errors(name: str, data_dir: Path | None) -> Iterator[None]:
    """Turn what a task raises on data it was not written for into a SourceError."""
    try:
        yield
    except ImpressError:
        raise
    except _DATA_ERRORS as error:
        hint = "give a folder of data (--data-dir DIR), or check the network"
        if data_dir:
            hint = f"{_odd_row(data_dir / name)}check the rows' fields"
        raise SourceError(
            f"task {name!r} can't be built ({type(error).__name__}: {error}); {hint}"
        ) from error


def _odd_row(folder: Path) -> str:
    """Where a row lacks what its file's other rows have, else what rows have; for messages."""
    files = sorted(folder.glob("*.jsonl"))
    for file in files:
        rows = [(row.where, set(require_object(row))) for row in iter_jsonl(file)]
        usual = max((fields for _, fields in rows), key=len, default=set())
        for where, fields in rows:
            if lacking := sorted(usual - fields):
                return f"{where} has no {', '.join(map(repr, lacking))}; "
    return f"{files[0]} has {', '.join(sorted(rows[0][1]))}; " if files and rows else ""


def _task_file(name: str, include_path: Path | None) -> Path:
    """YAML file of a task.

    lm-eval's index of its own tasks takes many seconds to build, so the one folder with the
    right file is indexed first, and a name that no file has is refused without it.
    """
    import lm_eval.tasks as lm_tasks
    from lm_eval.tasks import TaskManager

    own = Path(lm_tasks.__file__).parent
    for file in files_with_task(name, include_path, own):
        manager = TaskManager(include_defaults=False, include_path=str(file.parent))
        found = _yaml_path(manager.task_index, name)
        if found is not None:
            return found
    if may_be_named(name, include_path, own):
        index = task_index(include_path)
        found = _yaml_path(index, name)
        if found is not None:
            return found
        if name in index:
            raise SourceError(
                f"{name!r} is a group or tag of lm-eval, not a single task; name one of its tasks"
            )
    raise unknown_task(name, include_path=include_path)


def _yaml_path(index: Mapping[str, Any], name: str) -> Path | None:
    entry = index.get(name)
    if entry is None or entry.yaml_path is None or entry.kind.name == "GROUP":
        return None
    return Path(entry.yaml_path)


def task_names(name: str, include_path: Path | None) -> list[str]:
    """Single tasks that a name stands for: itself, or the members of the group or tag.

    lm-eval is imported, and its index built, only for a name that is no single task's on a line
    of a task file.

    Raises
    ------
    SourceError
        Nothing has the name or a member of the group has none, the group changes settings of a
        member, or lm-eval is not installed.
    """
    root = require_lm_eval(name)
    if single_task(name, include_path, root) is not None:
        return [name]
    index: dict[str, Any] = {}
    if may_be_named(name, include_path, root):
        try:
            index = task_index(include_path)
        except ImportError as error:
            raise _no_lm_eval(name, str(error)) from error
    if name not in index:
        raise unknown_task(name, include_path=include_path)
    leaves = list(dict.fromkeys(_leaves(index, name, set())))
    if not leaves:
        raise SourceError(f"{name!r} has no tasks in it; name tasks themselves")
    return leaves


def _leaves(index: Mapping[str, Any], name: str, seen: set[str]) -> list[str]:
    """Single tasks below a name of the index. Raises `SourceError`."""
    if name in seen:
        return []
    seen.add(name)
    entry = index[name]
    kind = entry.kind.name
    if kind == "TAG":
        return _of_members(index, name, sorted(entry.tags), seen)
    if kind == "GROUP":
        return _of_members(index, name, (entry.cfg or {}).get("task"), seen)
    return [name]


def _of_members(index: Mapping[str, Any], group: str, members: Any, seen: set[str]) -> list[str]:
    """Single tasks below the members of a group, which are names or written out in its file."""
    found: list[str] = []
    for member in members if isinstance(members, list) else [members] if members else []:
        inner = member.get("task") if isinstance(member, dict) else None
        if isinstance(member, dict):
            _require_plain(group, member)
        if isinstance(inner, list):
            # A group that is written where it is used, and has no entry in the index.
            found += _of_members(index, str(member.get("group") or group), inner, seen)
            continue
        name: Any = inner or member.get("group") if isinstance(member, dict) else member
        if not isinstance(name, str) or name not in index:
            raise SourceError(
                f"group {group!r} has a member {name!r} that is no task, group or tag of lm-eval; "
                "name those of its tasks that are to be used themselves"
            )
        found += _leaves(index, name, seen)
    return found


def _require_plain(group: str, member: dict[str, Any]) -> None:
    """Raise `SourceError` for a member with settings of its own: a task is used as its file is."""
    name = member.get("task") or member.get("group")
    named = member.get("group") if isinstance(name, list) else name
    if settings := sorted(set(member) - _MEMBER_KEYS):
        raise SourceError(
            f"group {group!r} changes settings of its member {named!r} ({', '.join(settings)}), "
            "which is not done here; name tasks themselves, or give the changed one a task file "
            "of its own (--include-path)"
        )


def require_lm_eval(name: str) -> Path:
    """Folder of lm-eval's task files. Raises `SourceError` where lm-eval is not installed."""
    root = own_root()
    if root is None:
        raise _no_lm_eval(name, "No module named 'lm_eval'")
    return root


def _no_lm_eval(name: str, reason: str) -> SourceError:
    return SourceError(
        f"few-shot prefixes of {name!r} need lm-eval ({reason}); "
        "install it with: pip install impress-kv[eval]"
    )


def task_index(include_path: Path | None) -> dict[str, Any]:
    """lm-eval's index of all names; entries of the user's folder come before its own.

    Its own part takes half a minute and is built once in a process. Raises ImportError where
    lm-eval is not installed.
    """
    from lm_eval.tasks import TaskManager

    with _quiet("lm_eval"):
        index = dict(_own_index(TaskManager))
        if include_path is not None:
            manager = TaskManager(include_defaults=False, include_path=str(include_path))
            index.update(manager.task_index)
    return index


@functools.lru_cache(maxsize=1)
def _own_index(manager: Callable[[], Any]) -> dict[str, Any]:
    index: dict[str, Any] = manager().task_index
    return index


def _use_files(config: dict[str, Any], folder: Path) -> None:
    """Replace the task's data set by the .jsonl files of a folder, one per split."""
    from datasets import Dataset, DatasetDict

    files = split_files(config, folder)
    splits = {
        file.stem: Dataset.from_list([require_object(row) for row in iter_jsonl(file)])
        for file in files
    }
    for key in _DATASET_KEYS:
        config.pop(key, None)
    config["custom_dataset"] = lambda **_: DatasetDict(splits)


@contextmanager
def _quiet(logger_name: str) -> Iterator[None]:
    """Hold back a library's advice about settings that are chosen on purpose here."""
    logger = logging.getLogger(logger_name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
