"""Rows of JSON Lines files as prefixes: ``{prefix, queries?, name?}``, or retrieved passages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipelines.sources.base import PrefixSource, RawPrefix
from pipelines.sources.jsonfiles import as_texts, count_lines, iter_jsonl, require_object
from pipelines.text import SEPARATOR, TokenizerLike, encode_prefix
from store.errors import SourceError


class RowFields(NamedTuple):
    """Names of the fields of a row.

    ``text`` None means ``prefix`` or else ``text``. Where ``contexts`` is given, it names a list
    of passages and the prefix is the first ``top`` of them, each written as ``context_format``
    with the passage's own fields.
    """

    text: str | None = None
    queries: str = "queries"
    name: str = "name"
    contexts: str | None = None
    context_format: str = "Title: {title}\n{text}"
    top: int | None = None


#: The shape of retrieval data sets such as NQ-open: question, answers, ctxs[{title, text}].
RAG_FIELDS = RowFields(queries="question", contexts="ctxs")


class JsonlSource(PrefixSource):
    """One prefix per row, read line by line.

    ``system`` is text put before every prefix, so that all share it.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        fields: RowFields = RowFields(),  # noqa: B008 (immutable)
        template: str = "auto",
        system: str | None = None,
        max_tokens: int | None = None,
        limit: int | None = None,
    ) -> None:
        super().__init__(max_tokens=max_tokens, limit=limit)
        self.paths = list(paths)
        self.fields = fields
        self.template = template
        self.system = system

    def raw_count(self) -> int:
        """Lines of the files that are not blank."""
        return sum(count_lines(path) for path in self.paths)

    def raw_items(self, tokenizer: TokenizerLike, longest: int) -> Iterator[RawPrefix]:  # noqa: ARG002
        """Yield one prefix per row; its name is the row's, or file name and line number."""
        for path in self.paths:
            for row in iter_jsonl(path):
                values = require_object(row)
                text = self._text(values, row.where)
                if not text.strip():
                    self.warnings.append(f"{row.where}: empty prefix, left out")
                    continue
                if self.system:
                    text = f"{self.system}{SEPARATOR}{text}"
                source = {
                    "kind": "jsonl",
                    "path": str(path),
                    "line": row.number,
                    "template": self.template,
                    "queries": as_texts(
                        values.get(self.fields.queries), row.where, self.fields.queries
                    ),
                }
                name = str(values.get(self.fields.name) or f"{path.stem}-{row.number}")
                ids = encode_prefix(tokenizer, text, self.template)
                yield RawPrefix(name, row.where, ids, source)

    def _text(self, values: dict[str, Any], where: str) -> str:
        if self.fields.contexts is not None:
            passages = _field(values, self.fields.contexts, where)
            return _join_passages(passages, self.fields, where)
        name = self.fields.text or ("prefix" if "prefix" in values else "text")
        text = _field(values, name, where)
        if not isinstance(text, str):
            raise SourceError(f"{where}: {name!r} is {type(text).__name__}; it must be a text")
        return text


def _field(values: dict[str, Any], name: str, where: str) -> Any:
    if name not in values:
        raise SourceError(
            f"{where}: no field {name!r} (fields: {', '.join(values) or 'none'}); name the right "
            "one in a recipe with text_field or contexts_field"
        )
    return values[name]


def _join_passages(passages: Any, fields: RowFields, where: str) -> str:
    if not isinstance(passages, list) or not all(isinstance(p, dict) for p in passages):
        raise SourceError(f"{where}: {fields.contexts!r} must be a list of objects")
    try:
        texts = [fields.context_format.format_map(p) for p in passages[: fields.top]]
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise SourceError(
            f"{where}: passages do not fit context_format {fields.context_format!r} ({error!r}); "
            "use fields that every passage has"
        ) from error
    return SEPARATOR.join(texts)
