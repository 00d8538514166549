"""A disk tier that is opened, used and closed again and again: memory, descriptors and threads stay the same.

`python chaos_soak.py SEED CYCLES` prints what is in use more after so many cycles, as a line of JSON.
"""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from chaos_history import SECONDS, Memory, fetch, make_tier, names
from exhausting import held

from kvoffload.tiers import Limits

KEYS = names(range(8))
WARM_UP = 50  # cycles before the first measurement


def usage() -> Counter[str]:
    """What the process has, and its threads by the kernel."""
    gc.collect()
    return held() + Counter(tasks=min(_tasks() for _ in range(20)))


def _tasks() -> int:
    time.sleep(2e-3)  # the kernel's task ends a moment after Python's thread
    return len(os.listdir("/proc/self/task"))


def cycle(folder: Path, memory: Memory, rng: random.Random, version: int) -> None:
    """Open a tier; put, fetch, remove and clear; close it. Some are refused, or closed while calls are queued."""
    tier = make_tier(folder, memory, limits=Limits(threads=2))
    keys = rng.sample(KEYS, 3)
    for entry in range(3):
        memory.fill(entry, version)
    job = tier.put(keys, range(3))
    if rng.random() < 0.8:
        job.wait(SECONDS)
        fetch(tier, memory, KEYS[:4])
        tier.remove(keys[:1]).wait(SECONDS)
    if rng.random() < 0.1:
        tier.clear().wait(SECONDS)
    if rng.random() < 0.2:
        try:
            make_tier(folder, memory)
        except BlockingIOError:
            pass
    if rng.random() < 0.2:
        assert make_tier(folder, memory, read_only=True).close(SECONDS)
    assert tier.close(SECONDS)


def run(seed: int, *, cycles: int = 0, seconds: float = 0.0) -> Counter[str]:
    """So many cycles, or for so long; what was in use more at the end than after the first cycles."""
    rng, memory, done = random.Random(seed), Memory(4), 0
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o700)
    end = time.monotonic() + seconds
    try:
        for done in range(1, WARM_UP + 1):
            cycle(folder, memory, rng, done)
        before = usage()
        while done - WARM_UP < cycles or time.monotonic() < end:
            done += 1
            cycle(folder, memory, rng, done)
        after = usage()
    finally:
        shutil.rmtree(folder)
    return Counter({"cycles": done, **{f"{name} more": after[name] - before[name] for name in before}})


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]), cycles=int(sys.argv[2]))))
