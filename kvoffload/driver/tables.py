"""Descriptor tables: C arrays that the batch calls read, kept in numpy memory and refilled by vectorised assignment.

The bindings take lists of `CUdeviceptr` and `CUDA_MEMCPY3D_BATCH_OP`. Building such objects costs 132 ns and 3 us each;
objects made once with `_ptr=` over a numpy array cost 5 to 22 ns to pass on, whatever the array holds by then. (They
hold no reference to the array, so the table does.) Bindings 13.5 take the addresses of the arrays themselves.

The driver reads a table during the call, so a table may be refilled as soon as the call has returned.
"""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import numpy.typing as npt


class SourceOrder(enum.IntEnum):
    """CUmemcpySrcAccessOrder: when a copy may read its source."""

    STREAM = 1  # in stream order
    ANY = 3  # at any moment from the submission on, events or not


# CUDA_MEMCPY3D_BATCH_OP and CUDA_MEMCPY2D of cuda.h, for pointer operands on a 64-bit machine.
DTYPE_3D = np.dtype(
    {
        "names": [
            *("source_type", "source", "source_pitch", "target_type", "target", "target_pitch"),
            *("width", "height", "depth", "order"),
        ],
        "formats": ["u4", "u8", "u8", "u4", "u8", "u8", "u8", "u8", "u8", "u4"],
        "offsets": [0, 8, 16, 40, 48, 56, 80, 88, 96, 104],
        "itemsize": 112,
    }
)
DTYPE_2D = np.dtype(
    {
        "names": ["source_type", "source", "source_pitch", "target_type", "target", "target_pitch", "width", "height"],
        "formats": ["u4", "u8", "u8", "u4", "u8", "u8", "u8", "u8"],
        "offsets": [16, 32, 48, 72, 88, 104, 112, 120],
        "itemsize": 128,
    }
)
_OPERAND_POINTER = 1  # CU_MEMCPY_OPERAND_TYPE_POINTER
_MAX_SLICES = 256
_MEMORY_UNIFIED = 4  # CU_MEMORYTYPE_UNIFIED: the address says whether it is host or device; uses the *Device fields


def address_of(array: npt.NDArray[Any]) -> int:
    """The address of an array's first element."""
    return int(array.__array_interface__["data"][0])


class StridedTable:
    """Room for `capacity` strided operations, as cuMemcpy3DBatchAsync or cuMemcpy2DAsync takes them."""

    def __init__(self, capacity: int, *, batched: bool) -> None:
        self.capacity = capacity
        self._rows = np.zeros(capacity, dtype=DTYPE_3D if batched else DTYPE_2D)
        self._rows["source_type"] = self._rows["target_type"] = _OPERAND_POINTER if batched else _MEMORY_UNIFIED
        if batched:
            self._rows["depth"] = 1
        self._batched = batched
        self._objects: list[Any] = []

    @property
    def address_3d(self) -> int:
        return address_of(self._rows)

    def fill(self, columns: dict[str, npt.NDArray[np.uint64]], order: SourceOrder) -> None:
        """Refill from the front. `columns`: source, target, their pitches, width, height; uint64, (n,) or (1,)."""
        rows = self._rows[: len(columns["source"])]
        for name, column in columns.items():
            rows[name] = column
        if self._batched:
            rows["order"] = order

    def objects_3d(self, count: int) -> list[Any]:
        if not self._objects:
            from cuda.bindings.driver import CUDA_MEMCPY3D_BATCH_OP

            self._objects = _views(CUDA_MEMCPY3D_BATCH_OP, self._rows)
        return self._objects if count == self.capacity else self._objects[:count]

    def object_2d(self, index: int) -> Any:
        if not self._objects:
            from cuda.bindings.driver import CUDA_MEMCPY2D

            self._objects = _views(CUDA_MEMCPY2D, self._rows)
        return self._objects[index]


class FlatTable:
    """Room for `capacity` flat copies, as cuMemcpyBatchAsync takes them."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._targets, self._sources, self._sizes = np.zeros((3, capacity), dtype=np.uint64)
        self._attribute_rows = np.zeros((4, 6), dtype=np.uint32)  # CUmemcpyAttributes: order, 2 location hints, flags
        self._attribute_rows[:, 0] = np.arange(4)
        self._indices = np.zeros(1, dtype=np.uint64)
        self._target_objects: list[Any] = []
        self._source_objects: list[Any] = []
        self._count = 0
        self._size_list: list[int] | None = None
        self._slices: dict[tuple[int, int], tuple[list[Any], list[Any]]] = {}
        self._attribute_lists: list[list[Any]] = []

    def fill(
        self,
        targets: npt.NDArray[np.uint64],
        sources: npt.NDArray[np.uint64],
        sizes: npt.NDArray[np.uint64],
    ) -> None:
        """Refill from the front; all uint64, (n,); `sizes`, bytes, may be (1,) where all copies have one size."""
        count = self._count = len(targets)
        self._targets[:count] = targets
        self._sources[:count] = sources
        self._sizes[:count] = sizes
        self._size_list = [int(sizes[0])] * count if len(sizes) == 1 else None

    def lists(self, start: int, stop: int) -> tuple[list[Any], list[Any], list[int]]:
        """Targets, sources and sizes of copies `[start, stop)` as the bindings take them."""
        if not self._target_objects:
            from cuda.bindings.driver import CUdeviceptr

            self._target_objects = _views(CUdeviceptr, self._targets)
            self._source_objects = _views(CUdeviceptr, self._sources)
        if self._size_list is None:  # once a fill: per chunk it costs half as much again
            self._size_list = self._sizes[: self._count].view(np.int64).tolist()
        targets, sources = self._slices.get((start, stop)) or self._slice(start, stop)
        return targets, sources, self._size_list[start:stop]

    def _slice(self, start: int, stop: int) -> tuple[list[Any], list[Any]]:
        """The objects of copies `[start, stop)`; kept, since chunks mostly begin and end at the same places."""
        pair = self._target_objects[start:stop], self._source_objects[start:stop]
        if len(self._slices) < _MAX_SLICES:
            self._slices[start, stop] = pair
        return pair

    def attributes(self, order: SourceOrder) -> list[Any]:
        """One CUmemcpyAttributes with that source order and nothing else set, in a list."""
        if not self._attribute_lists:
            from cuda.bindings.driver import CUmemcpyAttributes

            self._attribute_lists = [[each] for each in _views(CUmemcpyAttributes, self._attribute_rows)]
        return self._attribute_lists[order]

    def raw_arrays(self, start: int) -> tuple[int, int, int]:
        """Addresses of targets, sources and sizes, uint64 arrays, from copy `start` on."""
        at = 8 * start
        return address_of(self._targets) + at, address_of(self._sources) + at, address_of(self._sizes) + at

    def raw_attributes(self, order: SourceOrder) -> tuple[int, int]:
        """Addresses of the attributes with that source order, and of the array that says: from the first copy on."""
        return address_of(self._attribute_rows) + order * self._attribute_rows.strides[0], address_of(self._indices)


def _views(kind: Any, rows: npt.NDArray[Any]) -> list[Any]:
    """One bindings object over each row of `rows`."""
    base, step = address_of(rows), rows.strides[0]
    return [kind(_ptr=base + index * step) for index in range(len(rows))]
