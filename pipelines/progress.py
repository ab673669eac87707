"""How pipelines report progress: a callback with plain values. Rendering belongs to the CLI."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class ProgressEvent(NamedTuple):
    """State of one task; ``done`` and ``total`` are in ``unit``.

    ``total`` is None while unknown. ``done == total`` ends the task.
    """

    task: str
    done: float
    total: float | None
    unit: str
    note: str = ""


Progress = Callable[[ProgressEvent], None]


def silent(_event: ProgressEvent) -> None:
    """Drop the event: the default where no progress is wanted."""
