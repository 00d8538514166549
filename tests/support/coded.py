"""Blocks of bf16 values of every kind, and engines whose slots hold them coded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from helpers import simulated

import kvoffload
from kvoffload import KVLayout, OffloadEngine, Plane
from kvoffload.driver import address_of
from kvoffload.layout.coding import Coding

Values = npt.NDArray[np.uint16]
OF_LAYOUT: dict[str, Any] = {"dtype": "bfloat16", "tokens_per_block": 16, "block_axes": ("tokens", "dim")}
BLOCK_BYTES = 512  # the least that can be coded: a chunk of 256 values, 7 of which may be escapes


def normal(random: np.random.Generator, count: int, scale: float = 1.0) -> Values:
    return bf16(random.standard_normal(count) * scale)


def bf16(numbers: npt.NDArray[Any]) -> Values:
    return (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def kinds(random: np.random.Generator, count: int, escapes: int) -> dict[str, Values]:
    """A chunk of `count` values of each kind. Those whose names begin with "unfit" do not fit."""
    anything = random.integers(0, 1 << 16, count).astype(np.uint16)
    usual = normal(random, count)
    levels = np.zeros(count, np.uint16)  # too far from each other for any window; else zeros, which fit into all
    places = random.permutation(count)[: 9 * (escapes + 1) // 8].reshape(9, -1)
    levels[places] = anything[places] & np.uint16(0x807F) | np.arange(250, 129, -15, dtype=np.uint16)[:, None] << 7
    found = {
        "normal": usual,
        "unfit: one too many in each window": levels,
        "large": normal(random, count, 1e30),
        "tiny": normal(random, count, 1e-36),
        "zeros": np.zeros(count, np.uint16),
        "negative zeros": np.full(count, 0x8000, np.uint16),
        "both zeros": anything & np.uint16(0x8000),
        "denormals": anything & np.uint16(0x807F),
        "one exponent": anything & np.uint16(0x807F) | np.uint16(0x3F80),
        "infinities": anything & np.uint16(0x8000) | np.uint16(0x7F80),
        "NaN": anything | np.uint16(0x7FC0),
        "partly filled": np.where(np.arange(count) < count // 3, usual, 0).astype(np.uint16),
        "a ramp": np.arange(count, dtype=np.uint16),
        "unfit: anything": anything,
        "unfit: two windows": np.where(np.arange(count) % 2, usual, normal(random, count, 1e20)).astype(np.uint16),
    }
    for number in (escapes, escapes + 1):  # at the edge of what fits; all in the even lanes, or in both
        places = random.choice(count // 2, number, replace=False) * 2
        places[::2] += int(random.integers(0, 2))
        few = usual & np.uint16(0x80FF) | np.uint16(0x3F00)  # exponents 126 and 127
        few[places] = anything[places] & np.uint16(0x807F) | np.uint16(0x0080)
        found[f"{'unfit: ' if number > escapes else ''}{number} small ones"] = few
    large = usual.copy()
    large[random.choice(count, escapes // 2, replace=False)] = 0x7F80  # the window is below them
    found["a few infinities"] = large
    return found


def chunks(seed: int, count: int, coding: Coding) -> tuple[Values, npt.NDArray[np.bool_]]:
    """So many chunks, uint16, (count, values): kinds in turn, and whether each fits by its name."""
    random = np.random.default_rng(seed)
    found: list[tuple[str, Values]] = []
    while len(found) < count:
        found += kinds(random, coding.values, coding.most_escapes).items()
    names, values = zip(*found[:count], strict=True)
    return np.stack(values), np.array([not name.startswith("unfit") for name in names])


def write_blocks(device: kvoffload.Device, planes: Sequence[Plane], blocks: Values) -> None:
    """Write `blocks`, uint16, (blocks, planes, values)."""
    with device.current():
        for block, of_planes in enumerate(blocks):
            for plane, values in zip(planes, of_planes, strict=True):
                values = np.ascontiguousarray(values)
                device.driver.copy_to_device(
                    plane.address + block * plane.block_stride, address_of(values), values.nbytes
                )


def read_blocks(device: kvoffload.Device, planes: Sequence[Plane], blocks: Sequence[int]) -> Values:
    """uint16, (blocks, planes, values)."""
    found = np.empty((len(blocks), len(planes), planes[0].block_bytes // 2), np.uint16)
    with device.current():
        for index, block in enumerate(blocks):
            for number, plane in enumerate(planes):
                part = found[index, number]
                device.driver.copy_to_host(
                    address_of(part), plane.address + block * plane.block_stride, plane.block_bytes
                )
    return found


@contextmanager
def coded(
    num_blocks: int = 8, planes: int = 2, seed: int = 0, block_bytes: int = BLOCK_BYTES, **options: Any
) -> Iterator[tuple[OffloadEngine, list[Plane], Values]]:
    """An engine over blocks of normal values, its planes and the values, (num_blocks, planes, values). Slots are
    poisoned.

    Args:
        options: of the engine, and `blocks_per_slot`.
    """
    factor = options.pop("blocks_per_slot", 1)
    values = normal(np.random.default_rng(seed), num_blocks * planes * block_bytes // 2)
    with simulated(seed) as device:
        of = device.allocate_planes(planes, block_bytes=block_bytes, num_blocks=num_blocks)
        blocks = values.reshape(num_blocks, planes, -1)
        write_blocks(device, of, blocks)
        layout = KVLayout([of], blocks_per_slot=factor, codec="bf16-12", **OF_LAYOUT)
        options = {"num_slots": num_blocks, **options}
        with OffloadEngine(layout, device=device, **options) as engine:
            engine.slots[:] = 0xB7
            yield engine, of, blocks.copy()


def unfit(values: Values) -> Values:
    """Values that fit nowhere, of the same shape."""
    return np.random.default_rng(int(values.size)).integers(0, 1 << 16, values.shape).astype(np.uint16)
