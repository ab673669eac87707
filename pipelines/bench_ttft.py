"""Time to the first token of several systems, side by side (`impress bench ttft`).

Every request is answered by all of them, one after the other and each time in another order, so
that drift of the machine, and what one leaves to the next, hit all alike. Owns the order of events;
the parts are `ttft_*`'s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil
import torch

from pipelines.progress import Progress, ProgressEvent, silent
from pipelines.systems import SYSTEMS
from pipelines.ttft_kept import KeptKey, require_same
from pipelines.ttft_rows import sample_of
from pipelines.ttft_runners import EngineRunner, Runner, open_runners
from pipelines.ttft_stores import TtftStores, bench_folder, folder_warnings
from pipelines.ttft_values import (
    DIY,
    RECOMPUTE,
    Budget,
    Layout,
    Reference,
    Sample,
    TtftOptions,
    TtftReport,
    TtftRow,
    Workload,
)
from pipelines.ttft_workload import make_workload, turns
from store.disk.io import IOOptions
from store.errors import InvalidValueError
from store.files import IMPORTANCE

if TYPE_CHECKING:
    from pipelines.models import LoadedModel

#: Loads everything: what it answers is what the others are compared with.
_REFERENCE = SYSTEMS["as-like"]


def bench_ttft(
    model: LoadedModel,
    options: TtftOptions,
    documents: Path,
    folder: Path,
    progress: Progress = silent,
    *,
    keep: bool = False,
) -> TtftReport:
    """Measure the systems on prefixes taken from documents.

    Parameters
    ----------
    documents
        Folder of text files.
    folder
        Where temporary stores go.
    keep
        Leave the stores in ``folder`` itself, and use those that an earlier run left there.

    Raises
    ------
    SourceError, PromptError, InvalidValueError
        The documents or questions can't be used, memory is too small, or what ``folder`` keeps was
        made of something else.
    StoreFullError, StoreWriteError
        ``folder`` has no room, or a file can't be written.
    """
    layouts = layouts_of(options)
    reordered = any(layout.order == IMPORTANCE for layout in layouts)
    workload = make_workload(model, documents, options, history=reordered)
    budget = options.budget(workload.kv_bytes(model.shape))
    _require_memory(model, options, budget)
    diy = DIY in options.systems
    with bench_folder(model, layouts, workload, folder, keep=keep, diy=diy) as place:
        if keep:
            key = KeptKey.of(model, workload, options.retention, reordered=reordered)
            require_same(place, key)
        stores = TtftStores(model, layouts, place, diy=diy)
        stores.fill(workload.prefixes, progress)
        ordered = stores.reorder(workload, options.retention, progress)
        with contextlib.ExitStack() as stack:
            runners = open_runners(stack, stores, model, options, budget)
            bench = _Bench(model, options, workload, stores, runners, progress)
            bench.measure()
            return bench.report(budget, ordered, folder_warnings(folder, keep=keep))


def layouts_of(options: TtftOptions) -> list[Layout]:
    """Layouts that the systems need, the one the reference is loaded from first.

    There is one where no system reuses anything, for the reference.
    """
    found = [Layout.of(system) for system in options.engine_systems if system.reuse]
    wanted = dict.fromkeys(found or [Layout.of(_REFERENCE)])
    return sorted(wanted, key=lambda layout: layout.order == IMPORTANCE)


def _require_memory(model: LoadedModel, options: TtftOptions, budget: Budget) -> None:
    """Raise `InvalidValueError` where the systems' memory together is more than there is."""
    each = budget.host_bytes + (budget.device_bytes if model.device.type == "cpu" else 0)
    count = sum(system.reuse for system in options.engine_systems)
    free = _free_bytes()
    if count * each > free:
        raise InvalidValueError(
            f"{count} systems with {each / 1e6:.0f} MB each need more than the {free / 1e6:.0f} MB "
            "of memory that are free; give a smaller --budget-share, fewer --prefixes, or fewer "
            "--systems"
        )


def _free_bytes() -> float:
    return float(psutil.virtual_memory().available)


class _Bench:
    """One comparison under way."""

    def __init__(
        self,
        model: LoadedModel,
        options: TtftOptions,
        workload: Workload,
        stores: TtftStores,
        runners: list[Runner],
        progress: Progress,
    ) -> None:
        self._model, self._options, self._workload = model, options, workload
        self._stores, self._runners, self._progress = stores, runners, progress
        self._samples: dict[str, list[Sample]] = {runner.name: [] for runner in runners}
        self._differences: list[float] = []
        count = len(workload.measured)
        places = np.linspace(0, count - 1, min(options.recompute_sample, count))
        self._recomputed = {round(float(place)) for place in places}

    def measure(self) -> None:
        """The reference's answers, then the warm-up, then what counts."""
        references = self._references()
        self._warm_up()
        measured = self._workload.measured
        for number, request in enumerate(measured):
            self._say("requests", number, len(measured))
            prefix = self._workload.prefixes[request.prefix]
            again = number in self._recomputed
            for turn, runner in enumerate(self._in_turn(number, everyone=again)):
                given = runner.answer(prefix.ids, request.query.ids)
                sample = sample_of(
                    given.stats,
                    given.logits,
                    references[number],
                    request=number,
                    prefix=request.prefix,
                    turn=turn,
                    layers=self._model.shape.num_layers,
                )
                self._samples[runner.name].append(sample)
                if runner.name == RECOMPUTE:
                    self._differences.append(_difference(references[number], given.logits))
        self._say("requests", len(measured), len(measured))

    def report(self, budget: Budget, ordered: int, of_folder: Sequence[str]) -> TtftReport:
        """What was measured, with ``ordered`` nodes in order of importance.

        ``of_folder`` is what has to be said of where the stores lie.
        """
        rows = tuple(map(self._row, self._runners))
        kv_bytes = self._workload.kv_bytes(self._model.shape)
        warnings = [*of_folder, *self._workload.warnings, *self._lost()]
        notes = self._notes(ordered)
        return TtftReport(
            rows, self._workload, kv_bytes, budget, self._reference(), notes, tuple(warnings)
        )

    def _row(self, one: Runner) -> TtftRow:
        samples = tuple(self._samples[one.name])
        return TtftRow(one.name, one.disk, one.layout, one.budget, samples, one.configuration)

    def _references(self) -> list[torch.Tensor]:
        """Logits of the full answer to every measured request, on the CPU."""
        found, measured = [], self._workload.measured
        with self._stores.open(self._stores.plainest, io=IOOptions()) as store:
            runner = EngineRunner(_REFERENCE, store, self._model, self._options, Budget(0, 0))
            for number, request in enumerate(measured):
                self._say("reference", number, len(measured))
                prefix = self._workload.prefixes[request.prefix]
                found.append(runner.answer(prefix.ids, request.query.ids).logits.cpu())
        self._say("reference", len(measured), len(measured))
        return found

    def _warm_up(self) -> None:
        requests = self._workload.warm_up
        for number, request in enumerate(requests):
            self._say("warm up", number, len(requests))
            prefix = self._workload.prefixes[request.prefix]
            for runner in self._in_turn(number, everyone=False):
                runner.answer(prefix.ids, request.query.ids)
        self._say("warm up", len(requests), len(requests))

    def _in_turn(self, number: int, *, everyone: bool) -> list[Runner]:
        """Who answers a request, in another order each time."""
        asked = [one for one in self._runners if everyone or not one.sampled]
        return [asked[place] for place in turns(self._options.seed, number, len(asked))]

    def _reference(self) -> Reference:
        samples = self._samples.get(RECOMPUTE, [])
        if not samples:
            return Reference(0, None, None)
        return Reference(len(samples), max(self._differences), max(sample.kl for sample in samples))

    def _lost(self) -> list[str]:
        """Who did not answer from the store as it should have."""
        found = []
        for runner in self._runners:
            wanted = self._workload.prefixes
            short = sum(
                sample.reused_tokens < len(wanted[sample.prefix].ids)
                for sample in self._samples[runner.name]
            )
            if short and not runner.sampled:
                found.append(
                    f"{runner.name}: {short} requests reused less than their prefix, as something "
                    "failed to load"
                )
        return found

    def _notes(self, ordered: int) -> tuple[str, ...]:
        notes = ["KL and top-1 compare the first token with a full load, which is exact in float32"]
        if RECOMPUTE in self._samples:
            notes.append(
                f"recompute answered {len(self._recomputed)} of {len(self._workload.measured)} "
                "requests, as it takes long"
            )
        if DIY in self._samples:
            notes.append(
                "diy has no budget: its file is dropped from the page cache before each request, "
                "and read whole before anything is computed"
            )
            if self._options.io.latency_s:
                notes.append(
                    "the emulated latency counts once per file for diy, and per read for the others"
                )
        if any(one.layout is not None and one.layout.order == IMPORTANCE for one in self._runners):
            notes.append(
                f"{ordered} nodes lie in order of importance, which each store learnt by its own "
                "evidence from queries that came before those measured"
            )
        return tuple(notes)

    def _say(self, task: str, done: int, total: int) -> None:
        self._progress(ProgressEvent(task, done, total, "requests"))


def _difference(reference: torch.Tensor, logits: torch.Tensor) -> float:
    return float((reference - logits.cpu()).abs().max())
