"""Where output goes: results to stdout, notes, warnings and progress to stderr.

Owns the three flags that every command has (``--debug``, ``--quiet``, ``--no-progress``) and
the consoles. It knows nothing about what is shown.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import typer
    from rich.console import Console, RenderableType

    from pipelines.progress import Progress

OWN_LOGGERS = ("store", "pipelines", "impress_cli")


@dataclass(frozen=True, slots=True)
class Ui:
    """Output of one run of the command."""

    debug: bool = False
    quiet: bool = False
    show_progress: bool = True
    _noted: set[str] = field(default_factory=set, init=False, repr=False, compare=False)

    def console(self) -> Console:
        """Console on stdout; without colour or cropping where stdout is not a terminal."""
        from rich.console import Console

        if sys.stdout.isatty():
            return Console(highlight=False)
        return Console(highlight=False, no_color=True, width=160, soft_wrap=True)

    def show(self, renderable: RenderableType) -> None:
        """Print a table or another rich value to stdout."""
        self.console().print(renderable)

    def line(self, text: str = "") -> None:
        """Print one line of result, as it is."""
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def stream(self, text: str) -> None:
        """Print a piece of an answer at once."""
        sys.stdout.write(text)
        sys.stdout.flush()

    def json(self, value: dict[str, Any], *, indent: int | None = 2) -> None:
        """Print one JSON object; ``indent=None`` gives a JSON line."""
        self.line(json.dumps(value, ensure_ascii=False, indent=indent))

    def note(self, text: str) -> None:
        """Say something worth knowing on stderr, unless ``--quiet``."""
        if not self.quiet:
            _to_stderr(f"note: {text}")

    def note_once(self, text: str) -> None:
        """`note`, unless this run of the command has said it that way already."""
        if text not in self._noted:
            self._noted.add(text)
            self.note(text)

    def warn(self, text: str) -> None:
        """Warn on stderr, also with ``--quiet``."""
        _to_stderr(f"warning: {text}")

    def error(self, text: str) -> None:
        """One line that says what failed."""
        _to_stderr(f"error: {text}")

    @contextmanager
    def progress(self) -> Iterator[Progress]:
        """Give a callback for pipelines that draws bars on stderr while the work is long."""
        from pipelines.progress import silent

        if self.quiet or not self.show_progress:
            yield silent
            return
        from impress_cli.progress import ProgressView

        with ProgressView() as view:
            yield view


def ui_of(ctx: typer.Context) -> Ui:
    """Return the output of the command that ``ctx`` belongs to."""
    ui = ctx.find_object(Ui)
    assert ui is not None, "the root callback sets it"
    return ui


def _to_stderr(text: str) -> None:
    sys.stderr.write(" ".join(text.splitlines()) + "\n")
    sys.stderr.flush()


class _LogHandler(logging.Handler):
    """Writes records to the stderr of the moment (tests and prompt_toolkit replace it)."""

    def emit(self, record: logging.LogRecord) -> None:
        _to_stderr(f"{record.levelname.lower()}: {self.format(record)}")


def configure_logging(ui: Ui) -> None:
    """Show our own log records on stderr and keep other libraries' warnings out of the way."""
    level = logging.DEBUG if ui.debug else logging.ERROR if ui.quiet else logging.WARNING
    for name in OWN_LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers = [h for h in logger.handlers if not isinstance(h, _LogHandler)]
        logger.addHandler(_LogHandler())
        logger.setLevel(level)
    # A user can't act on a dependency's deprecation warning; --debug still shows it.
    logging.captureWarnings(not ui.debug)
    warnings_logger = logging.getLogger("py.warnings")
    if not warnings_logger.handlers:
        warnings_logger.addHandler(logging.NullHandler())
    warnings_logger.propagate = ui.debug


def stdin_lines() -> Iterator[str]:
    """Lines of standard input; bytes that are no UTF-8 become surrogates, refused line by line."""
    reconfigure = getattr(sys.stdin, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(encoding="utf-8", errors="surrogateescape")
    yield from sys.stdin
