"""Tier: a store of records below the pool of pinned slots, such as a disk. Knows neither engines nor GPUs.

A record is the bytes of one key: row `entry` of each of the pool's arrays, all or nothing. A cache gives a tier its
pool by `attach`, and then calls the five operations, which return at once with a `TierJob`:

    put      copy entries to the tier            remove, clear    forget records; durable when the job has ended
    get      copy records to entries, verified   exists           ask; a hint, since a later `get` may find nothing

No operation raises for trouble with the medium: a record that cannot be read is MISSING or FAILED. A key of a job:

    waiting ──begin──> begun ──settle──> an outcome
       └──cancel, the deadline has passed──^

Only between `begin` and `settle` may the tier read or write the key's entry of the pool. So a call that hangs leaves
its outcome open, and the owner of the entry keeps the entry until then.
"""

from __future__ import annotations

import enum
import math
import numbers
import operator
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvoffload.errors import LayoutError
from kvoffload.internal.checks import shown
from kvoffload.internal.log import LOGGER
from kvoffload.internal.nesting import new_lock, refuse_under_locks, refuse_waiting, run_outside
from kvoffload.internal.types import UInt8Array
from kvoffload.internal.waiting import wait_until


class Outcome(enum.Enum):
    """How one key of a job ended.

    - DONE. `put`: the record is readable. `get`: the entry holds the bytes that were put, verified. `exists`: there is
      a record, probably. `remove`, `clear`: gone for good.
    - MISSING: there is no record, or, for `get`, a corrupt one.
    - DECLINED: the tier's queue is full, or it has no room for the record of a `put`, or does not want it.
    - FAILED: an error of the medium.
    - EXPIRED: the deadline passed before the tier began with the key.
    - CANCELLED: before the tier began with the key, the job was cancelled, the tier closed, or the key of a waiting
      `put` removed.
    """

    DONE = "done"
    MISSING = "missing"
    DECLINED = "declined"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


_lock = new_lock()  # of all jobs, held for microseconds


class TierJob:
    """Keys that a tier puts, fetches, asks for or removes. Usable from any thread.

    A tier makes it, and calls `begin`, `settle` and `settle_waiting`. The caller of the tier reads it, waits, cancels.

    Args:
        keys, entries, deadline: see the attributes. They are not checked here.
        notify: called without arguments each time when keys have got outcomes, in the thread that sets them. An
            exception from it is logged.
        count: for the tier's statistics: called before `notify`, in the same thread, with the outcomes that are new. It
            must not raise.
        ended: called once with the job, before `notify`, in the same thread, when every key has its outcome. Not for a
            job without keys. An exception from it is logged.

    Attributes:
        keys: as given, no repeats.
        entries: for `put` and `get`, the entry of the pool that each key's record is copied from or to; else empty.
        deadline: by `time.monotonic`, in seconds. Keys that the tier has not begun by then become EXPIRED when it comes
            to one of them, or at `cancel`; not before. None: no limit.
        outcomes: for each key; None while it waits or the tier works on it. Written only by `settle`, `settle_waiting`
            and `cancel`.
        cancelled: whether `cancel` was called.
    """

    __slots__ = (
        "_begun", "_count", "_ended", "_ended_before", "_notify", "cancelled", "deadline", "entries", "keys",
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
            TimeoutError: `timeout` seconds have passed (None: no limit); the job goes on.
            ValueError: `timeout` is no number.
            RuntimeError: called inside another call, or in a thread of the library: the tier may wait for that.
        """
        refuse_waiting("wait")
        wait_until(lambda: self.done, timeout, f"a tier's job of {len(self.keys)} keys")
        return [outcome for outcome in self.outcomes if outcome is not None]

    def cancel(self) -> None:
        """End keys that the tier has not begun: CANCELLED at once, or EXPIRED if the deadline has passed.

        The others go on: until `done`, the tier may touch their entries.

        Raises:
            RuntimeError: called inside another call of the library, as by a signal handler.
        """
        refuse_under_locks("cancel")
        late = self.deadline is not None and time.monotonic() >= self.deadline
        self.cancelled = True
        self.settle_waiting(Outcome.EXPIRED if late else Outcome.CANCELLED)

    # for tiers ----------------------------------------------------------------------------------------------------

    def begin(self, positions: Iterable[int]) -> list[int]:
        """Claim the keys at `positions`. Returns the positions that you may work on now, and must `settle` afterwards:
        until then, and no longer, you may touch their entries.

        The others have outcomes, or have begun. After the deadline, all waiting keys of the job become EXPIRED, with
        callbacks in this thread as in `settle`: hold no lock. Give no position twice: that is not checked, and both
        would be returned.
        """
        if self.deadline is not None and time.monotonic() >= self.deadline:
            self.settle_waiting(Outcome.EXPIRED)
        with _lock:
            begun = self._waiting(positions)
            for at in begun:
                self._begun[at] = 1
        return begun

    def settle(self, positions: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        """Set the outcomes of keys that you began, one for each position. Stop touching their entries before this call.
        It calls the callbacks of the job in this thread, so hold no lock. It is not checked whether you began them, nor
        whether a position repeats.

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
        with _lock:
            for at in filter(self.outcomes.__getitem__, positions):
                raise RuntimeError(f"keys[{at}] is {self.outcomes[at]}: an outcome is set once")
            for at, outcome in zip(positions, outcomes, strict=True):
                self.outcomes[at] = outcome
        if outcomes:
            self._announce(outcomes)

    def settle_waiting(self, outcome: Outcome, positions: Iterable[int] | None = None) -> TierJob:
        """Set the outcome of keys (all, or those at `positions`) that have none and have not begun; leave the others.
        Returns the job. It calls the callbacks in this thread, as `settle` does. What `outcome` is, is not checked.
        """
        with _lock:
            ended = self._waiting(range(len(self.keys)) if positions is None else positions)
            for position in ended:
                self.outcomes[position] = outcome
        if ended:
            self._announce([outcome] * len(ended))
        return self

    def _waiting(self, positions: Iterable[int]) -> list[int]:
        return [at for at in positions if self.outcomes[at] is None and not self._begun[at]]

    def _announce(self, outcomes: Sequence[Outcome]) -> None:
        """Count new outcomes, and call `ended` and `notify`. What these raise is logged, so that a tier that ends many
        jobs gets to the last one.
        """
        if self._count is not None:
            self._count(outcomes)
        if self._ended is not None and self.done:
            with _lock:
                function, self._ended = self._ended, None
            if function is not None:
                self._guarded(partial(function, self))
        if self._notify is not None:
            self._guarded(partial(run_outside, self._notify))

    @staticmethod
    def _guarded(function: Callable[[], None]) -> None:
        try:
            function()
        except Exception:  # noqa: BLE001  # the caller's
            LOGGER.exception("a notify function of the caller's raised, or what ends a job of a tier")

    def __repr__(self) -> str:
        waiting = self.outcomes.count(None)
        return f"TierJob({len(self.keys)} keys, {len(self.keys) - waiting} ended)"


LAYOUT_BYTES = 16
RECORD_ALIGNMENT = 4096  # bytes, of rows: what direct I/O and registered memory need
LONGEST_KEY = 64  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TierCapabilities:
    """The kind of a tier. The cache above chooses by it how to ask the tier, and `check_tier` what to test.

    Attributes:
        durable: once `drain` has returned True, records survive a crash or power cut of this machine and of the store's
            servers.
        shared: other processes or machines may put and remove records, too.
        local_index: `contains` answers from memory. If False, it says False for every key, and only `exists` knows.
        max_bytes: the tier's records never take more bytes than this. None: somebody else sets the limit, such as the
            store.
        pins_pool: `attach` has the pool's memory pinned, such as for a network card. Under a pool that grows, the
            constructor of a cache then waits, without a limit, until the pool grows no more, and gives its tiers the
            rows that are pinned.
    """

    durable: bool
    shared: bool
    local_index: bool
    max_bytes: int | None = None
    pins_pool: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStatistics:
    """Counts since `attach`, and the state of a tier now: `records`, `queued_...`, `in_calls`, `longest_call`.

    Attributes:
        records: how many the tier holds; None if it does not know.
        written, read: keys that were put or fetched with the outcome DONE. A put of a record that the tier had already
            counts as written.
        bytes_written, bytes_read: the bytes of these records.
        missing: keys of `get` with the outcome MISSING, corrupt records included.
        corrupt: records that a read found to differ from the bytes that were put.
        declined, failed, expired, cancelled: keys of any job with that outcome; a `clear` or `drain` is one key.
        queued_writes: keys of puts that wait for a thread.
        queued_reads: keys of all other jobs that wait for one, removals included.
        in_calls: keys that a thread is working on.
        longest_call: seconds since the oldest of these calls began; 0 if there is none.
    """

    records: int | None = None
    written: int = 0
    read: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    missing: int = 0
    corrupt: int = 0
    declined: int = 0
    failed: int = 0
    expired: int = 0
    cancelled: int = 0
    queued_reads: int = 0
    queued_writes: int = 0
    in_calls: int = 0
    longest_call: float = 0.0


Notify = Callable[[], None]


class Tier(ABC):
    """A store of records below a cache's pool. Any thread may call any method, several at a time.

    A subclass sets `name` and `capabilities`. A full tier may evict any record at any time. Most tiers are easier to
    write as a `kvoffload.tiers.ThreadedTier`, whose methods may block. `kvoffload.testing.check_tier` tests a tier
    against these docstrings.

    In a forked child the tiers of this package raise ClosedError for an operation, `drain` or `statistics`; `contains`
    is all False there, and `close` does nothing and returns True.

    Attributes:
        name: short, for metrics and messages. A cache's tiers have different ones, and none of "host", "pending",
            "missing" and "unknown", which `BlockCache.locate` uses.
        capabilities: see `TierCapabilities`.
    """

    name: str
    capabilities: TierCapabilities

    @abstractmethod
    def attach(self, pools: Sequence[UInt8Array], layout: bytes | None) -> None:
        """Take the arrays that records come from and go to. The cache calls this once, before all operations.

        It may block. If it raises, except ClosedError, the tier has no pool yet, and you may call it again. But if a
        thread of the tier cannot start (RuntimeError), the tier is closed: make another one.

        Args:
            pools: one array for each device, with one row for each entry: uint8, (entries, bytes), C-contiguous,
                writable. The bytes of a row are a multiple of 4096, and so is the array's address. The caller keeps the
                arrays allocated until every job has its outcomes and `close` has returned True. Of a pool that grows,
                rows may not have memory yet: touch only rows of keys whose put or get has begun.
            layout: 16 bytes that stand for the meaning of the bytes (`KVLayout.fingerprint`). None: the layout has no
                fingerprint; a durable or shared tier refuses that.

        Raises:
            LayoutError: the pool or the layout does not suit the tier, or its records have another layout.
            CapacityError: there is no room for one record.
            ClosedError: the tier is closed, or has a pool already.
            Also errors of the medium, such as OSError, and errors that the tier's class names.
        """

    @abstractmethod
    def put(
        self,
        keys: Sequence[bytes],
        entries: Sequence[int],
        *,
        tenant: str = "",
        deadline: float | None = None,
        notify: Notify | None = None,
    ) -> TierJob:
        """Copy one entry of the pool into a record for each key, later. Returns at once.

        Outcomes: DONE: there is a record; one that the tier had already stays as it is. FAILED: there may be a record
        or none. DECLINED: the queue or the tier is full, or it does not want the record. CANCELLED: before a thread
        began with the key, the job was cancelled, the key removed, or the tier closed. EXPIRED: see `deadline`.

        Args:
            keys: 1 to 64 bytes each, no repeats, in the order of a request: a record is of use only with all before it.
            entries: for each key the row of the pool, no repeats. Do not write a row until its key has an outcome.
            tenant: whose records they are, for tiers with quotas. Of a cache with named weights (`use_weights`) the
                tenant's name, NUL, and the name of the weights.
            deadline: in seconds by `time.monotonic`. A key that no thread has begun by then is EXPIRED when one
                comes to it. None: no limit.
            notify: called without arguments each time when keys have got outcomes; never for a job without keys, which
                is done at once. It must not block. Any thread may call it, none with a lock of the tier's: a thread of
                the tier, one that cancels or closes, and the caller's own before `put` returns. If it raises, the tier
                logs that.

        Raises:
            LayoutError: an argument is not as described. Nothing has happened. The other operations do the same.
            ClosedError: the tier is closed, or has no pool yet. The other operations and `drain` do the same.
            RuntimeError: called inside another call of the library in the same thread, as by a signal handler. The
                tiers of this package refuse that, here, in the other operations and in `drain`.
        """

    @abstractmethod
    def get(
        self,
        keys: Sequence[bytes],
        entries: Sequence[int],
        *,
        deadline: float | None = None,
        notify: Notify | None = None,
    ) -> TierJob:
        """Copy the record of each key into one entry of the pool, later. Returns at once. Arguments and errors
        (LayoutError, ClosedError) as for `put`.

        Do not read or write a row until its key has an outcome. DONE: the row holds the bytes that were put, verified.
        MISSING: no record, or a corrupt one. After FAILED or MISSING the row may hold anything; after DECLINED (the
        queue is full), EXPIRED or CANCELLED it is untouched. Earlier keys come first as far as possible.
        """

    @abstractmethod
    def exists(self, keys: Sequence[bytes], *, deadline: float | None = None, notify: Notify | None = None) -> TierJob:
        """Ask which keys have records, later. Returns at once. Arguments and errors (LayoutError, ClosedError) as for
        `put`.

        Outcomes: DONE, there is one; MISSING, there is none; FAILED, an error of the medium; DECLINED, the queue is
        full; EXPIRED, CANCELLED: as for `put`. A hint: a later `get` may still find no record, or a bad one.
        """

    @abstractmethod
    def remove(self, keys: Sequence[bytes], *, notify: Notify | None = None) -> TierJob:
        """Remove records, later. Returns at once. DONE: the record is gone. MISSING: there was none. Neither comes back
        after a crash.

        Records of earlier puts are gone, too: waiting puts of these keys are CANCELLED, and the removal waits for puts
        that have begun. (But see `RemoteTier` on puts that have FAILED.) After FAILED or CANCELLED, a record may still
        be there, or come back after a crash. Never DECLINED or EXPIRED. Arguments and errors (LayoutError, ClosedError)
        as for `put`.
        """

    @abstractmethod
    def clear(self, *, notify: Notify | None = None) -> TierJob:
        """Remove all records that `get` could find, later. Returns at once. Like `remove`, it cancels waiting puts and
        waits for puts that have begun. The job has one key, b""; its outcome is DONE when all are gone for good, else
        FAILED or CANCELLED. Argument and errors (LayoutError, ClosedError) as for `put`.
        """

    @abstractmethod
    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Say from memory whether each key has a record. A hint: `get` may still miss. Never blocks and never raises.

        All False if `capabilities.local_index` is False, before `attach` and after `close`.
        """

    def keep_weights(self, names: frozenset[str]) -> None:  # noqa: B027  # most stores evict by themselves
        """Evict records of other weights than these first, from now on. Does nothing unless you override it.

        Called when the cache, or a member of the shared pool, begins to use other weights; must not block. What it
        raises is logged. `put` says of which weights records are (see `tenant`); "" stands for those without a name.
        """

    @abstractmethod
    def statistics(self) -> TierStatistics:
        """Return the counts since `attach`, and the tier's state now. Any thread asks, also before `attach` and after
        `close`: answer without waiting for the medium.
        """

    @abstractmethod
    def drain(self, timeout: float | None = None) -> bool:
        """Wait until every put so far has its outcomes and, in a durable tier, its records survive a crash.

        Returns False if that takes longer than `timeout` seconds in total (None: no limit), or if they cannot be made
        durable. True says nothing about the outcomes: puts may have failed. ClosedError if the tier is closed or has no
        pool; ValueError if `timeout` is no number.
        """

    @abstractmethod
    def close(self, timeout: float = 10.0) -> bool:
        """Cancel keys that wait, let calls that have begun end, and release files and connections. Does not raise for
        the medium; call `drain` first to keep what was put.

        From now on operations raise ClosedError. You may call `close` again. For an error of the caller it may raise,
        as the tiers of this package do: ValueError if `timeout` is no number (nor may it be None), RuntimeError inside
        another call.

        Returns:
            True if everything has ended within `timeout` seconds. False: a call of the medium still runs and may touch
            its entries. Keep the pool allocated until another `close` returns True.
        """


def check_pools(pools: Sequence[UInt8Array]) -> int:
    """Return the bytes of a record, over all pools. LayoutError unless the pools are as `Tier.attach` needs them."""
    if isinstance(pools, np.ndarray) or len(pools) == 0:
        raise LayoutError(f"pools must be a list of at least one array, got {type(pools).__name__} of {len(pools)}")
    for number, pool in enumerate(pools):
        if not isinstance(pool, np.ndarray) or pool.ndim != 2 or pool.dtype != np.uint8 or not pool.flags.carray:
            described = f"{pool.dtype}, {pool.shape}" if isinstance(pool, np.ndarray) else type(pool).__name__
            raise LayoutError(
                f"pools[{number}] must be a C-contiguous writable array of uint8, (entries, bytes), got {described}"
            )
        if len(pool) != len(pools[0]):
            raise LayoutError(f"pools[{number}] must have {len(pools[0])} entries as pools[0] has, got {len(pool)}")
        address = pool.__array_interface__["data"][0]
        if pool.shape[1] == 0 or pool.shape[1] % RECORD_ALIGNMENT or address % RECORD_ALIGNMENT:
            raise LayoutError(
                f"pools[{number}] must have rows of a multiple of {RECORD_ALIGNMENT} bytes, at such addresses, got "
                f"rows of {pool.shape[1]} at {address:#x}; take the slots of an engine"
            )
    return sum(pool.shape[1] for pool in pools)


def check_layout(layout: bytes | None, capabilities: TierCapabilities) -> None:
    """Raise LayoutError unless `layout` is 16 bytes, or None for a tier that is neither durable nor shared."""
    if layout is None and (capabilities.durable or capabilities.shared):
        raise LayoutError(
            "layout must not be None: the tier outlives this process or is shared, and it does not say what its bytes "
            'mean; give it dtype, block_axes and tokens_per_block (for arrays in open_cache, name "tokens" in axes)'
        )
    if layout is not None and (not isinstance(layout, bytes) or len(layout) != LAYOUT_BYTES):
        raise LayoutError(f"layout must be {LAYOUT_BYTES} bytes, as of KVLayout.fingerprint, got {shown(layout)}")


def check_keys(keys: Sequence[bytes]) -> tuple[bytes, ...]:
    """Return the keys as a tuple. LayoutError if one is not bytes, empty, longer than 64 bytes, or given twice."""
    try:
        checked = tuple(keys)
    except TypeError:
        raise LayoutError(f"keys must be a list of bytes, got {shown(keys)}") from None
    for position, key in enumerate(checked):
        if not isinstance(key, bytes) or not 0 < len(key) <= LONGEST_KEY:
            raise LayoutError(f"keys[{position}] must be 1 to {LONGEST_KEY} bytes, got {shown(key)}")
    if len(set(checked)) != len(checked):
        raise LayoutError("keys repeats a key; each key of a job must be given once")
    return checked


def check_entries(entries: Sequence[int], keys: Sequence[bytes], pools: Sequence[UInt8Array]) -> tuple[int, ...]:
    """Return the entries as a tuple. LayoutError unless each key has one, each is in the pool, and none is twice."""
    try:
        checked = tuple(map(operator.index, entries))
    except TypeError:
        raise LayoutError(f"entries must be integers, got {shown(entries)}") from None
    if len(checked) != len(keys):
        raise LayoutError(f"entries must hold one for each of {len(keys)} keys, got {len(checked)}")
    count = len(pools[0]) if pools else 0
    if checked and (min(checked) < 0 or max(checked) >= count):
        raise LayoutError(f"entries must be in [0, {count}), got {min(checked)} to {max(checked)}")
    if len(set(checked)) != len(checked):
        raise LayoutError("entries repeats an entry; records of two keys cannot lie in one")
    return checked


def check_call(deadline: float | None, notify: Notify | None, tenant: str = "") -> None:
    """Raise LayoutError for a deadline, `notify` or tenant that `Tier.put` does not take."""
    if not isinstance(tenant, str):
        raise LayoutError(f"tenant must be a string, got {shown(tenant)}")
    if deadline is not None and (not isinstance(deadline, numbers.Real) or math.isnan(deadline)):
        raise LayoutError(f"deadline must be a number of seconds by time.monotonic, or None, got {shown(deadline)}")
    if notify is not None and not callable(notify):
        raise LayoutError(f"notify must be a function without arguments, or None, got {shown(notify)}")
