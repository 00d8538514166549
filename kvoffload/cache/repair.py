"""Repair of an entry table after an exception: finish published changes, compute derived state again, check it."""

from __future__ import annotations

from collections import Counter

from kvoffload.cache.entries import EntryTable, Record, Stage
from kvoffload.cache.pools import Pools


def repair(table: EntryTable, pools: Pools, in_order: set[Record]) -> dict[Record, None]:
    """Make derived state, and the policies, agree with the truth. May be interrupted and called again.

    Args:
        in_order: records that are settled in the order of their transfers.

    Returns:
        The other records that wait for transfers.
    """
    rebuild(table)
    waiting: list[Record] = [record for record in table.reservations if record.stage is not Stage.OPEN]
    waiting += [lease for lease in table.leases if lease.released]
    mine: list[list[bytes]] = [[] for _ in pools.all]
    for index, key in enumerate(table.keys):
        if key is not None:
            mine[table.pool_of[index]].append(key)
    for pool, keys in zip(pools.all, mine, strict=True):
        pool.restore(keys)
    return {record: None for record in waiting if record not in in_order}


def rebuild(table: EntryTable) -> None:
    """Finish records whose stage says that they are settled, then compute derived state from the truth.

    A record was left in one of these states:

    1. OPEN, in `reservations`: published, perhaps without all of its keys in `of`. It stays pending with the keys that
       `of` maps to its entries; its call or its handle, which have let go of it, will abort it.
    2. SETTLING: the same, with transfers; it is settled when these have ended.
    3. COMMITTED: the bytes are there. It only has to leave `reservations`; then its keys are hits.
    4. ABORTED: its keys leave `of`, except keys that a later store has put into other entries. The record stays in
       `reservations` while transfers may write its entries.
    5. A released lease: it leaves `leases` unless transfers still read its entries.

    Everything else is computed from `of`, `pool_of`, `reservations` and `leases`, so it may be done twice.
    """
    of = table.of
    for record in list(table.reservations):  # 3 and 4; the keys go before the record, else they would be hits
        if record.stage is Stage.ABORTED:
            for key, index in zip(record.keys, record.indices, strict=True):
                if of.get(key) == index:
                    del of[key]
        if record.stage is Stage.COMMITTED or (record.stage is Stage.ABORTED and record.transfers_ended):
            table.reservations.discard(record)
    for lease in list(table.leases):  # 5
        if lease.released and lease.transfers_ended:
            table.leases.discard(lease)
    table.keys = [None] * len(table.pool_of)  # one for each entry ever used: free and doomed ones keep None
    for key, index in of.items():
        table.keys[index] = key
    # 1 and 2: a key is pending if `of` gives it the record's entry. An aborted record has no keys any more, but still
    # holds its entries while transfers may write them: so it counts among the holders.
    unsettled = [record for record in table.reservations if record.stage is not Stage.ABORTED]
    table.pending = {key: record for record in unsettled for key in table.still_mine(record)}
    table.writable = {index for record in unsettled if record.stage is Stage.OPEN for index in record.indices}
    table.holds = dict(_holders(table))
    keyless = [index for index, key in enumerate(table.keys) if key is None]  # free at once, or when its holders go
    table.doomed = {index for index in keyless if index in table.holds}
    table.free = [index for index in reversed(keyless) if index not in table.holds]


def check(table: EntryTable) -> None:
    """Raise AssertionError unless derived state agrees with the truth."""
    used = [*table.of.values(), *table.doomed]
    assert sorted(used + table.free) == list(range(len(table.keys))), "every entry is used, free or never used"
    assert len(table.keys) <= table.capacity, "no more entries than capacity"
    assert len(table.pool_of) == len(table.keys), "every used entry has a pool"
    assert all(table.keys[index] is key for key, index in table.of.items()), "entries know their keys"
    assert len(table.keys) - table.keys.count(None) == len(table.of), "no entry has a key that is gone"
    assert all(count > 0 for count in table.holds.values()), "holders are counted"
    assert table.doomed <= table.holds.keys(), "an entry without a key and a holder is free"
    assert table.holds == _holders(table), "entries are held by reservations and leases alone"
    assert all(record.stage in (Stage.OPEN, Stage.SETTLING, Stage.ABORTED) for record in table.reservations)
    unsettled = [record for record in table.reservations if record.stage is not Stage.ABORTED]
    mine = [(key, record) for record in unsettled for key in table.still_mine(record)]
    assert dict(mine) == table.pending, "pending keys are those of unsettled reservations"
    assert len(mine) == len(table.pending), "no key is in two reservations"
    assert all(table.still_mine(record) == [] for record in table.reservations if record.stage is Stage.ABORTED)
    opened = {index for record in unsettled if record.stage is Stage.OPEN for index in record.indices}
    assert table.writable == opened, "the writable entries are those of open reservations"


def _holders(table: EntryTable) -> Counter[int]:
    holders: Counter[int] = Counter()
    for reservation in table.reservations:
        holders.update(reservation.indices)
    for lease in table.leases:
        holders.update(set(lease.indices))
    return holders
