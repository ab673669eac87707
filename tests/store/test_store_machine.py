"""Runs the state machine of a whole store."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.store.store_machine import StoreMachine

TestStoreMachine = pytest.mark.slow(StoreMachine.TestCase)
TestStoreMachine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
