"""The contiguous copy: what the link carries when one driver call copies one pinned range."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvoffload.device.buffers import DeviceBuffer
from kvoffload.device.pinned import PAGE_BYTES, PinnedMemory
from kvoffload.internal.types import UInt8Array
from kvoffload.planning.transfer_plan import Direction
from kvoffload_bench.rounds import Scenario
from kvoffload_bench.tools import POISON, BenchTools

CONTIGUOUS_COPY = "contiguous copy"
_PATTERN_BYTES = 8 << 20  # the pattern repeats, so that it stays in the CPU's caches


class ContiguousCopy:
    """One copy of `nbytes` (rounded up to pages) between pinned and GPU memory. Free it with `close`."""

    def __init__(self, tools: BenchTools, nbytes: int) -> None:
        self._tools, self.nbytes = tools, -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        random = np.random.default_rng(tools.seed)
        self._pattern = random.integers(0, 256, min(self.nbytes, _PATTERN_BYTES), dtype=np.uint8)
        self._buffers: list[DeviceBuffer] = []
        self._pinned: list[PinnedMemory] = []
        try:
            for _ in range(2):
                with tools.device.current():
                    self._pinned.append(PinnedMemory(tools.driver, self.nbytes, unit_bytes=self.nbytes))
                self._buffers.append(tools.device.allocate(self.nbytes))
            self._host, self._check = self._pinned
            self._gpu, self._poison = self._buffers
            tools.in_threads(lambda each: np.copyto(each, self._pattern[: len(each)]), self._sections(self._host))
            self._queue(lambda stream: tools.driver.fill(self._poison.address, POISON, self.nbytes, stream))
            self._copy(self._gpu.address, self._host.address)
        except BaseException:
            self.close()
            raise

    def scenario(self, direction: Direction) -> Scenario:
        """Needs no preparation: the bytes that one direction has written are the source of the other."""
        if direction is Direction.STORE:
            return Scenario(
                lambda: self._copy(self._host.address, self._gpu.address),
                lambda: self._poison_host(self._host),
                lambda: self._wrong(self._host),
                self.nbytes,
            )
        return Scenario(
            lambda: self._copy(self._gpu.address, self._host.address), self._poison_gpu, self._read_back, self.nbytes
        )

    def queue(self, direction: Direction, stream: int, *, first: int = 0, nbytes: int | None = None) -> None:
        """Queue the copy on a stream, and return: of `nbytes` from byte `first` on, None: of all. Its bytes are not
        verified here.
        """
        target, source = self._host.address + first, self._gpu.address + first
        if direction is Direction.LOAD:
            target, source = source, target
        self._tools.driver.copy(target, source, self.nbytes if nbytes is None else nbytes, stream)

    def _queue(self, submit: Callable[[int], object]) -> float:
        timer = self._tools.timer
        return timer.seconds(lambda: submit(timer.stream))

    def _copy(self, target: int, source: int) -> float:
        return self._queue(lambda stream: self._tools.driver.copy(target, source, self.nbytes, stream))

    def _poison_gpu(self) -> None:
        self._queue(lambda stream: self._tools.driver.fill(self._gpu.address, POISON, self.nbytes, stream))

    def _poison_host(self, host: PinnedMemory) -> None:
        self._copy(host.address, self._poison.address)

    def _read_back(self) -> int:
        self._poison_host(self._check)
        self._copy(self._check.address, self._gpu.address)
        return self._wrong(self._check)

    def _wrong(self, host: PinnedMemory) -> int:
        """Wrong rows of a page each."""
        pairs = [(each, self._pattern[: each.nbytes]) for each in self._sections(host)]
        return self._tools.wrong_rows(pairs, PAGE_BYTES)

    def _sections(self, host: PinnedMemory) -> list[UInt8Array]:
        step = len(self._pattern)
        return [host.array[start : start + step] for start in range(0, self.nbytes, step)]

    def close(self) -> None:
        """Free the memory; no copy of it may be queued."""
        for buffer in self._buffers:
            buffer.close()
        with self._tools.device.current():
            for memory in self._pinned:
                memory.release()
