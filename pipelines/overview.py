"""What a store holds and how its queries went, as plain values for people and JSON.

Reads the catalog and file sizes only; no KV.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from store.disk.sidecar_layout import ProbeSpec, SidecarLayout
from store.errors import ChunkLoadError, PrefixNotFoundError
from store.files import order_name
from store.index.mapping import chunk_count
from store.tier.policy import POLICIES

if TYPE_CHECKING:
    from store.engine import PrefixStore
    from store.index.rows import NodeRow, ProbeRow

TIERS = ("device", "host", "disk")


def store_stats(store: PrefixStore) -> dict[str, Any]:
    """Sizes, and totals over all queries so far (docs/json.md, ``impress.stats/1``).

    Ratios are None until there was something to count. ``hit`` is the share of the tokens that
    could have come from the store and did, by tier; ``hit_bytes`` the share of the chunks asked
    for, by tier; ``important_hit`` the share of selected tokens' keys and values that were in
    memory. ``read_amplification`` is KV read from disk over what of it was needed, and
    ``wasted_bytes`` the difference: needed are selected tokens, or all where all was loaded.
    ``policies`` has the last two kinds of hits by policy. ``probe_share`` compares the bytes of
    evidence with those of KV, without padding, checksums and files' metadata.
    """
    counters = store.counters()
    rows = store.nodes()
    kv_bytes = sum(row.bytes for row in rows)
    probes = _probes(store, rows)
    probe_bytes = sum(entry["bytes"] for entry in probes.values())
    read, needed = counters.get("kv_read_bytes", 0.0), counters.get("needed_bytes", 0.0)
    return {
        "nodes": len(rows),
        "prefixes": len(store.prefixes()),
        "tokens": sum(row.length for row in rows),
        "bytes": {"kv": kv_bytes, "probe": probe_bytes, "total": store.size_bytes()},
        "quarantined": len(store.quarantined()),
        "hit": _hits(counters),
        "hit_bytes": _shares(counters, "chunks"),
        "important_hit": _in_memory(counters),
        "read_amplification": read / needed if needed else None,
        "wasted_bytes": int(max(0.0, read - needed)),
        "policies": _policies(counters),
        "probe_share": sum(entry["kv_share"] for entry in probes.values()),
        "probes": probes,
        "counters": counters,
    }


def _probes(store: PrefixStore, rows: list[NodeRow]) -> dict[str, dict[str, Any]]:
    """Per kind: nodes that have a sidecar, its bytes on disk, its share of all KV."""
    lengths = {row.node_id: row.length for row in rows}
    kv_bytes = sum(lengths.values()) * store.shape.token_bytes
    found: dict[str, dict[str, Any]] = {}
    evidence: dict[str, int] = {}
    for row in store.probe_rows():
        if row.node_id not in lengths:
            continue  # removed by another process just now
        entry = found.setdefault(row.kind, {"nodes": 0, "bytes": 0, "kv_share": 0.0})
        spec = ProbeSpec.from_json(json.loads(row.detail))
        layout = SidecarLayout.of(store.shape, lengths[row.node_id], spec)
        entry["nodes"] += 1
        entry["bytes"] += row.bytes
        evidence[row.kind] = evidence.get(row.kind, 0) + layout.data_bytes
        entry["kv_share"] = evidence[row.kind] / kv_bytes
    return found


def _sidecar(row: ProbeRow) -> dict[str, Any]:
    return {**json.loads(row.detail), "bytes": row.bytes}


def _hits(counters: dict[str, float]) -> dict[str, float | None]:
    """Reused tokens over those that could have been, split by the bytes each tier gave."""
    eligible = counters.get("eligible_tokens", 0.0)
    if eligible <= 0:
        return dict.fromkeys(TIERS)
    ratio, shares = counters.get("reused_tokens", 0.0) / eligible, _shares(counters, "chunks")
    return {tier: ratio * (share or 0.0) for tier, share in shares.items()}


def _shares(counters: dict[str, float], unit: str, policy: str = "") -> dict[str, float | None]:
    """Share of each tier in what was counted in a unit; None where nothing was."""
    found = {tier: counters.get(f"{policy}{tier}_{unit}", 0.0) for tier in TIERS}
    total = sum(found.values())
    return {tier: amount / total if total else None for tier, amount in found.items()}


def _in_memory(counters: dict[str, float], policy: str = "") -> float | None:
    """Share of selected tokens' keys and values that were in memory."""
    disk = _shares(counters, "important_rows", policy)["disk"]
    return None if disk is None else 1.0 - disk


def _policies(counters: dict[str, float]) -> dict[str, dict[str, Any]]:
    """Hits by the policy that was in use."""
    return {
        name: {
            "loads": int(counters[f"{name}.loads"]),
            "hit_bytes": _shares(counters, "chunks", f"{name}."),
            "important_hit": _in_memory(counters, f"{name}."),
        }
        for name in POLICIES
        if f"{name}.loads" in counters
    }


def _order(store: PrefixStore, row: NodeRow) -> str | None:
    """How a node's rows are stored; None where its files can't tell."""
    try:
        return order_name(store.order(row.node_id))
    except ChunkLoadError:
        return None


def find_node(store: PrefixStore, key: str) -> NodeRow:
    """Return the node with this id, or whose id alone begins so. Raises PrefixNotFoundError."""
    rows = [row for row in store.nodes() if row.node_id.startswith(key.lower())]
    exact = [row for row in rows if row.node_id == key.lower()]
    found = exact or rows
    if len(found) == 1:
        return found[0]
    why = f"{len(found)} nodes begin with {key!r}" if found else f"the store has no node {key!r}"
    raise PrefixNotFoundError(f"{why}; 'impress inspect' without a node lists them")


def node_detail(store: PrefixStore, key: str) -> dict[str, Any]:
    """One node: its place in the tree, its chunks and bytes, what is damaged, who uses it."""
    row = find_node(store, key)
    info, shape = store.info, store.shape
    chunks = chunk_count(row.length, info.chunk_tokens)
    return {
        "node_id": row.node_id,
        "parent_id": row.parent_id,
        "start": row.start,
        "length": row.length,
        "generation": row.generation,
        "bytes": row.bytes,
        "chunk_tokens": info.chunk_tokens,
        "chunks_per_layer": chunks,
        "chunk_bytes": info.chunk_tokens * shape.row_bytes,
        "layers": shape.num_layers,
        "codec": info.codec,
        "kv_dtype": info.dtype,
        "order": _order(store, row),
        "children": [child.node_id for child in store.nodes() if child.parent_id == row.node_id],
        "prefixes": [prefix.name for prefix in store.prefixes() if prefix.node_id == row.node_id],
        "probes": {
            probe.kind: _sidecar(probe)
            for probe in store.probe_rows()
            if probe.node_id == row.node_id
        },
        "quarantined": [
            {"array": bad.array, "layer": bad.layer, "chunk": bad.chunk, "reason": bad.reason}
            for bad in store.quarantined()
            if bad.node_id == row.node_id
        ],
    }
