"""Prefix sources: what text becomes which tokens, and what is said about bad data."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pipelines.prefixes import (
    PrefixItem,
    PrefixSource,
    encode_prefix,
    encode_question,
    source_from_files,
    source_from_recipe,
)
from pipelines.recipe import Recipe, load_recipe, shipped_folder
from pipelines.text import decode_text
from store.errors import InvalidValueError, SourceError
from tests.pipelines.tiny_tokenizers import CHATML, DROPS_TOOLS, STRICT, tiny_tokenizer

SHARED = Path(__file__).parents[3] / "shared" / "data"
SYSTEM = {"role": "system", "content": "Follow the policy.\n\nBe brief."}
TALK = [
    SYSTEM,
    {"role": "user", "content": "Hi there."},
    {"role": "assistant", "content": "Hello!\n"},
    {"role": "user", "content": "Book the other flight"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "book", "arguments": '{"id": "7é"}'}, "id": "c1"}],
    },
    {"role": "tool", "name": "book", "tool_call_id": "c1", "content": "done"},
    {"role": "assistant", "content": "Booked."},
]


def recipe(**prefixes: object) -> Recipe:
    return Recipe.model_validate({"name": "mine", "prefixes": prefixes})


def items(source: PrefixSource, tokenizer=None, max_tokens: int = 10_000) -> list[PrefixItem]:
    return list(source.items(tokenizer or tiny_tokenizer(), max_tokens))


def write_rows(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def starts_with(ids: np.ndarray, prefix: np.ndarray) -> bool:
    return len(prefix) > 0 and np.array_equal(ids[: len(prefix)], prefix)


# Text to tokens


@pytest.mark.parametrize("template", ["auto", "none"])
@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("chat_template", [None, CHATML, STRICT])
@pytest.mark.parametrize("text", ["The end.\n\n", "the other", "x", "é\n"])
def test_ids_are_prefix_and_question_with_nothing_in_between(template, bos, chat_template, text):
    tokenizer = tiny_tokenizer(chat_template, bos=bos)
    prefix = encode_prefix(tokenizer, text, template)
    question = encode_question(tokenizer, "\nWho?", template)
    assert prefix.dtype == question.dtype == np.uint32
    whole = tokenizer.decode(np.concatenate([prefix, question]).tolist())
    assert text in whole
    assert whole.count("<s>") == int(bos or (chat_template == STRICT and template == "auto"))
    assert "</s>" not in whole


def test_a_blank_line_at_the_seam_is_why_prefix_and_question_are_encoded_apart():
    tokenizer = tiny_tokenizer()
    together = np.asarray(tokenizer.encode("end\n\nnext"), dtype=np.uint32)
    prefix = encode_prefix(tokenizer, "end\n\n", "none")
    assert not starts_with(together, prefix)


def test_auto_frames_document_and_question_with_the_chat_template():
    tokenizer = tiny_tokenizer(CHATML)
    ids = [*encode_prefix(tokenizer, "A text."), *encode_question(tokenizer, "Who?")]
    expected = "<|im_start|>user\nA text.\n\nWho?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids) == expected


def test_a_question_without_a_prefix_is_one_whole_message():
    tokenizer = tiny_tokenizer(CHATML)
    alone = encode_question(tokenizer, "Who?", has_prefix=False)
    assert tokenizer.decode(alone) == ("<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n")


def test_a_question_without_a_prefix_gets_the_bos_of_a_base_model():
    tokenizer = tiny_tokenizer(bos=True)
    assert tokenizer.decode(encode_question(tokenizer, "Who?", has_prefix=False)) == "<s>Who?"
    assert tokenizer.decode(encode_question(tokenizer, "Who?")) == "Who?"


def test_none_leaves_an_instruct_model_without_a_frame():
    tokenizer = tiny_tokenizer(CHATML)
    assert tokenizer.decode(encode_prefix(tokenizer, "A text.", "none")) == "A text."
    assert tokenizer.decode(encode_question(tokenizer, "Who?", "none")) == "Who?"


def test_an_unknown_template_is_refused_with_the_known_ones():
    with pytest.raises(InvalidValueError, match="'chatml' is not known; use one of auto, none"):
        encode_prefix(tiny_tokenizer(), "a", "chatml")


def test_a_template_that_loses_the_users_text_is_refused_with_the_way_out():
    tokenizer = tiny_tokenizer("{{ 'nothing' }}")
    with pytest.raises(SourceError, match="use --template none"):
        encode_prefix(tokenizer, "a text")


# Documents


def test_each_file_is_a_prefix_named_after_it(tmp_path):
    (tmp_path / "b.md").write_text("second", encoding="utf-8")
    (tmp_path / "a.txt").write_text("first", encoding="utf-8")
    source = source_from_files([tmp_path / "b.md", tmp_path / "a.txt"])
    assert source.count() == 2
    found = items(source)
    assert [item.name for item in found] == ["b", "a"]
    assert found[0].source == {
        "kind": "documents",
        "path": str(tmp_path / "b.md"),
        "template": "auto",
        "queries": [],
        "cut_tokens": 0,
    }
    assert [item.name for item in items(source_from_files([tmp_path]))] == ["a", "b"]


def test_the_stored_ids_are_what_a_query_makes_of_the_same_file(tmp_path):
    tokenizer = tiny_tokenizer(CHATML, bos=True)
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfA text.\r\n\n")
    [item] = items(source_from_files([path]), tokenizer)
    assert np.array_equal(item.ids, encode_prefix(tokenizer, "A text.\r\n\n"))


def test_files_of_one_name_get_different_names_and_equal_texts_stay_two_items(tmp_path):
    paths = [tmp_path / name for name in ("x/a.txt", "y/a.txt", "a-2.txt", "z/a.md")]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.write_text("same", encoding="utf-8")
    found = items(source_from_files(paths))
    assert len({item.name for item in found}) == 4
    assert all(np.array_equal(item.ids, found[0].ids) for item in found)


def test_an_empty_file_is_left_out_with_a_warning(tmp_path):
    (tmp_path / "a.txt").write_text(" \n", encoding="utf-8")
    (tmp_path / "b.txt").write_text("text", encoding="utf-8")
    source = source_from_files([tmp_path])
    assert [item.name for item in items(source)] == ["b"]
    assert source.warnings == [f"{tmp_path / 'a.txt'}: empty file, left out"]
    items(source)
    assert len(source.warnings) == 1


def test_a_file_that_is_not_utf8_names_file_and_byte(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9 au lait")
    with pytest.raises(SourceError, match=r"latin\.txt: not UTF-8 text, byte 0xe9 at offset 3"):
        items(source_from_files([path]))


def test_a_long_document_is_cut_and_the_warning_says_by_how_much(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("x" * 100, encoding="utf-8")
    source = source_from_files([path])
    [item] = items(source, max_tokens=30)
    assert len(item.ids) == 30
    assert item.source["cut_tokens"] == 70
    assert source.warnings == [f"{path}: 100 tokens cut to 30, the last 70 are dropped"]


def test_the_recipes_own_max_tokens_and_limit_apply_too(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name * 50, encoding="utf-8")
    spec = recipe(source="documents", path="*.txt", max_tokens=20, limit=2)
    source = source_from_recipe(spec, tmp_path)
    assert source.count() == 2
    assert [len(item.ids) for item in items(source)] == [20, 20]


def test_a_system_text_is_the_common_beginning_of_all_documents(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"{name} text", encoding="utf-8")
    write_rows(tmp_path / "c.jsonl", [{"text": "c text"}])
    spec = recipe(source="documents", path=["*.txt", "c.jsonl"], system="Rules.")
    shared = np.frombuffer(b"Rules.", dtype=np.uint8).size
    found = items(source_from_recipe(spec, tmp_path))
    assert len(found) == 3
    assert all(np.array_equal(item.ids[:shared], found[0].ids[:shared]) for item in found)
    assert tiny_tokenizer().decode(found[2].ids) == "Rules.\n\nc text"


def test_paths_of_a_recipe_are_meant_from_its_folder_and_can_be_replaced(tmp_path):
    (tmp_path / "own.txt").write_text("own", encoding="utf-8")
    (tmp_path / "given.txt").write_text("given", encoding="utf-8")
    spec = recipe(source="documents", path="own.txt")
    assert [i.name for i in items(source_from_recipe(spec, tmp_path))] == ["own"]
    replaced = source_from_recipe(spec, tmp_path, [tmp_path / "given.txt"])
    assert [i.name for i in items(replaced)] == ["given"]


@pytest.mark.parametrize("name", ["none.txt", "*.md"])
def test_a_path_without_a_file_is_named(tmp_path, name):
    with pytest.raises(SourceError, match="check the"):
        source_from_recipe(recipe(source="documents", path=name), tmp_path)


def test_a_folder_without_text_and_a_file_of_another_kind_are_refused(tmp_path):
    with pytest.raises(SourceError, match=r"no \.txt or \.md files"):
        source_from_files([tmp_path])
    (tmp_path / "a.pdf").touch()
    with pytest.raises(SourceError, match=r"'\.pdf' are not known; give \.txt"):
        source_from_files([tmp_path / "a.pdf"])
    with pytest.raises(SourceError, match="no files given"):
        source_from_files([])


def test_less_than_one_token_is_refused():
    source = source_from_recipe(load_recipe("demo"), shipped_folder())
    with pytest.raises(InvalidValueError, match="max_tokens is 0"):
        items(source, max_tokens=0)


def test_the_demo_has_three_questions_about_one_long_document():
    source = source_from_recipe(load_recipe("demo"), shipped_folder())
    [item] = items(source, max_tokens=100_000)
    assert item.name == "demo"
    assert len(item.source["queries"]) == 3
    assert len(item.ids) > 10_000  # bytes here; about 3 000 tokens of the model


# JSON Lines


def test_rows_are_prefixes_with_their_queries(tmp_path):
    rows = [
        {"prefix": "one", "queries": ["q1", "q2"], "name": "first"},
        {"prefix": "two", "queries": "q3"},
        {"prefix": ""},
        {"prefix": "one"},
    ]
    source = source_from_files([write_rows(tmp_path / "p.jsonl", rows)])
    assert source.count() == 4
    found = items(source)
    assert [item.name for item in found] == ["first", "p-2", "p-4"]
    assert [item.source["queries"] for item in found] == [["q1", "q2"], ["q3"], []]
    assert np.array_equal(found[0].ids, found[2].ids)
    assert source.warnings == [f"{tmp_path / 'p.jsonl'}:3: empty prefix, left out"]


def test_field_names_come_from_the_recipe(tmp_path):
    write_rows(tmp_path / "p.jsonl", [{"body": "text", "ask": "q", "id": 7}])
    spec = recipe(
        source="jsonl", path="p.jsonl", text_field="body", queries_field="ask", name_field="id"
    )
    [item] = items(source_from_recipe(spec, tmp_path))
    assert (item.name, item.source["queries"]) == ("7", ["q"])


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"prefix": "a"', r"p\.jsonl:2: not JSON at column 15"),
        (b"[1]", r"p\.jsonl:2: a JSON list; each row must be an object"),
        (b'{"text_": "a"}', r"p\.jsonl:2: no field 'text' \(fields: text_\)"),
        (b'{"prefix": 3}', r"p\.jsonl:2: 'prefix' is int; it must be a text"),
        (b'{"prefix": "a", "queries": [1]}', r"p\.jsonl:2: 'queries' is list"),
        (b'{"prefix": "\xff"}', r"p\.jsonl:2: not UTF-8 text, byte 0xff at offset 28"),
    ],
)
def test_a_bad_line_names_file_and_line(tmp_path, line, says):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prefix": "a"}\n' + line + b"\n")
    with pytest.raises(SourceError, match=says):
        items(source_from_files([path]))


PASSAGES = {
    "question": "who?",
    "answers": ["me"],
    "ctxs": [{"title": f"T{i}", "text": f"text {i}", "score": i} for i in range(3)],
}


def test_retrieved_passages_are_joined_and_the_question_is_the_query(tmp_path):
    path = write_rows(tmp_path / "r.jsonl", [PASSAGES])
    [item] = items(source_from_recipe(load_recipe("rag"), shipped_folder(), [path]))
    text = "Title: T0\ntext 0\n\nTitle: T1\ntext 1\n\nTitle: T2\ntext 2"
    assert tiny_tokenizer().decode(item.ids) == text
    assert item.source["queries"] == ["who?"]
    assert np.array_equal(items(source_from_files([path]))[0].ids, item.ids)


def test_top_and_format_of_passages_come_from_the_recipe(tmp_path):
    write_rows(tmp_path / "r.jsonl", [PASSAGES])
    options = {"source": "jsonl", "path": "r.jsonl", "contexts_field": "ctxs", "top": 2}
    [item] = items(source_from_recipe(recipe(**options, context_format="{text}"), tmp_path))
    assert tiny_tokenizer().decode(item.ids) == "text 0\n\ntext 1"
    with pytest.raises(SourceError, match=r"r\.jsonl:1: passages do not fit context_format"):
        items(source_from_recipe(recipe(**options, context_format="{body}"), tmp_path))


# Chat


def chat(folder: Path, transcripts: list, **options: object) -> PrefixSource:
    (folder / "t.json").write_text(json.dumps(transcripts), encoding="utf-8")
    return source_from_recipe(recipe(source="chat", path="t.json", **options), folder)


def other_talk() -> list[dict]:
    return [SYSTEM, {"role": "user", "content": "Something else"}]


def test_a_transcript_goes_through_the_chat_template_with_tool_calls_as_json(tmp_path):
    tokenizer = tiny_tokenizer(CHATML)
    [item] = items(chat(tmp_path, [{"traj": TALK}]), tokenizer)
    text = tokenizer.decode(item.ids)
    assert text.startswith("<|im_start|>system\nFollow the policy.\n\nBe brief.<|im_end|>\n")
    assert '{"name": "book", "arguments": "{\\"id\\": \\"7é\\"}"}<|im_end|>' in text
    assert "<|im_start|>tool\ndone<|im_end|>" in text
    assert text.endswith("Booked.<|im_end|>\n")
    assert item.source["template"] == "chat"


@pytest.mark.parametrize("template", [None, CHATML, STRICT, DROPS_TOOLS])
def test_transcripts_share_the_tokens_of_their_system_prompt(tmp_path, template):
    tokenizer = tiny_tokenizer(template)
    first, second = items(chat(tmp_path, [TALK, {"messages": other_talk()}]), tokenizer)
    text = tokenizer.decode(first.ids)
    end = text.index("Be brief.") + len("Be brief.")
    shared = len(tokenizer.encode(text[:end], add_special_tokens=False))
    assert np.array_equal(first.ids[:shared], second.ids[:shared])


@pytest.mark.parametrize("template", [STRICT, DROPS_TOOLS])
def test_what_a_template_can_not_express_is_said_by_the_user(tmp_path, template):
    tokenizer = tiny_tokenizer(template)
    [item] = items(chat(tmp_path, [TALK]), tokenizer)
    text = tokenizer.decode(item.ids)
    for part in ("Follow the policy.", "tool: done", "Booked."):
        assert part in text


def test_a_template_that_refuses_every_way_of_writing_names_the_transcript(tmp_path):
    tokenizer = tiny_tokenizer("{{ raise_exception('no chats') }}")
    with pytest.raises(SourceError, match=r"t\.json element 1: .*no chats.*template none"):
        items(chat(tmp_path, [TALK]), tokenizer)


@pytest.mark.parametrize("template", [None, CHATML, STRICT])
def test_with_all_turns_each_prefix_extends_the_last_and_its_query_is_what_came_next(
    tmp_path, template
):
    tokenizer = tiny_tokenizer(template)
    source = chat(tmp_path, [TALK, other_talk()], turns="all")
    found = items(source, tokenizer)
    assert source.count() == len(found) == 3
    assert [item.name for item in found] == ["t-1-turn-1", "t-1-turn-2", "t-2-turn-1"]
    assert found[0].source["queries"] == ["Book the other flight"]
    assert found[1].source["queries"] == []
    assert starts_with(found[1].ids, found[0].ids)
    assert np.array_equal(found[1].ids, items(chat(tmp_path, [TALK]), tokenizer)[0].ids)


@pytest.mark.parametrize("bos", [False, True])
def test_a_question_after_a_transcript_is_its_next_turn(tmp_path, bos):
    tokenizer = tiny_tokenizer(CHATML, bos=bos)
    first, second = items(chat(tmp_path, [TALK], turns="all"), tokenizer)
    question = encode_question(tokenizer, first.source["queries"][0], first.source["template"])
    asked = np.concatenate([first.ids, question])
    text = tokenizer.decode(second.ids)
    end = text.index('{"name"')
    assert tokenizer.decode(asked) == text[:end]
    assert starts_with(second.ids, asked)


@pytest.mark.parametrize(("template", "option"), [(None, "auto"), (CHATML, "none"), (None, "none")])
def test_without_a_chat_template_a_transcript_is_paragraphs_of_role_and_content(
    tmp_path, template, option
):
    tokenizer = tiny_tokenizer(template)
    [item] = items(chat(tmp_path, [TALK[1:3]], template=option), tokenizer)
    assert tokenizer.decode(item.ids) == "user: Hi there.\n\nassistant: Hello!\n"
    assert item.source["template"] == "transcript"
    question = encode_question(tokenizer, "Why?", item.source["template"])
    assert tokenizer.decode(question) == "\n\nuser: Why?\n\nassistant:"


@pytest.mark.parametrize(
    "row",
    [
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}],
        {"history": [{"user": "Hi", "bot": "Yes"}]},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, TALK[6]]},
    ],
)
def test_the_known_shapes_of_transcripts_are_read_from_json_lines(tmp_path, row):
    tokenizer = tiny_tokenizer(CHATML)
    source = source_from_files([write_rows(tmp_path / "t.jsonl", [row])])
    assert source.count() == 1
    text = tokenizer.decode(items(source, tokenizer)[0].ids)
    assert text.startswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_a_file_that_is_one_list_of_messages_is_one_transcript(tmp_path):
    assert len(items(chat(tmp_path, TALK))) == 1


@pytest.mark.parametrize(
    ("transcripts", "says"),
    [
        ([{"turns": []}], "no field messages or traj.*fields: turns.*messages_field"),
        ([TALK, []], "element 2: a transcript must be a list"),
        ([[{"content": "a"}]], "element 1 message 1: needs role and content"),
        ([3], "element 1: a JSON int"),
        ([[{"role": "assistant", "tool_calls": [{}]}]], "a tool call needs a function"),
    ],
)
def test_a_transcript_that_can_not_be_read_is_named(tmp_path, transcripts, says):
    with pytest.raises(SourceError, match=says):
        items(chat(tmp_path, transcripts))


def test_broken_json_names_line_and_column(tmp_path):
    path = tmp_path / "t.json"
    path.write_text('[\n{"messages": }\n]', encoding="utf-8")
    with pytest.raises(SourceError, match=r"t\.json: not JSON at line 2 column 14"):
        items(source_from_files([path]))


def test_the_offset_in_a_message_counts_from_the_beginning_of_the_file():
    with pytest.raises(SourceError, match="offset 12"):
        decode_text(b"ab\xff", "file", 10)


# Data that lies next to the repository


@pytest.mark.skipif(not SHARED.exists(), reason="shared/data is not next to the repository")
def test_tool_use_transcripts_share_their_system_prompt():
    path = SHARED / "chat" / "tau_bench_gpt-4o-airline.json"
    tokenizer = tiny_tokenizer(CHATML)
    spec = recipe(source="chat", path=str(path), limit=12)
    found = items(source_from_recipe(spec, path.parent), tokenizer, 100_000)
    prompt = json.loads(path.read_text(encoding="utf-8"))[0]["traj"][0]["content"]
    shared = len(tokenizer.encode(prompt, add_special_tokens=False))
    assert len(found) == 12
    assert shared > 1000
    assert all(np.array_equal(i.ids[:shared], found[0].ids[:shared]) for i in found)
