"""Values of a trace replay: what to replay, and what came of it. Checks values, runs nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pipelines.probes import default_head_count
from pipelines.trace_caches import CacheCase, TraceGeometry, TraceRow
from pipelines.trace_importance import MODELS
from store.errors import InvalidValueError
from store.files import ORDERS
from store.tier.policy import Score, make_policy
from store.types import MAX_CHUNK_TOKENS, MIN_CHUNK_TOKENS, KVShape


class TierSizes(NamedTuple):
    """Bytes of device and host memory."""

    device_bytes: int
    host_bytes: int


#: A quarter of the paper's tiers, the paper's, and four times those.
SIZES = tuple(TierSizes(int(10e9 * times), int(32e9 * times)) for times in (0.25, 1, 4))


@dataclass(frozen=True, slots=True)
class TraceBenchOptions:
    """What to replay.

    Parameters
    ----------
    shape
        KV shape of the model.
    chunk_tokens, block_tokens
        Tokens of a chunk and of a block of the trace; chunks divide blocks.
    retention
        Share of the matched tokens that a request selects.
    policies, sizes, orders
        Each combination is a cache; a tier of 0 bytes is none.
    layers_sampled
        Layers to replay; bytes are scaled to all.
    evidence_share
        KV that is read from disk to choose by, over all KV matched; None for that of probe heads.
    disk_bytes_s, host_bytes_s
        Bytes per second from disk to host memory, and from there to the device.
    importance
        One of `trace_importance.MODELS`; ``measured`` needs a store.
    half_life
        Ageing of accesses in requests (policy ``score``); None for none.
    requests
        How many of the trace, from its start; None for all.
    """

    shape: KVShape
    chunk_tokens: int = 64
    block_tokens: int = 512
    retention: float = 0.25
    policies: tuple[str, ...] = ("lru", "lfu", "score")
    sizes: tuple[TierSizes, ...] = SIZES
    orders: tuple[str, ...] = ("importance",)
    layers_sampled: int = 2
    evidence_share: float | None = None
    disk_bytes_s: float = 5e9
    host_bytes_s: float = 25e9
    importance: str = "zipf"
    half_life: float | None = None
    requests: int | None = None
    seed: int = 1

    def __post_init__(self) -> None:
        for name in self.policies:
            make_policy(name)
        if self.half_life is not None:
            Score(self.half_life)
        _require(self.importance, MODELS, "importance")
        for order in self.orders:
            _require(order, ORDERS, "order")
        self._check_tokens()
        self._check_numbers()
        for size in self.sizes:
            self._check_size(size)

    @property
    def evidence(self) -> float:
        """The share read to choose by; of probe heads where none was given."""
        if self.evidence_share is None:
            return default_head_count(self.shape) / (2 * self.shape.num_kv_heads)
        return self.evidence_share

    @property
    def geometry(self) -> TraceGeometry:
        """Sizes and rates."""
        rates = (self.disk_bytes_s, self.host_bytes_s)
        return TraceGeometry(self.shape, self.layers_sampled, self.chunk_tokens, *rates)

    def cases(self) -> list[CacheCase]:
        """All caches, by size, then order, then policy."""
        return [
            CacheCase(policy, order, *size)
            for size in self.sizes
            for order in self.orders
            for policy in self.policies
        ]

    def _check_tokens(self) -> None:
        if not MIN_CHUNK_TOKENS <= self.chunk_tokens <= MAX_CHUNK_TOKENS:
            raise InvalidValueError(
                f"chunks of {self.chunk_tokens} tokens are not allowed; give --chunk-tokens from "
                f"{MIN_CHUNK_TOKENS} to {MAX_CHUNK_TOKENS}"
            )
        if self.block_tokens < 1 or self.block_tokens % self.chunk_tokens:
            raise InvalidValueError(
                f"blocks of {self.block_tokens} tokens do not divide into chunks of "
                f"{self.chunk_tokens}; give a --chunk-tokens that divides --block-tokens"
            )

    def _check_numbers(self) -> None:
        if not (0.0 < self.retention <= 1.0 and 0.0 <= self.evidence <= 1.0):
            raise InvalidValueError(
                f"retention is {self.retention} and the evidence share {self.evidence}; give "
                "fractions up to 1, retention above 0"
            )
        if not (self.disk_bytes_s > 0 and self.host_bytes_s > 0):
            raise InvalidValueError(
                f"bandwidths are {self.disk_bytes_s} and {self.host_bytes_s} bytes per second; "
                "give rates above 0"
            )
        if not 1 <= self.layers_sampled <= self.shape.num_layers:
            raise InvalidValueError(
                f"{self.layers_sampled} layers can't be sampled of {self.shape.num_layers}; give "
                f"--layers-sampled from 1 to {self.shape.num_layers}"
            )
        if (self.requests is not None and self.requests < 1) or self.seed < 0:
            raise InvalidValueError(
                f"requests is {self.requests} and seed {self.seed}; give at least one request and "
                "a seed from 0 up"
            )

    def _check_size(self, size: TierSizes) -> None:
        least = self.geometry.chunk_bytes * self.shape.num_layers
        small = [tier for tier in size if 0 < tier < least]
        if small or not any(size):
            raise InvalidValueError(
                f"a tier of {min(small, default=0)} bytes holds less than one chunk of keys and "
                f"values of each layer, {least} bytes; give larger --sizes, or 0 for one of two"
            )


@dataclass(frozen=True, slots=True)
class TraceReport:
    """Result.

    Parameters
    ----------
    rows, endless
        A row per cache, in the order of `TraceBenchOptions.cases`; per order of rows, the row of a
        cache that keeps on the device whatever was used once, and the bytes it came to hold.
    requests, blocks
        Requests replayed and their blocks, each as often as it occurs.
    matched_blocks, stored_blocks
        Blocks that were stored when their prompt came; blocks stored in the end.
    nodes, splits
        Nodes stored in the end; splits on the way, each of which emptied a node.
    data_bytes
        KV of all that is stored in the end.
    matched_bytes, evidence_bytes
        KV of all matched blocks, which full loads would have moved; what was read to choose by.
    notes
        What is odd about the trace, one sentence each.
    """

    rows: list[TraceRow]
    endless: list[tuple[TraceRow, int]]
    requests: int
    blocks: int
    matched_blocks: int
    stored_blocks: int
    nodes: int
    splits: int
    data_bytes: int
    matched_bytes: int
    evidence_bytes: float
    notes: list[str]

    @property
    def infinite_hit_ratio(self) -> float:
        """Share of the prompts' blocks that were stored when they came."""
        return self.matched_blocks / self.blocks if self.blocks else 0.0


def _require(name: str, allowed: tuple[str, ...], what: str) -> None:
    if name not in allowed:
        raise InvalidValueError(f"{what} {name!r} is not known; use one of {', '.join(allowed)}")
