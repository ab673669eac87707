"""What ``impress eval`` runs on, and what happens to its result: shown, written, drawn, kept.

The evaluation is `pipelines.evaluate`'s, the options are `evaluate`'s.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from impress_cli.bench_inputs import picture_title
from impress_cli.build_choices import existing_info
from impress_cli.envelope import envelope
from impress_cli.eval_tables import eval_object, eval_table, eval_versions, task_lines
from impress_cli.options import DiskSettings, MemorySettings
from impress_cli.ui import Ui
from impress_cli.units import format_bytes, format_seconds
from impress_cli.verdicts import verdicts_of
from store.errors import InvalidValueError, StoreError

if TYPE_CHECKING:
    from pipelines.eval_values import EvalOptions, EvalReport
    from pipelines.models import LoadedModel

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

    def load(self, ui: Ui, store: Path) -> LoadedModel:
        """Load the model: the one named, else the store's, else the default one.

        Raises ImpressError, also for a memory budget that is of no use to the store.
        """
        from impress_cli.session import DEFAULT_MODEL, loaded_model, opened_store

        info = existing_info(store)
        spec, dtype = (DEFAULT_MODEL, "auto") if info is None else (info.model_spec, info.dtype)
        if info is not None and self._limited:
            with opened_store(ui, store, memory=self.memory):
                pass  # what is wrong with the budgets is said before a model is loaded
        return loaded_model(
            ui,
            self.model or spec,
            dtype=self.dtype or dtype,
            device=self.device,
            threads=self.threads,
        )

    @property
    def _limited(self) -> bool:
        """Whether anything was said about memory."""
        return (self.memory.device_bytes, self.memory.host_bytes) != (None, None)

    def evaluate(self, outcome: Outcome, model: LoadedModel, results: Path) -> EvalReport:
        """Answer what was not answered yet, and return the result of all."""
        from pipelines.evaluate import evaluate
        from store.run_maker import MemoryOptions

        memory = None
        if self._limited:
            memory = MemoryOptions(self.memory.device_bytes or 0, self.memory.host_bytes or 0)
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
            )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was asked for, and where its result goes."""

    ui: Ui
    store: Path
    options: EvalOptions
    disk: DiskSettings
    markdown: Path | None
    plot: Path | None

    def check(self) -> None:
        """Refuse what can be refused before a model is loaded. Raises InvalidValueError."""
        folders = {"data-dir": self.options.data_dir, "include-path": self.options.include_path}
        for name, folder in folders.items():
            if folder is not None and not folder.is_dir():
                raise InvalidValueError(f"--{name} {folder}: no such folder; {_HOLDS[name]}")
        if self.markdown is not None:
            from pipelines.eval_report import require_markdown

            require_markdown(self.markdown)
        if self.plot is not None:
            from pipelines.plots import require_plots

            require_plots(self.plot)

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

        facts = {
            "command": f"`{self.command_line()}`",
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
        from store.engine import PrefixStore

        facts = {
            "date": _now(),
            "model": model.spec,
            "dtype": model.identity.dtype,
            "synthetic": model.synthetic,
            "versions": eval_versions(),
        }
        verdicts = verdicts_of(report, facts)
        if not verdicts:
            return
        try:
            with PrefixStore.open(self.store, identity=model.identity) as store:
                known = [_undated(verdict) for verdict in store.verdicts()]
                for verdict in verdicts:
                    if _undated(verdict) not in known:
                        store.add_verdict(verdict)
        except StoreError as error:
            self.ui.warn(f"the store keeps no verdict: {error}")

    def command_line(self) -> str:
        """The command that gives this result again, as far as options decide about answers."""
        asked = self.options
        given = [
            ("--store", self.store),
            ("--tasks", ",".join(asked.tasks)),
            *(("--retention", f"{share:g}") for share in asked.retention),
            ("--systems", ",".join(asked.systems)),
            ("--limit", asked.limit),
            ("--num-fewshot", asked.num_fewshot),
            ("--max-prefix-tokens", asked.max_prefix_tokens),
            ("--data-dir", asked.data_dir),
            ("--include-path", asked.include_path),
            ("--seed", asked.seed),
        ]
        words = [str(word) for pair in given if pair[1] is not None for word in pair]
        words += [] if asked.controls else ["--no-controls"]
        words += ["--recompute", "all"] if asked.recompute_all else []
        return shlex.join(["impress", "eval", *words])


def _undated(verdict: dict[str, Any]) -> dict[str, Any]:
    """Return a verdict without its date: a command that is run again finds the same."""
    return {name: value for name, value in verdict.items() if name != "date"}


def _now() -> str:
    """Date and time of now in UTC, to the second."""
    return datetime.now(tz=UTC).isoformat(timespec="seconds")
