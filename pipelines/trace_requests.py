"""Hash-id request traces: one JSON object a line, equal ids for equal beginnings of prompts.

Owns reading and checking. ``hash_ids`` names the blocks of a prompt in order; two prompts with the
same first n ids share their first n blocks. Ids are numbers or texts of any size and are numbered
anew in the order in which they first occur.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipelines.progress import Progress, ProgressEvent, silent
from pipelines.sources.jsonfiles import Row, count_lines, iter_jsonl, require_object
from store.errors import SourceError
from store.index.ids import Ids

_EVENT_ROWS = 1000


class TraceRequest(NamedTuple):
    """Blocks of one prompt, uint32 [n], of which the first ``whole`` are full: n or n - 1."""

    blocks: Ids
    whole: int


class Trace(NamedTuple):
    """Requests in the order of the file, and what is odd about it, one sentence each."""

    requests: list[TraceRequest]
    notes: list[str]

    @property
    def blocks(self) -> int:
        """Blocks of all prompts, each as often as it occurs."""
        return sum(len(request.blocks) for request in self.requests)


def read_trace(
    path: Path, block_tokens: int, limit: int | None = None, progress: Progress = silent
) -> Trace:
    """Read a trace.

    Parameters
    ----------
    path
        JSON lines with ``hash_ids``; ``input_length`` (tokens of the prompt), where it is given,
        says whether the last block is full. Other fields are left alone.
    block_tokens
        Tokens of a block.
    limit
        Requests to read at most.

    Raises
    ------
    SourceError
        The file can't be read, holds no request, or a line is not a request; names file and line.
    """
    total = count_lines(path) if limit is None else min(limit, count_lines(path))
    numbers: dict[int | str, int] = {}
    requests: list[TraceRequest] = []
    odd = 0
    for row in iter_jsonl(path):
        if len(requests) == total:
            break
        ids, tokens = _fields(row)
        blocks = np.array([numbers.setdefault(one, len(numbers)) for one in ids], dtype=np.uint32)
        full = tokens is None or tokens >= len(ids) * block_tokens
        requests.append(TraceRequest(blocks, len(ids) if full else max(0, len(ids) - 1)))
        odd += tokens is not None and -(-tokens // block_tokens) != len(ids)
        if len(requests) % _EVENT_ROWS == 0:
            progress(ProgressEvent("read trace", len(requests), total, "requests"))
    if not requests:
        raise SourceError(f"{path}: holds no request; give a file of JSON lines with hash_ids")
    progress(ProgressEvent("read trace", len(requests), len(requests), "requests"))
    return Trace(requests, _notes(odd, len(requests), block_tokens))


def _notes(odd: int, requests: int, block_tokens: int) -> list[str]:
    if not odd:
        return []
    return [
        f"{odd} of {requests} requests have another number of hash_ids than their input_length "
        f"fills at {block_tokens} tokens a block; is --block-tokens right?"
    ]


def _fields(row: Row) -> tuple[list[int | str], int | None]:
    """The ids and the length of a row's prompt. Raises SourceError."""
    values = require_object(row)
    if "hash_ids" not in values:
        raise SourceError(
            f"{row.where}: no field 'hash_ids' (fields: {', '.join(values) or 'none'}); give a "
            "trace that names the blocks of each prompt"
        )
    ids = values["hash_ids"]
    if not isinstance(ids, list) or not all(_is_id(one) for one in ids):
        raise SourceError(
            f"{row.where}: 'hash_ids' must be a list of whole numbers or texts, one per block"
        )
    tokens = values.get("input_length")
    if tokens is not None and not (_is_number(tokens) and tokens >= 0):
        raise SourceError(
            f"{row.where}: 'input_length' is {tokens!r}; it must be a whole number of tokens"
        )
    return ids, tokens


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_id(value: Any) -> bool:
    return _is_number(value) or isinstance(value, str)
