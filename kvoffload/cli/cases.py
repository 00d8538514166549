"""What `bench transfer` moves: planes, a pool, and one set of addresses that every way of copying is given.

Blocks are random and never adjacent beyond the runs of a row, slots are random; planes of 16 MiB lie in one slab.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from kvoffload.device import Device
from kvoffload.driver import binding_types
from kvoffload.engine import OffloadEngine
from kvoffload.errors import DriverError
from kvoffload.layout import Int64Array, KVLayout
from kvoffload.memory import PinnedMemory, UInt8Array, address_of
from kvoffload.models import ModelGeometry
from kvoffload.plan import Direction
from kvoffload.streams import NO_WAIT

_POISON = 0xA5
_SHIFT_BYTES = 65_544  # between the windows of two planes: not a multiple of any block size, so planes differ
_MAX_SPARE_POOL_BYTES = 512 << 20


class Size(NamedTuple):
    """How big the cases are.

    Attributes:
        payload_bytes: of a transfer, about.
        plane_bytes: from one plane to the next, about.
        big_bytes: of the big copy.
        scale: of block bytes.
        descriptors: of the flat batches that are compared at one number of descriptors.
    """

    payload_bytes: int
    plane_bytes: int
    big_bytes: int
    scale: float
    descriptors: int


FULL = Size(64 << 20, 16 << 20, 1 << 30, 1.0, 4096)
SMALL = Size(256 << 10, 64 << 10, 1 << 20, 1 / 64, 256)  # for the simulated device


class GpuTimer:
    """A stream of its own, and what is queued on it timed by two events. Free it with `close`."""

    def __init__(self, device: Device) -> None:
        self._device, self._driver = device, device.driver
        with device.current():
            self.stream = self._driver.stream_create(0)
            self._start = self._driver.event_create(timing=True)
            self._end = self._driver.event_create(timing=True)

    def seconds(self, submit: Callable[[], object]) -> float:
        """Seconds on the GPU clock from before to after what `submit` queues on an idle stream; waits for it."""
        with self._device.current():
            self._driver.event_record(self._start, self.stream)
            submit()
            self._driver.event_record(self._end, self.stream)
            while not self._driver.event_query(self._end):
                pass
            return self._driver.event_seconds(self._start, self._end)

    def close(self) -> None:
        with self._device.current():
            self._driver.stream_destroy(self.stream)
            self._driver.event_destroy(self._start)
            self._driver.event_destroy(self._end)


class BigCopy:
    """One contiguous pinned copy: what the link gives. Close it before the device."""

    def __init__(self, device: Device, timer: GpuTimer, nbytes: int, seed: int) -> None:
        self._device, self._timer, self.nbytes = device, timer, nbytes
        with device.current():
            self._host = PinnedMemory(device.driver, nbytes)
        self._gpu = device.allocate(nbytes)
        self._tile = np.random.default_rng(seed).integers(0, 256, min(nbytes, 32 << 20), dtype=np.uint8)

    def seconds(self, direction: Direction) -> float:
        host, gpu = self._host.address, self._gpu.address
        target, source = (host, gpu) if direction is Direction.STORE else (gpu, host)
        copy = self._device.driver.copy
        return self._timer.seconds(lambda: copy(target, source, self.nbytes, self._timer.stream))

    def wrong(self) -> int:
        """Bytes that differ after a copy there and back over poison."""
        tiles = self._host.array.reshape(-1, len(self._tile))
        tiles[:] = self._tile
        fill = self._device.driver.fill
        self._timer.seconds(lambda: fill(self._gpu.address, _POISON, self.nbytes, self._timer.stream))
        self.seconds(Direction.LOAD)
        tiles[:] = _POISON
        self.seconds(Direction.STORE)
        return sum(int(np.count_nonzero(tile != self._tile)) for tile in tiles)

    def close(self) -> None:
        self._gpu.close()
        with self._device.current():
            self._host.release()


class Bed:
    """Planes of one geometry on the device, slots in a pool, and which blocks go where. A context manager.

    Args:
        geometry: of a model with several groups, one group's planes: a transfer is of one block table.
        row_blocks: adjacent device blocks in a slot.
        count: blocks of a transfer, or None for about `size.payload_bytes`.

    Attributes:
        blocks: int64; runs of `row_blocks` adjacent ids, no two runs adjacent.
        slots: int64; one per run.
        pitch: bytes from plane to plane.
        row_bytes: of one row of a strided operation.
    """

    def __init__(
        self,
        device: Device,
        timer: GpuTimer,
        geometry: ModelGeometry,
        *,
        row_blocks: int,
        count: int | None,
        size: Size,
        seed: int,
    ) -> None:
        self._device, self._timer = device, timer
        self.model, self.row_blocks = geometry.name, row_blocks
        planes, block_bytes = geometry.planes_per_group[0], geometry.block_bytes
        wanted = count or max(1, round(size.payload_bytes / (planes * block_bytes)))
        runs = -(-wanted // row_blocks)
        num_blocks = row_blocks * max(size.plane_bytes // (block_bytes * row_blocks), 2 * runs)
        self._planes = device.allocate_planes(planes, block_bytes=block_bytes, num_blocks=num_blocks)
        self.layout = KVLayout([self._planes], blocks_per_slot=row_blocks)
        spare = min(4 * runs, _MAX_SPARE_POOL_BYTES // self.layout.slot_bytes)
        self.engine = OffloadEngine(self.layout, device=device, num_slots=max(runs, spare))
        self._random = np.random.default_rng(seed)
        self._choose(runs, num_blocks // row_blocks)
        self.pitch = self._planes[1].address - self._planes[0].address
        self.row_bytes = row_blocks * block_bytes
        self.nbytes = len(self.blocks) * planes * block_bytes
        self._content = self._random.integers(
            0, 256, self._planes[0].span_bytes + planes * _SHIFT_BYTES, dtype=np.uint8
        )
        self._plane_buffer = np.empty(self._planes[0].span_bytes, dtype=np.uint8)

    def _choose(self, runs: int, available: int) -> None:
        starts = self._random.permutation(np.arange(0, available - available % 2, 2))[:runs] * self.row_blocks
        self.starts: Int64Array = starts.astype(np.int64)
        self.blocks: Int64Array = (self.starts[:, np.newaxis] + np.arange(self.row_blocks)).reshape(-1)
        self.slots: Int64Array = self._random.permutation(self.engine.num_slots)[:runs].astype(np.int64)

    @property
    def plane_count(self) -> int:
        return len(self._planes)

    @property
    def block_bytes(self) -> int:
        return self._planes[0].block_bytes

    # ways of copying, each returning seconds on the GPU clock -----------------------------------------------------

    def engine_seconds(self, direction: Direction, copier: str) -> float:
        if direction is Direction.STORE:
            job = self.engine.store(self.blocks, self.slots, after=NO_WAIT, copier=copier)
        else:
            job = self.engine.load(self.slots, self.blocks, after=NO_WAIT, copier=copier)
        while not job.done:  # wait() sleeps between looks, which a wall clock around this would see
            pass
        return job.wait().seconds

    def bare_strided(self, direction: Direction) -> Callable[[], float]:
        """The same operations, built here and now from Python attributes, in one bare driver call."""
        device = self._planes[0].address + self.starts * self.block_bytes
        host = address_of(self.engine.slots) + self.slots * self.layout.slot_bytes
        ends = ((device, self.pitch), (host, self.row_bytes))
        source, target = ends if direction is Direction.STORE else ends[::-1]
        operations = [
            _operation((int(s), source[1]), (int(t), target[1]), self.row_bytes, self.plane_count)
            for s, t in zip(source[0], target[0], strict=True)
        ]
        call = self._device.driver.api.cuMemcpy3DBatchAsync
        stream = self._timer.stream
        return lambda: self._timer.seconds(lambda: _check(call(len(operations), operations, 0, stream)))

    def bare_flat(self, direction: Direction) -> Callable[[], float]:
        """The same rows, one descriptor each, in one bare driver call on an idle stream."""
        device, host = self.row_addresses()
        source, target = (device, host) if direction is Direction.STORE else (host, device)
        sources, targets = (_pointers(addresses) for addresses in (source, target))
        sizes, attributes = [self.row_bytes] * len(sources), _stream_order()
        call, stream = self._device.driver.api.cuMemcpyBatchAsync, self._timer.stream

        def submit() -> None:
            _check(call(targets, sources, sizes, len(sizes), [attributes], [0], 1, stream))

        return lambda: self._timer.seconds(submit)

    def row_addresses(self) -> tuple[Any, Any]:
        """Device and host address of every row, uint64, slot by slot and plane by plane."""
        plane = np.arange(self.plane_count)
        device = self._planes[0].address + self.starts[:, np.newaxis] * self.block_bytes + plane * self.pitch
        host = address_of(self.engine.slots) + self.slots[:, np.newaxis] * self.layout.slot_bytes
        return device.reshape(-1).astype(np.uint64), (host + plane * self.row_bytes).reshape(-1).astype(np.uint64)

    # bytes --------------------------------------------------------------------------------------------------------

    def prepare(self, direction: Direction) -> None:
        """Give the sources of a direction their bytes."""
        for index, plane in enumerate(self._planes):
            if direction is Direction.STORE:
                with self._device.current():
                    source = self._window(index)
                    self._device.driver.copy_to_device(plane.address, address_of(source), source.nbytes)
            else:
                self._rows(index)[self.slots] = self._expected(index)

    def poison(self, direction: Direction) -> None:
        """Overwrite the targets of a direction."""
        if direction is Direction.STORE:
            self.engine.slots[self.slots] = _POISON
            return
        slab = self._planes[0].owner
        address, nbytes = slab.address, slab.nbytes  # type: ignore[attr-defined]
        fill, stream = self._device.driver.fill, self._timer.stream
        self._timer.seconds(lambda: fill(address, _POISON, nbytes, stream))

    def wrong(self, direction: Direction) -> int:
        """How many of the rows that a transfer has moved do not hold the bytes they must."""
        found = self._rows if direction is Direction.STORE else self._read_plane
        picked = self.slots if direction is Direction.STORE else self.starts // self.row_blocks
        count = 0
        for index in range(self.plane_count):
            count += int((found(index)[picked] != self._expected(index)).any(axis=1).sum())
        return count

    def _window(self, index: int) -> UInt8Array:
        begin = index * _SHIFT_BYTES
        return self._content[begin : begin + self._planes[index].span_bytes]

    def _expected(self, index: int) -> UInt8Array:
        """What the rows of a plane hold, in the order of `slots`: uint8, (runs, row_bytes)."""
        rows: UInt8Array = self._window(index).reshape(-1, self.row_bytes)[self.starts // self.row_blocks]
        return rows

    def _rows(self, index: int) -> UInt8Array:
        begin = index * self.row_bytes
        return self.engine.slots[:, begin : begin + self.row_bytes]

    def _read_plane(self, index: int) -> UInt8Array:
        plane = self._planes[index]
        with self._device.current():
            self._device.driver.copy_to_host(address_of(self._plane_buffer), plane.address, plane.span_bytes)
        return self._plane_buffer.reshape(-1, self.row_bytes)

    def close(self) -> None:
        """Close the engine and free the planes."""
        self.engine.close()
        self._planes[0].owner.close()  # type: ignore[attr-defined]

    def __enter__(self) -> Bed:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


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


def _pointers(addresses: Iterable[int]) -> list[Any]:
    pointer = binding_types().CUdeviceptr
    return [pointer(int(address)) for address in addresses]


def _stream_order() -> Any:
    driver = binding_types()
    attributes = driver.CUmemcpyAttributes()
    attributes.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    return attributes


def _check(result: tuple[Any, ...]) -> None:
    if int(result[0]):
        raise DriverError("a bare batch call", result[0].name, int(result[0]))
