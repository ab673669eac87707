"""The ``impress`` command: its tree of subcommands and its one error boundary.

Importing this module imports neither torch nor zarr, so that ``--help`` answers at once: every
command imports what it needs when it runs.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from impress_cli import (
    bench,
    build_store,
    demo,
    evaluate,
    gc,
    inspect_node,
    ls,
    models,
    query,
    reorder,
    repair,
    rm,
    stats,
    verify,
)
from impress_cli.envelope import impress_version
from impress_cli.ui import Ui, configure_logging
from store.errors import ImpressError, InvalidValueError

#: Accepted before and after the command's name.
GLOBAL_FLAGS = ("--debug", "--quiet", "-q", "--no-progress")
INTERRUPTED = 130

# Typer brings its own copy of click; reaching the class through a public name works with both.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="impress",
    help="Long shared prompt prefixes made cheap: their keys and values are stored once on disk "
    "and loaded instead of recomputed. The flags below may also stand after the command.",
    pretty_exceptions_enable=False,
    # Plain help: twice as fast as boxes, and long choices are not broken in the middle.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module, name in (
    (demo, "demo"),
    (build_store, "build-store"),
    (reorder, "reorder"),
    (query, "query"),
    (evaluate, "eval"),
    (ls, "ls"),
    (inspect_node, "inspect"),
    (stats, "stats"),
    (verify, "verify"),
    (repair, "repair"),
    (gc, "gc"),
    (rm, "rm"),
    (models, "models"),
):
    app.command(name)(module.command)
app.add_typer(bench.app, name="bench")


def _show_version(value: bool) -> None:
    if value:
        sys.stdout.write(f"impress {impress_version()}\n")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    ctx: typer.Context,
    _version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            help="Show the version and exit.",
            show_default=False,
        ),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Show tracebacks and debug logs.", show_default=False),
    ] = False,
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet", "-q", help="Only results, warnings and errors.", show_default=False
        ),
    ] = False,
    no_progress: Annotated[
        bool, typer.Option("--no-progress", help="No progress bars.", show_default=False)
    ] = False,
) -> None:
    """Set up output for the command that follows."""
    ctx.obj = Ui(debug=debug, quiet=quiet, show_progress=not no_progress)
    configure_logging(ctx.obj)
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def hoist_global_flags(arguments: Sequence[str]) -> list[str]:
    """Move the global flags to the front, so that they work after the command's name too.

    What follows ``--`` is left alone.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    head = arguments[:end]
    flags = [argument for argument in head if argument in GLOBAL_FLAGS]
    rest = [argument for argument in head if argument not in GLOBAL_FLAGS]
    return [*flags, *rest, *arguments[end:]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; no exception leaves this function.

    0 done, 1 failed, 2 wrong usage, 130 interrupted. A failure is one line on stderr;
    ``--debug`` adds the traceback.
    """
    argv = hoist_global_flags(sys.argv[1:] if arguments is None else arguments)
    ui = Ui(debug="--debug" in argv)
    try:
        code = _run(argv)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:
        code = _close_stdout_quietly()
    except Exception as error:  # noqa: BLE001  the boundary: every failure becomes one line
        code = _report(ui, error)
    if code == INTERRUPTED:
        ui.error(_interrupted(argv))
    return code


def _interrupted(argv: Sequence[str]) -> str:
    """What an interrupted command leaves; a bench's stores are temporary unless it keeps them."""
    words = [word for word in argv if not word.startswith("-")]
    kept = any(word.partition("=")[0] == "--keep" for word in argv)
    if words[:1] == ["bench"] and not kept:
        return "interrupted; nothing was stored: run the same command again to measure anew"
    return (
        "interrupted; what was finished is stored and the store is consistent: "
        "run the same command again to go on"
    )


def _run(argv: list[str]) -> int:
    command = typer.main.get_command(app)
    try:
        result = command.main(args=argv, prog_name="impress", standalone_mode=False)
    except SystemExit as stop:
        result = stop.code
    return result if isinstance(result, int) else 0


def _report(ui: Ui, error: Exception) -> int:
    if ui.debug:
        traceback.print_exception(error, file=sys.stderr)
    if isinstance(error, UsageError):
        context = getattr(error, "ctx", None)
        path = context.command_path if context else "impress"
        message = error.format_message().rstrip(".")  # type: ignore[attr-defined]
        message = message.replace("Value error, ", "")
        ui.error(f"{message}; see '{path} --help'")
        return 2
    if isinstance(error, ImpressError):
        ui.error(str(error))
        return 2 if isinstance(error, InvalidValueError) else 1
    if isinstance(error, typer.Abort):
        ui.error("the input ended before an answer was given")
        return 1
    hint = "" if ui.debug else "; run the command again with --debug to see where"
    ui.error(f"unexpected {type(error).__name__}: {error}{hint}")
    return 1


def _close_stdout_quietly() -> int:
    # The reader has gone (`impress ls | head`): nothing to say, and nothing to flush at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


if __name__ == "__main__":
    sys.exit(main())
