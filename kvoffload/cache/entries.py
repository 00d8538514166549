"""Entries of a cache: which key has which, who holds them, which are free.

The *truth* is four containers: `of`, `pool_of`, `reservations` and `leases`. Each is changed by one operation in C at a
time, in an order in which every state between two of them is safe:

- a key that is evicted is taken out of `of` before the reservation that gets its entry is in `reservations`;
- that reservation is in `reservations`, so that its entries are pending, before its keys are in `of`;
- the keys of an aborted reservation are taken out of `of` before it is taken out of `reservations`.

All other attributes are *derived*: `rebuild` computes them from the truth after an exception has left them half done.

An entry without a key that is still held is *doomed*: it is free when its last holder releases it.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import takewhile
from operator import eq

from kvoffload.cache.reservations import LeaseRecord, ReservationRecord, Stage
from kvoffload.errors import LayoutError

_FEW = 8  # adjacent keys; where fewer are, comparing neighbours is not worth it


class EntryTable:
    """`capacity` entries and the keys in them. Not for several threads at a time."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
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
        self._doomed: set[int] = set()
        self._free: list[int] = []

    @property
    def num_free(self) -> int:
        return self.capacity - len(self.keys) + len(self._free)

    def originals(self, keys: Iterable[bytes]) -> list[bytes]:
        """The same keys, as the objects that `of` has where they have entries."""
        of, known = self.of, self.keys
        return [known[of[key]] or key if key in of else key for key in keys]

    def leading(self, keys: list[bytes]) -> int:
        """How many leading keys have entries.

        Keys that were stored together mostly have adjacent entries: comparing them in order costs a fifth of looking up
        each in a large dictionary (`kvoffload bench cache`), where nearly every step misses the CPU's caches.
        """
        found, compared = 0, 2 * _FEW
        while found < len(keys):
            index = self.of.get(keys[found])
            if index is None:
                return found
            together = self._together(index, keys[found : found + compared])
            found += together
            if together < _FEW:
                break
            compared = 2 * together  # so that many short ranges cost no more than one long one
        return found + len(list(takewhile(self.of.__contains__, keys[found:])))

    def _together(self, index: int, keys: list[bytes]) -> int:
        """How many of these keys, from the first, have the entries from `index` on."""
        there = self.keys[index : index + len(keys)]
        return len(keys) if there == keys else len(list(takewhile(bool, map(eq, there, keys))))

    # reservations -------------------------------------------------------------------------------------------------

    def allocate(self, record: ReservationRecord) -> None:
        """Choose entries for the keys of a new record, neighbours if possible; changes nothing here.

        Those of the record's victims first, then never-used ones, then free ones.
        """
        count, used = len(record.keys), len(self.keys)
        record.victim_indices = list(map(self.of.__getitem__, record.evicted))
        indices = record.victim_indices[:count]
        indices.sort()
        record.num_unused = min(count - len(indices), self.capacity - used)
        indices += range(used, used + record.num_unused)
        record.num_recycled = count - len(indices)
        if record.num_recycled:
            indices += sorted(self._free[-record.num_recycled :])
        record.indices = indices

    def publish(self, record: ReservationRecord, *, several_pools: bool) -> None:
        """Change the truth: the victims are gone, the record's keys are pending. `fill` or `withdraw` follows."""
        of, pool_of, number = self.of, self.pool_of, record.pool.number
        pool_of.extend(array("I", (number,)) * (len(self.keys) + record.num_unused - len(pool_of)))
        record.victim_pools = [pool_of[index] for index in record.victim_indices] if several_pools else []
        for key in record.evicted:
            del of[key]
        if several_pools:
            for index in record.indices:
                pool_of[index] = number
        self.reservations.add(record)
        of.update(zip(record.keys, record.indices, strict=True))
        self.writable.update(record.indices)  # what the transfer that fills them is checked against

    def withdraw(self, record: ReservationRecord) -> None:
        """Undo `publish`: nothing has been written to the entries."""
        of, pool_of = self.of, self.pool_of
        record.stage = Stage.ABORTED
        for key in record.keys:
            del of[key]
        self.reservations.discard(record)
        for index, number in zip(record.victim_indices, record.victim_pools, strict=False):
            pool_of[index] = number
        of.update(zip(record.evicted, record.victim_indices, strict=True))
        self.writable.difference_update(record.indices)
        del pool_of[len(self.keys) :]

    def fill(self, record: ReservationRecord) -> None:
        """Change what is derived from what `publish` has changed."""
        keys, known, free = record.keys, self.keys, self._free
        for index in record.victim_indices:
            known[index] = None
        del free[len(free) - record.num_recycled :]
        free += record.victim_indices[len(keys) :]  # those that no new key takes
        known += [None] * record.num_unused
        for key, index in zip(keys, record.indices, strict=True):
            known[index] = key
        self.pending.update(dict.fromkeys(keys, record))
        self.holds.update(dict.fromkeys(record.indices, 1))

    def still_mine(self, record: ReservationRecord) -> list[bytes]:
        """The record's keys that were not removed meanwhile."""
        found = list(map(self.of.get, record.keys))
        if found == record.indices:
            return record.keys
        return [key for key, index, mine in zip(record.keys, found, record.indices, strict=True) if index == mine]

    def end(self, record: ReservationRecord, mine: list[bytes], *, held: bool) -> None:
        """Change what is derived when a record is settled, its keys being `mine`; `held`: not the entries, yet."""
        pending = self.pending
        for key in mine:
            del pending[key]
        self.writable.difference_update(record.indices)
        if not held:
            self.release(record.indices)

    # holders ------------------------------------------------------------------------------------------------------

    def hold(self, indices: Iterable[int]) -> None:
        """One holder more for each of them; no repeats."""
        holds = self.holds
        for index in indices:
            holds[index] = holds.get(index, 0) + 1

    def release(self, indices: Collection[int]) -> None:
        """One holder less for each of them; no repeats."""
        holds, doomed = self.holds, self._doomed
        for index in indices:
            count = holds[index]
            if count > 1:
                holds[index] = count - 1
                continue
            del holds[index]
            if index in doomed:
                doomed.remove(index)
                self._free.append(index)

    def unlink(self, index: int) -> None:
        """An entry has lost its key; it is free as soon as it has no holder."""
        self.keys[index] = None
        if index in self.holds:
            self._doomed.add(index)
        else:
            self._free.append(index)

    # after an exception -------------------------------------------------------------------------------------------

    def rebuild(self) -> None:
        """Finish records whose stage says that they are settled, then compute from the truth what is derived."""
        of = self.of
        for record in list(self.reservations):
            if record.stage is Stage.ABORTED:
                for key, index in zip(record.keys, record.indices, strict=True):
                    if of.get(key) == index:
                        del of[key]
            if record.stage is Stage.COMMITTED or (record.stage is Stage.ABORTED and record.transfers_ended):
                self.reservations.discard(record)
        for lease in list(self.leases):
            if lease.released and lease.transfers_ended:
                self.leases.discard(lease)
        self._derive()

    def _derive(self) -> None:
        self.keys = [None] * len(self.pool_of)
        for key, index in self.of.items():
            self.keys[index] = key
        unsettled = [record for record in self.reservations if record.stage is not Stage.ABORTED]
        self.pending = {key: record for record in unsettled for key in self.still_mine(record)}
        self.writable = {index for record in unsettled if record.stage is Stage.OPEN for index in record.indices}
        self.holds = dict(self._holders())
        keyless = [index for index, key in enumerate(self.keys) if key is None]
        self._doomed = {index for index in keyless if index in self.holds}
        self._free = [index for index in reversed(keyless) if index not in self.holds]

    def _holders(self) -> Counter[int]:
        holders: Counter[int] = Counter()
        for reservation in self.reservations:
            holders.update(reservation.indices)
        for lease in self.leases:
            holders.update(set(lease.indices))
        return holders

    def check(self) -> None:
        """Raise AssertionError unless what is derived agrees with the truth."""
        used = [*self.of.values(), *self._doomed]
        assert sorted(used + self._free) == list(range(len(self.keys))), "every entry is used, free or never used"
        assert len(self.keys) <= self.capacity, "no more entries than capacity"
        assert len(self.pool_of) == len(self.keys), "every used entry has a pool"
        assert all(self.keys[index] is key for key, index in self.of.items()), "entries know their keys"
        assert len(self.keys) - self.keys.count(None) == len(self.of), "no entry has a key that is gone"
        assert all(count > 0 for count in self.holds.values()), "holders are counted"
        assert self._doomed <= self.holds.keys(), "an entry without a key and a holder is free"
        assert self.holds == self._holders(), "entries are held by reservations and leases alone"
        assert all(record.stage in (Stage.OPEN, Stage.SETTLING, Stage.ABORTED) for record in self.reservations)
        unsettled = [record for record in self.reservations if record.stage is not Stage.ABORTED]
        mine = [(key, record) for record in unsettled for key in self.still_mine(record)]
        assert dict(mine) == self.pending, "pending keys are those of unsettled reservations"
        assert len(mine) == len(self.pending), "no key is in two reservations"
        assert all(self.still_mine(record) == [] for record in self.reservations if record.stage is Stage.ABORTED)
        opened = {index for record in unsettled if record.stage is Stage.OPEN for index in record.indices}
        assert self.writable == opened, "the writable entries are those of open reservations"

    def __len__(self) -> int:
        return len(self.of)


def check_keys(keys: Sequence[bytes], *, repeats: bool = True) -> list[bytes]:
    """`keys` as a list of the cache's own.

    Raises:
        LayoutError: no sequence of bytes, or one that repeats a key where that is not legal.
    """
    if type(keys) is not list and type(keys) is not tuple:
        if isinstance(keys, bytes | str):
            raise LayoutError(f"keys must be a list of keys, got one: {keys!r:.80}")
        if not isinstance(keys, Sequence):
            raise LayoutError(f"keys must be a list of bytes, got {keys!r:.80}")
    checked = list(keys)
    if not set(map(type, checked)) <= {bytes}:
        for position, key in enumerate(checked):
            if not isinstance(key, bytes):
                raise LayoutError(f"keys[{position}] must be bytes, got {key!r:.80}")
        checked = list(map(bytes, checked))  # a subclass may compare in Python, and raise there
    if not repeats and len(frozenset(checked)) != len(checked):
        raise LayoutError("keys repeats a key; each key of a store must be given once")
    return checked
