"""Damage at rest: bytes flipped, files cut off, slots and members swapped, older sectors and pages brought back."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from chaos_history import PAGE, RECORD_BYTES, SECONDS, Memory, fetch, make_tier, names

from kvoffload.tiers import DiskTier, Outcome

FILES = ("0.kv", "1.kv")
SLOTS = 2  # of each file
KEYS = names(range(len(FILES) * SLOTS))
LATER = names(range(10, 10 + len(KEYS)))
TABLE = 2 * PAGE
DATA = 3 * PAGE
SUPERBLOCK = 512
HEADER = 192

State = dict[str, bytes]


class Damaged(NamedTuple):
    """A state of the files, and what a tier may and must find.

    Attributes:
        what: the damage.
        state: of each file.
        least: records that must be there.
        may: records that may be there.
    """

    what: str
    state: State
    least: dict[bytes, int]
    may: dict[bytes, int]


class Lab:
    """Folders, memory and states of small files."""

    def __init__(self) -> None:
        self.base = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        self.memory = Memory(len(KEYS))
        self._number = 0

    def close(self) -> None:
        shutil.rmtree(self.base)

    def folder(self) -> Path:
        self._number += 1
        folder = self.base / str(self._number)
        folder.mkdir(mode=0o700)
        return folder

    def put(self, folder: Path, versions: dict[bytes, int], **options: Any) -> None:
        """Put these versions with a tier on these files."""
        for entry, version in enumerate(versions.values()):
            self.memory.fill(entry, version)
        with self.tier(folder, **options) as tier:
            outcomes = tier.put(list(versions), range(len(versions))).wait(SECONDS)
        assert set(outcomes) == {Outcome.DONE}

    @contextmanager
    def tier(self, folder: Path, **options: Any) -> Iterator[DiskTier]:
        """A tier on these files, which is closed afterwards."""
        tier = make_tier(folder, self.memory, **({"slots": SLOTS} | options))
        try:
            yield tier
        finally:
            assert tier.close(SECONDS)

    def read(self, folder: Path) -> State:
        return {name: (folder / name).read_bytes() for name in FILES}

    def found(self, state: State) -> dict[bytes, int]:
        """The records that a tier on these files has, each byte compared."""
        folder = self.base / "damaged"
        folder.mkdir(mode=0o700, exist_ok=True)
        for name, data in state.items():
            (folder / name).write_bytes(data)
            (folder / name).chmod(0o600)
        with self.tier(folder) as tier:
            return fetch(tier, self.memory, [*KEYS, *LATER])

    def check(self, each: Damaged) -> str | None:
        """What is wrong with the records of a damaged state."""
        try:
            found = self.found(each.state)
        except AssertionError as error:
            return f"{each.what}: {error}"
        if not each.least.items() <= found.items() <= each.may.items():
            return f"{each.what}: found {found}, expected at least {each.least} and at most {each.may}"
        return None


def full(lab: Lab) -> tuple[Path, State, dict[bytes, int]]:
    """Files whose slots are all records."""
    folder, versions = lab.folder(), {key: 100 + number for number, key in enumerate(KEYS)}
    lab.put(folder, versions)
    return folder, lab.read(folder), versions


def places(state: State, versions: dict[bytes, int]) -> dict[tuple[str, int], bytes]:
    """Which key is in which slot of which file."""
    found = {}
    for name in FILES:
        for slot in range(SLOTS):
            header = state[name][TABLE + slot * HEADER :][:HEADER]
            found[name, slot] = header[48 : 48 + header[164]]
    assert sorted(found.values()) == sorted(versions)
    return found


# damages --------------------------------------------------------------------------------------------------------------


def flipped(lab: Lab, stride: int, rng: random.Random) -> Iterator[Damaged]:
    """Every byte of superblocks, headers and payloads, one at a time; of payloads each `stride`th."""
    _, state, versions = full(lab)
    at = places(state, versions)
    for name in FILES:
        headers = range(TABLE, TABLE + SLOTS * HEADER)
        payloads = range(DATA + rng.randrange(stride), DATA + SLOTS * RECORD_BYTES, stride)
        for offset in (*range(SUPERBLOCK), *range(PAGE, PAGE + SUPERBLOCK), *headers, *payloads):
            data = bytearray(state[name])
            data[offset] ^= 1 << rng.randrange(8)
            hit: bytes | None = None
            if offset >= DATA:
                hit = at[name, (offset - DATA) // RECORD_BYTES]
            elif offset >= TABLE:
                hit = at[name, (offset - TABLE) // HEADER]
            least = {key: version for key, version in versions.items() if key != hit}
            yield Damaged(f"byte {offset} of {name} flipped", state | {name: bytes(data)}, least, least)


def truncated(lab: Lab) -> Iterator[Damaged]:
    """Each file cut off at each page and around it."""
    _, state, versions = full(lab)
    at = places(state, versions)
    for name in FILES:
        pages = range(0, len(state[name]) + 1, PAGE)
        for nbytes in sorted({min(max(0, page + off), len(state[name])) for page in pages for off in (-1, 0, 1, 600)}):
            whole = {
                key for (file, slot), key in at.items() if file != name or DATA + (slot + 1) * RECORD_BYTES <= nbytes
            }
            least = {key: versions[key] for key in whole} if nbytes >= SUPERBLOCK else {}
            yield Damaged(f"{name} cut off at {nbytes}", state | {name: state[name][:nbytes]}, least, least)


def swapped(lab: Lab) -> Iterator[Damaged]:
    """Headers, payloads or both of two slots; superblocks of two members; the files of a set as each other."""
    _, state, versions = full(lab)
    at = places(state, versions)
    slots = list(at)
    for first in range(len(slots)):
        for second in range(first + 1, len(slots)):
            rest = {key: versions[key] for slot, key in at.items() if slot not in (slots[first], slots[second])}
            for parts in ("headers", "payloads", "headers and payloads"):
                data = {name: bytearray(each) for name, each in state.items()}
                for part in parts.split(" and "):
                    start, size = (TABLE, HEADER) if part == "headers" else (DATA, RECORD_BYTES)
                    _swap(data, slots[first], slots[second], start, size)
                what = f"{parts} of {slots[first]} and {slots[second]} swapped"
                yield Damaged(what, {name: bytes(each) for name, each in data.items()}, rest, rest)
    one, other = FILES
    yield Damaged("members swapped", {one: state[other], other: state[one]}, versions, versions)


def _swap(data: dict[str, bytearray], first: tuple[str, int], second: tuple[str, int], start: int, size: int) -> None:
    (a, i), (b, j) = first, second
    left, right = slice(start + i * size, start + (i + 1) * size), slice(start + j * size, start + (j + 1) * size)
    data[a][left], data[b][right] = bytes(data[b][right]), bytes(data[a][left])


def mixed(older: State, newer: State, what: str, may: dict[bytes, int], rng: random.Random) -> Iterator[Damaged]:
    """Each sector and page of the older state in the newer one, and random sets of sectors."""
    for unit in (512, PAGE):
        for name in FILES:
            for start in range(0, len(newer[name]), unit):
                data = bytearray(newer[name])
                data[start : start + unit] = older[name][start : start + unit]
                if bytes(data) != newer[name]:
                    yield Damaged(f"{what}: {unit} bytes at {start} of {name}", newer | {name: bytes(data)}, {}, may)
    for _ in range(60):
        state = {name: bytearray(data) for name, data in newer.items()}
        for name in FILES:
            for start in range(TABLE, len(newer[name]), 512):  # the superblocks stay
                if rng.random() < 0.5:
                    state[name][start : start + 512] = older[name][start : start + 512]
        yield Damaged(f"{what}: sectors", {name: bytes(data) for name, data in state.items()}, {}, may)


def older_generations(lab: Lab, rng: random.Random) -> Iterator[Damaged]:
    """What was before a clear, before other records, and before a removal."""
    folder, before, versions = full(lab)
    later = {key: 200 + number for number, key in enumerate(LATER)}
    lab.put(folder, later)
    yield from mixed(before, lab.read(folder), "before other records", versions | later, rng)
    with lab.tier(folder) as tier:
        tier.clear().wait(SECONDS)
    cleared = lab.read(folder)
    yield from mixed(before, cleared, "before a clear", {}, rng)
    lab.put(folder, later)
    yield from mixed(before, lab.read(folder), "before a clear and other records", later, rng)

    folder, before, versions = full(lab)
    with lab.tier(folder) as tier:
        tier.remove(KEYS[:2]).wait(SECONDS)
    removed = lab.read(folder)
    # The format cannot know that a header's sector is older: the record is back, with its own bytes.
    yield from mixed(before, removed, "before a removal", versions, rng)
    rest = {key: version for key, version in versions.items() if key not in KEYS[:2]}
    payloads = {name: removed[name][:DATA] + before[name][DATA:] for name in FILES}
    yield Damaged("payloads before a removal", payloads, rest, rest)
    lab.put(folder, {key: 300 + number for number, key in enumerate(LATER[:2])})
    reused = lab.read(folder)
    tables = {name: before[name][:DATA] + reused[name][DATA:] for name in FILES}
    yield Damaged("headers before a removal, whose slots have other payloads", tables, rest, rest)
    yield Damaged("all of both files before a removal", before, versions, versions)


def run(stride: int, seed: int, every: int = 1) -> tuple[Counter[str], list[str]]:
    """All damages, or one of `every` so many; counts of each kind, and what was wrong."""
    rng, counts, wrong, lab = random.Random(seed), Counter[str](), list[str](), Lab()
    kinds: dict[str, Iterable[Damaged]] = {
        "flipped": flipped(lab, stride, rng),
        "truncated": truncated(lab),
        "swapped": swapped(lab),
        "older": older_generations(lab, rng),
    }
    try:
        for kind, damages in kinds.items():
            for each in islice(damages, rng.randrange(every), None, every):
                problem = lab.check(each)
                counts[kind] += 1
                wrong += [] if problem is None else [problem]
    finally:
        lab.close()
    counts["wrong"] = len(wrong)
    return counts, wrong
