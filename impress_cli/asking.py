"""One open store and one loaded model, ready for questions; shared by the three ways to ask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from impress_cli.envelope import envelope
from impress_cli.options import DiskSettings, Dtype
from impress_cli.render import explain_lines, ttft_lines
from impress_cli.session import loaded_model, opened_store, stored_model
from impress_cli.ui import Ui

if TYPE_CHECKING:
    from pipelines.ask import Divergence, Prefix
    from pipelines.generate import Answer
    from pipelines.models import LoadedModel
    from store.engine import PrefixStore


@dataclass(frozen=True, slots=True)
class Settings:
    """How questions are answered: the options of ``impress query``, checked."""

    prefix: str | None = None
    template: str = "auto"
    retention: float = 1.0
    plan: str = "auto"
    insert: str = "exact"
    system: str = "impress"
    max_new_tokens: int = 64
    explain: bool = False


class Reply(NamedTuple):
    """An answer, the prefix it is about, and where the match ended."""

    answer: Answer
    prefix: Prefix
    divergence: Divergence


@dataclass(slots=True)
class Asker:
    """Answers questions on one store with one model."""

    ui: Ui
    store: PrefixStore
    model: LoadedModel
    settings: Settings
    disk: DiskSettings
    notes: list[str]

    def find(self, key: str | None) -> Prefix:
        """Return the prefix that ``key`` names, or an empty one; say which kind it is."""
        from pipelines.ask import Prefix, find_prefix

        if key is None:
            return Prefix(_no_tokens(), template=self.settings.template)
        prefix = find_prefix(self.store, self.model, key, self.settings.template)
        of = f"file {key}" if prefix.origin == "file" else f"stored prefix {prefix.name}"
        self.ui.note(f"{of}: {len(prefix.ids)} tokens")
        if cut := prefix.source.get("cut_tokens"):
            when = (
                "when it was stored"
                if prefix.origin == "stored"
                else f"from the end: this model leaves a prefix {self.model.prefix_limit}"
            )
            self.ui.warn(f"{cut} tokens were cut {when}")
        return prefix

    def ask(
        self, prefix: Prefix, prompt: str, on_text: Callable[[str], None] | None = None
    ) -> Reply:
        """Answer one question. Raises ImpressError for what can't be answered."""
        from pipelines.ask import ask, divergence
        from pipelines.generate import QueryOptions

        chosen = self.settings
        options = QueryOptions(
            max_new_tokens=chosen.max_new_tokens,
            retention=chosen.retention,
            plan=chosen.plan,
            # The turns of a chat would stay in the store without a name to remove them by.
            insert="never" if prefix.origin == "chat" else chosen.insert,
        )
        answer = ask(self.store, self.model, prefix, prompt, options, on_text)
        self._announce_io()
        parting = divergence(answer.matched, prefix.ids, self.model.tokenizer)
        return Reply(answer, prefix, parting)

    def _announce_io(self) -> None:
        """Say once, after the first read, if O_DIRECT was asked for and can't be had."""
        note = self.store.io_note()
        if note is not None and note not in self.notes:
            self.notes.append(note)
            self.ui.note(note)

    def one_shot(self, prompt: str, *, as_json: bool) -> int:
        """Answer one question from the command line; the exit code is 0."""
        prefix = self.find(self.settings.prefix)
        reply = self.ask(prefix, prompt, None if as_json else self.ui.stream)
        if as_json:
            self.ui.json(self.reply_object(reply))
        else:
            self.ui.line()
            self.show_stats(reply)
        return 0

    def show_stats(self, reply: Reply) -> None:
        """Print the TTFT lines and, if asked for, the explanation."""
        if not self.ui.quiet:
            for text in ttft_lines(reply.answer.stats):
                self.ui.line(text)
        if reply.answer.insert_note:
            self.ui.note(reply.answer.insert_note)
        if self.settings.explain:
            for text in explain_lines(reply.answer, reply.divergence, len(reply.prefix.ids)):
                self.ui.line(text)

    def reply_object(self, reply: Reply, **more: Any) -> dict[str, Any]:
        """Build the versioned JSON object of an answer (docs/json.md)."""
        answer, prefix = reply.answer, reply.prefix
        body = {
            **more,
            "text": answer.text,
            "tokens": [int(token) for token in answer.token_ids],
            "system": self.settings.system,
            **asdict(answer.stats),
            "prefix": {
                "name": prefix.name,
                "origin": prefix.origin,
                "prefix_id": prefix.prefix_id,
                "tokens": len(prefix.ids),
                "template": prefix.template,
            },
            "inserted_tokens": answer.inserted_tokens,
            "insert_note": answer.insert_note,
            "model": self.model.spec,
            "synthetic": self.model.synthetic,
            "notes": self.notes,
        }
        if self.settings.explain:
            body["explain"] = explain_object(reply)
        return envelope("query", body, device=str(self.model.device), disk=self.disk)

    def change(self, **settings: Any) -> None:
        """Change settings for the questions that follow."""
        self.settings = replace(self.settings, **settings)


def explain_object(reply: Reply) -> dict[str, Any]:
    """JSON object of ``--explain``."""
    matched = reply.answer.matched
    return {
        "nodes": [
            {"node": part.node.node_id, "used_tokens": part.used, "tokens": part.node.length}
            for part in matched.nodes
        ],
        "matched_tokens": matched.matched_len,
        "stop": matched.stop,
        "divergence": reply.divergence._asdict(),
    }


@contextmanager
def opened_asker(
    ui: Ui,
    path: Path,
    settings: Settings,
    *,
    disk: DiskSettings,
    model: str | None,
    dtype: Dtype | None,
    device: str,
    threads: int | None,
) -> Iterator[Asker]:
    """Load the model that the store names (or ``model``) and open the store for it."""
    spec, stored_dtype = stored_model(path)
    chosen = stored_dtype if dtype is None else dtype.value
    loaded = loaded_model(ui, model or spec, dtype=chosen, device=device, threads=threads)
    opened = opened_store(ui, path, identity=loaded.identity, disk=disk, device=str(loaded.device))
    with opened as store:
        yield Asker(ui, store, loaded, settings, disk, list(store.notes))


def _no_tokens() -> Any:
    from pipelines.ask import NO_TOKENS

    return NO_TOKENS
