"""Random calls of several members of a pool, compared with a model that knows which bytes a hit may have.

Each store of a key writes other bytes; with a tier, which keeps the first ones, only after a removal. The model has for
each key the bytes of the last store that was accepted, or None if it was removed since: a hit must give exactly these.
A miss is always legal, since keys are evicted, and misses where no owner answers; so hits are counted.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from pooling import ROW_BYTES, SECONDS, SOURCES, TARGETS, Member, eventually, keys_of, region_bytes, rows_of

from kvoffload import NO_WAIT, MissingKeyError, Status, TransferError
from kvoffload.layout.coding import CodecName
from kvoffload.pool import PoolOwner

NUMBERS = 24


def bytes_of(number: int, version: int, codec: CodecName) -> npt.NDArray[np.uint8]:
    """(planes, bytes): of a key after its store with this version."""
    random = np.random.default_rng((number, version))
    found: npt.NDArray[np.uint8] = rows_of(random, "raw" if unfit(number, version, codec) else codec, 1)[0]
    return found


def unfit(number: int, version: int, codec: CodecName) -> bool:
    """Whether these bytes do not fit the codec."""
    return codec != "raw" and (7 * number + version) % 9 == 0


@dataclass
class Held:
    """A lease, with what its slots must go on to hold."""

    member: Member
    lease: Any
    versions: list[tuple[int, int]]


@dataclass
class Fuzz:
    """A pool, its members and the model."""

    folder: Path
    seed: int
    capacity: int = 14
    num_members: int = 3
    options: dict[str, Any] = field(default_factory=dict)
    tiered: bool = False
    codec: CodecName = "raw"

    def __post_init__(self) -> None:
        self.rng, self.counts = random.Random(self.seed), Counter[str]()
        self.allowed: dict[int, int | None] = dict.fromkeys(range(NUMBERS))
        self.version, self.removals = 0, Counter[int]()
        self.held: list[Held] = []
        self.opened: list[tuple[Member, Any, dict[int, int]]] = []  # reservations
        self.path = str(self.folder / "pool")
        self.owner = self.serve()
        self.stacks = [ExitStack() for _ in range(self.num_members)]
        self.members = [Member(self.path, stack, codec=self.codec) for stack in self.stacks]

    def serve(self) -> PoolOwner:
        return PoolOwner(self.path, nbytes=region_bytes(self.capacity), **self.options)

    def run(self, steps: int) -> Counter[str]:
        kinds: dict[Callable[[], None], int] = {
            self.store: 22, self.load: 14, self.pending: 6, self.fetch: 16, self.reserve: 8, self.settle: 8,
            self.acquire: 6, self.release: 6, self.remove: 5, self.clear: 1, self.request: 6, self.hint: 2,
            self.look: 6, self.reattach: 1, self.restart: 1,
        }  # fmt: skip
        for _ in range(steps):
            self.rng.choices(list(kinds), list(kinds.values()))[0]()
        while self.held:
            self.release()
        while self.opened:
            self.settle()
        for each in self.members:
            each.engine.drain(SECONDS)
            each.cache.status([])
            each.cache.check()
        eventually(self.idle, "nothing is held")
        self.counts["unfit"] = sum(each.cache.statistics().unfit for each in self.members)
        return self.counts

    def idle(self) -> bool:
        for each in self.members:
            each.cache.status([])
        found = self.owner.statistics()
        return bool(found) and (found[0]["pending"], found[0]["pinned"]) == (0, 0)

    def close(self) -> None:
        for stack in self.stacks:
            stack.close()
        self.owner.close()

    # pieces -------------------------------------------------------------------------------------------------------

    def some(self) -> list[int]:
        start = self.rng.randrange(NUMBERS)
        return [(start + each) % NUMBERS for each in range(self.rng.randint(1, 6))]

    def write_sources(self, one: Member, numbers: list[int]) -> list[int]:
        """New bytes for each key in its source block; their versions."""
        one.engine.drain(SECONDS)  # nothing reads the blocks
        versions = list(map(self.next_version, numbers))
        for number, version in zip(numbers, versions, strict=True):
            one.put(number, bytes_of(number, version, self.codec))
        return versions

    def next_version(self, number: int) -> int:
        if self.tiered:
            return self.removals[number]
        self.version += 1
        return self.version

    def targets(self, count: int) -> list[int]:
        return [SOURCES + each for each in self.rng.sample(range(TARGETS), count)]

    def compare(self, one: Member, numbers: list[int], blocks: list[int], what: str) -> None:
        image = one.buffer.to_numpy()
        for number, block in zip(numbers, blocks, strict=True):
            version = self.legal(number)
            assert version is not None, f"{what}: key {number} was removed, and is a hit"
            starts = [plane.address - one.buffer.address + block * ROW_BYTES for plane in one.planes]
            rows = np.array([image[start : start + ROW_BYTES] for start in starts])
            assert np.array_equal(rows, bytes_of(number, version, self.codec)), f"{what}: key {number} has other bytes"
        self.counts[what] += len(numbers)

    def legal(self, number: int) -> int | None:
        """The version that a hit must have. With a tier a key may come back from there until it is removed."""
        version = self.removals[number] if self.tiered else self.allowed[number]
        return None if version is None or unfit(number, version, self.codec) else version

    def accept(self, numbers: list[int], versions: list[int], keys: tuple[bytes, ...]) -> None:
        stored = set(map(int, keys))
        self.allowed |= {n: version for n, version in zip(numbers, versions, strict=True) if n in stored}
        self.counts["stored"] += len(stored)

    # steps --------------------------------------------------------------------------------------------------------

    def store(self) -> None:
        one, numbers = self.rng.choice(self.members), self.some()
        versions = self.write_sources(one, numbers)
        call = self.rng.choice((one.cache.store, one.cache.keep))
        job = call(keys_of(numbers), numbers, after=NO_WAIT)
        self.accept(numbers, versions, job.keys)
        if self.rng.random() < 0.6:
            job.wait(SECONDS)

    def load(self) -> None:
        one, numbers = self.rng.choice(self.members), self.some()
        hits = one.hits(*numbers)
        blocks = self.targets(hits)
        one.poison(blocks)
        one.cache.load(keys_of(numbers[:hits]), blocks, after=NO_WAIT).wait(SECONDS)
        self.compare(one, numbers[:hits], blocks, "loaded")

    def pending(self) -> None:
        """A load behind the store, of keys that were there and of keys that it stores."""
        one, numbers = self.rng.choice(self.members), self.some()
        versions = self.write_sources(one, numbers)
        job = one.cache.store(keys_of(numbers), numbers, after=NO_WAIT)
        self.accept(numbers, versions, job.keys)
        blocks = self.targets(len(numbers))
        one.poison(blocks)
        try:
            behind = one.cache.load(keys_of(numbers), blocks, after=NO_WAIT, pending=True)
        except MissingKeyError:
            return
        if behind.jobs and any(self.legal(number) is None for number in numbers):
            with pytest.raises(TransferError, match="did not fit the codec"):
                behind.wait(SECONDS)
        else:
            behind.wait(SECONDS)
            self.compare(one, numbers, blocks, "loaded pending")

    def fetch(self) -> None:
        one, numbers = self.rng.choice(self.members), self.some()
        blocks = self.targets(len(numbers))
        one.poison(blocks)
        job = one.cache.fetch(keys_of(numbers), blocks, after=NO_WAIT, deadline=0.2)
        hits = job.wait(SECONDS)
        self.compare(one, numbers[:hits], blocks[:hits], "fetched")

    def request(self) -> None:
        one, numbers = self.rng.choice(self.members), self.some()
        with one.cache.open_request(session=self.rng.choice(("a", "b", None))) as opened:
            blocks = self.targets(len(numbers))
            one.poison(blocks)
            hits = one.cache.fetch(keys_of(numbers), blocks, after=NO_WAIT, request=opened).wait(SECONDS)
            self.compare(one, numbers[:hits], blocks[:hits], "fetched")
            rest = numbers[hits:]
            for piece in (rest[:2], rest[2:]):
                versions = self.write_sources(one, piece)
                job = one.cache.store(keys_of(piece), piece, after=NO_WAIT, request=opened)
                self.accept(piece, versions, job.keys)

    def reserve(self) -> None:
        one, numbers = self.rng.choice(self.members), self.some()
        reservation = one.cache.reserve(keys_of(numbers))
        versions = {}
        for number, slot in zip(map(int, reservation.keys), reservation.slots(), strict=True):
            versions[number] = self.next_version(number)
            one.row(slot)[:] = one.in_slot(bytes_of(number, versions[number], self.codec))
            self.allowed[number] = None
        self.opened.append((one, reservation, versions))

    def settle(self) -> None:
        """Commit, abort or drop a reservation. No program fills an entry by hand with what does not fit."""
        if self.opened:
            _, reservation, versions = self.opened.pop(self.rng.randrange(len(self.opened)))
            kind = self.rng.random()
            if kind < 0.6 and not any(unfit(*each, self.codec) for each in versions.items()):
                reservation.commit()
                self.allowed |= versions
            elif kind < 0.8:
                reservation.abort()

    def acquire(self) -> None:
        one, numbers = self.rng.choice(self.members), self.some()
        hits = one.hits(*numbers)
        lease = one.cache.acquire(keys_of(numbers[:hits]))
        versions = [(number, self.legal(number)) for number in numbers[:hits]]
        for number, version in versions:
            assert version is not None, f"acquire: key {number} was removed"
        self.held.append(Held(one, lease, [(number, version or 0) for number, version in versions]))

    def release(self) -> None:
        """What a lease holds has stayed the same, whatever was removed and stored meanwhile."""
        if self.held:
            held = self.held.pop(self.rng.randrange(len(self.held)))
            for (number, version), slot in zip(held.versions, held.lease.slots(), strict=True):
                expected = bytes_of(number, version, self.codec)
                same = np.array_equal(held.member.row(slot), held.member.in_slot(expected))
                assert same, f"lease: key {number} has other bytes"
            self.counts["leased"] += len(held.versions)
            if self.rng.random() < 0.8:
                held.lease.release()

    def remove(self) -> None:
        one, numbers = self.rng.choice(self.members), self.some()[:2]
        one.cache.remove(keys_of(numbers))
        self.removed(one, numbers)

    def clear(self) -> None:
        one = self.rng.choice(self.members)
        one.cache.clear()
        self.removed(one, list(range(NUMBERS)))

    def removed(self, one: Member, numbers: list[int]) -> None:
        if one.pool.connected:  # else no owner has done it
            self.allowed |= dict.fromkeys(numbers)
            self.removals.update(numbers)
            for _, _, versions in self.opened:
                for number in numbers:
                    versions.pop(number, None)

    def hint(self) -> None:
        action = self.rng.choice(("retain", "release", "demote", "prefetch"))
        self.rng.choice(self.members).cache.hint(action, session="a")

    def look(self) -> None:
        one = self.rng.choice(self.members)
        for number, status in enumerate(one.cache.status(keys_of(range(NUMBERS)))):
            assert status is not Status.HIT or self.legal(number) is not None, f"key {number} was removed"
        statistics = one.cache.statistics()
        assert statistics.resident + statistics.pending <= self.capacity

    def reattach(self) -> None:
        """A member leaves, whatever it has, and another one comes."""
        place = self.rng.randrange(self.num_members)
        old = self.members[place]
        self.held = [each for each in self.held if each.member is not old]
        self.opened = [each for each in self.opened if each[0] is not old]
        self.stacks[place].close()
        self.stacks[place] = ExitStack()
        self.members[place] = Member(self.path, self.stacks[place], codec=self.codec)
        self.counts["attached"] += 1

    def restart(self) -> None:
        """Another owner. In between, members go on without hits."""
        self.owner.close()
        self.opened.clear()  # at the next owner they are nothing
        for _ in range(self.rng.randint(0, 3)):
            self.rng.choice((self.store, self.load, self.fetch))()
        self.owner = self.serve()

        def joined() -> bool:
            return all(each.cache.status([]) == [] and each.pool.connected for each in self.members)

        eventually(joined, "they join")
        self.counts["owners"] += 1


def fuzz(folder: Path, seed: int, steps: int, **options: Any) -> Counter[str]:
    """Run it; counts."""
    one = Fuzz(folder, seed, **options)
    try:
        return one.run(steps)
    finally:
        one.close()
