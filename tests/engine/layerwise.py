"""Loads in parts, some of which are held back, and readers of single planes whose streams wait for a part."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from helpers import Gate, Rig, leaks_of, release, rig, simulated, whole
from interrupts import count_points, interrupt_at
from transfers import COPY_CALLS, intercepted, queueing

import kvoffload
from kvoffload import Direction, Job
from kvoffload.engine.job import Segment

PLANES = 8  # of the rigs of most tests
PARTS = 4  # of two planes each
DEFAULTS: dict[str, Any] = {"after": kvoffload.NO_WAIT, "parts": PARTS}  # of every load


class Produced:
    """An array of another library's, which names the stream that computes it."""

    def __init__(self, stream: int | None) -> None:
        shape = {"shape": (4,), "typestr": "|u1", "data": (1 << 20, False), "version": 3}
        self.__cuda_array_interface__ = shape | ({} if stream is None else {"stream": stream})


def hold_from(bench: Rig, part: int, *, most: int = 1 << 30) -> Gate:
    """A closed gate that holds that part, and what follows it, of every load queued from now on, of `most` at most."""
    gate = bench.gate()
    held: list[Segment] = []

    def hold_first(function: Callable[..., Any], *arguments: Any) -> Any:
        transfer = queueing(bench.engine)
        if transfer is not None and transfer.direction is Direction.LOAD and len(held) < most:
            segment = transfer.segments[-1]
            first = [each.part for each in transfer.segments].count(part) == 1
            if segment.part == part and first and segment not in held:
                held.append(segment)
                gate.hold(segment.stream.handle)
        return function(*arguments)

    bench.cleanup.enter_context(intercepted(bench.device.driver, COPY_CALLS, hold_first))
    return gate


class Reader:
    """A caller's stream that copies one block of one plane into memory of its own."""

    def __init__(self, bench: Rig) -> None:
        self._bench = bench
        self.stream = bench.stream()
        self._scratch = bench.device.allocate(bench.planes[0].block_bytes)

    def read(self, plane: int, block: int) -> None:
        """Queue it."""
        source = self._bench.planes[plane]
        with self._bench.device.current():
            at = source.address + block * source.block_stride
            self._bench.device.driver.copy(self._scratch.address, at, self._scratch.nbytes, self.stream)

    @property
    def idle(self) -> bool:
        with self._bench.device.current():
            return self._bench.device.driver.stream_query(self.stream)

    @property
    def value(self) -> int:
        """The value of all bytes that were read."""
        (value,) = set(self._scratch.to_numpy().tolist())
        return int(value)


def reader_of(bench: Rig, job: Job, part: int, plane: int, block: int) -> Reader:
    """A reader whose stream was ordered after a part of a load."""
    reader = Reader(bench)
    job.order_before(reader.stream, part=part)
    reader.read(plane, block)
    return reader


def load(bench: Rig, slots: Any, blocks: Any, **options: Any) -> Job:
    return bench.engine.load(slots, blocks, **{**DEFAULTS, **options})


def blocks_hold(bench: Rig, blocks: Any, values: Any) -> bool:
    """Whether each of these blocks holds its value in every byte of every plane."""
    found = [set(bench.block(block).tolist()) for block in blocks]
    return found == [{value} for value in values]


def load_and_drain(bench: Rig, held: int, gate: Gate) -> None:
    """Load in parts behind a held stream, which is then let go on, and see the load end."""
    load(bench, range(4), range(4), after=held)
    gate.open()
    bench.engine.drain(10)


def check_after_interrupt(bench: Rig) -> None:
    """Blocks of an interrupted `load_and_drain` can be loaded again, in parts, too; nothing is left of either load."""
    bench.gates[-1].open()
    bench.engine.drain(10)
    follower = load(bench, range(8, 12), range(4))
    reader = reader_of(bench, follower, 0, 0, 3)
    release(bench)
    follower.wait(10)
    assert reader.value == 111
    assert blocks_hold(bench, range(4), range(108, 112))
    whole(bench.engine)
    assert len(bench.engine.poll()) in (0, 1), "the load that was interrupted"


def interrupt_loads(
    first: int, step: int, check: Callable[[Rig], None] = check_after_interrupt, **options: Any
) -> None:
    """Interrupt a load in parts at its points `first`, `first + step` and so on, each time on a device of its own.

    Args:
        check: what must hold then, and after a load that was not interrupted.
        options: of the rigs.
    """

    def attempt(number: int) -> int:
        with simulated(1) as device, rig(device, planes=PLANES, **options) as bench:
            held = bench.stream()
            work = partial(load_and_drain, bench, held, bench.gate(held))
            points = 0
            if number:
                interrupt_at(number, work)
            else:
                points = count_points(work)
            check(bench)
        assert sum(leaks_of(device).values()) <= 1, "the handle that an interrupted driver call made"
        return points

    points = attempt(0)
    for number in range(first, points + 1, step):
        try:
            attempt(number)
        except BaseException as error:
            error.add_note(f"interrupted at point {number} of {points}")
            raise
