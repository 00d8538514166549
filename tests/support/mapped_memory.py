"""Planes in memory that no DeviceBuffer stands for: filled, transferred by every copier, and compared byte by byte."""

from __future__ import annotations

from typing import Any

import numpy as np
from helpers import Bytes, copiers_in

import kvoffload
from kvoffload import NO_WAIT, KVLayout, Plane
from kvoffload.driver import address_of
from kvoffload.testing import naive_transfer


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
    """Store and load by each copier of an engine, and by its choice; after each, every byte is compared with what a
    loop over blocks and planes does.

    Args:
        device: that has the memory.
        planes: of the engine's one group.
        ranges: (address, bytes) of all memory that the planes lie in; no copy may cross from one to another.
        folds: what the engine's text must say of the planes.
        options: of the engine.
    """
    layout = KVLayout([planes])
    with kvoffload.OffloadEngine(layout, device=device, num_slots=6, **options) as engine:
        assert folds in repr(engine), repr(engine)
        chance = np.random.default_rng(1)
        for number, copier in enumerate([*copiers_in(engine), None]):
            for index, (address, nbytes) in enumerate(ranges):
                scramble_at(device, address, nbytes, 100 * number + index)
            engine.slots[:] = chance.integers(0, 256, engine.slots.shape, dtype=np.uint8)
            pool = engine.slots.copy()
            memory = {address: read(device, address, nbytes) for address, nbytes in ranges}
            blocks = chance.permutation(planes[0].num_blocks)[:4].tolist()
            for direction, ids, slots in (("store", blocks, [5, 0, 3, 1]), ("load", blocks[::-1], [2, 4, 1, 0])):
                transfer = engine.store if direction == "store" else engine.load
                lists = (ids, slots) if direction == "store" else (slots, ids)
                transfer(*lists, after=NO_WAIT, copier=copier).wait(30)
                naive_transfer(layout, direction, ids, slots, memory=memory, pool=pool)
                assert (engine.slots == pool).all(), (copier, direction)
                for address, nbytes in ranges:
                    assert (read(device, address, nbytes) == memory[address]).all(), (copier, direction)
