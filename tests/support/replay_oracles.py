"""What replays are compared with: the same counts from models that share no code with the library; synthetic traces."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Sequence
from itertools import combinations, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

REAL_BLOCKS = 288_500
KNOWN_LRU_HITS = {512: 12_168, 2048: 15_857, 8192: 52_381, 32768: 96_618}  # of the whole real trace
KNOWN_OPTIMUM = {512: 39_927, 2048: 74_235, 8192: 105_710, 32768: 105_710}


class Served(NamedTuple):
    """What one request did, or all of them together."""

    hits: int
    stored: int
    evicted: int


class Oracle:
    """A cache that evicts the least recently used key, in one ordered dict, least recently used first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.present: OrderedDict[Any, None] = OrderedDict()

    def serve(self, keys: Sequence[Any]) -> Served:
        keys = keys[: self.capacity]
        hits = 0
        while hits < len(keys) and keys[hits] in self.present:
            hits += 1
        absent = [key for key in dict.fromkeys(keys[hits:]) if key not in self.present]
        request = set(keys)
        excess = max(0, len(self.present) + len(absent) - self.capacity)
        victims = list(islice((key for key in self.present if key not in request), excess))
        for key in victims:
            del self.present[key]
        self.present.update(dict.fromkeys(absent))
        for key in reversed(keys):
            self.present.move_to_end(key)
        return Served(hits, len(absent), len(victims))

    def serve_all(self, requests: Sequence[Sequence[Any]]) -> Served:
        return Served(*(sum(column) for column in zip(*map(self.serve, requests), strict=True)))


class FleetServed(NamedTuple):
    """What one request of a fleet did: hits in the host, on its disk if it has one, in the store; keys written."""

    hits: tuple[int, ...]
    written: tuple[int, ...]


class FleetOracle:
    """Hosts, each an `Oracle` and perhaps one more for its disk, over one dict: the store, what goes next first.

    Attributes:
        store: key to the host that has written it.
        shared: hosts with the keys that they have read from the store, or wanted to write to it, although another host
            had written them.
    """

    def __init__(self, hosts: int, slots: int, disk_slots: int, store_slots: int, write: str) -> None:
        self.pools = [Oracle(slots) for _ in range(hosts)]
        self.disks = [Oracle(disk_slots) for _ in range(hosts)] if disk_slots else []
        self.store: dict[Any, int] = {}
        self.store_slots = store_slots
        self.read_of_others = 0
        self.shared: set[tuple[int, Any]] = set()
        self._seen: list[set[Any]] | None = [set() for _ in range(hosts)] if write == "second" else None
        self._unwritten: list[set[Any]] = [set() for _ in range(hosts)]  # in the pool, and below as far as it knows

    def serve(self, host: int, keys: Sequence[Any]) -> FleetServed:
        used = list(dict.fromkeys(keys[: self.pools[host].capacity]))
        pool, disk = self.pools[host].present, self._disk(host)
        counts = [0, 0, 0]
        for key in used:
            place = 0 if key in pool else 1 if key in disk else 2 if key in self.store else None
            if place is None:
                break
            counts[place] += 1
            if place == 2:
                self._read(host, key)
        for key in reversed([key for key in used[: sum(counts)] if key in disk and key not in pool]):
            disk.move_to_end(key)
        arrived = {key for key in used if key not in pool}
        self.pools[host].serve(used)
        wanted = self._wanted(host, used, arrived)
        new = self._write(host, wanted)
        if not self.disks:
            return FleetServed((counts[0], counts[2]), (new,))
        return FleetServed(tuple(counts), (self._write_disk(self.disks[host], wanted, used), new))

    def _disk(self, host: int) -> OrderedDict[Any, None]:
        return self.disks[host].present if self.disks else OrderedDict()

    def _read(self, host: int, key: Any) -> None:
        self.store[key] = self.store.pop(key)
        if self.store[key] != host:
            self.read_of_others += 1
            self.shared.add((host, key))

    def _wanted(self, host: int, used: Sequence[Any], arrived: set[Any]) -> list[Any]:
        """What the host writes: what it takes to be nowhere below, and, of "second", has had in a request before."""
        unwritten = self._unwritten[host]
        unwritten.difference_update(arrived)
        unwritten.update(key for key in used if key not in self._disk(host) and key not in self.store)
        unwritten.intersection_update(self.pools[host].present)
        wanted = [key for key in used if key in unwritten]
        if self._seen is not None:
            wanted = [key for key in wanted if key in self._seen[host]]
            self._seen[host].update(used)
        unwritten.difference_update(wanted)
        return wanted

    def _write(self, host: int, wanted: Sequence[Any]) -> int:
        self.shared.update((host, key) for key in wanted if self.store.get(key, host) != host)
        new = [key for key in wanted if key not in self.store]
        for key in new:
            if len(self.store) >= self.store_slots:
                del self.store[next(iter(self.store))]
            self.store[key] = host
        return len(new)

    def _write_disk(self, disk: Oracle, wanted: Sequence[Any], used: Sequence[Any]) -> int:
        absent = [key for key in wanted if key not in disk.present]
        excess = max(0, len(disk.present) + len(absent) - disk.capacity)
        for key in list(disk.present)[:excess]:
            del disk.present[key]
        disk.present.update(dict.fromkeys(absent))
        for key in reversed(used):
            if key in disk.present:
                disk.present.move_to_end(key)
        return len(absent)


def most_hits(requests: Sequence[Sequence[Any]], capacity: int) -> int:
    """The most leading hits there can be: every use of the places is tried. For a few requests of a few keys."""
    best: dict[frozenset[Any], int] = {frozenset(): 0}
    for request in requests:
        following: dict[frozenset[Any], int] = {}
        for held, hits in best.items():
            leading = 0
            while leading < len(request) and request[leading] in held:
                leading += 1
            known = held | set(request)
            for kept in combinations(sorted(known), min(capacity, len(known))):
                following[frozenset(kept)] = max(following.get(frozenset(kept), 0), hits + leading)
        best = following
    return max(best.values())


def belady(requests: Sequence[Sequence[Any]], capacity: int, *, deepest_first: bool = True) -> list[int]:
    """Belady's rule with bypass, by looking for the next use in the requests themselves; hits of each request."""
    held: dict[Any, int] = {}  # to its depth
    found = []

    def last_to_go(key: Any, number: int) -> tuple[int, int]:
        later = range(number + 1, len(requests))
        following = next((each for each in later if key in requests[each]), len(requests))
        return following, held[key] if deepest_first else -held[key]

    for number, request in enumerate(requests):
        hits = 0
        while hits < len(request) and request[hits] in held:
            hits += 1
        found.append(hits)
        held.update((key, depth) for depth, key in enumerate(request))
        while len(held) > capacity:
            del held[max(held, key=lambda key: (*last_to_go(key, number), key))]
    return found


def generated_trace(seed: int, requests: int = 120) -> list[list[int]]:
    """Conversations that come back, with gaps, empty requests, and some longer than a small cache."""
    random = np.random.default_rng(seed)
    histories = [[conversation * 1000] for conversation in range(6)]
    trace = []
    for _ in range(requests):
        history = histories[random.integers(len(histories))]
        history.extend(history[0] + len(history) + index for index in range(random.integers(0, 5)))
        ids = [0, *history[: random.integers(0, len(history) + 1)]]
        if random.random() < 0.2:  # a hole: something new in the middle of what is known
            ids[random.integers(len(ids))] = int(random.integers(10**6, 10**7))
        trace.append(list(dict.fromkeys(ids)) if random.random() > 0.05 else [])
    return trace


def tree_trace(random: np.random.Generator, requests: int, depth: int, branches: int) -> list[tuple[bytes, ...]]:
    """Paths from the root of a tree downwards: a key is always preceded by the same keys."""
    trace = []
    for _ in range(requests):
        method = bytes(random.integers(0, branches, random.integers(0, depth + 1)).tolist())
        trace.append(tuple(method[: length + 1] for length in range(len(method))))
    return trace


def keys_of(ids: Sequence[int]) -> tuple[bytes, ...]:
    return tuple(identity.to_bytes(16, "big") for identity in ids)


def write_trace(path: Path, requests: Sequence[Sequence[int]]) -> Path:
    path.write_text("".join(json.dumps({"timestamp": 0, "hash_ids": list(ids)}) + "\n" for ids in requests))
    return path


def find_real_trace() -> Path:
    """Where it is; skips the test where it is not."""
    path = os.environ.get("KVOFFLOAD_TRACE")
    if path is None:
        pytest.skip("KVOFFLOAD_TRACE does not name the conversation trace of the Mooncake FAST'25 release")
    return Path(path)
