"""A CUDA driver in Python: the functions of `cuda.bindings.driver` that kvoffload calls, over ordinary memory.

`SimulatedDriver` takes the real argument types and returns the real tuples, so every line of a program that calls the
driver runs on a machine without a GPU. It is lazy, seeded and strict:

- Nothing happens when work is submitted. A seeded scheduler advances streams, and only during a driver call; a
  copy reads its source when it executes, or at any earlier moment since its submission if its access order is ANY.
- Kernels are Triton kernels, run by Triton's interpreter; every address that they touch is checked.
- Memory is exact, guarded and poisoned. Wrong addresses get the driver's error; what CUDA leaves undefined (overlapping
  targets in a batch, a buffer freed under a queued copy, a wait that can never end) is a `SimulatorError`.
- It shares what driver 580 was seen to do where one would guess otherwise (tests/driver/test_manners.py, which runs on
  a GPU, too): a batch that fails may have copied a part, one from pageable memory reads late, a shared mapping of a
  file cannot be registered.
- Tests set the versions of driver and bindings, limits, failures and delays.

`SimulatedDriver` is in driver.py, and the driver functions, which take it as their first argument, in the files named
`..._calls.py`; importing those makes it offer them.

Its clock is simulated: no time that it reports says anything about a GPU.

Where it is stricter or simpler than CUDA: every call on a stream or an event needs a current context; copies need the
stream's own context current; copies have one layer; a batch to pageable memory has ended when its call returns;
unregistering memory under queued copies, for which the driver waits, is a SimulatorError (so it waits only if it is
not `strict`); stream priorities are accepted and ignored; a handle is never used twice; a lost context answers every
call with its error, and only its destruction cleans up.
"""

from kvoffload.simulator import copy_calls, device_calls, kernel_calls, stream_calls  # noqa: F401
from kvoffload.simulator.driver import SimulatedDriver
from kvoffload.simulator.errors import DriverError, FunctionNotFoundError, SimulatorError
from kvoffload.simulator.faults import Faults

__all__ = ["DriverError", "Faults", "FunctionNotFoundError", "SimulatedDriver", "SimulatorError"]
