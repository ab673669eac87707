"""``impress query``: one question, a file of questions, or an interactive prompt."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from impress_cli.options import (
    BandwidthOption,
    DeviceBudgetOption,
    DeviceOption,
    DiskSettings,
    DtypeOption,
    HostBudgetOption,
    IoMode,
    IoOption,
    JsonOption,
    LatencyOption,
    MemorySettings,
    ModelOption,
    PolicyOption,
    StoreOption,
    Template,
    TemplateOption,
    ThreadsOption,
)
from impress_cli.retention import (
    AlphaOption,
    AttendOption,
    Choice,
    EvidenceOption,
    FallbackOption,
    RetentionOption,
    RowsOption,
    SetsOption,
    ThresholdOption,
)
from impress_cli.ui import ui_of
from impress_cli.units import parse_retention
from store.errors import InvalidValueError, PromptError


class Plan(StrEnum):
    """Whether stored KV is used."""

    AUTO = "auto"
    FORCE_LOAD = "force-load"
    FORCE_RECOMPUTE = "force-recompute"


class Insert(StrEnum):
    """Whether a prefix that the store lacks is stored after the answer."""

    EXACT = "exact"
    NEVER = "never"


def command(
    ctx: typer.Context,
    store: StoreOption,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="[PROMPT]", help="The question. Without: an interactive prompt."),
    ] = None,
    prefix: Annotated[
        str | None,
        typer.Option(
            "--prefix",
            metavar="ID|FILE",
            help="Text file, or id, unique beginning of an id, or name of a stored prefix.",
            show_default=False,
        ),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            "--prompts",
            metavar="FILE|-",
            help='JSON lines {"prefix": …, "prompt": …}; answers are JSON lines on stdout.',
            show_default=False,
        ),
    ] = None,
    retention: RetentionOption = None,
    evidence: EvidenceOption = None,
    attend: AttendOption = None,
    sets: SetsOption = None,
    rows: RowsOption = None,
    alpha: AlphaOption = None,
    threshold: ThresholdOption = None,
    fallback: FallbackOption = None,
    plan: Annotated[
        Plan, typer.Option("--plan", help="auto: load whatever of the prefix is stored.")
    ] = Plan.AUTO,
    insert: Annotated[
        Insert,
        typer.Option(
            "--insert",
            help="exact: store the part of the prefix the store lacks, after the answer.",
        ),
    ] = Insert.EXACT,
    template: TemplateOption = Template.AUTO,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=1, help="Longest answer, in tokens.")
    ] = 64,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Also show what matched and where it ended and, below retention 1.0, what each "
            "layer chose and read.",
            show_default=False,
        ),
    ] = False,
    model: ModelOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    system: Annotated[
        str | None,
        typer.Option(
            "--system",
            metavar="NAME",
            help="Answer as one of the systems that are compared would: recompute, as-like, "
            "as-h2o-lru, as-h2o-lfu, impress-paper or impress (default), and toggles such as "
            "as-h2o-lfu+itf. It sets what --evidence, --attend and --policy leave open.",
            show_default=False,
        ),
    ] = None,
    warm: Annotated[
        int,
        typer.Option(
            "--warm",
            metavar="N",
            min=0,
            help="Before the first question, load KV into memory: of the N prefixes that most "
            "questions with a retention below 1 were about.",
        ),
    ] = 0,
    device_budget: DeviceBudgetOption = None,
    host_budget: HostBudgetOption = None,
    policy: PolicyOption = None,
    disk_bandwidth: BandwidthOption = None,
    disk_latency: LatencyOption = None,
    io: IoOption = IoMode.DIRECT,
    json_output: JsonOption = False,
) -> None:
    """Answer questions about a long prefix from stored KV.

    One PROMPT, a file of --prompts, or, with neither, an interactive prompt.
    """
    from impress_cli.asking import Settings, opened_asker

    choice = Choice(
        retention=None if retention is None else parse_retention(retention, "--retention"),
        evidence=evidence,
        attend=attend,
        sets=sets,
        rows=rows,
        alpha=alpha,
        threshold=threshold,
        fallback=fallback,
    )
    memory = MemorySettings.parse(device_budget, host_budget, policy)
    disk = DiskSettings.parse(disk_bandwidth, disk_latency, io)
    _check_mode(prompt, prompts)
    settings = Settings(
        prefix=prefix,
        template=template.value,
        choice=choice,
        plan=plan.value,
        insert=insert.value,
        system=system or "impress",
        max_new_tokens=max_new_tokens,
        explain=explain,
    )
    settings.chosen(), settings.way()  # what contradicts the system is said at once
    with opened_asker(
        ui_of(ctx),
        store,
        settings,
        disk=disk,
        model=model,
        dtype=dtype,
        device=device,
        threads=threads,
        memory=memory.of_system(settings.system),
        warm=warm if settings.way() != "force-recompute" else 0,
    ) as asker:
        if prompts is not None:
            from impress_cli.batch import run_batch

            code = run_batch(asker, prompts)
        elif prompt is not None:
            code = asker.one_shot(prompt, as_json=json_output)
        else:
            from impress_cli.interactive import run_interactive

            code = run_interactive(asker, as_json=json_output)
    if code:
        raise typer.Exit(code)


def _check_mode(prompt: str | None, prompts: str | None) -> None:
    """Refuse what can be refused before a model is loaded."""
    if prompt is not None and prompts is not None:
        raise InvalidValueError("give either a PROMPT or --prompts FILE, not both")
    if prompt is not None and not prompt.strip():
        raise PromptError("the prompt is empty; type a question, or leave it out to be asked")
