"""Breaker: when a tier that fails is left alone, and when it is tried again.

    closed ──failures in a row──> open ──after a pause──> trying ──success──> closed
                                   ^───────failure──────────┘

The pause doubles from try to try. A call that does not return opens it, too; it stays open until the call has returned.
"""

from __future__ import annotations

import enum

_FAILURES = 5  # in a row
_FIRST_PAUSE = 1.0  # seconds
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

    def usable(self, now: float, longest_call: float) -> bool:
        """Whether the tier may be given another job; if it has been open, that job is the try."""
        if longest_call >= self._hung:
            if self.state is not BreakerState.OPEN:
                self._open(now)
            return False
        if self.state is BreakerState.OPEN and now >= self._until:
            self.state = BreakerState.TRYING
            self._until = now + self._hung
            return True
        if self.state is BreakerState.TRYING and now >= self._until:  # the try was never answered
            self._until = now + self._hung
            return True
        return self.state is BreakerState.CLOSED

    def succeeded(self) -> None:
        """A key has come, or gone, well."""
        self.state = BreakerState.CLOSED
        self._failures = 0
        self._pause = _FIRST_PAUSE

    def failed(self, now: float) -> None:
        """The medium failed for a key, or a promotion's deadline passed while the tier worked on it."""
        self._failures += 1
        if self.state is BreakerState.TRYING or (self.state is BreakerState.CLOSED and self._failures >= _FAILURES):
            self._open(now)

    def _open(self, now: float) -> None:
        self.state = BreakerState.OPEN
        self.opened += 1
        self._failures = 0
        self._until = now + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
