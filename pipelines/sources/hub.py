"""Whether the hub can give a task's data. Asked once, so that no network is a short wait.

The hub's client would try for two minutes.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import Any

import huggingface_hub as client
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError

from store.errors import SourceError

#: Seconds that the hub has to answer whether it is there.
_TIMEOUT_S = 5.0
#: As in `model_files`: the hub client's HTTP error is that of whichever HTTP library it uses.
_ERRORS: tuple[type[BaseException], ...] = (OSError, HfHubHTTPError.__mro__[1])


def require_hub(name: str, config: dict[str, Any]) -> None:
    """Raise `SourceError` for data of the hub that is not here where the hub can't be reached."""
    source = config.get("dataset_path")
    if not isinstance(source, str) or "custom_dataset" in config:
        return
    if re.fullmatch(r"[\w.-]+/[\w.-]+", source) is None or Path(source).exists() or _kept(source):
        return
    problem = hub_problem()
    if problem is not None:
        raise SourceError(
            f"task {name!r} takes its data ({source}) from the hub, which can't be reached "
            f"({problem}), and none of it is kept here; give a folder with "
            f"{name}/<split>.jsonl (--data-dir DIR), or check the network"
        )


def _kept(source: str) -> bool:
    """Whether something of a data set is in the caches of the hub client or of datasets."""
    owner, _, name = source.partition("/")
    home = Path(constants.HF_HOME)
    datasets = Path(os.environ.get("HF_DATASETS_CACHE") or home / "datasets").expanduser()
    snapshots = Path(constants.HF_HUB_CACHE) / f"datasets--{owner}--{name}" / "snapshots"
    return snapshots.is_dir() or any(datasets.glob(f"{owner}___*"))


@functools.lru_cache(maxsize=1)
def hub_problem() -> str | None:
    """Why the hub can't be reached; None where it answers. Asked once, without trying again."""
    given = os.environ.get("HF_DATASETS_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    if given or constants.HF_HUB_OFFLINE:
        return f"{'HF_DATASETS_OFFLINE' if given else 'HF_HUB_OFFLINE'} is set"
    try:
        client.get_session().head(constants.ENDPOINT, timeout=_TIMEOUT_S)
    except _ERRORS as error:
        return f"{constants.ENDPOINT}: {str(error) or type(error).__name__}"
    return None
