"""Evaluate what leaving out KV costs on real tasks (`impress eval`).

Every document of a task is answered by all systems through the path of a query, and their answers
are compared with those that nothing was left out of. Owns the order of events; the parts are
`eval_*`'s. What was answered once is kept and not asked again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.eval_answers import Results
from pipelines.eval_fill import fill_stores, order_stores
from pipelines.eval_lanes import LaneMaker
from pipelines.eval_notes import notes_of, summed
from pipelines.eval_rows import (
    Answered,
    average_rows,
    control_notes,
    divergence_notes,
    primary_metric,
    task_rows,
)
from pipelines.eval_run import TaskRun
from pipelines.eval_stores import EvalStores, require_model
from pipelines.eval_tasks import EvalTask, load_tasks
from pipelines.eval_values import EvalOptions, EvalReport, TaskFacts
from pipelines.progress import Progress, silent
from pipelines.ttft_values import Layout

if TYPE_CHECKING:
    from pipelines.models import LoadedModel
    from pipelines.sources.fewshot import TaskRequests
    from store.disk.io import IOOptions
    from store.run_maker import MemoryOptions


def evaluate(
    store: Path,
    model: LoadedModel,
    options: EvalOptions,
    results: Path,
    progress: Progress = silent,
    *,
    io: IOOptions | None = None,
    memory: MemoryOptions | None = None,
    prepared: Mapping[str, TaskRequests] | None = None,
) -> EvalReport:
    """Answer the tasks in all ways and compare.

    Parameters
    ----------
    store
        Folder of the store; made where there is none. Systems of another layout get stores beside
        it.
    results
        Folder of the answers; those that are there already are taken over.
    memory
        What a store may keep in memory between documents; nothing by default, so that no answer's
        cost depends on what was asked before.
    prepared
        The tasks as `prepare_tasks` loaded them from ``options``; None to load them here.

    Raises
    ------
    ModelMismatchError
        The store is another model's.
    SourceError, PromptError
        A task is unknown, its data is missing or of another shape, or a document does not fit.
    InvalidValueError
        ``results`` can't be written, or a store of another layout is in the way.
    StoreError
        A store can't be read or written, or was reordered meanwhile; what was answered stays.
    """
    require_model(store, model)
    tasks = load_tasks(model, options, progress, prepared)
    kept = Results(results)
    layouts = [Layout.of(system) for system in options.made_systems if system.reuse]
    stores = EvalStores(store, model, layouts, [task.prefix.ids for task in tasks], kept)
    fill_stores(stores, tasks, progress)
    order = order_stores(stores, tasks, kept, progress)
    with ExitStack() as stack:
        lanes = LaneMaker(stack, stores, options, kept, io, memory)
        runs = [TaskRun(task, model, options, lanes, progress) for task in tasks]
        for run in runs:
            run.answer()
    found = [run.answered() for run in runs]
    rows = [row for one in found for row in task_rows(one)]
    facts = [
        _facts(task, one, order.questions.get(task.name, 0))
        for task, one in zip(tasks, found, strict=True)
    ]
    recompute = summed([run.recompute_facts() for run in runs])
    off = [run.controls_off for run in runs]
    notes = notes_of(options, facts, recompute, stores, memory, off)
    return EvalReport(
        rows=(*rows, *average_rows(rows)),
        tasks=tuple(facts),
        recompute=recompute,
        notes=(
            *notes,
            *divergence_notes(found),
            *(note for one in found for note in control_notes(one)),
        ),
        warnings=(
            *(text for task in tasks for text in task.warnings),
            *order.warnings,
            *(text for run in runs for text in run.warnings),
        ),
        documents={one.way: one.answers for answered in found for one in answered},
        events=tuple(stores.events),
    )


def _facts(task: EvalTask, found: Sequence[Answered], questions: int) -> TaskFacts:
    names = [metric.name for metric in found[0].metrics]
    first = primary_metric(names)
    return TaskFacts(
        name=task.name,
        split=task.split,
        n=task.count,
        documents=task.documents,
        shots=task.shots,
        prefix_tokens=len(task.prefix.ids),
        prefix_digest=task.prefix_digest,
        metrics=(first, *(name for name in names if name != first)),
        order_questions=questions,
    )
