"""The messages between a pool's owner and its members, over a Unix socket of type SOCK_SEQPACKET.

A message is one datagram, or several if it is large: a header of 16 bytes, then its payload. A member numbers its
messages; a reply has the number of what it answers. Messages of one member are executed in the order sent.

    JOIN     {"version", "fingerprint", "identity", "row_bytes", ...}       JSON both ways; see `PoolOwner._admit`
    FIND     keys                       how many leading keys are ready, u32; counts as a look-up
    STATUS   keys                       a byte a key: 0 missing, 1 ready, 2 pending
    TAKE     flags, request, keys       lease of the leading ready keys, or of each, named by the number of this
                                        message: entries. Says USE, too
    RESERVE  flags, request, keys       whether there was too little room, a code a key (`PRESENT`, `NEW`, `DECLINED`),
                                        and the entries of the new ones
    END      number, well, entries      no reply. Commits or aborts a reservation, releases a lease, or drops a request
                                        without recording its use. The keys of these entries are removed: their blocks
                                        do not fit the layout's codec
    BRING    milliseconds, keys         promotes keys from the owner's tiers, and says how many leading keys are ready
    USE      request, keys              no reply. A request loads these keys
    TOUCH    keys                       no reply. A request with these keys has ended
    OPEN     request, session           no reply. Opens a request
    CLOSE    request                    no reply. Ends it
    HINT     JSON                       JSON
    REMOVE   keys                       how many there were, u32. An empty payload: all keys
    FORGET   keys                       as REMOVE, and the owner's tiers keep theirs
    COUNTS   nothing                    JSON
    WEIGHTS  name                       no reply. The member uses these weights from now on; its keys have their tag
    CLEAN    nothing                    no reply. Nothing that the last owner granted is in use any more
    WAIT                                from the owner, each second until it answers JOIN: it allocates a region

Keys are a number (u32), the length of each (a byte), and their bytes one after the other.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np

from kvoffload.cache.entries import Status
from kvoffload.errors import LayoutError
from kvoffload.internal.checks import shown

VERSION = 2
MOST_KEY_BYTES = 64
DATAGRAM_BYTES = 48 << 10  # at most; the system's default room for a socket is 208 KiB
MOST_TEXT = 4096  # characters of identity, tenant, and reasons
MOST_MESSAGE = 8 << 20  # 125,000 keys of 64 bytes
HEADER = struct.Struct("<QBB6x")  # number, operation, whether more follows
NUMBER = struct.Struct("<I")
FOR_REQUEST = struct.Struct("<BQ")  # flags, request (0: none)
ENDING = struct.Struct("<QB")  # number, well
REQUEST = struct.Struct("<Q")
STATUSES = (Status.MISS, Status.HIT, Status.PENDING)  # by their codes in the answer to STATUS
PRESENT, NEW, DECLINED = range(3)  # codes of keys in the answer to RESERVE
ALL_OR_NOTHING, USES = 1, 2  # flags of RESERVE
PENDING, EACH, LOADS = 1, 2, 4  # of TAKE: pending keys of this member, too; every ready key, and answer for all keys;
# and if all are taken, the request loads them, as with USE
MISSING, STORING = (1 << 32) - 1, (1 << 32) - 2  # with EACH in place of an entry; STORING: this member is storing it

Grant = tuple[int, int]  # a generation of owners, as a member counts them, and the number of its message


class Operation(IntEnum):
    """See the table above; REFUSED is a reply, with the reason as text."""

    JOIN = 1
    FIND = 2
    STATUS = 3
    TAKE = 4
    RESERVE = 5
    END = 6
    BRING = 7
    USE = 8
    TOUCH = 9
    OPEN = 10
    CLOSE = 11
    HINT = 12
    REMOVE = 13
    COUNTS = 14
    CLEAN = 15
    REFUSED = 16
    WAIT = 17
    FORGET = 18
    WEIGHTS = 19


def socket_path(path: str | Path) -> str:
    """Return the absolute path; `~` is your home. Raises TypeError; ValueError: it is empty, too long, or has a NUL."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"the pool's path must be a string or a Path, got {shown(path)}")
    if not str(path) or "\0" in str(path):
        raise ValueError(f"the pool's path must name a socket, got {shown(path)}")
    absolute = os.path.abspath(os.path.expanduser(path))
    if (length := len(os.fsencode(absolute))) > 107:
        raise ValueError(
            f"the pool's path must have at most 107 bytes, as every socket's, got {length}: {shown(absolute)}"
        )
    return absolute


class MessageError(Exception):
    """A peer sent bytes that are no message."""


class OtherMemoryError(Exception):
    """A member's memory is not the region's: this owner will never take it."""


def pack_keys(keys: Sequence[bytes], salt: bytes = b"", tag_bytes: int = 0) -> bytes:
    """Pack keys, with a salt in front of each. Raises LayoutError: one has more than 64 bytes then. Its first
    `tag_bytes` are not the user's.
    """
    if salt:
        keys = [salt + key for key in keys]
    try:
        lengths = bytes(map(len, keys))
    except ValueError:  # one of more than 255
        lengths = b"\xff"
    if max(lengths, default=0) > MOST_KEY_BYTES:
        place, ours = next(at for at, key in enumerate(keys) if len(key) > MOST_KEY_BYTES), len(salt) + tag_bytes
        raise LayoutError(
            f"keys[{place}] has {len(keys[place]) - ours} bytes, and those of a shared pool have at most "
            f"{MOST_KEY_BYTES - ours}: take those of chain_keys"
        )
    return NUMBER.pack(len(keys)) + lengths + b"".join(keys)


def unpack_keys(payload: bytes, start: int = 0) -> list[bytes]:
    """Return the keys that `pack_keys` has packed. Raises MessageError."""
    (count,) = unpack(NUMBER, payload, start)
    begin = start + 4 + count
    lengths = payload[start + 4 : begin]
    each = lengths[0] if lengths else 0
    if 0 < each <= MOST_KEY_BYTES and lengths.count(each) == count and len(payload) == begin + each * count:
        keys: list[bytes] = np.frombuffer(payload, f"V{each}", count, begin).tolist()  # the usual case
        return keys
    if max(lengths, default=0) > MOST_KEY_BYTES:
        raise MessageError(f"a key has {max(lengths)} bytes")
    if len(lengths) != count or len(payload) != begin + sum(lengths):
        raise MessageError("a list of keys has another length than it says")
    keys = []
    for length in lengths:
        keys.append(payload[begin : begin + length])
        begin += length
    return keys


def unpack(form: struct.Struct, payload: bytes, start: int = 0) -> tuple[Any, ...]:
    """Read a struct at `start`. Raises MessageError: the payload is too short."""
    if len(payload) < start + form.size:
        raise MessageError("a message is cut off")
    return form.unpack_from(payload, start)


def pack_entries(entries: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(entries)}I", *entries)


def unpack_entries(payload: bytes, start: int = 0) -> list[int]:
    """Return the entries that `pack_entries` has packed. Raises MessageError."""
    if (len(payload) - start) % 4:
        raise MessageError("a list of entries is cut off")
    return list(struct.unpack_from(f"<{(len(payload) - start) // 4}I", payload, start))


def datagrams(number: int, operation: int, payload: bytes) -> list[bytes]:
    """Cut a message into datagrams."""
    step = DATAGRAM_BYTES - HEADER.size
    if len(payload) <= step:  # the usual case
        return [HEADER.pack(number, operation, False) + payload]
    begins = range(0, len(payload), step)
    return [HEADER.pack(number, operation, begin < begins[-1]) + payload[begin : begin + step] for begin in begins]


class Assembler:
    """Puts messages together. Drops one that another message cuts off, as after an interrupt of its sender."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._of: tuple[int, int] | None = None

    def take(self, datagram: bytes) -> tuple[int, int, bytes] | None:
        """Return number, operation and payload of the message that this datagram completes; None: it completes none.
        Raises MessageError.
        """
        if not HEADER.size <= len(datagram) <= DATAGRAM_BYTES:
            raise MessageError(f"a datagram of {len(datagram)} bytes is cut off, or has more than {DATAGRAM_BYTES}")
        number, operation, more = HEADER.unpack_from(datagram)
        if not more and not self._parts:  # the usual case
            return number, operation, datagram[HEADER.size :]
        if self._of != (number, operation):
            self._parts, self._of = [], (number, operation)
        self._parts.append(datagram[HEADER.size :])
        if more:
            if len(self._parts) * DATAGRAM_BYTES > MOST_MESSAGE:
                raise MessageError(f"a message has more than {MOST_MESSAGE} bytes")
            return None
        payload = b"".join(self._parts)
        self._parts, self._of = [], None
        return number, operation, payload
