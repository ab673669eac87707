"""Recipes: YAML files that say which model, which prefixes, and how to store and query them.

Owns the schema and the messages for what does not fit it. It reads no data: `pipelines.prefixes`
turns a recipe's ``prefixes`` into a source.
"""

from __future__ import annotations

import difflib
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from pipelines.text import read_text
from store.errors import SourceError
from store.itf.options import SparseOptions
from store.types import MAX_CHUNK_TOKENS, MIN_CHUNK_TOKENS

Template = Literal["auto", "none"]
Paths = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda value: (value,) if isinstance(value, str) else value),
]


class _Section(BaseModel):
    """A frozen part of a recipe; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class _Prefixes(_Section):
    """What every source takes. ``max_tokens`` and ``limit`` None mean no limit of its own."""

    template: Template = "auto"
    max_tokens: int | None = Field(default=None, ge=1)
    limit: int | None = Field(default=None, ge=1)


class DocumentsSpec(_Prefixes):
    """Text files, folders of them, or glob patterns; ``path`` may be left to the command line."""

    source: Literal["documents"]
    path: Paths = ()
    system: str | None = None


class JsonlSpec(_Prefixes):
    """JSON Lines rows; see `pipelines.sources.jsonl.RowFields` for the fields."""

    source: Literal["jsonl"]
    path: Paths = ()
    system: str | None = None
    text_field: str | None = None
    queries_field: str = "queries"
    name_field: str = "name"
    contexts_field: str | None = None
    context_format: str = "Title: {title}\n{text}"
    top: int | None = Field(default=None, ge=1)


class ChatSpec(_Prefixes):
    """Transcripts; see `pipelines.sources.chat.ChatSource`."""

    source: Literal["chat"]
    path: Paths = ()
    turns: Literal["last", "all"] = "last"
    messages_field: str | None = None
    name_field: str | None = None


class FewshotSpec(_Section):
    """Few-shot prefixes of an lm-eval task; see `pipelines.sources.fewshot.FewshotSource`.

    ``shots`` None means as many as fit ``max_tokens``. ``data_dir`` holds
    ``<task>/<split>.jsonl``; without it the task's own data set is downloaded.
    """

    source: Literal["fewshot"]
    task: str
    shots: int | None = Field(default=None, ge=1)
    variants: int = Field(default=1, ge=1)
    seed: int = 1
    max_tokens: int | None = Field(default=None, ge=1)
    data_dir: str | None = None
    include_path: str | None = None


PrefixesSpec = Annotated[
    DocumentsSpec | JsonlSpec | ChatSpec | FewshotSpec, Field(discriminator="source")
]


class QueriesSpec(_Section):
    """Questions: ``prompts`` for every prefix, or a split of the task and how many of it."""

    prompts: tuple[str, ...] = ()
    split: str | None = None
    limit: int | None = Field(default=None, ge=1)


class StoreSpec(_Section):
    """How the KV is laid out on disk."""

    chunk_tokens: int = Field(default=16, ge=MIN_CHUNK_TOKENS, le=MAX_CHUNK_TOKENS)
    probe: Literal["heads", "sketch", "both", "none"] = "sketch"
    codec: str = "none"


class QuerySpec(_Section):
    """Defaults of a query against the store; see `SparseOptions` for what they mean.

    What is None is left to the engine.
    """

    system: Literal["impress"] = "impress"
    retention: float | None = Field(default=None, gt=0, le=1)
    evidence: Literal["auto", "sketch", "heads", "full", "static", "random"] | None = None
    attend: Literal["loaded", "selected"] | None = None
    sets: Literal["one", "per-head"] | None = None
    rows: Literal["auto", "all", "sampled"] | None = None
    alpha: float | None = Field(default=None, ge=0)
    fallback: Literal["auto", "never", "always"] | None = None
    max_new_tokens: int = Field(default=64, ge=1)

    def choice(self) -> dict[str, Any]:
        """Return what the recipe says of `SparseOptions`; nothing where it says nothing."""
        return self.model_dump(exclude={"system", "max_new_tokens"}, exclude_none=True)

    def sparse(self) -> SparseOptions:
        """Return what the recipe says, as the engine's value."""
        return SparseOptions(**self.choice())


class Recipe(_Section):
    """One recipe."""

    name: str
    description: str = ""
    model: str | None = None
    prefixes: PrefixesSpec
    queries: QueriesSpec = QueriesSpec()
    store: StoreSpec = StoreSpec()
    query: QuerySpec = QuerySpec()


def shipped_folder() -> Path:
    """Folder of the recipes that come with the package."""
    return Path(str(resources.files("recipes")))


def shipped_recipes() -> list[str]:
    """Names of the recipes that come with the package, sorted."""
    return sorted(path.stem for path in shipped_folder().glob("*.yaml"))


def recipe_path(name_or_path: str | Path) -> Path:
    """The recipe's file: a shipped name, or a path that ends in .yaml or .yml.

    Relative paths inside a recipe are meant from this file's folder.

    Raises
    ------
    SourceError
        No such recipe; the message lists the shipped ones.
    """
    text = str(name_or_path)
    shipped = shipped_folder() / f"{text}.yaml"
    if text in shipped_recipes():
        return shipped
    path = Path(text).expanduser()
    if path.suffix in (".yaml", ".yml") and path.is_file():
        return path
    near = difflib.get_close_matches(text, shipped_recipes(), n=1)
    hint = f"; did you mean {near[0]!r}? Or" if near else ";"
    raise SourceError(
        f"no recipe {text!r}{hint} give a .yaml file or one of: {', '.join(shipped_recipes())}"
    )


def load_recipe(name_or_path: str | Path) -> Recipe:
    """Read and check a recipe, by shipped name or path.

    Raises
    ------
    SourceError
        No such recipe, not YAML, an unknown key (the nearest known one is named), a missing
        key or a value outside what is allowed.
    """
    path = recipe_path(name_or_path)
    try:
        data = yaml.safe_load(read_text(path))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "can't be parsed"
        raise SourceError(f"{path}{place}: not YAML ({problem}); correct the file") from error
    if not isinstance(data, dict):
        raise SourceError(f"{path}: a recipe must be a mapping with name and prefixes")
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise SourceError(f"{path}: {_explain(error)}") from error


def _explain(error: ValidationError) -> str:
    """The first problem as one sentence: where in the YAML, what is allowed."""
    problems = error.errors(include_url=False)
    # An unknown key first: a misspelt required key is also reported as missing.
    first = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    keys = _yaml_keys(first["loc"])
    where = ".".join(keys)
    if first["type"] == "extra_forbidden":
        known = _known_keys(first["loc"])
        near = difflib.get_close_matches(keys[-1], known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return f"unknown key {where!r}; {hint}known keys here: {', '.join(known)}"
    if first["type"] == "missing":
        return f"key {where!r} is missing; add it"
    if first["type"] in ("union_tag_invalid", "union_tag_not_found"):
        tag = f" {first['input'].get('source')!r}" if isinstance(first["input"], dict) else ""
        return f"{where}: source{tag} is not known; use one of {', '.join(_SPECS)}"
    return f"{where} is {first['input']!r}: {first['msg']}"


_SPECS: dict[str, type[BaseModel]] = {
    get_args(spec.model_fields["source"].annotation)[0]: spec
    for spec in (DocumentsSpec, JsonlSpec, ChatSpec, FewshotSpec)
}
_SECTIONS: dict[str, type[BaseModel]] = {
    "queries": QueriesSpec,
    "store": StoreSpec,
    "query": QuerySpec,
}


def _yaml_keys(loc: tuple[Any, ...]) -> list[str]:
    """pydantic's location without the name of the source, which is no key of the file."""
    parts = [str(part) for part in loc]
    if len(parts) > 1 and parts[0] == "prefixes" and parts[1] in _SPECS:
        del parts[1]
    return parts


def _known_keys(loc: tuple[Any, ...]) -> list[str]:
    """Keys allowed where the unknown one stands."""
    if len(loc) == 1:
        return list(Recipe.model_fields)
    section = _SPECS[str(loc[1])] if loc[0] == "prefixes" else _SECTIONS[str(loc[0])]
    return list(section.model_fields)
