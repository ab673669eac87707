"""Who asks what in `impress bench ttft`: prefixes from documents, and a seeded order of requests.

Every query of a prefix is another one: what is measured was never asked before. They are the text
that follows the prefix, and once that is used up, text of the other prefixes; or questions from a
file. It runs no model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pipelines.fidelity_cases import document_cases
from pipelines.fidelity_values import BenchCase, CaseOptions, Cases
from pipelines.ttft_values import (
    OTHERS,
    OWN,
    QUESTION,
    Query,
    Request,
    TtftOptions,
    TtftPrefix,
    Workload,
)
from store.errors import PromptError, SourceError

if TYPE_CHECKING:
    from pipelines.models import LoadedModel

#: Queries from which a prefix's importance is known before it is reordered, at least.
HISTORY = 6


class Demand(NamedTuple):
    """How many queries a prefix needs."""

    measured: int
    warm_up: int
    history: int


def make_workload(
    model: LoadedModel, documents: Path, options: TtftOptions, *, history: bool
) -> Workload:
    """Prefixes and requests.

    Parameters
    ----------
    documents
        Folder of text files; short ones are joined.
    history
        Whether prefixes need queries of their own to be reordered by.

    Raises
    ------
    SourceError
        No such folder, no text files in it, or too little text.
    InvalidValueError, PromptError
        Prefix and query need more positions than the model has.
    """
    drawn = _draw(options, options.prefixes)
    found = _cases(model, documents, options, int(np.bincount(drawn).max()) + HISTORY)
    if len(found.cases) < options.prefixes:
        drawn = _draw(options, len(found.cases))
    dealer = _Dealer(options, found.cases, history, model)
    return dealer.workload(drawn, tuple(found.warnings))


def turns(seed: int, request: int, count: int) -> list[int]:
    """In which order ``count`` systems answer a request: another one each time, by the seed.

    Where they only took turns in beginning, each would always follow the same other one.
    """
    drawn = np.random.default_rng([seed, request, count]).permutation(count)
    return [int(number) for number in drawn]


def _draw(options: TtftOptions, count: int) -> np.ndarray:
    """Prefix of each request, the warm-up's first, int64 [warm_up + requests]."""
    rng = np.random.default_rng([options.seed, count])
    exponent = options.zipf if options.popularity == "zipf" else 0.0
    weights = np.arange(1, count + 1, dtype=np.float64) ** -exponent
    # Which prefix is popular has nothing to do with the order of the documents.
    chance = rng.permutation(weights / weights.sum())
    return rng.choice(count, options.warm_up + options.requests, p=chance)


def _cases(model: LoadedModel, documents: Path, options: TtftOptions, windows: int) -> Cases:
    """Prefixes with their own queries: up to ``windows`` of each, fewer rather than fewer prefixes.

    The longer a text has to be, the more documents are joined into one.
    """
    best: Cases | None = None
    while True:
        cases = CaseOptions(
            options.prefix_tokens,
            options.prefixes,
            options.query_tokens,
            history=0 if options.queries else windows - 1,
            history_from="same",
            queries=options.queries,
        )
        found = document_cases(model, documents, cases)
        if best is None or len(found.cases) > len(best.cases):
            best = found
        if options.queries or windows == 1 or len(best.cases) == options.prefixes:
            return best
        windows //= 2


@dataclass(slots=True)
class _Counts:
    """Queries that are not what they should be."""

    others: int = 0
    repeated: int = 0


class _Dealer:
    """Hands each prefix's queries out to measured requests, warm-up and history."""

    def __init__(
        self,
        options: TtftOptions,
        cases: Sequence[BenchCase],
        history: bool,
        model: LoadedModel,
    ) -> None:
        self._options, self._cases, self._model = options, cases, model
        self._history = HISTORY if history else 0
        self._own = [(*case.queries, *case.history) for case in cases]
        self._counts = _Counts()

    def workload(self, drawn: np.ndarray, warnings: tuple[str, ...]) -> Workload:
        """The workload of drawn prefixes."""
        split = self._options.warm_up
        early, late = drawn[:split], drawn[split:]
        asked = [np.bincount(part, minlength=len(self._cases)) for part in (late, early)]
        prefixes, queues = [], []
        for number, case in enumerate(self._cases):
            measured, warm_up = (int(counts[number]) for counts in asked)
            demand = Demand(measured, warm_up, max(0, self._history - warm_up))
            dealt = self._deal(number, demand)
            known = _distinct(dealt[1] + dealt[2]) if self._history else []
            prefixes.append(TtftPrefix(case.name, case.prefix_ids, tuple(known)))
            queues.append((iter(dealt[0]), iter(dealt[1])))
        return Workload(
            tuple(prefixes),
            tuple(Request(int(number), next(queues[number][1])) for number in early),
            tuple(Request(int(number), next(queues[number][0])) for number in late),
            (*warnings, *self._warnings()),
        )

    def _deal(self, number: int, demand: Demand) -> tuple[list[Query], list[Query], list[Query]]:
        """Queries for measured requests, warm-up and history of one prefix, shuffled."""
        wanted = sum(demand)
        pool = self._pool(number, wanted)
        rng = np.random.default_rng([self._options.seed, number, len(pool)])
        pool = [pool[place] for place in rng.permutation(len(pool))]
        before = demand.warm_up + demand.history
        kept = min(demand.measured, len(pool) - min(1, before))
        if demand.measured and kept < 1:
            raise SourceError(
                f"{self._cases[number].name}: there is only one query for it, and what is measured "
                "must not have been asked before; give more text or more questions"
            )
        if len(pool) < wanted and demand.measured and before:
            kept = min(kept, max(1, len(pool) * demand.measured // wanted))
        self._counts.repeated += demand.measured - kept
        measured = list(islice(cycle(pool[:kept]), demand.measured))
        self._counts.others += sum(query.source == OTHERS for query in measured)
        rest = list(islice(cycle(pool[kept:]), before))
        return measured, rest[: demand.warm_up], rest[demand.warm_up :]

    def _pool(self, number: int, wanted: int) -> list[Query]:
        """Up to ``wanted`` different queries: the prefix's own ones, then those of others."""
        case, from_file = self._cases[number], self._options.queries is not None
        room = self._model.max_positions - len(case.prefix_ids)
        own = [Query(ids, QUESTION if from_file else OWN) for ids in self._own[number]]
        longest = max(len(query.ids) for query in own)
        if longest >= room:
            raise PromptError(
                f"{case.name}: prefix ({len(case.prefix_ids)} tokens), longest query ({longest}) "
                f"and an answer need more than the {self._model.max_positions} positions of "
                f"{self._model.spec}; give fewer --prefix-tokens"
            )
        others = [*range(number + 1, len(self._cases)), *range(number)]
        turns = zip_longest(*(self._texts(other) for other in others))
        more = (Query(ids, OTHERS) for turn in turns for ids in turn if ids is not None)
        fitting = (query for query in more if len(query.ids) < room)
        return _distinct([*own, *fitting])[:wanted]

    def _texts(self, number: int) -> Iterable[np.ndarray]:
        """What other prefixes may be asked: what this one is asked, then its own text."""
        if self._options.queries is not None:
            return self._own[number]
        ids, size = self._cases[number].prefix_ids, self._options.query_tokens
        starts = range(0, len(ids) - size + 1, size)
        return [*self._own[number], *(ids[at : at + size] for at in starts)]

    def _warnings(self) -> list[str]:
        counts, total, found = self._counts, self._options.requests, []
        if counts.others:
            found.append(
                f"{counts.others} of {total} measured queries are of other documents, as the text "
                "behind their prefix was used up"
            )
        if counts.repeated:
            found.append(
                f"{counts.repeated} of {total} measured requests repeat a query, as there are no "
                "more different ones"
            )
        return found


def _distinct(queries: Iterable[Query]) -> list[Query]:
    """Each query once, the first of its kind."""
    found: dict[bytes, Query] = {}
    for query in queries:
        found.setdefault(query.ids.tobytes(), query)
    return list(found.values())
