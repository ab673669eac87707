"""From a recipe or from files to a prefix source; the sources are in `pipelines.sources`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from pipelines.recipe import ChatSpec, DocumentsSpec, FewshotSpec, JsonlSpec, Recipe
from pipelines.sources.base import PrefixItem, PrefixSource, RawPrefix
from pipelines.sources.chat import MESSAGE_FIELDS, ChatSource
from pipelines.sources.documents import TEXT_SUFFIXES, DocumentsSource
from pipelines.sources.fewshot import FewshotSource
from pipelines.sources.jsonfiles import iter_jsonl
from pipelines.sources.jsonl import RAG_FIELDS, JsonlSource, RowFields
from pipelines.text import TokenizerLike, encode_prefix, encode_question, read_text
from store.errors import SourceError

__all__ = [
    "PrefixItem",
    "PrefixSource",
    "TokenizerLike",
    "encode_prefix",
    "encode_question",
    "read_text",
    "source_from_files",
    "source_from_recipe",
]


class JoinedSource(PrefixSource):
    """Several sources one after the other."""

    def __init__(self, parts: Sequence[PrefixSource]) -> None:
        super().__init__()
        self.parts = list(parts)

    def raw_count(self) -> int | None:
        """Sum over the parts, None if one does not know."""
        counts = [part.raw_count() for part in self.parts]
        return None if None in counts else sum(count or 0 for count in counts)

    def raw_items(self, tokenizer: TokenizerLike, longest: int) -> Iterator[RawPrefix]:
        """Yield the prefixes of each part."""
        for part in self.parts:
            part.warnings = self.warnings
            yield from part.raw_items(tokenizer, longest)


def source_from_recipe(
    recipe: Recipe, base_dir: Path, overrides: Sequence[Path] = ()
) -> PrefixSource:
    """The source a recipe describes.

    Parameters
    ----------
    recipe
        The recipe.
    base_dir
        Folder that relative paths in the recipe are meant from: the recipe file's.
    overrides
        Files or folders given by the user, which replace the recipe's ``path`` (for ``fewshot``
        one folder, which replaces ``data_dir``); relative to the current folder.

    Raises
    ------
    SourceError
        The recipe needs files and none are given, or a path does not exist.
    """
    source = _source_of(recipe, base_dir, overrides)
    source.query = recipe.query.choice()
    return source


def _source_of(recipe: Recipe, base_dir: Path, overrides: Sequence[Path]) -> PrefixSource:
    spec = recipe.prefixes
    if isinstance(spec, FewshotSpec):
        return _fewshot(spec, base_dir, overrides)
    paths = _existing(overrides) if overrides else _resolve(spec.path, base_dir)
    if not paths:
        raise SourceError(
            f"recipe {recipe.name!r} names no files; give them after its name, for example: "
            f"impress build-store {recipe.name} FILE"
        )
    if isinstance(spec, DocumentsSpec):
        return DocumentsSource(
            paths,
            template=spec.template,
            system=spec.system,
            queries=recipe.queries.prompts,
            max_tokens=spec.max_tokens,
            limit=spec.limit,
        )
    return _jsonl(spec, paths) if isinstance(spec, JsonlSpec) else _chat(spec, paths)


def _jsonl(spec: JsonlSpec, paths: Sequence[Path]) -> JsonlSource:
    fields = RowFields(
        text=spec.text_field,
        queries=spec.queries_field,
        name=spec.name_field,
        contexts=spec.contexts_field,
        context_format=spec.context_format,
        top=spec.top,
    )
    return JsonlSource(
        paths,
        fields=fields,
        template=spec.template,
        system=spec.system,
        max_tokens=spec.max_tokens,
        limit=spec.limit,
    )


def _chat(spec: ChatSpec, paths: Sequence[Path]) -> ChatSource:
    return ChatSource(
        paths,
        template=spec.template,
        turns=spec.turns,
        messages_field=spec.messages_field,
        name_field=spec.name_field,
        max_tokens=spec.max_tokens,
        limit=spec.limit,
    )


def _fewshot(spec: FewshotSpec, base_dir: Path, overrides: Sequence[Path]) -> FewshotSource:
    if len(overrides) > 1 or (overrides and not overrides[0].is_dir()):
        raise SourceError(
            f"{overrides[-1]}: a few-shot recipe takes one folder that holds {spec.task}/*.jsonl"
        )
    data_dir = overrides[0] if overrides else None
    if data_dir is None and spec.data_dir is not None:
        data_dir = _existing([base_dir / Path(spec.data_dir).expanduser()])[0]
    return FewshotSource(
        spec.task,
        shots=spec.shots,
        variants=spec.variants,
        seed=spec.seed,
        max_tokens=spec.max_tokens,
        data_dir=data_dir,
        include_path=None if spec.include_path is None else base_dir / spec.include_path,
    )


def source_from_files(paths: Sequence[Path], *, template: str = "auto") -> PrefixSource:
    """A source for files given without a recipe, by their names and first rows.

    ``.txt`` and ``.md`` (and folders of them) are documents, ``.json`` is an array of chat
    transcripts, ``.jsonl`` has one prefix, one transcript or one list of retrieved passages
    (``ctxs``) per row.

    Raises
    ------
    SourceError
        No files, a file that does not exist, or one of another kind.
    """
    if not paths:
        raise SourceError("no files given; give .txt, .md, .json or .jsonl files, or a recipe")
    parts = [_source_for(path, template) for path in _existing(paths)]
    return parts[0] if len(parts) == 1 else JoinedSource(parts)


def _source_for(path: Path, template: str) -> PrefixSource:
    if path.is_dir() or path.suffix in TEXT_SUFFIXES:
        return DocumentsSource([path], template=template)
    if path.suffix == ".json":
        return ChatSource([path], template=template)
    if path.suffix == ".jsonl":
        return _source_for_rows(path, template)
    raise SourceError(
        f"{path}: files that end in {path.suffix or 'nothing'!r} are not known; give .txt, .md, "
        ".json or .jsonl files, or a recipe"
    )


def _source_for_rows(path: Path, template: str) -> PrefixSource:
    first = next(iter_jsonl(path), None)
    value = first.value if first else {"prefix": ""}
    if isinstance(value, list) or (
        isinstance(value, dict) and any(name in value for name in MESSAGE_FIELDS)
    ):
        return ChatSource([path], template=template)
    if isinstance(value, dict) and isinstance(value.get("ctxs"), list):
        return JsonlSource([path], fields=RAG_FIELDS, template=template)
    return JsonlSource([path], template=template)


def _resolve(patterns: Sequence[str], base_dir: Path) -> list[Path]:
    """Paths of a recipe: relative ones from its folder, glob patterns sorted."""
    found: list[Path] = []
    for pattern in patterns:
        path = base_dir / Path(pattern).expanduser()
        if any(sign in pattern for sign in "*?[") and not path.exists():
            anchor = Path(path.anchor or ".")
            matches = sorted(anchor.glob(str(path.relative_to(anchor))))
            if not matches:
                raise SourceError(f"{path}: no file fits this pattern; check the recipe's path")
            found += matches
        else:
            found += _existing([path])
    return found


def _existing(paths: Sequence[Path]) -> list[Path]:
    for path in paths:
        if not path.exists():
            raise SourceError(f"{path}: no such file; check the path")
    return list(paths)
