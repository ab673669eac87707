"""What a request trace would find in memory, by policy and size (`impress bench trace`).

A trace drives the store's own index, tiers and policies; no KV exists and no model runs. Which
tokens matter comes from a model of importance (`trace_importance`), where chunks lie from the tiers
(`trace_caches`), and a request's I/O time from bytes and given bandwidths, one after the other. All
caches see the same requests and the same selections.
"""

from __future__ import annotations

from pathlib import Path

from pipelines.progress import Progress, ProgressEvent, silent
from pipelines.trace_caches import CacheReplay, EndlessCache, tiered
from pipelines.trace_importance import (
    ImportanceModel,
    measured_model,
    uniform_model,
    zipf_model,
)
from pipelines.trace_index import TraceIndex
from pipelines.trace_requests import Trace, read_trace
from pipelines.trace_uses import TraceUses
from pipelines.trace_values import TraceBenchOptions, TraceReport
from store.engine import PrefixStore
from store.errors import InvalidValueError

__all__ = ["TraceBenchOptions", "TraceReport", "bench_trace", "importance_model"]

_EVENT_REQUESTS = 100


def bench_trace(
    path: Path,
    options: TraceBenchOptions,
    store: PrefixStore | None = None,
    progress: Progress = silent,
) -> TraceReport:
    """Replay a trace.

    Parameters
    ----------
    path
        JSON lines, see `trace_requests.read_trace`.
    store
        Whose statistics the importance ``measured`` comes from.

    Raises
    ------
    SourceError
        The trace can't be read.
    InvalidValueError
        The store has no statistics to use.
    """
    model = importance_model(options, store)
    trace = read_trace(path, options.block_tokens, options.requests, progress)
    return _Replay(options, model, trace).run(progress)


def importance_model(options: TraceBenchOptions, store: PrefixStore | None) -> ImportanceModel:
    """The model that the options name. Raises InvalidValueError."""
    sizes = (options.layers_sampled, options.block_tokens)
    if options.importance == "measured":
        if store is None:
            raise InvalidValueError(
                "measured importance needs a store; give --importance measured:STORE"
            )
        return measured_model(store, *sizes, options.retention, options.seed)
    make = zipf_model if options.importance == "zipf" else uniform_model
    return make(*sizes, options.retention, options.seed)


class _Replay:
    """State of one replay: the index, and a cache for each case."""

    def __init__(self, options: TraceBenchOptions, model: ImportanceModel, trace: Trace) -> None:
        self._options, self._trace = options, trace
        self._index, geometry = TraceIndex(), options.geometry
        self._uses = TraceUses(self._index, model, options.orders, options.chunk_tokens)
        self._cases = [
            (case, CacheReplay(tiered(case, geometry, options.half_life), geometry))
            for case in options.cases()
        ]
        self._endless = [
            (order, CacheReplay(EndlessCache(geometry), geometry)) for order in options.orders
        ]
        self._matched_blocks = self._splits = 0
        self._block_bytes = options.block_tokens * options.shape.token_bytes

    def run(self, progress: Progress) -> TraceReport:
        """Put all requests, in their order."""
        total = len(self._trace.requests)
        for number in range(total):
            if number % _EVENT_REQUESTS == 0:
                progress(ProgressEvent("replay", number, total, "requests"))
            self._ask(number)
        progress(ProgressEvent("replay", total, total, "requests"))
        return self._report()

    def _ask(self, number: int) -> None:
        request = self._trace.requests[number]
        match = self._index.match(request.blocks)
        self._matched_blocks += match.matched_len
        uses = self._uses.uses(number, match)
        matched_bytes = match.matched_len * self._block_bytes
        evidence_bytes = self._options.evidence * matched_bytes
        for order, bound in self._endless:
            bound.ask(uses[order], matched_bytes, evidence_bytes)
        for case, cache in self._cases:
            cache.ask(uses[case.order], matched_bytes, evidence_bytes)
        if self._index.insert(request, match) is not None:
            self._splits += 1
            names = self._index.names
            for _, one in (*self._endless, *self._cases):
                one.cache.forget(names)

    def _report(self) -> TraceReport:
        matched_bytes = self._matched_blocks * self._block_bytes
        return TraceReport(
            rows=[cache.row(*case) for case, cache in self._cases],
            endless=[
                (bound.row("endless", order), bound.held_bytes) for order, bound in self._endless
            ],
            requests=len(self._trace.requests),
            blocks=self._trace.blocks,
            matched_blocks=self._matched_blocks,
            stored_blocks=self._index.blocks,
            nodes=len(self._index.names),
            splits=self._splits,
            data_bytes=self._index.blocks * self._block_bytes,
            matched_bytes=matched_bytes,
            evidence_bytes=self._options.evidence * matched_bytes,
            notes=self._trace.notes,
        )
