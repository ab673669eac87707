"""Invariant 2: a sparse answer is that of a dense model with the same prefix tokens masked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from store.engine import PrefixStore
from store.itf.importance import keep_count
from store.itf.options import SparseOptions
from tests.helpers import ask, compute_and_store, ids_of, new_store, worst
from tests.sparse import masked_logits, sparse_run, worst_sparse
from tests.tiny import make_tiny

TOLERANCE = 1e-4
FAMILIES = ("mha", "gqa", "mqa", "opt")
QUESTIONS = (ids_of(9, seed=7), ids_of(1, seed=8))


def fill(store: PrefixStore, model, prefix: np.ndarray, scene: str) -> tuple[np.ndarray, int]:
    """Store a prefix as the scene wants it; returns what to ask about and its matched tokens."""
    if scene == "several nodes":
        for end in (len(prefix) // 3, 2 * len(prefix) // 3):
            compute_and_store(store, model, prefix[:end], f"to {end}")
    compute_and_store(store, model, prefix, "whole")
    if scene == "after a split":
        cut = len(prefix) // 2 + 3
        other = np.concatenate([prefix[:cut], [(prefix[cut] + 1) % 256], ids_of(20, seed=3)])
        compute_and_store(store, model, other.astype(np.uint32), "other")
    if scene == "leaving half-way":
        return prefix[: len(prefix) - 21], len(prefix) - 21
    return prefix, len(prefix)


SCENES = ("one node", "several nodes", "after a split", "leaving half-way")


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("attend", ["loaded", "selected"])
@pytest.mark.parametrize("evidence", ["full", "heads", "sketch", "random"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_sparse_run_equals_its_masked_reference(family, evidence, attend, scene, tmp_path: Path):
    model = make_tiny(family)
    prefix = ids_of(200, seed=5)
    with new_store(tmp_path / "kv", model, probes="both") as store:
        asked, matched = fill(store, model, prefix, scene)
        for question in QUESTIONS:
            # The first token of the question must not go on where the stored prefix does.
            question = np.concatenate([[(prefix[matched % 200] + 1) % 256], question[1:]])
            for fallback in ("never", "always"):
                # Few enough that chunks are left out, too, where whole ones are attended to.
                options = SparseOptions(
                    retention=0.2 if attend == "selected" else 0.03,
                    evidence=evidence,
                    attend=attend,
                    fallback=fallback,
                )
                gap, run = worst_sparse(store, model, asked, question.astype(np.uint32), options)
                assert run.matched_len == matched
                assert gap <= TOLERANCE
                check_reports(run, options, matched)


def check_reports(run, options: SparseOptions, matched: int) -> None:
    k, shape = keep_count(matched, options.retention), run.shape
    assert len(run.reports) == shape.num_layers
    fell = options.evidence == "heads" and options.fallback == "always"
    for layer, report in enumerate(run.reports):
        kept, sets = run.kept(layer), run.selected[layer]
        assert report.fell_back == fell
        assert report.evidence == ("full" if fell else options.evidence)
        assert len(sets) == report.sets == (shape.num_kv_heads if fell else 1)
        assert sets.shape[1] == report.selected_tokens == k
        assert all(len(set(row)) == k for row in sets)
        assert kept.shape[1] == report.kept_tokens
        if options.attend == "selected":
            np.testing.assert_array_equal(kept, np.broadcast_to(sets, kept.shape))
        else:
            assert kept.shape[1] == report.loaded_tokens < matched
            assert set(sets.reshape(-1)) <= set(kept[0])


@pytest.mark.parametrize("sets", ["one", "per-head"])
@pytest.mark.parametrize("chunk_tokens", [16, 64])
@pytest.mark.parametrize("codec", ["none", "zstd", "lz4"])
def test_chunk_sizes_codecs_and_sets_make_no_difference(sets, chunk_tokens, codec, tmp_path: Path):
    model = make_tiny("gqa")
    with new_store(
        tmp_path / "kv", model, probes="both", chunk_tokens=chunk_tokens, codec=codec
    ) as store:
        asked, _ = fill(store, model, ids_of(300, seed=2), "several nodes")
        for attend in ("loaded", "selected"):
            options = SparseOptions(retention=0.05, evidence="sketch", attend=attend, sets=sets)
            gap, run = worst_sparse(store, model, asked, QUESTIONS[0], options)
            assert gap <= TOLERANCE
            assert run.reports[0].sets == (1 if sets == "one" else 2)


@pytest.mark.parametrize("evidence", ["auto", "sketch", "heads", "full", "static", "random"])
@pytest.mark.parametrize("family", FAMILIES)
def test_retention_one_is_exact_whatever_the_evidence(family, evidence, tmp_path: Path):
    model = make_tiny(family)
    prefix = ids_of(150, seed=6)
    with new_store(tmp_path / "kv", model, probes="both") as store:
        compute_and_store(store, model, prefix, "p")
        for attend in ("loaded", "selected"):
            options = SparseOptions(retention=1.0, evidence=evidence, attend=attend)
            given = ask(store, model, prefix, QUESTIONS[0], sparse=options)
            assert given.stats.reused_tokens == 150
            assert given.layers == ()
            assert worst(given, model, prefix, QUESTIONS[0]) <= TOLERANCE


def test_the_reference_notices_one_wrong_token(tmp_path: Path):
    # The tolerance means something only if another set of tokens moves the logits far more.
    model = make_tiny("gqa")
    prefix = ids_of(200, seed=5)
    with new_store(tmp_path / "kv", model) as store:
        compute_and_store(store, model, prefix, "p")
        options = SparseOptions(retention=0.2, evidence="full", attend="selected")
        run, logits = sparse_run(store, model, prefix, QUESTIONS[0], options)
        with run:
            kept = [run.kept(layer).copy() for layer in range(run.shape.num_layers)]
            absent = sorted(set(range(200)) - set(kept[0][0]))
            kept[0][:, 0] = absent[0]
            ids = np.concatenate([prefix, QUESTIONS[0]])
            other = masked_logits(model, ids, kept, 200)
            assert float((logits - other).abs().max()) > 5 * TOLERANCE


def test_decoded_tokens_attend_to_the_same_rows(tmp_path: Path):
    from pipelines.attention import forward

    model = make_tiny("gqa")
    prefix = ids_of(200, seed=5)
    with new_store(tmp_path / "kv", model, probes="sketch") as store:
        compute_and_store(store, model, prefix, "p")
        for attend in ("loaded", "selected"):
            options = SparseOptions(retention=0.2, attend=attend)
            run, logits = sparse_run(store, model, prefix, QUESTIONS[0], options)
            with run:
                kept = [run.kept(layer) for layer in range(run.shape.num_layers)]
                ids = np.concatenate([prefix, QUESTIONS[0]])
                for _ in range(3):
                    token = logits[-1:].argmax(-1).numpy().astype(np.uint32)
                    ids = np.concatenate([ids, token])
                    logits = forward(model.model, run, token, logits=1)
                    expected = masked_logits(model, ids, kept, 200)[-1]
                    assert float((logits[0] - expected).abs().max()) <= TOLERANCE
