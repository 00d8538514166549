"""Kill engines that share a pool, and its owner, at random moments, many times, and compare every byte that they load.

    python tests/chaos/support/exhaust_pool.py                          2,000 kills on simulated devices
    python tests/chaos/support/exhaust_pool.py --kills 200 --gpu        with real devices, several engines on one GPU
    python tests/chaos/support/exhaust_pool.py --kills 50 --seed 7 --lanes 1

Each lane has a pool of its own: an owner and several engines, of which one or the other is killed, stopped or begun
anew (see `chaos_pool.py`). It prints counts, also of kills by what the engine was doing, and what was wrong: other
bytes, entries that nobody can reserve once all engines have ended, processes that hang, descriptors and files left.
Exit status 1 if anything was.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from exhausting import report, too_many

HERE = Path(__file__).resolve().parent
SPARE_SECONDS = 120.0  # that a lane may need after `--seconds`


def started(plan: dict[str, Any]) -> subprocess.Popen[str]:
    """A lane, in a process without threads, since it forks."""
    paths = [str(HERE.parents[2]), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, str(HERE / "chaos_pool.py"), json.dumps(plan)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OPENBLAS_NUM_THREADS": "1"},
    )


def kills(
    count: int, seed: int, *, lanes: int = 1, gpu: int = -1, seconds: float = 600.0, **options: Any
) -> tuple[Counter[str], list[str]]:
    """So many, in so many pools at the same time; counts, and what was wrong."""
    lanes = min(lanes, count)
    shares = [count // lanes + (lane < count % lanes) for lane in range(lanes)]
    plans = [
        {"kills": share, "seed": seed * 1000 + lane, "gpu": gpu, "seconds": seconds, **options}
        for lane, share in enumerate(shares)
    ]
    counts, wrong = Counter[str](), list[str]()
    processes = [started(plan) for plan in plans]
    longest = 0
    for process, plan in zip(processes, plans, strict=True):
        try:
            printed, _ = process.communicate(timeout=seconds + SPARE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.communicate()
            wrong.append(f"lane of seed {plan['seed']} does not end")
            continue
        if process.returncode:
            wrong.append(f"lane of seed {plan['seed']} has ended with status {process.returncode}")
            continue
        found = json.loads(printed.splitlines()[-1])
        counts.update(found["counts"])
        longest = max(longest, found["counts"]["longest call ms"])
        wrong += found["wrong"]
    counts["longest call ms"] = longest
    return counts, wrong + too_many(counts, {"descriptors": 0}, "left") + too_many(counts, {"files": 0}, "in /dev/shm")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lanes", type=int, default=os.cpu_count() or 1, help="pools at the same time")
    parser.add_argument("--engines", type=int, default=3, help="of each pool")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin nothing new after so many")
    parser.add_argument("--gpu", type=int, nargs="?", const=0, default=-1, help="with this GPU; 0 if no number follows")
    options = parser.parse_args(arguments)
    more: dict[str, Any] = {"row_bytes": 64 << 10} if options.gpu >= 0 else {}
    counts, wrong = kills(
        options.kills, options.seed, lanes=options.lanes, gpu=options.gpu, seconds=options.seconds,
        engines=options.engines, **more,
    )  # fmt: skip
    return int(report("kills", counts, wrong))


if __name__ == "__main__":
    sys.exit(main())
