"""DiskIndex: the records of a disk, with the policies, tenants and quotas of a cache, restored after a restart.

An entry of the `CacheIndex` is a slot of the files. Opening a set reads the index of the process before from the header
table; each header has its record's place in the order of requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvoffload.cache.entries import Status
from kvoffload.cache.index import CacheIndex
from kvoffload.cache.policies import PolicyChoice
from kvoffload.cache.pools import Tenant
from kvoffload.cache.reservations import Reservation
from kvoffload.cache.weights import MARK, lost_namespace
from kvoffload.errors import CapabilityError, MissingKeyError
from kvoffload.internal.nesting import new_lock
from kvoffload.tiers.files import Buffer
from kvoffload.tiers.format import MOST_SEQUENCE, Pairs, as_pairs, tenant_digest
from kvoffload.tiers.member_file import ReadResult, SlotPut
from kvoffload.tiers.slot_files import SlotFiles


class DiskPut:
    """Slots for the new keys of one put call; from `DiskIndex.reserve`, until `DiskIndex.finish`.

    Attributes:
        namespace: whose records they are, see `kvoffload.cache.weights`.
        slots: for each key to write. Keys that were present or declined have none.
        written: keys whose records are written.
        positions: place of each key in the put call.
    """

    def __init__(self, reservation: Reservation, namespace: str, sequence: int) -> None:
        self.reservation, self.namespace = reservation, namespace
        self.slots = dict(zip(reservation.keys, reservation.indices, strict=True))
        self.written: set[bytes] = set()
        self.sequence = sequence
        self.positions = dict(zip(reservation.keys, reservation.positions, strict=True))


class DiskIndex:
    """The records of a `SlotFiles`. Usable from any thread; owns the files, unless the constructor raises."""

    def __init__(
        self,
        files: SlotFiles,
        *,
        policy: PolicyChoice,
        tenants: Mapping[str, Tenant],
    ) -> None:
        self.files = files
        records = files.load()  # if that fails, a policy object has served no index yet
        self.index = CacheIndex(max(1, files.num_slots), policy=policy, tenants=tenants)
        self._lock = new_lock()  # what `remove` and `clear` say of the keys of open puts, with the index
        self._writing: dict[bytes, DiskPut] = {}  # keys that a put has reserved and `finish` has not seen
        self._next_sequence = min(int(records.sequences[-1]) + 1, MOST_SEQUENCE) if records.keys else 0
        self.index.restore(
            records.keys,
            records.slots,
            records.sequences.astype(np.int64),
            tenants=_names(records.tenants, tenants),
        )

    # asking -------------------------------------------------------------------------------------------------------

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Return whether each key has a record, without asking the disk. Takes no lock: a hint."""
        table = self.index._state.table
        of, pending = table.of, table.pending
        if not pending:
            return list(map(of.__contains__, keys))
        return [
            key in of and (key not in pending or ((put := self._writing.get(key)) is not None and key in put.written))
            for key in keys
        ]

    def __len__(self) -> int:
        return len(self.index._state.table)  # without its lock: see `Workers.figures`

    # writing ------------------------------------------------------------------------------------------------------

    def reserve(self, keys: Sequence[bytes], tenant: str = "") -> DiskPut:
        """Reserve slots for those keys of a put call that have no record yet, evicting others."""
        self._check_writes()
        with self._lock:
            reservation = self.index.reserve(keys, tenant=tenant)
            put = DiskPut(reservation, tenant, self._next_sequence)
            self._next_sequence = min(self._next_sequence + 1, MOST_SEQUENCE)
            self._writing.update(dict.fromkeys(put.slots, put))
        return put

    def write(self, put: DiskPut, keys: Sequence[bytes], payloads: Sequence[Sequence[Buffer]]) -> list[bool | OSError]:
        """Write records into `put.slots`, readable when this returns. Threads may write different keys of a put.

        Args:
            payloads: see `SlotPut`.

        Returns:
            For each key True, False if it was removed meanwhile, or the error that left it without a record.
        """
        puts = [
            SlotPut(put.slots[key], key, put.positions[key], views) for key, views in zip(keys, payloads, strict=True)
        ]
        results = self.files.write(puts, put.namespace, put.sequence, wanted=lambda key: self._writing.get(key) is put)
        put.written.update(key for key, result in zip(keys, results, strict=True) if result is True)
        return results

    def finish(self, put: DiskPut) -> None:
        """End a put: keys that were not written are missing again.

        Every `write` of this put must have returned. A late one would change a slot that has another key by now.
        """
        with self._lock:
            mine = list(filter(lambda key: self._writing.get(key) is put, put.slots))
            if put.written:
                self.index.remove(list(filter(lambda key: key not in put.written, mine)))
                put.reservation.commit()
            else:
                put.reservation.abort()
            for key in mine:  # after the commit, so that a written key can be read at any time
                del self._writing[key]

    # reading ------------------------------------------------------------------------------------------------------

    def read(self, keys: Sequence[bytes], payloads: Sequence[Sequence[Buffer]]) -> list[ReadResult]:
        """Read records and verify them; `keys` has no repeats.

        Returns:
            A `ReadResult` for each key. Unless it is True, the payload may hold anything and the key's record is
            removed.
        """
        results: dict[bytes, ReadResult] = dict.fromkeys(keys, False)
        of = dict(zip(keys, payloads, strict=True))
        # no lease: a slot has the key as long as its put is not finished
        for key, put in [(key, self._writing.get(key)) for key in keys]:
            if put is not None and key in put.written:
                read = self.files.read([put.slots[key]], [key], [of[key]])
                if self._writing.get(key) is put:
                    results[key] = read[0]
                    del of[key]
        if of:
            results.update(self._read_finished(of))
        return [results[key] for key in keys]

    def _read_finished(self, of: dict[bytes, Sequence[Buffer]]) -> dict[bytes, ReadResult]:
        """Do `read` for keys whose puts are finished. `of` has their payloads."""
        keys = list(of)
        try:
            lease = self.index.acquire(keys)
        except MissingKeyError:
            if len(of) == 1:
                return {}
            one_by_one = [self._read_finished({key: views}) for key, views in of.items()]
            return {key: result for each in one_by_one for key, result in each.items()}
        with lease:
            slots = list(lease.indices)
            results = self.files.read(slots, keys, list(of.values()))
            for key, slot, _ in filter(lambda each: each[2] is not True, zip(keys, slots, results, strict=True)):
                self._drop(key, slot)
        return dict(zip(keys, results, strict=True))

    def _drop(self, key: bytes, slot: int) -> None:
        """Drop an entry that turned out to have no record. Its slot is still leased: no other key can have taken it."""
        self.index.remove([key])
        if not self.files.read_only:
            self.files.erase(slot)

    # removing -----------------------------------------------------------------------------------------------------

    def remove(self, keys: Sequence[bytes]) -> list[bool]:
        """Remove records, durably, and return for each key whether it was known. Puts go on without these keys.

        Raises:
            OSError: they are misses now, but a crash may bring some back; call it again.
            CapabilityError: the files are open for reading only. For this object the keys are misses from now on.
        """
        with self._lock:
            found = [state is not Status.MISS for state in self.index.status(keys)]
            self.index.remove(keys)
            for key in keys:
                self._writing.pop(key, None)
        self._check_writes()
        self.files.remove(keys)
        return found

    def clear(self) -> None:
        """Remove all records, durably. Raises as `remove` does."""
        with self._lock:
            self.index.clear()
            self._writing.clear()
        self._check_writes()
        self.files.clear()

    def _check_writes(self) -> None:
        if self.files.read_only:
            raise CapabilityError(f"{self.files!r} is open for reading only; put and remove in the process that writes")


def _names(digests: Pairs, tenants: Mapping[str, Tenant]) -> list[str] | None:
    """Return the tenant name per record, or a text for its namespace, or "" if the tenant is gone. None: no
    record has a tenant.
    """
    names = np.full(len(digests), "", dtype=object)
    for name in filter(None, tenants):
        names[(digests == as_pairs(tenant_digest(name))[0]).all(axis=1)] = name
    marked = digests[:, 0] & 0xFFFFFFFF == int.from_bytes(MARK, "little")
    begins, places = np.unique(digests[marked, 0], return_inverse=True)  # one pass, however many namespaces
    names[marked] = np.array([lost_namespace(begin.tobytes()) for begin in begins], dtype=object)[places]
    return list(names) if any(names) else None
