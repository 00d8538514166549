"""What a cache hands out: reservations of entries to fill, and leases of entries to read."""

from __future__ import annotations

import enum
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvoffload.engine.job import Job, wait_until
from kvoffload.errors import ClosedError, TransferError
from kvoffload.internal.teardown import run_all
from kvoffload.internal.types import Int64Array

if TYPE_CHECKING:
    from kvoffload.cache.admission import Pool
    from kvoffload.cache.entries import Draw
    from kvoffload.cache.index import CacheIndex


class Status(enum.Enum):
    """What a cache knows of a key."""

    MISS = "miss"
    HIT = "hit"  # can be loaded
    PENDING = "pending"  # reserved or being stored


class Stage(enum.Enum):
    """Where a reservation stands."""

    OPEN = "open"
    SETTLING = "settling"  # committed, as soon as transfers have ended well
    COMMITTED = "committed"
    ABORTED = "aborted"


class Proposal(NamedTuple):
    """What a reservation would do; valid as long as the lock is held."""

    pool: Pool
    namespace: str
    keys: list[bytes]
    positions: list[int]
    draw: Draw
    victims: list[tuple[Pool, list[bytes]]]
    declined: list[bytes]
    present: list[bytes]


class Reservation:
    """Entries for keys that are missing, to be filled and committed, or aborted. Usable from any thread.

    As a context manager it commits at the end of the block and aborts on an exception, unless that was done inside.
    Nobody else is given these entries, and nobody can read them, until then.

    Attributes:
        keys: to be stored, in the order in which they were given. Not all that are missing, if some are `declined`.
        positions: where these stand among the keys given.
        indices: the entry of each.
        evicted: keys that were given up for them.
        declined: missing keys that are not to be stored: worth less than what they would displace, not asked for often
            enough yet, or beyond their namespace's quota.
        present: keys that are there or on their way, by somebody else's reservation.
        namespace: as given.
    """

    def __init__(
        self,
        index: CacheIndex,
        *,
        keys: tuple[bytes, ...],
        positions: tuple[int, ...],
        indices: tuple[int, ...],
        evicted: tuple[bytes, ...],
        declined: tuple[bytes, ...],
        present: tuple[bytes, ...],
        namespace: str,
    ) -> None:
        self._index = index
        self.keys = keys
        self.positions = positions
        self.indices = indices
        self.evicted = evicted
        self.declined = declined
        self.present = present
        self.namespace = namespace
        self.stage = Stage.OPEN
        self.keys_removed: set[bytes] = set()  # by `remove`, while it was open
        self.jobs: tuple[Job, ...] = ()  # the transfers that fill it

    def slots(self, group: int = 0) -> Int64Array:
        """The engine's slots for the keys' blocks of a group: int64, (keys,)."""
        return _slot_numbers(self.indices, self._index.num_groups, group)

    def commit(self, *jobs: Job) -> None:
        """The entries hold the keys' blocks: from now on they are hits.

        Args:
            jobs: transfers into the slots that may not have ended. Then the keys become hits when all have ended well,
                and the reservation is aborted if one fails.

        Raises:
            ClosedError: it has been committed or aborted before; nothing has changed.
            TypeError, ValueError: one of `jobs` is no job, or one of another engine; nothing has changed.
        """
        _check_jobs(jobs, self._index)
        self._index.commit(self, jobs)

    def abort(self) -> None:
        """The keys will not come; they become missing, and their entries free. Nothing may write the slots any more.

        Raises:
            ClosedError: it has been committed or aborted before; nothing has changed.
        """
        self._index.abort(self)

    def check_open(self) -> None:
        """Raise ClosedError unless it is open."""
        if self.stage is not Stage.OPEN:
            raise ClosedError(
                f"the reservation of {len(self.keys)} keys has been settled before: it is {self.stage.value}"
            )

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self.stage is Stage.OPEN:
            if kind is None:
                self.commit()
            else:
                self.abort()

    def __repr__(self) -> str:
        more = "".join(
            f", {len(keys)} {name}"
            for name, keys in (("evicted", self.evicted), ("declined", self.declined), ("present", self.present))
            if keys
        )
        return f"Reservation({len(self.keys)} keys{more}, {self.stage.value})"


class Lease:
    """Entries that stay as they are while somebody reads them: not given up, and if removed, not given to others.

    A context manager. Usable from any thread.

    Attributes:
        keys: as given.
        indices: the entry of each.
        pending: the reservations that fill those of them that were pending.
    """

    def __init__(
        self, index: CacheIndex, keys: tuple[bytes, ...], indices: tuple[int, ...], pending: tuple[Reservation, ...]
    ) -> None:
        self._index = index
        self.keys = keys
        self.indices = indices
        self.pending = pending
        self.released = False

    def slots(self, group: int = 0) -> Int64Array:
        """The engine's slots of the keys' blocks of a group: int64, (keys,)."""
        return _slot_numbers(self.indices, self._index.num_groups, group)

    def order_before(self, stream: Any) -> None:
        """Work queued on `stream` from now on starts after all entries have been written; the host does not wait.

        A store that fails later does not hold the stream back: `wait` says so.
        """
        run_all(partial(job.order_before, stream) for job in self._jobs())

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all entries have been written, at most `timeout` seconds. (The jobs are still reported by `poll`.)

        Raises:
            TransferError: one was not; the bytes of the keys that it stood for are nobody's.
            TimeoutError: time is up; the transfers go on.
        """
        wait_until(lambda: all(job.done for job in self._jobs()), timeout, repr(self))
        self.check()

    def check(self) -> None:
        """Raise TransferError if a pending entry was given up instead of written."""
        raise_if_aborted(self.pending)

    def release(self) -> None:
        """Nobody reads the entries any more. Idempotent."""
        self._index.release(self)

    def _jobs(self) -> list[Job]:
        return [job for reservation in self.pending for job in reservation.jobs]

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"Lease({len(self.keys)} keys, {'released' if self.released else 'held'})"


def raise_if_aborted(reservations: tuple[Reservation, ...]) -> None:
    """Raise TransferError if one of them was aborted: what was read from its entries is not the keys' bytes."""
    for reservation in reservations:
        failed = any(job.error is not None for job in reservation.jobs)  # it is aborted only when these have ended
        if failed or reservation.stage is Stage.ABORTED:
            raise TransferError(
                f"the store of {len(reservation.keys)} keys that were pending when they were leased has failed: what "
                "was read from their slots must not be used"
            )


def _check_jobs(jobs: tuple[Job, ...], index: CacheIndex) -> None:
    for position, job in enumerate(jobs):
        if not isinstance(job, Job):
            raise TypeError(f"jobs[{position}] must be what OffloadEngine.store returned, got {job!r:.80}")
        if job.lock is not index.lock:
            raise ValueError(f"jobs[{position}] must be of the engine whose slots these are, got {job!r:.80}")


def _slot_numbers(indices: tuple[int, ...], num_groups: int, group: int) -> Int64Array:
    """Entry `i` owns slot `i * num_groups + g` for group `g`."""
    return np.array(indices, dtype=np.int64) * num_groups + group
