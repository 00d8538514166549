"""The processes of `fuzz_pool.py`: engines and an owner that do what they are told, one command after another.

Each is forked from a process without threads. A command is a name and arguments; the answer is what the method of this
name returns. An engine answers for bytes: it fills what it stores with bytes that follow from key and version, poisons
what it loads into, and says which version it has found there, or -1.

Keys are numbers: those of weights number `i` are from `i * KEYS` on. For the cache they are the same keys.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from chaos_tiers import RoughDisk, Weather
from pooling import (
    PLANES,
    POISON,
    ROW_BYTES,
    SECONDS,
    SOURCES,
    TARGETS,
    Member,
    eventually,
    held,
    key_of,
    region_bytes,
)

from kvoffload import NO_WAIT, MissingKeyError, Status, Tenant
from kvoffload.cache.weights import tag_of
from kvoffload.pool import PoolOwner, owner, watching
from kvoffload.tiers import MemoryTier, Tier

WORD = np.dtype("<i8")
KEYS = 1 << 12  # more than any weights have
RETRY_SECONDS = 0.02  # of engines without an owner: a second takes too long
POLICIES: dict[str, dict[str, Any]] = {
    "lru": {"policy": "lru"},
    "prefix": {},
    "quota": {"policy": "s3fifo", "tenants": {"": Tenant(max_blocks=9)}},
    "tier": {"tiers": lambda *_: [MemoryTier(1 << 20)], "write": "through"},
    "disk": {"policy": "lru", "tenants": {"": Tenant(max_blocks=11)}, "write": "through"},  # a slow one
}


def keys_of(numbers: Sequence[int]) -> list[bytes]:
    """As the cache is told them."""
    return [key_of(number % KEYS) for number in numbers]


def weights_of(number: int) -> str:
    """The name of the weights that a key is of."""
    return f"step {number // KEYS}" if number >= KEYS else ""


def bytes_of(number: int, version: int) -> npt.NDArray[np.uint8]:
    """(planes, bytes): of a key after its store with this version. Each plane begins with the version and the key."""
    rows = np.random.default_rng((number, version)).integers(0, 256, (PLANES, ROW_BYTES), dtype=np.uint8)
    rows[:, : 2 * WORD.itemsize] = np.array([version, number], WORD).view(np.uint8)
    return rows


def version_of(number: int, rows: npt.NDArray[np.uint8]) -> int:
    """The version of the key whose bytes these are; -1: of none."""
    version = int(rows.reshape(-1)[: WORD.itemsize].view(WORD)[0])
    known = 0 <= version < 1 << 40
    return version if known and np.array_equal(rows.reshape(PLANES, -1), bytes_of(number, version)) else -1


class EngineProcess:
    """An engine over a shared pool.

    Args:
        settles: whether each command ends when the owner has heard all that follows from it.
    """

    def __init__(self, path: str, seed: int, *, settles: bool) -> None:
        watching.RETRY_SECONDS = RETRY_SECONDS
        self.rng, self.settles = random.Random(seed), settles
        self.stack = ExitStack()
        self.one = Member(path, self.stack, timeout=60.0)
        self.sources = itertools.cycle(range(SOURCES))
        self.busy: dict[int, Any] = {}  # blocks, and jobs that use them
        self.jobs: list[Any] = []  # that nobody has waited for
        self.behind: list[tuple[Sequence[int], list[int], Any]] = []  # loads that nobody has waited for
        self.handles: dict[int, Any] = {}
        self.gate: ExitStack | None = None
        self.stream: Any = None
        self.gated = False  # a store waits for the stream
        self.generation = 0
        self.first = 0  # key of the weights

    def after(self) -> None:
        if self.settles:
            self.one.cache.status([])

    # pieces -------------------------------------------------------------------------------------------------------

    def free(self, block: int) -> bool:
        unread = any(block in targets for _, targets, _ in self.behind)
        return not unread and (block not in self.busy or self.busy[block].done)

    def rows_of(self, block: int) -> list[int]:
        base = self.one.buffer.address
        return [plane.address - base + block * ROW_BYTES for plane in self.one.planes]

    def filled(self, numbers: Sequence[int], versions: Sequence[int]) -> list[int]:
        """Blocks with the bytes of these keys."""
        blocks = [next(block for block in self.sources if self.free(block)) for _ in numbers]
        for number, version, block in zip(numbers, versions, blocks, strict=True):
            for start, row in zip(self.rows_of(block), bytes_of(number, version), strict=True):
                self.one.buffer.copy_from(row, offset=start)
        return blocks

    def poisoned(self, count: int) -> list[int]:
        """Blocks to load into."""
        free = [block for block in range(SOURCES, SOURCES + TARGETS) if self.free(block)]
        blocks = self.rng.sample(free, count)
        self.one.poison(blocks)
        return blocks

    def versions(self, numbers: Sequence[int], blocks: Sequence[int]) -> list[int]:
        image = self.one.buffer.to_numpy()
        return [
            version_of(number, np.array([image[start : start + ROW_BYTES] for start in self.rows_of(block)]))
            for number, block in zip(numbers, blocks, strict=False)
        ]

    def keep_job(self, job: Any, blocks: Sequence[int]) -> None:
        self.jobs.append(job)
        self.busy.update(dict.fromkeys(blocks, job))

    # commands -----------------------------------------------------------------------------------------------------

    def store(
        self,
        numbers: Sequence[int],
        versions: Sequence[int],
        *,
        keep: bool = False,
        request: int | None = None,
        gated: bool = False,
        wait: bool = True,
        then_load: bool = False,
    ) -> dict[str, Any]:
        """The keys accepted. With `then_load` also the versions that a load behind it has found; None: refused;
        "later": not waited for; "none": there was none, since it would not follow this store.

        Args:
            gated: it does not end before `finish`, and so nothing that is stored later does.
        """
        blocks = self.filled(numbers, versions)
        if gated:
            self.hold()
        call = self.one.cache.keep if keep else self.one.cache.store
        opened = None if request is None else self.handles.pop(request) if keep else self.handles[request]
        job = call(keys_of(numbers), blocks, after=self.stream if gated else NO_WAIT, request=opened)
        self.keep_job(job, blocks)
        self.gated |= gated and bool(job.keys)
        if gated and not self.gated and not self.behind:
            self.finish_gate()
        found: Any = None
        if then_load and not wait and not job.keys:
            found = "none"
        elif then_load:
            targets = self.poisoned(len(numbers))
            try:
                load = self.one.cache.load(keys_of(numbers), targets, after=NO_WAIT, pending=True)
            except MissingKeyError:
                pass
            else:
                found = "later"
                if wait:
                    load.wait(SECONDS)
                    found = self.versions(numbers, targets)
                else:
                    self.behind.append((numbers, targets, load))
        if wait:
            job.wait(SECONDS)
        return {"accepted": self.numbers(job.keys), "found": found}

    def numbers(self, keys: Sequence[bytes]) -> list[int]:
        return [self.first + int(key) for key in keys]

    def use_weights(self, first: int) -> None:
        """Those with this first key. What a fetch has begun, whose hits nobody has read, is none of theirs."""
        blocks, changes = self.poisoned(3), first != self.first
        job = self.one.cache.fetch(keys_of(range(3)), blocks, after=NO_WAIT, deadline=0.2)
        self.busy.update(dict.fromkeys(blocks, job))
        self.one.cache.use_weights(weights_of(first))
        self.first = first
        assert not (changes and job.hits), "hits of the weights before"

    def finish_loads(self) -> list[list[int]]:
        """The versions that each load has found which nobody has waited for."""
        behind, self.behind = self.behind, []
        found = []
        for numbers, targets, load in behind:
            load.wait(SECONDS)
            found.append(self.versions(numbers, targets))
        return found

    def hold(self) -> None:
        """Have a stream that stands still until `finish`."""
        if self.gate is None:
            self.gate = ExitStack()
            self.stream, _ = self.gate.enter_context(held(self.one))

    def finish_gate(self) -> None:
        gate, self.gate, self.stream, self.gated = self.gate, None, None, False
        if gate is not None:
            gate.close()

    def finish(self) -> list[list[int]]:
        """End all that is under way; see `finish_loads`."""
        self.finish_gate()
        for job in self.jobs:
            job.wait(SECONDS)
        self.jobs.clear()
        return self.finish_loads()

    def look_up(self, numbers: Sequence[int]) -> int:
        return int(self.one.cache.lookup(keys_of(numbers)))

    def load(self, numbers: Sequence[int], *, request: int | None = None) -> list[int] | None:
        opened = None if request is None else self.handles[request]
        blocks = self.poisoned(len(numbers))
        try:
            job = self.one.cache.load(keys_of(numbers), blocks, after=NO_WAIT, request=opened)
        except MissingKeyError:
            return None
        job.wait(SECONDS)
        return self.versions(numbers, blocks)

    def fetch(self, numbers: Sequence[int], *, request: int | None = None) -> list[int]:
        opened = None if request is None else self.handles[request]
        blocks = self.poisoned(len(numbers))
        job = self.one.cache.fetch(keys_of(numbers), blocks, after=NO_WAIT, deadline=0.2, request=opened)
        hits = job.wait(SECONDS)
        return self.versions(numbers[:hits], blocks)

    def begin_fetch(self, numbers: Sequence[int]) -> int:
        """The hits, which are loaded at `finish`, see there."""
        blocks = self.poisoned(len(numbers))
        self.hold()
        job = self.one.cache.fetch(keys_of(numbers), blocks, after=self.stream, deadline=0.2)
        hits = int(job.hits)
        if hits:
            self.behind.append((numbers[:hits], blocks[:hits], job))
            self.busy.update(dict.fromkeys(blocks, job))
        elif not self.gated and not self.behind:
            self.finish_gate()
        return hits

    def abandon(self, numbers: Sequence[int]) -> None:
        """A load of what is there, whose job nobody looks at."""
        blocks = self.poisoned(len(numbers))
        job = self.one.cache.fetch(keys_of(numbers), blocks, after=NO_WAIT, deadline=0.2)
        self.busy.update(dict.fromkeys(blocks, job))

    def reserve(self, handle: int, numbers: Sequence[int], versions: Sequence[int]) -> list[int]:
        """The keys reserved, whose entries have their bytes now."""
        reservation = self.handles[handle] = self.one.cache.reserve(keys_of(numbers))
        accepted, version_by_number = self.numbers(reservation.keys), dict(zip(numbers, versions, strict=True))
        for number, slot in zip(accepted, reservation.slots(), strict=True):
            self.one.row(slot)[:] = bytes_of(number, version_by_number[number]).reshape(-1)
        return accepted

    def commit(self, handle: int, copy: tuple[Sequence[int], Sequence[int]] | None = None) -> None:
        """With `copy`, keys and versions, by a transfer of the engine's, that fills the entries again."""
        reservation = self.handles.pop(handle)
        if copy is None or not reservation.keys:
            reservation.commit()
            return
        blocks = self.filled(*copy)
        job = self.one.engine.store(blocks, reservation.slots(), after=NO_WAIT)
        reservation.commit(job)
        job.wait(SECONDS)

    def abort(self, handle: int) -> None:
        self.handles.pop(handle).abort()

    def drop(self, handle: int) -> None:
        """A reservation or a lease becomes garbage."""
        del self.handles[handle]

    def lease(self, handle: int, numbers: Sequence[int]) -> list[int] | None:
        try:
            self.handles[handle] = self.one.cache.acquire(keys_of(numbers))
        except MissingKeyError:
            return None
        return self.leased(handle, numbers)

    def leased(self, handle: int, numbers: Sequence[int]) -> list[int]:
        slots = self.handles[handle].slots()
        return [version_of(number, self.one.row(slot)) for number, slot in zip(numbers, slots, strict=True)]

    def release(self, handle: int, numbers: Sequence[int]) -> list[int]:
        found = self.leased(handle, numbers)
        self.handles.pop(handle).release()
        return found

    def open_request(self, handle: int, session: str | None) -> None:
        self.handles[handle] = self.one.cache.open_request(session=session)

    def end_request(self, handle: int) -> None:
        self.handles.pop(handle).end()

    def haunt(self, handle: int, path: str) -> None:
        """When this process has been killed, a child writes into what is reserved here, as a GPU might, until there is
        no such file.
        """
        rows, parent = [self.one.row(slot) for slot in self.handles[handle].slots()], os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # there are threads
            child = os.fork()
        if child == 0:
            try:
                end = time.monotonic() + 60.0
                while os.path.exists(path) and time.monotonic() < end:
                    for row in rows if os.getppid() != parent else ():
                        row[:] = POISON
                    time.sleep(0.001)
            finally:
                os._exit(0)

    def touch(self, numbers: Sequence[int]) -> None:
        self.one.cache.touch(keys_of(numbers))

    def hint(self, action: Any, session: str) -> None:
        self.one.cache.hint(action, session=session)

    def remove(self, numbers: Sequence[int] | None) -> dict[str, Any]:
        """How many there were, and whether an owner has answered. None: all keys."""
        before = self.one.pool.generation
        count = self.one.cache.clear() if numbers is None else self.one.cache.remove(keys_of(numbers))
        return {"count": count, "heard": self.one.pool.connected and self.one.pool.generation == before}

    def look(self, universe: int) -> dict[str, Any]:
        """The statuses of all keys of the weights, and counts of the region."""
        places = (Status.MISS, Status.HIT, Status.PENDING)
        numbers = range(self.first, self.first + universe)
        found = self.one.cache.status(keys_of(numbers))
        statuses = {number: places.index(each) for number, each in zip(numbers, found, strict=True)}
        statistics = self.one.cache.statistics()
        names = ("resident", "pending", "pinned", "evicted")
        return {"statuses": statuses, "statistics": {name: getattr(statistics, name) for name in names}}

    def lost(self) -> None:
        """Wait until the owner is seen to have ended."""
        eventually(lambda: self.one.cache.status([]) == [] and not self.one.pool.connected, "the owner is lost")

    def joined(self) -> None:
        """Wait until an owner answers."""
        eventually(lambda: self.one.cache.status([]) == [] and self.one.pool.connected, "an owner is found")

    def check(self) -> None:
        self.one.engine.drain(SECONDS)
        self.one.cache.status([])
        self.one.cache.check()

    def leave(self) -> None:
        """Close all, whatever is still reserved or leased."""
        if self.gate is not None:
            self.finish()
        self.settles = False
        self.stack.close()


class OwnerProcess:
    """The owner of a pool with one region of so many keys."""

    def __init__(self, path: str, capacity: int, policy: str, grace: float) -> None:
        owner.GRACE_SECONDS = grace
        self.wrong = list[str]()
        options = POLICIES[policy] | ({"tiers": partial(self.disk, path)} if policy == "disk" else {})
        self.owner = PoolOwner(path, nbytes=region_bytes(capacity), **options)

    def disk(self, path: str, name: str, _: str) -> list[Tier]:
        """Its file outlives this owner. No call fails: after a removal that was answered the keys are gone."""
        made = RoughDisk(Path(path).with_name(f"tier-{name}"), nbytes=1 << 20, identity="fuzz")
        made.weather = Weather(random.Random(), self.right, self.wrong.append, fails=False)
        return [made]

    def right(self, key: bytes, row: npt.NDArray[np.uint8]) -> bool:
        """Whether a row has bytes of a key with the tag of its weights."""
        number = int(row[WORD.itemsize : 2 * WORD.itemsize].view(WORD)[0])
        return key == tag_of(weights_of(number)) + key_of(number % KEYS) and version_of(number, row) >= 0

    def after(self) -> None:
        assert not self.wrong, self.wrong

    def statistics(self) -> list[dict[str, int]]:
        return self.owner.statistics()

    def leave(self) -> None:
        self.owner.close()


def serve(connection: Connection, parent: int, make: Callable[[], EngineProcess | OwnerProcess]) -> None:
    """Make it, say so, and execute commands until "leave"."""
    try:
        process, name, answer = make(), "", None
        while name != "leave":
            connection.send(("well", answer))
            while not connection.poll(2.0):
                if os.getppid() != parent:
                    os._exit(1)
            name, arguments, options = connection.recv()
            answer = getattr(process, name)(*arguments, **options)
            process.after()
        connection.send(("well", answer))
    except BaseException:
        connection.send(("failed", traceback.format_exc()))


class Worker:
    """A process that executes commands, as this one sees it. Attributes: number: an engine's; 0 for the owner."""

    def __init__(self, number: int, make: Callable[..., EngineProcess | OwnerProcess], *arguments: Any) -> None:
        context = multiprocessing.get_context("fork")
        self.number, self.ended = number, False
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, os.getpid(), lambda: make(*arguments)), daemon=True)
        self.process.start()
        theirs.close()

    def send(self, name: str, *arguments: Any, **options: Any) -> None:
        self.connection.send((name, arguments, options))

    def answer(self, seconds: float) -> Any:
        """Raises AssertionError: it does not answer in time, has ended, or has failed."""
        if not self.connection.poll(seconds):
            raise AssertionError(f"{self} hangs")
        try:
            well, answer = self.connection.recv()
        except EOFError:
            raise AssertionError(f"{self} has ended with status {self.process.exitcode}") from None
        assert well == "well", f"{self}: {answer}"
        return answer

    def kill(self) -> None:
        self.process.kill()
        self.end()

    def end(self, seconds: float = 30.0) -> None:
        """Wait for it, and for its children."""
        self.process.join(seconds)
        try:
            while self.connection.poll(seconds):
                self.connection.recv()
        except (EOFError, OSError):
            pass
        assert self.process.exitcode is not None, f"{self} does not end"
        self.ended = True
        self.process.close()
        self.connection.close()

    def __str__(self) -> str:
        return f"engine {self.number}" if self.number else "the owner"
