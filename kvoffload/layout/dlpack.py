"""GPU arrays of other libraries, read and exported through DLPack by cuda.core."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

CPU, CUDA, CUDA_HOST, MANAGED = 1, 2, 3, 13  # DLPack's device types


class ArrayView(NamedTuple):
    """The place of an array in memory.

    Attributes:
        address: of its first element, bytes.
        shape, strides: extents, and bytes from one element to the next, by axis.
        itemsize: bytes of an element.
        read_only: whether the array may not be written.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    read_only: bool


def packed_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return the bytes from one element to the next along each axis of a C-contiguous array."""
    return tuple(itemsize * int(np.prod(shape[axis + 1 :], dtype=np.int64)) for axis in range(len(shape)))


class _WithStream:
    """An array for cuda.core whose `__dlpack__` is called with `stream`, or with none if that is None."""

    def __init__(self, array: Any, stream: int | None) -> None:
        self._array = array
        self._options = {} if stream is None else {"stream": stream}

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, index = self._array.__dlpack_device__()
        return int(kind), int(index)

    def __dlpack__(self, **_: Any) -> Any:
        return self._array.__dlpack__(**self._options)


def view_dlpack(array: Any, stream: int | None) -> ArrayView:
    """Return the place of an array with `__dlpack__` in memory, which the result does not keep alive.

    Args:
        stream: a CUstream handle, which the array's library makes wait until the array is computed; -1: it makes no
            stream wait (but JAX takes that for a handle); None: the array's `__dlpack__` is called without a stream
            (JAX: the host waits).

    Raises:
        BufferError, or another error of the array's library: it cannot be exported.
    """
    from cuda.core.utils import StridedMemoryView

    view = StridedMemoryView.from_dlpack(_WithStream(array, stream), -1)
    shape = tuple(int(extent) for extent in view.shape)
    itemsize = int(getattr(array, "itemsize", None) or view.dtype.itemsize)  # the view has no dtype for some types
    strides = view.strides
    in_bytes = packed_strides(shape, itemsize) if strides is None else tuple(int(each) * itemsize for each in strides)
    return ArrayView(int(view.ptr), shape, in_bytes, itemsize, bool(view.readonly))


def export_dlpack(
    address: int,
    nbytes: int,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    owner: object,
    max_version: tuple[int, int] | None,
) -> Any:
    """Return a DLPack capsule over C-contiguous GPU memory; it keeps `owner` alive. The memory's context must be
    current.

    Args:
        max_version: the newest version of DLPack that the consumer knows, or None for the unversioned protocol.
    """
    from cuda.core import Buffer
    from cuda.core.utils import StridedMemoryView

    memory = Buffer.from_handle(address, nbytes, owner=owner)
    view = StridedMemoryView.from_buffer(memory, shape, itemsize=dtype.itemsize, dtype=dtype)
    return view.__dlpack__(max_version=max_version)
