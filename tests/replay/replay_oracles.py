"""What replays are compared with: the same counts from models that share no code with the library; synthetic traces."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
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
    return write_lines(path, ({"timestamp": 0, "hash_ids": list(ids)} for ids in requests))


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def find_real_trace() -> Path:
    """Where it is; skips the test where it is not."""
    path = os.environ.get("KVOFFLOAD_TRACE")
    if path is None:
        pytest.skip("KVOFFLOAD_TRACE does not name the conversation trace of the Mooncake FAST'25 release")
    return Path(path)
