"""Every copy method on the addresses of a setup: this library's, bare driver calls, and a grid-stride kernel.

    bare strided     the operations of the strided copier, built once, in one cuMemcpy3DBatchAsync
    flat batch       one cuMemcpyBatchAsync with a descriptor per row, on an idle stream
    copy loop        cuMemcpyAsync, row by row
    grid-stride N    a kernel of N programs of 4 warps that copies one row at a time in 8-byte words; three arrays, of
                     sources, targets and bytes, are copied to the GPU at each call, from ordinary memory as a framework
                     does that turns an array of the host into one of the GPU; ", pinned": from pinned memory

All are timed on the GPU clock; `measure` measures one transfer with each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np

from kvoffload import kernels
from kvoffload.calibration.compute import in_context, pinned_memory
from kvoffload.driver import FlatTable, SourceOrder, StridedTable, address_of
from kvoffload.engine.job import Job
from kvoffload.errors import CapabilityError, DriverError
from kvoffload.internal.types import UInt64Array
from kvoffload.kernels import KernelSpec, LoadedKernel
from kvoffload.planning.transfer_plan import Direction
from kvoffload.tuning import COPIERS, CopierName
from kvoffload_bench.harness import CONTIGUOUS_COPY, Lab, Scenario, Timing, Undoing, time_rounds
from kvoffload_bench.setup import Placement, TransferSetup

TimedCopy = Callable[[], float]
BARE_STRIDED, FLAT_BATCH, COPY_LOOP = "bare strided", "flat batch", "copy loop"
GRID_PROGRAMS = 12
GRID_STRIDE = f"grid-stride {GRID_PROGRAMS}"
_MAX_WORDS = 8192  # of 8 bytes, in a tile: 64 KiB, half the registers of 128 threads
_WARPS = 4


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
    count, rows = setup.slot_count, setup.rows_per_slot
    (source, source_pitch), (target, target_pitch) = (
        (end[::rows], end[1::rows] - end[::rows]) for end in setup.ends(direction)
    )
    width, height = (np.array([size], dtype=np.uint64) for size in (setup.row_bytes, rows))
    table = StridedTable(count, batched=True)
    table.fill((source, target, source_pitch, target_pitch, width, height), SourceOrder.STREAM)
    table.make_objects(count)
    call = setup.lab.driver.api.cuMemcpy3DBatchAsync
    return lambda: setup.lab.wait(lambda stream: _check(call(count, table.objects[:count], 0, stream)))


def flat_batch(setup: TransferSetup, direction: Direction) -> TimedCopy:
    """One copy a row; the descriptors are built as the batch copier builds them, before the clock starts."""
    source, target = setup.ends(direction)
    table, driver = FlatTable(len(source)), setup.lab.driver
    table.fill(target, source, np.array([setup.row_bytes], dtype=np.uint64))
    table.lists(0, len(source))  # makes the objects that the bindings take
    return lambda: setup.lab.wait(lambda stream: driver.copy_batch(table, 0, len(source), SourceOrder.STREAM, stream))


def copy_loop(setup: TransferSetup, direction: Direction) -> TimedCopy:
    sources, targets = (end.tolist() for end in setup.ends(direction))
    nbytes, call = setup.row_bytes, setup.lab.driver.api.cuMemcpyAsync

    def submit(stream: int) -> None:
        for target, source in zip(targets, sources, strict=True):
            _check(call(target, source, nbytes, stream))

    return lambda: setup.lab.wait(submit)


def _check(result: tuple[Any, ...]) -> None:
    if int(result[0]):
        raise DriverError("a bare call", result[0].name, int(result[0]))


class GridStride(Undoing):
    """The grid-stride kernel for rows of one size, and its three arrays. Free it with `close`.

    Raises:
        CapabilityError: no kernel can be loaded here.
    """

    def __init__(self, lab: Lab, row_bytes: int, capacity: int) -> None:
        self._lab, self._row_bytes = lab, row_bytes
        words = min(_MAX_WORDS, 1 << (row_bytes // 8).bit_length() - 1)
        parameters = (("sources", "i64"), ("targets", "i64"), ("sizes", "i64"), ("count", "i32"))
        spec = KernelSpec("kvoffload_bench.grid_stride", "grid_stride", parameters, (("WORDS", words),), _WARPS)
        with ExitStack() as undo:
            with lab.device.current():
                self._kernel: LoadedKernel = kernels.load_kernel(lab.driver, lab.device.capabilities, spec)
                undo.callback(in_context, lab.device, self._kernel.close)
            self._pinned = undo.enter_context(pinned_memory(lab.device, 24 * capacity)).array
            self._device = undo.enter_context(lab.device.allocate(self._pinned.nbytes))
            self._undo = undo.pop_all()
        self._ordinary = np.zeros_like(self._pinned)

    def timed(self, setup: TransferSetup, direction: Direction, programs: int) -> TimedCopy:
        """A transfer by `programs` programs. Writing the arrays is not timed; copying them to the GPU is."""

        def timed() -> float:
            return self._lab.wait(self.stage(setup, direction, setup.ends(direction), programs))

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
        memory = (self._pinned if pinned else self._ordinary)[24 * first : 24 * (first + count)]
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


def open_grid(lab: Lab, row_bytes: int, capacity: int) -> tuple[GridStride | None, str]:
    """The kernel, or None and why it cannot be used here."""
    reason = kernels.why_not(lab.device.capabilities)
    if reason is not None:
        return None, reason
    try:
        return GridStride(lab, row_bytes, capacity), ""
    except CapabilityError as error:
        return None, str(error)


# one transfer by each of them -----------------------------------------------------------------------------------------

PREFERENCES = ("overlap", "latency")
COPY_ENGINE: tuple[CopierName, ...] = ("strided", "batch", "loop")
_SHORT_BYTES = 8 << 20  # up to here a delay of the host shows in the figures
_MORE_ROUNDS = 3


def choice(prefer: str) -> str:
    """The name of the engine's own choice in tables and JSON."""
    return f"choice, {prefer}"


def size_text(nbytes: int) -> str:
    """Bytes as text, in KiB if they are whole KiB."""
    return f"{nbytes} B" if nbytes % 1024 else f"{nbytes // 1024} KiB"


def measure(setup: TransferSetup, counts: Sequence[int] | None, not_run: dict[str, str]) -> Iterator[dict[str, Any]]:
    """A record for each direction and number of slots of a group: a line of a table.

    Args:
        counts: of slots; None: all that the setup has.
        not_run: is told why a copy method cannot be used here.

    The fields of a record, by scenario those that end in "s":

        model, placement, planes, block_bytes, blocks_per_slot, row_bytes, groups    of the `TransferSetup`
        blocks, copies, nbytes                                                       of the transfer
        gb_per_s, samples_us    payload over the median seconds, and every counted round; {} on the simulated device
        wrong                   rows of bytes that were wrong, over all rounds; 0 each when all is well
        chosen                  the reason of the engine's choice, by preference
    """
    every = len(setup.groups[0].slots)
    not_run |= {name: reason for name, reason in setup.missing.items() if reason is not None}
    with ExitStack() as stack:
        small_setup = stack.enter_context(setup.smaller())
        grid, reason = open_grid(setup.lab, setup.row_bytes, max(setup.copies, small_setup.copies))
        if grid is None:
            not_run[GRID_STRIDE] = reason
        else:
            stack.enter_context(grid)
        for direction in Direction:
            setup.take(every)
            setup.prepare(direction)
            for count in counts or (every,):
                setup.take(count)
                yield _record(setup, small_setup, direction, grid)


def _record(
    setup: TransferSetup,
    small_setup: TransferSetup,
    direction: Direction,
    grid: GridStride | None,
) -> dict[str, Any]:
    # 1. the scenarios: the engine with every copier, bare calls, and the contiguous copy
    wanted: dict[str, tuple[CopierName | None, str]] = {choice(prefer): (None, prefer) for prefer in PREFERENCES}
    wanted |= {copier: (copier, PREFERENCES[0]) for copier in COPIERS if setup.missing[copier] is None}
    chosen: dict[str, str] = {}
    scenarios = {
        name: scenario_of(
            setup,
            direction,
            partial(time_engine, setup, direction, name, chosen, *given),
            partial(_warm_engine, small_setup, setup, direction, *given),
        )
        for name, given in wanted.items()
    }
    bare, warm = (_bare_copies(each, direction, grid) for each in (setup, small_setup))
    scenarios |= {name: scenario_of(setup, direction, run, warm[name]) for name, run in bare.items()}
    scenarios[CONTIGUOUS_COPY] = setup.lab.contiguous.scenario(direction)
    # 2. their rounds: more of short transfers
    simulated = setup.lab.device.simulated
    short = setup.nbytes <= _SHORT_BYTES and not simulated
    timings = time_rounds(scenarios, setup.lab.repeats * (_MORE_ROUNDS if short else 1))
    # 3. the record
    timed = {} if simulated else timings
    where = {"model": setup.model, "placement": setup.placement, "direction": direction, "groups": len(setup.groups)}
    shape = {"planes": setup.plane_count, "block_bytes": setup.block_bytes, "blocks_per_slot": setup.blocks_per_slot}
    sizes = {"row_bytes": setup.row_bytes, "blocks": setup.block_count, "copies": setup.copies, "nbytes": setup.nbytes}
    measured = {
        "gb_per_s": {name: timing.gb_per_s for name, timing in timed.items()},
        "samples_us": {name: microseconds(timing) for name, timing in timed.items()},
        "wrong": {name: timing.wrong for name, timing in timings.items()},
    }
    return {**where, **shape, **sizes, **measured, "chosen": chosen}


def _bare_copies(setup: TransferSetup, direction: Direction, grid: GridStride | None) -> dict[str, TimedCopy]:
    copies = bare_calls(setup, direction)
    if grid is not None:
        copies[GRID_STRIDE] = grid.timed(setup, direction, GRID_PROGRAMS)
    return copies


def time_engine(
    setup: TransferSetup,
    direction: Direction,
    name: str,
    chosen: dict[str, str],
    copier: CopierName | None,
    prefer: str,
) -> float:
    """One transfer; seconds on the GPU clock. Of one group: the time of its job. Of several groups: from the first call
    to the end of the last job, which includes some host time, since an engine times each job by itself.

    The reason of the engine's own choice goes to `chosen[name]`.
    """
    jobs: list[Job] = []

    def submit(stream: int) -> None:
        jobs[:] = setup.submit(direction, copier, prefer=prefer, after=stream)
        for job in jobs:
            job.order_before(stream)

    if len(setup.groups) == 1:
        jobs = setup.submit(direction, copier, prefer=prefer)
        seconds = setup.seconds(jobs)
    else:
        seconds = setup.lab.wait(submit)
        setup.seconds(jobs)
    if copier is None:
        chosen[name] = jobs[0].reason
    return seconds


def _warm_engine(
    small_setup: TransferSetup, setup: TransferSetup, direction: Direction, copier: CopierName | None, prefer: str
) -> float:
    """A small transfer with the copier that the next one on `setup` will have."""
    return small_setup.seconds(small_setup.submit(direction, copier or setup.chosen_copier(direction, prefer)))


def scenario_of(setup: TransferSetup, direction: Direction, run: TimedCopy, warm: Callable[[], object]) -> Scenario:
    """A copy method on the blocks of a setup, as a scenario; the simulated device has no caches to warm up."""
    poison, wrong = partial(setup.poison, direction), partial(setup.wrong, direction)
    return Scenario(run, poison, wrong, setup.nbytes, (lambda: None) if setup.lab.device.simulated else warm)


def microseconds(timing: Timing) -> list[float]:
    return [round(seconds * 1e6, 2) for seconds in timing.seconds]
