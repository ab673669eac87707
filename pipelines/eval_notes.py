"""What is to be said beside the figures of an evaluation: how they came about. Texts only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pipelines.eval_stats import INTERVAL_NOTE
from pipelines.eval_values import (
    RECOMPUTE_TOLERANCE,
    EvalOptions,
    RecomputeFacts,
    Scored,
    TaskFacts,
    Way,
)
from pipelines.ttft_values import Layout

if TYPE_CHECKING:
    from pipelines.eval_stores import EvalStores
    from store.run_maker import MemoryOptions


def summed(facts: Sequence[RecomputeFacts]) -> RecomputeFacts:
    """How recomputing answered, over all tasks."""
    known = [one.max_difference for one in facts if one.max_difference is not None]
    return RecomputeFacts(
        recomputed=sum(one.recomputed for one in facts),
        compared=sum(one.compared for one in facts),
        max_difference=float(np.max(known)) if known else None,  # keeps what is no number
        taken_over=sum(one.taken_over for one in facts),
    )


def notes_of(
    options: EvalOptions,
    tasks: Sequence[TaskFacts],
    recompute: RecomputeFacts,
    stores: EvalStores,
    memory: MemoryOptions | None,
    controls_off: Sequence[float | None] = (),
) -> list[str]:
    """How to read the figures, one sentence each; the same whenever the run was stopped.

    ``controls_off`` is `TaskRun.controls_off` of the tasks.
    """
    notes = [INTERVAL_NOTE, recompute_note(recompute), _memory_note(memory)]
    if options.with_controls:
        notes.append(_controls_note([off for off in controls_off if off is not None]))
    questions = {task.order_questions for task in tasks if task.order_questions}
    if questions:
        notes.append(
            f"rows were put in order by {_span(questions)} questions of each task's shots that are "
            "neither in its prefix nor evaluated"
        )
    return [*notes, *_store_notes(options, stores)]


def recompute_note(facts: RecomputeFacts) -> str:
    """Who answered for `RECOMPUTE`, and what its time is a mean of."""
    if not facts.taken_over:
        return f"recompute answered all {facts.recomputed} documents itself"
    assert facts.max_difference is not None
    if math.isnan(facts.max_difference):
        return (
            f"recompute answered {facts.recomputed} documents, which its time is a mean of; a full "
            f"load's answers, equal on a sample of their tasks, stand for the other "
            f"{facts.taken_over}"
        )
    return (
        f"recompute answered {facts.recomputed} documents, which its time is a mean of; on "
        f"{facts.compared} of them a full load's log-likelihoods differ by at most "
        f"{facts.max_difference:.1g}, so that its answers stand for the other {facts.taken_over}"
    )


def differs_warning(task: str, dtype: str, difference: float) -> str:
    """Why a task was recomputed whole although that was not asked for."""
    apart = "some are no numbers" if math.isnan(difference) else f"by up to {difference:.2g}"
    return (
        f"{task}: a full load's log-likelihoods differ from recompute's ({apart}) in {dtype} "
        f"(allowed: {RECOMPUTE_TOLERANCE:g}), so that every document was recomputed"
    )


def control_warning(way: Way, loaded: float, wanted: float) -> str:
    """A control that loads another share of chunks than the system it is compared with."""
    return (
        f"{_named(way)} loaded {loaded:.3f} of the chunks and impress {wanted:.3f}, as it could "
        "not be brought closer: the two do not compare at equal bytes"
    )


def mixed_warning(task: str, tokens: int, path: str) -> str:
    """A prefix that is part of a longer one whose rows were put in order as a whole."""
    return (
        f"{task}: {path} has the prefix of {tokens} tokens as part of a longer one that was stored "
        "before, with its rows in order, so that its chunks hold rows of both and what the systems "
        "load depends on the store's history; give another --store for figures without it"
    )


def reuse_warnings(
    way: Way, given: Sequence[Scored], tokens: int, shows_evidence: bool
) -> list[str]:
    """What kept answers from coming from a stored prefix of so many tokens as they should have.

    ``shows_evidence``: whether an answer that read no evidence had lost it.
    """
    found, short = [], [one for one in given if one.reused_tokens < tokens]
    if short:
        failed = sum(one.recovered_chunks > 0 for one in short)
        found.append(
            f"{_named(way)}: {len(short)} documents reused less than the prefix of {tokens} "
            f"tokens: {_shortfall(failed, len(short) - failed)}"
        )
    # Reading all keys for want of evidence loads half of everything.
    blind = sum(
        bool(one.reused_tokens) and not one.probe_ratio and one.loaded_ratio >= 0.5 for one in given
    )
    if blind and shows_evidence:
        found.append(
            f"{_named(way)}: {blind} documents were answered without the stored evidence (a sketch "
            "or probe keys), which was lost or damaged: all keys were read instead; 'impress "
            "verify --repair' makes it anew"
        )
    return found


def _shortfall(failed: int, other: int) -> str:
    """Why documents reused too little; what is known of those that met no failure is less."""
    reasons = []
    if failed:
        reasons.append(f"chunks of {failed} failed to load ('impress verify --repair' mends them)")
    if other:
        reasons.append(
            f"for {other} the store had no more of it to use (it was removed, or is known to be "
            "damaged, or the context did not begin with it)"
        )
    return " and ".join(reasons)


def number_warnings(way: Way, given: Sequence[Scored]) -> list[str]:
    """That log-likelihoods can't be compared, where some are no numbers."""
    count = sum(any(map(math.isnan, one.loglikelihoods)) for one in given)
    if not count:
        return []
    return [
        f"{_named(way)}: log-likelihoods of {count} documents are no numbers (NaN), so that their "
        "answers mean nothing; try --dtype float32"
    ]


def _named(way: Way) -> str:
    share = "" if way.retention is None else f" at retention {way.retention:g}"
    return f"{way.task}: {way.system}{share}"


def _controls_note(off: Sequence[float]) -> str:
    """What the controls are, by what was measured of them."""
    alone = "no-prefix is asked without the shots"
    if not off:
        return f"controls: {alone}"
    percent = max(1, math.ceil(100 * max(off)))
    return (
        "controls: random and static attend to all they load, as many chunks as impress loads on "
        f"the task to within {percent} %; {alone}"
    )


def _memory_note(memory: MemoryOptions | None) -> str:
    if memory is None:
        return "nothing stays in memory between documents: each reads all it needs from disk"
    host, device = memory.host_bytes / 1e6, memory.device_bytes / 1e6
    return (
        f"up to {host:.0f} MB in host memory and {device:.0f} MB on the device stay from document "
        "to document, so that times and bytes depend on what this run asked before"
    )


def _store_notes(options: EvalOptions, stores: EvalStores) -> list[str]:
    """Which systems answered from another store than the one named."""
    found = []
    for layout, path in stores.paths.items():
        names = [s.name for s in options.made_systems if s.reuse and Layout.of(s) == layout]
        if names and path != stores.base:
            found.append(f"{' and '.join(names)} answered from {path.name}, which has the layout")
    return found


def _span(counts: set[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"
