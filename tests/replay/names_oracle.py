"""Hits of a cache that knows afterwards what names could have told it, as far as it follows a rule.

    python tests/replay/names_oracle.py TRACE.jsonl SLOTS[,SLOTS...]

prints how far each rule goes from LRU (0) to Belady's rule (1), for a trace whose lines name sessions. The oracles in
`hint_oracles` evict as LRU does where they are told nothing, so a policy that learns can find more than they do. These
learn, too, and from the whole trace at once: of blocks of one kind they know how many come back, and after how long.

- uses: the kind is how often a block was used, and whether it was the end of its request: the kinds of `prefix`.
- pace: also how fast its session's requests follow each other (the median of the latest nine gaps) and how long its
  request is.
- exact: also which blocks their session never uses again, which go first.

Like `prefix` they evict what has the lowest worth (see `kvoffload/cache/policies/reuse.py`) together with all that
needs it, and decline new blocks that are worth less. They are bounds for policies that go by such kinds, not for all
policies.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from heapq import heapify, heappop, heapreplace
from math import log2
from pathlib import Path
from typing import NamedTuple

import numpy as np
from hint_oracles import Asked, read

from kvoffload.replay.hits import belady_hits, hits_of_policy
from kvoffload.replay.trace import Trace

EDGES = (0, *(int(64 * 2 ** (step / 2)) for step in range(44)))  # of ages, in milliseconds
FEWEST = 2_000  # blocks that reach an age, below which it is worth half of the one before it
MOST_USES = 6
DEAD = 0  # the kind of blocks that their session never uses again


class Learned(NamedTuple):
    """What the whole trace says.

    Attributes:
        kinds: the kind of each block of each request, once the request has ended.
        worth, chain_worth: by kind and age: of a block; of a block with all that needs it.
    """

    kinds: list[list[int]]
    worth: list[list[float]]
    chain_worth: list[list[float]]


def learn(requests: list[Asked], *, pace: bool, exact: bool) -> Learned:
    following: dict[bytes, float] = {}
    waits: list[list[float]] = []  # until each block of a request is used again; -1: never
    goes_on, later = [False] * len(requests), set[str]()
    for number in range(len(requests) - 1, -1, -1):
        session, now, keys = requests[number]
        waits.append([1e3 * (following[key] - now) if key in following else -1.0 for key in keys])
        following.update(dict.fromkeys(keys, now))
        goes_on[number] = session in later
        later.add(session)
    waits.reverse()
    numbers: dict[tuple[int, ...], int] = {(): DEAD}
    uses: dict[bytes, int] = {}
    kinds = []
    for number, (of_session, request) in enumerate(zip(_of_sessions(requests, pace), requests, strict=True)):
        mine = []
        for depth, key in enumerate(request.keys):
            uses[key] = min(MOST_USES, uses.get(key, 0) + 1)
            kind = (*of_session, uses[key], depth < len(request.keys) - 1)
            dead = exact and goes_on[number] and waits[number][depth] < 0
            mine.append(DEAD if dead else numbers.setdefault(kind, len(numbers)))
        kinds.append(mine)
    worth = _worth(np.concatenate(kinds), np.concatenate(waits), len(numbers))
    chain_worth = np.maximum.accumulate(worth[:, ::-1], axis=1)[:, ::-1]
    below: dict[tuple[int, ...], np.ndarray] = defaultdict(lambda: np.zeros(len(EDGES)))
    for kind in sorted(numbers)[1:]:
        chain_worth[numbers[kind]] = below[kind[:-2]] = np.maximum(chain_worth[numbers[kind]], below[kind[:-2]])
    worth[DEAD] = chain_worth[DEAD] = -1
    return Learned(kinds, worth.tolist(), chain_worth.tolist())


def _of_sessions(requests: list[Asked], pace: bool) -> Iterator[tuple[int, ...]]:
    gaps, before = defaultdict[str, list[float]](list), dict[str, float]()
    for session, now, keys in requests:
        if session in before:
            gaps[session].append(now - before[session])
        before[session] = now
        latest = sorted(gaps[session][-9:])
        median = min(3, int(log2(1 + latest[len(latest) // 2] / 2)) // 2) if latest else -1
        yield (median, min(5, int(log2(1 + len(keys))) // 2)) if pace else ()


def _worth(kinds: np.ndarray, waits: np.ndarray, count: int) -> np.ndarray:
    """By kind and age: the most uses for each millisecond that a block is kept, over all ages until which it may be."""
    reused = np.zeros((count, len(EDGES)))
    again = waits >= 0
    np.add.at(reused, (kinds[again], np.searchsorted(EDGES, waits[again], side="right") - 1), 1)
    reached = np.bincount(kinds, minlength=count)[:, None] - reused.cumsum(axis=1) + reused
    widths = np.diff((*EDGES, 2 * EDGES[-1]))
    worth = np.zeros_like(reused)
    for begin in range(len(EDGES)):
        found = reused[:, begin:].cumsum(axis=1)
        kept = (widths[begin:] * (reached[:, begin:] - reused[:, begin:] / 2)).cumsum(axis=1)
        worth[:, begin] = (found / np.maximum(kept, 1e-9)).max(axis=1)
        few = reached[:, begin] < FEWEST
        if begin:
            worth[few, begin] = worth[few, begin - 1] / 2
    return worth


def hits(requests: list[Asked], slots: int, learned: Learned) -> int:
    """Leading hits."""
    queues: list[OrderedDict[bytes, int]] = [OrderedDict() for _ in learned.worth]  # when it was used; the oldest first
    held: dict[bytes, int] = {}  # the kind
    found = 0
    for request, kinds in zip(requests, learned.kinds, strict=True):
        now, keys = int(1e3 * request.seconds), request.keys[:slots]
        found += next((depth for depth, key in enumerate(keys) if key not in held), len(keys))
        new = [depth for depth, key in enumerate(keys) if key not in held]

        def put(
            depths: Iterator[int], keys: tuple[bytes, ...] = keys, kinds: list[int] = kinds, now: int = now
        ) -> None:
            for depth in depths:  # the deepest first, so that it is the oldest
                held[keys[depth]] = kinds[depth]
                queues[kinds[depth]][keys[depth]] = now

        for key in keys:
            if key in held:
                del queues[held[key]][key]
        put(depth for depth in range(len(keys) - 1, -1, -1) if keys[depth] in held)
        wanted, mine = len(new) - (slots - len(held)), set(keys)
        if wanted > 0:

            def heads(kind: int, now: int = now, mine: set[bytes] = mine) -> Iterator[tuple[float, int, int, bytes]]:
                for key, used in queues[kind].items():
                    if key not in mine:
                        place = bisect_right(EDGES, now - used) - 1
                        yield learned.chain_worth[kind][place], used - now, kind, key

            each = [heads(kind) for kind in range(len(queues))]
            first = [head for head in (next(iterator, None) for iterator in each) if head is not None]
            heapify(first)
            victims: list[tuple[int, bytes]] = []
            while wanted > len(victims):
                _, age, kind, key = first[0] if first else (0.0, 0, DEAD, b"")
                displaced = learned.worth[kind][bisect_right(EDGES, -age) - 1] if first else float("inf")
                if new and learned.worth[kinds[new[-1]]][0] <= displaced:
                    new.pop()
                    wanted -= 1
                    continue
                victims.append((kind, key))
                following = next(each[kind], None)
                if following is None:
                    heappop(first)
                else:
                    heapreplace(first, following)
            for kind, key in victims:
                del queues[kind][key], held[key]
        put(reversed(new))
    return found


KINDS = {
    "uses": {"pace": False, "exact": False},
    "uses, exact": {"pace": False, "exact": True},
    "pace, exact": {"pace": True, "exact": True},
}

if __name__ == "__main__":
    asked = read(Path(sys.argv[1]))
    trace = Trace([request.keys for request in asked])
    rules = {name: learn(asked, **kind) for name, kind in KINDS.items()}
    for capacity in map(int, sys.argv[2].split(",")):
        least = hits_of_policy(trace, capacity, "lru", lambda *_: None).blocks_hit
        most = belady_hits(trace.requests, capacity)
        print(f"{capacity} slots: LRU {least:,}, Belady {most:,}")
        for name, rule in rules.items():
            print(f"  {name:12}{(hits(asked, capacity, rule) - least) / max(1, most - least):6.2f}", flush=True)
