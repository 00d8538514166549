"""What programs that search for long measure of their process, and print."""

from __future__ import annotations

import itertools
import os
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from haunting import summary

Result = tuple[Counter[str], list[str]]
HANGS = re.compile(r"^\S.*\b(hangs?|does not (end|close))\b", re.MULTILINE)  # a traceback's lines begin with spaces
OPERATIONS = ("operations", "calls", "steps", "put")  # as the programs call them


def held() -> Counter[str]:
    """What this process has: threads of Python's, descriptors, bytes of resident memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Counter(
        threads=threading.active_count(),
        descriptors=len(os.listdir("/proc/self/fd")),
        resident=pages * os.sysconf("SC_PAGE_SIZE"),
    )


def too_many(counts: Mapping[str, int], limits: Mapping[str, int], what: str) -> list[str]:
    """What is wrong: counts named "`limit` `what`" that are above their limit."""
    found = {f"{name} {what}": most for name, most in limits.items()}
    return [f"{counts[name]} {name}" for name, most in found.items() if counts[name] > most]


def report(heading: str, counts: Mapping[str, int], wrong: list[str]) -> bool:
    """Print both; whether anything was wrong."""
    print(f"{heading}: " + ", ".join(f"{count} {what}" for what, count in sorted(counts.items())), flush=True)
    print(f"  {len(wrong)} wrong" + "".join(f"\n    {each}" for each in wrong[:10]), flush=True)
    return bool(wrong)


def go_on_for(minutes: float, name: str, runs: Sequence[Callable[[int], Result]], seed: int | None) -> int:
    """Make these runs in turn, each with another seed; print what they have found, and a summary. Returns whether
    anything was wrong. Without a seed it is another one each time.
    """
    first = random.SystemRandom().randrange(1 << 20) if seed is None else seed
    counts, wrong, end = Counter[str](), list[str](), time.monotonic() + 60.0 * minutes
    for number, run in zip(itertools.count(first), itertools.cycle(runs), strict=False):
        if time.monotonic() > end or len(wrong) >= 5:
            break
        found, new = run(number)
        counts.update(found)
        wrong += new
    report(name, counts, wrong)
    hangs = sum(HANGS.search(each) is not None for each in wrong)
    counts["operations"] = sum(counts[each] for each in OPERATIONS)
    print(summary(name, first, counts, wrong=len(wrong) - hangs, hangs=hangs), flush=True)
    return int(bool(wrong))
