"""Wrong calls. A type checker has to refuse every line that is marked, and no other. Never run.

The mark is the comment `wrong`. `test_typing` gives this file to mypy and to pyright.
"""

from __future__ import annotations

import numpy as np

from kvoffload import (
    NO_WAIT,
    BlockCache,
    CacheIndex,
    Device,
    KVLayout,
    OffloadEngine,
    Plane,
    chain_keys,
    nvtx_tracer,
    open_device,
    set_tracer,
)
from kvoffload.jax import OwnedCache
from kvoffload.testing import SimulatedDriver


def opening() -> None:
    open_device("0")  # wrong
    open_device(backend="rocm")  # wrong
    open_device(backend=SimulatedDriver(seed="1"))  # wrong
    open_device(backend=SimulatedDriver(driver_version=13))  # wrong
    open_device(device=0)  # wrong


def memory(device: Device) -> None:
    device.allocate("64")  # wrong
    device.allocate_planes(2, block_bytes=1.5, num_blocks=2)  # wrong
    device.allocate_planes(2, 64, 2)  # wrong
    device.allocate_blocks(2, 2, 64)  # wrong
    KVLayout.from_stacked(device.empty((2, 2, 64), "uint8"), 0, 1)  # wrong
    KVLayout.from_stacked(device.empty((2, 2, 64), "uint8"), plane_axis=0)  # wrong
    device.empty(4, "float16")  # wrong
    device.closed()  # wrong
    device.allocate(64).copy_from("bytes", offset="0")  # wrong
    device.close("now")  # wrong
    device.stream(0)  # wrong
    device.stream(priority="high")  # wrong
    device.stream().handle()  # wrong
    device.stream().synchronize("1")  # wrong
    device.stream().done()  # wrong


def layouts(planes: list[Plane]) -> None:
    Plane(0, block_bytes=64)  # wrong
    Plane("0", block_bytes=64, num_blocks=2)  # wrong
    KVLayout(planes)  # wrong
    KVLayout([planes], blocks_per_slot="2")  # wrong
    KVLayout([planes], block_per_slot=2)  # wrong
    KVLayout([planes], tokens_per_block=16.0)  # wrong
    KVLayout([planes], slot_order="blocks")  # wrong
    KVLayout([planes], block_axes=("tokens", 2))  # wrong


def caches_of_jax(device: Device) -> None:
    OwnedCache(device, (4, 2, 64), "uint8", plane_axis=1)  # wrong
    OwnedCache(device, (4, 2, 64), "uint8", 1, 0)  # wrong
    OwnedCache(device, (4, 2, 64), "uint8", plane_axis=1, block_axis=0, tokens_per_block="16")  # wrong
    OwnedCache(device, (4, 2, 64), "uint8", plane_axis=1, block_axis=0, tokens_in_block=16)  # wrong
    OwnedCache(device, (4, 2, 64), "uint8", plane_axis=1, block_axis=0, block_axes=("tokens", 2))  # wrong
    OwnedCache(device, (4, 2, 64), "uint8", plane_axis=1, block_axis=0, slot_order="blocks")  # wrong
    OwnedCache(device, (4, 2, 64), "uint8", plane_axis=1, block_axis=0, on_default_stream=True)  # wrong


def engines(layout: KVLayout, device: Device) -> None:
    OffloadEngine(layout)  # wrong
    OffloadEngine([layout], device=device)  # wrong
    OffloadEngine(layout, device=0)  # wrong
    OffloadEngine(layout, device=device, prefer="fast")  # wrong
    OffloadEngine(layout, device=device, profile="x")  # wrong
    OffloadEngine(layout, device=device, num_slots="16")  # wrong
    OffloadEngine(layout, device=device, num_slots=16.0)  # wrong
    OffloadEngine(layout, device=device, staging_bytes=None)  # wrong
    OffloadEngine(layout, device=device, slots=16)  # wrong
    OffloadEngine(layout, device=device, progress=3)  # wrong
    OffloadEngine(layout, device=device, max_in_flight=None)  # wrong


def stores(engine: OffloadEngine) -> None:
    engine.store("123", [0])  # wrong
    engine.store([0], "123")  # wrong
    engine.store([0.5], [0])  # wrong
    engine.store([0], [0.5])  # wrong
    engine.store(0, [0])  # wrong
    engine.store([0], None)  # wrong
    engine.store(["0"], [0])  # wrong
    engine.store(np.zeros(2), [0, 1])  # wrong
    engine.store([0], [0], group="0")  # wrong
    engine.store([0], [0], after="stream")  # wrong
    engine.store([0], [0], after=1.5)  # wrong
    engine.store([0], [0], after=[0, "stream"])  # wrong
    engine.store([0], [0], after=[NO_WAIT])  # wrong
    engine.store([0], [0], after=engine)  # wrong
    engine.store([0], [0], copier="stride")  # wrong
    engine.store([0], [0], copier=1)  # wrong
    engine.store([0], [0], source_order="any")  # wrong
    engine.store([0], [0], wait=NO_WAIT)  # wrong
    engine.store([0])  # wrong


def loads(engine: OffloadEngine) -> None:
    engine.load([0], [0], source_order="late")  # wrong
    engine.load([0], [0], parts="2")  # wrong
    engine.load([0], [0], parts=2.5)  # wrong
    engine.load([0], [0], parts=[["0"]])  # wrong
    engine.load([0], [0], part=2)  # wrong
    engine.plan("copy", [0], [0])  # wrong
    engine.plan("store", "0", [0])  # wrong
    engine.submit("copy", [0], [0])  # wrong
    engine.submit("load", [0], [0], after=engine)  # wrong
    engine.load([0], 0)  # wrong
    engine.load([0], [0], copier="fast")  # wrong
    engine.drain("soon")  # wrong
    engine.poll(1)  # wrong
    engine.statistics().stores  # noqa: B018  # wrong


def jobs(engine: OffloadEngine) -> None:
    job = engine.load([0], [0])
    job.wait("1")  # wrong
    job.done()  # wrong
    job.order_before("stream")  # wrong
    job.order_before(0, part="a")  # wrong
    job.order_before()  # wrong
    job.result().secs  # noqa: B018  # wrong
    job.result().gb_per_s()  # wrong


def tracers(engine: OffloadEngine) -> None:
    set_tracer(engine)  # wrong
    set_tracer(print)  # wrong
    set_tracer()  # wrong
    nvtx_tracer(3)  # wrong


def caches(engine: OffloadEngine, layout: KVLayout) -> None:
    BlockCache(layout)  # wrong
    BlockCache(engine, policy="lfu")  # wrong
    BlockCache(engine, policy=3)  # wrong
    BlockCache(engine, store_after="1")  # wrong
    BlockCache(engine, on_event=3)  # wrong
    BlockCache(engine, max_blocks=4)  # wrong
    CacheIndex("100")  # wrong
    CacheIndex(100, policy="mru")  # wrong
    chain_keys(5, layout=layout)  # wrong


def cached(cache: BlockCache) -> None:
    cache.lookup("key")  # wrong
    cache.lookup(b"key")  # wrong
    cache.lookup(["key"])  # wrong
    cache.store([b"key"], "0")  # wrong
    cache.store([b"key"], [0], after="stream")  # wrong
    cache.store([b"key"])  # wrong
    cache.store([b"key"], [0.5])  # wrong
    cache.load([b"key"], "0")  # wrong
    cache.load([b"key"], [0], after=cache)  # wrong
    cache.load([b"key"], [0], pending="yes")  # wrong
    cache.load([b"key"], [0], parts="2")  # wrong
    cache.touch(1)  # wrong
    cache.use_weights(b"one")  # wrong
    cache.remove("key")  # wrong
    cache.acquire([b"key"], pending=3)  # wrong
    cache.reserve(b"key")  # wrong
    cache.reserve([b"key"]).commit("job")  # wrong
    cache.statistics().hits_total  # noqa: B018  # wrong
    cache.statistics().hit_rate()  # wrong
