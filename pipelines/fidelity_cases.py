"""What the benches of importance ask: prefixes, the queries behind them, and a history of others.

From a folder of documents, a prefix is the first tokens of a document (short ones are joined) and
the query is the document's own continuation. Questions from a file replace the continuations. A
store's prefixes are used as they are. It runs no model; which queries make a history is
`fidelity_history`'s.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipelines.fidelity_history import kept_back, with_history
from pipelines.fidelity_texts import (
    Question,
    TextStream,
    document_streams,
    named_documents,
    read_questions,
    text_files,
)
from pipelines.fidelity_values import BenchCase, CaseOptions, Cases
from pipelines.text import encode_prefix, encode_question, read_text
from store.errors import ChunkLoadError, InvalidValueError, PromptError, SourceError

if TYPE_CHECKING:
    from pipelines.models import LoadedModel
    from store.engine import PrefixStore
    from store.index.rows import PrefixRow


def document_cases(model: LoadedModel, folder: Path, options: CaseOptions) -> Cases:
    """Cases from text files.

    Continuations are the same whatever ``history_from`` says, so that they can be compared.

    Raises
    ------
    SourceError
        No such folder, no text files in it, or too few tokens for one prefix.
    InvalidValueError, PromptError
        Prefix and query need more positions than the model has.
    """
    paths = text_files(folder)
    if options.queries is None:
        asked = own = _continued_documents(model, paths, options)
    else:
        asked = _asked_documents(model, paths, options, read_questions(options.queries))
        own = [kept_back(case, options.history) for case in asked]
    found = _checked(asked, [], options, _too_short(folder, options))
    return with_history(found, own, options, model.max_positions)


def _asked_documents(
    model: LoadedModel, paths: list[Path], options: CaseOptions, questions: list[Question]
) -> list[BenchCase]:
    """Documents that questions name, cut to length; all of them, joined, where none does."""
    template, longest = "auto", options.prefix_tokens
    if any(question.prefix for question in questions):
        named = named_documents(paths, questions)
        whole = (encode_prefix(model.tokenizer, read_text(path), template) for path in named)
        streams: Iterator[TextStream] = (
            TextStream(path.stem, ids) for path, ids in zip(named, whole, strict=True)
        )
    else:
        streams = document_streams(paths, model.tokenizer, longest, longest, template)
    return [
        _asked(model, stream.name, stream.ids[:longest], template, questions)
        for stream in islice(streams, options.prefixes)
    ]


def _continued_documents(
    model: LoadedModel, paths: list[Path], options: CaseOptions
) -> list[BenchCase]:
    prefix, query = options.prefix_tokens, options.query_tokens
    least = prefix + query
    if least > model.max_positions:
        raise InvalidValueError(
            f"--prefix-tokens {prefix} and --query-tokens {query} need {least} positions, "
            f"{model.spec} has {model.max_positions}; give fewer --prefix-tokens"
        )
    wanted = least + query * options.history
    streams = document_streams(paths, model.tokenizer, wanted, least)
    return [continued(stream, options) for stream in islice(streams, options.prefixes)]


def _too_short(folder: Path, options: CaseOptions) -> SourceError:
    least, parts = options.prefix_tokens, f"--prefix-tokens {options.prefix_tokens}"
    if options.queries is None:
        least += options.query_tokens
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
    """Cut a document into prefix, query and a history of its own.

    ::

        | prefix | query | history 0 | history 1 | ...      each window query_tokens long
    """
    first, size = options.prefix_tokens, options.query_tokens
    starts = range(first, len(stream.ids) - size + 1, size)[: options.history + 1]
    windows = [stream.ids[start : start + size] for start in starts]
    return BenchCase(stream.name, stream.ids[:first], (windows[0],), tuple(windows[1:]))


def _asked(
    model: LoadedModel,
    name: str,
    ids: np.ndarray,
    template: str,
    questions: Iterable[Question],
) -> BenchCase:
    """A prefix with its questions."""
    prompts = [q.prompt for q in questions if q.prefix is None or Path(q.prefix).stem == name]
    return BenchCase(name, ids, question_ids(model, name, ids, template, prompts))


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
