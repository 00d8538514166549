"""Other copy methods on the addresses of a setup: bare driver calls, and a grid-stride kernel.

    bare strided     the operations of the strided copier, built once, in one cuMemcpy3DBatchAsync
    flat batch       one cuMemcpyBatchAsync with a descriptor per row, on an idle stream
    copy loop        cuMemcpyAsync, row by row
    grid-stride N    a kernel of N programs of 4 warps that copies one row at a time in 8-byte words; three arrays, of
                     sources, targets and bytes, are copied to the GPU at each call, from ordinary memory as a framework
                     does that turns an array of the host into one of the GPU; ", pinned": from pinned memory

All are timed on the GPU clock, on a stream of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import numpy as np

from kvoffload import kernels
from kvoffload.device.pinned import PAGE_BYTES, PinnedMemory
from kvoffload.driver import FlatTable, SourceOrder, address_of, binding_types
from kvoffload.errors import DriverError
from kvoffload.internal.types import UInt64Array
from kvoffload.kernels import KernelSpec, LoadedKernel
from kvoffload.planning.transfer_plan import Direction
from kvoffload_bench.lab import Lab
from kvoffload_bench.setup import GroupBlocks, Placement, TransferSetup

TimedCopy = Callable[[], float]
BARE_STRIDED, FLAT_BATCH, COPY_LOOP = "bare strided", "flat batch", "copy loop"
GRID_PROGRAMS = (12, 20)
_MAX_WORDS = 8192  # of 8 bytes, in a tile: 64 KiB, half the registers of 128 threads
_WARPS = 4


def grid_stride(programs: int, *, pinned: bool = False) -> str:
    return f"grid-stride {programs}" + (", pinned" if pinned else "")


def bare_calls(setup: TransferSetup, direction: Direction) -> dict[str, TimedCopy]:
    """By name; only those whose driver calls are available here."""
    capabilities = setup.lab.device.capabilities
    copies = {COPY_LOOP: copy_loop(setup, direction)}
    if capabilities.flat_batch:
        copies[FLAT_BATCH] = flat_batch(setup, direction)
    if capabilities.strided_batch and setup.placement is Placement.FOLDED:
        copies[BARE_STRIDED] = bare_strided(setup, direction)
    return copies


def bare_strided(setup: TransferSetup, direction: Direction) -> TimedCopy:
    """One operation a slot, with a row for each plane; the planes must fold."""
    operations = [
        _operation(*(ends if direction is Direction.STORE else ends[::-1]), setup.row_bytes, setup.plane_count)
        for group in setup.groups
        for ends in _strided_ends(setup, group)
    ]
    call = setup.lab.driver.api.cuMemcpy3DBatchAsync
    timer = setup.lab.timer
    return lambda: timer.seconds(lambda: _check(call(len(operations), operations, 0, timer.stream)))


def _strided_ends(setup: TransferSetup, group: GroupBlocks) -> Iterable[tuple[tuple[int, int], tuple[int, int]]]:
    """Device and host end of each slot, as (address, pitch)."""
    pitch = group.planes[1].address - group.planes[0].address
    for start, slot in zip(group.starts.tolist(), group.slots.tolist(), strict=True):
        device = group.planes[0].address + start * setup.block_bytes
        yield (device, pitch), (setup.pool_address + slot * setup.layout.slot_bytes, setup.row_bytes)


def _operation(source: tuple[int, int], target: tuple[int, int], width: int, height: int) -> Any:
    """A strided operation of `height` rows of `width` bytes; ends are (address, pitch)."""
    driver = binding_types()
    operation = driver.CUDA_MEMCPY3D_BATCH_OP()
    for end, (address, pitch) in ((operation.src, source), (operation.dst, target)):
        end.type = driver.CUmemcpy3DOperandType.CU_MEMCPY_OPERAND_TYPE_POINTER
        end.op.ptr.ptr = address
        end.op.ptr.rowLength = pitch
    operation.extent.width, operation.extent.height, operation.extent.depth = width, height, 1
    operation.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    return operation


def flat_batch(setup: TransferSetup, direction: Direction) -> TimedCopy:
    """One copy a row; the descriptors are built as the batch copier builds them, before the clock starts."""
    source, target = setup.ends(direction)
    table, driver, timer = FlatTable(len(source)), setup.lab.driver, setup.lab.timer
    table.fill(target, source, np.array([setup.row_bytes], dtype=np.uint64))
    table.lists(0, len(source))  # makes the objects that the bindings take
    return lambda: timer.seconds(lambda: driver.copy_batch(table, 0, len(source), SourceOrder.STREAM, timer.stream))


def copy_loop(setup: TransferSetup, direction: Direction) -> TimedCopy:
    sources, targets = (end.tolist() for end in setup.ends(direction))
    nbytes, call, timer = setup.row_bytes, setup.lab.driver.api.cuMemcpyAsync, setup.lab.timer

    def submit() -> None:
        for target, source in zip(targets, sources, strict=True):
            _check(call(target, source, nbytes, timer.stream))

    return lambda: timer.seconds(submit)


def _check(result: tuple[Any, ...]) -> None:
    if int(result[0]):
        raise DriverError("a bare call", result[0].name, int(result[0]))


class GridStride:
    """The grid-stride kernel for rows of one size, and its three arrays. Free it with `close`.

    Raises:
        CapabilityError: no kernel can be loaded here.
    """

    def __init__(self, lab: Lab, row_bytes: int, capacity: int) -> None:
        self._lab, self._row_bytes = lab, row_bytes
        words = min(_MAX_WORDS, 1 << (row_bytes // 8).bit_length() - 1)
        parameters = (("sources", "i64"), ("targets", "i64"), ("sizes", "i64"), ("count", "i32"))
        spec = KernelSpec("kvoffload.kernels.baseline", "grid_stride", parameters, (("WORDS", words),), _WARPS)
        nbytes = -(-24 * capacity // PAGE_BYTES) * PAGE_BYTES
        with lab.device.current(), ExitStack() as undo:
            self._kernel: LoadedKernel = kernels.load_kernel(lab.driver, lab.device.capabilities, spec)
            undo.callback(self._kernel.close)
            self._pinned = PinnedMemory(lab.driver, nbytes)
            undo.callback(self._pinned.release)
            self._device = lab.device.allocate(nbytes)
            undo.pop_all()
        self._ordinary = np.zeros(nbytes, dtype=np.uint8)

    def timed(self, setup: TransferSetup, direction: Direction, programs: int, *, pinned: bool = False) -> TimedCopy:
        """A transfer by `programs` programs. Writing the arrays is not timed; copying them to the GPU is."""
        timer = self._lab.timer

        def timed() -> float:
            submit = self.stage(setup, direction, setup.ends(direction), programs, pinned=pinned)
            return timer.seconds(lambda: submit(timer.stream))

        return timed

    def stage(
        self,
        setup: TransferSetup,
        direction: Direction,
        ends: tuple[UInt64Array, UInt64Array],
        programs: int,
        *,
        pinned: bool = False,
        first: int = 0,
    ) -> Callable[[int], None]:
        """Write the arrays for the flat copies between `ends`, see `TransferSetup.ends`; returns a function that queues
        the copies of the arrays and the kernel on a stream.

        What was staged before stays valid if it has another place in the arrays, `[first, first + len(ends[0]))`.
        """
        count = len(ends[0])
        memory = (self._pinned.array if pinned else self._ordinary)[24 * first : 24 * (first + count)]
        rows = memory.view(np.int64).reshape(3, count)
        with self._lab.device.current():
            shift = self._lab.driver.host_device_address(setup.pool_address) - setup.pool_address
        rows[0], rows[1] = ends
        rows[0 if direction is Direction.LOAD else 1] += shift
        rows[2] = self._row_bytes
        copy, target, source = self._lab.driver.copy, self._device.address + 24 * first, address_of(memory)
        arrays = [target + index * 8 * count for index in range(3)]

        def submit(stream: int) -> None:
            for index, array in enumerate(arrays):
                copy(array, source + index * 8 * count, 8 * count, stream)
            self._kernel.launch(stream, programs, (*arrays, count))

        return submit

    def close(self) -> None:
        with self._lab.device.current():
            self._kernel.close()
            self._pinned.release()
        self._device.close()
