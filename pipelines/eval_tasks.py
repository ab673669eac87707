"""Tasks to evaluate: documents and requests of lm-eval tasks behind one fixed few-shot prefix.

Owns which shots go before every document, what lm-eval then asks, and lm-eval's metrics of the
answers. Prefixes are `sources.fewshot`'s, loading of tasks `sources.lmtasks`'. It runs no model.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pipelines.eval_metrics import MetricValues, metrics_of
from pipelines.eval_score import SHORTER
from pipelines.eval_values import EvalOptions, Scored
from pipelines.progress import Progress, ProgressEvent
from pipelines.sources.base import PrefixItem
from pipelines.sources.fewshot import (
    FewshotSource,
    TaskRequests,
    context_texts,
    fewshot_pool,
    same_shots,
    shared_end,
    shot_order,
)
from pipelines.sources.lmtasks import load_task, task_errors, task_names
from pipelines.text import encode_text
from store.errors import PromptError, SourceError
from store.index.ids import ids_digest

if TYPE_CHECKING:
    from pipelines.models import LoadedModel

#: Questions that decide the order of a prefix's rows.
ORDER_QUESTIONS = 12
_TYPES = ("multiple_choice", "loglikelihood", "generate_until")
#: Documents that are looked at to find whether all fit.
_LONGEST = 4
#: Room that encodings of a question may take more behind the shots than by itself.
_SEAM_TOKENS = 4


class EvalTask:
    """One task with its prefix.

    Attributes
    ----------
    name, split
        As lm-eval has them; the split is that of the documents.
    prefix
        What all requests begin with.
    count, documents
        Documents to answer, of so many in the split.
    warnings
        What is not as asked for.
    """

    def __init__(
        self,
        name: str,
        model: LoadedModel,
        options: EvalOptions,
        requests: TaskRequests | None = None,
    ) -> None:
        requests = requests or _prepared(name, options)
        self.name, self._model, self._data_dir = name, model, options.data_dir
        source = FewshotSource(
            name,
            shots=options.num_fewshot,
            max_tokens=options.max_prefix_tokens,
            data_dir=options.data_dir,
            include_path=options.include_path,
            requests=requests,
        )
        self._task = requests.task
        with self._errors():
            self._docs = list(self._task.eval_docs)
            self._pool = list(fewshot_pool(self._task))
        self.documents = len(self._docs)
        self.count = min(self.documents, options.limit or self.documents)
        self.prefix = self._fitting(source, filled=options.num_fewshot is None)
        self.warnings = list(source.warnings)
        with self._errors():
            self._head, self._cut = self._seam()
        config = self._task.config
        self.split = str(
            config.test_split if self._task.has_test_docs() else config.validation_split
        )
        self._check_shots()

    @property
    def shots(self) -> int:
        """Whole shots in the prefix."""
        return int(self.prefix.source["shots"])

    @property
    def prefix_digest(self) -> str:
        """Digest of the prefix's token ids."""
        return ids_digest(self.prefix.ids)

    def _errors(self) -> Any:
        return task_errors(self.name, self._data_dir)

    def _seam(self) -> tuple[str, int]:
        """Text of the shots, and where in a document's own text what follows them begins.

        The source of the prefix has seen to it that they are the same for all documents.
        """
        chosen = [self._pool[i] for i in shot_order(len(self._pool), 0, 0)[: self.shots]]
        self._task.sampler = same_shots(chosen)
        whole = context_texts(self._task, self._docs[0], len(chosen))[0]
        bare = context_texts(self._task, self._docs[0], 0)[0]
        shared = shared_end(whole, bare)
        return whole[: len(whole) - shared], len(bare) - shared

    def requests(self, number: int, *, alone: bool = False) -> list[Any]:
        """lm-eval's requests (`Instance`) of a document, behind the shots or ``alone``."""
        with self._errors():
            return self._instances(number, alone=alone)

    def _instances(self, number: int, *, alone: bool) -> list[Any]:
        doc = self._docs[number]
        contexts = context_texts(self._task, doc, 0)
        if not alone:
            contexts = [self._head + text[self._cut :] for text in contexts]
        made = self._task.construct_requests(
            doc=doc,
            ctx=contexts[0] if len(contexts) == 1 else contexts,
            metadata=(self.name, number, 1),
        )
        return made if isinstance(made, list) else [made]

    def order_questions(self) -> list[np.ndarray]:
        """Questions that are asked to order the prefix's rows: whole token ids, uint32 each.

        They are the first documents of the pool behind the shots; none of them is evaluated,
        whatever the limit.
        """
        with self._errors():
            evaluated = {_text_of(doc) for doc in self._docs}
            others = (doc for doc in self._pool[self.shots :] if _text_of(doc) not in evaluated)
            texts = [
                self._head + context_texts(self._task, doc, 0)[0][self._cut :]
                for doc, _ in zip(others, range(ORDER_QUESTIONS), strict=False)
            ]
        whole = [encode_text(self._model.tokenizer, text, special=True) for text in texts]
        return [
            ids for ids in whole if len(self.prefix.ids) < len(ids) <= self._model.max_positions
        ]

    def _fitting(self, source: FewshotSource, *, filled: bool) -> PrefixItem:
        """The prefix, behind which the longest document fits with its answer.

        A prefix that is filled is made shorter for that, one of so many shots is not. Raises
        `PromptError` where it does not fit.
        """
        tokens, answer = self._longest()
        limit = self._model.max_positions
        room = limit - tokens - answer - _SEAM_TOKENS
        [prefix] = source.items(self._model.tokenizer, self._model.prefix_limit)
        if filled and len(prefix.ids) > room > 0:
            # Only now: what was answered behind a prefix that fits is kept for that very prefix.
            with contextlib.suppress(SourceError):  # not even one shot fits
                [prefix] = source.items(self._model.tokenizer, room)
        if len(prefix.ids) > room:
            written = f" and an answer of up to {answer}" if answer else ""
            remedy = SHORTER if room > 0 else "use a model with more positions, or another task"
            raise PromptError(
                f"task {self.name!r} has a document of {tokens} tokens{written}, which does not "
                f"fit behind a prefix of {len(prefix.ids)}: the model has {limit} positions; "
                f"{remedy}"
            )
        return prefix

    def _longest(self) -> tuple[int, int]:
        """Tokens of the longest document alone, and of the longest answer that is written to it."""
        from pipelines.lm import answer_tokens

        with self._errors():
            # Writing requests takes long; the longest document has the longest request, or nearly.
            numbers = sorted(range(self.count), key=lambda i: len(_text_of(self._docs[i])))
            asked = [
                request.args
                for number in numbers[-_LONGEST:]
                for request in self._instances(number, alone=True)
            ]
            texts = ("".join(part for part in args if isinstance(part, str)) for args in asked)
            longest = max(texts, key=len)
            written = self._task.OUTPUT_TYPE == "generate_until"
            answer = max(answer_tokens(args[1]) for args in asked) if written else 0
        return len(encode_text(self._model.tokenizer, longest, special=True)), answer

    def _check_shots(self) -> None:
        shots = {_text_of(doc) for doc in self._pool[: self.shots]}
        among = sum(_text_of(doc) in shots for doc in self._docs[: self.count])
        if among:
            self.warnings.append(
                f"{self.name}: {among} of the evaluated documents are among the shots, with their "
                "answers, as the task has no split of its own for shots"
            )

    def metrics(self, answers: Sequence[Scored]) -> list[MetricValues]:
        """lm-eval's metrics of some documents' answers."""
        with self._errors():
            return metrics_of(self._task, dict(enumerate(self._docs)), answers)


def _require_usable(name: str, task: Any) -> None:
    """Raise `SourceError` for a task that can't be asked behind a prefix, or should not be."""
    if task.OUTPUT_TYPE not in _TYPES:
        raise SourceError(
            f"task {name!r} is of type {task.OUTPUT_TYPE}, which has no question behind a prefix; "
            f"use one of type {', '.join(_TYPES)}"
        )
    if getattr(task, "MULTIMODAL", False):
        raise SourceError(f"task {name!r} needs images or sound; use a task of text alone")
    if getattr(task, "UNSAFE_CODE", False):
        raise SourceError(
            f"task {name!r} runs code that the model wrote, which is not done here; use another"
        )


def _text_of(doc: dict[str, Any]) -> str:
    return json.dumps(doc, sort_keys=True, default=str)


def request_digest(requests: Sequence[Any]) -> str:
    """Digest of what lm-eval asks of a document: an answer is only good for the same requests."""
    text = json.dumps([[one.request_type, one.args] for one in requests], default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def prepare_tasks(options: EvalOptions, progress: Progress) -> dict[str, TaskRequests]:
    """Load the tasks that the options name and write their requests, before there is a model.

    By name, members of groups in the groups' order. Rows of another shape than a task's show
    while its requests are written.

    Raises
    ------
    SourceError
        lm-eval is not installed, a name is unknown, or data is missing or of another shape.
    """
    found: dict[str, TaskRequests] = {}
    for done, name in enumerate(options.tasks):
        progress(ProgressEvent("tasks", done, len(options.tasks), "tasks", name))
        for member in task_names(name, options.include_path):
            if member not in found:
                found[member] = _prepared(member, options)
    progress(ProgressEvent("tasks", len(options.tasks), len(options.tasks), "tasks"))
    return found


def _prepared(name: str, options: EvalOptions) -> TaskRequests:
    task = load_task(name, data_dir=options.data_dir, include_path=options.include_path)
    _require_usable(name, task)
    with task_errors(name, options.data_dir):
        fewshot_pool(task)
        return TaskRequests(task)


def load_tasks(
    model: LoadedModel,
    options: EvalOptions,
    progress: Progress,
    prepared: Mapping[str, TaskRequests] | None = None,
) -> list[EvalTask]:
    """The tasks that the options name, each once; ``prepared`` is what `prepare_tasks` returned.

    Raises
    ------
    SourceError
        As `prepare_tasks`.
    PromptError
        A document does not fit.
    """
    tasks = prepare_tasks(options, progress) if prepared is None else prepared
    return [EvalTask(name, model, options, requests) for name, requests in tasks.items()]
