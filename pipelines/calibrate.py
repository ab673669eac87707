"""Statistics of a store's nodes from given questions, beside those of its own queries.

They serve to reorder a store before anybody has asked it anything (`impress reorder --calibrate`).
Nothing of it is kept: the store's own statistics stay as they are.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pipelines.ask import find_prefix
from pipelines.attention import prefill
from pipelines.fidelity_cases import question_ids
from pipelines.progress import Progress, ProgressEvent, silent
from store.access import AccessStats
from store.errors import (
    PROBE_PREFIX,
    ChunkLoadError,
    InvalidValueError,
    PrefixNotFoundError,
    PromptError,
    SourceError,
)
from store.itf.options import SparseOptions
from store.recorder import RunRecorder
from store.sparse import SparseFetch

if TYPE_CHECKING:
    from pipelines.fidelity_texts import Question
    from pipelines.models import LoadedModel
    from store.engine import PrefixStore

log = logging.getLogger(__name__)

CALIBRATION_RETENTION = 0.25


class _Target(NamedTuple):
    """A prefix that questions are asked of; ``ids`` uint32 [n]."""

    name: str
    ids: np.ndarray
    template: str


def calibrate(
    store: PrefixStore,
    model: LoadedModel,
    questions: Sequence[Question],
    retention: float = CALIBRATION_RETENTION,
    progress: Progress = silent,
) -> AccessStats:
    """Run questions with part of the KV, and collect what they find important.

    Only up to their first token, on what of each prefix is stored. What fails to load is
    quarantined, as in any query.

    Parameters
    ----------
    questions
        With a ``prefix``, which is a file or a stored prefix, asked of that; else of every stored
        prefix, in turn, so that no prefix is the last one for what they share.
    retention
        Share of the prefix tokens to select, below 1.

    Returns
    -------
    Statistics in memory alone; as large as the nodes need.

    Raises
    ------
    InvalidValueError
        A retention that leaves nothing out, and so tells nothing.
    SourceError
        A question names no prefix or is too long (its line is named), or none met stored tokens.
    """
    sparse = SparseOptions(retention=retention)
    if not sparse.sparse:
        raise InvalidValueError(
            f"retention {retention:g} selects everything, which tells nothing; use one below 1"
        )
    # Statistics that are in no file would be lost for good if they were dropped for their size.
    access = AccessStats(None, store.shape, cache_bytes=sys.maxsize)
    recorder, recorded = RunRecorder(access), 0
    asked = _targets(store, model, questions)
    total = sum(len(targets) for _, targets in asked)
    for done, (question, target) in enumerate(_pairs(asked)):
        progress(ProgressEvent("calibrate", done, total, "questions", target.name))
        query = _encoded(model, question, target)
        if _run(store, model, target, query, sparse, recorder):
            recorded += 1
        else:
            log.warning("%s: nothing usable of %s is stored", question.where, target.name)
    progress(ProgressEvent("calibrate", total, total, "questions"))
    if not recorded:
        raise SourceError(
            f"none of the {len(questions)} questions met tokens stored in {store.path}; name "
            "stored prefixes ('impress ls' lists them), or leave the prefix out to ask all"
        )
    return access


def _targets(
    store: PrefixStore, model: LoadedModel, questions: Sequence[Question]
) -> list[tuple[Question, list[_Target]]]:
    """The prefixes of each question. Raises `SourceError` for one that is not there."""
    everything = _stored(store) if any(q.prefix is None for q in questions) else []
    named: dict[str, _Target] = {}
    for question in questions:
        if question.prefix is None or question.prefix in named:
            continue
        try:
            found = find_prefix(store, model, question.prefix, "auto")
        except (PrefixNotFoundError, ChunkLoadError) as error:
            raise SourceError(f"{question.where}: {error}") from error
        named[question.prefix] = _Target(found.name, found.ids, found.template)
    return [(q, everything if q.prefix is None else [named[q.prefix]]) for q in questions]


def _stored(store: PrefixStore) -> list[_Target]:
    """Every stored prefix whose tokens can be read."""
    found = []
    for row in store.prefixes():
        try:
            ids = store.prefix_ids(row)
        except ChunkLoadError as error:
            log.warning("prefix %s is left out: %s", row.name, error)
            store.quarantine(error)
            continue
        found.append(_Target(row.name, ids, json.loads(row.source).get("template", "auto")))
    return found


def _pairs(
    asked: Sequence[tuple[Question, list[_Target]]],
) -> Iterator[tuple[Question, _Target]]:
    for question, targets in asked:
        for target in targets:
            yield question, target


def _encoded(model: LoadedModel, question: Question, target: _Target) -> np.ndarray:
    """Token ids of a question behind its prefix, uint32 [m]."""
    try:
        (ids,) = question_ids(model, target.name, target.ids, target.template, [question.prompt])
    except PromptError as error:
        raise SourceError(f"{question.where}: {error}") from error
    return ids


def _run(
    store: PrefixStore,
    model: LoadedModel,
    target: _Target,
    query: np.ndarray,
    sparse: SparseOptions,
    recorder: RunRecorder,
) -> bool:
    """Run one question and record it; False where none of its prefix can be used."""
    ids = np.concatenate([target.ids, query]).astype(np.uint32)
    limit = len(target.ids)
    while limit > 0:
        run, match = store.begin(
            ids, max_new_tokens=0, max_match=limit, sparse=sparse, record=False
        )
        try:
            with run:
                if not isinstance(run.fetch, SparseFetch):
                    return False
                prefill(model.model, run, ids[match.matched_len :], logits=0)
                recorder.add(run.fetch)
                return True
        except ChunkLoadError as error:
            store.quarantine(error)
            if error.array.startswith(PROBE_PREFIX):
                # Whatever else serves as evidence may be damaged too; all keys are not.
                sparse = replace(sparse, evidence="full")
            else:
                limit = error.usable_before(match.matched_len)
    return False
