"""Job: what `OffloadEngine.store` and `load` return, and how a transfer ended."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from kvoffload.engine.callbacks import Waitable
from kvoffload.engine.transfer import State
from kvoffload.errors import TransferError
from kvoffload.internal.nesting import refuse_nested
from kvoffload.internal.types import StreamLike
from kvoffload.internal.waiting import wait_until
from kvoffload.planning.transfer_plan import Direction
from kvoffload.tuning import CopyMethod


class TransferResult(NamedTuple):
    """How a transfer ended.

    Attributes:
        job_id: `Job.id`.
        direction: "store" or "load".
        nbytes: payload bytes.
        seconds: from the transfer's start to its end on the GPU's clock, without what it waited for before; NaN if
            unknown. If a transfer does not fit into the driver's queues, it includes the time that later segments wait
            to be queued.
        copier: what copied it: "strided", "gather", "split", "batch", "loop"; "none" for an empty transfer.
        error: None, or why it failed.
    """

    job_id: int
    direction: Direction
    nbytes: int
    seconds: float
    copier: str
    error: TransferError | None

    @property
    def gb_per_s(self) -> float:
        """Payload bytes over seconds on the GPU's clock, in 10^9 bytes a second.

        NaN where the seconds are unknown, for an empty or failed transfer, and on the simulated device, whose seconds
        are invented.
        """
        return self.nbytes / self.seconds / 1e9 if self.nbytes and self.seconds > 0 else math.nan


class SimulatedTransferResult(TransferResult):
    """A result of the simulated device: `seconds` is invented."""

    __slots__ = ()

    @property
    def gb_per_s(self) -> float:
        """NaN: no transfer was timed."""
        return math.nan


class TransferRecord(Protocol):
    """What a job needs of the record behind it; `Transfer` has it."""

    @property
    def id(self) -> int: ...

    @property
    def direction(self) -> Direction: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def num_parts(self) -> int: ...

    @property
    def method(self) -> CopyMethod | None: ...

    @property
    def reason(self) -> str: ...

    @property
    def copier(self) -> str: ...

    @property
    def state(self) -> State: ...

    @property
    def finished(self) -> bool: ...

    @property
    def error(self) -> TransferError | None: ...

    @property
    def seconds(self) -> float: ...

    @property
    def simulated(self) -> bool: ...


def result_of(transfer: TransferRecord) -> TransferResult:
    """The result of a finished transfer."""
    kind = SimulatedTransferResult if transfer.simulated else TransferResult
    fields = transfer.id, transfer.direction, transfer.nbytes, transfer.seconds, transfer.copier, transfer.error
    return kind(*fields)


class JobEngine(Protocol):
    """What a job needs of its engine."""

    def advance(self) -> None: ...

    @property
    def lock(self) -> threading.RLock: ...

    def forget_report(self, job_id: int) -> None: ...

    def order_job_before(self, transfer: Any, stream: Any, part: int | None) -> None: ...

    def when_done(self, job: Any, callback: Callable[[Any], object]) -> None: ...


class Job(Waitable[TransferResult]):
    """One submitted transfer; returned by `OffloadEngine.store` and `load`. Usable from any thread, and awaitable.

    Until it is done, the caller must not write its blocks (a load's targets, a store's sources) or, for a store, read
    its slots, except on a stream ordered with `order_before`.
    """

    __slots__ = ("__weakref__", "_engine", "_transfer")

    def __init__(self, engine: JobEngine, transfer: TransferRecord) -> None:
        self._engine = engine
        self._transfer = transfer

    @property
    def lock(self) -> threading.RLock:
        """The lock of its engine."""
        return self._engine.lock

    @property
    def id(self) -> int:
        """Unique within the engine, increasing in the order of submission."""
        return self._transfer.id

    @property
    def direction(self) -> Direction:
        """`Direction.STORE` or `Direction.LOAD`."""
        return self._transfer.direction

    @property
    def nbytes(self) -> int:
        """Payload bytes."""
        return self._transfer.nbytes

    @property
    def num_parts(self) -> int:
        """The number of parts that a load was divided into, else 1; see `parts` of `OffloadEngine.load`."""
        return self._transfer.num_parts

    @property
    def method(self) -> CopyMethod | None:
        """How the blocks are copied: the copier, the kernel programs and their share; None for an empty transfer."""
        return self._transfer.method

    @property
    def reason(self) -> str:
        """Why that copy method was selected."""
        return self._transfer.reason

    @property
    def copier(self) -> str:
        """The name of the copier; "none" for an empty transfer."""
        return self._transfer.copier

    @property
    def error(self) -> TransferError | None:
        """Why the transfer failed; None if it has not failed, or not yet. `wait` raises it."""
        return self._transfer.error

    @property
    def finished(self) -> bool:
        """Whether the transfer is known to have ended, successfully or not. Does not ask the GPU; `done` does."""
        return self._transfer.finished

    @property
    def done(self) -> bool:
        """Whether the transfer has ended, well or not. Asks the GPU, and does not wait for it.

        It takes the engine's lock, and may call a tracer's `on_end` in this thread before it returns. Inside another
        call in the same thread it says what is known, as `finished` does.
        """
        if not self._transfer.finished:
            self._engine.advance()
        return self._transfer.finished

    def wait(self, timeout: float | None = None) -> TransferResult:
        """Wait until the transfer has ended. `OffloadEngine.poll` will not report it any more.

        Args:
            timeout: seconds; None waits for as long as it takes.

        Raises:
            TransferError: the transfer failed.
            TimeoutError: `timeout` seconds have passed; the transfer goes on.
            RuntimeError: it is called inside another call in the same thread, such as by a signal handler.
        """
        refuse_nested(self._engine.lock, "wait")
        wait_until(lambda: self.done, timeout, repr(self))
        self._engine.forget_report(self._transfer.id)
        self._raise_error()
        return result_of(self._transfer)

    def outcome(self) -> TransferResult:
        """The result of a finished transfer, with its `error` if it failed; does not raise that.

        Raises:
            RuntimeError: the transfer is not known to have ended; `wait` for it, or ask `done`, first.
        """
        if not self._transfer.finished:
            raise RuntimeError(f"{self!r} has not ended; call wait(), or ask done, before outcome()")
        return result_of(self._transfer)

    def _raise_error(self) -> None:
        """Raise the transfer's error, if it has one: a copy each time, so that the stored one refers to no frames."""
        error = self._transfer.error
        if error is not None:
            raise TransferError(*error.args) from error.__cause__

    def _call_when_done(self, callback: Callable[[Any], object]) -> None:
        self._engine.when_done(self, callback)

    def order_before(self, stream: StreamLike, *, part: int | None = None) -> None:
        """Work queued on `stream` from now on starts after this transfer has ended. The host does not wait for that.

        (Where the driver's queues are full, it waits up to a second for the transfer, or the part, to be queued.)
        A transfer that fails on the GPU later does not hold the stream back: check `wait()` or `poll()`.

        Args:
            stream: a handle, or anything with `__cuda_stream__`.
            part: of a load in parts: wait for this part and all before it. None: for all of the transfer.

        Raises:
            ValueError: the transfer has no such part; CUDA does not know the stream in this context.
            TransferError: the transfer has failed already, or the stream is being captured.
            CapacityError: the driver's queues are full, and for a second there was no room for the rest of the
                transfer, or of the part.
        """
        self._engine.order_job_before(self._transfer, stream, part)

    def __dir__(self) -> list[str]:
        """Without `lock`, which is for caches."""
        return sorted(set(super().__dir__()) - {"lock"})

    def __repr__(self) -> str:
        return describe(self._transfer)


def describe(transfer: TransferRecord) -> str:
    """A transfer in words, as the repr of its job."""
    name = f"{transfer.id}, {transfer.direction}, {transfer.nbytes} bytes"
    return f"Job({name}, {transfer.copier}, {transfer.state.name.lower()})"
