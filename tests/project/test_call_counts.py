"""A transfer is one straight way: so many Python calls, through so many files. A count, not a time."""

from __future__ import annotations

import pytest
from call_counts import MEASURED, count_calls
from documents import ROOT

LIMITS = {
    "engine.store": (70, 13),
    "engine.load": (70, 13),
    "cache.store": (90, 20),
    "cache.store, evicting": (165, 24),  # the default policy's search for what is worth least is half of it
    "cache.load": (82, 20),
    "cache.promote, in the tiers' thread": (300, 20),  # of 8 keys, which a tier has done at once
}


@pytest.mark.parametrize("name", MEASURED)
def test_a_warm_transfer_takes_few_calls_through_few_files(name: str) -> None:
    calls = MEASURED[name]()
    most_calls, most_files = LIMITS[name]
    assert calls.total <= most_calls, str(calls)
    assert len(calls.files) <= most_files, str(calls)


def test_the_limits_are_those_of_the_page() -> None:
    limits = ", ".join(f"`{name}` {calls} calls in {files} files" for name, (calls, files) in LIMITS.items())
    assert limits in " ".join((ROOT / "CONTRIBUTING.md").read_text().split())


def test_calls_are_counted() -> None:
    def inner() -> None:
        pass

    def outer() -> None:
        inner()
        inner()
        len("")

    assert count_calls(outer).total == 3, "outer, and inner twice"
