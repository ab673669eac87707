"""``impress build-store``: compute the KV of prefixes once and store it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from impress_cli.build_choices import (
    Choices,
    choose,
    delete_store,
    existing_info,
    new_probes,
    read_inputs,
    refuse_other_probes,
)
from impress_cli.options import (
    BandwidthOption,
    DeviceOption,
    DiskSettings,
    DtypeOption,
    IoMode,
    IoOption,
    JsonOption,
    LatencyOption,
    ModelOption,
    StoreOption,
    Template,
    TemplateOption,
    ThreadsOption,
)
from impress_cli.probe_options import (
    Probe,
    ProbeChoice,
    ProbeHeadsOption,
    SketchBitsOption,
    probe_json,
)
from impress_cli.ui import Ui, ui_of
from impress_cli.units import parse_size

if TYPE_CHECKING:
    from pipelines.models import LoadedModel
    from pipelines.prefixes import PrefixSource
    from store.engine import PrefixStore
    from store.probes import ProbeSettings


def command(
    ctx: typer.Context,
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE|FILES...",
            help="A shipped recipe's name or a recipe's .yaml file (files after it replace its "
            "own), or .txt, .md, .jsonl and chat .json files.",
        ),
    ],
    store: StoreOption,
    model: ModelOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    probe: Annotated[
        Probe | None,
        typer.Option(
            "--probe",
            help="Probe layouts beside the KV, from which queries tell which tokens matter: a "
            "low-bit sketch of all keys, some KV heads' keys, both or none. Default: the store's "
            "own, for a new store sketch.",
            show_default=False,
        ),
    ] = None,
    sketch_bits: SketchBitsOption = None,
    probe_heads: ProbeHeadsOption = None,
    chunk_tokens: Annotated[
        int | None,
        typer.Option(
            "--chunk-tokens",
            metavar="N",
            help="Tokens per chunk, 16 to 256. Default 16.",
            show_default=False,
        ),
    ] = None,
    codec: Annotated[
        str | None,
        typer.Option(
            "--codec",
            metavar="CODEC",
            help="none, zstd or lz4. Default none.",
            show_default=False,
        ),
    ] = None,
    template: TemplateOption = Template.AUTO,
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=1, help="At most this many prefixes.", show_default=False),
    ] = None,
    max_size: Annotated[
        str | None,
        typer.Option(
            "--max-size",
            metavar="SIZE",
            help="Stop before the store takes more than this, such as 20GB.",
            show_default=False,
        ),
    ] = None,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Delete the store first and start anew.", show_default=False),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Only say how many tokens and bytes, how long, and what is free.",
            show_default=False,
        ),
    ] = False,
    disk_bandwidth: BandwidthOption = None,
    disk_latency: LatencyOption = None,
    io: IoOption = IoMode.DIRECT,
    json_output: JsonOption = False,
) -> None:
    """Compute and store the KV of prefixes; run again to resume.

    Prefixes that are stored already are not computed again; an interrupted build goes on where it
    stopped.
    """
    ui = ui_of(ctx)
    max_bytes = None if max_size is None else parse_size(max_size, "--max-size")
    disk = DiskSettings.parse(disk_bandwidth, disk_latency, io)
    recipe, source = read_inputs(inputs, template.value, limit)
    info = None if fresh else existing_info(store)
    choices = choose(info, recipe, store, model, dtype, chunk_tokens, codec)
    probing = ProbeChoice(probe, sketch_bits, probe_heads)
    if info is not None:
        refuse_other_probes(probing, info, store)
    loaded = _load(ui, choices, device, threads)
    probes = new_probes(probing, recipe, loaded.shape) if info is None else None
    if dry_run:
        _plan(ui, store, probes, loaded, source, disk, max_bytes, json_output)
        return
    if fresh:
        delete_store(store)
    with _store_for(ui, store, probes, loaded, choices, disk) as opened:
        report = _build(ui, opened, loaded, source, max_bytes)
    if json_output:
        ui.json(_json("build-store", report, loaded, disk))
    else:
        _show(ui, report, store)


def _load(ui: Ui, choices: Choices, device: str, threads: int | None) -> LoadedModel:
    from impress_cli.session import loaded_model

    return loaded_model(ui, choices.model, dtype=choices.dtype, device=device, threads=threads)


def _store_for(
    ui: Ui,
    path: Path,
    probes: ProbeSettings | None,
    loaded: LoadedModel,
    choices: Choices,
    disk: DiskSettings,
) -> Any:
    """Open the store or, with ``probes`` for it, create it and say so."""
    from impress_cli.session import created_store, opened_store

    if probes is None:
        return opened_store(
            ui, path, identity=loaded.identity, disk=disk, device=str(loaded.device)
        )
    return created_store(
        ui,
        path,
        loaded,
        chunk_tokens=choices.chunk_tokens,
        codec=choices.codec,
        disk=disk,
        probes=probes,
    )


def _build(
    ui: Ui,
    opened: PrefixStore,
    loaded: LoadedModel,
    source: PrefixSource,
    max_bytes: int | None,
) -> dict[str, Any]:
    from pipelines.build import build_store

    with ui.progress() as progress:
        report = build_store(opened, loaded, source, max_size_bytes=max_bytes, progress=progress)
    names = ("prefixes", "prefixes_reused", "duplicates", "tokens", "computed_tokens")
    more = ("tokens_per_s", "bytes", "dropped", "failed")
    values = {name: getattr(report, name) for name in names + more}
    probe = probe_json(opened.probes())
    return {**values, "probe": probe, "warnings": list(report.warnings)}


def _plan(
    ui: Ui,
    store: Path,
    probes: ProbeSettings | None,
    loaded: LoadedModel,
    source: PrefixSource,
    disk: DiskSettings,
    max_bytes: int | None,
    as_json: bool,
) -> None:
    from contextlib import nullcontext

    from impress_cli.render import flat_table
    from impress_cli.session import opened_store
    from pipelines.build import plan_build

    opening = (
        opened_store(ui, store, identity=loaded.identity, disk=disk)
        if probes is None
        else nullcontext()
    )
    with opening as opened:
        setting = probes if opened is None else opened.probes()
        plan = plan_build(loaded, source, opened, path=store, probes=setting)
        used = opened.used_bytes() if opened is not None else 0
    if max_bytes is not None and used + plan.bytes > max_bytes:
        text = f"{used + plan.bytes} bytes would pass --max-size {max_bytes}: some are left out"
        plan.warnings.append(text)
    values = {
        "prefixes": plan.prefixes,
        "tokens": plan.tokens,
        "computed_tokens": plan.computed_tokens,
        "bytes": plan.bytes,
        "duration_s": plan.seconds,
        "free_bytes": plan.free_bytes,
    }
    if as_json:
        body = {"dry_run": True, **values, "warnings": list(plan.warnings)}
        ui.json(_json("build-store", body, loaded, disk))
        return
    ui.show(flat_table(values))
    for text in plan.warnings:
        ui.warn(text)


def _json(
    name: str, body: dict[str, Any], loaded: LoadedModel, disk: DiskSettings
) -> dict[str, Any]:
    from impress_cli.envelope import envelope

    more = {"model": loaded.spec, "synthetic": loaded.synthetic}
    return envelope(name, {**body, **more}, device=str(loaded.device), disk=disk)


def _show(ui: Ui, report: dict[str, Any], store: Path) -> None:
    from impress_cli.render import build_lines

    for text in report["warnings"]:
        ui.warn(text)
    for text in build_lines(report, str(store)):
        ui.line(text)
