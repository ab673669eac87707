"""Text documents as prefixes: one per .txt or .md file, or per row of a .jsonl file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from pipelines.sources.base import PrefixSource, RawPrefix
from pipelines.sources.jsonl import JsonlSource
from pipelines.text import SEPARATOR, TokenizerLike, encode_prefix, read_text
from store.errors import SourceError

TEXT_SUFFIXES = (".txt", ".md")


class DocumentsSource(PrefixSource):
    """Files in the order given; a folder stands for the text files in it, sorted by name.

    ``system`` is text put before every document, so that all prefixes share it. ``queries`` are
    questions that go with every document.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        template: str = "auto",
        system: str | None = None,
        queries: Sequence[str] = (),
        max_tokens: int | None = None,
        limit: int | None = None,
    ) -> None:
        super().__init__(max_tokens=max_tokens, limit=limit)
        self.paths = expand_folders(paths)
        self.template = template
        self.system = system
        self.queries = list(queries)

    def raw_count(self) -> int | None:
        """Files, and rows of .jsonl files; empty files are counted until they are read."""
        return sum(
            self._rows(path).raw_count() if path.suffix == ".jsonl" else 1 for path in self.paths
        )

    def raw_items(self, tokenizer: TokenizerLike, longest: int) -> Iterator[RawPrefix]:
        """Yield one prefix per document, named after its file."""
        for path in self.paths:
            if path.suffix == ".jsonl":
                rows = self._rows(path)
                rows.warnings = self.warnings
                yield from rows.raw_items(tokenizer, longest)
                continue
            text = read_text(path)
            if not text.strip():
                self.warnings.append(f"{path}: empty file, left out")
                continue
            ids = encode_prefix(tokenizer, join_system(self.system, text), self.template)
            source = {
                "kind": "documents",
                "path": str(path),
                "template": self.template,
                "queries": self.queries,
            }
            yield RawPrefix(path.stem, str(path), ids, source)

    def _rows(self, path: Path) -> JsonlSource:
        return JsonlSource([path], template=self.template, system=self.system)


def join_system(system: str | None, text: str) -> str:
    """A document with the shared text in front."""
    return f"{system}{SEPARATOR}{text}" if system else text


def expand_folders(paths: Sequence[Path]) -> list[Path]:
    """Files, with folders replaced by the text files in them. Raises SourceError for none."""
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            found.append(path)
            continue
        inside = sorted(p for p in path.iterdir() if p.suffix in TEXT_SUFFIXES and p.is_file())
        if not inside:
            raise SourceError(
                f"{path}: no {' or '.join(TEXT_SUFFIXES)} files in this folder; name another "
                "folder or the files themselves"
            )
        found += inside
    return found
