"""Methods for users of JAX: the cache of this library, and jitted gathers and scatters with device_put to pinned
memory of JAX's. On the simulated device JAX computes on the CPU.

The cache is one bfloat16 array (planes, blocks, elements), which updates are given as a donated argument. `time_tree`
takes a list of arrays, and times what the host does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvoffload.device.device import Device
from kvoffload.engine.engine import OffloadEngine
from kvoffload.engine.job import Job
from kvoffload_bench.framework_data import POISON_ELEMENT, Elements, EngineSlots, FrameworkData, FrameworkMethod
from kvoffload_bench.harness import Undoing

JAX = "JAX"
OWNED = "OwnedCache"
OWN = "gather, device_put / device_put, scatter"
_TREE_WARM_UP = 3
OWN_JITTED = "gather into / scatter from pinned_host, jitted"


class JaxMethods(Undoing):
    """Methods by name, created by calling the values of `makers`. `close` closes their engines."""

    name = JAX

    def __init__(self, data: FrameworkData) -> None:
        import jax

        self._jax, self._data, self._device = jax, data, data.lab.device
        target = jax.devices("cpu")[0] if self._device.simulated else jax.devices("gpu")[self._device.index]
        with ExitStack() as stack:
            stack.enter_context(jax.default_device(target))
            self._programs = _Programs(jax, data, target)
            self._plain = self._cache(SimpleNamespace(arrays=self._new_array()))
            self._host = _Pinned(jax, data, self._programs)
            self._undo = stack.pop_all()

    @property
    def makers(self) -> dict[str, Callable[[], FrameworkMethod]]:
        programs = self._programs
        return {
            OWNED: self._owned,
            OWN: lambda: self._own(OWN, programs.gather_to_host, programs.scatter_from_host),
            OWN_JITTED: lambda: self._own(OWN_JITTED, *programs.jitted()),
        }

    def _new_array(self) -> Any:
        return self._jax.numpy.zeros(self._data.shape, self._jax.numpy.bfloat16, device=self._programs.on_device)

    def _cache(self, holder: Any) -> _Cache:
        return _Cache(self._data, holder, self._programs)

    def _owned(self) -> FrameworkMethod:
        from kvoffload.jax import OwnedCache

        held = OwnedCache(self._device, self._data.shape, self._jax.numpy.bfloat16, plane_axis=0, block_axis=1)
        blocks, slots, cache = self._data.blocks, self._data.slots, self._cache(held)
        engine = self._undo.enter_context(self._data.engine(held.layout))

        def store() -> Job:
            return engine.store(blocks, slots, after=held)

        def load() -> Job:
            job = engine.load(slots, blocks, after=held.after(*cache.readers))
            cache.look()
            return job

        return FrameworkMethod(JAX, OWNED, cache, EngineSlots(self._data, engine), store, load)

    def _own(self, name: str, gather: Callable[..., Any], scatter: Callable[..., Any]) -> FrameworkMethod:
        cache, host, ids = self._plain, self._host, self._data.blocks.astype(np.int32)

        def store() -> None:
            host.stored.append(gather(cache.holder.arrays, ids))

        def load() -> None:
            cache.holder.arrays = scatter(cache.holder.arrays, ids, host.stored[-1])
            cache.look()

        return FrameworkMethod(JAX, name, cache, host, store, load)


_TREE_ARRAY = (64, 16, 8, 128)  # pages, tokens, heads, head size


def time_tree(device: Device, leaves: int, repeats: int) -> dict[str, Any]:
    """What an `OwnedCache` of a list of arrays costs the host in a step that takes and returns all.

    Returns:
        `leaves`; `samples_us`, by name, of `repeats` each: a step of arrays that JAX has allocated; the same step of
        the cache where no transfer was submitted since the last, and where some were; and `cache.after()` after a step,
        which is what a transfer asks for. `wrong`: arrays whose stored and loaded block is not right.
    """
    import jax

    from kvoffload.jax import OwnedCache

    def update(arrays: list[Any], value: Any) -> tuple[list[Any], Any]:
        return [array.at[3].set(value) for array in arrays], arrays[-1][3, 0, 0, 0]

    cache = OwnedCache(device, [_TREE_ARRAY] * leaves, jax.numpy.bfloat16, block_axis=0, plane_axis=None)
    own = [jax.numpy.zeros(_TREE_ARRAY, jax.numpy.bfloat16) for _ in range(leaves)]
    step = jax.jit(update, donate_argnums=0)
    differ = jax.jit(lambda arrays, value: sum((array[5] != value).any().astype(int) for array in arrays))
    samples: dict[str, list[float]] = {name: [] for name in ("step", "no transfer", "after transfers", "after=cache")}
    clock, wrong = time.perf_counter, 0
    with OffloadEngine(cache.layout, device=device, num_slots=2) as engine:
        for turn in range(_TREE_WARM_UP + repeats):
            value = turn % 128
            begin = clock()
            own, seen = step(own, value)
            samples["step"].append(clock() - begin)
            seen.block_until_ready()
            for name in ("no transfer", "after transfers"):
                if name == "after transfers":
                    begin = clock()
                    after = cache.after()
                    samples["after=cache"].append(clock() - begin)
                    engine.store([3], [0], after=after)
                    engine.load([0], [5], after=after)
                begin = clock()
                cache.arrays, seen = step(cache.arrays, value)
                samples[name].append(clock() - begin)
                seen.block_until_ready()
            wrong += int(differ(cache.arrays, value))
    return {
        "leaves": leaves,
        "wrong": wrong,
        "samples_us": {name: [1e6 * each for each in taken[-repeats:]] for name, taken in samples.items()},
    }


class _Programs:
    """Jitted programs, and where arrays lie: `ids`, `right` and `poison` on the device. Scatters donate the cache."""

    def __init__(self, jax: Any, data: FrameworkData, target: Any) -> None:
        self._jax = jax
        self.on_device = jax.sharding.SingleDeviceSharding(target, memory_kind="device")
        self.on_host = jax.sharding.SingleDeviceSharding(target, memory_kind="pinned_host")
        self.right = self.put(data.right, self.on_device)
        self.poison = self.put(np.full_like(data.right, POISON_ELEMENT), self.on_device)
        self.ids = jax.device_put(data.blocks.astype(np.int32), self.on_device)
        self.gather = jax.jit(_gather)
        self.scatter = jax.jit(_scatter, donate_argnums=0)
        self.look = jax.jit(lambda cache, ids: cache[-1, ids[-1], -1])

    def put(self, elements: Elements, where: Any) -> Any:
        """16-bit integers as an array of bfloat16."""
        return self._jax.device_put(elements.view(np.dtype(self._jax.numpy.bfloat16)), where)

    def gather_to_host(self, cache: Any, ids: Any) -> Any:
        return self._jax.device_put(self.gather(cache, ids), self.on_host)

    def scatter_from_host(self, cache: Any, ids: Any, host: Any) -> Any:
        return self.scatter(cache, ids, self._jax.device_put(host, self.on_device))

    def jitted(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The same two, each as one program."""
        put = partial(self._jax.device_put, device=self.on_device)
        gather = self._jax.jit(_gather, out_shardings=self.on_host)
        scatter = self._jax.jit(lambda cache, ids, host: _scatter(cache, ids, put(host)), donate_argnums=0)
        return gather, scatter


def _gather(cache: Any, ids: Any) -> Any:
    return cache[:, ids]


def _scatter(cache: Any, ids: Any, blocks: Any) -> Any:
    return cache.at[:, ids].set(blocks)


class _Cache:
    """The blocks of an array of JAX's; `holder.arrays` is set to the result of each update.

    What was seen is kept until the blocks are written from here again: each look must have found the right element.
    """

    def __init__(self, data: FrameworkData, holder: Any, programs: _Programs) -> None:
        self._data, self.holder, self._programs = data, holder, programs
        self._seen: list[Any] = []

    @property
    def readers(self) -> list[Any]:
        """Readers that a load must follow: the last look at the cache, which follows all earlier ones."""
        return self._seen[-1:]

    def look(self) -> None:
        """Compute with an element of the last block."""
        self._seen.append(self._programs.look(self.holder.arrays, self._programs.ids))

    def wait(self) -> None:
        for seen in self._seen:
            seen.block_until_ready()

    def fill(self) -> None:
        self._write(self._programs.right)

    def poison(self) -> None:
        self._write(self._programs.poison)

    def _write(self, blocks: Any) -> None:
        self._seen.clear()
        updated = self._programs.scatter(self.holder.arrays, self._programs.ids, blocks)
        self.holder.arrays = updated
        updated.block_until_ready()

    def wrong(self) -> int:
        right = self._data.right
        looked_too_early = sum(int(np.asarray(seen).view(np.uint16) != right[-1, -1, -1]) for seen in self._seen)
        found = np.asarray(self._programs.gather(self.holder.arrays, self._programs.ids))
        return self._data.wrong(found, right) + looked_too_early


class _Pinned:
    """Pinned memory of JAX's: a new array for each store, kept in `stored` until `poison`."""

    def __init__(self, jax: Any, data: FrameworkData, programs: _Programs) -> None:
        self._jax, self._data, self._programs = jax, data, programs
        self.stored: list[Any] = []

    def fill(self) -> None:
        self.stored = [self._programs.put(self._data.right, self._programs.on_host)]
        self.wait()

    def wait(self) -> None:
        self._jax.block_until_ready(self.stored)

    def poison(self) -> None:
        """JAX gives the next stores the memory that was freed last: poison as much as these had."""
        had, programs = len(self.stored), self._programs
        self.stored.clear()
        self._jax.block_until_ready([self._jax.device_put(programs.poison, programs.on_host) for _ in range(had)])

    def wrong(self) -> int:
        return sum(self._data.wrong(np.asarray(stored), self._data.right) for stored in self.stored)
