"""Block-major caches, `(blocks, planes, ...)`: with every copier the bytes of a naive loop, and one copy a block."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from counting import copies_by_call
from helpers import COPY_ENGINE_ONLY, STAGING
from strategies import slab_of

import kvoffload
from kvoffload import NO_WAIT, Direction, KVLayout, OffloadEngine, Plane
from kvoffload.layout.planes import SlotOrder
from kvoffload.testing import Mirror, poison, scramble
from kvoffload.tuning import COPIERS, CopierName

PLANES, BLOCK_BYTES, BLOCKS, SLOTS = 5, 48, 30, 6
FACTORS = pytest.mark.parametrize("factor", [1, 3, 8])


def block_major(device: kvoffload.Device) -> list[Plane]:
    return device.allocate_blocks(BLOCKS, planes=PLANES, block_bytes=BLOCK_BYTES)


def plane_major(device: kvoffload.Device) -> list[Plane]:
    return device.allocate_planes(PLANES, block_bytes=BLOCK_BYTES, num_blocks=BLOCKS)


@FACTORS
@pytest.mark.parametrize("copier", COPIERS)
@pytest.mark.parametrize(
    ("make", "slot_order"),
    [
        (block_major, None),
        (block_major, "plane-major"),
        (plane_major, "block-major"),
        (plane_major, None),
    ],
    ids=["block-major", "block-major in plane-major slots", "plane-major in block-major slots", "plane-major"],
)
def test_the_bytes_of_a_naive_loop_and_no_others(
    device: kvoffload.Device,
    make: Callable[[kvoffload.Device], list[Plane]],
    slot_order: SlotOrder | None,
    copier: CopierName,
    factor: int,
    seed: int,
) -> None:
    """Adjacent blocks and single ones, from several sub-blocks on; loads whole, in parts, and with repeated slots."""
    chance = np.random.default_rng(seed)
    planes = make(device)
    slab = slab_of(planes)
    scramble(slab, seed)
    layout = KVLayout([planes], blocks_per_slot=factor, slot_order=slot_order)
    assert layout.groups[0].slot_order == (slot_order or ("block-major" if make is block_major else "plane-major"))
    if copier == "pack" and factor > 1 and layout.groups[0].slot_order == "plane-major":
        pytest.skip("it carries blocks that are one range of a slot")
    with OffloadEngine(layout, device=device, num_slots=SLOTS, staging_bytes=STAGING) as engine:
        poison(engine.slots)
        mirror = Mirror(engine, [slab])
        for first in {0, factor // 2, factor - 1}:
            count = min(SLOTS * factor - first, 17)
            blocks = chance.permutation(BLOCKS)[:count]
            blocks[: count // 2] = np.arange(count // 2) + chance.integers(
                BLOCKS - count // 2
            )  # a store may repeat them
            slots = chance.permutation(SLOTS)[: layout.slots_for(count, first_sub_block=first)]
            engine.store(blocks, slots, first_sub_block=first, after=NO_WAIT, copier=copier)
            mirror.expect(Direction.STORE, blocks.tolist(), slots.tolist(), first_sub_block=first)
            targets = np.roll(chance.permutation(BLOCKS)[:count], 1)
            targets[: count // 3].sort()
            parts = None if copier == "pack" else [[1, 2], [0, 3, 4]]
            engine.load(slots, targets, first_sub_block=first, after=NO_WAIT, copier=copier, parts=parts)
            mirror.expect(Direction.LOAD, targets.tolist(), slots.tolist(), first_sub_block=first)
            again = np.full_like(slots, slots[0])
            engine.load(again, np.sort(targets), first_sub_block=first, after=NO_WAIT, copier=copier)
            mirror.expect(Direction.LOAD, np.sort(targets).tolist(), again.tolist(), first_sub_block=first)
        engine.drain(timeout=60)
        assert all(result.error is None for result in engine.poll())
        mirror.check()


@FACTORS
@pytest.mark.parametrize("copier", ["strided", "batch", "loop"])
def test_adjacent_blocks_of_a_slot_are_one_copy(device: kvoffload.Device, copier: CopierName, factor: int) -> None:
    layout = KVLayout([block_major(device)], blocks_per_slot=factor)
    with OffloadEngine(layout, device=device, num_slots=SLOTS, **COPY_ENGINE_ONLY) as engine:
        blocks = np.arange(2 * factor) + 3
        for each, copies in ((blocks, 2), (blocks[::-1], 2 * factor)):
            device.simulator.faults.calls = []
            engine.store(each, [4, 1], after=NO_WAIT, copier=copier).wait(10)
            assert sum(count for _, count, _ in copies_by_call(device.simulator)) == copies


@FACTORS
def test_what_one_order_has_stored_another_layout_of_that_order_loads(device: kvoffload.Device, factor: int) -> None:
    """Two caches of one model with equal fingerprints: the bytes in a slot mean the same."""
    description = {"dtype": "uint8", "tokens_per_block": 1, "block_axes": ("tokens", "dim"), "blocks_per_slot": factor}
    first, second = block_major(device), plane_major(device)
    content = scramble(slab_of(first), 3).reshape(BLOCKS, PLANES, BLOCK_BYTES)
    order: SlotOrder
    for order in ("block-major", "plane-major"):
        layouts = [KVLayout([planes], slot_order=order, **description) for planes in (first, second)]  # type: ignore[arg-type]
        assert layouts[0].fingerprint == layouts[1].fingerprint
        scramble(slab_of(second), 4)
        with (
            OffloadEngine(layouts[0], device=device, num_slots=2) as giver,
            OffloadEngine(layouts[1], device=device, num_slots=2) as taker,
        ):
            blocks = np.arange(2 * factor)
            giver.store(blocks, [0, 1], after=NO_WAIT).wait(10)
            taker.slots[:] = giver.slots
            taker.load([0, 1], blocks + 5, after=NO_WAIT).wait(10)
        taken, pitch = slab_of(second).to_numpy(), second[1].address - second[0].address
        for plane in range(PLANES):
            found = taken[plane * pitch :][: BLOCKS * BLOCK_BYTES].reshape(BLOCKS, BLOCK_BYTES)
            assert (found[blocks + 5] == content[blocks, plane]).all()
