"""The command that gives an evaluation's result again, for the page that shows the result."""

from __future__ import annotations

import shlex
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from impress_cli.options import DiskSettings

if TYPE_CHECKING:
    from impress_cli.eval_outcome import Outcome, Subject
    from pipelines.eval_values import EvalOptions
    from pipelines.models import LoadedModel


def command_line(outcome: Outcome, subject: Subject, results: Path, model: LoadedModel) -> str:
    """Return the command, without what only says where its result goes.

    The model and its dtype are always named: what they default to differs from one machine, and
    from one store, to another. Numbers are not rounded.
    """
    given = [
        ("--store", outcome.store),
        ("--model", model.spec),
        ("--dtype", model.identity.dtype),
        *_asked(outcome.options),
        *_machine(subject),
        *_disk(outcome.disk),
        ("--results", None if _is_default(results, outcome.store) else results),
    ]
    words = [str(word) for pair in given if pair[1] is not None for word in pair]
    words += [] if outcome.options.controls else ["--no-controls"]
    words += ["--recompute", "all"] if outcome.options.recompute_all else []
    return shlex.join(["impress", "eval", *words])


def _asked(options: EvalOptions) -> list[tuple[str, Any]]:
    return [
        ("--tasks", ",".join(options.tasks)),
        *(("--retention", share) for share in options.retention),
        ("--systems", ",".join(options.systems)),
        ("--limit", options.limit),
        ("--num-fewshot", options.num_fewshot),
        ("--max-prefix-tokens", options.max_prefix_tokens),
        ("--data-dir", options.data_dir),
        ("--include-path", options.include_path),
        ("--seed", options.seed),
    ]


def _machine(subject: Subject) -> list[tuple[str, Any]]:
    return [
        ("--device", None if subject.device == "auto" else subject.device),
        ("--threads", subject.threads),
        ("--host-budget", subject.memory.host_bytes),
        ("--device-budget", subject.memory.device_bytes),
    ]


def _disk(disk: DiskSettings) -> list[tuple[str, Any]]:
    rate, latency = disk.bandwidth_bytes_s, disk.latency_s
    return [
        ("--io", None if disk.direct else "buffered"),
        ("--disk-bandwidth", None if rate is None else f"{rate:.0f}B/s"),
        # The option takes no exponent, which str() gives a short time.
        ("--disk-latency", f"{Decimal(str(latency)):f}s" if latency else None),
    ]


def _is_default(results: Path, store: Path) -> bool:
    from impress_cli.evaluate import default_results

    return results.absolute() == default_results(store)
