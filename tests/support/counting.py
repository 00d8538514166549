"""Counts the Python functions that a call enters, its steps, and the copies that a simulated driver was given."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


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


def steps(action: Callable[[], object]) -> int:
    """Lines of Python that `action` runs, each round of a loop counted, and functions in C that it calls.

    What a single function in C does is one step, however long it takes.
    """
    count = 0

    def trace(_: FrameType, event: str, __: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    def profile(_: FrameType, event: str, __: object) -> None:
        nonlocal count
        count += event == "c_call"

    before = sys.gettrace(), sys.getprofile()
    sys.setprofile(profile)
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
    return count


# copy functions: which argument counts descriptors (None: there is one), and how many may go in a call
COPY_CALLS = {
    "cuMemcpyBatchAsync": (3, 128),
    "memcpy_batch_async_v2": (3, 128),
    "cuMemcpy3DBatchAsync": (0, 512),
    "memcpy_3d_batch_async_v2": (0, 512),
    "cuMemcpy2DAsync": (None, 1),
    "cuMemcpyAsync": (None, 1),
}


def copies_by_call(simulator: Any) -> list[tuple[str, int, int]]:
    """Function, descriptors and stream of every copy call since `simulator.faults.calls` was set."""
    found = []
    for name, arguments in simulator.faults.calls:
        if name in COPY_CALLS:
            position, _ = COPY_CALLS[name]
            found.append((name, 1 if position is None else arguments[position], int(arguments[-1])))
    return found
