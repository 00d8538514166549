"""Interleaved rounds: each scenario executes once a round, so that one slow minute of the machine hits all alike.

Before a scenario is timed its targets are poisoned, after it all bytes that it had to write are compared with what they
must be. Figures are medians over the rounds that follow `WARM_UP` uncounted ones. Right before it is timed, a scenario
may move a few other blocks with the same copy method: a CPU that has just compared 32 MiB has cold caches, the CPU of a
server has not.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

WARM_UP = 1  # rounds that are not counted


class Scenario(NamedTuple):
    """A transfer, or anything else that writes bytes, to be timed.

    Attributes:
        execute: does it once, waits for its end, and returns its seconds.
        poison: overwrites the bytes that `execute` has to write.
        wrong: the number of rows whose bytes are not what `execute` must have written.
        nbytes: bytes that one execution moves.
        warm_up: the same kind of work on other bytes, not timed.
    """

    execute: Callable[[], float]
    poison: Callable[[], None]
    wrong: Callable[[], int]
    nbytes: int
    warm_up: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Timing:
    """The result of the rounds of one scenario.

    Attributes:
        nbytes: bytes that one execution moves.
        seconds: of each counted round.
        wrong: wrong rows, summed over all rounds, the uncounted ones included.
    """

    nbytes: int
    seconds: list[float] = field(default_factory=list)
    wrong: int = 0

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def gb_per_s(self) -> float:
        return self.nbytes / self.median / 1e9


def time_rounds(scenarios: Mapping[str, Scenario], repeats: int, warm_up: int = WARM_UP) -> dict[str, Timing]:
    """Execute every scenario once in each of `warm_up + repeats` rounds; each round begins with another scenario."""
    seconds: dict[str, list[float]] = {name: [] for name in scenarios}
    wrong = dict.fromkeys(scenarios, 0)
    names = list(scenarios)
    for number in range(warm_up + repeats):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            scenario = scenarios[name]
            scenario.poison()
            scenario.warm_up()
            seconds[name].append(scenario.execute())
            wrong[name] += scenario.wrong()
    return {name: Timing(scenarios[name].nbytes, seconds[name][warm_up:], wrong[name]) for name in names}
