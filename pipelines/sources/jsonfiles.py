"""JSON and JSON Lines files, with errors that name the file and the line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pipelines.text import decode_text, read_text
from store.errors import SourceError


class Row(NamedTuple):
    """One JSON value of a file; ``where`` is ``file:line`` for messages."""

    where: str
    number: int
    value: Any


def iter_jsonl(path: Path) -> Iterator[Row]:
    """Yield the rows of a JSON Lines file one by one; blank lines are left out.

    Raises
    ------
    SourceError
        The file can't be read, or a line is not UTF-8 or not JSON.
    """
    offset = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                where = f"{path}:{number}"
                text = decode_text(line, where, offset).strip()
                offset += len(line)
                if text:
                    yield Row(where, number, _loads(text, where))
    except OSError as error:
        raise SourceError(
            f"{path}: can't be read ({error.strerror}); give a readable file"
        ) from error


def count_lines(path: Path) -> int:
    """Lines of a file that are not blank. Raises SourceError if it can't be read."""
    try:
        with path.open("rb") as file:
            return sum(1 for line in file if line.strip())
    except OSError as error:
        raise SourceError(
            f"{path}: can't be read ({error.strerror}); give a readable file"
        ) from error


def iter_json(path: Path) -> Iterator[Row]:
    """Yield the elements of a file that holds one JSON array (or the one object it holds)."""
    value = _loads(read_text(path), str(path))
    for number, element in enumerate(value if isinstance(value, list) else [value], start=1):
        yield Row(f"{path} element {number}", number, element)


def _loads(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise SourceError(f"{where}: JSON nested too deeply; correct or remove it") from error
    except json.JSONDecodeError as error:
        place = f"column {error.colno}"
        if error.lineno > 1:
            place = f"line {error.lineno} {place}"
        raise SourceError(
            f"{where}: not JSON at {place} ({error.msg}); correct or remove it"
        ) from error


def as_texts(value: Any, where: str, field: str) -> list[str]:
    """A text, a list of texts, or nothing, as a list of texts."""
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and all(isinstance(text, str) for text in value):
        return list(value)
    raise SourceError(
        f"{where}: {field!r} is {type(value).__name__}; it must be a text or a list of texts"
    )


def require_object(row: Row) -> dict[str, Any]:
    """The row's value as an object."""
    if not isinstance(row.value, dict):
        raise SourceError(
            f"{row.where}: a JSON {type(row.value).__name__}; each row must be an object"
        )
    return row.value
