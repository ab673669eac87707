"""``impress verify``: read every chunk and check it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from impress_cli.options import (
    DeviceOption,
    JsonOption,
    StoreOption,
    ThreadsOption,
)
from impress_cli.ui import Ui, ui_of

if TYPE_CHECKING:
    from pipelines.mend import MendReport
    from pipelines.probes import ProbeReport
    from store.disk.verify import BadChunk


def command(
    ctx: typer.Context,
    store: StoreOption,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Recompute damaged KV with the store's model; write damaged or missing probe "
            "layouts again.",
            show_default=False,
        ),
    ] = False,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    json_output: JsonOption = False,
) -> None:
    """Check every stored chunk; exit 1 if any is bad.

    Names node, array, layer and chunk of whatever is bad.
    """
    from impress_cli.envelope import envelope
    from impress_cli.render import verify_lines
    from impress_cli.session import opened_store
    from pipelines.probes import plan_probes
    from pipelines.progress import ProgressEvent
    from store.disk.verify import kv_damage

    ui = ui_of(ctx)
    with opened_store(ui, store) as opened, ui.progress() as progress:
        report = opened.verify(
            lambda done, total: progress(ProgressEvent("verify", done, total, "nodes"))
        )
        kv_bad = kv_damage(report.bad)
        missing = len(plan_probes(opened, opened.probes(), drop=False).add)
        released = opened.release({place.node for place in kv_bad}) if repair else 0
    bad = [dict(zip(place._fields, place, strict=True)) for place in report.bad]
    body = {"nodes": report.nodes, "chunks": report.chunks, "bytes": report.bytes, "bad": bad}
    body["probes_missing"] = missing
    failed = bool(bad)
    if repair:
        body["released"] = released
        failed = _repair(ui, store, report.bad, device, threads, body)
    if json_output:
        ui.json(envelope("verify", body))
    else:
        for text in verify_lines(body):
            ui.line(text)
        for text in _probe_lines(body):
            ui.line(text)
    if failed:
        raise typer.Exit(1)


def _probe_lines(body: dict[str, Any]) -> list[str]:
    """What became of probe layouts that are damaged or that nodes lack."""
    if "probes_added" in body:
        added = body["probes_added"]
        return [f"{added} probe layouts written again"] if added else []
    missing = body["probes_missing"]
    why = "of those that the store keeps are missing; 'impress verify --repair' writes them"
    return [f"{missing} probe layouts {why}"] if missing else []


def _repair(
    ui: Ui,
    store: Path,
    bad: Sequence[BadChunk],
    device: str,
    threads: int | None,
    body: dict[str, Any],
) -> bool:
    """Repair what a scrub found, write it down in ``body``; True where something is left."""
    from store.disk.verify import kv_damage

    damaged = kv_damage(bad)
    left = dict(_mend(ui, store, damaged, device, threads).failed) if damaged else {}
    probes = _mend_probes(ui, store, bad)
    body["probes_added"] = probes.added
    if bad:
        nodes = dict.fromkeys(place.node for place in bad)
        left |= {node: why for node, why in probes.failures.items() if node not in left}
        body["repaired"] = [node for node in nodes if node not in left]
        body["not_repaired"] = [{"node": node, "reason": why} for node, why in left.items()]
    return bool(bad and left)


def _mend(
    ui: Ui, store: Path, bad: Sequence[BadChunk], device: str, threads: int | None
) -> MendReport:
    from impress_cli.session import loaded_model, opened_store, stored_model
    from pipelines.mend import mend

    spec, dtype = stored_model(store)
    model = loaded_model(ui, spec, dtype=dtype, device=device, threads=threads)
    opening = opened_store(ui, store, identity=model.identity, device=str(model.device))
    with opening as opened, ui.progress() as progress:
        return mend(opened, model, bad, progress)


def _mend_probes(ui: Ui, store: Path, bad: Sequence[BadChunk]) -> ProbeReport:
    from impress_cli.session import opened_store
    from pipelines.mend import mend_probes

    with opened_store(ui, store) as opened, ui.progress() as progress:
        return mend_probes(opened, bad, progress)
