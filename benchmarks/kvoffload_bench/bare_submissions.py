"""The driver calls that every submission of a transfer needs, called directly: a floor for the engine's host time.

Every submission pushes the context, computes addresses from block and slot numbers into arrays, records a marker on the
caller's stream and makes the copy stream wait for it, makes one copy call between two timing events, and pops the
context. The copy call is one of

    batch     cuMemcpyBatchAsync with one copy a block, of planes that interleave
    strided   cuMemcpy3DBatchAsync with one operation a block, of planes that fold
    gather    cuLaunchKernel of the library's kernel, after 16 bytes a block were written into a pinned table

All calls go to the driver API, without the checks, the retries and the ordering that `Driver` and the engine add.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import ExitStack
from typing import Any

import numpy as np

from kvoffload.device.pinned import PAGE_BYTES, PinnedMemory
from kvoffload.driver import Driver, address_of, binding_types
from kvoffload.driver.tables import DTYPE_3D
from kvoffload.errors import DriverError
from kvoffload.internal.types import Int64Array, UInt64Array
from kvoffload.kernels import load_kernel
from kvoffload.planning.transfer_plan import Direction
from kvoffload.terminal.machine import aligned_gather_kernel
from kvoffload_bench.setup import TransferSetup

UNFINISHED = 16  # submissions that may be unfinished at a time
_GATHER_PROGRAMS = 4
_GATHER_ROW_BYTES = 2048


class BareSubmission(ABC):
    """Submits transfers of one direction by bare driver calls. Free it with `close` when its transfers have ended.

    Args:
        setup: whose planes and pool are used.
        direction: of the transfers.
        most_blocks: blocks of a transfer, at most.
    """

    def __init__(self, setup: TransferSetup, direction: Direction, most_blocks: int) -> None:
        lab = setup.lab
        self._device, self._driver, self._direction = lab.device, lab.driver, direction
        self._api, self._before = lab.driver.api, lab.timer.stream
        plane = setup.groups[0].planes[0]
        self._block_base, self._block_stride = np.uint64(plane.address), np.uint64(plane.block_stride)
        self._slot_base, self._slot_bytes = np.uint64(setup.pool_address), np.uint64(setup.layout.slot_bytes)
        self._number = 0
        self._results: tuple[Any, ...] = ()
        with lab.device.current(), ExitStack() as undo:
            self._context = lab.driver.current_context()
            self._stream = lab.driver.stream_create(0)
            undo.callback(lab.driver.stream_destroy, self._stream)
            self._markers = [self._event(undo, timing=False) for _ in range(UNFINISHED)]
            self._starts, self._ends = ([self._event(undo, timing=True) for _ in range(UNFINISHED)] for _ in range(2))
            self._make_tables(setup, most_blocks, undo)
            self._undo = undo.pop_all()

    def _event(self, undo: ExitStack, *, timing: bool) -> int:
        event = self._driver.event_create(timing=timing)
        undo.callback(self._driver.event_destroy, event)
        return event

    def submit(self, blocks: Int64Array, slots: Int64Array) -> None:
        """Queue the copy of block `blocks[i]` to or from slot `slots[i]`; int64, (n,). `check` raises if it failed."""
        api, stream = self._api, self._stream
        index = self._number % UNFINISHED
        self._number += 1
        pushed = api.cuCtxPushCurrent(self._context)
        self._fill(index, blocks, slots)
        marked = api.cuEventRecord(self._markers[index], self._before)
        waits = api.cuStreamWaitEvent(stream, self._markers[index], 0)
        started = api.cuEventRecord(self._starts[index], stream)
        copied = self._copy(len(blocks), stream)
        ended = api.cuEventRecord(self._ends[index], stream)
        popped = api.cuCtxPopCurrent()
        self._results = (pushed, marked, waits, started, copied, ended, popped)

    @abstractmethod
    def _make_tables(self, setup: TransferSetup, most_blocks: int, undo: ExitStack) -> None:
        """Allocate what `_fill` writes to."""

    @abstractmethod
    def _fill(self, index: int, blocks: Int64Array, slots: Int64Array) -> None:
        """Write the addresses of a transfer; `index` distinguishes the transfers that may be unfinished at a time."""

    @abstractmethod
    def _copy(self, count: int, stream: int) -> tuple[Any, ...]:
        """Make the copy call, and return what it returned."""

    def _block_addresses(self, blocks: Int64Array) -> UInt64Array:
        return blocks.view(np.uint64) * self._block_stride + self._block_base

    def _slot_addresses(self, slots: Int64Array) -> UInt64Array:
        return slots.view(np.uint64) * self._slot_bytes + self._slot_base

    def check(self) -> None:
        """Raise DriverError if a call of the last submission failed."""
        for result in self._results:
            if int(result[0]):
                raise DriverError("a bare call", result[0].name, int(result[0]))

    def wait(self) -> None:
        """Wait until all transfers have ended, without sleeping."""
        with self._device.current():
            while not self._driver.stream_query(self._stream):
                pass

    def close(self) -> None:
        with self._device.current():
            self._undo.close()


class BareBatch(BareSubmission):
    """One flat copy a block."""

    def _make_tables(self, setup: TransferSetup, most_blocks: int, undo: ExitStack) -> None:  # noqa: ARG002
        types = binding_types()
        self._words = np.zeros((2, most_blocks), np.uint64)
        step = self._words.itemsize
        self._device_side, self._host_side = (
            [types.CUdeviceptr(_ptr=address_of(words) + step * index) for index in range(most_blocks)]
            for words in self._words
        )
        attributes = types.CUmemcpyAttributes()
        attributes.srcAccessOrder = types.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        self._attributes, self._block_bytes = [attributes], setup.row_bytes

    def _fill(self, index: int, blocks: Int64Array, slots: Int64Array) -> None:  # noqa: ARG002
        count = len(blocks)
        self._words[0, :count] = self._block_addresses(blocks)
        self._words[1, :count] = self._slot_addresses(slots)

    def _copy(self, count: int, stream: int) -> tuple[Any, ...]:
        targets, sources = self._device_side[:count], self._host_side[:count]
        if self._direction is Direction.STORE:
            targets, sources = sources, targets
        sizes = [self._block_bytes] * count
        result: tuple[Any, ...] = self._api.cuMemcpyBatchAsync(
            targets, sources, sizes, count, self._attributes, [0], 1, stream
        )
        return result


class BareStrided(BareSubmission):
    """One operation a block, with a row for each plane."""

    def _make_tables(self, setup: TransferSetup, most_blocks: int, undo: ExitStack) -> None:  # noqa: ARG002
        planes = setup.groups[0].planes
        ends = ("source", "target") if self._direction is Direction.STORE else ("target", "source")
        self._device_end, self._host_end = ends
        self._operations = np.zeros(most_blocks, DTYPE_3D)
        for end in ends:
            self._operations[f"{end}_type"] = 1  # CU_MEMCPY_OPERAND_TYPE_POINTER
        self._operations[f"{self._device_end}_pitch"] = planes[1].address - planes[0].address
        self._operations[f"{self._host_end}_pitch"] = self._operations["width"] = setup.row_bytes
        self._operations["height"], self._operations["depth"] = setup.rows_per_slot, 1
        self._operations["order"] = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        kind, step = binding_types().CUDA_MEMCPY3D_BATCH_OP, self._operations.itemsize
        self._objects = [kind(_ptr=address_of(self._operations) + step * index) for index in range(most_blocks)]

    def _fill(self, index: int, blocks: Int64Array, slots: Int64Array) -> None:  # noqa: ARG002
        count = len(blocks)
        self._operations[self._device_end][:count] = self._block_addresses(blocks)
        self._operations[self._host_end][:count] = self._slot_addresses(slots)

    def _copy(self, count: int, stream: int) -> tuple[Any, ...]:
        result: tuple[Any, ...] = self._api.cuMemcpy3DBatchAsync(count, self._objects[:count], 0, stream)
        return result


class _LaunchRecorder:
    """A driver API that keeps the arguments of the last kernel launch."""

    def __init__(self, api: Any) -> None:
        self._api = api
        self.arguments: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    def cuLaunchKernel(self, *arguments: Any) -> Any:  # noqa: N802
        self.arguments = list(arguments)
        return self._api.cuLaunchKernel(*arguments)


class BareGather(BareSubmission):
    """One kernel launch; rows of the planes are in device memory, blocks and slots in a pinned table.

    Raises:
        CapabilityError: no kernel can be used here.
    """

    def _make_tables(self, setup: TransferSetup, most_blocks: int, undo: ExitStack) -> None:
        lab = setup.lab
        row_bytes = min(_GATHER_ROW_BYTES, setup.block_bytes)
        rows = self._fragment_table(setup, row_bytes)
        buffer = undo.enter_context(lab.device.allocate(rows.nbytes))
        buffer.copy_from(rows)
        pinned = PinnedMemory(lab.driver, -(-16 * most_blocks * UNFINISHED // PAGE_BYTES) * PAGE_BYTES)
        undo.callback(pinned.release)
        table_bytes = 16 * most_blocks
        self._tables = pinned.array[: table_bytes * UNFINISHED].view(np.int64).reshape(UNFINISHED, -1)
        table = lab.driver.host_device_address(pinned.address)
        self._table_addresses = [table + table_bytes * index for index in range(UNFINISHED)]
        self._slot_base = np.uint64(lab.driver.host_device_address(setup.pool_address))
        recorder = _LaunchRecorder(lab.driver.api)
        driver = Driver(
            recorder, raw=None, bindings_version=lab.driver.bindings_version, simulated=lab.driver.simulated
        )
        spec = aligned_gather_kernel(self._direction, _GATHER_PROGRAMS, row_bytes)
        self._kernel = load_kernel(driver, lab.device.capabilities, spec)
        undo.callback(self._kernel.close)
        self._rows = (buffer.address, rows.shape[1])
        self._kernel.launch(
            self._stream, 1, (buffer.address, table, rows.shape[1], 0)
        )  # of no blocks: it copies nothing
        self._launch = recorder.arguments
        lab.driver.stream_synchronize(self._stream)
        self._tile_fragments = spec.constant("FRAGMENTS")

    def _fragment_table(self, setup: TransferSetup, row_bytes: int) -> Int64Array:
        """See `kvoffload.kernels.gather`: int64, (5, rows)."""
        columns = []
        for index, plane in enumerate(setup.groups[0].planes):
            start = np.arange(0, plane.block_bytes, row_bytes)
            stride, step, words = (
                np.full(start.shape, value) for value in (plane.block_stride, plane.block_bytes, row_bytes // 8)
            )
            columns.append(np.stack([plane.address + start, stride, index * plane.block_bytes + start, step, words]))
        return np.ascontiguousarray(np.concatenate(columns, axis=1))

    def _fill(self, index: int, blocks: Int64Array, slots: Int64Array) -> None:
        count = len(blocks)
        table = self._tables[index]
        table[:count] = blocks
        table[count : 2 * count] = self._slot_addresses(slots).view(np.int64)
        rows, row_count = self._rows
        self._kernel.pack((rows, self._table_addresses[index], row_count, count))

    def _copy(self, count: int, stream: int) -> tuple[Any, ...]:  # noqa: ARG002
        launch = self._launch
        launch[1] = min(_GATHER_PROGRAMS, -(-self._rows[1] * count // self._tile_fragments))
        result: tuple[Any, ...] = self._api.cuLaunchKernel(*launch)
        return result
