"""The hook for tracers, and the notices that wait until the engine's lock is released: ends of transfers, log lines.

`on_submit` is called inside the submission. The end of a transfer is found under the engine's lock; its notice waits
until the call that found it has released the lock.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any, NamedTuple, Protocol

from kvoffload.engine.job import AnyTransfer, Job, TransferResult, result_of
from kvoffload.internal.checks import shown
from kvoffload.internal.log import LOGGER
from kvoffload.internal.nesting import run_outside

MOST_NOTICES = 1 << 16


class Tracer(Protocol):
    """What you give to `set_tracer`: any object with these two methods. You need not derive from this class."""

    def on_submit(self, job: Job) -> Any:
        """Note that a transfer is in flight. The value that you return comes back as `started` of `on_end`: a span, a
        time.

        The submitting thread calls it with the engine's lock held. Return soon, do not wait for a thread that uses the
        engine or its cache, nor for the job, and do not submit transfers. If it raises an Exception, that is logged,
        the transfer goes on, and `on_end` is not called for it.
        """

    def on_end(self, started: Any, result: TransferResult) -> object:
        """Note that the transfer has ended, well or not: `result.error` says which.

        It is called without the engine's lock, in the thread of a call that asks the GPU, such as the engine's `poll`,
        or `wait` of an unfinished job, or in that of done callbacks; several threads may call it at a time. If a
        submission found the end, the next such call in any thread calls it, maybe after `wait` of the job has returned.
        `result.seconds` is the time on the GPU. If it raises an Exception, that is logged.

        Called once for each `on_submit` that has returned. If an interrupt (KeyboardInterrupt, an exception from a
        signal handler) comes in between, a later call such as `poll` or `drain` delivers it. The call can be missing if
        the interrupt came just as `on_submit` returned or `on_end` was called, or if more than 65,536 notices were
        waiting.
        """


class Notice(NamedTuple):
    level: int
    text: str


Notices = deque[AnyTransfer | Notice]
"""Reported once the lock is released: ended transfers that have a tracer, and log lines."""

current: Tracer | None = None  # read by every submission


def set_tracer(tracer: Tracer | None) -> Tracer | None:
    """Have `tracer` follow every transfer that is submitted to any engine in this process from now on; None ends that.

    Each store or load that copies something calls `started = tracer.on_submit(job)` when it is submitted, and
    `tracer.on_end(started, result)` of the same tracer when the engine finds that it has ended. A transfer of a
    `ShardedEngine` counts once, not per device. An Exception from a tracer is logged (logger "kvoffload") and harms no
    transfer.

    Returns:
        The tracer that was set before, or None. It still gets the ends of transfers that were submitted to it.

    Raises:
        TypeError: `tracer` lacks `on_submit` or `on_end`; nothing has changed.
    """
    global current
    if tracer is not None and not (
        callable(getattr(tracer, "on_submit", None)) and callable(getattr(tracer, "on_end", None))
    ):
        raise TypeError(f"tracer must have on_submit(job) and on_end(started, result), got {shown(tracer)}")
    before, current = current, tracer
    return before


def start(tracer: Tracer, job: Job, record: AnyTransfer, notices: Notices) -> None:
    """Call `on_submit` for a transfer that was just put in flight, under the engine's lock."""
    try:
        started = tracer.on_submit(job)
        record.trace = (tracer, started)  # a plain tuple: an interrupt in the call of a class would lose `started`
    except Exception as error:  # noqa: BLE001  # a tracer of the caller's
        notices.append(Notice(logging.ERROR, f"on_submit of {tracer!r} raised {error!r}"))
        return
    if record.finished:  # the context was lost in its submission
        notices.append(record)


def deliver(notices: Notices) -> None:
    """Write log lines, and call `on_end` of tracers. Hold no lock; several threads may deliver at a time.

    The end of a transfer stays in the queue until its tracer is called, so an interrupt before that only delays it.
    """
    while notices:
        try:
            notice = notices[0]
        except IndexError:  # another thread delivers, too
            return
        if isinstance(notice, Notice):
            if _take(notices, notice):
                LOGGER.log(notice.level, "%s", notice.text)
            continue
        run_outside(_end, notices, notice)


def _end(notices: Notices, record: AnyTransfer) -> None:
    """Call `on_end`. It takes the record just before, since an interrupt in `run_outside` would lose it."""
    trace, result = record.trace, result_of(record)
    if not _take(notices, record) or trace is None:
        return
    record.trace = None
    tracer, started = trace
    try:
        tracer.on_end(started, result)
    except Exception:  # noqa: BLE001  # a tracer of the caller's
        LOGGER.exception("on_end of %r raised", tracer)


def _take(notices: Notices, notice: AnyTransfer | Notice) -> bool:
    """Take `notice` if it is still the first; False if another thread has taken it.

    Makes no call (`popleft` would be one): after a call an interrupt could come, or another thread could run.
    """
    if notices and notices[0] is notice:
        del notices[0]
        return True
    return False
