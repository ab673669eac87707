"""Answers of an evaluation on disk, so that one that was stopped goes on where it was.

Owns the folder of results: one JSON Lines file for each way to answer a task, named by a digest of
everything that decides the answers, and a small file of facts about the stores. An answer is
written when it is there; a process that is killed loses the one under way.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from pipelines.eval_values import Scored, Way
from store.errors import InvalidValueError

log = logging.getLogger(__name__)

_FACTS = "stores.json"
_FIELDS = {field.name for field in fields(Scored)} - {"metrics"}


class Answers:
    """Answers of one way, by document.

    Parameters
    ----------
    path
        Their file; made when the first answer comes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[int, tuple[str, Scored]] = {}
        for line in _whole_lines(path):
            self._take(line)

    def get(self, document: int, request: str) -> Scored | None:
        """The answer to a document; None unless it was given to requests of this digest."""
        known = self._known.get(document)
        return known[1] if known is not None and known[0] == request else None

    def add(self, answer: Scored, request: str) -> None:
        """Keep an answer. Raises `InvalidValueError` where the folder can't be written."""
        self._known[answer.document] = (request, answer)
        body = {name: value for name, value in asdict(answer).items() if name in _FIELDS}
        line = json.dumps({"request": request, **body}, ensure_ascii=False)
        try:
            with self._path.open("ab") as file:
                file.write(line.encode() + b"\n")
        except OSError as error:
            raise _unwritable(self._path.parent, error) from error

    def _take(self, line: bytes) -> None:
        """Take over a line; one that is no answer counts as none, and is given again."""
        try:
            row = json.loads(line)
            request = row.pop("request")
            row["loglikelihoods"] = tuple(row["loglikelihoods"])
            row["greedy"] = tuple(row["greedy"])
            answer = Scored(**row)
        except (ValueError, KeyError, TypeError) as error:
            log.warning("%s: an answer can't be read and is given again: %s", self._path, error)
            return
        self._known[answer.document] = (request, answer)


def _whole_lines(path: Path) -> list[bytes]:
    """Lines of a file that end; what a killed process wrote of the last one is cut off."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _unwritable(path.parent, error) from error
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        try:
            with path.open("r+b") as file:
                file.truncate(whole)
        except OSError as error:
            raise _unwritable(path.parent, error) from error
    return data[:whole].splitlines()


class Results:
    """The folder of results. Raises `InvalidValueError` where it can't be made or written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(folder, error) from error
        self._facts = self._read_facts()

    def answers(self, way: Way, key: Mapping[str, Any]) -> Answers:
        """Answers given in one way; ``key`` is everything beside the requests that decides them."""
        text = json.dumps({"way": way, **key}, sort_keys=True, default=str)
        digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        share = "" if way.retention is None else f"-{way.retention:.6g}"
        name = re.sub(r"[^\w.@+-]", "_", f"{way.task}-{way.system}{share}-{digest}.jsonl")
        return Answers(self._folder / name)

    def fact(self, name: str) -> Any:
        """What was noted under a name (a JSON value), None for nothing."""
        return self._facts.get(name)

    def note(self, name: str, value: Any) -> None:
        """Note a fact about a store that a later run can't see."""
        if self._facts.get(name) == value:
            return
        self._facts[name] = value
        path, new = self._folder / _FACTS, self._folder / f".{_FACTS}.tmp"
        try:
            new.write_text(json.dumps(self._facts, indent=1, sort_keys=True), encoding="utf-8")
            new.replace(path)
        except OSError as error:
            raise _unwritable(self._folder, error) from error

    def _read_facts(self) -> dict[str, Any]:
        path = self._folder / _FACTS
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            log.warning("%s can't be read and is written anew: %s", path, error)
            return {}
        return found if isinstance(found, dict) else {}


def _unwritable(folder: Path, error: OSError) -> InvalidValueError:
    return InvalidValueError(
        f"results can't be kept in {folder} ({error.strerror}); give --results a folder that can "
        "be written"
    )
