"""Random operations on a disk tier whose system calls fail, hang and end late; every byte is compared.

Jobs overlap. Entries that no job has are filled with known bytes, which must not change. A second tier reads the same
files. The tier is closed, killed and opened again meanwhile.

`python chaos_machine.py OPERATIONS SEED`: also while finalizers call the tier in its threads, and signals interrupt
calls. It prints a line of JSON: counts, and what was wrong.
"""

from __future__ import annotations

import json
import logging
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from chaos_files import NO_FAULTS, ChaosFiles, Faults
from chaos_history import SECONDS, History, Memory, make_tier, names
from exhausting import held
from haunting import Ghosts, Interrupts, Watchdog, unheard

from kvoffload.errors import KVOffloadError
from kvoffload.tiers import DiskTier, Limits, Outcome, TierJob

KEYS = names(range(16))
GONE = (Outcome.DONE, Outcome.MISSING)
NEVER_BEGUN = (Outcome.CANCELLED, Outcome.EXPIRED)
ENTRIES = 24
JOBS = 6
HUNG_SECONDS = 90.0
IDLE = 1 << 40  # versions from here on fill entries that no job has
STEPS = {
    "put": 40, "get": 40, "read": 12, "exists": 6, "remove": 10, "clear": 1, "drain": 2, "cancel": 4, "release": 20,
    "faults": 2, "settle": 20, "close": 1, "kill": 1, "reader": 6,
}  # fmt: skip
PROFILES = (
    NO_FAULTS,
    Faults(short=0.3),
    Faults(error=0.2),
    Faults(late_error=0.2),
    Faults(sync_error=0.5),
    Faults(hang=0.2),
    Faults(short=0.1, error=0.05, late_error=0.05, sync_error=0.1, hang=0.05),
)


T = TypeVar("T")


@dataclass
class Live:
    """A job that has not been looked at.

    Attributes:
        may: of each key that is fetched, the versions that it may have had at the call.
        after: versions beyond this one were put after the call.
        versions: that were put.
        removal: its number in the history.
    """

    kind: str
    job: TierJob
    may: tuple[frozenset[int], ...] = ()
    after: int = 0
    versions: tuple[int, ...] = ()
    removal: int = 0


class Machine:
    """See above. `counts` has operations, steps, outcomes and faults.

    Args:
        haunts: given if finalizers and interrupts are to come; gets what finalizers raise.
    """

    def __init__(self, folder: Path, seed: int, *, files: int = 2, haunts: list[str] | None = None) -> None:
        self.rng = random.Random(seed)
        self.folder = folder
        self.files = files
        self.memory = Memory(ENTRIES + 1)  # the last one is for finalizers
        self.history = History()
        self.counts: Counter[str] = Counter()
        self.interrupts = None if haunts is None else Interrupts(seed, self.counts)
        self.ghosts = None if haunts is None else Ghosts(seed, self.counts, haunts)
        self.lost: list[int] = []  # entries of interrupted calls, until the tier is closed
        self.live: list[Live] = []
        self.reading: Live | None = None
        self._key_of: dict[int, bytes] = {}
        self._version = 0
        self._removals = 0
        self._idle = IDLE
        self._expected: dict[int, int] = {}  # of each entry that no job has
        self._free(range(ENTRIES))
        self.calls = ChaosFiles()
        self.tier: DiskTier
        self._open(NO_FAULTS)
        self.reader_memory = Memory(4)
        self.reader = make_tier(folder, self.reader_memory, files=files, read_only=True)

    def run(self, operations: int, goes_on: Callable[[], object] = int) -> None:
        kinds, weights = list(STEPS), list(STEPS.values())
        while self.counts["operations"] < operations:
            kind = self.rng.choices(kinds, weights)[0]
            self.counts[f"step {kind}"] += 1
            goes_on()
            getattr(self, f"_{kind}")()
            while len(self.live) > JOBS:
                self._settle()
            if self.rng.random() < 0.05:
                self._check_idle()
        self._shut(kill=False)
        self._check_idle()
        self.memory.check_guards()
        assert self.reader.close(SECONDS)

    # entries ------------------------------------------------------------------------------------------------------

    def _call(self, call: Callable[[], T]) -> T | None:
        """Make a call of the tier; None: it was interrupted."""
        if self.interrupts is None or self.ghosts is None:
            return call()
        if self.rng.random() < 0.7:
            return self.ghosts.during(call)
        results: list[T] = []
        interrupted = self.interrupts.during(lambda: results.append(call()))
        return None if interrupted else results[0]

    def _take(self, count: int) -> list[int]:
        while len(self._expected) < count:
            if not self.live:
                self._close()
            self._settle()
        chosen = self.rng.sample(sorted(self._expected), count)
        for entry in chosen:
            expected = self._expected.pop(entry)
            assert self.memory.version(entry) == expected, f"entry {entry} has changed, and no job had it"
        return chosen

    def _free(self, entries: Iterable[int]) -> None:
        for entry in entries:
            self._idle += 1
            self.memory.fill(entry, self._idle)
            self._expected[entry] = self._idle

    def _check_idle(self) -> None:
        for entry, version in self._expected.items():
            assert self.memory.version(entry) == version, f"entry {entry} has changed, and no job had it"

    # steps --------------------------------------------------------------------------------------------------------

    def _some_keys(self, most: int = 4) -> list[bytes]:
        keys = self.rng.sample(KEYS, self.rng.randint(1, most))
        self.counts["operations"] += len(keys)
        return keys

    def _deadline(self) -> float | None:
        return self.rng.choice((None, None, None, time.monotonic() + 1e-3))

    def _put(self) -> None:
        keys = self._some_keys()
        entries, versions = self._take(len(keys)), list[int]()
        for key, entry in zip(keys, entries, strict=True):
            self._version += 1
            versions.append(self._version)
            self._key_of[self._version] = key
            self.memory.fill(entry, self._version)
            self.history.put(key, self._version)
        job = self._call(partial(self.tier.put, keys, entries, deadline=self._deadline()))
        if job is None:
            self.lost += entries
        else:
            self.live.append(Live("put", job, versions=tuple(versions)))

    def _get(self) -> None:
        keys = self._some_keys()
        entries = self._take(len(keys))
        may = tuple(map(self.history.may, keys))
        job = self._call(partial(self.tier.get, keys, entries, deadline=self._deadline()))
        if job is None:
            self.lost += entries
        else:
            self.live.append(Live("get", job, may, self._version))

    def _read(self) -> None:
        """By the tier that only reads, which has one job at a time."""
        if self.reading is not None:
            self.reading.job.wait(SECONDS)
            self._look_at(self.reading, self.reader_memory)
            self.reading = None
        keys = self._some_keys()
        may = tuple(map(self.history.may, keys))
        self.reading = Live("read", self.reader.get(keys, range(len(keys))), may, self._version)

    def _exists(self) -> None:
        keys = self._some_keys()
        self._call(partial(self.tier.contains, keys))
        if (job := self._call(partial(self.tier.exists, keys))) is not None:
            self.live.append(Live("exists", job))

    def _remove(self) -> None:
        self._forget(self._some_keys(3))

    def _clear(self) -> None:
        self._forget(None)
        self.counts["operations"] += 1

    def _forget(self, keys: list[bytes] | None) -> None:
        self._removals += 1
        self.history.removing(self._removals, keys)
        job = self._call(self.tier.clear if keys is None else partial(self.tier.remove, keys))
        if job is not None:
            self.live.append(Live("remove", job, removal=self._removals))

    def _drain(self) -> None:
        self._call(partial(self.tier.drain, self.rng.choice((0.0, 0.01))))

    def _cancel(self) -> None:
        if self.live:
            self._call(self.rng.choice(self.live).job.cancel)

    def _release(self) -> None:
        self.counts["released"] += self.calls.hung
        self.calls.release()

    def _faults(self) -> None:
        self.calls.faults = self.rng.choice(PROFILES)

    def _settle(self) -> None:
        if self.live:
            live = self.live.pop(self.rng.randrange(len(self.live)))
            self._wait(live.job)
            self._look_at(live, self.memory)

    def _wait(self, job: TierJob) -> None:
        end = time.monotonic() + SECONDS
        while not job.done:
            assert time.monotonic() < end, f"{job!r} does not end"
            self._release()
            try:
                job.wait(0.002)
            except TimeoutError:
                pass

    def _look_at(self, live: Live, memory: Memory) -> None:
        """Compare what a job has done with what it may have done."""
        outcomes = live.job.wait(SECONDS)
        self.counts.update(f"{live.kind} {outcome.value}" for outcome in outcomes)
        for place, (key, outcome) in enumerate(zip(live.job.keys, outcomes, strict=True)):
            if live.kind == "put" and outcome in NEVER_BEGUN:
                self.history.never(key, live.versions[place])
            elif live.kind == "put":
                version = memory.version(live.job.entries[place])
                assert version == live.versions[place], "the tier has written to an entry that was put"
            elif live.kind in ("get", "read") and outcome is Outcome.DONE:
                version = memory.version(live.job.entries[place])
                assert version is not None, f"{key!r} is DONE with bytes of no version"
                later = version > live.after and self._key_of.get(version) == key
                assert later or version in live.may[place], f"{live.kind} of {key!r}: {version}; {live.may[place]}"
        if live.kind == "remove" and all(outcome in GONE for outcome in outcomes):
            self.history.removed(live.removal)
        if live.kind in ("put", "get"):
            self._free(live.job.entries)

    # restarts -----------------------------------------------------------------------------------------------------

    def _close(self) -> None:
        self._shut(kill=False)
        self._open(self.rng.choice(PROFILES))

    def _kill(self) -> None:
        self._shut(kill=True)
        self._open(self.rng.choice(PROFILES))

    def _reader(self) -> None:
        assert self.reader.close(SECONDS)
        self.reading = None
        self.reader = make_tier(self.folder, self.reader_memory, files=self.files, read_only=True)

    def _shut(self, *, kill: bool) -> None:
        for live in [live for live in self.live if live.job.done]:
            self.live.remove(live)
            self._look_at(live, self.memory)
        if kill:
            self.calls.kill()
        elif self.tier.close(0.0) and self.rng.random() < 0.5:
            pass
        else:
            self.calls.faults = NO_FAULTS
        end = time.monotonic() + SECONDS
        while not self._call(partial(self.tier.close, 0.01)):
            assert time.monotonic() < end, "the tier does not close"
            self.calls.release()
        for live in self.live:
            if kill and live.kind == "remove":
                continue  # what a killed process says of a removal does not count
            self._look_at(live, self.memory)
        self.live.clear()
        self._free(self.lost)
        self.lost.clear()
        self.counts.update(self.calls.injected)

    def _open(self, faults: Faults) -> None:
        """With failing calls, too; what they refuse is opened again without."""
        direct = self.rng.random() < 0.5
        for each in (Faults(faults.short / 50, faults.error / 5, faults.late_error / 5, faults.sync_error), NO_FAULTS):
            self.calls = ChaosFiles(self.rng.randrange(1 << 30), each)
            try:
                self.tier = make_tier(
                    self.folder,
                    self.memory,
                    files=self.files,
                    operations=self.calls,
                    direct=direct,
                    limits=Limits(threads=3),
                )
                break
            except (OSError, KVOffloadError):
                assert each is not NO_FAULTS
                self.counts["open refused"] += 1
        self.calls.faults = faults
        if self.ghosts is not None:
            self.ghosts.calls = self._haunted()

    def _haunted(self) -> list[Callable[[], object]]:
        """What finalizers call: on a key and an entry of their own, where it changes something."""
        tier, key, entry = self.tier, [b"ghost"], [ENTRIES]
        return [
            partial(tier.contains, KEYS), partial(tier.exists, KEYS[:3]), tier.statistics, partial(tier.drain, 0.0),
            partial(tier.put, key, entry), partial(tier.get, key, entry), partial(tier.remove, key),
            partial(repr, tier), partial(tier.drain, 0.01),
        ]  # fmt: skip


def run(operations: int, seed: int, haunts: list[str] | None = None) -> Counter[str]:
    """One machine; AssertionError where it is wrong. Counts, with descriptors and threads that were left."""
    base = Path(tempfile.mkdtemp())
    before = held()
    try:
        (base / "disk").mkdir(mode=0o700)
        machine = Machine(base / "disk", seed, haunts=haunts)
        machine.run(operations, int if haunts is None else Watchdog(HUNG_SECONDS, sys.stderr).goes_on)
    finally:
        shutil.rmtree(base)
    after = held()
    machine.counts.update({f"{name} left": after[name] - before[name] for name in ("descriptors", "threads")})
    return machine.counts


if __name__ == "__main__":
    logging.getLogger("kvoffload").setLevel(logging.CRITICAL)
    totals, problems = Counter[str](), list[str]()
    unheard(problems)
    try:
        totals = run(int(sys.argv[1]), int(sys.argv[2]), problems)
    except Exception:
        problems.append(f"machine of seed {sys.argv[2]}: {traceback.format_exc()[-2500:]}")
    print(json.dumps({"counts": totals, "wrong": problems[:10]}))
