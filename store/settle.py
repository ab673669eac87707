"""After the answer: tell the tiers what a run used and offer them what came from disk."""

from __future__ import annotations

import numpy as np

from store.chunk_load import LoadPart
from store.fetch import Fetch
from store.node_access import NodeAccess
from store.tier.tiered import Access, TieredCache


def introduce(tier: TieredCache, part: LoadPart, known: NodeAccess | None) -> None:
    """Tell the tiers what earlier processes' queries found in a node, if it is new to them.

    Recorded by token; a chunk was used whenever its most used token was.
    """
    if known is None or tier.known(part.files):
        return
    layout = part.files.layout
    size, chunks = layout.chunk_tokens, layout.num_chunks
    table = np.zeros((2, layout.shape.num_layers, chunks * size), dtype=np.float32)
    for layer in range(layout.shape.num_layers):
        stored = part.rows(layer)
        at = slice(0, layout.tokens) if stored is None else stored
        table[0, layer, at], table[1, layer, at] = known.loaded[layer], known.selected[layer]
    loaded, selected = table.reshape(2, layout.shape.num_layers, chunks, size)
    accesses = loaded.max(axis=-1)
    ratio = selected.sum(axis=-1) / (size * np.maximum(accesses, 1.0))
    tier.introduce(part.files, np.repeat(accesses[:, None], 2, axis=1), ratio)


def settle(tier: TieredCache, fetch: Fetch) -> None:
    """Count a run's accesses and let the tiers admit of its chunks; its buffers are still whole.

    A run that failed on the way offers the layers that it got.
    """
    offers = [load.fetched(fetch.buffers) for load in fetch.loads]
    tier.settle([_access(fetch, part) for part in fetch.parts], offers)


def _access(fetch: Fetch, part: LoadPart) -> Access:
    """Chunks of a part that the run used, and how much of each was important."""
    layers, chunks = fetch.buffers.shape.num_layers, part.files.layout.num_chunks
    used = np.zeros((layers, 2, chunks), dtype=bool)
    ratio = np.zeros((layers, chunks), dtype=np.float32)
    if not fetch.selective:
        # What arrived: a run that ended early says nothing of the layers that it never asked for.
        for load in fetch.loads:
            if load.part is part:
                used[load.layer, load.which, load.chunks] = True
        ratio[used[:, 0]] = 1.0
        return Access(part.files, used, ratio)
    for layer, report in enumerate(fetch.reports):
        wanted = _chunks(np.unique(fetch.selected[layer]), part, layer)
        used[layer, :, wanted] = True
        if report.evidence == "full":
            used[layer, 0, part.whole(layer).chunks] = True
        counts = np.bincount(wanted, minlength=chunks)
        ratio[layer] = counts / part.chunk_tokens
    return Access(part.files, used, ratio)


def _chunks(positions: np.ndarray, part: LoadPart, layer: int) -> np.ndarray:
    """Chunk of each position that lies in the part."""
    own = positions - part.start
    own = own[(own >= 0) & (own < part.used)]
    inside: np.ndarray = part.rows_of(layer, own) // part.chunk_tokens
    return inside
