"""`kvoffload bench growth`: pools that are pinned piece by piece, beside one that is pinned at once.

Each engine stores its first blocks as soon as it is there. Then it stores and loads, one transfer at a time, concurrent
with products on each GPU: while its pool grows, and as often once all of it is pinned. Every transfer has slots of its
own among those that are pinned by then. Its targets are poisoned before it, and compared after it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from kvoffload.calibration.compute import pinned_memory
from kvoffload.device.buffers import DeviceBuffer
from kvoffload.device.growth import Growing
from kvoffload.device.streams import NO_WAIT
from kvoffload.driver import address_of
from kvoffload.engine.sharded import ShardedEngine
from kvoffload.internal.types import Int64Array, UInt8Array
from kvoffload.layout.layout import KVLayout
from kvoffload.planning.transfer_plan import Direction
from kvoffload.terminal.console import Output, mib
from kvoffload.terminal.options import COMMON, add_command, size, whole
from kvoffload_bench.field_compute import ConcurrentCompute, Situation
from kvoffload_bench.harness import FULL, SMALL, Lab, Undoing
from kvoffload_bench.report import Fields, add_bench_options, conduct, fixed
from kvoffload_bench.sharded import ShardSize, open_gpus

GROWING, PINNED = "growing", "pinned"
_SIZE, _SIMULATED_SIZE = ShardSize(64, 32 << 10, 32, 1), ShardSize(4, 256, 2, 1)
_SIMULATED_BYTES, _SIMULATED_PIECES = 1 << 20, (64 << 10, 16 << 10)
_PIECES = (256 << 20, 64 << 20, 1 << 30)
_TEXT = """\
Pins a pool at once and piece by piece, and times transfers of 64 MiB a GPU beside large products: while the pool \
grows, and afterwards. Every byte is verified."""


class Sample(NamedTuple):
    """One transfer.

    Attributes:
        call_seconds, seconds: of the call, and from the call until the job had ended, by the wall clock.
        slowdown: the largest of all GPUs, and at least 1: time of a product meanwhile over its time alone.
        wrong: rows of its targets with other bytes.
    """

    call_seconds: float
    seconds: float
    slowdown: float
    wrong: int


class Gpu(Undoing):
    """A GPU with products, and blocks: the first half is stored, into the second half is loaded. A context manager."""

    def __init__(self, lab: Lab, shape: ShardSize, seed: int) -> None:
        self.lab, self.device, self._row_bytes = lab, lab.device, shape.row_bytes
        random = np.random.default_rng(seed)
        self._right = random.integers(0, 256, (shape.blocks, shape.row_bytes), dtype=np.uint8)
        self._half = self._right.nbytes
        with ExitStack() as undo:
            planes = self.device.allocate_blocks(2 * shape.blocks, planes=shape.planes, block_bytes=shape.block_bytes)
            assert isinstance(planes[0].owner, DeviceBuffer)
            self._memory = undo.enter_context(planes[0].owner)
            self._memory.copy_from(self._right)
            self.layout = KVLayout([planes], on_default_stream=False)
            with self.device.current():
                self.compute = undo.enter_context(closing(ConcurrentCompute(lab, Situation.LARGE)))
            self._back = undo.enter_context(pinned_memory(self.device, self._half)).array[: self._half]
            self._undo = undo.pop_all()

    def poison(self, rows: Sequence[UInt8Array] = ()) -> None:
        """Overwrite rows of slots, or without any the blocks that are loaded into."""
        with self.device.current():
            if rows:
                self.lab.poison(rows)
            else:
                self.lab.fill([(self._memory.address + self._half, self._half)])

    def wrong(self, rows: Sequence[UInt8Array] = ()) -> int:
        """How many of these rows of slots, or of the loaded blocks, have other bytes than the blocks."""
        if not rows:
            back = self._back
            with self.device.current():
                self.lab.poison([back])
                source, copy = self._memory.address + self._half, self.lab.driver.copy
                self.lab.wait(lambda stream: copy(address_of(back), source, self._half, stream))
            rows = list(back.reshape(self._right.shape))
        return self.lab.wrong_rows(list(zip(rows, self._right, strict=True)), self._row_bytes)


class Run:
    """Transfers of one engine over all GPUs."""

    def __init__(self, gpus: Sequence[Gpu], shape: ShardSize, pool: int | Growing, seed: int) -> None:
        self._gpus, self._shape, self._random = gpus, shape, np.random.default_rng(seed)
        self._blocks: Int64Array = np.arange(shape.blocks)
        begin = time.perf_counter()
        layouts, devices = [gpu.layout for gpu in gpus], [gpu.device for gpu in gpus]
        self.engine = ShardedEngine(layouts, devices=devices, pool_bytes=pool)
        self._begin = begin

    def first_store(self) -> float:
        """Seconds from before the engine was made until its first blocks were stored."""
        self.engine.store(self._blocks[:1], self._blocks[:1], after=NO_WAIT).wait()
        return time.perf_counter() - self._begin

    def until_pinned(self) -> tuple[dict[Direction, list[Sample]], float]:
        """Transfers while the pool grows; and seconds since before the engine was made."""
        samples: dict[Direction, list[Sample]] = {each: [] for each in Direction}
        while self.engine.growing:
            for direction, sample in self._pair().items():
                samples[direction].append(sample)
        return samples, time.perf_counter() - self._begin

    def as_often(self, count: int) -> dict[Direction, list[Sample]]:
        pairs = [self._pair() for _ in range(count)]
        return {direction: [pair[direction] for pair in pairs] for direction in Direction}

    def _pair(self) -> dict[Direction, Sample]:
        """A store of the blocks into random slots, and a load from these."""
        slots = self._random.choice(self.engine.pinned_slots, self._shape.blocks, replace=False)
        rows = [[pool[slot, : self._shape.row_bytes] for slot in slots] for pool in self.engine.slots]
        for gpu, its in zip(self._gpus, rows, strict=True):
            gpu.poison(its)
        timed = self._timed(Direction.STORE, self._blocks, slots)
        store = Sample(*timed, sum(gpu.wrong(its) for gpu, its in zip(self._gpus, rows, strict=True)))
        for gpu in self._gpus:
            gpu.poison()
        timed = self._timed(Direction.LOAD, self._blocks + self._shape.blocks, slots)
        return {Direction.STORE: store, Direction.LOAD: Sample(*timed, sum(gpu.wrong() for gpu in self._gpus))}

    def _timed(self, direction: Direction, blocks: Int64Array, slots: Int64Array) -> tuple[float, float, float]:
        """Seconds of the call and of the transfer, and how much longer products took meanwhile."""
        engine, slow = self.engine, 1.0
        for gpu in self._gpus:
            with gpu.device.current():
                gpu.compute.begin()
        begin = time.perf_counter()
        job = engine.submit(direction, blocks, slots, after=NO_WAIT)
        call = time.perf_counter() - begin
        while not job.done:
            for gpu in self._gpus:
                with gpu.device.current():
                    gpu.compute.top_up()
        took = time.perf_counter() - begin
        job.wait()
        for gpu in self._gpus:
            with gpu.device.current():
                times = gpu.compute.end(took)
            alone = gpu.compute.product_seconds
            if alone is not None:
                slow = max(slow, times.window_seconds / (times.products * alone))
        return call, took, slow


# the command ----------------------------------------------------------------------------------------------------------


def add_parser(benches: Any) -> None:
    example = "bench growth --bytes 64GiB --gpus 2"
    parser = add_command(
        benches, "growth", "pools that are pinned while they serve", _TEXT, example=example, common=COMMON
    )
    add = parser.add_argument
    add("--bytes", type=size, default=64 << 30, metavar="SIZE", help="of a pool, of all GPUs (default 64GiB)")
    add("--pieces", type=_sizes, default=_PIECES, metavar="SIZE,...", help="bytes pinned at a time (256MiB,64MiB,1GiB)")
    add("--gpus", type=whole(1, 16), default=1, metavar="N", help="how many, from --device on (default 1)")
    add_bench_options(parser, 50, drawn=False)
    parser.set_defaults(run=run)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(size, text.split(",")))


def run(arguments: argparse.Namespace) -> int:
    def measure(lab: Lab, output: Output) -> Fields:
        shape, nbytes, pieces = _SIZE, arguments.bytes, arguments.pieces
        if lab.device.simulated:
            shape, nbytes, pieces = _SIMULATED_SIZE, _SIMULATED_BYTES, _SIMULATED_PIECES
        with ExitStack() as undo:
            gpus = []
            for number, device in enumerate(open_gpus(lab.device, arguments.gpus, undo)):
                its = Lab(device, SMALL if device.simulated else FULL, repeats=lab.repeats, seed=lab.seed)
                gpus.append(undo.enter_context(Gpu(undo.enter_context(its), shape, lab.seed + number)))
            return _measure(gpus, shape, nbytes, pieces, lab, output)

    return conduct(arguments, "growth", measure, _show)


def _measure(
    gpus: Sequence[Gpu], shape: ShardSize, nbytes: int, pieces: Sequence[int], lab: Lab, output: Output
) -> Fields:
    timed, pools, records = not lab.device.simulated, list[dict[str, Any]](), list[dict[str, Any]]()
    kinds: list[int | Growing] = [nbytes, *(Growing(nbytes, piece_bytes=each) for each in pieces)]
    with output.progress("pools") as progress:
        for kind in kinds:
            method = "at once" if isinstance(kind, int) else f"pieces of {mib(kind.piece_bytes)}"
            run = Run(gpus, shape, kind, lab.seed)
            with closing(run.engine):
                seconds = [run.first_store()]
                samples, pinned = run.until_pinned()
                seconds.append(pinned)
                phases = {GROWING: samples, PINNED: run.as_often(lab.repeats)}
                error = run.engine.statistics().pinning_error
            pools.append({"method": method, "pinning_error": error})
            if timed:
                pools[-1] |= dict(zip(("first_store_seconds", "pinned_seconds"), seconds, strict=True))
            for phase, by_direction in phases.items():
                for direction, found in by_direction.items():
                    if found:
                        records.append({"method": method, "situation": phase, "direction": str(direction)})
                        records[-1] |= _figures(found, timed=timed)
            progress(len(pools), len(kinds))
    wrong = sum(record["wrong"] for record in records)
    fields = {"gpus": len(gpus), "nbytes": nbytes, **shape._asdict(), "pools": pools, "transfers_of_pools": records}
    return {**fields, "not_run": {}, "wrong_rows": wrong}


def _figures(samples: Sequence[Sample], *, timed: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"count": len(samples), "wrong": sum(each.wrong for each in samples)}
    if timed:
        for name, values in {
            "ms": [1e3 * each.seconds for each in samples],
            "call_ms": [1e3 * each.call_seconds for each in samples],
            "slowdown": [each.slowdown for each in samples],
        }.items():
            found |= {f"median_{name}": median(values), f"most_{name}": max(values)}
    return found


def _of(gpus: int) -> str:
    return f"{gpus} GPU{'s' * (gpus > 1)}"


def _show(fields: Fields, output: Output) -> None:
    growing = [each for each in fields["transfers_of_pools"] if each["situation"] == GROWING]
    most = max((each["most_ms"] for each in growing), default=0.0)
    first = max(each["first_store_seconds"] for each in fields["pools"][1:] or fields["pools"])
    output.line(
        f"bench growth: {mib(fields['nbytes'])} on {_of(fields['gpus'])}: the first store ends after {first:.2f} s at "
        f"most; while a pool grows a transfer takes {most:.1f} ms at most"
    )
    lines = [
        [each["method"], fixed(each["first_store_seconds"], 2), fixed(each["pinned_seconds"], 2)]
        for each in fields["pools"]
    ]
    output.table("seconds until", ("pinned", "first store has ended", "all is pinned"), lines)
    rows = [
        [
            *(each[name] for name in ("method", "situation", "direction", "count")),
            *(
                fixed(each[f"{which}_{name}"], 2)
                for name in ("ms", "call_ms", "slowdown")
                for which in ("median", "most")
            ),
        ]
        for each in fields["transfers_of_pools"]
    ]
    header = ("pinned", "pool is", "moves", "count", "ms", "most", "call ms", "most", "product", "most")
    moved = mib(fields["blocks"] * fields["planes"] * fields["block_bytes"])
    title = f"transfers of {moved} a GPU, concurrent with large products; product: its time over its time alone"
    output.table(title, header, rows)
