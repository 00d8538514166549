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
from collections.abc import Callable, Sequence
from typing import IO, Any

from kvoffload.errors import KVOffloadError

REFUSALS = (KVOffloadError, RuntimeError, TimeoutError)  # what a call inside another one may raise
PACKAGE = "/kvoffload/"


class Ghost:
    """Garbage as soon as it is made; its finalizer makes a call."""

    def __init__(self, ghosts: Ghosts) -> None:
        self.me, self.ghosts = self, ghosts

    def __del__(self) -> None:
        self.ghosts.call()


class Ghosts:
    """Finalizers that make calls, at random lines of the package in threads that begin from now on.

    Args:
        chance: that a line of such a thread runs a collection.

    Attributes:
        calls: that finalizers make; none yet. They may be refused, see `REFUSALS`.
        made: how many of them have returned or were refused.
        wrong: what else they raised.
    """

    def __init__(self, seed: int, chance: float = 0.001) -> None:
        self.calls: Sequence[Callable[[], object]] = ()
        self.made, self.wrong = 0, list[str]()
        self._random, self._chance = random.Random(seed), chance
        gc.freeze()  # a collection looks at little
        threading.settrace(self._trace)

    def call(self) -> None:
        calls = self.calls
        try:
            if calls:
                self._random.choice(calls)()
        except REFUSALS:
            pass
        except KeyboardInterrupt:
            pass  # a signal has come in the meantime: it is said to have been swallowed by a finalizer
        except BaseException:
            self.wrong.append(f"a finalizer: {traceback.format_exc()[-1500:]}")
        self.made += bool(calls)

    def litter(self) -> None:
        """Leave one for whichever thread collects next."""
        Ghost(self)

    def _trace(self, frame: Any, event: str, _: Any) -> Any:
        if PACKAGE not in frame.f_code.co_filename:
            return None
        if event == "line" and self._random.random() < self._chance:
            Ghost(self)
            gc.collect()
        return self._trace


class Interrupts:
    """KeyboardInterrupt by a signal at a random moment of a call. For the main thread.

    Attributes:
        count: how many calls were interrupted.
    """

    def __init__(self, seed: int) -> None:
        self.count, self._armed, self._random = 0, False, random.Random(seed)
        signal.signal(signal.SIGALRM, self._handle)

    def _handle(self, *_: object) -> None:
        if self._armed:
            self._armed = False
            raise KeyboardInterrupt

    def during(self, call: Callable[[], object]) -> bool:
        """Make a call; whether it was interrupted, 10 microseconds to 30 milliseconds after its beginning."""
        try:
            self._armed = True
            signal.setitimer(signal.ITIMER_REAL, 10 ** self._random.uniform(-5.0, -1.5))
            call()
            self._armed = False
            return False
        except KeyboardInterrupt:
            self.count += 1
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


def summary(name: str, seed: int, *, operations: int, interrupts: int, kills: int, wrong: int, hangs: int) -> str:
    """The last line of each of the programs."""
    return (
        f"{name}: seed {seed}, {operations} operations, {interrupts} interrupts, {kills} kills, {wrong} wrong, "
        f"{hangs} hangs"
    )
