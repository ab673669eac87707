"""A cache and its reference, given the same requests and compared after each."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby

import numpy as np
import torch

from store.tier.policy import make_policy
from store.tier.tiered import Access, Budgets, Fetched, Moves, TieredCache
from store.types import KVShape
from tests.store.tier.model import Reference, Use

SHAPE = KVShape(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=3, dtype="float32")
CHUNK_TOKENS = 4
CHUNK = CHUNK_TOKENS * SHAPE.row_bytes


@cache
def noise(name: str, tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn((tokens, SHAPE.num_kv_heads, SHAPE.head_dim), generator=generator)


@dataclass(frozen=True)
class Node:
    """A node generation with bytes that are its own; its last chunk may be short."""

    name: str
    tokens: int

    @property
    def num_chunks(self) -> int:
        return -(-self.tokens // CHUNK_TOKENS)

    def length(self, chunk: int) -> int:
        return min(CHUNK_TOKENS, self.tokens - chunk * CHUNK_TOKENS)

    def kv(self, layer: int, which: int) -> torch.Tensor:
        """[tokens, kv_heads, head_dim]"""
        return noise(f"{self.name}/{layer}/{which}", self.tokens).clone()

    def dims(self) -> tuple[int, int, int]:
        return (SHAPE.num_layers, 2, self.num_chunks)

    def uses(self, ratio: float = 1.0) -> list[Use]:
        """All its chunks."""
        return [Use(self.name, *place, ratio) for place in np.ndindex(self.dims())]


@dataclass(frozen=True)
class Setup:
    """A configuration of the tiers, sizes in chunks."""

    device: int
    host: int
    memory: bool = True
    joined: bool | None = None

    def cache(self, policy: str = "score", half_life: float | None = None) -> TieredCache:
        return TieredCache(
            SHAPE,
            CHUNK_TOKENS,
            Budgets(self.device * CHUNK, self.host * CHUNK + CHUNK - 1),
            make_policy(policy, half_life),
            torch.device("cpu"),
            memory=self.memory,
            joined=self.joined,
        )


def access(node: Node, uses: list[Use]) -> Access:
    used, ratio = np.zeros(node.dims(), bool), np.zeros((2, node.num_chunks), np.float32)
    for use in uses:
        used[use.layer, use.which, use.chunk] = True
        ratio[use.layer, use.chunk] = use.ratio
    return Access(node, used, ratio)


def fetched(node: Node, layer: int, which: int, chunks: list[int], memory: bool = True) -> Fetched:
    """Chunks as a load leaves them: one after the other, the rows of a short one the last."""
    lengths = [node.length(chunk) for chunk in chunks]
    first_rows = 2 + np.cumsum([0, *lengths[:-1]])
    rows = None
    if memory:
        kv = node.kv(layer, which)
        own = [kv[c * CHUNK_TOKENS :][:size] for c, size in zip(chunks, lengths, strict=True)]
        rows = torch.cat([torch.full_like(kv[:2].expand(2, -1, -1), torch.nan), *own])
    return Fetched(node, layer, which, np.array(chunks, dtype=np.int64), rows, first_rows)


def by_array(uses: list[Use]) -> list[Use]:
    """In another order than that of the store: layer after layer."""
    return sorted(uses, key=lambda use: (use.layer, use.which, use.name))


@dataclass
class Twin:
    """Requests by name of node and chunk; every method compares the two afterwards."""

    setup: Setup
    policy: str = "score"
    half_life: float | None = None
    nodes: dict[str, Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cache = self.setup.cache(self.policy, self.half_life)
        sizes = (self.setup.device, self.setup.host)
        self.reference = Reference(*sizes, self.policy, self.half_life)

    def add(self, name: str, tokens: int = 14) -> Node:
        self.nodes[name] = Node(name, tokens)
        return self.nodes[name]

    def request(self, uses: list[Use], beside: list[Use] | None = None) -> Moves:
        """Use chunks, reading those that are in no tier, and more that are read ``beside``."""
        names = list(dict.fromkeys(use.name for use in uses))
        accesses = [access(self.nodes[n], [u for u in uses if u.name == n]) for n in names]
        read = by_array(self.absent(uses + (beside or [])))
        moves = self.cache.settle(accesses, self.loads(read))
        self.compare(moves, self.reference.settle(uses, read))
        return moves

    def warm(self, offers: list[Use]) -> Moves:
        offers = by_array(offers)
        moves = self.cache.warm(self.loads(offers))
        self.compare(moves, self.reference.replace(set(), offers))
        return moves

    def introduce(self, name: str, accesses: np.ndarray, ratio: np.ndarray) -> None:
        node = self.nodes[name]
        self.cache.introduce(node, accesses.astype(np.float32), ratio.astype(np.float32))
        places = np.ndindex(accesses.shape)
        facts = [(*at, float(accesses[at]), float(ratio[at[0], at[2]])) for at in places]
        self.reference.introduce(name, facts)

    def pin(self, *names: str) -> None:
        self.cache.pin(self.nodes[name] for name in names)
        self.reference.pins.update(names)

    def unpin(self, *names: str) -> None:
        self.cache.unpin(self.nodes[name] for name in names)
        self.reference.pins.subtract(names)

    def keep(self, *names: str) -> bool:
        """Forget all other nodes, as far as nothing pins them."""
        done = self.cache.forget(set(names))
        assert done == self.reference.forget(set(names))
        self.compare()
        return done

    def absent(self, uses: list[Use]) -> list[Use]:
        return [use for use in uses if self.slot(use) < 0]

    def slot(self, use: Use) -> int:
        slots = self.cache.slots(self.nodes[use.name], use.layer)
        return int(slots[use.which, use.chunk])

    def tier(self, use: Use) -> str:
        slot = self.slot(use)
        return "disk" if slot < 0 else "device" if slot < self.cache.device_slots else "host"

    def loads(self, read: list[Use]) -> list[Fetched]:
        """One load per array of a node's layer."""
        return [
            fetched(self.nodes[name], layer, which, [use.chunk for use in own], self.setup.memory)
            for (name, layer, which), own in groupby(read, key=lambda use: use[:3])
        ]

    def compare(self, moves: Moves | None = None, expected: dict[str, int] | None = None) -> None:
        assert moves is None or moves._asdict() == expected
        self.cache.check_integrity()
        found: dict[str, set[tuple[int, ...]]] = {"device": set(), "host": set(), "disk": set()}
        for name, number in self.reference.numbers.items():
            for use in self.nodes[name].uses():
                found[self.tier(use)].add((number, *use[1:4]))
        assert found["device"] == self.reference.device
        assert found["host"] == self.reference.host
        sizes = [len(found[tier]) * CHUNK for tier in ("device", "host")]
        assert self.cache.used_bytes() == tuple(sizes)
        assert sizes[0] <= self.setup.device * CHUNK
        assert sizes[1] <= self.setup.host * CHUNK
        self.compare_bytes()

    def compare_bytes(self) -> None:
        """The bytes of every resident chunk are those of its node."""
        if self.cache.memory is None:
            return
        for node in self.nodes.values():
            for layer, which in np.ndindex(2, 2):
                slots = self.cache.slots(node, layer)[which].astype(np.int64)
                rows = slots[:, None] * CHUNK_TOKENS + np.arange(CHUNK_TOKENS)
                rows[slots < 0] = -1
                rows = rows.reshape(-1)[: node.tokens]
                want = node.kv(layer, which)
                want[torch.from_numpy(rows < 0)] = 1e9
                given = torch.full_like(want, 1e9)
                self.cache.memory.to_host(rows, given)
                self.cache.memory.to_device(rows, given)
                assert torch.equal(given, want)
