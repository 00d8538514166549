"""Counts the Python functions that a call enters."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType


def python_calls(action: Callable[[], object]) -> list[str]:
    """The names of the Python functions that `action` enters, itself not included; functions written in C are not."""
    names: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            names.append(frame.f_code.co_qualname)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(before)
    return names[1:]
