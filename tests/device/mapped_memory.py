"""Planes in memory that no DeviceBuffer stands for: mapped on a GPU, copied by every copier, compared byte by byte."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
from cuda.bindings import driver as cuda
from helpers import Bytes, copiers_in

import kvoffload
from kvoffload import NO_WAIT, Direction, KVLayout, Plane
from kvoffload.driver import address_of
from kvoffload.testing import naive_transfer

_PART_BYTES = 2 << 20


def planes_at(addresses: list[int], *, block_bytes: int, num_blocks: int) -> list[Plane]:
    return [Plane(address, block_bytes=block_bytes, num_blocks=num_blocks) for address in addresses]


def read(device: kvoffload.Device, address: int, nbytes: int) -> Bytes:
    content = np.empty(nbytes, np.uint8)
    with device.current():
        device.driver.copy_to_host(address_of(content), address, nbytes)
    return content


def scramble_at(device: kvoffload.Device, address: int, nbytes: int, seed: int) -> None:
    content = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    with device.current():
        device.driver.copy_to_device(address, address_of(content), nbytes)


def check_every_copier(
    device: kvoffload.Device, planes: list[Plane], ranges: list[tuple[int, int]], *, folds: str, **options: Any
) -> None:
    """Store and load all blocks by each copier of an engine, and by its choice; after each, every byte is compared with
    what a loop over blocks and planes does.

    Args:
        device: that has the memory.
        planes: of the engine's one group.
        ranges: (address, bytes) of all memory that the planes lie in.
        folds: what the engine's text must say of the planes.
        options: of the engine.
    """
    layout, num_blocks = KVLayout([planes]), planes[0].num_blocks
    chance = np.random.default_rng(1)
    with kvoffload.OffloadEngine(layout, device=device, num_slots=num_blocks, **options) as engine:
        assert folds in repr(engine), repr(engine)
        for number, copier in enumerate([*copiers_in(engine), None]):
            for index, (address, nbytes) in enumerate(ranges):
                scramble_at(device, address, nbytes, 100 * number + index)
            pool = engine.slots.copy()
            memory = {address: read(device, address, nbytes) for address, nbytes in ranges}
            for direction in Direction:
                blocks, slots = chance.permutation(num_blocks).tolist(), chance.permutation(num_blocks).tolist()
                if direction == Direction.STORE:
                    engine.store(blocks, slots, after=NO_WAIT, copier=copier).wait(30)
                else:
                    engine.load(slots, blocks, after=NO_WAIT, copier=copier).wait(30)
                naive_transfer(layout, direction, blocks=blocks, slots=slots, memory=memory, pool=pool)
                assert (engine.slots == pool).all(), (copier, direction)
                for address, nbytes in ranges:
                    assert (read(device, address, nbytes) == memory[address]).all(), (copier, direction)


class Mapping:
    """Virtual memory of a GPU: a reservation, to whose parts handles are mapped. A context must be current.

    Args:
        device: whose memory is mapped.
        parts: how many, of 2 MiB each.
        without: parts that nothing is mapped to.
        address: where the reservation should begin; 0 for anywhere.
    """

    def __init__(
        self, device: kvoffload.Device, parts: int, *, without: tuple[int, ...] = (), address: int = 0
    ) -> None:
        self._properties = cuda.CUmemAllocationProp()
        self._properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.id = device.index
        least = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        granularity = int(_ok(cuda.cuMemGetAllocationGranularity(self._properties, least)))
        self.part_bytes = -(-_PART_BYTES // granularity) * granularity
        self.nbytes = parts * self.part_bytes
        with ExitStack() as undo:
            self.address = int(_ok(cuda.cuMemAddressReserve(self.nbytes, 0, address, 0)))
            undo.callback(_call, cuda.cuMemAddressFree, self.address, self.nbytes)
            for part in range(parts):
                if part not in without:
                    self._map(self.part(part), undo)
            self._undo = undo.pop_all()

    def _map(self, address: int, undo: ExitStack) -> None:
        handle = _ok(cuda.cuMemCreate(self.part_bytes, self._properties, 0))
        undo.callback(_call, cuda.cuMemRelease, handle)
        _call(cuda.cuMemMap, address, self.part_bytes, 0, handle, 0)
        undo.callback(_call, cuda.cuMemUnmap, address, self.part_bytes)
        access = cuda.CUmemAccessDesc()
        access.location = self._properties.location
        access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        _call(cuda.cuMemSetAccess, address, self.part_bytes, [access], 1)

    def part(self, index: int) -> int:
        """The address of a part."""
        return self.address + index * self.part_bytes

    def close(self) -> None:
        """Unmap and free all of it. No copy may use it any more."""
        self._undo.close()


def _ok(result: tuple[Any, ...]) -> Any:
    status, *values = result
    assert int(status) == 0, status
    return values[0] if values else None


def _call(function: Callable[..., tuple[Any, ...]], *arguments: Any) -> None:
    _ok(function(*arguments))
