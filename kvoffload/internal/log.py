"""The library's one logger, "kvoffload". Quiet unless the program gives it, or the root logger, a handler and a level.

    INFO      a device was opened, a pool pinned, a profile chosen; an engine is closed with transfers in flight
    WARNING   a transfer failed; a measured profile is ignored; the driver lacks what fast copies need
    ERROR     a CUDA context is lost; the caller's code raised: a done callback, a tracer

Without configured logging, errors are printed to stderr, since nothing else reports them. Successful transfers are not
logged, and nothing is logged while the engine's lock is held. Passwords in a record are masked. What a handler or
filter of the program's raises stays here: neither a request nor a thread of the library ends for it. KeyboardInterrupt
and SystemExit leave the main thread's calls, since a signal handler may have raised them.
"""

from __future__ import annotations

import logging
import threading

from kvoffload.internal.checks import masked

LOGGER = logging.getLogger("kvoffload")


class _UnlessConfigured(logging.Handler):
    """Prints errors as Python does without any handler, unless the program has given a handler to a logger."""

    def emit(self, record: logging.LogRecord) -> None:
        configured = logging.getLogger().handlers or any(each is not self for each in LOGGER.handlers)
        if not configured and logging.lastResort is not None:
            logging.lastResort.handle(record)


def _mask(record: logging.LogRecord) -> bool:
    try:
        text = record.getMessage()
    except Exception:  # noqa: BLE001  # an object that cannot show itself: handlers say so
        return True
    if masked(text) != text:
        record.msg, record.args = masked(text), ()
    return True


def _handle(record: logging.LogRecord) -> None:
    try:
        type(LOGGER).handle(LOGGER, record)
    except BaseException as error:
        if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
            raise  # of a signal handler, such as Ctrl-C
        record.getMessage()  # raises if the record itself is wrong


LOGGER.handle = _handle  # type: ignore[method-assign]
LOGGER.addFilter(_mask)
LOGGER.addHandler(_UnlessConfigured(logging.ERROR))
