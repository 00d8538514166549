"""Every copy method on the addresses of a setup: this library's, bare driver calls, and a grid-stride kernel.

    bare strided     the operations of the strided copier, built once, in one cuMemcpy3DBatchAsync
    flat batch       one cuMemcpyBatchAsync with a descriptor per row, on an idle stream
    copy loop        cuMemcpyAsync, row by row
    grid-stride N    a kernel of N programs of 4 warps that copies one row at a time in 8-byte words; three arrays, of
                     sources, targets and bytes, are copied to the GPU at each call, from ordinary memory as a framework
                     does that turns an array of the host into one of the GPU; ", pinned": from pinned memory

All are timed on the GPU clock; `Measurer` measures one transfer with each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from kvoffload import kernels
from kvoffload.device.pinned import PAGE_BYTES, PinnedMemory
from kvoffload.driver import FlatTable, SourceOrder, address_of, binding_types
from kvoffload.engine.job import Job
from kvoffload.errors import CapabilityError, DriverError
from kvoffload.internal.types import UInt64Array
from kvoffload.kernels import KernelSpec, LoadedKernel
from kvoffload.planning.transfer_plan import Direction
from kvoffload.tuning import CopierChoice, CopierName, CopyMethod
from kvoffload_bench.harness import CONTIGUOUS_COPY, Lab, Scenario, Timing, time_rounds
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
        spec = KernelSpec("kvoffload_bench.grid_stride", "grid_stride", parameters, (("WORDS", words),), _WARPS)
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


# one transfer by each of them -----------------------------------------------------------------------------------------

PREFERENCES = ("overlap", "latency")
COPY_ENGINE: tuple[CopierName, ...] = ("strided", "batch", "loop")
METHODS = (
    CopyMethod("gather", 4, 1.0),
    CopyMethod("gather", 3, 1.0),
    CopyMethod("gather", 2, 1.0),
    CopyMethod("split", 2),
    CopyMethod("split", 1),
)
GRID = GRID_PROGRAMS[0]
_SHORT_BYTES = 8 << 20  # up to here a delay of the host shows in the figures
_MORE_ROUNDS = 3


def choice(prefer: str) -> str:
    """The name of the engine's own choice in tables and JSON."""
    return f"choice, {prefer}"


@dataclass(frozen=True)
class Measurement:
    """The figures of one transfer: a line of a table.

    Attributes:
        model, placement, planes, block_bytes, blocks_per_slot, row_bytes: of the `TransferSetup`.
        blocks, copies, nbytes: of the transfer; `copies` of `row_bytes` each.
        gb_per_s: payload over the median seconds, by scenario; empty on the simulated device.
        samples_us: microseconds of every counted round, by scenario; empty on the simulated device.
        wrong: rows of bytes that were wrong, by scenario, over all rounds; 0 each when all is well.
        chosen: the reason of the engine's choice, by preference.
        groups: groups of the model; the engine makes a job of each.
    """

    model: str
    placement: Placement
    direction: Direction
    planes: int
    block_bytes: int
    blocks_per_slot: int
    row_bytes: int
    blocks: int
    copies: int
    nbytes: int
    gb_per_s: dict[str, float] = field(default_factory=dict)
    samples_us: dict[str, list[float]] = field(default_factory=dict)
    wrong: dict[str, int] = field(default_factory=dict)
    chosen: dict[str, str] = field(default_factory=dict)
    groups: int = 1

    def ratio(self, over: str, under: str) -> float | None:
        """The ratio of two scenarios' bandwidths; None if one was not measured."""
        rates = self.gb_per_s
        return rates[over] / rates[under] if over in rates and under in rates else None

    @property
    def where(self) -> str:
        adjacent = f", {self.blocks_per_slot} blocks adjacent" if self.blocks_per_slot > 1 else ""
        return f"{self.model}, {size_text(self.block_bytes)}, n = {self.copies}, {self.placement}{adjacent}"


def size_text(nbytes: int) -> str:
    """Bytes as text, in KiB if they are whole KiB."""
    return f"{nbytes} B" if nbytes % 1024 else f"{nbytes // 1024} KiB"


class Measurer:
    """Measures setups.

    Attributes:
        not_run: by name, why a copy method cannot be used here.
        profile: the source of the engine's profile.
    """

    def __init__(self, methods: Sequence[CopyMethod] = METHODS) -> None:
        self._methods = methods
        self.not_run: dict[str, str] = {}
        self.profile: str | None = None

    @contextmanager
    def on(self, setup: TransferSetup) -> Iterator[Callable[[Direction, int], Measurement]]:
        """Yields a function that measures a direction of this setup, with so many slots of each group."""
        self.profile = setup.engine.profile.source
        prepared: list[Direction] = []
        with ExitStack() as stack:
            small_setup = stack.enter_context(setup.smaller())
            grid = self._grid(setup, max(setup.copies, small_setup.copies))
            if grid is not None:
                stack.enter_context(closing(grid))

            def measure(direction: Direction, slots: int) -> Measurement:
                if prepared[-1:] != [direction]:
                    setup.prepare(direction)
                    prepared.append(direction)
                setup.take(slots)
                return self._measure(setup, small_setup, direction, grid)

            yield measure

    def _grid(self, setup: TransferSetup, capacity: int) -> GridStride | None:
        lab = setup.lab
        reason = kernels.why_not(lab.device.capabilities)
        if reason is None:
            try:
                return GridStride(lab, setup.row_bytes, capacity)
            except CapabilityError as error:
                reason = str(error)
        self.not_run[grid_stride(GRID)] = reason
        return None

    def _measure(
        self, setup: TransferSetup, small_setup: TransferSetup, direction: Direction, grid: GridStride | None
    ) -> Measurement:
        chosen: dict[str, str] = {}
        wanted = self._wanted(setup, direction)
        scenarios = {
            name: scenario_of(
                setup,
                direction,
                partial(time_engine, setup, direction, name, chosen, *given),
                partial(warm_engine, small_setup, setup, direction, *given),
            )
            for name, given in wanted.items()
        }
        bare, warm = (_bare_copies(each, direction, grid) for each in (setup, small_setup))
        scenarios |= {name: scenario_of(setup, direction, run, warm[name]) for name, run in bare.items()}
        scenarios[CONTIGUOUS_COPY] = setup.lab.contiguous.scenario(direction)
        short = setup.nbytes <= _SHORT_BYTES and not setup.lab.device.simulated
        repeats = setup.lab.repeats * (_MORE_ROUNDS if short else 1)
        return measurement_of(setup, direction, time_rounds(scenarios, repeats), chosen)

    def _wanted(self, setup: TransferSetup, direction: Direction) -> dict[str, tuple[CopierChoice, str]]:
        """By name: the copier that the engine is given, and the preference."""
        missing = setup.missing
        self.not_run |= {name: reason for name, reason in missing.items() if reason is not None}
        wanted: dict[str, tuple[CopierChoice, str]] = {choice(prefer): (None, prefer) for prefer in PREFERENCES}
        wanted |= {name: (name, PREFERENCES[0]) for name in COPY_ENGINE if missing[name] is None}
        return wanted | {
            method.label: (method, PREFERENCES[0])
            for method in with_shares(setup, direction, self._methods)
            if not missing[method.copier]
        }


def _bare_copies(setup: TransferSetup, direction: Direction, grid: GridStride | None) -> dict[str, TimedCopy]:
    copies = bare_calls(setup, direction)
    if grid is not None:
        for pinned in (False,) if setup.lab.device.simulated else (False, True):
            copies[grid_stride(GRID, pinned=pinned)] = grid.timed(setup, direction, GRID, pinned=pinned)
    return copies


def time_engine(
    setup: TransferSetup,
    direction: Direction,
    name: str,
    chosen: dict[str, str],
    copier: CopierChoice,
    prefer: str,
) -> float:
    """One transfer; seconds on the GPU clock. The reason of the engine's own choice goes to `chosen[name]`."""

    def note(job: Job) -> None:
        if copier is None:
            chosen[name] = job.reason

    return setup.transfer_seconds(direction, copier, prefer, note)


def warm_engine(
    small_setup: TransferSetup, setup: TransferSetup, direction: Direction, copier: CopierChoice, prefer: str
) -> float:
    """A small transfer with the copy method that the next one on `setup` will have."""
    return small_setup.seconds(small_setup.submit(direction, copier or setup.chosen_method(direction, prefer)))


def with_shares(setup: TransferSetup, direction: Direction, methods: Sequence[CopyMethod]) -> list[CopyMethod]:
    """Copy methods with the shares that the engine's profile gives to splits; splits of share 0 or 1 are left out."""
    shape, profile = setup.shape(direction), setup.engine.profile
    shared = [
        method._replace(share=profile.split_share(shape, method.programs)) if method.copier == "split" else method
        for method in methods
    ]
    return [method for method in shared if method.copier != "split" or 0 < method.share < 1]


def scenario_of(
    setup: TransferSetup, direction: Direction, run: TimedCopy, warm: Callable[[], object] | None = None
) -> Scenario:
    """A copy method on the blocks of a setup, as a scenario."""
    if warm is None or setup.lab.device.simulated:
        return Scenario(run, lambda: setup.poison(direction), lambda: setup.wrong(direction), setup.nbytes)
    return Scenario(run, lambda: setup.poison(direction), lambda: setup.wrong(direction), setup.nbytes, warm)


def measurement_of(
    setup: TransferSetup, direction: Direction, timings: Mapping[str, Timing], chosen: dict[str, str]
) -> Measurement:
    record = Measurement(
        setup.model,
        setup.placement,
        direction,
        setup.plane_count,
        setup.block_bytes,
        setup.blocks_per_slot,
        setup.row_bytes,
        setup.block_count,
        setup.copies,
        setup.nbytes,
        wrong={name: timing.wrong for name, timing in timings.items()},
        chosen=chosen,
        groups=len(setup.groups),
    )
    if not setup.lab.device.simulated:
        record.gb_per_s.update({name: timing.gb_per_s for name, timing in timings.items()})
        record.samples_us.update({name: microseconds(timing) for name, timing in timings.items()})
    return record


def microseconds(timing: Timing) -> list[float]:
    return [round(seconds * 1e6, 2) for seconds in timing.seconds]


def describe(records: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Measurements as records for tables, plots and JSON."""
    return [dict(vars(record)) for record in records]


def wrong_rows(records: Sequence[Measurement]) -> int:
    return sum(sum(record.wrong.values()) for record in records)
