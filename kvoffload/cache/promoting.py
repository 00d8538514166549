"""What tiers need of an index: a reservation for each key that is promoted, and the keys that are evicted next."""

from __future__ import annotations

from kvoffload.cache.entries import EntryTable, ReservationRecord
from kvoffload.cache.pools import most_victims
from kvoffload.cache.state import CacheState


def reserve_each(state: CacheState, keys: list[bytes], tenant: str) -> list[ReservationRecord]:
    """Reserve entries as `CacheIndex.reserve` does, with a record for each key that gets one, in the order of the keys.

    Under the lock, by a thread that no signal handler interrupts: an interrupt would leave keys pending for ever.
    """
    record = state.propose(keys, tenant, False, None, False)
    record.promoted, record.declined = True, []
    if not record.keys:
        return []
    state.publish(record)
    state.fill(record)
    state.consistent = False
    parts = _split(state.table, record)
    state.consistent = True
    return parts


def next_to_go(state: CacheState, count: int) -> list[bytes]:
    """The keys that would be evicted for so many new ones, beyond the entries that are free. Changes nothing."""
    table = state.table
    wanted = count - table.num_free
    found: list[bytes] = []
    for pool in sorted(state.pools.all, key=lambda pool: pool.priority):
        if len(found) < wanted and len(pool.policy):
            found += most_victims(pool.policy, wanted - len(found), lambda key: table.of.get(key) in table.holds)
    return found


def _split(table: EntryTable, record: ReservationRecord) -> list[ReservationRecord]:
    """Put a record for each key in the place of an open one."""
    parts = []
    for key, position, index in zip(record.keys, record.positions, record.indices, strict=True):
        part = ReservationRecord(record.pool, record.tenant, [key], [], [], record.policy)
        part.positions, part.indices, part.promoted = (position,), [index], record.promoted
        parts.append(part)
    table.reservations.update(parts)
    table.reservations.discard(record)
    table.pending.update(zip(record.keys, parts, strict=True))
    return parts
