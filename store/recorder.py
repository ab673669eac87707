"""Hands what a sparse run selected to the access statistics, node by node, after the answer."""

from __future__ import annotations

import numpy as np
import torch

from store.access import AccessStats, NodeAccess
from store.disk.reader import NodeFiles
from store.sparse import SparseFetch

#: Runs between two writes of the statistics; a process that is killed loses at most these.
FLUSH_RUNS = 16


class RunRecorder:
    """Counts sparse runs and writes the statistics now and then."""

    def __init__(self, access: AccessStats) -> None:
        self._access = access
        self._runs = 0

    def known(self, files: NodeFiles) -> NodeAccess | None:
        """Statistics of a node."""
        return self._access.get(files.node_id, files.layout.tokens)

    def add(self, fetch: SparseFetch) -> None:
        """Record a run that went through every layer; one that failed on the way is left out."""
        layers, n = fetch.buffers.shape.num_layers, fetch.matched_len
        if len(fetch.reports) < layers:
            return
        selected, loaded = np.zeros((layers, n), bool), np.zeros((layers, n), bool)
        for layer in range(layers):
            selected[layer, fetch.selected[layer].reshape(-1)] = True
            loaded[layer, fetch.loaded[layer]] = True
        importance = torch.stack(fetch.importance).cpu().numpy() if fetch.observed else None
        for part in fetch.parts:
            own = slice(part.start, part.start + part.used)
            self._access.record(
                part.files.node_id,
                part.files.layout.tokens,
                None if importance is None else importance[:, own],
                selected[:, own],
                loaded[:, own],
            )
        self._runs += 1
        if self._runs % FLUSH_RUNS == 0:
            self._access.flush()
