"""Invariant 1: retention 1.0 is exact, whatever the model, the tree and the chunk size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.helpers import ask, ids_of, new_store, open_store, put, reference_logits, worst
from tests.tiny import make_tiny

TOLERANCE = 1e-4
FAMILIES = ("mha", "gqa", "mqa", "opt", "qwen2")
LENGTHS = (1, 15, 16, 17, 200)
QUESTIONS = (ids_of(5, seed=7), ids_of(1, seed=8), ids_of(33, seed=9))


def check(store, model, prefix: np.ndarray, matched: int) -> None:
    """Ask several questions; each must reuse ``matched`` tokens and give the reference logits."""
    for question in QUESTIONS:
        given = ask(store, model, prefix, question)
        assert given.stats.reused_tokens >= matched
        assert worst(given, model, prefix, question) <= TOLERANCE


def one_node(store, model, prefix, _chunk):
    put(store, model, prefix)
    assert len(store.nodes()) == 1
    check(store, model, prefix, len(prefix))


def three_nodes(store, model, prefix, _chunk):
    if len(prefix) < 3:
        pytest.skip("three nodes need three tokens")
    for end in (len(prefix) // 3, 2 * len(prefix) // 3, len(prefix)):
        put(store, model, prefix[:end])
    assert len(store.nodes()) == 3
    check(store, model, prefix, len(prefix))


def after_a_split(store, model, prefix, _chunk):
    if len(prefix) < 2:
        pytest.skip("a split needs two tokens")
    put(store, model, prefix)
    cut = len(prefix) // 2
    other = np.concatenate([prefix[:cut], [(prefix[cut] + 1) % 256], ids_of(20, seed=3)])
    put(store, model, other.astype(np.uint32))
    assert len(store.nodes()) == 3
    check(store, model, prefix, len(prefix))
    check(store, model, other.astype(np.uint32), len(other))


def leaving_at_a_chunk_edge(store, model, prefix, chunk):
    if len(prefix) <= chunk:
        pytest.skip("the prefix has no inner chunk edge")
    put(store, model, prefix)
    left = prefix[:chunk].copy()
    question = np.concatenate([[(prefix[chunk] + 1) % 256], ids_of(4, seed=5)]).astype(np.uint32)
    given = ask(store, model, left, question)
    assert given.stats.reused_tokens == chunk
    assert worst(given, model, left, question) <= TOLERANCE


def leaving_off_a_chunk_edge(store, model, prefix, chunk):
    if len(prefix) < 2:
        pytest.skip("leaving inside a node needs two tokens")
    put(store, model, prefix)
    cut = len(prefix) - 1 if (len(prefix) - 1) % chunk else len(prefix) - 2
    left = prefix[:cut].copy()
    question = np.concatenate([[(prefix[cut] + 1) % 256], ids_of(4, seed=5)]).astype(np.uint32)
    for _ in range(2):
        given = ask(store, model, left, question)
        assert given.stats.reused_tokens == cut
        assert worst(given, model, left, question) <= TOLERANCE


SCENES = (one_node, three_nodes, after_a_split, leaving_at_a_chunk_edge, leaving_off_a_chunk_edge)


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("chunk_tokens", [16, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_full_load_equals_full_prefill(family, chunk_tokens, length, scene, tmp_path: Path):
    model = make_tiny(family)
    with new_store(tmp_path / "kv", model, chunk_tokens=chunk_tokens) as store:
        scene(store, model, ids_of(length, seed=length), chunk_tokens)


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_full_load_is_exact_through_a_codec_and_in_other_families(family, codec, tmp_path: Path):
    model = make_tiny(family)
    with new_store(tmp_path / "kv", model, codec=codec) as store:
        three_nodes(store, model, ids_of(200), 16)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_same_bytes_come_back_with_and_without_direct_io(direct, dtype, tmp_path: Path):
    model = make_tiny("gqa", dtype=dtype)
    prefix, question = ids_of(150), ids_of(4, seed=1)
    with new_store(tmp_path / "kv", model) as store:
        first = ask(store, model, prefix, question, insert="exact")
    with open_store(tmp_path / "kv", model, direct=direct) as store:
        again = ask(store, model, prefix, question)
    assert again.stats.reused_tokens == 150
    assert float((again.logits - first.logits).abs().max()) < (1e-5 if dtype == "float32" else 0.05)


def test_a_question_on_a_wrong_prefix_would_be_noticed():
    # The tolerance above means something only if the wrong KV moves the logits far more.
    model = make_tiny("gqa")
    question = QUESTIONS[0]
    right = reference_logits(model, np.concatenate([ids_of(200), question]))
    wrong = reference_logits(model, np.concatenate([ids_of(200, seed=1), question]))
    assert float((right - wrong).abs().max()) > 50 * TOLERANCE


def test_positions_go_on_after_the_whole_prefix(tmp_path: Path):
    model = make_tiny("opt")
    with new_store(tmp_path / "kv", model) as store:
        prefix = ids_of(64)
        put(store, model, prefix)
        answer = ask(store, model, prefix, ids_of(3, seed=2), tokens=8)
        expected = []
        ids = np.concatenate([prefix, ids_of(3, seed=2)])
        for _ in range(len(answer.token_ids)):
            token = int(reference_logits(model, ids).argmax())
            expected.append(token)
            ids = np.append(ids, np.uint32(token))
        assert answer.token_ids == expected


def test_a_long_unmatched_part_is_prefilled_in_segments_with_the_same_result(
    tmp_path: Path, monkeypatch
):
    monkeypatch.setattr("pipelines.attention.SEGMENT_TOKENS", 32)
    monkeypatch.setattr("pipelines.attention.ACTIVATION_BYTES", 0)
    model = make_tiny("gqa")
    with new_store(tmp_path / "kv", model) as store:
        prefix = ids_of(40)
        put(store, model, prefix)
        question = ids_of(150, seed=4)
        given = ask(store, model, prefix, question)
        assert given.stats.reused_tokens == 40
        assert worst(given, model, prefix, question) <= TOLERANCE
        assert worst(ask(store, model, ids_of(0), question), model, ids_of(0), question) <= 1e-4
