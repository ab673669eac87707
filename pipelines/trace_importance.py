"""Which tokens matter to the requests of a trace: models of importance without a model's weights.

A block has weights, one per token and layer, that stay the same for all requests. A request draws,
of all tokens it matched and in each layer, the k that it selects: one after the other without
replacement, in proportion to their weights (the k highest of log weight plus Gumbel noise). So
requests agree on what is heavy and differ on the rest, and chunks differ in how much of them is
selected.

- ``zipf``: the weight of a block's u-th of T tokens is (u/T) ** -4.5. A seeded permutation says
  which token is the u-th: tokens are ranked by a normal variable of which a share of 0.75 is
  common to runs of 32 neighbours, as attention comes in clusters. At retention 0.25 and chunks of
  64 tokens a request touches 0.94 of the chunks in token order and 0.61 of those in order of
  importance; measured on a small model: 0.93, and 0.55 to 0.65.
- ``uniform``: all weights are equal; the control, in which no chunk is worth more than another.
- ``measured``: how often past queries of a store selected each token, cut into blocks. A token
  selected in a share f of the queries has the weight -log(1 - f).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from store.engine import PrefixStore
from store.errors import InvalidValueError
from store.index.ids import Ids
from store.itf.importance import keep_count

ZIPF_EXPONENT = 4.5
CLUSTER_TOKENS, CLUSTER_SHARE = 32, 0.75
#: Different blocks of weights; a block of the trace has those that its number falls on.
PATTERNS = 256
MODELS = ("zipf", "uniform", "measured")

# Knuth's multiplicative hash: neighbouring numbers fall on distant patterns.
_MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class ImportanceModel:
    """Weights of tokens, float32 [patterns, layers, block_tokens], above 0."""

    weights: np.ndarray
    retention: float
    seed: int

    def weights_of(self, blocks: Ids) -> np.ndarray:
        """Weights of the tokens of ``blocks`` (uint32 [n]), float32 [layers, n * block_tokens]."""
        mixed = (blocks.astype(np.uint64) + np.uint64(self.seed % 2**32)) * _MIX
        pattern = (mixed >> np.uint64(32)) % np.uint64(len(self.weights))
        found = self.weights[pattern.astype(np.int64)]
        return found.transpose(1, 0, 2).reshape(self.weights.shape[1], -1)

    def select(self, request: int, blocks: Ids) -> np.ndarray:
        """Tokens that a request selects of its matched blocks, bool [layers, n * block_tokens].

        Depends on the seed and the number of the request alone.
        """
        weights = self.weights_of(blocks)
        random = np.random.default_rng((self.seed, request))
        # The first k of exponential clocks whose rates are the weights: the same as Gumbel noise
        # on their logarithms, at less cost.
        times = random.standard_exponential(weights.shape, dtype=np.float32) / weights
        k = keep_count(times.shape[1], self.retention)
        selected = np.zeros(times.shape, dtype=bool)
        np.put_along_axis(selected, np.argpartition(times, k - 1, axis=1)[:, :k], True, axis=1)
        return selected


def zipf_model(layers: int, block_tokens: int, retention: float, seed: int) -> ImportanceModel:
    """Weights by rank in seeded, clustered permutations; see the module."""
    random = np.random.default_rng((seed, PATTERNS))
    runs = -(-block_tokens // CLUSTER_TOKENS)
    common = random.standard_normal((PATTERNS, layers, runs))
    common = np.repeat(common, CLUSTER_TOKENS, axis=2)[:, :, :block_tokens]
    own = random.standard_normal(common.shape)
    level = np.sqrt(CLUSTER_SHARE) * common + np.sqrt(1 - CLUSTER_SHARE) * own
    ranks = np.argsort(np.argsort(-level, axis=2), axis=2) + 1
    weights = (ranks / block_tokens) ** -ZIPF_EXPONENT
    return ImportanceModel(weights.astype(np.float32), retention, seed)


def uniform_model(layers: int, block_tokens: int, retention: float, seed: int) -> ImportanceModel:
    """Every token weighs the same."""
    weights = np.ones((1, layers, block_tokens), dtype=np.float32)
    return ImportanceModel(weights, retention, seed)


def measured_model(
    store: PrefixStore, layers: int, block_tokens: int, retention: float, seed: int
) -> ImportanceModel:
    """Weights from the access statistics of a store, whose layers are sampled evenly.

    Raises
    ------
    InvalidValueError
        The store has fewer layers, or no statistics of ``block_tokens`` tokens.
    """
    if store.shape.num_layers < layers:
        raise InvalidValueError(
            f"{store.path} was built with a model of {store.shape.num_layers} layers, {layers} are "
            "to be sampled; give a lower --layers-sampled"
        )
    parts = list(_selected_weights(store, sampled_layers(store.shape.num_layers, layers)))
    tokens = np.concatenate(parts, axis=1) if parts else np.zeros((layers, 0), np.float32)
    blocks = tokens.shape[1] // block_tokens
    if blocks == 0:
        raise InvalidValueError(
            f"{store.path} has statistics of {tokens.shape[1]} tokens, a block needs "
            f"{block_tokens}; ask it questions with 'impress query --retention 0.25' first"
        )
    cut = tokens[:, : blocks * block_tokens].reshape(layers, blocks, block_tokens)
    return ImportanceModel(np.ascontiguousarray(cut.transpose(1, 0, 2)), retention, seed)


def sampled_layers(num_layers: int, sampled: int) -> list[int]:
    """``sampled`` layers spread evenly over all: the middles of as many equal parts."""
    return [int((part + 0.5) * num_layers / sampled) for part in range(sampled)]


def _selected_weights(store: PrefixStore, layers: list[int]) -> Iterator[np.ndarray]:
    """Per node with statistics: float32 [layers, n], nodes in the order of their ids."""
    for row in sorted(store.nodes(), key=lambda row: row.node_id):
        access = store.access.get(row.node_id, row.length)
        if access is None or access.queries == 0:
            continue
        # Half a query more on either side, so that no share is 0 or 1.
        share = (access.selected[layers] + 0.5) / (access.queries + 1.0)
        yield -np.log1p(-np.minimum(share, 1.0 - 1e-6)).astype(np.float32)
