"""KV caches in JAX, whose arrays are immutable and whose streams are not visible. See docs/jax.md.

Four classes for one device; in each, `array` is a `jax.Array` of the whole cache. They differ in whose memory it is,
and in how JAX is made to wait for transfers:

    OwnedCache      recommended. kvoffload's memory, imported by JAX. After a transfer the memory is imported again, and
                    computations with the new array wait for the transfer on the GPU. Relies on DLPack, and on a donated
                    update staying at its address, which is checked.
    AdoptedCache    JAX's memory. The host waits for transfers. Relies on a donated update staying at its address, which
                    is checked, and on JAX seeing bytes that other libraries have written.
    StagedCache     JAX's memory, copied by JAX to and from a staging array. Relies on DLPack alone; costs one more copy
                    on the device.
    CallbackCache   JAX's memory. Transfers are submitted by a callback in JAX's own stream
                    (`jax.experimental.buffer_callback`, an experimental interface), so they need no other order.

And one for several devices of a process, `ShardedOwnedCache`: an OwnedCache in a sharded array, for a ShardedEngine.

A step that updates the cache is jitted with the cache donated:

    step = jax.jit(step, donate_argnums=0)
    cache.array, logits = step(cache.array, tokens)     # the setter checks the address of the result
    engine.store(blocks, slots, after=cache)            # follows the step, on the GPU
    engine.load(slots, other_blocks, after=cache)
    cache.array, logits = step(cache.array, tokens)     # follows both

Not used: `jax.new_ref` (in JAX 0.11 a reference has no `__dlpack__`, and creating or reading one copies the array) and
`jax.ffi` (needs functions compiled from C++; `buffer_callback` is its form for Python).
"""

from __future__ import annotations

from kvoffload.jax.adopted import AdoptedCache
from kvoffload.jax.callback import CallbackCache
from kvoffload.jax.imports import from_device
from kvoffload.jax.owned import OwnedCache
from kvoffload.jax.sharded import ShardedOwnedCache
from kvoffload.jax.staged import StagedCache

__all__ = ["AdoptedCache", "CallbackCache", "OwnedCache", "ShardedOwnedCache", "StagedCache", "from_device"]
