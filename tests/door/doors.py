"""A rig for tests of `open_cache`: arrays on a simulated device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from helpers import simulated

import kvoffload
from kvoffload import DeviceArray

SHAPE = (2, 16, 4, 8)  # planes, blocks, tokens, head
AXES = ("planes", "blocks", "tokens", "head")
BLOCKS = SHAPE[1]
KEY_BYTES = 4096  # of 2 planes x 2 arrays x 32 elements, rounded up


def tokens(number: int, count: int = 4) -> list[int]:
    """Tokens of `count` blocks, which begin as those of no other number."""
    return [1000 * number + token for token in range(4 * count)]


class Host(NamedTuple):
    """What a host has: a device and a tree of arrays, whose blocks it fills and reads."""

    device: kvoffload.Device
    arrays: dict[str, list[DeviceArray]]

    @property
    def each(self) -> list[DeviceArray]:
        return [array for name in sorted(self.arrays) for array in self.arrays[name]]

    def write(self, block: int, number: int) -> None:
        for salt, array in enumerate(self.each):
            content = self.read(array)
            content[:, block] = (17 * number + salt) % 251
            array.buffer.copy_from(content)

    def holds(self, block: int, number: int) -> bool:
        return all(
            (self.read(array)[:, block] == (17 * number + salt) % 251).all() for salt, array in enumerate(self.each)
        )

    def read(self, array: DeviceArray) -> Any:
        return array.buffer.to_numpy().reshape(SHAPE)


@contextmanager
def host(seed: int = 0) -> Iterator[Host]:
    with simulated(seed, "no-batch") as device:
        yield Host(device, {"k": [device.empty(SHAPE, "uint8")], "v": [device.empty(SHAPE, "uint8")]})
