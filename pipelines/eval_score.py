"""Score continuations of a context, and write answers, on one store in one way.

Owns what happens behind a context once it ran: the run is taken back to the context's end before
each continuation, so that a document's choices share it. Up to the first logits a document is a
query like any other (`generate`), and so is what is timed. It knows no tasks and no texts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from pipelines.attention import forward
from pipelines.eval_values import Scored
from pipelines.generate import QueryOptions, first_logits
from pipelines.query_stats import Attempts, query_stats
from store.errors import PromptError
from store.itf.options import SparseOptions
from store.stats import QueryStats

if TYPE_CHECKING:
    from pipelines.models import LoadedModel
    from store.engine import PrefixStore
    from store.query_run import QueryRun

#: What to do about a prefix that is too long for its task.
SHORTER = "give a smaller --max-prefix-tokens, or fewer shots with --num-fewshot"
#: Tokens of a continuation whose logits are in memory at once.
_LOGIT_TOKENS = 512


class Pair(NamedTuple):
    """Token ids of a request, uint32 [n ≥ 1] and [m ≥ 1]: how likely is the second part?"""

    context: np.ndarray
    continuation: np.ndarray


class Written(NamedTuple):
    """A text to be written behind a context, uint32 [n ≥ 1], of at most ``room`` tokens.

    ``ended`` tells from the text so far whether it is complete, ``finished`` takes off what the
    answer does not count.
    """

    context: np.ndarray
    room: int
    ended: Callable[[str], bool]
    finished: Callable[[str], str]


class Scores(NamedTuple):
    """Of continuations of one context: log-likelihoods in nats, greedy flags, what it cost."""

    loglikelihoods: tuple[float, ...]
    greedy: tuple[bool, ...]
    stats: QueryStats


class Scorer:
    """Answers on one store in one way; what it asks counts in no statistics.

    Parameters
    ----------
    sparse
        What of a stored prefix is loaded; everything by default.
    load
        False to compute everything anew.
    """

    def __init__(
        self,
        store: PrefixStore,
        model: LoadedModel,
        sparse: SparseOptions | None = None,
        *,
        load: bool = True,
    ) -> None:
        self._store, self._model = store, model
        self._options = QueryOptions(
            plan="auto" if load else "force-recompute",
            insert="never",
            sparse=sparse or SparseOptions(),
            record=False,
        )

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self._model.shape.num_layers

    def score(self, context: np.ndarray, continuations: Sequence[np.ndarray]) -> Scores:
        """Log-likelihoods of continuations, uint32 [m ≥ 1] each, behind one context.

        The context alone decides what a sparse run keeps, as it does for a query.

        Raises
        ------
        PromptError
            The model has too few positions.
        """
        # The last token of a continuation is predicted and never read.
        room = max(len(ids) for ids in continuations) - 1
        run, logits, stats = self._begin(context, room)
        with run:
            found = [self._continued(run, logits, len(context), ids) for ids in continuations]
        values, greedy = zip(*found, strict=True)
        return Scores(values, greedy, stats)

    def write(self, wanted: Written) -> tuple[str, QueryStats]:
        """Write a text greedily until it is complete, an end token comes, or the room is used."""
        run, logits, stats = self._begin(wanted.context, wanted.room)
        with run:
            tokens = [int(logits.argmax())]
            while True:
                text = self._text(tokens)
                ended = tokens[-1] in self._model.stop_ids or wanted.ended(text)
                if ended or len(tokens) == wanted.room:
                    return wanted.finished(text), stats
                step = forward(self._model.model, run, np.asarray(tokens[-1:], np.uint32), logits=1)
                assert step is not None
                tokens.append(int(step[0].argmax()))

    def _text(self, tokens: list[int]) -> str:
        return str(self._model.tokenizer.decode(tokens, skip_special_tokens=True))

    def _begin(self, ids: np.ndarray, room: int) -> tuple[QueryRun, torch.Tensor, QueryStats]:
        """Run a context; returns the open run and the logits [vocab] behind it."""
        limit = self._model.max_positions
        if len(ids) + room > limit:
            raise PromptError(
                f"a request has {len(ids)} tokens and {room} to follow, the model has {limit} "
                f"positions; {SHORTER}"
            )
        attempts, started = Attempts(), time.perf_counter()
        run, _, logits = first_logits(self._store, self._model, ids, room, self._options, attempts)
        try:
            int(logits.argmax())  # waits for a device that computes on its own
            ttft_s = time.perf_counter() - started
            retention = self._options.sparse.retention
            return run, logits, query_stats(ttft_s, attempts, run, len(ids), retention, [])
        except BaseException:
            run.close()
            raise

    def _continued(
        self, run: QueryRun, logits: torch.Tensor, start: int, ids: np.ndarray
    ) -> tuple[float, bool]:
        """Log-likelihood of ``ids`` behind the first ``start`` tokens, where ``logits`` are.

        ::

            context |ids[0] ids[1] … ids[m-2] ids[m-1]
            logits   ^ given         read, for the logits of the one behind each
        """
        run.rewind(start)
        total, greedy = _picked(logits[None], ids[:1])
        for at in range(0, len(ids) - 1, _LOGIT_TOKENS):
            part = ids[at : min(at + _LOGIT_TOKENS, len(ids) - 1)]
            step = forward(self._model.model, run, part, logits=len(part))
            assert step is not None
            value, same = _picked(step, ids[at + 1 : at + 1 + len(part)])
            total, greedy = total + value, greedy and same
        return total, greedy


def _picked(logits: torch.Tensor, ids: np.ndarray) -> tuple[float, bool]:
    """Sum of the log-probabilities of ``ids`` [m], and whether each is the likeliest.

    ``logits`` [m, vocab] of any dtype; probabilities are float32.
    """
    targets = torch.from_numpy(ids.astype(np.int64)).to(logits.device)
    found = torch.log_softmax(logits.float(), dim=-1)
    likeliest = bool((found.argmax(dim=-1) == targets).all())
    return float(found.gather(1, targets[:, None]).sum()), likeliest


def by_context(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """Neighbours that have the same context, together."""
    for _, group in groupby(pairs, key=lambda pair: pair.context.tobytes()):
        yield list(group)


def score_document(scorer: Scorer, number: int, pairs: Sequence[Pair]) -> Scored:
    """Answer a document of which each request is a pair; each context is run once."""
    found = [
        scorer.score(group[0].context, [pair.continuation for pair in group])
        for group in by_context(pairs)
    ]
    return _scored(
        number,
        [one.stats for one in found],
        scorer.num_layers,
        loglikelihoods=tuple(value for one in found for value in one.loglikelihoods),
        greedy=tuple(flag for one in found for flag in one.greedy),
    )


def write_document(scorer: Scorer, number: int, wanted: Written) -> Scored:
    """Answer a document that asks for a text."""
    text, stats = scorer.write(wanted)
    return _scored(number, [stats], scorer.num_layers, text=text)


def _scored(
    number: int,
    all_stats: Sequence[QueryStats],
    layers: int,
    *,
    loglikelihoods: tuple[float, ...] = (),
    greedy: tuple[bool, ...] = (),
    text: str | None = None,
) -> Scored:
    """A document's figures from those of its contexts: the first one's time, everyone's bytes.

    Contexts without a prefix (of metrics that compare with no context at all) load nothing, and
    are left out of the shares.
    """
    first = all_stats[0]
    behind = [stats for stats in all_stats if stats.reused_tokens] or [first]
    reused = bool(behind[0].reused_tokens)
    return Scored(
        document=number,
        loglikelihoods=loglikelihoods,
        greedy=greedy,
        text=text,
        ttft_s=first.ttft_s,
        selected_ratio=statistics.fmean(stats.selected_ratio for stats in behind),
        loaded_ratio=statistics.fmean(stats.loaded_ratio for stats in behind) if reused else 0.0,
        probe_ratio=statistics.fmean(stats.probe_ratio for stats in behind),
        fallback_ratio=statistics.fmean(stats.fallback_layers / layers for stats in behind),
        disk_bytes=sum(stats.bytes["disk"] for stats in all_stats),
        read_bytes=sum(stats.read_bytes for stats in all_stats),
        prompt_tokens=first.prompt_tokens,
        reused_tokens=first.reused_tokens,
        recovered_chunks=sum(stats.recovered_chunks for stats in all_stats),
    )


def apart(first: Scored, second: Scored) -> float:
    """Largest difference of two answers' log-likelihoods; 1 for texts that differ.

    No number where one of them is none.
    """
    if first.text is not None:
        return float(first.text != second.text)
    one, other = np.array(first.loglikelihoods), np.array(second.loglikelihoods)
    assert one.shape == other.shape, "answers to the same requests"
    with np.errstate(invalid="ignore"):  # equal infinities are no difference
        return float(np.max(np.where(one == other, 0.0, np.abs(one - other))))
