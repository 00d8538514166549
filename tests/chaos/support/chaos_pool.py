"""Engines that share a pool, and its owner, are killed and stopped at random moments: `python chaos_pool.py JSON`.

Each process is a fork of this one, which has no threads and no CUDA context. Engines store, load, fetch, reserve, lease
and remove keys at random, and compare every block that they load with what its key stands for. Key `i` stands for block
`i`, whose bytes follow from the seed, so bytes of another key, and bytes that were not written yet, are wrong.

After some kills there is an audit: the engines end by themselves, then one member must be able to reserve every entry
of the pool. After others all processes are killed, and the next ones begin with an empty pool.
Prints a line of JSON: counts, and what was wrong.
"""

from __future__ import annotations

import importlib
import json
import logging
import mmap
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

import kvoffload
from kvoffload import (
    NO_WAIT,
    BlockCache,
    CacheIndex,
    CapacityError,
    KVLayout,
    KVOffloadError,
    MissingKeyError,
    OffloadEngine,
)
from kvoffload.pool import PoolOwner, SharedPool
from kvoffload.pool.owner import GRACE_SECONDS
from kvoffload.tiers import MemoryTier

PLANES, TARGETS = 2, 24
HUNG_SECONDS = 25.0  # that an engine may be in one call
AUDIT_SECONDS = 20.0  # until all entries are free after all engines have ended
POISON = 0xEE
LONGEST = 12  # keys of a call


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


WORD = np.dtype([("state", "<i8"), ("calls", "<i8"), ("stop", "<i8"), ("longest", "<f8"), ("since", "<f8"), *(
    (name, "<i8") for name in ("stored", "loaded", "fetched", "foreign", "declined", "missed", "removed", "forks")
)])  # fmt: skip
CHILD_SECONDS = 0.3  # that a forked child lives at most
COUNTED = ("calls", "stored", "loaded", "fetched", "foreign", "declined", "missed", "removed", "forks")


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
    """

    kills: int
    seed: int
    engines: int = 3
    capacity: int = 40
    universe: int = 64
    gpu: int = -1
    row_bytes: int = 2048
    audit: int = 25
    seconds: float = 600.0

    @property
    def region_bytes(self) -> int:
        """Of a region with exactly `capacity` entries."""
        return self.capacity * PLANES * self.row_bytes + 4096 + -(-self.capacity * 128 // 4096) * 4096


def layout_of(planes: list[kvoffload.Plane]) -> KVLayout:
    return KVLayout([planes], dtype="uint8", tokens_per_block=4, block_axes=("tokens", "x"))


def key_of(number: int) -> bytes:
    return b"%032d" % number


def contents(plan: Plan) -> npt.NDArray[np.uint8]:
    """(keys, planes, bytes): what each key stands for."""
    return np.random.default_rng(plan.seed).integers(0, 256, (plan.universe, PLANES, plan.row_bytes), dtype=np.uint8)


# an engine ------------------------------------------------------------------------------------------------------------


class Engine:
    """The process of an engine: random calls until it is killed or told to end."""

    def __init__(self, plan: Plan, path: str, word: Any, seed: int) -> None:
        self.plan, self.word, self.rng, self.path = plan, word, random.Random(seed), path
        self.expected = contents(plan)
        self.mine = set[int]()

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
            with SharedPool.attach(self.path, layout, identity="chaos", timeout=60.0) as pool:
                memory = pool.host_memory
                with OffloadEngine(layout, device=device, host_memory=memory, staging_bytes=0) as engine:
                    self.cache = BlockCache(engine, pool=pool)
                    self.engine = engine
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
        kinds = ("store", "load", "fetch", "reserve", "lease", "ask", "remove", "fork", "pause", "reattach")
        kind = self.rng.choices(kinds, [24, 16, 24, 8, 6, 8, 2, 1, 3, 0])[0]
        getattr(self, kind)()

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
        with self.cache.open_request() as request:
            job = self.cache.fetch(list(map(key_of, numbers)), targets, after=NO_WAIT, deadline=0.2, request=request)
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
        self.cache.hint("retain", session="a")

    def remove(self) -> None:
        self.enter(State.REMOVING)
        self.word["removed"] += self.cache.remove(list(map(key_of, self.some()))[:3])

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
    """In a forked child: never returns."""
    status = 1
    try:
        Engine(plan, path, word, seed).run()
        status = 0
    except BaseException:
        errors.write_text(f"seed {seed}: {traceback.format_exc()}")
    finally:
        os._exit(status)


def run_owner(plan: Plan, path: str, ready: Any, seed: int, errors: Path) -> None:
    """In a forked child: serves until it is killed. Some have a tier."""
    try:
        options: dict[str, Any] = {}
        if seed % 3 == 0:
            options = {"tiers": lambda *_: [MemoryTier(plan.region_bytes * 4)], "write": "through"}
        policy: Any = ("prefix", "lru", "s3fifo")[seed % 5 % 3]
        with PoolOwner(path, nbytes=plan.region_bytes, policy=policy, **options) as owner:
            while not ready["stop"]:
                ready["state"] = 1
                time.sleep(0.02)
            ready["calls"] = sum(each["pending"] + each["pinned"] for each in owner.statistics())
    except BaseException:
        errors.write_text(f"owner, seed {seed}: {traceback.format_exc()}")
        os._exit(1)
    os._exit(0)


# the one that kills ---------------------------------------------------------------------------------------------------


class Process:
    """A forked process, with the words that it shares with this one."""

    def __init__(self, run: Callable[..., None], word: Any, *arguments: Any) -> None:
        word["state"], word["stop"], word["longest"], word["since"] = 0, 0, 0.0, time.monotonic()
        self.word, self.stopped = word, False
        self.pid = os.fork()
        if self.pid == 0:
            run(*arguments)
            os._exit(1)

    def signal(self, number: int) -> None:
        self.stopped = number == signal.SIGSTOP
        os.kill(self.pid, number)

    def end(self, seconds: float) -> int | None:
        """Its exit status, as of `os.waitstatus_to_exitcode`; None: it has not ended in time."""
        end = time.monotonic() + seconds
        while True:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > end:
                return None
            time.sleep(0.002)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        os.waitpid(self.pid, 0)


class Lane:
    """A pool, and what happens to its processes."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.rng = plan, random.Random(plan.seed)
        self.counts, self.wrong = Counter[str](), list[str]()
        self.folder = Path(tempfile.mkdtemp(prefix="chaos-pool-"))
        self.path = str(self.folder / "pool")
        self._shared = mmap.mmap(-1, WORD.itemsize * (plan.engines + 1))
        self.words = np.frombuffer(self._shared, WORD)
        self.engines: list[Process] = []
        self.owner: Process | None = None
        self.longest = 0.0

    def errors(self) -> Path:
        return self.folder / f"error-{self.counts['processes']}"

    def start_owner(self) -> Process:
        self.counts["processes"] += 1
        seed = self.rng.randrange(1 << 30)
        word = self.words[self.plan.engines : self.plan.engines + 1][0]
        self.grace_until = time.monotonic() + GRACE_SECONDS + 0.5  # it may take as long to start
        return Process(run_owner, word, self.plan, self.path, word, seed, self.errors())

    def start_engine(self, number: int) -> Process:
        self.counts["processes"] += 1
        word = self.words[number : number + 1][0]
        return Process(run_engine, word, self.plan, self.path, word, self.rng.randrange(1 << 30), self.errors())

    def collect(self) -> None:
        """Take over the counts of the engines' words, and look for problems."""
        for number, process in enumerate(self.engines):
            word = self.words[number]
            for name in COUNTED:
                self.counts[name] += int(word[name])
                word[name] = 0
            self.longest = max(self.longest, float(word["longest"]))
            late = time.monotonic() - float(word["since"])
            busy = State.STARTING < word["state"] < State.ENDED
            if busy and not process.stopped and late > HUNG_SECONDS:
                self.wrong.append(f"an engine hangs in {State(int(word['state'])).name} for {late:.0f} seconds")
                os.kill(process.pid, signal.SIGKILL)
        for path in sorted(self.folder.glob("error-*")):
            if text := path.read_text():
                self.wrong.append(text[-1500:])
            path.unlink()

    def check_alive(self) -> None:
        """Processes that have ended by themselves are wrong; start new ones."""
        for number, process in enumerate(self.engines):
            status = process.end(0.0) if not process.stopped else None
            if status is not None:
                self.wrong.append(f"an engine has ended with status {status}")
                self.engines[number] = self.start_engine(number)
        if self.owner is not None and (status := self.owner.end(0.0)) is not None:
            self.wrong.append(f"the owner has ended with status {status}")
            self.owner = self.start_owner()

    def wait_for_progress(self) -> None:
        """Until each engine has made some calls, most of the time: else kills would all be in `attach`."""
        end = time.monotonic() + 6.0
        if self.rng.random() < 0.8:
            wanted = self.rng.randint(1, 60)
            while time.monotonic() < end and min(int(each) for each in self.words["calls"][:-1]) < wanted:
                time.sleep(0.002)

    def wait(self) -> None:
        longest = self.rng.choice((0.0, 0.004, 0.03, 0.03, 0.1, 0.1, 0.3, 1.3))
        time.sleep(self.rng.random() * longest)

    def kill_engine(self) -> None:
        number = self.rng.randrange(self.plan.engines)
        state = State(int(self.words[number]["state"]))
        self.engines[number].kill()
        self.counts.update({"kills": 1, "kills of engines": 1, f"in {state.name.lower()}": 1})
        if self.rng.random() < 0.3:
            self.wait()
        self.engines[number] = self.start_engine(number)

    def kill_owner(self) -> None:
        assert self.owner is not None
        self.owner.kill()
        self.counts.update({"kills": 1, "kills of owners": 1})
        self.wait()
        self.owner = self.start_owner()

    def kill_both(self) -> None:
        assert self.owner is not None
        number = self.rng.randrange(self.plan.engines)
        os.kill(self.engines[number].pid, signal.SIGKILL)
        self.owner.kill()
        self.engines[number].kill()
        self.counts.update({"kills": 2, "kills of both": 1})
        self.wait()
        self.engines[number] = self.start_engine(number)
        self.owner = self.start_owner()

    def stop(self) -> None:
        """A process stands still for a while, in which others go on or die; then it goes on, or dies, too."""
        victims = [*self.engines, self.owner]
        victim = self.rng.choice(victims)
        assert victim is not None
        victim.signal(signal.SIGSTOP)
        self.counts["stops"] += 1
        self.wait()
        if victim is not self.owner and self.rng.random() < 0.5:
            self.kill_owner()
            self.wait()
        victim.signal(signal.SIGCONT)
        victim.word["since"] = time.monotonic()

    def kill_all(self) -> None:
        """The next processes begin with an empty pool."""
        for process in [*self.engines, self.owner]:
            if process is not None:
                os.kill(process.pid, signal.SIGKILL)
        for process in [*self.engines, self.owner]:
            if process is not None:
                process.kill()
        self.counts["kills of all"] += 1

    def start_all(self) -> None:
        self.owner = self.start_owner()
        self.engines = [self.start_engine(number) for number in range(self.plan.engines)]

    def audit(self) -> None:
        """The engines end; then all entries can be had by one member."""
        assert self.owner is not None
        for process in self.engines:
            process.word["stop"] = 1
        for process in self.engines:
            status = process.end(HUNG_SECONDS)
            if status is None:
                self.wrong.append(f"an engine does not end: {State(int(process.word['state'])).name}")
                process.kill()
            elif status:
                self.wrong.append(f"an engine has ended with status {status}")
        self.collect()
        self.engines = []
        auditor = Process(audit_pool, self.words[0], self.plan, self.path, self.errors())
        if auditor.end(AUDIT_SECONDS * 2) != 0:
            with suppress(ProcessLookupError):
                os.kill(auditor.pid, signal.SIGKILL)
        wait = max(CHILD_SECONDS, self.grace_until - time.monotonic())
        time.sleep(wait)  # until then it leaves the socket to the next one: children of killed engines have their locks
        self.owner.word["stop"] = 1
        if (status := self.owner.end(HUNG_SECONDS)) != 0:
            self.wrong.append(f"the owner has ended with status {status}")
        elif self.owner.word["calls"]:
            self.wrong.append(f"{self.owner.word['calls']} keys are held when no member is left")
        self.owner = None
        left = [each.name for each in self.folder.iterdir() if not each.name.startswith("error-")]
        if left:
            self.wrong.append(f"files are left: {left}")
        self.collect()
        self.counts["audits"] += 1

    def run(self) -> None:
        end = time.monotonic() + self.plan.seconds
        self.start_all()
        while self.counts["kills"] < self.plan.kills and time.monotonic() < end and len(self.wrong) < 5:
            self.wait_for_progress()
            self.wait()
            steps = (self.kill_engine, self.kill_owner, self.kill_both, self.stop)
            before = self.counts["kills"]
            self.rng.choices(steps, [50, 25, 10, 15])[0]()
            self.check_alive()
            self.collect()
            if before // self.plan.audit < self.counts["kills"] // self.plan.audit:
                if self.rng.random() < 0.5:
                    self.audit()
                else:
                    self.kill_all()
                self.start_all()
        self.audit()
        self.counts["longest call ms"] = int(1000 * self.longest)

    def close(self) -> None:
        for process in [*self.engines, self.owner]:
            if process is not None:
                with suppress(ProcessLookupError, ChildProcessError):
                    process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def audit_pool(plan: Plan, path: str, errors: Path) -> None:
    """In a forked child: reserve every entry, once quarantines are over."""
    try:
        end = time.monotonic() + AUDIT_SECONDS
        with kvoffload.open_device(backend="simulated") as device:
            planes = device.allocate_planes(PLANES, block_bytes=plan.row_bytes, num_blocks=plan.universe + TARGETS)
            with SharedPool.attach(path, layout_of(planes), identity="chaos", timeout=AUDIT_SECONDS) as pool:
                index, found = CacheIndex(pool), -1
                assert index.capacity == plan.capacity, f"{index.capacity} entries of {plan.capacity}"
                while found < plan.capacity and time.monotonic() < end:
                    index.clear()
                    with suppress(CapacityError):
                        reservation = index.reserve([b"%064d" % each for each in range(plan.capacity)])
                        found = len(set(reservation.indices))
                        reservation.abort()
                    time.sleep(0.02)
                assert found == plan.capacity, f"{found} of {plan.capacity} entries are free: {index.statistics()}"
                index.clear()
                statistics = index.statistics()
                assert (statistics.resident, statistics.pending, statistics.pinned) == (0, 0, 0), statistics
    except BaseException:
        errors.write_text(f"audit: {traceback.format_exc()}")
        os._exit(1)
    os._exit(0)


def load_modules(plan: Plan) -> None:
    """Import here what each process would import anew."""
    with kvoffload.open_device(backend="simulated") as device:
        planes = device.allocate_planes(PLANES, block_bytes=plan.row_bytes, num_blocks=4)
        with OffloadEngine(layout_of(planes), device=device, num_slots=4, staging_bytes=0) as engine:
            cache = BlockCache(engine)
            cache.keep([key_of(1)], [0], after=NO_WAIT).wait()
            cache.fetch([key_of(1)], [1], after=NO_WAIT).wait()
    importlib.import_module("kvoffload.pool.records")
    if plan.gpu >= 0:
        importlib.import_module("cuda.bindings.driver")


def run(plan: Plan) -> tuple[Counter[str], list[str]]:
    """Counts, and what was wrong."""
    load_modules(plan)
    before, shm = set(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm"))
    lane = Lane(plan)
    try:
        lane.run()
    finally:
        lane.close()
    counts, wrong = lane.counts, lane.wrong
    counts["descriptors left"] = len(set(os.listdir("/proc/self/fd")) - before)
    new = [each for each in set(os.listdir("/dev/shm")) - shm if "kvoffload" in each]
    counts["files in /dev/shm"] = len(new)
    return counts, [f"seed {plan.seed}: {each}" for each in wrong]


if __name__ == "__main__":
    logging.getLogger("kvoffload").setLevel(logging.CRITICAL)
    totals, problems = run(Plan(**json.loads(sys.argv[1])))
    print(json.dumps({"counts": totals, "wrong": problems[:10]}))
