"""Which chunks of a request go to which tier, on plain arrays; changes nothing.

First the device's slots, then the host's (paper section on the score-based cache)::

    compete for the device    host residents that the request used, what it read from disk
    compete for the host      what has to leave the device, what of the read did not get in
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from store.tier.replace import Exchange, exchange


class Comers(NamedTuple):
    """Chunks that want a slot; each array [k].

    Parameters
    ----------
    places
        int64, in the chunk table; no two are the same.
    priority
        float64.
    origin
        int64: the slot where the chunk is now; below 0 the complement of its number among what
        was fetched from disk.
    """

    places: np.ndarray
    priority: np.ndarray
    origin: np.ndarray

    @classmethod
    def none(cls) -> Comers:
        """Nothing."""
        places = np.empty(0, dtype=np.int64)
        return cls(places, np.empty(0), places)

    @classmethod
    def merged(cls, one: Comers, other: Comers) -> Comers:
        """All of two, in the order of their places."""
        both = cls(*(np.concatenate(pair) for pair in zip(one, other, strict=True)))
        return both.at(np.argsort(both.places))

    def at(self, index: np.ndarray) -> Comers:
        """Those at the given indices, or where a mask is true."""
        return Comers(*(array[index] for array in self))

    @property
    def moved(self) -> int:
        """How many are in a slot now."""
        return int((self.origin >= 0).sum())


class Residents(NamedTuple):
    """What lies in each slot, those of the device first; each array [slots].

    ``priority`` float64, infinite where a slot is free; ``place`` int64; ``locked`` bool, true for
    chunks that must stay where they are. The device has the first ``device_slots``, of which
    ``free[0]`` are free; the host the others, ``free[1]`` of them free.
    """

    priority: np.ndarray
    place: np.ndarray
    locked: np.ndarray
    device_slots: int
    free: tuple[int, int]

    def compete(self, comers: Comers, tier: int, more: int = 0) -> Exchange:
        """Exchange in the device (0) or the host (1), where ``more`` slots become free first."""
        begin = (0, self.device_slots)[tier]
        own = slice(begin, (self.device_slots, None)[tier])
        residents = self.priority[own], self.place[own]
        enter, leave = exchange(
            comers.priority, *residents, self.free[tier] + more, self.locked[own]
        )
        return Exchange(enter, leave + begin)


class Plan(NamedTuple):
    """What gets into each tier, and the slots of each whose chunks leave memory (int64).

    Of what gets in, those that lie in a slot of the other tier come first.
    """

    device: Comers
    host: Comers
    device_out: np.ndarray
    host_out: np.ndarray


def plan_request(comers: Comers, residents: Residents) -> Plan:
    """Plan for one request.

    Parameters
    ----------
    comers
        Host residents that the request used and chunks that it read, in the order of places.
    """
    stays = comers.origin >= 0
    stays[stays] = residents.locked[comers.origin[stays]]
    comers = comers.at(~stays)
    up = residents.compete(comers, 0)
    to_device = _moved_first(comers.at(up.enter))
    refused = np.ones(len(comers.places), dtype=bool)
    refused[up.enter] = False
    displaced = Comers(residents.place[up.leave], residents.priority[up.leave], up.leave)
    downs = Comers.merged(displaced, comers.at(refused & (comers.origin < 0)))
    # What goes up leaves its slot free. It is among the host's residents still, but can't be
    # replaced there: what comes down lost to what goes up, so none of it is higher.
    down = residents.compete(downs, 1, to_device.moved)
    lost = downs.origin >= 0
    lost[down.enter] = False
    to_host = _moved_first(downs.at(down.enter))
    return Plan(to_device, to_host, downs.origin[lost], down.leave)


def _moved_first(comers: Comers) -> Comers:
    return comers.at(np.argsort(comers.origin < 0, kind="stable"))
