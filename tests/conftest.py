"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny import make_tiny, save_tiny


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., object]:
    """Factory of tiny random models: ``tiny_model("mqa", seed=1)`` (see `tests.tiny`)."""
    return make_tiny


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Path:
    """A folder with a tiny GQA model and its tokenizer, as transformers writes it."""
    return save_tiny(tmp_path / "model")
