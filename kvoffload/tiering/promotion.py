"""Promotion: leading keys of a request on their way from tiers into slots."""

from __future__ import annotations

import threading
import time
from typing import Any, Protocol

from kvoffload.cache.entries import ReservationRecord
from kvoffload.cache.reservations import CacheJob, Lease
from kvoffload.errors import ClosedError
from kvoffload.internal.types import Int64Array
from kvoffload.internal.waiting import wait_until
from kvoffload.tiering.below import TierBelow
from kvoffload.tiers.job import Outcome, TierJob


class Fetch:
    """A job of one tier that works for a promotion.

    Attributes:
        below: the tier, with its breaker and speed.
        job: the tier's.
        positions: of the job's keys among those of the promotion.
        begun: by `time.monotonic`.
        measured: whether its time has been taken note of.
    """

    __slots__ = ("begun", "below", "job", "measured", "positions")

    def __init__(self, below: TierBelow, job: TierJob, positions: list[int]) -> None:
        self.below, self.job, self.positions = below, job, positions
        self.begun = time.monotonic()
        self.measured = False


class TierIo:
    """For the index: what may still write an entry, a key of a tier's job. A `Completion`."""

    __slots__ = ("_job", "_position", "lock")

    error = None

    def __init__(self, job: TierJob, position: int, lock: threading.RLock) -> None:
        self._job, self._position, self.lock = job, position, lock

    @property
    def finished(self) -> bool:
        return self._job.outcomes[self._position] is not None

    done = finished

    def order_before(self, stream: Any) -> None:
        """No stream waits for a tier: what a tier fills cannot be read before it has ended."""
        raise AssertionError(f"stream {stream!r} would wait for a tier")


class PromotionRecord:
    """What the manager knows of a promotion; changed by its thread alone, but for `cancelled` and `released`.

    Attributes:
        keys: as given.
        tenant: as given.
        deadline: by `time.monotonic`; None: none.
        here: of each key, whether its entry is leased, so that it can be loaded.
        gone: of each key, whether it will not come.
        ready: leading keys that can be loaded.
        records: of the keys that are on their way, by position.
        fetches: the tiers' jobs.
        leases: hold the entries of keys that have come, or were there.
        ended: whether `ready` is final.
        cancelled: whether the caller wants no more.
        released: whether nothing more is to be leased.
    """

    def __init__(self, keys: list[bytes], tenant: str, deadline: float | None) -> None:
        self.keys, self.tenant, self.deadline = keys, tenant, deadline
        self.here = bytearray(len(keys))
        self.gone = bytearray(len(keys))
        self.ready = 0
        self.records: dict[int, ReservationRecord] = {}
        self.fetches: list[Fetch] = []
        self.leases: list[Lease] = []
        self.ended = False
        self.cancelled = self.released = False

    def end(self) -> None:
        """Nothing more comes; the leases of a promotion that has been released go."""
        self.ended = True
        if self.released:
            self.release_leases()

    def release_leases(self) -> None:
        leases, self.leases = self.leases, []
        for lease in leases:
            lease.release()

    def advance_ready(self) -> None:
        while self.ready < len(self.keys) and self.here[self.ready]:
            self.ready += 1

    @property
    def broken(self) -> bool:
        """Whether nothing that is still to come can lengthen `ready`."""
        return self.ready == len(self.keys) or bool(self.gone[self.ready])

    def settled(self, position: int, outcome: Outcome) -> None:
        if outcome is Outcome.DONE:
            self.here[position] = 1
        else:
            self.gone[position] = 1


class PromotionOwner(Protocol):
    """What a promotion needs of the cache."""

    def wake_tiers(self) -> None: ...

    def load_after(self, record: PromotionRecord, blocks: Any, after: Any, parts: Any) -> ChainedLoad: ...


class Promotion:
    """Leading keys of a request that are brought from tiers into slots, as many as come in time.

    What has come can be loaded while the rest is on its way, and is not evicted as long as the promotion is held: until
    `release`, the end of a `with` block, or until it becomes garbage. A tier that fails shortens the promotion, and
    raises nothing. Usable from any thread.

    Attributes:
        keys: as given.
    """

    def __init__(self, record: PromotionRecord, owner: PromotionOwner) -> None:
        self.keys = tuple(record.keys)
        self._record = record
        self._owner = owner

    @property
    def ready(self) -> int:
        """How many leading keys can be loaded now: it only grows, until `done`."""
        return self._record.ready

    @property
    def done(self) -> bool:
        """Whether no more will come."""
        return self._record.ended

    def wait(self, timeout: float | None = None) -> int:
        """Wait until no more will come, and return how many leading keys can be loaded.

        Raises:
            TimeoutError: `timeout` seconds have passed; it goes on.
        """
        wait_until(lambda: self._record.ended, timeout, f"a promotion of {len(self.keys)} keys")
        return self._record.ready

    def cancel(self) -> None:
        """Bring no more: what the tiers have not begun is left, what has come stays. It is `done` soon."""
        self._record.cancelled = True
        self._owner.wake_tiers()

    def load(self, blocks: Any, after: Any = None, *, parts: Any = None) -> ChainedLoad:
        """Load the keys as soon as the promotion has ended; a shorter promotion shortens the load. Returns at once.

        A thread of the cache submits it then, as `BlockCache.load` would; no stream waits for a tier.

        Args:
            blocks: target ids for all keys, as for `BlockCache.load`; those of keys that do not come are not written.
                Must be left alone until the load has ended.
            after, parts: as for `BlockCache.load`; of a stream, its work up to the submission.

        Raises:
            ClosedError: the promotion has been released.
            LayoutError, and what else `BlockCache.load` raises for bad arguments. Nothing has happened then.
        """
        if self._record.released:
            raise ClosedError("the promotion has been released: load its keys by cache.load")
        return self._owner.load_after(self._record, blocks, after, parts)

    def release(self) -> None:
        """The keys that have come may be evicted from now on, and no more is brought. Idempotent."""
        self._record.released = True
        self.cancel()
        if self._record.ended:
            self._record.release_leases()

    def __enter__(self) -> Promotion:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        state = "done" if self.done else "going on"
        return f"Promotion({self.ready} of {len(self.keys)} keys ready, {state})"


class ChainedLoad:
    """A load that follows a promotion.

    Attributes:
        job: the load, once it has been submitted; None before, and if no key has come.
        submitted: whether it has been, or will not be.
        error: why it could not be submitted, or None.
        promotion, blocks, after, parts: for the cache; `blocks` per group, of shape (keys, blocks_per_slot).
    """

    def __init__(self, promotion: PromotionRecord, blocks: list[Int64Array], after: Any, parts: Any) -> None:
        self.promotion = promotion
        self.blocks, self.after, self.parts = blocks, after, parts
        self.job: CacheJob | None = None
        self.submitted = False
        self.error: Exception | None = None

    def wait(self, timeout: float | None = None) -> tuple[bytes, ...]:
        """Wait until the promotion and the load have ended; returns the leading keys that were loaded.

        Raises:
            TransferError: the load failed; and what else `BlockCache.load` raises.
            TimeoutError: `timeout` seconds have passed, for each of the two; they go on.
        """
        wait_until(lambda: self.submitted, timeout, "a promotion with a load behind it")
        if self.error is not None:
            raise self.error
        if self.job is None:
            return ()
        self.job.wait(timeout)
        return self.job.keys
