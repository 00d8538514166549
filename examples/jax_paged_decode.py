"""Decode with a paged KV cache in JAX that is larger than its room on the device; compare every bit of the logits.

A small transformer serves conversations of several turns. After a turn it stores the conversation's blocks in pinned
host memory, and gives them to other conversations. Before the next turn it finds the prefix by its tokens and loads it
into other blocks, while other conversations still decode. It compares the time with a cache that holds everything, and
with computing the prefix again. Code shared with cupy_paged_decode.py is in paged_decode/.

    python examples/jax_paged_decode.py --plot timeline.png       # pip install 'kvoffload[jax,plot]'
    python examples/jax_paged_decode.py --devices 2               # divide heads and hidden units among two GPUs
    python examples/jax_paged_decode.py --device simulated        # on the CPU; with numpy if JAX is missing
    python examples/jax_paged_decode.py --pool                    # also continue another process's work, in one pool
    python examples/jax_paged_decode.py --store mooncake --start-store      # the same by way of a store
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
from paged_decode import model, report
from paged_decode.arrays import NumpyBackend
from paged_decode.backend import ONE_ALGORITHM, Backend, Followed, Logits

import kvoffload
from kvoffload.testing import SimulatedDriver


def compute(
    size: model.ModelSize, weights: model.Weights, cache: Any, step: model.Step, reduce: model.Reduce = model.whole
) -> tuple[Any, Any]:
    """The logits of a step, and the cache with K and V of its tokens: in the same memory, if you donate the cache. With
    several devices, `size`, `weights` and `cache` are one device's share.

    The cache holds bfloat16 as uint16 bits, see `jax_layers.write`.
    """
    import jax
    import jax.numpy as jnp
    from paged_decode import jax_layers

    rotation = model.rotary(jnp, size, step)
    blocks, offsets = step.rows // model.BLOCK_TOKENS, step.rows % model.BLOCK_TOKENS

    def compute_layer(carry: tuple[Any, Any], layer: dict[str, Any]) -> tuple[tuple[Any, Any], None]:
        x, cache = carry
        key_plane, value_plane = 2 * layer["number"], 2 * layer["number"] + 1

        def keep(keys: Any, values: Any) -> tuple[Any, tuple[Any, Any]]:
            new = jax_layers.write(cache, (*size.place(key_plane, blocks), offsets), keys)
            new = jax_layers.write(new, (*size.place(value_plane, blocks), offsets), values)
            places = size.place(key_plane, step.tables), size.place(value_plane, step.tables)
            return new, (jax_layers.read(new, places[0], keys.dtype), jax_layers.read(new, places[1], keys.dtype))

        return jax_layers.compute_layer(size, layer, x, step, rotation, keep, reduce), None

    layers = {name: weights[name] for name in model.LAYER_WEIGHTS} | {"number": jnp.arange(size.layers)}
    (x, cache), _ = jax.lax.scan(compute_layer, (model.embed(weights, step), cache), layers)
    return model.unembed(jnp, size, weights, x, step), cache


class JaxBackend:
    """JAX on a cache in kvoffload's memory, `kvoffload.jax.OwnedCache`. The host waits only for logits: a transfer
    follows the computation that made the cache, and computations with `cache.arrays` follow the transfers so far. A
    step that may run while other blocks are loaded takes `cache.unordered`.
    """

    stream: int | None = None  # JAX does not expose it

    def __init__(self, devices: Sequence[kvoffload.Device], size: model.ModelSize) -> None:
        import jax

        self.devices, self.size = devices, size
        keys = jax.random.split(jax.random.key(0), len(size.weight_shapes))
        self._weights = {
            name: jax.random.normal(key, shape, "bfloat16") * shape[-2] ** -0.5
            for key, (name, shape) in zip(keys, size.weight_shapes.items(), strict=True)
        }
        self._compute = jax.jit(partial(compute, size), donate_argnums=1)
        self._cache: Any = None
        self._follows = False  # whether the next step follows the transfers so far

    def new_cache(self, num_blocks: int) -> kvoffload.KVLayout | kvoffload.ShardedLayout:
        self._cache = None  # free its memory before allocating as much again
        self._cache = self._allocate(self.size.cache_shape(num_blocks))
        layout: kvoffload.KVLayout | kvoffload.ShardedLayout = self._cache.layout
        return layout

    def _allocate(self, shape: tuple[int, ...]) -> Any:
        import kvoffload.jax

        return kvoffload.jax.OwnedCache(self.devices[0], shape, "uint16", **self.size.description)

    def step(self, step: model.Step) -> Logits:
        array = self._cache.arrays if self._follows else self._cache.unordered
        self._follows = False
        logits, self._cache.arrays = self._compute(self._weights, array, step)
        return np.asarray(logits)

    def after(self) -> Any:
        return self._cache

    def follow(self, _: Followed) -> None:
        self._follows = True  # JAX cannot follow one job, so it follows all that were submitted so far

    def follow_by_layer(self, job: kvoffload.CacheJob) -> None:
        raise NotImplementedError(f"{job!r}: all layers are one computation of JAX")


class ShardedJaxBackend(JaxBackend):
    """The same on several devices (tensor parallel): each computes its heads and hidden units, and keeps their K and V
    in a sharded `OwnedCache`. Twice a layer the products of all devices are added up.
    """

    def __init__(self, devices: Sequence[kvoffload.Device], size: model.ModelSize) -> None:
        super().__init__(devices, size)
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        mesh = Mesh(np.array(jax.devices()[: len(devices)]), ("heads",))
        everywhere, inputs, outputs = PartitionSpec(), PartitionSpec(None, "heads"), PartitionSpec(None, None, "heads")
        # Outputs are ordered by device. Each device has its heads of Q, K and V, or its gates and up projections.
        specs = {"query_key_value": outputs, "attention_out": inputs, "gate_up": outputs, "down": inputs}
        specs = {name: specs.get(name, everywhere) for name in self._weights}
        in_cache = PartitionSpec(None, None, None, "heads")
        self._sharding = NamedSharding(mesh, in_cache)
        self._weights = {
            name: jax.device_put(weight, NamedSharding(mesh, specs[name])) for name, weight in self._weights.items()
        }
        of_each = jax.shard_map(
            partial(compute, size.shard(len(devices)), reduce=add_up),
            mesh=mesh,
            in_specs=(specs, in_cache, everywhere),
            out_specs=(everywhere, in_cache),
        )
        self._compute = jax.jit(of_each, donate_argnums=1)

    def _allocate(self, shape: tuple[int, ...]) -> Any:
        import kvoffload.jax

        description: dict[str, Any] = self.size.description | {"sharding": self._sharding}
        return kvoffload.jax.OwnedCache(self.devices, shape, "uint16", **description)


def add_up(product: Any) -> Any:
    """The sum of the products of all devices, in float32."""
    import jax

    return jax.lax.psum(product.astype("float32"), "heads")


def numpy_backend(devices: Sequence[kvoffload.Device], size: model.ModelSize) -> Backend:
    return NumpyBackend(devices[0], size)


Make = Callable[[Sequence[kvoffload.Device], model.ModelSize], Backend]


def find_backend(device: str, count: int) -> Make | None:
    """The backend that can run on so many devices, or None."""
    if find_spec("jax") is None:
        return numpy_backend if (device, count) == (report.SIMULATED, 1) else None
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {ONE_ALGORITHM}"
    import jax

    if device == report.SIMULATED:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    elif jax.default_backend() != "gpu" or len(jax.devices()) < count:
        return None
    return JaxBackend if count == 1 else ShardedJaxBackend


def main() -> int:
    options = report.command_line(__doc__, sharded=True)
    with report.store_is_ready(options):
        return serve(options)


def serve(options: Namespace) -> int:
    count, simulated = options.devices, options.device == report.SIMULATED
    make_backend = find_backend(options.device, count)
    if make_backend is None:
        if simulated:
            print(f"--devices {count} needs JAX, on the CPU, too: pip install jax", file=sys.stderr)
        else:
            gpus = "a GPU" if count == 1 else f"{count} GPUs"
            remedy = "pip install 'kvoffload[jax]', or try --device simulated"
            print(f"there is no JAX with {gpus}: {remedy}", file=sys.stderr)
        return 2
    with ExitStack() as stack:
        driver: Any = SimulatedDriver(device_count=count) if simulated else report.CUDA
        devices = [stack.enter_context(kvoffload.open_device(index, backend=driver)) for index in range(count)]
        return report.serve_and_compare(
            make_backend(devices, report.model_size(options)),
            options,
            left_out="the order of JAX and transfers on a GPU, and concurrency",
        )


if __name__ == "__main__":
    sys.exit(main())
