"""From a prefix someone names and a question someone types to an answer.

Owns how a prefix is found (file, stored id or name), how prefix and question become tokens, what
a chat turn adds, and why a match ended where it did. The forward passes are `generate`'s.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pipelines.text import (
    encode_prefix,
    encode_question,
    encode_text,
    has_chat_template,
    read_text,
    render,
)
from store.errors import PrefixNotFoundError, PromptError, SourceError

if TYPE_CHECKING:
    from pipelines.generate import Answer, QueryOptions
    from pipelines.models import LoadedModel
    from pipelines.text import TokenizerLike
    from store.engine import PrefixStore
    from store.index.radix import PrefixMatch

NO_TOKENS = np.zeros(0, dtype=np.uint32)


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a question is asked about.

    Parameters
    ----------
    ids
        uint32 (n,), n may be 0.
    name
        For people: a file's name or the stored prefix's name.
    template
        ``auto`` or ``none``: how the question after it has to be framed.
    origin
        ``none``, ``file``, ``stored`` or ``chat``.
    prefix_id
        Id of the stored prefix, None where it was not looked up by one.
    source
        Where it comes from (`PrefixItem.source`), kept with it if it is stored now.
    """

    ids: np.ndarray
    name: str = ""
    template: str = "auto"
    origin: str = "none"
    prefix_id: str | None = None
    source: dict[str, Any] = field(default_factory=dict)


class Divergence(NamedTuple):
    """Where a prompt leaves what is stored: ``position`` counts tokens from the beginning.

    Texts are None where there is no such token (the prefix, or the stored tokens, end there).
    """

    position: int
    given: str | None
    stored: str | None


def find_prefix(store: PrefixStore, model: LoadedModel, key: str, template: str) -> Prefix:
    """Return the prefix that ``key`` names: a text file if one exists, else a stored prefix.

    A stored prefix keeps the framing it was stored with; a file is cut where `build` cuts it.
    Raises PrefixNotFoundError, SourceError.
    """
    path = Path(key)
    if _is_file(path):
        text = read_text(path)
        if not text.strip():
            raise SourceError(f"{path} is empty; name a file with text, or leave out --prefix")
        ids = encode_prefix(model.tokenizer, text, template)
        cut = max(0, len(ids) - model.prefix_limit)
        source = {"kind": "document", "path": str(path), "template": template, "cut_tokens": cut}
        return Prefix(ids[: model.prefix_limit], path.stem, template, "file", source=source)
    try:
        row = store.prefix(key)
    except PrefixNotFoundError as error:
        raise PrefixNotFoundError(f"no file {key!r} here, and {error}") from error
    source = json.loads(row.source)
    framing = source.get("template", "auto") if template == "auto" else template
    return Prefix(store.prefix_ids(row), row.name, framing, "stored", row.prefix_id, source)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name longer than the file system allows is not a file
        return False


def question_ids(tokenizer: TokenizerLike, prompt: str, prefix: Prefix) -> np.ndarray:
    """Token ids of a question after ``prefix``, uint32. Raises PromptError where it is empty."""
    if not prompt.strip():
        raise PromptError("the prompt is empty; type a question")
    return encode_question(tokenizer, prompt, prefix.template, has_prefix=len(prefix.ids) > 0)


def ask(
    store: PrefixStore,
    model: LoadedModel,
    prefix: Prefix,
    prompt: str,
    options: QueryOptions,
    on_text: Callable[[str], None] | None = None,
) -> Answer:
    """Answer one question about ``prefix``; pieces of the answer go to ``on_text`` as they come."""
    from pipelines.generate import answer

    suffix = question_ids(model.tokenizer, prompt, prefix)
    return answer(
        store,
        model,
        prefix.ids,
        suffix,
        options=options,
        on_text=on_text,
        name=prefix.name,
        source=prefix.source,
    )


def after_turn(model: LoadedModel, prefix: Prefix, prompt: str, token_ids: list[int]) -> Prefix:
    """Return the prefix of a chat's next question: this prefix, the question and the answer.

    The token that ended the answer is replaced by what closes a message in the chat template;
    `question_ids` frames the next turn.
    """
    tokenizer = model.tokenizer
    said = np.asarray([t for t in token_ids if t not in model.stop_ids], dtype=np.uint32)
    parts = [prefix.ids, question_ids(tokenizer, prompt, prefix), said]
    framing = prefix.template
    if framing != "none" and has_chat_template(tokenizer):
        framing = "chat"
        parts.append(encode_text(tokenizer, assistant_close(tokenizer), special=False))
    ids = np.concatenate(parts)
    return Prefix(ids, prefix.name, framing, "chat", prefix.prefix_id, prefix.source)


def assistant_close(tokenizer: TokenizerLike) -> str:
    """Text that the chat template writes after an assistant's message."""
    mark = "impress-answer-mark"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": mark}]
    return render(tokenizer, turns).partition(mark)[2]


def divergence(match: PrefixMatch, ids: np.ndarray, tokenizer: TokenizerLike) -> Divergence:
    """Return the first token where ``ids`` (uint32) and the stored tokens part, as text."""
    position = match.matched_len
    token = int(ids[position]) if position < len(ids) else None
    given = None if token is None else tokenizer.decode([token])
    return Divergence(position, given, _next_stored(match, token, tokenizer))


def _next_stored(match: PrefixMatch, given: int | None, tokenizer: TokenizerLike) -> str | None:
    if not match.nodes:
        return None
    node, used = match.nodes[-1]
    known = node.first_ids if node.ids is None else node.ids
    if used < len(known):
        return str(tokenizer.decode([int(known[used])]))
    # A child that begins with the given token was stored after the answer.
    others = [token for token in node.children if token != given]
    if used == node.length and len(others) == 1:
        return str(tokenizer.decode(others))
    return None
