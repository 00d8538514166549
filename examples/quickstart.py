"""Store blocks of a paged KV cache in pinned host memory, lose them on the device, load them back, compare.

Runs anywhere: on a GPU if there is one, else on the simulated device.

    python examples/quickstart.py
"""

import numpy as np

import kvoffload

LAYERS, BLOCKS, TOKENS, HEADS, HEAD_SIZE = 4, 64, 16, 8, 128
BLOCK_BYTES = TOKENS * HEADS * HEAD_SIZE * 2  # bfloat16


def main() -> None:
    with kvoffload.open_device(backend="auto") as device:
        print(device)
        # Each layer has two planes, K and V. A block is one contiguous range of all planes, so one copy moves it
        planes = device.allocate_blocks(BLOCKS, planes=2 * LAYERS, block_bytes=BLOCK_BYTES)
        cache_memory = planes[0].owner
        assert isinstance(cache_memory, kvoffload.DeviceBuffer)
        original = np.random.default_rng(0).integers(0, 256, cache_memory.nbytes, dtype=np.uint8)
        cache_memory.copy_from(original)

        axes = ("tokens", "heads", "dim")  # the axes of a block of one plane; keys depend on them
        layout = kvoffload.KVLayout([planes], dtype="bfloat16", tokens_per_block=TOKENS, block_axes=axes)
        with kvoffload.OffloadEngine(layout, device=device, num_slots=32) as engine:
            print(engine)

            # by id: blocks 3, 9 and 60 to slots 0, 1 and 2, and back
            print(engine.store([3, 9, 60], [0, 1, 2]).wait())
            cache_memory.copy_from(np.zeros_like(original))
            print(engine.load([0, 1, 2], [3, 9, 60]).wait())

            # by key: from here on the cache owns the slots. A key becomes a hit when its copy has completed. When the
            # cache is full, it evicts the blocks that are least likely to be used again
            cache = kvoffload.BlockCache(engine)
            conversation = kvoffload.chain_keys(range(3 * TOKENS), layout=layout, salt="quickstart")
            cache.store(conversation, blocks=[3, 9, 60]).wait()
            cache.touch(conversation)
            cache_memory.copy_from(np.zeros_like(original))
            following = kvoffload.chain_keys(range(4 * TOKENS), layout=layout, salt="quickstart")
            hits = cache.lookup(following)
            cache.load(following[:hits], blocks=[3, 9, 60]).wait()
            print(f"{hits} blocks found and loaded; {cache.statistics()}")

        restored = cache_memory.to_numpy().reshape(BLOCKS, -1)
        assert np.array_equal(restored[[3, 9, 60]], original.reshape(BLOCKS, -1)[[3, 9, 60]])
        print("every byte came back")


if __name__ == "__main__":
    main()
