"""``impress eval``: what leaving out part of the KV costs in accuracy, on real tasks.

Owns the options. What happens to a result is `eval_outcome`'s, the evaluation is
`pipelines.evaluate`'s.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from impress_cli.bench_inputs import PlotOption, shares, words
from impress_cli.options import (
    BandwidthOption,
    DeviceBudgetOption,
    DeviceOption,
    DiskSettings,
    DtypeOption,
    IoMode,
    IoOption,
    JsonOption,
    LatencyOption,
    MemorySettings,
    ModelOption,
    StoreOption,
    ThreadsOption,
)
from impress_cli.ui import ui_of


class Recompute(StrEnum):
    """Which documents are recomputed."""

    SAMPLE = "sample"
    ALL = "all"


def command(
    ctx: typer.Context,
    store: StoreOption,
    tasks: Annotated[
        str,
        typer.Option(
            "--tasks", metavar="NAME,…", help="Tasks or groups of lm-eval, such as rte,copa."
        ),
    ],
    model: ModelOption = None,
    retention: Annotated[
        list[str] | None,
        typer.Option(
            "--retention",
            metavar="R,…",
            help="Shares of the prefix to select; may be given several times. Default: 0.25.",
            show_default=False,
        ),
    ] = None,
    systems: Annotated[
        str,
        typer.Option(
            "--systems",
            metavar="NAME,…",
            help="Who answers, as in `impress bench ttft`. Each is compared with recompute, which "
            "is always there.",
        ),
    ] = "recompute,impress",
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", metavar="N", help="Only the first N documents of a task.", show_default=False
        ),
    ] = None,
    num_fewshot: Annotated[
        int | None,
        typer.Option(
            "--num-fewshot",
            metavar="N",
            help="Shots in the prefix. Default: as many whole ones as fit.",
            show_default=False,
        ),
    ] = None,
    max_prefix_tokens: Annotated[
        int, typer.Option("--max-prefix-tokens", metavar="N", help="Most tokens of a prefix.")
    ] = 4096,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            "--data-dir",
            metavar="DIR",
            help="Folder with <task>/<split>.jsonl. Default: the tasks' own data, from the hub.",
            show_default=False,
        ),
    ] = None,
    include_path: Annotated[
        Path | None,
        typer.Option(
            "--include-path",
            metavar="DIR",
            help="Folder with task files of your own, as lm-eval has them.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", help="Of the control that chooses at random.")
    ] = 1,
    results: Annotated[
        Path | None,
        typer.Option(
            "--results",
            metavar="DIR",
            help="Where answers are kept as they come; the same command goes on from there. "
            "Default: the store's folder with .eval behind its name.",
            show_default=False,
        ),
    ] = None,
    controls: Annotated[
        bool,
        typer.Option(
            "--controls/--no-controls",
            help="Beside impress also answer from tokens chosen at random, from those that "
            "mattered to other questions, as many bytes each, and without the prefix: where they "
            "are no worse, a task shows nothing.",
        ),
    ] = True,
    recompute: Annotated[
        Recompute,
        typer.Option(
            "--recompute",
            help="all: compute every document's prefix anew, which takes long; sample: until 20 "
            "were shown to be answered the same by a full load, which then answers for it.",
        ),
    ] = Recompute.SAMPLE,
    markdown: Annotated[
        Path | None,
        typer.Option(
            "--markdown",
            metavar="FILE",
            help="Also write the result into this Markdown file.",
            show_default=False,
        ),
    ] = None,
    plot: PlotOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    device_budget: DeviceBudgetOption = None,
    host_budget: Annotated[
        str | None,
        typer.Option(
            "--host-budget",
            metavar="SIZE",
            help="Most host memory for sketches and KV between documents. Default: 0, so that "
            "every document reads from disk.",
            show_default=False,
        ),
    ] = None,
    disk_bandwidth: BandwidthOption = None,
    disk_latency: LatencyOption = None,
    io: IoOption = IoMode.DIRECT,
    json_output: JsonOption = False,
) -> None:
    """Measure what it costs in accuracy to load part of a prefix, on tasks of lm-eval.

    Every document of a task is answered behind the same shots, by each system and through the same
    path as `impress query`; its scores are lm-eval's. Run again to resume: what was answered is not
    asked again. The store is made where there is none, and keeps a verdict.
    """
    from impress_cli.eval_outcome import Outcome, Subject, require_folders
    from pipelines.eval_check import check_tasks

    asked = words(tasks, "--tasks")
    require_folders(data_dir, include_path)
    check_tasks(asked, data_dir=data_dir, include_path=include_path)
    # Imports torch, which takes long, so that it comes behind what can be told without.
    from pipelines.eval_values import EvalOptions

    options = EvalOptions(
        tasks=asked,
        systems=words(systems, "--systems"),
        retention=_retentions(retention),
        limit=limit,
        num_fewshot=num_fewshot,
        max_prefix_tokens=max_prefix_tokens,
        data_dir=data_dir,
        include_path=include_path,
        seed=seed,
        controls=controls,
        recompute_all=recompute is Recompute.ALL,
    )
    ui = ui_of(ctx)
    disk = DiskSettings.parse(disk_bandwidth, disk_latency, io)
    memory = MemorySettings.parse(device_budget, host_budget, None)
    outcome = Outcome(ui, store, options, disk, markdown, plot)
    outcome.check()
    subject = Subject(model, None if dtype is None else dtype.value, device, threads, memory)
    info = subject.check(ui, store)
    prepared = outcome.prepare()
    loaded = subject.load(ui, store, info)
    report = subject.evaluate(outcome, loaded, results or default_results(store), prepared)
    outcome.publish(report, loaded, as_json=json_output)


def _retentions(given: list[str] | None) -> tuple[float, ...]:
    """Shares from an option that may be repeated, each with commas. Raises InvalidValueError."""
    from pipelines.eval_values import DEFAULT_RETENTION

    if not given:
        return DEFAULT_RETENTION
    return tuple(dict.fromkeys(share for text in given for share in shares(text, "--retention")))


def default_results(store: Path) -> Path:
    """Where answers are kept unless told: beside the store, which holds nothing but itself."""
    place = store.absolute()
    return place.with_name(f"{place.name}.eval")
