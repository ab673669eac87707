"""One run of ``impress reorder`` on one store: probe layouts, rows, and what is said of them.

Its options are `reorder`'s, what is decided and done is `pipelines`'.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from impress_cli.probe_options import ProbeChoice, probe_json
from impress_cli.ui import Ui
from impress_cli.units import format_seconds

if TYPE_CHECKING:
    from pipelines.fidelity_texts import Question
    from pipelines.models import LoadedModel
    from pipelines.probes import ProbeReport
    from pipelines.reorder import ReorderReport
    from pipelines.reorder_plan import ReorderOptions, ReorderPlan
    from store.access import AccessStats
    from store.engine import PrefixStore
    from store.probes import ProbeSettings


@dataclass(frozen=True, slots=True)
class Request:
    """The options about rows, checked.

    Parameters
    ----------
    questions
        To learn from in place of past ones; None without.
    watch_s
        Seconds between two passes; None for one pass.
    explicit
        Whether rows were asked for; else only probe layouts are changed.
    """

    options: ReorderOptions
    questions: list[Question] | None
    watch_s: float | None
    dry_run: bool
    explicit: bool


class ReorderJob:
    """What `run` needs to know."""

    def __init__(self, ui: Ui, path: Path, request: Request, choice: ProbeChoice) -> None:
        self._ui, self._path, self._request, self._choice = ui, path, request, choice

    def run(self, device: str, threads: int | None, *, as_json: bool) -> None:
        """Change probe layouts and rows, or say what would change."""
        from impress_cli.session import opened_store

        with opened_store(self._ui, self._path) as opened:
            settings = self._choice.settings(opened.shape, opened.probes())
        model = self._model(settings, device, threads)
        identity = None if model is None else model.identity
        where = "cpu" if model is None else str(model.device)
        opening = opened_store(self._ui, self._path, identity=identity, device=where)
        with opening as opened:
            access = self._calibrated(opened, model)
            if model is not None and settings.calibrate is not None and not self._request.dry_run:
                settings = self._with_heads(opened, model, settings)
            if self._request.watch_s is not None:
                self._watch(opened, settings, self._request.watch_s)
            elif self._request.dry_run:
                self._plan(opened, settings, access, as_json=as_json)
            else:
                self._change(opened, settings, access, as_json=as_json)

    def _model(
        self, settings: ProbeSettings, device: str, threads: int | None
    ) -> LoadedModel | None:
        """Load the store's model, where questions are to be asked or heads to be chosen."""
        from impress_cli.session import loaded_model, stored_model

        choosing = settings.calibrate is not None and not self._request.dry_run
        if self._request.questions is None and not choosing:
            return None
        spec, dtype = stored_model(self._path)
        return loaded_model(self._ui, spec, dtype=dtype, device=device, threads=threads)

    def _calibrated(self, opened: PrefixStore, model: LoadedModel | None) -> AccessStats | None:
        """Ask the questions that were given; None without. Changes nothing stored."""
        from pipelines.calibrate import calibrate

        questions = self._request.questions
        if questions is None or model is None:
            return None
        with self._ui.progress() as progress:
            return calibrate(opened, model, questions, progress=progress)

    def _with_heads(
        self, opened: PrefixStore, model: LoadedModel, settings: ProbeSettings
    ) -> ProbeSettings:
        """Choose the heads that ``--probe-heads auto`` asks for; changes nothing stored."""
        from pipelines.probes import calibrate_heads

        with self._ui.progress() as progress:
            heads = calibrate_heads(opened, model, settings.calibrate, progress)
        return replace(settings, heads=heads, calibrate=None)

    def _plan(
        self,
        opened: PrefixStore,
        settings: ProbeSettings,
        access: AccessStats | None,
        *,
        as_json: bool,
    ) -> None:
        """Say what would change."""
        from impress_cli.reorder_tables import planned_probes, reorder_object
        from pipelines.probes import first_heads, plan_probes
        from pipelines.reorder_plan import ReorderPlan, plan_reorder

        known: ProbeSettings = settings
        anew: tuple[str, ...] = ()
        if settings.calibrate is not None:
            # Which heads is not known yet; how many is, and with it the bytes.
            known = replace(settings, heads=first_heads(opened.shape, settings.calibrate))
            anew = ("heads",)
        probes = planned_probes(plan_probes(opened, known, anew=anew), len(opened.nodes()))
        rows = ReorderPlan(())
        if self._request.explicit:
            rows = plan_reorder(opened, self._request.options, access)
        body = reorder_object(rows, probes, [], self._request.options.order)
        body = {"dry_run": True, **body, "probe": probe_json(settings)}
        self._show(body, rows, settings, as_json=as_json)

    def _change(
        self,
        opened: PrefixStore,
        settings: ProbeSettings,
        access: AccessStats | None,
        *,
        as_json: bool,
    ) -> None:
        from impress_cli.reorder_tables import changed_probes, reorder_object
        from pipelines.reorder import ReorderReport, reorder_store

        probes, options = self._match_probes(opened, settings), self._request.options
        report = ReorderReport()
        if self._request.explicit:
            with self._ui.progress() as progress:
                report = reorder_store(opened, options, progress, access=access)
        warnings = [*probes.warnings, *report.warnings]
        body = reorder_object(report.plan, changed_probes(probes), warnings, options.order)
        body["probe"] = probe_json(settings)
        self._show(body, report.plan, settings, as_json=as_json)

    def _match_probes(self, opened: PrefixStore, settings: ProbeSettings) -> ProbeReport:
        from pipelines.probes import match_probes

        if settings != opened.probes():
            opened.set_probes(settings)
        with self._ui.progress() as progress:
            return match_probes(opened, progress)

    def _show(
        self, body: dict[str, Any], rows: ReorderPlan, settings: ProbeSettings, *, as_json: bool
    ) -> None:
        from impress_cli.envelope import envelope
        from impress_cli.reorder_tables import probe_line, reorder_table, row_lines

        if as_json:
            self._ui.json(envelope("reorder", body))
            return
        for text in body["warnings"]:
            self._ui.warn(text)
        notes = self._probe_notes(settings)
        if self._request.explicit:
            dry_run = self._request.dry_run
            if dry_run:
                self._ui.show(reorder_table(rows))
            for text in row_lines(rows, body["order"], dry_run=dry_run):
                self._ui.line(text)
            notes += self._row_notes(rows)
        self._ui.line(probe_line(body))
        for text in notes:
            self._ui.note(text)

    def _probe_notes(self, settings: ProbeSettings) -> list[str]:
        """What the line about probe layouts does not tell."""
        if settings.calibrate is not None and self._choice.heads == "auto":
            return ["which heads auto takes is known once it ran; nodes that have them are skipped"]
        if not self._choice.given and not settings.specs:
            return [
                f"the store keeps no probe layouts; 'impress reorder --store {self._path} "
                "--probe sketch' adds a sketch"
            ]
        return []

    def _row_notes(self, rows: ReorderPlan) -> list[str]:
        """How to get statistics, where there are none and some are needed."""
        needed = self._request.options.order == "importance" and rows.nodes
        if not needed or rows.chunks_before is not None:
            return []
        return [
            "no question has said yet what is important: ask some with a retention below 1 "
            f"('impress query --store {self._path} --retention 0.25'), or give questions with "
            "--calibrate FILE"
        ]

    def _watch(self, opened: PrefixStore, settings: ProbeSettings, period_s: float) -> None:
        """Go on until Ctrl-C, which is how this ends, and so no failure."""
        from pipelines.reorder import watch

        for text in self._match_probes(opened, settings).warnings:
            self._ui.warn(text)
        every = f"every {format_seconds(period_s)}, while no question is asked"
        self._ui.note(f"watching {self._path}: reordered {every}; Ctrl-C ends it")
        try:
            watch(opened, self._request.options, period_s, on_pass=self._show_pass)
        except KeyboardInterrupt:
            self._ui.note("stopped watching; what was finished is stored, the store is consistent")

    def _show_pass(self, report: ReorderReport) -> None:
        """Say what a pass changed, if anything."""
        from impress_cli.reorder_tables import row_lines

        for text in report.warnings:
            self._ui.warn(text)
        if report.plan.rewritten:
            for text in row_lines(report.plan, self._request.options.order):
                self._ui.line(text)
