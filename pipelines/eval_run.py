"""One task of an evaluation: who answers which document when, and who answers for whom.

All ways to answer take turns on each document, so that drift of the machine hits all alike.
Recomputing takes longest by far: once it was seen to give a full load's answers, that answers for
it. Controls come last, as they are to load what a system loaded on the whole task.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from pipelines.eval_lanes import Lane, LaneMaker, corrected_share
from pipelines.eval_notes import (
    control_warning,
    differs_warning,
    mixed_warning,
    number_warnings,
    reuse_warnings,
)
from pipelines.eval_rows import Answered
from pipelines.eval_score import Pair, Written, apart
from pipelines.eval_tasks import EvalTask, request_digest
from pipelines.eval_values import (
    OURS,
    RANDOM,
    RECOMPUTE_SAMPLE,
    RECOMPUTE_TOLERANCE,
    STATIC,
    EvalOptions,
    RecomputeFacts,
    Scored,
    Way,
)
from pipelines.progress import Progress, ProgressEvent
from pipelines.systems import SYSTEMS

if TYPE_CHECKING:
    from pipelines.models import LoadedModel

#: The system that loads everything: its answers are a full load's.
_AS_LIKE = "as-like"
#: Part of what `OURS` loads by which a control may load more or less.
CONTROL_TOLERANCE = 0.05


class _Asked:
    """A document's requests; encoded once, and only where somebody has to answer them."""

    def __init__(self, task: EvalTask, model: LoadedModel, number: int, *, alone: bool) -> None:
        self.number, self._model, self._name = number, model, task.name
        self._requests = task.requests(number, alone=alone)
        self.digest = request_digest(self._requests)

    @cached_property
    def encoded(self) -> list[Pair] | Written:
        """Token ids, as lm-eval's own models have them, but for contexts that it would cut.

        Raises `PromptError` for those.
        """
        from pipelines.lm import EngineLM, encode_document

        whole = f"task {self._name!r}: document {self.number}"
        return encode_document(EngineLM(self._model, whole=whole), self._requests)


class TaskRun:
    """One task under way; `answer` comes first.

    Attributes
    ----------
    warnings
        What is not as asked for.
    controls_off
        By how much a control loaded more or less than `OURS` at most, as a share of that; None
        without such controls.
    """

    def __init__(
        self,
        task: EvalTask,
        model: LoadedModel,
        options: EvalOptions,
        lanes: LaneMaker,
        progress: Progress,
    ) -> None:
        self._task, self._model, self._options = task, model, options
        self._maker, self._progress = lanes, progress
        self._given: dict[Way, dict[int, Scored]] = {}
        self._recompute = lanes.recompute(task)
        self._systems = self._system_lanes()
        self._controls: list[Lane] = []
        self._full = None if options.recompute_all else self._full_lane()
        self._done = self._total = 0
        self.warnings: list[str] = []
        self.controls_off: float | None = None

    def _system_lanes(self) -> list[Lane]:
        """Systems in their order, those that leave something out at each retention."""
        return [
            self._maker.system(self._task, system, retention)
            for system in self._options.made_systems
            if system.reuse
            for retention in (self._options.retention if system.sparse else (None,))
        ]

    def _full_lane(self) -> Lane:
        """Who may answer for recomputing: the system that loads everything, where it is there."""
        named = [lane for lane in self._systems if lane.way.system == _AS_LIKE]
        return named[0] if named else self._maker.full_load(self._task)

    def answer(self) -> None:
        """Let everyone answer every document that has no answer yet."""
        lanes = list(self._systems)
        if self._full is not None and self._full not in lanes:
            lanes.append(self._full)
        count = self._task.count
        sample = count if self._options.recompute_all else min(count, RECOMPUTE_SAMPLE)
        self._total = count * len(lanes) + sample
        for number in range(count):
            asked = _Asked(self._task, self._model, number, alone=False)
            if number == sample and self._differs():
                sample, self._total = count, self._total + count - sample
            turn = [*lanes, self._recompute] if number < sample else lanes
            for lane in _in_turn(turn, number):
                self._give(lane, asked)
        if self._options.with_controls:
            self._answer_controls()
        self._check_reuse()
        self._tell()

    def _give(self, lane: Lane, asked: _Asked) -> None:
        """Take an answer over, or let it be given and keep it."""
        known = lane.answers.get(asked.number, asked.digest)
        if known is None:
            known = lane.answer(self._model, asked.number, asked.encoded)
            lane.require_same_order()
            lane.answers.add(known, asked.digest)
        self._given.setdefault(lane.way, {})[asked.number] = known
        self._done += 1
        self._tell()

    def _tell(self) -> None:
        self._progress(ProgressEvent(self._task.name, self._done, self._total, "answers"))

    def _difference(self) -> float | None:
        """Largest difference between recomputing and a full load on the documents of both."""
        if self._full is None:
            return None
        both = self._given.get(self._recompute.way, {}), self._given.get(self._full.way, {})
        numbers = both[0].keys() & both[1].keys()
        found = [apart(both[0][number], both[1][number]) for number in numbers]
        # numpy's max, unlike Python's, is no number where one of them is none.
        return float(np.max(found)) if found else None

    def _differs(self) -> bool:
        """Whether a full load may not answer for recomputing; said once."""
        difference = self._difference()
        assert difference is not None, "a sample was answered by both"
        # Not <=: what is no number is a difference, too.
        if difference <= RECOMPUTE_TOLERANCE:
            return False
        dtype = self._model.identity.dtype
        self.warnings.append(differs_warning(self._task.name, dtype, difference))
        return True

    def _answer_controls(self) -> None:
        """Let controls answer, with as many chunks as `OURS` loaded on the whole task."""
        shared = [
            (ours, lane)
            for ours in self._systems
            if ours.way.system == OURS and ours.sparse.sparse
            for lane in self._control_lanes(ours)
        ]
        alone = self._maker.no_prefix(self._task)
        self._ask([*(lane for _, lane in shared), alone])
        self._controls = [*(self._matched(ours, lane) for ours, lane in shared), alone]

    def _ask(self, lanes: Sequence[Lane]) -> None:
        """Let controls answer every document."""
        self._total += self._task.count * len(lanes)
        for number in range(self._task.count):
            kinds = {lane.alone for lane in lanes}
            asked = {one: _Asked(self._task, self._model, number, alone=one) for one in kinds}
            for lane in _in_turn(lanes, number):
                self._give(lane, asked[lane.alone])

    def _loaded(self, lane: Lane) -> float:
        """Mean share of chunks that was loaded."""
        return statistics.fmean(one.loaded_ratio for one in self._given[lane.way].values())

    def _matched(self, ours: Lane, lane: Lane) -> Lane:
        """A control that loads what `OURS` loads; where it does not, it is asked once more.

        The share that it was asked for takes each chunk for full of the prefix's own tokens, which
        fails where a longer prefix is stored.
        """
        wanted, first = self._loaded(ours), self._given[lane.way]
        off = abs(self._loaded(lane) / wanted - 1.0)
        if off > CONTROL_TOLERANCE:
            assert lane.asked is not None
            assert ours.way.retention is not None
            share = corrected_share(lane.asked, self._loaded(lane), wanted)
            name, retention = lane.way.system, ours.way.retention
            again = self._maker.control(self._task, name, retention, share)
            del self._given[lane.way]
            self._ask([again])
            closer = abs(self._loaded(again) / wanted - 1.0)
            if closer < off:
                lane, off = again, closer
            else:
                self._given[lane.way] = first
        if off > CONTROL_TOLERANCE:
            self.warnings.append(control_warning(lane.way, self._loaded(lane), wanted))
        self.controls_off = max(off, self.controls_off or 0.0)
        return lane

    def _control_lanes(self, ours: Lane) -> list[Lane]:
        """Both sets that know nothing of the question.

        A chunk of c tokens is loaded if one of them is selected. Chosen at random with probability
        p each, that is 1 - (1 - p)^c of the chunks; by the order that rows are stored in, p.
        """
        share = self._loaded(ours)
        if not 0.0 < share <= 1.0:
            self.warnings.append(
                f"{self._task.name}: {OURS} loaded nothing, so that there is nothing to compare "
                "controls with"
            )
            return []
        retention, task = ours.way.retention, self._task
        assert retention is not None
        chance = 1.0 - (1.0 - share) ** (1.0 / SYSTEMS[OURS].chunk_tokens)
        lanes = [self._maker.control(task, RANDOM, retention, chance)]
        if self._maker.remembers(task):
            lanes.append(self._maker.control(task, STATIC, retention, share))
        else:
            self.warnings.append(
                f"{task.name}: no question was asked before, so that there is no control {STATIC}"
            )
        return lanes

    def _check_reuse(self) -> None:
        """Say who did not answer from the store as it should have."""
        tokens = len(self._task.prefix.ids)
        placed = ((lane.store.path, lane.placed) for lane in self._systems)
        mixed = dict.fromkeys(str(path) for path, one in placed if one is not None and one.mixed)
        self.warnings += [mixed_warning(self._task.name, tokens, path) for path in mixed]
        for lane in (*self._systems, *self._controls):
            lane.require_same_order()
            if lane.load:
                given = list(self._given[lane.way].values())
                self.warnings += reuse_warnings(lane.way, given, tokens, lane.shows_evidence)
        for way, answers in self._given.items():
            self.warnings += number_warnings(way, list(answers.values()))

    def answered(self) -> list[Answered]:
        """All ways in the order of their rows, recomputing first."""
        numbers = range(self._task.count)
        found = [(self._recompute.way, [self._recomputed(number) for number in numbers])]
        found += [
            (lane.way, [self._given[lane.way][number] for number in numbers])
            for lane in (*self._systems, *self._controls)
        ]
        return [Answered.of(way, given, self._task.metrics(given)) for way, given in found]

    def _recomputed(self, number: int) -> Scored:
        """The recomputed answer to a document, or a full load's in its place, without its costs."""
        own = self._given[self._recompute.way].get(number)
        if own is not None:
            return own
        assert self._full is not None
        return replace(
            self._given[self._full.way][number],
            ttft_s=None,
            loaded_ratio=0.0,
            disk_bytes=0,
            read_bytes=0,
            reused_tokens=0,
            recovered_chunks=0,
        )

    def recompute_facts(self) -> RecomputeFacts:
        """How recomputing answered."""
        own = len(self._given[self._recompute.way])
        difference = self._difference()
        compared = 0 if difference is None else own
        return RecomputeFacts(own, compared, difference, self._task.count - own)


def _in_turn(lanes: Sequence[Lane], number: int) -> list[Lane]:
    """Lanes in the order in which they answer: another one begins each time."""
    first = number % max(1, len(lanes))
    return [*lanes[first:], *lanes[:first]]
