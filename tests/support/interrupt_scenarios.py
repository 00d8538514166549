"""A scenario for every public call: what is set up, and the call that is interrupted.

A scenario is a function that takes a world and returns the call. What the caller of a real program would hold on to
while the call runs is in the closure, or in `world.kept`. The tables at the end name them.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from interrupt_world import CAPACITY, PLANES, POLICIES, SECONDS, Fifo, IndexWorld, World, keys

import kvoffload
from kvoffload import NO_WAIT, CacheIndex, KVLayout, OffloadEngine

Call = Callable[[], object]
Prepare = Callable[[Any], Call]
TARGETS = (40, 41, 42, 43)  # blocks that interrupted loads write


class Scenario(NamedTuple):
    """What to interrupt.

    Attributes:
        name: such as "cache.store.evicting"; the part before the first dot is its family.
        world: makes the world, of a policy.
        prepare: sets it up and returns the call.
        policies: those that it is tried with.
    """

    name: str
    world: Callable[[str], Any]
    prepare: Prepare
    policies: tuple[str, ...]


SCENARIOS: dict[str, Scenario] = {}


def scenario(
    name: str, world: Callable[..., Any], *, every_policy: bool = False, **options: Any
) -> Callable[[Prepare], Prepare]:
    """Register the decorated function, with worlds made with `options`."""

    def register(prepare: Prepare) -> Prepare:
        make = functools.partial(world, **options)
        SCENARIOS[name] = Scenario(name, make, prepare, tuple(POLICIES) if every_policy else ("lru",))
        return prepare

    return register


def in_turn(*calls: Call) -> Call:
    """A call that makes each of these."""

    def call() -> None:
        for each in calls:
            each()

    return call


# engine ---------------------------------------------------------------------------------------------------------------


def _transfer(world: World, direction: str, **options: Any) -> Call:
    engine, after = world.busy, options.pop("after", NO_WAIT)
    if direction == "store":
        return lambda: engine.store([1, 2, 3], [0, 1, 2], after=after, **options)
    return lambda: engine.load([0, 1, 2], TARGETS[:3], after=after, **options)


def _and_wait(call: Callable[[], Any]) -> Call:
    return lambda: call().wait(SECONDS)


def _transfer_and_wait(world: World, direction: str) -> Call:
    return _and_wait(_transfer(world, direction))


def _after_stream(world: World, direction: str) -> Call:
    return _transfer(world, direction, after=world.stream())


def _after_held_stream(world: World, direction: str) -> Call:
    return _transfer(world, direction, after=world.held_stream())


def _conflicting(world: World, direction: str) -> Call:
    world.busy.store([1, 2], [0, 1], after=NO_WAIT)
    world.busy.load([2, 3], [1, 2], after=NO_WAIT)
    return _transfer(world, direction)


for _direction in ("store", "load"):
    for _copier in ("strided", "batch", "loop", "gather", "split"):
        _limit = 1 if _copier in ("gather", "split") else 0
        scenario(f"engine.{_direction}.{_copier}", World, sm_limit=_limit)(
            functools.partial(_transfer, direction=_direction, copier=_copier)
        )
    for _ending, _prepare in (
        ("", _transfer_and_wait),
        (".after_stream", _after_stream),
        (".after_held_stream", _after_held_stream),
        (".conflicting", _conflicting),
    ):
        scenario(f"engine.{_direction}{_ending}", World)(functools.partial(_prepare, direction=_direction))


def on_progress(*_: int) -> None:
    """A hook."""


def on_event(_: object) -> None:
    """A hook."""


class Tracing:
    """A tracer."""

    def on_submit(self, job: kvoffload.Job) -> int:
        return job.id

    def on_end(self, started: int, result: kvoffload.TransferResult) -> None:
        assert started == result.job_id


@scenario("engine.store.traced", World)
def _traced(world: World) -> Call:
    def call() -> None:
        kvoffload.set_tracer(Tracing())
        try:
            _transfer_and_wait(world, "store")()
        finally:
            kvoffload.set_tracer(None)

    return call


class StreamLike:
    """A stream of another library's."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)


class ArrayLike:
    """An array of another library's, which makes a stream of the consumer's wait for its producer."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)


HOOKS: tuple[Any, ...] = (
    *(on_progress, on_event, StreamLike.__cuda_stream__, ArrayLike.__dlpack__, Tracing.on_submit, Tracing.on_end),
)


@scenario("engine.store.after_stream_object", World)
def _after_stream_object(world: World) -> Call:
    return _transfer(world, "store", after=StreamLike(world.stream()))


@scenario("engine.store.after_array", World)
def _after_array(world: World) -> Call:
    array = ArrayLike(world.device.empty((4, 64), "uint8"))
    return _transfer(world, "store", after=array)


@scenario("engine.store.after_several", World)
def _after_several(world: World) -> Call:
    return _transfer(world, "store", after=[world.stream(), StreamLike(world.stream())])


@scenario("engine.load.parts", World)
def _parts(world: World) -> Call:
    return _transfer(world, "load", parts=PLANES)


@scenario("engine.load.parts_listed", World)
def _parts_listed(world: World) -> Call:
    return _transfer(world, "load", parts=[[0, 2], [1]])


@scenario("engine.load.source_order", World)
def _source_order(world: World) -> Call:
    return _transfer(world, "load", source_order="stream")


@scenario("engine.plan", World)
def _plan(world: World) -> Call:
    return lambda: world.busy.plan("load", TARGETS[:3], [0, 1, 2])


def _running(world: World, held: bool = False) -> Any:
    """A store and a load that have been submitted; if `held`, they wait for the caller."""
    after = world.held_stream() if held else NO_WAIT
    world.busy.store([4], [3], after=after)
    return world.busy.load([0, 1], TARGETS[:2], after=after, parts=PLANES)


@scenario("engine.poll", World)
def _poll(world: World) -> Call:
    _running(world)
    world.driver.run_all()
    return world.busy.poll


@scenario("engine.drain", World)
def _drain(world: World) -> Call:
    _running(world)
    return lambda: world.busy.drain(SECONDS)


@scenario("engine.advance", World)
def _advance(world: World) -> Call:
    _running(world)
    world.driver.run_all()
    return world.busy.advance


@scenario("engine.statistics", World)
def _statistics(world: World) -> Call:
    _running(world)
    return lambda: (world.busy.statistics(), world.busy.submitted, repr(world.busy), world.busy.slots)


@scenario("engine.close", World)
def _close(world: World) -> Call:
    world.closing = True
    return lambda: world.busy.close(SECONDS)


@scenario("engine.close.with_jobs", World)
def _close_with_jobs(world: World) -> Call:
    world.closing = True
    _running(world)
    return lambda: world.busy.close(SECONDS)


@scenario("engine.close.used", World, sm_limit=1)
def _close_used(world: World) -> Call:
    """After kernels and tables have been made."""
    for copier in ("strided", "batch", "gather"):
        world.busy.store([1], [1], copier=copier, after=NO_WAIT).wait(SECONDS)
    world.closing = True
    return lambda: world.busy.close(SECONDS)


@scenario("engine.open", World)
def _open(world: World) -> Call:
    """A second engine on the device, opened and closed."""

    def call() -> None:
        OffloadEngine(world.layout, device=world.device, num_slots=2, sm_limit=0).close(SECONDS)

    return call


@scenario("engine.open.kernels", World)
def _open_kernels(world: World) -> Call:
    return lambda: world.kept.append(OffloadEngine(world.layout, device=world.device, num_slots=2, sm_limit=1))


@scenario("engine.open.progress", World)
def _open_progress(world: World) -> Call:
    options: Any = {"num_slots": 2, "sm_limit": 0, "progress": on_progress}
    return lambda: world.kept.append(OffloadEngine(world.layout, device=world.device, **options))


# jobs -----------------------------------------------------------------------------------------------------------------


@scenario("job.wait", World)
def _wait(world: World) -> Call:
    job = _running(world)
    return lambda: job.wait(SECONDS)


@scenario("job.result", World)
def _result(world: World) -> Call:
    job = _running(world)
    world.driver.run_all()
    return lambda: (job.done, job.result())


@scenario("job.failed", World)
def _failed(world: World) -> Call:
    """A job whose copy the driver refuses."""
    world.driver.faults.fail_call("cuEventRecord", nth=2)
    job = world.busy.store([4], [3], after=NO_WAIT)

    def call() -> None:
        try:
            job.wait(SECONDS)
        except kvoffload.TransferError:
            pass

    return call


@scenario("job.order_before", World)
def _order_before(world: World) -> Call:
    job, stream = _running(world), world.stream()
    return lambda: job.order_before(stream)


@scenario("job.order_before.part", World)
def _order_before_part(world: World) -> Call:
    job, stream = _running(world, held=True), StreamLike(world.stream())
    return lambda: job.order_before(stream, part=0)


# device ---------------------------------------------------------------------------------------------------------------


@scenario("device.open", World)
def _device_open(world: World) -> Call:
    return lambda: kvoffload.open_device(backend=world.driver).close(SECONDS)


@scenario("device.open.garbage", World)
def _device_open_garbage(world: World) -> Call:
    return lambda: world.kept.append(kvoffload.open_device(backend=world.driver).name)


@scenario("device.allocate", World)
def _allocate(world: World) -> Call:
    return lambda: world.device.allocate(1000).close()


@scenario("device.allocate_planes", World)
def _allocate_planes(world: World) -> Call:
    return lambda: world.device.allocate_planes(2, block_bytes=64, num_blocks=4)


@scenario("device.allocate_blocks", World)
def _allocate_blocks(world: World) -> Call:
    return lambda: world.device.allocate_blocks(4, planes=2, block_bytes=64)


@scenario("device.empty", World)
def _empty(world: World) -> Call:
    return lambda: world.device.empty((2, 3), "float16")


@scenario("device.stream", World)
def _device_stream(world: World) -> Call:
    def call() -> None:
        with world.device.stream() as stream:
            world.busy.load([0], TARGETS[:1], after=stream).order_before(stream)
            stream.synchronize(SECONDS)

    return call


@scenario("device.reclaim", World)
def _reclaim(world: World) -> Call:
    for _ in range(3):
        world.device.allocate(100)
    gc.collect()
    return world.device.reclaim


@scenario("device.buffer", World)
def _buffer(world: World) -> Call:
    buffer = world.device.allocate(64)

    def call() -> None:
        buffer.copy_from(np.arange(64, dtype=np.uint8))
        buffer.to_numpy()
        buffer.close()

    return call


@scenario("device.export", World)
def _export(world: World) -> Call:
    """Another library takes memory that a transfer writes."""
    array = world.device.empty((4, 64), "uint8")
    _running(world)
    return lambda: (np.from_dlpack(ArrayLike(array)), world.slab.__cuda_array_interface__)


@scenario("device.close", World)
def _device_close(world: World) -> Call:
    world.closing = True
    return lambda: world.device.close(SECONDS)


@scenario("device.close.with_jobs", World)
def _device_close_with_jobs(world: World) -> Call:
    world.closing = True
    _running(world)
    world.kept.append(world.device.allocate(100))
    return lambda: world.device.close(SECONDS)


@scenario("device.close.lost", World)
def _device_close_lost(world: World) -> Call:
    """After the context was lost, where nothing can be freed but by ending it."""
    world.closing = world.lost = True
    _running(world)
    world.driver.faults.sticky()
    world.driver.run_all()
    return lambda: world.device.close(SECONDS)


@scenario("layout.from_stacked", World)
def _from_stacked(world: World) -> Call:
    array = world.device.empty((2, 4, 64), "uint8")
    return lambda: KVLayout.from_stacked(array, plane_axis=0, block_axis=1)


# index ----------------------------------------------------------------------------------------------------------------


def _index_scenario(name: str) -> Callable[[Prepare], Prepare]:
    return scenario(f"index.{name}", IndexWorld, every_policy=True)


@_index_scenario("open")
def _index_open(world: IndexWorld) -> Call:
    return lambda: world.kept.append(CacheIndex(CAPACITY, policy=Fifo))


@_index_scenario("lookup")
def _index_lookup(world: IndexWorld) -> Call:
    return lambda: (world.full.lookup(keys([0, 1, 9])), world.full.lookup_many([keys([2]), keys([9])]))


@_index_scenario("status")
def _index_status(world: IndexWorld) -> Call:
    return lambda: (world.full.status(keys(range(6))), world.full.statistics(), len(world.full), repr(world.full))


@_index_scenario("status_of")
def _index_status_of(world: IndexWorld) -> Call:
    return lambda: [world.full.status_of(each) for each in keys([0, 9])]


@_index_scenario("request")
def _index_request(world: IndexWorld) -> Call:
    """The cache is full: the second piece evicts what is not the request's, the third finds nothing to evict."""
    request = world.full.open_request()

    def call() -> None:
        with request:
            world.full.load(keys([0, 1]), request=request)
            for piece in ([4], [5, 6]):
                reservation = world.full.reserve(keys(piece), request=request)
                world.write(reservation)
                reservation.commit()

    return call


@_index_scenario("touch")
def _index_touch(world: IndexWorld) -> Call:
    return lambda: world.full.touch(keys([1, 0, 9]))


@_index_scenario("reserve")
def _index_reserve(world: IndexWorld) -> Call:
    def call() -> None:
        reservation = world.full.reserve(keys([0, 4, 5]))
        world.write(reservation)
        reservation.commit()

    return call


@_index_scenario("abort")
def _index_abort(world: IndexWorld) -> Call:
    reservation = world.full.reserve(keys([4, 5]))
    world.kept.append(reservation)
    return reservation.abort


@_index_scenario("block")
def _index_block(world: IndexWorld) -> Call:
    def call() -> None:
        with world.full.reserve(keys([4])) as reservation:
            world.write(reservation)

    return call


@_index_scenario("acquire")
def _index_acquire(world: IndexWorld) -> Call:
    def call() -> None:
        with world.full.acquire(keys([1, 2])) as lease:
            lease.slots()

    return call


@_index_scenario("remove")
def _index_remove(world: IndexWorld) -> Call:
    reservation = world.full.reserve(keys([4]))
    world.write(reservation)
    world.kept += [reservation, world.full.acquire(keys([2]))]
    return lambda: world.full.remove(keys([1, 2, 4]))


@_index_scenario("clear")
def _index_clear(world: IndexWorld) -> Call:
    world.kept.append(world.full.acquire(keys([2])))
    return world.full.clear
