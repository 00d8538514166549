"""Random programs of several threads against a BlockCache over failing tiers; every loaded byte is compared.

The weights change all the time, and with them the content of every key. Some programs are killed, and the next ones
look at what their disks have.

    python tests/tiering/tier_fuzz.py --operations 100000 --seed 7

Each thread has keys and blocks of its own, and shares slots and tiers with the others. A removal that succeeds gives
its keys another content from then on, so bytes that come back after it are seen as wrong. The seed determines what the
threads do, not how they interleave.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

sys.path += [str(Path(__file__).parents[1] / each) for each in ("support", "chaos/support")]

from changing import NAMES, Changes
from exhausting import killed
from tiering import SECONDS, Bench, key, tiered, until

from kvoffload import NO_WAIT, MissingKeyError, TierError
from kvoffload.cache.tiering import below as breaker
from kvoffload.cache.tiering.promotion import ChainedLoad, Promotion
from kvoffload.layout.coding import CODECS, CodecName
from kvoffload.testing import FaultyTier, TierFaults
from kvoffload.tiers import DiskTier, Limits, MemoryTier, Tier

FAULTS = TierFaults(fail=0.04, error=0.03, delay=0.05, hang=0.1, decline=0.02, drop=0.02, tear=0.02)
KEYS = 16  # of each thread
_CONTENTS = 16_000_057  # that differ
_VERSIONS = 64  # of a key, at most
_STEPS = 6  # keys of one call, at most


@dataclass
class Held:
    """A promotion, and what was known when it was asked for."""

    promotion: Promotion
    numbers: list[int]
    removals: int
    asked: int  # the number of the latest change of weights
    chained: ChainedLoad | None = None
    versions: Counter[tuple[int, str]] = field(default_factory=Counter)


class Worker:
    """One thread: keys `first` to `first + KEYS - 1`; blocks from `block` on, for stores, loads and chained loads."""

    def __init__(self, world: World, number: int, seed: int) -> None:
        self.world, self.bench, self.weights = world, world.bench, world.weights
        self.cache = world.bench.cache
        self.random = random.Random(f"{seed} {number}")
        self.first = number * KEYS
        base = number * 4 * _STEPS
        self.store_blocks = range(base, base + _STEPS)
        self.load_blocks = range(base + _STEPS, base + 2 * _STEPS)
        self.chain_blocks = range(base + 2 * _STEPS, base + 3 * _STEPS)
        self.version = Counter[tuple[int, str]]()  # of a key's content, with these weights
        self.held: list[Held] = []
        self.storing: Any = None
        self.removals = 0
        self.done = Counter[str]()

    def run(self, operations: int) -> None:
        calls: dict[Callable[[], None], float] = {
            self.store: 30,
            self.load: 25,
            self.fetch: 20,
            self.promote: 20,
            self.use_promotion: 15,
            self.forget_promotion: 10,
            self.touch: 8,
            self.remove: 2,
            self.look: 4,
            self.drain: 0.5,
            self.clear: 0.1,
            self.weights.use_any: 10,
        }
        chosen = self.random.choices(list(calls), list(calls.values()), k=operations)
        for call in chosen:
            if self.world.errors:
                return
            call()
            self.done[call.__name__] += 1
        for _ in range(len(self.held)):
            self.forget_promotion()
        self.finish_store()

    def some(self) -> list[int]:
        start = self.random.randrange(KEYS)
        return [self.first + (start + at) % KEYS for at in range(self.random.randint(1, _STEPS))]

    def content(self, number: int, name: str, version: int) -> int:
        return crc32(f"{number} {version} {name}".encode()) % _CONTENTS

    def check(self, block: int, number: int, names: Iterable[str], oldest: Counter[tuple[int, str]], what: str) -> None:
        """A block has the bytes of a key with weights of one of these names, not older than these versions."""
        possible = {
            self.content(number, name, version)
            for name in names
            for version in range(oldest[number, name], self.version[number, name] + 1)
        }
        right = any(self.bench.holds(block, content) for content in possible)
        assert right, f"wrong bytes of {what}: key {number}, weights {names}"
        self.world.compared += 1

    def finish_store(self) -> None:
        if self.storing is not None:
            self.storing.wait(SECONDS)
            self.storing = None

    def store(self) -> None:
        self.finish_store()
        numbers = self.some()
        blocks = list(self.store_blocks)[: len(numbers)]
        store = self.random.choice([self.cache.store, self.cache.keep])
        with self.weights.computing:
            for block, number in zip(blocks, numbers, strict=True):
                name = self.weights.names[-1]
                self.bench.write(block, self.content(number, name, self.version[number, name]))
            self.storing = store([key(number) for number in numbers], self.bench.blocks(blocks), after=NO_WAIT)
        if self.random.random() < 0.5:
            self.finish_store()

    def load(self) -> None:
        numbers = self.some()
        found = self.cache.lookup([key(number) for number in numbers])
        self.load_these(numbers[:found], may_be_gone=True)

    def load_these(self, numbers: list[int], *, may_be_gone: bool) -> None:
        blocks = list(self.load_blocks)[: len(numbers)]
        losses, read = self.world.losses, self.weights.returned
        for block in blocks:
            self.bench.write(block, 1)
        try:
            job = self.cache.load([key(number) for number in numbers], self.bench.blocks(blocks), after=NO_WAIT)
        except MissingKeyError:
            lost = losses < 0 or self.world.losses != losses
            assert may_be_gone or lost, f"keys {numbers} of a promotion that is held are gone"
            return
        names = self.weights.names[read:]
        job.wait(SECONDS)
        for block, number in zip(blocks, numbers, strict=True):
            self.check(block, number, names, self.version, "a load")

    def fetch(self) -> None:
        """Fetch, and perhaps cancel it."""
        numbers = self.some()
        blocks = list(self.load_blocks)[: len(numbers)]
        for block in blocks:
            self.bench.write(block, 1)
        deadline = self.random.choice([1e-4, 2e-3, 5e-3, 5.0, None])
        names = [key(number) for number in numbers]
        job = self.cache.fetch(names, self.bench.blocks(blocks), after=NO_WAIT, deadline=deadline)
        asked, chance = self.weights.begun, self.random.random()
        if chance < 0.3:
            time.sleep(self.random.choice([0, 1e-4, 2e-3]))
            job.cancel()
        read = self.weights.returned
        if chance > 0.6:
            assert job.hits >= 0  # from here on the weights may change
            time.sleep(self.random.choice([0, 1e-4, 2e-3]))
        loaded = job.wait(SECONDS)
        for block, number in list(zip(blocks, numbers, strict=True))[:loaded]:
            self.check(block, number, self.weights.names[read : asked + 1], self.version, "a fetch")

    def promote(self) -> None:
        if len(self.held) >= 3:
            self.forget_promotion()
        numbers = self.some()
        names = [key(number) for number in numbers]
        losses = self.world.losses
        promotion = self.cache.promote(names, deadline=self.random.choice([1e-4, 2e-3, 5e-3, 5.0, None]))
        held = Held(promotion, numbers, -1 if losses < 0 else self.removals + losses, self.weights.begun)
        if self.random.random() < 0.3 and all(each.chained is None for each in self.held):
            held.versions = self.version.copy()
            blocks = list(self.chain_blocks)[: len(numbers)]
            held.chained = promotion.load(self.bench.blocks(blocks), after=NO_WAIT)
        self.held.append(held)

    def use_promotion(self) -> None:
        """Load what a promotion has brought so far: it must be there unless it was removed."""
        if not self.held:
            return
        held = self.random.choice(self.held)
        read, ready = self.weights.returned, held.promotion.ready
        if self.random.random() < 0.5:
            ready = max(ready, held.promotion.wait(SECONDS))
        assert not ready or read <= held.asked, "a promotion for weights of before has hits"
        shrunk = held.promotion.ready < ready
        removed = held.removals != self.removals + self.world.losses
        assert removed or not shrunk, "ready has shrunk"
        self.load_these(held.numbers[:ready], may_be_gone=removed)

    def forget_promotion(self) -> None:
        if not self.held:
            return
        held = self.held.pop(self.random.randrange(len(self.held)))
        end = self.random.randrange(4)
        if end == 0:
            held.promotion.cancel()
        elif end == 1:
            held.promotion.release()
        chained, numbers, versions, asked = held.chained, held.numbers, held.versions, held.asked
        del held  # garbage, if it was not released
        if self.random.random() < 0.02:
            gc.collect()
        if chained is not None:
            self.check_chained(chained, numbers, versions, asked)

    def check_chained(
        self, chained: ChainedLoad, numbers: list[int], versions: Counter[tuple[int, str]], asked: int
    ) -> None:
        read = self.weights.returned
        try:
            loaded = len(chained.wait(SECONDS))
        except MissingKeyError:  # removed since
            return
        for block, number in zip(self.chain_blocks, numbers[:loaded], strict=False):
            self.check(block, number, self.weights.names[read : asked + 1], versions, "a chained load")

    def touch(self) -> None:
        self.cache.touch([key(number) for number in self.some()])

    def remove(self) -> None:
        self.finish_store()
        numbers = self.some()
        self.removals += 1
        read = self.weights.returned
        try:
            self.cache.remove([key(number) for number in numbers])
        except TierError:  # their bytes may come back
            return
        if len(names := self.weights.names[read:]) == 1:
            self.version.update((number, names[0]) for number in numbers)

    def clear(self) -> None:
        with self.world.clear_lock:
            self.world.clears += 1
            self.world.clearing = True
            try:
                self.cache.clear()
            except TierError:
                pass
            self.world.clearing = False

    def look(self) -> None:
        names = [key(number) for number in self.some()]
        self.cache.locate(names)
        self.cache.tier_statistics()
        self.cache.check()
        counts = self.cache.statistics()
        assert counts.resident + counts.pending <= counts.capacity

    def drain(self) -> None:
        self.cache.drain(0.05)


class World:
    """A cache over a failing tier and another one, and threads that use it.

    Attributes:
        compared: blocks whose bytes were compared.
        clears, clearing: calls of `clear`, and whether one goes on.
        weights: those of the cache.
        errors: what left the threads.
    """

    def __init__(self, bench: Bench, tier: FaultyTier, seed: int) -> None:
        self.bench, self.tier = bench, tier
        self.compared = self.clears = 0
        self.clearing, self.clear_lock = False, threading.Lock()
        self.weights = Changes(bench.cache, seed, Counter())
        self.errors: list[BaseException] = []
        self.over = threading.Event()

    @property
    def losses(self) -> int:
        """How often keys have been lost by `clear`, or by other weights; -1: they are being lost."""
        changes = self.weights.begun
        return -1 if self.clearing or self.weights.returned < changes else self.clears + changes

    def run(self, operations: int, threads: int, seed: int) -> Counter[str]:
        workers = [Worker(self, number, seed) for number in range(threads)]

        def work(worker: Worker) -> None:
            try:
                worker.run(operations // threads)
            except BaseException as error:
                self.errors.append(error)
                raise

        running = [threading.Thread(target=work, args=(worker,), name=f"worker {seed}") for worker in workers]
        releasing = threading.Thread(target=self.release_hung, args=(seed,))
        for thread in (*running, releasing):
            thread.start()
        for thread in running:
            thread.join()
        self.over.set()
        releasing.join()
        if self.errors:
            raise self.errors[0]
        self.check_end(workers)
        return sum((worker.done for worker in workers), Counter[str]())

    def release_hung(self, seed: int) -> None:
        """Calls that hang return at some time, mostly after their keys were given up."""
        chance = random.Random(seed)
        while not self.over.is_set():
            time.sleep(chance.choice([2e-3, 1e-2, 0.05]))
            self.tier.release_hung()

    def check_end(self, workers: list[Worker]) -> None:
        """When all calls have returned, nothing is held, and what the tiers have is right."""
        self.tier.heal()
        cache = self.bench.cache
        assert cache.drain(SECONDS)
        gc.collect()
        until(lambda: cache.statistics().pinned == cache.statistics().pending == 0, "the end of holds")
        cache.check()
        for name in NAMES:
            self.weights.use(name)
            for worker in workers:
                for number in range(worker.first, worker.first + KEYS):
                    with cache.promote([key(number)]) as promotion:
                        worker.load_these([number][: promotion.wait(SECONDS)], may_be_gone=False)

    def check_old(self, worker: Worker, numbers: Iterable[int]) -> None:
        """A disk that a killed process has left has bytes of each key's weights, of any version. Forget it then."""
        cache, block = self.bench.cache, worker.load_blocks[0]
        for name in NAMES:
            self.weights.use(name)
            for number in numbers:
                if cache.fetch([key(number)], self.bench.blocks([block]), after=NO_WAIT).wait(SECONDS):
                    worker.version[number, name] = _VERSIONS
                    worker.check(block, number, [name], Counter(), "a disk after a kill")
                    self.weights.counts["after a kill"] += 1
        cache.clear()


def fuzz(
    operations: int,
    seed: int,
    pipe: int = -1,
    *,
    threads: int = 3,
    disk: Path | None = None,
    groups: int = 1,
    codec: CodecName = "raw",
) -> dict[str, int]:
    """Run a program, and say so to `pipe`; returns how often what was done. AssertionError: something was wrong."""
    breaker._FIRST_PAUSE, breaker._LONGEST_PAUSE, before = 2e-3, 2e-2, (breaker._FIRST_PAUSE, breaker._LONGEST_PAUSE)
    logging.getLogger("kvoffload").setLevel(logging.CRITICAL)
    tier, old = FaultyTier(seed=seed, limits=Limits(threads=2)), disk is not None and disk.exists()
    below: Tier = (
        MemoryTier(40 * 4096)
        if disk is None
        else DiskTier(disk, nbytes=1 << 20, identity="fuzz", limits=Limits(threads=2))
    )
    chance = random.Random(seed)
    options: dict[str, Any] = {
        "capacity": chance.choice([8, 12, 20]),
        "policy": chance.choice(["lru", "prefix"]),
        "write": "through",
        "hung": chance.choice([0.02, 30.0]),
    }
    tiers = chance.choice([[tier, below], [below, tier]])
    try:
        blocks = threads * 4 * _STEPS
        with tiered(*tiers, seed=seed, blocks=blocks, groups=groups, codec=codec, **options) as bench:
            world = World(bench, tier, seed)
            if old:
                world.check_old(Worker(world, 0, seed), range(threads * KEYS))
            tier.faults = FAULTS
            if pipe >= 0:
                os.write(pipe, b"[]\n")
            done = dict(world.run(operations, threads, seed))
            figures = bench.cache.tier_statistics()
    except BaseException:
        traceback.print_exc()  # where it is to be killed nobody else does
        raise
    finally:
        breaker._FIRST_PAUSE, breaker._LONGEST_PAUSE = before
        logging.getLogger("kvoffload").setLevel(logging.NOTSET)
    names = ("promoted", "not_found", "written", "not_written", "opened")
    counts = {name: sum(getattr(each, name) for each in figures) for name in names}
    return {**done, **counts, **world.weights.counts, "compared": world.compared}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=100_000)
    parser.add_argument("--each", type=int, default=5_000, help="operations of one cache")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--codec", choices=CODECS, default="raw", help="of the slots")
    options = parser.parse_args()
    total = Counter[str]()
    for seed in range(options.seed, options.seed + -(-options.operations // options.each)):
        with tempfile.TemporaryDirectory() as folder:
            begun = time.monotonic()
            disk = Path(folder) / "disk" if seed % 2 else None
            run = partial(fuzz, options.each, disk=disk, groups=1 + (seed % 3 == 2), codec=options.codec)
            if disk is not None:
                gc.collect()  # a child that lets go of the pools of caches before may unmap memory of its own
                _, status = killed(partial(run, -seed), random.Random(seed).uniform(0.2, 3.0))
                assert status == -signal.SIGKILL, f"seed {-seed} has ended before it was killed, with status {status}"
                total["kills"] += 1
            done = run(seed)
            total.update(done)
            print(f"seed {seed}: {time.monotonic() - begun:.1f} s, {done}", flush=True)
    print(dict(total))


if __name__ == "__main__":
    main()
