"""``impress query`` without a PROMPT: questions typed one after another.

Reads with prompt_toolkit on a terminal (history, editing) and plain lines from a pipe.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from impress_cli.envelope import envelope
from impress_cli.render import flat_table
from impress_cli.retention import Attend, Evidence, word
from impress_cli.ui import stdin_lines
from impress_cli.units import parse_retention
from store.errors import ImpressError, InvalidValueError

if TYPE_CHECKING:
    from prompt_toolkit.history import History

    from impress_cli.asking import Asker, Reply
    from pipelines.ask import Prefix

HELP = (
    "/prefix [ID|FILE]   ask about another prefix (without: about none)",
    "/retention R        share of the prefix to select, 1.0 for all of it",
    "/evidence NAME      auto, sketch, heads, full, static or random: what to select by",
    "/attend NAME        loaded, or selected only",
    "/system NAME        impress, recompute, as-like, as-h2o-lfu, … (see --system)",
    "/chat on|off        on: each question continues the conversation",
    "/stats              figures of the last answer and of the store",
    "/help               this text",
    "/quit               leave (also Ctrl-D)",
)


def run_interactive(asker: Asker, *, as_json: bool) -> int:
    """Answer questions until the input ends or ``/quit``; the exit code is 0."""
    session = Session(asker, as_json)
    session.greet()
    for line in _read_lines():
        if not session.handle(line.strip()):
            break
    return 0


class Session:
    """What one interactive run remembers: the prefix, the chat, the last answer."""

    def __init__(self, asker: Asker, as_json: bool = False) -> None:
        self.asker = asker
        self.as_json = as_json
        self.prefix: Prefix = asker.find(asker.settings.prefix)
        self.chat: Prefix | None = None
        self.last: Reply | None = None
        self._commands: dict[str, Callable[[str], None]] = {
            "prefix": self._set_prefix,
            "retention": self._set_retention,
            "evidence": self._set_evidence,
            "attend": self._set_attend,
            "system": self._set_system,
            "chat": self._set_chat,
            "stats": self._show_stats,
            "help": self._show_help,
        }

    def greet(self) -> None:
        """Say what is loaded and how to get help."""
        self.asker.ui.note(f"{self.asker.model.spec} is ready; /help lists commands")

    def handle(self, line: str) -> bool:
        """Answer a question or run a command; False ends the session. Errors are one line."""
        if line in ("/quit", "/exit"):
            return False
        if not line:
            return True
        try:
            if line.startswith("/"):
                self._run(line)
            else:
                self._ask(line)
        except ImpressError as error:
            self.asker.ui.error(str(error))
        except KeyboardInterrupt:
            # Ctrl-C ends an answer, not the session.
            self.asker.ui.line()
            self.asker.ui.note("answer interrupted; /quit leaves")
        return True

    def _run(self, line: str) -> None:
        name, _, argument = line[1:].partition(" ")
        action = self._commands.get(name)
        if action is None:
            raise InvalidValueError(f"/{name} is no command; /help lists them")
        action(argument.strip())

    def _ask(self, prompt: str) -> None:
        from pipelines.ask import after_turn

        asker = self.asker
        about = self.prefix if self.chat is None else self.chat
        reply = asker.ask(about, prompt, None if self.as_json else asker.ui.stream)
        self.last = reply
        if self.as_json:
            asker.ui.json(asker.reply_object(reply), indent=None)
        else:
            asker.show_stats(reply)
        if self.chat is not None:
            self.chat = after_turn(asker.model, about, prompt, list(reply.answer.token_ids))

    def _set_prefix(self, key: str) -> None:
        self.prefix = self.asker.find(key or None)
        self.chat = None if self.chat is None else self.prefix

    def _set_retention(self, text: str) -> None:
        self._choose(retention=parse_retention(text, "/retention"))

    def _set_evidence(self, name: str) -> None:
        self._choose(evidence=word(Evidence, name, "/evidence"))

    def _set_attend(self, name: str) -> None:
        self._choose(attend=word(Attend, name, "/attend"))

    def _choose(self, **values: Any) -> None:
        self._change(choice=self.asker.settings.choice.changed(**values))

    def _change(self, **values: Any) -> None:
        """Change settings, unless they contradict each other."""
        changed = replace(self.asker.settings, **values)
        changed.chosen(), changed.way()
        self.asker.change(**values)

    def _set_system(self, name: str) -> None:
        from pipelines.systems import make_system

        system, memory = make_system(name), self.asker.store.memory
        self._change(system=name)
        used = (memory.policy, memory.half_life)
        if system.reuse and (system.policy, system.half_life) != used:
            self.asker.ui.note(
                f"what stays in memory is still chosen by {memory.policy}; start again with "
                f"--system {name} for its policy"
            )

    def _set_chat(self, state: str) -> None:
        if state not in ("on", "off"):
            raise InvalidValueError(f"/chat {state!r} is unknown; use on or off")
        self.chat = self.prefix if state == "on" else None

    def _show_stats(self, _argument: str) -> None:
        from pipelines.overview import store_stats

        stats = store_stats(self.asker.store)
        if self.as_json:
            self.asker.ui.json(envelope("stats", stats), indent=None)
            return
        if self.last is not None:
            self.asker.ui.show(flat_table(asdict(self.last.answer.stats)))
        self.asker.ui.show(flat_table(stats))

    def _show_help(self, _argument: str) -> None:
        for text in HELP:
            (self.asker.ui.note if self.as_json else self.asker.ui.line)(text)


def _read_lines() -> Iterator[str]:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield from stdin_lines()
        return
    from prompt_toolkit import PromptSession

    session: PromptSession[str] = PromptSession(history=_history())
    while True:
        try:
            yield session.prompt("> ")
        except EOFError:
            return
        except KeyboardInterrupt:  # Ctrl-C clears the line, as in a shell
            continue


def _history() -> History:
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    folder = Path(typer.get_app_dir("impress"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # no home to write to: history lasts as long as the session
        return InMemoryHistory()
    return FileHistory(str(folder / "history"))
