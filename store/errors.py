"""Every error a user can cause or meet, in one tree.

Messages are one line: what, why (with the value), what to do next. This module owns the
classes only; the sentences are written where the error is raised.

    ImpressError
    ├── InvalidValueError      a value outside what is allowed (wrong usage)
    ├── PromptError            empty prompt, or more tokens than the model has positions
    ├── UnsupportedModelError  a model family or setting whose KV can't be reused
    ├── ModelLoadError         a model that isn't there, or whose files can't be read
    ├── ModelMismatchError     the store was built by another model
    ├── SourceError            an input file that can't be read as text, JSON or a recipe
    └── StoreError
        ├── StoreNotFoundError
        ├── NotAStoreError
        ├── FormatVersionError
        ├── CatalogError       the catalog can't be read
        ├── StoreLockedError   another process is writing
        ├── ReadOnlyStoreError
        ├── StoreFullError     disk full, or the size limit reached
        ├── StoreWriteError    any other failed write
        ├── PrefixNotFoundError
        └── ChunkLoadError     stored KV that can't be used; a query turns it into a miss
"""

from __future__ import annotations


class ImpressError(Exception):
    """Base of all errors that are answered with one line instead of a traceback."""


class InvalidValueError(ImpressError, ValueError):
    """A value outside what is allowed; the command exits with 2."""


class PromptError(ImpressError, ValueError):
    """A prompt that can't be answered: empty, or longer than the model's positions."""


class UnsupportedModelError(ImpressError, ValueError):
    """A model whose keys and values can't be reused by position."""


class ModelLoadError(ImpressError, OSError):
    """A model that can't be found or loaded; the message says how to get it."""


class ModelMismatchError(ImpressError, ValueError):
    """The store's identity differs from the model's; the message names the first field."""


class SourceError(ImpressError, ValueError):
    """A dataset, recipe or prompt file that can't be used."""


class StoreError(ImpressError):
    """Base of everything that is wrong with a store on disk."""


class StoreNotFoundError(StoreError, FileNotFoundError):
    """No store at the path."""


class NotAStoreError(StoreError, ValueError):
    """The path exists and is not an impress store."""


class FormatVersionError(StoreError, ValueError):
    """The store has a format this version does not know; both versions are named."""


class CatalogError(StoreError, RuntimeError):
    """The catalog is missing or damaged; ``impress repair`` rebuilds it."""


class StoreLockedError(StoreError, RuntimeError):
    """Another process holds the writer lock."""


class ReadOnlyStoreError(StoreError, PermissionError):
    """A write was asked of a store that can only be read."""


class StoreFullError(StoreError, OSError):
    """The disk, or the size limit given by the user, has no room for more KV."""


class StoreWriteError(StoreError, OSError):
    """The store's folder could not be written for another reason than its size."""


class PrefixNotFoundError(StoreError, KeyError):
    """No stored prefix has this id."""

    def __str__(self) -> str:
        # KeyError shows the repr of its argument, which puts quotes around a sentence.
        return str(self.args[0]) if self.args else ""


#: Array names and folders of evidence begin so: losing it costs no KV.
PROBE_PREFIX = "probe-"


class ChunkLoadError(StoreError, OSError):
    """Stored data that can't be used; a query recomputes from ``first_token`` on.

    Parameters
    ----------
    node_id, array, layer, chunk
        Where the data lies; ``chunk`` is -1 where the whole array is meant.
    first_token
        Absolute position of the first token whose KV can't be used.
    reason
        One of ``corrupt``, ``missing``, ``short``, ``slow``, ``io``.
    """

    def __init__(
        self, node_id: str, array: str, layer: int, chunk: int, first_token: int, reason: str
    ) -> None:
        super().__init__(
            f"node {node_id} array {array} layer {layer} chunk {chunk}: {reason}; "
            "run 'impress verify --repair' to rebuild it"
        )
        self.node_id = node_id
        self.array = array
        self.layer = layer
        self.chunk = chunk
        self.first_token = first_token
        self.reason = reason

    def usable_before(self, matched_len: int) -> int:
        """Tokens of a match of ``matched_len`` that can be tried again: fewer each time."""
        if self.array.startswith(PROBE_PREFIX):
            return matched_len  # the evidence is lost, the tokens are not
        return self.first_token if self.first_token < matched_len else 0
