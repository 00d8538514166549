"""Tier: a store of records below the pool of pinned slots, such as a disk. Knows neither engines nor GPUs.

A record is the bytes of one key: row `entry` of each of the pool's arrays, all or nothing. A cache gives a tier its
pool by `attach`, and then calls the five operations, which return at once with a `TierJob`:

    put      copy entries to the tier            remove, clear    forget records; durable when the job has ended
    get      copy records to entries, verified   exists           ask; a hint, since a later `get` may find nothing

No operation raises for trouble with the medium: a record that cannot be read is MISSING or FAILED.
"""

from __future__ import annotations

import math
import numbers
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvoffload.cache.tiering.job import TierJob
from kvoffload.errors import LayoutError
from kvoffload.internal.checks import shown
from kvoffload.internal.types import UInt8Array

LAYOUT_BYTES = 16
RECORD_ALIGNMENT = 4096  # bytes, of rows: what direct I/O and registered memory need
LONGEST_KEY = 64  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TierCapabilities:
    """The properties of a tier that the cache above uses.

    Attributes:
        durable: whether records outlive the process.
        shared: whether others may put records into it, and remove them.
        local_index: whether `contains` answers at once; else only `exists` knows, and takes a while.
        max_bytes: the most bytes that it takes; None: it does not decide that itself.
    """

    durable: bool
    shared: bool
    local_index: bool
    max_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStatistics:
    """Counts of a tier since it was attached, and its work now.

    Attributes:
        records: how many it holds; None if it does not know.
        written, read: keys put and fetched with the outcome DONE; putting a key that it already has counts, too.
        bytes_written, bytes_read: of these records.
        missing, corrupt: keys that were asked for and had no record, or one with other bytes than were put.
        declined, failed, expired, cancelled: keys with that outcome.
        queued_reads, queued_writes: keys that wait.
        in_calls: keys whose I/O has begun and has not ended.
        longest_call: how long the oldest of these calls has taken so far, in seconds.
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
    """A store of records below a cache's pool. Its methods are called from several threads.

    Most tiers are easier to write as a `kvoffload.tiers.ThreadedTier`, whose methods may block.
    `kvoffload.testing.check_tier` tells you whether a tier keeps these promises.

    Attributes:
        name: short, for metrics and messages.
        capabilities: see `TierCapabilities`.
    """

    name: str
    capabilities: TierCapabilities

    @abstractmethod
    def attach(self, pools: Sequence[UInt8Array], layout: bytes | None) -> None:
        """Take a pool. The cache above calls it once, before all operations.

        Args:
            pools: one array per device, uint8, (entries, bytes), C-contiguous; each row a multiple of 4096 bytes, at an
                address that is a multiple of 4096. They stay valid until `close` has returned and every job has ended.
            layout: 16 bytes that name the meaning of the bytes (`KVLayout.fingerprint`); None if the layout has none; a
                durable or shared tier refuses that.

        Raises:
            LayoutError: the pool or the layout does not suit it, or its records have another layout.
            CapacityError: it has no room for one record.
            ClosedError: it is closed, or has a pool.
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
        """Copy records from entries. Returns at once. A key that the tier already has is DONE without being copied
        again.

        Args:
            keys: of at most 64 bytes, no repeats, in the order of a request: each needs the ones before.
            entries: the entry of each key, no repeats; must not be written until the key has its outcome.
            tenant: of the records.
            deadline: see `TierJob`.
            notify: called without arguments after keys have got outcomes; must not block. Any thread may call it, with
                no lock of the tier held: the tier's own, one that cancels or closes, or the caller of this method,
                before it returns. If it raises, that is logged.

        Raises:
            LayoutError: an argument is not as described; nothing has happened. The same for the other operations.
            ClosedError: the tier is closed, or has no pool yet. The same for the other operations and `drain`.
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
        """Copy records to entries, in the order of the keys as far as possible. Returns at once.

        Do not read or write an entry until its key has an outcome. If that is not DONE, the entry may hold any bytes.
        """

    @abstractmethod
    def exists(self, keys: Sequence[bytes], *, deadline: float | None = None, notify: Notify | None = None) -> TierJob:
        """Ask which keys have records: DONE or MISSING. A hint: a record may go, or turn out to be unreadable."""

    @abstractmethod
    def remove(self, keys: Sequence[bytes], *, notify: Notify | None = None) -> TierJob:
        """Forget records. DONE: the record is gone, and stays gone whatever crashes afterwards. MISSING: there was
        none.

        Waiting puts of these keys are CANCELLED; puts that have begun end first. So a record put before the call is
        gone after it.
        """

    @abstractmethod
    def clear(self, *, notify: Notify | None = None) -> TierJob:
        """Forget all records. The job has one key, b"", whose outcome is as for `remove`."""

    @abstractmethod
    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each key has a record, as far as the tier knows at once: never blocks, never raises.

        All False without a local index, without a pool and after `close`.
        """

    @abstractmethod
    def statistics(self) -> TierStatistics:
        """Counts since it was attached, and its work now; never blocks."""

    @abstractmethod
    def drain(self, timeout: float | None = None) -> bool:
        """Wait until all records put so far are written, and durable if the tier is; False after `timeout` seconds."""

    @abstractmethod
    def close(self, timeout: float = 10.0) -> bool:
        """Cancel work that has not begun, wait at most `timeout` seconds for the rest, and release resources.

        May be called again, and has to be if it returned False.

        Returns:
            Whether everything has ended. If False, a call hangs, and its entries must stay allocated.
        """


def check_pools(pools: Sequence[UInt8Array]) -> int:
    """The bytes of a record, over all pools.

    Raises:
        LayoutError: they do not suit `Tier.attach`; the message says why.
    """
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
    """Raise LayoutError unless it is 16 bytes, or None for a tier that is neither durable nor shared."""
    if layout is None and (capabilities.durable or capabilities.shared):
        raise LayoutError(
            "layout must not be None: the tier outlives this process or is shared, and the KVLayout does not say what "
            "its bytes mean; give it dtype, block_axes and tokens_per_block"
        )
    if layout is not None and (not isinstance(layout, bytes) or len(layout) != LAYOUT_BYTES):
        raise LayoutError(f"layout must be {LAYOUT_BYTES} bytes, as of KVLayout.fingerprint, got {shown(layout)}")


def check_keys(keys: Sequence[bytes]) -> tuple[bytes, ...]:
    """The keys as a tuple.

    Raises:
        LayoutError: one is not bytes, longer than 64 bytes, empty, or given twice.
    """
    checked = tuple(keys)
    for position, key in enumerate(checked):
        if not isinstance(key, bytes) or not 0 < len(key) <= LONGEST_KEY:
            raise LayoutError(f"keys[{position}] must be 1 to {LONGEST_KEY} bytes, got {shown(key)}")
    if len(set(checked)) != len(checked):
        raise LayoutError("keys repeats a key; each key of a job must be given once")
    return checked


def check_entries(entries: Sequence[int], keys: Sequence[bytes], pools: Sequence[UInt8Array]) -> tuple[int, ...]:
    """The entries as a tuple.

    Raises:
        LayoutError: not one for each key, all in the pool, none twice.
    """
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


def check_call(deadline: float | None, notify: Notify | None) -> None:
    """Raise LayoutError unless `Tier.put` takes these."""
    if deadline is not None and (not isinstance(deadline, numbers.Real) or math.isnan(deadline)):
        raise LayoutError(f"deadline must be a number of seconds by time.monotonic, or None, got {shown(deadline)}")
    if notify is not None and not callable(notify):
        raise LayoutError(f"notify must be a function without arguments, or None, got {shown(notify)}")
