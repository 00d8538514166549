"""Entries that a tier fills: each key has a reservation of its own, since its bytes come alone or not at all."""

from __future__ import annotations

from kvoffload.cache.entries import ReservationRecord
from kvoffload.cache.state import CacheState


def reserve_each(state: CacheState, keys: list[bytes], tenant: str) -> list[ReservationRecord]:
    """Reserve entries as `CacheState.reserve` does, with a record for each key that gets one, in the order of the keys.

    Under the lock, by a thread that no signal handler interrupts: an interrupt would leave keys pending for ever.
    """
    record = state.propose(keys, tenant)
    record.promoted, record.declined = True, []
    if not record.keys:
        return []
    try:
        state.reserve(record)
        state.consistent = False
        parts = state.table.split(record)
        state.consistent = True
    except BaseException:
        state.abandoned.append(record)
        raise
    return parts
