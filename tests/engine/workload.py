"""A program that uses an engine and a cache, and checks of what it was told and what the bytes are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest
from helpers import COPY_ENGINE_ONLY, STAGING, Rig, change_streams, copiers_in, rig, simulated, whole

import kvoffload
from kvoffload import NO_WAIT, BlockCache, Direction, KVLayout, KVOffloadError, OffloadEngine
from kvoffload.copiers import loop, strided
from kvoffload.tuning import CopierName


def several_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small segments on changing streams, so that a few transfers use several streams and the links between them."""
    change_streams(monkeypatch)
    monkeypatch.setattr(strided.StridedCopier, "segment_operations", 2)
    monkeypatch.setattr(loop.LoopCopier, "segment_operations", 4)


class Check(NamedTuple):
    """One attempt: what it should have written, and where."""

    job: kvoffload.Job | None  # None: the call raised
    sources: tuple[kvoffload.Job | None, ...]  # jobs whose failure spoils what this one copied
    target: Callable[[], Any]
    before: int
    after: int


class Program:
    """A caller's program over one device: an engine, streams of its own, and a cache over two groups.

    Args:
        ways: to carry transfers by; none: every copier of the engine.
    """

    def __init__(self, bench: Rig, copiers: tuple[CopierName, ...] = ()) -> None:
        self.bench = bench
        self.copiers: tuple[CopierName, ...] = copiers or tuple(copiers_in(bench.engine))
        self.streams = [bench.stream(), bench.stream()]
        planes = [bench.device.allocate_planes(2, block_bytes=48, num_blocks=8) for _ in range(2)]
        self.cache_planes = planes
        self.cache_engine = OffloadEngine(KVLayout(planes), device=bench.device, num_slots=6, **COPY_ENGINE_ONLY)
        self.cache = BlockCache(self.cache_engine, policy="lru")
        self.errors: list[Exception] = []
        self.stored: dict[bytes, kvoffload.CacheJob] = {}

    @property
    def simulator(self) -> Any:
        return self.bench.device.simulator

    def attempt(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """The call's value, or None if it raised an error of the library's."""
        try:
            return call(*arguments, **options)
        except KVOffloadError as error:
            self.errors.append(error)
            return None

    def run(self, offset: int = 0) -> list[Check]:
        """Stores and loads by every copier, chained, ordered with streams; `offset` picks fresh slots and blocks."""
        engine = self.bench.engine
        checks = [
            check
            for index, copier in enumerate(self.copiers)
            for check in self.there_and_back(copier, 4 * index + offset, 2 * index + offset)
        ]
        self.attempt(engine.poll)
        self.run_cache(offset)
        for each in (engine, self.cache_engine):
            self.attempt(each.drain, 10)
        self.attempt(engine.poll)
        return checks

    def there_and_back(self, copier: CopierName, low: int, slot: int) -> list[Check]:
        """Store blocks `low` and `low + 1`; load the first of them, and a slot of old, into the next two."""
        bench, submit, after = self.bench, self.bench.engine.submit, self.streams[0]
        store = self.attempt(submit, Direction.STORE, [low, low + 1, 30], [slot, slot + 1, 30], copier=copier)
        load = self.attempt(submit, Direction.LOAD, [low + 2, low + 3], [slot, 20], after=after, copier=copier)
        if load is not None:
            self.attempt(load.order_before, self.streams[1])
        return [
            Check(store, (), partial(bench.slot, slot), 100 + slot, low + 1),
            Check(load, (store,), partial(bench.block, low + 2), low + 3, low + 1),
            Check(load, (), partial(bench.block, low + 3), low + 4, 120),
        ]

    def run_cache(self, offset: int) -> None:
        for number in range(3):
            key = b"%d" % (number + offset)
            job = self.attempt(self.cache.store, [key], [[number], [number + 1]], after=self.streams[0])
            if job is not None:
                self.stored[key] = job
        first = [b"%d" % offset]
        self.attempt(self.cache.load, first, [[5], [6]], after=NO_WAIT)
        self.attempt(self.cache.lookup, first)

    def verify(self, checks: list[Check], *, all_well: bool) -> None:
        """Every pool is whole; what succeeded is right, and what raised has done nothing."""
        for engine in (self.bench.engine, self.cache_engine):
            engine.drain(10)
            whole(engine)
            engine.poll()
        self.cache.check()
        for check in checks:
            failed = check.job is None or check.job.error is not None
            if all_well:
                assert not failed, check.job and check.job.error
            if any(each is None or each.error is not None for each in check.sources):
                continue
            if check.job is None:
                assert (check.target() == check.before).all(), "the call raised, so nothing may have happened"
            elif not failed:
                assert (check.target() == check.after).all()
            assert check.job is None or check.job.finished
        for key, job in self.stored.items():
            failed = any(each.error is not None for each in job.jobs)
            assert (self.cache.lookup([key]) == 0) or not failed, "a failed store is never visible"
            if all_well:
                assert self.cache.lookup([key]) == 1
        self.stored.clear()

    def close(self) -> None:
        self.cache_engine.close(10)


@contextmanager
def program(level: str = "batch", copiers: tuple[CopierName, ...] = (), **options: Any) -> Iterator[Program]:
    """A program on a device of its own; `options` as for `simulated`."""
    device = simulated(3, level, **options)
    try:
        with rig(device, num_blocks=40, num_slots=40, staging_bytes=STAGING if "pack" in copiers else 0) as bench:
            made = Program(bench, copiers)
            try:
                yield made
            finally:
                for gate in bench.gates:
                    gate.open()
                made.close()
    finally:
        device.close(30)
