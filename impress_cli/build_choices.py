"""What `impress build-store` builds: its inputs, its model and layout, and a fresh start."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from impress_cli.options import Dtype
from impress_cli.probe_options import Probe, ProbeChoice, probe_of
from store.errors import InvalidValueError, NotAStoreError

if TYPE_CHECKING:
    from pipelines.prefixes import PrefixSource
    from pipelines.recipe import Recipe
    from store.info import StoreInfo
    from store.probes import ProbeSettings
    from store.types import KVShape

RECIPE_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class Choices:
    """What a new store is made of; None where nothing was said."""

    model: str
    dtype: str
    chunk_tokens: int
    codec: str


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


def new_probes(choice: ProbeChoice, recipe: Recipe | None, shape: KVShape) -> ProbeSettings:
    """Settle a new store's probe layouts: option, else the recipe's, else a sketch."""
    from store.probes import ProbeSettings

    usual = Probe(recipe.store.probe) if recipe else Probe.SKETCH
    return replace(choice, probe=choice.probe or usual).settings(shape, ProbeSettings())


def refuse_other_probes(choice: ProbeChoice, info: StoreInfo, store: Path) -> None:
    """Raise InvalidValueError where an option contradicts what the store at the path keeps."""
    if not choice.given:
        return
    current = _stored_probes(store)
    heads_are_chosen = current.heads is not None or current.calibrate is not None
    if choice.heads == "auto" and heads_are_chosen:
        choice = replace(choice, heads=None)
    if not choice.given or choice.settings(info.identity.shape, current) == current:
        return
    raise InvalidValueError(
        f"{choice.text()} differs from what the store at {store} keeps (--probe "
        f"{probe_of(current)}); leave it out, or change all nodes with 'impress reorder --store "
        f"{store} {choice.text()}'"
    )


def _stored_probes(store: Path) -> ProbeSettings:
    from store.index.catalog import Catalog
    from store.info import CATALOG
    from store.probes import META_KEY, ProbeSettings

    with Catalog.open(store / CATALOG, readonly=True) as catalog:
        return ProbeSettings.from_text(catalog.meta(META_KEY))


def delete_store(store: Path) -> None:
    """Delete a store, of any format version, but nothing that is not one."""
    from store.locks import WriterLock

    if not store.exists() or not any(store.iterdir()):
        return
    if not (store / "impress.json").is_file():
        raise NotAStoreError(
            f"{store} is not an impress store (no impress.json), so --fresh does not delete it; "
            "choose another --store"
        )
    lock = WriterLock(store)
    lock.acquire(0.0)
    try:
        shutil.rmtree(store)
    finally:
        lock.release()
