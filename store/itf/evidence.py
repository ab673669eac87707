"""Evidence: where the importance of prefix tokens comes from.

One small contract and its implementations (algorithms.md "Evidence"): all keys, probe heads, a
low-bit sketch, and the controls that look at no key of this query.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from store.disk.reader import ReadCount
from store.disk.sidecar import SketchData
from store.errors import ChunkLoadError
from store.itf.importance import column_sums
from store.itf.sketch import GROUP_TOKENS, Codes, group_count, unpack
from store.stats import RunCounters
from store.types import KVShape

T = TypeVar("T")

#: Fewer new tokens than this are all scored by every head.
SAMPLED_TOKENS = 16
#: At most one row in so many is left to estimate from.
MAX_STRIDE = 4


def row_stride(heads: int) -> int:
    """Of ``heads`` query heads that take turns: the most turns that weigh all new tokens alike."""
    return next(turns for turns in range(MAX_STRIDE, 0, -1) if heads % turns == 0)


def awaited(futures: Sequence[Future[T]], counters: RunCounters, deadline_s: float) -> list[T]:
    """Results of reads of evidence; the wait is counted. Raises `ChunkLoadError`."""
    started = time.perf_counter()

    def left() -> float:
        return max(0.0, deadline_s - (time.perf_counter() - started))

    try:
        return [future.result(timeout=left()) for future in futures]
    except FutureTimeoutError as error:
        reason = f"slow: no answer in {deadline_s:g} s"
        raise ChunkLoadError("-", "probe-keys", -1, -1, 0, reason) from error
    finally:
        counters.probe_wait_s += time.perf_counter() - started


class Evidence(ABC):
    """Importance of prefix tokens, layer by layer; used by one run.

    Attributes
    ----------
    name
        As in `store.itf.options.EVIDENCE`.
    """

    name: str

    @abstractmethod
    def importance(
        self, layer: int, q: torch.Tensor, k_new: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """Importance for these queries, float32 [heads, n] on the queries' device.

        ``heads`` are the KV heads that the evidence covers, or 1 where it knows no heads; the
        arguments are those of `QueryRun.attend`. Raises `ChunkLoadError`.
        """

    def probe_bytes(self, _layer: int) -> int:
        """Bytes that were read for a layer and serve as nothing but evidence."""
        return 0


class FullKeys(Evidence):
    """All keys of the layer, which attention uses afterwards.

    ``keys`` reads them if they are not there and returns [n, kv_heads, head_dim].
    """

    name = "full"

    def __init__(self, keys: Callable[[int], torch.Tensor]) -> None:
        self._keys = keys

    def importance(
        self, layer: int, q: torch.Tensor, k_new: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """H2O column sums over all keys, float32 [kv_heads, n]."""
        return column_sums(q, self._keys(layer), k_new, scaling)


class SketchPart(NamedTuple):
    """A node's sketch and how many of its tokens are used; ``fresh`` where this run reads it."""

    data: Future[SketchData]
    used: int
    bits: int
    fresh: bool


class Sketch(Evidence):
    """A low-bit copy of all keys, resident in host memory.

    ``sampled``: estimate importance from part of the query rows where there are enough of them,
    which costs nothing measurable where whole chunks are attended to (docs/decisions.md).
    """

    name = "sketch"

    def __init__(
        self,
        parts: Sequence[SketchPart],
        shape: KVShape,
        counters: RunCounters,
        deadline_s: float,
        *,
        sampled: bool,
    ) -> None:
        self._parts, self._counters, self._deadline_s = list(parts), counters, deadline_s
        self._sampled = sampled
        self._n = sum(part.used for part in parts)
        # Unpacking fills whole groups; what it writes past a part is overwritten by the next.
        room = self._n + GROUP_TOKENS
        self._keys = torch.empty(room, shape.num_kv_heads, shape.head_dim)
        self._counted = False

    def importance(
        self, layer: int, q: torch.Tensor, k_new: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """H2O column sums over unpacked keys, float32 [kv_heads, n]."""
        datas = self._resident()
        base = 0
        for part, data in zip(self._parts, datas, strict=True):
            groups = group_count(part.used)
            rows = groups * GROUP_TOKENS * part.bits // 8
            codes = Codes(
                torch.from_numpy(data.code[layer, :rows]),
                torch.from_numpy(data.scale[layer, :groups]),
                torch.from_numpy(data.zero[layer, :groups]),
            )
            unpack(codes, part.bits, self._keys[base : base + groups * GROUP_TOKENS])
            base += part.used
        stride = 1
        if self._sampled and q.shape[1] >= SAMPLED_TOKENS:
            stride = row_stride(q.shape[0] // k_new.shape[0])
        keys = self._keys[: self._n].to(q.device)
        return column_sums(q, keys, k_new, scaling, stride)

    def probe_bytes(self, _layer: int) -> int:
        """A layer's share of the sketches that this run read; nothing where they were resident."""
        return sum(
            part.data.result().count.wanted_bytes // len(part.data.result().code)
            for part in self._parts
            if part.fresh
        )

    def _resident(self) -> list[SketchData]:
        """Wait for the sketches; the first time, count what was read."""
        datas = awaited([part.data for part in self._parts], self._counters, self._deadline_s)
        if not self._counted:
            self._counted = True
            for part, data in zip(self._parts, datas, strict=True):
                if part.fresh:
                    self._counters.add_probe(data.count)
        return datas


class ProbeHeads(Evidence):
    """Keys of a few probe heads, stored a second time (paper, ITF).

    Parameters
    ----------
    reads
        Per layer, per part: the future of (keys [used, P, head_dim], what it cost).
    heads
        int64 [layers, P], the probed KV heads.
    """

    name = "heads"

    def __init__(
        self,
        reads: Sequence[Sequence[Future[tuple[torch.Tensor, ReadCount]]]],
        heads: np.ndarray,
        counters: RunCounters,
        deadline_s: float,
    ) -> None:
        self._reads, self._heads, self._counters = reads, heads, counters
        self._deadline_s = deadline_s
        self._bytes: dict[int, int] = {}

    def importance(
        self, layer: int, q: torch.Tensor, k_new: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """H2O column sums of the query heads that share a probed KV head, float32 [P, n]."""
        found = awaited(self._reads[layer], self._counters, self._deadline_s)
        for _, count in found:
            self._counters.add_probe(count)
        self._bytes[layer] = sum(count.wanted_bytes for _, count in found)
        keys = found[0][0] if len(found) == 1 else torch.cat([part for part, _ in found])
        probed = torch.from_numpy(self._heads[layer]).to(q.device)
        grouped = q.reshape(k_new.shape[0], -1, *q.shape[1:])
        rows = grouped.index_select(0, probed).flatten(0, 1)
        return column_sums(rows, keys.to(q.device), k_new.index_select(0, probed), scaling)

    def probe_bytes(self, layer: int) -> int:
        """Bytes of the layer's probe keys."""
        return self._bytes.get(layer, 0)


class Static(Evidence):
    """Moving importance from other queries: a control that sees nothing of this one.

    ``importance``: float32 [layers, n].
    """

    name = "static"

    def __init__(self, importance: np.ndarray) -> None:
        self._importance = torch.from_numpy(importance)

    def importance(
        self, layer: int, q: torch.Tensor, _k_new: torch.Tensor, _scaling: float | None
    ) -> torch.Tensor:
        """The recorded importance, float32 [1, n]."""
        return self._importance[layer][None].to(q.device)


class Random(Evidence):
    """A random set in each layer: a control; the same for the same seed."""

    name = "random"

    def __init__(self, n: int, seed: int) -> None:
        self._n, self._seed = n, seed

    def importance(
        self, layer: int, q: torch.Tensor, _k_new: torch.Tensor, _scaling: float | None
    ) -> torch.Tensor:
        """Uniform noise, float32 [1, n]."""
        generator = torch.Generator().manual_seed(self._seed * 100_003 + layer)
        return torch.rand(1, self._n, generator=generator).to(q.device)
