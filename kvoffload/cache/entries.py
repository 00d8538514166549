"""Entries of a cache: which key has which, who holds them, which are free.

The *truth* is four containers: `of`, `pool_of`, `reservations` and `leases`. Methods here and of `CacheState` change
them, each by one operation in C at a time, in an order in which every state between two of them is safe:

- a key that is evicted is taken out of `of` before the reservation that gets its entry is in `reservations`;
- that reservation is in `reservations`, so that its entries are pending, before its keys are in `of`;
- the keys of an aborted reservation are taken out of `of` before it is taken out of `reservations`.

All other attributes are *derived*: `repair` computes them from the truth after an exception has left them half done.

An entry without a key that is still held is *doomed*: it is free when its last holder releases it.
"""

from __future__ import annotations

import enum
import weakref
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

from kvoffload.errors import LayoutError, TransferError

if TYPE_CHECKING:
    from kvoffload.cache.policies import RequestPolicy
    from kvoffload.cache.pools import Pool, Victims

_BYTES = frozenset({bytes})
_finished = attrgetter("finished")
_error = attrgetter("error")


class Status(enum.Enum):
    """Whether a cache has a key in a slot. HIT: it can be loaded. PENDING: reserved, being stored, or on its way from a
    tier. MISS: neither, though a tier may have it.
    """

    MISS = "miss"
    HIT = "hit"
    PENDING = "pending"


class Stage(enum.Enum):
    """The state of a reservation. Writing COMMITTED or ABORTED publishes a decision that then has to be carried out."""

    OPEN = "open"
    SETTLING = "settling"  # committed once its transfers have succeeded
    COMMITTED = "committed"
    ABORTED = "aborted"


OPEN, SETTLING, COMMITTED, ABORTED = Stage  # looking them up in the class takes as long as a small call of the index


class _WithTransfers:
    """A record of entries that transfers read or write.

    Attributes:
        groups: slots of an entry.
        sources: records of the reservations that were filling the entries when this one was made.
    """

    __slots__ = ("groups", "jobs")
    groups: int
    jobs: tuple[Completion, ...]
    indices: Sequence[int]
    sources: tuple[ReservationRecord, ...] = ()

    @property
    def transfers_ended(self) -> bool:
        return all(map(_finished, self.jobs))

    @property
    def any_failed(self) -> bool:
        return any(map(_error, self.jobs))

    @property
    def unfit(self) -> set[int]:
        """The entries with a block that does not fit the codec, as its transfers have found."""
        return {slot // self.groups for job in self.jobs for slot in getattr(job, "unfit", ())}

    def check_sources(self) -> None:
        """Raise TransferError if the store of a key that was pending has failed, or will, or a block of these entries
        does not fit the codec: bytes read from them would not belong to its keys.
        """
        for source in self.sources:
            if source.any_failed or source.stage is ABORTED or not source.unfit.isdisjoint(self.indices):
                raise TransferError(
                    f"the store of {len(source.keys)} keys that were pending when they were leased has failed: bytes "
                    "read from their slots must not be used"
                )


@dataclass(slots=True, eq=False, repr=False)
class ReservationRecord(_WithTransfers):
    """The index's record of a reservation.

    Attributes:
        keys, positions, evicted, declined, present, short, tenant: see `Reservation`.
        victims: `evicted` by pool.
        policy: inserts the keys: the pool's policy, or its `for_request` if the call named an open request.
        promoted: whether a tier fills the entries, not a transfer.
        indices: the entries; with `victim_indices`, `victim_pools`, `num_unused`, `num_recycled`: see
            `EntryTable.allocate`.
        jobs: transfers that fill the entries; if aborted, transfers that may still write them.
        watch: the weak reference to the handle, if there is one and the record is not settled.
    """

    pool: Pool
    tenant: str
    keys: list[bytes]
    positions: Sequence[int]
    victims: Victims
    present: list[bytes]
    policy: RequestPolicy
    groups: int
    evicted: Sequence[bytes] = ()
    declined: Sequence[bytes] = ()
    short: bool = False
    promoted: bool = False
    indices: Sequence[int] = ()
    victim_indices: Sequence[int] = ()
    victim_pools: Sequence[int] = ()
    num_unused: int = 0
    num_recycled: int = 0
    stage: Stage = OPEN
    jobs: tuple[Completion, ...] = ()
    watch: HandleWatch | None = None


class LeaseRecord(_WithTransfers):
    """The index's record of a lease, or of a load.

    Attributes:
        keys, indices: see `Lease`.
        held: the indices without repeats.
        released: only `jobs` still read the entries.
        jobs: transfers that read them.
        watch: the weak reference to the handle, if there is one and the record is not released.
    """

    __slots__ = ("held", "indices", "keys", "released", "sources", "watch")
    tenant = ""

    def __init__(
        self, keys: list[bytes], indices: Sequence[int], sources: tuple[ReservationRecord, ...], groups: int = 1
    ) -> None:
        self.keys = keys
        self.indices = indices
        self.held: Collection[int] = indices if len(indices) == 1 else set(indices)
        self.sources = sources
        self.released = False
        self.groups = groups
        self.jobs = ()
        self.watch: HandleWatch | None = None


Record = ReservationRecord | LeaseRecord


class HandleWatch(weakref.ref[Any]):
    """A weak reference to a handle, with the record behind it."""

    __slots__ = ("record",)

    record: Record


class EntryTable:
    """Entries and the keys in them. Not for several threads at a time.

    Attributes:
        capacity: how many entries there are. Grows with the engine's pool, and never falls.
        most: how many there can be in the end; tables of remembered keys are sized by it.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = self.most = capacity
        # the truth
        self.of: dict[bytes, int] = {}
        self.pool_of = array("I")  # of each entry that was ever used: the number of its pool
        self.reservations: set[ReservationRecord] = set()  # whose entries are being filled, or may still be written
        self.leases: set[LeaseRecord] = set()  # whose entries are being read
        # derived
        self.pending: dict[bytes, ReservationRecord] = {}
        self.writable: set[int] = set()  # entries of open reservations
        self.holds: dict[int, int] = {}  # holders of each entry that has any
        self.keys: list[bytes | None] = []  # of each used entry: the object that `of` has, so that there is one copy
        self.doomed: set[int] = set()
        self.free: list[int] = []

    @property
    def num_free(self) -> int:
        return self.capacity - len(self.keys) + len(self.free)

    def pool_numbers(self, keys: Sequence[bytes]) -> list[int | None]:
        """Return the number of each key's pool; None: it has no entry."""
        of, pool_of = self.of, self.pool_of
        try:
            return list(map(pool_of.__getitem__, map(of.__getitem__, keys)))
        except KeyError:
            return [pool_of[of[key]] if key in of else None for key in keys]

    def originals(self, keys: Iterable[bytes]) -> list[bytes]:
        """Return the same keys, as the objects in `of` where they have entries."""
        of, known = self.of, self.keys
        return [known[of[key]] or key if key in of else key for key in keys]

    # reservations -------------------------------------------------------------------------------------------------

    def allocate(self, record: ReservationRecord) -> None:
        """Choose entries for the keys of a new record, neighbours if possible. Changes nothing here.

        The entries of the record's victims come first, then entries never used, then free ones.
        """
        count, used = len(record.keys), len(self.keys)
        victims = record.victims
        if victims:
            record.evicted = victims[0][1] if len(victims) == 1 else [key for _, mine in victims for key in mine]
            record.victim_indices = list(map(self.of.__getitem__, record.evicted))
        record.indices = indices = sorted(record.victim_indices[:count])
        if len(indices) == count:
            return
        record.num_unused = min(count - len(indices), self.capacity - used)
        indices += range(used, used + record.num_unused)
        record.num_recycled = count - len(indices)
        if record.num_recycled:
            indices += sorted(self.free[-record.num_recycled :])

    def still_mine(self, record: ReservationRecord) -> list[bytes]:
        """Return the record's keys that were not removed meanwhile."""
        found = list(map(self.of.get, record.keys))
        if found == record.indices:
            return record.keys
        return [key for key, index, mine in zip(record.keys, found, record.indices, strict=True) if index == mine]

    # holders ------------------------------------------------------------------------------------------------------

    def release(self, indices: Collection[int]) -> None:
        """Take one holder from each of these entries; no repeats."""
        holds, doomed = self.holds, self.doomed
        for index in indices:
            count = holds[index]
            if count > 1:
                holds[index] = count - 1
                continue
            del holds[index]
            if index in doomed:
                doomed.remove(index)
                self.free.append(index)

    def unlink(self, index: int) -> None:
        self.keys[index] = None
        if index in self.holds:
            self.doomed.add(index)
        else:
            self.free.append(index)

    def __len__(self) -> int:
        return len(self.of)


def check_keys(keys: Sequence[bytes], *, repeats: bool = True, tag: bytes = b"") -> list[bytes]:
    """Check keys, and return them as a list of the cache's own, with the tag of their weights.

    Raises:
        LayoutError: not a sequence of bytes; or a key is repeated, and `repeats` is False.
    """
    if type(keys) is not list and type(keys) is not tuple:
        if isinstance(keys, bytes | str):
            raise LayoutError(f"keys must be a list of keys, got one: {keys!r:.80}")
        if not isinstance(keys, Sequence):
            raise LayoutError(f"keys must be a list of bytes, got {keys!r:.80}")
    checked = list(keys)
    if not _BYTES.issuperset(map(type, checked)):
        for position, key in enumerate(checked):
            if not isinstance(key, bytes):
                raise LayoutError(f"keys[{position}] must be bytes, got {key!r:.80}")
        checked = list(map(bytes, checked))  # a subclass may compare in Python, and raise there
    if not repeats and len(checked) > 1 and len(frozenset(checked)) != len(checked):
        raise LayoutError("keys repeats a key; each key of a store must be given once")
    return list(map(tag.__add__, checked)) if tag else checked


def watch(handle: object, record: Record, abandoned: Callable[[Any], None]) -> None:
    """Call `abandoned` with the weak reference if a handle becomes garbage before its record is settled."""
    reference = HandleWatch(handle, abandoned)
    reference.record = record
    record.watch = reference


class Completion(Protocol):
    """A transfer as a cache's records see it; `kvoffload.Job` is one. Handles use more of a job than this."""

    @property
    def finished(self) -> bool:
        """Whether it is known to have ended, well or not. Does not ask the GPU."""

    @property
    def error(self) -> BaseException | None:
        """Why it failed; None if it has not."""


class Journal(Protocol):
    """Writes down what the entries hold, where another process can read it after this one has died."""

    def reserved(self, record: ReservationRecord, /) -> None:
        """Note that the entries of a record are about to be written."""

    def filled(self, entries: Sequence[int], /) -> None:
        """Note that the entries have the bytes of the keys that they were reserved for."""

    def removed(self, entries: Sequence[int], /) -> None:
        """Note that the keys of these entries are missing from now on."""
