"""What the benches of importance read: documents as streams of tokens, and files of questions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipelines.sources.documents import expand_folders
from pipelines.sources.jsonfiles import Row, iter_jsonl, require_object
from pipelines.text import SEPARATOR, TokenizerLike, encode_prefix, encode_text, read_text
from store.errors import SourceError

_KEYS = ("prefix", "prompt")


class Question(NamedTuple):
    """One line of a file of questions; ``prefix`` None means every prefix."""

    where: str
    prefix: str | None
    prompt: str


def read_questions(path: Path) -> list[Question]:
    """Read JSON lines ``{"prefix": …, "prompt": …}``. Raises SourceError naming the line."""
    questions = [_question(row) for row in iter_jsonl(path)]
    if not questions:
        raise SourceError(f'{path} holds no questions; write lines such as {{"prompt": "Why?"}}')
    return questions


def _question(row: Row) -> Question:
    value = require_object(row)
    unknown = sorted(set(value) - set(_KEYS))
    if unknown:
        raise SourceError(
            f"{row.where}: unknown key {unknown[0]!r}; use {' and '.join(map(repr, _KEYS))}"
        )
    prefix, prompt = value.get("prefix"), value.get("prompt")
    if not isinstance(prompt, str) or not prompt.strip():
        raise SourceError(f"{row.where}: no text under 'prompt'; write the question there")
    if prefix is not None and not isinstance(prefix, str):
        raise SourceError(f"{row.where}: 'prefix' is not text; name a document or stored prefix")
    return Question(row.where, prefix, prompt)


def text_files(folder: Path) -> list[Path]:
    """Text files in a folder, sorted by name. Raises SourceError where there are none."""
    if not folder.exists():
        raise SourceError(f"{folder}: no such folder; give --documents a folder of .txt files")
    return expand_folders([folder])


def named_documents(paths: Iterable[Path], questions: Iterable[Question]) -> list[Path]:
    """Documents that questions name by file name with or without its ending, each once.

    Raises SourceError naming the line of the file of questions.
    """
    known = {key: path for path in paths for key in (path.stem, path.name, str(path))}
    found: dict[Path, None] = {}
    for question in questions:
        if question.prefix is None:
            continue
        if question.prefix not in known:
            raise SourceError(
                f"{question.where}: no document {question.prefix!r} in the folder; name one of "
                "its files"
            )
        found[known[question.prefix]] = None
    return list(found)


class TextStream(NamedTuple):
    """Tokens of one document, or of several joined, uint32 (n,)."""

    name: str
    ids: np.ndarray


def document_streams(
    paths: Iterable[Path],
    tokenizer: TokenizerLike,
    wanted: int,
    least: int,
    template: str = "none",
) -> Iterator[TextStream]:
    """Yield documents of ``least`` tokens or more as they are, then shorter ones joined in order.

    A stream is cut after ``wanted`` tokens; shorter documents are joined until there are as many,
    or until there are no more.
    """
    short: list[tuple[str, str]] = []
    for path in paths:
        text = read_text(path)
        if not text.strip():
            continue
        ids = encode_prefix(tokenizer, text, template)
        if len(ids) >= least:
            yield TextStream(path.stem, ids[:wanted])
        else:
            short.append((path.stem, text))
    names: list[str] = []
    parts: list[np.ndarray] = []
    for name, text in short:
        names.append(name)
        parts.append(
            encode_text(tokenizer, SEPARATOR + text, special=False)
            if parts
            else encode_prefix(tokenizer, text, template)
        )
        if sum(map(len, parts)) >= wanted:
            yield TextStream("+".join(names), np.concatenate(parts)[:wanted])
            names, parts = [], []
    if sum(map(len, parts)) >= least:
        yield TextStream("+".join(names), np.concatenate(parts))
