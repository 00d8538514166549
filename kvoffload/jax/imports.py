"""Memory of ours as arrays of JAX."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from kvoffload.device.buffers import DeviceArray
from kvoffload.errors import CapabilityError, LayoutError
from kvoffload.layout.dtypes import NARROW_BYTES


def import_jax() -> Any:
    """The package `jax`.

    Raises:
        CapabilityError: it cannot be imported; says what to install.
    """
    try:
        import jax
        import jax.numpy
    except ImportError as error:
        raise CapabilityError(
            f"kvoffload.jax needs JAX, which cannot be imported ({error}); install it: pip install 'kvoffload[jax]'"
        ) from None
    return jax


def from_device(memory: DeviceArray, *, after: Any = None) -> Any:
    """GPU memory of ours as a `jax.Array`, without a copy. Computations with it wait, on the GPU, for the transfers in
    flight that touch the memory.

    Types that DLPack does not carry from here ("bfloat16" and those of 8 bits) come as unsigned integers, and are seen
    as what they are by a jitted function with its argument donated, which copies nothing.

    On a simulated device that is a copy: JAX on the CPU does not reinterpret or update imported memory in place.

    Args:
        memory: from `Device.empty`, of a device that JAX uses.
        after: an array of JAX's whose computation is to be followed, too.

    Raises:
        LayoutError: JAX made a copy.
    """
    jax = import_jax()
    narrow = memory.dtype in NARROW_BYTES
    carrier = memory.view(f"uint{8 * memory.itemsize}") if narrow else memory
    array = jax.dlpack.from_dlpack(_Export(carrier, after))
    if narrow:
        array = _reinterpret(memory.dtype)(array)
    if address_of(array) != memory.address and not memory.buffer.device.simulated:
        raise LayoutError(f"JAX {jax.__version__} copied {memory!r} instead of importing it in place")
    return array


def address_of(array: Any) -> int:
    """Where a `jax.Array` on one device lies."""
    return int(array.unsafe_buffer_pointer())


class _Export:
    """Memory of ours, exported behind an array of JAX's."""

    def __init__(self, memory: DeviceArray, after: Any) -> None:
        self._memory = memory
        self._after = after

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._memory.__dlpack_device__()

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        if self._after is not None:
            follow(self._after, stream)
        return self._memory.__dlpack__(stream=stream, **options)


def follow(array: Any, stream: int | None) -> Any:
    """Have a stream wait for the computation of a `jax.Array`; without one, the host waits. Returns the capsule."""
    return array.__dlpack__() if stream is None else array.__dlpack__(stream=stream)


@lru_cache
def _reinterpret(dtype: str) -> Any:
    jax = import_jax()
    target = jax.numpy.dtype(dtype)
    return jax.jit(lambda carrier: jax.lax.bitcast_convert_type(carrier, target), donate_argnums=0)
