"""kvoffload's device memory as arrays of JAX."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from kvoffload.device.buffers import DeviceArray, DeviceBuffer
from kvoffload.device.device import Device
from kvoffload.device.ownership import DeviceUser
from kvoffload.device.streams import stream_handle
from kvoffload.driver.core import LEGACY_STREAM
from kvoffload.errors import CapabilityError, LayoutError
from kvoffload.internal.checks import shown
from kvoffload.internal.teardown import run_all
from kvoffload.layout.arrays import check_jax_array, view_of
from kvoffload.layout.dlpack import CUDA, packed_strides
from kvoffload.layout.dtypes import NARROW_BYTES


def import_jax() -> Any:
    """Import and return `jax`; CapabilityError says what to install if that fails."""
    try:
        import jax
        import jax.numpy
    except ImportError as error:
        raise CapabilityError(
            f"kvoffload.jax needs JAX, which cannot be imported ({error}); install it: pip install 'kvoffload[jax]'"
        ) from None
    return jax


def from_device(memory: DeviceArray, *, after: Any = None) -> Any:
    """Import device memory as a `jax.Array`, without a copy. JAX's computations with it wait, on the GPU, for all
    transfers that are in flight now and touch the memory, and for no later ones: import again after those. On a
    simulated device this call itself waits for them.

    Transfers do not wait for JAX: give each `after=` the arrays that JAX computed last from this memory; one with
    `after=None` does not follow JAX. `OwnedCache` does this for you.

    The array keeps the memory from being freed as garbage. Closing `memory.buffer` or the device frees it all the
    same: end JAX's work with it first.

    The result has `memory`'s dtype. DLPack does not export bfloat16 and float8: this call imports them as unsigned
    integers and reinterprets them in place. You do nothing for that, and it copies nothing.

    On a simulated device the array may be a copy: JAX on the CPU does not reinterpret imported memory in place.

    Args:
        memory: from `Device.empty`, on a device that JAX uses.
        after: a `jax.Array`, or None; JAX's computations with the new array wait for its computation, too.

    Raises:
        CapabilityError: JAX is not installed.
        TypeError: `memory` is no `DeviceArray`, or `after` no `jax.Array`.
        ValueError: `after` was deleted, or donated.
        LayoutError: JAX made a copy; never on a simulated device.
        ClosedError: the memory is freed, the device is closed, or this is a forked child.
        CapacityError: after a second transfers still wait on the host, since the driver's queues are full: `poll` the
            engine.
        TransferError: the CUDA context is lost.
    """
    if not isinstance(memory, DeviceArray):
        raise TypeError(f"memory must be a DeviceArray from Device.empty(), got {shown(memory)}")
    if after is not None:
        check_jax_array("after", after)
    return import_memory(memory, after)


def import_memory(memory: DeviceArray | Adopted, after: Any, engines: Sequence[DeviceUser] | None = None) -> Any:
    """`from_device`, also for arrays that JAX has allocated, as new arrays of the same memory. `engines`: follow the
    transfers of these, whatever they touch; None: of those that touch the memory."""
    jax = import_jax()
    if isinstance(memory, DeviceArray) and memory.dtype in NARROW_BYTES:
        array = jax.dlpack.from_dlpack(_Export(memory.view(f"uint{8 * memory.itemsize}"), after, engines))
        array = _reinterpret(memory.dtype, array.sharding)(array)
    else:
        array = jax.dlpack.from_dlpack(_Export(memory, after, engines))
    if address_of(array) != memory.address and (isinstance(memory, Adopted) or not memory.buffer.device.simulated):
        raise LayoutError(f"JAX {jax.__version__} copied {memory!r} instead of importing it in place")
    return array


def zeroed(devices: Sequence[Device], nbytes: int) -> tuple[DeviceBuffer, ...]:
    """Allocate zeros on each device. Fresh memory may hold NaN, which a mask of zeros does not remove."""
    memories: list[DeviceBuffer] = []
    try:
        for device in devices:
            memories.append(device.allocate(nbytes))
            with device.current():
                device.driver.fill(memories[-1].address, 0, nbytes, LEGACY_STREAM)
                device.driver.stream_synchronize(LEGACY_STREAM)
    except BaseException:
        run_all(memory.close for memory in memories)
        raise
    return tuple(memories)


def address_of(array: Any) -> int:
    """Return the address of a `jax.Array` that is on one device.

    On the CPU, JAX would wait for its computation without giving up the GIL, which the end of that computation needs if
    it frees imported memory.
    """
    if next(iter(array.devices())).platform == "cpu":
        array.block_until_ready()
    return int(array.unsafe_buffer_pointer())


def wait_for_computations(array: Any) -> None:
    """Wait until JAX has ended everything that it was given so far for the devices of `array`.

    JAX computes on one stream per device, in the order of its calls, so waiting for one more computation on each is
    enough. `array` itself may be deleted.
    """
    jax = import_jax()
    last = [jax.device_put(np.int32(0), device) + 1 for device in array.sharding.device_set]
    for each in last:
        each.block_until_ready()


class Adopted:
    """The memory of a `jax.Array` on one device, for JAX to import again. Holds the array, so that JAX does not free
    the memory, and a capsule, so that it cannot be donated.

    Attributes:
        buffer: the array.
        address, nbytes: of its memory.
    """

    def __init__(self, array: Any, device: Device, name: str) -> None:
        if array.__dlpack_device__() != (CUDA, device.index):
            raise LayoutError(
                f"{name} is on {array.devices()}, and the cache on the GPU {device.index}: move it there first"
            )
        view = view_of(array, name)
        if view.strides != packed_strides(view.shape, view.itemsize):
            raise LayoutError(f"{name} must be C-contiguous, got strides of {view.strides} bytes for {view.shape}")
        self.buffer, self._index = array, device.index
        self.address, self.nbytes = view.address, int(array.nbytes)
        self._capsule = follow(array, None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, self._index

    def __dlpack__(self, **_: Any) -> Any:
        return follow(self.buffer, None)  # it has been computed, and no step updates it

    def __repr__(self) -> str:
        return f"{self.buffer.dtype} of shape {self.buffer.shape} at {self.address:#x}"


class _Export:
    """Device memory for JAX to import, ordered after a `jax.Array` as well."""

    def __init__(self, memory: DeviceArray | Adopted, after: Any, engines: Sequence[DeviceUser] | None) -> None:
        self._memory = memory
        self._after = after
        self._engines = engines

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._memory.__dlpack_device__()

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        if self._after is not None:
            follow(self._after, stream)
        if self._engines is not None:
            for engine in self._engines:
                engine.order_all_before(stream_handle(stream or 0, "stream"))
            stream = -1  # it follows them already
        return self._memory.__dlpack__(stream=stream, **options)


def follow(array: Any, stream: int | None) -> Any:
    """Make a stream wait for the computation of a `jax.Array`; None: the host waits. Returns the capsule."""
    return array.__dlpack__() if stream is None else array.__dlpack__(stream=stream)


@lru_cache
def _reinterpret(dtype: str, place: Any) -> Any:
    """Return a function that reinterprets memory in place as `dtype`. `place`: its sharding before and after."""
    jax = import_jax()
    target = jax.numpy.dtype(dtype)
    return jax.jit(
        lambda carrier: jax.lax.bitcast_convert_type(carrier, target),
        donate_argnums=0,
        in_shardings=place,
        out_shardings=place,
    )
