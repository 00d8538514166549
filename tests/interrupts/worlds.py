"""The worlds that scenarios run in, and what must hold in each of them after an interrupt.

A world has one or two simulated devices, planes whose blocks all differ, an engine, and where the scenario needs it a
cache, with or without a tier; `IndexWorld` has an index alone. Key `i` stands for block `i`, so the bytes of a hit show
whether the cache told the truth.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from coded import normal
from growing import Pieces, wait_for, wait_for_the_end
from tier_classes import DictTier

import kvoffload
from kvoffload import (
    NO_WAIT,
    BlockCache,
    CacheIndex,
    ClosedError,
    Device,
    Growing,
    KVLayout,
    Lease,
    OffloadEngine,
    Reservation,
    ShardedEngine,
    Status,
    TransferError,
)
from kvoffload.cache.policies import DEFAULT_POLICY, Policy
from kvoffload.cache.tiering.promotion import Promotion
from kvoffload.layout.coding import CodecName, Coding
from kvoffload.pool import PoolOwner, SharedPool, watching
from kvoffload.pool.pool_memory import Meaning
from kvoffload.testing import SimulatedDriver

PLANES, BLOCK_BYTES, BLOCKS, SLOT_BYTES = 3, 32, 48, 4096
CODED_BYTES = 512
SOURCES = 24  # blocks that hold what keys stand for; the others are targets of loads
CAPACITY = 4  # of caches: slots of the engine
SECONDS = 10.0  # for what should take no time; kernels are interpreted


class Fifo(Policy):
    """A user's policy: evicts the key that was inserted first. Its methods are places where exceptions come out."""

    def __init__(self, capacity: int = 0) -> None:
        del capacity
        self.keys: OrderedDict[bytes, int] = OrderedDict()

    def insert(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.keys[key] = 0

    def load(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.keys[key] += 1

    def touch(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if key in self.keys:
                self.keys[key] += 1

    def remove(self, keys: Sequence[bytes], evicted: bool) -> None:
        del evicted
        for key in keys:
            del self.keys[key]

    def victims(self, count: int, protected: Callable[[bytes], bool]) -> list[bytes] | None:
        found = [key for key in self.keys if not protected(key)][:count]
        return found if len(found) == count else None

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.keys)

    def __len__(self) -> int:
        return len(self.keys)


POLICIES: dict[str, Any] = {"prefix": "prefix", "lru": "lru", "user": Fifo}


def key(number: int) -> bytes:
    return b"key-%d" % number


def keys(numbers: Iterable[int]) -> list[bytes]:
    return [key(number) for number in numbers]


def numbers_of(names: Iterable[bytes]) -> list[int]:
    return [int(name.split(b"-")[1]) for name in names]


@functools.cache
def contents() -> npt.NDArray[np.uint8]:
    """(blocks, planes, bytes): no two blocks have a plane in common."""
    return np.random.default_rng(5).integers(0, 256, (BLOCKS, PLANES, BLOCK_BYTES), dtype=np.uint8)


@functools.cache
def coded_contents() -> npt.NDArray[np.uint8]:
    random = np.random.default_rng(6)
    values = normal(random, BLOCKS * PLANES * CODED_BYTES // 2).reshape(BLOCKS, PLANES, -1)
    values[[5, 7], 1] = random.integers(0, 1 << 16, (2, CODED_BYTES // 2))
    return values.view(np.uint8)


class _Checked:
    """What is verified after an interrupt, in every world.

    Attributes:
        kept: handles that the scenario's caller holds. They are settled first.
        made: what the scenario has prepared; its caller drops it when the call has ended.
        leaves: what the scenario leaves: "open"; "closed", an engine or a device; "lost", the context.
        wanted: keys that the interrupted call stores.
        cache: a cache or an index, if there is one.
    """

    driver: SimulatedDriver | None = None
    engine: Any = None
    cache: Any = None
    leaves = "open"
    wanted: Sequence[int] = (4, 5)

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.made: Any = None

    def problems(self, creating: bool) -> list[str]:
        """What is wrong now; closes everything.

        Args:
            creating: the interrupted call was the driver's, and returned a handle: that one may be lost.
        """
        found: list[str] = []
        gc.collect()
        self.let_go()
        for step in (self.settle, self.check_use, self.close):
            try:
                found += step()
            except ClosedError as error:
                if self.leaves == "open":
                    found.append(f"broken: {error!r}")
            except TimeoutError as error:
                found.append(f"hang: {error}")
            except Exception as error:
                found.append(f"broken: {type(error).__name__}: {error}")
        if self.driver is None:
            return found
        left = {kind: count for kind, count in self.driver.leaks().items() if count}
        if sum(left.values()) > int(creating):
            found.append(f"leak: {left}")
        try:
            self.driver.check_guards()
        finally:
            found += [f"violation: {text}" for text in self.driver.violations]
        return found

    def let_go(self) -> None:
        """Nothing is held back from now on, and no call is made to fail."""

    def settle(self) -> list[str]:
        """End the use of the handles, as a program does after an interrupt."""
        while self.kept:
            handle = self.kept.pop()
            if isinstance(handle, Reservation):
                with contextlib.suppress(ClosedError):  # it has been committed or aborted
                    handle.abort()
            elif isinstance(handle, Lease | Promotion):
                handle.release()
            elif isinstance(handle, OffloadEngine | ShardedEngine):
                handle.close(SECONDS)
            elif isinstance(handle, BlockCache) and not handle.close(SECONDS):
                return ["hang: close of a cache"]
        return []

    def check_use(self) -> list[str]:
        """Hits are true at once and later; no key stays pending; what is wanted can be stored, and no entry is lost."""
        cache, found = self.cache, self.check_hits("at once")
        sessions = cache._state.sessions
        if hasattr(self, "now") and sessions is not None:
            self.now = 1e6
            cache.touch([])
            known = sum(len(chain.keys) for session in sessions._all.values() for chain in session.chains)
            if sessions._known != known:
                found.append(f"wrong: {sessions._known} keys are counted in chains, of {known}")
            pools = [pool for pool in cache._state.pools.all if pool.beside is not None and not pool.released]
            if any(len(pool.policy) for pool in pools):
                found.append("lost: keys stay retained for ever")
        if self.engine is not None:
            self.engine.drain(SECONDS)
            found += self.check_hits("after drain")
        statuses = cache.status(keys(range(SOURCES)))
        stuck = [number for number, status in enumerate(statuses) if status is Status.PENDING]
        if stuck:
            return [*found, f"lost: keys {stuck} stay pending for ever"]
        for numbers in (self.wanted, range(CAPACITY)):
            self.store_and_wait(numbers)
            found += self.check_hits("after another store")
        cache.clear()
        fresh = range(SOURCES - CAPACITY, SOURCES)
        self.store_and_wait(fresh)
        if cache.lookup(keys(fresh)) != CAPACITY:
            found.append(f"lost: once emptied, {CAPACITY} entries take {cache.lookup(keys(fresh))} keys")
        return found + self.check_hits("at the end")

    def check_hits(self, when: str) -> list[str]:
        """Every hit has its bytes, and the cache is consistent."""
        hits = [number for number in range(SOURCES) if self.cache.lookup([key(number)]) == 1]
        found = [f"wrong hit: key {number} {when}" for number in self.wrong_hits(hits)]
        try:
            self.cache.check()
        except AssertionError as error:
            found.append(f"check() {when}: {error}")
        if self.cache._state.pools.in_use != self.cache._state.weights.in_use:
            found.append("lost: keys of the weights in use go first")
        self.cache.use_weights("")  # which the other checks mean
        return found

    def wrong_hits(self, hits: list[int]) -> list[int]:
        raise NotImplementedError

    def store_and_wait(self, numbers: Sequence[int]) -> None:
        raise NotImplementedError

    def close(self) -> list[str]:
        return []


class World(_Checked):
    """Devices, memory and streams of a caller's, and an engine.

    Args:
        policy: of the cache; a name in POLICIES.
        devices: 1, or 2: then the first has two planes of each block, the second one.
        options: of the engine.
    """

    codec: CodecName = "raw"
    block_bytes = BLOCK_BYTES
    _folder: tempfile.TemporaryDirectory[str] | None = None

    def __init__(self, policy: str = "lru", *, devices: int = 1, **options: Any) -> None:
        super().__init__()
        self.policy = policy
        self.driver: SimulatedDriver = SimulatedDriver(seed=1, deadlock_seconds=0.3, device_count=devices)
        self.devices = [kvoffload.open_device(number, backend=self.driver) for number in range(devices)]
        self.device = self.devices[0]
        self.shares = [slice(0, 2), slice(2, PLANES)] if devices == 2 else [slice(0, PLANES)]
        self.planes = [
            device.allocate_planes(len(range(PLANES)[share]), block_bytes=self.block_bytes, num_blocks=BLOCKS)
            for device, share in zip(self.devices, self.shares, strict=True)
        ]
        self.slab: Any = self.planes[0][0].owner
        self.fill()
        self.layouts = [KVLayout([planes], codec=self.codec) for planes in self.planes]
        self.layout: Any = self.layouts if devices == 2 else self.layouts[0]
        self.copier: Any = "pack" if options.get("staging_bytes") else None  # by which it is used afterwards
        self.engine = self.open_engine(CAPACITY, **{"staging_bytes": 0, **options})
        self.streams: list[tuple[Device, int]] = []
        self.gate: Any = None

    def open_growing(self, num_slots: int, **options: Any) -> Any:
        """An engine whose pool grows by a slot at a time."""
        nbytes = num_slots * SLOT_BYTES * len(self.devices)
        return self.open_engine(None, pool_bytes=Growing(nbytes, piece_bytes=SLOT_BYTES), staging_bytes=0, **options)

    def open_engine(self, num_slots: int | None, **options: Any) -> Any:
        if len(self.devices) == 1:
            return OffloadEngine(self.layout, device=self.device, num_slots=num_slots, **options)
        return ShardedEngine(self.layout, devices=self.devices, num_slots=num_slots, **options)

    def folder(self) -> str:
        """For files, of which none is open in the end."""
        self._folder = self._folder or tempfile.TemporaryDirectory()
        return self._folder.name

    def open_files(self) -> list[str]:
        gc.collect()
        names = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
        links = [os.readlink(name) for name in names if os.path.islink(name)]
        return [link for link in links if self._folder is not None and link.startswith(self._folder.name)]

    def begin(self) -> Any:
        """Have a store and a load in flight; returns the load."""
        self.engine.store([4], [3], after=NO_WAIT)
        parts = {"parts": PLANES} if len(self.devices) == 1 else {}
        return self.engine.load([0, 1], [40, 41], after=NO_WAIT, **parts)

    def contents(self) -> npt.NDArray[np.uint8]:
        """(blocks, planes, bytes)"""
        return contents()

    def in_slot(self, number: int, share: slice) -> npt.NDArray[np.uint8]:
        """What a slot of this block holds, of these planes."""
        return self.contents()[number, share].reshape(-1)

    def fill(self) -> None:
        """Write every block."""
        for share, planes in zip(self.shares, self.planes, strict=True):
            slab: Any = planes[0].owner
            image = np.zeros(slab.nbytes, np.uint8)
            for index, plane in zip(range(PLANES)[share], planes, strict=True):
                start = plane.address - slab.address
                image[start : start + plane.span_bytes] = self.contents()[:, index].reshape(-1)
            slab.copy_from(image)

    def blocks(self) -> npt.NDArray[np.uint8]:
        """All blocks now: (blocks, planes, bytes)."""
        found = np.empty((BLOCKS, PLANES, self.block_bytes), np.uint8)
        for share, planes in zip(self.shares, self.planes, strict=True):
            slab: Any = planes[0].owner
            image = slab.to_numpy()
            for index, plane in zip(range(PLANES)[share], planes, strict=True):
                start = plane.address - slab.address
                found[:, index] = image[start : start + plane.span_bytes].reshape(BLOCKS, self.block_bytes)
        return found

    def slots(self, slot: int) -> list[tuple[npt.NDArray[np.uint8], slice]]:
        """The bytes of a slot in each device's pool, with the planes that they are of."""
        pools = self.engine.slots if len(self.devices) > 1 else [self.engine.slots]
        return [
            (pool[slot, : layout.groups[0].payload_bytes], share)
            for pool, share, layout in zip(pools, self.shares, self.layouts, strict=True)
        ]

    def each(self, make: Callable[[Device], Any]) -> Any:
        """What `make` returns of the device; of several, a list."""
        made = [make(device) for device in self.devices]
        return made if len(made) > 1 else made[0]

    def stream_on(self, device: Device) -> int:
        with device.current():
            status, handle = self.driver.cuStreamCreateWithPriority(1, 0)
        assert int(status) == 0
        self.streams.append((device, int(handle)))
        return int(handle)

    def stream(self) -> Any:
        """A stream of the caller's on each device."""
        return self.each(self.stream_on)

    def held_stream(self) -> Any:
        """The same; the one on the first device stands still until `let_go`."""
        streams = self.stream()
        if self.gate is None:
            self.gate = self.device.allocate(64)
            self.gate.copy_from(np.zeros(64, np.uint8))
        with self.device.current():
            first = streams[0] if len(self.devices) > 1 else streams
            (status,) = self.driver.cuStreamWaitValue32(first, self.gate.address, 1, 0)
        assert int(status) == 0
        return streams

    # what must hold ---------------------------------------------------------------------------------------------

    def let_go(self) -> None:
        if self.gate is not None:
            self.driver.view(self.gate.address, 4)[0] = 1
        self.driver.faults.clear()

    def check_use(self) -> list[str]:
        """The engine moves the right bytes: four blocks there and back, one after another through the same slots."""
        engine = self.engine
        if engine is None or self.leaves == "lost":
            return []
        engine.drain(SECONDS)
        engine.poll()
        self.fill()
        slots = range(CAPACITY)
        for first in (0, CAPACITY):
            engine.store(range(first, first + CAPACITY), slots, after=NO_WAIT, copier=self.copier).wait(SECONDS)
            targets = range(SOURCES, SOURCES + CAPACITY)
            engine.load(slots, targets, after=NO_WAIT, copier=self.copier).wait(SECONDS)
            if not (self.blocks()[SOURCES : SOURCES + CAPACITY] == self.contents()[first : first + CAPACITY]).all():
                return ["wrong bytes: a transfer after the interrupted call"]
        assert engine.statistics().in_flight == 0, "nothing is in flight"
        return []

    def close(self) -> list[str]:
        """All of it ends, in the order in which a program does it."""
        if self.engine is not None:
            self.engine.drain(SECONDS)
            self.engine.close(SECONDS)
        self.engine = None
        for device, stream in self.streams:
            if not device.closed:
                with device.current():
                    self.driver.cuStreamSynchronize(stream)
                    self.driver.cuStreamDestroy(stream)
        for device in reversed(self.devices):
            device.close(SECONDS)
        for number in range(len(self.devices)):
            kvoffload.open_device(number, backend=self.driver).close(SECONDS)
        end = time.monotonic() + SECONDS
        while self.open_files() and time.monotonic() < end:  # threads of a tier that is garbage close them
            time.sleep(1e-3)
        return [f"leak: {name} is open" for name in self.open_files()]


class CacheWorld(World):
    """A world with a cache of four keys, 0 to 3, that are all in it; `contents()[i]` are the bytes of key `i`.

    Args:
        filled: how many of its four keys are stored.
        cache_options: of the cache.
    """

    tier: DictTier | None = None
    pool: Any = None

    def __init__(
        self,
        policy: str = "lru",
        *,
        filled: int = CAPACITY,
        cache_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(policy, **options)
        self.cache: Any = BlockCache(
            self.engine, **{"policy": POLICIES[policy], "pool": self.pool, **(cache_options or {})}
        )
        if filled:
            self.store(*range(filled)).wait(SECONDS)

    def begin(self) -> Any:
        return self.store(4, 5)

    def store(self, *numbers: int, after: Any = NO_WAIT) -> Any:
        return self.cache.store(keys(numbers), list(numbers), after=after)

    def pend(self, number: int) -> None:
        """Have a key that is pending."""
        self.store(number)

    def slot_of(self, number: int) -> int:
        return int(self.cache._state.table.of[key(number)])

    def write(self, reservation: Any) -> None:
        """Fill a reservation's slots by hand."""
        for number, slot in zip(numbers_of(reservation.keys), reservation.slots(), strict=True):
            for pool, share in self.slots(slot):
                pool[:] = self.in_slot(number, share)

    def store_and_wait(self, numbers: Sequence[int]) -> None:
        self.cache.store(keys(numbers), list(numbers), after=NO_WAIT).wait(SECONDS)

    def check_use(self) -> list[str]:
        return _Checked.check_use(self)

    def wrong_hits(self, hits: list[int]) -> list[int]:
        """The hits that a load gives other bytes of."""
        self.fill()
        targets = list(range(SOURCES, SOURCES + len(hits)))
        self.cache.load(keys(hits), targets, after=NO_WAIT).wait(SECONDS)
        loaded = self.blocks()[targets]
        return [
            number for number, each in zip(hits, loaded, strict=True) if not (each == self.contents()[number]).all()
        ]

    def close(self) -> list[str]:
        cache, self.cache = self.cache, None
        closed = self.tier is None or cache.close(SECONDS)
        del cache
        return [*([] if closed else ["hang: close of the tiers"]), *super().close()]


class GrowingWorld(CacheWorld):
    """A cache over a pool that grows, of which half is pinned until `grow` or `let_go`; keys 0 and 1 are in it.

    Args:
        short: there will be two slots fewer than the pool was to have.
    """

    def __init__(self, policy: str = "lru", *, short: bool = False, **options: Any) -> None:
        self.pieces = Pieces(options.get("devices", 1))
        self.more = 2 * short
        super().__init__(policy, filled=0, **options)
        wait_for(self.engine, 2)
        if short:  # the first slot past CAPACITY cannot be pinned
            self.driver.faults.fail_call("cuMemHostRegister", nth=2 * len(self.devices) + 1, error=2)
        self.store(0, 1).wait(SECONDS)

    def open_engine(self, num_slots: int | None, **options: Any) -> Any:
        if num_slots is None:
            return super().open_engine(None, **options)
        return self.open_growing(num_slots + self.more, progress=self.pieces)

    def grow(self) -> None:
        self.pieces.let_all()
        wait_for_the_end(self.engine)
        assert self.engine.pinned_slots == CAPACITY

    def let_go(self) -> None:
        super().let_go()
        self.pieces.let_all()
        wait_for_the_end(self.engine)


class PoolWorld(CacheWorld):
    """A world whose cache is over a shared pool. Its owner is in another thread, which nothing interrupts."""

    def __init__(self, policy: str = "lru", **options: Any) -> None:
        watching.RETRY_SECONDS = 0.02  # after which it asks for what an interrupt has lost; a second takes too long
        self.owner = PoolOwner(f"{self.folder()}/pool", nbytes=Meaning(CAPACITY, 4096, b"", b"").nbytes)
        super().__init__(policy, cache_options={"policy": DEFAULT_POLICY}, **options)

    def open_engine(self, num_slots: int | None, **options: Any) -> Any:
        del num_slots
        dtype = "uint8" if self.codec == "raw" else "bfloat16"
        described: dict[str, Any] = {"dtype": dtype, "tokens_per_block": 4, "block_axes": ("tokens", "x")}
        self.layout = KVLayout(self.planes, codec=self.codec, **described)
        self.pool = SharedPool.attach(self.owner.path, self.layout, identity="model", answer_seconds=SECONDS)
        return OffloadEngine(self.layout, device=self.device, host_memory=self.pool.host_memory, **options)

    def attach_again(self) -> SharedPool:
        """Another membership, of no engine."""
        return SharedPool.attach(self.owner.path, self.layout, identity="model", answer_seconds=SECONDS)

    def slot_of(self, number: int) -> int:
        with self.cache.acquire([key(number)]) as lease:
            return int(lease.slots()[0])

    def check_use(self) -> list[str]:
        """As of every cache; then the owner holds nothing."""
        if self.pool._closed:
            return []
        end = time.monotonic() + SECONDS
        while self.cache.lookup([b"nothing"]) or (not self.pool.connected and time.monotonic() < end):
            time.sleep(1e-3)
        found = super().check_use()
        self.engine.drain(SECONDS)
        self.cache.status([])
        (counts,) = self.owner.statistics()
        while (counts["pending"], counts["pinned"]) != (0, 0) and time.monotonic() < end:
            time.sleep(1e-3)
            self.cache.status([])
            (counts,) = self.owner.statistics()
        if (counts["pending"], counts["pinned"]) != (0, 0):
            found.append(f"lost: the owner holds {counts} for ever")
        return found

    def close(self) -> list[str]:
        found = super().close()
        self.pool.close()
        end = time.monotonic() + SECONDS
        while self.owner.statistics()[0]["members"] and time.monotonic() < end:
            time.sleep(1e-3)
        left = self.owner.statistics()[0]["members"]
        self.owner.close()
        return [*found, *([f"leak: {left} members are left"] if left else [])]


class TieredWorld(CacheWorld):
    """A world whose cache writes every key through to a tier, which has keys 0 to 3; its thread runs all the time."""

    def __init__(self, policy: str = "lru", **options: Any) -> None:
        self.tier: DictTier = DictTier()
        super().__init__(policy, cache_options={"tiers": [self.tier], "write": "through"}, **options)
        assert self.cache.drain(SECONDS), "the tier has the keys"

    def promoted(self) -> Any:
        """A promotion of keys that are in the tier alone."""
        self.cache.clear(below=False)
        promotion = self.cache.promote(keys([0, 1]))
        self.kept.append(promotion)
        return promotion

    def check_use(self) -> list[str]:
        """Hits have their bytes; what the tier has can be promoted and loaded; nothing stays pending or held."""
        cache = self.cache
        found = self.check_hits("at once")
        self.engine.drain(SECONDS)
        if not cache.drain(SECONDS):
            found.append("hang: the tier's writes")
        cache.clear(below=False)
        there = [number for number in range(SOURCES) if self.tier.contains([key(number)])[0]][:2]
        end = time.monotonic() + SECONDS
        while True:  # the thread of the tiers gives entries of an abandoned promotion back when it looks
            with cache.promote(keys(there)) as promotion:
                came = promotion.wait(SECONDS)
                found += self.check_hits("after a promotion")
            if came == len(there) or time.monotonic() > end:
                break
        if came != len(there):
            found.append(f"lost: keys {there} are in the tier, {came} were promoted")
        self.store_and_wait([8])
        found += self.check_hits("after a store")
        if cache.remove(keys([8])) != 1 or self.tier.contains([key(8)])[0]:
            found.append("broken: a key was not removed")
        return found


class _Coded(CacheWorld):
    """A world whose slots are coded. Blocks 5 and 7 do not fit.

    Attributes:
        by_hand: key 5 was committed without its job, so it is a hit until its first load has failed.
    """

    codec = "bf16-12"
    block_bytes = CODED_BYTES
    by_hand = False

    def __init__(self, policy: str = "lru", **options: Any) -> None:
        super().__init__(policy, **{"staging_bytes": 1 << 20, **options})
        self.copier = None

    def contents(self) -> npt.NDArray[np.uint8]:
        return coded_contents()

    def in_slot(self, number: int, share: slice) -> npt.NDArray[np.uint8]:
        records, _ = Coding(CODED_BYTES // 2).encode(self.contents()[number, share].view(np.uint16))
        return records.reshape(-1)

    def wrong_hits(self, hits: list[int]) -> list[int]:
        if self.by_hand and 5 in hits:
            job = self.cache.load([key(5)], [SOURCES], after=NO_WAIT)
            with contextlib.suppress(TransferError):
                job.wait(SECONDS)
                return [5]
            hits = [number for number in hits if number != 5 or self.cache.lookup([key(5)])]
        return super().wrong_hits(hits)


class CodedWorld(_Coded):
    """A world with a cache alone."""


class CodedTieredWorld(_Coded, TieredWorld):
    """A world whose cache writes coded slots through to a tier."""


class CodedPoolWorld(_Coded, PoolWorld):
    """A world whose cache is over a shared pool of coded slots."""


class IndexWorld(_Checked):
    """A `CacheIndex` of four entries, and the key that was written into each; keys 0 to 3 are in it."""

    def __init__(self, policy: str, **options: Any) -> None:
        super().__init__()
        self.cache = CacheIndex(CAPACITY, policy=POLICIES[policy], **options)
        self.entries: dict[int, bytes] = {}
        self.store(*range(CAPACITY))

    def write(self, reservation: Any) -> None:
        self.entries.update(zip((int(each) for each in reservation.indices), reservation.keys, strict=True))

    def store(self, *numbers: int) -> None:
        reservation = self.cache.reserve(keys(numbers))
        self.write(reservation)
        reservation.commit()

    def pend(self, number: int) -> None:
        reservation = self.cache.reserve(keys([number]))
        self.write(reservation)
        self.kept.append(reservation)

    def store_and_wait(self, numbers: Sequence[int]) -> None:
        self.store(*numbers)

    def wrong_hits(self, hits: list[int]) -> list[int]:
        """The hits whose entry another key was written into."""
        wrong = []
        for number in hits:
            with self.cache.acquire([key(number)]) as lease:
                if self.entries.get(int(lease.indices[0])) != key(number):
                    wrong.append(number)
        return wrong
