"""What is to be said beside the figures of an evaluation: how they came about. Texts only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipelines.eval_stats import INTERVAL_NOTE
from pipelines.eval_values import (
    RECOMPUTE_TOLERANCE,
    EvalOptions,
    RecomputeFacts,
    TaskFacts,
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
        max_difference=max(known) if known else None,
        taken_over=sum(one.taken_over for one in facts),
    )


def notes_of(
    options: EvalOptions,
    tasks: Sequence[TaskFacts],
    recompute: RecomputeFacts,
    stores: EvalStores,
    memory: MemoryOptions | None,
) -> list[str]:
    """How to read the figures, one sentence each; the same whenever the run was stopped."""
    notes = [INTERVAL_NOTE, recompute_note(recompute), _memory_note(memory)]
    if options.with_controls:
        notes.append(
            "controls: random and static attend to all they load, as many chunks as impress loads "
            "on the task; no-prefix is asked without the shots"
        )
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
    return (
        f"recompute answered {facts.recomputed} documents, which its time is a mean of; on "
        f"{facts.compared} of them a full load's log-likelihoods differ by at most "
        f"{facts.max_difference:.1g}, so that its answers stand for the other {facts.taken_over}"
    )


def differs_warning(task: str, dtype: str, difference: float) -> str:
    """Why a task was recomputed whole although that was not asked for."""
    return (
        f"{task}: a full load's log-likelihoods differ from recompute's by up to {difference:.2g} "
        f"in {dtype} (allowed: {RECOMPUTE_TOLERANCE:g}), so that every document was recomputed"
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
