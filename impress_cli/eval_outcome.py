"""What ``impress eval`` runs on, and what happens to its result: shown, written, drawn, kept.

The evaluation is `pipelines.evaluate`'s, the options are `evaluate`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from impress_cli.bench_inputs import picture_title
from impress_cli.build_choices import existing_info
from impress_cli.envelope import envelope
from impress_cli.eval_command import command_line
from impress_cli.eval_tables import eval_object, eval_table, eval_versions, task_lines
from impress_cli.options import DiskSettings, MemorySettings
from impress_cli.ui import Ui
from impress_cli.units import format_bytes, format_seconds
from impress_cli.verdicts import keep_verdicts, unkept, verdicts_of
from store.errors import ImpressError, InvalidValueError

if TYPE_CHECKING:
    from pipelines.eval_values import EvalOptions, EvalReport
    from pipelines.models import LoadedModel
    from pipelines.sources.fewshot import TaskRequests
    from store.identity import ModelIdentity
    from store.info import StoreInfo

_TITLE = "What leaving out part of the KV costs in accuracy"
#: What the folders of tasks must hold.
_HOLDS = {
    "data-dir": "give one with <task>/<split>.jsonl, or leave it out to take data from the hub",
    "include-path": "give one with task files (.yaml)",
}


@dataclass(frozen=True, slots=True)
class Subject:
    """The model that answers, as given, and the memory it answers with."""

    model: str | None
    dtype: str | None
    device: str
    threads: int | None
    memory: MemorySettings

    def check(self, ui: Ui, store: Path) -> StoreInfo | None:
        """Facts of the store, None where there is none yet. Loads no model.

        Raises ImpressError for a folder that is no store, for a memory budget that is of no use to
        it, and for a model that is known to be another one.
        """
        from impress_cli.session import opened_store

        info = existing_info(store)
        if info is not None:
            info.identity.require(self._expected(info), str(store))
            if self._limited:
                with opened_store(ui, store, memory=self.memory):
                    pass
        return info

    def _expected(self, info: StoreInfo) -> ModelIdentity:
        """The model's identity as far as that is known without its weights, else the store's.

        A name may stand for files that are not here yet, so that only folders are looked into.
        """
        from pipelines.devices import resolve_device, resolve_dtype
        from pipelines.identify import make_identity
        from pipelines.model_files import BUNDLED
        from pipelines.models import read_config

        stored, spec = info.identity, self.model or info.model_spec
        dtype = resolve_dtype(self.dtype or info.dtype, resolve_device(self.device))
        folder = Path(spec).expanduser()
        if spec == BUNDLED or not folder.is_dir():
            return replace(stored, dtype=dtype)
        config = read_config(folder, spec)
        return make_identity(
            config, dtype=dtype, weights=stored.weights, tokenizer=stored.tokenizer
        )

    def load(self, ui: Ui, store: Path, info: StoreInfo | None) -> LoadedModel:
        """Load the model: the one named, else the store's, else the default one.

        Raises ImpressError for one that the store was not built with.
        """
        from impress_cli.session import DEFAULT_MODEL, loaded_model

        spec, dtype = (DEFAULT_MODEL, "auto") if info is None else (info.model_spec, info.dtype)
        loaded = loaded_model(
            ui,
            self.model or spec,
            dtype=self.dtype or dtype,
            device=self.device,
            threads=self.threads,
        )
        if info is not None:
            info.identity.require(loaded.identity, str(store))
        return loaded

    @property
    def _limited(self) -> bool:
        """Whether anything was said about memory."""
        return (self.memory.device_bytes, self.memory.host_bytes) != (None, None)

    def evaluate(
        self,
        outcome: Outcome,
        model: LoadedModel,
        results: Path,
        prepared: Mapping[str, TaskRequests],
    ) -> EvalReport:
        """Answer what was not answered yet, and return the result of all."""
        from pipelines.evaluate import evaluate
        from store.run_maker import MemoryOptions

        memory = None
        if self._limited:
            memory = MemoryOptions(self.memory.device_bytes or 0, self.memory.host_bytes or 0)
        outcome.answered = Answered(self, results)
        outcome.ui.note(f"answers are kept in {results}; run the same command again to go on")
        with outcome.ui.progress() as progress:
            return evaluate(
                outcome.store,
                model,
                outcome.options,
                results,
                progress,
                io=outcome.disk.io_options(),
                memory=memory,
                prepared=prepared,
            )


class Answered(NamedTuple):
    """Who answers, and the folder that keeps the answers."""

    subject: Subject
    results: Path


@dataclass(slots=True)
class Outcome:
    """What was asked for, and where its result goes.

    ``answered`` is None until answers are asked for.
    """

    ui: Ui
    store: Path
    options: EvalOptions
    disk: DiskSettings
    markdown: Path | None
    plot: Path | None
    answered: Answered | None = None

    def check(self) -> None:
        """Refuse what can be refused before a model is loaded. Raises InvalidValueError."""
        if self.markdown is not None:
            from pipelines.eval_report import require_markdown

            require_markdown(self.markdown)
        if self.plot is not None:
            from pipelines.plots import require_plots

            require_plots(self.plot)

    def prepare(self) -> dict[str, TaskRequests]:
        """Load the tasks, which also finds rows of another shape. Raises SourceError."""
        from pipelines.eval_tasks import prepare_tasks

        with self.ui.progress() as progress:
            return prepare_tasks(self.options, progress)

    def publish(self, report: EvalReport, model: LoadedModel, *, as_json: bool) -> None:
        """Keep a verdict in the store, write the result where it was asked for, and show it.

        It is shown last, as a reader of stdout may have gone before its end.
        """
        for text in report.events:
            self.ui.note(text)
        for text in report.warnings:
            self.ui.warn(text)
        self._keep(report, model)
        if self.markdown is not None:
            self._write(report, model, self.markdown)
        if self.plot is not None:
            self._draw(report, model, self.plot)
        if as_json:
            self.ui.json(self._json(report, model))
        else:
            self._show(report)

    def _json(self, report: EvalReport, model: LoadedModel) -> dict[str, Any]:
        body = {
            **eval_object(report, self.options),
            "store": str(self.store),
            "model": model.spec,
            "dtype": model.identity.dtype,
            "synthetic": model.synthetic,
        }
        value = envelope("eval", body, device=str(model.device), disk=self.disk)
        return {**value, "versions": eval_versions()}

    def _show(self, report: EvalReport) -> None:
        for text in task_lines(report):
            self.ui.line(text)
        self.ui.show(eval_table(report))
        for text in report.notes:
            self.ui.line(text)

    def _write(self, report: EvalReport, model: LoadedModel, path: Path) -> None:
        from pipelines.eval_report import markdown, write_markdown

        assert self.answered is not None, "there is a report"
        command = command_line(self, *self.answered, model)
        facts = {
            "command": f"`{command}`",
            "model": f"{picture_title(model)} in {model.identity.dtype} on {model.device}",
            "date": _now(),
            "versions": ", ".join(f"{name} {number}" for name, number in eval_versions().items()),
        }
        if self.disk.emulated:
            facts["disk"] = self._slower_disk()
        write_markdown(path, markdown(report, _TITLE, facts))
        self.ui.note(f"written to {path}")

    def _slower_disk(self) -> str:
        rate, latency = self.disk.bandwidth_bytes_s, self.disk.latency_s
        parts = [] if rate is None else [f"{format_bytes(rate)}/s"]
        parts += [f"{format_seconds(latency)} per read"] if latency else []
        return f"slowed down on purpose: {', '.join(parts)}"

    def _draw(self, report: EvalReport, model: LoadedModel, path: Path) -> None:
        from pipelines.eval_plots import plot_eval

        plot_eval(report, path, picture_title(model))
        self.ui.note(f"drawn in {path}")

    def _keep(self, report: EvalReport, model: LoadedModel) -> None:
        """Store verdicts. One that can't be kept costs a warning, not the result."""
        for text in unkept(report):
            self.ui.warn(text)
        facts = {
            "date": _now(),
            "model": model.spec,
            "dtype": model.identity.dtype,
            "synthetic": model.synthetic,
            "versions": eval_versions(),
        }
        verdicts = verdicts_of(report, self.options.base, facts)
        if not verdicts:
            return
        try:
            paths = self._paths(model)
            for path in dict.fromkeys(paths.values()):
                theirs = [verdict for verdict in verdicts if paths[verdict["system"]] == path]
                keep_verdicts(path, model.identity, theirs)
        except ImpressError as error:
            self.ui.warn(f"the store keeps no verdict: {error}")

    def _paths(self, model: LoadedModel) -> dict[str, Path]:
        """By system the store that it answered from: its layout may not be the named one's."""
        from pipelines.eval_answers import Results
        from pipelines.eval_stores import EvalStores
        from pipelines.ttft_values import Layout

        assert self.answered is not None, "there is a report"
        layouts = {s.name: Layout.of(s) for s in self.options.made_systems if s.reuse}
        # Where each layout is was noted beside the answers, so that no prefix is needed to tell.
        results = Results(self.answered.results)
        paths = EvalStores(self.store, model, list(layouts.values()), [], results).paths
        return {name: paths[layout] for name, layout in layouts.items()}


def require_folders(data_dir: Path | None, include_path: Path | None) -> None:
    """Raise InvalidValueError for a folder of tasks that is not there."""
    for name, folder in (("data-dir", data_dir), ("include-path", include_path)):
        if folder is not None and not folder.is_dir():
            raise InvalidValueError(f"--{name} {folder}: no such folder; {_HOLDS[name]}")


def _now() -> str:
    """Date and time of now in UTC, to the second."""
    return datetime.now(tz=UTC).isoformat(timespec="seconds")
