"""The right bytes of a setup's slots, and a pinned copy of what its planes hold, moved by bare flat copies."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np

from kvoffload.device.pinned import PAGE_BYTES, PinnedMemory
from kvoffload.driver import FlatTable, SourceOrder, address_of
from kvoffload.internal.types import UInt8Array, UInt64Array
from kvoffload_bench.tools import POISON, BenchTools

_FLAT_COPIES = 4096  # of one driver call; a call with 51,828 has crashed a driver


class SetupBytes:
    """Random bytes for `slots` slots of each of `groups` groups. Free it with `close`.

    Attributes:
        expected: the right bytes of each slot that transfers copy now, group after group.
    """

    def __init__(self, tools: BenchTools, groups: int, slots: int, payload_bytes: int) -> None:
        self._tools = tools
        random = np.random.default_rng(tools.seed + 1)
        words = random.integers(0, 1 << 64, (groups, slots, payload_bytes // 8), np.uint64)
        self._right: UInt8Array = words.view(np.uint8)
        self._table = FlatTable(_FLAT_COPIES)
        fill, timer = tools.driver.fill, tools.timer
        nbytes = -(-words.nbytes // PAGE_BYTES) * PAGE_BYTES
        with tools.device.current(), ExitStack() as undo:
            self._poison = undo.enter_context(tools.device.allocate(payload_bytes))
            self._pinned = PinnedMemory(tools.driver, nbytes, unit_bytes=nbytes)
            undo.callback(self._pinned.release)
            timer.seconds(lambda: fill(self._poison.address, POISON, payload_bytes, timer.stream))
            undo.pop_all()
        self._mirror = self._pinned.array[: words.nbytes].reshape(self._right.shape)

    def take(self, slots: int, first: int = 0) -> None:
        """Make `expected` hold `slots` slots of each group, from `first` on."""
        self.expected = [slot for group in self._right for slot in group[first : first + slots]]
        self._found = [slot for group in self._mirror for slot in group[first : first + slots]]

    def against(self, found: Sequence[UInt8Array]) -> list[tuple[UInt8Array, UInt8Array]]:
        """Pairs of the found and the right bytes of each slot."""
        return list(zip(found, self.expected, strict=True))

    def poison(self, addresses: Sequence[int]) -> None:
        """Overwrite a slot's payload at each of these host addresses, from the GPU."""
        copy, timer, nbytes = self._tools.driver.copy, self._tools.timer, self._poison.nbytes

        def submit() -> None:
            for address in addresses:
                copy(address, self._poison.address, nbytes, timer.stream)

        timer.seconds(submit)

    def upload(self, device: UInt64Array, row_bytes: int) -> None:
        """Copy the right bytes to device addresses, one for each row of every slot."""
        self._tools.in_threads(lambda pair: np.copyto(*pair), self.against(self._found))
        self._copy(device, self._rows(row_bytes), row_bytes)

    def download(self, device: UInt64Array, row_bytes: int) -> list[UInt8Array]:
        """Copy rows from device addresses. Returns the payload of each slot, valid until the next call."""
        self.poison([address_of(slot) for slot in self._found])
        self._copy(self._rows(row_bytes), device, row_bytes)
        return self._found

    def _rows(self, row_bytes: int) -> UInt64Array:
        starts = np.array([address_of(slot) for slot in self._found], dtype=np.int64)[:, np.newaxis]
        return (starts + np.arange(0, self._poison.nbytes, row_bytes)).reshape(-1).astype(np.uint64)

    def _copy(self, targets: UInt64Array, sources: UInt64Array, row_bytes: int) -> None:
        self._tools.timer.seconds(lambda: self._submit(targets, sources, row_bytes))

    def _submit(self, targets: UInt64Array, sources: UInt64Array, row_bytes: int) -> None:
        driver, stream = self._tools.driver, self._tools.timer.stream
        if not self._tools.device.capabilities.flat_batch:
            for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
                driver.copy(target, source, row_bytes, stream)
            return
        for start in range(0, len(targets), _FLAT_COPIES):
            stop = min(start + _FLAT_COPIES, len(targets))
            self._table.fill(
                targets[start:stop], sources[start:stop], np.full(stop - start, row_bytes, dtype=np.uint64)
            )
            driver.copy_batch(self._table, 0, stop - start, SourceOrder.STREAM, stream)

    def close(self) -> None:
        self._poison.close()
        with self._tools.device.current():
            self._pinned.release()
