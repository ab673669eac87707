"""Few-shot prefixes of lm-eval tasks: the text all requests of a task begin with.

With the same shots for every document (lm-eval's ``first_n`` sampler), the requests of a task
share all tokens up to the question. That shared beginning is the prefix; it is taken from the
*tokens* of the requests, since the last shot's blank line may be encoded differently once a
question follows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipelines.sources.base import PrefixSource, RawPrefix
from pipelines.sources.lmtasks import load_task, task_errors
from pipelines.text import TokenizerLike, encode_text
from store.errors import SourceError

# Characters on either side of the seam that are encoded to find the requests with the fewest
# shared tokens. Those few are then encoded whole, so the window decides about time, not result.
_WINDOW_CHARS = 200
# A recipe that names a number of shots mostly names one that fits.
_TRY_ALL = 256


class FewshotSource(PrefixSource):
    """``variants`` prefixes of one task, each with up to ``shots`` whole shots.

    Variant 0 has the first shots of the training split in their order (what lm-eval's
    ``first_n`` gives); variant i > 0 has a sample drawn with ``seed`` and i. Shots are left off
    until the prefix has at most ``max_tokens`` tokens; ``shots`` None takes as many as fit.
    ``requests`` are the task's where it is loaded already.
    """

    def __init__(
        self,
        task: str,
        *,
        shots: int | None = None,
        variants: int = 1,
        seed: int = 1,
        max_tokens: int | None = None,
        data_dir: Path | None = None,
        include_path: Path | None = None,
        requests: TaskRequests | None = None,
    ) -> None:
        super().__init__(max_tokens=max_tokens)
        self.task = task
        self.shots = shots
        self.variants = variants
        self.seed = seed
        self.data_dir = data_dir
        self.include_path = include_path
        self._requests = requests

    def raw_count(self) -> int | None:
        """Number of variants."""
        return self.variants

    def raw_items(self, tokenizer: TokenizerLike, longest: int) -> Iterator[RawPrefix]:
        """Yield one prefix per variant. Raises SourceError where not even one shot fits."""
        requests = self._requests
        with task_errors(self.task, self.data_dir):
            if requests is None:
                requests = TaskRequests(self._loaded())
            pool = fewshot_pool(requests.task)
        for variant in range(self.variants):
            order = shot_order(len(pool), variant, self.seed)
            wanted = [pool[i] for i in order[: self.shots]]
            name = f"{self.task}-{variant}"
            with task_errors(self.task, self.data_dir):
                number, ids = _fit(tokenizer, requests, wanted, longest, name)
            if self.shots is not None and number < self.shots:
                self.warnings.append(
                    f"{name}: {number} of {self.shots} shots fit in {longest} tokens"
                    if number < len(wanted)
                    else f"{name}: the task has only {number} of the {self.shots} shots asked"
                )
            source = {
                "kind": "fewshot",
                "task": self.task,
                "variant": variant,
                "shots": number,
                "seed": self.seed,
                "template": "none",
                "queries": [],
            }
            yield RawPrefix(name, name, ids, source)

    def _loaded(self) -> Any:
        return load_task(self.task, data_dir=self.data_dir, include_path=self.include_path)


def shot_order(pool_size: int, variant: int, seed: int) -> list[int]:
    """Numbers of the training documents in the order they become shots.

    The same in every process: variant 0 is 0, 1, 2, …; others are a seeded shuffle.
    """
    order = list(range(pool_size))
    if variant:
        random.Random(f"{seed}:{variant}").shuffle(order)
    return order


def fewshot_pool(task: Any) -> Sequence[dict[str, Any]]:
    """Documents that a task takes its shots from."""
    docs = list(task.fewshot_docs() or [])
    if not docs:
        raise SourceError(
            f"task {task.task_name!r} has no documents for shots; use a task with a training split"
        )
    return docs


class Seam(NamedTuple):
    """Requests as the shots' text and what follows it in each request."""

    head: str
    tails: list[str]


class TaskRequests:
    """Request texts (context + continuation) of a task for any list of shots.

    Writing 40 shots into each of thousands of requests is slow, so the requests are written once
    without shots, and the shots once. ``task`` is the task they are of.
    """

    def __init__(self, task: Any) -> None:
        self.task = task
        self._docs = list(task.eval_docs)
        self._bare = [context_texts(task, doc, 0) for doc in self._docs]
        self._full = [
            _requests(task, doc, contexts)
            for doc, contexts in zip(self._docs, self._bare, strict=True)
        ]

    def seam(self, shots: Sequence[dict[str, Any]]) -> Seam:
        """Split all requests at the end of the shots.

        Raises
        ------
        SourceError
            The task writes other text before the question from document to document.
        """
        self.task.sampler = same_shots(shots)
        first = context_texts(self.task, self._docs[0], len(shots))[0]
        bare = self._bare[0][0]
        # first: |description and shots|question|     bare: |description|question|
        #                               ^ head ends                     ^ cut
        shared = shared_end(first, bare)
        head, cut = first[: len(first) - shared], len(bare) - shared
        last = context_texts(self.task, self._docs[-1], len(shots))[-1]
        if last != head + self._bare[-1][-1][cut:]:
            raise SourceError(
                f"task {self.task.task_name!r} writes its few-shot text anew for each document, "
                "so requests share no prefix; use another task"
            )
        return Seam(head, [text[cut:] for texts in self._full for text in texts])


def context_texts(task: Any, doc: dict[str, Any], shots: int) -> list[str]:
    """Context text of a document; several where the task puts its choices into the context."""
    text = task.fewshot_context(doc, shots, gen_prefix=task.doc_to_prefix(doc))
    return list(text) if isinstance(text, list) else [text]


def _requests(task: Any, doc: dict[str, Any], contexts: list[str]) -> list[str]:
    made = task.construct_requests(doc=doc, ctx=contexts[0] if len(contexts) == 1 else contexts)
    made = made if isinstance(made, list) else [made]
    # Arguments are (context, continuation) for scored tasks, (context, settings) for written ones.
    return ["".join(part for part in request.args if isinstance(part, str)) for request in made]


def same_shots(shots: Sequence[dict[str, Any]]) -> Any:
    """A ``first_n`` sampler that keeps a shot even where it equals the evaluated document."""
    from lm_eval.api.samplers import FirstNSampler

    class SameShots(FirstNSampler):  # type: ignore[misc]
        def rm_eval_doc(self, doc: Any, _iter: Any, n: int | None = None) -> Any:  # noqa: ARG002
            return _iter

    return SameShots(list(shots))


def shared_end(first: str, second: str) -> int:
    """Characters that both texts end with."""
    length = 0
    for a, b in zip(reversed(first), reversed(second), strict=False):
        if a != b:
            break
        length += 1
    return length


def common_prefix(tokenizer: TokenizerLike, seam: Seam) -> np.ndarray:
    """Token ids that the encodings of all requests begin with, at most the shots' own tokens."""
    ids = encode_text(tokenizer, seam.head, special=True)
    window = seam.head[-_WINDOW_CHARS:]
    seen = encode_text(tokenizer, window, special=False)
    kept: dict[int, str] = {}
    for tail in {tail[:_WINDOW_CHARS]: tail for tail in seam.tails}.values():
        near = encode_text(tokenizer, window + tail[:_WINDOW_CHARS], special=False)
        kept.setdefault(_shared_tokens(seen, near), tail)
    for tail in kept.values():
        whole = encode_text(tokenizer, seam.head + tail, special=True)
        ids = ids[: _shared_tokens(ids, whole)]
    return ids


def _shared_tokens(first: np.ndarray, second: np.ndarray) -> int:
    size = min(len(first), len(second))
    different = np.flatnonzero(first[:size] != second[:size])
    return int(different[0]) if len(different) else size


def _fit(
    tokenizer: TokenizerLike,
    requests: TaskRequests,
    wanted: Sequence[dict[str, Any]],
    longest: int,
    name: str,
) -> tuple[int, np.ndarray]:
    """The most whole shots whose text is at most ``longest`` tokens, and their common prefix."""

    def fits(number: int) -> bool:
        head = requests.seam(wanted[:number]).head
        return len(encode_text(tokenizer, head, special=True)) <= longest

    number = _largest(fits, len(wanted))
    if not number:
        raise SourceError(
            f"{name}: one shot is longer than {longest} tokens; raise max_tokens or use a model "
            "with more positions"
        )
    return number, common_prefix(tokenizer, requests.seam(wanted[:number]))


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """Largest number in 1..most that fits, 0 if none; larger numbers never fit better."""
    if most <= _TRY_ALL and fits(most):
        return most
    low, high = 0, 1
    # Doubling first: the pool may be thousands of shots where a dozen fit.
    while high < most and fits(high):
        low, high = high, min(high * 2, most)
    if high == most and fits(most):
        return most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
