"""Values of `impress bench fidelity`: what is compared, and what came out. No code that runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from store.errors import InvalidValueError
from store.files import IMPORTANCE, ORDERS, ORIGINAL
from store.itf.options import ATTEND, ROWS, SETS, SparseOptions
from store.itf.sketch import check_bits
from store.types import MAX_CHUNK_TOKENS, MIN_CHUNK_TOKENS

#: Evidence that can be compared, the best first: all but ``auto``, which stands for one of them.
EVIDENCE_ORDER = ("full", "sketch", "heads", "static", "random")
#: Evidence of the reference's own row.
EXACT = "exact"
#: Where a history may come from (`fidelity_history`).
HISTORY_FROM = ("others", "same")


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
        Other queries per prefix, up to as many, from which the evidence ``static`` takes its
        importance.
    history_from
        ``others``: the measured queries of the other prefixes, which know nothing of this one;
        ``same``: of this prefix, the next windows of its continuation, which know what the
        measured one is about, or the last of its questions, which are then not measured.
    queries
        JSON lines ``{"prefix": …, "prompt": …}`` instead of continuations; a line without
        ``prefix`` is asked of every prefix.
    """

    prefix_tokens: int = 2048
    prefixes: int = 8
    query_tokens: int = 64
    history: int = 6
    history_from: str = "others"
    queries: Path | None = None

    def __post_init__(self) -> None:
        for name, least in (("prefix_tokens", 1), ("prefixes", 1), ("query_tokens", 1)):
            _at_least(name, getattr(self, name), least)
        _at_least("history", self.history, 0)
        if self.history_from not in HISTORY_FROM:
            raise InvalidValueError(
                f"--history-from {self.history_from!r} is not known; use one of "
                f"{', '.join(HISTORY_FROM)}"
            )


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
    """The cases, at least one, and what has to be said about them.

    ``history_from`` is where their history comes from in the end, None where they have none of
    their own; ``history_notes`` are for those who use it.
    """

    cases: list[BenchCase]
    warnings: list[str]
    history_from: str | None = None
    history_notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FidelityOptions:
    """What is compared; raises `InvalidValueError` for a value that is not allowed.

    Every evidence is combined with every other value, a sketch with ``rows`` as well.
    ``chunk_tokens``, ``sketch_bits`` and ``order`` are those of the temporary stores; the order
    ``importance`` is by each prefix's history, which there has to be. All that is compared takes
    what else there is to choose (``alpha``, ``threshold``, ``fallback``) from ``shared``.
    """

    cases: CaseOptions = field(default_factory=CaseOptions)
    retention: tuple[float, ...] = (0.1, 0.25)
    evidence: tuple[str, ...] = EVIDENCE_ORDER
    sets: tuple[str, ...] = ("one",)
    attend: tuple[str, ...] = ("selected", "loaded")
    chunk_tokens: tuple[int, ...] = (16,)
    sketch_bits: tuple[int, ...] = (2,)
    rows: tuple[str, ...] = ("auto",)
    order: tuple[str, ...] = (ORIGINAL,)
    shared: SparseOptions = field(default_factory=SparseOptions)

    def __post_init__(self) -> None:
        for name, given, allowed in (
            ("evidence", self.evidence, EVIDENCE_ORDER),
            ("sets", self.sets, SETS),
            ("attend", self.attend, ATTEND),
            ("rows", self.rows, ROWS),
            ("order", self.order, ORDERS),
        ):
            _require_known(name, given, allowed)
        for value in self.retention:
            SparseOptions(retention=value)
        for bits in self.sketch_bits:
            check_bits(bits)
        require_chunk_tokens(self.chunk_tokens)
        if IMPORTANCE in self.order and not self.cases.history:
            raise InvalidValueError(
                "order importance is by what earlier queries found, and history 0 leaves none; "
                "give --history 1 or more, or leave importance out of --order"
            )

    def combinations(self) -> list[Combination]:
        """All combinations, in the order of the rows."""
        return [
            Combination(evidence, bits, rows, sets, attend, chunk_tokens, retention, order)
            for chunk_tokens, order, retention, evidence in product(
                self.chunk_tokens, self.order, self.retention, self.evidence
            )
            for bits, rows in (
                product(self.sketch_bits, self.rows) if evidence == "sketch" else ((None, None),)
            )
            for sets, attend in product(self.sets, self.attend)
        ]


def require_chunk_tokens(sizes: Iterable[int]) -> None:
    """Raise `InvalidValueError` for a chunk size that no store can have."""
    for size in sizes:
        if not MIN_CHUNK_TOKENS <= size <= MAX_CHUNK_TOKENS:
            raise InvalidValueError(
                f"chunks of {size} tokens are not allowed; use {MIN_CHUNK_TOKENS} to "
                f"{MAX_CHUNK_TOKENS}"
            )


def _require_known(name: str, given: Iterable[str], allowed: tuple[str, ...]) -> None:
    for value in given:
        if value not in allowed:
            raise InvalidValueError(
                f"{name} {value!r} is not known; use one or more of {', '.join(allowed)}, "
                "separated by commas"
            )


class Combination(NamedTuple):
    """One way to be sparse; ``bits`` and ``rows`` only of the evidence ``sketch``."""

    evidence: str
    bits: int | None
    rows: str | None
    sets: str
    attend: str
    chunk_tokens: int
    retention: float
    order: str

    def sparse(self, shared: SparseOptions, seed: int) -> SparseOptions:
        """The engine's value, the rest from ``shared``; ``seed`` draws the control ``random``."""
        return replace(
            shared,
            retention=self.retention,
            evidence=self.evidence,
            attend=self.attend,
            sets=self.sets,
            rows=self.rows or shared.rows,
            # The choice is measured, not what is read beside it in case it is wanted.
            ahead=False,
            seed=seed,
        )


class Pair(NamedTuple):
    """One query answered in one way, beside the full answer.

    Parameters
    ----------
    prefix, query
        Name of the prefix, number of the query behind it.
    kl, top1
        Means over the query's positions: divergence in nats, share of equal first choices.
    nll
        Mean over the query's tokens but the first, in nats; None for a query of one token.
    recall
        Share of the oracle's tokens that were selected.
    selected_ratio, touched_ratio, loaded_ratio, probe_ratio
        Shares of the prefix's tokens (per set), of its chunks that hold one of these, of the
        chunks of keys and of values that were loaded, and of its KV bytes as evidence.
    bytes
        Fetched, evidence included.
    fallback_ratio
        Share of the layers that fell back.
    """

    prefix: str
    query: int
    kl: float
    top1: float
    nll: float | None
    recall: float
    selected_ratio: float
    touched_ratio: float
    loaded_ratio: float
    probe_ratio: float
    bytes: int
    fallback_ratio: float


@dataclass(frozen=True, slots=True)
class FidelityRow:
    """One combination and its pairs.

    ``sets`` and ``attend`` are None in the reference's own row, whose evidence is ``exact``.
    """

    evidence: str
    bits: int | None
    rows: str | None
    sets: str | None
    attend: str | None
    chunk_tokens: int
    retention: float
    order: str
    pairs: tuple[Pair, ...]

    @property
    def n(self) -> int:
        """How many queries were compared."""
        return len(self.pairs)

    @property
    def kl_min(self) -> float:
        """The least divergence of a query."""
        return min(pair.kl for pair in self.pairs)

    @property
    def kl_max(self) -> float:
        """The largest divergence of a query."""
        return max(pair.kl for pair in self.pairs)

    @property
    def read_ratio(self) -> float:
        """Bytes read as a share of the KV: chunks and evidence."""
        return self.mean("loaded_ratio") + self.mean("probe_ratio")

    @property
    def nll(self) -> float | None:
        """Mean negative log-likelihood; None where no query has one."""
        known = [pair.nll for pair in self.pairs if pair.nll is not None]
        return float(np.mean(known)) if known else None

    def mean(self, name: str) -> float:
        """Mean of a field that every pair has."""
        return float(np.mean([getattr(pair, name) for pair in self.pairs]))


@dataclass(frozen=True, slots=True)
class FidelityReport:
    """Result: the reference's row first, then one per combination.

    ``prefixes`` are names and lengths in tokens. ``history_from`` is where ``static`` learned from,
    None where there was no history, or where it was what a store's own queries left.
    """

    rows: list[FidelityRow]
    prefixes: list[tuple[str, int]]
    warnings: list[str]
    history_from: str | None = None
