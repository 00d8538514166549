"""Try what may go wrong where engines share a pool, many times, and compare every byte that they load.

    python tests/chaos/support/exhaust_pool.py                          everything on simulated devices: half an hour
    python tests/chaos/support/exhaust_pool.py --only kills --kills 200 --gpu       several engines on one GPU
    python tests/chaos/support/exhaust_pool.py --only fuzz --rounds 100000 --seconds 36000 --seed 7
    python tests/chaos/support/exhaust_pool.py --minutes 40        both in turn, with finalizers and interrupts, too

    kills   engines and the owner killed, stopped, closed and begun anew at random moments (`chaos_pool.py`)
    fuzz    random calls of four engines, compared with a model (`fuzz_pool.py`)

Each lane has a pool of its own: an owner and several engines, in processes. It prints counts, and what was wrong: other
bytes, answers that a model does not allow, entries that nobody can reserve once all engines have ended, processes that
hang, descriptors and files left. Exit status 1 if anything was.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from exhausting import HERE, Result, answer, go_on_for, report, started, too_many

KINDS = ("kills", "fuzz")
SPARE_SECONDS = 120.0  # that a lane may need after `--seconds`
TURN_SECONDS = 60.0  # of a kind, with `--minutes`


def work_off(program: str, plans: Sequence[dict[str, Any]], seconds: float) -> Result:
    """Each plan in a lane of its own, at the same time; counts, and what was wrong."""
    counts, wrong, longest = Counter[str](), list[str](), 0
    processes = [started(HERE / program, json.dumps(plan)) for plan in plans]
    for process, plan in zip(processes, plans, strict=True):
        try:
            found = answer(process, seconds + SPARE_SECONDS)
        except ChildProcessError as error:
            wrong.append(f"lane of seed {plan['seed']} {error}")
            continue
        longest = max(longest, found["counts"].pop("longest call ms"))
        counts.update(found["counts"])
        wrong += found["wrong"]
    counts["longest call ms"] = longest
    return counts, wrong + too_many(counts, {"descriptors": 0}, "left") + too_many(counts, {"files": 0}, "in /dev/shm")


def shares(count: int, lanes: int) -> list[int]:
    lanes = min(lanes, count)
    return [count // lanes + (lane < count % lanes) for lane in range(lanes)]


def kills(count: int, seed: int, *, lanes: int = 1, gpu: int = -1, seconds: float = 600.0, **options: Any) -> Result:
    """So many kills, in so many pools at the same time. In every other one most owners are closed instead, while their
    tiers move keys.
    """
    plans = [
        {"kills": share, "seed": seed * 1000 + lane, "gpu": gpu, "seconds": seconds, "closes": lane % 2 == 1, **options}
        for lane, share in enumerate(shares(count, lanes))
    ]
    return work_off("chaos_pool.py", plans, seconds)


def fuzz(rounds: int, seed: int, *, lanes: int = 1, steps: int = 500, seconds: float = 600.0) -> Result:
    """So many rounds: each has a pool, and so many steps."""
    plans = [
        {"rounds": share, "steps": steps, "seed": seed + 1_000_000 * lane, "seconds": seconds}
        for lane, share in enumerate(shares(rounds, lanes))
    ]
    return work_off("fuzz_pool.py", plans, seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=KINDS, help="may be repeated; all by default")
    parser.add_argument("--kills", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=200, help="of the fuzz; each has a seed of its own")
    parser.add_argument("--steps", type=int, default=500, help="of a round")
    parser.add_argument("--seed", type=int, help="0 by default, and with --minutes another one each time")
    parser.add_argument("--minutes", type=float, help="go on for so long; finalizers and interrupts, too")
    parser.add_argument("--lanes", type=int, default=os.cpu_count() or 1, help="pools at the same time")
    parser.add_argument(
        "--engines", type=int, default=3, help="of each pool whose engines are killed; the fuzz has four"
    )
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin nothing new after so many, of each kind")
    parser.add_argument(
        "--gpu", type=int, nargs="?", const=0, default=-1, help="kills with this GPU; 0 if no number follows"
    )
    options = parser.parse_args(arguments)
    more: dict[str, Any] = {"row_bytes": 64 << 10} if options.gpu >= 0 else {}
    common: dict[str, Any] = {"lanes": options.lanes, "seconds": options.seconds}
    if options.minutes is not None:
        turn: dict[str, Any] = {"lanes": options.lanes, "seconds": TURN_SECONDS}
        runs: dict[str, Callable[[int], Result]] = {
            "kills": lambda seed: kills(10_000, seed, **turn, **more, engines=options.engines, haunted=True),
            "fuzz": lambda seed: fuzz(10_000, 1000 * seed, **turn),
        }
        return go_on_for(options.minutes, "pools", [runs[kind] for kind in options.only or KINDS], options.seed)
    failed, seed = False, options.seed or 0
    for kind in options.only or KINDS:
        if kind == "kills":
            more |= {"gpu": options.gpu, "engines": options.engines}
            found = kills(options.kills, seed, **common, **more)
        else:
            found = fuzz(options.rounds, seed, **common, steps=options.steps)
        failed |= report(kind, *found)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
