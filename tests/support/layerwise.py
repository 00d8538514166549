"""Loads in parts, some of which are held back, and readers of single planes whose streams wait for a part."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import Gate, Rig, release

import kvoffload
from kvoffload.device.streams import LaneStream
from kvoffload.engine import launcher
from kvoffload.engine.job import Job
from kvoffload.engine.transfer import Segment

PLANES = 8  # of the rigs of most tests
PARTS = 4  # of two planes each
DEFAULTS: dict[str, Any] = {"after": kvoffload.NO_WAIT, "parts": PARTS}  # of every load


def hold_from(bench: Rig, monkeypatch: pytest.MonkeyPatch, part: int) -> Gate:
    """A closed gate. It holds that part of every transfer that is queued from now on, and all later parts."""
    gate = bench.gate()

    class HeldSegment(Segment):
        """A segment is created before anything of it is queued."""

        __slots__ = ()

        def __init__(self, share: int, number: int, stream: LaneStream, places: int) -> None:
            super().__init__(share, number, stream, places)
            if number == part:
                gate.hold(stream.handle)

    monkeypatch.setattr(launcher, "Segment", HeldSegment)
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


def load_interrupted(bench: Rig, held: int, gate: Gate, left: list[int]) -> None:
    """Load behind a held stream, with an interrupt in between, see `interrupt_call`. Then load these blocks in parts,
    which works."""

    def load_until_ended() -> None:
        load(bench, range(4), range(4), after=held)
        gate.open()
        bench.engine.drain(10)

    with pytest.raises(KeyboardInterrupt):
        load_until_ended()
    assert left[0] <= 0
    follower = load(bench, range(8, 12), range(4))
    reader = reader_of(bench, follower, 0, 0, 3)
    release(bench)
    follower.wait(10)
    assert reader.value == 111
    assert blocks_hold(bench, range(4), range(108, 112))
