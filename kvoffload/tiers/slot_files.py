"""SlotFiles: the files of a set as an array of slots, each with a key and a payload whose checksum is verified.

A payload is written before its header, and neither is synced: after a crash as before, a slot holds a record only if
the header's digest matches. `remove` and `clear` are durable when they return; `member` says why nothing comes back.

Slot `s` is slot `s // n` of member `s % n` of n members, so neighbours are on different disks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from kvoffload.errors import CapacityError
from kvoffload.internal.checks import at_least, shown
from kvoffload.internal.teardown import run_all
from kvoffload.internal.types import Int64Array, UInt64Array
from kvoffload.tiers.files import PAGE, Buffer, FileOperations
from kvoffload.tiers.format import (
    DIGEST_BYTES,
    HEADER_BYTES,
    TABLE_OFFSET,
    Pairs,
    Superblock,
    identity_fields,
    join_headers,
    make_checksum,
    tenant_digest,
)
from kvoffload.tiers.member_file import MemberFile, ReadResult, SlotPut, hashes_of
from kvoffload.tiers.sets import open_set

_T = TypeVar("_T")


class StoredKeys(NamedTuple):
    """The records of a set when it is opened, by column, in the order in which they were put.

    Attributes:
        keys: the keys.
        slots: int64, (keys,).
        tenants: digests, (keys, 2).
        sequences: number of each key's put call; it rises.
    """

    keys: list[bytes]
    slots: Int64Array
    tenants: Pairs
    sequences: UInt64Array


class SlotFiles:
    """The slots of a set of files. Several threads may read and write different slots at a time.

    One object at a time may have a set open for writing. `read_only` objects follow its changes: their reads compare
    the file's header before and after the payload. Arguments and errors as for `DiskTier`, but

    Args:
        nbytes: size of all files together, allocated at once. Not used with `read_only`.
        io_threads: most payload transfers at a time with direct I/O; further calls may compute checksums meanwhile.
            None: no limit.

    Attributes:
        num_slots: slots of all members; 0 with `read_only` if there is nothing to read.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        *,
        slot_bytes: int,
        nbytes: int,
        layout_digest: bytes,
        identity: str,
        key: bytes | None,
        reset: bool,
        read_only: bool,
        direct: bool,
        io_threads: int | None,
        operations: FileOperations,
    ) -> None:
        self.paths = [str(path) for path in paths]
        self.slot_bytes = slot_bytes
        self.read_only = read_only
        self.checksum = make_checksum(key)
        count = len(self.paths)
        wanted = Superblock(
            slot_bytes=slot_bytes,
            slots=1 if read_only else _slots_of(nbytes, count, slot_bytes),
            member=0,
            members=count,
            epoch=0,
            algorithm=self.checksum.algorithm,
            key_check=self.checksum.key_check,
            set_id=bytes(DIGEST_BYTES),
            layout_digest=layout_digest,
            identity_digest=identity_fields(identity)[0],
            identity_text=identity_fields(identity)[1],
        )
        with ExitStack() as undo:
            opened = open_set(self.paths, wanted, operations, undo, reset=reset, read_only=read_only)
            if direct:
                for file, superblock in opened:
                    file.try_direct(superblock.data_offset)
            # through the page cache a transfer is a copy by this processor, as a checksum is
            bounded = io_threads is not None and all(file.direct for file, _ in opened)
            gate = threading.BoundedSemaphore(io_threads or 1) if bounded else nullcontext()
            self._members = [MemberFile(file, superblock, self.checksum, gate) for file, superblock in opened]
            undo.pop_all()

    @property
    def num_slots(self) -> int:
        return sum(member.superblock.slots for member in self._members)

    @property
    def direct(self) -> tuple[bool, ...]:
        return tuple(member.file.direct for member in self._members)

    @property
    def unlinked(self) -> list[str]:
        """The paths of open files that have no name any more: they end with this process."""
        files = [member.file for member in self._members]
        return [file.path for file in files if file.operations.fstat(file.descriptor).st_nlink == 0]

    # records ------------------------------------------------------------------------------------------------------

    def load(self) -> StoredKeys:
        """Return all records, each key once, in the order of their writes. Call it once, before other methods.

        It reads no payloads: `read` finds out if a crash lost one.
        """
        count = len(self._members)
        segments = [
            segment._replace(slots=segment.slots * count + place)
            for place, member in enumerate(self._members)
            for segment in member.load()
        ]
        if not segments:
            return StoredKeys([], np.zeros(0, np.int64), np.zeros((0, 2), np.uint64), np.zeros(0, np.uint64))
        found = join_headers(segments)
        segments.clear()
        found = found.take(np.lexsort((found.positions, found.sequences)))
        keys = found.key_list()  # objects in the order of requests: later passes over them are faster
        hashes = hashes_of(keys)
        for place, member in enumerate(self._members):
            mine = found.slots % count == place
            member.adopt(found.slots[mine] // count, hashes[mine], found.digests[mine])
        ordered = np.sort(hashes)  # several times as quick as np.unique
        if (ordered[1:] == ordered[:-1]).any():
            latest = np.sort(np.fromiter({key: place for place, key in enumerate(keys)}.values(), np.int64))
            found, keys = found.take(latest), [keys[place] for place in latest.tolist()]
        return StoredKeys(keys, found.slots, found.tenants, found.sequences)

    def write(
        self,
        puts: Sequence[SlotPut],
        tenant: str,
        sequence: int,
        wanted: Callable[[bytes], bool],
    ) -> list[bool | OSError]:
        """Write records into slots; durable after `sync`.

        Give a slot to one call at a time, and leave the payloads unchanged until it returns.

        Args:
            tenant, sequence: tenant and number of the put call; numbers rise.
            wanted: called with each key after its payload is written. False: the slot does not get this record.

        Returns:
            For each record the answer of `wanted`; or the error that left its slot without a record.
        """
        owner, count = tenant_digest(tenant), len(self._members)

        def write(member: MemberFile, mine: list[int]) -> Sequence[bool | OSError]:
            places = [puts[at].slot // count for at in mine]
            return member.write(places, [puts[at] for at in mine], owner, sequence, wanted)

        return self._by_member([put.slot for put in puts], write)

    def read(
        self, slots: Sequence[int], keys: Sequence[bytes], payloads: Sequence[Sequence[Buffer]]
    ) -> list[ReadResult]:
        """Read the payloads of keys, each from its slot. Unless the result is True, the payload may hold anything."""
        count = len(self._members)

        def read(member: MemberFile, mine: list[int]) -> Sequence[ReadResult]:
            places, of = [slots[at] // count for at in mine], [keys[at] for at in mine]
            call = member.read_shared if self.read_only else member.read
            return call(places, of, [payloads[at] for at in mine])

        return self._by_member(slots, read)

    def erase(self, slot: int) -> None:
        """Clear a slot. A crash before the next `sync` may bring its record back. Raises no OSError."""
        place, number = divmod(slot, len(self._members))
        self._members[number].erase(place)

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove the records of these keys, durably.

        Raises:
            OSError: a crash may bring keys back; until then they are misses. Call it again, or `clear`.
        """
        run_all(partial(member.remove, keys) for member in self._members)

    def clear(self) -> None:
        """Remove all records, durably. Raises as `remove` does."""
        run_all(member.clear for member in self._members)

    def sync(self) -> None:
        """Make all writes so far durable.

        Raises:
            OSError: records so far may be missing after a restart.
        """
        run_all(member.sync for member in self._members)

    def close(self) -> None:
        """Sync, and close the files. No other call may run. Idempotent."""
        members, self._members = self._members, []
        try:
            if not self.read_only:
                run_all(member.sync for member in members)
        finally:
            run_all(member.file.close for member in members)

    def __repr__(self) -> str:
        mode = ", read_only" if self.read_only else ""
        return f"SlotFiles({', '.join(self.paths)}: {self.num_slots} slots of {self.slot_bytes} bytes{mode})"

    # inner workings -----------------------------------------------------------------------------------------------

    def _by_member(self, slots: Sequence[int], call: Callable[[MemberFile, list[int]], Sequence[_T]]) -> list[_T]:
        """Call each member that has some of the slots, with their positions in `slots`. Returns all results."""
        results: dict[int, _T] = {}
        for number, member in enumerate(self._members):
            mine = [at for at, slot in enumerate(slots) if slot % len(self._members) == number]
            if mine:
                results.update(zip(mine, call(member, mine), strict=True))
        return [results[at] for at in range(len(slots))]


def _slots_of(nbytes: int, members: int, slot_bytes: int) -> int:
    space = at_least("nbytes", nbytes, 1) // members - TABLE_OFFSET
    slots = space // (HEADER_BYTES + slot_bytes)
    if slots > 0 and -(-slots * HEADER_BYTES // PAGE) * PAGE + slots * slot_bytes > space:
        slots -= 1  # the header table ends with a page
    if slots <= 0:
        least = members * (TABLE_OFFSET + PAGE + slot_bytes)
        each = f"a disk of {nbytes} bytes has no room for a record of {slot_bytes} bytes in each file"
        raise CapacityError(f"{each}: give it {least} or more")
    if nbytes >= 1 << 60:
        raise CapacityError(f"a disk of {shown(nbytes)} bytes is larger than any: give it less")
    return slots
