"""Hits of caches that are told one kind of knowledge about sessions, and told it exactly.

    python tests/replay/hint_oracles.py TRACE.jsonl SLOTS[,SLOTS...]

prints how far each goes from LRU (0) to Belady's rule (1), for a trace whose lines name sessions. They say what a hint
can be worth, before a policy that executes hints is tuned:

- within: which blocks their session never uses again, known while the session goes on. What names can tell at best
  about what a request leaves behind; nothing about who comes back first.
- release: when a session has ended.
- dead: both, so all blocks that nobody uses again.
- return N: with release, the time to the next request of the session, rounded up to one of N times. Blocks of sessions
  that come back latest go first, after those of sessions that come back later than all of these times, and those whose
  time has passed.

All else is evicted as LRU does, the end of a request first. With `dead` LRU still has to choose among living blocks.
"""

from __future__ import annotations

import json
import sys
from bisect import bisect_left
from collections import Counter
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, NamedTuple

from kvoffload.replay.hits import belady_hits

NEVER = float("inf")


class Asked(NamedTuple):
    session: str
    seconds: float
    keys: tuple[bytes, ...]


def read(path: Path) -> list[Asked]:
    lines = map(json.loads, path.open())
    return [
        Asked(str(line["session"]), line["timestamp"] / 1000, tuple(key.to_bytes(8, "big") for key in line["hash_ids"]))
        for line in lines
    ]


def hits(  # noqa: C901  # one pass over a trace
    requests: list[Asked], slots: int, *, within: bool, release: bool, times: tuple[float, ...] = ()
) -> int:
    """Leading hits. Each key has an order in which it goes: (class, order in the class, depth from the end)."""
    following: dict[bytes, int] = {}
    last_use = [[True] * len(request.keys) for request in requests]
    comes_back, later = [NEVER] * len(requests), dict[str, float]()
    for number in range(len(requests) - 1, -1, -1):
        session, now, keys = requests[number]
        last_use[number] = [key not in following for key in keys]
        following.update(dict.fromkeys(keys, number))
        comes_back[number] = later.get(session, NEVER) - now
        later[session] = now
    found, held = 0, dict[bytes, tuple[int, float, int, bytes]]()
    queue: list[tuple[int, float, int, bytes]] = []
    due: list[tuple[float, int]] = []
    named: dict[str, set[bytes]] = {}
    sharing: Counter[bytes] = Counter()

    def order(key: bytes, kind: int, place: float, depth: int) -> None:
        held[key] = (kind, place, -depth, key)
        heappush(queue, held[key])

    for number, (session, now, keys) in enumerate(requests):
        while due and due[0][0] <= now:
            past, promiser = heappop(due)
            for depth, key in enumerate(requests[promiser].keys):
                if held.get(key) == (2, -past, -depth, key):
                    order(key, 1, promiser, depth)
        found += next((depth for depth, key in enumerate(keys) if key not in held), len(keys))
        mine = named.setdefault(session, set())
        sharing.update(key for key in set(keys) if key not in mine)
        mine.update(keys)
        rounded = bisect_left(times, comes_back[number]) if times else 0
        promised = rounded < len(times)
        if promised:
            heappush(due, (now + times[rounded], number))
        for depth, key in enumerate(keys):
            if within and last_use[number][depth] and comes_back[number] < NEVER:
                order(key, 0, number, depth)
            elif promised:
                order(key, 2, -(now + times[rounded]), depth)
            else:
                order(key, 1, number, depth)
        if release and comes_back[number] == NEVER:
            sharing.subtract(mine)
            for key in mine:
                if not sharing[key] and key in held:
                    order(key, 0, held[key][1], -held[key][2])
            del named[session]
        while len(held) > slots:
            entry = heappop(queue)
            if held.get(entry[3]) == entry:
                del held[entry[3]]
    return found


KINDS: dict[str, Any] = {
    "within": {"within": True, "release": False},
    "release": {"within": False, "release": True},
    "dead": {"within": True, "release": True},
    "return 2": {"within": False, "release": True, "times": (30.0, 300.0)},
    "return 5": {"within": False, "release": True, "times": (8.0, 32.0, 128.0, 512.0, 2048.0)},
}

if __name__ == "__main__":
    asked = read(Path(sys.argv[1]))
    for capacity in map(int, sys.argv[2].split(",")):
        least, most = hits(asked, capacity, within=False, release=False), belady_hits([a.keys for a in asked], capacity)
        print(f"{capacity} slots: LRU {least:,}, Belady {most:,}")
        for name, kind in KINDS.items():
            print(f"  {name:10}{(hits(asked, capacity, **kind) - least) / max(1, most - least):6.2f}", flush=True)
