"""Tools for tests of tiers: pools in host memory with numbered contents, and one tier with such a pool."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from kvoffload.internal.types import UInt8Array
from kvoffload.testing.transfers import POISON
from kvoffload.tiers import Outcome, Tier, TierJob

DONE, MISSING = Outcome.DONE, Outcome.MISSING
_ANY = frozenset(Outcome)
_GUARD = 4096  # bytes before and after each array
_GUARD_BYTE = 0x5C
_DIFFERENT = 61  # rows of random bytes that contents are made of


class TierPools:
    """One array for each of some devices, (entries, row_bytes), page-aligned, with guards; all entries are poisoned.

    Attributes:
        arrays: for `Tier.attach`.
        layout: 16 bytes that name shape and seed.
    """

    def __init__(self, entries: int, row_bytes: int, count: int, seed: int) -> None:
        self.arrays: list[UInt8Array] = []
        self._whole: list[UInt8Array] = []
        for _ in range(count):
            whole = np.frombuffer(mmap.mmap(-1, entries * row_bytes + 2 * _GUARD), dtype=np.uint8)
            whole[:] = _GUARD_BYTE
            self._whole.append(whole)
            self.arrays.append(whole[_GUARD:-_GUARD].reshape(entries, row_bytes))
        name = repr((entries, row_bytes, count, seed))
        self.layout = hashlib.blake2b(name.encode(), digest_size=16).digest()
        chance = np.random.default_rng(seed)
        self._rows = chance.integers(0, 256, (count, _DIFFERENT, row_bytes), dtype=np.uint8)
        for entry in range(entries):
            self.poison(entry)

    @property
    def record_bytes(self) -> int:
        return sum(array.shape[1] for array in self.arrays)

    def fill(self, entry: int, version: int) -> None:
        """Write the content with this number, 0 to 2**63 - 1, to an entry."""
        for array, rows in zip(self.arrays, self._rows, strict=True):
            array[entry] = rows[version % _DIFFERENT]
            array[entry, :8] = np.frombuffer(version.to_bytes(8, "little"), dtype=np.uint8)

    def version(self, entry: int) -> int | None:
        """Return the number of an entry's content, or None if a byte of it is wrong."""
        version = int.from_bytes(self.arrays[0][entry, :8].tobytes(), "little")
        for array, rows in zip(self.arrays, self._rows, strict=True):
            number, content = array[entry, :8].tobytes(), array[entry, 8:]
            if number != version.to_bytes(8, "little") or not np.array_equal(content, rows[version % _DIFFERENT, 8:]):
                return None
        return version

    def poison(self, entry: int) -> None:
        for array in self.arrays:
            array[entry] = POISON

    def poisoned(self, entry: int) -> bool:
        """Return whether an entry was not written to since it was poisoned."""
        return all(bool((array[entry] == POISON).all()) for array in self.arrays)

    def check_guards(self) -> None:
        """Raise AssertionError if a byte before or after an array has changed."""
        for number, whole in enumerate(self._whole):
            for where, guard in (("before", whole[:_GUARD]), ("after", whole[-_GUARD:])):
                assert (guard == _GUARD_BYTE).all(), f"the tier has written {where} pools[{number}]"


@dataclass(frozen=True)
class TierSetup:
    make: Callable[[], Tier]
    entries: int
    row_bytes: int
    pools: int
    seed: int
    timeout: float

    def new_pools(self) -> TierPools:
        return TierPools(self.entries, self.row_bytes, self.pools, self.seed)

    @contextmanager
    def session(self, *, attach: bool = True, clear: bool = True) -> Iterator[TierSession]:
        """Yield a tier with a pool, without records; close it afterwards, and check its guards."""
        session = TierSession(self)
        try:
            if attach:
                session.attach()
                if clear:
                    session.outcomes(session.tier.clear())
            yield session
            session.close()
            session.pools.check_guards()
        finally:
            session.tier.close(1.0)


class TierSession:
    """A tier, and pools for it. Record `n` has the key `key(n)` and content number `n`."""

    def __init__(self, setup: TierSetup) -> None:
        self.setup, self.timeout, self.count = setup, setup.timeout, setup.entries
        self.tier, self.pools = setup.make(), setup.new_pools()

    def attach(self) -> None:
        self.tier.attach(self.pools.arrays, self.pools.layout)

    def close(self) -> None:
        ended = self.tier.close(self.timeout)
        assert ended is True, f"close(timeout={self.timeout}) has returned {ended} although no call hangs"

    @staticmethod
    def key(number: int) -> bytes:
        return b"record %d" % number

    def keys(self, numbers: Iterable[int]) -> list[bytes]:
        return [self.key(number) for number in numbers]

    def outcomes(self, job: TierJob, allowed: Set[Outcome] = _ANY, what: str = "") -> list[Outcome]:
        """Wait for a job, and check that all of its outcomes are allowed; `what` says in the error what was done."""
        outcomes = job.wait(self.timeout)
        assert len(outcomes) == len(job.keys), f"{len(outcomes)} outcomes of {len(job.keys)} keys"
        assert job.done, "wait has returned, and done is False"
        assert allowed >= set(outcomes), f"{what}: {names(outcomes)}"
        return outcomes

    def fill(self, numbers: Sequence[int]) -> list[int]:
        """Put these records' contents into the entries 0, 1, ..., and poison the others."""
        for entry in range(self.count):
            self.pools.poison(entry)
        for entry, number in enumerate(numbers):
            self.pools.fill(entry, number)
        return list(range(len(numbers)))

    def put(self, numbers: Sequence[int], keys: Sequence[bytes] | None = None, allowed: Set[Outcome] = _ANY) -> None:
        entries = self.fill(numbers)
        job = self.tier.put(self.keys(numbers) if keys is None else keys, entries)
        self.outcomes(job, allowed, "put, with room for all")
        for entry, number in zip(entries, numbers, strict=True):
            assert self.pools.version(entry) == number, f"put has written to entry {entry} of the pool"

    def put_all(self, numbers: Sequence[int], keys: Sequence[bytes] | None = None) -> None:
        for start in range(0, len(numbers), self.count):
            part = slice(start, start + self.count)
            self.put(numbers[part], None if keys is None else keys[part], {DONE})

    def get(self, keys: Sequence[bytes]) -> list[int | None]:
        """Fetch keys to entries from the last one down. Returns the numbers of their contents, None for MISSING."""
        for entry in range(self.count):
            self.pools.poison(entry)
        entries = list(range(self.count))[::-1][: len(keys)]
        outcomes = self.outcomes(self.tier.get(keys, entries))
        found: list[int | None] = []
        for key, entry, outcome in zip(keys, entries, outcomes, strict=True):
            assert outcome in (DONE, MISSING), f"get of {key!r}: {outcome}, instead of DONE or MISSING"
            version = self.pools.version(entry) if outcome is DONE else None
            assert outcome is MISSING or version is not None, f"get of {key!r} is DONE with bytes that were never put"
            found.append(version)
        for entry in range(self.count - len(keys)):
            assert self.pools.poisoned(entry), f"get has written to entry {entry}, which it was not given"
        return found

    def expect(self, numbers: Sequence[int], keys: Sequence[bytes] | None = None) -> None:
        keys = self.keys(numbers) if keys is None else keys
        for start in range(0, len(numbers), self.count):
            part = slice(start, start + self.count)
            found = self.get(keys[part])
            wanted = list(numbers[part])
            assert found == wanted, f"get of {keys[part]}: contents {found}, instead of {wanted}"

    def expect_none(self, keys: Sequence[bytes], why: str) -> None:
        """Check by `get`, `exists` and `contains` that none of these keys has a record."""
        for start in range(0, len(keys), self.count):
            part = keys[start : start + self.count]
            found = self.get(part)
            assert not any(each is not None for each in found), f"{why}: get finds {found} for {part}"
            self.outcomes(self.tier.exists(part), {MISSING}, f"{why}: exists of {part}")
            assert not any(self.tier.contains(part)), f"{why}: contains says {self.tier.contains(part)} for {part}"


def names(outcomes: Iterable[Outcome]) -> str:
    return ", ".join(outcome.name for outcome in outcomes)
