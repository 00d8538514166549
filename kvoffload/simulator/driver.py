"""`SimulatedDriver`: the state of one simulated driver, and what every driver function has in common.

The functions themselves are in device_calls.py, copy_calls.py, stream_calls.py and kernel_calls.py,
each a plain function whose first parameter is the driver. `driver_call` gives them their common form, and adds them to
the class, so that the seam finds them by name.
"""

from __future__ import annotations

import operator
import os
import threading
from collections.abc import Callable, Sequence
from enum import Enum, IntEnum
from functools import partial, update_wrapper
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from cuda.bindings import driver as cuda

from kvoffload.simulator import space
from kvoffload.simulator.contexts import LEGACY, PER_THREAD, Captures, Context, Event, HandleTable, Operation, Stream
from kvoffload.simulator.errors import INVALID_HANDLE, DeadlockError, DriverError, RefusedError, SimulatorError
from kvoffload.simulator.faults import Faults
from kvoffload.simulator.kernels import Function, Module
from kvoffload.simulator.memory import Kind, MemoryTable, Region
from kvoffload.simulator.operations import KernelOperation
from kvoffload.simulator.scheduler import Scheduler

_R = cuda.CUresult
SUCCESS = _R.CUDA_SUCCESS
INVALID_CONTEXT = _R.CUDA_ERROR_INVALID_CONTEXT
INVALID_DEVICE = _R.CUDA_ERROR_INVALID_DEVICE
CONTEXT_IS_DESTROYED = _R.CUDA_ERROR_CONTEXT_IS_DESTROYED
_NOT_INITIALIZED = _R.CUDA_ERROR_NOT_INITIALIZED

Version = tuple[int, int]
Span = tuple[int, int]
Body = Callable[..., Any]
Item = TypeVar("Item", Stream, Event)
Live = TypeVar("Live")

RAW_FUNCTIONS: dict[str, Body] = {}  # of `SimulatedDriver.raw`; `raw_call` puts them here
_BATCHES = ("cuMemcpyBatchAsync", "cuMemcpy3DBatchAsync", "memcpy_batch_async_v2", "memcpy_3d_batch_async_v2")
FAIL_INDEX = -1  # `values` of the batch calls: a fail index with some bindings, and nothing with others

_FIRST_POOL = 0xA_0000_0000
_OUTSIDE_ALIGNMENT = 512
_A = cuda.CUdevice_attribute
_DEVICE_ATTRIBUTES = {  # as of a PCIe Gen5 data-center GPU; all others read as 0
    _A.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: 9,
    _A.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: 0,
    _A.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: 132,
    _A.CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: 1024,
    _A.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: 232_448,
    _A.CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: 3,
    _A.CU_DEVICE_ATTRIBUTE_MAX_PITCH: (1 << 31) - 1,  # the copy calls take larger pitches all the same
    _A.CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: 1,
    # Stream memory operations: driver 580 on an H200 answers 0 to the attributes of the first version (92 to 94).
    _A.CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS: 1,
}


# what every driver function goes through ------------------------------------------------------------------------------


class Needs(IntEnum):
    """What must be there before a call does anything."""

    NOTHING = 0
    DRIVER = 1  # cuInit
    CONTEXT = 2  # a current context without a sticky error


def _answering(body: Body, values: int, needs: Needs) -> Body:
    name = body.__name__

    def call(driver: SimulatedDriver, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        status: Any = _NOT_INITIALIZED
        if os.getpid() == driver.process:  # in a forked child CUDA is not initialized; the lock may be held for ever
            driver.faults.sleep(name)
            with driver.lock:
                fault = driver.faults.next_call(name, args)
                driver.cut = fault is not None and driver.faults.partial and name in _BATCHES
                if fault is not None:
                    status = fault.error
                    if fault.sticky and (lost := driver.current_context()) is not None:
                        driver.scheduler.fail_context(lost, status)
                        fault = None  # the call itself says so
                if fault is None or fault.after or driver.cut:
                    try:
                        context = driver.require(needs)
                        driver.captures.refuse_unsafe(name)
                        result = body(driver, *args, **kwargs)
                    except RefusedError as refused:
                        result, context = refused.status, None
                    if context is not None and context.error is not None:
                        result = context.error  # lost while work ran during the call
                    if fault is None:
                        if result is None:
                            return (SUCCESS,)
                        if isinstance(result, tuple):
                            return (SUCCESS, *result)
                        status = result
        return (status, *(None,) * (values if values != FAIL_INDEX else len(driver.fail_index)))

    return update_wrapper(call, body)


def driver_call(values: int = 0, needs: Needs = Needs.CONTEXT) -> Callable[[Body], Body]:
    """Turn a body into a function of SimulatedDriver that answers as the bindings do: `(status, value...)`.

    The body is called under the driver's lock. It returns None, a tuple of values, or a status that is not success; or
    it raises RefusedError. After a failure the `values` values are None.
    """

    def decorate(body: Body) -> Body:
        call = _answering(body, values, needs)
        setattr(SimulatedDriver, body.__name__, call)
        return call

    return decorate


def raw_call(body: Body) -> Body:
    """Turn a body into a function in the style of the 13.5 preview: it returns None, or raises DriverError."""
    answer = _answering(body, 0, Needs.CONTEXT)

    def call(driver: SimulatedDriver, *args: Any) -> None:
        if not all(isinstance(each, int) for each in args):  # unlike elsewhere: no handles, no numpy integers
            raise TypeError("an integer is required")
        status = answer(driver, *args)[0]
        if status != SUCCESS:
            raise DriverError(status)

    RAW_FUNCTIONS[body.__name__] = call
    return call


def integer(value: Any, *, signed: bool = False) -> int:
    """Return a handle, an address or a flag as an int; handle types and None count as integers, as in the bindings."""
    if value is None:
        return 0
    if isinstance(value, str | bytes | float):
        raise TypeError("an integer is required")
    number = int(value)
    if number < 0 and not signed:
        raise OverflowError("can't convert negative value to unsigned PY_LONG_LONG")
    return number


def size(value: Any) -> int:
    if value is None:
        raise TypeError("an integer is required")
    return integer(value)


# memory that other libraries allocated --------------------------------------------------------------------------------


class Allocator(Enum):
    """What makes the memory of `SimulatedDriver.allocate_outside`."""

    DEFAULT_POOL = "default pool"  # cuMemAllocAsync
    OWN_POOL = "own pool"  # cuMemPoolCreate and cuMemAllocFromPoolAsync
    MAPPED = "mapped"  # cuMemCreate and cuMemMap
    UNKNOWN = "unknown"  # such as cuMemAllocManaged: the driver reports neither context nor pool


class Pool(NamedTuple):
    device: int
    readers: tuple[int, ...]  # devices that can access it


class SimulatedDriver:
    """One simulated CUDA driver for `open_device(backend=...)`. It has the functions of `cuda.bindings.driver` that
    kvoffload calls. In a forked child each returns CUDA_ERROR_NOT_INITIALIZED.

    Args:
        seed: an integer. It decides every choice that CUDA leaves open, so the same calls from one thread have the same
            results in the same order.
        driver_version: below (12, 8) there are no batch calls; with bindings 13.x there are none below (13, 0).
        bindings_version: below (13, 0) batch calls return a fail index and cuCtxCreate takes two arguments;
            from (13, 5) on there is `raw`.
        memory_bytes: memory of each device.
        device_count: how many devices it has.
        queue_depth: places of a stream's queue. A submission that finds too few free ones waits.
        strict: True raises SimulatorError for undefined behaviour at once; False only collects it in `violations`. A
            wait that can never end always raises it.
        max_register_bytes: the most that one cuMemHostRegister takes; None: any.
        pinnable_bytes: the most that can be pinned in all; None: any.
        deadlock_seconds: how long a wait that no queued work can end goes on for other threads before SimulatorError.

    Attributes:
        faults: planned failures, see `Faults`.
        call_count: calls so far, failed ones included, by the driver function's name; 0 for other names.
        device_faults: why contexts were lost, as text; CUDA only reports a number.
        scheduler: `scheduler.drift_probability` is the chance that something runs before a submission returns, 0.125
            unless you set it: with 1 a few operations of one stream, not all; 0 is the laziest device.
        violations: undefined behaviour so far, as text.
        pageable_copies: how many copy calls had unpinned host memory; a batch is one.
        blocked_submissions: how often a submission waited for a full queue.
        attributes: device attributes by number; tests may change them. Others read as 0.
        staged_copies: whether cuMemcpyHtoD from pageable memory returns before the device has the bytes, as CUDA may;
            True unless you set it.
        raw: the raw-address calls of the 13.5 bindings; None for older bindings.
        device_ordinal_works: False, unless you set it: CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL is 0 for all memory, as with
            several releases of the bindings.
        pools_report_their_device: whether pools have CU_MEMPOOL_ATTR_LOCATION_TYPE and _ID, of CUDA 13; True unless you
            set it.

    Raises:
        TypeError: `seed` is no integer, or a version is no tuple of two integers.
        ValueError: `device_count` is not an integer of at least 1. The other numbers are not checked.
    """

    simulated = True

    cut = False  # the batch call under way fails on demand, and copies a part first

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
        if isinstance(seed, bool) or not hasattr(seed, "__index__"):
            raise TypeError(f"seed must be an integer, got {seed!r:.80}")
        for name, version in (("driver_version", driver_version), ("bindings_version", bindings_version)):
            if not isinstance(version, tuple) or [type(number) for number in version] != [int, int]:
                raise TypeError(f"{name} must be two integers such as (13, 0), got {version!r:.80}")
        if isinstance(device_count, bool) or not hasattr(device_count, "__index__") or device_count < 1:
            raise ValueError(f"device_count must be an integer of at least 1, got {device_count!r:.80}")
        self.driver_version = driver_version
        self.bindings_version = bindings_version
        self.memory_bytes = memory_bytes
        self.device_count = device_count
        self.queue_depth = queue_depth
        self.strict = strict
        self.max_register_bytes = max_register_bytes
        self.pinnable_bytes = pinnable_bytes
        self.attributes = {int(attribute): value for attribute, value in _DEVICE_ATTRIBUTES.items()}
        self.staged_copies = True
        self.device_ordinal_works = False
        self.pools_report_their_device = True
        self.per_thread_default = os.environ.get("CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM") == "1"
        self.fail_index = (0,) if bindings_version < (13, 0) else ()  # what batch calls return after the status

        self.violations: list[str] = []
        self.pageable_copies = 0
        self.blocked_submissions = 0
        self.left_in_contexts: dict[str, int] = {}
        self.faults = Faults()
        self.faults.partial = operator.index(seed) % 4 == 1
        self.process = os.getpid()
        self.initialized = False
        self.lock = threading.RLock()
        self.memory = MemoryTable()
        self.captures = Captures()
        self.scheduler = Scheduler(operator.index(seed), self.faults, threading.Condition(self.lock), deadlock_seconds)
        self.call_count, self.device_faults = self.faults.call_count, self.scheduler.device_faults
        self.contexts: HandleTable[Context] = HandleTable(0x5_0000_0000)
        self.streams: HandleTable[Stream] = HandleTable(0x6_0000_0000)
        self.events: HandleTable[Event] = HandleTable(0x7_0000_0000)
        self.modules: HandleTable[Module] = HandleTable(0x8_0000_0000)
        self.functions: HandleTable[Function] = HandleTable(0x9_0000_0000)
        self.primaries: dict[int, Context] = {}  # primary contexts by device
        self.pools: dict[int, Pool] = {}  # by handle
        self.pool_of: dict[int, int] = {}  # the pool of an allocation, by its address
        self.retained: dict[int, Region] = {}  # mapped memory by the allocation handles that were asked for
        self._outside: dict[int, Context] = {}  # the contexts of memory that others allocated, by device
        self._local = threading.local()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Body:
            """The driver functions, see `driver_call`."""

    @property
    def raw(self) -> SimpleNamespace | None:
        if self.bindings_version < (13, 5):
            return None
        return SimpleNamespace(**{name: partial(function, self) for name, function in RAW_FUNCTIONS.items()})

    # For tests: what a GPU would do on its own

    def enqueue(
        self, stream: Any, function: Callable[[], object], *, reads: Sequence[Span] = (), writes: Sequence[Span] = ()
    ) -> None:
        """Queue a Python function as if it were a kernel; it runs when the stream gets there. On a stream that is being
        captured it is dropped.

        It runs in whichever driver call advances the stream, perhaps this one, under the driver's lock. So it must not
        wait for another thread that calls the driver. It reaches memory by `view`. An exception of the function leaves
        that call.

        Args:
            stream: the handle of a stream of the calling thread's current context, such as `stream.handle`.
            function: called without arguments; its result is ignored.
            reads, writes: its (address, nbytes) pairs. If a GPU could not reach one when the function is due, such as
                unpinned host memory, the context is lost and the function does not run.

        Raises:
            DriverError: bad stream or context; `status` is what a launch would return. Nothing is queued. It is that of
                kvoffload.simulator, not the library's.
            SimulatorError: the stream was destroyed, and the driver is `strict`; or its queue stays full.
        """
        with self.lock:
            try:
                target = self.submission_stream(stream)
                spans = [*reads, *writes]
                regions = filter(None, [self.memory.at(address) for address, _ in spans])
                self.submit(target, KernelOperation([*regions], function, spans, self.memory))
            except RefusedError as refused:
                raise DriverError(refused.status) from None
            self.scheduler.drift()

    def view(self, address: Any, nbytes: int) -> space.Bytes:
        """Return device or pinned memory as a writable uint8 array, (nbytes,), without a copy. It does not wait for
        queued work, and does not keep the memory alive: do not use it after a free. Raises ValueError for other
        addresses.
        """
        self._holding(address, nbytes)
        return space.view(int(address), nbytes)

    def exported(self, address: Any, nbytes: int, owner: object) -> space.Bytes:
        """Return device or pinned memory as `view` does, as an array that keeps `owner` and the memory alive. After a
        free it reads the fill of freed memory, 0xDE, never another allocation's bytes. Registered memory is the
        program's own: nothing fills or keeps it. ValueError for other addresses.
        """
        return space.held_view(int(address), nbytes, (owner, self._holding(address, nbytes).storage))

    def unmap(self, address: int) -> None:
        """Call it right before you unmap memory that is registered, to see what a GPU then does: copies go on with the
        old pages, whatever is mapped at these addresses later, until the memory is unregistered and registered again.
        (They read the bytes of this moment, and what they write is lost. Kernels use the new mapping.)

        Args:
            address: of any registered byte; its whole range is meant.

        Raises:
            ValueError: the address is not in device or pinned memory.
        """
        with self.lock:
            region = self._holding(address, 1)
            region.pages = space.view(region.base, region.nbytes).copy()

    def _holding(self, address: Any, nbytes: int) -> Region:
        with self.lock:
            region = self.memory.at(int(address))
        if region is None or int(address) + nbytes > region.end:
            raise ValueError(f"{nbytes} bytes at {int(address):#x} are not within device or pinned memory")
        return region

    def pending_operations(self) -> int:
        """Return how many operations are queued and have not run, in all contexts; records and waits are some, too."""
        return self.scheduler.pending

    def run_all(self) -> None:
        """Run all queued operations, of all streams and contexts, before this returns; but leave those behind a
        stream's wait for a value that the host has not written. An exception of a function that was given to `enqueue`
        leaves this call, and the rest stays queued.
        """
        with self.lock:
            self.scheduler.run_all()

    def check_guards(self) -> None:
        """Look for allocations with overwritten neighbouring bytes. If the driver is `strict`, the first raises
        SimulatorError; otherwise `violations` gets a text for each. Freed memory is not looked at.
        """
        with self.lock:
            for region in self.memory.live():
                self.check_guards_of(region)

    def leaks(self) -> dict[str, int]:
        """Return how many objects of each kind exist now, over all contexts: all 0 if everything was freed.

        Keys: those of `contents`, and allocation_handles, contexts (without primary ones), primary_retains. Objects
        that a primary context still had at its last release stay counted, unless it was lost.
        """
        with self.lock:
            contexts = self.contexts.values()
            counts = self.contents() | {
                "allocation_handles": len(self.retained),
                "contexts": sum(not context.primary for context in contexts),
                "primary_retains": sum(context.retain_count for context in contexts),
            }
            return {kind: count + self.left_in_contexts.get(kind, 0) for kind, count in counts.items()}

    def contents(self, context: Context | None = None) -> dict[str, int]:
        """Return how many objects of each kind a context has (give an object such as `current_context()`, no handle).
        None: all contexts have, and memory of `allocate_outside`.

        Keys, always present: streams, events, device_allocations, host_allocations, registered_ranges, modules.
        """
        kinds = [region.kind for region in self.memory.live(context)]

        def count(table: HandleTable[Any]) -> int:
            return sum(context in (None, each.context) for each in table.values())

        return {
            "streams": count(self.streams),
            "events": count(self.events),
            "device_allocations": kinds.count(Kind.DEVICE),
            "host_allocations": kinds.count(Kind.PINNED),
            "registered_ranges": kinds.count(Kind.REGISTERED),
            "modules": count(self.modules),
        }

    def allocate_outside(self, nbytes: int, device: int, allocator: Allocator | str, **options: Any) -> int:
        """Allocate `nbytes` on GPU number `device` as another library does, and return the address. `allocator` and
        `options` (`readers`, `handle_bytes`) are those of `allocate_adjacent`. Free it with `free_outside`; `leaks`
        counts it. ValueError if there is no such allocator or GPU.
        """
        return self.allocate_adjacent([nbytes], [device], allocator, **options)[0]

    def allocate_adjacent(
        self,
        sizes: Sequence[int],
        devices: Sequence[int],
        allocator: Allocator | str,
        *,
        readers: tuple[int, ...] = (),
        handle_bytes: int | None = None,
    ) -> list[int]:
        """Allocate device memory as another library does, without gaps between. Returns the addresses.

        A copy that crosses from one allocation to the next is refused, as by the driver. Free each with `free_outside`;
        in "mapped" memory that leaves a gap. They count in `contents()` and `leaks`; `memory_bytes` is no limit.

        Args:
            sizes: bytes of each allocation; only the first is aligned, to 512.
            devices: the number of the GPU of each.
            allocator: an `Allocator`, or its value: "default pool", "own pool", "mapped", "unknown".
            readers: for "own pool": other devices that can access it.
            handle_bytes: for "mapped": bytes that a handle maps, the last one of each allocation the rest; None: one
                handle for each allocation.

        Raises:
            ValueError: there is no such allocator or GPU, or not one device for each size, or no size.
        """
        if not set(devices) <= {*range(self.device_count)}:
            raise ValueError(f"each device must be in [0, {self.device_count}), got {devices!r:.80}")
        with self.lock:
            made_by = Allocator(allocator)
            contexts = [self._outside.setdefault(each, Context(0, each, primary=False)) for each in devices]
            regions = self.memory.allocate(Kind.DEVICE, sizes, _OUTSIDE_ALIGNMENT, contexts)
            for region in regions:
                device = region.context.device
                if made_by is Allocator.DEFAULT_POOL:
                    self.pool_of[region.base] = self.default_pool(device)
                elif made_by is Allocator.OWN_POOL:
                    self.pool_of[region.base] = pool = _FIRST_POOL + 4096 + len(self.pools)
                    self.pools[pool] = Pool(device, (device, *readers))
                region.handle_bytes = (handle_bytes or region.nbytes) if made_by is Allocator.MAPPED else 0
            return [region.base for region in regions]

    def free_outside(self, address: int) -> None:
        """Free memory of `allocate_outside` or `allocate_adjacent`. AssertionError for other or freed memory; and, in a
        `strict` driver, SimulatorError for memory that queued work uses: it is not freed.
        """
        with self.lock:
            region = self.memory.at(address)
            assert region is not None, "freed twice"
            assert (region.context.handle, region.base) == (0, address), "cuMemAlloc made it, or it begins elsewhere"
            self.pool_of.pop(region.base, None)
            self.free_region(region)

    def __repr__(self) -> str:
        driver, bindings = (".".join(map(str, each)) for each in (self.driver_version, self.bindings_version))
        live = " ".join(f"{kind}={count}" for kind, count in self.leaks().items() if count)
        state = f"pending={self.pending_operations()} calls={self.faults.total_calls} violations={len(self.violations)}"
        return f"<SimulatedDriver {driver} bindings {bindings} {state}{' ' + live if live else ''}>"

    # Contexts and handles

    @property
    def context_stack(self) -> list[Context]:
        try:
            return self._local.stack  # type: ignore[no-any-return]
        except AttributeError:
            self._local.stack = []
            return self._local.stack  # type: ignore[no-any-return]

    def current_context(self) -> Context | None:
        stack = self.context_stack
        return stack[-1] if stack else None

    def require(self, needs: Needs) -> Context | None:
        if needs == Needs.NOTHING:
            return None
        if not self.initialized:
            raise RefusedError(_NOT_INITIALIZED)
        return self.context() if needs == Needs.CONTEXT else None

    def context(self) -> Context:
        stack = self.context_stack
        if not stack:
            raise RefusedError(INVALID_CONTEXT)
        context = stack[-1]
        if not context.alive:
            raise RefusedError(CONTEXT_IS_DESTROYED)
        if context.error is not None:
            raise RefusedError(context.error)
        return context

    def stream(self, handle: Any) -> Stream:
        number = integer(handle)
        if number == LEGACY or (number == 0 and not self.per_thread_default):
            return self.context().legacy
        if number in (0, PER_THREAD):
            return self.context().per_thread()
        return self._healthy(self.live(self.streams, number, "stream {:#x} used after it was destroyed"))

    def event(self, handle: Any) -> Event:
        return self._healthy(self.live(self.events, integer(handle), "event {:#x} used after it was destroyed"))

    @staticmethod
    def _healthy(item: Item) -> Item:
        if item.context.error is not None:
            raise RefusedError(item.context.error)
        return item

    def live(self, table: HandleTable[Live], number: int, violation: str) -> Live:
        """Return the object of a handle; one that was destroyed is a violation. RefusedError, with which a driver call
        returns CUDA_ERROR_INVALID_HANDLE, if there is none and that has not raised.
        """
        if table.is_stale(number):
            self.violate(violation.format(number))
        return table.get(number)

    def default_pool(self, device: int) -> int:
        if not 0 <= device < self.device_count:
            raise RefusedError(INVALID_DEVICE)
        handle = _FIRST_POOL + 16 * (device + 1)
        self.pools[handle] = Pool(device, (device,))
        return handle

    def violate(self, text: str) -> None:  # undefined behaviour
        self.violations.append(text)
        if self.strict:
            raise SimulatorError(text)

    # Submission

    def submission_stream(self, handle: Any) -> Stream:
        stream = self.stream(handle)
        if stream.context is not self.context():
            raise RefusedError(INVALID_HANDLE)
        return stream

    def submit(self, stream: Stream, operation: Operation) -> int:
        # Returns its number in the stream, or 0 if the stream is being captured. Blocks while the queue is full.
        if stream.capture is not None:
            stream.capture.check()
            return 0
        stream.refuse_implicit_capture()
        most = max(0, self.queue_depth - operation.places)  # an operation that is larger than the queue gets all of it
        if stream.occupied > most:
            self.blocked_submissions += 1
            self._wait(lambda: stream.occupied <= most, f"a submission to {stream}, whose queue is full,")
        return self.scheduler.submit(stream, operation)

    def finish(self, stream: Stream, serial: int, what: str) -> None:
        self._wait(lambda: stream.completed >= serial, what)

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        try:
            self.scheduler.run_until(done, what)
        except DeadlockError as deadlock:
            self.violations.append(str(deadlock))
            raise

    # Memory and modules

    def drop_module(self, module: Module) -> None:
        for function in module.functions:
            self.functions.remove(function.handle)
        self.modules.remove(module.handle)

    def free_region(self, region: Region) -> None:
        if region.pending:
            self.violate(f"freed while a queued copy uses it: {region.nbytes} bytes at {region.base:#x}")
            if region.kind is Kind.REGISTERED:  # as driver 580 does; its documentation does not promise it
                self._wait(lambda: not region.pending, "cuMemHostUnregister under copies that are queued")
        self.check_guards_of(region)
        self.memory.remove(region)

    def check_guards_of(self, region: Region) -> None:
        if not region.guards_intact():
            self.violate(f"bytes next to the {region.kind.value} allocation at {region.base:#x} were overwritten")
