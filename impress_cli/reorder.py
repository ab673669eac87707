"""``impress reorder``: change how stored nodes are laid out, without computing them again."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from impress_cli.options import DeviceOption, JsonOption, StoreOption, ThreadsOption
from impress_cli.probe_options import Probe, ProbeChoice, ProbeHeadsOption, SketchBitsOption
from impress_cli.reorder_job import ReorderJob, Request
from impress_cli.ui import ui_of
from impress_cli.units import parse_duration
from store.errors import InvalidValueError


class Order(StrEnum):
    """How the rows of a node are stored."""

    IMPORTANCE = "importance"
    ORIGINAL = "original"


def command(
    ctx: typer.Context,
    store: StoreOption,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            "--calibrate",
            metavar="QUERIES",
            help="JSON lines {prefix, prompt} to ask first, in place of what past questions found "
            "important; without prefix: asked of every stored prefix.",
            show_default=False,
        ),
    ] = None,
    order: Annotated[
        Order | None,
        typer.Option(
            "--order",
            help="importance (default): what past questions found important first, so that it "
            "lies in fewer chunks; original: back in token order.",
            show_default=False,
        ),
    ] = None,
    min_gain: Annotated[
        str | None,
        typer.Option(
            "--min-gain",
            metavar="SHARE",
            help="Leave a node alone unless its new order saves this share of the chunks that a "
            "question reads of it, such as 5%. Default: 5%.",
            show_default=False,
        ),
    ] = None,
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
    watch: Annotated[
        str | None,
        typer.Option(
            "--watch",
            metavar="TIME",
            help="Go on, once every so often, such as 10m, while no question is asked; Ctrl-C "
            "ends it.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Only say what would be done.", show_default=False),
    ] = False,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    json_output: JsonOption = False,
) -> None:
    """Store what matters together, and add or drop probe layouts; run again to resume.

    Reads and writes stored KV only: no prefix is computed again, and answers from all of it stay
    the same. Questions can be asked meanwhile.
    """
    ui, choice = ui_of(ctx), ProbeChoice(probe, sketch_bits, probe_heads)
    _refuse_pairs(calibrate, order, watch, dry_run, json_output)
    request = _request(calibrate, order, min_gain, watch, dry_run, choice)
    if order is Order.ORIGINAL and min_gain is not None:
        ui.note("--min-gain has no effect with --order original, which every node gets")
    ReorderJob(ui, store, request, choice).run(device, threads, as_json=json_output)


def _refuse_pairs(
    calibrate: Path | None, order: Order | None, watch: str | None, dry_run: bool, as_json: bool
) -> None:
    """Raise InvalidValueError for options that exclude each other."""
    others = {"--dry-run": dry_run, "--calibrate": calibrate is not None, "--json": as_json}
    for name, given in others.items():
        if watch is not None and given:
            raise InvalidValueError(
                f"--watch {watch} and {name} exclude each other: one goes on until it is stopped, "
                "the other is done once; leave one of them out"
            )
    if calibrate is not None and order is Order.ORIGINAL:
        raise InvalidValueError(
            f"--calibrate {calibrate} and --order original exclude each other: token order needs "
            "no questions; leave one of them out"
        )


def _request(
    calibrate: Path | None,
    order: Order | None,
    min_gain: str | None,
    watch: str | None,
    dry_run: bool,
    choice: ProbeChoice,
) -> Request:
    """Check the options about rows. Raises InvalidValueError, SourceError."""
    from pipelines.fidelity_texts import read_questions
    from pipelines.reorder_plan import MIN_GAIN, ReorderOptions

    least = MIN_GAIN if min_gain is None else _share(min_gain, "--min-gain")
    options = ReorderOptions((order or Order.IMPORTANCE).value, least)
    watch_s = None if watch is None else _period(watch, "--watch")
    questions = None if calibrate is None else read_questions(calibrate)
    said = (order, calibrate, min_gain, watch)
    explicit = any(one is not None for one in said) or not choice.given
    return Request(options, questions, watch_s, dry_run, explicit)


def _share(text: str, option: str) -> float:
    """A fraction from ``"5%"`` or ``"0.05"``, from 0 up to, not including, 1."""
    number = text.strip()
    try:
        value = float(number.removesuffix("%")) / (100.0 if number.endswith("%") else 1.0)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < 1.0:
        raise InvalidValueError(
            f"{option} {text!r} is out of range; give a share from 0 to below 100%, such as 5%"
        )
    return value


def _period(text: str, option: str) -> float:
    """Seconds, above 0, from ``"10m"``, where ``m`` stands for minutes, or ``"1h"``."""
    seconds = parse_duration(re.sub(r"(?<=\d)\s*m\s*$", "min", text), option)
    if not seconds > 0:
        raise InvalidValueError(f"{option} {text!r} is no time to wait; give some, such as 10m")
    return seconds
