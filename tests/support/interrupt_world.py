"""What the interrupt scenarios run in, and what must hold in it afterwards, whatever was interrupted.

A world is a simulated device with planes whose blocks all differ, an engine over them, and where the scenario needs it
a cache. Key `i` stands for block `i`, so the bytes of a hit say whether the cache told the truth.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from tier_classes import DictTier

import kvoffload
from kvoffload import (
    NO_WAIT,
    BlockCache,
    CacheIndex,
    ClosedError,
    KVLayout,
    Lease,
    OffloadEngine,
    Plane,
    Reservation,
    ShardedEngine,
    Status,
)
from kvoffload.cache.policies import Policy
from kvoffload.cache.tiering.promotion import Promotion
from kvoffload.testing import SimulatedDriver

PLANES, BLOCK_BYTES, BLOCKS = 3, 32, 48
SOURCES = 24  # blocks that hold what keys stand for; the others are targets of loads
CAPACITY = 4  # of caches: slots of the engine
SECONDS = 3.0  # for what should take no time


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


@functools.cache
def contents() -> npt.NDArray[np.uint8]:
    """(blocks, planes, bytes): no two blocks have a plane in common."""
    return np.random.default_rng(5).integers(0, 256, (BLOCKS, PLANES, BLOCK_BYTES), dtype=np.uint8)


def settle(handles: list[Any]) -> list[str]:
    """What a program does with the handles that it holds when a call was interrupted: it ends their use."""
    while handles:
        handle = handles.pop()
        if isinstance(handle, Reservation):
            with contextlib.suppress(ClosedError):  # it has been committed or aborted
                handle.abort()
        elif isinstance(handle, Lease | Promotion):
            handle.release()
        elif isinstance(handle, OffloadEngine | ShardedEngine):
            handle.close(SECONDS)
    return []


class World:
    """A device, memory and streams of a caller's, and an engine.

    Args:
        policy: of the cache; a name in POLICIES.
        options: of the engine.
    """

    device_count = 1

    def __init__(self, policy: str = "lru", **options: Any) -> None:
        self.policy = policy
        self.driver = SimulatedDriver(seed=1, deadlock_seconds=0.3, device_count=self.device_count)
        self.device: kvoffload.Device = kvoffload.open_device(backend=self.driver)
        self.planes = self.make_planes()
        self.slab: Any = self.planes[0].owner
        self.fill()
        self.layout: Any = self.make_layout()
        self.engine: Any = self.make_engine({"num_slots": CAPACITY, "sm_limit": 0, **options})
        self.streams: list[int] = []
        self.gate: Any = None
        self.kept: list[Any] = []  # handles that the scenario's caller holds, and settles
        self.lost = False  # whether the scenario loses the context: nothing is left to use
        self.closing = False  # whether the scenario closes the engine or the device
        self.before: npt.NDArray[np.uint8] | None = None

    def make_planes(self) -> list[Plane]:
        """Planes 0 to 2 of the blocks, wherever they are."""
        return self.device.allocate_planes(PLANES, block_bytes=BLOCK_BYTES, num_blocks=BLOCKS)

    def make_layout(self) -> Any:
        return KVLayout([self.planes])

    def make_engine(self, options: dict[str, Any]) -> Any:
        return OffloadEngine(self.layout, device=self.device, **options)

    @property
    def busy(self) -> OffloadEngine:
        engine: OffloadEngine | None = self.engine
        assert engine is not None
        return engine

    def fill(self) -> None:
        """Write every block."""
        for slab, members in self._slabs():
            image = np.zeros(slab.nbytes, np.uint8)
            for index, plane in members:
                start = plane.address - slab.address
                image[start : start + plane.span_bytes] = contents()[:, index].reshape(-1)
            slab.copy_from(image)

    def blocks(self) -> npt.NDArray[np.uint8]:
        """All blocks now: (blocks, planes, bytes)."""
        found = np.empty((BLOCKS, PLANES, BLOCK_BYTES), np.uint8)
        for slab, members in self._slabs():
            image = slab.to_numpy()
            for index, plane in members:
                start = plane.address - slab.address
                found[:, index] = image[start : start + plane.span_bytes].reshape(BLOCKS, BLOCK_BYTES)
        return found

    def _slabs(self) -> list[tuple[Any, list[tuple[int, Plane]]]]:
        """The allocations, each with its planes by number."""
        members: dict[int, list[tuple[int, Plane]]] = {}
        for index, plane in enumerate(self.planes):
            members.setdefault(id(plane.owner), []).append((index, plane))
        return [(each[0][1].owner, each) for each in members.values()]

    def stream(self) -> int:
        """A stream of the caller's."""
        with self.device.current():
            status, handle = self.driver.cuStreamCreateWithPriority(1, 0)
        assert int(status) == 0
        self.streams.append(int(handle))
        return int(handle)

    def held_stream(self) -> int:
        """A stream of the caller's that stands still until `open_gate`."""
        stream = self.stream()
        if self.gate is None:
            self.gate = self.device.allocate(64)
            self.gate.copy_from(np.zeros(64, np.uint8))
        with self.device.current():
            (status,) = self.driver.cuStreamWaitValue32(stream, self.gate.address, 1, 0)
        assert int(status) == 0
        return stream

    def open_gate(self) -> None:
        if self.gate is not None:
            self.driver.view(self.gate.address, 4)[0] = 1

    # what must hold ---------------------------------------------------------------------------------------------

    def problems(self, creating: bool) -> list[str]:
        """What is wrong now; closes everything.

        Args:
            creating: the interrupted call was the driver's, and returned a handle: that one may be lost.
        """
        found: list[str] = []
        gc.collect()
        self.open_gate()
        self.driver.faults.clear()
        for step in (partial(settle, self.kept), self.check_use, self.close):
            try:
                found += step()
            except ClosedError as error:
                if not self.closing:
                    found.append(f"broken: {error!r}")
            except TimeoutError as error:
                found.append(f"hang: {error}")
            except Exception as error:
                found.append(f"broken: {type(error).__name__}: {error}")
        left = {kind: count for kind, count in self.driver.leaks().items() if count}
        if sum(left.values()) > int(creating):
            found.append(f"leak: {left}")
        try:
            self.driver.check_guards()
        finally:
            found += [f"violation: {text}" for text in self.driver.violations]
        return found

    def check_use(self) -> list[str]:
        """The engine moves the right bytes: four blocks there and back, one after another through the same slots."""
        engine = self.engine
        if engine is None or self.lost:
            return []
        engine.drain(SECONDS)
        engine.poll()
        self.fill()
        slots = range(CAPACITY)
        for first in (0, CAPACITY):
            engine.store(range(first, first + CAPACITY), slots, after=NO_WAIT).wait(SECONDS)
            engine.load(slots, range(SOURCES, SOURCES + CAPACITY), after=NO_WAIT).wait(SECONDS)
            if not (self.blocks()[SOURCES : SOURCES + CAPACITY] == contents()[first : first + CAPACITY]).all():
                return ["wrong bytes: a transfer after the interrupted call"]
        statistics = engine.statistics()
        assert statistics.in_flight == 0, "nothing is in flight"
        return []

    def close(self) -> list[str]:
        """All of it ends, in the order in which a program does it."""
        if self.engine is not None:
            self.engine.drain(SECONDS)
            self.engine.close(SECONDS)
        self.engine = None
        if self.streams and not self.device.closed:
            with self.device.current():
                for stream in self.streams:
                    self.driver.cuStreamSynchronize(stream)
                    self.driver.cuStreamDestroy(stream)
        self.device.close(SECONDS)
        kvoffload.open_device(backend=self.driver).close(SECONDS)
        return []


class CacheWorld(World):
    """A world with a cache of four keys, 0 to 3, that are all in it; `contents()[i]` are the bytes of key `i`.

    Args:
        filled: how many of its four keys are stored.
        cache_options: of the cache.
    """

    def __init__(
        self,
        policy: str = "lru",
        *,
        filled: int = CAPACITY,
        cache_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(policy, **options)
        self.cache: Any = self.make_cache(POLICIES[policy], **(cache_options or {}))
        if filled:
            self.store(*range(filled)).wait(SECONDS)
        self.wanted: list[int] = [4, 5]  # keys that the interrupted call stores

    def make_cache(self, policy: Any, **options: Any) -> Any:
        return BlockCache(self.busy, policy=policy, **options)

    @property
    def full(self) -> Any:
        assert self.cache is not None
        return self.cache

    def store(self, *numbers: int, after: Any = NO_WAIT) -> Any:
        return self.full.store(keys(numbers), list(numbers), after=after)

    def write(self, reservation: Any) -> None:
        """Fill a reservation's slots by hand."""
        numbers = [int(each.split(b"-")[1]) for each in reservation.keys]
        pool = self.busy.slots
        for number, slot in zip(numbers, reservation.slots(), strict=True):
            pool[slot, : PLANES * BLOCK_BYTES] = contents()[number].reshape(-1)

    def check_use(self) -> list[str]:
        cache = self.full
        found = self._check_hits("at once")
        self.busy.drain(SECONDS)
        found += self._check_hits("after drain")
        statuses = cache.status(keys(range(SOURCES)))
        stuck = [number for number, status in enumerate(statuses) if status is Status.PENDING]
        if stuck:
            return [*found, f"lost: keys {stuck} stay pending for ever"]
        for numbers in (self.wanted, range(CAPACITY)):
            cache.store(keys(numbers), list(numbers), after=NO_WAIT).wait(SECONDS)
            found += self._check_hits("after another store")
        cache.clear()
        fresh = range(SOURCES - CAPACITY, SOURCES)
        cache.store(keys(fresh), list(fresh), after=NO_WAIT).wait(SECONDS)
        if cache.lookup(keys(fresh)) != CAPACITY:
            found.append(f"lost: the emptied cache of {CAPACITY} takes {cache.lookup(keys(fresh))} keys")
        return found + self._check_hits("at the end")

    def _check_hits(self, when: str) -> list[str]:
        """Every hit is loaded, and has its bytes."""
        cache = self.full
        self.fill()
        hits = [number for number in range(SOURCES) if cache.lookup([key(number)]) == 1]
        targets = list(range(SOURCES, SOURCES + len(hits)))
        cache.load(keys(hits), targets, after=NO_WAIT).wait(SECONDS)
        loaded = self.blocks()[targets]
        wrong = [number for number, each in zip(hits, loaded, strict=True) if not (each == contents()[number]).all()]
        found = [f"wrong hit: key {number} {when}" for number in wrong]
        try:
            cache.check()
        except AssertionError as error:
            found.append(f"check() {when}: {error}")
        return found

    def close(self) -> list[str]:
        self.cache = None
        return super().close()


class TieredWorld(CacheWorld):
    """A world whose cache writes every key through to a tier, which has keys 0 to 3; its thread runs all the time."""

    def make_cache(self, policy: Any, **options: Any) -> Any:
        self.tier = DictTier()
        return BlockCache(self.busy, policy=policy, tiers=[self.tier], write="through", **options)

    def __init__(self, policy: str = "lru", **options: Any) -> None:
        super().__init__(policy, **options)
        assert self.full.drain(SECONDS), "the tier has the keys"

    def check_use(self) -> list[str]:
        """Hits have their bytes; what the tier has can be promoted and loaded; nothing stays pending or held."""
        cache = self.full
        found = self._check_hits("at once")
        self.busy.drain(SECONDS)
        if not cache.drain(SECONDS):
            found.append("hang: the tier's writes")
        cache.clear(below=False)
        there = [number for number in range(SOURCES) if self.tier.contains([key(number)])[0]][:2]
        end = time.monotonic() + SECONDS
        while True:  # the thread of the tiers gives entries of an abandoned promotion back when it looks
            with cache.promote(keys(there)) as promotion:
                came = promotion.wait(SECONDS)
                found += self._check_hits("after a promotion")
            if came == len(there) or time.monotonic() > end:
                break
        if came != len(there):
            found.append(f"lost: keys {there} are in the tier, {came} were promoted")
        cache.store(keys([8]), [8], after=NO_WAIT).wait(SECONDS)
        found += self._check_hits("after a store")
        if cache.remove(keys([8])) != 1 or self.tier.contains([key(8)])[0]:
            found.append("broken: a key was not removed")
        return found

    def close(self) -> list[str]:
        closed = self.cache is None or self.cache.close(SECONDS)
        return [*([] if closed else ["hang: close of the tiers"]), *super().close()]


class IndexWorld:
    """A `CacheIndex` of four entries, and the key that was written into each; keys 0 to 3 are in it."""

    closing = False

    def __init__(self, policy: str, **options: Any) -> None:
        self.driver = None
        self.index: CacheIndex | None = CacheIndex(CAPACITY, policy=POLICIES[policy], **options)
        self.entries: dict[int, bytes] = {}
        self.kept: list[Any] = []
        self.wanted = [4, 5]
        self.store(keys(range(CAPACITY)))

    @property
    def full(self) -> CacheIndex:
        assert self.index is not None
        return self.index

    def write(self, reservation: Any) -> None:
        self.entries.update(zip((int(each) for each in reservation.indices), reservation.keys, strict=True))

    def store(self, wanted: Sequence[bytes]) -> None:
        reservation = self.full.reserve(wanted)
        self.write(reservation)
        reservation.commit()

    def problems(self, creating: bool) -> list[str]:
        del creating
        gc.collect()
        try:
            settle(self.kept)
            return self._check_use()
        except Exception as error:
            return [f"broken: {type(error).__name__}: {error}"]

    def _check_use(self) -> list[str]:
        index, found = self.full, self._check_hits("at once")
        statuses = index.status(keys(range(SOURCES)))
        stuck = [number for number, status in enumerate(statuses) if status is Status.PENDING]
        if stuck:
            return [*found, f"lost: keys {stuck} stay pending for ever"]
        for numbers in (self.wanted, range(CAPACITY)):
            self.store(keys(numbers))
            found += self._check_hits("after another store")
        index.clear()
        fresh = keys(range(SOURCES - CAPACITY, SOURCES))
        self.store(fresh)
        if index.lookup(fresh) != CAPACITY:
            found.append(f"lost: the emptied index of {CAPACITY} takes {index.lookup(fresh)} keys")
        return found + self._check_hits("at the end")

    def _check_hits(self, when: str) -> list[str]:
        found = []
        for wanted in keys(range(SOURCES)):
            if self.full.lookup([wanted]) == 1:
                with self.full.acquire([wanted]) as lease:
                    if self.entries.get(int(lease.indices[0])) != wanted:
                        found.append(f"wrong hit: {wanted.decode()} {when}")
        try:
            self.full.check()
        except AssertionError as error:
            found.append(f"check() {when}: {error}")
        return found
