"""Member: one file of a set, with what its headers hold, and which older headers a crash could bring back.

A crash may lose any of the writes since the last sync, each sector by itself. It may leave

1. a header without its payload, or with parts of it: the digests differ, a miss;
2. a payload without its header: the header is the older one, whose digest differs, or none, a miss;
3. parts of a header that crosses sectors: its checksum differs, a miss;
4. an older header with its older payload, whole: a hit with the right bytes, unless its key was removed since.

So `remove` has to know of headers that the file may hold after a crash. There are three kinds:

- in the file as this process sees it: `hashes` has the key of every slot, also of those that an index has evicted and
  nothing has overwritten yet. They are overwritten with zeros;
- overwritten since the last sync: `_older` has their keys. The file is synced. If there are many, or the process has
  just started and cannot know, every removal syncs;
- in a slot whose header could not be written, or read at the start, `_uncertain`: the next sync writes zeros. If the
  slot is used before that, every removal syncs.

The process before may have been killed after a sync that failed. Then the page cache shows writes that the disk lost,
as if they were durable. So the first removal of a process writes the header table again before it syncs, `_inherited`.

A header is written to the file when no record is being written, and at the latest with 512 others: an ordinary write
waits for all direct I/O on the file, and holds it up meanwhile. Until then this process has it in `_waiting`; a kill
leaves what the slot's older header says, whose payload digest differs. Every sync, which forgets `_older`, writes those
that wait before it does so.

Where a sync fails, or zeros cannot be written, the kernel may have dropped any write, and says so once. Then another
epoch begins, which makes every header so far invalid as soon as a superblock can be written; until then syncs fail.
The upper half of an epoch counts. The lower half is random, because an epoch that was begun and could not be recorded
must not begin again after a restart: headers in the file have it.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kvoffload.internal.types import Int64Array
from kvoffload.tiers.checksums import DIGEST_BYTES, Checksum
from kvoffload.tiers.files import PAGE, Buffer, OpenFile, in_runs
from kvoffload.tiers.format import (
    HEADER_BYTES,
    SUPERBLOCK_BYTES,
    SUPERBLOCK_OFFSETS,
    TABLE_OFFSET,
    Headers,
    Pairs,
    Superblock,
    pack_header,
    parse_headers,
    unpack_superblock,
)

_MOST_OLDER = 16_384  # keys whose overwritten headers are remembered; beyond, every removal syncs
_HEADERS_AT_ONCE = 32_768  # 6 MiB
_MOST_WAITING = 512  # headers of records that are not in the file yet
_EPOCH_COUNT = 1 << 32  # the upper half of an epoch counts
_NO_HEADER = memoryview(bytes(HEADER_BYTES))


class Peek(NamedTuple):
    """A valid header as the file had it at one moment, and the epoch of that moment."""

    header: bytes
    epoch: int
    key: bytes
    digest: bytes


class NewRecord(NamedTuple):
    """A record whose payload has been written; `tenant` and `digest` are digests, `position` its place in the put."""

    slot: int
    key: bytes
    tenant: bytes
    digest: bytes
    position: int


class Member:
    """One file of a set. Usable from several threads; slots are numbered from 0 in each member.

    Attributes:
        hashes: of the key in each slot's header as the file has it, or will have it, 0 for none; see `hash_of`.
        digests: of the payload that belongs to each header.
    """

    def __init__(self, file: OpenFile, superblock: Superblock, checksum: Checksum) -> None:
        self.file = file
        self.superblock = superblock
        self.checksum = checksum
        self.hashes: Int64Array = np.zeros(superblock.slots, dtype=np.int64)
        self.digests: Pairs = np.zeros((superblock.slots, 2), dtype=np.uint64)
        self._digest_bytes = self.digests.data.cast("B")  # the same memory, quicker for one record
        self._digest = superblock.member_digest()
        self._data_offset = superblock.data_offset
        self._headers = threading.RLock()  # for the state below and writes of headers
        self._epoch = superblock.epoch
        self._epoch_unwritten = False
        self._older: set[int] = set()
        self._any_older = True  # the process before may have overwritten headers and not synced
        self._uncertain: set[int] = set()
        self._waiting: dict[int, bytes] = {}
        self._writes = 0  # of records, that have begun and have not ended
        self._inherited = True  # headers that this process has not written, which the disk may have lost
        self._syncing = threading.Lock()  # held during a sync; taken before `_headers`

    def load(self) -> list[Headers]:
        """Read the header table: the valid headers, in segments. `adopt` follows for those that are records."""
        segments: list[Headers] = []
        buffer = memoryview(bytearray(min(_HEADERS_AT_ONCE, self.superblock.slots) * HEADER_BYTES))
        for first in range(0, self.superblock.slots, _HEADERS_AT_ONCE):
            count = min(_HEADERS_AT_ONCE, self.superblock.slots - first)
            data = buffer[: count * HEADER_BYTES]
            if not self.file.read([data], TABLE_OFFSET + first * HEADER_BYTES):
                self._uncertain.update(range(first, self.superblock.slots))  # cut off, or not read
                break
            segments.append(parse_headers(data, self.superblock, first, self.checksum))
        return segments

    def adopt(self, slots: Int64Array, hashes: Int64Array, digests: Pairs) -> None:
        """The file has valid headers in these slots, whatever an index makes of them."""
        self.hashes[slots] = hashes
        self.digests[slots] = digests

    # payloads -----------------------------------------------------------------------------------------------------

    def payload_offset(self, slot: int) -> int:
        return self._data_offset + slot * self.superblock.slot_bytes

    def digest_of(self, slot: int, key: bytes) -> bytes | None:
        """The digest of the payload of `key`; None if the slot holds another key, or none."""
        if self.hashes[slot] != hash_of(key):
            return None
        return bytes(self._digest_bytes[slot * DIGEST_BYTES : (slot + 1) * DIGEST_BYTES])

    def begin_writes(self, count: int) -> None:
        """So many records are going to be written: headers wait meanwhile. `end_writes` follows."""
        with self._headers:
            self._writes += count

    def write_payloads(self, slots: Sequence[int], payloads: Sequence[Sequence[Buffer]]) -> list[bool | OSError]:
        """Write payloads; `add_headers` follows. Returns True of each, or why it is not written."""
        return in_runs(self._write, slots, payloads)

    def read_payloads(self, slots: Sequence[int], payloads: Sequence[Sequence[Buffer]]) -> list[bool | OSError]:
        """Read payloads. Returns of each whether it is complete, or what failed; it is not verified."""
        return in_runs(self._read, slots, payloads)

    def _write(self, slot: int, views: Sequence[Buffer]) -> bool:
        self.file.write_payload(views, self.payload_offset(slot))
        return True

    def _read(self, slot: int, views: Sequence[Buffer]) -> bool:
        return self.file.read_payload(views, self.payload_offset(slot))

    # headers ------------------------------------------------------------------------------------------------------

    def add_headers(self, records: Sequence[NewRecord], sequence: int, wanted: Callable[[bytes], bool]) -> list[bool]:
        """Make payloads that have been written records, whose headers are in the file by the next `end_writes` at rest.

        Args:
            wanted: called with each key under the lock that `erase` takes, too: so a key that is unwanted from some
                moment on, and erased after that moment, is not in the file.

        Returns:
            Of each whether it was wanted; if not, nothing has changed.
        """
        with self._headers:
            added = [wanted(record.key) for record in records]
            for record, is_wanted in zip(records, added, strict=True):
                if is_wanted:
                    self._add(record, sequence)
        return added

    def end_writes(self, count: int) -> dict[int, OSError]:
        """Writes that have begun have ended; if no others go on, or many headers wait, these are written.

        Returns:
            Slots that hold no record, as their headers could not be written, and why.
        """
        with self._headers:
            self._writes -= count
            if self._waiting and (self._writes == 0 or len(self._waiting) >= _MOST_WAITING):
                return self._write_waiting()
        return {}

    def _add(self, record: NewRecord, sequence: int) -> None:
        slot = record.slot
        self._note_older(slot)
        self._waiting[slot] = pack_header(
            self.checksum,
            self._digest,
            slot=slot,
            key=record.key,
            tenant=record.tenant,
            digest=record.digest,
            nbytes=self.superblock.slot_bytes,
            epoch=self._epoch,
            sequence=sequence,
            position=record.position,
        )
        self._digest_bytes[slot * DIGEST_BYTES : (slot + 1) * DIGEST_BYTES] = record.digest
        self.hashes[slot] = hash_of(record.key)

    def erase(self, slots: Iterable[int]) -> None:
        """Make slots hold no record. Durable after a `sync` that succeeds. Does not raise where zeros are not written:
        that is tried again by `sync`.
        """
        with self._headers:
            for slot in slots:
                self._erase(slot)

    def remove(self, keys: Iterable[bytes]) -> None:
        """No header of these keys is in the file, now or after a crash, when it returns.

        Raises:
            OSError: that is not certain.
        """
        hashes = {hash_of(key) for key in keys}
        with self._headers:
            for slot in np.flatnonzero(np.isin(self.hashes, list(hashes))).tolist():
                self._erase(slot)
        with self._syncing:  # a sync that has begun has not ended yet
            with self._headers:
                needed = self._any_older or self._epoch_unwritten or bool(self._uncertain) or self._inherited
                needed = needed or not self._older.isdisjoint(hashes)
            if needed:
                self._sync(with_inherited=self._inherited)

    def clear(self) -> None:
        """No header is valid when it returns, now or after a crash.

        Raises:
            OSError: that is not certain.
        """
        with self._headers:
            self._begin_epoch()
            self.hashes[:] = 0
        self.sync()

    def sync(self) -> None:
        """What has been written is durable when it returns.

        Raises:
            OSError: it may not be. Another epoch has begun; see above.
        """
        with self._syncing:
            self._sync()

    def _sync(self, *, with_inherited: bool = False) -> None:
        with self._headers:
            self._write_waiting()
            self._older, self._any_older = set(), False
            self._settle_uncertain()
            epoch, unwritten = self._epoch, self._epoch_unwritten
        try:
            if unwritten:
                write_superblocks(self.file, self.superblock._replace(epoch=epoch))
            else:
                if with_inherited:
                    self._write_inherited()
                self.file.sync()
        except OSError:
            with self._headers:
                self._begin_epoch()
            raise
        except BaseException:
            self._any_older = True
            raise
        with self._headers:
            if self._epoch == epoch:
                self._epoch_unwritten = False
                self._inherited = self._inherited and not with_inherited

    def _write_inherited(self) -> None:
        """Write the header table as it can be read, so that the next sync makes it durable."""
        buffer = memoryview(bytearray(min(_HEADERS_AT_ONCE, self.superblock.slots) * HEADER_BYTES))
        for first in range(0, self.superblock.slots, _HEADERS_AT_ONCE):
            data = buffer[: min(_HEADERS_AT_ONCE, self.superblock.slots - first) * HEADER_BYTES]
            with self._headers:
                if self.file.read([data], TABLE_OFFSET + first * HEADER_BYTES):
                    self.file.write([data], TABLE_OFFSET + first * HEADER_BYTES)

    def _settle_uncertain(self) -> None:
        try:
            for slot in list(self._uncertain):
                self._write_headers(slot, [_NO_HEADER])
        except OSError:
            self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._epoch = (self._epoch // _EPOCH_COUNT + 1) * _EPOCH_COUNT + secrets.randbits(32)
        self._epoch_unwritten = True
        self._any_older = False
        self._older = set()
        self._uncertain = set()
        self._waiting = {}  # they are of the epoch before
        self._inherited = False

    def _erase(self, slot: int) -> None:
        try:
            self._replace(slot, _NO_HEADER)
        except OSError:
            pass  # it is in `_uncertain`

    def _replace(self, slot: int, header: memoryview) -> None:
        """Write a header over another one, which a crash may bring back until the next sync."""
        self._note_older(slot)
        self._waiting.pop(slot, None)
        self._uncertain.add(slot)
        self.hashes[slot] = 0
        self._write_headers(slot, [header])

    def _note_older(self, slot: int) -> None:
        older = int(self.hashes[slot])
        if slot in self._uncertain:  # of which key is not known
            self._older, self._any_older = set(), True
        if older and not self._any_older:
            self._older.add(older)
            if len(self._older) > _MOST_OLDER:
                self._older, self._any_older = set(), True

    def _write_waiting(self) -> dict[int, OSError]:
        """Write the headers that wait, neighbours in one call. Returns slots that hold no record, as that failed."""
        waiting, self._waiting = self._waiting, {}
        failed: dict[int, OSError] = {}
        run: list[int] = []
        for slot in [*sorted(waiting), -1]:
            if run and slot != run[-1] + 1:
                self._uncertain.update(run)
                try:
                    self._write_headers(run[0], [memoryview(waiting[each]) for each in run])
                except OSError as error:
                    self.hashes[run] = 0
                    failed.update(dict.fromkeys(run, error))
                run = []
            run.append(slot)
        return failed

    def _write_headers(self, first: int, headers: Sequence[memoryview]) -> None:
        """Write headers of consecutive slots, which are in `_uncertain`; they are not, afterwards."""
        self.file.write(headers, TABLE_OFFSET + first * HEADER_BYTES)
        self._uncertain.difference_update(range(first, first + len(headers)))

    # read by another process --------------------------------------------------------------------------------------

    def peek(self, slot: int) -> Peek | None:
        """What the file holds for a slot now, for a process that does not write it; None for no valid header."""
        found = [each for each in read_superblocks(self.file) if each is not None]
        current = max(found, key=lambda each: each.epoch, default=None)
        if current is None or current.member_digest() != self._digest:
            return None
        data = bytearray(HEADER_BYTES)
        if not self.file.read([memoryview(data)], TABLE_OFFSET + slot * HEADER_BYTES):
            return None
        headers = parse_headers(memoryview(data), current, slot, self.checksum)
        if not len(headers.slots):
            return None
        return Peek(bytes(data), current.epoch, headers.key_list()[0], headers.digests[0].tobytes())


def hash_of(key: bytes) -> int:
    """A number for a key, not 0; of this process alone, as Python's hashes of bytes are salted."""
    return hash(key) or 1


def hashes_of(keys: Sequence[bytes]) -> Int64Array:
    """`hash_of` each key, int64, (keys,)."""
    hashes = np.fromiter(map(hash, keys), np.int64, len(keys))
    hashes[hashes == 0] = 1
    return hashes


def read_superblocks(file: OpenFile) -> list[Superblock | None]:
    """Both copies; None for one that is not valid."""
    found: list[Superblock | None] = []
    for offset in SUPERBLOCK_OFFSETS:
        data = bytearray(SUPERBLOCK_BYTES)
        found.append(unpack_superblock(bytes(data)) if file.read([memoryview(data)], offset) else None)
    return found


def write_superblocks(file: OpenFile, superblock: Superblock) -> None:
    """Write both copies, and sync after each: so one is whole at any moment, and none is an older one afterwards."""
    page = memoryview(superblock.pack().ljust(PAGE, b"\0"))
    for offset in SUPERBLOCK_OFFSETS:
        file.write([page], offset)
        file.sync()
