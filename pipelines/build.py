"""Build a store: compute each prefix once, keep its KV, skip what is there already.

A prefix whose beginning is stored (by an earlier prefix of the same build, or by an earlier
build) reuses it: only the rest runs through the model. Each prefix is published on its own, so
that a build that was stopped anywhere goes on where it was.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from pipelines.attention import prefill
from pipelines.models import LoadedModel
from pipelines.probes import NoCalibrationError, finish_probes
from pipelines.progress import Progress, ProgressEvent, silent
from pipelines.sources.base import PrefixItem, PrefixSource
from store.buffers import RunBuffers, arena_bytes
from store.disk.io import Arena, IOOptions
from store.disk.reader import ChunkReader
from store.disk.sidecar_layout import SidecarLayout
from store.engine import PrefixStore
from store.errors import (
    ChunkLoadError,
    ReadOnlyStoreError,
    StoreError,
    StoreFullError,
    StoreLockedError,
    StoreWriteError,
)
from store.fetch import FullFetch
from store.index.ids import ids_digest
from store.probes import ProbeSettings
from store.query_run import QueryRun

#: Most that one more prefix adds to the catalog and its journal.
_CATALOG_BYTES = 128 << 10


@dataclass(slots=True)
class BuildReport:
    """What a build did. ``tokens`` counts all prefixes, ``computed_tokens`` what ran.

    ``tokens_per_s`` is over computed tokens and the whole time, storing included; ``bytes`` is
    what was written; ``dropped`` counts prefixes left out for the size limit, ``failed`` those that
    damage in the store kept from being stored (``warnings`` says which).
    """

    prefixes: int = 0
    prefixes_reused: int = 0
    duplicates: int = 0
    dropped: int = 0
    failed: int = 0
    tokens: int = 0
    computed_tokens: int = 0
    tokens_per_s: float = 0.0
    compute_s: float = 0.0
    bytes: int = 0
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """What a build would do: tokens that would be computed, their bytes and time, free space."""

    prefixes: int
    tokens: int
    computed_tokens: int
    bytes: int
    seconds: float
    free_bytes: int
    warnings: list[str]


def build_store(
    store: PrefixStore,
    model: LoadedModel,
    source: PrefixSource,
    *,
    max_size_bytes: int | None = None,
    progress: Progress | None = None,
    limit: int | None = None,
) -> BuildReport:
    """Store every prefix of ``source``.

    Parameters
    ----------
    max_size_bytes
        Leave out prefixes that would make the store larger than this, counting what it holds.
    limit
        Use only the first prefixes.

    Raises
    ------
    StoreLockedError, ReadOnlyStoreError, StoreFullError
        What was published before stays.
    """
    with store.writing():
        tell = progress or silent
        report = _Builder(store, model, source, max_size_bytes, tell, limit).run()
        try:
            probes = finish_probes(store, model, tell)
        except NoCalibrationError as error:
            probes = None
            report.warnings.append(str(error))
        if probes is not None:
            report.bytes += probes.bytes_written
            report.warnings += probes.warnings
        return report


class _Builder:
    """One build under way."""

    def __init__(
        self,
        store: PrefixStore,
        model: LoadedModel,
        source: PrefixSource,
        max_size_bytes: int | None,
        progress: Progress,
        limit: int | None,
    ) -> None:
        self.store, self.model, self.source = store, model, source
        self.max_size_bytes, self.progress, self.limit = max_size_bytes, progress, limit
        self.report = BuildReport()
        self.seen: set[str] = set()
        self.done_tokens, self.total_tokens = 0, 0
        # Of the prefix under way: a failed try starts again and must not count twice.
        self.item_tokens = 0

    def run(self) -> BuildReport:
        """Work through the source."""
        self.total_tokens = sum(len(item.ids) for item in self._items())
        started = time.perf_counter()
        for item in self._items():
            self._one(item)
            self.done_tokens += self.item_tokens
            self.item_tokens = 0
        report = self.report
        report.warnings = [*self.source.warnings, *report.warnings]
        elapsed = time.perf_counter() - started
        report.tokens_per_s = report.computed_tokens / elapsed if elapsed > 0 else 0.0
        self._tell(0, "", final=True)
        return report

    def _items(self) -> Iterable[PrefixItem]:
        return _limited(self.source, self.model, self.limit)

    def _one(self, item: PrefixItem) -> None:
        report, digest = self.report, ids_digest(item.ids)
        report.prefixes += 1
        report.tokens += len(item.ids)
        if digest in self.seen:
            report.duplicates += 1
            self._tell(len(item.ids), item.name)
            return
        self.seen.add(digest)
        if self.store.has_prefix(item.ids) is not None:
            report.prefixes_reused += 1
            self._tell(len(item.ids), item.name)
            return
        if self.store.match(item.ids).matched_len == len(item.ids):
            self.store.add_prefix(item.ids, item.name, item.source)
            self._tell(len(item.ids), item.name)
            return
        if self._fits(item):
            self._try(item)

    def _try(self, item: PrefixItem) -> None:
        """Compute one prefix; what is wrong with this one alone does not stop the others."""
        try:
            self._compute(item)
        except (StoreFullError, StoreLockedError, StoreWriteError, ReadOnlyStoreError):
            raise
        except StoreError as error:
            self.report.failed += 1
            self.report.warnings.append(f"{item.name} was not stored: {error}")
            self.item_tokens = 0
            self._tell(len(item.ids), item.name)

    def _fits(self, item: PrefixItem) -> bool:
        if self.max_size_bytes is None:
            return True
        need = self.store.insert_bytes(item.ids) + _CATALOG_BYTES
        if self.store.used_bytes() + need <= self.max_size_bytes:
            return True
        self.report.dropped += 1
        self.report.warnings.append(
            f"{item.name} was left out: with it the store would pass the size limit of "
            f"{self.max_size_bytes} bytes; raise --max-size, or remove prefixes with 'impress rm'"
        )
        self._tell(len(item.ids), item.name)
        return False

    def _compute(self, item: PrefixItem) -> None:
        """Prefill what is not stored and publish it; a stored part that fails is computed too."""
        max_match: int | None = None
        while True:
            run, match = self.store.begin(item.ids, max_new_tokens=0, max_match=max_match)
            with run:
                try:
                    self._prefill(run, item, match.matched_len)
                except ChunkLoadError as error:
                    self.store.quarantine(error)
                    self.report.warnings.append(f"{error}")
                    max_match = error.usable_before(match.matched_len)
                    self.item_tokens = 0
                    continue
                self._publish(run, item, match.matched_len)
                return

    def _prefill(self, run: QueryRun, item: PrefixItem, start: int) -> None:
        self._tell(start, item.name)
        began = time.perf_counter()
        rest = item.ids[start:]
        prefill(
            self.model.model,
            run,
            rest,
            logits=0,
            on_segment=lambda tokens: self._tell(tokens, item.name),
        )
        self.report.compute_s += time.perf_counter() - began
        self.report.computed_tokens += len(rest)

    def _publish(self, run: QueryRun, item: PrefixItem, start: int) -> None:
        result = self.store.insert(
            item.ids,
            lambda layer: run.kv(layer, start, len(item.ids)),
            start,
            name=item.name,
            source=item.source,
        )
        self.report.bytes += result.bytes

    def _tell(self, tokens: int, name: str, *, final: bool = False) -> None:
        self.item_tokens += tokens
        done = self.total_tokens if final else self.done_tokens + self.item_tokens
        note = f"{name} · {self.report.bytes / 1e6:.0f} MB written" if name else ""
        self.progress(ProgressEvent("build store", done, self.total_tokens, "tokens", note))


def _limited(source: PrefixSource, model: LoadedModel, limit: int | None) -> Iterable[PrefixItem]:
    """Prefixes of the source, cut so that a question fits behind them."""
    for count, item in enumerate(source.items(model.tokenizer, model.prefix_limit)):
        if limit is not None and count >= limit:
            return
        yield item


def plan_build(
    model: LoadedModel,
    source: PrefixSource,
    store: PrefixStore | None,
    *,
    path: Path,
    probes: ProbeSettings | None = None,
    limit: int | None = None,
) -> BuildPlan:
    """Say what `build_store` would do, writing nothing.

    ``path`` is where the store is or would be, ``probes`` what its nodes get beside their KV; the
    time is estimated from a short prefill.
    """
    items = list(_limited(source, model, limit))
    matched = [store.match(item.ids).matched_len if store else 0 for item in items]
    fresh = new_tokens([item.ids for item in items], matched)
    return BuildPlan(
        prefixes=len(items),
        tokens=sum(len(item.ids) for item in items),
        computed_tokens=fresh,
        bytes=fresh * model.shape.token_bytes + _probe_bytes(model, fresh, probes),
        seconds=fresh / prefill_rate(model) if fresh else 0.0,
        free_bytes=shutil.disk_usage(_existing(path)).free,
        warnings=list(source.warnings),
    )


def _probe_bytes(model: LoadedModel, tokens: int, probes: ProbeSettings | None) -> int:
    """Bytes of the sidecars of ``tokens`` tokens, taken as one node."""
    specs = probes.specs.values() if probes is not None and tokens else ()
    return sum(SidecarLayout.of(model.shape, tokens, spec).data_bytes for spec in specs)


def _existing(path: Path) -> Path:
    """The path or its nearest parent that exists."""
    path = path.absolute()
    return next(p for p in [path, *path.parents] if p.exists())


def new_tokens(prefixes: list[np.ndarray], matched: list[int]) -> int:
    """Tokens that have to be computed, each shared beginning once.

    In sorted order, what a prefix shares with any earlier one it shares with the one before it.
    ``matched``: tokens of each that are stored already.
    """
    order = sorted(range(len(prefixes)), key=lambda i: prefixes[i].astype(">u4").tobytes())
    total, before = 0, np.empty(0, np.uint32)
    for index in order:
        ids = prefixes[index]
        size = min(len(ids), len(before))
        differ = np.flatnonzero(ids[:size] != before[:size])
        shared = int(differ[0]) if len(differ) else size
        total += len(ids) - max(shared, matched[index])
        before = ids
    return total


def prefill_rate(model: LoadedModel, tokens: int = 256) -> float:
    """Tokens per second of a short prefill on this machine, now."""
    tokens = min(tokens, model.max_positions - 1)
    shape = model.shape
    reader = ChunkReader(IOOptions())
    arena = Arena(arena_bytes(shape, tokens))
    ids = np.zeros(tokens, dtype=np.uint32)
    device = torch.device(model.device)
    buffers = RunBuffers(shape, arena, tokens, device)
    with QueryRun(buffers, FullFetch([], reader, buffers), lambda *_: None) as run:
        began = time.perf_counter()
        prefill(model.model, run, ids, logits=0)
        return tokens / (time.perf_counter() - began)
