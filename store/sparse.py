"""The sparse load: per layer identify, fetch the chosen chunks, keep what may be attended to.

Where rows arrive (paper section on ITF; algorithms.md "From tokens to chunks")::

    attend loaded     front: part 0, its chunks in order | part 1 | ...     all of them are kept
    attend selected   aside: the same; the selected rows are copied to the front

Where a query leaves a reordered node half-way, rows that are not its own arrive among them: then
all arrive aside, whatever is attended to. After a fallback, or with all keys as evidence, a layer's
keys arrive aside, whole; its values arrive in chunks all the same. Where memory has every chunk
that is needed, the kept rows alone are copied, straight to the front.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import torch

from store.buffers import RunBuffers
from store.chunk_load import ChunkLoad, LoadPart
from store.disk.reader import ChunkReader, ReadCount
from store.fetch import Fetch, gather, whole_loads, whole_places
from store.itf.evidence import Evidence, FullKeys, ProbeHeads, Random, Static
from store.itf.importance import keep_count
from store.itf.options import SparseOptions
from store.itf.select import Choice, PartPlan, choose, choose_by_probes, plan_part
from store.stats import LayerReport, RunCounters
from store.tier.tiered import TieredCache

_KEYS, _VALUES = 0, 1


def rows_aside(options: SparseOptions, evidence: Evidence | None, parts: Sequence[LoadPart]) -> int:
    """Rows of room that buffers need for what is not kept where it arrives."""
    mixed = any(part.mixed for part in parts)
    sparse = options.sparse and bool(parts)
    reads_all_keys = sparse and (evidence is None or isinstance(evidence, ProbeHeads))
    selected = sparse and options.attend == "selected"
    return sum(part.stored for part in parts) if mixed or reads_all_keys or selected else 0


class SparseFetch(Fetch):
    """Loads what the evidence says matters for the queries of the first forward.

    Parameters
    ----------
    evidence
        Where importance comes from; None for all keys, which are then read ahead.
    counters
        Those that the evidence counts its reads in.

    Attributes
    ----------
    importance
        Per layer so far, float32 [n]: importance summed over the heads that the evidence covers.
    observed
        Whether that importance is this query's own.
    loaded
        Per layer so far, int64 positions whose keys and values were both fetched.
    """

    selective = True

    def __init__(
        self,
        parts: Sequence[LoadPart],
        reader: ChunkReader,
        buffers: RunBuffers,
        options: SparseOptions,
        evidence: Evidence | None,
        counters: RunCounters,
        tier: TieredCache | None = None,
    ) -> None:
        super().__init__(parts, reader, buffers, counters, tier)
        self._options = options
        self._k = keep_count(self.matched_len, options.retention)
        mixed = any(part.mixed for part in self.parts)
        self._to_aside = mixed or options.attend == "selected"
        self._in_order = all(part.files.rows is None for part in self.parts)
        layers = buffers.shape.num_layers
        self._reads: list[list[Future[ReadCount]]] = [[] for _ in range(layers)]
        self._key_loads: list[list[ChunkLoad]] = [[] for _ in range(layers)]
        self._kept: list[np.ndarray] = []
        self._counted = 0
        self.loaded: list[np.ndarray] = []
        self.importance: list[torch.Tensor] = []
        if evidence is None:
            for layer in range(layers):
                self._submit_keys(layer)
        self._evidence = evidence or FullKeys(self._keys)
        self.observed = not isinstance(evidence, Static | Random)

    def layer(self, layer: int, q: torch.Tensor, k_new: torch.Tensor, scaling: float | None) -> int:
        """Identify, fetch and compact one layer; returns the rows that each KV head keeps."""
        choice = self._identify(layer, q, k_new, scaling)
        sets = choice.sets.cpu().numpy()
        before = self.counters.device_chunks, self.counters.host_chunks
        plans, kept = self._fetch(layer, sets)
        self.selected.append(sets)
        self._kept.append(kept)
        hits = (self.counters.device_chunks - before[0], self.counters.host_chunks - before[1])
        self.reports.append(self._report(layer, choice, plans, kept.shape[-1], hits))
        return int(kept.shape[-1])

    def _fetch(self, layer: int, sets: np.ndarray) -> tuple[list[PartPlan], np.ndarray]:
        """Bring the rows to keep to the front of the layer; all of it counts as loading.

        Returns what was planned and the positions that are kept.
        """
        began, waited = time.perf_counter(), self.counters.load_wait_s
        selected = np.unique(sets) if len(sets) > 1 else sets[0]
        gap = self.reader.options.bridge_chunks
        plans = [plan_part(selected, part, layer, gap) for part in self.parts]
        tokens = np.concatenate([plan.tokens for plan in plans])
        self.loaded.append(tokens)
        kept = sets if self._options.attend == "selected" else tokens
        if not self._copy_kept(layer, plans, kept):
            self._load(layer, plans)
            self._compact(layer, plans, kept, tokens)
        spent = time.perf_counter() - began
        self.counters.load_wait_s = waited + spent
        self.counters.fetch_s += spent
        return plans, kept

    def _copy_kept(self, layer: int, plans: list[PartPlan], kept: np.ndarray) -> bool:
        """Copy the kept rows from memory, if it has all of them; False where it has not.

        And where whole chunks are kept: those come to the front by themselves.
        """
        if self.tier is None or not self._to_aside or self._key_loads[layer]:
            return False
        found = self._resident(layer, kept)
        if int(found.min(initial=0)) < 0:
            return False
        for which in (_KEYS, _VALUES):
            self.copy(layer, which, found[which], 0, kept.shape[-1])
        for part, plan in zip(self.parts, plans, strict=True):
            self.count_chunks(self.tier.slots(part.files, layer)[:, plan.chunks])
        return True

    def _resident(self, layer: int, positions: np.ndarray) -> np.ndarray:
        """Row in memory of the key and the value at each position, below 0 where it has none.

        int64 [2, *shape of positions].
        """
        assert self.tier is not None
        found = np.empty((2, *positions.shape), dtype=np.int64)
        for part in self.parts:
            own = positions - part.start
            inside = slice(None) if len(self.parts) == 1 else (own >= 0) & (own < part.used)
            chunk, at = np.divmod(part.rows_of(layer, own[inside]), part.chunk_tokens)
            slots = self.tier.slots(part.files, layer)[:, chunk].astype(np.int64)
            found[:, inside] = slots * part.chunk_tokens + at
        return found

    def count_important(self) -> None:
        """Count rows of selected tokens, keys and values, by the tier they lie in.

        Nothing has moved since they were loaded, as nodes in use are pinned: so this can wait
        until the first token is out. A second call counts nothing.
        """
        counters, size = self.counters, self.parts[0].chunk_tokens
        for layer in range(self._counted, len(self.selected)):
            selected = np.unique(self.selected[layer])
            device = held = 0
            if self.tier is not None:
                found = self._resident(layer, selected)
                held = int((found >= 0).sum())
                device = held - int((found >= self.tier.device_slots * size).sum())
            counters.important_rows += 2 * len(selected)
            counters.important_device_rows += device
            counters.important_host_rows += held - device
            counters.needed_bytes += (2 * len(selected) - held) * self.buffers.shape.row_bytes
        self._counted = len(self.selected)

    def pending(self) -> list[Future[ReadCount]]:
        """Reads that nobody has waited for yet."""
        return [future for futures in self._reads for future in futures]

    def kept_positions(self, layer: int) -> np.ndarray:
        """Prefix positions that a layer keeps."""
        return self._kept[layer]

    def loaded_positions(self, layer: int) -> np.ndarray:
        """Prefix positions whose keys and values a layer fetched."""
        return self.loaded[layer]

    def _identify(
        self, layer: int, q: torch.Tensor, k_new: torch.Tensor, scaling: float | None
    ) -> Choice:
        """Choose the layer's tokens; time spent waiting for reads is counted as such."""
        counters = self.counters
        began, waited = time.perf_counter(), counters.load_wait_s + counters.probe_wait_s
        importance = self._evidence.importance(layer, q, k_new, scaling)
        self.importance.append(importance.sum(0))

        def all_heads() -> torch.Tensor:
            return FullKeys(self._keys).importance(layer, q, k_new, scaling)

        if isinstance(self._evidence, ProbeHeads):
            choice = choose_by_probes(importance, self._k, self._options, all_heads)
        else:
            choice = choose(importance, self._k, self._options)
        waited = counters.load_wait_s + counters.probe_wait_s - waited
        counters.identify_s += time.perf_counter() - began - waited
        return choice

    def _submit_keys(self, layer: int) -> None:
        loads = [*whole_loads(self, layer, (_KEYS,), self.buffers.aside)]
        self._key_loads[layer] = loads
        self._reads[layer] += self.submit(loads, 1)

    def _keys(self, layer: int) -> torch.Tensor:
        """All keys of a layer in token order, [n, kv_heads, head_dim]; read if need be."""
        began = time.perf_counter()
        if not self._key_loads[layer]:
            self._submit_keys(layer)
        self._wait(layer)
        self.arrived(self._key_loads[layer])
        self.counters.fetch_s += time.perf_counter() - began
        keys = self.buffers.rows(layer)[_KEYS][self.buffers.aside :]
        if self._in_order:
            return keys[: self.matched_len]
        return keys[torch.from_numpy(whole_places(self.parts, layer)).to(keys.device)]

    def _wait(self, layer: int) -> None:
        self.await_reads(layer, self._reads[layer])
        self._reads[layer] = []

    def _load(self, layer: int, plans: list[PartPlan]) -> None:
        """Fetch the planned chunks of values, and of keys unless all of them are there."""
        arrays = (_VALUES,) if self._key_loads[layer] else (_KEYS, _VALUES)
        loads, row = [], self.buffers.aside if self._to_aside else 0
        for part, plan in zip(self.parts, plans, strict=True):
            loads += [
                ChunkLoad.plan(part, layer, which, plan.chunks, row, self.tier)
                for which in arrays
                if plan.arriving
            ]
            row += plan.arriving
        jobs = max(1, self.reader.options.threads // (2 * len(self.parts)))
        self._reads[layer] += self.submit(loads, jobs)
        self._wait(layer)
        self.arrived(loads)

    def _compact(
        self, layer: int, plans: list[PartPlan], kept: np.ndarray, tokens: np.ndarray
    ) -> None:
        """Copy what is kept from aside to the front; what arrived at the front stays."""
        whole = bool(self._key_loads[layer])
        k, v = self.buffers.rows(layer)
        from_k, from_v = (rows[self.buffers.aside :] for rows in (k, v))
        if whole:
            places = kept if self._in_order else whole_places(self.parts, layer)[kept]
            gather(from_k, places, k)
        if self._to_aside:
            # Where each token's row has arrived.
            arrived = np.empty(self.matched_len, dtype=np.int64)
            arrived[tokens] = _places(plans)
            gather(from_v, arrived[kept], v)
            if not whole:
                gather(from_k, arrived[kept], k)

    def _report(
        self,
        layer: int,
        choice: Choice,
        plans: list[PartPlan],
        kept: int,
        hits: tuple[int, int],
    ) -> LayerReport:
        chunks = sum(part.chunks for part in self.parts)
        fetched = [len(plan.chunks) for plan in plans]
        whole = sum(len(load.chunks) for load in self._key_loads[layer])
        keys = whole if self._key_loads[layer] else sum(fetched)
        size = self.parts[0].files.layout.chunk_bytes
        return LayerReport(
            layer=layer,
            evidence="full" if choice.fell_back else self._evidence.name,
            jaccard=choice.jaccard,
            threshold=choice.threshold,
            fell_back=choice.fell_back,
            sets=len(choice.sets),
            selected_tokens=self._k,
            chunks=chunks,
            chunks_selected=sum(plan.wanted for plan in plans),
            chunks_read=keys + sum(fetched),
            loaded_tokens=len(self.loaded[-1]),
            kept_tokens=kept,
            kv_bytes=(keys + sum(fetched)) * size,
            probe_bytes=self._evidence.probe_bytes(layer),
            device_chunks=hits[0],
            host_chunks=hits[1],
        )


def _places(plans: Sequence[PartPlan]) -> np.ndarray:
    """Where the tokens of all parts' plans are among the rows that arrive, int64."""
    base, found = 0, []
    for plan in plans:
        own = np.arange(plan.arriving) if plan.places is None else plan.places
        found.append(base + own)
        base += plan.arriving
    return np.concatenate(found)
