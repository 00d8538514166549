"""GPU memory that the device frees: as bytes, and as arrays that other libraries take without a copy.

Importing waits on the GPU. A consumer names its stream (`array.__dlpack__(stream=...)`, see the DLPack protocol,
https://dmlc.github.io/dlpack/latest/python_spec.html), and that stream is made to wait for the transfers in flight that
touch the memory. Consumers of `__cuda_array_interface__` (version 3) are told a stream to wait for.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvoffload.device.pinned import UInt8Array
from kvoffload.device.streams import stream_handle
from kvoffload.driver import address_of
from kvoffload.errors import ClosedError
from kvoffload.layout.dlpack import CPU, CUDA, ArrayView, export_dlpack, packed_strides
from kvoffload.layout.dtypes import NARROW_BYTES, dtype_name, element_bytes

if TYPE_CHECKING:
    from kvoffload.device.device import Device
    from kvoffload.engine.engine import OffloadEngine


class DeviceBuffer:
    """GPU memory that the device frees: with `close`, after the buffer is garbage, or when the device closes.

    Made by `Device.allocate`. Other libraries can take it as an array of bytes (see `DeviceArray` for other types);
    what they make of it keeps the buffer alive, but not the device open.

    Attributes:
        device: on which it lies.
        address: device address, bytes.
        nbytes: exactly as many as asked for.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        with device.current():
            self.address = device.driver.allocate(nbytes)
        self.nbytes = nbytes
        self.device = device
        self._claim = device.claim(self, partial(device.driver.free, self.address))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self._bytes().__cuda_array_interface__

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._bytes().__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self._bytes().__dlpack__(**options)

    def _bytes(self) -> DeviceArray:
        return DeviceArray(self, (self.nbytes,), np.uint8)

    def copy_from(self, array: npt.ArrayLike, offset: int = 0) -> None:
        """Copy the bytes of a host array into the buffer from `offset` bytes on; returns when they are there.

        Ordered after work on the legacy default stream, not after work on other streams.

        Raises:
            ValueError: the array does not fit.
            ClosedError: the buffer or its device is closed.
        """
        self.check()
        source = np.ascontiguousarray(array)
        if offset < 0 or offset + source.nbytes > self.nbytes:
            raise ValueError(f"array of {source.nbytes} bytes at offset {offset} does not fit into {self.nbytes} bytes")
        if source.nbytes:
            with self.device.current():
                self.device.driver.copy_to_device(self.address + offset, address_of(source), source.nbytes)

    def to_numpy(self) -> UInt8Array:
        """The bytes as a new array, uint8, (nbytes,); ordered after work on the legacy default stream alone."""
        self.check()
        target = np.empty(self.nbytes, dtype=np.uint8)
        with self.device.current():
            self.device.driver.copy_to_host(address_of(target), self.address, self.nbytes)
        return target

    def close(self) -> None:
        """Free the memory. No transfer may be using it. Idempotent."""
        if self._claim.alive and not self.device.foreign:
            with self.device.current():
                self._claim.free()

    def check(self) -> None:
        """Raise ClosedError if the memory has been freed."""
        if not self._claim.alive:
            raise ClosedError(f"the buffer of {self.nbytes} bytes at {self.address:#x} is closed")

    def __enter__(self) -> DeviceBuffer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "" if self._claim.alive else ", closed"
        return f"DeviceBuffer({self.address:#x}, {self.nbytes} bytes{state})"


class DeviceArray:
    """A C-contiguous array in GPU memory that other libraries take without a copy. Made by `Device.empty`.

    CuPy: `cupy.from_dlpack(array)` or `cupy.asarray(array)`; PyTorch: `torch.from_dlpack(array)`; JAX:
    `kvoffload.jax.OwnedCache`, or `jax.dlpack.from_dlpack(array)`. What they make of it keeps the memory alive, but not
    the device open: it must not be used after the device is closed. On a simulated device it is exported as what it is,
    host memory: `numpy.from_dlpack(array)`; the export then waits, on the host, for the transfers that touch it.

    Args:
        buffer: the memory.
        shape: extents, all positive.
        dtype: of an element; see `dtype_name`.

    Attributes:
        buffer: the memory.
        address: device address, bytes.
        shape, dtype, itemsize, nbytes: as numpy has them; dtype is a name, such as "bfloat16".

    Raises:
        ValueError: the array has not the size of the buffer, or a size is not positive.
        LayoutError: `dtype` is no type of one element, or one of a size that is not known.
    """

    def __init__(self, buffer: DeviceBuffer, shape: Sequence[int], dtype: Any) -> None:
        self.buffer = buffer
        self.address = buffer.address
        self.dtype = dtype_name(dtype)
        self.itemsize = element_bytes(self.dtype)
        self.shape = check_shape(shape)
        self.nbytes = math.prod(self.shape) * self.itemsize
        if self.nbytes != buffer.nbytes:
            raise ValueError(f"shape {self.shape} of {self.dtype} is {self.nbytes} bytes, the buffer {buffer.nbytes}")

    def view(self, dtype: Any) -> DeviceArray:
        """The same memory as elements of another type of the same size.

        Raises:
            ValueError: the sizes differ.
        """
        if element_bytes(dtype_name(dtype)) != self.itemsize:
            raise ValueError(f"dtype must have {self.itemsize} bytes like {self.dtype}, got {dtype!r:.80}")
        return DeviceArray(self.buffer, self.shape, dtype)

    def array_view(self) -> ArrayView:
        """Where the elements lie. ClosedError if the memory has been freed."""
        self.buffer.check()
        strides = packed_strides(self.shape, self.itemsize)
        return ArrayView(self.address, self.shape, strides, self.itemsize, read_only=False)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (CPU, 0) if self.buffer.device.simulated else (CUDA, self.buffer.device.index)

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A capsule for another library, as the DLPack protocol has it.

        Args:
            stream: whose work from now on follows the transfers in flight that touch the memory; None: the legacy
                default stream; -1: none.
            max_version: the newest version of the protocol that the consumer knows.
            dl_device, copy: None, or what asks for no copy.

        Raises:
            BufferError: a copy was asked for, another device, or a type that cannot be exported: "bfloat16" and the
                types of 8 bits and fewer, for which `view("uint16")` or `view("uint8")` goes, to be seen as what it is
                on the other side.
            ClosedError: the memory has been freed, or the device is closed.
        """
        self.buffer.check()
        if copy or (dl_device is not None and tuple(dl_device) != self.__dlpack_device__()):
            raise BufferError(f"{self!r} is exported without a copy, and only where it is")
        dtype = self._numpy_dtype()
        device = self.buffer.device
        if device.simulated:
            for engine in self._engines():
                engine.drain()
            content = device.simulator.view(self.address, self.nbytes).view(dtype).reshape(self.shape)
            return content.__dlpack__() if max_version is None else content.__dlpack__(max_version=max_version)
        if stream is None or operator.index(stream) != -1:
            handle = stream_handle(stream or 0, "stream")
            for engine in self._engines():
                engine.callers.order_all_before(handle)
        return self._export(dtype, max_version)

    def _engines(self) -> list[OffloadEngine]:
        """Whose transfers may touch the memory."""
        return self.buffer.device.engines_over(self.address, self.nbytes)

    def _export(self, dtype: np.dtype[Any], max_version: tuple[int, int] | None) -> Any:
        with self.buffer.device.current():  # cuda.core asks the driver where the memory is
            return export_dlpack(self.address, self.nbytes, self.shape, dtype, self.buffer, max_version)

    def _numpy_dtype(self) -> np.dtype[Any]:
        if self.dtype in NARROW_BYTES:
            same_size = f"uint{8 * self.itemsize}"
            raise BufferError(f"{self.dtype} is not exported; view({same_size!r}) is, to be seen as {self.dtype} there")
        return np.dtype(self.dtype)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3. `stream` is one that ends after the transfers in flight that touch the memory, None if none are.

        Raises:
            AttributeError: numpy has no such type.
            ClosedError: the memory has been freed, or the device is closed.
        """
        self.buffer.check()
        try:
            typestr = self._numpy_dtype().str
        except BufferError as error:
            raise AttributeError(str(error)) from None
        data = (self.address, False)
        interface = {"shape": self.shape, "typestr": typestr, "data": data, "version": 3, "strides": None}
        return interface | {"stream": self._stream_behind_transfers()}

    def _stream_behind_transfers(self) -> int | None:
        busy = [engine for engine in self._engines() if engine.statistics().in_flight]
        if not busy:
            return None
        wait_stream = busy[0].callers.wait_stream()
        for engine in busy:
            engine.callers.order_all_before(wait_stream)
        return wait_stream

    def __repr__(self) -> str:
        return f"DeviceArray({self.shape}, {self.dtype}, {self.address:#x})"


def check_shape(shape: Any) -> tuple[int, ...]:
    """`shape` as a tuple of positive ints."""
    try:
        extents = tuple(operator.index(extent) for extent in shape)
    except TypeError:
        extents = ()
    if not extents or min(extents) < 1:
        raise ValueError(f"shape must be a sequence of positive integers, got {shape!r:.80}")
    return extents
