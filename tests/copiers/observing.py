"""A link in several situations, on which `Comparison` chooses between two copiers.

To see the shares of the better copier's throughput, and what a wrong choice costs:

    PYTHONPATH=tests/support python tests/copiers/observing.py
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from math import exp
from statistics import fmean
from typing import NamedTuple

from seeds import seeds

from kvoffload.copiers.observed import Comparison, Way

MIB = 1 << 20
SIZES = (4, 16, 64)  # MiB
SEEDS = seeds(8)
BEGINNING = 16  # transfers that do not count

# GB/s of pack and strided, on an H200, rows of 32 KiB, by kernels of priority 0: a launch behind a long kernel waits
# until a wave of it ends. So the situations differ more than with the highest priority, the default.
RATES: dict[str, dict[int, tuple[float, float]]] = {
    "idle": {4: (53, 45), 16: (54, 47), 64: (53, 48)},
    "small products": {4: (43, 44), 16: (50, 46), 64: (52, 48)},
    "decode-like": {4: (40, 32), 16: (48, 34), 64: (50, 34)},
    "large products": {4: (6, 30), 16: (22, 38), 64: (41, 38)},
}
MIXED = "mixed"
FOLLOWED = tuple((name, 200) for name in ("large products", "decode-like", "small products", "idle")) * 3
TO_AND_FRO = tuple((name, 60) for name in ("large products", "idle")) * 10


def seconds(situation: str, size: int, copier: int) -> float:
    return size * MIB / (RATES[situation][size][copier] * 1e9)


class World(NamedTuple):
    """How times differ from those in `RATES`.

    Attributes:
        noise: standard deviation of the logarithm.
        outliers: how many times are ten times as long.
        scales: predicted seconds of each copier, as multiples of the right ones.
        depth: how many transfers are in flight when one is chosen.
        waits: how long a launch waits: "same" each time, "even" from 0 to twice as long, "half" of the times not at
            all, or "every other" time.
    """

    noise: float = 0.1
    outliers: float = 0.0
    scales: tuple[float, float] = (1.0, 1.0)
    depth: int = 0
    waits: str = "same"


class Step(NamedTuple):
    """A transfer: what it was expected to take (mean) by the chosen copier, and by the better one."""

    situation: str
    size: int
    copier: int
    tried: bool
    mean: float
    least: float


def run(
    phases: Sequence[tuple[str, int]], sizes: Sequence[int], seed: int = 0, world: World | None = None
) -> list[Step]:
    """Transfers one after the other: for each phase a situation, and how many."""
    world = world or World()
    rng, steps, waiting = random.Random(seed), [], []
    comparisons: dict[int, Comparison] = {}
    for situation, count in phases:
        for number in range(count):
            size = rng.choice(sizes)
            ways = (
                Way("pack", (size * MIB / 54e9 + 2e-6) * world.scales[0]),
                Way("strided", (size * MIB / 48.5e9 + 6e-6) * world.scales[1]),
            )
            comparison = comparisons.setdefault(size, Comparison(ways))
            forecast = comparison.choose(ways, size * MIB)
            packed, mean = _packed(rng, world, situation, size, number)
            means = mean, seconds(situation, size, 1)
            time = (packed, means[1])[forecast.number] * exp(rng.gauss(0.0, world.noise))
            time *= 10.0 if rng.random() < world.outliers else 1.0
            waiting.append((comparison, forecast, time))
            if len(waiting) > world.depth:
                ended, chosen, taken = waiting.pop(0)
                ended.note(chosen, taken)
            step = Step(situation, size, forecast.number, forecast.price > 0.0, means[forecast.number], min(means))
            steps.append(step)
    return steps


def _packed(rng: random.Random, world: World, situation: str, size: int, number: int) -> tuple[float, float]:
    """What packing takes this time, and on the average."""
    slow, fast = seconds(situation, size, 0), min(seconds(each, size, 0) for each in RATES)
    if world.waits == "even":
        return fast + (slow - fast) * 2.0 * rng.random(), slow
    if world.waits == "half":
        return rng.choice((fast, slow)), (fast + slow) / 2.0
    if world.waits == "every other":
        return (fast, slow)[number % 2], (fast + slow) / 2.0
    return slow, slow


def share(steps: Sequence[Step], beginning: int = BEGINNING) -> float:
    """Of the better copier's throughput."""
    counted = steps[beginning:]
    return sum(step.least for step in counted) / sum(step.mean for step in counted)


def shares(phases: Sequence[tuple[str, int]], size: int | str, world: World | None = None) -> list[float]:
    sizes = SIZES if isinstance(size, str) else (size,)
    return [share(run(phases, sizes, seed, world)) for seed in SEEDS]


def lags(phases: Sequence[tuple[str, int]], size: int, seed: int, world: World | None = None) -> list[int]:
    """For each change of situation, the transfers until the better copier carried two of three."""
    steps, found, begin = run(phases, (size,), seed, world), [], 0
    for situation, count in phases:
        right = [step.mean == step.least for step in steps[begin : begin + count]]
        if begin:
            found.append(next((n for n in range(count - 2) if sum(right[n : n + 3]) >= 2 and right[n]), count))
        begin += count
        assert situation == steps[begin - 1].situation
    return found


def _always(copier: int) -> Callable[[str, int], float]:
    def share_of(situation: str, size: int) -> float:
        return min(seconds(situation, size, each) for each in (0, 1)) / seconds(situation, size, copier)

    return share_of


HEAD = (*(f"{size} MiB" for size in SIZES), MIXED)


def _line(name: str, phases: Sequence[tuple[str, int]], world: World) -> str:
    found = [shares(phases, size, world) for size in (*SIZES, MIXED)]
    return f"  {name:44}" + "".join(f"{fmean(each):8.3f} {min(each):.2f}" + " " for each in found)


def table() -> str:
    worlds = {
        "times scatter by 10%": World(),
        "1% of times are 10 times as long": World(outliers=0.01),
        "profile: pack takes twice as long": World(scales=(2.0, 1.0)),
        "profile: pack takes half": World(scales=(0.5, 1.0)),
        "profile: strided takes twice as long": World(scales=(1.0, 2.0)),
        "profile: strided takes half": World(scales=(1.0, 0.5)),
        "4 in flight": World(depth=4),
        "waits from 0 to twice": World(waits="even"),
        "half of the launches wait": World(waits="half"),
    }
    lines = [f"{'of the better copier, mean and least of ' + str(len(SEEDS)):46}" + "".join(f"{n:>14}" for n in HEAD)]
    for situation in RATES:
        lines.append(situation)
        for copier, name in enumerate(("pack", "strided")):
            of_each = [f"{_always(copier)(situation, size):14.2f}" for size in SIZES]
            lines.append(f"  {'always ' + name:44}" + "".join(of_each))
        lines += [_line(name, [(situation, 200)], world) for name, world in worlds.items()]
    lines += ["changes every 200 transfers: large, decode-like, small, idle"]
    lines += [_line(name, FOLLOWED, world) for name, world in worlds.items()]
    lines += ["changes every 60 transfers: large, idle"]
    lines += [_line(name, TO_AND_FRO, world) for name, world in worlds.items()]
    lines += ["transfers until a change is followed, median and 90%: large, idle"]
    for name, world in worlds.items():
        found = [sorted(lag for seed in SEEDS for lag in lags(TO_AND_FRO, size, seed, world)) for size in SIZES]
        each = [f"{lag[len(lag) // 2]} {lag[len(lag) * 9 // 10]}" for lag in found]
        lines.append(f"  {name:44}" + "".join(f"{text:>14}" for text in each))
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
