"""Calls inside calls: a signal handler, a finalizer, a policy or a hook calls the library in the middle of a call.

Such a call comes in the thread that holds the lock, and a reentrant lock would let it in, in the middle of a change. So
every public call first asks whether its own thread holds the lock. If so, it answers from the truth, is put off, or is
refused; ARCHITECTURE.md says which. Parts of the library that call each other under the lock do not ask.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

_PACKAGE = str(Path(__file__).resolve().parent.parent) + "/"
_RLOCK: Any = type(threading.RLock())

in_call = _RLOCK._is_owned
"""Whether the calling thread holds a `threading.RLock`. (What `threading.Condition` asks; one call in C, 20 ns.)"""


def refuse_nested(lock: threading.RLock, call: str) -> None:
    """Raise RuntimeError if the calling thread is inside a call that holds `lock`; the message names this `call`."""
    if in_call(lock):
        raise_nested(call)


def raise_nested(call: str) -> NoReturn:
    """Raise RuntimeError: `call` was made inside another call. The message says where that was interrupted."""
    inner = sys._getframe(1)
    caller = _up(inner, inside=False)
    interrupted = _up(caller, inside=True)
    where = "" if interrupted is None else f" {interrupted.f_code.co_qualname}"
    by = "" if caller is None else f" by {caller.f_code.co_qualname} ({caller.f_code.co_filename}:{caller.f_lineno})"
    raise RuntimeError(
        f"{call} was called{by} in the middle of another call of the library in the same thread{where}: a signal "
        "handler, a finalizer, a policy or a hook must leave that to the program, for instance by setting a flag"
    )


def _up(frame: FrameType | None, inside: bool) -> FrameType | None:
    """The first frame from this one up whose code is in the package, or is not."""
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE) is not inside:
        frame = frame.f_back
    return frame
