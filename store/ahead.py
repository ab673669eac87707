"""Read ahead: chunks that a query will most likely want, before it says so.

Past queries tell which tokens matter to most of them, and reordering puts these at a node's front;
reading them while earlier layers compute hides what would be waited for (architecture.md, one query
as data flows). They arrive aside, and what of them is wanted is copied from there: what is not, is
left out, as an answer must not depend on what happens to be known of other queries.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from store.chunk_load import ChunkLoad, LoadPart
from store.disk.reader import ReadCount
from store.fetch import Fetch
from store.index.mapping import invert_rows
from store.itf.select import PartPlan, plan_chunks
from store.node_access import NodeAccess

#: A chunk is read ahead if at least this share of queries is expected to want it.
LIKELY = 0.7
#: Layers that are read ahead of the one that computes: reads are served in turn, so that those of
#: far layers would keep the next one's waiting.
DEPTH = 3
#: Queries that must have used a node before anything is expected of the next one.
MIN_QUERIES = 3
_CACHED = 64


class Forecast:
    """Which chunks of a node the next query will want, by what past ones selected."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, int, float], np.ndarray] = OrderedDict()

    def chunks(
        self, part: LoadPart, access: NodeAccess | None, retention: float
    ) -> np.ndarray | None:
        """Chunks likely to be wanted, bool [layers, chunks]; None where nothing is known.

        And where the query leaves a reordered node half-way: what past queries selected there
        says little of its chunks.
        """
        if access is None or access.queries < MIN_QUERIES or part.mixed:
            return None
        key = (part.files.name, access.queries, retention)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = _likely(
                access, part.files.rows, part.chunk_tokens, retention
            )
            if len(self._known) > _CACHED:
                self._known.popitem(last=False)
        return found[:, : part.chunks]


def _likely(
    access: NodeAccess, rows: np.ndarray | None, chunk_tokens: int, retention: float
) -> np.ndarray:
    """Chunks of which a token is selected by `LIKELY` of queries, taking tokens as independent."""
    share = np.minimum(access.selected / access.queries, 1.0).astype(np.float32)
    usual = float(share.mean())
    # Queries that selected more than this one will say too much of it.
    share *= min(1.0, retention / usual) if usual else 0.0
    with np.errstate(divide="ignore"):
        missed = np.log1p(-share)
    if rows is not None:
        missed = np.take_along_axis(missed, invert_rows(rows), axis=1)
    starts = np.arange(0, access.tokens, chunk_tokens)
    likely: np.ndarray = -np.expm1(np.add.reduceat(missed, starts, axis=1)) >= LIKELY
    return likely


class ReadAhead:
    """What one query reads ahead; it is planned and submitted layer by layer.

    Parameters
    ----------
    masks
        Per part, bool [layers, chunks] as of `Forecast`, or None.
    row
        Where the first part's rows go.
    """

    def __init__(self, fetch: Fetch, masks: Sequence[np.ndarray | None], row: int) -> None:
        self._fetch, self._masks, self._row = fetch, masks, row
        self._layers = fetch.buffers.shape.num_layers if any(m is not None for m in masks) else 0
        self._next = 0
        self.pieces: dict[int, list[tuple[LoadPart, PartPlan]]] = {}
        self.loads: dict[int, list[ChunkLoad]] = {}
        self.reads: dict[int, list[Future[ReadCount]]] = {}

    def advance(self, layer: int) -> None:
        """Start reading for the layers up to ``DEPTH`` after ``layer``."""
        while self._next < min(layer + DEPTH + 1, self._layers):
            self._start(self._next)
            self._next += 1

    def without(self, index: int, layer: int) -> np.ndarray | None:
        """Chunks of a part that come ahead, bool [chunks]; None for none."""
        if layer not in self.pieces:
            return None
        part = self._fetch.parts[index]
        return next((_held(plan, part) for one, plan in self.pieces[layer] if one is part), None)

    def end(self, layer: int) -> int:
        """The row after those of a layer that come ahead."""
        return self._row + sum(plan.arriving for _, plan in self.pieces.get(layer, ()))

    def wanted(self, layer: int, plans: Sequence[PartPlan]) -> np.ndarray:
        """Which tokens of a layer are wanted: those that came ahead, then those planned, bool."""
        flags = []
        for part, plan in self.pieces[layer]:
            own = plans[self._fetch.parts.index(part)].wanted[plan.chunks]
            flags.append(np.repeat(own, part.chunk_tokens)[: plan.arriving])
        flags += [np.ones(len(plan.tokens), dtype=bool) for plan in plans]
        return np.concatenate(flags)

    def _start(self, layer: int) -> None:
        fetch, row = self._fetch, self._row
        pieces: list[tuple[LoadPart, PartPlan]] = []
        loads: list[ChunkLoad] = []
        for part, mask in zip(fetch.parts, self._masks, strict=True):
            if mask is None:
                continue
            held: np.ndarray = mask[layer]
            if fetch.tier is not None:
                # What memory has costs no time.
                absent = fetch.tier.slots(part.files, layer).min(axis=0) < 0
                held = held & absent[: len(held)]
            plan = plan_chunks(part, layer, held)
            if plan.arriving:
                pieces.append((part, plan))
                both = (
                    ChunkLoad.plan(part, layer, w, plan.chunks, row, fetch.tier) for w in (0, 1)
                )
                loads += both
                row += plan.arriving
        self.pieces[layer], self.loads[layer] = pieces, loads
        self.reads[layer] = fetch.submit(loads, 1)


def _held(plan: PartPlan, part: LoadPart) -> np.ndarray:
    held = np.zeros(-(-part.stored // part.chunk_tokens), dtype=bool)
    held[plan.chunks] = True
    return held
