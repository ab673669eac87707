from __future__ import annotations

import dataclasses
import itertools

import pytest

from store.errors import InvalidValueError
from store.itf.options import ATTEND, EVIDENCE, FALLBACK, SETS, SparseOptions


def test_the_default_loads_everything() -> None:
    options = SparseOptions()
    assert options.retention == 1.0
    assert not options.sparse
    assert SparseOptions(retention=0.999).sparse


def test_every_listed_choice_is_allowed() -> None:
    for evidence, attend, sets, fallback in itertools.product(EVIDENCE, ATTEND, SETS, FALLBACK):
        options = SparseOptions(evidence=evidence, attend=attend, sets=sets, fallback=fallback)
        assert options.evidence == evidence


@pytest.mark.parametrize(
    "options",
    [
        {"retention": 1e-9},
        {"alpha": 0.0},
        {"alpha": 100.0},
        {"threshold": 0.0},
        {"threshold": 1.0},
        {"seed": -1},
    ],
)
def test_the_ends_of_each_range_are_allowed(options: dict) -> None:
    assert dataclasses.replace(SparseOptions(), **options) == SparseOptions(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"retention": 0.0}, "retention 0 is out of range; use a fraction above 0, up to 1.0"),
        ({"retention": -0.25}, "retention -0.25"),
        ({"retention": 1.5}, "retention 1.5"),
        ({"retention": 25}, "retention 25"),
        ({"retention": float("nan")}, "retention nan"),
        ({"alpha": -0.1}, "alpha -0.1 is out of range; use 0 or more"),
        ({"alpha": float("inf")}, "alpha inf"),
        ({"alpha": float("nan")}, "alpha nan"),
        ({"threshold": -0.1}, "threshold -0.1 is out of range; use a fraction from 0 to 1"),
        ({"threshold": 1.1}, "threshold 1.1"),
        ({"threshold": float("nan")}, "threshold nan"),
        ({"evidence": "probes"}, "evidence 'probes' is not known; use one of auto, sketch, heads"),
        ({"attend": "all"}, "attend 'all' is not known; use one of loaded, selected"),
        ({"sets": "two"}, "sets 'two' is not known; use one of one, per-head"),
        ({"fallback": "no"}, "fallback 'no' is not known; use one of auto, never, always"),
    ],
)
def test_another_value_is_refused_with_what_is_allowed(options: dict, message: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        SparseOptions(**options)
    assert message in str(caught.value)


def test_options_do_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SparseOptions().retention = 0.5  # type: ignore[misc]
