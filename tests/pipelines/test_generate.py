"""Answering prompts: options, plans, streaming, inserts, statistics."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipelines import generate
from pipelines.attention import SEGMENT_TOKENS
from pipelines.generate import QueryOptions, answer
from store.errors import ChunkLoadError, InvalidValueError, PromptError
from store.itf.options import SparseOptions
from store.stats import STAGES
from tests.helpers import ask, ids_of, new_store, open_store, put, worst
from tests.tiny import make_tiny

MODEL = make_tiny("gqa", positions=256)
QUESTION = ids_of(4, seed=50)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "1 or more"),
        ({"plan": "guess"}, "force-load"),
        ({"insert": "maybe"}, "exact, never"),
    ],
)
def test_options_outside_what_is_allowed_are_refused(options, message):
    with pytest.raises(InvalidValueError, match=message):
        QueryOptions(**options)


def test_an_empty_question_is_refused(tmp_path: Path):
    with new_store(tmp_path / "kv", MODEL) as store, pytest.raises(PromptError, match="empty"):
        ask(store, MODEL, ids_of(10), ids_of(0))


def test_a_prompt_longer_than_the_positions_is_refused_with_the_numbers(tmp_path: Path):
    with new_store(tmp_path / "kv", MODEL) as store:
        with pytest.raises(PromptError, match=r"256 tokens \(prefix 250, question 6\).*256 positi"):
            ask(store, MODEL, ids_of(250), ids_of(6))
        assert store.counters() == {}


def test_the_answer_ends_where_the_positions_end(tmp_path: Path):
    with new_store(tmp_path / "kv", MODEL) as store:
        given = ask(store, MODEL, ids_of(245), ids_of(6), tokens=50)
        assert len(given.token_ids) <= 5


def test_the_second_question_is_answered_from_what_the_first_stored(tmp_path: Path):
    with new_store(tmp_path / "kv", MODEL) as store:
        first = put(store, MODEL, ids_of(100), "essay")
        assert (first.inserted_tokens, first.stats.reused_tokens) == (100, 0)
        assert first.stats.plan == "recompute"
        assert first.stats.miss_reasons == ["nothing is stored after token 0"]
        second = ask(store, MODEL, ids_of(100), QUESTION)
        assert (second.stats.reused_tokens, second.stats.plan) == (100, "load")
        assert second.stats.miss_reasons == []
        assert second.stats.forward_tokens == len(QUESTION)
        assert store.prefix("essay").length == 100


def test_the_question_is_never_stored(tmp_path: Path):
    with new_store(tmp_path / "kv", MODEL) as store:
        put(store, MODEL, ids_of(100))
        ask(store, MODEL, ids_of(0), ids_of(20, seed=3), insert="exact")
        assert [row.length for row in store.nodes()] == [100]


def test_insert_never_stores_nothing(tmp_path: Path):
    with new_store(tmp_path / "kv", MODEL) as store:
        assert ask(store, MODEL, ids_of(50), QUESTION).inserted_tokens == 0
        assert store.nodes() == []


def test_force_recompute_reads_nothing_and_says_so(tmp_path: Path):
    with new_store(tmp_path / "kv", MODEL) as store:
        put(store, MODEL, ids_of(100))
        given = ask(store, MODEL, ids_of(100), QUESTION, plan="force-recompute")
        assert given.stats.reused_tokens == given.stats.read_bytes == 0
        assert "--plan force-recompute" in given.stats.miss_reasons[0]
        loaded = ask(store, MODEL, ids_of(100), QUESTION, plan="force-load")
        assert loaded.stats.reused_tokens == 100
        assert loaded.token_ids == given.token_ids


def test_stages_sum_to_the_ttft_and_bytes_to_the_kv(tmp_path: Path):
    with new_store(tmp_path / "kv", MODEL) as store:
        put(store, MODEL, ids_of(96))
        stats = ask(store, MODEL, ids_of(96), QUESTION).stats
        assert tuple(stats.stages_s) == STAGES
        assert sum(stats.stages_s.values()) == pytest.approx(stats.ttft_s)
        assert stats.bytes["disk"] == 96 * MODEL.shape.token_bytes
        assert stats.read_bytes >= stats.bytes["disk"]
        assert stats.requests == 2 * MODEL.shape.num_layers


def test_statistics_survive_reopening(tmp_path: Path):
    with new_store(tmp_path / "kv", MODEL) as store:
        put(store, MODEL, ids_of(96))
        ask(store, MODEL, ids_of(96), QUESTION)
    with open_store(tmp_path / "kv", MODEL) as store:
        counters = store.counters()
        assert counters["queries"] == 2
        assert counters["reused_tokens"] == 96


def test_streamed_pieces_make_up_the_text(tmp_path: Path):
    pieces: list[str] = []
    with new_store(tmp_path / "kv", MODEL) as store:
        given = answer(
            store,
            MODEL,
            ids_of(0),
            ids_of(9),
            options=QueryOptions(max_new_tokens=20),
            on_text=pieces.append,
        )
    assert "".join(pieces) == given.text
    assert len(pieces) > 1


def test_a_character_of_several_tokens_is_shown_once_it_is_whole():
    shown: list[str] = []
    tokens = list("aé".encode())  # the tiny tokenizer has one token per byte
    text = ""
    for end in range(1, len(tokens) + 1):
        text = generate._show(MODEL, tokens[:end], text, shown.append, whole=False)
    assert shown == ["a", "é"]


def test_only_the_last_position_gets_logits(tmp_path: Path, monkeypatch):
    seen: list[int] = []
    head = MODEL.model.get_output_embeddings()
    handle = head.register_forward_hook(lambda _m, args, _out: seen.append(args[0].shape[1]))
    try:
        long = make_tiny("gqa", positions=256)
        assert SEGMENT_TOKENS > 0
        monkeypatch.setattr("pipelines.attention.SEGMENT_TOKENS", 50)
        monkeypatch.setattr("pipelines.attention.ACTIVATION_BYTES", 0)
        with new_store(tmp_path / "kv", MODEL) as store:
            ask(store, MODEL, ids_of(120), QUESTION)
        assert long.shape == MODEL.shape
    finally:
        handle.remove()
    assert seen == [1]


def test_a_failed_load_ends_even_if_it_fails_every_time(tmp_path: Path, monkeypatch):
    with new_store(tmp_path / "kv", MODEL) as store:
        put(store, MODEL, ids_of(100))
        broken = ChunkLoadError("unknown", "k", 0, 2, 32, "injected")

        def always(self, _layer, _futures):
            if self.matched_len:
                raise broken

        monkeypatch.setattr("store.fetch.Fetch.await_reads", always)
        given = ask(store, MODEL, ids_of(100), QUESTION)
        assert given.stats.reused_tokens == 0
        assert given.stats.recovered_chunks >= 1


def test_what_a_sparse_answer_computed_is_never_stored(tmp_path: Path):
    with new_store(tmp_path / "kv", MODEL, probes="sketch") as store:
        put(store, MODEL, ids_of(100))
        longer = ids_of(160)
        sparse = SparseOptions(retention=0.1, attend="selected")
        given = ask(store, MODEL, longer, QUESTION, insert="exact", name="long", sparse=sparse)
        assert (given.stats.reused_tokens, given.inserted_tokens) == (100, 60)
        assert len(given.layers) == MODEL.shape.num_layers
        again = ask(store, MODEL, longer, QUESTION)
        assert again.stats.reused_tokens == 160
        assert worst(again, MODEL, longer, QUESTION) <= 1e-4


def test_a_store_that_cannot_be_written_says_so_after_a_sparse_answer_too(tmp_path: Path):
    with new_store(tmp_path / "kv", MODEL, probes="sketch") as store:
        put(store, MODEL, ids_of(100))
        store._index.read_only = True
        notes = [
            ask(store, MODEL, ids_of(160), QUESTION, insert="exact", sparse=sparse).insert_note
            for sparse in (SparseOptions(), SparseOptions(retention=0.1))
        ]
        store._index.read_only = False
        assert notes[0] == notes[1] != ""


def test_memory_given_back_by_a_query_serves_the_next(tmp_path: Path):
    with new_store(tmp_path / "kv", MODEL) as store:
        put(store, MODEL, ids_of(100))
        first = store._runs._arenas[0]
        for _ in range(3):
            ask(store, MODEL, ids_of(100), QUESTION)
        assert store._runs._arenas == [first]
        long = ask(store, MODEL, np.tile(ids_of(100), 2), QUESTION, tokens=9)
        assert long.stats.reused_tokens == 100
        assert len(store._runs._arenas) == 1
