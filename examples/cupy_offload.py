"""Offload a KV cache that CuPy owns, ordered with CuPy's own stream. Needs a GPU and CuPy.

python examples/cupy_offload.py
"""

import sys

import kvoffload

try:
    import cupy as cp
except ImportError as error:
    sys.exit(f"this example needs CuPy, which cannot be imported ({error}): pip install 'kvoffload[cupy]'")

LAYERS, BLOCKS, TOKENS, HEADS, HEAD_SIZE = 32, 128, 16, 8, 128


def main() -> None:
    # Block-major, in one array: one copy moves a block. CuPy arrays created one by one have an allocation each, and
    # the copy engine cannot take several of them in one copy.
    random = cp.random.default_rng(0)
    shape = (BLOCKS, 2 * LAYERS, TOKENS, HEADS, HEAD_SIZE)
    kv_cache = random.standard_normal(shape, dtype=cp.float32).astype(cp.float16)
    layout = kvoffload.KVLayout.from_stacked(kv_cache, plane_axis=1, block_axis=0)

    with (
        kvoffload.open_device(kv_cache.device.id) as device,
        kvoffload.OffloadEngine(layout, device=device, num_slots=64) as engine,
        cp.cuda.Stream() as stream,
    ):
        print(engine)
        blocks, slots = [5, 17, 99, 3], [0, 1, 2, 3]
        kv_cache *= 2  # queued on CuPy's stream; the store below waits for it on the GPU
        expected = kv_cache[blocks].copy()
        stored = engine.store(blocks, slots, after=stream)

        stored.order_before(stream)  # CuPy may overwrite the blocks once they are stored
        kv_cache[blocks] = 0
        loaded = engine.load(slots, blocks, after=stream)

        loaded.order_before(stream)  # CuPy's next work sees the loaded blocks
        assert cp.array_equal(kv_cache[blocks], expected), "the blocks did not come back"
        print(stored.wait(), loaded.wait(), "every byte came back", sep="\n")


if __name__ == "__main__":
    main()
