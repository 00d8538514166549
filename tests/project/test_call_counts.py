"""The counting of Python calls; how many a transfer may take is in `test_ratchet`."""

from __future__ import annotations

from call_counts import count_calls


def test_calls_are_counted() -> None:
    def inner() -> None:
        pass

    def outer() -> None:
        inner()
        inner()
        len("")

    assert count_calls(outer).total == 3, "outer, and inner twice"
