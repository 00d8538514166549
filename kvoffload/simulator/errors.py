"""The simulator's exceptions: its own verdicts, and look-alikes of the CUDA bindings' exceptions."""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver as cuda

try:
    from cuda.bindings._internal.utils import FunctionNotFoundError as FunctionNotFoundError
except ImportError:  # a private module of the bindings: it may move

    class FunctionNotFoundError(RuntimeError):  # type: ignore[no-redef]
        """The driver library has no such symbol."""


INVALID_HANDLE = cuda.CUresult.CUDA_ERROR_INVALID_HANDLE
INVALID_VALUE = cuda.CUresult.CUDA_ERROR_INVALID_VALUE


class SimulatorError(AssertionError):
    """A program used behaviour that CUDA leaves undefined, or waits for something that can never happen.

    An AssertionError, so that no handler for driver or library errors swallows it.
    """


class DeadlockError(SimulatorError):
    """A wait that can never end."""


class DriverError(Exception):
    """The raw-address functions raise it, like `cuda.bindings._v2.driver.DriverError`. `status`: CUDA's number."""

    def __init__(self, status: int) -> None:
        self.status = int(status)
        name = cuda.CUresult(status).name.removeprefix("CUDA_")
        super().__init__(f"{name} ({self.status})")


class RefusedError(Exception):
    """Inside the simulator only: the driver call returns this status."""

    def __init__(self, status: Any) -> None:
        super().__init__(status)
        self.status = status
