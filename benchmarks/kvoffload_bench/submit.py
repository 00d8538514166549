"""`kvoffload bench submit`: how long `store()` and `load()` keep their caller, against the bare driver calls.

A *pair* is a block with the slot that it is stored to or loaded from. The engine and the bare calls use pairs of their
own, of the same planes and the same pool; each submission takes the next few pairs of a random order.

Every bare submission pushes the context, computes addresses from block and slot numbers into arrays, records a marker
on the caller's stream and makes the copy stream wait for it, makes one copy call between two timing events, and pops
the context. The copy call is one of

    batch     cuMemcpyBatchAsync with one copy a block, of planes that interleave
    strided   cuMemcpy3DBatchAsync with one operation a block, of planes that fold
    gather    cuLaunchKernel of the library's kernel, after 16 bytes a block were written into a pinned table

All calls go to the driver API, without the checks, the retries and the ordering that `Driver` and the engine add.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvoffload.device.pinned import PAGE_BYTES, PinnedMemory
from kvoffload.driver import Driver, address_of, binding_types
from kvoffload.driver.tables import DTYPE_3D
from kvoffload.engine.job import Job
from kvoffload.errors import DriverError
from kvoffload.internal.types import Int64Array, UInt64Array
from kvoffload.kernels import load_kernel
from kvoffload.planning.transfer_plan import Direction
from kvoffload.terminal.console import Output
from kvoffload.terminal.machine import aligned_gather_kernel
from kvoffload.terminal.options import COMMON, add_command, add_wide
from kvoffload.tuning import CopierName
from kvoffload_bench.harness import CONTIGUOUS_COPY, Lab, time_rounds
from kvoffload_bench.report import Fields, add_bench_options, conduct, fixed
from kvoffload_bench.setup import Placement, TransferSetup, geometry_of

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
_DONE_BAR_US = 120.0
_SUBMISSIONS = 100
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
    _Layout("separate allocations", Placement.SCATTERED, "gather", BareGather),
)


class _Bar(NamedTuple):
    """What a figure should not exceed. `of`: "ratio" of the medians, or "us" of the engine's."""

    of: str
    limit: float

    @property
    def text(self) -> str:
        return f"<= {self.limit:g}" + ("x" if self.of == "ratio" else " us")


def bar_of(copier: str, blocks: int, cold: bool) -> _Bar | None:
    """The bar of a line, None if it has none."""
    if copier != "batch":
        return _Bar("ratio", 2.5 if cold else 3.0)
    if blocks >= 8:
        return _Bar("ratio", 2.0 if cold else 2.5)
    return None if cold else _Bar("us", 45.0)


def add_parser(benches: Any) -> None:
    parser = add_command(
        benches,
        "submit",
        "host time of store() and load()",
        _TEXT,
        example="bench submit --save submit.json",
        common=COMMON,
    )
    add_wide(parser, "95th percentiles and bars")
    add_bench_options(parser, _SUBMISSIONS, drawn=False)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    return conduct(arguments, "submit", _measure, _show)


def _measure(lab: Lab, output: Output) -> Fields:
    submissions: list[dict[str, Any]] = []
    loads: list[dict[str, Any]] = []
    not_run: dict[str, str] = {}
    links = time_rounds({str(each): lab.contiguous.scenario(each) for each in Direction}, _LINK_ROUNDS)
    planes = _SIMULATED_PLANES if lab.device.simulated else _PLANES
    with output.progress("layouts") as progress:
        for done, layout in enumerate(_LAYOUTS, start=1):
            geometry = geometry_of(planes, _BLOCK_BYTES, lab.size.scale)
            with TransferSetup(lab, geometry, placement=layout.placement, count=2 * _MOST_PAIRS) as setup:
                reason = _why_not(setup, layout)
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


def _why_not(setup: TransferSetup, layout: _Layout) -> str | None:
    capabilities = setup.lab.device.capabilities
    if layout.copier == "strided" and not capabilities.strided_batch:
        return capabilities.missing["cuMemcpy3DBatchAsync"]
    return setup.missing[layout.copier]


# submissions ----------------------------------------------------------------------------------------------------------


class _Submitter(Protocol):
    """Submits transfers of blocks and slots, int64, (n,) each; see `BareSubmission`."""

    def submit(self, blocks: Int64Array, slots: Int64Array) -> None: ...

    def check(self) -> None: ...

    def wait(self) -> None: ...


class _EngineSubmission:
    """Submits transfers through an engine; a copier of None leaves the choice to it."""

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
    setup.take(2 * _MOST_PAIRS)
    setup.prepare(direction)
    engine = _EngineSubmission(setup, direction, layout.copier)
    with closing(layout.bare(setup, direction, max(_BLOCKS))) as bare:
        for blocks in _BLOCKS:
            pairs = min(_MOST_PAIRS, 4 * blocks)
            setup.take(2 * pairs)
            sources = [_windows(setup, range(at, at + pairs), blocks) for at in (0, pairs)]
            for cold in (False, True):
                setup.poison(direction)
                seconds = _time_submissions((engine, bare), sources, setup.lab, pairs // blocks, cold)
                yield _record(setup, layout, direction, blocks, cold, seconds)


def _time_submissions(
    submitters: tuple[_Submitter, ...],
    sources: Sequence[Iterator[Pairs]],
    lab: Lab,
    least: int,
    cold: bool,
) -> list[list[float]]:
    """Host seconds of every counted submission, of each submitter: bare and through the engine in turn."""
    uncounted = 0 if lab.device.simulated else _UNCOUNTED
    seconds: list[list[float]] = [[] for _ in submitters]

    def wait() -> None:
        for each in submitters:
            each.wait()

    with ExitStack() as undo:
        undo.callback(wait)
        for number in range(max(lab.repeats, least) + uncounted):
            if number % _BURST == 0:
                wait()
            for submitter, source, found in zip(submitters, sources, seconds, strict=True):
                if cold:
                    wait()
                    time.sleep(_IDLE_SECONDS)
                found.append(_seconds_of(submitter.submit, next(source)))
                submitter.check()
    return [each[uncounted:] for each in seconds]


def _seconds_of(submit: Callable[[Int64Array, Int64Array], None], pairs: Pairs) -> float:
    begin = time.perf_counter()
    submit(*pairs)
    return time.perf_counter() - begin


def _record(
    setup: TransferSetup, layout: _Layout, direction: Direction, blocks: int, cold: bool, seconds: list[list[float]]
) -> dict[str, Any]:
    bar = bar_of(layout.copier, blocks, cold)
    record: dict[str, Any] = {
        "layout": layout.name,
        "copier": layout.copier,
        "direction": str(direction),
        "blocks": blocks,
        "planes": setup.plane_count,
        "block_bytes": setup.block_bytes,
        "cold": cold,
        "submissions": len(seconds[0]),
        "bar": None if bar is None else bar.text,
        "wrong": setup.wrong(direction),
    }
    if not setup.lab.device.simulated:
        for name, values in zip(("ours", "bare"), seconds, strict=True):
            record |= _figures(name, values)
        record["ratio"] = record["ours_us"] / record["bare_us"]
        record["bar_met"] = None
        if bar is not None:
            record["bar_met"] = record["ratio" if bar.of == "ratio" else "ours_us"] <= bar.limit
    return record


def _figures(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Median and 95th percentile in microseconds."""
    ordered = sorted(seconds)
    return {f"{name}_us": statistics.median(ordered) * 1e6, f"{name}_p95_us": ordered[int(0.95 * len(ordered))] * 1e6}


# until done -----------------------------------------------------------------------------------------------------------


def _loads(setup: TransferSetup, layout: str, link_gb_per_s: float) -> Iterator[dict[str, Any]]:
    """Loads of a few blocks, from the call until the polled job is done; hot and cold."""
    direction, lab = Direction.LOAD, setup.lab
    setup.take(4 * _DONE_BLOCKS)
    setup.prepare(direction)
    windows = _windows(setup, range(4 * _DONE_BLOCKS), _DONE_BLOCKS)
    submitter = _EngineSubmission(setup, direction, None)
    uncounted = 0 if lab.device.simulated else _UNCOUNTED
    for cold in (False, True):
        setup.poison(direction)
        seconds = []
        copier = ""
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
            copier = job.copier
            submitter.wait()
        nbytes = _DONE_BLOCKS * setup.nbytes // setup.block_count
        record = {"layout": layout, "copier": copier, "blocks": _DONE_BLOCKS, "nbytes": nbytes, "cold": cold}
        record["wrong"] = setup.wrong(direction)
        yield record | ({} if lab.device.simulated else _beyond_link(seconds[uncounted:], nbytes, link_gb_per_s))


def _beyond_link(seconds: Sequence[float], nbytes: int, link_gb_per_s: float) -> dict[str, Any]:
    figures = _figures("wall", seconds)
    link_us = nbytes / link_gb_per_s / 1e3
    beyond = figures["wall_us"] - link_us
    return figures | {
        "link_us": link_us,
        "beyond_link_us": beyond,
        "bar_us": _DONE_BAR_US,
        "bar_met": beyond <= _DONE_BAR_US,
    }


# tables ---------------------------------------------------------------------------------------------------------------


def _show(fields: Fields, output: Output) -> None:
    output.line(_verdict(fields["submissions"], fields["loads"]))
    for layout in dict.fromkeys(each["layout"] for each in fields["submissions"]):
        _show_submissions([each for each in fields["submissions"] if each["layout"] == layout], output)
    lines = []
    for each in fields["loads"]:
        line = [each["layout"], each["copier"], each["blocks"], _host(each)]
        line += [fixed(each[f"{name}_us"]) for name in ("wall", "link", "beyond_link")]
        line += [fixed(each["wall_p95_us"]), f"<= {each['bar_us']:g} us", _met(each["bar_met"])] if output.wide else []
        lines.append(line)
    columns = ["layout", "copier", "blocks", "host", "wall us", "link us", "wall - link us"]
    columns += ["p95", "bar", "met"] if output.wide else []
    output.table("from the call of load() until the job is done", columns, lines)
    rates = ", ".join(f"{name} {rate:.1f}" for name, rate in fields["contiguous_copy_gb_per_s"].items())
    output.line(f"{CONTIGUOUS_COPY}, GB/s on the GPU clock: {rates}")
    output.line("hot: submissions without a wait; cold: each after the GPU and the host were idle for 3 ms")
    output.line("bar: what kvoffload aims at; nothing fails if it is missed")


def _verdict(submissions: Sequence[dict[str, Any]], loads: Sequence[dict[str, Any]]) -> str:
    if not submissions:
        return "bench submit: no submission was timed"
    ratios = [each["ratio"] for each in submissions]
    missed = sum(each["bar_met"] is False for each in (*submissions, *loads))
    return (
        f"bench submit: store() and load() take {min(ratios):.1f} to {max(ratios):.1f} times the bare driver calls; "
        f"{missed} of {sum(each['bar_met'] is not None for each in (*submissions, *loads))} bars missed"
    )


def _show_submissions(records: Sequence[dict[str, Any]], output: Output) -> None:
    lines = []
    for each in records:
        line = [each["direction"], each["blocks"], _host(each), fixed(each["bare_us"]), fixed(each["ours_us"])]
        line += [f"{each['ratio']:.2f}", each["bar"] or "-", _met(each["bar_met"])]
        line += [fixed(each[f"{name}_us"]) for name in ("bare_p95", "ours_p95")] if output.wide else []
        lines.append(line)
    columns = ["direction", "blocks", "host", "bare us", "ours us", "ours / bare", "bar", "met"]
    columns += ["bare p95", "ours p95"] if output.wide else []
    output.table(f"host time of one submission, {records[0]['layout']} by {records[0]['copier']}", columns, lines)


def _host(record: dict[str, Any]) -> str:
    return "cold" if record["cold"] else "hot"


def _met(met: bool | None) -> str:
    return "-" if met is None else "yes" if met else "no"
