"""Every range of memory of the simulated driver: device and pinned allocations, registered host ranges.

One allocation with its guards:

    zone_start        base                       end = base + nbytes      zone_end
        | guard >= 512 |  exactly the bytes asked  |  guard >= 512 bytes    |

A freed allocation stays a while, poisoned, so that its address is known to be wrong instead of being ordinary memory.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvoffload.simulator import space
from kvoffload.simulator.errors import INVALID_VALUE, RefusedError, SimulatorError

FRESH_BYTE = 0xA5  # what new memory holds: never zero, which looks like a right answer too often
FREED_BYTE = 0xDE
GUARD_BYTE = 0xC3
GUARD_BYTES = 512
PAGE_BYTES = 4096
QUARANTINE_BYTES = 64 << 20  # of freed memory kept to catch late uses

Indices = NDArray[np.int64]


class Kind(Enum):
    DEVICE = "device"
    PINNED = "pinned"  # cuMemHostAlloc
    REGISTERED = "registered"  # cuMemHostRegister: memory of the process
    FREED = "freed"


@dataclass(slots=True, eq=False)
class Region:
    """A known range `[base, end)`; a copy must not leave it. `pending` counts the queued operations that refer to it.

    Mapped virtual memory without a gap is one region: copies may cross from handle to handle. Then each handle maps
    `handle_bytes`, the last one the rest; for other memory `handle_bytes` is 0. `pages`: the bytes of a registered
    range that the process has unmapped.
    """

    kind: Kind
    zone_start: int
    base: int
    end: int
    zone_end: int
    context: Any
    storage: space.Bytes | None = field(default=None, repr=False)
    pending: int = 0
    handle_bytes: int = 0
    pages: space.Bytes | None = field(default=None, repr=False)

    @property
    def nbytes(self) -> int:
        return self.end - self.base

    @property
    def on_device(self) -> bool:
        return self.kind is Kind.DEVICE

    def range_at(self, address: int) -> tuple[int, int]:
        """Return base and bytes of what cuMemGetAddressRange returns for an address in it: of mapped memory, one
        handle.
        """
        if not self.handle_bytes:
            return self.base, self.nbytes
        base = address - (address - self.base) % self.handle_bytes
        return base, min(self.handle_bytes, self.end - base)

    def serves(self, device: int) -> bool:
        return self.kind is not Kind.FREED and (not self.on_device or self.context.device == device)

    def guards_intact(self) -> bool:
        before = space.view(self.zone_start, self.base - self.zone_start)
        after = space.view(self.end, self.zone_end - self.end)
        return bool((before == GUARD_BYTE).all() and (after == GUARD_BYTE).all())


class _Columns(NamedTuple):
    """The table as arrays, for lookups of many addresses at once; row i is `regions[i]`, and row 0 is below all."""

    regions: list[Region]
    zone_starts: Indices
    zone_ends: Indices
    bases: Indices
    ends: Indices


_LOWEST = np.iinfo(np.int64).min
_BELOW_ALL = Region(Kind.FREED, _LOWEST, _LOWEST, _LOWEST, _LOWEST, None)


def _pages(start: int, end: int) -> tuple[int, int]:
    return start // PAGE_BYTES * PAGE_BYTES, -(-end // PAGE_BYTES) * PAGE_BYTES


class MemoryTable:
    """Regions sorted by address; they never overlap. Freed ones are in it while they are in quarantine."""

    def __init__(self) -> None:
        self._regions: list[Region] = []
        self._starts: list[int] = []
        self._columns: _Columns | None = None
        self._quarantine: deque[Region] = deque()
        self._mapped = space.MappedPages()

    def allocate(self, kind: Kind, sizes: Sequence[int], alignment: int, contexts: Sequence[Any]) -> list[Region]:
        """Return new regions of exactly these bytes, filled with FRESH_BYTE, at addresses that follow each other; only
        the first is aligned. Raises MemoryError like numpy.
        """
        nbytes = sum(sizes)
        storage = np.empty(nbytes + 2 * GUARD_BYTES + alignment, np.uint8)
        zone_start = space.address_of(storage)
        first = -(-(zone_start + GUARD_BYTES) // alignment) * alignment
        start = first - zone_start
        storage[:start] = GUARD_BYTE
        storage[start : start + nbytes] = FRESH_BYTE
        storage[start + nbytes :] = GUARD_BYTE
        bases = list(itertools.accumulate(sizes, initial=first))
        edges = [zone_start, *bases[1:-1], zone_start + storage.size]  # guards: before the first and after the last
        zones = zip(itertools.pairwise(edges), itertools.pairwise(bases), contexts, strict=True)
        regions = [
            Region(kind, low, base, end, high, context, storage[low - zone_start : high - zone_start])
            for (low, high), (base, end), context in zones
        ]
        for region in regions:
            self._insert(region)
        return regions

    def register(self, address: int, nbytes: int, context: Any) -> Region:
        region = Region(Kind.REGISTERED, address, address, address + nbytes, address + nbytes, context)
        self._insert(region)
        return region

    def remove(self, region: Region) -> None:
        """Remove a range; memory that the simulator allocated is poisoned and goes into quarantine first."""
        if region.storage is None:
            self._drop(region)
            return
        region.storage[:] = FREED_BYTE
        region.kind = Kind.FREED
        self._quarantine.append(region)
        held = sum(freed.storage.size for freed in self._quarantine if freed.storage is not None)
        while held > QUARANTINE_BYTES:
            oldest = self._quarantine.popleft()
            held -= oldest.storage.size if oldest.storage is not None else 0
            self._drop(oldest)

    def live(self, context: Any = None) -> list[Region]:
        found = [region for region in list(self._regions) if region.kind is not Kind.FREED]
        return found if context is None else [region for region in found if region.context is context]

    def at(self, address: int) -> Region | None:
        region = self._zone(address)
        inside = region is not None and region.kind is not Kind.FREED and region.base <= address < region.end
        return region if inside else None

    def find(self, address: int, nbytes: int) -> Region | None:
        """Return the live region that holds all of a range, or None for pageable host memory.

        Raises RefusedError for an address that is neither, and for a range that leaves its region.
        """
        region = self._zone(address)
        if region is None:
            self._require_pageable(address, nbytes)
        elif region.kind is Kind.FREED or address < region.base or address + nbytes > region.end:
            raise RefusedError(INVALID_VALUE)
        return region

    def locate(self, first: Indices, end: Indices) -> tuple[list[Region], bool]:
        """Return the distinct regions of many ranges `[first, end)`, found as by `find`, and whether any range is
        pageable.
        """
        table = self._table()
        index = np.searchsorted(table.zone_starts, first, side="right") - 1
        inside = first < table.zone_ends[index]
        hit = index[inside]
        if hit.size and ((first[inside] < table.bases[hit]) | (end[inside] > table.ends[hit])).any():
            raise RefusedError(INVALID_VALUE)
        regions = [table.regions[i] for i in np.unique(hit).tolist()]
        if any(region.kind is Kind.FREED for region in regions):
            raise RefusedError(INVALID_VALUE)
        for low, high in zip(first[~inside].tolist(), end[~inside].tolist(), strict=True):
            self._require_pageable(low, high - low)
        return regions, len(hit) < len(first)

    def physical(self, addresses: Indices) -> Indices:
        """Return where the bytes of these addresses are now: elsewhere if registered memory was unmapped."""
        moved = addresses.copy()
        for region in self.live():
            if region.pages is not None:
                inside = (region.base <= addresses) & (addresses < region.end)
                moved[inside] += space.address_of(region.pages) - region.base
        return moved

    def reachable(self, addresses: Indices, nbytes: int, device: int) -> bool:
        """Return whether a kernel on a device may touch `nbytes` at each address: its own memory, or pinned host
        memory.
        """
        region = self.at(int(addresses.min()))  # mostly all are in one region, or each row is: their ends show it
        if region is not None and int(addresses.max()) + nbytes <= region.end:
            return region.serves(device)
        table = self._table()
        if addresses.ndim > 1:
            first, end = addresses.min(axis=-1).reshape(-1), addresses.max(axis=-1).reshape(-1) + nbytes
            if self._within(table, first, end, device):
                return True
        first = addresses.reshape(-1)
        return self._within(table, first, first + nbytes, device)

    @staticmethod
    def _within(table: _Columns, first: Indices, end: Indices, device: int) -> bool:
        index = np.searchsorted(table.bases, first, side="right") - 1
        if (end > table.ends[index]).any():
            return False
        return all(table.regions[i].serves(device) for i in set(index.tolist()))

    def overlapping(self, address: int, nbytes: int) -> bool:
        """Return whether a range shares a byte with our own memory, or a page with a registered range."""
        low, high = _pages(address, address + nbytes)
        index = max(bisect_right(self._starts, low) - 1, 0)
        for region in self._regions[index:]:
            if region.zone_start >= high:
                break
            if region.kind is Kind.REGISTERED:
                region_low, region_high = _pages(region.base, region.end)
                if region_low < high and low < region_high:
                    return True
            elif region.zone_start < address + nbytes and address < region.zone_end:
                return True
        return False

    def mapped(self, address: int, nbytes: int) -> bool:
        return 0 < address < space.ADDRESS_LIMIT - nbytes and (address, nbytes) in self._mapped

    def can_be_pinned(self, address: int, nbytes: int) -> bool:
        return 0 < address < space.ADDRESS_LIMIT - nbytes and self._mapped.can_be_pinned(address, nbytes)

    def _zone(self, address: int) -> Region | None:
        index = bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        region = self._regions[index]
        return region if address < region.zone_end else None

    def _require_pageable(self, address: int, nbytes: int) -> None:
        following = bisect_right(self._starts, address)
        runs_into = following < len(self._starts) and self._starts[following] < address + nbytes
        if runs_into or not self.mapped(address, nbytes):
            raise RefusedError(INVALID_VALUE)

    def _table(self) -> _Columns:
        if self._columns is None:
            regions = [_BELOW_ALL, *self._regions]
            edges = [(region.zone_start, region.zone_end, region.base, region.end) for region in regions]
            self._columns = _Columns(regions, *np.array(edges, np.int64).reshape(-1, 4).T.copy())
        return self._columns

    def _insert(self, region: Region) -> None:
        index = bisect_right(self._starts, region.zone_start)
        for other in self._regions[max(index - 1, 0) : index + 1]:
            if other.zone_start < region.zone_end and region.zone_start < other.zone_end:
                raise SimulatorError(
                    f"{region} overlaps {other}: was registered memory freed before it was unregistered?"
                )
        self._starts.insert(index, region.zone_start)
        self._regions.insert(index, region)
        self._columns = None

    def _drop(self, region: Region) -> None:
        index = bisect_right(self._starts, region.zone_start) - 1
        del self._regions[index], self._starts[index]
        self._columns = None
