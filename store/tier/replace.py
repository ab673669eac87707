"""Which chunks get a tier's slots, on plain arrays: the paper's replacement for a whole request.

Knows neither nodes nor bytes. Its cost is that of the request, beside a few passes over the
residents' priorities; residents are never sorted.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Exchange(NamedTuple):
    """Newcomers that get a slot, best first, and slots whose residents leave, lowest first."""

    enter: np.ndarray
    leave: np.ndarray


def exchange(
    newcomers: np.ndarray,
    priority: np.ndarray,
    order: np.ndarray,
    free: int,
    locked: np.ndarray | None = None,
) -> Exchange:
    """Give newcomers the free slots, then those of residents with a lower priority.

    The outcome is that of comparing one newcomer after the other with the lowest resident (paper
    section on the score-based cache): residents keep their slots on ties, and of newcomers alike
    the first in the array gets one::

        newcomers, best first  9 7 4 | 3 1        residents, lowest first   2 3 5 5
        free slots take        9                  swaps while better        7>2 4>3 3<5

    Parameters
    ----------
    newcomers
        Their priorities, float64 [k].
    priority
        Priority of the resident in each slot, float64 [slots]; infinite where there is none.
    order
        int64 [slots], different for all residents: of those alike the lowest leaves first.
    free
        Slots that newcomers may take without a comparison.
    locked
        bool [slots]: residents that stay whatever comes.

    Returns
    -------
    Exchange
        int64 indices into ``newcomers``, and slots; ``free`` more enter than leave, at most.
    """
    best = np.argsort(-newcomers, kind="stable")
    rest = newcomers[best[free:]]
    if len(rest) == 0:
        return Exchange(best, np.empty(0, dtype=np.int64))
    lowest = _lowest(priority, order, float(rest[0]), len(rest), locked)
    swaps = int((rest[: len(lowest)] > priority[lowest]).sum())
    return Exchange(best[: free + swaps], lowest[:swaps])


def _lowest(
    priority: np.ndarray, order: np.ndarray, below: float, count: int, locked: np.ndarray | None
) -> np.ndarray:
    """Slots of the ``count`` lowest residents, lowest first, of those that are ``below``."""
    values = priority if locked is None else np.where(locked, np.inf, priority)
    is_low = values < below
    if int(np.count_nonzero(is_low)) > count:
        low = _cut(values, order, count)
    else:
        low = np.flatnonzero(is_low)
    ranked: np.ndarray = low[np.lexsort((order[low], values[low]))]
    return ranked


def _cut(values: np.ndarray, order: np.ndarray, count: int) -> np.ndarray:
    """Slots of the ``count`` lowest values, in no order; ties at the edge go by ``order``."""
    edge = np.partition(values, count - 1)[count - 1]
    sure, ties = np.flatnonzero(values < edge), np.flatnonzero(values == edge)
    more = count - len(sure)
    if more < len(ties):
        place = order[ties]
        ties = ties[place <= np.partition(place, more - 1)[more - 1]]
    return np.concatenate([sure, ties])


class FreeSlots:
    """Free slots of a tier, a stack: the last one put back is the next.

    Slots are looked up before they are taken, so that a copy into them may fail.
    """

    def __init__(self, first: int, count: int) -> None:
        self._slots = np.arange(first + count - 1, first - 1, -1, dtype=np.int64)
        self.count = count

    def next(self, count: int) -> np.ndarray:
        """The next ``count`` slots, int64; there must be as many."""
        assert count <= self.count
        return self._slots[self.count - count : self.count][::-1].copy()

    def take(self, count: int) -> None:
        """Take the next ``count`` slots."""
        assert count <= self.count
        self.count -= count

    def put_back(self, slots: np.ndarray) -> None:
        """Free ``slots``; their first becomes the next."""
        self._slots[self.count : self.count + len(slots)] = slots[::-1]
        self.count += len(slots)

    def held(self) -> np.ndarray:
        """All free slots."""
        return self._slots[: self.count]
