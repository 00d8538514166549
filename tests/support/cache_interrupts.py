"""Exceptions at every point of a call of a cache where CPython may deliver a signal.

`sys.setprofile` is called where a Python function begins ("call") and after a function in C has returned ("c_return"),
before its result is stored. An exception raised there reaches the code as one of a signal handler does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


class Interrupt(BaseException):
    """Raised where a signal could be delivered."""


class _Points:
    def __init__(self, nth: int | None, inside: str) -> None:
        self.nth = nth
        self.inside = inside
        self.seen = 0
        self.where = ""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "c_return") or argument is sys.setprofile:
            return
        if self.inside not in frame.f_code.co_filename:
            return
        self.seen += 1
        if self.seen == self.nth:
            sys.setprofile(None)
            self.where = f"{event} {argument!r} at {frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
            raise Interrupt(self.where)


def count_points(call: Callable[[], object], inside: str = "kvoffload") -> int:
    """How many points a call has, in files whose path has `inside`."""
    return _run(_Points(None, inside), call).seen


def interrupt(call: Callable[[], object], nth: int, inside: str = "kvoffload") -> str | None:
    """Call, with an exception at the nth point. Returns where it was; None if there are fewer points."""
    return _run(_Points(nth, inside), call).where or None


def _run(points: _Points, call: Callable[[], object]) -> _Points:
    sys.setprofile(points)
    try:
        call()
    except Interrupt:
        pass
    except Exception:
        if not points.where:  # what is not due to the interrupt is the test's to know
            raise
    finally:
        sys.setprofile(None)
    return points
