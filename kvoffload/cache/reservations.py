"""What a cache hands out: reservations of entries to fill, and leases of entries to read.

`Reservation` and `Lease` are handles of the caller. The index keeps a record for each, which holds the entries until it
is settled. A handle that becomes garbage before that tells nobody in Python: a weak reference appends itself to a queue
of the index, and the next call of the index aborts the reservation, or releases the lease.
"""

from __future__ import annotations

import enum
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvoffload.engine.job import wait_until
from kvoffload.errors import ClosedError, TransferError
from kvoffload.internal.teardown import run_all
from kvoffload.internal.types import Int64Array, StreamLike

if TYPE_CHECKING:
    from kvoffload.cache.pools import Pool

_NO_INDICES: list[int] = []
_finished = attrgetter("finished")
_error = attrgetter("error")


class Completion(Protocol):
    """What a cache needs of a transfer; `kvoffload.Job` has it."""

    @property
    def finished(self) -> bool:
        """Whether it is known to have ended, well or not; does not ask the GPU."""

    @property
    def error(self) -> BaseException | None:
        """Why it failed; None if it has not."""

    @property
    def done(self) -> bool:
        """The same as `finished`, but asks the GPU."""

    @property
    def lock(self) -> threading.RLock:
        """Its engine's."""

    def order_before(self, stream: Any) -> None:
        """Make work queued on `stream` from now on start after it has ended."""


class Status(enum.Enum):
    """What a cache knows of a key."""

    MISS = "miss"
    HIT = "hit"  # can be loaded
    PENDING = "pending"  # reserved or being stored


class Stage(enum.Enum):
    """Where a reservation stands. Writing COMMITTED or ABORTED publishes what then has to be carried out."""

    OPEN = "open"
    SETTLING = "settling"  # committed, as soon as transfers have ended well
    COMMITTED = "committed"
    ABORTED = "aborted"


class ReservationRecord:
    """The index's record of a reservation.

    Attributes:
        keys, positions, evicted, declined, present, tenant: see `Reservation`.
        pool: whose keys they are.
        victims: `evicted` by pool.
        indices: the entries; also `victim_indices`, `victim_pools`, `num_unused`, `num_recycled`, how the entries were
            allocated: see `EntryTable.allocate`.
        stage: where it stands.
        jobs: transfers that fill the entries; of an aborted record, transfers that may still write them.
        watch: the weak reference to the handle, if there is one and the record is not settled.
    """

    __slots__ = (
        "declined",
        "evicted",
        "indices",
        "jobs",
        "keys",
        "num_recycled",
        "num_unused",
        "pool",
        "positions",
        "present",
        "stage",
        "tenant",
        "victim_indices",
        "victim_pools",
        "victims",
        "watch",
    )

    def __init__(
        self,
        pool: Pool,
        tenant: str,
        keys: list[bytes],
        positions: Sequence[int],
        victims: list[tuple[Pool, list[bytes]]],
        declined: list[bytes],
        present: list[bytes],
    ) -> None:
        self.pool = pool
        self.tenant = tenant
        self.keys = keys
        self.positions = positions
        self.victims = victims
        self.evicted = [key for _, mine in victims for key in mine] if victims else []
        self.declined = declined
        self.present = present
        self.indices = self.victim_indices = self.victim_pools = _NO_INDICES
        self.num_unused = self.num_recycled = 0
        self.stage = Stage.OPEN
        self.jobs: tuple[Completion, ...] = ()
        self.watch: Watch | None = None

    @property
    def transfers_ended(self) -> bool:
        return all(map(_finished, self.jobs))

    @property
    def any_failed(self) -> bool:
        return any(map(_error, self.jobs))

    def raise_if_failed(self) -> None:
        """Raise TransferError if it was aborted, or will be: what was read from its entries is not the keys' bytes."""
        if self.any_failed or self.stage is Stage.ABORTED:
            raise TransferError(
                f"the store of {len(self.keys)} keys that were pending when they were leased has failed: what was read "
                "from their slots must not be used"
            )


class LeaseRecord:
    """The index's record of a lease, or of a load.

    Attributes:
        keys, indices: see `Lease`.
        sources: records of the reservations that were filling them.
        released: nobody reads the entries any more, but for `jobs`.
        jobs: transfers that read them.
        watch: the weak reference to the handle, if there is one and the record is not released.
    """

    __slots__ = ("indices", "jobs", "keys", "released", "sources", "watch")

    def __init__(self, keys: list[bytes], indices: list[int], sources: tuple[ReservationRecord, ...]) -> None:
        self.keys = keys
        self.indices = indices
        self.sources = sources
        self.released = False
        self.jobs: tuple[Completion, ...] = ()
        self.watch: Watch | None = None

    @property
    def transfers_ended(self) -> bool:
        return all(map(_finished, self.jobs))

    @property
    def any_failed(self) -> bool:
        return any(map(_error, self.jobs))


Record = ReservationRecord | LeaseRecord


class Watch(weakref.ref[Any]):
    """A weak reference to a handle, with the record behind it."""

    __slots__ = ("record",)

    record: Record


class Owner(Protocol):
    """What handles need of an index."""

    lock: threading.RLock
    num_groups: int

    def commit(self, record: ReservationRecord, jobs: tuple[Completion, ...]) -> None: ...

    def abort(self, record: ReservationRecord) -> None: ...

    def release(self, record: LeaseRecord) -> None: ...


def watch(handle: Reservation | Lease, record: Record, abandoned: Callable[[Any], None]) -> None:
    """Have `abandoned` called with the weak reference when a handle becomes garbage before its record is settled."""
    reference = Watch(handle, abandoned)
    reference.record = record
    record.watch = reference


class Reservation:
    """Entries for keys that are missing, to be filled and committed, or aborted. Usable from any thread.

    As a context manager it commits at the end of the block and aborts on an exception, unless that was done inside.
    Until then no other request is given these entries, and the keys cannot be loaded. A reservation that becomes
    garbage first is aborted by a later call of the cache.

    Attributes:
        keys: to be stored, in the order in which they were given. Not all that are missing, if some are `declined`.
        positions: where these stand among the keys given.
        indices: the entry of each.
        evicted: keys that were evicted for them.
        declined: missing keys that are not to be stored: worth less than what they would displace, not looked up often
            enough yet, beyond their tenant's quota, or more than the entries that were free or could be evicted.
        present: keys that were resident, or pending by another reservation.
        tenant: as given.
    """

    def __init__(self, index: Owner, record: ReservationRecord) -> None:
        self._index = index
        self._record = record
        self.keys = tuple(record.keys)
        self.positions = tuple(record.positions)
        self.indices = tuple(record.indices)
        self.evicted = tuple(record.evicted)
        self.declined = tuple(record.declined)
        self.present = tuple(record.present)
        self.tenant = record.tenant

    @property
    def stage(self) -> Stage:
        """Where it stands."""
        return self._record.stage

    def slots(self, group: int = 0) -> Int64Array:
        """The engine's slots for the keys' blocks of a group: int64, (keys,)."""
        return _slot_numbers(self.indices, self._index.num_groups, group)

    def commit(self, *jobs: Completion) -> None:
        """The entries hold the keys' blocks: from now on they are hits.

        Args:
            jobs: transfers into the slots that may not have ended. Then the keys become hits when all have ended well,
                and the reservation is aborted if one fails.

        Raises:
            ClosedError: it has been committed or aborted before; nothing has changed.
            TypeError, ValueError: one of `jobs` is no job, or one of another engine; nothing has changed.
        """
        _check_jobs(jobs, self._index)
        self._index.commit(self._record, jobs)

    def abort(self) -> None:
        """Make the keys missing and the entries free. The caller must not write the slots any more.

        Raises:
            ClosedError: it has been committed or aborted before; nothing has changed.
        """
        self._index.abort(self._record)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._record.stage is Stage.OPEN:
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
        return f"Reservation({len(self.keys)} keys{more}, {self._record.stage.value})"


class Lease:
    """Entries that stay as they are while the caller reads them: not evicted, and if removed, not given to other keys.

    A context manager. Usable from any thread. A lease that becomes garbage is released by a later call of the cache.

    Attributes:
        keys: as given.
        indices: the entry of each.
        pending: those of the keys whose stores had not ended.
    """

    def __init__(self, index: Owner, record: LeaseRecord) -> None:
        self._index = index
        self._record = record
        self.keys = tuple(record.keys)
        self.indices = tuple(record.indices)
        awaited = {key for source in record.sources for key in source.keys}
        self.pending = tuple(key for key in self.keys if key in awaited) if awaited else ()

    @property
    def released(self) -> bool:
        """Whether `release` has been called."""
        return self._record.released

    def slots(self, group: int = 0) -> Int64Array:
        """The engine's slots of the keys' blocks of a group: int64, (keys,)."""
        return _slot_numbers(self.indices, self._index.num_groups, group)

    def order_before(self, stream: StreamLike) -> None:
        """Work queued on `stream` from now on starts after all entries have been written; the host does not wait.

        A store that fails later does not hold the stream back: `wait` raises its error.
        """
        run_all(partial(job.order_before, stream) for job in self._jobs())

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all entries have been written, at most `timeout` seconds. `poll` still reports the jobs.

        Raises:
            TransferError: one was not; the bytes in its slot are not those of its key.
            TimeoutError: `timeout` seconds have passed; the transfers go on.
        """
        wait_until(self._written, timeout, repr(self))
        self.check()

    def check(self) -> None:
        """Raise TransferError if the store of a pending key has failed."""
        for source in self._record.sources:
            source.raise_if_failed()

    def release(self) -> None:
        """The caller does not read the entries any more. Idempotent."""
        self._index.release(self._record)

    def _jobs(self) -> list[Completion]:
        return [job for source in self._record.sources for job in source.jobs]

    def _written(self) -> bool:
        return all(job.done for job in self._jobs())

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"Lease({len(self.keys)} keys, {'released' if self.released else 'held'})"


def _check_jobs(jobs: tuple[Completion, ...], index: Owner) -> None:
    for position, job in enumerate(jobs):
        lock = getattr(job, "lock", None)
        if lock is None or not hasattr(job, "finished"):
            raise TypeError(f"jobs[{position}] must be what OffloadEngine.store returned, got {job!r:.80}")
        if lock is not index.lock:
            raise ValueError(f"jobs[{position}] must be of the engine whose slots these are, got {job!r:.80}")


def check_open(record: ReservationRecord) -> None:
    """Raise ClosedError unless a reservation is open."""
    if record.stage is not Stage.OPEN:
        raise ClosedError(
            f"the reservation of {len(record.keys)} keys has been settled before: it is {record.stage.value}"
        )


def _slot_numbers(indices: tuple[int, ...], num_groups: int, group: int) -> Int64Array:
    """Entry `i` owns slot `i * num_groups + g` for group `g`."""
    return np.array(indices, dtype=np.int64) * num_groups + group
