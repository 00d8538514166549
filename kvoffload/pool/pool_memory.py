"""PoolMemory: the slots of a region, and headers that say what they hold, in one memfd.

    byte 0              `capacity` rows of `row_bytes`: row `e` is entry `e`, one slot for each group
    then                the superblock, one page: what the rows mean
    then                the headers, 128 bytes an entry

Only the owner writes superblock and headers. They are there for the owner's death: a new owner that gets the memfd from
a member reads from them which keys are ready, which entries are being written and by whom, and which are being read.
The order of writes makes every prefix of them safe, and a process that is killed leaves a prefix:

- an entry's header says RESERVED, with a check that fits no key, before anybody may write its row;
- then it gets the key and its check, and READY after its row was filled.

**Who may still touch the rows.** Each member holds a lock on one byte of the memfd, the byte of its number, from before
its first transfer until after its last one. The lock belongs to an open file (F_OFD_SETLK), so the kernel ends it when
the process and all children that inherited the file are gone: the GPU's work for them has ended by then
(`tests/chaos/support/late_writes.py` measures it). Until then, entries that a dead member was writing stay in
quarantine.

**Who may grant them.** An owner holds its own byte, alone, for as long as it or its tiers may touch the rows. The next
owner reads the headers once it has that lock, and not before.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
import weakref
import zlib
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvoffload.device.shared_slots import SEALS, allocate_memory
from kvoffload.internal.teardown import close_last, opened, received
from kvoffload.internal.types import UInt8Array
from kvoffload.pool.messages import DATAGRAM_BYTES, MOST_KEY_BYTES

PAGE = 4096
MAGIC = b"\x89KVPOOL3"
OWNER = 63  # the owner's number, and its lock
MEMBERS = 63  # numbers 0 to 62
FREE, RESERVED, READY = range(3)
_OWNED = set[int]()  # descriptors of this process that hold an owner's lock

HEADER = struct.Struct(f"<IIQQII8s{MOST_KEY_BYTES}s24x")
# check: of what follows `readers`; state; readers: a bit for each member that may be reading; sequence, of the
# reservation; writer; bytes of the key; tenant; key
_CHECKED = slice(16, 104)
_RESERVED = struct.Struct("<IIQQI")  # check to writer
_NAMED = struct.Struct(f"<I8s{MOST_KEY_BYTES}s")  # the rest
_CHECK = struct.Struct("<I")
_SUPERBLOCK = struct.Struct("<8sQQ16s16s")  # magic, capacity, row bytes, fingerprint, identity
_LOCK = struct.Struct("hhqqi4x")  # struct flock on 64-bit Linux: type, whence, start, length, process


class RowLayout(Protocol):
    """What a pool needs of a layout: a `KVLayout` has it.

    Attributes:
        fingerprint: 16 bytes, the same for the same meaning of a row.
        slot_bytes: a multiple of 4096.
        num_groups: slots of a row.
    """

    @property
    def fingerprint(self) -> bytes: ...

    @property
    def slot_bytes(self) -> int: ...

    @property
    def num_groups(self) -> int: ...


class Meaning(NamedTuple):
    """What the rows of a region mean.

    Attributes:
        capacity: entries.
        row_bytes: bytes of an entry, of all groups; a multiple of 4096.
        fingerprint: the layout's, 16 bytes.
        identity: digest of the identity that members give, 16 bytes.
    """

    capacity: int
    row_bytes: int
    fingerprint: bytes
    identity: bytes

    @property
    def rows_bytes(self) -> int:
        return self.capacity * self.row_bytes

    @property
    def name(self) -> str:
        """A text, the same for the same layout and identity."""
        return blake2b(self.fingerprint + self.identity + b"%d" % self.row_bytes, digest_size=8).hexdigest()

    @property
    def nbytes(self) -> int:
        return self.rows_bytes + PAGE + -(-self.capacity * HEADER.size // PAGE) * PAGE

    def pack(self) -> bytes:
        return _SUPERBLOCK.pack(MAGIC, *self)


class FoundIndex(NamedTuple):
    """What a new owner finds in the headers.

    Attributes:
        keys, entries, sequences, tenants: of ready keys, the oldest sequence first; `tenants` are digests.
        users: of entries that may be in use, with a key or without: a bit for the number of each member that may.
    """

    keys: list[bytes]
    entries: npt.NDArray[np.int64]
    sequences: npt.NDArray[np.int64]
    tenants: list[bytes]
    users: dict[int, int]


class PoolMemory:
    """A memfd of a region, mapped here.

    Args:
        files: has the descriptor of the memfd. The list belongs to this object from now on, also if this raises.
        meaning: what it must hold.
        headers: map the headers, too: the owner does.

    Attributes:
        rows: uint8, (capacity, row_bytes).
        headers: uint8, (capacity * 128,): a `HEADER` for each entry; empty unless mapped.
    """

    def __init__(self, files: list[int], meaning: Meaning, *, headers: bool) -> None:
        self.meaning = meaning
        self._files = files  # `lock` adds that of an open file of our own, which holds the lock
        try:
            mapped = mmap.mmap(files[0], meaning.nbytes if headers else meaning.rows_bytes)
            weakref.finalize(mapped, close_files, self._files).atexit = False
        except BaseException:
            close_files(self._files)
            raise
        begin, everything = meaning.rows_bytes, np.frombuffer(mapped, np.uint8)
        self.rows: UInt8Array = everything[:begin].reshape(meaning.capacity, meaning.row_bytes)
        self.headers = everything[begin + PAGE :][: meaning.capacity * HEADER.size]
        self._bytes = self.headers.data

    @classmethod
    def create(cls, meaning: Meaning) -> PoolMemory:
        """Allocate the memory of a new region. Raises CapacityError, CapabilityError."""
        files = list[int]()
        allocate_memory(files, "kvoffload-pool", meaning.nbytes)
        memory = cls(files, meaning, headers=True)
        os.pwrite(memory.descriptor, meaning.pack(), meaning.rows_bytes)
        return memory

    @classmethod
    def adopt(cls, descriptor: int, meaning: Meaning) -> PoolMemory:
        """Map the memory of an owner that has ended. `descriptor` is a member's, and stays that one's. Raises
        ValueError: it is no such memory.
        """
        packed = meaning.pack()
        try:
            sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS == SEALS
            fits = sealed and os.fstat(descriptor).st_size == meaning.nbytes
        except OSError:
            fits = False
        if not fits or os.pread(descriptor, len(packed), meaning.rows_bytes) != packed:
            raise ValueError(
                f"a member's memory is no region of {meaning.nbytes} bytes with the superblock that it says"
            )
        return cls([os.dup(descriptor)], meaning, headers=True)

    @property
    def descriptor(self) -> int:
        return self._files[0] if self._files else -1

    # locks --------------------------------------------------------------------------------------------------------

    def lock(self, number: int) -> None:
        """Hold the lock of this number until `close`. Several processes may hold a member's: those of one engine.

        Raises BlockingIOError: the number is `OWNER`, and another owner has the memory.
        """
        if len(self._files) < 2:
            opened(self._files, os.open, f"/proc/self/fd/{self.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        kind = fcntl.F_RDLCK
        if number == OWNER:
            kind = fcntl.F_WRLCK
            _OWNED.add(self._files[1])
        fcntl.fcntl(self._files[1], fcntl.F_OFD_SETLK, _LOCK.pack(kind, os.SEEK_SET, number, 1, 0))

    def locked(self, number: int) -> bool:
        """Whether any other open file holds the lock of this number."""
        asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0)
        answer = fcntl.fcntl(self.descriptor, fcntl.F_OFD_GETLK, asked)
        return bool(_LOCK.unpack(answer)[0] != fcntl.F_UNLCK)

    # the owner's headers ------------------------------------------------------------------------------------------

    def reserved(self, entries: Sequence[int], sequence: int, writer: int) -> None:
        """Write headers of entries that are about to be written."""
        pack, headers = _RESERVED.pack_into, self._bytes
        for entry in entries:
            pack(headers, HEADER.size * entry, 0, RESERVED, 0, sequence, writer)

    def named(self, keys: Sequence[bytes], entries: Sequence[int], tenant: bytes) -> None:
        """Write keys into the headers of entries that were reserved for them."""
        headers = self._bytes
        for key, entry in zip(keys, entries, strict=True):
            begin = HEADER.size * entry
            _NAMED.pack_into(headers, begin + _RESERVED.size, len(key), tenant, key)
            _CHECK.pack_into(headers, begin, zlib.crc32(headers[begin + 16 : begin + 104]))

    def ready(self, entries: Iterable[int]) -> None:
        """Mark entries that have the bytes of their keys by now."""
        states = self._bytes.cast("I")
        for entry in entries:
            states[32 * entry + 1] = READY

    def gone(self, entries: Iterable[int]) -> None:
        """Mark entries that have no keys any more as free. Those that are being written are so still."""
        states = self._bytes.cast("I")
        for entry in entries:
            if states[32 * entry + 1] == READY:
                states[32 * entry + 1] = FREE

    def reading(self, entries: Iterable[int], member: int) -> None:
        """Mark entries that the member may read from now on."""
        words, bit = self._bytes.cast("Q"), 1 << member
        for entry in entries:
            words[16 * entry + 1] |= bit

    def read(self, entries: Iterable[int], member: int) -> None:
        """Take the member's mark from entries that it does not read any more."""
        words, others = self._bytes.cast("Q"), ~(1 << member)
        for entry in entries:
            words[16 * entry + 1] &= others

    def found(self) -> FoundIndex:
        """Read what a dead owner has left. Headers that are wrong count as free."""
        ready, users = list[tuple[int, int, bytes, bytes]](), dict[int, int]()
        for entry, fields in enumerate(HEADER.iter_unpack(self._bytes)):
            check, state, readers, sequence, writer, length, tenant, key = fields
            if used := readers | (state == RESERVED) << (writer & 63):
                users[entry] = used
            checked = self._bytes[HEADER.size * entry :][_CHECKED]
            if state == READY and sequence < 1 << 62 and length <= MOST_KEY_BYTES and check == zlib.crc32(checked):
                ready.append((sequence, entry, key[:length], tenant))
        oldest: dict[bytes, tuple[int, int, bytes]] = {}
        for sequence, entry, key, tenant in sorted(ready):
            oldest.setdefault(key, (sequence, entry, tenant))
        sequences, entries = (np.array([each[place] for each in oldest.values()], np.int64) for place in (0, 1))
        return FoundIndex(list(oldest), entries, sequences, [tenant for _, _, tenant in oldest.values()], users)

    def close(self) -> None:
        """Give up lock, descriptor and arrays. The rows stay mapped while another array over them lives. Idempotent.

        Memory that is forgotten gives them up once no array over it is left, an engine's either.
        """
        if len(self._files) > 1:  # a forked child has it, too, and may go on for long
            fcntl.fcntl(self._files[1], fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, MEMBERS + 1, 0))
        self.rows, self.headers = np.empty((0, 0), np.uint8), np.empty(0, np.uint8)
        self._bytes = memoryview(b"")
        close_files(self._files)


def close_files(files: list[int]) -> None:
    """Close descriptors, the last one first, and take each out of the list."""
    _OWNED.difference_update(files)
    close_last(files, len(files))


def receive(connection: socket.socket, files: list[int] | None) -> bytes:
    """Receive a datagram. A descriptor that comes along is put into `files`, unless that is None or has one already."""
    if files is None:
        return connection.recv(DATAGRAM_BYTES + 1)
    datagram = received(files, connection, DATAGRAM_BYTES + 1)
    close_last(files, len(files) - 1)
    return datagram


def _leave_locks_to_parent() -> None:
    """Close locks that this process, a forked child, has inherited from an owner: the next owner must not wait for it.
    Each descriptor stays taken until it is closed here.
    """
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    for number in list(_OWNED):
        os.dup2(null, number, inheritable=False)
    os.close(null)


os.register_at_fork(after_in_child=_leave_locks_to_parent)
