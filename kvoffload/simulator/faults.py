"""Failures that a test asks for: of a call, of a copy on the device, of a context; delays; and call counts."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from cuda.bindings import driver as cuda

_ANY = "*"


@dataclass(slots=True)
class PlannedFault:
    """One failure to come: at the `remaining`-th call of `name` from now."""

    name: str
    remaining: int
    error: Any
    after: bool
    sticky: bool


class Faults:
    """The faults of one simulated driver. All counting starts at the moment of the request, with 1.

    Attributes:
        call_count: calls so far, by the driver function's name.
        total_calls: their sum.
        calls: set it to an empty list to have every call's name and arguments appended.
    """

    def __init__(self) -> None:
        self.call_count: Counter[str] = Counter()
        self.total_calls = 0
        self.calls: list[tuple[str, tuple[Any, ...]]] | None = None
        self.clear()

    def fail_call(self, name: str, nth: int = 1, *, error: Any = None, after: bool = False) -> None:
        """Make the nth call of `name` return `error` without doing its work; with `after`, having done it."""
        self._plan(name, nth, error, after=after)

    def fail_nth(self, n: int, *, error: Any = None, after: bool = False) -> None:
        """Make the nth call of any name return `error`."""
        self._plan(_ANY, n, error, after=after)

    def sticky(self, at_call: int | None = None) -> None:
        """Lose a context to an illegal address: the context of the next operation that executes, or of the nth call.

        From then on every call in that context returns CUDA_ERROR_ILLEGAL_ADDRESS, until the context is destroyed.
        """
        if at_call is None:
            self._sticky_soon = True
        else:
            self._plan(_ANY, at_call, cuda.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS, sticky=True)

    def fail_operation(self, nth: int = 1) -> None:
        """Make the nth executed copy fault in the middle; its context is lost, as with `sticky`."""
        self._copy_countdown = nth

    def delay(self, name: str, seconds: float) -> None:
        """Make every call of `name` take `seconds` longer; no lock is held meanwhile."""
        self.delays[name] = seconds

    def clear(self) -> None:
        """Cancel every planned failure and delay. Counts stay."""
        self._planned: list[PlannedFault] = []
        self._copy_countdown = 0
        self._sticky_soon = False
        self.delays: dict[str, float] = {}

    @property
    def pending(self) -> int:
        """How many planned failures have not happened yet."""
        return len(self._planned) + bool(self._copy_countdown) + self._sticky_soon

    def _plan(self, name: str, nth: int, error: Any, after: bool = False, sticky: bool = False) -> None:
        if nth < 1:
            raise ValueError(f"nth counts from 1, got {nth}")
        error = cuda.CUresult.CUDA_ERROR_UNKNOWN if error is None else cuda.CUresult(error)
        self._planned.append(PlannedFault(name, nth, error, after, sticky))

    # What the simulator asks.

    def sleep(self, name: str) -> None:
        seconds = self.delays.get(name)
        if seconds:
            time.sleep(seconds)

    def next_call(self, name: str, args: tuple[Any, ...]) -> PlannedFault | None:
        """Count a call, and return the fault planned for it, or None."""
        self.call_count[name] += 1
        self.total_calls += 1
        if self.calls is not None:
            self.calls.append((name, args))
        if not self._planned:
            return None
        due = None
        for fault in [fault for fault in self._planned if fault.name in (name, _ANY)]:
            fault.remaining -= 1
            if fault.remaining == 0:
                self._planned.remove(fault)
                due = due or fault
        return due

    def next_operation(self) -> bool:
        """Whether the operation about to execute takes its context down."""
        lost, self._sticky_soon = self._sticky_soon, False
        return lost

    def next_copy(self) -> bool:
        """Whether the copy about to execute faults."""
        if not self._copy_countdown:
            return False
        self._copy_countdown -= 1
        return self._copy_countdown == 0
