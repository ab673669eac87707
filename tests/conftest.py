"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.tiny import make_tiny, save_tiny


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny models run on one thread: handing their work to a second costs more than it saves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., object]:
    """Factory of tiny random models: ``tiny_model("mqa", seed=1)`` (see `tests.tiny`)."""
    return make_tiny


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Path:
    """A folder with a tiny GQA model and its tokenizer, as transformers writes it."""
    return save_tiny(tmp_path / "model")
