"""The contract of a prefix source, and what all sources share: cutting, naming, warnings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipelines.text import TokenizerLike
from store.errors import InvalidValueError


@dataclass(frozen=True, slots=True)
class PrefixItem:
    """One prefix to store.

    ``ids`` is uint32 of shape (n,), n ≥ 1. ``source`` is JSON-able and says where the prefix
    comes from: ``kind``, ``path`` or ``task``, ``template`` (how to encode a question after it,
    see `pipelines.text`), ``cut_tokens`` (dropped from the end), ``queries`` (texts) and ``query``
    (what its recipe says of `SparseOptions`; absent without a recipe that does).
    """

    name: str
    ids: np.ndarray
    source: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RawPrefix:
    """A prefix before it is cut to length; ``where`` names it in warnings."""

    name: str
    where: str
    ids: np.ndarray
    source: dict[str, Any]


class PrefixSource(ABC):
    """A data set read as prefixes, in a fixed order.

    Subclasses write `raw_items`. Equal prefixes are yielded as often as they occur (the builder
    counts duplicates); names are unique within one source. ``warnings`` grows while `items` is
    consumed and starts anew with each call.
    """

    def __init__(self, *, max_tokens: int | None = None, limit: int | None = None) -> None:
        self.max_tokens = max_tokens
        self.limit = limit
        self.query: dict[str, Any] = {}
        self.warnings: list[str] = []

    def count(self) -> int | None:
        """How many prefixes `items` will yield at most, or None where only reading would tell."""
        total = self.raw_count()
        return total if total is None or self.limit is None else min(total, self.limit)

    def items(self, tokenizer: TokenizerLike, max_tokens: int) -> Iterator[PrefixItem]:
        """Yield the prefixes one by one; nothing is kept.

        Parameters
        ----------
        tokenizer
            The model's tokenizer.
        max_tokens
            Longest prefix the caller can use; the source's own limit applies as well. Longer
            ones are cut at the end, with a warning that says by how much.

        Raises
        ------
        InvalidValueError
            ``max_tokens`` below 1.
        SourceError
            Data that can't be read; the message names file, and line or byte.
        """
        if max_tokens < 1:
            raise InvalidValueError(f"max_tokens is {max_tokens}; at least 1 token is needed")
        self.warnings.clear()
        longest = min(max_tokens, self.max_tokens or max_tokens)
        names: dict[str, int] = {}
        for number, raw in enumerate(self.raw_items(tokenizer, longest)):
            if self.limit is not None and number >= self.limit:
                return
            yield self._cut(raw, _unique(raw.name, names), longest)

    @abstractmethod
    def raw_count(self) -> int | None:
        """`count` before the limit."""

    @abstractmethod
    def raw_items(self, tokenizer: TokenizerLike, longest: int) -> Iterator[RawPrefix]:
        """Yield prefixes of any length; one without tokens is left out with a warning.

        What is longer than ``longest`` tokens will be cut: a source that composes its prefixes
        should stay below it.
        """

    def _cut(self, raw: RawPrefix, name: str, longest: int) -> PrefixItem:
        cut = max(0, len(raw.ids) - longest)
        if cut:
            self.warnings.append(
                f"{raw.where}: {len(raw.ids)} tokens cut to {longest}, the last {cut} are dropped"
            )
        source = {**raw.source, "cut_tokens": cut}
        if self.query:
            source["query"] = self.query
        return PrefixItem(name, raw.ids[:longest], source)


def _unique(name: str, seen: dict[str, int]) -> str:
    """``name``, or ``name-2``, ``name-3``, … where it was given before."""
    if name not in seen:
        seen[name] = 1
        return name
    while True:
        seen[name] += 1
        candidate = f"{name}-{seen[name]}"
        if candidate not in seen:
            seen[candidate] = 1
            return candidate
