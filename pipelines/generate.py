"""Answer one prompt on the store: match, load, prefill, decode greedily, keep the prefix.

Owns the order of events, the clock that stops at the first token, and recovery: stored KV that
fails to load is quarantined and the prompt is answered by recomputing from there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from pipelines.attention import forward, prefill
from pipelines.models import LoadedModel
from pipelines.query_stats import Attempts, lifetime_amounts, miss_reasons, query_stats
from store.engine import PrefixStore
from store.errors import PROBE_PREFIX, ChunkLoadError, InvalidValueError, PromptError, StoreError
from store.index.radix import PrefixMatch
from store.itf.options import SparseOptions
from store.query_run import QueryRun
from store.stats import LayerReport, QueryStats

log = logging.getLogger(__name__)

PLANS = ("auto", "force-load", "force-recompute")
INSERTS = ("exact", "never")
#: Another process may be reordering a node, which takes about as long.
_WRITE_WAIT_S = 10.0
_READ_ONLY = "the store can't be written, so the prefix was not stored"


@dataclass(frozen=True, slots=True)
class QueryOptions:
    """How a prompt is answered; raises `InvalidValueError` for a value that is not allowed.

    ``record`` says whether what a sparse query selects counts in the access statistics.
    """

    max_new_tokens: int = 64
    plan: str = "auto"
    insert: str = "exact"
    sparse: SparseOptions = field(default_factory=SparseOptions)
    record: bool = True

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise InvalidValueError(
                f"max-new-tokens {self.max_new_tokens} is not allowed; use 1 or more"
            )
        for name, value, allowed in (
            ("plan", self.plan, PLANS),
            ("insert", self.insert, INSERTS),
        ):
            if value not in allowed:
                raise InvalidValueError(
                    f"{name} {value!r} is not known; use one of {', '.join(allowed)}"
                )


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer and what it cost.

    ``logits`` float [vocab] are those of the first answer token; ``matched`` is the match that
    was used in the end; ``layers`` what a sparse query did in each; ``insert_note`` says why the
    prefix was not stored, if it should have been.
    """

    text: str
    token_ids: list[int]
    stats: QueryStats
    logits: torch.Tensor = field(repr=False)
    matched: PrefixMatch = field(repr=False)
    layers: tuple[LayerReport, ...] = field(default=(), repr=False)
    inserted_tokens: int = 0
    insert_note: str = ""


def answer(
    store: PrefixStore,
    model: LoadedModel,
    prefix_ids: np.ndarray,
    suffix_ids: np.ndarray,
    *,
    options: QueryOptions | None = None,
    on_text: Callable[[str], None] | None = None,
    name: str | None = None,
    source: dict[str, Any] | None = None,
) -> Answer:
    """Answer a prompt with greedy decoding.

    Parameters
    ----------
    prefix_ids, suffix_ids
        uint32 [p], [m ≥ 1]; only the prefix is ever stored.
    on_text
        Gets pieces of the answer as they are decoded.
    name, source
        Under which the prefix is listed if it is stored now.

    Raises
    ------
    PromptError
        The prompt is empty or has more tokens than the model has positions.
    """
    options = options or QueryOptions()
    ids = _checked_prompt(prefix_ids, suffix_ids, model)
    room = min(options.max_new_tokens, model.max_positions - len(ids))
    attempts, started = Attempts(), time.perf_counter()
    run, match, logits = first_logits(store, model, ids, room, options, attempts)
    with run:
        token = int(logits.argmax())
        ttft_s = time.perf_counter() - started
        reasons = miss_reasons(match, ids, prefix_ids, options.plan)
        retention = options.sparse.retention
        stats = query_stats(ttft_s, attempts, run, len(ids), retention, reasons)
        layers = tuple(run.reports)
        tokens, text = _decode(model, run, token, room, on_text)
        if not layers:
            kept = _keep_prefix(store, run, match, prefix_ids, options, name, source)
    if layers:
        kept = _keep_exact(store, model, match, prefix_ids, options, name, source)
    recompute = options.plan == "force-recompute"
    _count(store, stats, 0 if recompute else max(len(prefix_ids), stats.reused_tokens))
    return Answer(text, tokens, stats, logits, match, layers, *kept)


def _checked_prompt(
    prefix_ids: np.ndarray, suffix_ids: np.ndarray, model: LoadedModel
) -> np.ndarray:
    if len(suffix_ids) == 0:
        raise PromptError("the prompt is empty; type a question")
    ids = np.concatenate([prefix_ids, suffix_ids]).astype(np.uint32)
    if len(ids) >= model.max_positions:
        raise PromptError(
            f"the prompt has {len(ids)} tokens (prefix {len(prefix_ids)}, question "
            f"{len(suffix_ids)}), the model has {model.max_positions} positions and needs one for "
            "the answer; shorten the prompt"
        )
    return ids


def first_logits(
    store: PrefixStore,
    model: LoadedModel,
    ids: np.ndarray,
    room: int,
    options: QueryOptions,
    attempts: Attempts,
) -> tuple[QueryRun, PrefixMatch, torch.Tensor]:
    """Prefill until it succeeds; it ends, as a failed load shortens the match or costs evidence."""
    max_match: int | None = None
    load, sparse = options.plan != "force-recompute", options.sparse
    while True:
        began = time.perf_counter()
        run, match = store.begin(
            ids,
            max_new_tokens=room,
            load=load,
            max_match=max_match,
            sparse=sparse,
            record=options.record,
        )
        attempts.match_s += time.perf_counter() - began
        attempts.recovered += match.error is not None
        try:
            began = time.perf_counter()
            logits = prefill(model.model, run, ids[match.matched_len :], logits=1)
            assert logits is not None
            return run, match, logits[0]
        except ChunkLoadError as error:
            run.close()
            store.quarantine(error)
            attempts.reasons.append(str(error).split(";")[0])
            if error.array.startswith(PROBE_PREFIX):
                log.warning("reading all keys after a failed load of evidence: %s", error)
                # Whatever else serves as evidence may be damaged too; all keys are not.
                sparse = replace(sparse, evidence="full")
            else:
                log.warning("recomputing after a failed load: %s", error)
                attempts.recovered += 1
                max_match = error.usable_before(match.matched_len)
        except BaseException:
            run.close()
            raise
        finally:
            attempts.forward_s += time.perf_counter() - began
            attempts.forward_tokens += run.position - run.matched_len
            attempts.add_run(run)


def _decode(
    model: LoadedModel,
    run: QueryRun,
    first: int,
    room: int,
    on_text: Callable[[str], None] | None,
) -> tuple[list[int], str]:
    """Greedy decoding on the run's own rows, from the first token on."""
    tokens, shown = [first], ""
    while True:
        ended = tokens[-1] in model.stop_ids
        shown = _show(model, tokens, shown, on_text, whole=ended or len(tokens) == room)
        if ended or len(tokens) == room:
            return tokens, shown
        step = forward(model.model, run, np.asarray(tokens[-1:], np.uint32), logits=1)
        assert step is not None
        tokens.append(int(step[0].argmax()))


def _show(
    model: LoadedModel,
    tokens: list[int],
    shown: str,
    on_text: Callable[[str], None] | None,
    *,
    whole: bool,
) -> str:
    """Hand out the text that is new; a character still in the making waits for its end."""
    text = str(model.tokenizer.decode(tokens, skip_special_tokens=True))
    if text.endswith("\ufffd") and not whole:
        return shown
    if on_text is not None and text.startswith(shown) and len(text) > len(shown):
        on_text(text[len(shown) :])
    return text


def _keep_prefix(
    store: PrefixStore,
    run: QueryRun,
    match: PrefixMatch,
    prefix_ids: np.ndarray,
    options: QueryOptions,
    name: str | None,
    source: dict[str, Any] | None,
) -> tuple[int, str]:
    """Store the part of the prefix the store lacked; returns (tokens, why not)."""
    start, end = match.matched_len, len(prefix_ids)
    if options.insert == "never" or start >= end:
        return 0, ""
    if store.read_only:
        return 0, _READ_ONLY
    try:
        result = store.insert(
            prefix_ids,
            lambda layer: run.kv(layer, start, end),
            start,
            name=name,
            source=source,
            timeout_s=_WRITE_WAIT_S,
        )
    except StoreError as error:
        # The answer is right either way; the caller tells the user why the next one is slow.
        return 0, f"the prefix was not stored: {error}"
    return result.inserted_tokens, ""


def _keep_exact(
    store: PrefixStore,
    model: LoadedModel,
    match: PrefixMatch,
    prefix_ids: np.ndarray,
    options: QueryOptions,
    name: str | None,
    source: dict[str, Any] | None,
) -> tuple[int, str]:
    """Store the missing part of the prefix after a sparse answer: computed again, with all KV.

    What the answer computed attended to a part of the prefix, and so is not what is stored.
    """
    if options.insert == "never" or match.matched_len >= len(prefix_ids):
        return 0, ""
    if store.read_only:
        return 0, _READ_ONLY
    run, again = store.begin(prefix_ids, max_new_tokens=0, internal=True)
    with run:
        try:
            prefill(model.model, run, prefix_ids[again.matched_len :], logits=0)
        except ChunkLoadError as error:
            store.quarantine(error)
            return 0, f"the prefix was not stored: {error}"
        return _keep_prefix(store, run, again, prefix_ids, options, name, source)


def _count(store: PrefixStore, stats: QueryStats, eligible_tokens: int) -> None:
    """Add to the store's lifetime statistics; ``eligible_tokens`` could have been reused."""
    try:
        store.add_counters(lifetime_amounts(stats, eligible_tokens, store.memory.policy))
    except StoreError as error:
        log.warning("statistics were not kept: %s", error)
