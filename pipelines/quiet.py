"""Keep transformers and the hub client from writing to the terminal while a model loads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import huggingface_hub.utils
import transformers.utils.logging

# Neither library annotates these functions.
_HF: Any = transformers.utils.logging
_HUB: Any = huggingface_hub.utils


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Only errors are logged and no progress bar is shown inside; everything is put back after.

    Progress goes through the caller's callback and problems become errors, so that nothing is
    lost; the CLI alone writes to the terminal.
    """
    verbosity, bars = _HF.get_verbosity(), _HF.is_progress_bar_enabled()
    hub_verbosity = _HUB.logging.get_verbosity()
    hub_bars = not _HUB.are_progress_bars_disabled()
    _HF.set_verbosity_error()
    _HUB.logging.set_verbosity_error()
    _HF.disable_progress_bar()
    try:
        yield
    finally:
        _HF.set_verbosity(verbosity)
        _HUB.logging.set_verbosity(hub_verbosity)
        if bars:
            _HF.enable_progress_bar()
        elif hub_bars:
            _HUB.enable_progress_bars()
