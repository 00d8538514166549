"""`kvoffload replay --metadata-only --disk-slots N`: what a disk below the cache would hold and save; no bytes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from kvoffload.cache.index import CacheIndex
from kvoffload.cache.policies import Prefix, make_policy
from kvoffload.cache.policies.base import Policy
from kvoffload.cache.statistics import CacheEvent
from kvoffload.replay.tier_writes import Writes, make_writes
from kvoffload.replay.trace import Request
from kvoffload.terminal.console import Advance, Output

WRITES = ("admitted", "through", "second", "random", "none")


class TierResult(NamedTuple):
    """What a host pool and a disk below it did with all the requests. Blocks are the cache's, one per key.

    Attributes:
        write: what was written: one of `WRITES`.
        slots, disk_slots: keys that the host and the disk hold.
        host_hits, disk_hits: leading blocks that were found in the host, and behind these on the disk.
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
    """The result of one request: leading keys in the host, those behind them on the disk, keys written."""

    host_hits: int
    disk_hits: int
    written: int


class TieredIndex:
    """A host pool and a disk below it, without bytes.

    A request finds leading keys in the host or on the disk; those that only the disk has are promoted: read into the
    host. The rest is computed and stored in the host. At its end `writes` says what of it is written to the disk, out
    of the host. A key that is promoted stays on the disk.
    """

    def __init__(self, slots: int, disk_slots: int, policies: Policies, writes: Writes) -> None:
        self.writes = writes
        self._host_keys: set[bytes] = set()
        self._disk_keys: set[bytes] = set()
        self.host = CacheIndex(slots, policy=host_policy(policies.host, slots), on_event=self._host_event)
        self.disk = CacheIndex(disk_slots, policy=make_policy(policies.disk, disk_slots), on_event=self._disk_event)

    def serve(self, keys: Request) -> Served:
        """One request; one that is longer than the host uses its first keys. A key that the host declined is written
        nowhere."""
        used = list(dict.fromkeys(keys[: self.host.capacity]))
        host_hits = self.host.lookup(used)
        hits = host_hits
        while hits < len(used) and (used[hits] in self._host_keys or used[hits] in self._disk_keys):
            hits += 1
        on_disk = [key for key in used[host_hits:hits] if key not in self._host_keys]
        with self.host.acquire(used[:host_hits]), self.disk.acquire(on_disk):
            self.host.load(used[:hits])
            self.disk.load(on_disk)
            with self.host.reserve(used) as reservation:
                arrived = list(reservation.keys)
        self._report(arrived, set(on_disk))
        written = self._write(self.writes.ended(used))
        self.host.touch(used)
        self.disk.touch(used)
        return Served(host_hits, hits - host_hits, written)

    def _report(self, arrived: list[bytes], on_disk: set[bytes]) -> None:
        """These keys have come to the host."""
        self._host_keys.update(arrived)
        self.writes.promoted([key for key in arrived if key in on_disk])
        stored = [key for key in arrived if key not in on_disk]
        self.writes.stored(stored)
        self.writes.written([key for key in stored if key in self._disk_keys])

    def _write(self, keys: list[bytes]) -> int:
        assert self._host_keys.issuperset(keys), "only what is in the host can be written"
        assert self._disk_keys.isdisjoint(keys), "what is on the disk is not written again"
        if not keys:
            return 0
        with self.disk.reserve(keys) as reservation:
            written = list(reservation.keys)
        self._disk_keys.update(written)
        self.writes.written(written)
        return len(written)

    def _host_event(self, event: CacheEvent) -> None:
        if event.kind == "evicted":
            self._host_keys.difference_update(event.keys)
            self.writes.left_host(event.keys)

    def _disk_event(self, event: CacheEvent) -> None:
        if event.kind == "evicted":
            self._disk_keys.difference_update(event.keys)
            self.writes.left_disk(event.keys)


def host_policy(name: str, slots: int) -> Policy:
    """As `make_policy`, but "prefix" admits all: what the host declines can never be written to the disk."""
    return Prefix(slots, declines=False) if name == "prefix" else make_policy(name, slots)


def drive(
    requests: Sequence[Request], slots: int, disk_slots: int, policies: Policies, writes: Writes, progress: Advance
) -> TierResult:
    """All requests through an empty host and an empty disk. `write` and `share` of the result are the caller's."""
    index = TieredIndex(slots, disk_slots, policies, writes)
    host_hits = disk_hits = written = 0
    begin = time.perf_counter()
    for number, request in enumerate(requests, start=1):
        served = index.serve(request)
        host_hits += served.host_hits
        disk_hits += served.disk_hits
        written += served.written
        progress(number, len(requests))
    seconds = round(time.perf_counter() - begin, 3)
    rate = (host_hits + disk_hits) / max(1, sum(map(len, requests)))
    evicted = index.disk.statistics().evicted
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
