"""Measures a profile: transfers through real engines.

Times are medians on the GPU's clock, of transfers one at a time on an idle GPU. Some transfers are also timed in the
field, by wall clock: beside products of matrices, large and small, and beside copies in the other direction. A copier
that cannot run here is left out, and then never chosen. What pack costs follows from contiguous copies, see
`kvoffload.copiers.selection`; it is timed only to see what the codec brings.
"""

from __future__ import annotations

import datetime
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from kvoffload.calibration.backdrops import Backdrop, opposite_copies, products
from kvoffload.calibration.schedule import FULL, MINIATURE, Scale, TrialSet, check_sets, flat_sets, strided_sets
from kvoffload.calibration.trial_engine import TrialEngine, TrialMemory
from kvoffload.copiers import why_not
from kvoffload.device.device import Device
from kvoffload.errors import CapabilityError
from kvoffload.layout.coding import CODECS, CodecName
from kvoffload.planning.transfer_plan import Direction
from kvoffload.tuning import Deviation, Profile, key_of
from kvoffload.tuning.costs import CONCURRENT_COMPUTE, Costs, Situation
from kvoffload.tuning.fitting import Sample, fit, fit_host

Samples = dict[tuple[Situation, Direction], list[Sample]]
Progress = Callable[[int, int], None]  # steps done, steps in all


class Tuning(NamedTuple):
    """A measured profile.

    Attributes:
        transfers: how many timings the profile is made from.
        seconds: wall clock of the whole measurement.
        missing: why a copier or "concurrent compute" could not be measured.
    """

    profile: Profile
    transfers: int
    seconds: float
    missing: dict[str, str]


def tune(device: Device, *, scale: Scale | None = None, progress: Progress | None = None) -> Tuning:
    """Measure a profile of `device`. Nothing else should use it meanwhile. The profile is not saved.

    Args:
        scale: None: `FULL` on a GPU, which takes less than 30 seconds, and `MINIATURE` on the simulated device.
        progress: called with (steps done, steps in all) after each step.

    Raises:
        CapacityError: GPU or host memory is short.
        TransferError: a transfer failed.
    """
    scale = scale or (MINIATURE if device.simulated else FULL)
    missing = {name: reason for name, reason in why_not(device.capabilities).items() if reason is not None}
    with TrialMemory(device, scale.planes, scale.scattered_bytes, scale.pitch) as memory:
        return _Tuner(device, scale, missing, memory, progress).run()


class _Tuner:
    def __init__(
        self, device: Device, scale: Scale, missing: dict[str, str], memory: TrialMemory, progress: Progress | None
    ) -> None:
        self._device, self._scale, self._missing, self._memory = device, scale, missing, memory
        self._progress = progress
        self._begin = time.perf_counter()
        self._backdrops: dict[tuple[Situation, Direction], Backdrop] = {}
        self._host: list[Sample] = []
        self._around: list[Sample] = []
        self._steps = self._timed = 0
        self._total = 1

    def run(self) -> Tuning:
        scale, missing = self._scale, self._missing
        first = [*flat_sets(scale, missing), *strided_sets(scale)]
        checking = list(check_sets(scale, missing))
        self._total = len(first) + 1 + len(checking) + len(CODECS)
        with ExitStack() as undo:
            field = scale.field
            try:
                for situation, product in zip(CONCURRENT_COMPUTE, (field.large, field.small), strict=True):
                    backdrop = undo.enter_context(products(self._device, product))
                    self._backdrops |= {(situation, direction): backdrop for direction in Direction}
            except CapabilityError as error:
                missing["concurrent compute"] = str(error)
            for direction in Direction:
                copies = undo.enter_context(opposite_copies(self._device, direction, field.opposite_bytes))
                self._backdrops[Situation.BOTH_DIRECTIONS, direction] = copies
            contiguous = self._time([TrialSet("loop", 1, scale.link_bytes, [1])])
            samples = self._time(first)
            codec = self._time_codec()
        situations: dict[Situation, dict[Direction, Costs]] = {}
        for (situation, direction), copies_alone in contiguous.items():
            timed = samples.get((situation, direction), [])  # the fastest is the link: the copy may have been slow
            link = max(each.shape.nbytes / each.seconds for each in (*copies_alone, *timed))
            situations.setdefault(situation, {})[direction] = fit(link, timed)
        costs = situations.pop(Situation.IDLE)
        profile = Profile(
            key=key_of(self._device),
            source=f"measured on {datetime.date.today()}" + (" BY A SIMULATED DEVICE" * self._device.simulated),
            costs=costs,
            situations=situations,
            host=fit_host(self._host),
            around=fit_host(self._around),
            codec=codec,
            simulated=self._device.simulated,
        )
        checked = chain.from_iterable(self._time(checking).values())
        profile = replace(profile, errors=deviations(profile, checked))
        return Tuning(profile, self._timed, time.perf_counter() - self._begin, missing)

    def _step(self) -> None:
        self._steps += 1
        if self._progress is not None:
            self._progress(min(self._steps, self._total), self._total)

    def _repeats(self) -> int:
        late = time.perf_counter() - self._begin > self._scale.seconds
        return self._scale.hurried if late else self._scale.repeats

    def _time_codec(self) -> dict[Situation, dict[Direction, float]]:
        """Time the same transfers with and without a codec, and return what `Profile.codec` has."""
        missing = self._missing
        if "concurrent compute" in missing:  # no kernel can run here
            missing["codec"] = missing["concurrent compute"]
            return {}
        block_bytes, blocks = self._scale.packed
        packed = TrialSet("pack", self._scale.planes, block_bytes, [blocks])
        self._memory.fill(self._memory.planes(packed))
        raw, coded = (self._time([packed], codec) for codec in CODECS)
        found: dict[Situation, dict[Direction, float]] = {}
        for (situation, direction), samples in coded.items():
            of_situation = found.setdefault(situation, {})
            if samples and raw[situation, direction]:
                of_situation[direction] = raw[situation, direction][0].seconds / samples[0].seconds
        return found

    def _time(self, trial_sets: Iterable[TrialSet], codec: CodecName | None = None) -> Samples:
        """Time each set on an idle GPU, and the transfers that `FieldScale` has in the other situations."""
        scale, samples = self._scale.field, defaultdict[tuple[Situation, Direction], list[Sample]](list)
        for trial_set in trial_sets:
            with TrialEngine(self._device, self._memory, trial_set, codec=codec) as trial_engine:
                in_field = [blocks for blocks in trial_set.blocks if scale.has(trial_set, blocks)]
                for direction in Direction:
                    found = trial_engine.rounds(direction, trial_set.blocks, self._repeats)
                    samples[Situation.IDLE, direction] += found
                    self._timed += trial_engine.counted
                    for (situation, each), backdrop in self._backdrops.items():
                        if in_field and each is direction:
                            found = trial_engine.rounds(direction, in_field, lambda: scale.repeats, backdrop)
                            samples[situation, direction] += found
                            self._timed += trial_engine.counted
                            backdrop.drain()
                if codec is None:
                    self._host += trial_engine.host
                    self._around += trial_engine.around
            self._step()
        return samples


def deviations(profile: Profile, samples: Iterable[Sample]) -> dict[str, Deviation]:
    found: dict[str, list[float]] = {}
    for copier, shape, seconds in samples:
        found.setdefault(copier, []).append(abs(profile.seconds(copier, shape) / seconds - 1.0))
    return {name: Deviation(statistics.median(each), max(each), len(each)) for name, each in found.items()}
