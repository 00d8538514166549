"""The real driver: `cuda.bindings.driver`, loaded when a device is first opened."""

from __future__ import annotations

from typing import Any

from kvoffload.driver.core import Driver
from kvoffload.errors import CapabilityError, DriverError

_INSTALL = "install it: pip install 'cuda-bindings>=12.9'"
_REMEDY = (
    "no usable NVIDIA GPU here. On a machine with one, install its driver; check `nvidia-smi` and `kvoffload doctor`. "
    'Without one, everything runs on a simulated device: open_device(backend="simulated"), or --backend simulated'
)


def load() -> Driver:
    """Return the CUDA driver of this machine, initialised (no context is created).

    Raises:
        CapabilityError: cuda-bindings is missing or too old, or there is no NVIDIA driver library.
        DriverError: the driver is there and fails, for example with CUDA_ERROR_NO_DEVICE.
    """
    try:
        import cuda.bindings
        from cuda.bindings import driver as api
    except ImportError as error:
        raise CapabilityError(f"cuda-bindings cannot be imported ({error}); {_INSTALL}") from error
    major, minor = (int(part) for part in cuda.bindings.__version__.split(".")[:2])
    if (major, minor) < (12, 9):
        raise CapabilityError(f"cuda-bindings {major}.{minor} is too old; {_INSTALL}")
    try:  # bindings 13.5 have a preview module whose batch calls take array addresses
        from cuda.bindings._v2 import driver as raw
    except ImportError:
        raw = None
    driver = Driver(api, raw=raw, bindings_version=(major, minor), simulated=False)
    try:
        driver.init()
    except DriverError as error:
        raise DriverError(error.call, error.name, error.code, _REMEDY) from error
    except CapabilityError as error:
        raise CapabilityError(f"{str(error).rstrip('.')}; {_REMEDY}") from error
    return driver


def binding_types() -> Any:
    """Return the module of cuda.bindings with its handles, structures and enums, which the simulator takes as well."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise CapabilityError(f"cuda-bindings cannot be imported ({error}); {_INSTALL}") from error
    return driver
