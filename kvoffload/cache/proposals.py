"""What a reservation or a lease would do, decided before anything changes."""

from __future__ import annotations

from itertools import filterfalse
from typing import TYPE_CHECKING

from kvoffload.cache.entries import EntryTable, LeaseRecord, ReservationRecord
from kvoffload.cache.pools import Pool
from kvoffload.cache.requests import RequestRecord
from kvoffload.cache.space import find_space, shortage
from kvoffload.errors import CapacityError, MissingKeyError

if TYPE_CHECKING:
    from kvoffload.cache.state import CacheState


def propose(
    state: CacheState,
    keys: list[bytes],
    tenant: str,
    all_or_nothing: bool = False,
    request: RequestRecord | None = None,
) -> ReservationRecord:
    """A record of what storing these keys, of an open request or of one of their own, would do. Changes nothing.

    Raises:
        CapacityError: `all_or_nothing`, and a missing key would be declined.
        ValueError: no tenant of that name, or not the request's; or the policy names keys that must not be evicted.
        ClosedError: the request has ended.
    """
    table, pools, reuse = state.table, state.pools, state.filter
    if request is not None:
        tenant = request.tenant_of_call(tenant)
    pool = pools.by_tenant.get(tenant) or pools.of(tenant)
    resident = table.of.__contains__
    present = list(filter(resident, keys))
    missing = list(filterfalse(resident, keys)) if present else keys
    new = reuse.passing(missing) if reuse.store_after else missing
    if pool.max_blocks is not None:
        new = pool.within_quota(new, present, state.pool_number)
    victims: list[tuple[Pool, list[bytes]]] = []
    free, short = table.num_free, False
    if not table.capacity:
        new, short = [], bool(missing)
    elif new and (len(new) > free or pool.selective):
        admitted, victims, short = find_space(table, pools, pool, new, present, request)
        new = new[:admitted]
    if all_or_nothing and len(new) < len(missing):
        raise CapacityError(shortage(table, len(missing), len(new), short))
    if len(new) == len(keys):
        record = ReservationRecord(pool, tenant, new, range(len(keys)), victims, [], present, request)
        return _allocated(table, record)
    chosen = set(new)
    positions = [place for place, key in enumerate(keys) if key in chosen]
    declined = [key for key in missing if key not in chosen] if len(new) < len(missing) else []
    record = ReservationRecord(pool, tenant, new, positions, victims, declined, present, request)
    record.short = short
    return _allocated(table, record)


def _allocated(table: EntryTable, record: ReservationRecord) -> ReservationRecord:
    if record.keys:
        table.allocate(record)
    return record


def propose_lease(table: EntryTable, keys: list[bytes], pending: bool) -> LeaseRecord:
    """A record for reading the entries of these keys. Changes nothing.

    Raises:
        MissingKeyError: a key is absent or not ready.
    """
    indices = list(map(table.of.get, keys))
    if None in indices or not table.pending.keys().isdisjoint(keys):
        awaited = [_check_readable(table, position, key, pending) for position, key in enumerate(keys)]
        sources = tuple(dict.fromkeys(record for record in awaited if record is not None))
    else:
        sources = ()
    return LeaseRecord(keys, indices, sources)  # type: ignore[arg-type]  # every key has an entry


def _check_readable(table: EntryTable, position: int, key: bytes, pending: bool) -> ReservationRecord | None:
    """None if the key is ready, or the reservation to wait for."""
    record, name = table.pending.get(key), f"keys[{position}] ({key.hex()[:16]})"
    if key not in table.of:
        raise MissingKeyError(f"{name} is not in the cache; load only what lookup() found")
    if record is not None and not pending:
        raise MissingKeyError(f"{name} is still being stored; load only what lookup() found")
    if record is not None and not record.jobs:
        raise MissingKeyError(f"{name} is reserved, and no transfer that fills it is known yet")
    return record
