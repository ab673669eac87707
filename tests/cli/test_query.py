"""``impress query`` on a real store with a tiny random model: all three ways to ask."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import MODEL, Run

SHORT = ("--max-new-tokens", 3)
#: Keys of docs/json.md that must never go away.
KEYS = {
    "schema",
    "text",
    "tokens",
    "ttft_s",
    "stages_s",
    "hidden_io_s",
    "prompt_tokens",
    "reused_tokens",
    "forward_tokens",
    "system",
    "plan",
    "retention",
    "selected_ratio",
    "loaded_ratio",
    "probe_ratio",
    "bytes",
    "fallback_layers",
    "miss_reasons",
    "recovered_chunks",
    "versions",
    "environment",
}
STAGES = {"match", "probe", "identify", "load", "compute", "other"}


def test_an_answer_shows_text_then_the_time_to_first_token(run: Run, built: Path) -> None:
    done = run("query", "who?", "--prefix", "keepers", "--store", built, *SHORT)
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[-2].startswith("TTFT ")
    assert "compute" in lines[-2]
    assert lines[-1].startswith("prefix ")
    assert "tokens reused" in lines[-1]
    assert "random weights" in done.err


def test_json_has_every_documented_key_and_stages_that_sum_to_the_total(
    run: Run, built: Path
) -> None:
    done = run("query", "who?", "--prefix", "keepers", "--store", built, "--json", *SHORT)
    value = done.json
    assert set(value) >= KEYS
    assert value["schema"] == "impress.query/1"
    assert set(value["stages_s"]) == STAGES
    assert abs(sum(value["stages_s"].values()) - value["ttft_s"]) < 1e-6
    assert value["reused_tokens"] == value["prefix"]["tokens"]
    assert value["reused_tokens"] + value["forward_tokens"] == value["prompt_tokens"]
    assert len(value["tokens"]) <= 3
    assert value["synthetic"] is True
    assert value["environment"]["emulation"] is None


def test_loading_and_recomputing_give_the_same_tokens(run: Run, built: Path) -> None:
    base = ("query", "who?", "--prefix", "keepers", "--store", built, "--json")
    load = run(*base, "--plan", "force-load").json
    recompute = run(*base, "--plan", "force-recompute").json
    assert load["tokens"] == recompute["tokens"]
    assert load["plan"] == "load"
    assert (recompute["plan"], recompute["reused_tokens"]) == ("recompute", 0)


def test_a_quarter_of_the_prefix_is_selected_and_the_lines_say_what_it_took(
    run: Run, built: Path
) -> None:
    quarter = ("--retention", "25%", "--evidence", "full", "--fallback", "never")
    ask = ("query", "who?", "--prefix", "keepers", "--store", built, *quarter, *SHORT)
    shown = run(*ask, "--explain")
    assert shown.code == 0
    assert "kept 25 % asked, " in shown.out
    assert " loaded" in shown.out
    assert "fallback has no effect with evidence full" in shown.err
    assert "layer" in shown.out
    value = run(*ask, "--explain", "--json").json
    assert set(value) >= KEYS
    assert value["retention"] == 0.25
    assert value["selected_ratio"] == pytest.approx(0.25, abs=0.01)
    assert value["sparse"]["evidence"] == "full"
    assert len(value["explain"]["layers"]) == value["layers"]
    (first, *_) = value["explain"]["layers"]
    assert (first["layer"], first["evidence"], first["sets"]) == (0, "full", 1)
    total = value["explain"]["totals"]
    assert total["kv_bytes"] == sum(layer["kv_bytes"] for layer in value["explain"]["layers"])
    assert total["kv_bytes"] + total["probe_bytes"] == value["bytes"]["disk"]
    assert "explain" not in run(*ask, "--json").json


def test_auto_takes_the_sketch_and_a_store_without_one_says_how_to_add_it(
    run: Run, built: Path, document: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    build = ("build-store", document, "--store", bare, "--model", MODEL, "--probe", "none")
    assert run(*build).code == 0
    quarter = ("--retention", "0.25", "--explain", "--json", *SHORT)
    ask = ("query", "who?", "--prefix", "keepers", "--store")
    with_sketch, without = run(*ask, built, *quarter), run(*ask, bare, *quarter)
    used = [
        {row["evidence"] for row in done.json["explain"]["layers"]}
        for done in (with_sketch, without)
    ]
    assert used == [{"sketch"}, {"full"}]
    assert f"'impress reorder --store {bare} --probe sketch' adds a sketch" in without.err
    assert any("adds a sketch" in note for note in without.json["notes"])
    assert "reorder" not in with_sketch.err
    named = run(*ask, bare, "--retention", "0.25", "--evidence", "sketch")
    assert (named.code, named.out) == (2, "")
    assert f"'impress reorder --store {bare} --probe sketch'" in named.err


def test_at_retention_1_no_layer_chooses_and_options_without_effect_get_one_note(
    run: Run, built: Path
) -> None:
    ask = ("query", "who?", "--prefix", "keepers", "--store", built, "--evidence", "full", *SHORT)
    done = run(*ask, "--explain", "--json")
    assert done.json["explain"]["layers"] == []
    assert done.json["explain"]["totals"] is None
    assert done.err.count("evidence has no effect at retention 1.0") == 1


def test_what_the_recipe_of_a_prefix_says_holds_until_the_command_says_otherwise(
    run: Run, document: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "quarter.yaml"
    recipe.write_text(
        f"name: quarter\nmodel: random:tiny-gqa\n"
        f"prefixes: {{source: documents, path: {document}}}\n"
        "query: {retention: 0.25, attend: selected}\n"
    )
    assert run("build-store", recipe, "--store", tmp_path / "kv").code == 0
    ask = ("query", "who?", "--prefix", "keepers", "--store", tmp_path / "kv", "--json", *SHORT)
    done = run(*ask)
    assert (done.json["retention"], done.json["sparse"]["attend"]) == (0.25, "selected")
    assert "retention 0.25, as the recipe of this prefix says" in done.err
    exact = run(*ask, "--retention", "1.0")
    assert exact.json["retention"] == 1.0
    assert "recipe" not in exact.err
    chat = ("query", "--prefix", "keepers", "--store", tmp_path / "kv", "--json", *SHORT)
    done = run(*chat, stdin="/chat on\nwho?\nwhy?\n")
    assert [json.loads(line)["retention"] for line in done.out.splitlines()] == [0.25, 0.25]
    assert done.err.count("as the recipe of this prefix says") == 1


def test_lines_of_a_batch_carry_what_was_kept_and_layers_only_with_explain(
    run: Run, built: Path, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prefix": "keepers", "prompt": "who?"}\n' * 2)
    ask = ("query", "--prompts", file, "--store", built, "--retention", "0.5", *SHORT)
    for line in run(*ask).out.splitlines():
        value = json.loads(line)
        assert value["retention"] == 0.5
        assert value["loaded_ratio"] >= value["selected_ratio"] >= 0.5
        assert "explain" not in value
    first = json.loads(run(*ask, "--explain").out.splitlines()[0])
    assert len(first["explain"]["layers"]) == first["layers"]


def test_interactive_retention_evidence_and_attend_hold_for_the_questions_that_follow(
    run: Run, built: Path
) -> None:
    text = "who?\n/retention 0.5\n/evidence full\n/attend selected\nwho?\n/retention 1.0\nwho?\n"
    done = run("query", "--store", built, "--prefix", "keepers", "--json", *SHORT, stdin=text)
    values = [json.loads(line) for line in done.out.splitlines()]
    assert [value["retention"] for value in values] == [1.0, 0.5, 1.0]
    assert (values[1]["sparse"]["evidence"], values[1]["sparse"]["attend"]) == ("full", "selected")
    assert done.err.count("attend and evidence have no effect at retention 1.0") == 1


def test_memory_makes_no_difference_to_an_answer_and_what_is_off_is_said(
    run: Run, built: Path
) -> None:
    ask = ("query", "who?", "--prefix", "keepers", "--store", built, "--retention", "0.5", "--json")
    none, large = (run(*ask, *SHORT, "--host-budget", size) for size in ("0", "1GB"))
    assert (none.code, large.code) == (0, 0)
    assert none.json["tokens"] == large.json["tokens"]
    assert "host budget 0: no KV and no sketch stays in host memory" in none.err
    assert "budget" not in large.err


@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_budget_that_holds_no_layer_is_refused_with_the_least_that_works(
    tier: str, run: Run, built: Path
) -> None:
    ask = ("query", "who?", "--prefix", "keepers", "--store", built, *SHORT, "--json")
    refused = run(*ask, f"--{tier}-budget", "1kB")
    assert refused.code == 2
    assert len(refused.err.splitlines()) == 1
    least = refused.err.split("give at least ")[1].split(",")[0]
    assert run(*ask, f"--{tier}-budget", least).code == 0
    assert "loading" not in refused.err, "refused before the model is loaded"


def test_a_batch_finds_in_memory_what_its_first_line_read(
    run: Run, built: Path, tmp_path: Path
) -> None:
    lines = tmp_path / "ask.jsonl"
    lines.write_text('{"prefix": "keepers", "prompt": "who?"}\n' * 2, encoding="utf-8")
    ask = ("query", "--prompts", lines, "--store", built, *SHORT)
    first, second = (json.loads(line) for line in run(*ask).out.splitlines())
    assert (first["chunks"]["host"], second["chunks"]["disk"]) == (0, 0)
    assert second["chunks"]["host"] == first["chunks"]["disk"] > 0
    both = run(*ask, "--device-budget", "64MB")
    assert [json.loads(line)["chunks"]["device"] > 0 for line in both.out.splitlines()] == [
        False,
        True,
    ]
    warmed = run(*ask, "--warm", 3)
    assert "warmed up: " in warmed.err
    assert json.loads(warmed.out.splitlines()[0])["chunks"]["disk"] == 0
    stats = run("stats", "--store", built, "--json").json
    assert stats["hit_bytes"]["host"] > 0
    assert stats["policies"]["score"]["hit_bytes"] == stats["hit_bytes"]


def test_a_system_sets_what_was_left_open(run: Run, built: Path) -> None:
    ask = ("query", "who?", "--prefix", "keepers", "--store", built, *SHORT, "--json")
    paper = run(*ask, "--system", "as-h2o-lfu", "--retention", "0.25")
    assert paper.json["system"] == "as-h2o-lfu"
    assert paper.json["sparse"]["evidence"] == "full"
    assert paper.json["sparse"]["attend"] == "selected"
    assert "as-h2o-lfu is defined on chunks of 64 tokens in original order" in paper.err
    sparse = run(*ask, "--system", "as-h2o-lfu")
    assert "retention 1.0: as-h2o-lfu loads everything; set one below 1" in sparse.err
    mixed = run(*ask, "--system", "as-h2o-lfu", "--retention", "0.25", "--attend", "loaded")
    assert mixed.json["sparse"]["attend"] == "loaded"
    full = run(*ask, "--system", "as-like")
    assert full.json["loaded_ratio"] == 1.0
    assert full.json["reused_tokens"] > 0
    assert run(*ask, "--system", "recompute").json["plan"] == "recompute"
    assert "defined on" not in run(*ask, "--system", "impress", "--retention", "0.25").err


def test_what_was_typed_outlives_the_system_that_it_was_typed_with(run: Run, built: Path) -> None:
    typed = "/system impress\nwho?\n/system as-like\n/retention 1.0\n/system as-like\nwho?\n/quit\n"
    ask = ("query", "--prefix", "keepers", "--store", built, *SHORT, "--json")
    done = run(*ask, "--system", "as-h2o-lfu", "--retention", "0.25", stdin=typed)
    first, second = (json.loads(line) for line in done.out.splitlines())
    assert (first["system"], first["sparse"]["evidence"]) == ("impress", "auto")
    assert first["sparse"]["attend"] == "loaded"
    assert "--retention 0.25 has no effect with system as-like" in done.err
    assert (second["system"], second["retention"]) == ("as-like", 1.0)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--system", "vllm"), "system 'vllm' is not known; use one of recompute, as-like"),
        (("--system", "as-like", "--retention", "0.5"), "--retention 0.5 has no effect"),
        (("--system", "recompute", "--plan", "force-load"), "leave out --plan"),
        (("--host-budget", "0x"), "--host-budget '0x' is not a size"),
    ],
)
def test_a_system_that_can_not_be_is_refused(options, says: str, run: Run, built: Path) -> None:
    done = run("query", "who?", "--prefix", "keepers", "--store", built, *options)
    assert done.code == 2
    assert len(done.err.splitlines()) == 1
    assert says in done.err


def test_emulation_is_named_in_the_output(run: Run, built: Path) -> None:
    slow = ("--disk-bandwidth", "50MB/s", "--disk-latency", "200us", "--io", "buffered")
    done = run("query", "who?", "--prefix", "keepers", "--store", built, "--json", *slow, *SHORT)
    environment = done.json["environment"]
    assert environment["emulation"] == {"disk_bandwidth_bytes_s": 50e6, "disk_latency_s": 2e-4}
    assert environment["page_cache"] == "used"


def test_a_file_wins_over_a_stored_prefix_of_the_same_name_and_says_so(
    run: Run, built: Path, document: Path
) -> None:
    from_file = run("query", "who?", "--prefix", document, "--store", built, *SHORT)
    assert f"file {document}" in from_file.err
    from_store = run("query", "who?", "--prefix", "keepers", "--store", built, *SHORT)
    assert "stored prefix keepers" in from_store.err


def test_a_prefix_that_is_neither_file_nor_stored_names_what_was_asked(
    run: Run, built: Path
) -> None:
    done = run("query", "who?", "--prefix", "nobody", "--store", built)
    assert done.code == 1
    assert "'nobody'" in done.err
    assert "impress ls" in done.err


def test_a_prefix_the_store_lacks_is_stored_after_the_answer_so_that_the_next_is_fast(
    run: Run, store: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.txt"
    other.write_text("A different text about boats and their owners. " * 3, encoding="utf-8")
    ask = ("query", "who?", "--prefix", other, "--store", store, "--json", *SHORT)
    first, second = run(*ask).json, run(*ask).json
    assert (first["reused_tokens"], first["inserted_tokens"]) == (0, first["prefix"]["tokens"])
    assert (second["reused_tokens"], second["inserted_tokens"]) == (second["prefix"]["tokens"], 0)
    names = [prefix["name"] for prefix in run("ls", "--store", store, "--json").json["prefixes"]]
    assert sorted(names) == ["keepers", "other"]


def test_insert_never_leaves_the_store_as_it_is(run: Run, store: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("A different text about boats. " * 3, encoding="utf-8")
    ask = ("query", "who?", "--prefix", other, "--store", store, "--insert", "never", "--json")
    assert run(*ask, *SHORT).json["inserted_tokens"] == 0
    assert len(run("ls", "--store", store, "--json").json["prefixes"]) == 1


def test_explain_shows_the_first_token_that_parts_and_its_text(
    run: Run, built: Path, document: Path, tmp_path: Path
) -> None:
    text = document.read_text(encoding="utf-8")
    changed = tmp_path / "changed.txt"
    changed.write_text(text.replace("house 3", "house X"), encoding="utf-8")
    ask = ("query", "who?", "--prefix", changed, "--store", built, "--insert", "never", "--explain")
    shown = run(*ask, *SHORT).out
    assert "'X' in the prefix, stored there is '3'" in shown
    explain = run(*ask, "--json", *SHORT).json["explain"]
    assert explain["stop"] == "diverged"
    assert explain["divergence"]["position"] == explain["matched_tokens"]
    assert (explain["divergence"]["given"], explain["divergence"]["stored"]) == ("X", "3")


def test_what_is_stored_after_the_answer_is_not_what_the_match_ended_at(
    run: Run, store: Path, document: Path, tmp_path: Path
) -> None:
    text, end = document.read_text(encoding="utf-8"), ("--explain", "--json", *SHORT)
    longer, other = tmp_path / "longer.txt", tmp_path / "other.txt"
    longer.write_text(text + "X and more", encoding="utf-8")
    other.write_text(text + "Y and less", encoding="utf-8")
    ask = ("query", "who?", "--store", store, "--prefix")
    first = run(*ask, longer, *end).json
    assert first["inserted_tokens"] > 0
    parting = first["explain"]["divergence"]
    assert (parting["given"], parting["stored"]) == ("X", None)
    parting = run(*ask, other, *end).json["explain"]["divergence"]
    assert (parting["given"], parting["stored"]) == ("Y", "X")


def test_explain_of_a_full_hit_says_that_the_whole_prefix_matched(run: Run, built: Path) -> None:
    ask = ("query", "who?", "--prefix", "keepers", "--store", built, "--explain", *SHORT)
    assert "the whole prefix matched" in run(*ask).out


def test_prompts_give_one_json_line_each_and_bad_lines_do_not_stop_the_others(
    run: Run, built: Path, tmp_path: Path
) -> None:
    lines = [
        '{"prefix": "keepers", "prompt": "who?"}',
        "no json",
        "",
        '{"prompt": 7}',
        '{"prefix": "keepers", "prompt": "where?", "extra": 1}',
        '{"prefix": "nobody", "prompt": "who?"}',
        '{"prompt": " "}',
        '{"prompt": "no prefix at all"}',
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(lines), encoding="utf-8")
    done = run("query", "--prompts", file, "--store", built, *SHORT)
    answers = [json.loads(line) for line in done.out.splitlines()]
    assert [answer["line"] for answer in answers] == [1, 2, 4, 5, 6, 7, 8]
    assert [answer["line"] for answer in answers if "error" not in answer] == [1, 8]
    assert {answer["schema"] for answer in answers} == {"impress.query/1"}
    assert "line 2" in answers[1]["error"]["message"]
    assert answers[3]["error"]["message"].count("'extra'") == 1
    assert done.code == 1
    assert "5 of the lines" in done.err


def test_prompts_come_from_stdin_with_the_prefix_of_the_option(run: Run, built: Path) -> None:
    ask = ("query", "--prompts", "-", "--prefix", "keepers", "--store", built, *SHORT)
    done = run(*ask, stdin='{"prompt": "who?"}\n')
    assert done.code == 0
    assert json.loads(done.out)["prefix"]["name"] == "keepers"


def test_a_prompts_file_that_is_not_there_fails_with_its_name(run: Run, built: Path) -> None:
    done = run("query", "--prompts", "none.jsonl", "--store", built)
    assert done.code == 1
    assert "none.jsonl" in done.err


def test_the_interactive_prompt_answers_piped_questions_independently(
    run: Run, built: Path
) -> None:
    ask = ("query", "--store", built, "--prefix", "keepers", *SHORT)
    done = run(*ask, stdin="who?\nwho?\n/quit\nnever asked\n")
    reused = [line for line in done.out.splitlines() if line.startswith("prefix ")]
    assert done.code == 0
    assert len(reused) == 2
    assert reused[0].split(" tokens")[0] == reused[1].split(" tokens")[0]


def test_in_a_chat_each_question_continues_the_last(run: Run, built: Path) -> None:
    ask = ("query", "--store", built, "--prefix", "keepers", "--json", *SHORT)
    done = run(*ask, stdin="/chat on\nwho?\nwhy?\n/chat off\nwho?\n")
    first, second, third = [json.loads(line) for line in done.out.splitlines()]
    said = len(first["tokens"])
    assert second["prompt_tokens"] >= first["prompt_tokens"] + said - 1
    assert third["prompt_tokens"] == first["prompt_tokens"]
    assert second["inserted_tokens"] == 0


def test_interactive_commands_change_what_follows_and_mistakes_are_one_line(
    run: Run, built: Path
) -> None:
    text = "\n".join(
        [
            "/prefix keepers",
            "/system recompute",
            "who?",
            "/system impress",
            "/retention 1.0",
            "/retention no",
            "/evidence guess",
            "/attend all",
            "/system other",
            "/chat maybe",
            "/prefix nobody",
            "/unknown",
            "/help",
            "/stats",
            "/quit",
        ]
    )
    done = run("query", "--store", built, "--json", *SHORT, stdin=text)
    assert done.code == 0
    answer = json.loads(done.out.splitlines()[0])
    assert (answer["system"], answer["reused_tokens"]) == ("recompute", 0)
    errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 7
    assert "error: /evidence 'guess' is unknown; use auto, sketch, heads" in done.err
    assert "error: /attend 'all' is unknown; use loaded, selected" in done.err
    for command in ("/prefix [ID|FILE]", "/retention R", "/evidence NAME", "/attend NAME"):
        assert command in done.err
    assert json.loads(done.out.splitlines()[1])["schema"] == "impress.stats/1"


def test_broken_text_is_an_error_of_its_line_and_the_others_are_answered(
    run: Run, built: Path, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "\\ud800"}\n' + "[" * 100_000 + '\n{"prompt": "who?"}\n')
    done = run("query", "--store", built, "--prompts", file, *SHORT)
    first, second, third = (json.loads(line) for line in done.out.splitlines())
    assert done.code == 1
    assert "invalid character" in first["error"]["message"]
    assert "nested too deeply" in second["error"]["message"]
    assert third["prompt_tokens"] > 0


def test_an_empty_prefix_file_is_refused_by_name(run: Run, built: Path, tmp_path: Path) -> None:
    (tmp_path / "nothing.txt").write_text(" \n")
    done = run("query", "who?", "--store", built, "--prefix", tmp_path / "nothing.txt")
    assert done.code == 1
    assert "nothing.txt is empty" in done.err


def test_explain_after_a_damaged_chunk_says_that_it_could_not_be_read(
    run: Run, store: Path
) -> None:
    (shard,) = store.glob("nodes/*/*/g0/k/c.1.0.0.0")
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 2] ^= 1
    shard.write_bytes(raw)
    done = run("query", "who?", "--store", store, "--prefix", "keepers", "--explain", *SHORT)
    assert done.code == 0
    assert "could not be read" in done.out
    assert "first token that parts" not in done.out


def test_a_prompt_longer_than_the_positions_is_refused_with_both_numbers(
    run: Run, built: Path
) -> None:
    done = run("query", "word " * 2000, "--store", built)
    assert done.code == 1
    assert "positions" in done.err
    assert "1024" in done.err


def test_another_model_is_refused_and_the_field_is_named(run: Run, built: Path) -> None:
    done = run("query", "who?", "--store", built, "--model", "random:tiny-mha")
    assert done.code == 1
    assert "num_kv_heads" in done.err


def test_another_dtype_is_refused_and_both_values_are_named(run: Run, built: Path) -> None:
    done = run("query", "who?", "--store", built, "--dtype", "float16")
    assert done.code == 1
    assert "float16" in done.err
    assert "float32" in done.err


def test_a_prefix_file_that_is_not_text_is_refused_by_name(
    run: Run, built: Path, tmp_path: Path
) -> None:
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"ab\xff\xfe")
    done = run("query", "who?", "--store", built, "--prefix", binary)
    assert done.code == 1
    assert "binary.txt" in done.err
    assert "UTF-8" in done.err


def test_a_folder_that_is_no_store_and_one_that_is_missing_are_told_apart(
    run: Run, tmp_path: Path
) -> None:
    missing = run("query", "who?", "--store", tmp_path / "none")
    other = run("query", "who?", "--store", tmp_path)
    assert (missing.code, other.code) == (1, 1)
    assert "no store at" in missing.err
    assert "not an impress store" in other.err
