"""The table of scenarios: each public call that is interrupted, in which worlds, after what, and how it leaves them.

    Row(name, worlds, prepare, call, leaves, options)

`prepare(world)` sets up what the call needs and returns what its caller would hold; `call(world)` is interrupted, and
finds that in `world.made`. What must hold afterwards says `worlds.py`, for every row; `leaves` says what is closed or
lost by then. A row is a scenario in each of its worlds, named after both:

    one             "store.strided" -> "engine.store.strided": an engine of one device
    two             "sharded.engine.store.strided": the same over two devices
    cache           "cache.store": a cache on an engine of one device
    two cache       "sharded.cache.store"
    tiers           "tiers.store": a cache with a tier
    growing         "growing.store": a cache over a pool that grows
    two growing     "sharded.growing.store"
    pool            "pool.store": a cache over a shared pool
    index           "index.reserve": a `CacheIndex`
    coded           "coded.store": a cache over an engine with a codec, which two of the blocks do not fit
    two coded       "coded.sharded.store"
    coded tiers     "coded.tiers.store"
    coded pool      "coded.pool.store"

To add a scenario, add a row, or a world to one.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from growing import wait_for_the_end
from worlds import (
    CAPACITY,
    PLANES,
    POLICIES,
    SECONDS,
    CacheWorld,
    CodedPoolWorld,
    CodedTieredWorld,
    CodedWorld,
    Fifo,
    GrowingWorld,
    IndexWorld,
    PoolWorld,
    TieredWorld,
    World,
    key,
    keys,
)

import kvoffload
from kvoffload import NO_WAIT, BlockCache, CacheIndex, KVLayout
from kvoffload.cache.sessions import ACTIONS

TARGETS = (40, 41, 42, 43)  # blocks that interrupted loads write
WORLDS: dict[str, tuple[str, Callable[..., Any]]] = {  # the beginning of the scenario's name, the world
    "one": ("", World),
    "two": ("sharded.", partial(World, devices=2)),
    "cache": ("cache.", CacheWorld),
    "two cache": ("sharded.cache.", partial(CacheWorld, devices=2)),
    "tiers": ("tiers.", TieredWorld),
    "growing": ("growing.", GrowingWorld),
    "two growing": ("sharded.growing.", partial(GrowingWorld, devices=2)),
    "pool": ("pool.", PoolWorld),
    "index": ("index.", IndexWorld),
    "coded": ("coded.", CodedWorld),
    "two coded": ("coded.sharded.", partial(CodedWorld, devices=2)),
    "coded tiers": ("coded.tiers.", CodedTieredWorld),
    "coded pool": ("coded.pool.", CodedPoolWorld),
}
EVERY_POLICY = ("cache", "two cache", "growing", "index")  # worlds that are tried with every policy; others with "lru"


class Row(NamedTuple):
    """A call and where it is made; see above.

    Attributes:
        worlds: keys of WORLDS, with commas.
        leaves: "open", "closed" (an engine or a device) or "lost" (the context).
        wanted: keys that the call stores.
        options: of the world.
    """

    name: str
    worlds: str
    prepare: Callable[[Any], Any] | None
    call: Callable[[Any], object]
    leaves: str = "open"
    wanted: tuple[int, ...] = (4, 5)
    options: dict[str, Any] = {}  # noqa: RUF012  (never changed)


class Scenario(NamedTuple):
    """A row in one of its worlds, with the policies that it is tried with."""

    row: Row
    world: Callable[..., Any]
    policies: tuple[str, ...]

    def prepared(self, policy: str) -> Any:
        """A world in which the call can be made."""
        world = self.world(policy, **self.row.options)
        world.leaves, world.wanted = self.row.leaves, self.row.wanted
        return world


# what users pass ------------------------------------------------------------------------------------------------------


def on_progress(*_: int) -> None:
    """A hook."""


def on_event(_: object) -> None:
    """A hook."""


class Tracing:
    """A tracer, which looks at the job."""

    def on_submit(self, job: kvoffload.Job) -> int:
        assert job.done in (True, False)
        return job.id

    def on_end(self, started: int, result: kvoffload.TransferResult) -> None:
        assert started == result.job_id


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


def stream_object(w: World) -> Any:
    return w.each(lambda device: StreamLike(w.stream_on(device)))


def several_streams(w: World) -> Any:
    return w.each(lambda device: [w.stream_on(device), StreamLike(w.stream_on(device))])


def array(w: World) -> Any:
    return w.each(lambda device: ArrayLike(device.empty((4, 64), "uint8")))


# steps of engines and jobs --------------------------------------------------------------------------------------------


def transfer(w: World, direction: str, **options: Any) -> Any:
    """Three blocks, behind what was made."""
    after = NO_WAIT if w.made is None else w.made
    if direction == "store":
        return w.engine.store([1, 2, 3], [0, 1, 2], after=after, **options)
    return w.engine.load([0, 1, 2], TARGETS[:3], after=after, **options)


def transfer_and_wait(w: World, direction: str) -> None:
    transfer(w, direction).wait(SECONDS)


def traced_store(w: World) -> None:
    kvoffload.set_tracer(Tracing())
    try:
        transfer_and_wait(w, "store")
    finally:
        kvoffload.set_tracer(None)


def conflict(w: World) -> None:
    """A store and a load of blocks that the call uses, too."""
    w.engine.store([1, 2], [0, 1], after=NO_WAIT)
    w.engine.load([2, 3], [1, 2], after=NO_WAIT)


def held_conflict(w: World) -> None:
    w.engine.store([1, 2], [0, 1], after=w.held_stream())


def begun(w: Any) -> Any:
    return w.begin()


def ended(w: World) -> Any:
    """Transfers that have ended, which the engine does not know yet."""
    job = w.begin()
    w.driver.run_all()
    return job


def begun_in_parts(w: World) -> Any:
    """A store and a load in parts that stand still, and a stream."""
    held = w.held_stream()
    w.engine.store([4], [3], after=held)
    return w.engine.load([0, 1], TARGETS[:2], after=held, parts=PLANES), stream_object(w)


def used(w: World) -> None:
    """Kernels and tables have been made."""
    for copier in ("strided", "batch", "pack"):
        w.engine.store([1], [1], copier=copier, after=NO_WAIT).wait(SECONDS)


def pack_held(w: World) -> Any:
    """A packed store and a packed load that stand still and have the rings' places."""
    held = w.held_stream()
    w.engine.store([4], [3], after=held, copier="pack")
    w.engine.load([3], TARGETS[3:], after=held, copier="pack")


def pack_fails(w: World) -> Any:
    """The same; the driver will refuse the wait of a second half for the first."""
    pack_held(w)
    w.driver.faults.fail_call("cuStreamWaitEvent", nth=3)


def pack_after_failure(w: World, direction: str) -> None:
    """A transfer fails in its second piece, and another one follows it through the ring."""
    for _ in range(2):
        transfer(w, direction, copier="pack")


def fail_copy(w: World) -> None:
    """The driver refuses the second copy: on two devices, the one on the second."""
    w.driver.faults.fail_call("cuEventRecord" if len(w.devices) == 1 else "cuMemcpy3DBatchAsync", nth=2)


def failed_job(w: World) -> Any:
    fail_copy(w)
    return w.engine.store([4], [3], after=NO_WAIT) if len(w.devices) == 1 else None


def wait_for_failure(w: World) -> None:
    try:
        (w.made or w.engine.store([4], [3], after=NO_WAIT)).wait(SECONDS)
    except kvoffload.TransferError:
        pass


# steps of devices -----------------------------------------------------------------------------------------------------


def use_stream(w: World) -> None:
    with w.device.stream() as stream:
        w.engine.load([0], TARGETS[:1], after=stream).order_before(stream)
        stream.synchronize(SECONDS)


def lost_buffers(w: World) -> None:
    for _ in range(3):
        w.device.allocate(100)
    gc.collect()


def use_buffer(w: World) -> None:
    w.made.copy_from(np.arange(64, dtype=np.uint8))
    w.made.to_numpy()
    w.made.close()


def exported(w: World) -> Any:
    memory = w.device.empty((4, 64), "uint8")
    w.begin()
    return memory


def begun_with_buffer(w: World) -> None:
    w.begin()
    w.kept.append(w.device.allocate(100))


def lost_context(w: World) -> None:
    w.begin()
    w.driver.faults.sticky()
    w.driver.run_all()


# steps of caches and indexes ------------------------------------------------------------------------------------------


def key_pending(w: Any) -> None:
    w.pend(4)


def stored(w: Any) -> None:
    """Two keys, whose copies have ended if there are any; the cache does not know it yet."""
    w.store(4, 5)
    if w.driver is not None:
        w.driver.run_all()


def two_loaded(w: CacheWorld) -> Any:
    return w.cache.load(keys([0, 1]), TARGETS[:2], after=NO_WAIT)


def load_and_pend(w: CacheWorld) -> None:
    w.cache.load(keys([3]), TARGETS[:1], after=NO_WAIT)
    w.store(4)


def store_and_displace(w: CacheWorld) -> None:
    """The keys of the first store are displaced by the second."""
    w.store(4, 5, 6, 7)
    w.engine.drain(SECONDS)
    w.store(8, 9, 10, 11)


def use_job(w: CacheWorld) -> None:
    job, stream = w.made
    job.order_before(stream)
    _ = job.done
    job.wait(SECONDS)
    repr(job)


def commit_by_hand(w: Any) -> None:
    reservation = w.cache.reserve(keys([0, 4, 5]))
    w.write(reservation)
    reservation.commit()


def commit_job(w: CacheWorld) -> None:
    reservation = w.cache.reserve(keys([4, 5]))
    job = w.engine.store([4, 5], reservation.slots(), after=NO_WAIT)
    reservation.commit(job)
    job.wait(SECONDS)


def commit_unfit(w: Any) -> None:
    """Without its job: the first load finds out."""
    w.by_hand = True
    reservation = w.cache.reserve([key(5)])
    w.engine.store([5], reservation.slots(), after=NO_WAIT).wait(SECONDS)
    reservation.commit()


def load_unfit(w: Any) -> None:
    job = w.cache.load(keys([5, 1]), TARGETS[:2], after=NO_WAIT, pending=True)
    w.let_go()
    try:
        job.wait(SECONDS)
    except kvoffload.TransferError:
        pass


def reserve_block(w: Any) -> None:
    with w.cache.reserve(keys([4, 5])) as reservation:
        w.write(reservation)


def abandon(w: Any) -> None:
    """The caller forgets a reservation and a lease; the next calls clean up after it."""
    w.cache.reserve(keys([4]))
    w.cache.acquire(keys([1]))
    w.cache.lookup(keys([1]))


def request(w: CacheWorld) -> None:
    """A request that loads its head and stores the rest in two pieces."""
    with w.made as opened:
        w.cache.load(keys([0, 1]), TARGETS[:2], after=NO_WAIT, request=opened)
        w.cache.status_of(key(4))
        for piece in ([4], [5, 6]):
            w.cache.store(keys(piece), piece, after=NO_WAIT, request=opened).wait(SECONDS)


def index_request(w: IndexWorld) -> None:
    """The cache is full: the second piece evicts what is not the request's, the third finds nothing to evict."""
    with w.made as opened:
        w.cache.load(keys([0, 1]), request=opened)
        for piece in ([4], [5, 6]):
            reservation = w.cache.reserve(keys(piece), request=opened)
            w.write(reservation)
            reservation.commit()


def turn(w: Any, session: str, numbers: tuple[int, ...], **promise: float) -> None:
    """A request of a session, which promises meanwhile to come back."""
    with w.cache.open_request(session=session) as opened:
        w.cache.hint("retain", session=session, **promise)
        w.cache.load(keys(numbers[:1]), request=opened) if w.engine is None else w.cache.status(keys(numbers))
        reservation = w.cache.reserve(keys(numbers), request=opened)
        w.write(reservation)
        reservation.commit()


def promised(w: Any) -> None:
    """All four keys are retained, for sessions that have kept a promise; `w.now` is the time."""
    w.now = 0.0
    w.cache._state.clock = lambda: w.now
    for session in "abab":
        turn(w, session, (0, 1) if session == "a" else (2, 3), ttl=60.0)


def sessions(w: Any) -> None:
    """A promise displaces a lower one, another is made after its request, released keys are evicted, and asked for."""
    turn(w, "a", (0, 1, 4), due=5.0)
    w.cache.hint("retain", session="b", ttl=30.0)
    w.cache.hint("release", session="b")
    w.cache.touch(keys([2]))
    turn(w, "c", (5,), ttl=60.0)
    w.cache.hint("release", session="a")


def promises_end(w: Any) -> None:
    """One is kept by half, then the time of all is over, of which one was given in a request that is dropped."""
    turn(w, "b", (2, 9), ttl=20.0)
    opened = w.cache.open_request(session="a")
    w.cache.hint("retain", session="a", ttl=30.0)
    with w.cache.reserve(keys([0, 4]), request=opened) as reservation:
        w.write(reservation)
    w.now = 100.0
    w.cache.touch(keys([9]))


def weights(w: Any) -> None:
    """Other ones, keys of these, and the first again."""
    w.cache.use_weights("one")
    reservation = w.cache.reserve(keys([4, 5]))
    w.write(reservation)
    reservation.commit()
    w.cache.use_weights("")


def named(w: Any) -> None:
    """A session has asked for keys 0 and 1."""
    with w.cache.open_request(session="a") as opened:
        w.cache.store(keys([0, 1]), [0, 1], after=NO_WAIT, request=opened).wait(SECONDS)


def named_below(w: Any) -> None:
    """Its keys are in the tier alone."""
    named(w)
    w.cache.clear(below=False)


def kept_reservation(w: Any) -> Any:
    w.kept.append(w.cache.reserve(keys([4, 5])))
    return w.kept[0]


def acquire_block(w: Any) -> None:
    with w.cache.acquire(keys([1, 2])) as lease:
        lease.slots()


def pending_lease(w: CacheWorld) -> Any:
    w.store(4)
    lease = w.cache.acquire([key(4)], pending=True)
    w.kept.append(lease)
    return lease, w.stream()


def use_lease(w: CacheWorld) -> None:
    lease, stream = w.made
    lease.order_before(stream)
    lease.wait(SECONDS)
    lease.check()
    lease.release()


def pending_and_leased(w: Any) -> None:
    """Key 4 is pending, 2 is leased."""
    w.pend(4)
    w.kept.append(w.cache.acquire(keys([2])))


def open_and_drop(w: World) -> None:
    """A cache on an engine that has none, twice."""
    for _ in range(2):
        cache = BlockCache(w.made, policy="lru")
        del cache


def second_engine(w: World) -> Any:
    w.kept.append(w.open_engine(2, staging_bytes=0))
    return w.kept[0]


def second_growing(w: GrowingWorld) -> Any:
    """Half of its pool will never be pinned."""
    w.driver.faults.fail_call("cuMemHostRegister", nth=2 * len(w.devices) + 1, error=2)
    w.kept.append(w.open_growing(4))
    wait_for_the_end(w.kept[0])
    return w.kept[0]


def promotion_ended(w: TieredWorld) -> Any:
    promotion = w.promoted()
    promotion.wait(SECONDS)
    return promotion


def fetch(w: World) -> None:
    w.cache.fetch(keys([0, 1]), [40, 41], after=NO_WAIT).wait(SECONDS)


def fetching(w: TieredWorld) -> Any:
    w.cache.clear(below=False)
    w.kept.append(w.cache.fetch(keys([0, 1]), [40, 41], after=NO_WAIT))
    return w.kept[0]


def order_fetched(w: TieredWorld) -> None:
    job, stream = w.made
    job.order_before(stream)
    job.wait(SECONDS)


def fetch_and_keep(w: CacheWorld) -> None:
    """A request by its handle, as a host serves it."""
    w.cache.fetch(keys([0, 1, 4]), [40, 41, 42], after=NO_WAIT, request=w.made).wait(SECONDS)
    w.cache.keep(keys([0, 1, 4]), [0, 1, 4], after=NO_WAIT, request=w.made).wait(SECONDS)


def open_cache(w: World, **options: Any) -> Any:
    """A cache over an engine of its own, which the world closes if it is kept."""
    described: dict[str, Any] = {"dtype": "uint8", "tokens_per_block": 4, "block_axes": ("tokens", "x")}
    layouts = [KVLayout([planes], **described) for planes in w.planes]
    layout = layouts[0] if len(layouts) == 1 else kvoffload.ShardedLayout(layouts)
    return kvoffload.open_cache(layout, device=w.devices, pool_bytes=2 * 4096 * len(w.devices), **options)


def open_and_use(w: World, **options: Any) -> None:
    with open_cache(w, **options) as cache:
        cache.keep(keys([4]), [4], after=NO_WAIT)
        cache.fetch(keys([4]), [40], after=NO_WAIT).wait(SECONDS)


def open_and_keep(w: World, **options: Any) -> None:
    w.kept.append(open_cache(w, **options))


def opened(w: World, **options: Any) -> Any:
    open_and_keep(w, **options)
    w.kept[0].keep(keys([4]), [4], after=NO_WAIT)
    return w.kept[0]


def disk(w: World) -> dict[str, Any]:
    return {"disk": f"{w.folder()}/kv", "disk_bytes": 1 << 16, "identity": "model"}


def disk_used(w: World) -> dict[str, Any]:
    """The files are there already."""
    options = disk(w)
    open_and_use(w, **options)
    return options


# the table ------------------------------------------------------------------------------------------------------------

ENGINES, CACHES, KEYS, GROWING = "one, two", "cache, two cache", "index, cache", "growing, two growing"
CODED = "coded, two coded, coded tiers, coded pool"
PACKED: dict[str, Any] = {"staging_bytes": 1 << 20}
PIECES: dict[str, Any] = {"staging_bytes": 2 * 512}  # a transfer of three blocks goes round a ring of two
EVENTS: dict[str, Any] = {"cache_options": {"on_event": on_event}}
TABLE: tuple[Row, ...] = (
    *(
        row
        for d in ("store", "load")
        for row in (
            Row(f"engine.{d}", ENGINES, None, partial(transfer_and_wait, direction=d)),
            Row(f"engine.{d}.queued", ENGINES, None, partial(transfer, direction=d)),
            Row(f"engine.{d}.strided", ENGINES, None, partial(transfer, direction=d, copier="strided")),
            Row(f"engine.{d}.batch", ENGINES, None, partial(transfer, direction=d, copier="batch")),
            Row(f"engine.{d}.loop", ENGINES, None, partial(transfer, direction=d, copier="loop")),
            Row(f"engine.{d}.pack", ENGINES, None, partial(transfer, direction=d, copier="pack"), options=PACKED),
            Row(
                f"engine.{d}.pack.pieces",
                "one",
                pack_held,
                partial(transfer, direction=d, copier="pack"),
                options=PIECES,
            ),
            Row(
                f"engine.{d}.pack.failing", "one", pack_fails, partial(pack_after_failure, direction=d), options=PIECES
            ),
            Row(f"engine.{d}.after_stream", ENGINES, World.stream, partial(transfer, direction=d)),
            Row(f"engine.{d}.after_held_stream", ENGINES, World.held_stream, partial(transfer, direction=d)),
            Row(f"engine.{d}.conflicting", ENGINES, conflict, partial(transfer, direction=d)),
            Row(f"engine.{d}.conflicting_held", ENGINES, held_conflict, partial(transfer, direction=d)),
        )
    ),
    Row("engine.store.traced", ENGINES, None, traced_store),
    Row("engine.store.after_stream_object", ENGINES, stream_object, lambda w: transfer(w, "store")),
    Row("engine.store.after_array", ENGINES, array, lambda w: transfer(w, "store")),
    Row("engine.store.after_several", ENGINES, several_streams, lambda w: transfer(w, "store")),
    Row("engine.load.parts", "one", None, lambda w: transfer(w, "load", parts=PLANES)),
    Row(
        "engine.load.pack.parts",
        "one",
        None,
        lambda w: transfer(w, "load", copier="pack", parts=PLANES),
        options=PIECES,
    ),
    Row("engine.load.parts_listed", "one", None, lambda w: transfer(w, "load", parts=[[0, 2], [1]])),
    Row("engine.load.source_order", "one", None, lambda w: transfer(w, "load", source_order="stream")),
    Row("engine.plan", ENGINES, None, lambda w: w.engine.plan("load", TARGETS[:3], [0, 1, 2])),
    Row("engine.poll", "one, two, cache, tiers", ended, lambda w: w.engine.poll()),
    Row("engine.drain", "one, two, cache", begun, lambda w: w.engine.drain(SECONDS)),
    Row("engine.advance", ENGINES, ended, lambda w: (w.engine.advance(), w.engine.poll())),
    Row(
        "engine.statistics",
        ENGINES,
        begun,
        lambda w: (w.engine.statistics(), w.engine.submitted, w.engine.in_flight, repr(w.engine), w.engine.slots),
    ),
    Row("engine.close", ENGINES, None, lambda w: w.engine.close(SECONDS), "closed"),
    Row("engine.close.with_jobs", "one, two, cache, two cache", begun, lambda w: w.engine.close(SECONDS), "closed"),
    Row("engine.close.used", ENGINES, used, lambda w: w.engine.close(SECONDS), "closed", options=PACKED),
    Row("engine.open", ENGINES, None, lambda w: w.open_engine(2, staging_bytes=0).close(SECONDS)),
    Row("engine.open.kernels", ENGINES, None, lambda w: w.kept.append(w.open_engine(2, staging_bytes=1 << 20))),
    Row(
        "engine.open.progress",
        "one",
        None,
        lambda w: w.kept.append(w.open_engine(2, staging_bytes=0, progress=on_progress)),
    ),
    Row("engine.open.growing", ENGINES, None, lambda w: w.kept.append(w.open_growing(3, progress=on_progress))),
    Row("engine.open.growing.closed", ENGINES, None, lambda w: w.open_growing(3).close(SECONDS)),
    # jobs
    Row("job.wait", ENGINES, begun, lambda w: w.made.wait(SECONDS)),
    Row("job.result", ENGINES, ended, lambda w: (w.made.done, w.made.result(), w.made.error, repr(w.made))),
    Row("job.failed", ENGINES, failed_job, wait_for_failure),
    Row(
        "job.order_before",
        ENGINES,
        lambda w: (w.begin(), stream_object(w)),
        lambda w: w.made[0].order_before(w.made[1]),
    ),
    Row("job.order_before.part", "one", begun_in_parts, lambda w: w.made[0].order_before(w.made[1], part=0)),
    # devices
    Row("device.open", "one", None, lambda w: kvoffload.open_device(backend=w.driver).close(SECONDS)),
    Row(
        "device.open.garbage",
        "one",
        None,
        lambda w: w.kept.append(kvoffload.open_device(backend=w.driver).name),
    ),
    Row("device.allocate", "one", None, lambda w: w.device.allocate(1000).close()),
    Row(
        "device.allocate_planes",
        "one",
        None,
        lambda w: w.device.allocate_planes(2, block_bytes=64, num_blocks=4),
    ),
    Row("device.allocate_blocks", "one", None, lambda w: w.device.allocate_blocks(4, planes=2, block_bytes=64)),
    Row("device.empty", "one", None, lambda w: w.device.empty((2, 3), "float16")),
    Row("device.stream", "one", None, use_stream),
    Row("device.reclaim", "one", lost_buffers, lambda w: w.device.reclaim()),
    Row("device.buffer", "one", lambda w: w.device.allocate(64), use_buffer),
    Row(
        "device.export",
        "one",
        exported,
        lambda w: (np.from_dlpack(ArrayLike(w.made)), w.slab.__cuda_array_interface__),
    ),
    Row("device.close", "one", None, lambda w: w.device.close(SECONDS), "closed"),
    Row("device.close.with_buffer", "one", begun_with_buffer, lambda w: w.device.close(SECONDS), "closed"),
    Row("device.close.with_jobs", "one, two, cache", begun, lambda w: w.devices[-1].close(SECONDS), "closed"),
    Row("device.close.lost", "one", lost_context, lambda w: w.device.close(SECONDS), "lost"),
    Row(
        "layout.from_stacked",
        "one",
        lambda w: w.device.empty((2, 4, 64), "uint8"),
        lambda w: KVLayout.from_stacked(w.made, plane_axis=0, block_axis=1),
    ),
    # caches and indexes
    Row("open", CACHES, second_engine, open_and_drop),
    Row("open", "index", None, lambda w: w.kept.append(CacheIndex(CAPACITY, policy=Fifo))),
    Row("lookup", KEYS, stored, lambda w: w.cache.lookup(keys([4, 5, 9]))),
    Row(
        "lookup_many",
        KEYS,
        stored,
        lambda w: (w.cache.lookup_many([keys([4, 5]), keys([2, 3]), keys([0, 1])]), w.cache.status(keys(range(6)))),
    ),
    Row("status_of", KEYS, None, lambda w: [w.cache.status_of(each) for each in keys([0, 9])]),
    Row(
        "statistics",
        KEYS,
        stored,
        lambda w: (w.cache.status(keys(range(6))), w.cache.statistics(), w.cache.check(), len(w.cache), repr(w.cache)),
    ),
    Row("touch", KEYS, key_pending, lambda w: w.cache.touch(keys([4, 2, 1, 9]))),
    Row("store.free", "cache", None, lambda w: w.store(4, 5), options={"filled": 2}),
    Row("store.evicting", CACHES, None, lambda w: w.store(4, 5)),
    Row("store.evicting.wait", "cache, tiers", None, lambda w: w.store(4, 5).wait(SECONDS)),
    Row("store.all", "cache", None, lambda w: w.store(4, 5, 6, 7), wanted=(4, 5, 6, 7)),
    Row("store.present", "cache", None, lambda w: (w.store(0, 1, 4), w.store(0, 1))),
    Row("store.held", CACHES, World.held_stream, lambda w: w.store(4, 5, after=w.made)),
    Row("store.behind_a_load", "cache", two_loaded, lambda w: w.store(4, 5)),
    Row("store.twice", "cache", None, store_and_displace, wanted=(4, 5, 6, 7)),
    Row("store.events", "cache", None, lambda w: w.store(4, 5).wait(SECONDS), options=EVENTS),
    Row("engine.store.failed", "cache", fail_copy, lambda w: (w.store(4, 5), w.engine.drain(SECONDS))),
    Row("load", "cache", None, two_loaded),
    Row(
        "load.wait",
        CACHES,
        None,
        lambda w: w.cache.load(keys([0, 0, 1]), TARGETS[:3], after=NO_WAIT).wait(SECONDS),
    ),
    Row(
        "load.parts",
        "cache",
        None,
        lambda w: w.cache.load(keys([0, 1]), TARGETS[:2], after=NO_WAIT, parts=PLANES).order_before(1, part=0),
    ),
    Row(
        "load.pending",
        CACHES,
        lambda w: w.store(4, after=w.held_stream()),
        lambda w: w.cache.load(keys([4, 2]), TARGETS[:2], after=NO_WAIT, pending=True),
    ),
    Row("job", "cache", lambda w: (two_loaded(w), w.stream()), use_job),
    Row("reserve", "cache", None, lambda w: w.cache.reserve(keys([0, 4, 5])).abort()),
    Row("reserve.commit", KEYS, None, commit_by_hand),
    Row("reserve.commit_job", CACHES, None, commit_job),
    Row("reserve.block", KEYS, None, reserve_block),
    Row("reserve.abandoned", KEYS, None, abandon),
    Row("abort", KEYS, kept_reservation, lambda w: w.made.abort()),
    Row("request", "cache", lambda w: w.cache.open_request(), request),
    Row("request", "index", lambda w: w.cache.open_request(), index_request),
    Row("sessions", KEYS, promised, sessions),
    Row("sessions.over", KEYS, promised, promises_end),
    Row("use_weights", f"{KEYS}, tiers", promised, weights),
    Row("use_weights.once", f"{KEYS}, tiers", None, lambda w: w.cache.use_weights("one")),
    Row("acquire", KEYS, None, acquire_block),
    Row("lease", CACHES, pending_lease, use_lease),
    Row(
        "remove",
        "index, cache, two cache, tiers",
        pending_and_leased,
        lambda w: w.cache.remove(keys([1, 2, 4, 9])),
    ),
    Row("clear", "cache", load_and_pend, lambda w: w.cache.clear()),
    Row("clear", "index", pending_and_leased, lambda w: w.cache.clear()),
    # pools that grow
    Row("store", GROWING, GrowingWorld.grow, lambda w: w.store(4, 5)),
    Row("store.half", GROWING, None, lambda w: w.store(4, 5)),
    Row("store.short", "growing", GrowingWorld.grow, lambda w: w.store(4, 5, 6), options={"short": True}),
    Row("statistics", GROWING, GrowingWorld.grow, lambda w: (w.cache.statistics(), w.engine.statistics())),
    Row("statistics.short", "growing", GrowingWorld.grow, lambda w: w.cache.lookup(keys([0])), options={"short": True}),
    Row("open", GROWING, second_growing, open_and_drop),
    Row("close", GROWING, None, lambda w: w.engine.close(SECONDS), "closed"),
    Row("close.devices", GROWING, begun, lambda w: w.devices[-1].close(SECONDS), "closed"),
    # a codec
    Row("store.evicting.wait", CODED, None, lambda w: w.store(4, 5, 6, 7).wait(SECONDS), wanted=(4, 5, 6)),
    Row("store.twice", "coded, coded tiers, coded pool", None, store_and_displace, wanted=(4, 5, 6, 7)),
    Row("lookup", "coded", stored, lambda w: w.cache.lookup(keys([4, 5, 9]))),
    Row("load.pending", "coded, coded tiers, coded pool", lambda w: w.store(4, 5, after=w.held_stream()), load_unfit),
    Row("reserve.commit_job", CODED, None, commit_job),
    Row("load.wait", "coded, coded pool", commit_unfit, load_unfit),
    Row("fetch", "coded tiers", lambda w: w.cache.clear(below=False), fetch),
    Row("drain", "coded tiers", lambda w: w.store(4, 5).wait(SECONDS), lambda w: w.cache.drain(SECONDS)),
    Row("load.parts", "coded", None, lambda w: w.cache.load(keys([0, 1]), TARGETS[:2], after=NO_WAIT, parts=PLANES)),
    # tiers
    Row(
        "promote",
        "tiers",
        lambda w: w.cache.clear(below=False),
        lambda w: w.kept.append(w.cache.promote(keys([0, 1]))),
    ),
    Row("promote.present", "tiers", None, lambda w: w.kept.append(w.cache.promote(keys([0, 1])))),
    Row("promotion.wait", "tiers", TieredWorld.promoted, lambda w: w.made.wait(SECONDS)),
    Row(
        "promotion.load",
        "tiers",
        promotion_ended,
        lambda w: w.made.load([40, 41], after=NO_WAIT).wait(SECONDS),
    ),
    Row("promotion.release", "tiers", promotion_ended, lambda w: w.made.release()),
    Row("promotion.cancel", "tiers", promotion_ended, lambda w: w.made.cancel()),
    Row("fetch.present", "cache, two cache, tiers", None, fetch),
    Row("fetch", "tiers", lambda w: w.cache.clear(below=False), fetch),
    Row("fetch.hits", "tiers", fetching, lambda w: w.made.hits),
    Row("fetch.cancel", "tiers", fetching, lambda w: w.made.cancel()),
    Row("fetch.wait", "tiers", fetching, lambda w: w.made.wait(SECONDS)),
    Row("fetch.order_before", "tiers", lambda w: (fetching(w), w.stream()), order_fetched),
    Row("request.fetch", "cache, two cache, tiers", lambda w: w.cache.open_request(), fetch_and_keep),
    Row("hint.demote", "tiers", named, lambda w: w.cache.hint("demote", session="a")),
    Row("hint.prefetch", "tiers", named_below, lambda w: w.cache.hint("prefetch", session="a")),
    Row("open_cache", ENGINES, None, open_and_keep),
    Row("open_cache.used", ENGINES, None, open_and_use),
    Row("open_cache.disk", "one", disk, lambda w: open_and_keep(w, **w.made)),
    Row("open_cache.disk.again", "one", disk_used, lambda w: open_and_keep(w, **w.made)),
    Row("open_cache.close", ENGINES, opened, lambda w: w.made.close(SECONDS)),
    Row("open_cache.close.disk", "one", lambda w: opened(w, **disk(w)), lambda w: w.made.close(SECONDS)),
    Row("close", "tiers", lambda w: w.store(4), lambda w: w.cache.close(SECONDS), "closed"),
    Row("close.fetching", "tiers", fetching, lambda w: w.cache.close(SECONDS), "closed"),
    Row("keep", "cache, tiers", None, lambda w: w.cache.keep(keys([0, 4]), [0, 4], after=NO_WAIT).wait(SECONDS)),
    Row("locate", "tiers", None, lambda w: (w.cache.locate(keys(range(6))), w.cache.tier_statistics())),
    Row("drain", "tiers", lambda w: w.store(4).wait(SECONDS), lambda w: w.cache.drain(SECONDS)),
)


POOLED = (  # rows of "cache" that are also tried over a shared pool
    *("lookup", "lookup_many", "status_of", "statistics", "touch", "store.free", "store.evicting", "store.all", "keep"),
    *(
        "store.evicting.wait",
        "store.present",
        "store.held",
        "store.behind_a_load",
        "store.twice",
        "engine.store.failed",
    ),
    *("load", "load.wait", "load.pending", "job", "reserve", "reserve.commit", "reserve.commit_job", "reserve.block"),
    *("reserve.abandoned", "abort", "request", "acquire", "lease", "remove", "clear", "fetch.present", "request.fetch"),
)
TABLE = tuple(
    row._replace(worlds=f"{row.worlds}, pool") if row.name in POOLED and "cache" in row.worlds.split(", ") else row
    for row in TABLE
)
TABLE += (
    Row("use_weights", "pool", None, weights),
    Row("hint", "pool", None, lambda w: [w.cache.hint(action, session="a") for action in ACTIONS]),
    Row("attach", "pool", None, lambda w: w.attach_again().close()),
    Row("close", "pool", two_loaded, lambda w: w.pool.close(), "closed"),
)


def scenarios() -> Iterator[tuple[str, Scenario]]:
    """Each row in each of its worlds, by name."""
    for row in TABLE:
        for where in row.worlds.split(", "):
            prefix, world = WORLDS[where]
            yield prefix + row.name, Scenario(row, world, tuple(POLICIES) if where in EVERY_POLICY else ("lru",))


SCENARIOS = dict(scenarios())
assert len(SCENARIOS) == len(list(scenarios())), "each name is used once"
