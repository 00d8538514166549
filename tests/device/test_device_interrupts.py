"""An interrupt at every point of a device's calls: nothing that was made is lost, and `close()` ends."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable

import pytest
from interrupts import Point, interrupt_at
from seeds import rest_long

import kvoffload
from kvoffload import ClosedError, DeviceBuffer
from kvoffload.device.pinned import PAGE_BYTES, PinnedMemory
from kvoffload.testing import SimulatedDriver

CREATING = {
    "cuMemAlloc": "device_allocations",
    "cuDevicePrimaryCtxRetain": "primary_retains",
    "cuStreamCreateWithPriority": "streams",
    "cuMemHostRegister": "",  # its range is known before the call
}


class World:
    """A device with a buffer, and what a call has made and holds."""

    def __init__(self) -> None:
        self.simulator = SimulatedDriver()
        self.device = kvoffload.open_device(backend=self.simulator)
        self.buffer = self.device.allocate(100)
        self.buffers: list[DeviceBuffer] = []
        self.pinned: list[PinnedMemory] = []

    def pin(self) -> None:
        with self.device.current():
            PinnedMemory(self.device.driver, 3 * PAGE_BYTES, unit_bytes=PAGE_BYTES, holder=self.pinned)

    def close_all(self) -> None:
        """As a program does it that was interrupted; in a thread that has no part of the lock that it left."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # an open that was interrupted is not closed
            gc.collect()
            kvoffload.open_device(backend="simulated").close()
            if not self.device.closed:
                self.device.reclaim()
                assert self.device.owned == (1 if "closed" not in repr(self.buffer) else 0)
                assert self.device.allocate(10).nbytes == 10
                with self.device.current():
                    for pinned in self.pinned:
                        pinned.release()
            self.device.close(5)
        with pytest.raises(ClosedError):
            self.device.allocate(10)

    def leaks(self) -> dict[str, int]:
        return {kind: count for kind, count in self.simulator.leaks().items() if count}


def pin_and_release(world: World) -> None:
    world.pin()
    with world.device.current():
        world.pinned[0].release()


def reopen(world: World) -> None:
    kvoffload.open_device(backend=world.simulator).close()


def lose_an_open(world: World) -> None:
    kvoffload.open_device(backend=world.simulator).name  # noqa: B018


def lose_a_buffer(world: World) -> None:
    world.device.allocate(64)
    world.device.reclaim()


def use_a_stream(world: World) -> None:
    with world.device.stream() as stream:
        with world.device.current():
            world.device.driver.fill(world.buffer.address, 1, world.buffer.nbytes, stream.handle)
        stream.synchronize()


def lose_a_stream(world: World) -> None:
    world.device.stream()
    world.device.reclaim()


CALLS: dict[str, Callable[[World], object]] = {
    "open_device": reopen,
    "open_device, not closed": lose_an_open,
    "allocate": lambda world: world.buffers.append(world.device.allocate(64)),
    "allocate, not kept": lose_a_buffer,
    "allocate_blocks": lambda world: world.device.allocate_blocks(4, planes=2, block_bytes=64),
    "allocate_planes": lambda world: world.device.allocate_planes(2, block_bytes=64, num_blocks=4),
    "empty": lambda world: world.device.empty((4, 4), "float16"),
    "copies": lambda world: world.buffer.copy_from(world.buffer.to_numpy()),
    "stream": use_a_stream,
    "stream, not kept": lose_a_stream,
    "buffer.close": lambda world: world.buffer.close(),
    "PinnedMemory": lambda world: world.pin(),
    "PinnedMemory.release": pin_and_release,
    "device.close": lambda world: world.device.close(5),
}


def one_try(name: str, number: int) -> tuple[Point | None, str]:
    """The point that was interrupted, None if there is none with that number; and what is wrong afterwards."""
    world = World()
    outcome = interrupt_at(number, lambda: CALLS[name](world))
    world.buffers.clear()
    problems: list[str] = []

    def settle() -> None:
        try:
            world.close_all()
        except BaseException as error:
            problems.append(repr(error))

    thread = threading.Thread(target=settle)
    thread.start()
    thread.join(30)
    lost = CREATING.get(outcome.point.what if outcome.point is not None and outcome.point.kind == "driver" else "")
    left = world.leaks()
    if lost and left.get(lost) == 1:
        del left[lost]
    if left or problems or thread.is_alive() or world.simulator.violations:
        return outcome.point, f"{outcome.point}: {left} {problems} {world.simulator.violations}"
    if (
        not lost
        and world.simulator.call_count["cuDevicePrimaryCtxRelease"]
        != world.simulator.call_count["cuDevicePrimaryCtxRetain"]
    ):
        return outcome.point, f"{outcome.point}: the primary context is retained"
    return outcome.point, ""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("first", rest_long(range(1, 4), 1))  # every third point at once, the others in long runs
@pytest.mark.parametrize("name", CALLS)
def test_pitfall_41_an_interrupt_anywhere_loses_nothing(name: str, first: int) -> None:
    number, wrong = first, []
    while True:
        point, problem = one_try(name, number)
        if problem:
            wrong.append(problem)
        if point is None:
            break
        number += 3
    print(f"{name}: every third point from {first} to {number - 3}")
    assert number > 10
    assert not wrong, "\n".join(wrong)
