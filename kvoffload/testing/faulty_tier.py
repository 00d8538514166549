"""FaultyTier: a tier that fails as media do, by seeded chance or on demand. For tests of code above tiers."""

from __future__ import annotations

import dataclasses
import errno
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvoffload.internal.checks import seconds, shown
from kvoffload.internal.nesting import new_lock
from kvoffload.tiers import Limits, MemoryTier, Origin, Outcome, ThreadedTier, TierJob
from kvoffload.tiers.threaded import Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class TierFaults:
    """How likely each fault of a `FaultyTier` is, 0.0 to 1.0, in its reads, writes, removals and flushes. Drawn
    independently for each record read or written, and for each call of `remove`, `clear` and flush (by `drain`).
    `exists` and `contains` have no faults.

    Attributes:
        fail: FAILED; a read leaves half a record of other bytes in its entry, a write or removal changes nothing. If a
            flush fails, `drain` returns False.
        error: as `fail`, by an OSError inside the tier; but a read leaves its entry as it was.
        delay: the call takes longer, by up to `longest_delay` seconds.
        hang: the call returns only after `FaultyTier.release_hung` or `heal`, and then does its work.
        decline: writes only: DECLINED.
        drop: writes of new records only: DONE, but there is no record afterwards.
        tear: writes of new records only: DONE, and `exists` finds the record, but it is corrupt: the first read leaves
            other bytes in its entry, and is MISSING.
        wrong_bytes: reads only: DONE with one byte that differs from the bytes put. No tier that verifies does so: use
            it only to test verification above tiers.
        longest_delay: seconds, 0 or more; no rate.

    Raises:
        ValueError: a rate is no number or out of range, or `longest_delay` is no number of seconds.
    """

    fail: float = 0.0
    error: float = 0.0
    delay: float = 0.0
    hang: float = 0.0
    decline: float = 0.0
    drop: float = 0.0
    tear: float = 0.0
    wrong_bytes: float = 0.0
    longest_delay: float = 1e-3

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "longest_delay" and not (isinstance(value, int | float) and 0.0 <= value <= 1.0):
                raise ValueError(f"{field.name} must be a number in [0.0, 1.0], got {shown(value)}")
        seconds("longest_delay", self.longest_delay, 0.0)


class FaultyTier(ThreadedTier):
    """A tier that calls another tier's methods, with faults. With one thread, equal calls in the same order get equal
    faults for a seed.

    Records are never wrong unless `wrong_bytes` says so: a lost or torn record is a miss.

    Args:
        faults: the rates; by default none, for use with `fail_all` and `hang_all`.
        inner: the other tier. Do not attach or close it: this tier's threads call its methods, and `close` its
            `release`. Default: a MemoryTier of 1 GiB.
        seed: of the faults.
        limits: see `Limits`; one thread by default.

    Attributes:
        faults: may be replaced at any time; the next call has the new rates.
        inner: the other tier.

    Raises:
        TypeError: `inner` is no `ThreadedTier`, or `limits` no `Limits`.
    """

    threads = 1

    def __init__(
        self,
        faults: TierFaults | None = None,
        *,
        inner: ThreadedTier | None = None,
        seed: int = 0,
        limits: Limits | None = None,
    ) -> None:
        super().__init__(limits=limits)
        self.inner = MemoryTier(1 << 30) if inner is None else inner
        if not isinstance(self.inner, ThreadedTier):
            raise TypeError(f"inner must be a kvoffload.tiers.ThreadedTier, or None, got {shown(inner)}")
        self.bytes_per_call = self.inner.bytes_per_call
        self.faults = TierFaults() if faults is None else faults
        self.name = f"faulty-{self.inner.name}"
        self.capabilities = self.inner.capabilities
        self._random = random.Random(seed)
        self._state = new_lock()  # never taken through the Condition: an interrupt there would leave it locked
        self._released = threading.Condition(self._state)
        self._torn = set[bytes]()
        self._all_fail = False
        self._all_hang = False
        self._hung = 0
        self._releases = 0

    # on demand ----------------------------------------------------------------------------------------------------

    @property
    def hung(self) -> int:
        """How many calls hang now, at most one for each thread."""
        return self._hung

    def fail_all(self) -> None:
        """Let every get, put, removal and flush fail from now on, as with a medium that is gone, until `heal`. So do
        calls that hang now, once they go on.

        Keys are FAILED, `drain` returns False. `exists` and `contains` still answer. Any thread may call this.
        """
        with self._state:
            self._all_fail = True

    def hang_all(self) -> None:
        """Let every get, put, removal and flush that begins from now on hang, until you call `heal`. (`release_hung`
        frees only those that hang by then.) Call `heal` before `close`, which would wait for its whole timeout and
        return False.

        `contains` still answers; so does `exists`, as long as one thread of the tier does not hang (by default there is
        only one).
        """
        with self._state:
            self._all_hang = True

    def release_hung(self) -> None:
        """Let the calls that hang now go on: a read then writes to its entry, and a write reads from it.

        Returns before they have ended. After `hang_all` the next calls hang again.
        """
        with self._state:
            self._releases += 1
            self._released.notify_all()

    def heal(self) -> None:
        """End all faults: `faults` becomes TierFaults(), and hanging calls go on. Returns before these end; one may
        still fail by the old rates. Records torn before stay corrupt.
        """
        with self._state:
            self.faults = TierFaults()
            self._all_fail = self._all_hang = False
        self.release_hung()

    # the methods --------------------------------------------------------------------------------------------------

    def start(self, layout: bytes | None) -> None:
        self.inner.pools, self.inner.record_bytes = self.pools, self.record_bytes
        self.inner.start(layout)

    def release(self) -> None:
        self.inner.release()

    def flush(self) -> None:
        self._refuse_some()
        self.inner.flush()

    def num_records(self) -> int | None:
        return self.inner.num_records()

    def read_record(self, key: bytes, rows: Rows) -> Outcome:
        failing = self._disturb()
        wrong = self._happens(self.faults.wrong_bytes)
        if failing:
            self._scribble(rows)
            return Outcome.FAILED
        with self._state:
            torn = key in self._torn
            self._torn.discard(key)
        if torn:
            self._scribble(rows)
            self.inner.remove_records([key])
            self.count_corrupt()
            return Outcome.MISSING
        outcome = self.inner.read_records([key], [rows])[0]
        if wrong and outcome is Outcome.DONE:
            rows[-1][-1] ^= 1
        return outcome

    def write_record(self, key: bytes, rows: Rows, origin: Origin) -> Outcome:
        failing = self._disturb()
        faults = self.faults
        decline, drop, tear = (self._happens(rate) for rate in (faults.decline, faults.drop, faults.tear))
        if failing or decline:
            return Outcome.FAILED if failing else Outcome.DECLINED
        if drop and not self.inner.have_records([key])[0]:
            return Outcome.DONE
        new = tear and not self.inner.have_records([key])[0]
        if new:  # before the write: no read may see it whole
            with self._state:
                self._torn.add(key)
        return self.inner.write_records([key], [rows], origin)[0]

    def keep_weights(self, names: frozenset[str]) -> None:
        self.inner.keep_weights(names)

    def put_ended(self, job: TierJob) -> None:
        self.inner.put_ended(job)

    def get_ended(self, job: TierJob) -> None:
        self.inner.get_ended(job)

    def has_record(self, key: bytes) -> bool:
        return self.inner.have_records([key])[0]

    def remove_records(self, keys: Sequence[bytes]) -> list[bool]:
        self._refuse_some()
        with self._state:
            self._torn.difference_update(keys)
        return self.inner.remove_records(keys)

    def remove_all(self) -> None:
        self._refuse_some()
        with self._state:
            self._torn.clear()
        self.inner.remove_all()

    # faults -------------------------------------------------------------------------------------------------------

    def _happens(self, rate: float) -> bool:
        with self._state:
            return self._random.random() < rate

    def _refuse_some(self) -> None:
        if self._disturb():
            raise OSError(errno.EIO, "a fault of FaultyTier")

    def _disturb(self) -> bool:
        """Take long, hang, or raise, as chance has it; returns whether the call is to fail."""
        faults = self.faults
        with self._state:
            fail, error, delay, hang, seconds = (self._random.random() for _ in range(5))
            if self._all_hang or hang < faults.hang:
                before = self._releases
                self._hung += 1
                try:
                    while self._releases == before:
                        self._released.wait(0.5)  # an interrupted `notify_all` may not wake it
                finally:
                    self._hung -= 1
        if delay < faults.delay:
            time.sleep(seconds * faults.longest_delay)
        if error < faults.error:
            raise OSError(errno.EIO, "a fault of FaultyTier")
        return self._all_fail or fail < faults.fail

    def _scribble(self, rows: Rows) -> None:
        for row in rows:
            row[: len(row) // 2] = 0xEE
