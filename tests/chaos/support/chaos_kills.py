"""A process that writes to a disk tier is killed at random moments: `python chaos_kills.py KILLS SEED`.

Each process is a fork of this one, which has no threads then. It says through a pipe what it is about to put and
remove, and which removals have ended. After each kill this process opens the files and compares every record.
Prints a line of JSON: counts, and what was wrong.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from chaos_history import SECONDS, History, Memory, fetch, make_tier, names
from exhausting import killed

from kvoffload.tiers import Limits, Outcome

KEYS = names(range(12))
LONGEST = 0.05  # seconds that a process may run after its first operation


def write_for_ever(folder: Path, memory: Memory, rng: random.Random, pipe: int, first: int) -> None:
    """What the killed process does."""
    tier = make_tier(folder, memory, limits=Limits(threads=2), direct=rng.random() < 0.5)
    removals = itertools.count()

    def say(what: str, *arguments: object) -> None:
        os.write(pipe, (json.dumps([what, *arguments]) + "\n").encode())

    version = first
    while True:
        kind = rng.choices(["put", "remove", "clear", "get", "sync"], [60, 20, 3, 10, 5])[0]
        some = rng.sample(range(len(KEYS)), rng.randint(1, 3))
        keys = [KEYS[number] for number in some]
        if kind == "put":
            for entry, number in enumerate(some):
                version += 1
                memory.fill(entry, version)
                say("put", number, version)
            job = tier.put(keys, range(len(keys)))
            job.wait(SECONDS)
        elif kind == "get":
            tier.get(keys, range(len(keys))).wait(SECONDS)
        elif kind == "sync":
            tier.drain(SECONDS)
        else:
            removal = next(removals)
            say("removing", removal, some if kind == "remove" else None)
            job = tier.remove(keys) if kind == "remove" else tier.clear()
            if all(each in (Outcome.DONE, Outcome.MISSING) for each in job.wait(SECONDS)):
                say("removed", removal)


def run_once(folder: Path, memory: Memory, rng: random.Random, first: int) -> list[list[Any]]:
    """Fork a writer and kill it; what it has said."""
    own = random.Random(rng.randrange(1 << 30))
    wait = rng.random() * LONGEST if rng.random() < 0.9 else 0.0
    said, status = killed(lambda pipe: write_for_ever(folder, memory, own, pipe, first), wait)
    assert status == -signal.SIGKILL, f"the writer ended by itself with status {status}"
    return said


def apply(said: list[list[Any]], history: History, counts: Counter[str]) -> int:
    """Bring a history up to what a writer said; the last version that it put."""
    version = 0
    for what, number, *more in said:
        counts[what] += 1
        if what == "put":
            version = more[0]
            history.put(KEYS[number], version)
        elif what == "removing":
            history.removing(number, None if more[0] is None else [KEYS[each] for each in more[0]])
        else:
            history.removed(number)
    return version


def run(kills: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Kill so many writers, one after the other on the same files; counts, and what was wrong."""
    rng, memory, history = random.Random(seed), Memory(12), History()
    counts, wrong, last = Counter[str](), list[str](), 0
    base = Path(tempfile.mkdtemp())
    try:
        (base / "disk").mkdir(mode=0o700)
        for _ in range(kills):
            last = max(last, apply(run_once(base / "disk", memory, rng, last), history, counts))
            tier = make_tier(base / "disk", memory)
            try:
                found = fetch(tier, memory, KEYS)
            except AssertionError as error:
                found = {}
                wrong.append(str(error))
            assert tier.close(SECONDS)
            counts.update(kills=1, records=len(found))
            wrong += [
                f"{key!r} has version {version}; possible were {sorted(history.may(key))}"
                for key, version in found.items()
                if version not in history.may(key)
            ]
    finally:
        shutil.rmtree(base)
    counts["wrong"] = len(wrong)
    return counts, wrong


if __name__ == "__main__":
    totals, problems = run(int(sys.argv[1]), int(sys.argv[2]))
    print(json.dumps({"counts": totals, "wrong": problems[:10]}))
