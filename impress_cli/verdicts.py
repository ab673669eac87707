"""What evaluations of a store found: a short verdict kept in it, looked up when a query is sparse.

Owns what a verdict holds, which one answers for a query, and the sentences about it;
`pipelines.evaluate` does the evaluation and `PrefixStore.add_verdict` keeps it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pipelines.eval_values import EvalReport, EvalRow
    from store.engine import PrefixStore
    from store.identity import ModelIdentity
    from store.itf.options import SparseOptions

#: An interval that reaches further into a loss than this says too little: 5 points, of a metric
#: that is no share this part of what recomputing scores.
_TELLING = 0.05
#: Figures of a row that a verdict takes over.
_FIGURES = (
    "system",
    "retention",
    "metric",
    "higher_is_better",
    "value",
    "n",
    "difference",
    "interval",
    "flips_worse",
    "flips_better",
    "mcnemar_p",
    "kl_mean",
    "loaded_ratio",
)
#: What decides an answer beside the system's name and the retention; a verdict without it was
#: written by an earlier version, maybe into a store that did not answer, and counts for none.
_DECIDES = ("chunk_tokens", "probe", "evidence", "attend", "order")
#: Kinds of findings, the worst first.
_LOSS, _UNCLEAR = 0, 1


def verdicts_of(
    report: EvalReport, base: SparseOptions, facts: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return a report's verdicts: one per sparse system, retention and headline.

    Where documents of a task did not reuse all of the prefix there is none, as its figures are
    not those of loading a part: `unkept` says so.

    Parameters
    ----------
    base
        What sparse systems took that is not their own.
    facts
        What holds for all of them: model, date, versions.
    """
    return [
        {**facts, **_decides(row, base), "tasks": _tasks_of(report, row), **_figures(row)}
        for row in _compared(report)
        if not _short(report, row)
    ]


def unkept(report: EvalReport) -> list[str]:
    """Return a sentence for each row that makes no verdict as its prefix was not reused."""
    return [
        f"no verdict is kept of {row.system} at retention {row.retention:g}: documents of "
        f"{', '.join(short)} reused less than the prefix"
        for row in _compared(report)
        if (short := _short(report, row))
    ]


def _compared(report: EvalReport) -> Iterator[EvalRow]:
    """Headline rows of systems that leave something out."""
    from pipelines.eval_report import headline_rows

    for row in headline_rows(report):
        if row.difference is not None and row.retention is not None and not row.control:
            yield row


def _short(report: EvalReport, row: EvalRow) -> list[str]:
    """Tasks of a row where a document reused less than the prefix."""
    from pipelines.eval_values import Way

    tokens = {task.name: task.prefix_tokens for task in report.tasks}
    return [
        name
        for name in _tasks_of(report, row)
        if any(
            one.reused_tokens < tokens[name]
            for one in report.documents.get(Way(name, row.system, row.retention), ())
        )
    ]


def _decides(row: EvalRow, base: SparseOptions) -> dict[str, Any]:
    """Layout and options that a row's system answered with, see `_DECIDES`."""
    from pipelines.systems import make_system

    system = make_system(row.system)
    assert row.retention is not None, "rows without one leave nothing out"
    sparse = system.options(row.retention, base)
    values = {**asdict(system), "evidence": sparse.evidence, "attend": sparse.attend}
    return {name: values[name] for name in _DECIDES}


def _tasks_of(report: EvalReport, row: EvalRow) -> list[str]:
    """Tasks that a row is about: of an average, those that have its metric."""
    names = [task.name for task in report.tasks if row.metric in task.metrics]
    return [row.task] if row.task in names else names


def _figures(row: EvalRow) -> dict[str, Any]:
    from impress_cli.eval_tables import json_value

    values = asdict(row)
    return {name: json_value(values[name]) for name in _FIGURES}


def keep_verdicts(path: Path, identity: ModelIdentity, verdicts: Iterable[dict[str, Any]]) -> None:
    """Add verdicts to a store, but for those that the newest of their kind says already.

    Older ones don't count: what was found, then found otherwise, and now found again is news.
    Raises StoreError.
    """
    from store.engine import PrefixStore

    with PrefixStore.open(path, identity=identity) as store:
        newest = {_kind(verdict): _undated(verdict) for verdict in store.verdicts()}
        for verdict in verdicts:
            if newest.get(_kind(verdict)) != _undated(verdict):
                store.add_verdict(verdict)


def _kind(verdict: Mapping[str, Any]) -> tuple[Any, ...]:
    """What two verdicts share of which the newer counts."""
    names = ("system", "retention", "evidence", "attend")
    return (*(verdict.get(name) for name in names), frozenset(verdict.get("tasks", ())))


def _undated(verdict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a verdict without its date: a command that is run again finds the same."""
    return {name: value for name, value in verdict.items() if name != "date"}


class Asked(NamedTuple):
    """How a query was answered, as far as a verdict can be about it.

    Parameters
    ----------
    system, sparse
        Who answered, with which options.
    used
        The evidence, also where the options say ``auto``.
    beside
        Whether an evaluation would answer from another store, as this one has another layout than
        the system is defined on.
    """

    system: str
    sparse: SparseOptions
    used: str
    beside: bool = False

    @classmethod
    def of(cls, name: str, sparse: SparseOptions, auto: str, store: PrefixStore) -> Asked:
        """Describe a query to a store; ``auto`` is the evidence that the option ``auto`` became."""
        from pipelines.systems import make_system

        system = make_system(name)
        lacks_probe = system.probe != "none" and system.probe not in store.probes().specs
        beside = lacks_probe or store.info.chunk_tokens != system.chunk_tokens
        return cls(name, sparse, auto if sparse.evidence == "auto" else sparse.evidence, beside)


def verdict_notes(verdicts: Iterable[Mapping[str, Any]], asked: Asked, store: Path) -> list[str]:
    """Return what should be said of the accuracy of a query, one sentence each.

    Of each set of tasks the newest verdict counts, and the worst of these is said: a loss beyond
    chance, else that too little was asked to tell.

    Parameters
    ----------
    verdicts
        Those of the store, oldest first.
    """
    if not asked.sparse.sparse:
        return []
    found = [verdict for verdict in verdicts if _is_about(verdict, asked)]
    if not found:
        return [_unmeasured(asked, store)]
    newest = {frozenset(verdict["tasks"]): verdict for verdict in found}
    findings = [finding for one in newest.values() if (finding := _finding(one)) is not None]
    return [min(findings).text] if findings else []


def _is_about(verdict: Mapping[str, Any], asked: Asked) -> bool:
    if any(verdict.get(name) is None for name in _DECIDES):
        return False
    known = verdict.get("retention")
    evidence = verdict["evidence"]
    if evidence == "auto":  # what it came to: the layout has one kind, or none
        evidence = "full" if verdict["probe"] == "none" else verdict["probe"]
    return (
        (verdict.get("system"), evidence, verdict["attend"])
        == (asked.system, asked.used, asked.sparse.attend)
        and isinstance(known, int | float)
        and math.isclose(known, asked.sparse.retention, abs_tol=1e-9)
    )


def _unmeasured(asked: Asked, store: Path) -> str:
    """Say that there is no verdict, and what makes one."""
    from pipelines.systems import make_system

    system, sparse = make_system(asked.system), asked.sparse
    share = f"{sparse.retention:g}"
    own = sparse.evidence == system.evidence or (system.evidence, asked.used) == (
        "auto",
        system.probe,
    )
    if not own or sparse.attend != system.attend:
        return (
            f"what retention {share} costs in accuracy with evidence {sparse.evidence} and attend "
            f"{sparse.attend} was never measured on this store; 'impress eval' measures systems as "
            f"they are defined, {system.name} with evidence {system.evidence} and attend "
            f"{system.attend}"
        )
    systems = "" if system.name == "impress" else f" --systems recompute,{system.name}"
    where = f", on a store beside it that has the layout of {system.name}" if asked.beside else ""
    return (
        f"what retention {share} costs in accuracy was never measured on this store; 'impress eval "
        f"--store {store} --retention {share} --tasks NAMES{systems}' measures it{where}"
    )


class _Finding(NamedTuple):
    """What a verdict says; the smallest of several is the worst."""

    kind: int
    #: Negative for what was lost, as a share of 1 or of what recomputing scores.
    gained: float
    text: str


def _finding(verdict: Mapping[str, Any]) -> _Finding | None:
    """What was lost, where chance is no explanation, or that too little was asked to tell."""
    low, high = verdict.get("interval") or (None, None)
    from pipelines.eval_report import is_share

    change, share = verdict["difference"], is_share(verdict["metric"])
    up = 1 if verdict["higher_is_better"] else -1
    scale = 1.0 if share else abs(verdict["value"] - change) or 1.0
    asked = f"{', '.join(verdict['tasks'])} ({verdict['n']} documents)"
    span = "its 95 % interval is not known"
    if low is not None and high is not None:
        span = f"95 %: {_signed(low, share)} to {_signed(high, share)}"
        if max(up * low, up * high) < 0:
            verb = "cost" if up > 0 else "add"
            text = (
                f"retention {verdict['retention']:g} was measured to {verb} "
                f"{_amount(abs(change), share)} {verdict['metric']} on {asked}; {span}"
            )
            return _Finding(_LOSS, up * change / scale, text)
        if min(up * low, up * high) >= -_TELLING * scale:
            return None
    text = (
        f"what retention {verdict['retention']:g} costs was measured on too little to tell: "
        f"{verdict['metric']} on {asked} changed by {_signed(change, share)}"
        f"{' points' if share else ''}; {span}"
    )
    return _Finding(_UNCLEAR, up * change / scale, text)


def _amount(change: float, share: bool) -> str:
    return f"{100 * change:.1f} points of" if share else f"{change:.3g} of"


def _signed(change: float, share: bool) -> str:
    return f"{100 * change:+.1f}" if share else f"{change:+.3g}"
