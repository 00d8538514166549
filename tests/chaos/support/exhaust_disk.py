"""Break a disk tier in every known manner, many times, and compare every byte that it returns.

    python tests/chaos/support/exhaust_disk.py                        everything: ten minutes on one core
    python tests/chaos/support/exhaust_disk.py --only crashes --states 1000000 --seed 7
    python tests/chaos/support/exhaust_disk.py --minutes 40           kills and haunts in turn

    crashes     states of the files after a crash: unsynced writes lost, torn, reordered
    kills       processes killed while they write
    damage      bytes flipped, files cut off, slots swapped, older sectors brought back
    faults      random operations while system calls fail, hang and end late
    haunts      the same, while finalizers call the tier in its threads, and signals interrupt calls
    soak        a tier opened and closed again and again: memory, descriptors, threads

It prints counts of each, and what was wrong. Exit status 1 if anything was.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import chaos_crashes
import chaos_damage
import chaos_machine
import chaos_soak
from exhausting import HERE, Result, answer, go_on_for, report, started, too_many

KINDS = ("crashes", "kills", "damage", "faults", "haunts", "soak")
PER_MACHINE = 20_000  # operations
MOST_GROWTH = 8 << 20  # bytes of resident memory, in a soak


def program(name: str, *arguments: int) -> dict[str, Any]:
    """What a program of this folder prints, in a process of its own."""
    return answer(started("-W", "error", HERE / name, *arguments))


def kills(count: int, seed: int) -> Result:
    """In a process of its own, which has no other threads when it forks."""
    report = program("chaos_kills.py", count, seed)
    return Counter(report["counts"]), report["wrong"]


def faults(operations: int, seed: int) -> Result:
    """Several machines, one after the other."""
    counts, wrong = Counter[str](), list[str]()
    while counts["operations"] < operations and not wrong:
        try:
            counts.update(chaos_machine.run(min(PER_MACHINE, operations - counts["operations"]), seed))
        except AssertionError as error:
            wrong.append(f"machine of seed {seed}: {error}")
        seed += 1
    return counts, wrong + too_many(counts, {"descriptors": 0, "threads": 0}, "left")


def haunts(operations: int, seed: int) -> Result:
    """In a process of its own, which says on its standard error where it hangs, and ends."""
    try:
        report = program("chaos_machine.py", operations, seed)
    except ChildProcessError as error:
        return Counter(), [f"machine of seed {seed} hangs: it {error}"]
    return Counter(report["counts"]), report["wrong"]


def soak(seconds: float, seed: int) -> Result:
    counts = chaos_soak.run(seed, seconds=seconds)
    limits = {"descriptors": 0, "threads": 0, "tasks": 0, "resident": MOST_GROWTH}
    return counts, too_many(counts, limits, "more")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=KINDS, help="may be repeated; all by default")
    parser.add_argument("--states", type=int, default=100_000, help="after crashes")
    parser.add_argument("--kills", type=int, default=500, help="of processes")
    parser.add_argument("--stride", type=int, default=1, help="of flipped bytes of payloads")
    parser.add_argument("--operations", type=int, default=100_000, help="with failing calls")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the soak")
    parser.add_argument("--seed", type=int, help="0 by default, and with --minutes another one each time")
    parser.add_argument("--minutes", type=float, help="go on for so long with kills and haunts")
    options = parser.parse_args(arguments)
    if options.minutes is not None:
        runs: list[Callable[[int], Result]] = [lambda seed: kills(20, seed), lambda seed: haunts(5000, seed)]
        return go_on_for(options.minutes, "tiers", runs, options.seed)
    seed = options.seed or 0
    tests = {
        "crashes": lambda: chaos_crashes.run(options.states, seed),
        "kills": lambda: kills(options.kills, seed),
        "damage": lambda: chaos_damage.run(options.stride, seed),
        "faults": lambda: faults(options.operations, seed),
        "haunts": lambda: haunts(options.operations, seed),
        "soak": lambda: soak(options.seconds, seed),
    }
    failed = False
    for name in options.only or KINDS:
        counts, wrong = tests[name]()
        failed |= report(name, counts, wrong)
    return int(failed)


if __name__ == "__main__":
    logging.getLogger("kvoffload").setLevel(logging.CRITICAL)  # of this process alone: tests call `main`, too
    sys.exit(main())
