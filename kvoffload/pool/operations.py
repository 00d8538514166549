"""What the owner of a pool does with the messages of a member: one function for each operation."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from kvoffload.cache.entries import ReservationRecord
from kvoffload.errors import KVOffloadError
from kvoffload.pool.messages import (
    DECLINED,
    EACH,
    ENDING,
    FOR_REQUEST,
    LOADS,
    NEW,
    NUMBER,
    PENDING,
    PRESENT,
    REQUEST,
    MessageError,
    Operation,
    pack_entries,
    unpack_entries,
    unpack_keys,
)
from kvoffload.pool.region import Holdings, Region

MOST_TEXT = 4096  # characters of identity, tenant, and reasons


class Message(NamedTuple):
    """A message of a member that has joined.

    Attributes:
        reply: sends the answer, where work is left that the member need not wait for. Then return None.
        answer: sends operation and payload later, from any thread.
    """

    member: Holdings
    region: Region
    payload: bytes
    number: int
    reply: Callable[[bytes], None]
    answer: Callable[[int, bytes], None]


def find(message: Message) -> bytes:
    return NUMBER.pack(message.region.look_up(unpack_keys(message.payload)))


def status(message: Message) -> bytes:
    return message.region.status(unpack_keys(message.payload))


def take(message: Message) -> bytes | None:
    flags, request = _unpacked(FOR_REQUEST, message.payload)
    keys = unpack_keys(message.payload, FOR_REQUEST.size)
    if flags & EACH:
        return pack_entries(message.region.take_each((message.member, message.number, keys)))
    entries = message.region.take((message.member, message.number, keys, bool(flags & PENDING)))
    message.member.release_promotions(ended=True)  # it has taken what they brought
    message.reply(pack_entries(entries))
    if flags & LOADS and len(entries) == len(keys):
        message.region.use(message.member, request, keys)
    return None


def reserve(message: Message) -> None:
    flags, request = _unpacked(FOR_REQUEST, message.payload)
    keys = unpack_keys(message.payload, FOR_REQUEST.size)
    if len(frozenset(keys)) < len(keys):
        raise MessageError("a key is to be reserved twice")

    def granted(record: ReservationRecord) -> None:
        if len(record.keys) == len(keys):
            codes = bytes([NEW]) * len(keys)
        else:
            new, declined = set(record.keys), set(record.declined)
            codes = bytes(NEW if key in new else DECLINED if key in declined else PRESENT for key in keys)
        message.reply(bytes([record.short]) + codes + pack_entries(record.indices))

    message.region.reserve((message.member, message.number, keys, granted, flags, request))


def end(message: Message) -> None:
    held, well = _unpacked(ENDING, message.payload)
    unfit = unpack_entries(message.payload, ENDING.size)
    message.region.end(message.member, held, well=bool(well), unfit=unfit)


def bring(message: Message) -> None:
    (milliseconds,) = _unpacked(NUMBER, message.payload)
    keys = list(dict.fromkeys(unpack_keys(message.payload, NUMBER.size)))
    message.member.release_promotions(ended=True)
    options = {"deadline": max(0.001, milliseconds / 1000), "tenant": message.member.tenant}
    promotion = message.region.index.promote(keys, counted=False, **options)
    message.member.promotions.append(promotion)
    promotion.add_done_callback(lambda ended: message.answer(Operation.BRING, NUMBER.pack(ended.ready)))


def use(message: Message) -> None:
    (request,) = _unpacked(REQUEST, message.payload)
    message.region.use(message.member, request, unpack_keys(message.payload, REQUEST.size))


def touch(message: Message) -> None:
    message.region.index.touch(unpack_keys(message.payload))


def open_request(message: Message) -> None:
    (request,) = _unpacked(REQUEST, message.payload)
    named = message.payload[REQUEST.size :]
    session = named[1:].decode("utf-8", "surrogatepass") if named else None
    message.region.open_request(message.member, request, session)


def close_request(message: Message) -> None:
    request, _ = _unpacked(ENDING, message.payload)
    message.region.close_request(message.member, request)


def hint(message: Message) -> bytes:
    asked: Any = unpack_json(message.payload)
    given = {name: asked.get(name) for name in ("ttl", "due")}
    tenant, session = message.member.tenant, str(asked.get("session"))
    return json.dumps(message.region.index.hint(asked.get("action"), session=session, tenant=tenant, **given)).encode()


def remove(message: Message) -> bytes | None:
    """Where there are tiers a thread does it, since they may take long."""
    index, keys = message.region.index, unpack_keys(message.payload) if message.payload else None

    def count() -> bytes:
        return NUMBER.pack(index.clear() if keys is None else index.remove(keys))

    def answer() -> None:
        try:
            message.answer(Operation.REMOVE, count())
        except KVOffloadError as error:
            message.answer(Operation.REFUSED, str(error).encode()[:MOST_TEXT])

    if not message.region.has_tiers:
        return count()
    threading.Thread(target=answer, name="kvoffload-pool-remove", daemon=True).start()
    return None


def counts(message: Message) -> bytes:
    return json.dumps(message.region.counts()).encode()


def clean(message: Message) -> None:
    message.region.end_inherited(message.member.number)


OPERATIONS: dict[int, Callable[[Message], bytes | None]] = {
    Operation.FIND: find,
    Operation.STATUS: status,
    Operation.TAKE: take,
    Operation.RESERVE: reserve,
    Operation.END: end,
    Operation.BRING: bring,
    Operation.USE: use,
    Operation.TOUCH: touch,
    Operation.OPEN: open_request,
    Operation.CLOSE: close_request,
    Operation.HINT: hint,
    Operation.REMOVE: remove,
    Operation.COUNTS: counts,
    Operation.CLEAN: clean,
}


def unpack_json(payload: bytes) -> dict[str, Any]:
    """Raises MessageError."""
    try:
        found = json.loads(payload)
    except ValueError as error:
        raise MessageError(f"no JSON: {error}") from None
    if not isinstance(found, dict):
        raise MessageError("no JSON object")
    return found


def _unpacked(form: struct.Struct, payload: bytes) -> tuple[Any, ...]:
    if len(payload) < form.size:
        raise MessageError("a message is cut off")
    return form.unpack_from(payload)
