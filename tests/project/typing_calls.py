"""Typical calls of the public names, for mypy to check; `test_package` runs them on the simulated device too."""

from __future__ import annotations

from typing import assert_type

import numpy as np
import numpy.typing as npt

import kvoffload
from kvoffload import (
    NO_WAIT,
    BlockCache,
    CacheEvent,
    CacheIndex,
    CacheJob,
    CacheRequest,
    CacheStatistics,
    CapacityError,
    Device,
    DeviceBuffer,
    Direction,
    Job,
    KVLayout,
    Lease,
    OffloadEngine,
    Plane,
    PlanReport,
    Reservation,
    Status,
    Tenant,
    TransferError,
    TransferResult,
    chain_keys,
    open_device,
)
from kvoffload.cache.policies import Prefix
from kvoffload.jax import OwnedCache
from kvoffload.testing import SimulatedDriver


class Stream:
    """What CuPy and cuda.core streams look like."""

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, 0)


def devices() -> Device:
    device = open_device(backend=SimulatedDriver(seed=3, driver_version=(12, 8), bindings_version=(12, 9)))
    assert_type(device, Device)
    assert_type(device.simulated, bool)
    assert_type(device.closed, bool)
    buffer = device.allocate(1024)
    assert_type(buffer, DeviceBuffer)
    assert_type(buffer.address, int)
    buffer.copy_from(np.arange(10))
    assert_type(buffer.to_numpy(), npt.NDArray[np.uint8])
    with device.stream(priority=0) as stream:
        assert_type(stream, kvoffload.Stream)
        assert_type(stream.handle, int)
        assert_type(stream.done, bool)
        assert_type(stream.__cuda_stream__(), tuple[int, int])
        stream.synchronize(timeout=10.0)
    return device


def layouts(device: Device) -> KVLayout:
    planes = device.allocate_planes(4, block_bytes=4096, num_blocks=32)
    assert_type(planes, list[Plane])
    plane = Plane(planes[0].address, block_bytes=64, num_blocks=8, block_stride=128)
    assert_type(plane.end, int)
    layout = KVLayout([planes], blocks_per_slot=2, dtype="bfloat16", tokens_per_block=16, block_axes=("tokens",))
    KVLayout.from_arrays([device.allocate(64)], blocks_per_slot=1)
    KVLayout.from_stacked(device.empty((4, 2, 64), "uint8"), plane_axis=1, block_axis=0, slot_order="block-major")
    assert_type(device.allocate_blocks(8, planes=4, block_bytes=64), list[Plane])
    assert_type(layout.slot_bytes, int)
    assert_type(layout.slots_for(5, first_sub_block=1), int)
    return layout


def transfers(layout: KVLayout, device: Device) -> list[TransferResult]:
    with OffloadEngine(layout, device=device, num_slots=16, staging_bytes=0, max_in_flight=64) as engine:
        job = engine.store([0, 1, 2], np.array([4, 5]))
        assert_type(job, Job)
        job.order_before(0)
        back = engine.load(range(4, 6), [3, 4, 5], after=NO_WAIT, source_order="stream")
        back.order_before(Stream())
        try:
            result = back.wait(timeout=10.0)
        except TimeoutError:
            raise
        except TransferError as error:
            raise RuntimeError(str(error)) from error
        assert_type(result, TransferResult)
        assert_type(result.seconds, float)
        assert_type(result.gb_per_s, float)
        with device.stream() as stream:
            engine.store([5], [9], after=stream).order_before(stream)
            engine.load([9], [6], after=[stream, Stream()]).wait(timeout=10.0)
        assert_type(result.direction, Direction)
        assert_type(result.error, TransferError | None)
        assert_type(job.id, int)
        assert_type(job.done, bool)
        layers = engine.load([4], [3], parts=[[0, 2], [1, 3]])
        assert_type(layers.num_parts, int)
        layers.order_before(Stream(), part=0)
        layers.wait(timeout=10.0)
        assert_type(engine.slots, npt.NDArray[np.uint8])
        engine.store([1], [7], group=0, first_sub_block=1, after=Stream(), copier="loop")
        waited: list[Stream] = [Stream(), Stream()]
        engine.store((1, 2), [np.int64(7)], after=waited).wait(timeout=10.0)
        engine.store(range(2), np.array([7], dtype=np.uint32), after=[0, Stream()]).wait(timeout=10.0)
        engine.drain(timeout=10.0)
        assert_type(engine.statistics().store.nbytes, int)
        report = engine.plan("load", [3, 4, 5], range(4, 6), copier="loop")
        assert_type(report, PlanReport)
        assert_type([seconds for _, seconds in report.alternatives], list[float])
        return engine.poll()


def caches(layout: KVLayout, device: Device) -> int:
    with OffloadEngine(layout, device=device, num_slots=16) as engine:
        events: list[CacheEvent] = []
        cache = BlockCache(engine, tenants={"guests": Tenant(max_blocks=4)}, on_event=events.append)
        try:
            job = cache.store([b"one", b"two"], [0, 1, 2, 3], after=NO_WAIT)
        except CapacityError:
            return 0
        assert_type(job, CacheJob)
        assert_type(job.wait(timeout=10.0), list[TransferResult])
        assert_type(job.outcome(), list[TransferResult])
        assert_type(job.error, TransferError | None)
        job.add_done_callback(lambda ended: assert_type(ended, CacheJob))
        found = cache.lookup([b"one", b"two", b"three"])
        assert_type(found, int)
        cache.load([b"one"], [5, 6]).wait(timeout=10.0)
        cache.load([b"two"], [5, 6], pending=True, parts=2).order_before(0, part=1)
        with cache.reserve([b"three"], tenant="guests") as reservation:
            assert_type(reservation, Reservation)
            assert_type(reservation.keys, tuple[bytes, ...])
            engine.slots[reservation.slots()] = 7
        with cache.acquire([b"one", b"three"]) as lease:
            assert_type(lease, Lease)
            assert_type(engine.slots[lease.slots()], npt.NDArray[np.uint8])
        assert_type(cache.status([b"three"]), list[Status])
        assert_type(cache.status_of(b"three"), Status)
        with cache.open_request() as request:
            assert_type(request, CacheRequest)
            assert_type(cache.store([b"four"], [0, 1], request=request).keys, tuple[bytes, ...])
            cache.load([b"one"], [5, 6], request=request).wait(timeout=10.0)
            cache.reserve([b"five"], request=request).abort()
            assert_type(request.keys, tuple[bytes, ...])
        cache.touch([b"one", b"two", b"three"])
        cache.use_weights("policy@step-1")
        assert_type(cache.lookup_many([[b"one"], [b"three"]]), list[int])
        assert_type(cache.remove([b"two"]) + cache.clear(), int)
        cache.check()
        assert_type(cache.statistics(), CacheStatistics)
        assert_type(cache.statistics().hit_rate, float)
        assert {event.kind for event in events} >= {"stored", "hit", "removed"}
        return found


async def awaited(cache: BlockCache[OffloadEngine]) -> None:
    assert_type(await cache.engine.store([0], [0], after=NO_WAIT), TransferResult)
    assert_type(await cache.store([b"one"], [0]), list[TransferResult])
    promotion = cache.promote([b"one"])
    assert_type(await promotion, int)
    assert_type(await promotion.load([0]), tuple[bytes, ...])


def shown(cache: BlockCache[OffloadEngine], registry: object) -> None:
    from kvoffload.observability import prometheus

    assert_type(prometheus.register(cache, registry, gpu="0"), prometheus.CacheCollector)


def caches_of_jax(device: Device) -> OwnedCache:
    axes = ("tokens", "heads", "dim")
    cache = OwnedCache(
        device, (64, 8, 16, 2, 8), "bfloat16", block_axis=0, plane_axis=1, tokens_per_block=16, block_axes=axes
    )
    with OffloadEngine(cache.layout, device=device, num_slots=32) as engine:
        BlockCache(engine).load([b"key"], [0], after=cache).wait(timeout=60)
    return cache


def keys(layout: KVLayout) -> list[bytes]:
    index = CacheIndex(100, policy=Prefix)
    found = chain_keys(np.arange(100, dtype=np.uint16), layout=layout, salt="model", extra=b"adapter")
    assert_type(found, list[bytes])
    index.reserve(found).commit()
    assert index.lookup(found) == len(found)
    return found


class Spans:
    """A tracer: what on_submit returns comes back in on_end."""

    def __init__(self) -> None:
        self.ended: list[float] = []

    def on_submit(self, job: Job) -> int:
        return job.nbytes

    def on_end(self, started: int, result: TransferResult) -> None:
        self.ended.append(started / max(result.seconds, 1e-9))


def tracers() -> None:
    spans = Spans()
    before = kvoffload.set_tracer(spans)
    assert_type(before, kvoffload.Tracer | None)
    kvoffload.set_tracer(before)
    tracer: kvoffload.Tracer = spans
    assert tracer is spans


def errors() -> None:
    assert issubclass(kvoffload.LayoutError, ValueError)
    error = kvoffload.DriverError("cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY", 2)
    assert_type(error.code, int)
    assert_type(error.name, str)


def main() -> None:
    """All of it, once."""
    with devices() as device:
        layout = layouts(device)
        assert len(transfers(layout, device)) == 3
        assert caches(layout, device) == 2
        assert len(keys(layout)) == 3
    tracers()
    errors()
