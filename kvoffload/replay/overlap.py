"""Several unfinished requests at a time, on one thread: each executes until it waits for a transfer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import NamedTuple, Protocol, TypeVar

from kvoffload.internal.waiting import wait_until

_T = TypeVar("_T")


class Ending(Protocol):
    """What a request waits for."""

    @property
    def done(self) -> bool: ...

    def wait(self) -> object: ...


class _Waiting(NamedTuple):
    steps: Iterator[Ending]
    job: Ending


def overlap(
    start: Callable[[_T, int], Iterator[Ending]], requests: Iterable[_T], lanes: int, ended: Callable[[], None]
) -> None:
    """Start requests in order, at most `lanes` at a time, and resume each when the job that it waits for has ended.

    Args:
        start: called with a request and the number of a lane that no other unfinished request has; yields the jobs that
            the request waits for, and is resumed when they have ended, well or not.
        requests: what to serve.
        lanes: how many requests may be unfinished at a time.
        ended: called after each request.

    Raises:
        What `start` and its steps raise; the other unfinished requests are not resumed.
    """
    free = deque(range(lanes))
    waiting: dict[int, _Waiting] = {}
    remaining = iter(requests)

    def resume(lane: int, steps: Iterator[Ending]) -> None:
        job = next(steps, None)
        if job is not None:
            waiting[lane] = _Waiting(steps, job)
        else:
            free.append(lane)
            ended()

    while True:
        beginning = list(islice(remaining, len(free)))
        for request in beginning:
            lane = free.popleft()
            resume(lane, start(request, lane))
        if waiting:
            wait_until(lambda: any(each.job.done for each in waiting.values()), None, "a request of the replay")
            for lane in [lane for lane, each in waiting.items() if each.job.done]:
                resume(lane, waiting.pop(lane).steps)
        elif not beginning:
            return
