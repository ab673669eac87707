"""The sparse load: per layer identify, fetch the chosen chunks, keep what may be attended to.

Buffers fill from the front (paper section on ITF; algorithms.md "From tokens to chunks")::

    fetched     | part 0: its chunks in order | part 1 | ... |       rows as they arrive
    kept        | all of them (attend loaded), or the selected ones moved to the front |

After a fallback, or with all keys as evidence, a layer's keys lie whole and in token order before
the kept ones are moved to the front; its values arrive in chunks all the same.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import torch

from store.buffers import RunBuffers
from store.disk.layout import KV_ARRAYS
from store.disk.reader import ChunkReader, ReadCount, ShardRead
from store.fetch import Fetch, LoadPart, whole_part
from store.itf.evidence import Evidence, FullKeys, ProbeHeads, Random, Static
from store.itf.importance import keep_count
from store.itf.options import SparseOptions
from store.itf.select import Choice, PartPlan, choose, choose_by_probes, plan_part, split_runs
from store.stats import LayerReport, RunCounters

_KEYS, _VALUES = 0, 1


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
    ) -> None:
        super().__init__(parts, reader, buffers, counters)
        self._options = options
        self._k = keep_count(self.matched_len, options.retention)
        layers = buffers.shape.num_layers
        self._reads: list[list[Future[ReadCount]]] = [[] for _ in range(layers)]
        self._whole_keys = [False] * layers
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
        self._load(layer, plans)
        kept = self._compact(layer, sets, tokens)
        self.selected.append(sets)
        self.loaded.append(tokens)
        self._kept.append(sets if self._options.attend == "selected" else tokens)
        self.reports.append(self._report(layer, choice, plans, kept))
        return kept

    def pending(self) -> list[Future[ReadCount]]:
        """Reads that nobody has waited for yet."""
        return [future for futures in self._reads for future in futures]

    def kept_positions(self, layer: int) -> np.ndarray:
        """Prefix positions that a layer keeps."""
        return self._kept[layer]

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
        self._whole_keys[layer] = True
        self._reads[layer] += [
            self.reader.submit(whole_part(self.buffers, part, layer, _KEYS, part is self.parts[-1]))
            for part in self.parts
        ]

    def _keys(self, layer: int) -> torch.Tensor:
        """All keys of a layer in token order, [n, kv_heads, head_dim]; read if need be."""
        if not self._whole_keys[layer]:
            self._submit_keys(layer)
        self._wait(layer)
        self.buffers.upload(layer, _KEYS, self.matched_len)
        return self.buffers.rows(layer)[_KEYS][: self.matched_len]

    def _wait(self, layer: int) -> None:
        self.await_reads(layer, self._reads[layer])
        self._reads[layer] = []

    def _load(self, layer: int, plans: list[PartPlan]) -> None:
        """Fetch the planned chunks of values, and of keys unless all of them are there."""
        arrays = (_VALUES,) if self._whole_keys[layer] else (_KEYS, _VALUES)
        reads, row = [], 0
        for part, plan in zip(self.parts, plans, strict=True):
            reads += self._chunk_reads(layer, arrays, part, plan, row)
            row += len(plan.tokens)
        # Planned first, submitted at once: running jobs compete with this thread for Python.
        self._reads[layer] += [self.reader.submit(read) for read in reads]
        self._wait(layer)
        for which in arrays:
            self.buffers.upload(layer, which, row)

    def _chunk_reads(
        self, layer: int, arrays: tuple[int, ...], part: LoadPart, plan: PartPlan, row: int
    ) -> list[ShardRead]:
        """Reads of a part's chunks to rows ``row`` and after, for as many jobs as threads.

        No job may write past its own rows: another's begin there.
        """
        size, end, reads = part.chunk_tokens, row + len(plan.tokens), []
        for runs in split_runs(plan.runs, self._jobs()):
            stop = min(row + int((runs.stop - runs.start).sum()) * size, end)
            for which in arrays:
                room = self.buffers.room(layer, which, row, stop)
                reads.append(ShardRead(part.files, KV_ARRAYS[which], layer, runs, room, len(room)))
            row = stop
        return reads

    def _jobs(self) -> int:
        return max(1, self.reader.options.threads // (2 * len(self.parts)))

    def _compact(self, layer: int, sets: np.ndarray, tokens: np.ndarray) -> int:
        """Move what is kept to the front of the layer's rows; returns how many rows that is."""
        k, v = self.buffers.rows(layer)
        whole = self._whole_keys[layer]
        if self._options.attend == "loaded":
            if whole and len(tokens) < self.matched_len:
                _gather(k, tokens)
            return len(tokens)
        # Where each selected token's row has arrived.
        arrived = np.empty(self.matched_len, dtype=np.int64)
        arrived[tokens] = np.arange(len(tokens))
        places = arrived[sets]
        _gather(k, sets if whole else places)
        _gather(v, places)
        return self._k

    def _report(self, layer: int, choice: Choice, plans: list[PartPlan], kept: int) -> LayerReport:
        chunks = sum(part.chunks for part in self.parts)
        fetched = [int((plan.runs.stop - plan.runs.start).sum()) for plan in plans]
        keys = chunks if self._whole_keys[layer] else sum(fetched)
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


def _gather(rows: torch.Tensor, places: np.ndarray) -> None:
    """Move rows to the front of ``rows`` [capacity, kv_heads, head_dim].

    ``places``: int64 [k], or [kv_heads, k] where each head keeps other rows; [1, k] counts as [k].
    """
    index = torch.from_numpy(places).to(rows.device)
    if places.ndim == 1 or len(places) == 1:
        flat = index.reshape(-1)
        rows[: len(flat)] = rows.index_select(0, flat)
        return
    heads, k = places.shape
    # One flat gather of head rows: row r of head h is row r * heads + h of the flattened view.
    flat = (index.t() * heads + torch.arange(heads, device=rows.device)).reshape(-1)
    moved = rows.flatten(0, 1).index_select(0, flat)
    rows[:k] = moved.view(k, heads, -1)
