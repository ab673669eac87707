"""Values of `impress bench fidelity`: what is compared, and what came out. No code that runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

import numpy as np

from pipelines.fidelity_cases import CaseOptions
from store.errors import InvalidValueError
from store.itf.options import ATTEND, SETS, SparseOptions
from store.itf.sketch import check_bits
from store.types import MAX_CHUNK_TOKENS, MIN_CHUNK_TOKENS

#: Evidence that can be compared, the best first: all but ``auto``, which stands for one of them.
EVIDENCE_ORDER = ("full", "sketch", "heads", "static", "random")
#: Evidence of the reference's own row.
EXACT = "exact"
#: Rows are stored in token order until a store is reordered.
ORDER = "original"


@dataclass(frozen=True, slots=True)
class FidelityOptions:
    """What is compared; raises `InvalidValueError` for a value that is not allowed.

    Every evidence is combined with every other value. ``chunk_tokens`` and ``sketch_bits`` are
    those of the temporary stores.
    """

    cases: CaseOptions = field(default_factory=CaseOptions)
    retention: tuple[float, ...] = (0.1, 0.25)
    evidence: tuple[str, ...] = EVIDENCE_ORDER
    sets: tuple[str, ...] = ("one",)
    attend: tuple[str, ...] = ("selected", "loaded")
    chunk_tokens: tuple[int, ...] = (16,)
    sketch_bits: tuple[int, ...] = (2,)

    def __post_init__(self) -> None:
        for name, given, allowed in (
            ("evidence", self.evidence, EVIDENCE_ORDER),
            ("sets", self.sets, SETS),
            ("attend", self.attend, ATTEND),
        ):
            _require_known(name, given, allowed)
        for value in self.retention:
            SparseOptions(retention=value)
        for bits in self.sketch_bits:
            check_bits(bits)
        require_chunk_tokens(self.chunk_tokens)

    def combinations(self) -> list[Combination]:
        """All combinations, in the order of the rows."""
        return [
            Combination(evidence, bits, sets, attend, chunk_tokens, retention)
            for chunk_tokens, retention, evidence in product(
                self.chunk_tokens, self.retention, self.evidence
            )
            for bits in (self.sketch_bits if evidence == "sketch" else (None,))
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
    """One way to be sparse; ``bits`` only of the evidence ``sketch``."""

    evidence: str
    bits: int | None
    sets: str
    attend: str
    chunk_tokens: int
    retention: float

    def sparse(self, seed: int) -> SparseOptions:
        """The engine's value; ``seed`` draws the control ``random``."""
        return SparseOptions(
            retention=self.retention,
            evidence=self.evidence,
            attend=self.attend,
            sets=self.sets,
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
    selected_ratio, loaded_ratio, probe_ratio
        Shares of the prefix's tokens (per set), of its chunks, and of its KV bytes.
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
    sets: str | None
    attend: str | None
    chunk_tokens: int
    retention: float
    pairs: tuple[Pair, ...]
    order: str = ORDER

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

    ``prefixes`` are names and lengths in tokens.
    """

    rows: list[FidelityRow]
    prefixes: list[tuple[str, int]]
    warnings: list[str]
