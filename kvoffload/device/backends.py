"""The arguments of `open_device`: which driver, and which context."""

from __future__ import annotations

from typing import Any

from kvoffload.driver import Driver
from kvoffload.errors import CapabilityError, DriverError

_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


def load_driver(backend: Any, simulation: dict[str, Any]) -> Driver:
    from kvoffload.driver import cuda

    if backend == "cuda":
        if simulation:
            raise ValueError(f"{', '.join(simulation)} belong to the simulated device, but backend is 'cuda'")
        return cuda.load()
    if backend == "auto":
        try:
            return cuda.load()
        except CapabilityError:  # no driver library
            backend = "simulated"
        except DriverError as error:
            if error.code != _NO_DEVICE:  # a GPU that is there and broken is not passed over
                raise
            backend = "simulated"
    if backend == "simulated":
        from kvoffload.simulator import SimulatedDriver

        backend = SimulatedDriver(**simulation)
    if not getattr(backend, "simulated", False):
        raise ValueError(f"backend must be 'cuda', 'simulated', 'auto' or a SimulatedDriver, got {backend!r:.80}")
    driver = Driver(backend, raw=backend.raw, bindings_version=backend.bindings_version, simulated=True)
    driver.init()
    return driver


def context_handle(context: Any) -> int | None:
    if context is None:
        return None
    try:
        handle = -1 if isinstance(context, bool | str | bytes) else int(context)
    except (TypeError, ValueError, OverflowError):
        handle = -1
    if handle <= 0:
        raise TypeError(f"context must be None or the handle of a CUDA context, got {context!r:.80}")
    return handle
