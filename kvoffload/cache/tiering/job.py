"""TierJob: one call of a tier, with an outcome for each key.

    waiting ──begin──> begun ──settle──> an outcome
       └──cancel, the deadline has passed──^

Only between `begin` and `settle` may the tier read or write the key's entry of the pool. So a call that hangs leaves
its outcome open, and the owner of the entry keeps the entry until then.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from kvoffload.internal.log import LOGGER
from kvoffload.internal.waiting import wait_until


class Outcome(enum.Enum):
    """How one key of a job ended.

    - DONE. `put`: the record is readable. `get`: the entry holds the bytes that were put, verified. `exists`: there is
      a record, probably. `remove`, `clear`: gone for good.
    - MISSING: there is no record, or, for `get`, a corrupt one.
    - DECLINED: the tier's queue is full, or it does not want the record of a `put`.
    - FAILED: an error of the medium.
    - EXPIRED: the tier had not begun when the deadline passed.
    - CANCELLED: nor when the job was cancelled, the tier closed, or the key of a waiting `put` removed.
    """

    DONE = "done"
    MISSING = "missing"
    DECLINED = "declined"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


class TierJob:
    """Keys that a tier puts, fetches, asks for or removes. Usable from any thread.

    A tier makes it, and calls `begin`, `settle` and `settle_waiting`. The caller of the tier reads it, waits, cancels.

    Args:
        keys, entries, deadline: see the attributes. They are not checked here.
        notify: called without arguments each time when keys have got outcomes, in the thread that sets them.
        count: for the tier's statistics: called before `notify`, with the outcomes that are new.
        ended: called once with the job, before `notify`, when every key has its outcome. Not for a job without keys.

    Attributes:
        keys: as given, no repeats.
        entries: for `put` and `get`, the entry of the pool that each key's record is copied from or to; else empty.
        deadline: by `time.monotonic`, in seconds. Keys that the tier has not begun by then are EXPIRED. None: no limit.
        outcomes: for each key; None while it waits or the tier works on it. Written only by `settle`, `settle_waiting`
            and `cancel`.
        cancelled: whether `cancel` was called.
    """

    __slots__ = (
        "_begun", "_count", "_ended", "_ended_before", "_lock", "_notify", "cancelled", "deadline", "entries", "keys",
        "outcomes",
    )  # fmt: skip

    def __init__(
        self,
        keys: Sequence[bytes],
        entries: Sequence[int] = (),
        *,
        deadline: float | None = None,
        notify: Callable[[], None] | None = None,
        count: Callable[[Sequence[Outcome]], None] | None = None,
        ended: Callable[[TierJob], None] | None = None,
    ) -> None:
        self.keys = tuple(keys)
        self.entries = tuple(entries)
        self.deadline = deadline
        self.outcomes: list[Outcome | None] = [None] * len(self.keys)
        self.cancelled = False
        self._ended_before = 0  # all keys before this one have outcomes; `done` raises it
        self._begun = bytearray(len(self.keys))
        self._lock = threading.RLock()
        self._notify = notify
        self._count = count
        self._ended = ended

    @property
    def done(self) -> bool:
        """Whether every key has its outcome: the tier does not touch the entries any more."""
        at, outcomes = self._ended_before, self.outcomes
        while at < len(outcomes) and outcomes[at] is not None:
            at += 1
        self._ended_before = at  # by threads at the same time: each of their values is right
        return at == len(outcomes)

    def wait(self, timeout: float | None = None) -> list[Outcome]:
        """Wait until every key has its outcome, and return the outcomes in the order of the keys.

        Raises:
            TimeoutError: `timeout` seconds have passed; the job goes on.
        """
        wait_until(lambda: self.done, timeout, f"a tier's job of {len(self.keys)} keys")
        return [outcome for outcome in self.outcomes if outcome is not None]

    def cancel(self) -> None:
        """Keys that the tier has not begun are CANCELLED at once, or EXPIRED if the deadline has passed.

        The others go on: until `done`, the tier may touch their entries.
        """
        late = self.deadline is not None and time.monotonic() >= self.deadline
        self.cancelled = True
        self.settle_waiting(Outcome.EXPIRED if late else Outcome.CANCELLED)

    # for tiers ----------------------------------------------------------------------------------------------------

    def begin(self, positions: Iterable[int]) -> list[int]:
        """Claim the keys at `positions`. Returns the positions that you may work on now, and must `settle` afterwards.

        The others have outcomes, or have begun. After the deadline, all waiting keys of the job become EXPIRED. Give no
        position twice: that is not checked, and both would be returned.
        """
        if self.deadline is not None and time.monotonic() >= self.deadline:
            self.settle_waiting(Outcome.EXPIRED)
        with self._lock:
            begun = [at for at in positions if self.outcomes[at] is None and not self._begun[at]]
            for at in begun:
                self._begun[at] = 1
        return begun

    def settle(self, positions: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        """Set the outcomes of keys that you began, one for each position; no repeats, which is not checked. Stop
        touching their entries before this call.

        Raises:
            RuntimeError: one of the keys already has an outcome.
            TypeError: one of `outcomes` is not an Outcome.
            ValueError: there are more or fewer outcomes than positions.
            Nothing has changed in these cases.
        """
        for outcome in outcomes:
            if not isinstance(outcome, Outcome):
                raise TypeError(f"each outcome must be an Outcome, got {outcome!r:.80}")
        if len(positions) != len(outcomes):
            raise ValueError(f"outcomes must be one for each of {len(positions)} positions, got {len(outcomes)}")
        with self._lock:
            for at in positions:
                if self.outcomes[at] is not None:
                    raise RuntimeError(f"keys[{at}] is {self.outcomes[at]}: an outcome is set once")
            for at, outcome in zip(positions, outcomes, strict=True):
                self.outcomes[at] = outcome
        if outcomes:
            self._announce(outcomes)

    def settle_waiting(self, outcome: Outcome, positions: Iterable[int] | None = None) -> TierJob:
        """Set the outcome of keys (all, or those at `positions`) that have none and have not begun. Returns the job."""
        ended = 0
        with self._lock:
            for position in range(len(self.keys)) if positions is None else positions:
                if self.outcomes[position] is None and not self._begun[position]:
                    self.outcomes[position] = outcome
                    ended += 1
        if ended:
            self._announce([outcome] * ended)
        return self

    def _announce(self, outcomes: Sequence[Outcome]) -> None:
        """Exceptions of `ended` and `notify` are logged: a tier that ends many jobs gets to the last one."""
        if self._count is not None:
            self._count(outcomes)
        if self._ended is not None and self.done:
            with self._lock:
                function, self._ended = self._ended, None
            if function is not None:
                self._guarded(partial(function, self))
        if self._notify is not None:
            self._guarded(self._notify)

    @staticmethod
    def _guarded(function: Callable[[], None]) -> None:
        try:
            function()
        except Exception:  # noqa: BLE001  # the caller's
            LOGGER.exception("a notify function of the caller's raised, or what ends a job of a tier")

    def __repr__(self) -> str:
        waiting = self.outcomes.count(None)
        return f"TierJob({len(self.keys)} keys, {len(self.keys) - waiting} ended)"
