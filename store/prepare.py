"""Which evidence a sparse query uses, and starting the reads it needs.

Owns the choice behind ``auto`` and the errors where what was asked for is not stored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future

import numpy as np
import torch

from store.access import AccessStats
from store.disk.reader import ChunkReader, ReadCount
from store.disk.sidecar import SidecarFiles, read_heads
from store.disk.sidecar_layout import PROBE_KINDS
from store.errors import InvalidValueError
from store.index.radix import MatchedNode, PrefixNode
from store.itf.evidence import Evidence, ProbeHeads, Random, Sketch, Static
from store.itf.options import SparseOptions
from store.itf.sketch import GROUP_TOKENS
from store.resident import SketchCache
from store.stats import RunCounters
from store.types import KVShape

#: Finds a node's sidecar of a kind, None where it has none. Raises `ChunkLoadError`.
FindSidecar = Callable[[PrefixNode, str], SidecarFiles | None]


class EvidenceMaker:
    """Makes the evidence of one query after the other."""

    def __init__(
        self,
        shape: KVShape,
        reader: ChunkReader,
        find: FindSidecar,
        sketches: SketchCache,
        access: AccessStats,
        how_to_add: Callable[[str], str],
        withdrawn: Collection[tuple[str, str]] = (),
    ) -> None:
        self._shape, self._reader, self._find = shape, reader, find
        self._withdrawn, self._how_to_add = withdrawn, how_to_add
        self._sketches, self._access = sketches, access

    def make(
        self, options: SparseOptions, nodes: list[MatchedNode], counters: RunCounters
    ) -> Evidence | None:
        """Evidence for matched nodes; None stands for all keys, which the fetch reads itself.

        ``auto`` takes the smaller of sketch and probe heads that all nodes have, else all keys.
        Raises `InvalidValueError` where evidence was named that a node lacks.
        """
        n = sum(node.used for node in nodes)
        name = options.evidence
        if name == "full":
            return None
        if name == "random":
            return Random(n, options.seed)
        if name == "static":
            return Static(self._recorded(nodes))
        kinds = PROBE_KINDS if name == "auto" else (name,)
        found = [files for kind in kinds if (files := self._files(nodes, kind)) is not None]
        if found:
            used = [node.used for node in nodes]
            files = min(found, key=lambda files: token_bytes(files[0]))
            if files[0].bits is not None:
                return self._sketch(files, used, counters, sampled=options.sampled)
            return self._probe_heads(files, used, counters)
        if name == "auto" or any((node.node.node_id, name) in self._withdrawn for node in nodes):
            # Damage that an earlier query met is no more this one's error than it was that one's.
            return None
        raise InvalidValueError(
            f"evidence {name!r} is not stored for all of this prefix; add it with "
            f"{self._how_to_add(name)}, or use evidence 'auto' or 'full'"
        )

    def _files(self, nodes: list[MatchedNode], kind: str) -> list[SidecarFiles] | None:
        """Sidecars of a kind; None unless every node has one and all probe the same heads.

        Nodes of an interrupted change of the probe heads may differ.
        """
        files = [one for node in nodes if (one := self._find(node.node, kind)) is not None]
        if len(files) < len(nodes):
            return None
        heads = [one.heads for one in files if one.heads is not None]
        return files if all(np.array_equal(heads[0], other) for other in heads) else None

    def _sketch(
        self,
        files: list[SidecarFiles],
        used: list[int],
        counters: RunCounters,
        *,
        sampled: bool,
    ) -> Evidence:
        parts = [self._sketches.take(one, count) for one, count in zip(files, used, strict=True)]
        deadline_s = self._reader.options.deadline_s
        return Sketch(parts, self._shape, counters, deadline_s, sampled=sampled)

    def _probe_heads(
        self, files: list[SidecarFiles], used: list[int], counters: RunCounters
    ) -> Evidence:
        heads = files[0].heads
        assert heads is not None
        reads = [
            [self._read_heads(one, count, layer) for one, count in zip(files, used, strict=True)]
            for layer in range(self._shape.num_layers)
        ]
        return ProbeHeads(reads, heads, counters, self._reader.options.deadline_s)

    def _read_heads(
        self, files: SidecarFiles, used: int, layer: int
    ) -> Future[tuple[torch.Tensor, ReadCount]]:
        def read() -> tuple[torch.Tensor, ReadCount]:
            keys, count = read_heads(files, self._reader, layer)
            typed = torch.from_numpy(keys).view(self._shape.torch_dtype)
            return typed[:used], count

        return self._reader.run(read)

    def _recorded(self, nodes: list[MatchedNode]) -> np.ndarray:
        """Moving importance of the matched tokens, float32 [layers, n]."""
        found = [self._access.get(node.node.node_id, node.node.length) for node in nodes]
        parts = [
            # A node's importance sums to 1: by its length, 1 is an average token in any node.
            one.importance[:, : node.used] * node.node.length
            for one, node in zip(found, nodes, strict=True)
            if one is not None and one.observed_tokens
        ]
        if len(parts) < len(nodes):
            raise InvalidValueError(
                "evidence 'static' needs importance recorded from earlier queries, and part of "
                "this prefix has none; ask some with another evidence first"
            )
        return np.concatenate(parts, axis=1)


def token_bytes(files: SidecarFiles) -> float:
    """Bytes of evidence per token and layer."""
    shape, bits = files.shape, files.bits
    if bits is None:
        assert files.heads is not None
        return float(files.heads.shape[1] * shape.head_dim * shape.np_dtype.itemsize)
    return shape.num_kv_heads * shape.head_dim * (bits / 8 + 4 / GROUP_TOKENS)
