"""Other processes that map shared slots, for tests: one without a device, and a rank with one. Started by spawn.

Each is asked for one thing at a time over a pipe, and answers with an array or None. It ends when the pipe is closed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
from helpers import COPY_ENGINE_ONLY, Bytes, Gate

import kvoffload
from kvoffload import NO_WAIT, DeviceBuffer, KVLayout, OffloadEngine, SharedSlots
from kvoffload.testing import scramble

SECONDS = 120.0  # for any answer: the first one waits for the imports of a new process
PLANES, NUM_BLOCKS, NUM_SLOTS = 8, 24, 16


def planes_on(device: kvoffload.Device) -> list[kvoffload.Plane]:
    """The same in all processes: those of the one group of an engine here."""
    return device.allocate_planes(PLANES, block_bytes=512 if device.simulated else 16 << 10, num_blocks=NUM_BLOCKS)


def buffer_of(planes: list[kvoffload.Plane]) -> DeviceBuffer:
    buffer = planes[0].owner
    assert isinstance(buffer, DeviceBuffer)
    return buffer


class Peer:
    """The side of the process that has started it."""

    def __init__(self, process: BaseProcess, connection: Connection) -> None:
        self.process, self._connection = process, connection

    def ask(self, name: str, *arguments: Any) -> Any:
        """Call a method of the other process's object, and return what it returns."""
        self._connection.send((name, arguments))
        assert self._connection.poll(SECONDS), f"no answer to {name} in {SECONDS} seconds"
        return self._connection.recv()

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(SECONDS)
        assert self.process.exitcode == -signal.SIGKILL


@contextmanager
def started(program: Callable[..., None], *arguments: Any) -> Iterator[Peer]:
    """A process that runs `program(connection, *arguments)`; killed at the end if it has not ended."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=program, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Peer(process, ours)
        ours.close()
        process.join(SECONDS)
    finally:
        ours.close()
        if process.is_alive():
            process.kill()
            process.join()


def _answer(connection: Connection, target: object) -> None:
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        connection.send(getattr(target, name)(*arguments))


# a process without a device -------------------------------------------------------------------------------------------


class _Mapped:
    def __init__(self, slots: SharedSlots) -> None:
        self._slots = slots

    def read(self) -> Bytes:
        """A copy of all slots."""
        return self._slots.array.copy()

    def write(self, seed: int) -> None:
        """Fill all slots with random bytes, `random_slots` of the seed."""
        self._slots.array[:] = random_slots(self._slots.array.shape, seed)


def random_slots(shape: tuple[int, ...], seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def map_slots(connection: Connection, name: str) -> None:
    """The program of a process that maps the slots offered under `name`; it answers `read` and `write`."""
    with SharedSlots.receive(name, timeout=SECONDS) as slots:
        _answer(connection, _Mapped(slots))


# a rank ---------------------------------------------------------------------------------------------------------------


class _Rank:
    def __init__(self, device: kvoffload.Device, engine: OffloadEngine, buffer: DeviceBuffer) -> None:
        self._device, self._engine, self._buffer = device, engine, buffer

    def store(self, blocks: list[int], slots: list[int], seed: int) -> Bytes:
        """Write random bytes to the device, store some blocks; all bytes of the device, once that has ended."""
        content = scramble(self._buffer, seed)
        self._engine.store(blocks, slots, after=NO_WAIT).wait(SECONDS)
        return content

    def load(self, slots: list[int], blocks: list[int]) -> Bytes:
        """Load some blocks; all bytes of the device, once that has ended."""
        self._engine.load(slots, blocks, after=NO_WAIT).wait(SECONDS)
        return self._buffer.to_numpy()

    def hold(self, blocks: list[int], slots: list[int]) -> int:
        """Submit stores and loads that cannot begin; how many are in flight."""
        self.load(slots, blocks)  # what the driver does for the first time may wait for the gate
        stream = self._device.stream()
        gate = Gate(self._device)
        gate.hold(stream.handle)
        for block, slot in zip(blocks, slots, strict=True):
            self._engine.store([block], [slot], after=stream)
            self._engine.load([slot], [block], after=stream)
        self._held = gate, stream  # kept until the process is killed
        return self._engine.in_flight


def run_rank(connection: Connection, name: str, simulated: bool, index: int) -> None:
    """The program of a rank: an engine over slots that it offers under `name`; it answers `store`, `load`, `hold`."""
    with kvoffload.open_device(0 if simulated else index, backend="simulated" if simulated else "cuda") as device:
        planes = planes_on(device)
        layout = KVLayout([planes])
        with (
            SharedSlots(NUM_SLOTS, layout.slot_bytes) as slots,
            OffloadEngine(layout, device=device, host_memory=slots.host_memory, **COPY_ENGINE_ONLY) as engine,
        ):
            slots.offer(name)
            _answer(connection, _Rank(device, engine, buffer_of(planes)))
