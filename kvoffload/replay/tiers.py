"""`kvoffload replay --metadata-only --disk-slots N`: what a disk below the cache would hold and save; no bytes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from kvoffload.cache.index import CacheIndex
from kvoffload.cache.policies import Prefix, make_policy
from kvoffload.cache.policies.base import Policy
from kvoffload.cache.statistics import CacheEvent
from kvoffload.cache.tiering.writer import WriteChoice
from kvoffload.replay.below import Below, Disk
from kvoffload.replay.tier_writes import make_writes
from kvoffload.replay.trace import Request
from kvoffload.terminal.console import Advance, Output

WRITES = ("admitted", "through", "second", "random", "none")


class TierResult(NamedTuple):
    """What a host pool and a disk below it did with all the requests. Blocks are the cache's, one per key.

    Attributes:
        write: what was written: one of `WRITES`.
        slots, disk_slots: keys that the host and the disk hold.
        host_hits, disk_hits: leading blocks that were found, by where they were: in the host, or on the disk alone.
        hit_rate: both, of all blocks that were requested.
        blocks_written, blocks_evicted: of the disk.
        blocks_read: from the disk: its hits.
        hits_per_written: reads from the disk for each block written; None if none was.
        share: of requests that "random" has written; None for others.
        seconds: host time of this machine for all requests.
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


class Served(NamedTuple):
    """The result of one request.

    Attributes:
        hits: leading keys that were found, by where they were: the host, then each tier below it.
        written: keys written to each tier below.
    """

    hits: tuple[int, ...]
    written: tuple[int, ...]


class HostPool:
    """A host pool and tiers below it, without bytes.

    A request finds leading keys in the host or in a tier; those that only tiers have are promoted from the first one
    that has them: read into the host. The rest is computed and stored in the host. At its end `writes` says what of it
    is written to every tier that lacks it, out of the host. A key that is promoted stays in its tier.

    Args:
        slots: keys that the host holds.
        policy: what the host evicts by; see `host_policy`.
        tiers: below it, the one that is asked first at the front.
        writes: what is written to them.
    """

    def __init__(self, slots: int, policy: str, tiers: Sequence[Below], writes: WriteChoice) -> None:
        self.writes = writes
        self.tiers = tiers
        self.keys: set[bytes] = set()  # of the host
        self._below = [tier.keys for tier in tiers]
        self.host = CacheIndex(slots, policy=host_policy(policy, slots), on_event=self._on_event)

    def serve(self, keys: Request) -> Served:
        """One request; one that is longer than the host uses its first keys. A key that the host declined is written
        nowhere."""
        used = list(dict.fromkeys(keys[: self.host.capacity]))
        places = self._locate(used)
        self.host.load(used[: len(places)])
        for number, tier in enumerate(self.tiers, start=1):
            if number in places:
                tier.read([key for key, place in zip(used, places, strict=False) if place == number])
        with self.host.reserve(used) as reservation:
            arrived = list(reservation.keys)
        self._report(arrived, {key for key, place in zip(used, places, strict=False) if place})
        written = self._write(used)
        self.host.touch(used)
        for tier in self.tiers:
            tier.touch(used)
        return Served(tuple(map(places.count, range(len(self.tiers) + 1))), written)

    def _locate(self, keys: Sequence[bytes]) -> list[int]:
        """Of each leading key that is found, where: 0 in the host, then the number of the tier, from 1 on."""
        places = []
        for key in keys:
            for place, held in enumerate((self.keys, *self._below)):
                if key in held:
                    places.append(place)
                    break
            else:
                break
        return places

    def _report(self, arrived: list[bytes], promoted: set[bytes]) -> None:
        """These keys have come to the host, and were computed unless they were promoted."""
        self.keys.update(arrived)
        self.writes.promoted([key for key in arrived if key in promoted])
        stored = [key for key in arrived if key not in promoted]
        self.writes.stored(stored)
        self.writes.written(self._held_below(stored))

    def _write(self, used: list[bytes]) -> tuple[int, ...]:
        """Write what is to be written of a request that has ended; how many keys to each tier."""
        self.writes.left_disk(self._lacking(used))
        chosen = self.writes.ended(used)
        assert self.keys.issuperset(chosen), "only what is in the host can be written"
        taken = tuple(len(tier.write(chosen)) if chosen else 0 for tier in self.tiers)
        self.writes.written(self._held_below(chosen))
        return taken

    def _lacking(self, keys: list[bytes]) -> list[bytes]:
        """Those of these keys that no tier holds."""
        for held in self._below:
            keys = [key for key in keys if key not in held]
        return keys

    def _held_below(self, keys: list[bytes]) -> list[bytes]:
        lacking = set(self._lacking(keys))
        return [key for key in keys if key not in lacking]

    def _on_event(self, event: CacheEvent) -> None:
        if event.kind == "evicted":
            self.keys.difference_update(event.keys)
            self.writes.left_host(event.keys)


def host_policy(name: str, slots: int) -> Policy:
    """As `make_policy`, but "prefix" admits all: what the host declines can never be written to the disk."""
    return Prefix(slots, declines=False) if name == "prefix" else make_policy(name, slots)


def drive(
    requests: Sequence[Request], slots: int, disk_slots: int, policies: Policies, writes: WriteChoice, progress: Advance
) -> TierResult:
    """All requests through an empty host and an empty disk. `write` and `share` of the result are the caller's."""
    disk = Disk(disk_slots, policies.disk)
    index = HostPool(slots, policies.host, [disk], writes)
    host_hits = disk_hits = written = 0
    begin = time.perf_counter()
    for number, request in enumerate(requests, start=1):
        served = index.serve(request)
        host_hits += served.hits[0]
        disk_hits += served.hits[1]
        written += served.written[0]
        progress(number, len(requests))
    seconds = round(time.perf_counter() - begin, 3)
    rate = (host_hits + disk_hits) / max(1, sum(map(len, requests)))
    evicted = disk.index.statistics().evicted
    ratio = disk_hits / written if written else None
    return TierResult(
        "", slots, disk_slots, host_hits, disk_hits, rate, written, evicted, disk_hits, ratio, None, seconds
    )


class Survey(NamedTuple):
    """What is replayed: capacities, policies and what is written.

    Attributes:
        slots, disk_slots: every pair of them.
        writes: names of `WRITES`. "random" writes as large a share of what "through" writes as "admitted" does, and
            needs both.
        least_hits: of "admitted".
        seed: of "random".
    """

    slots: Sequence[int]
    disk_slots: Sequence[int]
    policies: Policies
    writes: Sequence[str]
    least_hits: float
    seed: int

    def run(self, requests: Sequence[Request], output: Output) -> list[TierResult]:
        """A result for each host, disk and way to write."""
        results = []
        for slots in self.slots:
            for disk_slots in self.disk_slots:
                results += self._of_one_size(requests, slots, disk_slots, output)
        return results

    def _of_one_size(
        self, requests: Sequence[Request], slots: int, disk_slots: int, output: Output
    ) -> list[TierResult]:
        done: dict[str, TierResult] = {}

        def result_of(name: str) -> TierResult:
            if name in done:
                return done[name]
            share = None
            if name == "random":
                share = min(1.0, result_of("admitted").blocks_written / max(1, result_of("through").blocks_written))
            writes = make_writes(
                name, disk_slots, least_hits=self.least_hits, share=1.0 if share is None else share, seed=self.seed
            )
            with output.progress(f"{name}, {slots} and {disk_slots} slots") as progress:
                found = drive(requests, slots, disk_slots, self.policies, writes, progress)
            done[name] = found._replace(write=name, share=share)
            return done[name]

        return [result_of(name) for name in self.writes]
