"""The seeded scheduler: the only place where queued work happens, and only while a driver call runs.

A stream moves between four states. Only runnable ones cost anything; a blocked one is woken by the stream it waits
for, a gated one is polled, because the host or a kernel writes the word without a notice.

    IDLE --submit--> RUNNABLE --first operation waits for a stream--> BLOCKED --that stream gets there--> RUNNABLE
                     RUNNABLE --first operation waits for a word----> GATED   --the word is right-------> RUNNABLE
                     RUNNABLE --queue empty--> IDLE
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from collections.abc import Callable
from typing import Any

from kvoffload.simulator.contexts import Context, Operation, Stream, StreamState
from kvoffload.simulator.errors import DeadlockError
from kvoffload.simulator.faults import Faults
from kvoffload.simulator.operations import ANY, DURING_API_CALL, Copy, CopyOperation, DeviceFaultError

LONGEST_BURST = 6  # operations that one stream may advance in one step
DRIFT_PROBABILITY = 0.125  # that an operation is done before a submission returns
GATE_POLL_PROBABILITY = 0.3
PATIENT_POLLS = 32  # in a row, without a submission
EARLY_READ_STEPS = 32  # the longest time, in steps, between a submission and an early read of its source
STALL_SECONDS = 0.001


class Scheduler:
    """Queues, order and time. Callers hold the driver's lock; `condition` is on that lock."""

    def __init__(self, seed: int, faults: Faults, condition: threading.Condition, deadlock_seconds: float) -> None:
        self.chance = random.Random(seed)
        self.microseconds = 0.0
        self.pending = 0  # queued operations in all streams
        self.deadlock_seconds = deadlock_seconds
        self.device_faults: list[str] = []
        self.drift_probability = DRIFT_PROBABILITY
        self._faults = faults
        self._condition = condition
        self._runnable: list[Stream] = []
        self._gated: list[Stream] = []
        self._early: list[tuple[int, int, Copy]] = []  # heap of (step, tie-breaker, copy)
        self._ties = itertools.count()
        self._steps = 0
        self._idle_polls = 0
        self._polls = 0

    def now(self) -> float:
        return self.microseconds

    # Submission

    def submit(self, stream: Stream, operation: Operation) -> int:
        for region in operation.regions:
            region.pending += 1
        legacy = stream.context.legacy  # CUDA's "implicit synchronisation"
        if stream is legacy:
            others = stream.context.blocking()
            operation.dependencies += [(other, other.submitted) for other in others if other.queue]
        elif stream.blocking and legacy.queue:
            operation.dependencies.append((legacy, legacy.submitted))
        stream.queue.append(operation)
        stream.occupied += operation.places
        stream.submitted += 1
        self.pending += 1
        self._polls = 0
        if stream.state is StreamState.IDLE:
            self._make_runnable(stream)
        return stream.submitted

    def read_source(self, copy: Copy, order: int) -> None:
        """Read a copy's source now, plan to read it early, or leave it to the copy, as its access order allows."""
        if order == DURING_API_CALL:
            copy.snapshot()
        elif order == ANY:
            moment = self.chance.randrange(3)
            if moment == 0:
                copy.snapshot()
            elif moment == 1:
                due = self._steps + self.chance.randrange(1, EARLY_READ_STEPS)
                heapq.heappush(self._early, (due, next(self._ties), copy))

    # Progress

    def drift(self) -> None:
        """Advance a stream, with the probability `drift_probability`: work may start as soon as it is submitted."""
        if self.pending and self.chance.random() < self.drift_probability:
            self.step()

    def poll(self) -> None:
        """Do 0 to 2 steps, or more after PATIENT_POLLS; at least one in every fourth poll, if any is ready."""
        self._idle_polls += 1
        self._polls += 1
        steps = int(self.chance.random() * 3) * min(8, 1 + self._polls // PATIENT_POLLS)
        if not steps and self._idle_polls >= 4:
            steps = 1
        for _ in range(steps):
            self._idle_polls = 0
            self.step()

    def step(self) -> bool:
        """Advance one stream by a few operations; False when nothing can move."""
        self._steps += 1
        while self._early and self._early[0][0] <= self._steps:
            heapq.heappop(self._early)[2].snapshot()
        if self._gated and (not self._runnable or self.chance.random() < GATE_POLL_PROBABILITY):
            for opened in [stream for stream in self._gated if stream.queue[0].open()]:
                self._gated.remove(opened)
                self._make_runnable(opened)
        if not self._runnable:
            return False
        stream = self._runnable[int(self.chance.random() * len(self._runnable))]
        for _ in range(1 + int(self.chance.random() * LONGEST_BURST)):
            if not self._advance(stream):
                break
        return True

    def run_until(self, done: Callable[[], bool], what: str) -> None:
        """Step until `done`. When nothing can move, wait `deadlock_seconds` for other threads to change that.

        Raises SimulatorError where a real program would hang for ever.
        """
        stalled_since: float | None = None
        while not done():
            if self.step():
                stalled_since = None
                continue
            now = time.monotonic()
            stalled_since = stalled_since if stalled_since is not None else now
            if now - stalled_since >= self.deadlock_seconds:
                raise DeadlockError(f"deadlock: {what} can never finish; waiting: {self._gated or 'nothing queued'}")
            self._condition.wait(STALL_SECONDS)  # releases the lock, however often this thread has taken it

    def run_all(self) -> None:
        while self.step():
            pass

    def _advance(self, stream: Stream) -> bool:
        """Run the first operation of a runnable stream; False when the stream cannot go on."""
        if stream.state is not StreamState.RUNNABLE:
            return False
        if stream.context.error is not None:
            self.drop_queue(stream)
            return False
        operation = stream.queue[0]
        while operation.dependencies:
            other, serial = operation.dependencies[-1]
            if other.completed < serial:
                self._leave_runnable(stream, StreamState.BLOCKED)
                other.waiters.append((serial, stream))
                return False
            operation.dependencies.pop()
        if not operation.open():
            self._leave_runnable(stream, StreamState.GATED)
            self._gated.append(stream)
            return False
        stream.queue.popleft()
        stream.occupied -= operation.places
        if not stream.queue:
            self._leave_runnable(stream, StreamState.IDLE)
        self._execute(stream, operation)
        return stream.state is StreamState.RUNNABLE

    def _execute(self, stream: Stream, operation: Operation) -> None:
        try:
            if self._faults.next_operation():
                raise DeviceFaultError("an injected fault")
            if isinstance(operation, CopyOperation):
                operation.fault = self._faults.next_copy()
            self.microseconds += operation.run()
        except DeviceFaultError as fault:
            self.device_faults.append(str(fault))
            self.fail_context(stream.context, fault.status)
        finally:
            self._finish(stream, operation)

    def _finish(self, stream: Stream, operation: Operation) -> None:
        self.pending -= 1
        for region in operation.regions:
            region.pending -= 1
        stream.completed += 1
        operation.end()
        if stream.waiters:
            ready = [waiter for serial, waiter in stream.waiters if serial <= stream.completed]
            stream.waiters = [entry for entry in stream.waiters if entry[0] > stream.completed]
            for waiter in ready:
                if waiter.state is StreamState.BLOCKED:
                    self._make_runnable(waiter)
        if stream.destroyed and not stream.queue:
            stream.context.streams.pop(stream, None)

    def _make_runnable(self, stream: Stream) -> None:
        stream.state = StreamState.RUNNABLE
        stream.position = len(self._runnable)
        self._runnable.append(stream)

    def _leave_runnable(self, stream: Stream, state: StreamState) -> None:
        last = self._runnable.pop()
        if last is not stream:
            last.position = stream.position
            self._runnable[last.position] = last
        stream.state, stream.position = state, -1

    # Loss

    def fail_context(self, context: Context, error: Any) -> None:
        """Make an error sticky in a context: its queued work never happens, and nothing waits for it."""
        context.error = context.error or error
        for stream in context.all_streams():
            self.drop_queue(stream)

    def drop_queue(self, stream: Stream) -> None:
        if stream.state is StreamState.RUNNABLE:
            self._leave_runnable(stream, StreamState.IDLE)
        elif stream.state is StreamState.GATED:
            self._gated.remove(stream)
        stream.state = StreamState.IDLE
        stream.occupied = 0
        while stream.queue:
            self._finish(stream, stream.queue.popleft())
