"""Random operations on a remote tier while its server is killed, paused and cut off; every byte is compared.

Jobs overlap. Between the client and the server is a proxy, which delays, cuts, half-opens and corrupts. After each
kind of fault the tier has to find the server again by itself. A removal that has ended well is final, except that a put
that FAILED may still arrive: the versions of such puts stay possible.
"""

from __future__ import annotations

import os
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from faulty_proxy import FaultyProxy, ProxyFaults
from proxy_process import ProxyProcess

from kvoffload.testing.tier_pools import TierPools
from kvoffload.tiers import Outcome, RemoteTier, TierJob

PAGE = os.sysconf("SC_PAGE_SIZE")
ENTRIES = 24
KEYS = 16
JOBS = 6
MOST_KEYS = 4  # of a job
SECONDS = 120.0  # that a job may take: else it hangs
TRIES = 300  # to find a server that is back
WEIGHTS = {"put": 40, "get": 40, "exists": 8, "remove": 10, "clear": 0.3, "cancel": 2}
GONE = (Outcome.DONE, Outcome.MISSING)

SLOW = ProxyFaults(delay=0.002)
CUTS = ProxyFaults(cut=0.02)
CORRUPT = ProxyFaults(corrupt=0.02)
SILENT = ProxyFaults(silent=True)
REFUSED = ProxyFaults(refuse=True)


class Killable(Protocol):
    """A server, as the machine uses it."""

    def start(self) -> None: ...

    def kill(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...


@dataclass
class Live:
    """A job that has not been looked at. Attributes: corrupt: whether bytes were being changed when it was called."""

    kind: str
    job: TierJob
    versions: tuple[int, ...]
    corrupt: bool


class RemoteMachine:
    """See above.

    Args:
        make: a tier, each time over the same records, whose client connects to the proxies.
        servers, proxies: as many.

    Attributes:
        counts: operations, outcomes, faults, and what the proxies did.
        share: of the usual number of jobs in each phase.
        corrupt_from: bytes of the smallest chunk that is corrupted.
    """

    def __init__(
        self,
        make: Callable[[], RemoteTier],
        servers: Sequence[Killable],
        proxies: Sequence[FaultyProxy | ProxyProcess],
        seed: int,
        *,
        pools: int = 2,
    ) -> None:
        self.share, self.corrupt_from = 1.0, 1
        self.rng = random.Random(seed)
        self.make, self.servers, self.proxies, self.pools = make, servers, proxies, pools
        self.counts = Counter[str]()
        self.corrupting = False
        self._keys = [b"chaos %d %d" % (seed, number) for number in range(KEYS)]
        self._may: dict[bytes, set[int]] = defaultdict(set)  # versions that a removal ends
        self._late: dict[bytes, set[int]] = defaultdict(set)  # versions of puts that FAILED
        self._past: dict[bytes, list[str]] = defaultdict(list)  # of each key what was called, and what came of it
        self._phase = ""
        self._version = 0
        self._live: list[Live] = []
        self._open()

    def run(self, operations: int) -> Counter[str]:
        """At least as many, counted in keys, and each phase at least once."""
        phases = (self._calm, self._with(SLOW), self._with(CUTS), self._with(CORRUPT), self._few(SILENT),
                  self._few(REFUSED), self._kill, self._pause, self._cut_all, self._reopen)  # fmt: skip
        names = ("calm", "slow", "cuts", "corrupt", "silent", "refused", "kill", "pause", "cut all", "reopen")
        number = 0
        while self.counts["operations"] < operations or number < len(phases):
            self._phase = f"{number}: {names[number % len(phases)]}"
            phases[number % len(phases)]()
            self._finish_all()
            self._recover()
            number += 1
        assert self.tier.close(SECONDS), "close has not ended"
        self.memory.check_guards()
        for proxy in self.proxies:
            self.counts.update({f"proxy {name}": count for name, count in proxy.counts.items()})
        return self.counts

    # phases -------------------------------------------------------------------------------------------------------

    def _calm(self) -> None:
        self._operate(100)

    def _with(self, faults: ProxyFaults) -> Callable[[], None]:
        def phase() -> None:
            self._set(faults)
            self._operate(60)

        return phase

    def _few(self, faults: ProxyFaults) -> Callable[[], None]:
        """What fails by a timeout takes long."""

        def phase() -> None:
            self._operate(10)
            self._set(faults)
            self._operate(8)

        return phase

    def _kill(self) -> None:
        """In the middle of jobs; and it comes back in the middle of others."""
        server = self.rng.choice(self.servers)
        self._operate(20)
        server.kill()
        self.counts["kills"] += 1
        try:
            self._operate(6)
        finally:
            server.start()

    def _pause(self) -> None:
        server = self.rng.choice(self.servers)
        self._operate(20)
        server.pause()
        self.counts["pauses"] += 1
        try:
            self._operate(6)
        finally:
            server.resume()

    def _cut_all(self) -> None:
        for _ in range(5):
            self._operate(8)
            for proxy in self.proxies:
                proxy.cut_all()
            self.counts["all cut"] += 1

    def _reopen(self) -> None:
        """Another tier over the same records, while jobs of this one have not ended."""
        self._operate(10)
        closing = self.tier
        assert closing.close(SECONDS), "close has not ended"
        self._finish_all()
        self._open()
        self.counts["reopened"] += 1

    def _recover(self) -> None:
        """The server is there again; tier and client are the same."""
        self._set(ProxyFaults())
        key = b"recovery"
        for _ in range(TRIES):
            self._version += 1
            self.memory.fill(0, self._version)
            outcomes = [self.tier.remove([key]).wait(SECONDS)[0], self.tier.put([key], [0]).wait(SECONDS)[0]]
            self.memory.poison(0)
            outcomes += self.tier.get([key], [0]).wait(SECONDS)
            version = self.memory.version(0) if outcomes[2] is Outcome.DONE else None
            self.memory.poison(0)
            if outcomes[0] in GONE and outcomes[1:] == [Outcome.DONE] * 2 and version == self._version:
                return
            self.counts["tries to recover"] += 1
        raise AssertionError(f"the server is back, and the tier does not find it after {TRIES} tries: {outcomes}")

    def _set(self, faults: ProxyFaults) -> None:
        faults = replace(faults, corrupt_from=self.corrupt_from)
        self.corrupting = faults.corrupt > 0
        for proxy in self.proxies:
            proxy.faults = faults

    # operations ---------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self.tier = self.make()
        self.memory = TierPools(ENTRIES, 4096, self.pools, 0)
        self._free = list(range(1, ENTRIES))  # 0: for `_recover`
        self.tier.attach(self.memory.arrays, self.memory.layout)

    def _operate(self, jobs: int) -> None:
        for _ in range(round(self.share * jobs)):
            [kind] = self.rng.choices(list(WEIGHTS), list(WEIGHTS.values()))
            if kind == "cancel":
                if self._live:
                    self.rng.choice(self._live).job.cancel()
            elif kind == "clear":
                self._finish_all()
                self._submit("clear", [b""], self.tier.clear())
                self._finish_all()
            else:
                self._call(kind)
            while len(self._live) >= JOBS:
                self._finish(self.rng.randrange(len(self._live)))

    def _call(self, kind: str) -> None:
        busy = {key for each in self._live for key in each.job.keys}
        keys = [key for key in self.rng.sample(self._keys, self.rng.randint(1, MOST_KEYS)) if key not in busy]
        if kind == "exists":
            self._submit(kind, keys, self.tier.exists(keys))
        elif kind == "remove":
            self._submit(kind, keys, self.tier.remove(keys))
        else:
            entries = self._take(len(keys))
            if kind == "get":
                self._submit(kind, keys, self.tier.get(keys, entries))
                return
            versions = range(self._version + 1, self._version + 1 + len(keys))
            self._version += len(keys)
            for entry, version in zip(entries, versions, strict=True):
                self.memory.fill(entry, version)
            self._submit(kind, keys, self.tier.put(keys, entries), tuple(versions))

    def _submit(self, kind: str, keys: Sequence[bytes], job: TierJob, versions: tuple[int, ...] = ()) -> None:
        self._live.append(Live(kind, job, versions or (0,) * len(keys), self.corrupting))

    def _take(self, count: int) -> list[int]:
        """Entries that no job has, which are poisoned: what a client writes to them too late is found here."""
        while len(self._free) < count:
            self._finish(0)
        self.rng.shuffle(self._free)
        taken = [self._free.pop() for _ in range(count)]
        for entry in taken:
            assert self.memory.poisoned(entry), f"entry {entry} was written to after its job had ended"
        return taken

    def _finish_all(self) -> None:
        while self._live:
            self._finish(0)

    def _finish(self, at: int) -> None:
        live = self._live.pop(at)
        job = live.job
        for position, outcome in enumerate(job.wait(SECONDS)):
            self.counts["operations"] += 1
            self.counts[f"{live.kind} {outcome.value}"] += 1
            key, entry = job.keys[position], job.entries[position] if job.entries else -1
            self._past[key].append(f"{self._phase}: {live.kind} {live.versions[position]} {outcome.value}")
            if live.kind == "put":
                self._has_put(key, entry, live.versions[position], outcome)
            elif live.kind == "get" and outcome is Outcome.DONE:
                self._has_got(key, entry)
            elif live.kind in ("remove", "clear") and outcome in GONE and not (live.corrupt or self.corrupting):
                for removed in [key] if live.kind == "remove" else list(self._may):
                    self._may[removed].clear()
        for entry in job.entries:
            self.memory.poison(entry)
        self._free += job.entries

    def _has_put(self, key: bytes, entry: int, version: int, outcome: Outcome) -> None:
        assert self.memory.version(entry) == version, f"put of {key!r} has written to its entry"
        if outcome is Outcome.DONE:
            self._may[key].add(version)
        elif outcome is Outcome.FAILED:
            self._late[key].add(version)

    def _has_got(self, key: bytes, entry: int) -> None:
        version = self.memory.version(entry)
        assert version is not None, f"get of {key!r} is DONE, and the entry holds bytes that were never put"
        allowed = self._may[key] | self._late[key]
        assert version in allowed, (
            f"get of {key!r} is DONE with version {version}; possible are {sorted(allowed)}: "
            + ("; ".join([*self._past[key][-20:], *self._past[b""][-3:]]))
        )
