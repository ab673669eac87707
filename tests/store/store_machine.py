"""A store under random use, against plain dictionaries: what it returns must be what was put in.

The oracle knows nothing of nodes, chunks, tiers or orders: a token's KV is a function of the tokens
up to it, and attention is computed from that in float64.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
import zlib
from pathlib import Path

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from store.disk.io import IOOptions
from store.engine import PrefixStore
from store.itf.options import SparseOptions
from store.probes import ProbeSettings
from store.query_run import QueryRun
from store.run_maker import MemoryOptions
from tests.tiny import make_tiny

CHUNK_TOKENS = 16
POLICIES = st.sampled_from(["score", "lru", "lfu"])
#: A few beginnings that many prefixes share, and ends of their own.
PREFIXES = st.builds(
    lambda parts: np.concatenate([np.full(n, token, dtype=np.uint32) for token, n in parts]),
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40)), min_size=1, max_size=3),
)


@functools.cache
def tiny():
    return make_tiny("gqa")


@functools.lru_cache(maxsize=100_000)
def row_of(path: bytes, layer: int, which: int) -> np.ndarray:
    """Key (0) or value (1) of the last token of a path, float32 [kv_heads, head_dim]."""
    shape = tiny().shape
    drawn = np.random.default_rng([zlib.crc32(path), layer, which])
    return drawn.standard_normal((shape.num_kv_heads, shape.head_dim)).astype(np.float32)


def rows_of(ids: np.ndarray, positions: np.ndarray, layer: int, which: int) -> np.ndarray:
    """Rows of given positions, [k, kv_heads, head_dim]."""
    return np.stack([row_of(ids[: p + 1].tobytes(), layer, which) for p in positions])


def attention(q: np.ndarray, keys: np.ndarray, values: np.ndarray, visible: int) -> np.ndarray:
    """One new token's attention in float64, [heads, head_dim]: ``visible`` rows of each head."""
    groups = keys.shape[1]
    out = []
    for head, query in enumerate(q.astype(np.float64)):
        own = head // (len(q) // groups)
        scores = keys[:visible, own].astype(np.float64) @ query
        weights = np.exp(scores - scores.max())
        out.append(weights @ values[:visible, own].astype(np.float64) / weights.sum())
    return np.array(out)


class StoreMachine(RuleBasedStateMachine):
    """Insert, match, fetch, pin, reorder, remove, reopen; budgets hold at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="store-machine-"))
        self.listed: dict[str, np.ndarray] = {}
        self.ever: list[np.ndarray] = []
        self.count = 0
        self.open_runs: list[tuple[QueryRun, np.ndarray]] = []
        self.budgets = (0, 0)
        PrefixStore.create(
            self.folder / "kv",
            identity=tiny().identity,
            model_spec=tiny().spec,
            chunk_tokens=CHUNK_TOKENS,
            probes=ProbeSettings(sketch_bits=2),
        ).close()
        self.store = self._opened(6, 20, "score")

    def teardown(self) -> None:
        for run, _ in self.open_runs:
            run.close()
        assert self.store.verify().bad == []
        self.store.close()
        shutil.rmtree(self.folder)

    def _opened(self, device: int, host: int, policy: str) -> PrefixStore:
        size = CHUNK_TOKENS * tiny().shape.row_bytes
        self.budgets = (device * size, host * size)
        return PrefixStore.open(
            self.folder / "kv",
            identity=tiny().identity,
            io=IOOptions(poison=True),
            memory=MemoryOptions(
                device_bytes=device * size, host_bytes=host * size, policy=policy, sketch_bytes=0
            ),
        )

    def _shared(self, ids: np.ndarray, others: list[np.ndarray]) -> int:
        """Longest beginning of ``ids`` that any of the others begins with."""
        best = 0
        for other in others:
            size = min(len(ids), len(other))
            differ = np.flatnonzero(ids[:size] != other[:size])
            best = max(best, int(differ[0]) if len(differ) else size)
        return best

    @rule(ids=PREFIXES)
    def insert(self, ids: np.ndarray) -> None:
        self.count += 1
        name, positions = f"p{self.count}", np.arange(len(ids))
        result = self.store.insert(
            ids,
            lambda layer: (rows_of(ids, positions, layer, 0), rows_of(ids, positions, layer, 1)),
            0,
            name=name,
        )
        assert result.prefix is not None
        self.listed[result.prefix.name] = ids
        self.ever.append(ids)
        assert self.store.match(ids).matched_len == len(ids)

    @rule(ids=PREFIXES)
    def match(self, ids: np.ndarray) -> None:
        found = self.store.match(ids).matched_len
        # A node that a shorter prefix still needs is kept whole.
        assert self._shared(ids, list(self.listed.values())) <= found
        assert found <= self._shared(ids, self.ever)

    def _begin(self, ids: np.ndarray, sparse: SparseOptions) -> QueryRun:
        run, match = self.store.begin(
            np.concatenate([ids, [7]]).astype(np.uint32), max_new_tokens=1, sparse=sparse
        )
        assert match.matched_len == self.store.match(ids).matched_len
        return run

    def _check(self, run: QueryRun, ids: np.ndarray) -> None:
        """Each layer's attention is that over the rows that the run says it keeps."""
        shape = run.shape
        drawn = np.random.default_rng(len(ids))
        for layer in range(shape.num_layers):
            q = drawn.standard_normal((4, 1, shape.head_dim)).astype(np.float32)
            new = drawn.standard_normal((2, shape.num_kv_heads, 1, shape.head_dim))
            k_new, v_new = (torch.from_numpy(a.astype(np.float32)) for a in new)
            out = run.attend(layer, torch.from_numpy(q), k_new, v_new, 1.0)
            kept = run.kept(layer)
            keys, values = (
                np.concatenate([self._kept_rows(ids, kept, layer, which), given.transpose(0, 1)])
                for which, given in enumerate((k_new, v_new))
            )
            expected = attention(q[:, 0], keys, values, len(keys))
            np.testing.assert_allclose(out[:, 0].numpy(), expected, atol=1e-4)

    def _kept_rows(self, ids: np.ndarray, kept: np.ndarray, layer: int, which: int) -> np.ndarray:
        shape = tiny().shape
        if kept.shape[1] == 0:
            return np.empty((0, shape.num_kv_heads, shape.head_dim), np.float32)
        heads = [rows_of(ids, kept[h], layer, which)[:, h] for h in range(shape.num_kv_heads)]
        return np.stack(heads, axis=1)

    @rule(
        ids=PREFIXES,
        retention=st.sampled_from([1.0, 0.5, 0.1]),
        evidence=st.sampled_from(["full", "sketch", "random"]),
        attend=st.sampled_from(["loaded", "selected"]),
        sets=st.sampled_from(["one", "per-head"]),
    )
    def fetch(self, ids, retention, evidence, attend, sets) -> None:
        sparse = SparseOptions(retention=retention, evidence=evidence, attend=attend, sets=sets)
        run = self._begin(ids, sparse)
        with run:
            self._check(run, ids)
            counted = run.counters.chunks
            if not run.reports and run.matched_len:
                assert sum(counted.values()) > 0
            assert (
                sum(counted.values()) == sum(r.chunks_read for r in run.reports) or not run.reports
            )
            run.fetch.count_important()
            assert run.counters.important_rows == sum(
                2 * len(np.unique(sets)) for sets in run.selected
            )

    @rule(ids=PREFIXES, retention=st.sampled_from([1.0, 0.2]))
    @precondition(lambda self: len(self.open_runs) < 2)
    def begin_and_hold(self, ids: np.ndarray, retention: float) -> None:
        """Begin a query that ends later: what it uses stays, whatever happens meanwhile."""
        run = self._begin(ids, SparseOptions(retention=retention, evidence="sketch"))
        self.open_runs.append((run, ids))

    @rule()
    @precondition(lambda self: self.open_runs)
    def finish(self) -> None:
        run, ids = self.open_runs.pop(0)
        with run:
            self._check(run, ids)

    @rule(seed=st.integers(0, 3), pick=st.integers(0, 99))
    @precondition(lambda self: self.store.nodes())
    def reorder(self, seed: int, pick: int) -> None:
        nodes = self.store.nodes()
        node = nodes[pick % len(nodes)]
        drawn = np.random.default_rng([seed, node.length])
        layers = range(tiny().shape.num_layers)
        rows = np.array([drawn.permutation(node.length) for _ in layers], dtype=np.int32)
        self.store.reorder(node.node_id, rows if seed else None)

    @rule(pick=st.integers(0, 99))
    @precondition(lambda self: self.listed)
    def remove(self, pick: int) -> None:
        name = sorted(self.listed)[pick % len(self.listed)]
        self.store.remove(self.store.prefix(name))
        del self.listed[name]

    @rule(device=st.sampled_from([0, 3, 50]), host=st.sampled_from([0, 5, 80]), policy=POLICIES)
    @precondition(lambda self: not self.open_runs)
    def reopen(self, device: int, host: int, policy: str) -> None:
        self.store.close()
        self.store = self._opened(device, host, policy)

    @rule(prefixes=st.integers(1, 3))
    def warm(self, prefixes: int) -> None:
        self.store.warm(prefixes)

    @invariant()
    def budgets_hold_and_every_slot_is_accounted_for(self) -> None:
        used = self.store.resident_bytes()
        assert used[0] <= self.budgets[0]
        assert used[1] <= self.budgets[1]
        tier = self.store._runs.tier
        if tier is not None:
            tier.check_integrity()

    @invariant()
    def prefixes_are_those_listed(self) -> None:
        assert {row.name for row in self.store.prefixes()} == set(self.listed)
