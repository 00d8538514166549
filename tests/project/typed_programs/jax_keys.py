"""JAX on the CPU: a KV cache in one array, whose blocks are stored under keys of their tokens and found again."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

import kvoffload
from kvoffload.jax import OwnedCache

BLOCKS, PLANES, TOKENS, HEADS, DIM = 64, 8, 16, 2, 8
PROMPT = [5, 9, 11]  # the blocks of the first request
AGAIN = [20, 21, 22]  # those of the second, which begins with the same tokens


def prefill(kv: jax.Array, blocks: npt.ArrayLike, values: npt.ArrayLike) -> jax.Array:
    """Stands for a step of the model, which writes K and V of new tokens."""
    return kv.at[blocks].set(values)


def make_cache(device: kvoffload.Device) -> OwnedCache:
    """A block-major cache, zeros at first."""
    return OwnedCache(
        device,
        (BLOCKS, PLANES, TOKENS, HEADS, DIM),
        jnp.bfloat16,
        block_axis=0,
        plane_axis=1,
        tokens_per_block=TOKENS,
        block_axes=("tokens", "heads", "dim"),
    )


def fill(cache: OwnedCache, blocks: list[int]) -> None:
    """Block number i of the list is filled with i + 1; the array is donated, so it is updated in place."""
    step = jax.jit(prefill, donate_argnums=0)  # pyright: ignore[reportUnknownMemberType] - of JAX's annotations
    values = np.arange(1, len(blocks) + 1).reshape(-1, 1, 1, 1, 1).astype(jnp.bfloat16)
    cache.arrays = step(cache.arrays, np.array(blocks), values)


def main(device: kvoffload.Device) -> npt.NDArray[np.float32]:
    """The first element of each loaded block."""
    cache = make_cache(device)
    with kvoffload.OffloadEngine(cache.layout, device=device, num_slots=32) as engine:
        prefixes = kvoffload.BlockCache(engine)
        tokens = np.arange(len(PROMPT) * TOKENS + 2)  # the last two tokens fill no block and have no key
        keys: list[bytes] = kvoffload.chain_keys(tokens, layout=cache.layout, salt="my-model@1")
        fill(cache, PROMPT)
        prefixes.store(keys, PROMPT, after=cache).wait(timeout=60)
        prefixes.touch(keys)  # once, at the end of a request

        hits: int = prefixes.lookup(keys)
        job: kvoffload.CacheJob = prefixes.load(keys[:hits], AGAIN[:hits], after=cache)
        loaded = np.asarray(cache.arrays[np.array(AGAIN)], dtype=np.float32)  # reading `array` follows the load
        job.wait(timeout=60)
        expected = np.arange(1, len(PROMPT) + 1, dtype=np.float32).reshape(-1, 1, 1, 1, 1)
        assert np.array_equal(loaded, np.broadcast_to(expected, loaded.shape))
    return loaded[:, 0, 0, 0, 0]


if __name__ == "__main__":
    with jax.default_device("cpu"), kvoffload.open_device(backend="simulated") as chosen:
        print(main(chosen))
