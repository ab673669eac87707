"""``impress verify``: read every chunk and check it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    from store.disk.verify import BadChunk


def command(
    ctx: typer.Context,
    store: StoreOption,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair", help="Recompute what is damaged with the store's model.", show_default=False
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
    from pipelines.progress import ProgressEvent

    ui = ui_of(ctx)
    with opened_store(ui, store) as opened, ui.progress() as progress:
        report = opened.verify(
            lambda done, total: progress(ProgressEvent("verify", done, total, "nodes"))
        )
        released = opened.release({place.node for place in report.bad}) if repair else 0
    bad = [dict(zip(place._fields, place, strict=True)) for place in report.bad]
    body = {"nodes": report.nodes, "chunks": report.chunks, "bytes": report.bytes, "bad": bad}
    failed = bool(bad)
    if repair:
        body["released"] = released
    if repair and bad:
        mended = _mend(ui, store, report.bad, device, threads)
        body["repaired"] = mended.nodes
        body["not_repaired"] = [{"node": n, "reason": why} for n, why in mended.failed]
        failed = bool(mended.failed)
    if json_output:
        ui.json(envelope("verify", body))
    else:
        for text in verify_lines(body):
            ui.line(text)
    if failed:
        raise typer.Exit(1)


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
