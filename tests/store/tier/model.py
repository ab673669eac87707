"""What the tiers must do, in plain Python: the paper's rule, chunk by chunk, over dicts.

Knows nothing of slots, arrays or thresholds; a chunk is a tuple (node number, layer, which,
chunk), so that tuples sort as places in the store do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

Chunk = tuple[int, int, int, int]


class Use(NamedTuple):
    """A chunk that a request used, and the share of it that was important."""

    name: str
    layer: int
    which: int
    chunk: int
    ratio: float = 1.0


class Facts:
    """One chunk's accesses, each with the request it was in, and moving ratio."""

    def __init__(self) -> None:
        self.accesses: list[tuple[int, float]] = []
        self.ratio = np.float32(0)

    def use(self, now: int, ratio: float) -> None:
        rate = np.float64(0.2 if self.accesses else 1.0)
        # The moving average is kept in 32 bits.
        self.ratio += np.float32(rate * (np.float32(ratio) - self.ratio))
        self.accesses.append((now, 1.0))


class Reference:
    """Two tiers, a policy by name and the facts of every chunk ever seen."""

    def __init__(
        self, device_slots: int, host_slots: int, policy: str, half_life: float | None
    ) -> None:
        self.capacity = (device_slots, host_slots)
        self.policy, self.half_life = policy, half_life
        self.device: set[Chunk] = set()
        self.host: set[Chunk] = set()
        self.facts: dict[Chunk, Facts] = {}
        self.numbers: dict[str, int] = {}
        self.names: list[str] = []
        self.pins: Counter[str] = Counter()
        self.now = 0

    def number(self, name: str) -> int:
        if name not in self.numbers:
            self.numbers[name] = len(self.names)
            self.names.append(name)
        return self.numbers[name]

    def chunk(self, use: Use) -> Chunk:
        return (self.number(use.name), use.layer, use.which, use.chunk)

    def pinned(self, chunk: Chunk) -> bool:
        return self.pins[self.names[chunk[0]]] > 0

    def fact(self, chunk: Chunk) -> Facts:
        return self.facts.setdefault(chunk, Facts())

    def introduce(self, name: str, chunks: Iterable[tuple[int, int, int, float, float]]) -> None:
        """Facts as (layer, which, chunk, accesses, ratio)."""
        if name in self.numbers:
            return
        for layer, which, chunk, accesses, ratio in chunks:
            facts = self.fact((self.number(name), layer, which, chunk))
            facts.accesses = [(self.now, accesses)] if accesses else []
            facts.ratio = np.float32(ratio)

    def priority(self, chunk: Chunk) -> float:
        facts = self.fact(chunk)
        if self.policy == "lru":
            return max((when for when, _ in facts.accesses), default=0)
        if self.policy == "lfu" or self.half_life is None:
            frequency = sum(weight for _, weight in facts.accesses)
        else:
            frequency = sum(
                weight * 2 ** ((when - self.now) / self.half_life)
                for when, weight in facts.accesses
            )
        return frequency if self.policy == "lfu" else float(frequency) * float(facts.ratio)

    def settle(self, uses: list[Use], read: list[Use]) -> Counter[str]:
        """One request; ``read`` are the chunks that came from disk. Counts what moved."""
        for use in uses + read:
            self.number(use.name)
        self.now += 1
        for use in uses:
            self.fact(self.chunk(use)).use(self.now, use.ratio)
        used = {self.chunk(use) for use in uses}
        return self.replace({c for c in used & self.host if not self.pinned(c)}, read)

    def replace(self, hits: set[Chunk], read: list[Use]) -> Counter[str]:
        before = set(self.device), set(self.host)
        offers = {self.chunk(use) for use in read} - self.device - self.host
        lost = self._one_by_one(self.device, self.capacity[0], sorted(hits | offers))
        self.host -= self.device
        self._one_by_one(self.host, self.capacity[1], sorted(set(lost) - hits))
        return self._moves(*before)

    def _one_by_one(self, tier: set[Chunk], capacity: int, comers: list[Chunk]) -> list[Chunk]:
        """Compare each comer with the lowest; gives those without a slot in the end."""
        new: set[Chunk] = set()
        lost = []

        def rank(chunk: Chunk) -> tuple[float, bool, tuple[int, ...]]:
            # On ties residents outlast newcomers; of residents the first in the store leaves
            # first, of newcomers the last.
            place = tuple(-part for part in chunk) if chunk in new else chunk
            return self.priority(chunk), chunk not in new, place

        for comer in comers:
            loser = None
            if len(tier) >= capacity:
                rivals = [c for c in tier if c in new or not self.pinned(c)]
                loser = min(rivals, key=rank, default=comer)
                if self.priority(comer) <= self.priority(loser):
                    loser = comer
                lost.append(loser)
            if loser != comer:
                tier.discard(loser)
                tier.add(comer)
                new.add(comer)
        return lost

    def _moves(self, device: set[Chunk], host: set[Chunk]) -> Counter[str]:
        return Counter(
            to_device=len(self.device - device - host),
            to_host=len(self.host - device - host),
            promoted=len(self.device & host),
            demoted=len(self.host & device),
            evicted=len((device | host) - self.device - self.host),
        )

    def forget(self, keep: set[str]) -> bool:
        pinned = {name for name, count in self.pins.items() if count}
        for name in self.numbers.keys() - keep - pinned:
            number = self.numbers.pop(name)
            for tier in (self.device, self.host):
                tier -= {chunk for chunk in tier if chunk[0] == number}
        return pinned <= keep
