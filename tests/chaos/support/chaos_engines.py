"""The engines of `chaos_pool.py`: each stores, loads, fetches, reserves, leases and removes keys at random, and hints.

It compares every block that it loads with what its key stands for.
"""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from chaos_tiers import POISON
from haunting import Ghosts, Interrupts, unheard

import kvoffload
from kvoffload import (
    NO_WAIT,
    BlockCache,
    CapabilityError,
    CapacityError,
    KVLayout,
    KVOffloadError,
    MissingKeyError,
    OffloadEngine,
)
from kvoffload.pool import SharedPool, watching
from kvoffload.pool import owner as pool_owner
from kvoffload.pool.region import meaning_of

PLANES, TARGETS = 2, 24
HUNG_SECONDS = 25.0  # that an engine may be in one call
ROOM_SECONDS = 20.0  # until there is room for an engine's region, and nobody uses the file of a tier of it any more
LONGEST = 12  # keys of a call
TENANTS = ("", "few")  # the second one has a quota
SESSIONS = "abcdefghijkl"  # so many that the latest keys of most are evicted


class State(IntEnum):
    """What an engine is doing, for the counts of kills by state."""

    STARTING = 0
    ATTACHING = 1
    STORING = 2
    WAITING = 3  # for transfers of its own
    LOADING = 4
    FETCHING = 5
    RESERVING = 6  # and filling, before the commit
    LEASING = 7
    REMOVING = 8
    ASKING = 9
    FORKING = 10
    CLOSING = 11
    ENDED = 12


COUNTED = (
    "calls", "stored", "loaded", "fetched", "foreign", "declined", "missed", "removed", "hinted", "forks",
    "interrupts", "finalizers",
)  # fmt: skip
TIMES, ORDERS = ("longest", "since"), ("state", "stop", "storms")
WORD = np.dtype([(name, "<f8") for name in TIMES] + [(name, "<i8") for name in ORDERS + COUNTED])
STORM = [10, 0, 6, 0, 0, 0, 84, 0, 0, 0]  # chances of calls just before an owner closes: its tiers get much to do
CHILD_SECONDS = 0.3  # that a forked child lives at most


@dataclass(frozen=True)
class Plan:
    """A run.

    Attributes:
        kills: how many, of engines and owners together.
        engines: processes of engines at the same time.
        capacity: keys of the pool.
        gpu: the number of a GPU; -1: simulated devices.
        row_bytes: of a block in each plane.
        audit: after so many kills.
        seconds: begin nothing after so many.
        haunted: signals interrupt calls of engines, and finalizers call the cache in any thread.
        closes: most owners close, once members have used them for a while, and few processes are killed. Engines find
            the next owner sooner than they would.
    """

    kills: int
    seed: int
    engines: int = 3
    capacity: int = 40
    universe: int = 96
    gpu: int = -1
    row_bytes: int = 2048
    audit: int = 25
    seconds: float = 600.0
    closes: bool = False
    haunted: bool = False

    @property
    def region_bytes(self) -> int:
        """Of a region with exactly `capacity` entries."""
        return self.capacity * PLANES * self.row_bytes + 4096 + -(-self.capacity * 128 // 4096) * 4096

    @property
    def retry_seconds(self) -> float:
        return 0.05 if self.closes else watching.RETRY_SECONDS

    @property
    def grace_seconds(self) -> float:
        return 0.4 if self.closes else pool_owner.GRACE_SECONDS

    @property
    def other(self) -> Plan:
        """For engines with larger blocks, whose region takes the room of the one with smaller blocks."""
        row_bytes = 2 * self.row_bytes
        room = meaning_of(b"", "", PLANES * row_bytes, nbytes=self.region_bytes)
        return replace(self, row_bytes=row_bytes, capacity=room.capacity)


def layout_of(planes: list[kvoffload.Plane]) -> KVLayout:
    return KVLayout([planes], dtype="uint8", tokens_per_block=4, block_axes=("tokens", "x"))


def key_of(number: int) -> bytes:
    return b"%032d" % number


def contents(plan: Plan) -> npt.NDArray[np.uint8]:
    """(keys, planes, bytes): what each key stands for."""
    return np.random.default_rng(plan.seed).integers(0, 256, (plan.universe, PLANES, plan.row_bytes), dtype=np.uint8)


def attached(path: str, layout: KVLayout, tenant: str = "") -> SharedPool:
    """Once the region with the other layout has made room, and the owner has tiers: it may have none today, or another
    one that hangs still has the file.
    """
    end = time.monotonic() + ROOM_SECONDS
    while True:
        try:
            return SharedPool.attach(path, layout, identity="chaos", tenant=tenant, timeout=60.0)
        except (CapacityError, CapabilityError):
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


# an engine ------------------------------------------------------------------------------------------------------------


class Engine:
    """The process of an engine: random calls until it is killed or told to end."""

    def __init__(self, plan: Plan, path: str, word: Any, seed: int) -> None:
        self.plan, self.word, self.rng, self.path = plan, word, random.Random(seed), path
        self.expected = contents(plan)
        watching.RETRY_SECONDS = plan.retry_seconds
        self.mine = set[int]()
        self.counts, self.wrong = Counter[str](), list[str]()
        self.interrupts = Interrupts(seed, self.counts) if plan.haunted else None
        self.ghosts = Ghosts(seed, self.counts, self.wrong) if plan.haunted else None
        unheard(self.wrong)

    def enter(self, state: State) -> None:
        now = time.monotonic()
        if self.word["state"] > State.ATTACHING:
            self.word["longest"] = max(float(self.word["longest"]), now - float(self.word["since"]))
        self.word["since"] = now
        self.word["state"] = state
        self.word["calls"] += 1

    def run(self) -> None:
        plan = self.plan
        backend: Any = {"backend": "simulated"} if plan.gpu < 0 else {"backend": "cuda"}
        with kvoffload.open_device(max(0, plan.gpu), **backend) as device:
            blocks = plan.universe + TARGETS
            planes = device.allocate_planes(PLANES, block_bytes=plan.row_bytes, num_blocks=blocks)
            self.buffer = buffer = cast(kvoffload.DeviceBuffer, planes[0].owner)
            self.starts = [plane.address - buffer.address for plane in planes]
            self.fill()
            layout = layout_of(planes)
            self.enter(State.ATTACHING)
            with attached(self.path, layout, self.rng.choice(TENANTS)) as pool:
                memory = pool.host_memory
                with OffloadEngine(layout, device=device, host_memory=memory, staging_bytes=0) as engine:
                    self.cache = BlockCache(engine, pool=pool)
                    self.engine = engine
                    if self.ghosts is not None:
                        self.ghosts.calls = self.haunted()
                    while not self.word["stop"]:
                        self.step()
                    self.enter(State.CLOSING)
                    engine.drain(10.0)
                    self.cache.check()
                del memory
            self.enter(State.ENDED)

    def fill(self) -> None:
        image = np.full(self.buffer.nbytes, POISON, np.uint8)
        for number, start in enumerate(self.starts):
            flat = self.expected[:, number].reshape(-1)
            image[start : start + flat.nbytes] = flat
        self.buffer.copy_from(image)

    def step(self) -> None:
        kinds = ("store", "load", "fetch", "reserve", "lease", "ask", "hint", "remove", "fork", "pause")
        kind = self.rng.choices(kinds, STORM if self.word["storms"] else [24, 16, 24, 8, 6, 6, 14, 2, 1, 3])[0]
        if self.interrupts is None or self.ghosts is None or kind == "fork":
            getattr(self, kind)()
        elif self.rng.random() < 0.7:
            self.ghosts.during(getattr(self, kind))
        elif self.interrupts.during(getattr(self, kind)):
            self.recover()
        for name in ("interrupts", "finalizers"):
            self.word[name] += self.counts.pop(name, 0)
        assert not self.wrong, self.wrong

    def recover(self) -> None:
        """Once nothing uses the blocks any more, as docs/how/interrupts.md says, they are used for something else."""
        while not self.cache.drain(1.0):
            self.enter(State.WAITING)
        self.engine.drain(10.0)
        self.buffer.copy_from(np.full(self.buffer.nbytes, POISON, np.uint8))
        time.sleep(self.rng.random() * 0.02)
        image = self.buffer.to_numpy()
        assert (image == POISON).all(), f"{(image != POISON).sum()} bytes were written after `drain`"
        self.fill()

    def haunted(self) -> list[Callable[[], object]]:
        """What finalizers call: a key of their own, where it changes something."""
        cache, keys, ghost = self.cache, list(map(key_of, range(4))), [b"ghost"]
        return [
            partial(cache.lookup, keys), partial(cache.status, keys), cache.statistics, partial(cache.drain, 0.01),
            partial(cache.remove, ghost), partial(cache.touch, keys), partial(self.engine.drain, 0.01), cache.check,
            partial(cache.hint, "prefetch", session="a"), lambda: cache.open_request(session="a").end(),
            lambda: cache.acquire(keys[:1]).release(), lambda: cache.reserve(ghost).abort(), partial(repr, cache),
        ]  # fmt: skip

    def pause(self) -> None:
        time.sleep(self.rng.random() * 0.01)

    def some(self) -> list[int]:
        """Neighbours, as requests with a common prefix have them."""
        start, count = self.rng.randrange(self.plan.universe), self.rng.randint(1, LONGEST)
        return [(start + each) % self.plan.universe for each in range(count)]

    def targets(self, count: int) -> list[int]:
        return [self.plan.universe + each for each in self.rng.sample(range(TARGETS), count)]

    def poison(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            for start in self.starts:
                row = np.full(self.plan.row_bytes, POISON, np.uint8)
                self.buffer.copy_from(row, offset=start + block * self.plan.row_bytes)

    def compare(self, numbers: Sequence[int], blocks: Sequence[int], what: str) -> None:
        image = self.buffer.to_numpy()
        for number, block in zip(numbers, blocks, strict=True):
            for plane, start in enumerate(self.starts):
                found = image[start + block * self.plan.row_bytes :][: self.plan.row_bytes]
                if not np.array_equal(found, self.expected[number, plane]):
                    raise AssertionError(f"{what}: key {number} has other bytes: {found[:8].tolist()} ...")

    def store(self) -> None:
        numbers = self.some()
        self.enter(State.STORING)
        keep = self.rng.random() < 0.5
        store = self.cache.keep if keep else self.cache.store
        job = store(list(map(key_of, numbers)), numbers, after=NO_WAIT)
        self.word["stored"] += len(job.keys)
        self.word["declined"] += not job.keys
        self.mine.update(map(int, job.keys))
        if self.rng.random() < 0.3:  # a load behind it
            self.enter(State.LOADING)
            targets = self.targets(len(job.keys))
            self.poison(targets)
            with suppress(MissingKeyError):
                behind = self.cache.load(list(job.keys), targets, after=NO_WAIT, pending=True)
                self.enter(State.WAITING)
                behind.wait(10.0)
                self.compare(list(map(int, job.keys)), targets, "load of pending keys")
        if self.rng.random() < 0.6:
            self.enter(State.WAITING)
            job.wait(10.0)

    def load(self) -> None:
        numbers = self.some()
        keys = list(map(key_of, numbers))
        self.enter(State.ASKING)
        hits = self.cache.lookup(keys)
        targets = self.targets(hits)
        self.poison(targets)
        self.enter(State.LOADING)
        try:
            job = self.cache.load(keys[:hits], targets, after=NO_WAIT)
        except MissingKeyError:
            self.word["missed"] += 1
            return
        self.enter(State.WAITING)
        job.wait(10.0)
        self.compare(numbers[:hits], targets, "load")
        self.word["loaded"] += hits
        self.word["foreign"] += sum(each not in self.mine for each in numbers[:hits])

    def fetch(self) -> None:
        numbers = self.some()
        targets = self.targets(len(numbers))
        self.poison(targets)
        self.enter(State.FETCHING)
        wait = self.rng.choice((0.01, 0.2, 1.0))
        with self.cache.open_request(session=self.rng.choice((None, None, None, *SESSIONS))) as request:
            job = self.cache.fetch(list(map(key_of, numbers)), targets, after=NO_WAIT, deadline=wait, request=request)
            hits = job.hits
            self.enter(State.WAITING)
            loaded = job.wait(10.0)
        assert loaded <= hits or not hits
        self.compare(numbers[:loaded], targets[:loaded], "fetch")
        self.word["fetched"] += loaded
        self.word["foreign"] += sum(each not in self.mine for each in numbers[:loaded])

    def reserve(self) -> None:
        """Fill entries by transfers of the engine's, or by hand."""
        numbers = self.some()
        self.enter(State.RESERVING)
        reservation = self.cache.reserve(list(map(key_of, numbers)))
        new = list(map(int, reservation.keys))
        if self.rng.random() < 0.3:
            time.sleep(self.rng.random() * 0.005)
        if self.rng.random() < 0.15:
            reservation.abort()
        elif self.rng.random() < 0.1:
            del reservation  # a later call aborts it
        elif self.rng.random() < 0.5 and new:
            job = self.engine.store(new, reservation.slots(), after=NO_WAIT)
            reservation.commit(job)
        else:
            for number, slot in zip(new, reservation.slots(), strict=True):
                self.engine.slots[slot, : PLANES * self.plan.row_bytes] = self.expected[number].reshape(-1)
            reservation.commit()
        self.mine.update(new)

    def lease(self) -> None:
        numbers = self.some()
        keys = list(map(key_of, numbers))
        self.enter(State.LEASING)
        hits = self.cache.lookup(keys)
        try:
            lease = self.cache.acquire(keys[:hits])
        except MissingKeyError:
            self.word["missed"] += 1
            return
        end = time.monotonic() + self.rng.random() * 0.01
        while True:  # they must stay as they are
            for number, slot in zip(numbers, lease.slots(), strict=False):
                held = self.engine.slots[slot, : PLANES * self.plan.row_bytes]
                if not np.array_equal(held, self.expected[number].reshape(-1)):
                    raise AssertionError(f"lease: key {number} has other bytes: {held[:8].tolist()} ...")
            if time.monotonic() > end:
                break
        if self.rng.random() < 0.8:
            lease.release()

    def ask(self) -> None:
        self.enter(State.ASKING)
        keys = list(map(key_of, self.some()))
        self.cache.status(keys)
        self.cache.statistics()
        self.cache.touch(keys)

    def hint(self) -> None:
        """Have the owner move keys of a session between entries and tiers."""
        self.enter(State.ASKING)
        action: Any = self.rng.choice(("retain", "release", "demote", "prefetch", "prefetch", "prefetch"))
        ttl = self.rng.choice((None, 0.2, 1.0))  # of a prefetch: a second tier is asked after half of it
        answer = self.cache.hint(action, session=self.rng.choice(SESSIONS), ttl=ttl)
        self.word["hinted"] += answer.outcome != "declined"

    def remove(self) -> None:
        self.enter(State.REMOVING)
        keys = list(map(key_of, self.some()))[:3]
        self.word["removed"] += self.cache.remove(keys, below=self.rng.random() < 0.7)

    def fork(self) -> None:
        """A child that holds all descriptors for a while. It must be refused, and disturb nothing."""
        self.enter(State.FORKING)
        self.word["forks"] += 1
        if self.plan.gpu >= 0 and self.rng.random() < 0.5:
            return
        wait = self.rng.random() * CHILD_SECONDS
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            with suppress(BaseException):
                with suppress(KVOffloadError):
                    self.cache.lookup([key_of(0)])
                time.sleep(wait)
            os._exit(0)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that no child stays a zombie


def run_engine(plan: Plan, path: str, word: Any, seed: int, errors: Path) -> None:
    """In a forked child: never returns. SIGABRT has it say where it hangs."""
    status = 1
    faulthandler.enable(open(f"{errors}-stacks", "w"))  # noqa: SIM115  # to the end
    try:
        Engine(plan, path, word, seed).run()
        status = 0
    except BaseException:
        errors.write_text(f"seed {seed}: {traceback.format_exc()}")
    finally:
        os._exit(status)
