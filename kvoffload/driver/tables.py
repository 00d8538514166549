"""Descriptor tables: C arrays that the batch calls read, kept in numpy memory and refilled by vectorised assignment.

The bindings take lists of `CUdeviceptr` and `CUDA_MEMCPY3D_BATCH_OP`. Building such objects costs 132 ns and 3 us each;
objects made once with `_ptr=` over a numpy array cost 5 to 22 ns to pass on, whatever the array holds by then. (They
hold no reference to the array, so the table does.) They are made when a call first needs so many, for a table has room
for thousands and most engines use tens. Bindings 13.5 take the addresses of the arrays themselves.

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
Column = npt.NDArray[np.uint64]
Columns = tuple[Column, Column, Column, Column, Column, Column]  # source, target, their pitches, width, height
_NO_SHAPE = 0, None, None, None, None, None
_OPERAND_POINTER = 1  # CU_MEMCPY_OPERAND_TYPE_POINTER
_MAX_SLICES = 256
_FEWEST_OBJECTS = 64  # made at a time
_MEMORY_UNIFIED = 4  # CU_MEMORYTYPE_UNIFIED: the address says whether it is host or device; uses the *Device fields


def address_of(array: npt.NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


class StridedTable:
    """Room for `capacity` strided operations, as cuMemcpy3DBatchAsync or cuMemcpy2DAsync takes them.

    Attributes:
        rows: one for each operation; `DTYPE_3D` if batched, else `DTYPE_2D`.
        address: of the first operation.
        sources, targets: the addresses in `rows`.
        shape: of the last `fill`: number of rows, order, and the columns but for the addresses.
        objects: one object of the bindings over each of the first operations: as many as were needed so far.
    """

    def __init__(self, capacity: int, *, batched: bool) -> None:
        self.rows = np.zeros(capacity, dtype=DTYPE_3D if batched else DTYPE_2D)
        self.rows["source_type"] = self.rows["target_type"] = _OPERAND_POINTER if batched else _MEMORY_UNIFIED
        if batched:
            self.rows["depth"] = 1
        self.address = address_of(self.rows)
        self.sources, self.targets = self.rows["source"], self.rows["target"]
        self._batched = batched
        self.shape: tuple[Any, ...] = _NO_SHAPE
        self.objects: list[Any] = []

    def fill(self, columns: Columns, order: SourceOrder) -> None:
        """Refill from the front: `columns` are uint64, (n,); but for the addresses, (1,) where all have one value."""
        self.shape = _NO_SHAPE  # an interrupt may come
        ops = self.rows[: len(columns[0])]
        ops["source"], ops["target"], ops["source_pitch"], ops["target_pitch"], ops["width"], ops["height"] = columns
        if self._batched:
            ops["order"] = order
        self.shape = len(ops), order, *columns[2:]

    def make_objects(self, count: int) -> None:
        """Have `objects` of the first `count` operations, before they are passed to a driver without raw addresses."""
        from cuda.bindings import driver

        kind = driver.CUDA_MEMCPY3D_BATCH_OP if self._batched else driver.CUDA_MEMCPY2D
        self.objects = _more_views(self.objects, kind, self.rows, count)


class FlatTable:
    """Room for `capacity` flat copies, as cuMemcpyBatchAsync takes them.

    Attributes:
        attributes: by `SourceOrder`, once `lists` was called: one CUmemcpyAttributes with that order and nothing else
            set, in a list.
    """

    def __init__(self, capacity: int) -> None:
        self._targets, self._sources, self._sizes = np.zeros((3, capacity), dtype=np.uint64)
        self._addresses = tuple(map(address_of, (self._targets, self._sources, self._sizes)))
        self._attribute_rows = np.zeros((4, 6), dtype=np.uint32)  # CUmemcpyAttributes: order, 2 location hints, flags
        self._attribute_rows[:, 0] = np.arange(4)
        self._attribute_address = address_of(self._attribute_rows)
        self._indices = np.zeros(1, dtype=np.uint64)
        self._indices_address = address_of(self._indices)
        self._target_objects: list[Any] = []
        self._source_objects: list[Any] = []
        self.attributes: list[list[Any]] = []
        self._size_list: list[int] = []
        self._given_sizes = self._sizes[:0]
        self._listed_sizes: Column | None = None  # that `_size_list` is of
        self._slices: dict[tuple[int, int], tuple[list[Any], list[Any]]] = {}

    def fill(self, targets: Column, sources: Column, sizes: Column) -> None:
        """Refill from the front; all uint64, (n,); `sizes`, bytes, may be (1,) where all copies have one size."""
        count = len(targets)
        self._targets[:count] = targets
        self._sources[:count] = sources
        if sizes is self._listed_sizes and count <= len(self._size_list):  # columns of plans never change
            return
        self._listed_sizes = None  # an interrupt may come
        self._given_sizes = sizes
        self._size_list = sizes.tolist() * count if len(sizes) == 1 else sizes.tolist()
        self._listed_sizes = sizes

    def lists(self, start: int, stop: int) -> tuple[list[Any], list[Any], list[int]]:
        """Return targets, sources and sizes of copies `[start, stop)` as the bindings take them."""
        pair = self._slices.get((start, stop))
        if pair is None:  # kept, since chunks mostly begin and end at the same places
            if stop > len(self._source_objects) or not self.attributes:
                from cuda.bindings import driver

                # The sources' objects after the targets', and `attributes` last: an interrupt cannot leave half.
                self._target_objects = _more_views(self._target_objects, driver.CUdeviceptr, self._targets, stop)
                self._source_objects = _more_views(self._source_objects, driver.CUdeviceptr, self._sources, stop)
                if not self.attributes:
                    rows = _views(driver.CUmemcpyAttributes, self._attribute_rows, 0, 4)
                    self.attributes = [[each] for each in rows]
            pair = self._target_objects[start:stop], self._source_objects[start:stop]
            if len(self._slices) < _MAX_SLICES:
                self._slices[start, stop] = pair
        targets, sources = pair
        sizes = self._size_list
        return targets, sources, sizes if len(sizes) == stop - start else sizes[start:stop]

    def raw_arrays(self, start: int) -> tuple[int, int, int]:
        """Return the addresses of targets, sources and sizes, uint64 arrays, from copy `start` on."""
        if len(self._given_sizes):  # since the last fill
            self._sizes[: len(self._size_list)] = self._given_sizes
            self._given_sizes = self._sizes[:0]
        targets, sources, sizes = self._addresses
        return targets + 8 * start, sources + 8 * start, sizes + 8 * start

    def raw_attributes(self, order: SourceOrder) -> tuple[int, int]:
        """Return the addresses of the attributes with that source order, and of the array that says: from the first
        copy on.
        """
        return self._attribute_address + order * self._attribute_rows.strides[0], self._indices_address


def _more_views(views: list[Any], kind: Any, rows: npt.NDArray[Any], count: int) -> list[Any]:
    """Return `views` of the first rows, or a new list that begins with them, twice as long or more, with `count` or
    more.
    """
    if count <= len(views):
        return views
    wanted = min(len(rows), max(count, 2 * len(views), _FEWEST_OBJECTS))
    return views + _views(kind, rows, len(views), wanted)


def _views(kind: Any, rows: npt.NDArray[Any], start: int, stop: int) -> list[Any]:
    base, step = address_of(rows), rows.strides[0]
    return [kind(_ptr=base + index * step) for index in range(start, stop)]
