"""Several devices, simulated or GPUs, with JAX on all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from random_programs import BLOCKS, PLANES, SHAPE, SLOTS, JaxProgram, Steps, jax_on

import kvoffload
from kvoffload import ShardedEngine
from kvoffload.jax import OwnedCache
from kvoffload.testing import SimulatedDriver, check_clean_close

Spec = tuple[str | None, ...]
FORMS = ["array", "tree", "adopted"]  # of a cache of planes: one array, a list with an array for each, JAX's own arrays
PROGRAMS = [("array", False), ("tree", False), ("tree", True), ("adopted", False)]  # form, a step for each array


def cache_in_form(
    jax: Any, form: str, devices: Any, shape: Sequence[int], dtype: Any, sharding: Any = None, **options: Any
) -> OwnedCache:
    """A cache of zeros of `shape`, (planes, blocks, ...). A sharding is of one plane."""
    if form == "array":
        if sharding is not None:
            spec = jax.sharding.PartitionSpec(None, *sharding.spec)
            sharding = jax.sharding.NamedSharding(sharding.mesh, spec)
        return OwnedCache(devices, shape, dtype, sharding=sharding, plane_axis=0, block_axis=1, **options)
    shapes: list[Any] = [tuple(shape[1:])] * shape[0]
    if form == "adopted":
        shapes = [jax.device_put(np.zeros(each, dtype), sharding) for each in shapes]
    options = {"plane_axis": None, "block_axis": 0, "adopt": form == "adopted", **options}
    return OwnedCache(devices, shapes, dtype, sharding=sharding, **options)


def planes_of(cache: OwnedCache) -> Any:
    """What a cache holds, as one array (planes, blocks, ...) in numpy."""
    arrays = cache.arrays
    return np.stack([np.asarray(each) for each in arrays]) if isinstance(arrays, list) else np.asarray(arrays)


class JaxDevices:
    """Devices, and JAX's devices for them."""

    def __init__(self, jax: Any, devices: Sequence[kvoffload.Device]) -> None:
        self.jax, self.devices = jax, list(devices)
        platform = "cpu" if self.devices[0].simulated else "gpu"
        found = jax.devices(platform)
        if max(device.index for device in self.devices) >= len(found):
            assert platform == "gpu", f"JAX was imported before JAX_NUM_CPU_DEVICES was set: it has {found}"
            pytest.skip(f"this JAX has {len(found)} GPUs")
        self.of_jax = [found[device.index] for device in self.devices]

    def sharding(self, *spec: str | None, extents: Sequence[int] | None = None) -> Any:
        """A NamedSharding over all of them; the mesh has an axis for each name in `spec`, with these extents."""
        names = [name for name in spec if name is not None] or ["all"]
        grid = np.array(self.of_jax).reshape(extents or [len(self.of_jax)])
        mesh = self.jax.sharding.Mesh(grid, names)
        return self.jax.sharding.NamedSharding(mesh, self.jax.sharding.PartitionSpec(*spec))

    def cache(self, shape: Sequence[int], dtype: Any, *spec: str | None, **options: Any) -> OwnedCache:
        sharding = self.sharding(*spec, extents=options.pop("extents", None))
        return OwnedCache(self.devices, shape, dtype, sharding=sharding, **options)

    def engine(self, cache: OwnedCache, num_slots: int = 8) -> ShardedEngine:
        options: dict[str, Any] = {"staging_bytes": 0} if self.devices[0].simulated else {}
        return ShardedEngine(cache.layout, devices=self.devices, num_slots=num_slots, **options)


@contextmanager
def simulated_devices(count: int, seed: int) -> Iterator[JaxDevices]:
    """Simulated devices of one driver, which check themselves at the end; skips without JAX."""
    simulator = SimulatedDriver(device_count=count, seed=seed)
    devices = [kvoffload.open_device(index, backend=simulator) for index in range(count)]
    try:
        with jax_on(devices[0]) as jax:
            yield JaxDevices(jax, devices)
    except BaseException:  # the test is skipped
        for device in devices:
            device.close(10)
        raise
    for device in devices[1:]:
        device.close(10)
    check_clean_close(devices[0])


def two_devices(seed: int) -> Iterator[JaxDevices]:
    """To be a fixture."""
    with simulated_devices(2, seed) as on:
        yield on


class ShardedProgram(JaxProgram):
    """A random program on a OwnedCache, whose elements are divided among the devices; in a form of `FORMS`."""

    def __init__(self, on: JaxDevices, *, ordered: bool = True, form: str = "array", by_layer: bool = False) -> None:
        jax = on.jax
        self._steps, self._ordered = Steps(jax, 16 if on.devices[0].simulated else 2048), ordered
        self._recent: list[Any] = []
        self._seen: list[Any] = []
        self._cache = cache_in_form(jax, form, on.devices, SHAPE, "float32", on.sharding(None, "parts"))
        if form != "array":
            self._steps.take_lists(jax, by_layer=by_layer)
        self._engine: Any = on.engine(self._cache, SLOTS)
        assert SHAPE[:2] == (PLANES, BLOCKS)
