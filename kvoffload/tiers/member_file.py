"""MemberFile: one file of a set, its headers, and the older headers that a crash could bring back.

A crash may lose any write since the last sync, each sector by itself. It may leave

1. a header without its payload, or with a part: the digests differ, a miss;
2. a payload without its header: the slot has its older header, whose digest differs, or none, a miss;
3. a part of a header that crosses sectors: its checksum differs, a miss;
4. an older header with its whole older payload: a hit with the right bytes, unless its key was removed since.

So `remove` has to know which headers may be in the file after a crash. There are three kinds:

- Headers that the file has now. `hashes` has the key of every slot, even if an index evicted it, until another header
  overwrites it. `remove` overwrites them with zeros.
- Headers that were overwritten since the last sync. `_older` has their keys; removing one of them syncs. If there are
  many, or the process has just started and cannot know, every removal syncs.
- Headers that could not be written, or read at the start: slots in `_uncertain`. The next sync writes zeros there. If
  such a slot is used before, every removal syncs.

The process before may have been killed after a failed sync. Then the page cache shows writes that the disk lost as if
they were durable. So the first removal of a process writes the header table again before it syncs, `_inherited`.

Headers go to the file when no record is being written, and at the latest 512 at a time: an ordinary write waits for all
direct I/O on the file, and holds it up meanwhile. Until then they are in `_waiting`. A kill leaves the slot's older
header, whose payload digest differs. A header that cannot be written goes on waiting, in `_uncertain` too: its put may
have ended, and its record is read. The next write and the next sync try again. A sync clears `_older`, so it writes the
waiting headers first, and fails if one cannot be written.

If a sync fails, or zeros cannot be written, the kernel may have dropped any write, and reports that once. Then another
epoch begins: every header so far is invalid as soon as a superblock can be written; until then syncs fail. After the
superblock that sync writes the headers of the records that are known, with the new epoch. The upper half of an epoch
counts. The lower half is random, because an epoch that could not be recorded must not begin again after a restart:
headers in the file have it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kvoffload.internal.nesting import new_lock
from kvoffload.internal.types import Int64Array
from kvoffload.tiers.files import PAGE, Buffer, OpenFile, in_runs
from kvoffload.tiers.format import (
    DIGEST_BYTES,
    HEADER_BYTES,
    HEADER_DTYPE,
    SUPERBLOCK_BYTES,
    SUPERBLOCK_OFFSETS,
    TABLE_OFFSET,
    Checksum,
    Headers,
    Pairs,
    Superblock,
    pack_header,
    parse_headers,
    renewed,
    unpack_superblock,
)

_MOST_OLDER = 16_384  # keys whose overwritten headers are remembered; beyond, every removal syncs
_HEADERS_AT_ONCE = 32_768  # 6 MiB
_MOST_WAITING = 512  # headers of records that are not in the file yet
_EPOCH_COUNT = 1 << 32  # the upper half of an epoch counts
_NO_HEADER = memoryview(bytes(HEADER_BYTES))

ReadResult: TypeAlias = bool | OSError | None
"""True: read and verified. False: no such record. None: the bytes do not match the header. Or the error."""


class Peek(NamedTuple):
    """A valid header as the file had it at one moment, and the epoch then."""

    header: bytes
    epoch: int
    key: bytes
    digest: bytes


class SlotPut(NamedTuple):
    """A record to write.

    Attributes:
        slot: where.
        key: 1 to 64 bytes.
        position: the key's place in its put call.
        views: the payload, `slot_bytes` together; for direct I/O each range starts and ends at a multiple of 4096.
    """

    slot: int
    key: bytes
    position: int
    views: Sequence[Buffer]


class MemberFile:
    """One file of a set. Usable from several threads; slots are numbered from 0 in each member.

    Args:
        gate: held during transfers of payloads.

    Attributes:
        hashes: `hash_of` the key in each slot's header as the file has it, or will have it; 0 for none.
        digests: digest of the payload that belongs to each header.
    """

    def __init__(
        self, file: OpenFile, superblock: Superblock, checksum: Checksum, gate: AbstractContextManager[Any]
    ) -> None:
        self.file = file
        self.superblock = superblock
        self.checksum = checksum
        self._gate = gate
        self.hashes: Int64Array = np.zeros(superblock.slots, dtype=np.int64)
        self.digests: Pairs = np.zeros((superblock.slots, 2), dtype=np.uint64)
        self._digest_bytes = self.digests.data.cast("B")  # the same memory, quicker for one record
        self._digest = superblock.member_digest()
        self._data_offset = superblock.data_offset
        self._headers = new_lock()  # for the state below and writes of headers
        self._epoch = superblock.epoch
        self._epoch_unwritten = False
        self._older: set[int] = set()
        self._any_older = True  # the process before may have overwritten headers and not synced
        self._uncertain: set[int] = set()
        self._waiting: dict[int, bytes] = {}
        self._writes = 0  # of records, that have begun and have not ended
        self._inherited = True  # headers that this process has not written, which the disk may have lost
        self._syncing = new_lock()  # held during a sync; taken before `_headers`

    def load(self) -> list[Headers]:
        """Read the valid headers of the table, in segments. Call `adopt` with them."""
        segments: list[Headers] = []
        for first, data in self._table():
            if not self.file.read([data], TABLE_OFFSET + first * HEADER_BYTES):
                self._uncertain.update(range(first, self.superblock.slots))  # cut off, or not read
                break
            segments.append(parse_headers(data, self.superblock, first, self.checksum))
        return segments

    def _table(self) -> Iterator[tuple[int, memoryview]]:
        """Yield for each part of the header table its first slot and memory for its headers, the same for all parts."""
        buffer = memoryview(bytearray(min(_HEADERS_AT_ONCE, self.superblock.slots) * HEADER_BYTES))
        for first in range(0, self.superblock.slots, _HEADERS_AT_ONCE):
            yield first, buffer[: min(_HEADERS_AT_ONCE, self.superblock.slots - first) * HEADER_BYTES]

    def adopt(self, slots: Int64Array, hashes: Int64Array, digests: Pairs) -> None:
        """Note the valid headers that the file has in these slots, whether or not an index keeps them."""
        self.hashes[slots] = hashes
        self.digests[slots] = digests

    # records ------------------------------------------------------------------------------------------------------

    def payload_offset(self, slot: int) -> int:
        return self._data_offset + slot * self.superblock.slot_bytes

    def write(
        self,
        slots: Sequence[int],
        puts: Sequence[SlotPut],
        tenant: bytes,
        sequence: int,
        wanted: Callable[[bytes], bool],
    ) -> list[bool | OSError]:
        """Write records into slots. Their headers are in the file at the latest when no record is being written.

        1. Headers wait from here on, until all writes that have begun have ended.
        2. Payloads are written, neighbouring slots in one call.
        3. Payloads that could be written get their headers. Readers find the records from here on.
        4. If no other write goes on, or many headers wait, headers are written.

        Args:
            tenant: its digest.
            wanted: called with each key under the lock that `erase` takes, too. So a key that became unwanted and was
                erased afterwards is not in the file.

        Returns:
            For each record whether it was wanted; if not, its slot's header is unchanged. Or why its slot holds none.
        """
        with self._headers:
            self._writes += len(puts)
        failed: dict[int, OSError] = {}
        try:
            digests = [self.checksum.of(put.views) for put in puts]
            with self._gate:
                results = in_runs(
                    lambda slot, views: self.file.write_payload(views, self.payload_offset(slot)),
                    slots,
                    [put.views for put in puts],
                )
            written = [at for at, result in enumerate(results) if result is True]
            with self._headers:
                for at in written:
                    results[at] = wanted(puts[at].key)
                for at in filter(lambda at: results[at], written):
                    self._add(slots[at], puts[at], tenant, digests[at], sequence)
        finally:
            with self._headers:
                self._writes -= len(puts)
                if self._waiting and (self._writes == 0 or len(self._waiting) >= _MOST_WAITING):
                    failed = self._write_waiting()
                    for slot in failed.keys() & set(slots):  # these are reported; others have been promised
                        del self._waiting[slot]
                        self.hashes[slot] = 0
        return [failed.get(slot, result) for slot, result in zip(slots, results, strict=True)]

    def _add(self, slot: int, put: SlotPut, tenant: bytes, digest: bytes, sequence: int) -> None:
        self._note_older(slot)
        self._waiting[slot] = pack_header(
            self.checksum,
            self._digest,
            slot=slot,
            key=put.key,
            tenant=tenant,
            digest=digest,
            nbytes=self.superblock.slot_bytes,
            epoch=self._epoch,
            sequence=sequence,
            position=put.position,
        )
        self._digest_bytes[slot * DIGEST_BYTES : (slot + 1) * DIGEST_BYTES] = digest
        self.hashes[slot] = hash_of(put.key)

    def read(
        self, slots: Sequence[int], keys: Sequence[bytes], payloads: Sequence[Sequence[Buffer]]
    ) -> list[ReadResult]:
        """Read the payloads of keys that this object wrote into these slots, or found there by `load`."""
        results: list[ReadResult] = [False] * len(slots)
        digests = {
            at: bytes(self._digest_bytes[slot * DIGEST_BYTES : (slot + 1) * DIGEST_BYTES])
            for at, (slot, key) in enumerate(zip(slots, keys, strict=True))
            if self.hashes[slot] == hash_of(key)
        }
        read = self._verified([slots[at] for at in digests], [payloads[at] for at in digests], list(digests.values()))
        for at, result in zip(digests, read, strict=True):
            results[at] = result
        return results

    def read_shared(
        self, slots: Sequence[int], keys: Sequence[bytes], payloads: Sequence[Sequence[Buffer]]
    ) -> list[ReadResult]:
        """Do `read` while another process may write: the header must be the same before and after reading the payload.

        A payload that is being replaced, and whose new header waits, looks like damage.
        """
        results: list[ReadResult] = []
        for slot, key, views in zip(slots, keys, payloads, strict=True):
            try:
                before = self._peek(slot)
                if before is None or before.key != key:
                    results.append(False)
                    continue
                (result,) = self._verified([slot], [views], [before.digest])
                results.append(result if self._peek(slot) == before else False)
            except OSError as error:
                results.append(error)
        return results

    def _verified(
        self, slots: Sequence[int], payloads: Sequence[Sequence[Buffer]], digests: Sequence[bytes]
    ) -> list[ReadResult]:
        with self._gate:
            results = in_runs(
                lambda slot, views: self.file.read_payload(views, self.payload_offset(slot)), slots, payloads
            )
        return [
            result if isinstance(result, OSError) else (result and self.checksum.of(views) == digest) or None
            for result, views, digest in zip(results, payloads, digests, strict=True)
        ]

    # what is forgotten, and what is durable -----------------------------------------------------------------------

    def erase(self, slot: int) -> None:
        """Clear the header of a slot. The next successful `sync` makes this durable.

        If a write fails, `sync` retries it; nothing is raised here.
        """
        with self._headers:
            self._erase(slot)

    def remove(self, keys: Iterable[bytes]) -> None:
        """Clear all headers of these keys, so that none is in the file when this returns, even after a crash.

        Raises:
            OSError: a crash may bring some back.
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
        """Make all headers invalid, even after a crash.

        Raises:
            OSError: a crash may bring some back.
        """
        with self._headers:
            self._waiting = {}
            self._begin_epoch()
            self.hashes[:] = 0
        self.sync()

    def sync(self) -> None:
        """Make all writes so far durable.

        Raises:
            OSError: a crash may lose some. The next call tries again.
        """
        with self._syncing:
            self._sync()

    def _sync(self, *, with_inherited: bool = False) -> None:
        with self._headers:
            if failed := self._write_waiting():
                raise next(iter(failed.values()))
            self._older, self._any_older = set(), False
            try:
                for slot in list(self._uncertain):
                    self._write_headers(slot, [_NO_HEADER])
            except OSError:
                self._begin_epoch()
            epoch, unwritten = self._epoch, self._epoch_unwritten
            renews = unwritten and bool(self.hashes.any())
        try:
            if unwritten:
                write_superblocks(self.file, self.superblock._replace(epoch=epoch))
            for first, data in self._table() if with_inherited or renews else ():
                with self._headers:  # written as it is read, or renewed, for this sync to make it durable
                    if self.file.read([data], TABLE_OFFSET + first * HEADER_BYTES):
                        self._renew(first, data)
                        self.file.write([data], TABLE_OFFSET + first * HEADER_BYTES)
            if renews or not unwritten:
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

    def _begin_epoch(self) -> None:
        self._epoch = (self._epoch // _EPOCH_COUNT + 1) * _EPOCH_COUNT + secrets.randbits(32)
        self._epoch_unwritten = True
        self._any_older = False
        self._older = set()
        self._uncertain = set()
        self._waiting = {slot: renewed(self.checksum, each, self._epoch) for slot, each in self._waiting.items()}
        self._inherited = False

    def _renew(self, first: int, data: memoryview) -> None:
        """Renew in `data` the headers of earlier epochs whose records are in `hashes` and `digests`."""
        table = np.frombuffer(data, HEADER_DTYPE)
        slots = slice(first, first + len(table))
        same = (self.digests[slots] == table["digest"]).all(axis=1) & (table["epoch"] != np.uint64(self._epoch))
        for at in np.flatnonzero(same).tolist():
            header = bytes(data[at * HEADER_BYTES : (at + 1) * HEADER_BYTES])
            key = table["key"][at, : table["key_bytes"][at]].tobytes()
            whole = self.checksum.of_bytes(header[DIGEST_BYTES:]) == header[:DIGEST_BYTES]
            if whole and hash_of(key) == self.hashes[first + at]:
                data[at * HEADER_BYTES : (at + 1) * HEADER_BYTES] = renewed(self.checksum, header, self._epoch)

    def _erase(self, slot: int) -> None:
        """Write zeros over a header, which a crash may bring back until the next sync."""
        self._note_older(slot)
        self._waiting.pop(slot, None)
        self._uncertain.add(slot)
        self.hashes[slot] = 0
        try:
            self._write_headers(slot, [_NO_HEADER])
        except OSError:
            pass  # it is in `_uncertain`

    def _note_older(self, slot: int) -> None:
        older = int(self.hashes[slot])
        if slot in self._uncertain:  # of which key is not known
            self._older, self._any_older = set(), True
        if older and not self._any_older:
            self._older.add(older)
            if len(self._older) > _MOST_OLDER:
                self._older, self._any_older = set(), True

    def _write_waiting(self) -> dict[int, OSError]:
        """Write the waiting headers, neighbours in one call. Returns the slots whose headers still wait, and why."""
        slots = sorted(self._waiting)
        self._uncertain.update(slots)
        results = in_runs(self._write_headers, slots, [[memoryview(self._waiting[slot])] for slot in slots])
        failed = {slot: result for slot, result in zip(slots, results, strict=True) if isinstance(result, OSError)}
        self._waiting = {slot: self._waiting[slot] for slot in failed}
        return failed

    def _write_headers(self, first: int, headers: Sequence[memoryview]) -> bool:
        """Write headers of consecutive slots, and take these slots out of `_uncertain`. Returns True."""
        self.file.write(headers, TABLE_OFFSET + first * HEADER_BYTES)
        self._uncertain.difference_update(range(first, first + len(headers)))
        return True

    def _peek(self, slot: int) -> Peek | None:
        """Read a slot's header as the file has it now, for a read-only process. None if it is not valid."""
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
    """Return a number for a key, not 0. It differs from process to process: Python salts hashes of bytes."""
    return hash(key) or 1


def hashes_of(keys: Sequence[bytes]) -> Int64Array:
    hashes = np.fromiter(map(hash, keys), np.int64, len(keys))
    hashes[hashes == 0] = 1
    return hashes


def read_superblocks(file: OpenFile) -> list[Superblock | None]:
    found: list[Superblock | None] = []
    for offset in SUPERBLOCK_OFFSETS:
        data = bytearray(SUPERBLOCK_BYTES)
        found.append(unpack_superblock(bytes(data)) if file.read([memoryview(data)], offset) else None)
    return found


def write_superblocks(file: OpenFile, superblock: Superblock) -> None:
    """Write both copies and sync after each, so that one is whole at any moment."""
    page = memoryview(superblock.pack().ljust(PAGE, b"\0"))
    for offset in SUPERBLOCK_OFFSETS:
        file.write([page], offset)
        file.sync()
