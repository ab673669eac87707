"""The sparse load: per layer identify, fetch the chosen chunks, keep what may be attended to.

Where rows arrive (paper section on ITF; algorithms.md "From tokens to chunks")::

    attend loaded     front: part 0, its chunks in order | part 1 | ...     all of them are kept
    attend selected   aside: the same; the selected rows are copied to the front

After a fallback, or with all keys as evidence, a layer's keys arrive aside, whole and in token
order; its values arrive in chunks all the same. Where memory has every chunk that is needed, the
kept rows alone are copied, straight to the front.
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
from store.disk.runs import run_chunks
from store.fetch import Fetch, whole_loads
from store.itf.evidence import Evidence, FullKeys, ProbeHeads, Random, Static
from store.itf.importance import keep_count
from store.itf.options import SparseOptions
from store.itf.select import Choice, PartPlan, choose, choose_by_probes, plan_part
from store.stats import LayerReport, RunCounters
from store.tier.host import HostTier

_KEYS, _VALUES = 0, 1


def needs_aside(options: SparseOptions, evidence: Evidence | None) -> bool:
    """Whether other rows than those that are kept may arrive; buffers need room for them then."""
    reads_all_keys = evidence is None or isinstance(evidence, ProbeHeads)
    return options.attend == "selected" or reads_all_keys


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

    def __init__(
        self,
        parts: Sequence[LoadPart],
        reader: ChunkReader,
        buffers: RunBuffers,
        options: SparseOptions,
        evidence: Evidence | None,
        counters: RunCounters,
        tier: HostTier | None = None,
    ) -> None:
        super().__init__(parts, reader, buffers, counters, tier)
        self._options = options
        self._k = keep_count(self.matched_len, options.retention)
        layers = buffers.shape.num_layers
        self._reads: list[list[Future[ReadCount]]] = [[] for _ in range(layers)]
        self._key_loads: list[list[ChunkLoad]] = [[] for _ in range(layers)]
        self._kept: list[np.ndarray] = []
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
        selected = np.unique(sets) if len(sets) > 1 else sets[0]
        gap = self.reader.options.bridge_chunks
        plans = [plan_part(selected, part, gap) for part in self.parts]
        tokens = np.concatenate([plan.tokens for plan in plans])
        kept = sets if self._options.attend == "selected" else tokens
        self._fetch(layer, plans, kept, tokens)
        self.selected.append(sets)
        self.loaded.append(tokens)
        self._kept.append(kept)
        self.reports.append(self._report(layer, choice, plans, kept.shape[-1]))
        return int(kept.shape[-1])

    def _fetch(
        self, layer: int, plans: list[PartPlan], kept: np.ndarray, tokens: np.ndarray
    ) -> None:
        """Bring the kept rows to the front of the layer; all of it counts as loading."""
        began, waited = time.perf_counter(), self.counters.load_wait_s
        if not self._copy_kept(layer, kept):
            self._load(layer, plans)
            self._compact(layer, kept, tokens)
        self.counters.load_wait_s = waited + time.perf_counter() - began

    def _copy_kept(self, layer: int, kept: np.ndarray) -> bool:
        """Copy the kept rows from memory, if it has all of them; False where it has not."""
        if self.tier is None or self._key_loads[layer]:
            return False
        rows = np.concatenate([self._tier_rows(part, layer) for part in self.parts], axis=1)
        places = rows[:, kept]
        if int(places.min()) < 0:
            return False
        for which in (_KEYS, _VALUES):
            host = self.buffers.host(layer, which)
            _gather(self.tier.slab.rows, places[which], host)
            self.buffers.upload(layer, which, 0, kept.shape[-1])
        self.counters.host_bytes += 2 * kept.shape[-1] * self.buffers.shape.row_bytes
        return True

    def _tier_rows(self, part: LoadPart, layer: int) -> np.ndarray:
        """Row of each token of a part in memory, int64 [2, used]; negative where it is absent."""
        assert self.tier is not None
        size = part.chunk_tokens
        slots = self.tier.slots(part.files, layer)[:, : part.chunks].astype(np.int64)
        rows = slots[:, :, None] * size + np.arange(size)
        return rows.reshape(2, -1)[:, : part.used]

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
        if not self._key_loads[layer]:
            self._submit_keys(layer)
        self._wait(layer)
        self.arrived(self._key_loads[layer])
        begin = self.buffers.aside
        return self.buffers.rows(layer)[_KEYS][begin : begin + self.matched_len]

    def _wait(self, layer: int) -> None:
        self.await_reads(layer, self._reads[layer])
        self._reads[layer] = []

    def _load(self, layer: int, plans: list[PartPlan]) -> None:
        """Fetch the planned chunks of values, and of keys unless all of them are there."""
        arrays = (_VALUES,) if self._key_loads[layer] else (_KEYS, _VALUES)
        loads, row = [], self.buffers.aside if self._options.attend == "selected" else 0
        for part, plan in zip(self.parts, plans, strict=True):
            chunks, count = run_chunks(plan.runs), len(plan.tokens)
            loads += [
                ChunkLoad.plan(part, layer, which, chunks, row, count, self.tier)
                for which in arrays
                if count
            ]
            row += count
        jobs = max(1, self.reader.options.threads // (2 * len(self.parts)))
        self._reads[layer] += self.submit(loads, jobs)
        self._wait(layer)
        self.arrived(loads)

    def _compact(self, layer: int, kept: np.ndarray, tokens: np.ndarray) -> None:
        """Copy what is kept from aside to the front; what arrived at the front stays."""
        whole = bool(self._key_loads[layer])
        k, v = self.buffers.rows(layer)
        from_k, from_v = (rows[self.buffers.aside :] for rows in (k, v))
        if self._options.attend == "loaded":
            if whole:
                _gather(from_k, kept, k)
            return
        # Where each token's row has arrived.
        arrived = np.empty(self.matched_len, dtype=np.int64)
        arrived[tokens] = np.arange(len(tokens))
        _gather(from_k, kept if whole else arrived[kept], k)
        _gather(from_v, arrived[kept], v)

    def _report(self, layer: int, choice: Choice, plans: list[PartPlan], kept: int) -> LayerReport:
        chunks = sum(part.chunks for part in self.parts)
        fetched = [int((plan.runs.stop - plan.runs.start).sum()) for plan in plans]
        keys = chunks if self._key_loads[layer] else sum(fetched)
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
        )


def _gather(source: torch.Tensor, places: np.ndarray, target: torch.Tensor) -> None:
    """Copy rows of ``source`` [rows, kv_heads, head_dim] to the front of ``target``.

    ``places``: int64 [k], or [kv_heads, k] where each head keeps other rows; [1, k] counts as [k].
    """
    index = torch.from_numpy(places).to(source.device)
    if places.ndim == 1 or len(places) == 1:
        flat = index.reshape(-1)
        torch.index_select(source, 0, flat, out=target[: len(flat)])
        return
    heads, k = places.shape
    # One flat gather of head rows: row r of head h is row r * heads + h of the flattened view.
    flat = (index.t() * heads + torch.arange(heads, device=source.device)).reshape(-1)
    torch.index_select(source.flatten(0, 1), 0, flat, out=target[:k].flatten(0, 1))
