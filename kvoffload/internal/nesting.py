"""Calls inside calls: a signal handler, a finalizer, a policy or a hook calls the library in the middle of a call.

Such a call comes in the thread that holds the lock, and a reentrant lock would let it in, in the middle of a change. So
every public call first asks whether its own thread holds the lock. If so, it answers from the truth, is put off, or is
refused; docs/how/locks.md says which. Parts of the library that call each other under the lock do not ask.

A finalizer also runs in threads of ours. Calls that wait for these (`refuse_waiting`) are refused in all of them, and
wherever the caller's thread holds one of our locks, whichever: the thread that is waited for may want it.
"""

from __future__ import annotations

import _thread
import os
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

_R = TypeVar("_R")
_PACKAGE = str(Path(__file__).resolve().parent.parent) + "/"
_RLOCK: Any = type(threading.RLock())

in_call = _RLOCK._is_owned
"""Whether the calling thread holds a `threading.RLock`. (What `threading.Condition` asks; one call in C, 20 ns.)"""


_Locks = set[weakref.ref[threading.RLock]]
_locks: _Locks = set()
_locks_of_managers: _Locks = set()
_ours: set[int] = set()  # threads of the library, while they run code of the library


def forget_threads_of_parent() -> None:
    """Forget the parent's threads: those of the child may have the numbers of those in `_ours`, and of those that hold
    locks.
    """
    _ours.clear()
    for lock in (known() for locks in (_locks, _locks_of_managers) for known in locks.copy()):
        if lock is not None and not in_call(lock):
            lock._at_fork_reinit()  # type: ignore[attr-defined]  # what `threading` does with its own


os.register_at_fork(after_in_child=forget_threads_of_parent)


def new_lock(*, of_manager: bool = False) -> threading.RLock:
    """Make a lock that `refuse_waiting` knows: every lock of the library but the simulator's, and one of ThreadedTier.

    `of_manager`: calls of tiers are made under this lock; under any other they are refused. A finalizer may call a
    cache while its thread holds a tier's lock, so taking a tier's lock under another one could be a deadlock.
    """
    lock, locks = threading.RLock(), _locks_of_managers if of_manager else _locks
    locks.add(weakref.ref(lock, locks.discard))
    return lock


def new_thread(name: str, run: Callable[..., object], *arguments: object) -> threading.Thread:
    """Make a thread of ours, in which calls that wait for others of ours are refused."""

    def inside() -> None:
        _ours.add(threading.get_ident())
        try:
            run(*arguments)
        finally:
            _ours.discard(threading.get_ident())

    return threading.Thread(target=inside, name=name, daemon=True)


def begin_thread(name: str, run: Callable[[], object]) -> None:
    """Begin a thread in which calls are not refused, and do not wait for it.

    `Thread.start` waits for the new thread, and for a lock of Python's. A finalizer in that thread's first lines may
    wait for the caller's thread, and a finalizer that comes here may hold the lock.

    Raises:
        RuntimeError: the system has no thread left.
    """
    thread = threading.Thread(target=run, name=name, daemon=True)

    def start() -> None:
        try:
            thread.start()
        except RuntimeError:  # there was one thread left, and no second one
            run()

    _thread.start_new_thread(start, ())


def run_outside(call: Callable[..., _R], *arguments: object) -> _R:
    """Call a function of the caller's, which may wait for the library even in one of its threads. Hold no lock here."""
    thread, ours = threading.get_ident(), in_ours()
    _ours.discard(thread)
    try:
        return call(*arguments)
    finally:
        if ours:
            _ours.add(thread)


def in_ours() -> bool:
    return threading.get_ident() in _ours


def in_any_call() -> bool:
    """Return whether the calling thread is one of ours, or holds any of our locks."""
    return in_ours() or _holds_any(_locks) or _holds_any(_locks_of_managers)


def _holds_any(locks: _Locks) -> bool:
    return any(map(in_call, filter(None, [known() for known in locks.copy()])))


def refuse_waiting(call: str) -> None:
    """Raise RuntimeError if the calling thread must not wait for others of ours."""
    if in_any_call():
        raise_nested(call)


def refuse_under_locks(call: str) -> None:
    """Raise RuntimeError if the calling thread holds any of our locks, but for a manager's."""
    if _holds_any(_locks):
        raise_nested(call)


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
