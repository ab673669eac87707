"""The sparse load: per layer identify, fetch the chosen chunks, keep what may be attended to.

Where rows arrive (paper section on ITF; algorithms.md "From tokens to chunks")::

    attend loaded     front: part 0, its chunks in order | part 1 | ...     all of them are kept
                      aside: chunks read ahead; those wanted are copied behind the others
    attend selected   aside: all of these; the selected rows are copied to the front

Where a query leaves a reordered node half-way, rows that are not its own arrive among them: then
all arrive aside, whatever is attended to. After a fallback, or with all keys as evidence, a layer's
keys arrive aside, whole; its values arrive in chunks all the same. Where memory has every chunk
that is needed, the kept rows alone are copied, straight to the front.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TypeAlias

import numpy as np
import torch

from store.ahead import ReadAhead
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
#: Chunks of a part that arrive together: those read ahead come first, then those wanted beside.
Piece: TypeAlias = tuple[LoadPart, PartPlan]


def rows_aside(
    options: SparseOptions, evidence: Evidence | None, parts: Sequence[LoadPart], *, ahead: bool
) -> int:
    """Rows of room that buffers need for what is not kept where it arrives.

    ``ahead``: whether chunks may come before it is known that they are wanted.
    """
    mixed = any(part.mixed for part in parts)
    sparse = options.sparse and bool(parts)
    reads_all_keys = sparse and (evidence is None or isinstance(evidence, ProbeHeads))
    selected = sparse and options.attend == "selected"
    # Each token of a mixed part may lie in a chunk of its own.
    rows = (min(part.stored, part.used * part.chunk_tokens) for part in parts)
    return sum(rows) if mixed or reads_all_keys or selected or ahead else 0


class SparseFetch(Fetch):
    """Loads what the evidence says matters for the queries of the first forward.

    Parameters
    ----------
    evidence
        Where importance comes from; None for all keys, which are then read ahead.
    counters
        Those that the evidence counts its reads in.
    likely
        Per part the chunks to read ahead, bool [layers, chunks] or None; only with evidence that
        never falls back to all keys, which arrive where these do.

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
        likely: Sequence[np.ndarray | None] = (),
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
            began = time.perf_counter()
            for layer in range(layers):
                self._submit_keys(layer)
            counters.fetch_s += time.perf_counter() - began
        self._evidence = evidence or FullKeys(self._keys)
        self._ahead = ReadAhead(self, likely, buffers.aside)
        began = time.perf_counter()
        self._ahead.advance(0)
        counters.fetch_s += time.perf_counter() - began
        self.observed = not isinstance(evidence, Static | Random)

    def layer(self, layer: int, q: torch.Tensor, k_new: torch.Tensor, scaling: float | None) -> int:
        """Identify, fetch and compact one layer; returns the rows that each KV head keeps."""
        before = self.counters.device_chunks, self.counters.host_chunks
        choice = self._identify(layer, q, k_new, scaling)
        sets = choice.sets.cpu().numpy()
        pieces, kept = self._fetch(layer, sets)
        with self.loading():
            self._ahead.advance(layer + 1)
        self.selected.append(sets)
        self._kept.append(kept)
        hits = (self.counters.device_chunks - before[0], self.counters.host_chunks - before[1])
        self.reports.append(self._report(layer, choice, pieces, kept.shape[-1], hits))
        return int(kept.shape[-1])

    def _fetch(self, layer: int, sets: np.ndarray) -> tuple[list[Piece], np.ndarray]:
        """Bring the rows to keep to the front of the layer; all of it counts as loading.

        Returns what was planned and the positions that are kept.
        """
        with self.loading():
            selected = np.unique(sets) if len(sets) > 1 else sets[0]
            plans = [
                plan_part(selected, part, layer, self._ahead.without(i, layer))
                for i, part in enumerate(self.parts)
            ]
            ahead = self._ahead.pieces.get(layer, [])
            pieces = [*ahead, *zip(self.parts, plans, strict=True)]
            tokens = np.concatenate([plan.tokens for _, plan in pieces])
            places, early = _places(pieces), 0
            if ahead:
                wanted = self._ahead.wanted(layer, plans)
                tokens, places = tokens[wanted], places[wanted]
                early = int(wanted[: sum(plan.arriving for _, plan in ahead)].sum())
            if not self._to_aside:
                # What came ahead lies aside, and is copied behind what comes now.
                tokens = np.concatenate([tokens[early:], tokens[:early]])
            self.loaded.append(tokens)
            kept = sets if self._options.attend == "selected" else tokens
            if not self._copy_kept(layer, pieces, kept):
                self._load(layer, pieces)
                self._compact(layer, kept, tokens, places, early)
        return pieces, kept

    def _copy_kept(self, layer: int, pieces: list[Piece], kept: np.ndarray) -> bool:
        """Copy the kept rows from memory, if it has all of them; False where it has not.

        And where whole chunks are kept: those come to the front by themselves.
        """
        if self.tier is None or not self._to_aside or self._key_loads[layer]:
            return False
        slots = [self.tier.slots(p.files, layer)[:, plan.chunks] for p, plan in pieces]
        if any(int(one.min(initial=0)) < 0 for one in slots):
            return False
        found = self._resident(layer, kept)
        for which in (_KEYS, _VALUES):
            self.copy(layer, which, found[which], 0, kept.shape[-1])
        for one in slots:
            self.count_chunks(one)
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
        ahead = self._ahead.reads.values()
        return [future for futures in (*self._reads, *ahead) for future in futures]

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
        with self.loading():
            if not self._key_loads[layer]:
                self._submit_keys(layer)
            self._wait(layer)
            self.arrived(self._key_loads[layer])
        keys = self.buffers.rows(layer)[_KEYS][self.buffers.aside :]
        if self._in_order:
            return keys[: self.matched_len]
        return keys[torch.from_numpy(whole_places(self.parts, layer)).to(keys.device)]

    def _wait(self, layer: int) -> None:
        self.await_reads(layer, self._reads[layer])
        self._reads[layer] = []

    def _load(self, layer: int, pieces: list[Piece]) -> None:
        """Fetch the planned chunks of values, and of keys unless all of them are there."""
        arrays = (_VALUES,) if self._key_loads[layer] else (_KEYS, _VALUES)
        ahead = self._ahead.loads.pop(layer, [])
        loads: list[ChunkLoad] = []
        row = self._ahead.end(layer) if self._to_aside else 0
        for part, plan in pieces[-len(self.parts) :]:
            if plan.arriving:
                loads += [
                    ChunkLoad.plan(part, layer, which, plan.chunks, row, self.tier)
                    for which in arrays
                ]
            row += plan.arriving
        jobs = max(1, self.reader.options.threads // (2 * len(self.parts)))
        self._reads[layer] += self._ahead.reads.pop(layer, [])
        self._reads[layer] += self.submit(loads, jobs)
        self._wait(layer)
        self.arrived([*ahead, *loads])

    def _compact(
        self, layer: int, kept: np.ndarray, tokens: np.ndarray, places: np.ndarray, early: int
    ) -> None:
        """Copy what is kept from aside to the front; what arrived at the front stays.

        ``places`` are the rows at which ``tokens`` arrived; the first ``early`` of them aside,
        before it was known which are wanted.
        """
        whole = bool(self._key_loads[layer])
        k, v = self.buffers.rows(layer)
        from_k, from_v = (rows[self.buffers.aside :] for rows in (k, v))
        if whole:
            order = kept if self._in_order else whole_places(self.parts, layer)[kept]
            gather(from_k, order, k)
        if self._to_aside:
            # Where each token's row has arrived.
            arrived = np.empty(self.matched_len, dtype=np.int64)
            arrived[tokens] = places
            gather(from_v, arrived[kept], v)
            if not whole:
                gather(from_k, arrived[kept], k)
        elif early:
            gather(from_k, places[:early], k[len(tokens) - early :])
            gather(from_v, places[:early], v[len(tokens) - early :])

    def _report(
        self,
        layer: int,
        choice: Choice,
        pieces: list[Piece],
        kept: int,
        hits: tuple[int, int],
    ) -> LayerReport:
        chunks = sum(
            len(part.whole(layer).chunks) if part.mixed else part.chunks for part in self.parts
        )
        fetched = [len(plan.chunks) for _, plan in pieces]
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
            chunks_selected=sum(int(p.wanted.sum()) for _, p in pieces[-len(self.parts) :]),
            chunks_read=keys + sum(fetched),
            loaded_tokens=len(self.loaded[-1]),
            kept_tokens=kept,
            kv_bytes=(keys + sum(fetched)) * size,
            probe_bytes=self._evidence.probe_bytes(layer),
            device_chunks=hits[0],
            host_chunks=hits[1],
        )


def _places(pieces: Sequence[Piece]) -> np.ndarray:
    """Where the tokens of all pieces are among the rows that arrive, int64."""
    base, found = 0, []
    for _, plan in pieces:
        own = np.arange(plan.arriving) if plan.places is None else plan.places
        found.append(base + own)
        base += plan.arriving
    return np.concatenate(found)
