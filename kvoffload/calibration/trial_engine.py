"""Engines to time transfers on, over planes that fold and planes that do not; an idle GPU's cache is flushed before."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np

from kvoffload.calibration.backdrops import Backdrop
from kvoffload.calibration.schedule import TrialSet
from kvoffload.copiers import STAGING_BYTES
from kvoffload.device.device import Device
from kvoffload.device.streams import NO_WAIT
from kvoffload.driver import address_of
from kvoffload.engine.engine import OffloadEngine
from kvoffload.engine.job import Job
from kvoffload.internal.teardown import Undoing
from kvoffload.layout.coding import CodecName
from kvoffload.layout.layout import KVLayout
from kvoffload.layout.planes import Plane
from kvoffload.planning.transfer_plan import Direction
from kvoffload.tuning import default_profile
from kvoffload.tuning.fitting import Sample

_LEAST_SECONDS = 1e-7  # the clock of the events counts half microseconds
_PITCH_ALIGNMENT = 2 << 20
_WARM_UP = 1
_IN_A_ROW = 3
_FLUSH_BYTES = 160 << 20  # more than the 126 MB of cache that the largest GPU has


class TrialMemory(Undoing):
    """Memory for `plane_count` planes, twice: each in its own allocation, and all in one slab. A context manager.

    Args:
        scattered_bytes: size of each allocation.
        pitch: bytes from plane to plane in the slab. Both are smaller if the GPU has too little memory to spare.
    """

    def __init__(self, device: Device, plane_count: int, scattered_bytes: int, pitch: int) -> None:
        with device.current():
            spare = device.driver.free_and_total_bytes()[0] // 4 // plane_count
        spare = max(spare // _PITCH_ALIGNMENT, 1) * _PITCH_ALIGNMENT
        self.pitch, scattered_bytes = min(pitch, spare), min(scattered_bytes, spare)
        self._device = device
        with ExitStack() as undo:
            self._stream = undo.enter_context(device.stream()).handle
            self._apart = [undo.enter_context(device.allocate(scattered_bytes)) for _ in range(plane_count)]
            self._slab = undo.enter_context(device.allocate(plane_count * self.pitch))
            self._undo = undo.pop_all()

    def planes(self, trial_set: TrialSet) -> list[Plane]:
        if trial_set.planes == 1:
            return [_plane(self._slab.address, trial_set.block_bytes, self._slab.nbytes)]
        if trial_set.folds:
            starts = [self._slab.address + index * self.pitch for index in range(trial_set.planes)]
            return [_plane(start, trial_set.block_bytes, self.pitch) for start in starts]
        return [_plane(each.address, trial_set.block_bytes, each.nbytes) for each in self._apart[: trial_set.planes]]

    def fill(self, planes: Sequence[Plane]) -> None:
        """Write bf16 values of a normal distribution into planes."""
        values = np.random.default_rng(0).standard_normal(planes[0].span_bytes // 2).astype(np.float32)
        rows = (values.view(np.uint32) >> 16).astype(np.uint16)
        with self._device.current():
            for plane in planes:
                self._device.driver.copy_to_device(plane.address, address_of(rows), rows.nbytes)

    def flush(self) -> None:
        """Replace the content of the GPU's cache, since real blocks are mostly not in it. Waits."""
        nbytes = min(_FLUSH_BYTES, self._slab.nbytes)
        with self._device.current():
            self._device.driver.fill(self._slab.address, 0, nbytes, self._stream)
            self._device.driver.stream_synchronize(self._stream)


def _plane(address: int, block_bytes: int, nbytes: int) -> Plane:
    return Plane(address, block_bytes=block_bytes, num_blocks=nbytes // block_bytes)


class TrialEngine(Undoing):
    """Transfers of random blocks between the planes of a set and random slots. A context manager.

    Args:
        codec: of the slots; None: "raw", and no memory for pack.

    Attributes:
        counted: how many timings the last `rounds` used; in the field each is of three transfers in a row.
        host: for each transfer on an idle GPU, the seconds that its submission kept the caller.
        around: for each, the seconds from the call until its end was seen, less those on the GPU's clock.
    """

    def __init__(
        self, device: Device, memory: TrialMemory, trial_set: TrialSet, *, codec: CodecName | None = None
    ) -> None:
        planes = memory.planes(trial_set)
        most = min(trial_set.most_blocks, planes[0].num_blocks)
        self._trial_set, self._memory, self._most_blocks = trial_set, memory, most
        self.counted = 0
        self.host: list[Sample] = []
        self.around: list[Sample] = []
        self.engine = OffloadEngine(
            KVLayout([planes], codec=codec or "raw"),
            device=device,
            num_slots=most + most // 4 + 1,
            staging_bytes=0 if codec is None else STAGING_BYTES,
            profile=default_profile(None),
        )
        random = np.random.default_rng(0)
        self._blocks = random.permutation(planes[0].num_blocks)[:most]
        self._slots = random.permutation(self.engine.num_slots)[:most]

    def submit(self, direction: Direction, count: int) -> Job:
        """Submit a transfer of so many blocks by the set's copier."""
        blocks, slots = self._blocks[:count], self._slots[:count]
        return self.engine.submit(direction, blocks, slots, after=NO_WAIT, copier=self._trial_set.copier)

    def seconds(self, direction: Direction, count: int) -> float:
        """Return the seconds of one transfer on an idle GPU, on the GPU's clock; NaN if unknown."""
        self._memory.flush()
        begin = time.perf_counter()
        job = self.submit(direction, count)
        host = time.perf_counter() - begin
        while not job.done:  # wait() sleeps between looks, and the next transfer would find a slower CPU
            pass
        until_seen = time.perf_counter() - begin
        seconds = job.wait().seconds
        self.host.append(self._sample(direction, count, host))
        if not math.isnan(seconds):
            self.around.append(self._sample(direction, count, max(0.0, until_seen - seconds)))
        return seconds

    def _sample(self, direction: Direction, count: int, seconds: float) -> Sample:
        return Sample(self._trial_set.copier, self._trial_set.shape(direction, count), seconds)

    def seconds_in_field(self, backdrop: Backdrop, direction: Direction, count: int) -> float:
        """Return the seconds per transfer of several in a row beside a backdrop, by wall clock. A single one would
        often find the GPU between two kernels.
        """
        backdrop.top_up()
        begin = time.perf_counter()
        jobs = [self.submit(direction, count) for _ in range(_IN_A_ROW)]
        while not jobs[-1].done:
            backdrop.top_up()
        seconds = (time.perf_counter() - begin) / _IN_A_ROW
        for job in jobs:
            job.wait()
        return seconds

    def rounds(
        self,
        direction: Direction,
        counts: Sequence[int],
        repeats: Callable[[], int],
        backdrop: Backdrop | None = None,
    ) -> list[Sample]:
        """Return the median time of each transfer over several rounds, after one round that does not count.

        Transfers that need more memory than the GPU had to spare are left out.

        Args:
            counts: how many blocks each transfer has.
            repeats: how many rounds; called before each.
            backdrop: runs meanwhile; None: the GPU is idle.
        """
        counts = [count for count in counts if count <= self._most_blocks]
        found: list[list[float]] = [[] for _ in counts]
        done = 0
        while done < _WARM_UP + repeats():
            for seconds, count in zip(found, counts, strict=True):
                if backdrop is None:
                    seconds.append(self.seconds(direction, count))
                else:
                    seconds.append(self.seconds_in_field(backdrop, direction, count))
            done += 1
        self.counted = (done - _WARM_UP) * len(counts)
        samples = []
        for seconds, count in zip(found, counts, strict=True):
            known = [max(value, _LEAST_SECONDS) for value in seconds[_WARM_UP:] if not math.isnan(value)]
            if known:
                samples.append(self._sample(direction, count, statistics.median(known)))
        return samples

    def close(self) -> None:
        self.engine.close()
