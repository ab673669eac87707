"""``impress reorder``: change how stored nodes are laid out, without computing them again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from impress_cli.options import DeviceOption, JsonOption, StoreOption, ThreadsOption
from impress_cli.probe_options import (
    Probe,
    ProbeChoice,
    ProbeHeadsOption,
    SketchBitsOption,
    probe_json,
)
from impress_cli.ui import Ui, ui_of
from impress_cli.units import format_bytes, format_count

if TYPE_CHECKING:
    from store.engine import PrefixStore
    from store.probes import ProbeSettings


def command(
    ctx: typer.Context,
    store: StoreOption,
    probe: Annotated[
        Probe | None,
        typer.Option(
            "--probe",
            help="Probe layouts that every node is to have; others are dropped. Default: those "
            "the store keeps, added where a node lacks them.",
            show_default=False,
        ),
    ] = None,
    sketch_bits: SketchBitsOption = None,
    probe_heads: ProbeHeadsOption = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Only say what would be done.", show_default=False),
    ] = False,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    json_output: JsonOption = False,
) -> None:
    """Add or drop probe layouts of stored nodes; run again to resume.

    Reads stored keys only: no prefix is computed again. Queries that need no probe layout are not
    disturbed.
    """
    from impress_cli.envelope import envelope
    from impress_cli.session import opened_store

    ui, choice = ui_of(ctx), ProbeChoice(probe, sketch_bits, probe_heads)
    with opened_store(ui, store) as opened:
        settings = choice.settings(opened.shape, opened.probes())
    if settings.calibrate is not None and not dry_run:
        settings = _calibrated(ui, store, settings, device, threads)
    with opened_store(ui, store) as opened:
        body = _plan(opened, settings) if dry_run else _change(ui, opened, settings)
    body["probe"] = probe_json(settings)
    if json_output:
        ui.json(envelope("reorder", body))
        return
    for text in body["warnings"]:
        ui.warn(text)
    ui.line(_line(body))
    for text in _notes(settings, choice, store):
        ui.note(text)


def _calibrated(
    ui: Ui, path: Path, settings: ProbeSettings, device: str, threads: int | None
) -> ProbeSettings:
    """Choose the heads that ``--probe-heads auto`` asks for; changes nothing in the store."""
    from impress_cli.session import loaded_model, opened_store, stored_model
    from pipelines.probes import calibrate_heads

    spec, dtype = stored_model(path)
    model = loaded_model(ui, spec, dtype=dtype, device=device, threads=threads)
    opening = opened_store(ui, path, identity=model.identity, device=str(model.device))
    with opening as opened, ui.progress() as progress:
        heads = calibrate_heads(opened, model, settings.calibrate, progress)
    return replace(settings, heads=heads, calibrate=None)


def _plan(opened: PrefixStore, settings: ProbeSettings) -> dict[str, Any]:
    from pipelines.probes import first_heads, plan_probes

    anew: tuple[str, ...] = ()
    if settings.calibrate is not None:
        # Which heads is not known yet; how many is, and with it the bytes.
        settings = replace(settings, heads=first_heads(opened.shape, settings.calibrate))
        anew = ("heads",)
    plan = plan_probes(opened, settings, anew=anew)
    return {"dry_run": True} | _body(
        nodes=len(opened.nodes()),
        bytes_written=plan.bytes,
        probes_added=len(plan.add),
        probes_dropped=len(plan.drop),
    )


def _change(ui: Ui, opened: PrefixStore, settings: ProbeSettings) -> dict[str, Any]:
    from pipelines.probes import match_probes

    if settings != opened.probes():
        opened.set_probes(settings)
    with ui.progress() as progress:
        report = match_probes(opened, progress)
    return _body(
        nodes=report.nodes,
        bytes_written=report.bytes_written,
        probes_added=report.added,
        probes_dropped=report.dropped,
        warnings=list(report.warnings),
    )


def _body(
    *,
    nodes: int,
    bytes_written: int,
    probes_added: int,
    probes_dropped: int,
    warnings: list[str] | None = None,
) -> dict[str, Any]:
    """Keys of the JSON object; rows are not reordered yet."""
    return {
        "nodes": nodes,
        "rewritten": 0,
        "bytes_written": bytes_written,
        "chunks_before": None,
        "chunks_after": None,
        "probes_added": probes_added,
        "probes_dropped": probes_dropped,
        "warnings": warnings or [],
    }


def _notes(settings: ProbeSettings, choice: ProbeChoice, store: Path) -> list[str]:
    """What the line of a run does not tell."""
    if settings.calibrate is not None and choice.heads == "auto":
        return ["which heads auto takes is known once it ran; nodes that have them are skipped"]
    if not choice.given and not settings.specs:
        return [
            f"the store keeps no probe layouts; 'impress reorder --store {store} --probe sketch' "
            "adds a sketch"
        ]
    return []


def _line(body: dict[str, Any]) -> str:
    would = "would be " if body.get("dry_run") else ""
    return (
        f"{format_count(body['nodes'])} nodes: {format_count(body['probes_added'])} probe layouts "
        f"{would}added ({format_bytes(body['bytes_written'])}), "
        f"{format_count(body['probes_dropped'])} {would}dropped"
    )
