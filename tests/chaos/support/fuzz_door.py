"""Random calls of caches from `open_cache` over one folder: sessions in processes, one after another, many killed.

    python tests/chaos/support/fuzz_door.py                                 40 minutes, another seed each time
    python tests/chaos/support/fuzz_door.py --only drops --seconds 60 --seed 7

    views        the same axes in other orders: arrays that lie so in memory, and permuted views of them
    finalizers   objects that become garbage in any thread, in the middle of anything, and call the cache
    headers      writes of headers to the disk fail now and then
    drops        interrupts by signals in calls of the cache. After that, as docs/how/interrupts.md says, `cache.drain`
                 is called, and the blocks are used for something else

The weights change all the time, in steps and in another thread. The bytes of a block follow from its
key and the name of the weights. Every block that is loaded is compared, and so are all blocks that no call
has. Records that were on the disk when `drain` was True are there in the next session, killed or not. Prints counts,
what was wrong, the stacks of what hangs, and a summary. Exit status 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import errno
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from changing import Changes
from exhausting import killed
from haunting import Ghosts, Interrupts, Watchdog, summary, unheard

import kvoffload
from kvoffload import BlockCache, ClosedError, Device, KVOffloadError, LayoutError, MissingKeyError
from kvoffload.cache.weights import tag_of
from kvoffload.testing import SimulatedDriver
from kvoffload.tiers import DiskTier, Limits, ObjectStoreTier, Outcome, Tier, TierJob
from kvoffload.tiers.files import FileOperations

KINDS = ("views", "finalizers", "headers", "drops")
AXES = ("planes", "blocks", "tokens", "heads", "dim")
REQUESTS, LONGEST = 12, 6
LAYERS, BLOCKS, SOURCES, GHOSTS = 2, 52, 24, 4  # blocks: sources, targets, and those of finalizers at the end
SHAPES = ((2, 2, 2), (4, 2, 8), (4, 1, 8), (2, 4, 4))  # tokens, heads, dim
SECONDS, HUNG_SECONDS, LONGEST_SESSION = 60.0, 90.0, 4.0
HEADER_BYTES, PAGE = 192, 4096
DISK_BYTES = 1 << 25  # for all records of a folder
SALT = "fuzz"


Named = tuple[str, str]


class Plan(NamedTuple):
    """A session. `shape`: of tokens, heads and dim. `kinds`: see above. `must`: by the disk's file, which keys it has:
    the names of their weights, and their digits.
    """

    folder: str
    seed: int
    shape: tuple[int, ...]
    kinds: tuple[str, ...]
    must: dict[str, list[Named]]

    def __str__(self) -> str:
        return f"seed {self.seed}, {' '.join(self.kinds)}"


class View:
    """Memory of a device array, with its axes in another order."""

    def __init__(self, array: Any, host: Any) -> None:
        self.array, self.shape, self.dtype = array, host.shape, host.dtype
        self.__cuda_array_interface__ = {
            "shape": host.shape, "strides": host.strides, "data": (host.ctypes.data, False), "typestr": "<u2",
            "version": 3, "stream": None,
        }  # fmt: skip


class FailingHeaders(FileOperations):
    """Some writes of headers fail, and payloads take their time: meanwhile headers wait."""

    def __init__(self, seed: int) -> None:
        self.random, self.rate = random.Random(seed), 0.0

    def pwritev(self, file: int, views: Sequence[memoryview], offset: int) -> int:
        nbytes = sum(view.nbytes for view in views)
        if nbytes % PAGE == 0:
            time.sleep(self.random.random() * 0.002)
        elif nbytes % HEADER_BYTES == 0 and self.random.random() < self.rate:
            raise OSError(errno.EIO, "a header")
        return super().pwritev(file, views, offset)


class Puts:
    """Remembers what a disk tier is told to write, and stays out of its class: another one's work may wait."""

    def __init__(self, disk: DiskTier) -> None:
        self.disk, self._jobs, self._put = disk, list[TierJob](), disk.put
        disk.put = self.put  # type: ignore[method-assign]

    def put(self, *arguments: Any, **options: Any) -> TierJob:
        job = self._put(*arguments, **options)
        self._jobs.append(job)
        return job

    def promised(self) -> tuple[set[bytes], int]:
        """Keys of which each put has ended DONE, and how many have FAILED. Call it when nothing is being written."""
        pairs = [pair for job in self._jobs for pair in zip(job.keys, job.wait(SECONDS), strict=True)]
        others = {key for key, outcome in pairs if outcome is not Outcome.DONE}
        failed = sum(outcome is Outcome.FAILED for _, outcome in pairs)
        return {key for key, _ in pairs} - others, failed


def content(request: int, depth: int, shape: tuple[int, ...], name: str) -> Any:
    """(layers, planes, tokens, heads, dim): what a key stands for with these weights."""
    seed = (request, depth, crc32(name.encode()))
    return np.random.default_rng(seed).integers(0, 1 << 16, (LAYERS, 2, *shape), dtype=np.uint16)


def named(keys: Iterable[bytes], names: Iterable[str]) -> set[Named]:
    return {(name, key.hex()) for name in names for key in keys}


class Session:
    """A process with a cache. `say` tells the program above it."""

    def __init__(self, plan: Plan, say: Callable[..., None]) -> None:
        self.plan, self.say, self.rng = plan, say, random.Random(plan.seed)
        self.counts, self.wrong = Counter[str](), list[str]()
        unheard(self.wrong)
        self.interrupts = Interrupts(plan.seed, self.counts)
        self.ghosts = Ghosts(plan.seed, self.counts, self.wrong) if "finalizers" in plan.kinds else None
        self.device: Device = kvoffload.open_device(backend=SimulatedDriver(seed=plan.seed))
        self.jobs: list[tuple[Any, list[int]]] = []  # that nobody has waited for, and their blocks
        self.taken = list[int]()  # blocks of the step
        self.operations = FailingHeaders(plan.seed)
        self.closed = self.over = False  # by a finalizer; in order
        self.make_arrays()
        self.idle: dict[int, int] = {}  # blocks that nothing has, and the words they are full of
        self.free(range(BLOCKS - GHOSTS))
        for block in range(BLOCKS - GHOSTS, BLOCKS):
            self.write(block, content(-1 % REQUESTS, 0, plan.shape, ""))

    def make_arrays(self) -> None:
        """In an order of their axes, seen in an order."""
        inner, views = list(AXES[2:]), "views" in self.plan.kinds
        self.axes = (*AXES[:2], *(self.rng.sample(inner, 3) if views else inner))
        memory = (*AXES[:2], *(self.rng.sample(inner, 3) if views and self.rng.random() < 0.7 else self.axes[2:]))
        extents = dict(zip(AXES, (2, BLOCKS, *self.plan.shape), strict=True))
        self.arrays, self.hosts = list[Any](), list[Any]()
        for _ in range(LAYERS):
            array = self.device.empty([extents[axis] for axis in memory], "uint16")
            host: Any = np.from_dlpack(array)
            seen = host.transpose([memory.index(axis) for axis in self.axes])
            self.arrays.append(array if memory == self.axes else View(array, seen))
            self.hosts.append(host.transpose([memory.index(axis) for axis in AXES]))
        self.counts["permuted views"] += memory != self.axes

    # blocks -------------------------------------------------------------------------------------------------------

    def write(self, block: int, rows: Any) -> None:
        for host, row in zip(self.hosts, rows, strict=True):
            host[:, block] = row

    def free(self, blocks: Sequence[int]) -> None:
        """They are the program's again, which uses them for something else."""
        for block in blocks:
            word = self.rng.randrange(1 << 16)
            self.write(block, [word] * LAYERS)
            self.idle[block] = word  # last: a signal may come anywhere

    def check_idle(self) -> None:
        for block, word in self.idle.items():
            for host in self.hosts:
                found = host[:, block]
                assert (found == word).all(), f"block {block}, which no call has, holds {found.ravel()[:8]}, not {word}"

    def take(self, first: int, end: int, count: int) -> list[int]:
        free = [block for block in self.idle if first <= block < end]
        if len(free) < count:
            self.settle()
            free = [block for block in self.idle if first <= block < end]
        taken = self.rng.sample(free, count)
        self.taken += taken
        for block in taken:
            del self.idle[block]
        return taken

    def settle(self) -> None:
        while self.jobs:
            job, blocks = self.jobs[-1]
            job.wait(SECONDS)
            self.taken += blocks
            self.jobs.pop()
            self.free(blocks)

    # opening and closing ------------------------------------------------------------------------------------------

    def open(self) -> BlockCache[Any]:
        """Over the folder's disk; or another file, if it is of another layout."""
        for name in ("kv", f"kv-{'-'.join(self.axes)}", f"kv-{self.rng.random()}"):
            self.path = str(Path(self.plan.folder, name))
            try:
                return self.open_path()
            except LayoutError:
                self.counts["refused as another layout"] += 1
        raise AssertionError("no file can be opened")

    def open_path(self) -> BlockCache[Any]:
        options: dict[str, Any] = {"axes": self.axes, "device": self.device, "pool_bytes": 1 << 16}
        limits = Limits(threads=self.rng.choice((1, 2, 4)))
        below: list[Tier] = []
        self.puts: Puts | None = None
        if "headers" in self.plan.kinds or self.rng.random() < 0.5:
            disk = DiskTier(
                self.path, nbytes=DISK_BYTES, identity="m", limits=limits, operations=self.operations, policy="lru"
            )
            self.puts = Puts(disk)
            below.append(disk)
        else:
            options |= {"disk": self.path, "disk_bytes": DISK_BYTES, "identity": "m"}
        if self.rng.random() < 0.3:
            folder = Path(self.plan.folder, "objects")
            folder.mkdir(exist_ok=True)
            below.append(ObjectStoreTier(folder.as_uri(), identity="m", limits=Limits(threads=2)))
        try:
            return kvoffload.open_cache(self.arrays, tiers=below, **options)
        except BaseException:
            for tier in below:
                tier.close(SECONDS)
            raise

    def opened(self) -> BlockCache[Any]:
        """Interrupted a few times, perhaps."""
        made: list[BlockCache[Any]] = []
        while "drops" in self.plan.kinds and not made and self.rng.random() < 0.5:
            self.interrupts.during(lambda: made.append(self.open()))
        return made[0] if made else self.open()

    def run(self, until: float) -> None:
        self.cache = self.opened()
        self.keys = [
            self.cache.keys(range(1000 * each, 1000 * each + LONGEST * self.plan.shape[0]), salt=SALT)
            for each in range(REQUESTS)
        ]
        self.weights = Changes(self.cache, self.plan.seed, self.counts)
        self.change = self.weights.use_any
        must = self.plan.must.get(self.path, [])
        missing = [each for each in must if not self.there(*each)]
        assert not missing, f"{len(missing)} of {len(must)} records that drain promised are gone: {missing}"
        self.removed = set[Named]()
        if self.ghosts is not None:
            self.ghosts.calls = self.haunted()
        self.operations.rate = self.rng.choice((0.05, 0.3)) if "headers" in self.plan.kinds else 0.0
        steps = {
            "keep": 30,
            "fetch": 40,
            "ask": 8,
            "drop": 6,
            "remove": 2,
            "turn": 6,
            "drain": 3,
            "lease": 4,
            "hint": 3,
            "change": 8,
        }
        threading.Thread(target=self.go_on_changing, daemon=True).start()
        try:
            while time.monotonic() < until and not self.wrong:
                self.step(getattr(self, self.rng.choices(list(steps), list(steps.values()))[0]))
            self.end()
        except ClosedError:
            if not self.closed:
                raise

    def there(self, name: str, key: str) -> bool:
        self.weights.use(name)
        return self.cache.locate([bytes.fromhex(key)]) != ["missing"]

    def go_on_changing(self) -> None:
        """In a thread, until the cache is closed."""
        with suppress(ClosedError):
            while not self.over:
                time.sleep(self.weights.random.random() ** 2 * 0.1)
                self.weights.use_any()

    def step(self, call: Callable[[], object]) -> None:
        self.say("step")
        self.counts["operations"] += 1
        self.taken.clear()
        if "drops" in self.plan.kinds and self.rng.random() < 0.5:
            if self.interrupts.during(call):
                self.recover()
        elif self.ghosts is not None:
            self.ghosts.during(call)
        else:
            call()
        self.check_idle()
        if self.rng.random() < 0.02:
            self.tell()

    def tell(self) -> None:
        counts = dict(self.counts)
        self.counts.clear()
        self.say("counts", counts)

    def recover(self) -> None:
        """What docs/how/interrupts.md says: then nothing uses the blocks of the call any more."""
        while not self.cache.drain(1.0):
            pass  # the watchdog says where it hangs
        self.weights.use(self.weights.names[-1])  # it may have been a change
        in_use = {block for _, blocks in self.jobs for block in blocks}
        self.free([block for block in self.taken if block not in self.idle and block not in in_use])

    def end(self) -> None:
        """Orderly."""
        self.operations.rate, self.over = 0.0, True
        self.settle()
        self.drain()
        self.cache.check()
        while "drops" in self.plan.kinds and self.rng.random() < 0.5:
            self.interrupts.during(lambda: self.cache.close(SECONDS))
        assert self.cache.close(SECONDS), "the cache does not close"
        self.check_idle()
        self.device.close()

    # steps --------------------------------------------------------------------------------------------------------

    def keep(self, number: int | None = None, opened: int | None = None, **options: Any) -> None:
        """`opened`: during which change the request was. If others have followed, none of its blocks is stored."""
        number = self.rng.randrange(REQUESTS) if number is None else number
        count = self.rng.randint(1, LONGEST)
        blocks = self.take(0, SOURCES, count)
        with self.weights.computing:
            several = opened not in (None, self.weights.begun)
            name = "several" if several else self.weights.names[-1]
            for depth, block in enumerate(blocks):
                self.write(block, content(number, depth, self.plan.shape, name))
            job = self.cache.keep(self.keys[number][:count], blocks, **options)
        assert not (several and job.keys), "a request has stored after a change of weights"
        if self.rng.random() < 0.5:
            job.wait(SECONDS)
            self.free(blocks)
        else:
            self.jobs.append((job, blocks))
            del job

    def fetch(self, number: int | None = None, **options: Any) -> None:
        number = self.rng.randrange(REQUESTS) if number is None else number
        blocks = self.take(SOURCES, BLOCKS - GHOSTS, LONGEST)
        deadline = self.rng.choice((0.002, 0.02, 0.5))
        job = self.cache.fetch(self.keys[number], blocks, deadline=deadline, **options)
        asked = self.weights.begun
        if self.rng.random() < 0.1:
            job.cancel()
        read = self.weights.returned
        if self.rng.random() < 0.3:
            assert job.hits >= 0  # from here on the weights may change
        hits = job.wait(SECONDS)
        names = self.weights.names[read : asked + 1]
        for depth, block in enumerate(blocks[:hits]):
            found = np.array([host[:, block] for host in self.hosts])
            if not any(np.array_equal(found, content(number, depth, self.plan.shape, name)) for name in names):
                what = f"block {depth} of request {number}, weights {names} of {self.weights.names[-5:]}"
                raise AssertionError(f"a hit, {what}, has other bytes: {found.ravel()[:8]}")
        self.counts["hits"] += hits
        self.free(blocks)

    def turn(self) -> None:
        """A request of a session."""
        number = self.rng.randrange(REQUESTS)
        request = self.cache.open_request(session=f"s{number}")
        opened = self.weights.begun
        self.fetch(number, request=request)
        if self.rng.random() < 0.5:
            self.change()
        self.keep(number, opened, request=request)

    def ask(self) -> None:
        keys = self.rng.choice(self.keys)
        for call in (self.cache.lookup, self.cache.status, self.cache.locate, self.cache.touch):
            call(keys)
        self.cache.tier_statistics()

    def hint(self) -> None:
        action: Any = self.rng.choice(("retain", "release", "demote", "prefetch"))
        self.cache.hint(action, session=f"s{self.rng.randrange(REQUESTS)}")

    def lease(self) -> None:
        with suppress(MissingKeyError):
            self.cache.acquire(self.rng.choice(self.keys)[:2]).release()

    def drop(self) -> None:
        """What is in slots only; what is below comes back."""
        self.cache.remove(self.rng.choice(self.keys), below=False)

    def remove(self) -> None:
        keys = self.rng.choice(self.keys)[self.rng.randrange(LONGEST) :]
        with self.weights.computing, suppress(KVOffloadError):
            self.forget(named(keys, self.weights.names[-1:]))
            self.cache.remove(keys)

    def forget(self, keys: set[Named]) -> None:
        """They are about to be removed: whether the disk has them is not known from here on."""
        self.say("removing", self.path, list(keys))
        self.removed.update(keys)

    def drain(self) -> None:
        """What was written is there, and will be."""
        if not self.cache.drain(SECONDS):
            return
        if self.puts is not None:
            promised, failed = self.puts.promised()
            given_up = self.puts.disk.statistics().failed - failed  # headers that were not written in the end
            keys = sorted(promised)
            missing = {key for key, there in zip(keys, self.puts.disk.contains(keys), strict=True) if not there}
            lost = missing - {tag_of(name) + bytes.fromhex(key) for name, key in self.removed}
            gone = f"of {len(keys)} DONE records, {given_up} given up, these are gone: {lost}"
            assert self.closed or len(lost) <= given_up, gone
        with self.weights.computing:
            keys = list(chain(*self.keys))
            self.cache.remove(keys, below=False)
            on_disk = [key for key in keys if self.cache.locate([key]) == ["disk"]]
            there = list(named(on_disk, self.weights.names[-1:]) - self.removed)
        self.counts["durable"] += len(there)
        self.say("durable", self.path, there)

    # finalizers ---------------------------------------------------------------------------------------------------

    def haunted(self) -> list[Callable[[], object]]:
        cache, keys, ghost = self.cache, self.keys[0], [b"ghost"]
        blocks = list(range(BLOCKS - GHOSTS, BLOCKS))

        def close() -> None:
            if self.rng.random() < 0.1:
                self.closed = True
                cache.close(1.0)

        def forget(remove: Callable[[], object], of: Sequence[bytes]) -> None:
            if self.rng.random() < 0.02:  # else nothing is left
                self.forget(named(of, set(self.weights.names)))
                remove()

        return [
            partial(cache.drain, 0.05), partial(cache.fetch, [*keys, *ghost][:GHOSTS], blocks), cache.check,
            partial(cache.keep, ghost, blocks[:1]), partial(cache.lookup, keys), partial(cache.status, keys),
            partial(cache.locate, keys), cache.statistics, cache.tier_statistics, partial(cache.promote, keys),
            partial(forget, partial(cache.remove, keys), keys), partial(forget, partial(cache.remove, ghost), ghost),
            partial(forget, cache.clear, [*ghost, *chain(*self.keys)]), partial(cache.touch, keys),
            partial(cache.hint, "prefetch", session="s1"), partial(cache.engine.drain, 0.05), close,
            lambda: cache.open_request(session="s1").end(), lambda: cache.acquire(keys).release(),
        ]  # fmt: skip


def run_session(plan: Plan, pipe: int, stacks: Path) -> None:
    """In a forked child: never returns."""
    with open(stacks, "w") as file:
        watchdog = Watchdog(HUNG_SECONDS, file)
        session: Session | None = None

        def say(*what: Any) -> None:
            watchdog.goes_on()
            if what[0] != "step":
                os.write(pipe, (json.dumps(what) + "\n").encode())

        try:
            warnings.simplefilter("ignore")
            say("begins")
            session = Session(plan, say)
            session.run(time.monotonic() + LONGEST_SESSION)
        except BaseException:
            say("wrong", f"{plan}: {traceback.format_exc()[-2500:]}")
        if session is not None:
            for each in session.wrong:
                say("wrong", f"{plan}: {each}")
            session.tell()
        os._exit(0)


class Fuzz:
    """Sessions one after another; each has the folder of the last one, or a new one."""

    def __init__(self, seed: int, only: Sequence[str]) -> None:
        self.rng, self.only = random.Random(seed), only
        self.counts, self.wrong, self.hangs = Counter[str](), list[str](), list[str]()
        self.base = Path(tempfile.mkdtemp(prefix="fuzz-door-"))
        self.begin()

    def begin(self) -> None:
        self.counts["folders"] += 1
        self.folder = self.base / str(self.counts["folders"])
        self.folder.mkdir(mode=0o700)
        self.shape = self.rng.choice(SHAPES)
        self.must: dict[str, set[Named]] = {}

    def session(self) -> None:
        if self.rng.random() < 0.15:
            shutil.rmtree(self.folder)
            self.begin()
        kinds = self.only or [kind for kind in KINDS if self.rng.random() < 0.5]
        must = {path: sorted(keys) for path, keys in self.must.items()}
        plan = Plan(str(self.folder), self.rng.randrange(1 << 30), self.shape, tuple(kinds), must)
        wait = self.rng.random() * LONGEST_SESSION if self.rng.random() < 0.6 else 3 * HUNG_SECONDS
        stacks = self.base / "stacks"
        said, status = killed(lambda pipe: run_session(plan, pipe, stacks), wait)
        self.removed = set[Named]()  # by this session
        self.counts["sessions"] += 1
        self.counts["kills"] += status == -signal.SIGKILL
        if status == 1 or (status == -signal.SIGKILL and wait > SECONDS):
            self.hangs.append(f"{plan}:\n{stacks.read_text()}")
        elif status not in (0, -signal.SIGKILL):
            self.wrong.append(f"{plan}: ended with status {status}")
        for what, *arguments in said:
            self.hear(what, arguments)
        if "headers" in kinds and status != 0:  # perhaps between a new epoch and the headers that follow it
            self.must = {}

    def hear(self, what: str, arguments: list[Any]) -> None:
        if what == "counts":
            self.counts.update(arguments[0])
        elif what == "wrong":
            self.wrong += arguments
        elif what == "durable":
            self.must.setdefault(arguments[0], set()).update({*map(tuple, arguments[1])} - self.removed)
        elif what == "removing":
            self.removed.update(map(tuple, arguments[1]))
            self.must.setdefault(arguments[0], set()).difference_update(self.removed)

    def run(self, seconds: float) -> None:
        begin = time.monotonic()
        try:
            while time.monotonic() - begin < seconds and len(self.wrong) + len(self.hangs) < 5:
                before = len(self.wrong) + len(self.hangs)
                self.session()
                for each in [*self.wrong, *self.hangs][before:] if before == 0 else ():
                    print(f"after {time.monotonic() - begin:.0f} seconds: {each}", flush=True)
        finally:
            shutil.rmtree(self.base, ignore_errors=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=KINDS, help="may be repeated; a mixture by default")
    parser.add_argument("--seconds", type=float, default=2400.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    options = parser.parse_args(arguments)
    fuzz = Fuzz(options.seed, options.only or ())
    fuzz.run(options.seconds)
    counts = fuzz.counts
    print(", ".join(f"{count} {what}" for what, count in sorted(counts.items())))
    print(*(f"  wrong: {each}" for each in fuzz.wrong[:5]), *(f"  hangs: {each}" for each in fuzz.hangs[:2]), sep="\n")
    print(summary("door", options.seed, counts, wrong=len(fuzz.wrong), hangs=len(fuzz.hangs)))
    return int(bool(fuzz.wrong or fuzz.hangs))


if __name__ == "__main__":
    logging.getLogger("kvoffload").setLevel(logging.CRITICAL)
    sys.exit(main())
