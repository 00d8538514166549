"""Loads in parts of which some are held back, and readers of single planes that were ordered behind a part."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import Gate, Rig, release

import kvoffload
from kvoffload.engine.books import Flight
from kvoffload.engine.job import Job, Piece
from kvoffload.engine.launcher import Launcher

PLANES = 8  # of the rigs of most tests
PARTS = 4  # of two planes each
DEFAULTS: dict[str, Any] = {"after": kvoffload.NO_WAIT, "parts": PARTS}  # of every load


def hold_from(bench: Rig, monkeypatch: pytest.MonkeyPatch, part: int) -> Gate:
    """A closed gate that holds that part of every job launched from now on, and what follows it."""
    gate = bench.gate()
    launch = Launcher._launch_piece

    def held(launcher: Launcher, job: Job, flight: Flight, stop: int, piece: Piece, *rest: Any) -> None:
        if piece.part == part and [each.part for each in job.pieces].count(part) == 1:
            gate.hold(piece.stream.handle)
        launch(launcher, job, flight, stop, piece, *rest)

    monkeypatch.setattr(Launcher, "_launch_piece", held)
    return gate


class Reader:
    """A stream of the caller's that copies one block of one plane aside."""

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
        """Of all bytes that it read."""
        (value,) = set(self._scratch.to_numpy().tolist())
        return int(value)


def reader_of(bench: Rig, job: Job, part: int, plane: int, block: int) -> Reader:
    """One that was ordered behind a part."""
    reader = Reader(bench)
    job.order_before(reader.stream, part=part)
    reader.read(plane, block)
    return reader


def load(bench: Rig, slots: Any, blocks: Any, **options: Any) -> Job:
    return bench.engine.load(slots, blocks, **{**DEFAULTS, **options})


def blocks_hold(bench: Rig, blocks: Any, values: Any) -> bool:
    """Whether each of these blocks holds that value in every byte of every plane."""
    found = [set(bench.block(block).tolist()) for block in blocks]
    return found == [{value} for value in values]


def load_interrupted(bench: Rig, held: int, gate: Gate, left: list[int]) -> None:
    """Load behind a held stream, with an interrupt on the way, see `interrupt_call`; then blocks of that load again,
    which works, in its parts, too."""

    def load_and_land() -> None:
        load(bench, range(4), range(4), after=held)
        gate.open()
        bench.engine.drain(10)

    with pytest.raises(KeyboardInterrupt):
        load_and_land()
    assert left[0] <= 0
    follower = load(bench, range(8, 12), range(4))
    reader = reader_of(bench, follower, 0, 0, 3)
    release(bench)
    follower.wait(10)
    assert reader.value == 111
    assert blocks_hold(bench, range(4), range(108, 112))
