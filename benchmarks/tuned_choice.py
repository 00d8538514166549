"""`python benchmarks/tuned_choice.py`: times of the copy methods chosen by a fresh profile, over those by the default.

Medians over sizes, counts and directions, folded and scattered, in turns, with an empty GPU cache. The same choice,
measured twice, differs by up to 10% at one to four blocks, and the model's error is 3 to 5% where two methods are about
as fast: a point over 1.05 is measured again, for longer. Expected: at most five of 72 points over 1.05, and a geometric
mean below 1.01. On the simulated device: small, and no times.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from kvoffload.calibration import FULL, MINIATURE, tune
from kvoffload.calibration.schedule import Trial, same_trials
from kvoffload.calibration.trial_engine import TrialEngine, TrialMemory
from kvoffload.device.device import Device
from kvoffload.planning.transfer_plan import Direction
from kvoffload.terminal.console import Output, open_backend
from kvoffload.terminal.options import add_common_options
from kvoffload.tuning import CopyMethod, Profile, default_profile, key_of

_BLOCK_BYTES, _BLOCKS = (2048, 4096, 8192, 16384, 32768, 65536), (1, 4, 32)
_SIMULATED_BLOCK_BYTES, _SIMULATED_BLOCKS = (64,), (1, 4)
_TOLERATED, _ROUNDS, _MORE_ROUNDS = 1.05, 15, 60


class Point(NamedTuple):
    """One transfer, its tuned time over its default time, and the reasons of both choices."""

    transfer: str
    ratio: float
    tuned: str
    default: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_options(parser)
    arguments = parser.parse_args()
    output = Output(arguments.json)
    with open_backend(arguments, output) as device:
        profiles = {"tuned": tune(device).profile, "default": default_profile(key_of(device))}
        points = list(measure(device, profiles))
        fields: dict[str, Any] = {"simulated": device.simulated, "points": len(points)}
        if not device.simulated:
            fields["slower"] = [each._asdict() for each in points if each.ratio > _TOLERATED]
            fields["geometric_mean"] = statistics.geometric_mean(each.ratio for each in points)
    output.result(fields)
    if fields["simulated"]:
        output.line(f"{len(points)} transfers; times need a GPU")
    else:
        output.table("slower than the default", Point._fields, [tuple(each.values()) for each in fields["slower"]])
        output.line(f"geometric mean of {len(points)} ratios: {fields['geometric_mean']:.3f}")
    return 0


def measure(device: Device, profiles: dict[str, Profile]) -> Iterator[Point]:
    small = device.simulated
    scale = MINIATURE if small else FULL
    with TrialMemory(device, scale.planes, scale.scattered_bytes, scale.pitch) as memory:
        for block_bytes in _SIMULATED_BLOCK_BYTES if small else _BLOCK_BYTES:
            for folds in (True, False):
                counts = _SIMULATED_BLOCKS if small else _BLOCKS
                widest = Trial(CopyMethod("gather", 4, 1.0), max(counts))
                with TrialEngine(device, memory, same_trials(folds, scale.planes, block_bytes, [widest])) as engine:
                    for direction in Direction:
                        for blocks in counts:
                            name = f"{direction}, {blocks} x {block_bytes} B, {'folded' if folds else 'scattered'}"
                            yield _point(name, memory, engine, profiles, direction, blocks, 1 if small else _ROUNDS)


def _point(
    name: str,
    memory: TrialMemory,
    engine: TrialEngine,
    profiles: dict[str, Profile],
    direction: Direction,
    blocks: int,
    rounds: int,
) -> Point:
    seconds: dict[str, list[float]] = {each: [] for each in profiles}
    jobs: dict[str, Any] = {}
    for _ in range(rounds):
        for each, profile in profiles.items():
            engine.engine.profile, engine.engine.prefer = profile, "latency"
            memory.flush()
            job = engine.submit_chosen(direction, blocks)
            while not job.done:
                pass
            seconds[each].append(job.wait().seconds)
            jobs[each] = job
    ratio = statistics.median(seconds["tuned"]) / statistics.median(seconds["default"])
    if jobs["tuned"].method == jobs["default"].method:
        ratio = 1.0
    elif ratio > _TOLERATED and rounds == _ROUNDS:
        return _point(name, memory, engine, profiles, direction, blocks, _MORE_ROUNDS)
    return Point(name, ratio, jobs["tuned"].reason, jobs["default"].reason)


if __name__ == "__main__":
    sys.exit(main())
