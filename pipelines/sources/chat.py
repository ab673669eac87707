"""Chat transcripts as prefixes: whole transcripts, or every turn of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipelines.sources.base import PrefixSource, RawPrefix
from pipelines.sources.jsonfiles import Row, count_lines, iter_json, iter_jsonl
from pipelines.sources.messages import (
    encode_messages,
    parse_messages,
    transcript_template,
    turn_ends,
)
from pipelines.text import TokenizerLike
from store.errors import SourceError

#: Fields that may hold a transcript's messages, in the order they are looked for.
MESSAGE_FIELDS = ("messages", "traj", "conversations", "conversation", "history")


class ChatSource(PrefixSource):
    """Transcripts of .json (one array) and .jsonl files, in file order.

    A transcript is a list of messages, or an object with such a list in ``messages_field``.
    With ``turns="last"`` a transcript is one prefix; with ``"all"`` each complete turn is one
    that extends the turn before, and the user's next message is its query.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        template: str = "auto",
        turns: str = "last",
        messages_field: str | None = None,
        name_field: str | None = None,
        max_tokens: int | None = None,
        limit: int | None = None,
    ) -> None:
        super().__init__(max_tokens=max_tokens, limit=limit)
        self.paths = list(paths)
        self.template = template
        self.turns = turns
        self.messages_field = messages_field
        self.name_field = name_field

    def raw_count(self) -> int | None:
        """Transcripts, or complete turns of them; reads the files."""
        if self.turns == "last" and all(path.suffix == ".jsonl" for path in self.paths):
            return sum(count_lines(path) for path in self.paths)
        rows = [row for path in self.paths for row in _transcripts(path)]
        if self.turns == "last":
            return len(rows)
        return sum(len(turn_ends(parse_messages(self._messages(r), r.where))) for r in rows)

    def raw_items(self, tokenizer: TokenizerLike, longest: int) -> Iterator[RawPrefix]:  # noqa: ARG002
        """Yield the prefixes of each transcript."""
        template = transcript_template(tokenizer, self.template)
        for path in self.paths:
            for row in _transcripts(path):
                yield from self._prefixes(tokenizer, path, row, template)

    def _prefixes(
        self, tokenizer: TokenizerLike, path: Path, row: Row, template: str
    ) -> Iterator[RawPrefix]:
        messages = parse_messages(self._messages(row), row.where)
        ends = turn_ends(messages)
        try:
            encoded = encode_messages(tokenizer, messages, ends, template)
        except SourceError as error:
            raise SourceError(f"{row.where}: {error}") from error
        name = self._name(path, row)
        for turn, (end, ids) in enumerate(zip(ends, encoded, strict=True), start=1):
            if self.turns == "last" and end != len(messages):
                continue
            label = name if self.turns == "last" else f"{name}-turn-{turn}"
            following = messages[end : end + 1]
            source = {
                "kind": "chat",
                "path": str(path),
                "row": row.number,
                "template": template,
                "queries": [message["content"] for message in following],
            }
            yield RawPrefix(label, row.where, ids, source)

    def _messages(self, row: Row) -> Any:
        if isinstance(row.value, list):
            return row.value
        if not isinstance(row.value, dict):
            raise SourceError(
                f"{row.where}: a JSON {type(row.value).__name__}; a transcript is a list of "
                "messages or an object that holds one"
            )
        names = (self.messages_field,) if self.messages_field else MESSAGE_FIELDS
        for name in names:
            if name in row.value:
                return row.value[name]
        raise SourceError(
            f"{row.where}: no field {' or '.join(names)} (fields: "
            f"{', '.join(row.value) or 'none'}); name it in a recipe with messages_field"
        )

    def _name(self, path: Path, row: Row) -> str:
        if self.name_field and isinstance(row.value, dict) and self.name_field in row.value:
            return str(row.value[self.name_field])
        return f"{path.stem}-{row.number}"


def _transcripts(path: Path) -> Iterator[Row]:
    """Rows of the file; an array of messages (not of transcripts) is one transcript."""
    if path.suffix == ".jsonl":
        yield from iter_jsonl(path)
        return
    rows = list(iter_json(path))
    first = rows[0].value if rows else None
    if isinstance(first, dict) and ("role" in first or "from" in first):
        yield Row(str(path), 1, [row.value for row in rows])
    else:
        yield from rows
