"""What the benches of importance ask: prefixes, the queries behind them, and a history of others.

From a folder of documents, a prefix is the first tokens of a document (short ones are joined) and
the query is the document's own continuation. Questions from a file replace the continuations. A
store's prefixes are used as they are. It runs no model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pipelines.fidelity_texts import (
    Question,
    TextStream,
    document_streams,
    read_questions,
    text_files,
)
from pipelines.text import encode_prefix, encode_question, read_text
from store.errors import ChunkLoadError, InvalidValueError, PromptError, SourceError

if TYPE_CHECKING:
    from pipelines.models import LoadedModel
    from store.engine import PrefixStore
    from store.index.rows import PrefixRow


@dataclass(frozen=True, slots=True)
class CaseOptions:
    """Which prefixes and queries are measured.

    Parameters
    ----------
    prefix_tokens
        Length of a prefix taken from documents; stored prefixes keep their own.
    prefixes
        How many prefixes at most.
    query_tokens
        Length of a query that continues its document.
    history
        Other queries per prefix, from which the evidence ``static`` takes its importance.
    queries
        JSON lines ``{"prefix": …, "prompt": …}`` instead of continuations; a line without
        ``prefix`` is asked of every prefix.
    """

    prefix_tokens: int = 2048
    prefixes: int = 8
    query_tokens: int = 64
    history: int = 6
    queries: Path | None = None

    def __post_init__(self) -> None:
        for name, least in (("prefix_tokens", 1), ("prefixes", 1), ("query_tokens", 1)):
            _at_least(name, getattr(self, name), least)
        _at_least("history", self.history, 0)


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise InvalidValueError(
            f"--{name.replace('_', '-')} {value} is not allowed; give {least} or more"
        )


@dataclass(frozen=True, slots=True)
class BenchCase:
    """One prefix, uint32 (n,); ``queries`` are measured, ``history`` are others, each uint32."""

    name: str
    prefix_ids: np.ndarray
    queries: tuple[np.ndarray, ...]
    history: tuple[np.ndarray, ...] = ()


class Cases(NamedTuple):
    """The cases, at least one, and what has to be said about them."""

    cases: list[BenchCase]
    warnings: list[str]


def document_cases(model: LoadedModel, folder: Path, options: CaseOptions) -> Cases:
    """Cases from text files.

    Raises
    ------
    SourceError
        No such folder, no text files in it, or too few tokens for one prefix.
    InvalidValueError, PromptError
        Prefix and query need more positions than the model has.
    """
    paths = text_files(folder)
    if options.queries is None:
        return _continued_documents(model, folder, paths, options)
    return _asked_documents(model, folder, paths, options, read_questions(options.queries))


def _asked_documents(
    model: LoadedModel,
    folder: Path,
    paths: list[Path],
    options: CaseOptions,
    questions: list[Question],
) -> Cases:
    """Documents that questions name, cut to length; all of them, joined, where none does."""
    template, longest = "auto", options.prefix_tokens
    if any(question.prefix for question in questions):
        named = _named_documents(paths, questions)
        whole = (encode_prefix(model.tokenizer, read_text(path), template) for path in named)
        streams: Iterator[TextStream] = (
            TextStream(path.stem, ids) for path, ids in zip(named, whole, strict=True)
        )
    else:
        streams = document_streams(paths, model.tokenizer, longest, longest, template)
    cases = [
        _asked(model, stream.name, stream.ids[:longest], template, questions, options.history)
        for stream in islice(streams, options.prefixes)
    ]
    return _checked(cases, [], options, _too_short(folder, longest, options))


def _continued_documents(
    model: LoadedModel, folder: Path, paths: list[Path], options: CaseOptions
) -> Cases:
    prefix, query = options.prefix_tokens, options.query_tokens
    least = prefix + query
    if least > model.max_positions:
        raise InvalidValueError(
            f"--prefix-tokens {prefix} and --query-tokens {query} need {least} positions, "
            f"{model.spec} has {model.max_positions}; give fewer --prefix-tokens"
        )
    wanted = least + query * options.history
    streams = document_streams(paths, model.tokenizer, wanted, least)
    cases = [continued(stream, options) for stream in islice(streams, options.prefixes)]
    warnings = [
        f"{case.name}: {len(case.history)} of {options.history} history queries, its text ends"
        for case in cases
        if len(case.history) < options.history
    ]
    return _checked(cases, warnings, options, _too_short(folder, least, options))


def _too_short(folder: Path, least: int, options: CaseOptions) -> SourceError:
    parts = f"--prefix-tokens {options.prefix_tokens}"
    if options.queries is None:
        parts += f" and --query-tokens {options.query_tokens}"
    return SourceError(
        f"{folder}: all documents together have fewer than the {least} tokens that {parts} need; "
        "give more documents or fewer tokens"
    )


def _checked(
    cases: list[BenchCase], warnings: list[str], options: CaseOptions, none: SourceError
) -> Cases:
    if not cases:
        raise none
    if len(cases) < options.prefixes:
        warnings.append(f"there are {len(cases)} of the {options.prefixes} prefixes asked for")
    return Cases(cases, warnings)


def continued(stream: TextStream, options: CaseOptions) -> BenchCase:
    """Cut a document into prefix, query and history.

    ::

        | prefix | query | history 0 | history 1 | ...      each window query_tokens long
    """
    first, size = options.prefix_tokens, options.query_tokens
    starts = range(first, len(stream.ids) - size + 1, size)[: options.history + 1]
    windows = [stream.ids[start : start + size] for start in starts]
    return BenchCase(stream.name, stream.ids[:first], (windows[0],), tuple(windows[1:]))


def _named_documents(paths: Iterable[Path], questions: Iterable[Question]) -> list[Path]:
    """Documents that questions name by file name with or without its ending, each once."""
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


def _asked(
    model: LoadedModel,
    name: str,
    ids: np.ndarray,
    template: str,
    questions: Iterable[Question],
    history: int,
) -> BenchCase:
    """A prefix with its questions; of several, the last ones are kept back as its history."""
    prompts = [q.prompt for q in questions if q.prefix is None or Path(q.prefix).stem == name]
    queries = question_ids(model, name, ids, template, prompts)
    measured = max(1, len(queries) - history)
    return BenchCase(name, ids, queries[:measured], queries[measured:])


def question_ids(
    model: LoadedModel, name: str, ids: np.ndarray, template: str, prompts: Iterable[str]
) -> tuple[np.ndarray, ...]:
    """Token ids of questions behind a prefix. Raises PromptError where one does not fit."""
    queries = tuple(encode_question(model.tokenizer, text, template) for text in prompts)
    longest = max(map(len, queries), default=0)
    if len(ids) + longest > model.max_positions:
        raise PromptError(
            f"{name}: prefix ({len(ids)} tokens) and longest question ({longest}) need more than "
            f"the {model.max_positions} positions of {model.spec}; shorten one of them"
        )
    return queries


def stored_cases(model: LoadedModel, store: PrefixStore, options: CaseOptions) -> Cases:
    """Cases from a store's prefixes: with given questions, else their own, else their last tokens.

    They have no history: the statistics of the store's own queries stand for it.

    Raises
    ------
    SourceError
        No prefix of the store can be used.
    PrefixNotFoundError
        A question names a prefix that is not stored.
    """
    questions = read_questions(options.queries) if options.queries else []
    keys = dict.fromkeys(q.prefix for q in questions if q.prefix is not None)
    rows = [store.prefix(key) for key in keys] if keys else store.prefixes()
    cases: list[BenchCase] = []
    warnings: list[str] = []
    for row in {row.prefix_id: row for row in rows}.values():
        if len(cases) == options.prefixes:
            break
        found = _stored_case(model, store, row, questions, options)
        if isinstance(found, str):
            warnings.append(f"{row.name} was left out: {found}")
        else:
            cases.append(found)
    detail = f" ({warnings[0]})" if warnings else ""
    none = SourceError(
        f"{store.path} holds no prefix that can be measured{detail}; store one with "
        "'impress build-store'"
    )
    return _checked(cases, warnings, options, none)


def _stored_case(
    model: LoadedModel,
    store: PrefixStore,
    row: PrefixRow,
    questions: list[Question],
    options: CaseOptions,
) -> BenchCase | str:
    """The case of a stored prefix, or why there is none."""
    try:
        ids = store.prefix_ids(row)
    except ChunkLoadError as error:
        return str(error)
    if store.match(ids).matched_len < len(ids):
        return "part of it is damaged; run 'impress verify --repair'"
    source: dict[str, Any] = json.loads(row.source)
    prompts = [q.prompt for q in questions if q.prefix is None or store.prefix(q.prefix) == row]
    prompts = prompts or ([] if questions else list(source.get("queries") or []))
    if prompts:
        template = source.get("template", "auto")
        return BenchCase(row.name, ids, question_ids(model, row.name, ids, template, prompts))
    cut = len(ids) - options.query_tokens
    if cut < 1:
        return f"it has {len(ids)} tokens, too few to cut a query of {options.query_tokens} off"
    return BenchCase(row.name, ids[:cut], (ids[cut:],))
