"""What one query cost: the TTFT breakdown and where its bytes came from.

Values only. Stages are timed separately; ``other`` is what none of them covers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

TIERS = ("disk", "host", "device")
STAGES = ("match", "probe", "identify", "load", "compute", "other")


class LayerReport(NamedTuple):
    """What a sparse run did in one layer.

    Parameters
    ----------
    evidence
        Where importance came from in the end: ``full`` after a fallback.
    jaccard, threshold
        Agreement of the probe heads and what it had to exceed; None where there is nothing to
        agree (other evidence, a single probe head).
    sets, selected_tokens
        Sets of tokens (one, or one per KV head) and tokens in each.
    chunks, chunks_selected, chunks_read
        Chunks of one array that the prefix covers; those that hold a selected token; chunks of
        keys and of values that were fetched.
    loaded_tokens, kept_tokens
        Prefix tokens whose keys and values were both fetched; rows each KV head attends to.
    kv_bytes, probe_bytes
        Bytes of the fetched chunks; bytes read as evidence.
    device_chunks, host_chunks
        Of the fetched chunks, those that were in memory.
    """

    layer: int
    evidence: str
    jaccard: float | None
    threshold: float | None
    fell_back: bool
    sets: int
    selected_tokens: int
    chunks: int
    chunks_selected: int
    chunks_read: int
    loaded_tokens: int
    kept_tokens: int
    kv_bytes: int
    probe_bytes: int
    device_chunks: int = 0
    host_chunks: int = 0


@dataclass(frozen=True, slots=True)
class QueryStats:
    """One answered query.

    Parameters
    ----------
    ttft_s
        Seconds from token ids to the first answer token.
    stages_s
        Seconds per stage of ``STAGES``; they sum to ``ttft_s``. ``load`` counts only time the
        query waited.
    hidden_io_s
        Seconds of reading that ran beside compute.
    prompt_tokens, reused_tokens, forward_tokens
        Tokens of prefix and question, tokens whose KV came from the store, tokens that ran
        through the model before the first answer token (recovery included).
    plan
        ``load`` or ``recompute``.
    retention, selected_ratio, loaded_ratio, probe_ratio
        Fractions of the reused KV: asked, selected, loaded, read as evidence.
    bytes
        Bytes of chunks by the tier they came from; ``disk`` counts evidence that was read, too.
    chunks
        Chunks of keys and of values by the tier they came from.
    important_rows
        Of a sparse query, keys and values of selected tokens by the tier they lay in.
    read_bytes, requests
        Bytes the reads moved (widened to disk blocks) and the number of read requests.
    needed_bytes
        Of the bytes read, those of selected tokens' keys and values; all where all was loaded.
    probe_bytes
        Of ``bytes["disk"]``, evidence.
    bookkeeping_s
        Seconds of ``match`` and ``load`` that went into finding where chunks are, without copying
        rows and waiting for reads.
    fallback_layers
        Layers that read all keys.
    miss_reasons
        Why tokens that could have been reused were not; empty after a full hit.
    recovered_chunks
        Chunks that failed to load and were recomputed.
    """

    ttft_s: float
    stages_s: dict[str, float]
    hidden_io_s: float
    prompt_tokens: int
    reused_tokens: int
    forward_tokens: int
    plan: str
    retention: float = 1.0
    selected_ratio: float = 1.0
    loaded_ratio: float = 1.0
    probe_ratio: float = 0.0
    bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    chunks: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    important_rows: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    read_bytes: int = 0
    requests: int = 0
    needed_bytes: int = 0
    probe_bytes: int = 0
    bookkeeping_s: float = 0.0
    fallback_layers: int = 0
    miss_reasons: list[str] = field(default_factory=list)
    recovered_chunks: int = 0


@dataclass(slots=True)
class RunCounters:
    """Mutable counters of a run under way; the run owns them.

    ``load_wait_s`` is what fetching kept the query from computing; ``fetch_s`` all that it took,
    planning included, of which ``read_wait_s`` waited for reads and ``copy_s`` copied rows.
    """

    load_wait_s: float = 0.0
    probe_wait_s: float = 0.0
    identify_s: float = 0.0
    fetch_s: float = 0.0
    read_wait_s: float = 0.0
    copy_s: float = 0.0
    probe_bytes: int = 0
    device_chunks: int = 0
    host_chunks: int = 0
    disk_chunks: int = 0
    chunk_bytes: int = 0
    important_rows: int = 0
    important_device_rows: int = 0
    important_host_rows: int = 0
    needed_bytes: int = 0
    io_spans_s: list[tuple[float, float]] = field(default_factory=list)
    wanted_bytes: int = 0
    read_bytes: int = 0
    requests: int = 0

    @property
    def bookkeeping_s(self) -> float:
        """Seconds of fetching that neither copied rows nor waited for reads."""
        return self.fetch_s - self.read_wait_s - self.copy_s

    @property
    def chunks(self) -> dict[str, int]:
        """Chunks of keys and of values by the tier they came from."""
        counts = (self.disk_chunks, self.host_chunks, self.device_chunks)
        return dict(zip(TIERS, counts, strict=True))

    @property
    def important(self) -> dict[str, int]:
        """Keys and values of selected tokens by the tier they lay in."""
        host, device = self.important_host_rows, self.important_device_rows
        counts = (self.important_rows - host - device, host, device)
        return dict(zip(TIERS, counts, strict=True))

    def hidden_io_s(self) -> float:
        """Seconds in which at least one read was under way and nobody waited for it."""
        busy = seen = 0.0
        for started, ended in sorted(self.io_spans_s):
            busy += max(0.0, ended - max(started, seen))
            seen = max(seen, ended)
        return max(0.0, busy - self.read_wait_s - self.probe_wait_s)

    def add_probe(self, count: Iterable[float]) -> None:
        """Count one finished read of evidence: the fields of `store.disk.reader.ReadCount`."""
        wanted, read, requests, started, ended = count
        self.probe_bytes += int(wanted)
        self.add_read(int(wanted), int(read), int(requests), started, ended)

    def add_read(
        self, wanted_bytes: int, read_bytes: int, requests: int, started_s: float, ended_s: float
    ) -> None:
        """Count one finished read."""
        self.io_spans_s.append((started_s, ended_s))
        self.wanted_bytes += wanted_bytes
        self.read_bytes += read_bytes
        self.requests += requests
