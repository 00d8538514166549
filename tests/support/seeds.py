"""Seeds of random tests. They are the same in each run, unless KVOFFLOAD_TEST_SEED, a whole number, chooses others."""

from __future__ import annotations

import os


def chosen() -> int:
    return int(os.environ.get("KVOFFLOAD_TEST_SEED", "0"))


def seeds(count: int) -> range:
    """So many seeds, none of which another choice has too."""
    assert count <= 10_000
    return range(10_000 * chosen(), 10_000 * chosen() + count)
