"""lm-eval tasks, with their data from local files or the hub. The only module that loads them.

lm-eval and datasets are an optional extra and slow to import, so both are imported when a task
is needed.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jinja2

from pipelines.sources.jsonfiles import iter_jsonl, require_object
from store.errors import ImpressError, SourceError

_DATASET_KEYS = ("dataset_path", "dataset_name", "dataset_kwargs")
_STRUCTURE_KEYS = ("tag", "group", "task_list")
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
        raise SourceError(
            f"few-shot prefixes of {name!r} need lm-eval ({error}); "
            "install it with: pip install impress-kv[eval]"
        ) from error
    # lm-eval's own loader also resolves the !function entries that some tasks have.
    config = {**load_yaml(_task_file(name, include_path))}
    for key in _STRUCTURE_KEYS:
        config.pop(key, None)
    with task_errors(name, data_dir), _quiet("lm_eval"):
        if data_dir is not None:
            _use_files(config, data_dir / name)
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
            hint = "check the rows' fields"
        raise SourceError(
            f"task {name!r} can't be built ({type(error).__name__}: {error}); {hint}"
        ) from error


def _task_file(name: str, include_path: Path | None) -> Path:
    """YAML file of a task.

    lm-eval's index of its own tasks takes many seconds to build, so the one folder with the
    right file is indexed first.
    """
    import lm_eval.tasks as lm_tasks
    from lm_eval.tasks import TaskManager

    own = Path(lm_tasks.__file__).parent
    mine = [] if include_path is None else _files_with_task(include_path, name)
    for file in (*mine, *_own_files_with_task(own, name)):
        found = _indexed(TaskManager(include_defaults=False, include_path=str(file.parent)), name)
        if found is not None:
            return found
    everything = TaskManager(include_path=None if include_path is None else str(include_path))
    found = _indexed(everything, name)
    if found is None:
        raise SourceError(
            f"task {name!r} is not a single task of lm-eval; 'lm-eval ls tasks' lists what there is"
        )
    return found


def _indexed(manager: Any, name: str) -> Path | None:
    entry = manager.task_index.get(name)
    return None if entry is None or entry.yaml_path is None else Path(entry.yaml_path)


def _files_with_task(root: Path, name: str) -> list[Path]:
    line = re.compile(rf"^task: *[\"']?{re.escape(name)}[\"']? *$", re.MULTILINE)
    return [
        file
        for file in sorted(root.glob("**/*.yaml"))
        if line.search(file.read_text(encoding="utf-8", errors="replace"))
    ]


# The installed package does not change while it runs; it has thousands of files.
_own_files_with_task = functools.lru_cache(maxsize=64)(_files_with_task)


def _use_files(config: dict[str, Any], folder: Path) -> None:
    """Replace the task's data set by the .jsonl files of a folder, one per split."""
    from datasets import Dataset, DatasetDict

    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise SourceError(
            f"{folder}: no .jsonl files; data_dir must hold {folder.name}/<split>.jsonl"
        )
    needed = [config.get(f"{kind}_split") for kind in ("training", "validation", "test")]
    needed += [config.get("fewshot_split")]
    missing = sorted({split for split in needed if split} - {file.stem for file in files})
    if missing:
        raise SourceError(
            f"{folder}: no {missing[0]}.jsonl (found: {', '.join(f.name for f in files)}); "
            f"the task needs the split {missing[0]}"
        )
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
