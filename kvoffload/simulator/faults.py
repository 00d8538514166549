"""Failures on demand: of a call, of a copy on the device, of a context; delays; and call counts."""

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
    """The planned faults of one simulated driver. A count such as `nth=1` means the next call or copy from now on, of
    any thread.

    Each failure happens once. Names are those of driver functions, such as "cuMemcpyAsync", or of calls of `raw`, such
    as "memcpy_batch_async_v2"; unknown ones are accepted and never apply. A count below 1 is a ValueError; only that of
    `fail_operation` is not checked, and 0 cancels there.

    Attributes:
        partial: True: a batch call (cuMemcpyBatchAsync, cuMemcpy3DBatchAsync, and those of `raw`) that is planned to
            fail queues some of its copies, perhaps none, as the driver may; never all, also with `after=True`. The
            driver sets it for one seed of four: 1, 5, 9 and so on.
        call_count: calls so far, failed ones included, by the driver function's name.
        total_calls: calls so far, of all names.
        calls: None; set it to a list, and every call appends (name, arguments).
    """

    def __init__(self) -> None:
        self.partial = False
        self.call_count: Counter[str] = Counter()
        self.total_calls = 0
        self.calls: list[tuple[str, tuple[Any, ...]]] | None = None
        self.clear()

    def fail_call(self, name: str, nth: int = 1, *, error: Any = None, after: bool = False) -> None:
        """Make the nth call of `name` from now on return `error` without doing its work; with `after=True`, after doing
        it. For batch calls see `partial`. A call of `raw` raises DriverError of kvoffload.simulator instead.

        If several failures fall on one call, the one that was planned first happens, and the others are dropped.

        Args:
            error: a CUresult or its number; None: CUDA_ERROR_UNKNOWN.

        Raises:
            ValueError: `nth` is below 1, or `error` is no CUresult.
        """
        self._plan(name, nth, error, after=after)

    def fail_nth(self, n: int, *, error: Any = None, after: bool = False) -> None:
        """Make the nth driver call from now on (1 is the next), whatever its name, return `error` without doing its
        work; with `after=True`, after doing it. Otherwise as `fail_call`, batch calls and `raw` included: None is
        CUDA_ERROR_UNKNOWN, and ValueError is raised if `n` is below 1 or `error` is no CUresult.
        """
        self._plan(_ANY, n, error, after=after)

    def sticky(self, at_call: int | None = None) -> None:
        """Lose a CUDA context, as by an illegal address: the one in which the next operation executes; or, with
        `at_call=n`, the one that is current in the thread of the nth driver call from now on (if none is, that call
        fails and no context is lost). Work queued in it, that operation included, never runs; calls that need it
        return CUDA_ERROR_ILLEGAL_ADDRESS until it is destroyed. ValueError if `at_call` is below 1.
        """
        if at_call is None:
            self._sticky_soon = True
        else:
            self._plan(_ANY, at_call, cuda.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS, sticky=True)

    def fail_operation(self, nth: int = 1) -> None:
        """Make the nth copy that executes from now on (1 is the next) fault halfway; its context is lost, as with
        `sticky`. A second call replaces the first; 0 cancels it. Queued copies count when they execute, not now. A
        batch is one copy; fills and kernels, also those that copy, are none.
        """
        self._copy_countdown = nth

    def delay(self, name: str, seconds: float) -> None:
        """Make every call of the driver function `name` sleep `seconds` first, without the driver's lock, until
        `clear`, which cancels all other delays and failures, too.

        A second delay of this name replaces the first; 0 ends it. Neither `name` nor `seconds` is checked.
        """
        self.delays[name] = seconds

    def clear(self) -> None:
        """Cancel every planned failure and delay. Counts stay; a call that sleeps already sleeps on, and a context that
        is lost stays lost.
        """
        self._planned: list[PlannedFault] = []
        self._copy_countdown = 0
        self._sticky_soon = False
        self.delays: dict[str, float] = {}

    @property
    def pending(self) -> int:
        """How many planned failures have not happened yet, those of unknown names included. Delays do not count."""
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
        lost, self._sticky_soon = self._sticky_soon, False
        return lost

    def next_copy(self) -> bool:
        if not self._copy_countdown:
            return False
        self._copy_countdown -= 1
        return self._copy_countdown == 0
