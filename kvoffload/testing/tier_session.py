"""One tier with a pool, as the checks of `check_tier` use it: puts and fetches that are compared, waits that end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvoffload.testing.tier_pools import TierPools
from kvoffload.tiers import Outcome, Tier, TierJob

DONE, MISSING = Outcome.DONE, Outcome.MISSING
ENDED_UNBEGUN = (Outcome.EXPIRED, Outcome.CANCELLED)


@dataclass(frozen=True)
class TierSetup:
    """What `check_tier` was called with; see there."""

    make: Callable[[], Tier]
    entries: int
    row_bytes: int
    pools: int
    seed: int
    timeout: float

    def new_pools(self) -> TierPools:
        return TierPools(self.entries, self.row_bytes, self.pools, self.seed)

    @contextmanager
    def session(self, *, clear: bool = True) -> Iterator[TierSession]:
        """A tier with a pool, without records; closed afterwards, and its guards are checked."""
        session = TierSession(self.make(), self.new_pools(), self.timeout)
        try:
            session.attach()
            if clear:
                session.outcomes(session.tier.clear())
            yield session
            session.close()
            session.pools.check_guards()
        finally:
            session.tier.close(1.0)


class TierSession:
    """A tier, and pools for it.

    Records are named by numbers: record `n` has the key `key(n)` and the content with that number.
    """

    def __init__(self, tier: Tier, pools: TierPools, timeout: float) -> None:
        self.tier, self.pools, self.timeout = tier, pools, timeout
        self.count = len(pools.arrays[0])

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

    def outcomes(self, job: TierJob) -> list[Outcome]:
        """Of a job that ends."""
        outcomes = job.wait(self.timeout)
        assert len(outcomes) == len(job.keys), f"{len(outcomes)} outcomes of {len(job.keys)} keys"
        assert job.done, "wait has returned, and done is False"
        return outcomes

    def fill(self, numbers: Sequence[int]) -> list[int]:
        """The entries 0, 1, ... hold these records' contents, the others are poisoned."""
        for entry in range(self.count):
            self.pools.poison(entry)
        for entry, number in enumerate(numbers):
            self.pools.fill(entry, number)
        return list(range(len(numbers)))

    def put(self, numbers: Sequence[int], keys: Sequence[bytes] | None = None) -> list[Outcome]:
        """Put records, and check that the entries were not written to."""
        entries = self.fill(numbers)
        outcomes = self.outcomes(self.tier.put(self.keys(numbers) if keys is None else keys, entries))
        for entry, number in zip(entries, numbers, strict=True):
            assert self.pools.version(entry) == number, f"put has written to entry {entry} of the pool"
        return outcomes

    def put_all(self, numbers: Sequence[int], keys: Sequence[bytes] | None = None) -> None:
        """Put records; all must be DONE."""
        for start in range(0, len(numbers), self.count):
            part = slice(start, start + self.count)
            outcomes = self.put(numbers[part], None if keys is None else keys[part])
            assert set(outcomes) <= {DONE}, f"put, with room for all: {names(outcomes)}, instead of DONE"

    def get(self, keys: Sequence[bytes]) -> list[int | None]:
        """The numbers of the contents that come back, None for MISSING; to entries from the last one down."""
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
        """These records come back, byte for byte, in this order."""
        keys = self.keys(numbers) if keys is None else keys
        for start in range(0, len(numbers), self.count):
            part = slice(start, start + self.count)
            found = self.get(keys[part])
            wanted = list(numbers[part])
            assert found == wanted, f"get of {keys[part]}: contents {found}, instead of {wanted}"

    def expect_none(self, keys: Sequence[bytes], why: str) -> None:
        """None of these has a record, by `get`, `exists` and `contains`."""
        for start in range(0, len(keys), self.count):
            part = keys[start : start + self.count]
            found = self.get(part)
            assert not any(each is not None for each in found), f"{why}: get finds {found} for {part}"
            asked = self.outcomes(self.tier.exists(part))
            assert set(asked) <= {MISSING}, f"{why}: exists says {names(asked)} for {part}"
            assert not any(self.tier.contains(part)), f"{why}: contains says {self.tier.contains(part)} for {part}"


def names(outcomes: Iterable[Outcome]) -> str:
    return ", ".join(outcome.name for outcome in outcomes)
