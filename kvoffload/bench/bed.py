"""Planes, a pool, and one set of addresses that every way of copying is given.

Blocks are random and never adjacent beyond the runs of a row; slots are random.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any, NamedTuple

import numpy as np

from kvoffload.bench.cases import POISON, Lab
from kvoffload.copiers import NAMES
from kvoffload.copiers.selection import choose
from kvoffload.device.pinned import PAGE_BYTES, PinnedMemory
from kvoffload.device.streams import NO_WAIT
from kvoffload.driver import FlatTable, SourceOrder, address_of
from kvoffload.engine.engine import OffloadEngine
from kvoffload.engine.job import Job
from kvoffload.internal.models import ModelGeometry
from kvoffload.internal.types import UInt8Array, UInt64Array
from kvoffload.layout.layout import Int64Array, KVLayout, Plane
from kvoffload.planning.transfer_plan import Direction
from kvoffload.tuning import CopyMethod, Shape

_MAX_SPARE_POOL_BYTES = 512 << 20
_TWIN_RUNS = 8  # enough for both parts of a split
_FLAT_COPIES = 4096  # in a call; one with 51,828 has crashed a driver


class Placement(enum.StrEnum):
    """Where the planes of a group lie."""

    FOLDED = "folded"  # in one slab: a strided operation carries a block of all of them
    SCATTERED = "scattered"  # each in a driver allocation of its own: nothing folds
    INTERLEAVED = "interleaved"  # (blocks, planes, ...): a block of all of them is one range


class Part(NamedTuple):
    """What a transfer moves of one group.

    Attributes:
        planes: the group's.
        starts: int64; the first block of each run of adjacent blocks; no two runs are adjacent.
        blocks: int64; all of them.
        slots: int64; one per run.
    """

    planes: Sequence[Plane]
    starts: Int64Array
    blocks: Int64Array
    slots: Int64Array


class Bed:
    """A context manager.

    Args:
        lab: where.
        geometry: of a model.
        placement: of the planes.
        row_blocks: adjacent device blocks in a slot.
        count: blocks of a transfer, over all groups, or None for `size.payload_bytes`; at least one run a group.
        plane_bytes: of a plane, about; None for `size.plane_bytes`.
        options: of the engine.

    Attributes:
        parts: one per group; `take` shortens them.
        rows: of a run, each `row_bytes` bytes: planes, or one where they interleave.
    """

    def __init__(
        self,
        lab: Lab,
        geometry: ModelGeometry,
        *,
        placement: Placement = Placement.FOLDED,
        row_blocks: int = 1,
        count: int | None = None,
        plane_bytes: int | None = None,
        **options: Any,
    ) -> None:
        if placement is Placement.INTERLEAVED and row_blocks != 1:
            raise ValueError(f"interleaved planes are one range a block with row_blocks=1 only, got {row_blocks}")
        self.lab, self.model, self.placement, self.row_blocks = lab, geometry.name, placement, row_blocks
        self._geometry, self._options = geometry, options
        self.plane_count, self.block_bytes = geometry.planes_per_group[0], geometry.block_bytes
        interleaved = placement is Placement.INTERLEAVED
        self.rows = 1 if interleaved else self.plane_count
        self.row_bytes = row_blocks * self.block_bytes * (self.plane_count if interleaved else 1)
        groups = len(geometry.groups)
        wanted = count or -(-lab.size.payload_bytes // (self.plane_count * self.block_bytes))
        runs = -(-wanted // (groups * row_blocks))
        self._random = np.random.default_rng(lab.seed)
        with ExitStack() as stack:
            available = max((plane_bytes or lab.size.plane_bytes) // (self.block_bytes * row_blocks), 2 * runs)
            sets = [self._planes(stack, available * row_blocks) for _ in range(groups)]
            self.layout = KVLayout(sets, blocks_per_slot=row_blocks)
            spare = min(4 * runs * groups, _MAX_SPARE_POOL_BYTES // self.layout.slot_bytes)
            self.engine = stack.enter_context(
                OffloadEngine(self.layout, device=lab.device, num_slots=max(runs * groups, spare), **options)
            )
            self._bytes = stack.enter_context(closing(_Bytes(lab, groups, runs, self.rows * self.row_bytes)))
            self._fill(available, runs, sets)
            self._stack = stack.pop_all()
        self.take(runs)

    def twin(self) -> Bed:
        """A small bed like this one, for transfers that warm up caches."""
        count = _TWIN_RUNS * len(self._geometry.groups) * self.row_blocks
        return Bed(
            self.lab,
            self._geometry,
            placement=self.placement,
            row_blocks=self.row_blocks,
            count=count,
            plane_bytes=1,
            **self._options,
        )

    def _planes(self, stack: ExitStack, num_blocks: int) -> list[Plane]:
        """The planes of one group."""
        device, count, block_bytes = self.lab.device, self.plane_count, self.block_bytes
        if self.placement is Placement.SCATTERED:
            buffers = [stack.enter_context(device.allocate(num_blocks * block_bytes)) for _ in range(count)]
            return [Plane(each.address, block_bytes=block_bytes, num_blocks=num_blocks) for each in buffers]
        if self.placement is Placement.FOLDED:
            planes = device.allocate_planes(count, block_bytes=block_bytes, num_blocks=num_blocks)
            stack.enter_context(planes[0].owner)  # type: ignore[arg-type]
            return planes
        slab = stack.enter_context(device.allocate(num_blocks * count * block_bytes))
        addresses = range(slab.address, slab.address + count * block_bytes, block_bytes)
        stride = count * block_bytes
        return [Plane(each, block_bytes=block_bytes, num_blocks=num_blocks, block_stride=stride) for each in addresses]

    def _fill(self, available: int, runs: int, sets: list[list[Plane]]) -> None:
        slots = self._random.permutation(self.engine.num_slots).astype(np.int64)
        self._all = []
        for index, planes in enumerate(sets):
            places = self._random.permutation(np.arange(0, available - available % 2, 2))[:runs]
            starts = (places * self.row_blocks).astype(np.int64)
            blocks = (starts[:, np.newaxis] + np.arange(self.row_blocks)).reshape(-1)
            self._all.append(Part(planes, starts, blocks, slots[index * runs : (index + 1) * runs]))

    def take(self, runs: int) -> None:
        """Let transfers be of the first `runs` runs of each group."""
        self.parts = [
            Part(part.planes, part.starts[:runs], part.blocks[: runs * self.row_blocks], part.slots[:runs])
            for part in self._all
        ]
        device, host = (np.concatenate(each) for each in zip(*map(self._row_addresses, self.parts), strict=True))
        self._ends: dict[Direction, tuple[UInt64Array, UInt64Array]] = {
            Direction.STORE: (device, host),
            Direction.LOAD: (host, device),
        }
        self._bytes.take(runs)

    @property
    def runs(self) -> int:
        """Of all groups."""
        return sum(len(part.slots) for part in self.parts)

    @property
    def block_count(self) -> int:
        return self.runs * self.row_blocks

    @property
    def copies(self) -> int:
        """Flat copies in a transfer."""
        return self.runs * self.rows

    @property
    def nbytes(self) -> int:
        return self.copies * self.row_bytes

    @property
    def slot_address(self) -> int:
        return address_of(self.engine.slots)

    def ends(self, direction: Direction) -> tuple[UInt64Array, UInt64Array]:
        """Source and target address of every flat copy, run by run and plane by plane; each is of `row_bytes` bytes."""
        return self._ends[direction]

    def _row_addresses(self, part: Part) -> tuple[UInt64Array, UInt64Array]:
        stride = part.planes[0].block_stride
        rows = np.array([plane.address for plane in part.planes[: self.rows]], dtype=np.int64)
        device = part.starts[:, np.newaxis] * stride + rows
        host = self.slot_address + part.slots[:, np.newaxis] * self.layout.slot_bytes
        host = host + np.arange(self.rows) * self.row_bytes
        return device.reshape(-1).astype(np.uint64), host.reshape(-1).astype(np.uint64)

    # the engine ---------------------------------------------------------------------------------------------------

    @property
    def missing(self) -> Mapping[str, str | None]:
        """For every copier None, or why it cannot run here."""
        return dict.fromkeys(NAMES) | self.engine.missing_copiers

    def shape(self, direction: Direction) -> Shape:
        """Of the transfer of one group."""
        blocks, rows = len(self.parts[0].blocks), len(self.parts[0].slots) * self.rows
        operations = rows if self.placement is Placement.SCATTERED else len(self.parts[0].slots)
        return Shape(direction, blocks, blocks * self.plane_count, operations, rows, rows * self.row_bytes)

    def chosen_way(self, direction: Direction, prefer: str) -> CopyMethod:
        """What the engine chooses for a group."""
        engine = self.engine
        names = [name for name, reason in self.missing.items() if reason is None]
        return choose(self.shape(direction), names, engine.profile, prefer, engine.sm_limit).method

    def submit(
        self,
        direction: Direction,
        copier: str | CopyMethod | None = None,
        *,
        prefer: str = "overlap",
        after: Any = NO_WAIT,
    ) -> list[Job]:
        """A job per group."""
        self.engine.prefer = prefer
        return [
            self.engine.submit(direction, part.blocks, part.slots, group=group, after=after, copier=copier)
            for group, part in enumerate(self.parts)
        ]

    def seconds(self, jobs: Sequence[Job]) -> float:
        """Wait; the time of one job on the GPU clock, or the sum of several."""
        while not all(job.done for job in jobs):  # wait() sleeps between looks, which a wall clock would see
            pass
        return sum(job.wait().seconds for job in jobs)

    def transfer_seconds(
        self, direction: Direction, copier: str | CopyMethod | None, prefer: str, note: Callable[[Job], object]
    ) -> float:
        """One transfer on the GPU clock: its job's time, or of several groups that from the first call to the end.

        (So that holds some of the host's time, too: an engine times jobs, not what they make up together.)
        """
        if len(self.parts) == 1:
            jobs = self.submit(direction, copier, prefer=prefer)
            note(jobs[0])
            return self.seconds(jobs)
        timer = self.lab.timer

        def submit() -> None:
            jobs = self.submit(direction, copier, prefer=prefer, after=timer.stream)
            note(jobs[0])
            for job in jobs:
                job.order_before(timer.stream)

        seconds = timer.seconds(submit)
        self.engine.drain()
        self.engine.poll()
        return seconds

    # bytes --------------------------------------------------------------------------------------------------------

    def prepare(self, direction: Direction) -> None:
        """Give the sources of a direction their bytes."""
        if direction is Direction.STORE:
            self._bytes.upload(self.ends(Direction.STORE)[0], self.row_bytes)
        else:
            self.lab.in_threads(lambda pair: np.copyto(*pair), self._bytes.against(self._found_slots()))

    def poison(self, direction: Direction) -> None:
        """Overwrite the targets of a direction; the GPU does it, so that the CPU's caches hold nothing of them.

        Of what is to be stored, nothing stays in the GPU's cache.
        """
        if direction is Direction.STORE:
            self._bytes.spoil([address_of(slot) for slot in self._found_slots()])
            self.lab.flush()
            return
        driver, timer = self.lab.driver, self.lab.timer
        spans = [span for part in self.parts for span in self._spans(part.planes)]

        def submit() -> None:
            for address, nbytes in spans:
                driver.fill(address, POISON, nbytes, timer.stream)

        timer.seconds(submit)

    def _spans(self, planes: Sequence[Plane]) -> list[tuple[int, int]]:
        if self.placement is Placement.SCATTERED:
            return [(plane.address, plane.span_bytes) for plane in planes]
        return [(planes[0].address, planes[-1].end - planes[0].address)]

    def wrong(self, direction: Direction) -> int:
        """How many of the rows that a transfer has moved do not hold the bytes they must."""
        if direction is Direction.STORE:
            found = self._found_slots()
        else:
            found = self._bytes.download(self.ends(Direction.LOAD)[1], self.row_bytes)
        return self.lab.wrong_rows(self._bytes.against(found), self.row_bytes)

    def _found_slots(self) -> list[UInt8Array]:
        """The payload of each slot, in the order of the runs."""
        payload = self.rows * self.row_bytes
        return [self.engine.slots[slot, :payload] for part in self.parts for slot in part.slots]

    def expected(self) -> list[UInt8Array]:
        """What each run holds: its rows, plane by plane."""
        return self._bytes.expected

    def close(self) -> None:
        """Close the engine and free the planes."""
        self._stack.close()

    def __enter__(self) -> Bed:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Bytes:
    """What runs must hold, and a pinned copy of what planes do hold, moved by bare flat copies."""

    def __init__(self, lab: Lab, groups: int, runs: int, payload_bytes: int) -> None:
        self._lab = lab
        words = np.random.default_rng(lab.seed + 1).integers(0, 1 << 64, (groups, runs, payload_bytes // 8), np.uint64)
        self._right: UInt8Array = words.view(np.uint8)
        self._table = FlatTable(_FLAT_COPIES)
        fill, timer = lab.driver.fill, lab.timer
        with lab.device.current(), ExitStack() as undo:
            self._poison = undo.enter_context(lab.device.allocate(payload_bytes))
            self._pinned = PinnedMemory(lab.driver, -(-words.nbytes // PAGE_BYTES) * PAGE_BYTES)
            undo.callback(self._pinned.release)
            timer.seconds(lambda: fill(self._poison.address, POISON, payload_bytes, timer.stream))
            undo.pop_all()
        self._mirror = self._pinned.array[: words.nbytes].reshape(self._right.shape)

    def take(self, runs: int) -> None:
        self.expected = [run for group in self._right for run in group[:runs]]
        self._found = [run for group in self._mirror for run in group[:runs]]

    def against(self, found: Sequence[UInt8Array]) -> list[tuple[UInt8Array, UInt8Array]]:
        """Each run's bytes with what they must be."""
        return list(zip(found, self.expected, strict=True))

    def spoil(self, addresses: Sequence[int]) -> None:
        """Overwrite the payloads at host addresses, from the GPU."""
        copy, timer, nbytes = self._lab.driver.copy, self._lab.timer, self._poison.nbytes

        def submit() -> None:
            for address in addresses:
                copy(address, self._poison.address, nbytes, timer.stream)

        timer.seconds(submit)

    def upload(self, device: UInt64Array, row_bytes: int) -> None:
        self._lab.in_threads(lambda pair: np.copyto(*pair), self.against(self._found))
        self._copy(device, self._rows(row_bytes), row_bytes)

    def download(self, device: UInt64Array, row_bytes: int) -> list[UInt8Array]:
        self.spoil([address_of(run) for run in self._found])
        self._copy(self._rows(row_bytes), device, row_bytes)
        return self._found

    def _rows(self, row_bytes: int) -> UInt64Array:
        starts = np.array([address_of(run) for run in self._found], dtype=np.int64)[:, np.newaxis]
        return (starts + np.arange(0, self._poison.nbytes, row_bytes)).reshape(-1).astype(np.uint64)

    def _copy(self, targets: UInt64Array, sources: UInt64Array, row_bytes: int) -> None:
        self._lab.timer.seconds(lambda: self._submit(targets, sources, row_bytes))

    def _submit(self, targets: UInt64Array, sources: UInt64Array, row_bytes: int) -> None:
        driver, stream = self._lab.driver, self._lab.timer.stream
        if not self._lab.device.capabilities.flat_batch:
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
        with self._lab.device.current():
            self._pinned.release()
