"""KV caches in JAX. Its arrays are immutable and its streams are its own, so somebody has to say who waits for whom.

Four ways, each with what it relies on; every `array` is a `jax.Array` of the whole cache:

    OwnedCache      memory of ours that JAX imports: the recommended one. After a transfer the array is imported anew,
                    and what JAX computes with it waits on the GPU. Relies on DLPack, and on a donated update staying
                    in its place, which is checked.
    AdoptedCache    memory that JAX allocated. Waits on the host for transfers. Relies on a donated update staying in
                    its place, which is checked, and on JAX seeing bytes that others write.
    StagedCache     memory that JAX allocated, reached through a gather, a scatter and a staging array. Relies on
                    DLPack alone; costs a copy on the device more.
    CallbackCache   memory that JAX allocated; transfers are queued from inside JAX's own stream, by a callback of
                    `jax.experimental.buffer_callback`. Nothing but JAX's order to keep; an experimental interface.

A step that updates the cache is jitted with the cache donated:

    step = jax.jit(step, donate_argnums=0)
    cache.array, logits = step(cache.array, tokens)     # the setter checks where the result lies
    engine.store(blocks, slots, after=cache)            # follows the step, on the GPU
    engine.load(slots, other_blocks, after=cache)
    cache.array, logits = step(cache.array, tokens)     # follows both

`jax.new_ref` was no better: in JAX 0.11 a reference has no `__dlpack__`, and making one copies, as does reading it as
a whole. `jax.ffi` needs functions compiled from C++; `buffer_callback` is what it offers to Python.
"""

from __future__ import annotations

from kvoffload.jax.adopted import AdoptedCache
from kvoffload.jax.callback import CallbackCache
from kvoffload.jax.imports import from_device
from kvoffload.jax.owned import OwnedCache
from kvoffload.jax.staged import StagedCache

__all__ = ["AdoptedCache", "CallbackCache", "OwnedCache", "StagedCache", "from_device"]
