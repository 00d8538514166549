"""The processes of `bench pool`: the owner of a pool, members that look keys up, members that move blocks."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import Any, NamedTuple, cast

import numpy as np

from kvoffload.cache.block_cache import BlockCache
from kvoffload.cache.index import CacheIndex
from kvoffload.cache.reservations import CacheJob
from kvoffload.device.buffers import DeviceBuffer
from kvoffload.device.device import Device, open_device
from kvoffload.device.streams import NO_WAIT
from kvoffload.engine.engine import OffloadEngine
from kvoffload.internal.types import UInt8Array
from kvoffload.layout.layout import KVLayout
from kvoffload.pool import PoolOwner, SharedPool
from kvoffload.pool.owner import BUSY_POLL_SECONDS
from kvoffload.simulator import SimulatedDriver
from kvoffload.terminal.console import CommandError
from kvoffload_bench.harness import Undoing
from kvoffload_bench.pool_table import SharedTable

_SECONDS = 120.0  # that an answer is waited for
_JOINED: dict[str, Any] = {"identity": "kvoffload bench pool", "timeout": 60.0, "answer_seconds": 5.0}  # no misses
OWN, POOL, TABLE = "own", "pool", "table"
STORE, LOAD = "store", "load"
_DESCRIBED: dict[str, Any] = {"dtype": "uint8", "tokens_per_block": 16, "block_axes": ("tokens", "dim")}
ENTRY_BYTES = 4096  # of members that only look keys up


def keys_of(number: int, start: int, count: int) -> list[bytes]:
    """Keys that look like digests; new objects each time, as requests bring them. Those of another number differ."""
    numbers = np.arange(start, start + count, dtype=np.uint64) + np.uint64((number << 40) + 1)
    mixed = numbers * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    words = np.stack([mixed * np.uint64(0xBF58476D1CE4E5B9), numbers], axis=1)
    return [row.tobytes() for row in words]


class Process(Undoing):
    """A process that makes an object, which is a context manager, and calls its methods. A context manager."""

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, name: str, *arguments: Any) -> None:
        self._ours.send((name, arguments))

    def result(self) -> Any:
        """What the method returned that was begun first; or None, once the object is made."""
        try:
            answered = self._ours.poll(_SECONDS)
            well, value = self._ours.recv() if answered else (False, f"no answer for {_SECONDS:.0f} seconds")
        except EOFError:
            well, value = False, "it has ended"
        if not well:
            raise CommandError(f"a process of the benchmark failed: {value}")
        return value

    def call(self, name: str, *arguments: Any) -> Any:
        self.begin(name, *arguments)
        return self.result()

    def close(self) -> None:
        self._ours.close()
        self._process.join(10)
        self._process.kill()
        self._process.join()


def _serve(connection: Any, make: Callable[..., Any], arguments: Sequence[Any]) -> None:
    try:
        with make(*arguments) as made:
            connection.send((True, None))
            while True:
                name, given = connection.recv()
                connection.send((True, getattr(made, name)(*given)))
    except EOFError:
        pass
    except Exception:  # noqa: BLE001  # the other process raises it
        connection.send((False, traceback.format_exc()[-1500:]))


def wait_until(start: float) -> None:
    """Until a time that other processes wait for, too."""
    time.sleep(max(0.0, start - time.monotonic() - 0.002))
    while time.monotonic() < start:
        pass


# the owner ------------------------------------------------------------------------------------------------------------


class Owner(Undoing):
    """The owner of a pool, as `kvoffload pool serve` makes it, and of a table of so many keys, a quarter full."""

    def __init__(self, path: str, nbytes: int, keys: int) -> None:
        with ExitStack() as undo:
            undo.enter_context(PoolOwner(path, nbytes=nbytes, busy_poll=BUSY_POLL_SECONDS))
            self._places = 4 << (keys - 1).bit_length()
            self._table = undo.enter_context(closing(SharedTable(self._places)))
            self._table.put(keys_of(0, 0, keys), range(keys))
            self._undo = undo.pop_all()

    def table(self) -> tuple[str, int]:
        """A file that other processes open, and its places."""
        return f"/proc/{os.getpid()}/fd/{self._table.descriptor}", self._places

    def upkeep(self, repeats: int) -> tuple[float, float]:
        """Microseconds that a stored and an evicted key takes in the table, in requests of 32 keys."""
        seconds: list[list[float]] = [[], []]
        for number in range(repeats):
            keys = keys_of(1, 32 * number, 32)
            times = [time.perf_counter()]
            self._table.put(keys, range(32))
            times.append(time.perf_counter())
            self._table.remove(keys)
            times.append(time.perf_counter())
            for which in range(2):
                seconds[which].append((times[which + 1] - times[which]) / 32 * 1e6)
        return float(np.median(seconds[0])), float(np.median(seconds[1]))


# looking keys up ------------------------------------------------------------------------------------------------------


class Asker(Undoing):
    """A member without an engine. `keys` keys are in the pool, the table and an index of its own."""

    def __init__(self, path: str, table: tuple[str, int], keys: int, fill: bool) -> None:
        with ExitStack() as undo:
            device = undo.enter_context(open_device(backend=SimulatedDriver()))
            layout = KVLayout([device.allocate_blocks(2, planes=1, block_bytes=ENTRY_BYTES)], **_DESCRIBED)
            pool = undo.enter_context(SharedPool.attach(path, layout, **_JOINED))
            pooled = undo.enter_context(CacheIndex(pool))
            indexes = [pooled] * fill
            self._lookups: dict[str, Callable[[Sequence[bytes]], int]] = {POOL: pooled.lookup}
            if fill:
                indexes.append(CacheIndex(keys))
                self._lookups[OWN] = indexes[-1].lookup
                descriptor = os.open(table[0], os.O_RDONLY)
                self._lookups[TABLE] = undo.enter_context(closing(SharedTable(table[1], descriptor))).lookup
            for index in indexes:
                for start in range(0, keys, 512):
                    index.reserve(keys_of(0, start, min(512, keys - start)), all_or_nothing=True).commit()
            self._keys, self._undo = keys, undo.pop_all()

    def look_up(self, how: str, count: int, repeats: int) -> tuple[list[float], int]:
        """Microseconds of look-ups of keys that are there, and how many of the answers were wrong."""
        lookup, random = self._lookups[how], np.random.default_rng(count)
        missing, found, wrong = keys_of(2, 0, 1), list[float](), 0
        for number in range(repeats + 20):
            keys = keys_of(0, int(random.integers(self._keys - count + 1)), count)
            right = count if number % 8 else count - 1
            keys[right:] = missing[: count - right]  # now and then the last one is missing
            begin = time.perf_counter()
            hits = lookup(keys)
            found.append((time.perf_counter() - begin) * 1e6)
            wrong += hits != right
        return found[20:], wrong

    def look_up_for(self, count: int, start: float, seconds: float) -> tuple[list[float], int]:
        """The same from a moment on, for so long, through the pool."""
        self.look_up(POOL, count, 0)
        wait_until(start)
        found, wrong = list[float](), 0
        while time.monotonic() < start + seconds:
            some, wrongs = self.look_up(POOL, count, 30)
            found += some
            wrong += wrongs
        return found, wrong


# moving blocks --------------------------------------------------------------------------------------------------------


class Moves(NamedTuple):
    """What a member moves: in a series `transfers` of `blocks` blocks of `planes` planes."""

    planes: int
    block_bytes: int
    blocks: int
    transfers: int
    calls: int  # that are timed, of each number of blocks

    @property
    def key_bytes(self) -> int:
        return self.planes * self.block_bytes

    @property
    def slots(self) -> int:
        """That a series takes."""
        return self.blocks * self.transfers


class Mover(Undoing):
    """A member with an engine over the pool, and another one over a pool of its own; both over the same blocks.

    The first half of the blocks is stored, the second half is loaded into.
    """

    def __init__(self, path: str, number: int, device: int | None, moves: Moves) -> None:
        self._number, self._moves = number, moves
        with ExitStack() as undo:
            backend: Any = SimulatedDriver() if device is None else "cuda"
            opened: Device = undo.enter_context(open_device(device or 0, backend=backend))
            planes = opened.allocate_blocks(2 * moves.blocks, planes=moves.planes, block_bytes=moves.block_bytes)
            self._memory = cast(DeviceBuffer, planes[0].owner)
            layout = KVLayout([planes], **_DESCRIBED)
            pool = undo.enter_context(SharedPool.attach(path, layout, **_JOINED))
            shared = undo.enter_context(OffloadEngine(layout, device=opened, host_memory=pool.host_memory))
            own = undo.enter_context(OffloadEngine(layout, device=opened, num_slots=moves.slots))
            self._contents: dict[int, UInt8Array] = {}
            self._caches = {OWN: BlockCache(own), POOL: BlockCache(shared, pool=pool)}
            self._memory.copy_from(self._content(number).reshape(-1))
            self._undo = undo.pop_all()

    def _content(self, number: int) -> UInt8Array:
        """Of the blocks that the member of this number stores."""
        if number not in self._contents:
            shape = (self._moves.blocks, self._moves.key_bytes)
            self._contents[number] = np.random.default_rng(number).integers(0, 256, shape, np.uint8)
        return self._contents[number]

    def poison(self) -> None:
        half = self._moves.blocks * self._moves.key_bytes
        self._memory.copy_from(np.full(half, 0xA5, np.uint8), offset=half)

    def wrong(self, number: int, count: int) -> int:
        """Of the loaded blocks that the member of this number has stored, those whose bytes are not its own."""
        found = self._memory.to_numpy().reshape(2, self._moves.blocks, self._moves.key_bytes)[1, :count]
        return int((found != self._content(number)[:count]).any(axis=1).sum())

    # bandwidth ----------------------------------------------------------------------------------------------------

    def series(self, how: str, direction: str, number: int, start: float) -> tuple[float, float, int]:
        """Store, or load, all keys of a member from a moment on. Returns the times of beginning and end, and the keys
        that were moved.
        """
        cache, moves = self._caches[how], self._moves
        jobs, keys = list[CacheJob](), [keys_of(number, at, moves.blocks) for at in range(0, moves.slots, moves.blocks)]
        wait_until(start)
        begin = time.monotonic()
        for each in keys:
            jobs.append(self._submit(cache, direction, each))
        for job in jobs:
            job.wait()
        end = time.monotonic()
        cache.lookup(keys[-1])  # the owner has executed what came before, so the other process finds the keys
        return begin, end, sum(len(job.keys) for job in jobs)

    def _submit(self, cache: BlockCache[Any], direction: str, keys: Sequence[bytes]) -> CacheJob:
        if direction == STORE:
            return cache.store(keys, range(len(keys)), after=NO_WAIT, all_or_nothing=True)
        return cache.load(keys, range(self._moves.blocks, self._moves.blocks + len(keys)), after=NO_WAIT)

    def remove(self, how: str) -> None:
        self._caches[how].remove(keys_of(self._number, 0, self._moves.slots))

    def hits(self, number: int) -> int:
        """In the pool, of the keys of a member."""
        return self._caches[POOL].lookup(keys_of(number, 0, self._moves.slots))

    # calls --------------------------------------------------------------------------------------------------------

    def calls(self, blocks: int) -> tuple[dict[str, dict[str, tuple[float, float]]], int]:
        """By pool and direction, median microseconds of a call until it returns, and until its end is seen; and how
        many loaded blocks were wrong.
        """
        times: dict[tuple[str, str], list[tuple[float, float]]] = {}
        wrong, warm = 0, 3
        for number in range(warm + self._moves.calls):
            keys, last = keys_of(self._number, 0, blocks), number == warm + self._moves.calls - 1
            for how in (OWN, POOL) if number % 2 else (POOL, OWN):
                for direction in (STORE, LOAD):
                    if last and direction == LOAD:
                        self.poison()
                    begin = time.perf_counter()
                    job = self._submit(self._caches[how], direction, keys)
                    called = time.perf_counter()
                    while not job.done:
                        pass
                    ended = time.perf_counter()
                    job.wait()
                    if number >= warm:
                        found = ((called - begin) * 1e6, (ended - begin) * 1e6)
                        times.setdefault((how, direction), []).append(found)
                wrong += self.wrong(self._number, blocks) if last else 0
                self.remove(how)
        medians: dict[str, dict[str, tuple[float, float]]] = {OWN: {}, POOL: {}}
        for (how, direction), each in times.items():
            called_us, ended_us = np.median(each, axis=0).tolist()
            medians[how][direction] = called_us, ended_us
        return medians, wrong

    def close(self) -> None:
        for cache in self._caches.values():
            cache.close()
        self._undo.close()
