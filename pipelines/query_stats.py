"""What a query cost, summed over the tries that it took to its first token."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

import numpy as np

from store.index.radix import PrefixMatch
from store.query_run import QueryRun
from store.stats import TIERS, QueryStats


@dataclass(slots=True)
class Attempts:
    """What happened on the way to the first token; times in seconds."""

    match_s: float = 0.0
    forward_s: float = 0.0
    probe_s: float = 0.0
    identify_s: float = 0.0
    load_s: float = 0.0
    hidden_io_s: float = 0.0
    bookkeeping_s: float = 0.0
    wanted_bytes: int = 0
    host_bytes: int = 0
    device_bytes: int = 0
    read_bytes: int = 0
    needed_bytes: int = 0
    probe_bytes: int = 0
    requests: int = 0
    chunks: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    important_rows: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    forward_tokens: int = 0
    recovered: int = 0
    reasons: list[str] = field(default_factory=list)

    def add_run(self, run: QueryRun) -> None:
        """Take over a run's counters at its first token, or at its failure."""
        counters = run.counters
        self.probe_s += counters.probe_wait_s
        self.identify_s += counters.identify_s
        self.load_s += counters.load_wait_s
        self.hidden_io_s += counters.hidden_io_s()
        self.bookkeeping_s += counters.bookkeeping_s
        self.wanted_bytes += counters.wanted_bytes
        self.host_bytes += counters.host_chunks * counters.chunk_bytes
        self.device_bytes += counters.device_chunks * counters.chunk_bytes
        self.read_bytes += counters.read_bytes
        self.probe_bytes += counters.probe_bytes
        self.requests += counters.requests
        for tier in TIERS:
            self.chunks[tier] += counters.chunks[tier]

    def add_important(self, run: QueryRun) -> None:
        """Take over what can be counted once the first token is out."""
        self.needed_bytes += run.counters.needed_bytes
        for tier in TIERS:
            self.important_rows[tier] += run.counters.important[tier]

    def stages_s(self, ttft_s: float) -> dict[str, float]:
        """Seconds per stage; they sum to ``ttft_s``."""
        waited = {"probe": self.probe_s, "identify": self.identify_s, "load": self.load_s}
        compute = self.forward_s - sum(waited.values())
        stages = {"match": self.match_s, **waited, "compute": compute}
        stages["other"] = ttft_s - sum(stages.values())
        return stages


def query_stats(
    ttft_s: float,
    attempts: Attempts,
    run: QueryRun,
    prompt_tokens: int,
    retention: float,
    miss_reasons: list[str],
) -> QueryStats:
    """Figures of a query whose last try was ``run``; call it once the first token is out."""
    run.fetch.count_important()
    attempts.add_important(run)
    kept, reports = kept_ratios(run), run.reports
    return QueryStats(
        ttft_s=ttft_s,
        stages_s=attempts.stages_s(ttft_s),
        hidden_io_s=attempts.hidden_io_s,
        prompt_tokens=prompt_tokens,
        reused_tokens=run.matched_len,
        forward_tokens=attempts.forward_tokens,
        plan="load" if run.matched_len else "recompute",
        retention=retention if run.matched_len else 1.0,
        selected_ratio=kept[0],
        loaded_ratio=kept[1],
        probe_ratio=kept[2],
        bytes={
            "disk": attempts.wanted_bytes,
            "host": attempts.host_bytes,
            "device": attempts.device_bytes,
        },
        chunks=attempts.chunks,
        important_rows=attempts.important_rows,
        read_bytes=attempts.read_bytes,
        requests=attempts.requests,
        needed_bytes=attempts.needed_bytes,
        probe_bytes=attempts.probe_bytes,
        bookkeeping_s=attempts.bookkeeping_s,
        fallback_layers=sum(report.fell_back for report in reports),
        miss_reasons=[*attempts.reasons, *miss_reasons],
        recovered_chunks=attempts.recovered,
    )


def lifetime_amounts(stats: QueryStats, eligible_tokens: int, policy: str) -> dict[str, float]:
    """What a query adds to its store's counters; hits a second time under ``<policy>.``."""
    hits: dict[str, float] = {"loads": float(stats.plan == "load")}
    for tier in TIERS:
        hits[f"{tier}_chunks"] = stats.chunks[tier]
        hits[f"{tier}_important_rows"] = stats.important_rows[tier]
    return {
        "queries": 1,
        "prompt_tokens": stats.prompt_tokens,
        "eligible_tokens": eligible_tokens,
        "reused_tokens": stats.reused_tokens,
        "forward_tokens": stats.forward_tokens,
        **{f"{tier}_bytes": stats.bytes[tier] for tier in TIERS},
        "read_bytes": stats.read_bytes,
        "kv_read_bytes": stats.read_bytes - stats.probe_bytes,
        "needed_bytes": stats.needed_bytes,
        "probe_bytes": stats.probe_bytes,
        "recovered_chunks": stats.recovered_chunks,
        "ttft_s": stats.ttft_s,
        **hits,
        **{f"{policy}.{name}": value for name, value in hits.items()},
    }


def kept_ratios(run: QueryRun) -> tuple[float, float, float]:
    """Fractions of the reused KV that were selected, loaded, and read as evidence.

    Selected counts tokens, loaded counts chunks of keys and values, evidence counts its bytes.
    """
    reports = run.reports
    if not reports:
        return 1.0, 1.0, 0.0
    selected = statistics.fmean(report.selected_tokens for report in reports) / run.matched_len
    loaded = sum(r.chunks_read for r in reports) / sum(2 * r.chunks for r in reports)
    kv_bytes = 2 * len(reports) * run.matched_len * run.shape.row_bytes
    return selected, loaded, sum(report.probe_bytes for report in reports) / kv_bytes


def miss_reasons(
    match: PrefixMatch, ids: np.ndarray, prefix_ids: np.ndarray, plan: str
) -> list[str]:
    """Why the prefix (the prompt, without one) was not reused to its end."""
    at = match.matched_len
    eligible = len(prefix_ids) if len(prefix_ids) else 1
    if at >= min(eligible, len(ids) - 1):
        return []
    if plan == "force-recompute":
        return ["recompute was asked for (--plan force-recompute)"]
    if match.stop == "unreadable" and match.error is not None:
        return [str(match.error).split(";")[0]]
    reasons = {
        "diverged": f"what is stored differs from token {at} on",
        "end_of_tree": f"nothing is stored after token {at}",
        "quarantined": f"stored data is damaged from token {at} on",
        "complete": f"tokens after {at} could not be loaded",
    }
    return [reasons[match.stop]]
