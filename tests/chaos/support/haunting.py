"""What happens to programs at any moment: finalizers in every thread, interrupts by real signals, calls that hang.

For programs that search for long. Of a process: it has one timer, one trace function for new threads.
"""

from __future__ import annotations

import faulthandler
import gc
import random
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from traceback import walk_stack
from typing import IO, Any, TypeVar

from kvoffload.errors import KVOffloadError

REFUSALS = (KVOffloadError, RuntimeError, TimeoutError)  # what a call inside another one may raise
PACKAGE = "/kvoffload/"
# CPython 3.11: a traced thread does not get past a function's entry while a signal waits for the main thread. If that
# waits for a lock of the thread, neither goes on. There a process has either finalizers in its threads or interrupts.
BOTH = sys.version_info >= (3, 12)
T = TypeVar("T")


class Ghost:
    """Garbage as soon as it is made; its finalizer makes a call."""

    def __init__(self, ghosts: Ghosts) -> None:
        self.me, self.ghosts = self, ghosts

    def __del__(self) -> None:
        self.ghosts.call()


class Ghosts:
    """Finalizers that make calls, at random lines of the package in threads that begin from now on, and `during` calls.
    None in the simulator. Nothing else collects.

    Args:
        counts: gets how many calls there were, as "finalizers".
        wrong: gets what they raised, but for `REFUSALS`.
        chance: that a line of such a thread runs a collection.

    Attributes:
        calls: that finalizers make; none yet.
    """

    def __init__(self, seed: int, counts: Counter[str], wrong: list[str], chance: float = 0.001) -> None:
        self.calls: Sequence[Callable[[], object]] = ()
        self._random, self._counts, self._wrong, self._chance = random.Random(seed), counts, wrong, chance
        gc.disable()
        gc.freeze()  # a collection looks at little
        if BOTH or seed % 2:
            threading.settrace(self._trace)

    def during(self, call: Callable[[], T]) -> T:
        """Make a call. No signal may come meanwhile: its handler would run where CPython runs none."""
        sys.settrace(self._trace)
        try:
            return call()
        finally:
            sys.settrace(None)

    def call(self) -> None:
        calls = self.calls
        try:
            if calls:
                self._random.choice(calls)()
        except REFUSALS:
            pass
        except KeyboardInterrupt:
            pass  # a signal in a finalizer's call: CPython swallows it, too
        except BaseException:
            self._wrong.append(f"a finalizer: {traceback.format_exc()[-1500:]}")
        self._counts["finalizers"] += bool(calls)

    def _trace(self, frame: Any, event: str, _: Any) -> Any:
        if PACKAGE not in frame.f_code.co_filename or "/simulator/" in frame.f_code.co_filename:
            return None
        if event == "line" and self._random.random() < self._chance:
            Ghost(self)
            gc.collect()
        return self._trace


class Interrupts:
    """KeyboardInterrupt by a signal at a random moment of a call, but not in the simulator: a driver runs no Python.

    For the main thread.

    Args:
        counts: gets how many calls were interrupted, as "interrupts".
    """

    def __init__(self, seed: int, counts: Counter[str]) -> None:
        self._counts, self._armed, self._random = counts, False, random.Random(seed)
        self._strikes = BOTH or not seed % 2
        signal.signal(signal.SIGALRM, self._handle)

    def _handle(self, _: int, frame: Any) -> None:
        simulated = self._armed and any("/simulator/" in each.f_code.co_filename for each, _ in walk_stack(frame))
        if simulated:
            signal.setitimer(signal.ITIMER_REAL, 2e-5)
        elif self._armed:
            self._armed = False
            raise KeyboardInterrupt

    def during(self, call: Callable[[], object]) -> bool:
        """Make a call; whether it was interrupted, 10 microseconds to 30 milliseconds after its beginning."""
        try:
            self._armed = self._strikes
            signal.setitimer(signal.ITIMER_REAL, self._strikes * 10 ** self._random.uniform(-5.0, -1.5))
            call()
            self._armed = False
            return False
        except KeyboardInterrupt:
            self._counts["interrupts"] += 1
            return True
        finally:
            self._armed = False
            signal.setitimer(signal.ITIMER_REAL, 0.0)


class Watchdog:
    """Ends the process with status 1, and all stacks in `file`, if nothing has been said for so long."""

    def __init__(self, seconds: float, file: IO[str]) -> None:
        self._seconds, self._file, self._next = seconds, file, 0.0

    def goes_on(self) -> None:
        if (now := time.monotonic()) > self._next:
            self._next = now + 1.0
            faulthandler.dump_traceback_later(self._seconds, exit=True, file=self._file)


def unheard(wrong: list[str]) -> None:
    """Have said what threads and finalizers raise, where nobody hears it; interrupts that finalizers swallow are the
    interpreter's doing."""

    def say(given: Any) -> None:
        if not issubclass(given.exc_type, KeyboardInterrupt):
            where = getattr(given, "object", None) or getattr(given, "thread", None)
            text = traceback.format_exception(given.exc_type, given.exc_value, given.exc_traceback)
            wrong.append(f"unheard, of {where!r:.200}: {''.join(text)[-1500:]}")

    sys.unraisablehook = threading.excepthook = say


def summary(name: str, seed: int, counts: Counter[str], *, wrong: int, hangs: int) -> str:
    """The last line of each of the programs."""
    figures = ", ".join(f"{counts[each]} {each}" for each in ("operations", "interrupts", "kills"))
    return f"{name}: seed {seed}, {figures}, {wrong} wrong, {hangs} hangs"
