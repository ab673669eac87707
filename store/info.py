"""``impress.json``: what cannot change about a store. Written once, atomically."""

from __future__ import annotations

import json
import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from store.disk.layout import CODECS
from store.disk.writer import disk_errors, sync_dir
from store.errors import (
    FormatVersionError,
    InvalidValueError,
    NotAStoreError,
    ReadOnlyStoreError,
    StoreNotFoundError,
)
from store.identity import ModelIdentity
from store.locks import LEASES, WRITER_LOCK
from store.types import MAX_CHUNK_TOKENS, MIN_CHUNK_TOKENS

FORMAT_VERSION = 1
FILE_NAME = "impress.json"
CATALOG = "catalog.sqlite"


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """Facts of a store; ``model_spec`` is what ``--model`` was when it was built."""

    store_id: str
    identity: ModelIdentity
    model_spec: str
    chunk_tokens: int
    codec: str
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if not MIN_CHUNK_TOKENS <= self.chunk_tokens <= MAX_CHUNK_TOKENS:
            raise InvalidValueError(
                f"chunk_tokens {self.chunk_tokens} is not allowed; "
                f"use {MIN_CHUNK_TOKENS} to {MAX_CHUNK_TOKENS}"
            )
        if self.codec not in CODECS:
            raise InvalidValueError(
                f"codec {self.codec!r} is not known; use one of {', '.join(CODECS)}"
            )

    @property
    def dtype(self) -> str:
        """Dtype of the stored KV."""
        return self.identity.dtype

    def to_json(self) -> dict[str, Any]:
        """The object written to ``impress.json``."""
        return {
            "format_version": self.format_version,
            "store_id": self.store_id,
            "model": self.model_spec,
            "dtype": self.dtype,
            "chunk_tokens": self.chunk_tokens,
            "codec": self.codec,
            "identity": self.identity.to_json(),
        }


def new_info(identity: ModelIdentity, model_spec: str, chunk_tokens: int, codec: str) -> StoreInfo:
    """Facts of a store about to be created. Raises `InvalidValueError`."""
    return StoreInfo(uuid.uuid4().hex, identity, model_spec, chunk_tokens, codec)


def write_info(store: Path, info: StoreInfo) -> None:
    """Write ``impress.json`` atomically; the folder becomes a store with it."""
    temp = store / f".{FILE_NAME}.{os.getpid()}"
    try:
        with disk_errors(store), temp.open("w", encoding="utf-8") as file:
            json.dump(info.to_json(), file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temp.replace(store / FILE_NAME)
        sync_dir(store)
    except PermissionError as error:
        raise ReadOnlyStoreError(
            f"{store} can't be written ({error.strerror}); choose another --store"
        ) from error


def read_info(store: Path) -> StoreInfo:
    """Read ``impress.json``.

    Raises
    ------
    StoreNotFoundError, NotAStoreError, FormatVersionError
    """
    if not store.exists():
        raise StoreNotFoundError(
            f"no store at {store}; build one with 'impress build-store FILES --store {store}'"
        )
    try:
        data = json.loads((store / FILE_NAME).read_bytes())
        version = int(data["format_version"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NotAStoreError(
            f"{store} is not an impress store (no readable {FILE_NAME}); give --store the folder "
            "that 'impress build-store' made"
        ) from error
    if version != FORMAT_VERSION:
        raise FormatVersionError(
            f"{store} has store format {version}, this version reads format {FORMAT_VERSION}; "
            "update impress-kv, or build a new store"
        )
    try:
        identity = ModelIdentity.from_json(data["identity"])
        return StoreInfo(
            str(data["store_id"]),
            identity,
            str(data["model"]),
            int(data["chunk_tokens"]),
            str(data["codec"]),
            version,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise NotAStoreError(
            f"{store}/{FILE_NAME} is damaged ({error}); restore the file from a copy, or build "
            "the store anew"
        ) from error


def is_free(path: Path) -> bool:
    """Whether a folder is empty but for what a `create` that was killed leaves."""
    if not path.is_dir():
        return False
    ours = (CATALOG, f".{FILE_NAME}.", LEASES, WRITER_LOCK)
    return not (path / FILE_NAME).exists() and all(
        entry.name.startswith(ours) or (entry.name == "nodes" and not any(entry.iterdir()))
        for entry in path.iterdir()
    )
