"""The hook by which a tracer follows transfers, and what is reported outside the engine's lock: ends, and log lines.

A tracer's `on_submit` is called in the submission, which is where its span begins. The end of a transfer is found under
the engine's lock; a notice of it is kept until the call that has found it has released the lock.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any, NamedTuple, Protocol

from kvoffload.engine.job import AnyTransfer, Job, TransferResult, result_of
from kvoffload.internal.checks import shown
from kvoffload.internal.log import LOGGER

MOST_NOTICES = 1 << 16


class Tracer(Protocol):
    """What follows transfers; see `set_tracer`."""

    def on_submit(self, job: Job) -> Any:
        """A transfer is in flight. What this returns is given to `on_end`: a span, a range, a time.

        Called by the thread that submits, with the engine's lock held: it must return soon, must not wait for another
        thread that uses the engine or its cache, and must not submit transfers.
        """

    def on_end(self, started: Any, result: TransferResult) -> object:
        """That transfer was found to have ended, well or not: `result.error` says which.

        Called by the thread that found it, in a call such as `poll` or `wait` of a job, with no lock held. The host
        finds an end later than it happens; `result.seconds` is the time on the GPU.

        Called once for each `on_submit` that has returned. After an interrupt (KeyboardInterrupt, an exception of a
        signal handler) at any other point, a later call such as `poll` or `drain` delivers it. It can be missing if the
        interrupt came as `on_submit` returned or as `on_end` was called, or in a submission that lost the CUDA context.
        """


class Notice(NamedTuple):
    """A line for the log."""

    level: int
    text: str


Notices = deque[AnyTransfer | Notice]
"""What is to be reported once the lock is released: transfers that a tracer follows and that have ended; log lines."""

current: Tracer | None = None  # read by every submission


def set_tracer(tracer: Tracer | None) -> Tracer | None:
    """From now on have `tracer` follow every transfer of every engine of this process; None: no tracer.

    For each store or load that copies something, `started = tracer.on_submit(job)` is called when it is submitted, and
    `tracer.on_end(started, result)` when it is found to have ended, well or not; by the tracer that was set when it was
    submitted. A transfer of a `ShardedEngine` is followed once, not on each device. What a tracer raises is logged
    (logger "kvoffload") and harms no transfer. Without a tracer this costs nothing.

    Returns:
        The tracer that was set before.

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
    """Have a tracer follow a transfer that was just put in flight; under the engine's lock."""
    try:
        started = tracer.on_submit(job)
        record.trace = (tracer, started)  # a plain tuple: an interrupt in the call of a class would lose `started`
    except Exception as error:  # noqa: BLE001  # a tracer of the caller's
        notices.append(Notice(logging.ERROR, f"on_submit of {tracer!r} raised {error!r}"))
        return
    if record.finished:  # the context was lost in its submission
        notices.append(record)


def deliver(notices: Notices) -> None:
    """Write log lines, and notify tracers of ends. No lock may be held; several threads may deliver at a time.

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
        trace, result = notice.trace, result_of(notice)
        if not _take(notices, notice) or trace is None:
            continue
        notice.trace = None
        tracer, started = trace
        try:
            tracer.on_end(started, result)
        except Exception:  # noqa: BLE001  # a tracer of the caller's
            LOGGER.exception("on_end of %r raised", tracer)


def _take(notices: Notices, notice: AnyTransfer | Notice) -> bool:
    """Whether this call has taken the first notice, and no other thread's has.

    Makes no call, after which an interrupt could come or another thread could run; `popleft` would be one.
    """
    if notices and notices[0] is notice:
        del notices[0]
        return True
    return False
