"""Seeds of random tests, and which of many cases are for long runs. The seeds are the same in each run, unless
KVOFFLOAD_TEST_SEED, a whole number, chooses others.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest


def chosen() -> int:
    return int(os.environ.get("KVOFFLOAD_TEST_SEED", "0"))


def seeds(count: int) -> range:
    """So many seeds, none of which another choice has too."""
    assert count <= 10_000
    return range(10_000 * chosen(), 10_000 * chosen() + count)


def rest_long(cases: Iterable[Any], now: int) -> list[Any]:
    """These parameters; those after the first `now` are for `-m long`, which CI runs."""
    marks = ((), pytest.mark.long)
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks[place >= now])
        for place, case in enumerate(cases)
    ]
