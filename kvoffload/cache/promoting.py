"""What tiers need of an index: a reservation for each key that is promoted, and the keys that are evicted next."""

from __future__ import annotations

from kvoffload.cache.entries import EntryTable, LeaseRecord, ReservationRecord, Status
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


def hold_ready(state: CacheState, keys: list[bytes], hold: bool) -> tuple[list[Status | None], LeaseRecord | None]:
    """Of each key its status, or None if it is pending and no call of the cache is needed to make it ready, or missing.

    With `hold`, those that are ready are held by the lease, so that nothing evicts them; None: there is none.
    """
    of, pending = state.table.of, state.table.pending
    found: list[Status | None] = []
    for key in keys:
        record = pending.get(key)
        filled = record is not None and (record.promoted or bool(record.jobs))
        found.append(None if filled else Status.PENDING if record else Status.HIT if key in of else Status.MISS)
    ready = [key for key, status in zip(keys, found, strict=True) if status is Status.HIT]
    if not (ready and hold):
        return found, None
    lease = state.propose_lease(ready, False)
    state.begin(lease)
    return found, lease


def commit_and_hold(state: CacheState, record: ReservationRecord, hold: bool) -> tuple[bool, LeaseRecord | None]:
    """Make the key of a record from `reserve_each` a hit, unless it was removed meanwhile, and hold it, as above."""
    mine = bool(state.table.still_mine(record))
    state.settle(record, well=True)
    if not (mine and hold):
        return mine, None
    lease = state.propose_lease(record.keys, False)
    state.begin(lease)
    return mine, lease


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
