"""What every driver call has in common: the lock, counting and faults, the context it needs, its answer's shape."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Concatenate, ParamSpec, TypeVar

from cuda.bindings import driver as cuda

from kvoffload.simulator.capture import Captures
from kvoffload.simulator.contexts import LEGACY, PER_THREAD, Context, Event, Operation, Stream
from kvoffload.simulator.errors import DeadlockError, RefusedError, SimulatorError
from kvoffload.simulator.faults import Faults
from kvoffload.simulator.handles import INVALID_HANDLE, HandleTable
from kvoffload.simulator.kernels import Function, Module
from kvoffload.simulator.memory import MemoryTable, Region
from kvoffload.simulator.scheduler import Scheduler

SUCCESS = cuda.CUresult.CUDA_SUCCESS
NOT_INITIALIZED = cuda.CUresult.CUDA_ERROR_NOT_INITIALIZED
INVALID_CONTEXT = cuda.CUresult.CUDA_ERROR_INVALID_CONTEXT
INVALID_VALUE = cuda.CUresult.CUDA_ERROR_INVALID_VALUE
CONTEXT_IS_DESTROYED = cuda.CUresult.CUDA_ERROR_CONTEXT_IS_DESTROYED

Version = tuple[int, int]
P = ParamSpec("P")


class Needs(IntEnum):
    """What must be there before a call does anything."""

    NOTHING = 0
    DRIVER = 1  # cuInit
    CONTEXT = 2  # a current context without a sticky error


def driver_call(
    values: int = 0, needs: Needs = Needs.CONTEXT
) -> Callable[[Callable[Concatenate[Any, P], Any]], Callable[Concatenate[Any, P], Any]]:
    """Turn a body into a driver function that answers as the bindings do: `(status, value...)`.

    The body returns None, a tuple of values, or a status that is not success; or raises RefusedError. After a failure
    the `values` values are None. `values=FAIL_INDEX` is the form of the batch calls, which depends on the bindings.
    """

    def decorate(body: Callable[Concatenate[Any, P], Any]) -> Callable[Concatenate[Any, P], Any]:
        name = body.__name__

        def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Any:
            status, answer = self.perform(name, needs, body, args, kwargs)
            if status is SUCCESS or status == SUCCESS:
                return (status, *answer)
            blanks = values if values >= 0 else self.fail_index_values
            return (status, *(None,) * blanks)

        functools.update_wrapper(call, body)
        return call

    return decorate


FAIL_INDEX = -1


def integer(value: Any, *, signed: bool = False) -> int:
    """A handle, an address or a flag; the handle types and None count as integers, as in the bindings."""
    if value is None:
        return 0
    if isinstance(value, str | bytes | float):
        raise TypeError("an integer is required")
    number = int(value)
    if number < 0 and not signed:
        raise OverflowError("can't convert negative value to unsigned PY_LONG_LONG")
    return number


def size(value: Any) -> int:
    """A size_t argument."""
    if value is None:
        raise TypeError("an integer is required")
    return integer(value)


def word(value: Any) -> int:
    """A cuuint32_t argument."""
    number = integer(value)
    if number > 0xFFFFFFFF:
        raise OverflowError("value too large to convert to uint32_t")
    return number


Item = TypeVar("Item", Stream, Event)


def _healthy(item: Item) -> Item:
    """The item, unless its context is lost."""
    if item.context.error is not None:
        raise RefusedError(item.context.error)
    return item


class Core:
    """The state of one simulated driver, and the checks that several calls share."""

    def __init__(
        self,
        seed: int,
        driver_version: Version,
        bindings_version: Version,
        queue_depth: int,
        strict: bool,
        patience: float,
    ) -> None:
        self.driver_version = driver_version
        self.bindings_version = bindings_version
        self.queue_depth = queue_depth
        self.strict = strict
        self.violations: list[str] = []
        self.pageable_copies = 0
        self.blocked_submissions = 0
        self.faults = Faults()
        self.lock = threading.RLock()
        self.memory = MemoryTable()
        self.captures = Captures()
        self.scheduler = Scheduler(seed, self.faults, threading.Condition(self.lock), patience)
        self.contexts: HandleTable[Context] = HandleTable(0x5_0000_0000)
        self.streams: HandleTable[Stream] = HandleTable(0x6_0000_0000)
        self.events: HandleTable[Event] = HandleTable(0x7_0000_0000)
        self.modules: HandleTable[Module] = HandleTable(0x8_0000_0000)
        self.functions: HandleTable[Function] = HandleTable(0x9_0000_0000)
        self.initialized = False
        self.per_thread_default = os.environ.get("CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM") == "1"
        self._local = threading.local()
        self._pid = os.getpid()

    @property
    def fail_index_values(self) -> int:
        """How many values the batch calls return: the 12.x bindings have a fail index."""
        return 1 if self.bindings_version < (13, 0) else 0

    # What every call goes through

    def perform(
        self, name: str, needs: Needs, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, tuple[Any, ...]]:
        """Run `body`, which implements the driver call `name`, under the lock, with the faults that a test has set.

        Returns:
            The CUresult, and the values that the call returns after it.
        """
        if os.getpid() != self._pid:
            return NOT_INITIALIZED, ()  # as CUDA in a forked child; and the lock may be held for ever
        self.faults.sleep(name)
        with self.lock:
            fault = self.faults.next_call(name, args)
            if fault is not None and fault.sticky and (context := self.current_context()) is not None:
                self.scheduler.fail_context(context, fault.error)
            elif fault is not None and not fault.after:
                return fault.error, ()
            status, values = self._answer(name, needs, body, args, kwargs)
            if fault is not None and fault.after:
                return fault.error, ()
            return status, values

    def _answer(
        self, name: str, needs: Needs, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, tuple[Any, ...]]:
        try:
            context = self._require(needs)
            self.captures.refuse_unsafe(name)
            result = body(self, *args, **kwargs)
        except RefusedError as refused:
            return refused.status, ()
        if context is not None and context.error is not None:
            return context.error, ()  # lost while work ran during the call
        if result is None:
            return SUCCESS, ()
        return (SUCCESS, result) if isinstance(result, tuple) else (result, ())

    def _require(self, needs: Needs) -> Context | None:
        if needs == Needs.NOTHING:
            return None
        if not self.initialized:
            raise RefusedError(NOT_INITIALIZED)
        return self.context() if needs == Needs.CONTEXT else None

    # Contexts and handles

    @property
    def context_stack(self) -> list[Context]:
        """The calling thread's stack of current contexts."""
        try:
            return self._local.stack  # type: ignore[no-any-return]
        except AttributeError:
            self._local.stack = []
            return self._local.stack  # type: ignore[no-any-return]

    def current_context(self) -> Context | None:
        stack = self.context_stack
        return stack[-1] if stack else None

    def context(self) -> Context:
        """The current context; raises RefusedError without one, with a destroyed one, and with a lost one."""
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
        """The stream of a handle, the default streams included; raises RefusedError."""
        number = integer(handle)
        if number == LEGACY or (number == 0 and not self.per_thread_default):
            return self.context().legacy
        if number in (0, PER_THREAD):
            return self.context().per_thread()
        if self.streams.is_stale(number):
            self.violate(f"stream {number:#x} used after it was destroyed")
        return _healthy(self.streams.get(number))

    def event(self, handle: Any) -> Event:
        number = integer(handle)
        if self.events.is_stale(number):
            self.violate(f"event {number:#x} used after it was destroyed")
        return _healthy(self.events.get(number))

    def violate(self, text: str) -> None:
        """Note something that CUDA leaves undefined; under `strict` it ends the call."""
        self.violations.append(text)
        if self.strict:
            raise SimulatorError(text)

    # Submission

    def submission_stream(self, handle: Any) -> Stream:
        """The stream of a call that works in the current context: it must belong to that."""
        stream = self.stream(handle)
        if stream.context is not self.context():
            raise RefusedError(INVALID_HANDLE)
        return stream

    def submit(self, stream: Stream, operation: Operation) -> int:
        """Queue an operation. Blocks while the queue is full.

        Returns:
            Its number in the stream, or 0 if the stream is being captured.
        """
        if stream.capture is not None:
            stream.capture.check()
            stream.capture.node_count += 1
            return 0
        self._refuse_implicit_capture(stream)
        if not self._has_room(stream, operation):
            self.blocked_submissions += 1
            self._wait(lambda: self._has_room(stream, operation), f"a submission to {stream}, whose queue is full,")
        return self.scheduler.submit(stream, operation)

    def finish(self, stream: Stream, serial: int, what: str) -> None:
        """Advance streams until `stream` has done its operation number `serial`."""
        self._wait(lambda: stream.completed >= serial, what)

    def _has_room(self, stream: Stream, operation: Operation) -> bool:
        return stream.occupied == 0 or stream.occupied + operation.places <= self.queue_depth

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        try:
            self.scheduler.run_until(done, what)
        except DeadlockError as deadlock:
            self.violations.append(str(deadlock))
            raise

    @staticmethod
    def _refuse_implicit_capture(stream: Stream, *, asking: bool = False) -> None:
        """The legacy stream would wait for a captured one. That ends the capture, unless the call only asks for it."""
        context = stream.context
        others = list(context.blocking.values()) if stream is context.legacy else []
        for capture in [other.capture for other in others if other.capture is not None]:
            capture.invalidated |= not asking
            raise RefusedError(cuda.CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)

    # Memory and modules

    def drop_module(self, module: Module) -> None:
        """Unload a module: its handle and those of its functions become invalid."""
        for function in module.functions:
            self.functions.remove(function.handle)
        self.modules.remove(module.handle)

    def free_region(self, region: Region) -> None:
        """Free an allocation or unregister a range. Queued copies of it, or changed bytes beyond it, are violations."""
        if region.pending:
            self.violate(f"freed while a queued copy uses it: {region.nbytes} bytes at {region.base:#x}")
        if not region.guards_intact():
            self.violate(f"bytes next to the {region.kind.value} allocation at {region.base:#x} were overwritten")
        self.memory.remove(region)
