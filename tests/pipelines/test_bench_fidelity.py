"""`bench fidelity`: figures against a dense computation of our own, rows, stores, history."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AttentionInterface

from pipelines.attention import use_attention
from pipelines.bench_fidelity import bench_documents, bench_stored, stored_evidence
from pipelines.fidelity_values import CaseOptions, FidelityOptions, FidelityReport, FidelityRow
from pipelines.models import LoadedModel
from pipelines.probes import first_heads
from pipelines.progress import ProgressEvent
from store.errors import InvalidValueError, StoreFullError
from store.itf.options import SparseOptions
from store.probes import ProbeSettings
from tests.helpers import compute_and_store, ids_of, new_store, shuffle
from tests.tiny import make_tiny

PREFIX, QUERY = 70, 9
DENSE = "dense-oracle"


def _dense(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    k: int = 0,
    sparse: bool = True,
    chosen: list[np.ndarray] | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in float64; ``sparse``: its last `QUERY` rows see k prefix tokens, the best."""
    assert chosen is not None
    assert scaling is not None
    heads, total = query.shape[1], key.shape[2]
    keys = key[0].double().repeat_interleave(heads // key.shape[1], 0)
    values = value[0].double().repeat_interleave(heads // key.shape[1], 0)
    scores = query[0].double() @ keys.transpose(1, 2) * scaling
    scores = scores.masked_fill(~torch.ones(total, total).tril().bool(), -math.inf)
    sums = scores.softmax(-1)[:, PREFIX:, :PREFIX].sum((0, 1))
    best = sums.argsort(descending=True)[:k]
    chosen.append(np.sort(best.numpy()))
    left_out = torch.ones(PREFIX, dtype=torch.bool)
    left_out[best] = False
    left_out &= sparse
    scores[:, PREFIX:, :PREFIX].masked_fill_(left_out, -math.inf)
    return (scores.softmax(-1) @ values).to(query.dtype).transpose(0, 1)[None], None


AttentionInterface.register(DENSE, _dense)


@torch.inference_mode()
def dense(
    model: LoadedModel, ids: np.ndarray, k: int, *, sparse: bool
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Log-probabilities [QUERY, vocab] and the best k tokens per layer, without the engine."""
    use_attention(model.model, DENSE)
    chosen: list[np.ndarray] = []
    tokens = torch.from_numpy(ids.astype(np.int64))[None]
    out = model.model(tokens, use_cache=False, k=k, sparse=sparse, chosen=chosen)
    return out.logits[0, PREFIX:].double().log_softmax(-1).numpy(), chosen


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return make_tiny("gqa")


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("documents")
    for name in "ab":
        lines = (f"{name} keeper {n} {name * 3} lives by pier {n * 37 % 11}. " for n in range(8))
        text = "".join(lines)
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return folder


def options_of(cases: dict[str, Any] | None = None, **values: Any) -> FidelityOptions:
    sizes = {"prefix_tokens": PREFIX, "query_tokens": QUERY, "prefixes": 2, "history": 3}
    return FidelityOptions(CaseOptions(**{**sizes, **(cases or {})}), **values)


@pytest.fixture(scope="module")
def report(
    model: LoadedModel, documents: Path, tmp_path_factory: pytest.TempPathFactory
) -> FidelityReport:
    folder = tmp_path_factory.mktemp("temporary")
    options = options_of(retention=(0.2, 1.0), sketch_bits=(2, 4), sets=("one", "per-head"))
    made = bench_documents(model, options, documents, folder)
    assert list(folder.iterdir()) == [], "temporary stores are gone"
    return made


def row_of(report: FidelityReport, **values: Any) -> FidelityRow:
    found = [r for r in report.rows if all(getattr(r, n) == v for n, v in values.items())]
    assert len(found) == 1, found
    return found[0]


ONE = {"sets": "one", "attend": "selected", "chunk_tokens": 16, "retention": 0.2}


@pytest.mark.parametrize(("number", "name"), [(0, "a"), (1, "b")])
def test_figures_equal_a_dense_computation(
    report: FidelityReport, model: LoadedModel, documents: Path, number: int, name: str
):
    text = (documents / f"{name}.txt").read_bytes()
    ids = np.frombuffer(text[: PREFIX + QUERY], np.uint8).astype(np.uint32)
    k = math.ceil(0.2 * PREFIX)
    full, wanted = dense(model, ids, k, sparse=False)
    sparse, selected = dense(model, ids, k, sparse=True)
    pair = row_of(report, evidence="full", **ONE).pairs[number]
    assert (pair.prefix, pair.query) == (name, 0)
    assert pair.kl == pytest.approx((np.exp(full) * (full - sparse)).sum(-1).mean(), rel=1e-3)
    assert pair.top1 == np.mean(full.argmax(-1) == sparse.argmax(-1))
    targets = ids[PREFIX + 1 :].astype(int)
    assert pair.nll == pytest.approx(-sparse[np.arange(QUERY - 1), targets].mean(), rel=1e-4)
    exact = row_of(report, evidence="exact").pairs[number]
    assert exact.nll == pytest.approx(-full[np.arange(QUERY - 1), targets].mean(), rel=1e-4)
    shared = [len(set(a) & set(b)) / k for a, b in zip(selected, wanted, strict=True)]
    assert pair.recall == pytest.approx(np.mean(shared))
    chunks = [len(set(positions // 16)) for positions in selected]
    # All keys are read to choose by, values by chunks of 16: 5 of them cover 70 tokens.
    assert pair.loaded_ratio == pytest.approx(np.mean([(5 + count) / 10 for count in chunks]))
    assert pair.touched_ratio == pytest.approx(np.mean([count / 5 for count in chunks]))
    assert (pair.selected_ratio, pair.probe_ratio) == (k / PREFIX, 0.0)


def test_rows_come_in_the_order_asked_for_after_the_reference(report: FidelityReport):
    first = report.rows[0]
    assert (first.evidence, first.sets, first.attend, first.retention) == (
        "exact",
        None,
        None,
        1.0,
    )
    names = ("evidence", "bits", "rows", "sets", "attend", "retention")
    keys = [tuple(getattr(row, name) for name in names) for row in report.rows[1:]]
    assert keys == [
        (evidence, bits, "auto" if bits else None, sets, attend, retention)
        for retention in (0.2, 1.0)
        for evidence in ("full", "sketch", "heads", "static", "random")
        for bits in ((2, 4) if evidence == "sketch" else (None,))
        for sets in ("one", "per-head")
        for attend in ("selected", "loaded")
    ]
    assert all((row.n, row.order, row.chunk_tokens) == (2, "original", 16) for row in report.rows)
    assert report.prefixes == [("a", PREFIX), ("b", PREFIX)]


def test_an_order_changes_which_chunks_are_touched_and_nothing_that_is_computed(
    model: LoadedModel, documents: Path, tmp_path: Path
):
    options = options_of(
        retention=(0.2,),
        evidence=("full", "sketch"),
        attend=("selected",),
        order=("original", "importance"),
    )
    made = bench_documents(model, options, documents, tmp_path)
    for evidence in options.evidence:
        before, after = (
            row_of(made, evidence=evidence, order=order) for order in ("original", "importance")
        )
        assert before.mean("kl") == pytest.approx(after.mean("kl"), rel=1e-3)
        assert before.mean("recall") == after.mean("recall")
        # What other queries found important is put together, in five chunks of 16.
        assert after.mean("touched_ratio") < before.mean("touched_ratio")


def test_a_stored_prefix_says_which_order_it_is_in(model: LoadedModel, tmp_path: Path):
    with new_store(tmp_path / "kv", model) as store:
        compute_and_store(store, model, ids_of(150), "p")
        options = options_of(
            {"query_tokens": 8, "history": 0}, evidence=("full",), retention=(0.2,)
        )
        rows = [bench_stored(model, options, store).rows]
        shuffle(store)
        rows.append(bench_stored(model, options, store).rows)
    assert [{row.order for row in found} for found in rows] == [{"original"}, {"importance"}]


def test_chunk_sizes_are_combined_with_everything_else():
    made = options_of(chunk_tokens=(16, 64), evidence=("full",), attend=("loaded",)).combinations()
    assert [(one.chunk_tokens, one.retention) for one in made] == [
        (16, 0.1),
        (16, 0.25),
        (64, 0.1),
        (64, 0.25),
    ]


def test_retention_one_is_exact_on_every_evidence(report: FidelityReport):
    for row in report.rows:
        if row.retention == 1.0:
            assert row.kl_max <= 1e-9, row
            assert row.mean("top1") == row.mean("recall") == row.mean("loaded_ratio") == 1.0


def test_attending_to_everything_that_was_loaded_is_exact_where_that_is_all(
    model: LoadedModel, documents: Path, tmp_path: Path
):
    # One chunk holds the whole prefix: whatever is selected, all of it is loaded.
    options = options_of(retention=(0.2,), evidence=("full", "random"), chunk_tokens=(128,))
    made = bench_documents(model, options, documents, tmp_path)
    for row in made.rows[1:]:
        assert (row.kl_max <= 1e-9) == (row.attend == "loaded"), row
        assert row.mean("loaded_ratio") == 1.0


def test_the_oracle_is_recalled_more_often_than_by_chance(report: FidelityReport):
    full = row_of(report, evidence="full", **ONE).mean("recall")
    chance = row_of(report, evidence="random", **ONE).mean("recall")
    # Not all of it: what earlier layers left out changes the later layers' queries.
    assert full > 0.5
    assert 0.05 < chance < 0.4


def test_evidence_is_counted_as_a_cold_query_would_read_it(report: FidelityReport):
    kv_bytes = 3 * PREFIX * 2 * 2 * 16 * 4
    # One of two KV heads' keys; codes and scales of two groups of 64 tokens.
    heads = row_of(report, evidence="heads", **ONE)
    assert heads.mean("probe_ratio") == pytest.approx(1 / 4, rel=0.02)
    for bits in (2, 4):
        sketch = row_of(report, evidence="sketch", bits=bits, **ONE)
        assert sketch.mean("probe_ratio") == pytest.approx(
            3 * 2 * 16 * (128 * bits / 8 + 2 * 4) / kv_bytes, rel=0.02
        )
        again = row_of(report, evidence="sketch", bits=bits, **{**ONE, "attend": "loaded"})
        assert again.mean("probe_ratio") == sketch.mean("probe_ratio")
    # Chunks of 16 pad 70 tokens to 80.
    for row in report.rows:
        fetched = row.mean("loaded_ratio") * 80 / PREFIX + row.mean("probe_ratio")
        assert row.mean("bytes") == pytest.approx(fetched * kv_bytes)


def test_documents_without_room_for_a_history_leave_static_out(model: LoadedModel, tmp_path: Path):
    (tmp_path / "a.txt").write_text("x" * (PREFIX + QUERY), encoding="utf-8")
    options = options_of({"prefixes": 1}, evidence=("static", "random"), retention=(0.2,))
    made = bench_documents(model, options, tmp_path, tmp_path)
    assert [row.evidence for row in made.rows] == ["exact", "random", "random"]
    assert made.warnings == [
        "static learns from further queries of the same prefix: there is only one",
        "a: 0 of 3 history queries, it has no more",
        "a: static was left out, no earlier query is known",
    ]


def test_prefixes_without_a_history_are_left_out_of_the_order_that_is_by_it(
    model: LoadedModel, tmp_path: Path
):
    for name, size in (("a", PREFIX + 3 * QUERY), ("b", PREFIX + QUERY)):
        (tmp_path / f"{name}.txt").write_text(
            (f"{name} sees pier 7. " * 20)[:size], encoding="utf-8"
        )
    options = options_of(
        {"history_from": "same"},
        evidence=("full", "static"),
        attend=("loaded",),
        retention=(0.2,),
        order=("original", "importance"),
    )
    events: list[ProgressEvent] = []
    made = bench_documents(model, options, tmp_path, tmp_path, events.append)
    names = {
        (row.evidence, row.order): [pair.prefix for pair in row.pairs] for row in made.rows[1:]
    }
    assert names == {
        ("full", "original"): ["a", "b"],
        ("static", "original"): ["a"],
        ("full", "importance"): ["a"],
        ("static", "importance"): ["a"],
    }
    assert made.warnings[-2:] == [
        "b: static was left out, no earlier query is known",
        "b: order importance was left out, no earlier query is known",
    ]
    assert events[-1].done == events[-1].total == 5


def test_static_learns_from_other_documents_or_from_the_same(
    model: LoadedModel, documents: Path, tmp_path: Path
):
    def measured(history_from: str) -> FidelityReport:
        cases = {"history": 1, "history_from": history_from}
        values = {"evidence": ("full", "static"), "attend": ("selected",), "retention": (0.2,)}
        made = bench_documents(model, options_of(cases, **values), documents, tmp_path)
        assert (made.history_from, made.warnings) == (history_from, [])
        return made

    others, same = measured("others"), measured("same")
    assert row_of(others, evidence="full") == row_of(same, evidence="full")
    static = [row_of(made, evidence="static").pairs for made in (others, same)]
    assert [len(pairs) for pairs in static] == [2, 2]
    assert static[0] != static[1]


def test_what_is_said_of_a_history_is_for_those_who_compare_static(
    model: LoadedModel, documents: Path, tmp_path: Path
):
    for evidence in (("random",), ("random", "static")):
        options = options_of({"prefixes": 1}, evidence=evidence, retention=(0.2,))
        made = bench_documents(model, options, documents, tmp_path)
        assert len(made.warnings) == len(evidence) - 1


def test_a_sketch_is_compared_by_the_rows_that_it_scores(
    model: LoadedModel, documents: Path, tmp_path: Path
):
    # From 16 new tokens on, part of the rows can be told from all of them.
    options = options_of(
        {"query_tokens": 24},
        evidence=("full", "sketch"),
        rows=("auto", "all", "sampled"),
        retention=(0.2,),
    )
    made = bench_documents(model, options, documents, tmp_path)
    keys = [(row.evidence, row.rows, row.attend) for row in made.rows]
    assert keys == [
        ("exact", None, None),
        ("full", None, "selected"),
        ("full", None, "loaded"),
        *[
            ("sketch", rows, attend)
            for rows in ("auto", "all", "sampled")
            for attend in ("selected", "loaded")
        ],
    ]
    for attend, meant, other in (("selected", "all", "sampled"), ("loaded", "sampled", "all")):
        found = {
            rows: row_of(made, evidence="sketch", rows=rows, attend=attend).pairs
            for rows in ("auto", "all", "sampled")
        }
        assert found["auto"] == found[meant] != found[other]


def test_the_agreement_of_probe_heads_is_handed_on(
    model: LoadedModel, documents: Path, tmp_path: Path
):
    (one,) = options_of(evidence=("heads",), retention=(0.2,), attend=("loaded",)).combinations()
    given = SparseOptions(threshold=0.5, fallback="never", rows="all")
    sparse = one.sparse(given, seed=7)
    assert (sparse.threshold, sparse.fallback, sparse.rows) == (0.5, "never", "all")
    assert (sparse.evidence, sparse.retention, sparse.seed) == ("heads", 0.2, 7)
    for fallback, share in (("always", 1.0), ("never", 0.0)):
        options = options_of(
            evidence=("full", "heads"),
            retention=(0.2,),
            attend=("selected",),
            shared=SparseOptions(fallback=fallback),
        )
        made = bench_documents(model, options, documents, tmp_path)
        assert row_of(made, evidence="heads").mean("fallback_ratio") == share
        assert row_of(made, evidence="full").mean("fallback_ratio") == 0.0


def test_progress_counts_runs(model: LoadedModel, documents: Path, tmp_path: Path):
    events: list[ProgressEvent] = []
    options = options_of(evidence=("full", "random"), retention=(0.2,))
    bench_documents(model, options, documents, tmp_path, events.append)
    assert {event.total for event in events} == {8}
    assert (events[0].done, events[-1].done) == (0, 8)


def test_questions_are_measured_one_by_one(model: LoadedModel, documents: Path, tmp_path: Path):
    path = tmp_path / "questions.jsonl"
    path.write_text('{"prompt": "Who?"}\n{"prompt": "Why so?"}\n{"prompt": "Where?"}\n')
    cases = {"queries": path, "history": 1, "history_from": "same"}
    options = options_of(cases, evidence=("static",), retention=(0.2,))
    made = bench_documents(model, options, documents, tmp_path)
    pairs = made.rows[1].pairs
    assert [(pair.prefix, pair.query) for pair in pairs] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]


def test_a_store_is_measured_as_it_is_and_stays_so(model: LoadedModel, tmp_path: Path):
    with new_store(tmp_path / "kv", model, chunk_tokens=32) as store:
        store.set_probes(ProbeSettings(sketch_bits=4))
        compute_and_store(store, model, ids_of(90), "p")
        assert stored_evidence(store) == ("full", "sketch", "static", "random")
        before = sorted((p, p.stat().st_size) for p in (tmp_path / "kv" / "nodes").rglob("*"))
        options = options_of(evidence=stored_evidence(store), retention=(0.2,))
        made = bench_stored(model, options, store)
        after = sorted((p, p.stat().st_size) for p in (tmp_path / "kv" / "nodes").rglob("*"))
    assert after == before
    assert not (tmp_path / "kv" / "stats").exists()
    assert {(row.evidence, row.bits, row.chunk_tokens) for row in made.rows} == {
        ("exact", None, 32),
        ("full", None, 32),
        ("sketch", 4, 32),
        ("random", None, 32),
    }
    assert made.prefixes == [("p", 90 - QUERY)]
    assert made.history_from is None
    assert "p: static was left out" in made.warnings[-1]


def test_a_store_without_the_evidence_asked_for_says_how_to_get_it(
    model: LoadedModel, tmp_path: Path
):
    with new_store(tmp_path / "kv", model) as store:
        compute_and_store(store, model, ids_of(90), "p")
        with pytest.raises(InvalidValueError, match=r"impress reorder --store .* --probe heads"):
            bench_stored(model, options_of(evidence=("heads",)), store)


def test_a_folder_that_cannot_hold_the_stores_is_named(
    model: LoadedModel, documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(InvalidValueError, match="can't put temporary stores into"):
        bench_documents(model, options_of(), documents, tmp_path / "none")
    monkeypatch.setattr("pipelines.fidelity_store._SPACE_FACTOR", 1e12)
    with pytest.raises(StoreFullError, match="fewer --prefixes"):
        bench_documents(model, options_of(), documents, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (
            {"evidence": ("fulll",)},
            "evidence 'fulll' is not known; use one or more of full,",
        ),
        ({"evidence": ("auto",)}, "evidence 'auto'"),
        ({"sets": ("two",)}, "sets 'two'"),
        ({"attend": ("all",)}, "attend 'all'"),
        ({"rows": ("some",)}, "rows 'some' is not known; use one or more of auto, all, sampled"),
        ({"retention": (0.0,)}, "retention 0"),
        ({"sketch_bits": (3,)}, "3 bits"),
        ({"chunk_tokens": (8,)}, "chunks of 8 tokens"),
        (
            {"cases": {"history": 0}, "order": ("original", "importance")},
            "order importance is by what earlier queries found, and history 0 leaves none",
        ),
    ],
)
def test_unknown_values_are_named(values: dict[str, Any], says: str):
    with pytest.raises(InvalidValueError, match=says):
        options_of(**values)


def test_probe_heads_are_the_published_ones(model: LoadedModel):
    assert first_heads(model.shape) == ((0,),) * 3
