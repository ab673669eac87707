"""What one query cost: the TTFT breakdown and where its bytes came from.

Values only. Stages are timed separately; ``other`` is what none of them covers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

STAGES = ("match", "probe", "identify", "load", "compute", "other")


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
        KV bytes by tier: ``disk``, ``host``, ``device``.
    read_bytes, requests
        Bytes the reads moved (widened to disk blocks) and the number of read requests.
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
    bytes: dict[str, int] = field(default_factory=lambda: {"disk": 0, "host": 0, "device": 0})
    read_bytes: int = 0
    requests: int = 0
    fallback_layers: int = 0
    miss_reasons: list[str] = field(default_factory=list)
    recovered_chunks: int = 0


@dataclass(slots=True)
class RunCounters:
    """Mutable counters of a run under way; the run owns them."""

    load_wait_s: float = 0.0
    io_started_s: float = 0.0
    io_ended_s: float = 0.0
    wanted_bytes: int = 0
    read_bytes: int = 0
    requests: int = 0

    def hidden_io_s(self) -> float:
        """Seconds from the first read's start to the last one's end that nobody waited for."""
        return max(0.0, self.io_ended_s - self.io_started_s - self.load_wait_s)

    def add_read(
        self, wanted_bytes: int, read_bytes: int, requests: int, started_s: float, ended_s: float
    ) -> None:
        """Count one finished read."""
        first = self.io_started_s == 0.0
        self.io_started_s = started_s if first else min(self.io_started_s, started_s)
        self.io_ended_s = max(self.io_ended_s, ended_s)
        self.wanted_bytes += wanted_bytes
        self.read_bytes += read_bytes
        self.requests += requests
