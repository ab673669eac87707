"""A folder that `bench ttft` keeps serves the runs that would make the same, and no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipelines.ttft_kept import FILE_NAME, KeptKey, require_same
from pipelines.ttft_values import OWN, Query, TtftPrefix, Workload
from store.errors import InvalidValueError
from tests.helpers import ids_of
from tests.tiny import make_tiny

KEY = KeptKey("model", ("a", "b"), "history")


def workload(seed: int = 0, prefixes: int = 2, history: int = 3) -> Workload:
    asked = tuple(Query(ids_of(5, seed=90 + seed + n), OWN) for n in range(history))
    made = (TtftPrefix(f"{n}", ids_of(40, seed=n), asked) for n in range(prefixes))
    return Workload(tuple(made), (), ())


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (KEY._replace(model="m"), "holds the KV of another model; give another folder, or delete"),
        (KEY._replace(prefixes=("a",)), "holds other prefixes"),
        (KEY._replace(prefixes=("b", "a")), "holds other prefixes"),
        (KEY._replace(history="other"), r"an order learnt from other queries \(--seed, "),
    ],
)
def test_what_another_run_kept_is_refused_and_left_alone(
    tmp_path: Path, other: KeptKey, says: str
) -> None:
    require_same(tmp_path, KEY)
    before = (tmp_path / FILE_NAME).read_bytes()
    with pytest.raises(InvalidValueError, match=says):
        require_same(tmp_path, other)
    assert (tmp_path / FILE_NAME).read_bytes() == before


def test_a_run_that_reorders_nothing_may_come_before_and_after_one_that_does(
    tmp_path: Path,
) -> None:
    for history in (None, "history", None, "history"):
        require_same(tmp_path, KEY._replace(history=history))
    with pytest.raises(InvalidValueError, match="other queries"):
        require_same(tmp_path, KEY._replace(history="other"))


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"model": "m"}', '"', "1"])
def test_a_damaged_key_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(InvalidValueError, match=f"no readable {FILE_NAME}"):
        require_same(tmp_path, KEY)


@pytest.mark.parametrize("held", ["diy/x.safetensors", "original-64-none/impress.json"])
def test_stores_without_a_key_are_refused_and_other_files_are_not(
    tmp_path: Path, held: str
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / held).parent.mkdir()
    (tmp_path / held).write_text("")
    with pytest.raises(InvalidValueError, match=f"holds stores, but no {FILE_NAME}"):
        require_same(tmp_path, KEY)
    (tmp_path / held).unlink()
    (tmp_path / held).parent.rmdir()
    require_same(tmp_path, KEY)
    assert json.loads((tmp_path / FILE_NAME).read_text())["prefixes"] == ["a", "b"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prefixes": 3}, "prefixes"),
        ({"seed": 1}, "history"),
        ({"history": 2}, "history"),
        ({"retention": 0.3}, "history"),
    ],
)
def test_what_decides_on_the_content_of_stores_is_in_the_key(
    changes: dict[str, Any], field: str
) -> None:
    model, given = make_tiny("gqa"), {"retention": 0.25, **changes}
    key = KeptKey.of(model, workload(), 0.25, reordered=True)
    retention = given.pop("retention")
    other = KeptKey.of(model, workload(**given), retention, reordered=True)
    assert getattr(key, field) != getattr(other, field)
    assert key == KeptKey.of(model, workload(), 0.25, reordered=True)
    assert KeptKey.of(model, workload(), 0.25, reordered=False).history is None
    assert key.model != KeptKey.of(make_tiny("mha"), workload(), 0.25, reordered=True).model
