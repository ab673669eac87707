"""Progress bars on stderr for `pipelines.progress` events.

A bar appears only once the work has taken two seconds, or at once when the first seconds show
that it will; on a stderr that is not a terminal a plain line is written now and then instead.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING

from impress_cli.units import format_bytes, format_count, format_seconds
from pipelines.progress import ProgressEvent

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

SHOW_AFTER_S = 2.0
PLAIN_EVERY_S = 10.0


def describe(event: ProgressEvent, elapsed_s: float, started_at: float) -> str:
    """One line for an event: amount, rate and time left, as far as the unit allows.

    ``started_at`` is the amount already done when the clock started (a resumed build), so that
    the rate covers only what was done since.
    """
    show = format_bytes if event.unit == "bytes" else format_count
    unit = "" if event.unit in ("", "bytes") else f" {event.unit}"
    of = f" of {show(event.total)}" if event.total else ""
    parts = [f"{show(event.done)}{of}{unit}"]
    rate = (event.done - started_at) / elapsed_s if elapsed_s > 0 else 0.0
    if rate > 0 and event.unit:
        shown = show(rate) if event.unit == "bytes" or rate >= 10 else f"{rate:.2g}"
        parts.append(f"{shown}{unit}/s")
    if rate > 0 and event.total and event.total > event.done:
        parts.append(f"{format_seconds((event.total - event.done) / rate)} left")
    if event.note:
        parts.append(event.note)
    return " · ".join(parts)


@dataclass(slots=True)
class _Task:
    started: float
    started_at: float
    last_plain: float
    bar: TaskID | None = None


@dataclass(slots=True)
class ProgressView:
    """Callback for progress events; use as a context manager so that the bars go away."""

    clock: Callable[[], float] = time.monotonic
    tasks: dict[str, _Task] = field(default_factory=dict)
    live: RichProgress | None = None

    def __enter__(self) -> ProgressView:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None

    def __call__(self, event: ProgressEvent) -> None:
        """Take one event; draws at most what is due."""
        now = self.clock()
        task = self.tasks.setdefault(event.task, _Task(now, event.done, now))
        if now - task.started < SHOW_AFTER_S:
            return
        text = describe(event, now - task.started, task.started_at)
        if sys.stderr.isatty():
            self._draw(task, event, text)
        elif now - task.last_plain >= PLAIN_EVERY_S:
            task.last_plain = now
            sys.stderr.write(f"{event.task}: {text}\n")
            sys.stderr.flush()

    def _draw(self, task: _Task, event: ProgressEvent, text: str) -> None:
        live = self.live or self._start()
        if task.bar is None:
            task.bar = live.add_task(event.task, total=event.total, text=text)
        live.update(task.bar, completed=event.done, total=event.total, text=text)

    def _start(self) -> RichProgress:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self.live = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[text]}"),
            console=Console(stderr=True),
            transient=True,
        )
        self.live.start()
        return self.live
