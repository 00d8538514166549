"""Random operations on a disk tier whose system calls fail, hang and end late; every byte is compared.

Jobs overlap. Entries that no job has are filled with known bytes, which must not change. A second tier reads the same
files. The tier is closed, killed and opened again meanwhile.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from chaos_files import NO_FAULTS, ChaosFiles, Faults
from chaos_history import SECONDS, History, Memory, make_tier, names
from exhausting import held

from kvoffload.errors import KVOffloadError
from kvoffload.tiers import DiskTier, Limits, Outcome, TierJob

KEYS = names(range(16))
GONE = (Outcome.DONE, Outcome.MISSING)
NEVER_BEGUN = (Outcome.CANCELLED, Outcome.EXPIRED)
ENTRIES = 24
JOBS = 6
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
    """See above. `counts` has operations, steps, outcomes and faults."""

    def __init__(self, folder: Path, seed: int, *, files: int = 2) -> None:
        self.rng = random.Random(seed)
        self.folder = folder
        self.files = files
        self.memory = Memory(ENTRIES)
        self.history = History()
        self.counts: Counter[str] = Counter()
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

    def run(self, operations: int) -> None:
        kinds, weights = list(STEPS), list(STEPS.values())
        while self.counts["operations"] < operations:
            kind = self.rng.choices(kinds, weights)[0]
            self.counts[f"step {kind}"] += 1
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

    def _take(self, count: int) -> list[int]:
        while len(self._expected) < count:
            self._settle()
        chosen = self.rng.sample(sorted(self._expected), count)
        for entry in chosen:
            expected = self._expected.pop(entry)
            assert self.memory.version(entry) == expected, f"entry {entry} has changed, and no job had it"
        return chosen

    def _free(self, entries: range | tuple[int, ...]) -> None:
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
        job = self.tier.put(keys, entries, deadline=self._deadline())
        self.live.append(Live("put", job, versions=tuple(versions)))

    def _get(self) -> None:
        keys = self._some_keys()
        entries = self._take(len(keys))
        may = tuple(map(self.history.may, keys))
        job = self.tier.get(keys, entries, deadline=self._deadline())
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
        self.tier.contains(keys)
        self.live.append(Live("exists", self.tier.exists(keys)))

    def _remove(self) -> None:
        self._forget(self._some_keys(3))

    def _clear(self) -> None:
        self._forget(None)
        self.counts["operations"] += 1

    def _forget(self, keys: list[bytes] | None) -> None:
        self._removals += 1
        self.history.removing(self._removals, keys)
        job = self.tier.clear() if keys is None else self.tier.remove(keys)
        self.live.append(Live("remove", job, removal=self._removals))

    def _drain(self) -> None:
        self.tier.drain(self.rng.choice((0.0, 0.01)))

    def _cancel(self) -> None:
        if self.live:
            self.rng.choice(self.live).job.cancel()

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
        while not self.tier.close(0.01):
            assert time.monotonic() < end, "the tier does not close"
            self.calls.release()
        for live in self.live:
            if kill and live.kind == "remove":
                continue  # what a killed process says of a removal does not count
            self._look_at(live, self.memory)
        self.live.clear()
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


def run(operations: int, seed: int) -> Counter[str]:
    """One machine; AssertionError where it is wrong. Counts, with descriptors and threads that were left."""
    base = Path(tempfile.mkdtemp())
    before = held()
    try:
        (base / "disk").mkdir(mode=0o700)
        machine = Machine(base / "disk", seed)
        machine.run(operations)
    finally:
        shutil.rmtree(base)
    after = held()
    machine.counts.update({f"{name} left": after[name] - before[name] for name in ("descriptors", "threads")})
    return machine.counts
