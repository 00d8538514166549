"""`bench disk --gpu`: what a busy disk tier costs the GPU's transfers; both use the same pinned pool, in turns.

Each transfer is measured on an idle GPU and concurrent with products, without and with disk traffic. Ratios are to the
same transfers, concurrent with the same products, without disk traffic. Every byte of both is compared. On the
simulated device bytes are compared, and nothing is timed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from kvoffload.device.device import Device
from kvoffload.device.streams import NO_WAIT
from kvoffload.engine.job import Job
from kvoffload.internal.models import MODELS
from kvoffload.planning.transfer_plan import Direction
from kvoffload.terminal.console import SIMULATED_NOTE, Output
from kvoffload.tiers import DiskTier, Outcome
from kvoffload.tiers.files import PAGE
from kvoffload_bench.field_compute import ComputeTimes, ConcurrentCompute, Situation, compute_ended
from kvoffload_bench.harness import FULL, SMALL, WARM_UP, Lab, Scenario, time_rounds
from kvoffload_bench.report import fixed
from kvoffload_bench.series import DIRECTIONS
from kvoffload_bench.setup import Placement, TransferSetup
from kvoffload_bench.tier_calls import LAYOUT, POISON, Verified, numbered_keys, tier_bytes

_MODEL = "llama-3.1-8b"
_BLOCKS, _SIMULATED_BLOCKS = 128, 8
TRANSFERS = 8  # of a series, in each direction
_SITUATIONS = (Situation.IDLE, Situation.LARGE, Situation.SMALL)  # the simulated device has one size of products
_STOP_SECONDS = 60.0


class Series:
    """Repeats a transfer of the setup's blocks; "both" moves half of them each way. Times are kept by round.

    Attributes:
        compute_times: of the products meanwhile; empty on an idle GPU.
    """

    def __init__(
        self, setup: TransferSetup, blocks: int, directions: Sequence[Direction], compute: ConcurrentCompute | None
    ) -> None:
        self._setup, self._compute, self._device = setup, compute, setup.lab.device
        self.compute_times: list[ComputeTimes] = []
        half = blocks // len(directions)
        self._parts = {direction: (half, half * number) for number, direction in enumerate(directions)}
        self._groups = {}
        for direction, part in self._parts.items():
            setup.take(*part)
            self._groups[direction] = setup.groups[0]

    def prepare(self) -> None:
        """Write the sources, and poison the targets: of loads first, since that overwrites all planes."""
        for direction in sorted(self._parts, key=[Direction.LOAD, Direction.STORE].index):
            self._setup.take(*self._parts[direction])
            self._setup.poison(direction)
            self._setup.prepare(direction)

    def execute(self) -> float:
        """Seconds from the first call to the last byte, wall clock."""
        with self._device.current():
            compute = self._compute
            if compute is None:
                return self._transfer()
            try:
                compute.begin()
                seconds = self._transfer()
                self.compute_times.append(compute.end(seconds))
            except BaseException:
                compute.abandon()
                raise
            return seconds

    def _transfer(self) -> float:
        engine, compute, jobs = self._setup.engine, self._compute, list[Job]()
        begin = time.perf_counter()
        for _ in range(TRANSFERS):
            for direction, each in self._groups.items():
                jobs.append(engine.submit(direction, each.blocks, each.slots, after=NO_WAIT))
            if compute is not None:
                compute.top_up()
        for job in jobs:
            while compute is not None and not job.done:
                compute.top_up()
            job.wait()
        return time.perf_counter() - begin

    def wrong(self) -> int:
        found = 0
        for direction, part in self._parts.items():
            self._setup.take(*part)
            found += self._setup.wrong(direction)
        return found


class DiskTraffic:
    """A tier over the slots of a pool that transfers leave: a thread puts one half of them, and gets into the other.

    Attributes:
        verified: records that were read and compared by the thread.
        rates: bytes a second of the disk, each time that it was busy.
    """

    def __init__(self, file: Path, setup: TransferSetup) -> None:
        self.verified, self.rates = Verified(), list[float]()
        self._slots = setup.engine.slots
        free = sorted({*range(len(self._slots))} - {*setup.groups[0].slots.tolist()})
        half = len(free) // 2
        self._sources, self._targets = free[:half], free[half : 2 * half]
        self._slots[self._sources] = np.random.default_rng(0).integers(0, 256, (half, self._slots.shape[1]), np.uint8)
        self._number = 0
        self._stop, self._thread = threading.Event(), threading.Thread()
        nbytes = tier_bytes(8 * half, setup.layout.slot_bytes)
        self._tier = DiskTier(file, nbytes=nbytes, identity="kvoffload bench disk", reset=True)
        self._tier.attach([self._slots], LAYOUT)

    def start(self) -> None:
        """From now on the tier writes and reads."""
        self._begin, self._before = time.perf_counter(), self._moved()
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, name="kvoffload-bench-disk")
        self._thread.start()

    def stop(self) -> None:
        """At least one record has been compared then. Idempotent."""
        if self._thread.ident is None:
            return
        self.rates.append((self._moved() - self._before) / (time.perf_counter() - self._begin))
        self._stop.set()
        self._thread.join()
        self._thread = threading.Thread()
        self._tier.clear().wait(_STOP_SECONDS)

    def _moved(self) -> int:
        done = self._tier.statistics()
        return done.bytes_written + done.bytes_read

    def _run(self) -> None:
        while True:
            self._number += 1
            keys = numbered_keys(self._number << 32, len(self._sources))
            for source, target in zip(self._sources, self._targets, strict=True):
                self._slots[source, ::PAGE] = self._number % 251  # new bytes in each page
                self._slots[target] = POISON
            put = self._tier.put(keys, self._sources)
            put.wait()
            self.verified.note(put)
            get = self._tier.get(keys, self._targets)
            get.wait()
            self.verified.note(get)
            done = [at for at, outcome in enumerate(get.outcomes) if outcome is Outcome.DONE]
            right = (self._slots[self._sources[at]] for at in done)
            self.verified.compare((self._slots[self._targets[at]] for at in done), right)
            if self._stop.is_set():
                return

    def close(self) -> None:
        self.stop()
        self._tier.close()


def measure(device: Device, file: Path, *, repeats: int) -> dict[str, Any]:
    """Bandwidths of series of transfers while the disk does nothing, and while it writes and reads records.

    Args:
        file: for the tier; lost afterwards.
        repeats: rounds.

    Returns:
        For JSON. Times are the host's, from the first call to the last byte.
    """
    simulated = device.simulated
    size, blocks = (SMALL, _SIMULATED_BLOCKS) if simulated else (FULL, _BLOCKS)
    repeats = 1 if simulated else repeats
    records: list[dict[str, Any]] = []
    with ExitStack() as undo:
        lab = undo.enter_context(Lab(device, size, repeats=repeats, seed=0))
        geometry = MODELS[_MODEL].scaled(size.scale)
        setup = undo.enter_context(TransferSetup(lab, geometry, placement=Placement.INTERLEAVED, count=blocks))
        traffic = undo.enter_context(closing(DiskTraffic(file, setup)))
        nbytes = TRANSFERS * setup.nbytes
        for situation in _SITUATIONS[:2] if simulated else _SITUATIONS:
            idle = situation is Situation.IDLE
            with nullcontext() if idle else closing(ConcurrentCompute(lab, situation)) as compute:
                for moves, directions in DIRECTIONS.items():
                    record = {"situation": str(situation), "moves": moves}
                    records.append(record | _in_turns(setup, blocks, directions, compute, traffic, nbytes))
    return {
        "simulated": simulated,
        "device": device.name,
        "model": _MODEL,
        "blocks": blocks,
        "verified_blocks": len(records) * 2 * (WARM_UP * (not simulated) + repeats) * blocks,
        "wrong_blocks": sum(record["wrong"] for record in records),
        "verified_records": traffic.verified.records,
        "wrong_records": traffic.verified.wrong,
        "missing_records": traffic.verified.missing,
        "records": records,
    }


def _in_turns(
    setup: TransferSetup,
    blocks: int,
    directions: Sequence[Direction],
    compute: ConcurrentCompute | None,
    traffic: DiskTraffic,
    nbytes: int,
) -> dict[str, Any]:
    """Series without and with disk traffic in turns. Those whose products ended before the transfers do not count."""
    simulated = setup.lab.device.simulated
    idle, busy = (Series(setup, blocks, directions, compute) for _ in range(2))
    traffic.rates.clear()

    def stop_and_compare() -> int:
        traffic.stop()
        return busy.wrong()

    scenarios = {
        "idle": Scenario(idle.execute, idle.prepare, idle.wrong, nbytes),
        "busy": Scenario(busy.execute, busy.prepare, stop_and_compare, nbytes, warm_up=traffic.start),
    }
    uncounted = 0 if simulated else WARM_UP
    timings = time_rounds(scenarios, setup.lab.repeats, uncounted)
    record: dict[str, Any] = {"wrong": sum(timing.wrong for timing in timings.values())}
    if simulated:
        return record
    times = [each.compute_times[uncounted:] for each in (idle, busy)]
    counted = [[not compute_ended(each) for each in found] or [True] * setup.lab.repeats for found in times]
    seconds = [timings[name].seconds for name in scenarios]
    kept = [[each for each, counts in zip(*pair, strict=True) if counts] for pair in zip(seconds, counted, strict=True)]
    pairs = zip(*seconds, *counted, strict=True)
    ratios = [without / with_disk for without, with_disk, *counts in pairs if all(counts)]
    products = [[each.window_seconds / each.products for each in found if not compute_ended(each)] for found in times]
    rates = [nbytes / median(each) / 1e9 if each else None for each in kept]
    return record | {
        "idle_gb_per_s": rates[0],
        "busy_gb_per_s": rates[1],
        "ratio": median(ratios) if ratios else None,
        "product_ratio": median(products[1]) / median(products[0]) if all(products) else None,
        "disk_gb_per_s": median(traffic.rates[uncounted:]) / 1e9,
        "series_compute_ended": sum(each.count(False) for each in counted),
    }


def wrong(fields: Mapping[str, Any]) -> int:
    """Blocks and records whose bytes were wrong, or that were missing."""
    return int(fields["wrong_blocks"] + fields["wrong_records"] + fields["missing_records"])


def show(fields: Mapping[str, Any], output: Output) -> None:
    if not fields["simulated"]:
        figures = {"idle_gb_per_s": 1, "busy_gb_per_s": 1, "ratio": 2, "product_ratio": 2, "disk_gb_per_s": 1}
        lines = [
            (each["situation"], each["moves"], *(fixed(each[name], digits) for name, digits in figures.items()))
            for each in fields["records"]
        ]
        title = f"the GPU's transfers while the disk works, {fields['model']}, {fields['blocks']} blocks; GB/s"
        columns = ("GPU", "moves", "disk idle", "disk busy", "busy / idle", "product", "disk")
        output.table(title, columns, lines, left=("moves",))
        output.line("")
        output.line("product: time of a product while the disk works over its time while it does not")
    output.line("")
    compared = f"{fields['verified_blocks']:,} blocks of transfers and {fields['verified_records']:,} records compared"
    missing = f", {fields['missing_records']} missing" if fields["missing_records"] else ""
    note = f"; {SIMULATED_NOTE}" if fields["simulated"] else ""
    output.line(f"{compared}, {fields['wrong_blocks'] + fields['wrong_records']} wrong{missing}{note}")
