"""Random operations on a tier, and a model of its possible answers: every byte that comes back is compared."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from kvoffload.internal.checks import to_wait
from kvoffload.testing.tier_pools import TierPools
from kvoffload.tiers import Outcome, Tier, TierJob

_JOBS_AT_ONCE = 8
_KEYS_PER_JOB = 8


class FuzzReport(NamedTuple):
    """The work of `fuzz_tier`.

    Attributes:
        operations: keys that were put, fetched, asked for and removed; each `clear` and `drain` counts as one.
        outcomes: how many keys ended so, by (operation, `Outcome.value`), such as ("get", "done"). Operations: "put",
            "get", "exists", "remove", "clear".
    """

    operations: int
    outcomes: Counter[tuple[str, str]]


class _Pending(NamedTuple):
    """A job not looked at yet. `versions`: the content that each key was put with."""

    kind: str
    job: TierJob
    versions: tuple[int, ...]


class TierModel:
    """The records that each key may have, from the outcomes so far; no two jobs of one key at a time.

    Args:
        lossless: the tier neither fails, declines nor evicts: a miss is as wrong as wrong bytes.
    """

    def __init__(self, lossless: bool) -> None:
        self._lossless = lossless
        self._versions: dict[bytes, set[int]] = {}  # what a read may return; a key without one: nothing

    def has_put(self, key: bytes, version: int, outcome: Outcome) -> None:
        if outcome is Outcome.DONE and self._lossless:
            self._versions.setdefault(key, {version})  # what was there stays
        elif outcome is Outcome.DONE or (outcome is Outcome.FAILED and not self._lossless):
            self._versions.setdefault(key, set()).add(version)
        else:
            allowed = (Outcome.EXPIRED, Outcome.CANCELLED)
            assert outcome in allowed or not self._lossless, f"put of {key!r} is {outcome}"

    def has_got(self, key: bytes, version: int | None, outcome: Outcome) -> None:
        may = self._versions.get(key, set())
        if outcome is Outcome.DONE:
            assert version is not None, f"get of {key!r} is DONE, and the entry holds bytes that were never put"
            assert version in may, f"get of {key!r} is DONE with record {version}; possible were {sorted(may)}"
            self._versions[key] = {version}
        elif self._lossless:
            expected = Outcome.DONE if may else Outcome.MISSING
            allowed = (Outcome.EXPIRED, Outcome.CANCELLED, expected)
            assert outcome in allowed, f"get of {key!r} is {outcome} instead of {expected}"

    def has_asked(self, key: bytes, outcome: Outcome) -> None:
        if self._lossless and outcome in (Outcome.DONE, Outcome.MISSING):
            there = bool(self._versions.get(key))
            assert (outcome is Outcome.DONE) == there, f"exists of {key!r} is {outcome}; there: {there}"

    def has_removed(self, key: bytes, outcome: Outcome) -> None:
        if outcome in (Outcome.DONE, Outcome.MISSING):
            there = self._versions.pop(key, None)
            assert there or outcome is Outcome.MISSING, f"remove of {key!r} is DONE; it had no record"
            assert not (there and self._lossless) or outcome is Outcome.DONE, f"remove of {key!r} is MISSING"

    def has_cleared(self, outcome: Outcome) -> None:
        if outcome is Outcome.DONE:
            self._versions.clear()


class TierFuzz:
    def __init__(
        self,
        tier: Tier,
        pools: TierPools,
        *,
        seed: int,
        keys: int = 200,
        lossless: bool = False,
        while_waiting: Callable[[], None] | None = None,
        timeout: float = 60.0,
    ) -> None:
        self._tier, self._pools, self._timeout = tier, pools, timeout
        self._while_waiting = while_waiting
        self._random = random.Random(seed)
        self._model = TierModel(lossless)
        self._keys = [b"fuzz %d %d" % (seed, number) for number in range(keys)]
        self._entries = list(range(len(pools.arrays[0])))
        for entry in self._entries:
            pools.poison(entry)
        self._pending: list[_Pending] = []
        self._next_version = 1
        self.operations = 0
        self.outcomes = Counter[tuple[str, str]]()

    def run(self, operations: int) -> None:
        kinds = ("put", "get", "exists", "remove", "look", "clear", "drain")
        while self.operations < operations:
            kind = self._random.choices(kinds, (40, 42, 7, 8, 3, 0.05, 0.1))[0]
            if kind == "look":
                self._tier.contains(self._random.sample(self._keys, 5))
                self._tier.statistics()
            elif kind in ("clear", "drain"):
                self._finish_all()
                self.operations += 1
                if kind == "clear":
                    [outcome] = self._wait(self._tier.clear())
                    self.outcomes[kind, outcome.value] += 1
                    self._model.has_cleared(outcome)
                elif self._while_waiting is None:
                    self._tier.drain(self._timeout)
            else:
                self._submit(kind)
            while len(self._pending) >= _JOBS_AT_ONCE or (self._pending and self._random.random() < 0.2):
                self._finish(self._random.randrange(len(self._pending)))
        self._finish_all()
        self._pools.check_guards()

    def _submit(self, kind: str) -> None:
        busy = {key for each in self._pending for key in each.job.keys}
        wanted = self._random.sample(self._keys, self._random.randint(1, _KEYS_PER_JOB))
        keys = [key for key in wanted if key not in busy]
        deadline = self._random.choice([None, None, None, time.monotonic() + self._timeout])
        if self._random.random() < 0.02:
            deadline = time.monotonic() - 1.0
        versions: tuple[int, ...] = ()
        if kind == "put":
            entries = self._take(len(keys))
            versions = tuple(range(self._next_version, self._next_version + len(keys)))
            self._next_version += len(keys)
            for entry, version in zip(entries, versions, strict=True):
                self._pools.fill(entry, version)
            job = self._tier.put(keys, entries, deadline=deadline, tenant=self._random.choice(["", "a"]))
        elif kind == "get":
            job = self._tier.get(keys, self._take(len(keys)), deadline=deadline)
        else:
            job = self._tier.exists(keys, deadline=deadline) if kind == "exists" else self._tier.remove(keys)
        self._pending.append(_Pending(kind, job, versions))
        if self._random.random() < 0.03:
            job.cancel()

    def _take(self, count: int) -> list[int]:
        """Take entries that no job has. Each must still be poisoned: this finds late writes of ended jobs."""
        while len(self._entries) < count:
            self._finish(0)
        self._random.shuffle(self._entries)
        taken = [self._entries.pop() for _ in range(count)]
        for entry in taken:
            assert self._pools.poisoned(entry), f"entry {entry} was written to, and no job that had not ended has it"
        return taken

    def _finish_all(self) -> None:
        while self._pending:
            self._finish(0)

    def _wait(self, job: TierJob) -> list[Outcome]:
        end = time.monotonic() + self._timeout
        while self._while_waiting is not None and not job.done and time.monotonic() < end:
            self._while_waiting()
            time.sleep(2e-5)
        return job.wait(self._timeout)

    def _finish(self, at: int) -> None:
        kind, job, versions = self._pending.pop(at)
        for position, outcome in enumerate(self._wait(job)):
            key = job.keys[position]
            self.operations += 1
            self.outcomes[kind, outcome.value] += 1
            if kind == "put":
                entry = job.entries[position]
                assert self._pools.version(entry) == versions[position], f"put of {key!r} has written to its entry"
                self._model.has_put(key, versions[position], outcome)
            elif kind == "get":
                entry = job.entries[position]
                self._model.has_got(key, self._pools.version(entry) if outcome is Outcome.DONE else None, outcome)
                if outcome in (Outcome.EXPIRED, Outcome.CANCELLED, Outcome.DECLINED):
                    assert self._pools.poisoned(entry), f"get of {key!r} is {outcome}, and its entry was written to"
            elif kind == "exists":
                self._model.has_asked(key, outcome)
            else:
                self._model.has_removed(key, outcome)
        for entry in job.entries:
            self._pools.poison(entry)
        self._entries += job.entries


def fuzz_tier(
    tier: Tier,
    *,
    operations: int = 10_000,
    entries: int = 64,
    row_bytes: int = 4096,
    pools: int = 1,
    keys: int = 200,
    lossless: bool = False,
    seed: int = 0,
    while_waiting: Callable[[], None] | None = None,
    timeout: float = 60.0,
) -> FuzzReport:
    """Put, fetch, ask for, remove and cancel random keys, several jobs at a time, sometimes clear the whole tier, and
    compare every byte with a model.

    Args:
        tier: not attached yet. This attaches it to pools of its own and closes it afterwards. Records that it had
            before may be removed, and those of the last operations stay: give it a store of its own.
        operations: how many at least, counted in keys.
        entries, row_bytes, pools: of its pool: one array of `entries` rows, at least 8, for each of `pools` devices.
            `row_bytes` is a multiple of 4096; else `attach` refuses the pool by a LayoutError.
        keys: how many different ones, at least 8. As with `entries`, that is not checked.
        lossless: the tier has room for all keys and no faults: a miss is an error, too.
        seed: of the operations.
        while_waiting: called in this thread, again and again, until a job has ended: `FaultyTier.release_hung` for a
            tier that hangs. If given, there are no drains.
        timeout: seconds that one job may take, and the `close` at the end.

    Raises:
        AssertionError: wrong bytes, a record that came back after its removal, an entry touched outside a job, a job
            that takes too long, or the tier or `while_waiting` raised (the cause). The message has the seed.
        ValueError: `timeout` is no number. Any error of `tier.attach`; then the tier is not closed.
    """
    timeout = to_wait("timeout", timeout)
    memory = TierPools(entries, row_bytes, pools, seed)
    tier.attach(memory.arrays, memory.layout)
    fuzz = TierFuzz(tier, memory, seed=seed, keys=keys, lossless=lossless, while_waiting=while_waiting, timeout=timeout)
    try:
        fuzz.run(operations)
    except Exception as error:
        raise AssertionError(f"seed={seed}, after {fuzz.operations} operations: {error}") from error
    finally:
        tier.close(timeout)
    return FuzzReport(fuzz.operations, fuzz.outcomes)
