"""A device with the tools that benchmarks share: a clock, threads, an exact comparison, a cache flush."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from kvoffload.device.device import Device
from kvoffload.internal import hostinfo
from kvoffload.internal.types import UInt8Array
from kvoffload_bench.clock import GpuTimer

POISON = 0xA5
_THREADED_BYTES = 1 << 20


class Size(NamedTuple):
    """How large the measured transfers are.

    Attributes:
        payload_bytes: bytes of a transfer, at least.
        plane_bytes: bytes of a plane, about.
        contiguous_bytes: bytes of the contiguous copy.
        scale: factor on the block bytes of models.
        descriptors: copies of the flat batches that are compared at one number of descriptors.
        flush_bytes: more bytes than the GPU's cache holds.
    """

    payload_bytes: int
    plane_bytes: int
    contiguous_bytes: int
    scale: float
    descriptors: int
    flush_bytes: int


# Strided copies are faster where planes lie less than 32 MiB apart; from there up to 1 GiB they are all alike.
FULL = Size(32 << 20, 64 << 20, 256 << 20, 1.0, 4096, 160 << 20)
SMALL = Size(8 << 10, 32 << 10, 1 << 20, 1 / 64, 128, 1 << 16)  # for the simulated device


class BenchTools:
    """Free it with `close`, before the device is closed.

    Attributes:
        device, size, repeats, seed: as given.
        driver: of the device.
        timer: times bare driver calls; benchmarks also use its stream for work that they wait for.
    """

    def __init__(self, device: Device, size: Size, *, repeats: int, seed: int) -> None:
        self.device, self.size, self.repeats, self.seed = device, size, repeats, seed
        self.driver = device.driver
        with ExitStack() as stack:
            self._threads = stack.enter_context(ThreadPoolExecutor(min(16, hostinfo.usable_cpus())))
            self.timer = stack.enter_context(closing(GpuTimer(device)))
            self._flush = stack.enter_context(device.allocate(size.flush_bytes))
            self._stack = stack.pop_all()

    def wrong_rows(self, pairs: Sequence[tuple[UInt8Array, UInt8Array]], row_bytes: int) -> int:
        """The number of rows that differ between contiguous 1-D arrays; `row_bytes` is a multiple of 8."""
        if sum(found.nbytes for found, _ in pairs) < _THREADED_BYTES:
            return sum(_wrong_rows(pair, row_bytes) for pair in pairs)
        return sum(self._threads.map(partial(_wrong_rows, row_bytes=row_bytes), pairs))

    def flush(self) -> None:
        """Replace the content of the GPU's cache."""
        self.timer.seconds(lambda: self.driver.fill(self._flush.address, 0, self._flush.nbytes, self.timer.stream))

    def in_threads(self, work: Callable[[Any], object], items: Iterable[Any]) -> None:
        """Call `work` for each item, on several threads; returns when all calls have."""
        list(self._threads.map(work, items))

    def close(self) -> None:
        self._stack.close()


def _wrong_rows(pair: tuple[UInt8Array, UInt8Array], row_bytes: int) -> int:
    words, right = (array.view(np.uint64) for array in pair)
    if np.array_equal(words, right):
        return 0
    return int((words != right).reshape(-1, row_bytes // 8).any(axis=1).sum())
