"""Runs of chunks that follow each other: what one read request can cover."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class ChunkRuns(NamedTuple):
    """Merged runs of chunks: run i covers chunks ``start[i]`` up to, not including, ``stop[i]``."""

    start: np.ndarray
    stop: np.ndarray


def merge_chunks(chunks: np.ndarray) -> ChunkRuns:
    """Merge sorted, distinct chunk numbers into runs.

    ::

        chunks   2 3 . 5 . . 8
        runs    [2 3] [5]   [8]     -> start [2, 5, 8], stop [4, 6, 9]
    """
    if len(chunks) == 0:
        empty = np.empty(0, dtype=np.int64)
        return ChunkRuns(empty, empty)
    breaks = np.flatnonzero(np.diff(chunks) > 1)
    start = chunks[np.concatenate(([0], breaks + 1))]
    stop = chunks[np.concatenate((breaks, [len(chunks) - 1]))] + 1
    return ChunkRuns(start.astype(np.int64), stop.astype(np.int64))


#: A request scatters over at most this many pieces, runs and what lies between (Linux has 1 024).
_MOST_PIECES = 512


def group_runs(runs: ChunkRuns, gap: int, span: int) -> np.ndarray:
    """Runs that one request reads: group i is runs ``bounds[i]`` up to ``bounds[i + 1]``, int64.

    Between the runs of a group lie up to ``gap`` chunks each. Requests begin anew every ``span``
    chunks of the array, so that none grows without end.

    ::

        runs    [2 3] [5]   [8]     gap 1
        groups  [2 3 . 5]   [8]     -> bounds [0, 2, 3]
    """
    begin, span = runs.start, max(1, min(span, _MOST_PIECES))
    apart = (begin[1:] - runs.stop[:-1] > gap) | (begin[1:] // span != begin[:-1] // span)
    return np.concatenate(([0], np.flatnonzero(apart) + 1, [len(begin)]))


def one_run(first: int, stop: int) -> ChunkRuns:
    """The chunks ``first`` up to ``stop`` as a single run."""
    return ChunkRuns(np.array([first], dtype=np.int64), np.array([stop], dtype=np.int64))


def run_chunks(runs: ChunkRuns) -> np.ndarray:
    """Every chunk number of the runs in order, int64."""
    sizes = runs.stop - runs.start
    before = np.cumsum(sizes) - sizes
    return np.repeat(runs.start - before, sizes) + np.arange(int(sizes.sum()))
