"""Answers of an evaluation on disk, so that one that was stopped goes on where it was.

Owns the folder of results: one JSON Lines file for each way to answer a task, named by a digest of
everything that decides the answers, and a small file of facts about the stores. An answer is
written when it is there; a process that is killed loses the one under way. Facts are read anew each
time, as another process may have noted some.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from filelock import FileLock

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

    def answers(self, way: Way, key: Mapping[str, Any]) -> Answers:
        """Answers given in one way; ``key`` is everything beside the requests that decides them."""
        text = json.dumps({"way": way, **key}, sort_keys=True, default=str)
        digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        share = "" if way.retention is None else f"-{way.retention:.6g}"
        name = re.sub(r"[^\w.@+-]", "_", f"{way.task}-{way.system}{share}-{digest}.jsonl")
        return Answers(self._folder / name)

    def of_store(self, name: str, store_id: str) -> StoreFacts:
        """Facts about the store of an id, that has a name now."""
        return StoreFacts(self, name, store_id)

    def fact(self, name: str) -> Any:
        """What was noted under a name (a JSON value), None for nothing."""
        # A new file takes the place of the old one at once, so that none is read half written.
        return self._read_facts().get(name)

    def note(self, name: str, value: Any) -> None:
        """Note a fact that a later run can't see; what other processes noted stays."""
        if self.fact(name) == value:
            return
        path, new = self._folder / _FACTS, self._folder / f".{_FACTS}.tmp"
        try:
            with FileLock(self._folder / f".{_FACTS}.lock"):
                facts = {**self._read_facts(), name: value}
                new.write_text(json.dumps(facts, indent=1, sort_keys=True), encoding="utf-8")
                new.replace(path)
        except OSError as error:
            raise _unwritable(self._folder, error) from error

    @contextmanager
    def ordering(self, store_id: str) -> Iterator[None]:
        """Hold what lets one process at a time put rows of a store in order; waits for others.

        Whoever holds it knows that an order that is noted as under way is one that was broken off.
        The kernel lets go of it when a process dies.
        """
        lock = FileLock(self._folder / f".order-{store_id}.lock")
        try:
            lock.acquire()
        except OSError as error:
            raise _unwritable(self._folder, error) from error
        try:
            yield
        finally:
            lock.release()

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


class StoreFacts:
    """Facts about one store, kept by its id: another one may take its place, and its name.

    Earlier versions went by the name alone. What they noted counts for the first store of that
    name that is seen here, so that what they began is gone on with.
    """

    def __init__(self, results: Results, name: str, store_id: str) -> None:
        self._results, self._name, self._id = results, name, store_id
        if results.fact(self._owner) is None:
            results.note(self._owner, store_id)

    @property
    def _owner(self) -> str:
        return f"store {self._name}"

    def get(self, kind: str, what: str) -> Any:
        """What was noted, None for nothing."""
        found = self._results.fact(f"{kind} {self._id} {what}")
        if found is None and self._results.fact(self._owner) == self._id:
            return self._results.fact(f"{kind} {self._name} {what}")
        return found

    def note(self, kind: str, what: str, value: Any) -> None:
        """Note a fact (a JSON value)."""
        self._results.note(f"{kind} {self._id} {what}", value)


def _unwritable(folder: Path, error: OSError) -> InvalidValueError:
    return InvalidValueError(
        f"results can't be kept in {folder} ({error.strerror}); give --results a folder that can "
        "be written"
    )
