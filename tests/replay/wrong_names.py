"""Hits of honest sessions, while others have no name, somebody else's, or a wrong one, or lie in their hints.

    python tests/replay/wrong_names.py TRACE.jsonl SLOTS[,SLOTS...] [--hints names|due] [--kinds ...] [--shares ...]

plays a trace whose lines name sessions. A share of the sessions is dishonest; for each kind of dishonesty and each
share it prints the hits of the others as multiples of those that LRU has for the same requests, and of those that the
same policy has if all are honest:

- missing: their requests name no session, and tell nothing.
- reused: they have the name of an honest session, all the same one.
- wrong: each request has the name of any session.
- lies: as for "wrong" the name is right, but each hint is a lie: they promise to come back soon when they have ended or
  stay away for long, promise late when they come back soon, and say that they have ended when they go on.
- greedy: they always promise to come back within 8 seconds.
- silent: not dishonest; they have names, and tell nothing.

With "names" nobody gives hints (and so nobody lies); with "due" the honest ones say when they come back or that they
have ended, as `kvoffload replay --hints due` does.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import NamedTuple

from kvoffload.cache.policies import make_policy
from kvoffload.replay.hits import HostPool
from kvoffload.replay.trace import Trace, read_timed_trace

KINDS = ("missing", "reused", "wrong", "lies", "greedy", "silent")
SHARES = (0.1, 0.5, 1.0)
TERMS = (8.0, 32.0, 128.0, 512.0, 2048.0)  # seconds


class Told(NamedTuple):
    """What a host hears of a request: its session's name, None: none; when the next one is due, None: that is not told;
    whether the session has ended.
    """

    name: str | None
    due: float | None = None
    ended: bool = False


def waits_of(trace: Trace) -> list[float]:
    """Seconds until the next request of the session; inf after its last."""
    assert trace.sessions is not None
    assert trace.seconds is not None
    following, waits = dict[str, float](), []
    for session, now in zip(reversed(trace.sessions), reversed(trace.seconds), strict=True):
        waits.append(following.get(session, inf) - now)
        following[session] = now
    return waits[::-1]


def honest(session: str, wait: float, hints: str) -> Told:
    if hints == "names":
        return Told(session)
    return Told(session, next((term for term in TERMS if wait <= term), None), wait == inf)


def dishonest(kind: str, session: str, wait: float, hints: str, names: Sequence[str], chance: random.Random) -> Told:
    if kind == "missing":
        return Told(None)
    if kind == "silent" or (hints == "names" and kind in ("lies", "greedy")):
        return Told(session)
    if kind == "lies":
        return Told(session, TERMS[-1] if wait < 60 else TERMS[0], wait < inf and chance.random() < 0.5)
    if kind == "greedy":
        return Told(session, TERMS[0])
    name = names[0] if kind == "reused" else chance.choice(names)
    return honest(session, wait, hints)._replace(name=name)


def play(trace: Trace, slots: int, policy: str, told: Sequence[Told] | None) -> list[int]:
    """The hits of each request."""
    assert trace.seconds is not None
    now = 0.0

    def clock() -> float:
        return now

    pool, hits = HostPool(slots, make_policy(policy, slots), clock=clock), []
    for number, keys in enumerate(trace.requests):
        now = trace.seconds[number]
        if told is None or told[number].name is None:
            hits.append(pool.serve(keys).hits[0])
            continue
        name, due, ended = told[number]
        assert name is not None
        request = pool.host.open_request(session=name)
        if due is not None:
            pool.host.hint("retain", session=name, ttl=due, due=due)
        hits.append(pool.serve(keys, request).hits[0])
        if ended:
            pool.host.hint("release", session=name)
    return hits


def compare(
    trace: Trace, slots: int, hints: str, kinds: Sequence[str], shares: Sequence[float], show: Callable[[str], None]
) -> dict[tuple[str, float], float]:
    """For each kind and share the others' hits as multiples of LRU's; if there are no others, those of all."""
    assert trace.sessions is not None
    names, waits = sorted(set(trace.sessions)), waits_of(trace)
    right = [honest(session, wait, hints) for session, wait in zip(trace.sessions, waits, strict=True)]
    lru, all_honest = play(trace, slots, "lru", None), play(trace, slots, "prefix", right)
    show(f"{slots} slots, {hints}, all honest: {sum(all_honest) / sum(lru):.4f} of LRU")
    found = {}
    for kind in kinds:
        for share in shares:
            chance = random.Random(slots)
            chosen = set(chance.sample(names, round(share * len(names))))
            others = [name for name in names if name not in chosen] or names
            told = [
                dishonest(kind, session, wait, hints, others, chance) if session in chosen else each
                for each, session, wait in zip(right, trace.sessions, waits, strict=True)
            ]
            hits = play(trace, slots, "prefix", told)
            counted = [place for place, session in enumerate(trace.sessions) if session in set(others)]
            of = [sum(each[place] for place in counted) for each in (hits, lru, all_honest)]
            found[kind, share] = of[0] / max(1, of[1])
            show(f"  {kind:8}{share:5.0%}  {found[kind, share]:.4f} of LRU  {of[0] / max(1, of[2]):.4f} of all honest")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("slots", type=lambda text: [int(each) for each in text.split(",")])
    parser.add_argument("--hints", choices=("names", "due"), default="due")
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=KINDS)
    parser.add_argument("--shares", type=lambda text: [float(each) for each in text.split(",")], default=SHARES)
    chosen = parser.parse_args()
    for capacity in chosen.slots:
        given = read_timed_trace(chosen.trace), capacity, chosen.hints, chosen.kinds, chosen.shares
        compare(*given, show=lambda line: print(line, flush=True))
