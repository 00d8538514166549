"""Capabilities of the driver, the bindings and the GPU, probed once when a device is opened."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvoffload.driver.core import Driver
from kvoffload.driver.functions import KERNELS
from kvoffload.errors import CapabilityError, DriverError

# CUdevice_attribute
_COMPUTE_CAPABILITY_MAJOR = 75
_COMPUTE_CAPABILITY_MINOR = 76
_MULTIPROCESSOR_COUNT = 16
_STREAM_MEMORY_OPERATIONS = 122  # CAN_USE_64_BIT_STREAM_MEM_OPS; the 32-bit ones came earlier
_ASYNC_ENGINE_COUNT = 40
_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97
_KERNEL_COMPUTE_CAPABILITY = (8, 0)  # asynchronous copies to shared memory came with it


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The features of driver, bindings and GPU.

    Attributes:
        driver_version: the CUDA version that the driver supports, for example `(13, 0)`.
        bindings_version: of cuda.bindings, for example `(13, 3)`.
        compute_capability: of the GPU, for example `(9, 0)`.
        multiprocessors: how many the GPU has.
        flat_batch: cuMemcpyBatchAsync can be called.
        strided_batch: cuMemcpy3DBatchAsync can be called.
        raw_addresses: both through calls that take array addresses (bindings 13.5).
        stream_memory_operations: cuStreamWaitValue32 can be called.
        copy_engines: asynchronous copy engines of the GPU.
        kernels: kernels can be loaded and launched (whether they can be compiled: `kvoffload.kernels.why_not`).
        max_shared_bytes: shared memory that one block of a kernel can ask for.
        missing: why a feature is absent, by its name: "cuMemcpyBatchAsync", "cuMemcpy3DBatchAsync", "raw addresses",
            "kernels".
    """

    driver_version: tuple[int, int]
    bindings_version: tuple[int, int]
    compute_capability: tuple[int, int]
    multiprocessors: int
    copy_engines: int
    flat_batch: bool
    strided_batch: bool
    raw_addresses: bool
    stream_memory_operations: bool
    kernels: bool
    max_shared_bytes: int
    missing: dict[str, str] = field(default_factory=dict)


def probe(driver: Driver, device: int) -> Capabilities:
    """Ask the driver; a context must be current. Sets `driver.use_raw`."""
    version = int(driver.call("cuDriverGetVersion"))
    driver_version = (version // 1000, version % 1000 // 10)
    missing: dict[str, str] = {}
    flat = _callable(driver, "cuMemcpyBatchAsync", ([], [], [], 0, [], [], 0, 0), missing)
    strided = _callable(driver, "cuMemcpy3DBatchAsync", (0, [], 0, 0), missing)
    raw = flat and strided and driver.has("memcpy_batch_async_v2") and driver.has("memcpy_3d_batch_async_v2")
    if not raw:
        missing["raw addresses"] = "need cuda-bindings >= 13.5 and a driver with batch copies"
    driver.use_raw = raw

    from cuda.bindings.driver import CUdevice_attribute

    def attribute(number: int) -> int:
        return int(driver.call("cuDeviceGetAttribute", CUdevice_attribute(number), device))

    compute_capability = (attribute(_COMPUTE_CAPABILITY_MAJOR), attribute(_COMPUTE_CAPABILITY_MINOR))
    return Capabilities(
        driver_version=driver_version,
        bindings_version=driver.bindings_version,
        compute_capability=compute_capability,
        multiprocessors=attribute(_MULTIPROCESSOR_COUNT),
        copy_engines=attribute(_ASYNC_ENGINE_COUNT),
        flat_batch=flat,
        strided_batch=strided,
        raw_addresses=raw,
        stream_memory_operations=driver.has("cuStreamWaitValue32") and bool(attribute(_STREAM_MEMORY_OPERATIONS)),
        kernels=_kernels(driver, compute_capability, missing),
        max_shared_bytes=attribute(_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
        missing=missing,
    )


def _callable(driver: Driver, name: str, nothing: tuple[object, ...], missing: dict[str, str]) -> bool:
    """Return whether `name` reaches the driver: called with nothing to copy, it returns an error or success but does
    not raise.

    The 13.x bindings bind only the 13.0 entry point of the batch calls; on an older driver the call raises.
    """
    if not driver.has(name):
        missing[name] = f"these bindings ({_dotted(driver.bindings_version)}) have no {name}; it came with CUDA 12.8"
        return False
    try:
        driver.call(name, *nothing)
    except DriverError:
        return True
    except CapabilityError:
        needed = "13.0" if driver.bindings_version >= (13, 0) else "12.8"
        missing[name] = f"cuda-bindings {_dotted(driver.bindings_version)} need a CUDA driver >= {needed} for {name}"
        return False
    return True


def _kernels(driver: Driver, compute_capability: tuple[int, int], missing: dict[str, str]) -> bool:
    """Return whether the calls that kernels need are there, and a GPU that is new enough."""
    absent = [name for name in KERNELS if not driver.has(name)]
    if absent:
        missing["kernels"] = f"these bindings ({_dotted(driver.bindings_version)}) have no {', '.join(absent)}"
    elif compute_capability < _KERNEL_COMPUTE_CAPABILITY:
        least = _dotted(_KERNEL_COMPUTE_CAPABILITY)
        missing["kernels"] = f"kernels need compute capability >= {least}, this GPU has {_dotted(compute_capability)}"
    return "kernels" not in missing


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(str(part) for part in version)
