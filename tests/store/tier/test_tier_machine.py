"""Runs the machine over the tiers."""

from __future__ import annotations

from hypothesis import settings

from tests.store.tier.tier_machine import TierMachine

TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
