"""A runtime of one's own: two threads with a CUDA stream each store blocks of a paged KV cache and load them back.

Every byte that comes back is compared. Runs on a GPU, and without one on the simulated device.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

import kvoffload

BLOCKS, PLANES, BLOCK_BYTES, SLOTS = 16, 8, 4096, 8


class Move(NamedTuple):
    """Blocks that a thread stores, the slots they go to, and the blocks that the slots are loaded to."""

    blocks: list[int]
    slots: list[int]
    targets: list[int]


def move(engine: kvoffload.OffloadEngine, device: kvoffload.Device, ids: Move) -> list[kvoffload.TransferResult]:
    """Store and load in one stream; neither call waits for the GPU."""
    with device.stream() as stream:
        store: kvoffload.Job = engine.store(ids.blocks, ids.slots, after=stream)
        store.order_before(stream)  # from here on the stream's work may overwrite the blocks
        load: kvoffload.Job = engine.load(ids.slots, ids.targets, after=stream)
        load.order_before(stream)  # from here on the stream's work sees the loaded bytes
    return [store.wait(timeout=60), load.wait(timeout=60)]


def memory_of(planes: list[kvoffload.Plane]) -> kvoffload.DeviceBuffer:
    """The allocation of all planes."""
    owner = planes[0].owner
    assert isinstance(owner, kvoffload.DeviceBuffer)
    return owner


def main(device: kvoffload.Device) -> list[kvoffload.TransferResult]:
    """Both threads' results; AssertionError if a byte is wrong."""
    planes = device.allocate_blocks(BLOCKS, planes=PLANES, block_bytes=BLOCK_BYTES)
    memory = memory_of(planes)
    content: npt.NDArray[np.uint8] = np.random.default_rng(0).integers(0, 256, memory.nbytes, dtype=np.uint8)
    memory.copy_from(content)
    with kvoffload.OffloadEngine(kvoffload.KVLayout([planes]), device=device, num_slots=SLOTS) as engine:
        moves = [Move([number, number + 2], [number, number + 2], [number + 8, number + 10]) for number in range(2)]
        with ThreadPoolExecutor(max_workers=len(moves)) as threads:
            results = [result for done in threads.map(partial(move, engine, device), moves) for result in done]
        found = memory.to_numpy().reshape(BLOCKS, -1)
        expected = content.reshape(BLOCKS, -1)
        for ids in moves:
            assert np.array_equal(found[ids.targets], expected[ids.blocks])
            assert np.array_equal(engine.slots[ids.slots, : PLANES * BLOCK_BYTES], expected[ids.blocks])
    return results


if __name__ == "__main__":
    with kvoffload.open_device(backend="auto") as chosen:
        for each in main(chosen):
            print(each.direction, each.nbytes, each.copier)
