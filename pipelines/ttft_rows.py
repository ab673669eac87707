"""Figures of `impress bench ttft` from its samples: means, percentiles, paired ratios. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from pipelines.fidelity_measure import compare
from pipelines.ttft_values import Sample, TtftRow
from store.stats import TIERS, QueryStats

PERCENTILES = (50, 95, 99)


def sample_of(
    stats: QueryStats,
    logits: torch.Tensor,
    reference: torch.Tensor,
    *,
    request: int,
    prefix: int,
    turn: int,
    layers: int,
) -> Sample:
    """A sample from what an answer cost, beside the reference's logits, float [vocab] each."""
    # What is no chunk of a store counts by its bytes; where all is loaded, all of it is important.
    hit = _shares(stats.chunks) or _shares(stats.bytes)
    important = _shares(stats.important_rows) or hit
    close = compare(reference[None], logits.cpu()[None])
    return Sample(
        request=request,
        prefix=prefix,
        turn=turn,
        ttft_s=stats.ttft_s,
        stages_s=dict(stats.stages_s),
        hidden_io_s=stats.hidden_io_s,
        bookkeeping_s=stats.bookkeeping_s,
        bytes=dict(stats.bytes),
        read_bytes=stats.read_bytes,
        needed_bytes=stats.needed_bytes,
        hit=hit,
        important=important,
        important_hit=1.0 - important["disk"] if important else None,
        kl=close.kl,
        top1=close.top1 == 1.0,
        selected_ratio=stats.selected_ratio,
        loaded_ratio=stats.loaded_ratio,
        probe_ratio=stats.probe_ratio,
        fallback_ratio=stats.fallback_layers / layers,
        reused_tokens=stats.reused_tokens,
        recovered_chunks=stats.recovered_chunks,
    )


def _shares(amounts: dict[str, int]) -> dict[str, float]:
    """Each tier's part of the whole; empty where there is nothing to share."""
    total = sum(amounts.values())
    return {tier: amounts[tier] / total for tier in TIERS} if total else {}


def ttft_figures(samples: Sequence[Sample]) -> dict[str, float]:
    """Mean and percentiles of the time to the first token, in seconds."""
    times = [sample.ttft_s for sample in samples]
    points = np.percentile(times, PERCENTILES)
    named = zip(PERCENTILES, points, strict=True)
    return {"mean": statistics.fmean(times)} | {f"p{at}": float(value) for at, value in named}


def mean_of(samples: Sequence[Sample], name: str) -> float:
    """Mean of a figure that every sample has."""
    return statistics.fmean(getattr(sample, name) for sample in samples)


def means_of(samples: Sequence[Sample], name: str) -> dict[str, float]:
    """Means by key of a figure that has several; empty where no sample has any."""
    found = [values for sample in samples if (values := getattr(sample, name))]
    if not found:
        return {}
    return {key: statistics.fmean(values[key] for values in found) for key in found[0]}


def known_mean(values: Iterable[float | None]) -> float | None:
    """Mean of what is known; None where nothing is."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def read_amplification(samples: Iterable[Sample]) -> float | None:
    """Bytes read for each byte of selected keys and values among them; None where none was."""
    found = list(samples)
    needed = sum(sample.needed_bytes for sample in found)
    return sum(sample.read_bytes for sample in found) / needed if needed else None


def paired_ratio(row: TtftRow, other: TtftRow) -> float | None:
    """Median over the requests both answered of this row's time as a multiple of the other's."""
    times = {sample.request: sample.ttft_s for sample in other.samples}
    both = [s.ttft_s / times[s.request] for s in row.samples if s.request in times]
    return statistics.median(both) if both else None
