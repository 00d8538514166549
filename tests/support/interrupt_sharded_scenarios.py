"""The scenarios of `ShardedEngine`, of its jobs, and of a cache on it: blocks with planes on two devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from interrupt_scenarios import TARGETS, ArrayLike, Call, Prepare, StreamLike, in_turn, scenario
from interrupt_world import BLOCK_BYTES, BLOCKS, PLANES, SECONDS, CacheWorld, World, contents, key, keys

import kvoffload
from kvoffload import NO_WAIT, BlockCache, KVLayout, Plane, ShardedEngine

FIRST = 2  # planes of the first device; the other one has the rest


class _OnTwoDevices(World):
    device_count = 2

    def make_planes(self) -> list[Plane]:
        self.other = kvoffload.open_device(1, backend=self.driver)
        self.other_streams: list[int] = []
        shapes = ((self.device, FIRST), (self.other, PLANES - FIRST))
        return [
            plane
            for device, count in shapes
            for plane in device.allocate_planes(count, block_bytes=BLOCK_BYTES, num_blocks=BLOCKS)
        ]

    def make_layout(self) -> Any:
        return [KVLayout([self.planes[:FIRST]]), KVLayout([self.planes[FIRST:]])]

    def make_engine(self, options: dict[str, Any]) -> Any:
        return ShardedEngine(self.layout, devices=[self.device, self.other], **options)

    @property
    def busy(self) -> Any:
        assert self.engine is not None
        return self.engine

    def other_stream(self) -> int:
        """A stream of the caller's on the other device."""
        with self.other.current():
            status, handle = self.driver.cuStreamCreateWithPriority(1, 0)
        assert int(status) == 0
        self.other_streams.append(int(handle))
        return int(handle)

    def held(self) -> list[int]:
        """One stream for each device, of which the first stands still until `open_gate`."""
        return [self.held_stream(), self.other_stream()]

    def close(self) -> list[str]:
        if self.engine is not None:
            self.engine.drain(SECONDS)
            self.engine.close(SECONDS)
        if self.other_streams and not self.other.closed:
            with self.other.current():
                for stream in self.other_streams:
                    self.driver.cuStreamSynchronize(stream)
                    self.driver.cuStreamDestroy(stream)
        self.other.close(SECONDS)
        return super().close()


class ShardedWorld(_OnTwoDevices):
    """An engine over two devices."""


class ShardedCacheWorld(_OnTwoDevices, CacheWorld):
    """A cache over two devices."""

    def write(self, reservation: Any) -> None:
        numbers = [int(each.split(b"-")[1]) for each in reservation.keys]
        for pool, planes in zip(self.busy.slots, (slice(FIRST), slice(FIRST, PLANES)), strict=True):
            for number, slot in zip(numbers, reservation.slots(), strict=True):
                payload = contents()[number, planes].reshape(-1)
                pool[slot, : len(payload)] = payload


def _engine(name: str, **options: Any) -> Callable[[Prepare], Prepare]:
    return scenario(f"sharded.{name}", ShardedWorld, **options)


def _cache(name: str, **options: Any) -> Callable[[Prepare], Prepare]:
    return scenario(f"sharded.cache.{name}", ShardedCacheWorld, every_policy=True, **options)


# engine ---------------------------------------------------------------------------------------------------------------


@_engine("open")
def _open(world: ShardedWorld) -> Call:
    def call() -> None:
        ShardedEngine(world.layout, devices=[world.device, world.other], num_slots=2, sm_limit=0).close(SECONDS)

    return call


@_engine("store")
def _store(world: ShardedWorld) -> Call:
    return lambda: world.busy.store([1, 2, 3], [0, 1, 2], after=NO_WAIT)


@_engine("load")
def _load(world: ShardedWorld) -> Call:
    return lambda: world.busy.load([0, 1, 2], TARGETS[:3], after=NO_WAIT)


@_engine("store.wait")
def _store_wait(world: ShardedWorld) -> Call:
    return lambda: world.busy.store([1, 2, 3], [0, 1, 2], after=NO_WAIT).wait(SECONDS)


@_engine("store.after_streams")
def _after_streams(world: ShardedWorld) -> Call:
    streams = [StreamLike(world.stream()), [world.other_stream(), StreamLike(world.other_stream())]]
    return lambda: world.busy.store([1, 2, 3], [0, 1, 2], after=streams)


@_engine("store.after_held")
def _after_held(world: ShardedWorld) -> Call:
    streams = world.held()
    return lambda: world.busy.store([1, 2, 3], [0, 1, 2], after=streams)


@_engine("store.after_arrays")
def _after_arrays(world: ShardedWorld) -> Call:
    arrays = [ArrayLike(device.empty((4, 64), "uint8")) for device in (world.device, world.other)]
    return lambda: world.busy.store([1, 2, 3], [0, 1, 2], after=arrays)


@_engine("load.conflicting")
def _conflicting(world: ShardedWorld) -> Call:
    world.busy.store([1, 2], [0, 1], after=world.held())
    return lambda: world.busy.load([0, 1, 2], TARGETS[:3], after=NO_WAIT)


@_engine("plan")
def _plan(world: ShardedWorld) -> Call:
    return lambda: world.busy.plan("load", TARGETS[:3], [0, 1, 2])


def _running(world: ShardedWorld) -> Any:
    world.busy.store([4], [3], after=NO_WAIT)
    return world.busy.load([0, 1], TARGETS[:2], after=NO_WAIT)


@_engine("poll")
def _poll(world: ShardedWorld) -> Call:
    _running(world)
    world.driver.run_all()
    return in_turn(world.busy.advance, world.busy.poll)


@_engine("drain")
def _drain(world: ShardedWorld) -> Call:
    _running(world)
    return lambda: world.busy.drain(SECONDS)


@_engine("statistics")
def _statistics(world: ShardedWorld) -> Call:
    _running(world)
    engine = world.busy
    return lambda: (engine.statistics(), engine.submitted, engine.in_flight, repr(engine), engine.slots)


@_engine("close")
def _close(world: ShardedWorld) -> Call:
    world.closing = True
    _running(world)
    return lambda: world.busy.close(SECONDS)


@_engine("device.close")
def _device_close(world: ShardedWorld) -> Call:
    """One of its devices is closed."""
    world.closing = True
    _running(world)
    return lambda: world.other.close(SECONDS)


@_engine("job.result")
def _job_result(world: ShardedWorld) -> Call:
    job = _running(world)
    world.driver.run_all()
    return lambda: (job.done, job.result(), job.error, repr(job))


@_engine("job.failed")
def _job_failed(world: ShardedWorld) -> Call:
    """A job whose copy the driver refuses on the second device."""
    world.driver.faults.fail_call("cuMemcpy3DBatchAsync", nth=2)

    def call() -> None:
        try:
            world.busy.store([4], [3], after=NO_WAIT).wait(SECONDS)
        except kvoffload.TransferError:
            pass

    return call


@_engine("job.order_before")
def _order_before(world: ShardedWorld) -> Call:
    job, streams = _running(world), [StreamLike(world.stream()), world.other_stream()]
    return lambda: job.order_before(streams)


# cache ----------------------------------------------------------------------------------------------------------------


@_cache("open")
def _cache_open(world: ShardedCacheWorld) -> Call:
    engine = ShardedEngine(world.layout, devices=[world.device, world.other], num_slots=2, sm_limit=0)
    world.kept.append(engine)

    def call() -> None:
        BlockCache(engine, policy="lru")

    return call


@_cache("store")
def _cache_store(world: ShardedCacheWorld) -> Call:
    """Displaces two keys."""
    return lambda: world.store(4, 5)


@_cache("store.held")
def _cache_store_held(world: ShardedCacheWorld) -> Call:
    after = world.held()
    return lambda: world.store(4, 5, after=after)


@_cache("load")
def _cache_load(world: ShardedCacheWorld) -> Call:
    return lambda: world.full.load(keys([0, 1]), TARGETS[:2], after=NO_WAIT).wait(SECONDS)


@_cache("load.pending")
def _cache_load_pending(world: ShardedCacheWorld) -> Call:
    world.store(4, after=world.held())
    return lambda: world.full.load(keys([4, 2]), TARGETS[:2], after=NO_WAIT, pending=True)


@_cache("lease")
def _cache_lease(world: ShardedCacheWorld) -> Call:
    world.store(4)
    lease, streams = world.full.acquire([key(4)], pending=True), [world.stream(), world.other_stream()]
    world.kept.append(lease)
    return in_turn(lambda: lease.order_before(streams), lambda: lease.wait(SECONDS), lease.release)


@_cache("reserve")
def _cache_reserve(world: ShardedCacheWorld) -> Call:
    def call() -> None:
        reservation = world.full.reserve(keys([4, 5]))
        job = world.busy.store([4, 5], reservation.slots(), after=NO_WAIT)
        reservation.commit(job)
        job.wait(SECONDS)

    return call


@_cache("remove")
def _cache_remove(world: ShardedCacheWorld) -> Call:
    world.store(4)
    world.kept.append(world.full.acquire(keys([2])))
    return lambda: world.full.remove(keys([1, 2, 4]))


@_cache("engine.close")
def _cache_close(world: ShardedCacheWorld) -> Call:
    world.closing = True
    world.store(4, 5)
    return lambda: world.busy.close(SECONDS)
