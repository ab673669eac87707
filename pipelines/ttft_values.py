"""Values of `impress bench ttft`: what is asked of whom, and what came out. No code that runs."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipelines.systems import SYSTEMS, System, make_system
from store.disk.io import IOOptions
from store.errors import InvalidValueError
from store.itf.options import SparseOptions
from store.types import KVShape

#: What people write themselves, beside the engine's systems: it is none of its configurations.
DIY = "diy"
#: Who nothing is reused by.
RECOMPUTE = "recompute"
#: Whom the others are compared with, where it is there.
OURS = "impress"
DEFAULT_SYSTEMS = (*SYSTEMS, DIY)
POPULARITY = ("zipf", "uniform")
#: Where a query comes from: the text behind its prefix, that of other prefixes, or a file.
OWN, OTHERS, QUESTION = "own", "others", "question"


@dataclass(frozen=True, slots=True)
class TtftOptions:
    """What is measured; raises `InvalidValueError` for a value that is not allowed.

    Parameters
    ----------
    systems
        Names as `make_system` takes them, and ``diy``.
    prefix_tokens, prefixes, query_tokens
        Length of a prefix, how many at most, and length of a query that continues a document.
    requests, warm_up
        Measured requests, and those before them that fill the tiers and are not counted.
    popularity, zipf
        How often a prefix is asked: all alike, or in proportion to rank to the power of -``zipf``.
    retention
        Of the systems that leave something out.
    budget_share, device_share
        Memory of each system as a fraction of the KV of all prefixes; fraction of it that is the
        device's, the rest is the host's.
    seed
        Of popularity, of the order of requests, and of which query is asked when.
    queries
        JSON lines ``{"prefix": …, "prompt": …}`` instead of continuations.
    recompute_sample
        Requests that are also recomputed, as that takes long.
    io
        How the store reads, with the emulation of a slower disk.
    base
        What sparse systems take that is not their own.
    """

    systems: tuple[str, ...] = DEFAULT_SYSTEMS
    prefix_tokens: int = 4096
    prefixes: int = 16
    requests: int = 48
    warm_up: int = 32
    popularity: str = "zipf"
    zipf: float = 1.0
    query_tokens: int = 64
    retention: float = 0.25
    budget_share: float = 0.3
    device_share: float = 0.25
    seed: int = 1
    queries: Path | None = None
    recompute_sample: int = 8
    io: IOOptions = field(default_factory=IOOptions)

    def __post_init__(self) -> None:
        self._check_counts()
        self._check_shares()
        if self.popularity not in POPULARITY:
            raise InvalidValueError(
                f"popularity {self.popularity!r} is not known; use one of {', '.join(POPULARITY)}"
            )
        if not self.systems:
            raise InvalidValueError("no system is named; give one or more with --systems")
        twice = [name for name, count in Counter(self.systems).items() if count > 1]
        if twice:
            raise InvalidValueError(f"system {twice[0]!r} is named twice; leave one of them out")
        _made(self.systems)

    def _check_counts(self) -> None:
        names = ("prefix_tokens", "prefixes", "query_tokens", "requests", "recompute_sample")
        for name, least in (*((name, 1) for name in names), ("warm_up", 0), ("seed", 0)):
            value = getattr(self, name)
            if value < least:
                raise InvalidValueError(
                    f"--{name.replace('_', '-')} {value} is not allowed; give {least} or more"
                )

    def _check_shares(self) -> None:
        if not 0.0 < self.budget_share <= 1.0:
            raise InvalidValueError(
                f"--budget-share {self.budget_share:g} is out of range; use a fraction of the data "
                "above 0, up to 1, such as 0.3"
            )
        if not 0.0 <= self.device_share <= 1.0:
            raise InvalidValueError(
                f"--device-share {self.device_share:g} is out of range; use a fraction of the "
                "memory from 0 to 1, such as 0.25"
            )
        if not 0.0 <= self.zipf < math.inf:
            raise InvalidValueError(f"--zipf {self.zipf:g} is not allowed; use 0 or more")
        SparseOptions(retention=self.retention)

    @property
    def engine_systems(self) -> tuple[System, ...]:
        """The systems that are configurations of the engine, in their order."""
        return _made(self.systems)

    def budget(self, kv_bytes: int) -> Budget:
        """Memory of each system beside ``kv_bytes`` of data."""
        total = int(self.budget_share * kv_bytes)
        device = int(self.device_share * total)
        return Budget(device, total - device)


def _made(names: tuple[str, ...]) -> tuple[System, ...]:
    known = [name for name in names if name != DIY]
    try:
        return tuple(make_system(name) for name in known)
    except InvalidValueError as error:
        raise InvalidValueError(f"{error}; beside them there is {DIY!r}") from error


class Budget(NamedTuple):
    """Memory of one system; resident probe data is inside ``host_bytes``."""

    device_bytes: int
    host_bytes: int


class Query(NamedTuple):
    """A question's token ids, uint32 [m], and where it comes from (`OWN`, …)."""

    ids: np.ndarray
    source: str


class Request(NamedTuple):
    """One request: number of the prefix, and the query."""

    prefix: int
    query: Query


@dataclass(frozen=True, slots=True)
class TtftPrefix:
    """A prefix, uint32 [n], and queries that were asked before: none of them is measured."""

    name: str
    ids: np.ndarray
    history: tuple[Query, ...] = ()


@dataclass(frozen=True, slots=True)
class Workload:
    """Prefixes, and who asks what in which order; ``warnings`` say what is not as asked for."""

    prefixes: tuple[TtftPrefix, ...]
    warm_up: tuple[Request, ...]
    measured: tuple[Request, ...]
    warnings: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens of all prefixes."""
        return sum(len(prefix.ids) for prefix in self.prefixes)

    def kv_bytes(self, shape: KVShape) -> int:
        """Bytes of the KV of all prefixes."""
        return self.tokens * shape.token_bytes


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured request answered by one system.

    Parameters
    ----------
    request, prefix, turn
        Number of the request, number of its prefix, and how many systems answered before.
    ttft_s, stages_s, hidden_io_s, bookkeeping_s, bytes, read_bytes, needed_bytes
        As in `QueryStats`.
    hit
        Share of the KV's chunks that each tier gave; empty where none was fetched.
    important, important_hit
        Share of the selected tokens' keys and values that each tier gave, of all where all is
        loaded, and what memory gave of it; empty and None where nothing was fetched.
    kl, top1
        Divergence of the first token's distribution from the reference's in nats, and whether the
        first choice is the same.
    selected_ratio, loaded_ratio, probe_ratio, fallback_ratio
        Shares of the prefix's tokens, of its chunks, of its KV bytes, and of the layers.
    reused_tokens, recovered_chunks
        As in `QueryStats`; fewer tokens than the prefix has mean that something failed to load.
    """

    request: int
    prefix: int
    turn: int
    ttft_s: float
    stages_s: dict[str, float]
    hidden_io_s: float
    bookkeeping_s: float
    bytes: dict[str, int]
    read_bytes: int
    needed_bytes: int
    hit: dict[str, float]
    important_hit: float | None
    kl: float
    top1: bool
    selected_ratio: float
    loaded_ratio: float
    probe_ratio: float
    fallback_ratio: float
    reused_tokens: int
    recovered_chunks: int = 0
    important: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TtftRow:
    """One system and its samples, in the order of the requests.

    ``layout`` is that of its store and ``budget`` its memory, both None for who has none; ``disk``
    says how it reads; ``configuration`` is that of the engine, None without a store.
    """

    system: str
    disk: str | None
    layout: Layout | None
    budget: Budget | None
    samples: tuple[Sample, ...]
    configuration: System | None = None


class Layout(NamedTuple):
    """What a temporary store looks like; systems with the same layout share one."""

    chunk_tokens: int
    probe: str
    order: str

    @classmethod
    def of(cls, system: System) -> Layout:
        """The layout that a system needs."""
        return cls(system.chunk_tokens, system.probe, system.order)

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.order}-{self.chunk_tokens}-{self.probe}"


class Reference(NamedTuple):
    """What distributions are compared with: a full load, and how far recomputing is from it.

    ``n`` requests were recomputed; ``max_difference`` is the largest difference of their logits,
    ``kl_max`` their largest divergence, both None where nothing was recomputed.
    """

    n: int
    max_difference: float | None
    kl_max: float | None


@dataclass(frozen=True, slots=True)
class TtftReport:
    """Result: a row per system in the order asked for, and what it was measured on.

    ``notes`` say how to read the figures, ``warnings`` what is not as asked for.
    """

    rows: tuple[TtftRow, ...]
    workload: Workload
    kv_bytes: int
    budget: Budget
    reference: Reference
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
