"""`kvoffload bench submit`: how long `store()` and `load()` keep their caller, against the bare driver calls.

A *pair* is a block with the slot that it is stored to or loaded from. The engine and the bare calls use pairs of their
own, of the same planes and the same pool; each submission takes the next few pairs of a random order.

Every bare submission pushes the context, computes addresses from block and slot numbers into arrays, records a marker
on the caller's stream and makes the copy stream wait for it, makes the copy calls between two timing events, and pops
the context. The copy calls are

    batch     cuMemcpyBatchAsync with one copy a block, of planes that interleave
    strided   cuMemcpy3DBatchAsync with one operation a block, of planes that fold
    pack      cuLaunchKernel of the library's two kernels, after 16 bytes a block were written into a pinned table, and
              cuMemcpyBatchAsync with one copy a block; on the same stream

All calls go to the driver API, without the checks, the retries and the ordering that `Driver` and the engine add.
"""

from __future__ import annotations

import itertools
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from kvoffload.calibration.compute import new_events, pinned_memory
from kvoffload.copiers.pack_kernels import TABLE_SPEC
from kvoffload.driver import Driver, SourceOrder, StridedTable, address_of, binding_types
from kvoffload.engine.job import Job
from kvoffload.errors import DriverError
from kvoffload.internal.types import Int64Array, UInt64Array
from kvoffload.kernels import KernelSpec, LoadedKernel, load_kernel
from kvoffload.planning.transfer_plan import Direction
from kvoffload.terminal.console import Output
from kvoffload.terminal.machine import aligned_pack_kernel
from kvoffload.terminal.options import COMMON, add_command
from kvoffload.tuning import CopierName
from kvoffload_bench.harness import CONTIGUOUS_COPY, Lab, time_rounds
from kvoffload_bench.report import Fields, add_bench_options, conduct, fixed
from kvoffload_bench.setup import Placement, TransferSetup, geometry_of

UNFINISHED = 16  # submissions that may be unfinished at a time
_ROW_BYTES = 2048


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
            self._stream = undo.enter_context(lab.device.stream()).handle
            self._markers, self._starts, self._ends = (
                undo.enter_context(new_events(lab.device, UNFINISHED, timing=each)) for each in (False, True, True)
            )
            self._make_tables(setup, most_blocks, undo)
            self._undo = undo.pop_all()

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
        self._attributes, self._block_bytes = [attributes], self._bytes_of_copy(setup)

    def _bytes_of_copy(self, setup: TransferSetup) -> int:
        return setup.row_bytes

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
        self._table = StridedTable(most_blocks, batched=True)
        self._table.make_objects(most_blocks)
        self._objects, self._operations = self._table.objects, self._table.rows
        self._operations[f"{self._device_end}_pitch"] = planes[1].address - planes[0].address
        self._operations[f"{self._host_end}_pitch"] = self._operations["width"] = setup.row_bytes
        self._operations["height"], self._operations["order"] = setup.rows_per_slot, SourceOrder.STREAM

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


class BarePack(BareBatch):
    """Two kernel launches and a copy a block, by way of device memory that all transfers use in turn.

    Raises:
        CapabilityError: no kernel can be used here.
    """

    def _bytes_of_copy(self, setup: TransferSetup) -> int:
        return sum(plane.block_bytes for plane in setup.groups[0].planes)

    def _make_tables(self, setup: TransferSetup, most_blocks: int, undo: ExitStack) -> None:
        super()._make_tables(setup, most_blocks, undo)
        lab = setup.lab
        row_bytes = min(_ROW_BYTES, setup.block_bytes)
        rows = self._fragment_table(setup, row_bytes)
        fragments = undo.enter_context(lab.device.allocate(rows.nbytes))
        fragments.copy_from(rows)
        table_bytes = 16 * most_blocks
        on_device = undo.enter_context(lab.device.allocate(table_bytes))
        staging = undo.enter_context(lab.device.allocate(most_blocks * self._block_bytes))
        self._places = staging.address + np.arange(most_blocks) * self._block_bytes
        pinned = undo.enter_context(pinned_memory(lab.device, table_bytes * UNFINISHED))
        self._tables = pinned.array[: table_bytes * UNFINISHED].view(np.int64).reshape(UNFINISHED, -1)
        table = lab.driver.host_device_address(pinned.address)
        self._table_addresses = [table + table_bytes * index for index in range(UNFINISHED)]
        self._rows = fragments.address, on_device.address, rows.shape[1], rows.shape[1]
        spec = aligned_pack_kernel(self._direction, row_bytes)
        self._tile_fragments = spec.constant("FRAGMENTS")
        self._copy_table, self._table_launch = self._loaded(lab, TABLE_SPEC, (table, on_device.address, 0), undo)
        self._pack, self._pack_launch = self._loaded(lab, spec, (*self._rows, 0), undo)
        lab.driver.stream_synchronize(self._stream)

    def _loaded(
        self, lab: Lab, spec: KernelSpec, nothing: Sequence[int], undo: ExitStack
    ) -> tuple[LoadedKernel, list[Any]]:
        """A kernel, and the arguments of the call that launches it; given `nothing`, it does nothing."""
        recorder = _LaunchRecorder(lab.driver.api)
        version, simulated = lab.driver.bindings_version, lab.driver.simulated
        driver = Driver(recorder, raw=None, bindings_version=version, simulated=simulated)
        kernel = load_kernel(driver, lab.device.capabilities, spec)
        undo.callback(kernel.close)
        kernel.launch(self._stream, 1, nothing)
        return kernel, recorder.arguments

    def _fragment_table(self, setup: TransferSetup, row_bytes: int) -> Int64Array:
        """See `kvoffload.kernels.pack`: int64, (5, rows)."""
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
        table[count : 2 * count] = self._places[:count]
        self._words[0, :count] = self._places[:count]
        self._words[1, :count] = self._slot_addresses(slots)
        self._copy_table.pack(self._table_addresses[index], self._rows[1], 2 * count)
        self._pack.pack(*self._rows, count)

    def _copy(self, count: int, stream: int) -> tuple[Any, ...]:
        self._pack_launch[1] = -(-self._rows[2] * count // self._tile_fragments)
        launches = [partial(self._api.cuLaunchKernel, *each) for each in (self._table_launch, self._pack_launch)]
        copies = partial(super()._copy, count, stream)
        for call in (copies, *launches) if self._direction is Direction.LOAD else (*launches, copies):
            result: tuple[Any, ...] = call()
            if int(result[0]):  # what follows would read what is not there
                break
        return result


# the command ----------------------------------------------------------------------------------------------------------

_PLANES, _BLOCK_BYTES = 64, 32 << 10
_SIMULATED_PLANES = 4
_BLOCKS = (2, 8, 32)
_MOST_PAIRS = 64
_IDLE_SECONDS = 3e-3
_BURST = 8  # submissions of each kind that follow each other without a wait; fewer than bare ones may be unfinished
_UNCOUNTED = _BURST
_LINK_ROUNDS = 10
_DONE_BLOCKS = 2
_TEXT = """\
Times the calls of store() and load(), and the bare driver calls of the same transfer, in turns, in a hot loop and \
after 3 ms of idleness (cold). Every byte is verified."""


class _Layout(NamedTuple):
    """One line of the tables: where planes lie, and which copier is given to the engine."""

    name: str
    placement: Placement
    copier: CopierName
    bare: type[BareSubmission]


_LAYOUTS = (
    _Layout("block-major", Placement.INTERLEAVED, "batch", BareBatch),
    _Layout("plane-major", Placement.FOLDED, "strided", BareStrided),
    _Layout("separate allocations", Placement.SCATTERED, "pack", BarePack),
)


def add_parser(benches: Any) -> None:
    example = "bench submit --save submit.json"
    parser = add_command(benches, "submit", "host time of store() and load()", _TEXT, example=example, common=COMMON)
    add_bench_options(parser, 100, drawn=False)
    parser.set_defaults(run=lambda arguments: conduct(arguments, "submit", _measure, _show))


def _measure(lab: Lab, output: Output) -> Fields:
    submissions: list[dict[str, Any]] = []
    loads: list[dict[str, Any]] = []
    not_run: dict[str, str] = {}
    links = time_rounds({str(each): lab.contiguous.scenario(each) for each in Direction}, _LINK_ROUNDS)
    capabilities = lab.device.capabilities
    geometry = geometry_of(_SIMULATED_PLANES if lab.device.simulated else _PLANES, _BLOCK_BYTES, lab.size.scale)
    with output.progress("layouts") as progress:
        for done, layout in enumerate(_LAYOUTS, start=1):
            with TransferSetup(lab, geometry, placement=layout.placement, count=2 * _MOST_PAIRS) as setup:
                reason = setup.missing[layout.copier]
                if layout.bare is BarePack:
                    reason = reason or setup.missing["batch"]
                if layout.copier == "strided" and not capabilities.strided_batch:
                    reason = capabilities.missing["cuMemcpy3DBatchAsync"]
                if reason is None:
                    for direction in Direction:
                        submissions += _submissions(setup, layout, direction)
                else:
                    not_run[f"{layout.name} by {layout.copier}"] = reason
                if layout.placement is not Placement.SCATTERED:
                    loads += _loads(setup, layout.name, links[str(Direction.LOAD)].gb_per_s)
                profile = setup.engine.profile.source
            progress(done, len(_LAYOUTS))
    wrong = sum(each["wrong"] for each in (*submissions, *loads)) + sum(each.wrong for each in links.values())
    fields: Fields = {"submissions": submissions, "loads": loads}
    if not lab.device.simulated:
        fields["contiguous_copy_gb_per_s"] = {name: timing.gb_per_s for name, timing in links.items()}
    return fields | {"not_run": not_run, "profile": profile, "wrong_rows": wrong}


class _EngineSubmission:
    """Submits transfers through an engine; a copier of None leaves the choice to it. As `BareSubmission`."""

    def __init__(self, setup: TransferSetup, direction: Direction, copier: CopierName | None) -> None:
        self._engine, self._copier, self._before = setup.engine, copier, setup.lab.timer.stream
        self._call = self._engine.store if direction is Direction.STORE else self._engine.load
        self._stores = direction is Direction.STORE
        self.jobs: list[Job] = []

    def submit(self, blocks: Int64Array, slots: Int64Array) -> None:
        ends = (blocks, slots) if self._stores else (slots, blocks)
        self.jobs.append(self._call(*ends, after=self._before, copier=self._copier))

    def check(self) -> None:
        """The jobs raise their failures when they are waited for."""

    def wait(self) -> None:
        for job in self.jobs:
            while not job.done:
                pass
            job.wait()
        self.jobs.clear()
        self._engine.poll()


Pairs = tuple[Int64Array, Int64Array]  # blocks and slots


def _windows(setup: TransferSetup, pairs: range, count: int) -> Iterator[Pairs]:
    """Endless: the next `count` of these pairs, in turn."""
    blocks, slots = (each[pairs.start : pairs.stop] for each in (setup.groups[0].blocks, setup.groups[0].slots))
    for start in itertools.cycle(range(0, len(pairs), count)):
        yield blocks[start : start + count], slots[start : start + count]


def _submissions(setup: TransferSetup, layout: _Layout, direction: Direction) -> Iterator[dict[str, Any]]:
    """Host time of the calls that submit, for each number of blocks; hot and cold."""
    simulated = setup.lab.device.simulated
    setup.take(2 * _MOST_PAIRS)
    setup.prepare(direction)
    engine = _EngineSubmission(setup, direction, layout.copier)
    with closing(layout.bare(setup, direction, max(_BLOCKS))) as bare:
        for blocks in _BLOCKS:
            pairs = min(_MOST_PAIRS, 4 * blocks)
            setup.take(2 * pairs)
            windows = [_windows(setup, range(at, at + pairs), blocks) for at in (0, pairs)]
            count = max(setup.lab.repeats, pairs // blocks) + (0 if simulated else _UNCOUNTED)
            for cold in (False, True):
                setup.poison(direction)
                seconds = _time_submissions((engine, bare), windows, count, cold)
                record: dict[str, Any] = {"layout": layout.name, "copier": layout.copier, "direction": str(direction)}
                record |= {"blocks": blocks, "planes": setup.plane_count, "block_bytes": setup.block_bytes}
                record |= {"cold": cold, "wrong": setup.wrong(direction)}
                if not simulated:
                    ours, bare_us = (statistics.median(each[_UNCOUNTED:]) * 1e6 for each in seconds)
                    record |= {"ours_us": ours, "bare_us": bare_us, "ratio": ours / bare_us}
                yield record


def _time_submissions(
    submitters: Sequence[_EngineSubmission | BareSubmission], windows: Sequence[Iterator[Pairs]], count: int, cold: bool
) -> list[list[float]]:
    """Host seconds of every submission, of each submitter: bare and through the engine in turn."""
    seconds: list[list[float]] = [[] for _ in submitters]

    def wait() -> None:
        for each in submitters:
            each.wait()

    with ExitStack() as undo:
        undo.callback(wait)
        for number in range(count):
            if number % _BURST == 0:
                wait()
            for submitter, window, found in zip(submitters, windows, seconds, strict=True):
                if cold:
                    wait()
                    time.sleep(_IDLE_SECONDS)
                submit, pairs = submitter.submit, next(window)
                begin = time.perf_counter()
                submit(*pairs)
                found.append(time.perf_counter() - begin)
                submitter.check()
    return seconds


def _loads(setup: TransferSetup, layout: str, link_gb_per_s: float) -> Iterator[dict[str, Any]]:
    """Loads of a few blocks, from the call until the polled job is done; hot and cold."""
    direction, lab = Direction.LOAD, setup.lab
    setup.take(4 * _DONE_BLOCKS)
    setup.prepare(direction)
    windows = _windows(setup, range(4 * _DONE_BLOCKS), _DONE_BLOCKS)
    submitter = _EngineSubmission(setup, direction, None)
    uncounted = 0 if lab.device.simulated else _UNCOUNTED
    nbytes = _DONE_BLOCKS * setup.nbytes // setup.block_count
    for cold in (False, True):
        setup.poison(direction)
        seconds = []
        for _ in range(max(lab.repeats, 4) + uncounted):
            if cold:
                time.sleep(_IDLE_SECONDS)
            blocks, slots = next(windows)
            begin = time.perf_counter()
            submitter.submit(blocks, slots)
            (job,) = submitter.jobs
            while not job.done:
                pass
            seconds.append(time.perf_counter() - begin)
            submitter.wait()
        record = {"layout": layout, "copier": job.copier, "blocks": _DONE_BLOCKS, "nbytes": nbytes, "cold": cold}
        record["wrong"] = setup.wrong(direction)
        if not lab.device.simulated:
            wall, link = statistics.median(seconds[uncounted:]) * 1e6, nbytes / link_gb_per_s / 1e3
            record |= {"wall_us": wall, "link_us": link, "beyond_link_us": wall - link}
        yield record


def _show(fields: Fields, output: Output) -> None:
    submissions = fields["submissions"]
    ratios = [each["ratio"] for each in submissions]
    if ratios:
        times = f"{min(ratios):.1f} to {max(ratios):.1f} times the bare driver calls"
        output.line(f"bench submit: store() and load() take {times}")
    else:
        output.line("bench submit: no submission was timed")
    host = {False: "hot", True: "cold"}
    for layout, copier in dict.fromkeys((each["layout"], each["copier"]) for each in submissions):
        lines = [
            [each["direction"], each["blocks"], host[each["cold"]], fixed(each["bare_us"]), fixed(each["ours_us"]),
             fixed(each["ratio"], 2)]
            for each in submissions if each["layout"] == layout
        ]  # fmt: skip
        columns = ("direction", "blocks", "host", "bare us", "ours us", "ours / bare")
        output.table(f"host time of one submission, {layout} by {copier}", columns, lines)
    names = ("wall_us", "link_us", "beyond_link_us")
    lines = [
        [each["layout"], each["copier"], each["blocks"], host[each["cold"]], *(fixed(each[name]) for name in names)]
        for each in fields["loads"]
    ]
    headings = ("layout", "copier", "blocks", "host", "wall us", "link us", "wall - link us")
    output.table("from the call of load() until the job is done", headings, lines)
    rates = ", ".join(f"{name} {rate:.1f}" for name, rate in fields["contiguous_copy_gb_per_s"].items())
    output.line(f"{CONTIGUOUS_COPY}, GB/s on the GPU clock: {rates}")
    output.line("hot: submissions without a wait; cold: each after the GPU and the host were idle for 3 ms")
