"""Text to token ids: ``ids = encode(prefix) + encode(question, no special tokens)``.

Owns the framing of a prefix and a question. Prefix and question are always encoded apart, so a
stored prefix matches to its last token whatever question follows. It knows no files and no
data sets.

Framings (``template``):

============  ==========================================  ===================================
template      prefix                                      question
============  ==========================================  ===================================
auto          template head + document                    "\\n\\n" + question + template tail
none          document                                    question
chat          transcript through the chat template        one more user turn
transcript    "role: content" paragraphs                  "\\n\\nuser: question\\n\\nassistant:"
============  ==========================================  ===================================

``auto`` is ``none`` for a tokenizer without a chat template. A question without a prefix is
encoded whole: head + question + tail (``auto``), or the plain question with the tokenizer's
usual special tokens (``none``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import jinja2
import numpy as np

from store.errors import InvalidValueError, SourceError

TEMPLATES = ("auto", "none", "chat", "transcript")
SEPARATOR = "\n\n"

# Text that no template changes and no document contains: it marks where content goes.
_MARK = "impress5e8bcontent{}7d21mark"

# Templates that would write today's date take this one instead (it is Llama 3.1's own default):
# a head that changes from day to day would never match what was stored yesterday.
_TEMPLATE_VALUES = {"date_string": "26 Jul 2024"}

Message = dict[str, str]


class TokenizerLike(Protocol):
    """The part of a transformers tokenizer that is used here."""

    chat_template: Any
    bos_token: str | None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of ``text``."""

    def decode(self, token_ids: Any) -> Any:
        """Text of ``token_ids``."""

    def apply_chat_template(
        self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool, **kwargs: Any
    ) -> Any:
        """Messages as text (``tokenize=False``)."""


class Frame(NamedTuple):
    """Text before and after what the user wrote."""

    head: str
    tail: str


def read_text(path: Path) -> str:
    """Text of a UTF-8 file, without a byte order mark.

    Raises
    ------
    SourceError
        The file can't be read, or is not UTF-8 (the message has the byte offset).
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SourceError(
            f"{path}: can't be read ({error.strerror}); give a readable file"
        ) from error
    return decode_text(data, str(path))


def decode_text(data: bytes, where: str, offset: int = 0) -> str:
    """Decode UTF-8; ``where`` and ``offset`` (of ``data`` in its file) are for the message."""
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise SourceError(
            f"{where}: not UTF-8 text, byte {data[error.start]:#04x} at offset "
            f"{offset + error.start}; convert the file to UTF-8"
        ) from error


def encode_text(tokenizer: TokenizerLike, text: str, *, special: bool) -> np.ndarray:
    """Token ids, uint32 of shape (n,).

    With ``special`` the special tokens that open a sequence (BOS) are put in front, unless
    ``text`` itself starts with the BOS token. Closing special tokens are never added: the text
    goes on with a question. Raises `SourceError` for what is no text: half of a surrogate pair,
    which broken input turns into.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise SourceError(
            f"the text has an invalid character at position {error.start}; write it as UTF-8"
        ) from error
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    if special and not _starts_with_bos(tokenizer, text):
        ids = _opening_tokens(tokenizer) + ids
    return np.asarray(ids, dtype=np.uint32)


def _starts_with_bos(tokenizer: TokenizerLike, text: str) -> bool:
    bos = getattr(tokenizer, "bos_token", None)
    return bool(bos) and text.startswith(str(bos))


def _opening_tokens(tokenizer: TokenizerLike) -> list[int]:
    plain = list(tokenizer.encode("a", add_special_tokens=False))
    full = list(tokenizer.encode("a", add_special_tokens=True))
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return full[:start]
    return []


def encode_prefix(tokenizer: TokenizerLike, text: str, template: str = "auto") -> np.ndarray:
    """Token ids of a prefix document, uint32 of shape (n,).

    Parameters
    ----------
    tokenizer
        The model's tokenizer.
    text
        The document.
    template
        ``auto`` or ``none``. (``chat`` and ``transcript`` prefixes are message lists, see
        `pipelines.sources.messages`; their text is encoded as with ``none``.)

    Raises
    ------
    InvalidValueError
        Another template.
    SourceError
        The tokenizer's chat template can't be split around a message.
    """
    _check_template(template)
    if template == "auto" and has_chat_template(tokenizer):
        return encode_text(tokenizer, user_frame(tokenizer).head + text, special=True)
    return encode_text(tokenizer, text, special=True)


def encode_question(
    tokenizer: TokenizerLike, text: str, template: str = "auto", has_prefix: bool = True
) -> np.ndarray:
    """Token ids of a question, uint32 of shape (n,).

    Parameters
    ----------
    template
        What the prefix was encoded with (`PrefixItem.source` has it).
    has_prefix
        Whether a prefix goes before it. Without one, head + question + tail, special tokens
        included.

    Raises
    ------
    InvalidValueError, SourceError
        As for `encode_prefix`.
    """
    _check_template(template)
    if template == "none" or (template == "auto" and not has_chat_template(tokenizer)):
        return encode_text(tokenizer, text, special=not has_prefix)
    if template in ("chat", "transcript") and has_prefix:
        frame = turn_frame(tokenizer, template)
        return encode_text(tokenizer, frame.head + text + frame.tail, special=False)
    if template == "transcript" or not has_chat_template(tokenizer):
        return encode_text(tokenizer, f"user: {text}{SEPARATOR}assistant:", special=True)
    head, tail = user_frame(tokenizer)
    if has_prefix:
        return encode_text(tokenizer, SEPARATOR + text + tail, special=False)
    return encode_text(tokenizer, head + text + tail, special=True)


def _check_template(template: str) -> None:
    if template not in TEMPLATES:
        raise InvalidValueError(
            f"template {template!r} is not known; use one of {', '.join(TEMPLATES)}"
        )


def has_chat_template(tokenizer: TokenizerLike) -> bool:
    """Whether the tokenizer knows how its model was taught to read messages."""
    return bool(getattr(tokenizer, "chat_template", None))


def render(
    tokenizer: TokenizerLike, messages: Sequence[Message], *, generation_prompt: bool = False
) -> str:
    """Messages as the text of the chat template.

    Raises
    ------
    SourceError
        The template refuses the messages (for example a role it does not know).
    """
    try:
        text = tokenizer.apply_chat_template(
            list(messages),
            tokenize=False,
            add_generation_prompt=generation_prompt,
            **_TEMPLATE_VALUES,
        )
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise SourceError(
            f"the chat template refuses these messages ({error}); use --template none"
        ) from error
    return cast(str, text)


def user_frame(tokenizer: TokenizerLike) -> Frame:
    """Chat template around one user message that is followed by an answer."""
    mark = _MARK.format(0)
    text = render(tokenizer, [{"role": "user", "content": mark}], generation_prompt=True)
    if text.count(mark) != 1:
        raise SourceError(
            "the chat template does not write a user message exactly once, so a document can't "
            "be put in front of a question; use --template none"
        )
    head, _, tail = text.partition(mark)
    return Frame(head, tail)


def turn_frame(tokenizer: TokenizerLike, template: str) -> Frame:
    """Text around a user message that continues a transcript."""
    if template == "transcript" or not has_chat_template(tokenizer):
        return Frame(f"{SEPARATOR}user: ", f"{SEPARATOR}assistant:")
    marks = [_MARK.format(i) for i in range(3)]
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
    closed = render(tokenizer, messages[:2]).partition(marks[1])[2]
    rest = render(tokenizer, messages, generation_prompt=True).partition(marks[1])[2]
    between, found, tail = rest.partition(marks[2])
    if not found:
        raise SourceError(
            "the chat template does not write a second user message; use --template none"
        )
    # The transcript's own text already ends with what closes the assistant's message.
    return Frame(between.removeprefix(closed), tail)
