"""Probe layouts of a store: give nodes what its setting asks for, and choose probe heads.

A probe layout is a sidecar of each node (`store.probes`), from which sparse queries tell which
tokens matter. Changing them needs no model; choosing heads by calibration does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from pipelines.attention import prefill
from pipelines.progress import Progress, ProgressEvent, silent
from store.disk.sidecar_layout import SidecarLayout
from store.errors import ChunkLoadError, StoreError
from store.itf.importance import column_sums, keep_count, top_k
from store.probes import ProbeSettings
from store.types import KVShape

if TYPE_CHECKING:
    from pipelines.models import LoadedModel
    from store.engine import PrefixStore
    from store.index.rows import NodeRow, PrefixRow

#: Prefixes that heads are chosen on, and the share of their tokens that counts as important.
CALIBRATION_PREFIXES, CALIBRATION_RETENTION = 8, 0.25
#: A prefix's last tokens serve as the question: at most so many, at most a quarter of it.
_QUERY_TOKENS, _QUERY_SHARE = 64, 4


class ProbeChange(NamedTuple):
    """One sidecar to add to a node, or to drop."""

    node: NodeRow
    kind: str


class ProbePlan(NamedTuple):
    """What makes all nodes match a setting; ``bytes`` is what the additions take at most."""

    add: list[ProbeChange]
    drop: list[ProbeChange]
    bytes: int


@dataclass(slots=True)
class ProbeReport:
    """What changed; ``failures`` says by node why its keys can't be read."""

    nodes: int = 0
    added: int = 0
    dropped: int = 0
    bytes_written: int = 0
    bytes_freed: int = 0
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def warnings(self) -> list[str]:
        """One sentence for each node that was left without."""
        return [f"no probe layout for {why}" for why in self.failures.values()]


def default_head_count(shape: KVShape) -> int:
    """Heads to probe: the published three, fewer for a model with few KV heads."""
    return max(1, min(3, shape.num_kv_heads // 4))


def first_heads(shape: KVShape, count: int | None = None) -> tuple[tuple[int, ...], ...]:
    """Heads 0 to ``count`` - 1 of every layer, as published; by default `default_head_count`."""
    return (tuple(range(count or default_head_count(shape))),) * shape.num_layers


def plan_probes(
    store: PrefixStore,
    settings: ProbeSettings,
    *,
    drop: bool = True,
    anew: Collection[str] = (),
) -> ProbePlan:
    """What the catalog's rows lack, and with ``drop`` what they have too much of.

    Every node gets the kinds of ``anew``, whatever it has of them.
    """
    have = {(row.node_id, row.kind): row.detail for row in store.probe_rows()}
    nodes = {row.node_id: row for row in store.nodes()}
    add, size = [], 0
    for node in nodes.values():
        for kind, spec in settings.specs.items():
            if kind in anew or have.get((node.node_id, kind)) != spec.detail:
                add.append(ProbeChange(node, kind))
                size += SidecarLayout.of(store.shape, node.length, spec).disk_bytes
    surplus = [
        ProbeChange(nodes[name], kind)
        for name, kind in have
        if drop and name in nodes and kind not in settings.specs
    ]
    return ProbePlan(add, surplus, size)


def match_probes(
    store: PrefixStore, progress: Progress = silent, *, drop: bool = True
) -> ProbeReport:
    """Make all nodes' sidecars match the store's setting; one that does is skipped.

    Each sidecar is published by itself, so that what was stopped anywhere goes on where it was.
    A node whose keys are damaged is left without, and said.

    Raises
    ------
    StoreLockedError, ReadOnlyStoreError, StoreFullError
        What was changed before stays.
    """
    store.refresh()
    plan = plan_probes(store, store.probes(), drop=drop)
    report = ProbeReport(nodes=len(store.nodes()))
    if not plan.add and not plan.drop:
        return report
    with store.writing():
        # Read again: another process may have written before the lock was ours.
        plan = plan_probes(store, store.probes(), drop=drop)
        total = len(plan.add) + len(plan.drop)
        for done, change in enumerate([*plan.add, *plan.drop]):
            note = f"{change.kind} of {change.node.node_id}"
            progress(ProgressEvent("probe layouts", done, total, "sidecars", note))
            if done < len(plan.add):
                _add(store, change, report)
            else:
                report.bytes_freed += store.drop_probe(change.node.node_id, change.kind)
                report.dropped += 1
    progress(ProgressEvent("probe layouts", total, total, "sidecars"))
    return report


def _add(store: PrefixStore, change: ProbeChange, report: ProbeReport) -> None:
    try:
        written = store.add_probe(change.node.node_id, change.kind)
    except ChunkLoadError as error:
        store.quarantine(error)
        report.failures[change.node.node_id] = str(error)
        return
    report.added += written > 0
    report.bytes_written += written


def finish_probes(
    store: PrefixStore, model: LoadedModel, progress: Progress = silent
) -> ProbeReport | None:
    """Choose heads where that was put off until prefixes are stored, and add them to all nodes.

    None where nothing was put off.

    Raises
    ------
    NoCalibrationError
        No prefix can serve; it stays put off.
    """
    settings = store.probes()
    if settings.calibrate is None:
        return None
    heads = calibrate_heads(store, model, settings.calibrate, progress)
    store.set_probes(replace(settings, heads=heads, calibrate=None))
    return match_probes(store, progress)


class NoCalibrationError(StoreError):
    """No stored prefix can serve to choose heads."""


def calibrate_heads(
    store: PrefixStore, model: LoadedModel, count: int | None = None, progress: Progress = silent
) -> tuple[tuple[int, ...], ...]:
    """Choose the heads of each layer that best tell what matters to all of them together.

    For up to 8 stored prefixes, the last tokens are taken as a question about those before. Per
    layer, heads are added one by one: each time the one with which the top quarter of the summed
    importance shares most with the top quarter by all heads (ties to the lower head).

    Parameters
    ----------
    count
        Heads per layer; by default `default_head_count`.

    Returns
    -------
    Ascending head numbers, one tuple per layer.

    Raises
    ------
    NoCalibrationError
        Nothing is stored that could serve.
    """
    shape = store.shape
    count = count or default_head_count(shape)
    rows = sorted(store.prefixes(), key=lambda row: (-row.length, row.prefix_id))
    rows = rows[:CALIBRATION_PREFIXES]
    sums = []
    for done, row in enumerate(rows):
        progress(ProgressEvent("calibrate heads", done, len(rows), "prefixes", row.name))
        found = _importance(store, model, row)
        if found is not None:
            sums.append(found)
    progress(ProgressEvent("calibrate heads", len(rows), len(rows), "prefixes"))
    if not sums:
        raise NoCalibrationError(
            f"probe heads can't be chosen by calibration: {store.path} has no usable prefix of "
            f"{_QUERY_SHARE} tokens or more; store some first, or name a number of heads"
        )
    layers = range(shape.num_layers)
    return tuple(best_heads([one[layer] for one in sums], count) for layer in layers)


def _importance(
    store: PrefixStore, model: LoadedModel, row: PrefixRow
) -> list[torch.Tensor] | None:
    """Column sums of each layer, float32 [kv_heads, n]; None for a prefix that can't serve."""
    cut = row.length - min(_QUERY_TOKENS, row.length // _QUERY_SHARE)
    if cut in (0, row.length):
        return None
    sums: dict[int, torch.Tensor] = {}

    def see(
        layer: int,
        q: torch.Tensor,
        keys: torch.Tensor,
        k_new: torch.Tensor,
        scaling: float | None,
    ) -> None:
        sums[layer] = column_sums(q, keys, k_new, scaling).cpu()

    try:
        ids = store.prefix_ids(row)
        run, match = store.begin(ids, max_new_tokens=0, max_match=cut, observer=see, record=False)
        with run:
            if match.matched_len < cut:
                return None
            prefill(model.model, run, ids[cut:], logits=0)
    except ChunkLoadError as error:
        store.quarantine(error)
        return None
    return [sums[layer] for layer in range(store.shape.num_layers)]


def best_heads(sums: Sequence[torch.Tensor], count: int) -> tuple[int, ...]:
    """Greedy choice of ``count`` heads of one layer.

    Parameters
    ----------
    sums
        Importance by KV head, float32 [kv_heads, n], one tensor per prefix.

    Returns
    -------
    Head numbers, ascending.
    """
    targets = [_important(one.sum(0, keepdim=True))[0] for one in sums]
    heads = sums[0].shape[0]
    chosen: list[int] = []
    while len(chosen) < min(count, heads):
        shared = np.zeros(heads)
        for one, target in zip(sums, targets, strict=True):
            # Every head as the next one, beside those that are chosen.
            sets = _important(one + one[chosen].sum(0))
            shared += (sets & target).sum(1).double().numpy() / int(target.sum())
        shared[chosen] = -1.0
        chosen.append(int(shared.argmax()))
    return tuple(sorted(chosen))


def _important(importance: torch.Tensor) -> torch.Tensor:
    """Membership of the top tokens, bool [sets, n]."""
    n = importance.shape[1]
    chosen = top_k(importance, keep_count(n, CALIBRATION_RETENTION))
    return torch.zeros(importance.shape, dtype=torch.bool).scatter_(1, chosen, True)
