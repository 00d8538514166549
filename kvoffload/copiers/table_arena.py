"""Descriptor tables that a GPU reads while a transfer runs: ranges of pinned memory.

One or several segments of a transfer use a table until they have ended. Segments of one direction end in the order in
which they were queued, so the arena is a ring.

    |....|table 3|table 4|...........|table 1 (given back)|table 2|
                          ^ next                                   when table 1 and 2 are back, their room is free
"""

from __future__ import annotations

from collections import deque

import numpy as np

from kvoffload.internal.types import Int64Array

_ALIGNMENT_BYTES = 64


class Table:
    """`words`, int64, (n,), which the GPU sees at `device_address`. After `release` another table may take the room.

    Attributes:
        unfit: what coding kernels write, of each block: whether it does not fit; int64. None without a codec.
        slots: of these blocks.
    """

    __slots__ = ("_arena", "device_address", "released", "slots", "start", "stop", "unfit", "words")

    def __init__(self, arena: TableArena, start: int, stop: int, count: int) -> None:
        self._arena = arena
        self.start = start
        self.stop = stop
        self.released = False
        self.words: Int64Array = arena.words[start // 8 : start // 8 + count]
        self.device_address = arena.device_address + start
        self.unfit: Int64Array | None = None
        self.slots: Int64Array | None = None

    def unfit_slots(self) -> list[int]:
        assert self.slots is not None
        return list(self.slots[self.unfit != 0].tolist())

    def release(self) -> None:
        """Free the table: nothing on the GPU reads it any more. Idempotent."""
        self.released = True
        self._arena.collect()


class TableArena:
    """A ring of tables in pinned memory.

    Args:
        memory: uint8, (n,), pinned; begins and ends on multiples of 64 bytes.
        device_address: where the GPU sees it.
    """

    def __init__(self, memory: np.ndarray[tuple[int], np.dtype[np.uint8]], device_address: int) -> None:
        self.words: Int64Array = memory.view(np.int64)
        self.device_address = device_address
        self._nbytes = memory.nbytes
        self._tables: deque[Table] = deque()
        self._next = 0

    @property
    def in_use(self) -> int:
        return sum(not table.released for table in self._tables)

    def take(self, count: int) -> Table | None:
        """Return a table of `count` words, or None while there is no room.

        1. No table is in use: the whole memory is free.
        2. The tables lie in one piece: there is room behind the last, and before the first.
        3. They wrap around: there is room between the last and the first.

        Room before the first table is never filled to the last byte: a full ring would look like an empty one.
        """
        nbytes = -(-8 * count // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        start = self._next
        first = self._tables[0].start if self._tables else None
        if first is None:
            start, fits = 0, nbytes <= self._nbytes
        elif start > first:
            fits = start + nbytes <= self._nbytes
            if not fits:
                start, fits = 0, nbytes < first
        else:
            fits = start + nbytes < first
        if not fits:
            return None
        table = Table(self, start, start + nbytes, count)
        self._tables.append(table)
        self._next = table.stop
        return table

    def collect(self) -> None:
        """Free the room of released tables at the old end of the ring."""
        while self._tables and self._tables[0].released:
            self._tables.popleft()

    def restore(self, used: list[Table]) -> None:
        """Restore the tables in use after an interrupt: exactly this arena's own in `used`."""
        for table in self._tables:
            table.released = table not in used
        self._tables = deque(table for table in self._tables if not table.released)
        self._next = self._tables[-1].stop if self._tables else 0
