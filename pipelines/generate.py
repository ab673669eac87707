"""Answer one prompt on the store: match, load, prefill, decode greedily, keep the prefix.

Owns the order of events, the clock that stops at the first token, and recovery: stored KV that
fails to load is quarantined and the prompt is answered by recomputing from there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pipelines.attention import forward, prefill
from pipelines.models import LoadedModel
from store.engine import PrefixStore
from store.errors import ChunkLoadError, InvalidValueError, PromptError, StoreError
from store.index.radix import PrefixMatch
from store.query_run import QueryRun
from store.stats import QueryStats

log = logging.getLogger(__name__)

PLANS = ("auto", "force-load", "force-recompute")
INSERTS = ("exact", "never")


@dataclass(frozen=True, slots=True)
class QueryOptions:
    """How a prompt is answered; raises `InvalidValueError` for a value that is not allowed."""

    max_new_tokens: int = 64
    retention: float = 1.0
    plan: str = "auto"
    insert: str = "exact"

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise InvalidValueError(
                f"max-new-tokens {self.max_new_tokens} is not allowed; use 1 or more"
            )
        if not 0.0 < self.retention <= 1.0:
            raise InvalidValueError(
                f"retention {self.retention:g} is out of range; use a fraction above 0, up to 1.0"
            )
        if self.retention != 1.0:
            raise InvalidValueError(
                f"retention {self.retention:g} is not available yet; only 1.0 (load everything) "
                "is, until importance is built"
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
    was used in the end; ``insert_note`` says why the prefix was not stored, if it should have
    been.
    """

    text: str
    token_ids: list[int]
    stats: QueryStats
    logits: torch.Tensor = field(repr=False)
    matched: PrefixMatch = field(repr=False)
    inserted_tokens: int = 0
    insert_note: str = ""


@dataclass(slots=True)
class _Attempts:
    """What happened on the way to the first token."""

    match_s: float = 0.0
    forward_s: float = 0.0
    load_s: float = 0.0
    hidden_io_s: float = 0.0
    wanted_bytes: int = 0
    read_bytes: int = 0
    requests: int = 0
    forward_tokens: int = 0
    recovered: int = 0
    reasons: list[str] = field(default_factory=list)

    def add_run(self, run: QueryRun) -> None:
        """Take over a run's counters at its first token, or at its failure."""
        counters = run.counters
        self.load_s += counters.load_wait_s
        self.hidden_io_s += counters.hidden_io_s()
        self.wanted_bytes += counters.wanted_bytes
        self.read_bytes += counters.read_bytes
        self.requests += counters.requests


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
    attempts, started = _Attempts(), time.perf_counter()
    run, match, logits = _first_logits(store, model, ids, room, options, attempts)
    with run:
        token = int(logits.argmax())
        stats = _stats(time.perf_counter() - started, attempts, match, ids, prefix_ids, options)
        tokens, text = _decode(model, run, token, room, on_text)
        kept = _keep_prefix(store, run, match, prefix_ids, options, name, source)
    recompute = options.plan == "force-recompute"
    _count(store, stats, 0 if recompute else max(len(prefix_ids), stats.reused_tokens))
    return Answer(text, tokens, stats, logits, match, *kept)


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


def _first_logits(
    store: PrefixStore,
    model: LoadedModel,
    ids: np.ndarray,
    room: int,
    options: QueryOptions,
    attempts: _Attempts,
) -> tuple[QueryRun, PrefixMatch, torch.Tensor]:
    """Prefill until it succeeds; each failed load shortens the match, so that this ends."""
    max_match: int | None = None
    while True:
        began = time.perf_counter()
        load = options.plan != "force-recompute"
        run, match = store.begin(ids, max_new_tokens=room, load=load, max_match=max_match)
        attempts.match_s += time.perf_counter() - began
        attempts.recovered += match.error is not None
        try:
            began = time.perf_counter()
            logits = prefill(model.model, run, ids[match.matched_len :], logits=True)
            assert logits is not None
            return run, match, logits
        except ChunkLoadError as error:
            run.close()
            log.warning("recomputing after a failed load: %s", error)
            store.quarantine(error)
            attempts.recovered += 1
            attempts.reasons.append(str(error).split(";")[0])
            max_match = error.usable_before(match.matched_len)
        except BaseException:
            run.close()
            raise
        finally:
            attempts.forward_s += time.perf_counter() - began
            attempts.forward_tokens += run.position - run.matched_len
            attempts.add_run(run)


def _stats(
    ttft_s: float,
    attempts: _Attempts,
    match: PrefixMatch,
    ids: np.ndarray,
    prefix_ids: np.ndarray,
    options: QueryOptions,
) -> QueryStats:
    stages = {
        "match": attempts.match_s,
        "probe": 0.0,
        "identify": 0.0,
        "load": attempts.load_s,
        "compute": attempts.forward_s - attempts.load_s,
    }
    stages["other"] = ttft_s - sum(stages.values())
    return QueryStats(
        ttft_s=ttft_s,
        stages_s=stages,
        hidden_io_s=attempts.hidden_io_s,
        prompt_tokens=len(ids),
        reused_tokens=match.matched_len,
        forward_tokens=attempts.forward_tokens,
        plan="load" if match.matched_len else "recompute",
        retention=options.retention,
        bytes={"disk": attempts.wanted_bytes, "host": 0, "device": 0},
        read_bytes=attempts.read_bytes,
        requests=attempts.requests,
        miss_reasons=[*attempts.reasons, *_miss_reasons(match, ids, prefix_ids, options)],
        recovered_chunks=attempts.recovered,
    )


def _miss_reasons(
    match: PrefixMatch, ids: np.ndarray, prefix_ids: np.ndarray, options: QueryOptions
) -> list[str]:
    """Why the prefix (the prompt, without one) was not reused to its end."""
    at = match.matched_len
    eligible = len(prefix_ids) if len(prefix_ids) else 1
    if at >= min(eligible, len(ids) - 1):
        return []
    if options.plan == "force-recompute":
        return ["recompute was asked for (--plan force-recompute)"]
    if match.stop == "unreadable" and match.error is not None:
        return [str(match.error).split(";")[0]]
    reasons = {
        "diverged": f"what is stored differs from token {at} on",
        "end_of_tree": f"nothing is stored after token {at}",
        "quarantined": f"stored data is damaged from token {at} on",
        "complete": f"tokens after {at} could not be loaded",
    }
    return [reasons[match.stop]]


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
        step = forward(model.model, run, np.asarray(tokens[-1:], np.uint32), logits=True)
        assert step is not None
        tokens.append(int(step.argmax()))


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
        return 0, "the store can't be written, so the prefix was not stored"
    try:
        result = store.insert(
            prefix_ids,
            lambda layer: run.kv(layer, start, end),
            start,
            name=name,
            source=source,
        )
    except StoreError as error:
        # The answer is right either way; the caller tells the user why the next one is slow.
        return 0, f"the prefix was not stored: {error}"
    return result.inserted_tokens, ""


def _count(store: PrefixStore, stats: QueryStats, eligible_tokens: int) -> None:
    """Add to the store's lifetime statistics; ``eligible_tokens`` could have been reused."""
    try:
        store.add_counters(
            {
                "queries": 1,
                "prompt_tokens": stats.prompt_tokens,
                "eligible_tokens": eligible_tokens,
                "reused_tokens": stats.reused_tokens,
                "forward_tokens": stats.forward_tokens,
                "disk_bytes": stats.bytes["disk"],
                "read_bytes": stats.read_bytes,
                "recovered_chunks": stats.recovered_chunks,
                "ttft_s": stats.ttft_s,
            }
        )
    except StoreError as error:
        log.warning("statistics were not kept: %s", error)
