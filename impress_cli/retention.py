"""What of a stored prefix a query loads: its options, checked before a model is loaded.

Owns what was asked for, what a prefix's recipe adds to that, and the notes about options that
have no effect. What the values mean is `store.itf.options`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from store.errors import InvalidValueError

if TYPE_CHECKING:
    from pipelines.systems import System
    from store.itf.options import SparseOptions


class Evidence(StrEnum):
    """Where the keys come from that importance is computed with."""

    AUTO = "auto"
    SKETCH = "sketch"
    HEADS = "heads"
    FULL = "full"
    STATIC = "static"
    RANDOM = "random"


class Attend(StrEnum):
    """Which prefix tokens are attended to."""

    LOADED = "loaded"
    SELECTED = "selected"


class Sets(StrEnum):
    """How many sets of tokens a layer selects."""

    ONE = "one"
    PER_HEAD = "per-head"


class Rows(StrEnum):
    """Which query rows a sketch scores."""

    AUTO = "auto"
    ALL = "all"
    SAMPLED = "sampled"


class Fallback(StrEnum):
    """When a layer reads all keys after all."""

    AUTO = "auto"
    NEVER = "never"
    ALWAYS = "always"


RetentionOption = Annotated[
    str | None,
    typer.Option(
        "--retention",
        metavar="R",
        help="Share of the prefix tokens to select in each layer, such as 0.25. Default: what the "
        "prefix's recipe says, else 1.0, which loads everything and is exact.",
        show_default=False,
    ),
]
EvidenceOption = Annotated[
    Evidence | None,
    typer.Option(
        "--evidence",
        help="What tells important tokens: sketch, a low-bit copy of all keys; heads, the keys of "
        "some heads; full, all keys; static, past queries; random. Default: auto, the smaller of "
        "sketch and heads that the store has, else full.",
        show_default=False,
    ),
]
AttendOption = Annotated[
    Attend | None,
    typer.Option(
        "--attend",
        help="loaded (default): to every token that had to be read anyway; selected: only to "
        "those selected.",
        show_default=False,
    ),
]
SetsOption = Annotated[
    Sets | None,
    typer.Option(
        "--sets",
        help="one (default): the same tokens for all heads of a layer; per-head: a set for each "
        "KV head.",
        show_default=False,
    ),
]
RowsOption = Annotated[
    Rows | None,
    typer.Option(
        "--rows",
        help="With evidence sketch, which rows of the question's queries are scored: all; sampled, "
        "where the query heads of a KV head take turns; auto (default), sampled with --attend "
        "loaded, else all.",
        show_default=False,
    ),
]
AlphaOption = Annotated[
    float | None,
    typer.Option(
        "--alpha",
        metavar="A",
        help="With evidence heads: larger lowers the agreement that the heads must show. "
        "Default: 0.6.",
        show_default=False,
    ),
]
ThresholdOption = Annotated[
    float | None,
    typer.Option(
        "--threshold",
        metavar="T",
        help="With evidence heads: the agreement itself, from 0 to 1, in place of --alpha.",
        show_default=False,
    ),
]
FallbackOption = Annotated[
    Fallback | None,
    typer.Option(
        "--fallback",
        help="Read all keys of a layer: auto (default), where its probe heads don't agree; never; "
        "always.",
        show_default=False,
    ),
]

#: Options that need probe heads to compare, one that they leave no room for (where they agree
#: there is one set, after a fallback one per KV head), and one that needs a sketch.
_NEED_HEADS, _NOT_WITH_HEADS, _NEED_SKETCH = {"alpha", "threshold", "fallback"}, {"sets"}, {"rows"}


@dataclass(frozen=True, slots=True)
class Choice:
    """What was asked for; None where nothing was said. Raises InvalidValueError when made.

    See `SparseOptions` for the fields.
    """

    retention: float | None = None
    evidence: str | None = None
    attend: str | None = None
    sets: str | None = None
    rows: str | None = None
    alpha: float | None = None
    threshold: float | None = None
    fallback: str | None = None

    def __post_init__(self) -> None:
        if self.alpha is not None and self.threshold is not None:
            raise InvalidValueError(
                f"--alpha {self.alpha:g} and --threshold {self.threshold:g} exclude each other: "
                "one sets the agreement by a formula, the other is it; give one of them"
            )
        self.options({})

    def given(self) -> dict[str, Any]:
        """Return the fields that were said, words as plain text."""
        said = {name: value for name, value in asdict(self).items() if value is not None}
        return {n: str(value) if isinstance(value, StrEnum) else value for n, value in said.items()}

    def changed(self, **values: Any) -> Self:
        """Return a choice with other values."""
        return replace(self, **values)

    def options(self, recipe: Mapping[str, Any]) -> SparseOptions:
        """Return the engine's value: what was asked for, else the recipe's, else the default."""
        from store.itf.options import SparseOptions

        known = {f.name: recipe[f.name] for f in fields(self) if f.name in recipe}
        return SparseOptions(**{**known, **self.given()})

    def of_system(self, system: System) -> Self:
        """Return a choice where a system fills in what was not said.

        Raises InvalidValueError for a retention below 1 where the system loads everything.
        """
        if not system.sparse:
            if self.retention is not None and self.retention < 1.0 and system.reuse:
                raise InvalidValueError(
                    f"--retention {self.retention:g} has no effect with system {system.name}, "
                    "which loads everything; leave it out (or say 1.0), or take another system"
                )
            return self.changed(retention=1.0) if system.reuse else self
        if system.name == "impress":
            return self  # what it sets are the defaults, which a prefix's recipe may change
        values = {"evidence": system.evidence, "attend": system.attend}
        return self.changed(**{n: v for n, v in values.items() if getattr(self, n) is None})

    def notes(self, recipe: Mapping[str, Any], plan: str) -> list[str]:
        """Return what should be said about a question with these options, one sentence each."""
        used, given = self.options(recipe), self.given()
        if plan == "force-recompute":
            return _without_effect(set(given), "when everything is recomputed")
        if not used.sparse:
            friends = {name for name in given if name != "retention"}
            why = "at retention 1.0, which loads everything; set one below 1, such as 0.25"
            return _without_effect(friends, why)
        found = []
        if "retention" in recipe and "retention" not in given:
            found.append(
                f"retention {used.retention:g}, as the recipe of this prefix says; "
                "retention 1.0 loads everything and is exact"
            )
        return found if used.evidence == "auto" else found + self.idle(used.evidence)

    def idle(self, evidence: str) -> list[str]:
        """Return what should be said where this evidence was used: options without effect."""
        return idle(self.given(), [evidence])


def idle(given: Iterable[str], evidence: Sequence[str]) -> list[str]:
    """Return what should be said of options that have an effect with none of these evidences."""
    names = set(given)
    for one in evidence:
        names &= _idle_names(one)
    return _without_effect(names, f"with evidence {', '.join(evidence)}")


def _idle_names(evidence: str) -> set[str]:
    """Options without effect with one evidence."""
    names = _NOT_WITH_HEADS if evidence == "heads" else _NEED_HEADS
    return names if evidence == "sketch" else names | _NEED_SKETCH


def _without_effect(names: set[str], why: str) -> list[str]:
    listed = " and ".join(sorted(names))
    have = "has" if len(names) == 1 else "have"
    return [f"{listed} {have} no effect {why}"] if listed else []


def word(kind: type[StrEnum], text: str, command: str) -> str:
    """Check a word typed at the interactive prompt; the message lists what is allowed."""
    allowed = [member.value for member in kind]
    if text not in allowed:
        raise InvalidValueError(f"{command} {text!r} is unknown; use {', '.join(allowed)}")
    return text
