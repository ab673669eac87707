"""Runs of chunks that follow each other: what one read request can cover."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class ChunkRuns(NamedTuple):
    """Merged runs of chunks: run i covers chunks ``start[i]`` up to, not including, ``stop[i]``."""

    start: np.ndarray
    stop: np.ndarray


def merge_chunks(chunks: np.ndarray, max_gap: int = 1) -> ChunkRuns:
    """Merge sorted, distinct chunk numbers into runs, bridging gaps of up to ``max_gap`` chunks.

    ::

        chunks   2 3 . 5 . . 8      max_gap 1
        runs    [2 . . 5]   [8]     -> start [2, 8], stop [6, 9]
    """
    if len(chunks) == 0:
        empty = np.empty(0, dtype=np.int64)
        return ChunkRuns(empty, empty)
    breaks = np.flatnonzero(np.diff(chunks) > max_gap + 1)
    start = chunks[np.concatenate(([0], breaks + 1))]
    stop = chunks[np.concatenate((breaks, [len(chunks) - 1]))] + 1
    return ChunkRuns(start.astype(np.int64), stop.astype(np.int64))


def one_run(first: int, stop: int) -> ChunkRuns:
    """The chunks ``first`` up to ``stop`` as a single run."""
    return ChunkRuns(np.array([first], dtype=np.int64), np.array([stop], dtype=np.int64))


def run_chunks(runs: ChunkRuns) -> np.ndarray:
    """Every chunk number of the runs in order, int64."""
    sizes = runs.stop - runs.start
    before = np.cumsum(sizes) - sizes
    return np.repeat(runs.start - before, sizes) + np.arange(int(sizes.sum()))
