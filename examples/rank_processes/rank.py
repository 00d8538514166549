"""A rank: a process with one device, its share of the model, its part of the paged KV cache, and an engine over that.

It decides nothing. It knows blocks and slots by number, and no keys. Only the scheduler's index knows which bytes are
worth keeping, and when a slot may be used again.
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from paged_decode import model
from paged_decode.arrays import NumpyBackend
from paged_decode.backend import Backend

import kvoffload
from rank_processes import messages

POLL_SECONDS = 0.001  # while the pipe is empty, look so often whether a transfer has ended


class Setup(NamedTuple):
    """A rank's number, how many ranks there are, and the size of the whole model.

    Attributes:
        simulated: compute in numpy on the simulated device; otherwise in CuPy on the GPU with the rank's number.
    """

    rank: int
    ranks: int
    size: model.ModelSize
    simulated: bool


class SchedulerEndedError(Exception):
    """The scheduler has closed the pipe, or its process has ended."""


def serve(connection: Connection, setup: Setup) -> None:
    """The function of a rank's process. It ends when the scheduler closes the pipe, or is killed."""
    with open_rank(connection, setup) as rank:
        rank.run()


@contextmanager
def open_rank(connection: Connection, setup: Setup) -> Iterator[Rank]:
    """A rank over its device. Whatever ends it, it drains the engine and unpins its memory before the process ends.

    If it raises, it sends the exception to the scheduler, and the process ends with exit code 1.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the scheduler closes the pipes
    try:
        with open_device(setup) as device, closing(Rank(connection, setup, device)) as rank:
            yield rank
    except SchedulerEndedError:
        sys.exit(1)
    except Exception as error:  # noqa: BLE001  # reported to the scheduler
        try:
            connection.send(messages.Raised("".join(traceback.format_exception(error))))
        except OSError:
            traceback.print_exception(error)  # the scheduler is gone
        sys.exit(1)


def open_device(setup: Setup) -> kvoffload.Device:
    """Open the rank's device. A simulated rank has its own driver, whose only device is number 0."""
    if setup.simulated:
        return kvoffload.open_device(backend="simulated")
    return kvoffload.open_device(setup.rank, backend="cuda")


class Rank:
    """Handles the scheduler's messages, and reports transfers that have ended."""

    def __init__(self, connection: Connection, setup: Setup, device: kvoffload.Device) -> None:
        self.device = device
        self._connection = connection
        self._backend = make_backend(device, setup, self._add_up)
        self._engine: kvoffload.OffloadEngine | None = None
        self._jobs: dict[int, kvoffload.Job] = {}  # in flight, by the transfer's number
        self._handlers: dict[type, Callable[[Any], None]] = {
            messages.Open: self._open,
            messages.Transfer: self._submit,
            messages.Follow: self._follow,
            messages.Compute: self._compute,
            messages.Spoil: self._spoil,
        }

    def run(self) -> None:
        """Run until the scheduler closes the pipe between two messages.

        Raises:
            SchedulerEndedError: the pipe was closed in the middle of a step.
        """
        while True:
            self._report_ended()
            if self._jobs and not self._connection.poll(POLL_SECONDS):
                continue
            try:
                request = self._receive()
            except SchedulerEndedError:
                return
            self._handlers[type(request)](request)

    def close(self) -> None:
        """Drain, and unpin the slots."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _open(self, request: messages.Open) -> None:
        self.close()  # before the old cache is freed
        layout = self._backend.new_cache(request.num_blocks)
        assert isinstance(layout, kvoffload.KVLayout)
        self._engine = kvoffload.OffloadEngine(layout, device=self.device, num_slots=request.num_slots)
        description = kvoffload.KVLayout(
            [[plane.disowned() for plane in group.planes] for group in layout.groups],
            dtype=layout.dtype,
            tokens_per_block=layout.tokens_per_block,
            block_axes=layout.block_axes,
        )
        self._send(messages.Opened(description))

    def _submit(self, request: messages.Transfer) -> None:
        """Submit a transfer. If the engine refuses it, report it as failed."""
        assert self._engine is not None, "Open is the first message"
        number, direction, blocks, slots = request
        try:
            self._jobs[number] = self._engine.submit(direction, blocks, slots, after=self._backend.after())
        except kvoffload.KVOffloadError as error:
            self._send(messages.Ended(number, str(error)))

    def _report_ended(self) -> None:
        for number, job in [each for each in self._jobs.items() if each[1].done]:
            del self._jobs[number]
            self._send(messages.Ended(number, None if job.error is None else str(job.error)))

    def _follow(self, request: messages.Follow) -> None:
        """If the transfer is not in flight, it has ended. If it fails, `Ended` reports the error."""
        job = self._jobs.get(request.number)
        if job is not None:
            try:
                self._backend.follow(job)
            except kvoffload.TransferError:
                pass

    def _compute(self, request: messages.Compute) -> None:
        self._send(messages.Logits(self._backend.step(request.step)))

    def _add_up(self, product: messages.Floats) -> messages.Floats:
        self._send(messages.Product(product))
        answer = self._receive()
        assert isinstance(answer, messages.Sum), answer
        return answer.values

    def _spoil(self, request: messages.Spoil) -> None:
        assert self._engine is not None, "Open is the first message"
        self._engine.slots[request.slot] ^= 1

    def _receive(self) -> messages.Request:
        try:
            request: messages.Request = self._connection.recv()
        except (EOFError, OSError) as error:
            raise SchedulerEndedError from error
        return request

    def _send(self, answer: messages.Answer) -> None:
        try:
            self._connection.send(answer)
        except OSError as error:
            raise SchedulerEndedError from error


def make_backend(
    device: kvoffload.Device, setup: Setup, add_up: Callable[[messages.Floats], messages.Floats]
) -> Backend:
    """The backend with the rank's share of the model."""
    division = model.Division(setup.rank, setup.ranks, add_up)
    if setup.simulated:
        return NumpyBackend(device, setup.size, division)
    import cupy
    from cupy_paged_decode import CupyBackend

    cupy.cuda.Device(device.index).use()
    backend: Backend = CupyBackend(device, setup.size, division)
    return backend
