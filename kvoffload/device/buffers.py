"""GPU memory that the device frees: as bytes, and as arrays that other libraries take without a copy.

An import waits on the GPU. A consumer names its stream (`array.__dlpack__(stream=...)`, see the DLPack protocol,
https://dmlc.github.io/dlpack/latest/python_spec.html), and we make that stream wait for the transfers in flight that
touch the memory. A consumer of `__cuda_array_interface__` (version 3) gets a stream to wait for.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvoffload.device.ownership import DeviceUser, OpenDevice
from kvoffload.device.streams import stream_handle
from kvoffload.driver import address_of
from kvoffload.driver.core import LEGACY_STREAM
from kvoffload.errors import ClosedError, DriverError
from kvoffload.internal.checks import index_or
from kvoffload.internal.teardown import Closing
from kvoffload.internal.types import ArrayLike, UInt8Array
from kvoffload.layout.dlpack import CPU, CUDA, ArrayView, export_dlpack, packed_strides
from kvoffload.layout.dtypes import NARROW_BYTES, dtype_name, element_bytes


class DeviceBuffer(Closing):
    """GPU memory, made by `Device.allocate`. A context manager.

    It is freed by `close`, when its device closes, or, once the buffer is garbage, by the device's next `allocate`,
    `stream` or new engine. Other libraries can take it as an array of uint8, as by `cupy.from_dlpack(buffer)`. Their
    arrays keep the buffer from becoming garbage; do not use them after `close`, or after the device is closed.

    Attributes:
        device: its device.
        address: its device address.
        nbytes: its size, exactly as asked for.
    """

    def __init__(self, device: OpenDevice, nbytes: int) -> None:
        driver = device.driver
        addresses: list[Any] = []  # the truth about what must be freed
        copying: list[bool] = []  # not empty: a `copy_from` has not ended, or was interrupted

        def free() -> None:  # it must not refer to the buffer
            if copying:  # an interrupted copy may still be writing to the memory
                driver.stream_synchronize(LEGACY_STREAM)
                copying.clear()
            driver.destroy("cuMemFree", addresses)

        self.device = device
        self.nbytes = nbytes
        self._copying = copying
        with device.current():
            self._resource = device.adopt(self, free)
            try:
                driver.create("cuMemAlloc", addresses, nbytes)
            except DriverError:
                self._resource.free()
                raise
        self.address = int(addresses[0])

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self._bytes().__cuda_array_interface__

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._bytes().__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self._bytes().__dlpack__(**options)

    def _bytes(self) -> DeviceArray:
        return DeviceArray(self, (self.nbytes,), np.uint8)

    def copy_from(self, array: ArrayLike, *, offset: int = 0) -> None:
        """Copy the bytes of a host array into the buffer from byte `offset` on. Returns when they are there; the array
        is yours again then.

        The copy runs after the work on the legacy default stream, and does not wait for other streams or transfers: if
        they use these bytes, wait for them first.

        Args:
            array: bytes, or anything that numpy turns into an array; copied in C order.
            offset: in bytes.

        Raises:
            ValueError: the array does not fit at `offset`, or numpy makes no array of it.
            TypeError: `array` is None, a masked array, or holds Python objects; `offset` is no integer.
            ClosedError: the buffer or its device is closed, or this is a forked child.
            DriverError: the driver failed; the buffer may hold any bytes there.
        """
        self.check()
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError(
                "array must not be masked: the bytes behind its mask are undefined; fill it with array.filled()"
            )
        # numpy would make one byte of b""
        source = np.frombuffer(array, np.uint8) if isinstance(array, bytes | bytearray) else np.ascontiguousarray(array)
        if source.dtype.hasobject:
            raise TypeError(
                f"array must hold plain values, got {array!r:.80}, which numpy holds as pointers ({source.dtype})"
            )
        start = index_or(offset, None)
        if start is None:
            raise TypeError(f"offset must be an integer, got {offset!r:.80}")
        if start < 0 or start + source.nbytes > self.nbytes:
            raise ValueError(f"array of {source.nbytes} bytes at offset {start} does not fit into {self.nbytes} bytes")
        if source.nbytes:
            with self.device.current():
                self._copying += (True,)
                self.device.driver.copy_to_device(self.address + start, address_of(source), source.nbytes)
                del self._copying[-1:]

    def to_numpy(self) -> UInt8Array:
        """Return the bytes as a new host array, uint8, (nbytes,), when they are there. It follows the legacy default
        stream, and waits for no other stream or transfer: if they write the buffer, wait for them first.

        Raises:
            ClosedError: the buffer or its device is closed, or this is a forked child.
            DriverError: the driver failed.
        """
        self.check()
        target = np.empty(self.nbytes, dtype=np.uint8)
        with self.device.current():
            self.device.driver.copy_to_host(address_of(target), self.address, self.nbytes)
        return target

    def close(self) -> None:
        """Free the memory. End every transfer, kernel and use of another library's array over it first: nothing is
        checked. Idempotent; does nothing in a forked child.

        If the CUDA context is lost, the memory is gone with it.

        Raises:
            DriverError: the driver failed for another reason than a lost context. Call it again.
        """
        try:
            self._resource.free()
        except DriverError as error:
            if not error.sticky:
                raise
            self._resource.drop()

    def check(self) -> None:
        """Raise ClosedError if the memory has been freed."""
        if not self._resource.alive:
            raise ClosedError(f"the buffer of {self.nbytes} bytes at {self.address:#x} is closed")

    def __repr__(self) -> str:
        state = "" if self._resource.alive else ", closed"
        return f"DeviceBuffer({self.address:#x}, {self.nbytes} bytes{state})"


class DeviceArray:
    """A C-contiguous array in GPU memory that other libraries take without a copy. Made by `Device.empty`.

    CuPy: `cupy.from_dlpack(array)` or `cupy.asarray(array)`; PyTorch: `torch.from_dlpack(array)`; JAX:
    `kvoffload.jax.OwnedCache`, or `jax.dlpack.from_dlpack(array)`. The consumer's stream waits for the transfers that
    are in flight then, of engines with planes in this memory; for later ones use `job.order_before`. For transfers to
    wait for that library's work, name it in their `after`. A simulated device exports host memory,
    `numpy.from_dlpack(array)`, and waits for such transfers on the host.

    Arrays of "bfloat16" and float8 types are not exported: `from_dlpack` raises BufferError, and there is no
    `__cuda_array_interface__`. `kvoffload.jax` takes them as they are. Elsewhere export `array.view("uint16")` (float8:
    "uint8"), and view that as the right type there.

    This array and those of other libraries keep the memory from being freed as garbage. Use none of them after the
    device, or `buffer`, is closed.

    Args:
        buffer: the memory.
        shape: at least one extent, all positive.
        dtype: type of the elements, as for `Device.empty`.
        offset: the byte of the buffer at which the array begins. None: the array fills the buffer exactly.

    Attributes:
        buffer: the memory.
        address: its device address.
        shape, dtype, itemsize, nbytes: as in numpy, except that `dtype` is a name, such as "bfloat16".

    Raises:
        ValueError: the array does not fill the buffer, or does not fit at `offset`; or an extent is not positive.
        LayoutError: `dtype` is not the type of one element, or its size is unknown.
    """

    def __init__(self, buffer: DeviceBuffer, shape: Sequence[int], dtype: Any, *, offset: int | None = None) -> None:
        self.buffer = buffer
        self.address = buffer.address + (offset or 0)
        self.dtype = dtype_name(dtype)
        self.itemsize = element_bytes(self.dtype)
        self.shape = check_shape(shape)
        self.nbytes = math.prod(self.shape) * self.itemsize
        fits = self.nbytes == buffer.nbytes if offset is None else 0 <= offset <= buffer.nbytes - self.nbytes
        if not fits:
            where = "" if offset is None else f" from byte {offset} on"
            raise ValueError(
                f"shape {self.shape} of {self.dtype} is {self.nbytes} bytes{where}, the buffer {buffer.nbytes}"
            )

    def view(self, dtype: Any) -> DeviceArray:
        """Return the same memory and shape, with elements of another type of the same size. Nothing is copied; the
        result keeps the memory from being freed as garbage, as this array does.

        Raises:
            ValueError: the sizes of the elements differ.
            LayoutError: `dtype` is not the type of one element, or its size is unknown.
        """
        if element_bytes(dtype_name(dtype)) != self.itemsize:
            raise ValueError(f"dtype must have {self.itemsize} bytes like {self.dtype}, got {dtype!r:.80}")
        return DeviceArray(self.buffer, self.shape, dtype, offset=self.address - self.buffer.address)

    def array_view(self) -> ArrayView:
        """Return the array's address, shape, strides in bytes and itemsize, for layouts. Nothing waits; the result does
        not keep the memory. ClosedError if the memory is freed.
        """
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
        """Return a capsule for another library, as the DLPack protocol defines it.

        Args:
            stream: the consumer's stream; its later work starts after the transfers in flight that touch the memory.
                None: the legacy default stream; -1: no stream waits. A simulated device ignores it, and waits on the
                host.
            max_version: the newest version of the protocol that the consumer knows.
            dl_device, copy: None, or values that ask for no copy.

        Raises:
            BufferError: a copy or another device was asked for; or the type is "bfloat16" or a float8 type. Export
                `view("uint16")` or `view("uint8")` instead, and view that as the right type in the other library.
            ClosedError: the memory is freed, or the device is closed.
            CapacityError, TransferError, ValueError, TypeError: the stream cannot wait, see `Job.order_before`.
        """
        self.buffer.check()
        if copy or (dl_device is not None and tuple(dl_device) != self.__dlpack_device__()):
            raise BufferError(
                f"{self!r} is exported without a copy, and only where it is: on {self.__dlpack_device__()}"
            )
        dtype = self._numpy_dtype()
        device = self.buffer.device
        if device.simulated:
            for engine in self._engines():
                engine.drain()
            memory = device.simulator.exported(self.address, self.nbytes, owner=self.buffer)
            content = memory.view(dtype).reshape(self.shape)
            return content.__dlpack__() if max_version is None else content.__dlpack__(max_version=max_version)
        if stream is None or operator.index(stream) != -1:
            handle = stream_handle(stream or 0, "stream")
            for engine in self._engines():
                engine.order_all_before(handle)
        with device.current():  # cuda.core asks the driver where the memory is
            return export_dlpack(self.address, self.nbytes, self.shape, dtype, self.buffer, max_version)

    def _engines(self) -> list[DeviceUser]:
        return self.buffer.device.engines_over(self.address, self.nbytes)

    def _numpy_dtype(self) -> np.dtype[Any]:
        if self.dtype in NARROW_BYTES:
            same_size = f"uint{8 * self.itemsize}"
            raise BufferError(
                f"{self.dtype} is not exported; view({same_size!r}) is: view that as {self.dtype} in the other library"
            )
        return np.dtype(self.dtype)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3. Its `stream` waits for the transfers in flight that touch the memory; None if there are none.

        Raises:
            AttributeError: numpy has no type for `dtype`.
            ClosedError: the memory is freed, or the device is closed.
            CapacityError: transfers wait on the host, since the driver's queues are full: `poll` the engine.
        """
        self.buffer.check()
        try:
            typestr = self._numpy_dtype().str
        except BufferError as error:
            raise AttributeError(str(error)) from None
        stream = None
        busy = [engine for engine in self._engines() if engine.in_flight]
        if busy:
            stream = busy[0].wait_stream()
            for engine in busy:
                engine.order_all_before(stream)
            stream = stream if any(engine.in_flight for engine in busy) else None
        data = (self.address, False)
        return {"shape": self.shape, "typestr": typestr, "data": data, "version": 3, "strides": None, "stream": stream}

    def __repr__(self) -> str:
        return f"DeviceArray({self.shape}, {self.dtype}, {self.address:#x})"


def check_shape(shape: Any) -> tuple[int, ...]:
    try:
        if isinstance(shape, bytes | bytearray):  # a sequence of integers: b"1" would be the shape (49,)
            raise TypeError
        extents = tuple(index_or(extent, -1) for extent in shape)
    except TypeError:
        extents = ()
    if not extents or min(extents) < 1:
        raise ValueError(f"shape must be a sequence of positive integers, got {shape!r:.80}")
    return extents
