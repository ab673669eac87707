"""After the answer: tell the host tier what a run used and offer it what came from disk."""

from __future__ import annotations

import numpy as np

from store.chunk_load import LoadPart
from store.fetch import Fetch
from store.tier.host import Access, HostTier


def settle(tier: HostTier, fetch: Fetch) -> None:
    """Count a run's accesses and let the tier admit of its chunks; its buffers are still whole.

    A run that failed on the way offers the layers that it got.
    """
    offers = [load.fetched(fetch.buffers) for load in fetch.loads]
    tier.settle([_access(fetch, part) for part in fetch.parts], offers)


def _access(fetch: Fetch, part: LoadPart) -> Access:
    """Chunks of a part that the run used, and how much of each was important."""
    layers, chunks = fetch.buffers.shape.num_layers, part.files.layout.num_chunks
    used = np.zeros((layers, 2, chunks), dtype=bool)
    ratio = np.zeros((layers, chunks), dtype=np.float32)
    if not fetch.selected:
        used[:, :, : part.chunks] = True
        ratio[:, : part.chunks] = 1.0
        return Access(part.files, used, ratio)
    for layer, report in enumerate(fetch.reports):
        used[layer, :, _chunks(fetch.loaded_positions(layer), part)] = True
        used[layer, 0, : part.chunks] |= report.evidence == "full"
        important = np.unique(fetch.selected[layer])
        counts = np.bincount(_chunks(important, part), minlength=chunks)
        ratio[layer] = counts / part.chunk_tokens
    return Access(part.files, used, ratio)


def _chunks(positions: np.ndarray, part: LoadPart) -> np.ndarray:
    """Chunk of each position that lies in the part."""
    own = positions - part.start
    inside: np.ndarray = own[(own >= 0) & (own < part.used)] // part.chunk_tokens
    return inside
