"""A CUDA driver in Python: the functions of `cuda.bindings.driver` that kvoffload calls, over ordinary memory.

`SimulatedDriver` takes the real argument types and returns the real tuples, so every line of a program that calls the
driver runs on a machine without a GPU. It is lazy, seeded and strict:

- Nothing happens when work is submitted. A seeded scheduler advances streams, and only during a driver call; a
  copy reads its source when it executes, or at any earlier moment since its submission if its access order is ANY.
- Kernels are Triton kernels, run by Triton's interpreter; every address that they touch is checked.
- Memory is exact, guarded and poisoned. Wrong addresses get the driver's error; what CUDA leaves undefined (overlapping
  targets in a batch, a buffer freed under a queued copy, a wait that can never end) is a `SimulatorError`.
- Tests set the versions of driver and bindings, limits, failures and delays.

Its clock is simulated: no time that it reports says anything about a GPU.

Where it is stricter or simpler than CUDA: every call on a stream or an event needs a current context; copies need the
stream's own context current; copies have one layer; stream priorities are accepted and ignored; a handle is never used
twice; a lost context answers every call with its error, and only its destruction cleans up.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from kvoffload.simulator import space
from kvoffload.simulator.calls import SUCCESS, Needs, Version
from kvoffload.simulator.copy_calls import CopyCalls
from kvoffload.simulator.device_calls import DeviceCalls, default_attributes
from kvoffload.simulator.errors import DriverError, FunctionNotFoundError, RefusedError, SimulatorError
from kvoffload.simulator.faults import Faults
from kvoffload.simulator.kernel_calls import KernelCalls
from kvoffload.simulator.memory import Kind
from kvoffload.simulator.memory_calls import MemoryCalls
from kvoffload.simulator.operations import KernelOperation
from kvoffload.simulator.stream_calls import StreamCalls

__all__ = ["DriverError", "Faults", "FunctionNotFoundError", "SimulatedDriver", "SimulatorError"]

Span = tuple[int, int]


class SimulatedDriver(DeviceCalls, MemoryCalls, CopyCalls, StreamCalls, KernelCalls):
    """One simulated driver: what a process sees when it loads CUDA.

    Args:
        seed: an integer; decides every choice that CUDA leaves open, so that the same calls from one thread have the
            same results in the same order.
        driver_version: below (12, 8) there are no batch calls; the 13.x bindings need (13, 0) for them.
        bindings_version: below (13, 0) batch calls return a fail index and cuCtxCreate takes two arguments;
            from (13, 5) on there is `raw`.
        memory_bytes: of each device.
        device_count: how many devices there are.
        queue_depth: places of a stream's queue; a submission that needs more than are left blocks.
        strict: raise SimulatorError for undefined behaviour at once, and not only collect it in `violations`.
        max_register_bytes: the most that one cuMemHostRegister takes.
        pinnable_bytes: the most that is pinned in all.
        deadlock_seconds: how long a call waits for other threads before a wait without end is an error.

    Attributes:
        faults: failures that a test asks for, and call counts.
        scheduler: `scheduler.drift_probability` is the chance that something runs before a submission returns: 1 is
            an eager device, 0 the laziest.
        violations: undefined behaviour seen so far, as text.
        pageable_copies: copies from or to host memory that is not pinned.
        blocked_submissions: how often a full queue held a submission up.
        attributes: device attributes by number; tests may change them.
        staged_copies: whether cuMemcpyHtoD returns before the device has the bytes of pageable memory, as CUDA may.
        raw: None, or the raw-address calls of the 13.5 bindings.
        device_ordinal_works, pools_report_their_device: see `OutsideCalls`.
    """

    simulated = True

    def __init__(
        self,
        *,
        seed: int = 0,
        driver_version: Version = (13, 0),
        bindings_version: Version = (13, 3),
        memory_bytes: int = 8 << 30,
        device_count: int = 1,
        queue_depth: int = 1022,
        strict: bool = True,
        max_register_bytes: int | None = None,
        pinnable_bytes: int | None = None,
        deadlock_seconds: float = 2.0,
    ) -> None:
        _check_numbers(seed, driver_version, bindings_version, device_count)
        super().__init__(operator.index(seed), driver_version, bindings_version, queue_depth, strict, deadlock_seconds)
        self.memory_bytes = memory_bytes
        self.device_count = device_count
        self.max_register_bytes = max_register_bytes
        self.pinnable_bytes = pinnable_bytes
        self.attributes = default_attributes()
        self.left_in_contexts: dict[str, int] = {}
        self.device_ordinal_works = False
        self.pools_report_their_device = True
        self._primaries = {}
        self._pools, self._pool_of, self._retained, self._outside = {}, {}, {}, {}
        self.raw = self._raw_namespace() if bindings_version >= (13, 5) else None

    # For tests: what a GPU would do on its own

    @property
    def device_faults(self) -> list[str]:
        """Why contexts were lost, as text; CUDA reports only the error's number."""
        return self.scheduler.device_faults

    @property
    def call_count(self) -> dict[str, int]:
        return self.faults.call_count

    def enqueue(
        self, stream: Any, function: Callable[[], object], *, reads: Sequence[Span] = (), writes: Sequence[Span] = ()
    ) -> None:
        """Queue a Python function as if it were a kernel; it runs when the stream gets there.

        `reads` and `writes` are (address, nbytes) pairs. One that a GPU could not reach when the function is due, such
        as host memory that is not pinned, is an illegal address: the function does not run and the context is lost.
        The function runs under the driver's lock: it must not wait for another thread that calls the driver.

        Raises DriverError where a launch would return an error.
        """
        with self.lock:
            try:
                target = self.submission_stream(stream)
                self.submit(target, KernelOperation(function, [*reads, *writes], self.memory))
            except RefusedError as refused:
                raise DriverError(refused.status) from None
            self.scheduler.drift()

    def view(self, address: Any, nbytes: int) -> space.Bytes:
        """Device or pinned memory as a writable uint8 array, with no copy and no order with queued work.

        It does not keep the memory alive. Raises ValueError for other addresses.
        """
        with self.lock:
            region = self.memory.at(int(address))
            if region is None or int(address) + nbytes > region.end:
                raise ValueError(f"{nbytes} bytes at {int(address):#x} are not within device or pinned memory")
            return space.view(int(address), nbytes)

    def exported(self, address: Any, nbytes: int, owner: object) -> space.Bytes:
        """Like `view`, but the array keeps `owner`, and the memory itself, alive: after a free it reads the bytes that
        freed memory is filled with, and no other allocation's.

        Raises ValueError for other addresses.
        """
        with self.lock:
            region = self.memory.at(int(address))
            if region is None or int(address) + nbytes > region.end:
                raise ValueError(f"{nbytes} bytes at {int(address):#x} are not within device or pinned memory")
            return space.held_view(int(address), nbytes, (owner, region.storage))

    def pending_operations(self) -> int:
        """Operations queued in all streams, of all contexts."""
        return self.scheduler.pending

    def run_all(self) -> None:
        """Run every queued operation that does not wait for the host."""
        with self.lock:
            self.scheduler.run_all()

    def check_guards(self) -> None:
        """Report every allocation whose neighbouring bytes were overwritten as a violation."""
        with self.lock:
            for region in self.memory.live():
                if not region.guards_intact():
                    self.violate(
                        f"bytes next to the {region.kind.value} allocation at {region.base:#x} were overwritten"
                    )

    def leaks(self) -> dict[str, int]:
        """How many streams, events, allocations and so on exist now, by kind: all 0 if everything was freed.

        What a primary context still held when its last reference was released stays counted.
        """
        with self.lock:
            kinds = [region.kind for region in self.memory.live()]
            contexts = self.contexts.values()
            counts = {
                "streams": len(self.streams),
                "events": len(self.events),
                "device_allocations": kinds.count(Kind.DEVICE),
                "host_allocations": kinds.count(Kind.PINNED),
                "registered_ranges": kinds.count(Kind.REGISTERED),
                "modules": len(self.modules),
                "allocation_handles": len(self._retained),
                "contexts": sum(not context.primary for context in contexts),
                "primary_retains": sum(context.retain_count for context in contexts),
            }
            return {kind: count + self.left_in_contexts.get(kind, 0) for kind, count in counts.items()}

    def __repr__(self) -> str:
        driver, bindings = (".".join(map(str, each)) for each in (self.driver_version, self.bindings_version))
        live = " ".join(f"{kind}={count}" for kind, count in self.leaks().items() if count)
        state = f"pending={self.pending_operations()} calls={self.faults.total_calls} violations={len(self.violations)}"
        return f"<SimulatedDriver {driver} bindings {bindings} {state}{' ' + live if live else ''}>"

    # The raw-address calls

    def _raw_namespace(self) -> SimpleNamespace:
        return SimpleNamespace(
            memcpy_batch_async_v2=self._raising("memcpy_batch_async_v2", type(self)._raw_batch),
            memcpy_3d_batch_async_v2=self._raising("memcpy_3d_batch_async_v2", type(self)._raw_strided_batch),
        )

    def _raising(self, name: str, body: Callable[..., Any]) -> Callable[..., None]:
        """A call in the style of the 13.5 preview: None, or DriverError."""

        def call(*args: Any) -> None:
            if not all(isinstance(each, int) for each in args):  # unlike elsewhere: no handles, no numpy integers
                raise TypeError("an integer is required")
            status, _ = self.perform(name, Needs.CONTEXT, body, args, {})
            if status != SUCCESS:
                raise DriverError(status)

        return call


def _check_numbers(seed: Any, driver_version: Any, bindings_version: Any, device_count: Any) -> None:
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise TypeError(f"seed must be an integer, got {seed!r:.80}")
    for name, version in (("driver_version", driver_version), ("bindings_version", bindings_version)):
        pair = isinstance(version, tuple) and [type(number) for number in version] == [int, int]
        if not pair:
            raise TypeError(f"{name} must be two integers such as (13, 0), got {version!r:.80}")
    if isinstance(device_count, bool) or not hasattr(device_count, "__index__") or device_count < 1:
        raise ValueError(f"device_count must be an integer of at least 1, got {device_count!r:.80}")
