"""`bench similarity`: rows by layer and retention, from full runs on documents or a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipelines.bench_similarity import SimilarityOptions, bench_documents, bench_stored
from pipelines.fidelity_cases import CaseOptions
from pipelines.models import LoadedModel
from pipelines.similarity_rows import head_sums
from store.errors import InvalidValueError
from store.itf.importance import agreement, keep_count, top_k
from tests.helpers import compute_and_store, ids_of, new_store
from tests.tiny import make_tiny


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return make_tiny("gqa")


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("documents")
    for name in "ab":
        text = "".join(f"{name} keeper {n} lives by pier {n * 37 % 11}. " for n in range(8))
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return folder


def options_of(**values: Any) -> SimilarityOptions:
    cases = CaseOptions(prefix_tokens=70, query_tokens=9, prefixes=2, history=0)
    return SimilarityOptions(**{"cases": cases, "retention": (0.1, 0.5), **values})


def test_every_layer_and_retention_has_a_row_and_every_retention_a_total(
    model: LoadedModel, documents: Path, tmp_path: Path
):
    made = bench_documents(model, options_of(), documents, tmp_path)
    assert [(row.layer, row.retention) for row in made.rows] == [
        (layer, retention) for layer in range(3) for retention in (0.1, 0.5)
    ]
    assert [(row.layer, row.retention, row.n) for row in made.totals] == [
        (None, 0.1, 2),
        (None, 0.5, 2),
    ]
    for total in made.totals:
        same = [row for row in made.rows if row.retention == total.retention]
        assert total.jaccard_heads == pytest.approx(np.mean([row.jaccard_heads for row in same]))
        rho = keep_count(70, total.retention) / 70
        assert total.random == pytest.approx(rho / (2 - rho))
        assert total.threshold == pytest.approx((rho / (2 - rho)) ** 0.6)
        assert [share.chunk_tokens for share in total.chunks] == [16, 64]
        assert all(0 < share.useful_ratio <= 1 for share in total.chunks)
        assert all(0 < share.touched_ratio <= 1 for share in total.chunks)
    assert made.prefixes == [("a", 70), ("b", 70)]
    assert list(tmp_path.iterdir()) == []


def test_the_same_store_gives_the_same_rows_whatever_its_chunks(model: LoadedModel, tmp_path: Path):
    made = []
    for size in (16, 32):
        with new_store(tmp_path / f"kv{size}", model, chunk_tokens=size) as store:
            compute_and_store(store, model, ids_of(80), "p")
            made.append(bench_stored(model, options_of(), store))
    assert made[0].rows == made[1].rows
    assert made[0].prefixes == [("p", 71)]


@pytest.mark.parametrize(
    ("family", "none"),
    [("mha", "jaccard_within"), ("mqa", "jaccard_kv_heads"), ("gqa", None)],
)
def test_what_has_nothing_to_compare_is_none(family: str, none: str | None, tmp_path: Path):
    tiny = make_tiny(family)
    with new_store(tmp_path / "kv", tiny) as store:
        compute_and_store(store, tiny, ids_of(60), "p")
        made = bench_stored(tiny, options_of(), store)
    names = ("jaccard_heads", "jaccard_kv_heads", "jaccard_within")
    for row in made.rows:
        assert [name for name in names if getattr(row, name) is None] == ([none] if none else [])


def test_agreement_is_between_the_sets_of_the_query_heads(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen: list[torch.Tensor] = []

    def remembered(*arguments: Any) -> torch.Tensor:
        seen.append(head_sums(*arguments))
        return seen[-1]

    monkeypatch.setattr("pipelines.bench_similarity.head_sums", remembered)
    with new_store(tmp_path / "kv", model) as store:
        compute_and_store(store, model, ids_of(60), "p")
        made = bench_stored(model, options_of(retention=(0.25,)), store)
    k = keep_count(51, 0.25)
    assert [row.jaccard_heads for row in made.rows] == [
        agreement(top_k(sums, k), 51) for sums in seen
    ]
    assert all(sums.shape == (4, 51) for sums in seen)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"retention": (2.0,)}, "retention 2"),
        ({"alpha": -1.0}, "alpha -1"),
        ({"chunk_tokens": (4,)}, "chunks of 4 tokens"),
    ],
)
def test_values_out_of_range_are_named(values: dict[str, Any], says: str):
    with pytest.raises(InvalidValueError, match=says):
        options_of(**values)
