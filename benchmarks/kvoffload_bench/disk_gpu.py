"""`bench disk --gpu`: what a busy disk tier costs the GPU's transfers; both use the same pinned pool, in turns.

Each transfer is measured on an idle GPU and concurrent with products, without and with disk traffic. Ratios are to the
same transfers, concurrent with the same products, without disk traffic. Every byte of both is compared. On the
simulated device bytes are compared, and nothing is timed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from kvoffload.device.device import Device
from kvoffload.device.streams import NO_WAIT
from kvoffload.engine.engine import OffloadEngine
from kvoffload.engine.job import Job
from kvoffload.internal.models import MODELS, ModelGeometry
from kvoffload.internal.patterns import KeyPatterns
from kvoffload.layout.layout import KVLayout
from kvoffload.terminal.console import SIMULATED_NOTE, Output
from kvoffload.tiers import DiskTier, Outcome, TierJob
from kvoffload_bench.disk_measure import tier_bytes
from kvoffload_bench.field_compute import ComputeTimes, ConcurrentCompute, Situation, compute_ended
from kvoffload_bench.harness import FULL, SMALL, Lab
from kvoffload_bench.report import fixed
from kvoffload_bench.tier_calls import Verified

Move: TypeAlias = Literal["store", "load", "both"]
_POISON = 0xA5
_PAGE = 4096
_STOP_SECONDS = 60.0


class Series(NamedTuple):
    """What was measured of a series.

    Attributes:
        seconds: from the first call to the last byte, wall clock.
        compute: of the products meanwhile; None on an idle GPU.
    """

    seconds: float
    compute: ComputeTimes | None


class _Parts(NamedTuple):
    """Blocks, and slots with the same numbers, that a series stores and loads."""

    stored: range
    loaded: range


class DiskTransfers:
    """Planes, the pool under test, and a second engine that writes and reads blocks. Free it with `close`.

    The first half of the pool's slots is for transfers, the second half for the disk.

    Args:
        blocks: of the device; the pool has twice as many slots.
        transfers: of a series, in each direction.

    Attributes:
        engine: whose slots the disk shares.
        verified: blocks of transfers that were compared.
    """

    def __init__(self, device: Device, geometry: ModelGeometry, blocks: int, transfers: int) -> None:
        planes = device.allocate_blocks(blocks, planes=sum(geometry.planes_per_group), block_bytes=geometry.block_bytes)
        axes = ("tokens", "heads", "dim")
        self.layout = KVLayout(
            [planes], blocks_per_slot=1, dtype="bfloat16", tokens_per_block=geometry.tokens_per_block, block_axes=axes
        )
        self.blocks, self._transfers = blocks, transfers
        self.verified = Verified()
        self._keys = [number.to_bytes(16, "big") for number in range(blocks)]
        with ExitStack() as undo:
            self.engine = undo.enter_context(OffloadEngine(self.layout, device=device, num_slots=2 * blocks))
            self._staging = undo.enter_context(OffloadEngine(self.layout, device=device, num_slots=blocks))
            self._patterns = KeyPatterns(self.layout.groups[0].payload_bytes)
            undo.callback(self._patterns.close)
            self._undo = undo.pop_all()

    def series_bytes(self) -> int:
        """Of a series, for each move: "both" moves half of the blocks each way."""
        return self._transfers * self.blocks * self.layout.groups[0].payload_bytes

    def series(self, move: Move, compute: ConcurrentCompute | None) -> Series:
        """Poison the targets, transfer, and compare. The device's context must be current."""
        parts = self._parts(move)
        self._prepare(parts)
        if compute is None:
            series = Series(self._transfer(parts, None), None)
        else:
            try:
                compute.begin()
                seconds = self._transfer(parts, compute)
                series = Series(seconds, compute.end(seconds))
            except BaseException:
                compute.abandon()
                raise
        self._compare(parts)
        return series

    def _parts(self, move: Move) -> _Parts:
        half = self.blocks // 2
        middle = {"store": self.blocks, "load": 0, "both": half}[move]
        return _Parts(range(middle), range(middle, self.blocks))

    def _prepare(self, parts: _Parts) -> None:
        slots, staging = self.engine.slots, self._staging.slots
        stored, loaded = (slice(part.start, part.stop) for part in parts)
        self._patterns.fill(staging[stored], self._keys[stored])
        staging[loaded] = _POISON
        slots[stored] = _POISON
        self._patterns.fill(slots[loaded], self._keys[loaded])
        every = np.arange(self.blocks)
        self._staging.load(every, every, after=NO_WAIT).wait()

    def _transfer(self, parts: _Parts, compute: ConcurrentCompute | None) -> float:
        stored, loaded = (np.array(part, dtype=np.int64) for part in parts)
        jobs: list[Job] = []
        begin = time.perf_counter()
        for _ in range(self._transfers):
            if len(stored):
                jobs.append(self.engine.store(stored, stored, after=NO_WAIT))
            if len(loaded):
                jobs.append(self.engine.load(loaded, loaded, after=NO_WAIT))
            if compute is not None:
                compute.top_up()
        for job in jobs:
            while compute is not None and not job.done:
                compute.top_up()
            job.wait()
        return time.perf_counter() - begin

    def _compare(self, parts: _Parts) -> None:
        stored, loaded = (slice(part.start, part.stop) for part in parts)
        staging = self._staging.slots
        staging[loaded] = ~np.uint8(_POISON)
        ids = np.array(parts.loaded, dtype=np.int64)
        if len(ids):
            self._staging.store(ids, ids, after=NO_WAIT).wait()
        self.verified.records += self.blocks
        self.verified.wrong += len(self._patterns.wrong(self.engine.slots[stored], self._keys[stored]))
        self.verified.wrong += len(self._patterns.wrong(staging[loaded], self._keys[loaded]))

    def close(self) -> None:
        self._undo.close()


class DiskTraffic:
    """A tier over the second half of a pool: a thread puts records of one half of that, and gets them into the other.

    Attributes:
        tier: the tier.
        verified: records that were read and compared by the thread.
    """

    def __init__(self, file: Path, transfers: DiskTransfers) -> None:
        blocks, layout = transfers.blocks, transfers.layout
        self.verified = Verified()
        self._sources = range(blocks, blocks + blocks // 2)
        self._targets = range(blocks + blocks // 2, blocks + 2 * (blocks // 2))
        self._slots = transfers.engine.slots
        random = np.random.default_rng(0)
        for entry in self._sources:
            self._slots[entry] = random.integers(0, 256, self._slots.shape[1], np.uint8)
        self._number = 0
        nbytes = tier_bytes(4 * blocks, layout.slot_bytes, 1)
        self.tier = DiskTier(file, nbytes=nbytes, identity="kvoffload bench disk", reset=True)
        self.tier.attach([self._slots], layout.fingerprint)

    def moved(self) -> int:
        """Bytes that the disk has written and read so far."""
        done = self.tier.statistics()
        return done.bytes_written + done.bytes_read

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Meanwhile the tier writes and reads. At least one record has been compared at the end."""
        stop = threading.Event()
        thread = threading.Thread(target=self._run, args=(stop,), name="kvoffload-bench-disk")
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            self.tier.clear().wait(_STOP_SECONDS)

    def _run(self, stop: threading.Event) -> None:
        while True:
            self._number += 1
            keys = [(self._number << 64 | entry).to_bytes(16, "big") for entry in self._sources]
            self._slots[self._sources.start : self._sources.stop, ::_PAGE] = (
                self._number % 251
            )  # new bytes in each page
            self._slots[self._targets.start : self._targets.stop] = _POISON
            put = self.tier.put(keys, self._sources)
            put.wait()
            self._count_missing(put)
            get = self.tier.get(keys, self._targets)
            get.wait()
            self._count_missing(get)
            self._compare(get.outcomes)
            if stop.is_set():
                return

    def _count_missing(self, job: TierJob) -> None:
        self.verified.missing += sum(outcome is not Outcome.DONE for outcome in job.outcomes)

    def _compare(self, outcomes: Sequence[Outcome | None]) -> None:
        for source, target, outcome in zip(self._sources, self._targets, outcomes, strict=True):
            if outcome is Outcome.DONE:
                self.verified.records += 1
                self.verified.wrong += not np.array_equal(self._slots[source], self._slots[target])

    def close(self) -> None:
        self.tier.close()


# the measurement ------------------------------------------------------------------------------------------------------

_MODEL = "llama-3.1-8b"
_BLOCKS, _SIMULATED_BLOCKS = 128, 8
_TRANSFERS = 8  # of a series, in each direction
_SERIES = 3  # of a round, without and with disk traffic
_MOVES: tuple[Move, ...] = ("store", "load", "both")
_SITUATIONS = (Situation.IDLE, Situation.LARGE, Situation.SMALL)  # the simulated device has one size of products


class _Round(NamedTuple):
    """One round: series without and with disk traffic, and bytes a second of the disk meanwhile."""

    idle: list[Series]
    busy: list[Series]
    disk: float


def measure(device: Device, file: Path, *, repeats: int) -> dict[str, Any]:
    """Bandwidths of series of transfers while the disk does nothing, and while it writes and reads records.

    Args:
        file: for the tier; lost afterwards.
        repeats: rounds.

    Returns:
        For JSON. Times are the host's, from the first call to the last byte.
    """
    size = SMALL if device.simulated else FULL
    geometry = MODELS[_MODEL].scaled(size.scale)
    blocks = _SIMULATED_BLOCKS if device.simulated else _BLOCKS
    with ExitStack() as undo:
        lab = undo.enter_context(Lab(device, size, repeats=repeats, seed=0))
        transfers = undo.enter_context(closing(DiskTransfers(device, geometry, blocks, _TRANSFERS)))
        traffic = undo.enter_context(closing(DiskTraffic(file, transfers)))
        records = [
            record
            for situation in (_SITUATIONS[:2] if device.simulated else _SITUATIONS)
            for record in _of_situation(lab, transfers, traffic, situation, 1 if device.simulated else repeats)
        ]
    return {
        "simulated": device.simulated,
        "device": device.name,
        "model": _MODEL,
        "blocks": blocks,
        "verified_blocks": transfers.verified.records,
        "wrong_blocks": transfers.verified.wrong,
        "verified_records": traffic.verified.records,
        "wrong_records": traffic.verified.wrong,
        "missing_records": traffic.verified.missing,
        "records": records,
    }


def _of_situation(
    lab: Lab, transfers: DiskTransfers, traffic: DiskTraffic, situation: Situation, repeats: int
) -> Iterator[dict[str, Any]]:
    with _computing(lab, situation) as compute:
        rounds: dict[Move, list[_Round]] = {move: [] for move in _MOVES}
        for number in range(repeats):
            for move in _MOVES:
                rounds[move].append(_round(lab, transfers, traffic, move, compute, busy_first=bool(number % 2)))
    for move in _MOVES:
        record = {"situation": str(situation), "moves": move}
        yield record if lab.device.simulated else record | _summary(rounds[move], transfers.series_bytes())


@contextmanager
def _computing(lab: Lab, situation: Situation) -> Iterator[ConcurrentCompute | None]:
    if situation is Situation.IDLE:
        yield None
        return
    with closing(ConcurrentCompute(lab, situation)) as compute:
        yield compute


def _round(
    lab: Lab,
    transfers: DiskTransfers,
    traffic: DiskTraffic,
    move: Move,
    compute: ConcurrentCompute | None,
    *,
    busy_first: bool,
) -> _Round:
    def series() -> list[Series]:
        with lab.device.current():
            return [transfers.series(move, compute) for _ in range(1 if lab.device.simulated else _SERIES)]

    def with_disk() -> tuple[list[Series], float]:
        before, begun = traffic.moved(), time.perf_counter()
        with traffic.busy():
            found = series()
            return found, (traffic.moved() - before) / (time.perf_counter() - begun)

    if busy_first:
        busy, disk = with_disk()
        return _Round(series(), busy, disk)
    idle = series()
    return _Round(idle, *with_disk())


# figures --------------------------------------------------------------------------------------------------------------


def _summary(rounds: Sequence[_Round], nbytes: int) -> dict[str, Any]:
    """Medians over the rounds; of series during which the products did not end before the transfers."""
    idle = [each for of_round in rounds for each in _counted(of_round.idle)]
    busy = [each for of_round in rounds for each in _counted(of_round.busy)]
    pairs = [(_counted(each.idle), _counted(each.busy)) for each in rounds]
    ratios = [_seconds(without) / _seconds(with_disk) for without, with_disk in pairs if without and with_disk]
    return {
        "idle_gb_per_s": nbytes / _seconds(idle) / 1e9 if idle else None,
        "busy_gb_per_s": nbytes / _seconds(busy) / 1e9 if busy else None,
        "ratio": median(ratios) if ratios else None,
        "product_ratio": _product_ratio(idle, busy),
        "disk_gb_per_s": median(each.disk for each in rounds) / 1e9,
        "series": len(idle) + len(busy),
        "series_compute_ended": 2 * _SERIES * len(rounds) - len(idle) - len(busy),
    }


def _counted(series: Sequence[Series]) -> list[Series]:
    return [each for each in series if each.compute is None or not compute_ended(each.compute)]


def _seconds(series: Sequence[Series]) -> float:
    return median(each.seconds for each in series)


def _product_ratio(idle: Sequence[Series], busy: Sequence[Series]) -> float | None:
    """Time of a product while the disk works over its time while it does not, during the same transfers."""
    times = [
        [each.compute.window_seconds / each.compute.products for each in series if each.compute is not None]
        for series in (idle, busy)
    ]
    return median(times[1]) / median(times[0]) if all(times) else None


def wrong(fields: Mapping[str, Any]) -> int:
    """Blocks and records whose bytes were wrong, or that were missing."""
    return int(fields["wrong_blocks"] + fields["wrong_records"] + fields["missing_records"])


def show(fields: Mapping[str, Any], output: Output) -> None:
    title = f"the GPU's transfers while the disk works, {fields['model']}, {fields['blocks']} blocks; GB/s"
    if not fields["simulated"]:
        columns = ("GPU", "moves", "disk idle", "disk busy", "busy / idle", "product", "disk")
        output.table(title, columns, [_line(each) for each in fields["records"]], left=("moves",))
        output.line("")
        output.line("product: time of a product while the disk works over its time while it does not")
    output.line("")
    compared = f"{fields['verified_blocks']:,} blocks of transfers and {fields['verified_records']:,} records compared"
    missing = f", {fields['missing_records']} missing" if fields["missing_records"] else ""
    note = f"; {SIMULATED_NOTE}" if fields["simulated"] else ""
    output.line(f"{compared}, {fields['wrong_blocks'] + fields['wrong_records']} wrong{missing}{note}")


def _line(each: Mapping[str, Any]) -> tuple[str, ...]:
    names = ("idle_gb_per_s", "busy_gb_per_s", "ratio", "product_ratio", "disk_gb_per_s")
    digits = (1, 1, 2, 2, 1)
    figures = [fixed(each[name], count) for name, count in zip(names, digits, strict=True)]
    return (each["situation"], each["moves"], *figures)
