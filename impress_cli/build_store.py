"""``impress build-store``: compute the KV of prefixes once and store it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from impress_cli.options import (
    BandwidthOption,
    DeviceOption,
    DiskSettings,
    Dtype,
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
from impress_cli.ui import Ui, ui_of
from impress_cli.units import parse_size
from store.errors import InvalidValueError, NotAStoreError

if TYPE_CHECKING:
    from pipelines.models import LoadedModel
    from pipelines.prefixes import PrefixSource
    from pipelines.recipe import Recipe
    from store.engine import PrefixStore
    from store.info import StoreInfo

RECIPE_SUFFIXES = (".yaml", ".yml")


class Probe(StrEnum):
    """Probe layouts that can be built."""

    NONE = "none"
    HEADS = "heads"
    SKETCH = "sketch"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class Choices:
    """What a new store is made of; None where nothing was said."""

    model: str
    dtype: str
    chunk_tokens: int
    codec: str


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
        Probe, typer.Option("--probe", help="Probe layout to store. Only none for now.")
    ] = Probe.NONE,
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
    if probe is not Probe.NONE:
        raise InvalidValueError(
            f"--probe {probe.value} is not available yet: probe layouts come with importance; "
            "leave it at none"
        )
    max_bytes = None if max_size is None else parse_size(max_size, "--max-size")
    disk = DiskSettings.parse(disk_bandwidth, disk_latency, io)
    recipe, source = read_inputs(inputs, template.value, limit)
    if recipe is not None and recipe.store.probe != "none":
        ui.note(f"recipe {recipe.name}: probe layouts come with importance; built without")
    info = None if fresh else existing_info(store)
    choices = choose(info, recipe, store, model, dtype, chunk_tokens, codec)
    loaded = _load(ui, choices, device, threads)
    if dry_run:
        _plan(ui, store if info else None, loaded, source, disk, json_output)
        return
    if fresh:
        delete_store(store)
    with _store_for(ui, store, info, loaded, choices, disk) as opened:
        report = _build(ui, opened, loaded, source, max_bytes)
    if json_output:
        ui.json(_json("build-store", report, loaded, disk))
    else:
        _show(ui, report, store)


def read_inputs(
    inputs: list[str], template: str, limit: int | None
) -> tuple[Recipe | None, PrefixSource]:
    """Return the recipe, if one was named, and the prefixes to store. Raises ImpressError."""
    from pipelines.prefixes import source_from_files, source_from_recipe
    from pipelines.recipe import load_recipe, recipe_path

    if not is_recipe(inputs[0]):
        source = source_from_files([Path(text) for text in inputs], template=template)
        source.limit = limit
        return None, source
    if template != "auto":
        raise InvalidValueError(
            f"--template {template} has no effect on a recipe; write 'template: {template}' "
            "under its prefixes"
        )
    recipe = load_recipe(inputs[0])
    files = [Path(text) for text in inputs[1:]]
    source = source_from_recipe(recipe, recipe_path(inputs[0]).parent, files)
    source.limit = limit if source.limit is None or limit is None else min(limit, source.limit)
    return recipe, source


def is_recipe(text: str) -> bool:
    """Whether an input names a recipe: a .yaml file, or a bare name that is no file."""
    path = Path(text)
    if path.suffix in RECIPE_SUFFIXES:
        return True
    return not path.suffix and path.name == text and not path.exists()


def existing_info(store: Path) -> StoreInfo | None:
    """Facts of the store at the path; None where nothing is there yet."""
    from store.info import read_info

    if not store.exists() or (store.is_dir() and not any(store.iterdir())):
        return None
    return read_info(store)


def choose(
    info: StoreInfo | None,
    recipe: Recipe | None,
    store: Path,
    model: str | None,
    dtype: Dtype | None,
    chunk_tokens: int | None,
    codec: str | None,
) -> Choices:
    """Settle model and layout: option, else the store's own, else the recipe's, else default.

    Raises InvalidValueError where an option contradicts the store that is already there.
    """
    from impress_cli.session import DEFAULT_MODEL

    given = {"chunk_tokens": chunk_tokens, "codec": codec}
    if info is not None:
        _refuse_change(info, store, given)
        return Choices(
            model or info.model_spec,
            info.dtype if dtype is None else dtype.value,
            info.chunk_tokens,
            info.codec,
        )
    layout = recipe.store if recipe else None
    return Choices(
        model or (recipe.model if recipe else None) or DEFAULT_MODEL,
        "auto" if dtype is None else dtype.value,
        chunk_tokens or (layout.chunk_tokens if layout else 16),
        codec or (layout.codec if layout else "none"),
    )


def _refuse_change(info: StoreInfo, store: Path, given: dict[str, Any]) -> None:
    for name, value in given.items():
        stored = getattr(info, name)
        if value is not None and value != stored:
            option = "--" + name.replace("_", "-")
            raise InvalidValueError(
                f"{option} {value} differs from the {stored} that the store at {store} was "
                "built with; leave it out, build another --store, or start anew with --fresh"
            )


def delete_store(store: Path) -> None:
    """Delete a store, of any format version, but nothing that is not one."""
    if not store.exists() or not any(store.iterdir()):
        return
    if not (store / "impress.json").is_file():
        raise NotAStoreError(
            f"{store} is not an impress store (no impress.json), so --fresh does not delete it; "
            "choose another --store"
        )
    shutil.rmtree(store)


def _load(ui: Ui, choices: Choices, device: str, threads: int | None) -> LoadedModel:
    from impress_cli.session import loaded_model

    return loaded_model(ui, choices.model, dtype=choices.dtype, device=device, threads=threads)


def _store_for(
    ui: Ui,
    path: Path,
    info: StoreInfo | None,
    loaded: LoadedModel,
    choices: Choices,
    disk: DiskSettings,
) -> Any:
    """Open the store, or create it and say so."""
    from impress_cli.session import created_store, opened_store

    if info is not None:
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
    more = ("tokens_per_s", "bytes", "dropped")
    values = {name: getattr(report, name) for name in names + more}
    return {**values, "warnings": list(report.warnings)}


def _plan(
    ui: Ui,
    path: Path | None,
    loaded: LoadedModel,
    source: PrefixSource,
    disk: DiskSettings,
    as_json: bool,
) -> None:
    from contextlib import nullcontext

    from pipelines.build import plan_build

    from impress_cli.render import flat_table
    from impress_cli.session import opened_store

    opening = opened_store(ui, path, identity=loaded.identity, disk=disk) if path else nullcontext()
    with opening as opened:
        plan = plan_build(loaded, source, opened)
    values = {
        "prefixes": plan.prefixes,
        "tokens": plan.tokens,
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
