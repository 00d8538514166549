"""What an engine keeps of a job, and driver calls that a test watches or changes while it queues one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import kvoffload
from kvoffload.driver import Driver
from kvoffload.driver.functions import RAW
from kvoffload.engine.job import Segment, Transfer

COPY_CALLS = (
    *("cuMemcpyAsync", "cuMemcpy2DAsync", "cuMemcpy3DBatchAsync", "cuMemcpyBatchAsync", "cuLaunchKernel"),
    *RAW,
)

Around = Callable[..., Any]  # called with a driver function, and the arguments of its call


def transfer_of(job: kvoffload.Job) -> Transfer:
    """The engine's record behind a job."""
    transfer = job._transfer
    assert isinstance(transfer, Transfer)
    return transfer


def segments_of(job: kvoffload.Job) -> list[Segment]:
    """What is queued of a job and not known to have ended."""
    return list(transfer_of(job).segments)


def queueing(engine: kvoffload.OffloadEngine) -> Transfer | None:
    """The transfer of which a call is queueing a segment now, its last one."""
    for queue in engine._parts.in_flight.both:
        for transfer in queue.transfers:
            if transfer.submitting and transfer.segments and transfer.segments[-1].event is None:
                return transfer
    return None


@contextmanager
def intercepted(driver: Driver, names: tuple[str, ...], around: Around) -> Iterator[None]:
    """Have `around(function, *arguments)` called in place of these functions of the driver, as far as it has them."""
    originals: dict[str, Callable[..., Any]] = {}

    def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        originals[name] = function
        return lambda *arguments: around(function, *arguments)

    for name in filter(driver.has, names):
        driver.intercept(name, lambda function, name=name: wrap(name, function))  # type: ignore[misc]
    try:
        yield
    finally:
        for name, original in originals.items():
            driver.intercept(name, lambda _, original=original: original)  # type: ignore[misc]
