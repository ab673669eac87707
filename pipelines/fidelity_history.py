"""Queries that the evidence ``static`` learns a prefix's importance from, before any is measured.

Later windows of the same text follow the measured query and know what it is about. The control is
there to tell what a choice is worth that knows nothing of this query, so it learns from queries of
other prefixes unless told otherwise. It runs no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, zip_longest

import numpy as np

from pipelines.fidelity_values import BenchCase, CaseOptions, Cases


def with_history(
    found: Cases, own: Sequence[BenchCase], options: CaseOptions, positions: int
) -> Cases:
    """Give cases their history, as ``options`` say.

    Parameters
    ----------
    found
        Cases with all queries that can be measured.
    own
        The same prefixes, with a history of their own. They are taken as well where other prefixes
        have no query for one of them.
    positions
        Tokens that the model takes: a query of another prefix has to fit behind this one.
    """
    wanted, notes = options.history, []
    if not wanted:
        return found
    if options.history_from == "others":
        room = [positions - len(case.prefix_ids) for case in found.cases]
        others = from_others([case.queries for case in found.cases], room, wanted)
        if others is not None:
            cases = [replace(a, history=b) for a, b in zip(found.cases, others, strict=True)]
            return _result(found, cases, "others", _few(others, wanted))
        why = "the others have no queries of their own" if len(own) > 1 else "there is only one"
        notes = [f"static learns from further queries of the same prefix: {why}"]
    notes += [
        f"{case.name}: {len(case.history)} of {wanted} history queries, it has no more"
        for case in own
        if len(case.history) < wanted
    ]
    return _result(found, own, "same", notes)


def _result(
    found: Cases, cases: Sequence[BenchCase], history_from: str, notes: Sequence[str]
) -> Cases:
    return Cases(list(cases), found.warnings, history_from, tuple(notes))


def _few(others: Sequence[Sequence[np.ndarray]], wanted: int) -> list[str]:
    least = min(map(len, others))
    short = f"{least} of {wanted} history queries, the other prefixes have no more"
    return [short] if least < wanted else []


def kept_back(case: BenchCase, history: int) -> BenchCase:
    """The case with the last of its queries as its history, but for one at least."""
    measured = max(1, len(case.queries) - history)
    return replace(case, queries=case.queries[:measured], history=case.queries[measured:])


def from_others(
    queries: Sequence[Sequence[np.ndarray]], room: Sequence[int], count: int
) -> list[tuple[np.ndarray, ...]] | None:
    """For each prefix up to ``count`` queries of the prefixes after it, then of those before.

    First comes one query of each of them, then a second one of each, and so on.

    Parameters
    ----------
    queries
        Measured queries of each prefix, uint32 each.
    room
        Tokens that fit behind each prefix.
    count
        1 or more.

    Returns
    -------
    None where a prefix would get none: the others ask what it is asked itself, or what is too long.
    """
    found = [_others(queries, at, longest, count) for at, longest in enumerate(room)]
    return found if all(found) else None


def _others(
    queries: Sequence[Sequence[np.ndarray]], at: int, longest: int, count: int
) -> tuple[np.ndarray, ...]:
    """Queries of others than prefix ``at``, each once, none that it is asked itself."""
    own = {query.tobytes() for query in queries[at]}
    chosen: dict[bytes, np.ndarray] = {}
    for turn in zip_longest(*queries[at + 1 :], *queries[:at]):
        for query in turn:
            if query is not None and len(query) <= longest and query.tobytes() not in own:
                chosen.setdefault(query.tobytes(), query)
    return tuple(islice(chosen.values(), count))
