"""``impress query --prompts``: JSON lines in, JSON lines out, one model load."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from impress_cli.ui import stdin_lines
from store.errors import ImpressError, SourceError

if TYPE_CHECKING:
    from impress_cli.asking import Asker

KEYS = ("prefix", "prompt")


def run_batch(asker: Asker, source: str) -> int:
    """Answer every line of ``source`` (``-`` is stdin); 1 if any line could not be answered.

    A line that can't be answered gives an object with ``line`` and ``error``; the others run.
    """
    failed = 0
    for number, text in _lines(source):
        try:
            reply = _answer(asker, number, text)
        except ImpressError as error:
            failed += 1
            reply = error_object(number, error)
        asker.ui.json(reply, indent=None)
    if failed:
        where = "stdin" if source == "-" else source
        asker.ui.error(
            f"{failed} of the lines in {where} could not be answered; their 'error' says why"
        )
    return 1 if failed else 0


def error_object(number: int, error: ImpressError) -> dict[str, Any]:
    """Object that stands for the answer to a line."""
    return {
        "schema": "impress.query/1",
        "line": number,
        "error": {"type": type(error).__name__, "message": str(error)},
    }


def parse_line(number: int, text: str) -> tuple[str | None, str]:
    """Prefix (or None) and prompt of a JSON line. Raises SourceError naming the line."""
    where = f"line {number}"
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise SourceError(f"{where} is JSON nested too deeply") from error
    except json.JSONDecodeError as error:
        raise SourceError(f"{where} is not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(value, dict):
        raise SourceError(f'{where} is not an object; write {{"prefix": …, "prompt": …}}')
    unknown = sorted(set(value) - set(KEYS))
    if unknown:
        raise SourceError(f"{where} has the unknown key {unknown[0]!r}; use {' and '.join(KEYS)}")
    prompt, prefix = value.get("prompt"), value.get("prefix")
    if not isinstance(prompt, str):
        raise SourceError(f"{where} has no text under 'prompt'; write the question there")
    if prefix is not None and not isinstance(prefix, str):
        raise SourceError(f"{where} has a 'prefix' that is not text; name a file or stored prefix")
    return prefix, prompt


def _answer(asker: Asker, number: int, text: str) -> dict[str, Any]:
    prefix, prompt = parse_line(number, text)
    found = asker.find(asker.settings.prefix if prefix is None else prefix)
    return asker.reply_object(asker.ask(found, prompt), line=number)


def _lines(source: str) -> Iterator[tuple[int, str]]:
    """Numbered lines that are not blank."""
    if source == "-":
        yield from _numbered(stdin_lines())
        return
    try:
        with Path(source).open(encoding="utf-8") as file:
            yield from _numbered(file)
    except UnicodeDecodeError as error:
        raise SourceError(f"{source} is not UTF-8 text; write the prompts as UTF-8") from error
    except OSError as error:
        raise SourceError(
            f"{source} can't be read ({error.strerror}); name a JSONL file"
        ) from error


def _numbered(lines: Any) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield number, line
