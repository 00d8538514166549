"""Hits of a host pool, and of tiers below it, with the cache's own indexes and policies, without bytes."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from heapq import heappop, heappush
from itertools import product
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from kvoffload.cache.index import CacheIndex
from kvoffload.cache.policies import Prefix, make_policy
from kvoffload.cache.policies.base import Policy
from kvoffload.cache.reservations import CacheRequest
from kvoffload.cache.statistics import CacheEvent
from kvoffload.cache.tiering.admission import WriteAdmission
from kvoffload.replay.trace import Request, Trace
from kvoffload.terminal.console import Advance, Output

OPTIMUM = "belady"  # in the place of a policy's name
WRITES = ("admitted", "through", "second", "random", "none")
_NEVER = 1 << 62  # above every request's number

# what is written to a disk --------------------------------------------------------------------------------------------


Keys = Sequence[bytes]


class Chosen:
    """Writes what a function chooses of the blocks in the host that the disk lacks, at the end of each request. It has
    the same methods as `WriteAdmission`.

    Args:
        choose: called with the keys of a request and those that the disk lacks; returns some of these.
    """

    def __init__(self, choose: Callable[[Keys, Keys], Keys]) -> None:
        self._choose = choose
        self._on_disk: dict[bytes, bool] = {}  # keys in the host, and whether the disk has them, too

    def stored(self, keys: Iterable[bytes]) -> None:
        self._on_disk.update((key, False) for key in keys if key not in self._on_disk)

    def promoted(self, keys: Iterable[bytes]) -> None:
        self._on_disk.update(dict.fromkeys(keys, True))

    def written(self, keys: Iterable[bytes]) -> None:
        self._on_disk.update((key, True) for key in keys if key in self._on_disk)

    def left_disk(self, keys: Iterable[bytes]) -> None:
        self._on_disk.update((key, False) for key in keys if key in self._on_disk)

    def left_host(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._on_disk.pop(key, None)

    def ended(self, keys: Keys) -> Keys:
        return self._choose(keys, [key for key in dict.fromkeys(keys) if self._on_disk.get(key) is False])


Writes: TypeAlias = WriteAdmission | Chosen


def make_writes(name: str, disk_slots: int, *, least_hits: float, share: float = 1.0, seed: int = 0) -> Writes:
    """Return the way to write that `--write` names. "admitted" uses `least_hits`, "random" uses `share` and `seed`."""
    if name == "admitted":
        return WriteAdmission(disk_slots, least_hits=least_hits)
    seen, random = set[bytes](), np.random.default_rng(seed)

    def second(keys: Keys, lacking: Keys) -> Keys:
        """Blocks that a second request stores or uses: every key is remembered, without bound."""
        found = [key for key in lacking if key in seen]
        seen.update(keys)
        return found

    ways: dict[str, Callable[[Keys, Keys], Keys]] = {
        "through": lambda _, lacking: lacking,
        "second": second,
        "random": lambda _, lacking: lacking if random.random() < share else (),  # as a block needs the ones before
        "none": lambda *_: (),
    }
    return Chosen(ways[name])


# one request after another --------------------------------------------------------------------------------------------


class Below(Protocol):
    """A tier as the host above it sees it; `keys`, the keys in it now, is always the same object."""

    @property
    def keys(self) -> Container[bytes]: ...

    @property
    def num_slots(self) -> int: ...

    def read(self, keys: Sequence[bytes]) -> None:
        """Note that the host reads these keys; the tier holds all of them."""

    def write(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """The host writes these keys. Returns the keys that the tier took; it skips keys that it has."""
        ...

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note that a request of this host has ended. The tier may not hold all of its keys."""


class Disk:
    """A disk of one host: the index that a `DiskTier` has."""

    def __init__(self, num_slots: int, policy: str) -> None:
        self.num_slots = num_slots
        self.keys: set[bytes] = set()
        self.index = CacheIndex(num_slots, policy=make_policy(policy, num_slots), on_event=self._on_event)

    def read(self, keys: Sequence[bytes]) -> None:
        self.index.load(keys)

    def write(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        with self.index.reserve([key for key in keys if key not in self.keys]) as reservation:
            taken = list(reservation.keys)
        self.keys.update(taken)
        return taken

    def touch(self, keys: Sequence[bytes]) -> None:
        self.index.touch(keys)

    def _on_event(self, event: CacheEvent) -> None:
        if event.kind == "evicted":
            self.keys.difference_update(event.keys)


class Served(NamedTuple):
    """The result of one request."""

    hits: tuple[int, ...]
    written: tuple[int, ...] = ()
    refused: bool = False


class HostPool:
    """A host pool, and tiers below it if there are any.

    A request takes its leading keys from the host, or from the first tier that has them. Keys from a tier are promoted:
    read into the host, and kept in the tier. The remaining keys are computed and stored in the host. When the request
    ends, `writes` chooses the keys that go to every tier that lacks them. Only the host's copy can be written, so a key
    that the host declined is written nowhere.

    A policy's name stands for one that declines nothing: see `host_policy`.
    """

    def __init__(
        self,
        slots: int,
        policy: str | Policy,
        tiers: Sequence[Below] = (),
        writes: Writes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.writes = writes or make_writes("none", 0, least_hits=0.0)
        self.tiers = tiers
        self.keys: set[bytes] = set()  # of the host
        self._below = [tier.keys for tier in tiers]
        policy = host_policy(policy, slots) if isinstance(policy, str) else policy
        self.host = CacheIndex(slots, policy=policy, on_event=self._on_event)
        self.host._state.clock = clock

    def serve(self, keys: Request, request: CacheRequest | None = None) -> Served:
        """Serve one request. If it is longer than the host, only its first keys are used.

        `reserve` gets all of its keys together, so that no key is evicted for another. `request`: an open one, which
        this ends.
        """
        used = keys[: self.host.capacity]
        places = self._places(used)
        unique = list(dict.fromkeys(used))
        place_of = dict(zip(used, places, strict=False))
        self.host.load(list(place_of), request=request)
        with self.host.reserve(unique, request=request) as reservation:
            arrived, refused = list(reservation.keys), reservation.short
        self.keys.update(arrived)
        written: tuple[int, ...] = ()
        if self.tiers:
            for number, tier in enumerate(self.tiers, start=1):
                tier.read([key for key, place in place_of.items() if place == number])
            self.writes.promoted([key for key in arrived if place_of.get(key)])
            stored = [key for key in arrived if not place_of.get(key)]
            self.writes.stored(stored)
            lacking = {key for key in unique if not any(key in held for held in self._below)}
            self.writes.written([key for key in stored if key not in lacking])
            self.writes.left_disk(lacking)
            chosen = self.writes.ended(unique)
            assert self.keys.issuperset(chosen), "only keys in the host can be written"
            written = tuple(len(tier.write(chosen)) if chosen else 0 for tier in self.tiers)
            self.writes.written([key for key in chosen if any(key in held for held in self._below)])
            for tier in self.tiers:
                tier.touch(unique)
        if request is None:
            self.host.touch(unique)
        else:
            request.end()
        return Served(tuple(map(places.count, range(len(self.tiers) + 1))), written, refused)

    def _places(self, keys: Request) -> list[int]:
        places = [0] * self.host.lookup(keys)
        for key in keys[len(places) :] if self.tiers else ():
            place = next((place for place, held in enumerate((self.keys, *self._below)) if key in held), None)
            if place is None:
                break
            places.append(place)
        return places

    def _on_event(self, event: CacheEvent) -> None:
        if event.kind == "evicted":
            self.keys.difference_update(event.keys)
            self.writes.left_host(event.keys)


def host_policy(name: str, slots: int) -> Policy:
    """Like `make_policy`, but "prefix" never declines a key, since a declined key never reaches the disk."""
    return Prefix(slots, declines=False) if name == "prefix" else make_policy(name, slots)


class Totals(NamedTuple):
    """All requests together: the sums of `Served`, and this machine's host time."""

    hits: list[int]
    written: list[int]
    refused: int
    seconds: float


def serve_all(
    index: HostPool, requests: Sequence[Request], progress: Advance, programs: Programs | None = None
) -> Totals:
    hits, written, refused = [0] * (len(index.tiers) + 1), [0] * len(index.tiers), 0
    begin = time.perf_counter()
    for number, request in enumerate(requests, start=1):
        served = index.serve(request) if programs is None else programs.serve(index, request)
        hits = [before + now for before, now in zip(hits, served.hits, strict=True)]
        written = [before + now for before, now in zip(written, served.written, strict=True)]
        refused += served.refused
        progress(number, len(requests))
    return Totals(hits, written, refused, round(time.perf_counter() - begin, 3))


def rate_of(hits: int, requests: Sequence[Request]) -> float:
    """Return `hits` as a share of all blocks that were requested."""
    return hits / max(1, sum(map(len, requests)))


# sessions, and what they tell -----------------------------------------------------------------------------------------

HINTS = ("none", "names", "release", "due")  # from "names" on, each tells what the one before it tells, and more
_TERMS = (8.0, 32.0, 128.0, 512.0, 2048.0)  # seconds within which a session may promise to come back


class Programs:
    """What the programs behind a trace tell a host: the session of each request, and hints; see docs/command-line.md.

    Attributes:
        answers: how many hints were "accepted", "clipped" and "declined".
    """

    def __init__(self, trace: Trace, hints: str) -> None:
        assert trace.sessions is not None, "the command refuses other traces"
        assert trace.seconds is not None, "it refuses these, too"
        self.answers = Counter[str]()
        self._tells = HINTS[: HINTS.index(hints) + 1]
        self._now = 0.0
        following: dict[str, float] = {}
        visits = []  # the last request first: its session, its time, and how long until the session's next one
        for session, now in zip(reversed(trace.sessions), reversed(trace.seconds), strict=True):
            visits.append((session, now, following.get(session, math.inf) - now))
            following[session] = now
        self._visits = reversed(visits)

    def clock(self) -> float:
        """Return the time of the latest request."""
        return self._now

    def serve(self, pool: HostPool, keys: Request) -> Served:
        """Serve the next request of the trace."""
        session, self._now, wait = next(self._visits)
        request = pool.host.open_request(session=session)
        term = next((each for each in _TERMS if wait <= each), None)
        if term is not None and "due" in self._tells:
            self.answers[pool.host.hint("retain", session=session, ttl=term, due=term).outcome] += 1
        served = pool.serve(keys, request)
        if wait == math.inf and "release" in self._tells:
            self.answers[pool.host.hint("release", session=session).outcome] += 1
        return served


# policies, without a disk ---------------------------------------------------------------------------------------------


class PolicyResult(NamedTuple):
    """The counts of a cache over all requests, in keys; docs/command-line.md has the fields."""

    policy: str
    slots: int
    blocks_hit: int
    hit_rate: float
    blocks_stored: int | None
    blocks_evicted: int | None
    blocks_declined: int | None
    requests_refused: int
    seconds: float
    share_of_optimum: float | None = None
    blocks_beyond_slots: int | None = None
    hints: str = "none"
    hints_accepted: int = 0
    hints_clipped: int = 0
    hints_declined: int = 0

    @property
    def name(self) -> str:
        return self.policy if self.hints == "none" else f"{self.policy} + {self.hints}"


def hits_of_policy(trace: Trace, slots: int, policy: str, progress: Advance, hints: str = "none") -> PolicyResult:
    programs = None if hints == "none" else Programs(trace, hints)
    index = HostPool(slots, make_policy(policy, slots), clock=programs.clock if programs else time.monotonic)
    (hits,), _, refused, seconds = serve_all(index, trace.requests, progress, programs)
    done, rate = index.host.statistics(), rate_of(hits, trace.requests)
    beyond = sum(max(0, len(request) - slots) for request in trace.requests)
    counts = (done.stored, done.evicted, done.declined, refused)
    answers = programs.answers if programs else Counter[str]()
    given = (hints, answers["accepted"], answers["clipped"], answers["declined"])
    return PolicyResult(policy, slots, hits, rate, *counts, seconds, None, beyond, *given)


def optimum(requests: Sequence[Request], slots: int) -> PolicyResult:
    """Return the most hits that any cache of this size can have."""
    begin = time.perf_counter()
    hits = sum(belady_hits(requests, slots))
    seconds = round(time.perf_counter() - begin, 3)
    return PolicyResult(OPTIMUM, slots, hits, rate_of(hits, requests), None, None, None, 0, seconds)


def hits_of_policies(
    trace: Trace,
    capacities: Collection[int],
    policies: Collection[str],
    output: Output,
    hints: Collection[str] = ("none",),
) -> list[PolicyResult]:
    """Replay with each policy. Returns a result for each capacity, policy and kind of hints, and the optimum's below
    them. With hints also LRU's without them, above.
    """
    base = [] if set(hints) == {"none"} else [("lru", "none")]
    results: list[PolicyResult] = []
    for slots in capacities:
        done = []
        for policy, told in dict.fromkeys([*base, *product(policies, hints)]):
            with output.progress(f"{policy}, {slots} slots") as progress:
                done.append(hits_of_policy(trace, slots, policy, progress, told))
        with output.progress(f"{OPTIMUM}, {slots} slots"):
            done.append(optimum(trace.requests, slots))
        least = next((result.blocks_hit for result in done if result.name == "lru"), None)
        length = 0 if least is None else done[-1].blocks_hit - least
        if least is not None and length > 0:
            done = [each._replace(share_of_optimum=(each.blocks_hit - least) / length) for each in done]
        results += done
    return results


def belady_hits(requests: Sequence[Request], capacity: int) -> list[int]:
    """Return the leading hits of each request under Belady's rule, which knows the future: no cache of this capacity
    has more in all.

    Among keys that the same request uses next, the deepest goes first. So the cache always holds whole prefixes, which
    all count as hits, and the rule that maximises hits of any kind maximises leading ones.
    """
    if capacity < 1:
        raise ValueError(f"capacity must be at least 1, got {capacity}")
    following: dict[bytes, int] = {}
    uses = []  # for each key of each request, the last request first, the number of the next request with that key
    for number in range(len(requests) - 1, -1, -1):
        uses.append([following.get(key, _NEVER) for key in requests[number]])
        following.update(dict.fromkeys(requests[number], number))
    held: dict[bytes, tuple[int, int, bytes]] = {}  # the key whose next use is last and deepest comes first
    queue: list[tuple[int, int, bytes]] = []  # all held keys, and outdated entries
    hits = []
    for request, next_uses in zip(requests, reversed(uses), strict=True):
        hits.append(next((depth for depth, key in enumerate(request) if key not in held), len(request)))
        for depth, (key, use) in enumerate(zip(request, next_uses, strict=True)):
            if use == _NEVER:
                held.pop(key, None)
            else:
                entry = held[key] = (-use, -depth, key)
                heappush(queue, entry)
        while len(held) > capacity:
            entry = heappop(queue)
            if held.get(entry[2]) == entry:
                del held[entry[2]]
    return hits


# a disk below ---------------------------------------------------------------------------------------------------------


class TierResult(NamedTuple):
    """The counts of a host pool and a disk below it over all requests; blocks are the cache's, one per key.
    docs/command-line.md has the fields.
    """

    write: str
    slots: int
    disk_slots: int
    host_hits: int
    disk_hits: int
    hit_rate: float
    blocks_written: int
    blocks_evicted: int
    blocks_read: int
    hits_per_written: float | None
    share: float | None
    seconds: float

    @property
    def hits(self) -> int:
        return self.host_hits + self.disk_hits


class Policies(NamedTuple):
    """What host and disk evict by."""

    host: str
    disk: str


def hits_with_disk(
    requests: Sequence[Request], slots: int, disk_slots: int, policies: Policies, writes: Writes, progress: Advance
) -> TierResult:
    """Serve all requests with an empty host and an empty disk. The caller fills in `write` and `share`."""
    disk = Disk(disk_slots, policies.disk)
    totals = serve_all(HostPool(slots, policies.host, [disk], writes), requests, progress)
    (host_hits, disk_hits), (written,) = totals.hits, totals.written
    rate, evicted = rate_of(host_hits + disk_hits, requests), disk.index.statistics().evicted
    ratio = disk_hits / written if written else None
    counts = (host_hits, disk_hits, rate, written, evicted, disk_hits)
    return TierResult("", slots, disk_slots, *counts, ratio, None, totals.seconds)


class Survey(NamedTuple):
    """A replay with a disk, over every pair of `slots` and `disk_slots`."""

    slots: Sequence[int]
    disk_slots: Sequence[int]
    policies: Policies
    writes: Sequence[str]
    least_hits: float
    seed: int

    def run(self, requests: Sequence[Request], output: Output) -> list[TierResult]:
        """Replay with each host, disk and way to write. Returns a result for each."""
        results = []
        needed = ("admitted", "through") if "random" in self.writes else ()
        for slots, disk_slots in product(self.slots, self.disk_slots):
            done: dict[str, TierResult] = {}
            for name in dict.fromkeys((*needed, *self.writes)):
                share = None
                if name == "random":
                    share = min(1.0, done["admitted"].blocks_written / max(1, done["through"].blocks_written))
                writes = make_writes(name, disk_slots, least_hits=self.least_hits, share=share or 0.0, seed=self.seed)
                with output.progress(f"{name}, {slots} and {disk_slots} slots") as progress:
                    found = hits_with_disk(requests, slots, disk_slots, self.policies, writes, progress)
                done[name] = found._replace(write=name, share=share)
            results += [done[name] for name in self.writes]
        return results
