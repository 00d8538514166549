"""Rigs for the tests: a device with planes, an engine and streams of a caller's, simulated or real."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from seeds import rest_long, seeds

import kvoffload
from kvoffload.copiers import CopierSet
from kvoffload.device import streams
from kvoffload.device.pinned import PAGE_BYTES, PinnedMemory
from kvoffload.driver import address_of
from kvoffload.driver.functions import RAW
from kvoffload.engine import launcher
from kvoffload.simulator import SimulatedDriver
from kvoffload.tuning import COPIERS, CopierName

Bytes = npt.NDArray[np.uint8]

# (driver version, bindings version): what the simulated device offers
LEVELS = {
    "batch": ((13, 0), (13, 3)),
    "fail-index": ((12, 8), (12, 9)),
    "no-batch": ((12, 4), (13, 3)),
    "raw": ((13, 0), (13, 5)),
}
LEGACY, PER_THREAD = 1, 2
LANE_STREAMS = streams.STREAMS_PER_LANE + 1  # those for copies, and one for kernels
ENGINE_STREAMS = 2 * LANE_STREAMS
# Two show every wait that is missing: the mutation tests run no more. Four have every level; the rest is for `-m long`.
ORDERING_SEEDS = seeds(int(os.environ.get("KVOFFLOAD_ORDERING_SEEDS", "6")))
EACH_SEED = rest_long(ORDERING_SEEDS, 4)
BLOCKING, NON_BLOCKING = 0, 1
# Of engines in tests about streams, order, segments and faults: without a kernel, those take the copy engine on every
# run, and cost nothing: interpreting one takes 4 ms, and 2 ms more for each of its tiles.
COPY_ENGINE_ONLY: dict[str, Any] = {"staging_bytes": 0}
STAGING = 16 << 20  # room for the blocks of these tests


def simulated(seed: int = 0, level: str = "batch", **options: Any) -> kvoffload.Device:
    """A simulated device of a capability level; `options` as for SimulatedDriver."""
    driver_version, bindings_version = LEVELS[level]
    driver = SimulatedDriver(
        seed=seed,
        driver_version=driver_version,
        bindings_version=bindings_version,
        **{"deadlock_seconds": 0.3, **options},
    )
    return kvoffload.open_device(backend=driver)


@contextmanager
def suppress_lost() -> Iterator[None]:
    """Let errors of a lost context pass: nothing can be given back in it."""
    try:
        yield
    except kvoffload.DriverError as error:
        if not error.sticky:
            raise


class Gate:
    """Holds streams until it is opened: they wait for a pinned word on the GPU.

    On a real GPU it opens by itself after a minute: whatever call a test is stuck in, it hangs no GPU.
    """

    def __init__(self, device: kvoffload.Device) -> None:
        self._device = device
        with device.current():
            self._memory = PinnedMemory(device.driver, PAGE_BYTES)
        self._opener = threading.Timer(60, self._open)
        self._opener.daemon = True
        if not device.simulated:
            self._opener.start()

    def hold(self, stream: int) -> None:
        with self._device.current():
            self._device.driver.call("cuStreamWaitValue32", stream, self._memory.address, 1, 0)

    def open(self) -> None:
        self._opener.cancel()
        self._open()

    def _open(self) -> None:
        self._memory.array[:4].view(np.uint32)[0] = 1

    def close(self) -> None:
        """Open it and unpin the word. No stream may wait for it any more."""
        self.open()
        if not self._device.closed:
            with self._device.current(), suppress_lost():
                self._memory.release()


@contextmanager
def held_stream(device: kvoffload.Device) -> Iterator[tuple[kvoffload.Stream, Gate]]:
    """A stream of the caller's that waits until its gate is opened."""
    with device.stream() as stream:
        gate = Gate(device)
        gate.hold(stream.handle)
        try:
            yield stream, gate
        finally:
            gate.open()
    gate.close()


@dataclass
class Rig:
    """A device, an engine over `slab`, and what a caller's program would own."""

    device: kvoffload.Device
    engine: kvoffload.OffloadEngine
    slab: kvoffload.DeviceBuffer
    planes: list[kvoffload.Plane]
    streams: list[int] = field(default_factory=list)
    gates: list[Gate] = field(default_factory=list)
    cleanup: ExitStack = field(default_factory=ExitStack)  # closed before the engine is

    def stream(self, flags: int = NON_BLOCKING) -> int:
        with self.device.current():
            handle = int(self.device.driver.call("cuStreamCreateWithPriority", flags, 0))
        self.streams.append(handle)
        return handle

    def gate(self, *streams: int) -> Gate:
        """A closed gate that holds these streams."""
        gate = Gate(self.device)
        self.gates.append(gate)
        for stream in streams:
            gate.hold(stream)
        return gate

    def settle(self) -> None:
        """Let everything run that nothing holds back."""
        if self.device.simulator is not None:
            self.device.simulator.run_all()
        else:
            time.sleep(0.05)  # more than a turn of eight processes that share the GPU

    def fill(
        self, stream: int, value: int, block: int | None = None, planes: list[kvoffload.Plane] | None = None
    ) -> None:
        """Queue the writing of `value` into a block of every plane, or into all of their blocks."""
        with self.device.current():
            for plane in self.planes if planes is None else planes:
                at = plane.address + (block or 0) * plane.block_stride
                nbytes = plane.span_bytes if block is None else plane.block_bytes
                self.device.driver.fill(at, value, nbytes, stream)

    def copy_block(self, stream: int, target: int, block: int) -> None:
        """Queue the copying of a block of every plane to device memory, one plane after the other."""
        with self.device.current():
            for plane in self.planes:
                source = plane.address + block * plane.block_stride
                self.device.driver.copy(target, source, plane.block_bytes, stream)
                target += plane.block_bytes

    def block(self, block: int, planes: list[kvoffload.Plane] | None = None) -> Bytes:
        """The bytes of a block now, plane after plane; read synchronously."""
        parts = []
        for plane in self.planes if planes is None else planes:
            part = np.empty(plane.block_bytes, np.uint8)
            with self.device.current():
                at = plane.address + block * plane.block_stride
                self.device.driver.copy_to_host(address_of(part), at, plane.block_bytes)
            parts.append(part)
        return np.concatenate(parts)

    def slot(self, slot: int) -> Bytes:
        """The payload of a slot when `blocks_per_slot` is 1."""
        return self.engine.slots[slot, : sum(plane.block_bytes for plane in self.planes)]

    def synchronize(self, stream: int) -> None:
        with self.device.current():
            self.device.driver.stream_synchronize(stream)

    def close(self) -> None:
        """Open the gates, let everything end, and give everything back but the planes."""
        self.cleanup.close()
        for gate in self.gates:
            gate.open()
        if self.device.closed:
            return
        self.engine.close(timeout=30)
        with self.device.current(), suppress_lost():
            self.device.driver.api.cuCtxSynchronize()
            for stream in self.streams:
                self.device.driver.stream_destroy(stream)
        for gate in self.gates:
            gate.close()


@contextmanager
def rig(
    device: kvoffload.Device, *, planes: int = 4, block_bytes: int = 64, num_blocks: int = 16, **options: Any
) -> Iterator[Rig]:
    """A rig with one group in one slab; block `b` is filled with `b + 1`, slot `s` with `100 + s`.

    Transfers take the copy engine unless `staging_bytes` says otherwise.
    """
    made = device.allocate_planes(planes, block_bytes=block_bytes, num_blocks=num_blocks)
    slab = made[0].owner
    assert isinstance(slab, kvoffload.DeviceBuffer)
    engine = kvoffload.OffloadEngine(
        kvoffload.KVLayout([made]), device=device, **{"num_slots": 16, **COPY_ENGINE_ONLY, **options}
    )
    every = Rig(device, engine, slab, made)
    paint(every)
    try:
        yield every
    finally:
        every.close()


def settled(device: kvoffload.Device, **options: Any) -> Iterator[Rig]:
    """A rig, for a fixture: at the end its gates are opened, it is drained, and its engine is checked."""
    with rig(device, **options) as made:
        if not device.simulated:
            warm_up(made)
        yield made
        for gate in made.gates:  # one that a failed test left closed
            gate.open()
        made.engine.drain(30)
        whole(made.engine)


def choose_kernels_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have engines choose kernels as on a GPU. Else the simulated device runs only those that are asked for."""
    opened = CopierSet.open

    def open_as_on_a_gpu(copiers: CopierSet, *arguments: Any) -> None:
        opened(copiers, *arguments)
        copiers.interpreted = False

    monkeypatch.setattr(CopierSet, "open", open_as_on_a_gpu)


def paint(rig: Rig) -> None:
    """Block `b` holds `b + 1` in every byte, slot `s` holds `100 + s`, modulo 256."""
    number_blocks(rig.planes, 1)
    rig.engine.slots[:] = (100 + np.arange(rig.engine.num_slots)).astype(np.uint8)[:, np.newaxis]


def copiers_in(engine: kvoffload.OffloadEngine) -> list[CopierName]:
    """The copiers that an engine has."""
    return [name for name in COPIERS if name not in engine.missing_copiers]


def warm_up(rig: Rig) -> None:
    """Do each kind of work once. The driver may synchronise when it does something first: for ever behind a gate."""
    nbytes = sum(plane.block_bytes for plane in rig.planes)
    stream, scratch = rig.stream(), rig.device.allocate(nbytes)
    rig.fill(stream, 1)
    rig.copy_block(stream, scratch.address, 0)
    rig.synchronize(stream)
    rig.gate(stream).open()
    for copier in copiers_in(rig.engine):
        for transfer in (rig.engine.store, rig.engine.load):
            transfer([0, 1], [0, 1], copier=copier).wait(30)
    rig.engine.poll()
    paint(rig)


def number_blocks(planes: list[kvoffload.Plane], first: int) -> None:
    """Block `b` of each of these planes of one slab holds `first + b` in every byte, modulo 256."""
    slab = planes[0].owner
    assert isinstance(slab, kvoffload.DeviceBuffer)
    image = slab.to_numpy()
    for plane in planes:
        for block in range(plane.num_blocks):
            start = plane.address - slab.address + block * plane.block_stride
            image[start : start + plane.block_bytes] = (first + block) % 256
    slab.copy_from(image)


def all_are(array: Any, value: int) -> bool:
    return bool((np.asarray(array) == value).all())


def release(rig: Rig, *held_back: kvoffload.Job) -> None:
    """Let run what can, make sure that these jobs could not, open all gates, and wait for everything."""
    rig.settle()
    for job in held_back:
        assert not job.done, "the gate holds this one back"
    for gate in rig.gates:
        gate.open()
    rig.engine.drain(30)
    rig.settle()


def change_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every segment of every transfer queued on another stream than the one before it in its direction.

    Kernels have the one stream of their lane.
    """

    def next_stream(lane: streams.Lane, places: int, kernel: bool) -> streams.LaneStream:
        del places
        if kernel:
            return lane.streams[streams.KERNEL_STREAM]
        lane.tail = (lane.tail + 1) % streams.STREAMS_PER_LANE
        return lane.streams[lane.tail]

    monkeypatch.setattr(launcher, "stream_with_room", next_stream)


def cut_segments(monkeypatch: pytest.MonkeyPatch, engine: kvoffload.OffloadEngine, operations: int = 1) -> None:
    """At most so many operations at a time, of a kernel so many blocks."""
    copiers = engine._parts.copiers
    for copier in (*copiers._of_copy_engine.values(), *copiers._pack.values()):
        monkeypatch.setattr(copier, "segment_operations", operations)


def in_threads(*works: Callable[[], object]) -> None:
    """Run each of these in a thread of its own; raises the first error."""
    errors: list[BaseException] = []

    def run(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error


def interrupt_call(
    patch: pytest.MonkeyPatch, owner: type, name: str, nth: int = 1, *, after: bool = False
) -> list[int]:
    """Have the nth call of a method raise KeyboardInterrupt, before or after it did its work, and no other; the list
    holds how many calls are left until then."""
    original, left = getattr(owner, name), [nth]

    def method(*arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0 and not after:
            raise KeyboardInterrupt
        value = original(*arguments, **options)
        if left[0] == 0:
            raise KeyboardInterrupt
        return value

    patch.setattr(owner, name, method)
    return left


def shuttles(rig: Rig, count: int, turns: int, *, between: Callable[[], object] = lambda: None) -> list[int]:
    """`count` threads move blocks to slots and back, eight of their own each, and check every byte; ids of the jobs."""
    ids: list[int] = []

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        mine = range(8 * number, 8 * number + 8)
        for _ in range(turns):
            blocks, slots = rng.permutation(mine)[:4], rng.permutation(mine)[:4]
            store = rig.engine.store(blocks, slots, after=kvoffload.NO_WAIT)
            load = rig.engine.load(slots, blocks, after=kvoffload.NO_WAIT)
            between()
            ids.extend(job.wait(60).job_id for job in (store, load))
            for block, slot in zip(blocks, slots, strict=True):
                assert all_are(rig.slot(int(slot)), int(block) + 1)
                assert all_are(rig.block(int(block)), int(block) + 1)

    in_threads(*(partial(work, number) for number in range(count)))
    return ids


def held_by_process() -> tuple[int, int]:
    """Open file descriptors and threads of this process."""
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()


def make_and_close(device: kvoffload.Device, layout: kvoffload.KVLayout, **options: Any) -> None:
    """An engine on a simulated device, whichever driver call was told to fail; the fault must have happened."""
    faults = device.simulator.faults
    engine = None
    try:
        engine = kvoffload.OffloadEngine(layout, device=device, **options)
        engine.close()
    except kvoffload.KVOffloadError:
        faults.clear()
        if engine is not None:
            engine.close()
    assert faults.pending == 0
    device.reclaim()


def leaks_of(device: kvoffload.Device) -> dict[str, int]:
    """What a simulated device holds now, without zeros."""
    assert device.simulator is not None
    return {kind: count for kind, count in device.simulator.leaks().items() if count}


class OrderSpy:
    """Notes the source access order of every batch call of a simulated device, as (direction, order)."""

    def __init__(self, device: kvoffload.Device) -> None:
        self.seen: list[tuple[str, int]] = []
        self._simulator = device.simulator
        assert self._simulator is not None
        for name in ("cuMemcpy3DBatchAsync", "cuMemcpyBatchAsync", *RAW):
            if device.driver.has(name):
                device.driver.intercept(name, self._wrap)

    def _wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        simulator: Any = self._simulator

        def call(*args: Any) -> Any:
            before = simulator.scheduler.read_source
            simulator.scheduler.read_source = self._note(before)
            try:
                return function(*args)
            finally:
                simulator.scheduler.read_source = before

        return call

    def _note(self, read_source: Callable[[Any, int], None]) -> Callable[[Any, int], None]:
        simulator: Any = self._simulator

        def noted(copy: Any, order: int) -> None:
            region = simulator.memory.at(int(copy.descriptors.source[0]))
            self.seen.append(("store" if region.on_device else "load", order))
            read_source(copy, order)

        return noted


def key(number: int) -> bytes:
    return b"key-%d" % number


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


def cache_state(cache: kvoffload.BlockCache) -> dict[str, Any]:
    """Everything that a refused call must leave as it was."""
    entries = cache._state.table
    statistics = cache.statistics()
    return {
        "entries": dict(entries.of),
        "pools": list(entries.pool_of),
        "policies": [list(pool.policy) for pool in cache._state.pools.all],
        "free": list(entries.free),
        "doomed": set(entries.doomed),
        "holds": dict(entries.holds),
        "used": len(entries.keys),
        "pending": list(entries.pending.items()),
        "writable": set(entries.writable),
        "leases": len(entries.leases),
        "statistics": statistics,
        "in flight": cache.engine.statistics().in_flight,
    }


def whole(engine: kvoffload.OffloadEngine) -> None:
    """Assert that nothing is in flight and that every stream and event is back in its pool."""
    statistics = engine.statistics()
    assert (statistics.in_flight, statistics.streams_in_use, statistics.events_in_use) == (0, 0, 0)


def no_leaks(simulator: Any) -> None:
    """Assert that a closed simulated device left nothing behind and did nothing undefined."""
    simulator.check_guards()
    assert simulator.violations == []
    assert {kind: count for kind, count in simulator.leaks().items() if count} == {}
