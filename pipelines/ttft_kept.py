"""What a kept folder of `impress bench ttft` was made of, so that no run takes it for another.

Stores and files that a run finds are used as they are: with other prefixes beside those asked
for, or in an order that the measured queries had a part in, systems would not be compared on
equal terms. Owns the file that says what they hold; their layouts are told by their folders.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pipelines.ttft_values import Workload
from store.disk.writer import disk_errors
from store.errors import InvalidValueError
from store.index.ids import ids_digest
from store.info import FILE_NAME as STORE_FILE

if TYPE_CHECKING:
    from pipelines.models import LoadedModel

FILE_NAME = "bench-ttft.json"
#: Folder of the files of transformers' cache; the others are named by their layouts.
DIY_FOLDER = "diy"


class KeptKey(NamedTuple):
    """Digests of what decides the content of kept stores.

    Parameters
    ----------
    model
        Of the identity.
    prefixes
        Of each prefix's token ids.
    history
        Of the queries that an order is learnt from, and of how; None where nothing is reordered.
    """

    model: str
    prefixes: tuple[str, ...]
    history: str | None = None

    @classmethod
    def of(
        cls, model: LoadedModel, workload: Workload, retention: float, *, reordered: bool
    ) -> KeptKey:
        """The key of a run; ``reordered`` says whether any of its stores are."""
        prefixes = tuple(ids_digest(prefix.ids) for prefix in workload.prefixes)
        asked = [[ids_digest(query.ids) for query in one.history] for one in workload.prefixes]
        text = json.dumps([retention, asked]).encode()
        history = hashlib.blake2b(text, digest_size=16).hexdigest() if reordered else None
        return cls(model.identity.digest(), prefixes, history)

    def differs(self, other: KeptKey) -> str | None:
        """What a run of another key would find here that is not its own; None for nothing."""
        if self.model != other.model:
            return "the KV of another model"
        if self.prefixes != other.prefixes:
            return "other prefixes"
        if None not in (self.history, other.history) and self.history != other.history:
            return (
                "an order learnt from other queries (--seed, --requests, --warm-up, --retention "
                "and the queries' own options decide on them)"
            )
        return None


def require_same(folder: Path, key: KeptKey) -> None:
    """Make a kept folder that of a run, or refuse it.

    Raises
    ------
    InvalidValueError
        What it holds was made of something else, or of what can't be told.
    StoreFullError, StoreWriteError
    """
    path = folder / FILE_NAME
    if path.exists():
        found = _read(path)
        wrong = f"no readable {FILE_NAME}" if found is None else found.differs(key)
    else:
        found = None
        held = (folder / DIY_FOLDER).exists() or any(folder.glob(f"*/{STORE_FILE}"))
        wrong = f"stores, but no {FILE_NAME} to say of what" if held else None
    if wrong is not None:
        raise InvalidValueError(
            f"--keep {folder} holds {wrong}; give another folder, or delete this one"
        )
    # A run that reorders nothing knows less than what an earlier one may have written.
    if found is None or key.history is not None:
        _write(path, key)


def _read(path: Path) -> KeptKey | None:
    """The key in a file; None for what is none."""
    try:
        value = json.loads(path.read_bytes())
        return KeptKey(value["model"], tuple(value["prefixes"]), value["history"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, key: KeptKey) -> None:
    made = path.with_suffix(".tmp")
    with disk_errors(path):
        made.write_text(json.dumps(key._asdict(), indent=2) + "\n", encoding="utf-8")
        made.replace(path)
