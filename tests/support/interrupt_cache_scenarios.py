"""The scenarios of `BlockCache`, of what it hands out, and of what lies below it while it is in use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from interrupt_scenarios import TARGETS, Call, Prepare, in_turn, on_event, scenario
from interrupt_world import PLANES, SECONDS, CacheWorld, key, keys

from kvoffload import NO_WAIT, BlockCache, OffloadEngine


def _cache(name: str, **options: Any) -> Callable[[Prepare], Prepare]:
    return scenario(f"cache.{name}", CacheWorld, every_policy=True, **options)


@_cache("open")
def _open(world: CacheWorld) -> Call:
    """A cache on an engine that has none, twice."""
    engine = OffloadEngine(world.layout, device=world.device, num_slots=2, sm_limit=0)

    def call() -> None:
        for _ in range(2):
            cache = BlockCache(engine, policy="lru")
            del cache

    world.kept.append(engine)
    return call


@_cache("lookup")
def _lookup(world: CacheWorld) -> Call:
    world.store(4, 5)
    world.driver.run_all()
    return lambda: world.full.lookup(keys([4, 5, 9]))


@_cache("lookup_many")
def _lookup_many(world: CacheWorld) -> Call:
    world.store(4)
    world.driver.run_all()
    return lambda: (world.full.lookup_many([keys([4]), keys([2, 3])]), world.full.status(keys(range(6))))


@_cache("touch")
def _touch(world: CacheWorld) -> Call:
    world.store(4)
    return lambda: world.full.touch(keys([4, 2, 9]))


@_cache("statistics")
def _statistics(world: CacheWorld) -> Call:
    world.store(4)
    world.driver.run_all()
    return in_turn(world.full.statistics, world.full.check, lambda: len(world.full), lambda: repr(world.full))


# store ----------------------------------------------------------------------------------------------------------------


@_cache("store.free", filled=2)
def _store_free(world: CacheWorld) -> Call:
    return lambda: world.store(4, 5)


@_cache("store.evicting")
def _store_evicting(world: CacheWorld) -> Call:
    return lambda: world.store(4, 5)


@_cache("store.evicting.wait")
def _store_evicting_wait(world: CacheWorld) -> Call:
    return lambda: world.store(4, 5).wait(SECONDS)


@_cache("store.all")
def _store_all(world: CacheWorld) -> Call:
    """Every key of the cache is displaced."""
    world.wanted = [4, 5, 6, 7]
    return lambda: world.store(4, 5, 6, 7)


@_cache("store.present")
def _store_present(world: CacheWorld) -> Call:
    return lambda: (world.store(0, 1, 4), world.store(0, 1))


@_cache("store.held")
def _store_held(world: CacheWorld) -> Call:
    after = world.held_stream()
    return lambda: world.store(4, 5, after=after)


@_cache("store.behind_a_load")
def _store_behind_a_load(world: CacheWorld) -> Call:
    """Two keys are being loaded; the others are displaced."""
    world.full.load(keys([0, 1]), TARGETS[:2], after=NO_WAIT)
    return lambda: world.store(4, 5)


@_cache("store.twice")
def _store_twice(world: CacheWorld) -> Call:
    """The keys of the first store are displaced by the second."""
    world.wanted = [4, 5, 6, 7]
    return in_turn(
        lambda: world.store(4, 5, 6, 7), lambda: world.busy.drain(SECONDS), lambda: world.store(8, 9, 10, 11)
    )


@_cache("store.events", cache_options={"on_event": on_event})
def _store_events(world: CacheWorld) -> Call:
    return lambda: world.store(4, 5).wait(SECONDS)


# load -----------------------------------------------------------------------------------------------------------------


@_cache("load")
def _load(world: CacheWorld) -> Call:
    return lambda: world.full.load(keys([0, 1]), TARGETS[:2], after=NO_WAIT)


@_cache("load.wait")
def _load_wait(world: CacheWorld) -> Call:
    return lambda: world.full.load(keys([0, 0, 1]), TARGETS[:3], after=NO_WAIT).wait(SECONDS)


@_cache("load.parts")
def _load_parts(world: CacheWorld) -> Call:
    return lambda: world.full.load(keys([0, 1]), TARGETS[:2], after=NO_WAIT, parts=PLANES).order_before(1, part=0)


@_cache("load.pending")
def _load_pending(world: CacheWorld) -> Call:
    world.store(4, after=world.held_stream())
    return lambda: world.full.load(keys([4, 2]), TARGETS[:2], after=NO_WAIT, pending=True)


@_cache("job")
def _job(world: CacheWorld) -> Call:
    job, stream = world.full.load(keys([0, 1]), TARGETS[:2], after=NO_WAIT), world.stream()
    return in_turn(lambda: job.order_before(stream), lambda: job.done, lambda: job.wait(SECONDS), lambda: repr(job))


# reservations and leases ----------------------------------------------------------------------------------------------


@_cache("reserve")
def _reserve(world: CacheWorld) -> Call:
    return lambda: world.full.reserve(keys([0, 4, 5])).abort()


@_cache("reserve.commit")
def _reserve_commit(world: CacheWorld) -> Call:
    def call() -> None:
        reservation = world.full.reserve(keys([4, 5]))
        world.write(reservation)
        reservation.commit()

    return call


@_cache("reserve.commit_job")
def _reserve_commit_job(world: CacheWorld) -> Call:
    def call() -> None:
        reservation = world.full.reserve(keys([4, 5]))
        job = world.busy.store([4, 5], reservation.slots(), after=NO_WAIT)
        reservation.commit(job)
        job.wait(SECONDS)

    return call


@_cache("reserve.block")
def _reserve_block(world: CacheWorld) -> Call:
    def call() -> None:
        with world.full.reserve(keys([4, 5])) as reservation:
            world.write(reservation)

    return call


@_cache("reserve.abandoned")
def _reserve_abandoned(world: CacheWorld) -> Call:
    """The caller forgets a reservation and a lease; the next calls clean up after it."""

    def call() -> None:
        world.full.reserve(keys([4]))
        world.full.acquire(keys([1]))
        world.full.lookup(keys([1]))

    return call


@_cache("request")
def _request(world: CacheWorld) -> Call:
    """A request that loads its head and stores the rest in two pieces."""
    request = world.full.open_request()

    def call() -> None:
        with request:
            world.full.load(keys([0, 1]), TARGETS[:2], after=NO_WAIT, request=request)
            world.full.status_of(key(4))
            for piece in ([4], [5, 6]):
                world.full.store(keys(piece), piece, after=NO_WAIT, request=request).wait(SECONDS)

    return call


@_cache("acquire")
def _acquire(world: CacheWorld) -> Call:
    def call() -> None:
        with world.full.acquire(keys([1, 2])) as lease:
            lease.slots()

    return call


@_cache("lease")
def _lease(world: CacheWorld) -> Call:
    world.store(4)
    lease, stream = world.full.acquire([key(4)], pending=True), world.stream()
    world.kept.append(lease)
    return in_turn(lambda: lease.order_before(stream), lambda: lease.wait(SECONDS), lease.check, lease.release)


# removing, closing ----------------------------------------------------------------------------------------------------


@_cache("remove")
def _remove(world: CacheWorld) -> Call:
    world.store(4)
    world.kept.append(world.full.acquire(keys([2])))
    return lambda: world.full.remove(keys([1, 2, 4]))


@_cache("clear")
def _clear(world: CacheWorld) -> Call:
    world.full.load(keys([3]), TARGETS[:1], after=NO_WAIT)
    world.store(4)
    return lambda: world.full.clear()


@_cache("engine.drain")
def _drain(world: CacheWorld) -> Call:
    world.store(4, 5)
    return lambda: world.busy.drain(SECONDS)


@_cache("engine.poll")
def _poll(world: CacheWorld) -> Call:
    world.store(4, 5)
    world.driver.run_all()
    return world.busy.poll


@_cache("engine.close")
def _close(world: CacheWorld) -> Call:
    world.closing = True
    world.store(4, 5)
    return lambda: world.busy.close(SECONDS)


@_cache("device.close")
def _device_close(world: CacheWorld) -> Call:
    world.closing = True
    world.store(4, 5)
    return lambda: world.device.close(SECONDS)


@_cache("engine.store.failed")
def _failed(world: CacheWorld) -> Call:
    """A store that the driver refuses when the caller waits for it."""
    world.driver.faults.fail_call("cuEventRecord", nth=2)

    def call() -> None:
        world.store(4, 5)
        world.busy.drain(SECONDS)

    return call
