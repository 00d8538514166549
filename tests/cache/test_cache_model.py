"""BlockCache beside a plain dictionary: random calls, failures and moments of completion."""

from __future__ import annotations

from cache_machine import MACHINE_SETTINGS, CacheMachine
from hypothesis import settings


class GroupedCacheMachine(CacheMachine):
    groups = 2
    factor = 2


TestCacheAgainstModel = CacheMachine.TestCase
TestCacheAgainstModel.settings = MACHINE_SETTINGS
TestGroupedCacheAgainstModel = GroupedCacheMachine.TestCase
TestGroupedCacheAgainstModel.settings = settings(MACHINE_SETTINGS, max_examples=25)
