"""Chat transcripts of several shapes as plain messages, and messages as prefix tokens.

Message lists are read from OpenAI's shape (``role``, ``content``, ``tool_calls``), ShareGPT's
(``from``, ``value``) and pairs (``user``, ``bot``). What a chat template can't express (tool
results, tool calls, a system message) is written as plain text under a role that it knows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from pipelines.text import (
    SEPARATOR,
    Message,
    TokenizerLike,
    encode_text,
    has_chat_template,
    render,
)
from store.errors import SourceError

_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}


def parse_messages(value: Any, where: str) -> list[Message]:
    """A transcript as messages with exactly ``role`` and ``content``, both texts.

    Raises
    ------
    SourceError
        Not a list of messages; ``where`` is named.
    """
    if not isinstance(value, list) or not value:
        raise SourceError(f"{where}: a transcript must be a list of messages with at least one")
    messages: list[Message] = []
    for number, entry in enumerate(value, start=1):
        messages += _parse_entry(entry, f"{where} message {number}")
    return messages


def _parse_entry(entry: Any, where: str) -> list[Message]:
    if isinstance(entry, dict) and "role" in entry:
        return [_message(entry["role"], _content(entry, where))]
    if isinstance(entry, dict) and "from" in entry and "value" in entry:
        return [_message(entry["from"], str(entry["value"]))]
    if isinstance(entry, dict) and isinstance(entry.get("user"), str):
        pair = [("user", entry["user"]), ("assistant", entry.get("bot", entry.get("assistant")))]
        return [_message(role, str(text)) for role, text in pair if text is not None]
    raise SourceError(f"{where}: needs role and content (or from and value, or user and bot)")


def _message(role: Any, content: str) -> Message:
    return {"role": _ROLES.get(str(role), str(role)), "content": content}


def _content(entry: dict[str, Any], where: str) -> str:
    """Content as text: parts are joined, tool calls are written as JSON after it."""
    content = entry.get("content")
    if isinstance(content, list):
        content = "\n".join(
            str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content
        )
    texts = [] if content is None else [str(content)]
    calls = entry.get("tool_calls") or (
        [entry["function_call"]] if entry.get("function_call") else []
    )
    texts += [_call_text(call, where) for call in calls]
    return "\n".join(texts)


def _call_text(call: Any, where: str) -> str:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or "name" not in function:
        raise SourceError(f"{where}: a tool call needs a function with a name")
    return json.dumps(
        {"name": function["name"], "arguments": function.get("arguments")}, ensure_ascii=False
    )


def turn_ends(messages: Sequence[Message]) -> list[int]:
    """Numbers of messages after which a user speaks, and the end: where a turn is complete.

    A user's message is the beginning of a turn, so the system prompt alone is none.
    """
    ends = [
        i + 1
        for i, (message, following) in enumerate(pairwise(messages))
        if following["role"] == "user" and message["role"] not in ("system", "user")
    ]
    return [*ends, len(messages)]


def encode_messages(
    tokenizer: TokenizerLike, messages: Sequence[Message], ends: Sequence[int], template: str
) -> list[np.ndarray]:
    """Token ids of the transcript up to each of ``ends`` (ascending); each extends the last.

    Every piece between two ends is encoded by itself: encoding a longer text anew could give
    other tokens at the seam, and then a later turn would not match the stored one.

    Parameters
    ----------
    template
        ``chat`` (the tokenizer's chat template) or ``transcript`` ("role: content").
    """
    texts = (
        _rendered(tokenizer, messages, ends)
        if template == "chat"
        else [plain_transcript(messages[:end]) for end in ends]
    )
    result: list[np.ndarray] = []
    done = ""
    ids = np.empty(0, dtype=np.uint32)
    for text in texts:
        if not text.startswith(done):
            # The template rewrites earlier messages (some drop old reasoning): nothing is shared.
            done, ids = "", ids[:0]
        piece = encode_text(tokenizer, text[len(done) :], special=not done)
        ids = np.concatenate([ids, piece])
        done = text
        result.append(ids)
    return result


def transcript_template(tokenizer: TokenizerLike, template: str) -> str:
    """How a transcript is written, given a recipe's ``template`` (auto or none)."""
    return "chat" if template == "auto" and has_chat_template(tokenizer) else "transcript"


def plain_transcript(messages: Sequence[Message]) -> str:
    """Transcript for models without a chat template: "role: content" paragraphs."""
    return SEPARATOR.join(f"{m['role']}: {m['content']}" for m in messages)


def _rendered(
    tokenizer: TokenizerLike, messages: Sequence[Message], ends: Sequence[int]
) -> list[str]:
    """Text up to each end, with the first way of writing roles that the template accepts whole."""
    problem: SourceError | None = None
    for rewrite in (_as_given, _tools_as_user, _system_as_user):
        try:
            texts = [render(tokenizer, rewrite(messages[:end])) for end in ends]
        except SourceError as error:
            problem = error
            continue
        if _says_all(texts[-1], messages):
            return texts
    raise problem or SourceError(
        "the chat template leaves out some of the messages; use template: none in the recipe"
    )


def _says_all(text: str, messages: Sequence[Message]) -> bool:
    """Whether no role was dropped: some templates do that without an error.

    What users and assistants say is not looked at: templates may shorten it on purpose.
    """
    return all(
        message["content"].strip() in text
        for message in messages
        if message["role"] not in ("user", "assistant")
    )


def _as_given(messages: Sequence[Message]) -> list[Message]:
    return list(messages)


def _tools_as_user(messages: Sequence[Message]) -> list[Message]:
    """Roles other than system, user and assistant become user messages that name the role."""
    known = ("system", "user", "assistant")
    plain = [
        m if m["role"] in known else {"role": "user", "content": f"{m['role']}: {m['content']}"}
        for m in messages
    ]
    return _merge_neighbours(plain)


def _system_as_user(messages: Sequence[Message]) -> list[Message]:
    """As `_tools_as_user`, with the system prompt in front of the user's first message."""
    plain = [
        {**m, "role": "user"} if m["role"] == "system" else m for m in _tools_as_user(messages)
    ]
    return _merge_neighbours(plain)


def _merge_neighbours(messages: Sequence[Message]) -> list[Message]:
    """One message for several of the same role in a row: many templates demand alternation."""
    merged: list[Message] = []
    for message in messages:
        if merged and merged[-1]["role"] == message["role"]:
            both = merged[-1]["content"] + SEPARATOR + message["content"]
            merged[-1] = {"role": message["role"], "content": both}
        else:
            merged.append(message)
    return merged
