"""Opening stores and loading models for commands, with notes and progress shown.

The only place in the commands that imports the engine and the model loader.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from impress_cli.options import DiskSettings, MemorySettings
from impress_cli.ui import Ui

if TYPE_CHECKING:
    from pipelines.models import LoadedModel
    from store.engine import PrefixStore
    from store.identity import ModelIdentity
    from store.probes import ProbeSettings

DEFAULT_MODEL = "smollm2-135m"


@contextmanager
def opened_store(
    ui: Ui,
    path: Path,
    *,
    identity: ModelIdentity | None = None,
    disk: DiskSettings | None = None,
    device: str = "cpu",
    memory: MemorySettings | None = None,
) -> Iterator[PrefixStore]:
    """Open the store at ``path``, say what it has to say once, and close it afterwards.

    Raises InvalidValueError for a memory budget that is of no use to the store.
    """
    from store.engine import PrefixStore

    options, chosen = (disk or DiskSettings()).io_options(), memory or MemorySettings()
    with PrefixStore.open(
        path, identity=identity, io=options, device=device, memory=chosen.options()
    ) as store:
        chosen.check(store)
        announce(ui, store)
        for text in chosen.notes():
            ui.note_once(text)
        yield store


def announce(ui: Ui, store: PrefixStore) -> None:
    """Show the store's notes (read-only, no direct I/O, …), once for a store opened again."""
    for text in store.notes:
        ui.note_once(text)


def stored_model(path: Path) -> tuple[str, str]:
    """Return how the store at ``path`` loads its model: the model's spec and its dtype."""
    from store.info import read_info

    info = read_info(path)
    return info.model_spec, info.dtype


def loaded_model(ui: Ui, spec: str, *, dtype: str, device: str, threads: int | None) -> LoadedModel:
    """Load a model with a progress bar; its warnings (random weights, …) go to stderr."""
    from pipelines.models import load_model

    with ui.progress() as progress:
        model = load_model(spec, dtype=dtype, device=device, threads=threads, progress=progress)
    for text in model.warnings:
        ui.warn(text)
    return model


@contextmanager
def created_store(
    ui: Ui,
    path: Path,
    model: LoadedModel,
    *,
    chunk_tokens: int,
    codec: str,
    disk: DiskSettings,
    probes: ProbeSettings | None = None,
) -> Iterator[PrefixStore]:
    """Create a store for ``model`` at ``path``, say so, and close it afterwards."""
    from store.engine import PrefixStore

    with PrefixStore.create(
        path,
        identity=model.identity,
        model_spec=model.spec,
        chunk_tokens=chunk_tokens,
        codec=codec,
        probes=probes,
        io=disk.io_options(),
        device=str(model.device),
    ) as store:
        ui.note(f"created a store at {path} for {model.spec} in {model.identity.dtype}")
        announce(ui, store)
        yield store
