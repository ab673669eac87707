"""Recompute stored KV that a scrub found damaged.

Damaged nodes are rebuilt from the root on, each from its own token ids and its healthy parents;
a node whose token ids are damaged too can't be, and is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from pipelines.attention import prefill
from pipelines.probes import ProbeReport, match_probes
from pipelines.progress import Progress, ProgressEvent, silent
from store.disk.layout import PROBE_PREFIX
from store.disk.verify import kv_damage
from store.errors import ChunkLoadError

if TYPE_CHECKING:
    from pipelines.models import LoadedModel
    from store.disk.verify import BadChunk
    from store.engine import PrefixStore
    from store.index.node import PrefixNode


class NotMended(NamedTuple):
    """A node that stays damaged, and why."""

    node: str
    reason: str


class MendReport(NamedTuple):
    """Ids of the nodes recomputed, the tokens that took, and what could not be done."""

    nodes: list[str]
    tokens: int
    failed: list[NotMended]


def mend(
    store: PrefixStore,
    model: LoadedModel,
    bad: Sequence[BadChunk],
    progress: Progress = silent,
) -> MendReport:
    """Recompute every node whose KV ``bad`` names and publish it as a new generation.

    Damaged sidecars are left to `mend_probes`.

    Raises
    ------
    StoreLockedError, ReadOnlyStoreError, StoreFullError
        Nodes mended before stay mended.
    """
    report = MendReport([], 0, [])
    with store.writing():
        # All are set aside first: none may serve as the healthy beginning of another.
        # One that was split or removed since the scrub is no longer anybody's concern.
        here = {row.node_id for row in store.nodes()}
        bad = [place for place in kv_damage(bad) if place.node in here]
        for place in bad:
            store.quarantine(_load_error(store, place))
        nodes = [store.node(name) for name in dict.fromkeys(place.node for place in bad)]
        nodes.sort(key=lambda node: (node.start, node.node_id))
        for done, node in enumerate(nodes):
            progress(ProgressEvent("repair", done, len(nodes), "nodes", node.node_id))
            report = _add(report, node, _mend_one(store, model, node))
    progress(ProgressEvent("repair", len(nodes), len(nodes), "nodes"))
    return report


def mend_probes(
    store: PrefixStore, bad: Sequence[BadChunk], progress: Progress = silent
) -> ProbeReport:
    """Write damaged sidecars again, and those that nodes lack; reads keys, computes nothing.

    Raises
    ------
    StoreLockedError, ReadOnlyStoreError, StoreFullError
        Sidecars written before stay.
    """
    here = {row.node_id for row in store.nodes()}
    for place in bad:
        # One that was split or removed since the scrub is no longer anybody's concern.
        if place.array.startswith(PROBE_PREFIX) and place.node in here:
            node = store.node(place.node)
            store.quarantine(
                ChunkLoadError(place.node, place.array, place.layer, -1, node.start, "corrupt")
            )
    return match_probes(store, progress, drop=False)


def _load_error(store: PrefixStore, place: BadChunk) -> ChunkLoadError:
    node = store.node(place.node)
    whole = place.array not in ("k", "v") or place.chunk < 0 or _reordered(store, place.node)
    first = node.start if whole else node.start + place.chunk * store.info.chunk_tokens
    return ChunkLoadError(place.node, place.array, place.layer, place.chunk, first, "corrupt")


def _reordered(store: PrefixStore, node_id: str) -> bool:
    """Whether a chunk of a node may hold any of its tokens."""
    try:
        return store.order(node_id) is not None
    except ChunkLoadError:
        return True


def _add(report: MendReport, node: PrefixNode, result: int | str) -> MendReport:
    if isinstance(result, str):
        return report._replace(failed=[*report.failed, NotMended(node.node_id, result)])
    return report._replace(nodes=[*report.nodes, node.node_id], tokens=report.tokens + result)


def _mend_one(store: PrefixStore, model: LoadedModel, node: PrefixNode) -> int | str:
    """Tokens that were computed, or why the node can't be mended."""
    try:
        ids = store.path_ids(node.node_id)
        run, match = store.begin(ids, max_new_tokens=0, max_match=node.start, internal=True)
        with run:
            rest = ids[match.matched_len :]
            prefill(model.model, run, rest, logits=0)
            store.replace(node.node_id, lambda layer: run.kv(layer, node.start, node.end))
    except ChunkLoadError as error:
        return str(error).partition(";")[0]
    return len(rest)
