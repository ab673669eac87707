"""The engine as a model of lm-eval: requests become token ids, and scores or texts.

Owns how lm-eval's requests are encoded and cut, which is lm-eval's own way, so that figures
compare with those of its other models. `impress eval` encodes with it; given to
``lm_eval.simple_evaluate``, it answers tasks by itself. Computing is `eval_score`'s.

lm-eval is an optional extra: import this module only where it is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from pipelines.eval_score import SHORTER, Pair, Scorer, Written, by_context
from pipelines.progress import Progress, ProgressEvent, silent
from pipelines.text import encode_text
from store.errors import InvalidValueError, PromptError

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from pipelines.models import LoadedModel

#: Tokens of a written answer where its task does not say, as in lm-eval's own models.
MAX_WRITTEN_TOKENS = 256


class EngineLM(TemplateLM):  # type: ignore[misc]
    """Answers lm-eval's requests one by one; neighbours with the same context share its run.

    A prefix is used where the scorer's store has it. At retention 1.0 the answers are those of
    lm-eval's ``hf`` model with a batch of one.

    Parameters
    ----------
    scorer
        What answers; None for one that only encodes.
    progress
        Told of answered requests.
    whole
        Name of a document none of whose contexts may be cut; None to cut what is too long, as
        lm-eval does.
    """

    def __init__(
        self,
        model: LoadedModel,
        scorer: Scorer | None = None,
        progress: Progress = silent,
        *,
        whole: str | None = None,
    ) -> None:
        super().__init__()
        self._loaded, self._maybe_scorer, self._progress = model, scorer, progress
        self._whole = whole
        self.tokenizer = model.tokenizer

    @property
    def _scorer(self) -> Scorer:
        assert self._maybe_scorer is not None, "a model without a scorer only encodes"
        return self._maybe_scorer

    @property
    def eot_token_id(self) -> int:
        """Token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """Token that stands for an empty context."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def max_length(self) -> int:
        """Most tokens that have a position."""
        return self._loaded.max_positions

    @property
    def tokenizer_name(self) -> str:
        """Name under which lm-eval keeps requests."""
        return self._loaded.spec

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Token ids of a text, opening special tokens included unless that is ruled out."""
        ids: list[int] = encode_text(
            self.tokenizer, string, special=add_special_tokens is not False
        ).tolist()
        return ids

    def encode(self, context: str, continuation: str) -> Pair:
        """Token ids of a request as `TemplateLM.loglikelihood` makes them, cut to the model."""
        if context:
            return self._cut(*self._encode_pair(context, continuation))
        ids = self.tok_encode(continuation, add_special_tokens=False)
        # An empty context is the token that begins a text; one that is there already serves.
        if ids[:1] == [self.prefix_token_id]:
            return self._cut(ids[:1], ids[1:])
        return self._cut([self.prefix_token_id], ids)

    def _cut(self, context: Sequence[int], continuation: Sequence[int]) -> Pair:
        """What of a request fits the model's positions: its end, as lm-eval has it."""
        if not continuation or len(continuation) > self.max_length:
            raise PromptError(
                f"a request's continuation has {len(continuation)} tokens; 1 to {self.max_length} "
                "can be scored, so correct the task's data, or use a model with more positions"
            )
        # The last token of a continuation is predicted and never read.
        follow = len(continuation) - 1
        return Pair(self._fitted(context, follow), _ids(continuation))

    def _fitted(self, context: Sequence[int], follow: int) -> np.ndarray:
        """A context that leaves room for what follows it: all of it, or its end.

        A context that is cut has another beginning, so that nothing stored matches it: what every
        way then answers says nothing about what is stored. Raises `PromptError` where that matters.
        """
        fits = max(1, self.max_length - follow)
        if len(context) > fits and self._whole is not None:
            raise PromptError(
                f"{self._whole} has {len(context)} tokens and {follow} to follow, the model has "
                f"{self.max_length} positions; {SHORTER}"
            )
        return _ids(context[-fits:])

    def written(self, context: str, settings: Mapping[str, Any]) -> Written:
        """What is to be written behind a context, up to the first text that ends it.

        Raises `InvalidValueError` where an answer is to be drawn at random, `PromptError` where
        a context that may not be cut is too long.
        """
        known: Any = normalize_gen_kwargs(dict(settings), MAX_WRITTEN_TOKENS)
        if known.get("do_sample"):
            raise InvalidValueError(
                "a task wants answers that are drawn at random (do_sample); only greedy ones are "
                "written, so use a task without it"
            )
        eos = str(self.tokenizer.decode([self.eot_token_id], skip_special_tokens=False))
        stops = [stop for stop in handle_stop_sequences(known.get("until"), eos=eos) if stop]
        room = min(int(known["max_gen_toks"]), self.max_length - 1)
        ids = self._fitted(self.tok_encode(context) or [self.prefix_token_id], room)

        def ended(text: str) -> bool:
            return any(stop in text for stop in stops)

        def finished(text: str) -> str:
            return str(postprocess_generated_text(text, stops, None))

        return Written(ids, room, ended, finished)

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        """Score (context, continuation) requests; `TemplateLM` encodes them."""
        return list(super().loglikelihood(requests, disable_tqdm=disable_tqdm))

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = True,  # noqa: ARG002
        **_options: Any,
    ) -> list[tuple[float, bool]]:
        """Score encoded requests, in their order."""
        pairs = [self._cut(context, continuation) for _, context, continuation in requests]
        answers: list[tuple[float, bool]] = []
        for found in self._scores(pairs):
            answers += found
            self._progress(ProgressEvent("requests", len(answers), len(pairs), "requests"))
        for (text, _, _), answer in zip(requests, answers, strict=True):
            if text is not None:
                self.cache_hook.add_partial("loglikelihood", text, answer)
        return answers

    def _scores(self, pairs: Sequence[Pair]) -> Iterator[list[tuple[float, bool]]]:
        for group in by_context(pairs):
            found = self._scorer.score(group[0].context, [one.continuation for one in group])
            yield list(zip(found.loglikelihoods, found.greedy, strict=True))

    def loglikelihood_rolling(
        self,
        requests: list[Instance],
        disable_tqdm: bool = True,  # noqa: ARG002
    ) -> list[float]:
        """Log-likelihoods of whole texts, in windows of the model's positions."""
        answers = []
        for done, request in enumerate(requests):
            (text,) = request.args
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            pairs = [self._cut(*make_disjoint_window(window)) for window in windows]
            answers.append(sum(value for found in self._scores(pairs) for value, _ in found))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), answers[-1])
            self._progress(ProgressEvent("texts", done + 1, len(requests), "texts"))
        return answers

    def generate_until(
        self,
        requests: list[Instance],
        disable_tqdm: bool = True,  # noqa: ARG002
    ) -> list[str]:
        """Write texts greedily until what their task says."""
        answers = []
        for done, request in enumerate(requests):
            context, settings = request.args
            text, _ = self._scorer.write(self.written(context, settings))
            answers.append(text)
            self.cache_hook.add_partial("generate_until", request.args, answers[-1])
            self._progress(ProgressEvent("texts", done + 1, len(requests), "texts"))
        return answers


def _ids(tokens: Sequence[int]) -> np.ndarray:
    return np.asarray(tokens, dtype=np.uint32)


def answer_tokens(settings: Mapping[str, Any]) -> int:
    """Most tokens of a written answer, by the settings that its task gives."""
    return int(normalize_gen_kwargs(dict(settings), MAX_WRITTEN_TOKENS)["max_gen_toks"])


def encode_document(lm: EngineLM, requests: Sequence[Instance]) -> list[Pair] | Written:
    """A document's requests as they are answered: pairs to score, or one text to write."""
    if requests[0].request_type == "generate_until":
        return lm.written(*requests[0].args)
    return [lm.encode(*request.args) for request in requests]
