"""lm-eval's metrics of answers: its filters, its results of a document, its aggregation.

Nothing here computes a metric; what a task counts as right is the task's to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipelines.eval_values import Scored


class MetricValues(NamedTuple):
    """A metric of a task: lm-eval's aggregate and standard error, and values by document.

    ``stderr`` is None where lm-eval would have to draw samples. ``values`` is empty where the
    aggregate is no mean of the documents' values, as of F1 and of perplexity, whose documents count
    in another unit and direction: nothing can be compared document by document then.
    """

    name: str
    value: float
    stderr: float | None
    values: dict[int, float]
    higher_is_better: bool


def metrics_of(
    task: Any, docs: Mapping[int, dict[str, Any]], answers: Sequence[Scored]
) -> list[MetricValues]:
    """Metrics of some documents' answers.

    Parameters
    ----------
    task
        lm-eval's task.
    docs
        The answered documents, and maybe others, by number.
    """
    asked = {answer.document: _instances(task, docs[answer.document], answer) for answer in answers}
    task._instances = [one for instances in asked.values() for one in instances]
    task.apply_filters()
    filters = list(task._instances[0].filtered_resps)
    return [
        _aggregated(task, metric, metric if len(filters) == 1 else f"{metric},{name}", values)
        for name in filters
        for metric, values in _results(task, name, docs, asked)
    ]


def _instances(task: Any, doc: dict[str, Any], answer: Scored) -> list[Any]:
    """The document's requests as lm-eval has them once they are answered."""
    from lm_eval.api.instance import Instance

    return [
        Instance(
            request_type="loglikelihood" if answer.text is None else "generate_until",
            doc=doc,
            arguments=("", ""),
            idx=index,
            metadata=(task.task_name, answer.document, 1),
            resps=[response],
        )
        for index, response in enumerate(_responses(answer))
    ]


def _responses(answer: Scored) -> list[Any]:
    if answer.text is not None:
        return [answer.text]
    return list(zip(answer.loglikelihoods, answer.greedy, strict=True))


def _results(
    task: Any, name: str, docs: Mapping[int, dict[str, Any]], asked: Mapping[int, list[Any]]
) -> Iterator[tuple[str, dict[int, Any]]]:
    """By metric: what each document counts for, after the filter of that name."""
    found: dict[str, dict[int, Any]] = {}
    for number, instances in asked.items():
        filtered = [one.filtered_resps[name] for one in instances]
        for metric, value in task.process_results(docs[number], filtered).items():
            found.setdefault(metric, {})[number] = value
    yield from found.items()


def _aggregated(task: Any, metric: str, name: str, values: dict[int, Any]) -> MetricValues:
    from lm_eval.api.metrics import mean, stderr_for_metric

    items = list(values.values())
    aggregate = task.aggregation().get(metric, mean)
    # Other aggregates' errors are drawn by lm-eval in processes of its own, which takes long.
    of_documents = aggregate is mean
    known = values.items() if of_documents else ()
    return MetricValues(
        name,
        float(aggregate(items)),
        float(stderr_for_metric(mean, 1)(items)) if of_documents and len(items) > 1 else None,
        {number: float(value) for number, value in known if _is_number(value)},
        bool(task.higher_is_better().get(metric, True)),
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number | np.bool_)
