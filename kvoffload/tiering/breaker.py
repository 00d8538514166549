"""Breaker: when a tier that fails is left alone, and when it is tried again.

    closed ──failures in a row──> open ──after a pause──> trying ──success──> closed
                                   ^───────failure──────────┘

The pause doubles from try to try. A call that does not return opens it, too, and so does one that goes on although a
promotion has given it up, when the tier is to be used next; it stays open until the call has returned.
"""

from __future__ import annotations

import enum
import math

_FAILURES = 5  # in a row
_FIRST_PAUSE = 1.0  # seconds
_LOOK = 0.05  # seconds between looks at calls that do not return
_LONGEST_PAUSE = 60.0
_HUNG = 30.0  # seconds: a call that has gone on for so long is taken for one that does not return


class BreakerState(enum.Enum):
    """Whether a tier is used."""

    CLOSED = "closed"  # it is
    OPEN = "open"  # it is not
    TRYING = "trying"  # one job is with it, and decides


class Breaker:
    """The state for one tier. Not for several threads at a time.

    Args:
        hung: seconds after which a call is taken for one that does not return.

    Attributes:
        state: as above.
        opened: how often it has opened.
    """

    def __init__(self, hung: float = _HUNG) -> None:
        self.state = BreakerState.CLOSED
        self.opened = 0
        self._hung = hung
        self._failures = 0
        self._pause = _FIRST_PAUSE
        self._until = 0.0
        self._late = -math.inf  # when a promotion's deadline passed last

    def usable(self, now: float, longest_call: float) -> bool:
        """Whether the tier may be given another job. Opens if its longest call does not return, or was given up.

        Args:
            now: seconds, as for the other methods.
            longest_call: seconds that its oldest call has been going on.
        """
        hangs = longest_call >= self._hung
        stuck = hangs or now - longest_call < self._late
        if stuck and self.state is not BreakerState.OPEN:
            self._open(now, self._pause if hangs else 0.0)
        if stuck:
            self._until = max(self._until, now + _LOOK)
        return not self.refuses(now, longest_call)

    def refuses(self, now: float, longest_call: float) -> bool:
        """The opposite of `usable`, but it changes nothing: for any thread."""
        decided = self.state is BreakerState.CLOSED or now >= self._until
        return not decided or longest_call >= self._hung or now - longest_call < self._late

    def pauses(self, now: float) -> bool:
        """Whether it is open, and stays so whatever the tier's calls do. Changes nothing; for any thread."""
        return self.state is BreakerState.OPEN and now < self._until

    def given(self, now: float) -> None:
        """The tier is given a job: unless it is closed, that one is the try, for at most `hung` seconds."""
        if self.state is not BreakerState.CLOSED:
            self.state = BreakerState.TRYING
            self._until = now + self._hung

    def succeeded(self) -> None:
        """A key has come, or gone, well. If it is open, the job was given before, and decides nothing."""
        if self.state is not BreakerState.OPEN:
            self.state = BreakerState.CLOSED
            self._failures = 0
            self._pause = _FIRST_PAUSE

    def failed(self, now: float) -> None:
        """The medium failed for a key, or a promotion's deadline passed while the tier worked on it."""
        if self.state is BreakerState.OPEN:
            return
        self._failures += 1
        if self.state is BreakerState.TRYING or self._failures >= _FAILURES:
            self._open(now, self._pause)

    def late(self, now: float) -> None:
        """A promotion's deadline passed. Until the calls that are going on have returned, the tier is not usable."""
        self._late = now

    def undecided(self, now: float) -> None:
        """A key ended without saying anything of the tier, declined or cancelled: the next job is the try."""
        if self.state is BreakerState.TRYING:
            self._until = now

    def _open(self, now: float, pause: float) -> None:
        self.state = BreakerState.OPEN
        self.opened += 1
        self._failures = 0
        self._until = now + pause
        if pause:
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
