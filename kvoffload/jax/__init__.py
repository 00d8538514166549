"""KV caches in JAX, whose arrays are immutable and whose streams are not visible. See docs/jax.md.

`OwnedCache` is one array or a tree of arrays (an array a layer), on one device or several, in memory that kvoffload
allocates, or JAX has allocated, and JAX imports. Jit the step that updates the cache with the cache donated:

    step = jax.jit(step, donate_argnums=0)
    cache.arrays, logits = step(cache.arrays, tokens)   # the setter checks the addresses of the result
    engine.store(blocks, slots, after=cache)            # follows the step, on the GPU
    engine.load(slots, other_blocks, after=cache)
    cache.arrays, logits = step(cache.arrays, tokens)   # follows both

Not used: `jax.new_ref` (in JAX 0.11 a reference has no `__dlpack__`, and creating or reading one copies the array) and
`jax.ffi` (needs functions compiled from C++).
"""

from __future__ import annotations

from kvoffload.jax.imports import from_device
from kvoffload.jax.owned import OwnedCache

__all__ = ["OwnedCache", "from_device"]
