"""Crash states replayed: random calls of a DiskTier, and what its disks may hold after a crash at any moment.

Every write and sync is recorded. A crash may lose any unsynced write, by whole writes or by sectors of 512 bytes, in
any order. After a sync that failed, what was not durable is lost though it can be read, until it is written again. The
tier is opened on such states: every record must have a version that was put under its key, and none that was put
before a removal whose job had ended.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from chaos_files import ChaosFiles, Event, EventLog, Faults, Noted, Sized, SyncBegun, SyncEnded, Written
from chaos_history import SECONDS, History, Memory, fetch, make_tier, names

from kvoffload.tiers import DiskTier, Limits, Outcome, TierJob

SECTOR = 512
KEYS = names(range(12))
GONE = (Outcome.DONE, Outcome.MISSING)
FAULTS = Faults(short=0.02, error=0.02, late_error=0.02, sync_error=0.05)
PROFILES = (Faults(short=0.05), Faults(sync_error=0.3), FAULTS, Faults(late_error=0.15))


class FileStates:
    """One file: what can be read, and which versions of each sector a crash may leave.

    Attributes:
        image: what can be read.
    """

    def __init__(self, image: bytes = b"") -> None:
        self.image = bytearray(image)
        self._versions: dict[int, list[tuple[int, bytes]]] = {}  # and when; the first is durable, the last can be read
        self._time = 0
        self._lost: set[int] = set()  # sectors that no sync makes durable before they are written again
        self._writes: list[tuple[int, bytes]] = []  # not durable, whole; None are known after a sync that failed
        self._any_lost = False
        self._marks: dict[int, tuple[dict[int, int], int]] = {}  # of each sync: versions and writes that it covers

    def resize(self, nbytes: int, shrinks: bool) -> None:
        """Durable at once."""
        self.image.extend(bytes(max(0, nbytes - len(self.image))))
        if shrinks:
            del self.image[nbytes:]
            self._versions = {sector: each for sector, each in self._versions.items() if sector * SECTOR < nbytes}
            self._writes = [(offset, data) for offset, data in self._writes if offset + len(data) <= nbytes]

    def write(self, offset: int, data: bytes) -> None:
        sectors = range(offset // SECTOR, -(-(offset + len(data)) // SECTOR))
        self._time += 1
        for sector in sectors:
            self._versions.setdefault(sector, [(0, self._sector(sector))])
        self.image[offset : offset + len(data)] = data
        for sector in sectors:
            self._versions[sector].append((self._time, self._sector(sector)))
            self._lost.discard(sector)
        self._writes.append((offset, data))

    def sync_begins(self, number: int) -> None:
        covered = {sector: len(each) - 1 for sector, each in self._versions.items() if sector not in self._lost}
        self._marks[number] = covered, len(self._writes)

    def sync_ends(self, number: int, succeeded: bool) -> None:
        covered, writes = self._marks.pop(number)
        if not succeeded:
            self._lost.update(covered)
            self._any_lost = True
            return
        dropped = dict[int, int]()
        for sector, count in covered.items():
            if sector in self._versions and sector not in self._lost:
                del self._versions[sector][:count]
                dropped[sector] = count
                if len(self._versions[sector]) == 1:
                    del self._versions[sector]
        del self._writes[:writes]
        for other, (marks, count) in self._marks.items():
            rest = {sector: max(0, at - dropped.get(sector, 0)) for sector, at in marks.items()}
            self._marks[other] = rest, max(0, count - writes)

    def state(self, rng: random.Random) -> bytes:
        """One state after a crash now: each of some ranges as it was at one moment, with exceptions."""
        if not self._any_lost and rng.random() < 0.3:
            return self._some_writes(rng)
        image = bytearray(self.image)
        size = rng.choice((1, 8, 16, 1 << 20))  # sectors of a range
        exceptions = rng.choice((0.0, 0.0, 0.1, 0.5))
        oldest, newest = rng.choice(((0.5, 0.5), (0.9, 0.1), (0.1, 0.9), (0.3, 0.3)))
        moments: dict[int, int] = {}
        for sector, versions in self._versions.items():
            if sector // size not in moments or rng.random() < exceptions:
                extremes = rng.choices((0, self._time, rng.randint(0, self._time)), (oldest, newest, 0.2))
                moments[sector // size] = extremes[0]
            moment = moments[sector // size]
            data = next((data for time, data in reversed(versions) if time <= moment), versions[0][1])
            image[sector * SECTOR : sector * SECTOR + len(data)] = data
        return bytes(image)

    def _some_writes(self, rng: random.Random) -> bytes:
        """Some of the writes since the last sync, in any order, some of them torn."""
        image = bytearray(self.image)
        for sector, versions in self._versions.items():
            oldest = versions[0][1]
            image[sector * SECTOR : sector * SECTOR + len(oldest)] = oldest
        kept = rng.choice((0.2, 0.5, 0.9))
        writes = [write for write in self._writes if rng.random() < kept]
        if rng.random() < 0.5:
            rng.shuffle(writes)
        for offset, data in writes:
            torn = rng.random() < 0.3
            for start, end in _by_sector(offset, len(data)):
                if not torn or rng.random() < 0.5:
                    image[start:end] = data[start - offset : end - offset]
        return bytes(image)

    def _sector(self, sector: int) -> bytes:
        return bytes(self.image[sector * SECTOR : (sector + 1) * SECTOR])


def _by_sector(offset: int, nbytes: int) -> Iterator[tuple[int, int]]:
    start, end = offset, offset + nbytes
    while start < end:
        after = min(end, (start // SECTOR + 1) * SECTOR)
        yield start, after
        start = after


class Replay:
    """The files and the history of a log, up to one of its events."""

    def __init__(self) -> None:
        self.files: dict[str, FileStates] = {}
        self.history = History()

    def advance(self, event: Event) -> None:
        if isinstance(event, Noted):
            self.history.apply(event.what, event.arguments)
            return
        file = self.files.setdefault(event.path, FileStates())
        if isinstance(event, Written):
            file.write(event.offset, event.data)
        elif isinstance(event, Sized):
            file.resize(event.nbytes, event.shrinks)
        elif isinstance(event, SyncBegun):
            file.sync_begins(event.number)
        elif isinstance(event, SyncEnded):
            file.sync_ends(event.number, event.succeeded)

    def state(self, rng: random.Random) -> dict[str, bytes]:
        """What each file may hold after a crash now, by path."""
        return {path: file.state(rng) for path, file in self.files.items()}

    def restart_from(self, state: Mapping[str, bytes]) -> None:
        self.files = {path: FileStates(image) for path, image in state.items()}


class Program:
    """Random calls of a tier whose disks are recorded.

    Args:
        faults: of the system calls.
        files: makes the system calls of a process.
    """

    def __init__(
        self,
        folder: Path,
        rng: random.Random,
        faults: Faults,
        files: Callable[[int, EventLog], ChaosFiles] = lambda seed, log: ChaosFiles(seed, log=log),
    ) -> None:
        self.rng = rng
        self.log = EventLog()
        self.memory = Memory(12)
        self.folder = folder
        self._files = files
        self._faults = faults
        self.members = rng.choice((1, 2, 2, 3))
        self._version = 0
        self._removals = 0
        self._jobs: list[tuple[TierJob, int | None]] = []  # and the number of its removal
        self.calls: ChaosFiles
        self.tier: DiskTier
        self.open()

    def open(self) -> None:
        self.calls = self._files(self.rng.randrange(1 << 30), self.log)
        direct = self.rng.random() < 0.5  # also writes the first page of payloads back, where that works
        self.tier = make_tier(
            self.folder, self.memory, files=self.members, operations=self.calls, limits=Limits(threads=2), direct=direct
        )
        self.calls.faults = self._faults

    def step(self) -> str:
        """One or a few calls at a time; what they were."""
        kind = self.rng.choices(
            ["put", "remove", "clear", "get", "sync", "close", "kill", "crash"], [40, 18, 4, 10, 6, 3, 3, 2]
        )[0]
        if kind == "put":
            self.put()
        elif kind == "remove":
            self._remove(self.rng.sample(KEYS, self.rng.randint(1, 3)))
        elif kind == "clear":
            self._remove(None)
        elif kind == "get":
            self._jobs.append((self.tier.get(self.rng.sample(KEYS, 3), [9, 10, 11]), None))
            self.wait()
        elif kind == "sync":
            self.tier.drain(SECONDS)
        elif kind == "close":
            self.wait()
            assert self.tier.close(SECONDS)
            self.open()
        if self.rng.random() < 0.7 or len(self._jobs) > 2:
            self.wait()
        failed = self.calls.injected["sync_error"] and kind != "close"
        return "kill" if failed and self.rng.random() < 0.3 else kind

    def put(self) -> None:
        keys = self.rng.sample(KEYS, self.rng.randint(1, 3))
        entries = list(range(len(self._jobs) * 3, len(self._jobs) * 3 + len(keys)))
        for key, entry in zip(keys, entries, strict=True):
            self._version += 1
            self.memory.fill(entry, self._version)
            self.log.note("put", key, self._version)
        self._jobs.append((self.tier.put(keys, entries), None))

    def _remove(self, keys: list[bytes] | None) -> None:
        self._removals += 1
        self.log.note("removing", self._removals, keys)
        job = self.tier.clear() if keys is None else self.tier.remove(keys)
        self._jobs.append((job, self._removals))

    def wait(self) -> None:
        for job, removal in self._jobs:
            outcomes = job.wait(SECONDS)
            if removal is not None and all(outcome in GONE for outcome in outcomes):
                self.log.note("removed", removal)
        self._jobs.clear()

    def with_all_members(self, state: Mapping[str, bytes]) -> dict[str, bytes]:
        """The same with all members: one that has not been created yet is empty."""
        return {str(self.folder / f"{number}.kv"): b"" for number in range(self.members)} | dict(state)

    def kill(self) -> None:
        """End the process; what its jobs say afterwards does not count."""
        self.calls.kill()
        assert self.tier.close(SECONDS)
        self._jobs.clear()


def examine(
    state: Mapping[str, bytes], history: History, folder: Path, memory: Memory, members: int
) -> tuple[int, list[str]]:
    """Open a tier on a state: how many records it has, and what is wrong with them."""
    for path, image in state.items():
        target = folder / Path(path).name
        target.write_bytes(image)
        target.chmod(0o600)
    tier = make_tier(folder, memory, files=members)
    try:
        found = fetch(tier, memory, KEYS)
    except AssertionError as error:
        return 0, [str(error)]
    finally:
        assert tier.close(SECONDS)
    wrong = [
        f"{key!r} has version {version}; possible were {sorted(history.may(key))}"
        for key, version in found.items()
        if version not in history.may(key)
    ]
    return len(found), wrong


def run_program(
    states: int,
    rng: random.Random,
    faults: Faults,
    files: Callable[[int, EventLog], ChaosFiles] = lambda seed, log: ChaosFiles(seed, log=log),
    each: int = 2,
) -> tuple[Counter[str], list[str]]:
    """Run one program until so many of its crash states have been examined.

    Args:
        each: states at each moment that is chosen.
        files: makes the system calls of a process.

    Returns:
        Counts of states, records, operations and wrong records; and what was wrong.
    """
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    base = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    try:
        for name in ("disk", "after"):
            (base / name).mkdir(mode=0o700)
        program, replay, memory, done = Program(base / "disk", rng, faults, files), Replay(), Memory(12), 0
        while counts["states"] < states:
            kind = program.step()
            counts["operations"] += 1
            if kind in ("kill", "crash"):
                program.kill()
            while done < len(program.log.events):  # threads of the tier add more meanwhile
                replay.advance(program.log.events[done])
                done += 1
                for _ in range(each if rng.random() < 0.5 else 0):
                    state = program.with_all_members(replay.state(rng))
                    found, problems = examine(state, replay.history, base / "after", memory, program.members)
                    counts.update(states=1, records=found, wrong=len(problems))
                    wrong += problems
            if kind == "crash":
                _crash(replay, rng)
            if kind in ("kill", "crash"):
                program.open()
            counts[kind] += 1
        program.kill()
    finally:
        shutil.rmtree(base)
    return counts, wrong


def _crash(replay: Replay, rng: random.Random) -> None:
    """The machine goes down, and comes up with one of the states."""
    state = replay.state(rng)
    replay.restart_from(state)
    for path, image in state.items():
        Path(path).write_bytes(image)


def run(states: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Many programs, with the faults of PROFILES in turn."""
    rng, counts, wrong, number = random.Random(seed), Counter[str](), list[str](), 0
    while counts["states"] < states:
        faults = PROFILES[number % len(PROFILES)]
        more, problems = run_program(min(500, states - counts["states"]), rng, faults)
        counts.update(more)
        wrong += problems
        number += 1
    counts["programs"] = number
    return counts, wrong
