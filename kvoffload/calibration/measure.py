"""Measures a profile: transfers through real engines, timed in turns, and a matrix product beside each way of them.

Times are medians on the GPU's clock, of transfers one at a time. For the slow-downs transfers follow each other without
a pause while a 4096^3 bf16 product runs again and again. What cannot run here is left out, and then never chosen.
"""

from __future__ import annotations

import datetime
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import NamedTuple

from kvoffload.calibration.compute import Computation
from kvoffload.calibration.schedule import (
    FULL,
    MINIATURE,
    Bed,
    Case,
    Scale,
    check_beds,
    flat_beds,
    restrict,
    same_cases,
    split_beds,
    strided_beds,
)
from kvoffload.calibration.trials import Ground, Trials
from kvoffload.copiers import why_not
from kvoffload.device.device import Device
from kvoffload.engine.job import Job
from kvoffload.errors import CapabilityError
from kvoffload.planning.transfer_plan import Direction
from kvoffload.tuning import Deviation, Profile, key_of
from kvoffload.tuning.costs import CopyMethod, Costs
from kvoffload.tuning.fitting import Sample, fit

Progress = Callable[[int, int], None]  # steps done, steps in all

_IN_FLIGHT = 3  # transfers beside the matrix product: one follows the other without a pause
_ROUNDS_BESIDE = 3


class Tuning(NamedTuple):
    """A profile, and how it came about.

    Attributes:
        transfers: of which the time was taken and counted.
        seconds: that it all took, wall clock.
        missing: why something was left out: by copier; and "slowdown".
    """

    profile: Profile
    transfers: int
    seconds: float
    missing: dict[str, str]


def tune(device: Device, *, scale: Scale | None = None, progress: Progress | None = None) -> Tuning:
    """Measure `device`; nothing else should use it meanwhile. The profile is not saved.

    Args:
        scale: None: `FULL` on a GPU, which takes less than 30 seconds, and `MINIATURE` on the simulated device.
        progress: called after each step.

    Raises:
        CapacityError: GPU or host memory is short.
        TransferError: a transfer failed.
    """
    scale = scale or (MINIATURE if device.simulated else FULL)
    with Ground(device, scale.planes, scale.scattered_bytes, scale.pitch) as ground:
        missing = _missing(device, ground, scale)
        return _Tuner(device, restrict(scale, missing), missing, ground, progress).run()


def _missing(device: Device, ground: Ground, scale: Scale) -> dict[str, str]:
    """Which copiers cannot run here, and why; of the kernel, that is known when one has run."""
    missing = {name: reason for name, reason in why_not(device.capabilities).items() if reason is not None}
    if "gather" not in missing:
        case = Case(CopyMethod("gather", 1, 1.0), 1)
        with Trials(device, ground, same_cases(False, scale.planes, scale.copy_bytes[0], [case])) as trials:
            missing |= trials.engine.missing_copiers
    return missing


class _Tuner:
    def __init__(
        self, device: Device, scale: Scale, missing: dict[str, str], ground: Ground, progress: Progress | None
    ) -> None:
        self._device, self._scale, self._missing, self._ground = device, scale, missing, ground
        self._progress = progress
        self._begin = time.perf_counter()
        self._steps = self._timed = 0
        self._total = 1

    def run(self) -> Tuning:
        scale, missing = self._scale, self._missing
        first = [*flat_beds(scale, missing), *strided_beds(scale)]
        self._total = len(first) + 2 + len(scale.split_bytes) + 2 * len(scale.check_bytes)
        link = self._link()
        samples: dict[Direction, list[Sample]] = {direction: [] for direction in Direction}
        self._time(first, samples)
        self._time(split_beds(scale, _fit(link, samples)), samples)
        costs = _fit(link, samples)
        slowdowns = self._slowdowns(costs)
        profile = Profile(
            key=key_of(self._device),
            source=f"measured on {datetime.date.today()}" + (" BY A SIMULATED DEVICE" * self._device.simulated),
            costs=costs,
            slowdowns=slowdowns,
            simulated=self._device.simulated,
        )
        checks: dict[Direction, list[Sample]] = {direction: [] for direction in Direction}
        self._time(check_beds(scale, missing, costs), checks)
        profile = replace(profile, errors=deviations(profile, [each for found in checks.values() for each in found]))
        return Tuning(profile, self._timed, time.perf_counter() - self._begin, missing)

    def _step(self) -> None:
        self._steps += 1
        if self._progress is not None:
            self._progress(min(self._steps, self._total), self._total)

    def _repeats(self) -> int:
        late = time.perf_counter() - self._begin > self._scale.seconds
        return self._scale.hurried if late else self._scale.repeats

    def _time(self, beds: Iterable[Bed], samples: Mapping[Direction, list[Sample]]) -> None:
        """Add what is timed on each bed to the samples of its direction."""
        for bed in beds:
            with Trials(self._device, self._ground, bed) as trials:
                for direction in Direction:
                    samples[direction] += trials.rounds(direction, bed.cases[direction], self._repeats)
                    self._timed += trials.counted
            self._step()

    def _link(self) -> dict[Direction, float]:
        """Bytes per second of one big copy."""
        bed = same_cases(True, 1, self._scale.link_bytes, [Case(CopyMethod("loop"), 1)])
        samples: dict[Direction, list[Sample]] = {direction: [] for direction in Direction}
        self._time([bed], samples)
        return {direction: self._scale.link_bytes / found[0].seconds for direction, found in samples.items()}

    # slow-downs ---------------------------------------------------------------------------------------------------

    def _slowdowns(self, costs: Mapping[Direction, Costs]) -> dict[str, float]:
        """By label: the product's time beside transfers over its time alone, the greater of both directions."""
        scale = self._scale
        try:
            computation = Computation(self._device, scale.product)
        except CapabilityError as error:
            self._missing["slowdown"] = str(error)
            return {}
        cases = {direction: self._beside_cases(costs[direction], direction) for direction in Direction}
        with computation, Trials(self._device, self._ground, self._beside_bed(cases)) as trials:
            computation.seconds_each(scale.products)  # clocks rise
            found = [_beside(computation, trials, cases, scale.products) for _ in range(_ROUNDS_BESIDE)]
        self._step()
        return {label: max(1.0, statistics.median(each[label] for each in found)) for label in found[0]}

    def _beside_bed(self, cases: Mapping[Direction, list[Case]]) -> Bed:
        return Bed(True, self._scale.planes, self._scale.beside_bytes, cases)

    def _beside_cases(self, costs: Costs, direction: Direction) -> list[Case]:
        scale = self._scale
        shape = self._beside_bed({}).shape(direction, scale.beside_blocks)
        methods = [
            CopyMethod("strided"),
            *([] if "batch" in self._missing else [CopyMethod("batch")]),
            CopyMethod("loop"),
        ]
        methods += [CopyMethod("gather", programs, 1.0) for programs in scale.gather_programs]
        shares = {each: costs.split_share(shape, each) for each in scale.split_programs}
        methods += [CopyMethod("split", each, share) for each, share in shares.items() if 0 < share < 1]
        return [Case(method, scale.beside_blocks) for method in methods]


def _fit(link: Mapping[Direction, float], samples: Mapping[Direction, list[Sample]]) -> dict[Direction, Costs]:
    return {direction: fit(link[direction], samples[direction]) for direction in Direction}


def _beside(
    computation: Computation, trials: Trials, cases: Mapping[Direction, list[Case]], products: int
) -> dict[str, float]:
    """One round: by label, how many times as long a product takes beside transfers, at worst."""
    alone = statistics.median(computation.seconds_each(products))
    found: dict[str, float] = {}
    for direction, each in cases.items():
        for case in each:
            with _Traffic(trials, direction, case) as traffic:
                times = computation.seconds_each(products, traffic.keep_up)
            slowdown = statistics.median(times) / max(alone, 1e-9)
            found[case.method.label] = max(found.get(case.method.label, 0.0), slowdown)
    return found


class _Traffic:
    """The same transfer again and again. A context manager, which waits for the last."""

    def __init__(self, trials: Trials, direction: Direction, case: Case) -> None:
        self._trials, self._direction, self._case = trials, direction, case
        self._jobs: deque[Job] = deque()

    def keep_up(self) -> None:
        """Submit what is missing."""
        while self._jobs and self._jobs[0].done:
            self._jobs.popleft().wait()
        while len(self._jobs) < _IN_FLIGHT:
            self._jobs.append(self._trials.submit(self._direction, self._case))

    def __enter__(self) -> _Traffic:
        return self

    def __exit__(self, *exception: object) -> None:
        with ExitStack() as stack:
            for job in self._jobs:
                stack.callback(job.wait)


def deviations(profile: Profile, samples: Iterable[Sample]) -> dict[str, Deviation]:
    """By copier: how far the profile is from samples."""
    found: dict[str, list[float]] = {}
    for method, shape, seconds in samples:
        found.setdefault(method.copier, []).append(abs(profile.seconds(method, shape) / seconds - 1.0))
    return {name: Deviation(statistics.median(each), max(each), len(each)) for name, each in found.items()}
