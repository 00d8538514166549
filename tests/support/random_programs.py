"""Random programs of stores, computations and loads, for any framework, against a model on the host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import pytest

import kvoffload
from kvoffload import NO_WAIT, OffloadEngine
from kvoffload.jax import OwnedCache

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would take three quarters of the GPU's memory

PLANES, BLOCKS, SLOTS, ELEMENTS = 4, 24, 16, 4096
SHAPE = (PLANES, BLOCKS, ELEMENTS)


class Program(Protocol):
    """What a framework does, queued in its own order and waited for by nobody. Values are float32 and exact."""

    def write(self, block: int, value: int) -> None:
        """Fill a block, after something slow."""

    def read(self, block: int) -> None:
        """Note what a block holds, after something slow."""

    def store(self, blocks: list[int], slots: list[int]) -> None: ...

    def load(self, slots: list[int], blocks: list[int]) -> None: ...

    def finish(self) -> list[np.ndarray[Any, Any]]:
        """What was read, (planes, elements) each, in order."""


def run_random_program(program: Program, steps: int, seed: int) -> int:
    """How many of the elements that were read are not what they should be."""
    chance = np.random.default_rng(seed)
    on_device, on_host = np.zeros(BLOCKS), np.zeros(SLOTS)
    for block in range(BLOCKS):
        program.write(block, block + 1)
        on_device[block] = block + 1
    program.store(list(range(SLOTS)), list(range(SLOTS)))
    on_host[:] = on_device[:SLOTS]
    expected = []
    for step in range(steps):
        block = int(chance.integers(BLOCKS))
        blocks = chance.permutation(BLOCKS)[: chance.integers(1, 9)].tolist()
        slots = chance.permutation(SLOTS)[: len(blocks)].tolist()
        kind = chance.choice(["write", "write", "read", "read", "store", "load"])
        if kind == "write":
            program.write(block, 1000 + step)
            on_device[block] = 1000 + step
        elif kind == "read":
            program.read(block)
            expected.append(on_device[block])
        elif kind == "store":
            program.store(blocks, slots)
            on_host[slots] = on_device[blocks]
        else:
            program.load(slots, blocks)
            on_device[blocks] = on_host[slots]
    found = program.finish()
    assert len(found) == len(expected) > steps // 10
    return sum(int((seen != value).sum()) for seen, value in zip(found, expected, strict=True))


class Steps:
    """Jitted steps that begin with something slow on which their result depends."""

    def __init__(self, jax: Any, burn_size: int) -> None:
        jnp = jax.numpy
        self.burn = jnp.ones((burn_size, burn_size), jnp.float32)

        def slowly(burn: Any) -> Any:
            burned = jax.lax.fori_loop(0, 16, lambda _, x: x @ x * 1e-4, burn)
            return jnp.isnan(burned[0, 0]).astype(jnp.float32)  # 0, but only JAX's GPU finds out

        def write(cache: Any, block: Any, value: Any, burn: Any) -> Any:
            return cache.at[:, block].set((value + slowly(burn)).astype(cache.dtype))

        def read(cache: Any, block: Any, burn: Any) -> Any:
            nothing = slowly(burn)
            return cache[:, (block + nothing).astype(int)].astype(jnp.float32) + nothing

        self.write = jax.jit(write, donate_argnums=0)
        self.read = jax.jit(read)

    def take_lists(self, jax: Any, *, by_layer: bool = False) -> None:
        """From now on they take a list with an array for each plane. `by_layer`: each array in a step of its own."""
        write_stacked, read_stacked = self.write.__wrapped__, self.read.__wrapped__

        def write(array: Any, block: Any, value: Any, burn: Any) -> Any:
            return write_stacked(array[None], block, value, burn)[0]

        def read(arrays: Any, block: Any, burn: Any) -> Any:
            return read_stacked(jax.numpy.stack(arrays), block, burn)

        if by_layer:
            write, read = jax.jit(write, donate_argnums=0), jax.jit(read)
            self.write = lambda arrays, *rest: [write(each, *rest) for each in arrays]
            self.read = lambda arrays, *rest: jax.numpy.concatenate([read([each], *rest) for each in arrays])
        else:
            self.write = jax.jit(lambda arrays, *rest: [write(each, *rest) for each in arrays], donate_argnums=0)
            self.read = jax.jit(read)


class JaxProgram:
    """On an OwnedCache of one array.

    Args:
        ordered: False leaves out every call that orders something.
    """

    def __init__(self, jax: Any, device: kvoffload.Device, *, ordered: bool = True) -> None:
        self._steps, self._ordered = Steps(jax, 16 if device.simulated else 2048), ordered
        self._recent: list[Any] = []
        self._seen: list[Any] = []
        self._cache = OwnedCache(device, SHAPE, np.float32, plane_axis=0, block_axis=1)
        self._engine = OffloadEngine(self._cache.layout, device=device, num_slots=SLOTS)

    @property
    def _array(self) -> Any:
        return self._cache.arrays if self._ordered else self._cache.unordered

    def write(self, block: int, value: int) -> None:
        self._cache.arrays = self._steps.write(self._array, block, float(value), self._steps.burn)
        self._recent.clear()  # it overwrites what they read, so it follows them

    def read(self, block: int) -> None:
        seen = self._steps.read(self._array, block, self._steps.burn)
        self._recent.append(seen)
        self._seen.append(seen)

    def _submit(self, name: str, first: list[int], second: list[int]) -> None:
        after = self._cache.after(*self._recent) if self._ordered else NO_WAIT
        getattr(self._engine, name)(first, second, after=after)

    def store(self, blocks: list[int], slots: list[int]) -> None:
        self._submit("store", blocks, slots)

    def load(self, slots: list[int], blocks: list[int]) -> None:
        self._submit("load", slots, blocks)

    def finish(self) -> list[np.ndarray[Any, Any]]:
        found = [np.asarray(seen) for seen in self._seen]
        self._engine.close()
        return found


class JaxTreeProgram(JaxProgram):
    """On an OwnedCache of a list with an array for each plane.

    Args:
        by_layer: each step takes one array alone.
        adopt: JAX has allocated the arrays.
    """

    def __init__(
        self,
        jax: Any,
        device: kvoffload.Device,
        *,
        ordered: bool = True,
        by_layer: bool = False,
        adopt: bool = False,
    ) -> None:
        super().__init__(jax, device, ordered=ordered)
        self._engine.close()
        shapes = [jax.numpy.zeros(SHAPE[1:]) if adopt else SHAPE[1:] for _ in range(PLANES)]
        self._cache = OwnedCache(device, shapes, np.float32, block_axis=0, plane_axis=None, adopt=adopt)
        self._engine = OffloadEngine(self._cache.layout, device=device, num_slots=SLOTS)
        self._steps.take_lists(jax, by_layer=by_layer)


@contextmanager
def jax_on(device: kvoffload.Device) -> Iterator[Any]:
    """JAX, which by default computes on the same GPU as the device; for a simulated device, on the CPU.

    Skips without JAX, or if it has no such device.
    """
    jax = pytest.importorskip("jax")
    platform, index = ("cpu", 0) if device.simulated else ("gpu", device.index)
    try:
        chosen = jax.devices(platform)[index]
    except (RuntimeError, IndexError) as error:
        pytest.skip(f"this JAX has no device {platform}:{index}: {str(error).splitlines()[0]}")
    with jax.default_device(chosen):
        yield jax
