"""What the owner of a pool does with the messages of a member: one function for each operation."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import takewhile
from typing import Any, NamedTuple

from kvoffload.cache.entries import LeaseRecord
from kvoffload.cache.record_calls import guarded, leading
from kvoffload.cache.weights import namespace_of, split_namespace
from kvoffload.internal.checks import reason
from kvoffload.internal.log import LOGGER
from kvoffload.pool import messages
from kvoffload.pool.messages import NUMBER, Operation, pack_entries, unpack, unpack_entries, unpack_keys
from kvoffload.pool.region import Member, Region, survived, tenant_digest

MOST_REQUESTS = 4096  # open ones of a member; the oldest are forgotten
_MOST_MARKED = 65_536  # entries of a member, after which marks of ended reads are removed


class Message(NamedTuple):
    """A message of a member that has joined."""

    member: Member
    number: int
    payload: bytes


def _unused(message: Message) -> Message:
    """Return the message. Raises MessageError if the member holds entries under its number: nothing would release them
    any more.
    """
    if message.number in message.member.reservations or message.number in message.member.leases:
        raise messages.MessageError(f"the number {message.number} is in use")
    return message


def find(region: Region, message: Message) -> bytes:
    return NUMBER.pack(region.records.look_up(([unpack_keys(message.payload)], None))[0])


def status(region: Region, message: Message) -> bytes:
    return bytes(map(messages.STATUSES.index, region.records.status(unpack_keys(message.payload))))


@guarded
def take(region: Region, message: Message) -> None:
    """Hold keys under the number of the message, and answer their entries.

    1. Of the leading keys that are ready; with `PENDING` keys that the member itself is storing count, too.
    2. With `EACH`: of all that are ready. The others are `STORING` or `MISSING`.

    With `LOADS` the request uses the keys if all are held. The policy is told after the member: if it raises, the next
    call repairs.
    """
    member, number, payload = _unused(message)
    flags, request = unpack(messages.FOR_REQUEST, payload)
    keys = unpack_keys(payload, messages.FOR_REQUEST.size)
    state, of, pending = region._state, region._state.table.of, region._state.table.pending
    own = set(member.reservations.values()) if pending else set()
    if flags & messages.EACH:
        ready = [key for key in keys if key in of and key not in pending]
    else:
        ready = keys[: leading(state.table, keys)]
        if pending:
            readable = {None, *own} if flags & messages.PENDING else {None}
            ready = list(takewhile(lambda key: pending.get(key) in readable, ready))
    entries = list(map(of.__getitem__, ready))
    if ready:
        state.proposed = record = LeaseRecord(ready, entries, ())
        state.begin(record)
        member.leases[number] = record
        region.memory.reading(entries, member.number)
        member.marked.update(entries)
    if flags & messages.EACH:
        found = dict(zip(ready, entries, strict=True))
        missing, storing = messages.MISSING, messages.STORING
        entries = [found.get(key, storing if pending.get(key) in own else missing) for key in keys]
    member.release_promotions(0.0, ended=True)  # it has taken what they brought
    member.answer(number, Operation.TAKE, pack_entries(entries))
    if flags & messages.LOADS and len(entries) == len(keys):
        with survived():
            state.use(keys, member.opened(request))


@guarded
def reserve(region: Region, message: Message) -> None:
    """Reserve entries for missing keys under the number. Raises CapacityError with `ALL_OR_NOTHING`. The policy is told
    after the member: the entries are the member's even if that raises, and the next call repairs.
    """
    member, number, payload = _unused(message)
    flags, request = unpack(messages.FOR_REQUEST, payload)
    keys = unpack_keys(payload, messages.FOR_REQUEST.size)
    if len(frozenset(keys)) < len(keys):
        raise messages.MessageError("a key is to be reserved twice")
    state, opened = region._state, member.opened(request)
    tenant = member.tenant if opened is None else ""
    all_or_nothing, uses = bool(flags & messages.ALL_OR_NOTHING), bool(flags & messages.USES)
    region.writer = member.number
    record = state.propose(keys, tenant, all_or_nothing, opened, uses)
    state.publish(record)
    if record.keys:
        member.reservations[number] = record
    if len(record.keys) == len(keys):
        codes = bytes([messages.NEW]) * len(keys)
    else:
        code_of = dict.fromkeys(record.keys, messages.NEW) | dict.fromkeys(record.declined, messages.DECLINED)
        codes = bytes(code_of.get(key, messages.PRESENT) for key in keys)
    member.answer(number, Operation.RESERVE, bytes([record.short]) + codes + pack_entries(record.indices))
    region.memory.named(record.keys, record.indices, tenant_digest(record.tenant))
    with survived():
        state.fill(record)
        if not record.keys:
            state.settle(record, well=True)


@guarded
def end(region: Region, message: Message) -> None:
    """Commit or abort a reservation, release a lease, or drop a request. A number under which the member holds nothing
    is ignored.
    """
    member, _, payload = message
    held, well = unpack(messages.ENDING, payload)
    unfit = frozenset(unpack_entries(payload, messages.ENDING.size))
    state, record, lease = region._state, member.reservations.get(held), member.leases.get(held)
    member.requests.pop(held, None)  # as one that is dropped
    if unfit and (holding := record or lease) is not None:
        state.decline_unfit(holding, unfit)
        state.consistent = True
    if record is not None:
        state.settle(record, well=bool(well))
        del member.reservations[held]
    if lease is not None:
        state.end(lease)
        del member.leases[held]
        if not member.leases or len(member.marked) > _MOST_MARKED:
            region.unmark(member)


def bring(region: Region, message: Message) -> None:
    member, number, payload = message
    (wait,) = unpack(NUMBER, payload)
    keys = list(dict.fromkeys(unpack_keys(payload, NUMBER.size)))
    member.release_promotions(0.0, ended=True)
    promotion = region.index.promote(keys, deadline=max(0.001, wait / 1000), tenant=member.tenant, counted=False)
    member.promotions.append(promotion)
    promotion.add_done_callback(lambda ended: member.answer_later(number, Operation.BRING, NUMBER.pack(ended.ready)))


def use(region: Region, message: Message) -> None:
    (request,) = unpack(messages.REQUEST, message.payload)
    keys = unpack_keys(message.payload, messages.REQUEST.size)
    region.records.use((keys, message.member.opened(request)))


def touch(region: Region, message: Message) -> None:
    region.index.touch(unpack_keys(message.payload))


def open_request(region: Region, message: Message) -> None:
    (request,) = unpack(messages.REQUEST, message.payload)
    named, requests = message.payload[messages.REQUEST.size :], message.member.requests
    session = named[1:].decode("utf-8", "surrogatepass") if named else None
    while len(requests) >= MOST_REQUESTS:
        requests.pop(next(iter(requests)))
    requests[request] = region.index.open_request(tenant=message.member.tenant, session=session)


def close_request(_: Region, message: Message) -> None:
    (request,) = unpack(messages.REQUEST, message.payload)
    opened = message.member.requests.pop(request, None)
    if opened is not None:
        opened.end()


def hint(region: Region, message: Message) -> bytes:
    asked: Any = json.loads(message.payload)
    given = {name: asked.get(name) for name in ("ttl", "due")}
    tenant, session = message.member.tenant, str(asked.get("session"))
    return json.dumps(region.index.hint(asked.get("action"), session=session, tenant=tenant, **given)).encode()


def remove(region: Region, message: Message) -> bytes | None:
    """Remove keys, or all, and answer how many there were. Where there are tiers the region's thread does it, since
    they may take long; if too many removals wait for it, the answer is that of a tier that fails.
    """
    index, (member, number, payload) = region.index, message
    keys = unpack_keys(payload) if payload else None

    def removed() -> bytes:
        try:
            return NUMBER.pack(index.clear() if keys is None else index.remove(keys))
        except Exception as error:  # noqa: BLE001  # a tier's
            LOGGER.warning("keys of a shared pool may still be in a tier: %s", reason(error))
            return b""

    if not region.has_tiers:
        return removed()
    waits = region.removals.add(lambda: member.answer_later(number, Operation.REMOVE, removed()))
    return None if waits else b""


def forget(region: Region, message: Message) -> bytes:
    index, payload = region.index, message.payload
    return NUMBER.pack(index.remove(unpack_keys(payload), below=False) if payload else index.clear(below=False))


def counts(region: Region, _: Message) -> bytes:
    return json.dumps(region.counts()).encode()


def weights(region: Region, message: Message) -> None:
    member, _, name = message
    member.tenant = namespace_of(split_namespace(member.tenant)[0], name.decode("utf-8", "surrogatepass"))
    region.keep_weights()


def clean(region: Region, message: Message) -> None:
    region.end_quarantine(message.member.number)


OPERATIONS: dict[int, Callable[[Region, Message], bytes | None]] = {
    Operation.FIND: find, Operation.STATUS: status, Operation.TAKE: take, Operation.RESERVE: reserve,
    Operation.END: end, Operation.BRING: bring, Operation.USE: use, Operation.TOUCH: touch,
    Operation.OPEN: open_request, Operation.CLOSE: close_request, Operation.HINT: hint, Operation.REMOVE: remove,
    Operation.COUNTS: counts, Operation.CLEAN: clean, Operation.FORGET: forget,
    Operation.WEIGHTS: weights,
}  # fmt: skip
