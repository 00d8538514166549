"""Raise an exception at the k-th point of a call where one can come: a signal's, or one out of a policy or a hook.

    count_points(function)                      how many points a call has
    interrupt_at(3, function)                   the same call, with a KeyboardInterrupt at its third point
    interrupt_at(3, function, RuntimeError, points=Methods(Lru))      the third call of a method of `Lru` raises
    call_at(3, function, other)                the same call, with a call of `other` at its third point
    interrupt(function, 3, "kvoffload/cache")  the same at its third point in those files or a finalizer of theirs

CPython runs a signal handler in the main thread at the entry of a Python function, after a call of a C function has
returned, and at the back-edge of a loop. `sys.setprofile` sees the first two. A point of `Signals` is

1. the entry ("call") of a Python function that is in the package, or that the package calls directly, such as the
   `__exit__` of a context manager made by `contextlib`; also the resumption of a generator, but not by `throw`, where
   CPython looks for no signal;
2. the return of a C function ("c_return") to a function of the package. Its result is lost;
3. the return of a function of the simulated driver ("driver") to a function of the package. On a GPU this is a point
   of the second kind, so nothing within the simulator is a point, nor in the kernels that it interprets.

Loop back-edges have no event of a profile function; `test_real_signals.py` reaches them.

No point lies in a finalizer, a weakref callback that `weakref.finalize` makes, or `__del__`: Python prints an exception
raised there and goes on, so a caller never sees it. The garbage collector is off while the function runs. An exception
that Python swallowed in a bare weakref callback is reported by `Outcome.in_finalizer`.
"""

from __future__ import annotations

import contextlib
import dis
import gc
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple, Protocol

import kvoffload

PACKAGE = str(Path(kvoffload.__file__).resolve().parent) + "/"
SIMULATOR = PACKAGE + "simulator/"
INTERPRETED = (SIMULATOR, *(PACKAGE + f"kernels/{name}.py" for name in ("pack", "coding", "compute")))
_CONTEXTLIB = contextlib.__file__
_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_FINALIZE = weakref.finalize.__call__.__code__


class Point(NamedTuple):
    """A place of a call where an exception can come.

    Attributes:
        kind: "call", "c_return", "driver"; of `Methods` "before", "after".
        place: file and line, relative to the package, of the code that is running.
        what: the function that was entered or has returned.
    """

    kind: str
    place: str
    what: str

    def __str__(self) -> str:
        return f"{self.kind} {self.what} at {self.place}"


class Points(Protocol):
    """Says of an event of a profile function whether it is a point."""

    def kind_of(self, frame: FrameType, event: str, argument: Any) -> str | None:
        """The kind of the point, or None."""


class Outcome(NamedTuple):
    """What came of a call.

    Attributes:
        point: where the exception was raised; None if the call ended before that point.
        error: what left the call, as text; empty if nothing did.
        in_finalizer: whether Python swallowed the exception, in a callback whose exceptions nothing receives.
    """

    point: Point | None
    error: str
    in_finalizer: bool

    @property
    def raised(self) -> bool:
        """Whether an exception left the call."""
        return bool(self.error)


class Signals:
    """Where a signal handler of the main thread can raise. `files`: Python files that count as the package, too."""

    def __init__(self, *files: str) -> None:
        self._files = frozenset(files)
        self._known: dict[str, bool] = {}
        self._resumptions: dict[CodeType, frozenset[int]] = {}
        self._throws = False

    def kind_of(self, frame: FrameType, event: str, argument: Any) -> str | None:
        # `throw` enters a generator as its next event. From Python 3.13 on its frame does not tell: it is at a RESUME.
        thrown, self._throws = self._throws, event == "c_call" and argument.__name__ == "throw"
        code, caller = frame.f_code, frame.f_back
        if event == "c_return":
            return "c_return" if self._is_ours(frame) else None
        if event == "call":
            if not self._inside(code.co_filename) and (
                caller is None or code.co_filename.startswith(SIMULATOR) or not self._inside(caller.f_code.co_filename)
            ):
                return None
            return "call" if not thrown and self._at_resumption(frame) else None
        if event == "return" and code.co_filename.startswith(SIMULATOR):
            returned = "RETURN" in dis.opname[code.co_code[frame.f_lasti]]  # else an exception leaves, or a yield
            called = caller is not None and self._inside(caller.f_code.co_filename)
            return "driver" if returned and called else None
        return None

    def _is_ours(self, frame: FrameType) -> bool:
        if self._inside(frame.f_code.co_filename):
            return True
        caller = frame.f_back  # `next(generator)` in a context manager of contextlib that the package enters
        return (
            caller is not None and frame.f_code.co_filename == _CONTEXTLIB and self._inside(caller.f_code.co_filename)
        )

    def _inside(self, file: str) -> bool:
        known = self._known.get(file)
        if known is None:
            known = (file.startswith(PACKAGE) and not file.startswith(INTERPRETED)) or file in self._files
            self._known[file] = known
        return known

    def _at_resumption(self, frame: FrameType) -> bool:
        """Whether CPython looks for signals here: not where `throw` enters a generator, nor in a `yield from`."""
        code = frame.f_code
        if not code.co_flags & _GENERATORS:
            return True
        if code not in self._resumptions:
            self._resumptions[code] = frozenset(
                each.offset
                for each in dis.get_instructions(code)
                if each.opname == "RESUME" and (each.arg or 0) & 3 < 2
            )
        return frame.f_lasti in self._resumptions[code]


class Inside:
    """Entries of Python functions and returns of C functions in files below `path`, also in finalizers."""

    in_finalizers = True

    def __init__(self, path: str) -> None:
        self._path = str(Path(PACKAGE).parent / path)

    def kind_of(self, frame: FrameType, event: str, argument: Any) -> str | None:
        del argument
        return event if event in ("call", "c_return") and frame.f_code.co_filename.startswith(self._path) else None


class Appends(Signals):
    """Where the package has just put something into a list or a queue."""

    def kind_of(self, frame: FrameType, event: str, argument: Any) -> str | None:
        kind = super().kind_of(frame, event, argument)
        return kind if kind == "c_return" and argument.__name__ == "append" else None


class Methods:
    """Calls of the methods of some classes (and of plain functions), out of which an exception comes.

    Args:
        owners: classes, whose own and inherited Python methods are meant, and functions.
        after: False: the method raises at once. True: it has done its work and raises at its end.
    """

    def __init__(self, *owners: Any, after: bool = False) -> None:
        functions = [
            member
            for owner in owners
            for member in (
                [value for base in owner.__mro__ for value in vars(base).values()]
                if isinstance(owner, type)
                else [owner]
            )
        ]
        self._codes = {each.__code__ for each in functions if inspect.isfunction(each)}
        self._after = after

    def kind_of(self, frame: FrameType, event: str, argument: Any) -> str | None:
        del argument
        if event != ("return" if self._after else "call") or frame.f_code not in self._codes:
            return None
        if self._after:
            return "after" if "RETURN" in dis.opname[frame.f_code.co_code[frame.f_lasti]] else None
        return "before"


def trace_points(function: Callable[[], object], points: Points | None = None) -> list[Point]:
    """The points of a call, in order. An exception of the call itself comes out."""
    counter = _Profile(0, KeyboardInterrupt, points or Signals(), keep=True)
    error = counter.run(function)
    if error is not None:
        raise error
    return counter.seen


def count_points(function: Callable[[], object], points: Points | None = None) -> int:
    """How many points a call has. An exception of the call itself comes out."""
    return len(trace_points(function, points))


def interrupt_at(
    number: int,
    function: Callable[[], object],
    exception: type[BaseException] = KeyboardInterrupt,
    points: Points | None = None,
) -> Outcome:
    """Call `function` and raise `exception` at its point `number`, counted from 1. Never raises an Exception itself.

    No reference to the exception, its traceback or the call's result is kept, so what the call had made is garbage.
    """
    swallowed: list[bool] = []
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: swallowed.append(True)
    try:
        profile = _Profile(number, exception, points or Signals())
        raised = profile.run(function)
        error = "" if raised is None else f"{type(raised).__name__}: {raised}"
        del raised
    finally:
        sys.unraisablehook = hook
    return Outcome(profile.hit, error, profile.hit is not None and bool(swallowed) and not error)


def interrupt_in_line(name: str, line: int, function: Callable[[], object]) -> None:
    """Call `function`, and raise KeyboardInterrupt before a line in the function `name` of Python's `threading`; lines
    count from 1, as they are executed. What is raised stays here. If fewer are executed, nothing is.
    """
    left = [line]

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename != threading.__file__ or frame.f_code.co_name != name:
            return None
        if event == "line":
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    try:
        sys.settrace(trace)
        function()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)


def call_at(number: int, function: Callable[[], object], other: Callable[[], object]) -> tuple[Outcome, Any]:
    """Call `function`, and `other` at its point `number`, as a signal handler would be; what came of it, and the
    exception that left the call, or None.
    """
    profile = _Profile(number, None, Signals(), action=other)
    raised = profile.run(function)
    return Outcome(profile.hit, "" if raised is None else repr(raised), False), raised


def interrupt(function: Callable[[], object], number: int, inside: str = "kvoffload") -> str | None:
    """Call `function` with a KeyboardInterrupt at that point of `Inside`; where it was, None if it has fewer."""
    outcome = interrupt_at(number, function, points=Inside(inside))
    assert outcome.point is not None or not outcome.raised, outcome.error
    return None if outcome.point is None else str(outcome.point)


def interrupted_everywhere(
    call: Callable[[int], Callable[[], object]], points: Points | None = None
) -> Iterator[tuple[int, bool]]:
    """Interrupt `call(value)()` at each of its points in turn; yields the value, and whether the exception came out.

    Ends after the first call that had no such point.
    """
    for number in range(1, 1000):
        outcome = interrupt_at(number, call(number), points=points)
        yield number, outcome.raised
        if outcome.point is None:
            assert number > 3, "there are points"
            return
    raise AssertionError("the call never ends without an interrupt")


class _Profile:
    def __init__(
        self,
        number: int,
        exception: type[BaseException] | None,
        points: Points,
        keep: bool = False,
        action: Callable[[], object] = lambda: None,
    ) -> None:
        self._left = number
        self._exception = exception
        self._action = action
        self._kind_of = points.kind_of
        self._in_finalizers = getattr(points, "in_finalizers", False)
        self._keep = keep
        self.seen: list[Point] = []
        self.hit: Point | None = None

    def run(self, function: Callable[[], object]) -> BaseException | None:
        collecting = gc.isenabled()
        gc.disable()
        try:
            sys.setprofile(self._notice)
            try:
                function()
            finally:
                sys.setprofile(None)
        except (Exception, KeyboardInterrupt) as error:
            return error
        finally:
            if collecting:
                gc.enable()
        return None

    def _notice(self, frame: FrameType, event: str, argument: Any) -> None:
        kind = self._kind_of(frame, event, argument)
        if kind is None or (not self._in_finalizers and in_finalizer(frame)):
            return
        if self._keep:
            self.seen.append(_point(kind, frame, argument))
        self._left -= 1
        if self._left == 0:
            sys.setprofile(None)
            self.hit = _point(kind, frame, argument)
            self._action()
            if self._exception is not None:
                raise self._exception(f"injected: {self.hit}")


def in_finalizer(frame: FrameType | None) -> bool:
    """Whether a finalizer runs, out of which no exception comes."""
    while frame is not None:
        code = frame.f_code
        if code is _FINALIZE or code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def _point(kind: str, frame: FrameType, argument: Any) -> Point:
    code = frame.f_code
    what = getattr(argument, "__qualname__", repr(argument)) if kind == "c_return" else code.co_qualname
    shown: FrameType = frame.f_back if kind == "driver" and frame.f_back is not None else frame
    if kind == "driver":
        what = frame.f_locals.get("name", code.co_name)
    return Point(kind, f"{shown.f_code.co_filename.removeprefix(PACKAGE)}:{shown.f_lineno}", str(what))
