"""Pools that grow on a GPU: every byte while pieces are registered, and closing in the middle."""

from __future__ import annotations

import numpy as np
import pytest
from growing import SECONDS, wait_for, wait_for_the_end
from helpers import STAGING, number_blocks

import kvoffload
from kvoffload import NO_WAIT, BlockCache, Growing, KVLayout, OffloadEngine

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

MIB = 1 << 20
SLOTS, BLOCKS = 512, 64


def test_every_byte_is_right_while_pieces_are_registered(gpu_device: kvoffload.Device, seed: int) -> None:
    """A cache over slots of 1 MiB; new keys are stored, old ones loaded, until the pool has grown and is full."""
    dice = np.random.default_rng(seed)
    planes = gpu_device.allocate_planes(16, block_bytes=MIB // 16, num_blocks=2 * BLOCKS)
    number_blocks(planes, 1)
    pool = Growing(SLOTS * MIB, piece_bytes=16 * MIB)
    with OffloadEngine(KVLayout([planes]), device=gpu_device, pool_bytes=pool, staging_bytes=STAGING) as engine:
        cache = BlockCache(engine, policy="lru")
        capacities, numbers = set[int](), 0
        while engine.growing or numbers < SLOTS:
            new = list(range(numbers, numbers + 8))
            numbers += 8
            job = cache.store([b"%d" % each for each in new], [each % BLOCKS for each in new], after=NO_WAIT)
            old = [int(each) for each in dice.permutation(numbers)[:8]]
            there = [each for each in old if cache.lookup([b"%d" % each])]
            targets = list(range(BLOCKS, BLOCKS + len(there)))
            cache.load([b"%d" % each for each in there], targets, after=NO_WAIT).wait(SECONDS)
            job.wait(SECONDS)
            capacities.add(cache.statistics().capacity)
            with cache.acquire([b"%d" % each for each in there]) as lease:
                for each, slot in zip(there, lease.slots(), strict=True):
                    assert (engine.slots[slot] == each % BLOCKS + 1).all()
        slab = planes[0].owner
        assert isinstance(slab, kvoffload.DeviceBuffer)
        image = slab.to_numpy()
        for block, each in zip(targets, there, strict=True):
            for plane in planes:
                start = plane.address - slab.address + block * plane.block_stride
                assert (image[start : start + plane.block_bytes] == each % BLOCKS + 1).all()
        cache.check()
        assert cache.statistics().capacity == SLOTS
        assert engine.statistics().pinning_error is None
        assert len(capacities) > 1


def test_closing_in_the_middle_and_again(gpu_device: kvoffload.Device) -> None:
    planes = gpu_device.allocate_planes(16, block_bytes=MIB // 16, num_blocks=8)
    number_blocks(planes, 1)
    layout = KVLayout([planes])
    for pinned_slots in (16, 64, SLOTS):
        pool = Growing(SLOTS * MIB, piece_bytes=16 * MIB)
        engine = OffloadEngine(layout, device=gpu_device, pool_bytes=pool, staging_bytes=0)
        wait_for(engine, pinned_slots)
        engine.store([1], [pinned_slots - 1], after=NO_WAIT)
        engine.close()
        wait_for_the_end(engine)
        assert engine.slots[pinned_slots - 1, 0] == 2
        assert engine.statistics().pinned_bytes == 0
