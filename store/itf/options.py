"""How a sparse query chooses what it loads: checked values, no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from store.errors import InvalidValueError

EVIDENCE = ("auto", "sketch", "heads", "full", "static", "random")
ATTEND = ("loaded", "selected")
FALLBACK = ("auto", "never", "always")
SETS = ("one", "per-head")
ROWS = ("auto", "all", "sampled")


@dataclass(frozen=True, slots=True)
class SparseOptions:
    """What of a stored prefix a query loads; raises `InvalidValueError` for a value not allowed.

    Parameters
    ----------
    retention
        Fraction of the prefix tokens that are selected in each layer; 1.0 loads everything and
        identifies nothing.
    evidence
        Where the keys come from that importance is computed with; ``auto`` takes the smaller of
        sketch and probe heads that every matched node has, else all keys.
    attend
        ``loaded``: to every token whose keys and values were fetched; ``selected``: the paper's.
    sets
        ``one`` set of tokens for all KV heads of a layer, or one ``per-head``.
    rows
        Which query rows a sketch scores: ``all``; ``sampled``, where the query heads of a KV head
        take turns, cheaper and less exact; ``auto`` samples where whole chunks are attended to,
        which hides the difference (docs/decisions.md).
    alpha, threshold
        Agreement that probe heads must show (paper section on ITF); a fixed ``threshold`` replaces
        the formula that ``alpha`` belongs to.
    fallback
        ``auto``: read all keys of a layer whose probe heads don't agree; ``never``; ``always``.
    ahead
        Whether chunks that past queries wanted are read before this one says that it does, too
        (evidence sketch, which never falls back).
    seed
        Of the control ``random``.
    """

    retention: float = 1.0
    evidence: str = "auto"
    attend: str = "loaded"
    sets: str = "one"
    rows: str = "auto"
    alpha: float = 0.6
    threshold: float | None = None
    fallback: str = "auto"
    ahead: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 < self.retention <= 1.0:
            raise InvalidValueError(
                f"retention {self.retention:g} is out of range; use a fraction above 0, up to 1.0"
            )
        if not 0.0 <= self.alpha < float("inf"):
            raise InvalidValueError(f"alpha {self.alpha:g} is out of range; use 0 or more")
        if self.threshold is not None and not 0.0 <= self.threshold <= 1.0:
            raise InvalidValueError(
                f"threshold {self.threshold:g} is out of range; use a fraction from 0 to 1"
            )
        for name, value, allowed in (
            ("evidence", self.evidence, EVIDENCE),
            ("attend", self.attend, ATTEND),
            ("sets", self.sets, SETS),
            ("rows", self.rows, ROWS),
            ("fallback", self.fallback, FALLBACK),
        ):
            if value not in allowed:
                raise InvalidValueError(
                    f"{name} {value!r} is not known; use one of {', '.join(allowed)}"
                )

    @property
    def sampled(self) -> bool:
        """Whether a sketch scores part of the query rows."""
        return self.rows == "sampled" or (self.rows == "auto" and self.attend == "loaded")

    @property
    def sparse(self) -> bool:
        """Whether anything is left out."""
        return self.retention < 1.0
