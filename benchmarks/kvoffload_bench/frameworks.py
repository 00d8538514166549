"""CuPy and JAX without this library, on arrays of their own: (planes, blocks, elements), the same block ids, pinned
host memory. They are measured last in a process: JAX takes streams, memory and threads of its own.

CuPy is timed on the GPU clock, JAX by wall clock, since its streams are its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvoffload.errors import CapabilityError
from kvoffload.internal.models import ModelGeometry
from kvoffload.planning.transfer_plan import Direction
from kvoffload_bench.contiguous import CONTIGUOUS_COPY
from kvoffload_bench.lab import Lab
from kvoffload_bench.measurements import Measurement, choice, measurement_of, scenario_of, time_engine
from kvoffload_bench.rounds import Scenario, time_rounds
from kvoffload_bench.setup import TransferSetup
from kvoffload_bench.tools import POISON

CUPY, JAX = "CuPy", "JAX, wall clock"
_POISON_ELEMENT = POISON * 0x101

Elements = npt.NDArray[np.uint16]


class Arrays(Protocol):
    """A framework's copies of what a setup copies, elements of 16 bits. Stores go first: they leave what loads read."""

    def scenario(self, direction: Direction) -> Scenario: ...

    def close(self) -> None: ...


def measure_frameworks(
    lab: Lab, geometries: Sequence[ModelGeometry], progress: Callable[[int, int], None]
) -> tuple[list[Measurement], dict[str, str]]:
    """Every geometry of one group, also by the engine's choice and the contiguous copy; by name, why one is missing."""
    kinds, missing = _importable()
    found: list[Measurement] = []
    for number, geometry in enumerate(geometries, start=1):
        if len(geometry.groups) == 1 and kinds:
            with TransferSetup(lab, geometry) as setup, ExitStack() as stack:
                arrays = {name: stack.enter_context(closing(make(setup))) for name, make in kinds.items()}
                found += [_measure(setup, direction, arrays) for direction in Direction]
        progress(number, len(geometries))
    return found, missing


def _importable() -> tuple[dict[str, Callable[[TransferSetup], Arrays]], dict[str, str]]:
    kinds: dict[str, Callable[[TransferSetup], Arrays]] = {}
    missing = {}
    for name, check, kind, extra in ((CUPY, check_cupy, CupyArrays, "cupy"), (JAX, check_jax, JaxArrays, "jax")):
        reason = why_not(check, extra)
        if reason is None:
            kinds[name] = kind
        else:
            missing[name] = reason
    return kinds, missing


def why_not(check: Callable[[], None], extra: str) -> str | None:
    """None if a check passes, or why a framework cannot be used; if it is not installed, the extra that installs it."""
    try:
        check()
    except ImportError as error:
        return f"{error}; pip install 'kvoffload[{extra}]'"
    except CapabilityError as error:
        return str(error)
    return None


def check_cupy() -> None:
    import cupy  # noqa: F401


def check_jax(platform: str = "gpu") -> None:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # it would take three quarters of the GPU's memory
    import jax

    try:
        jax.devices(platform)
    except RuntimeError as error:
        raise CapabilityError(f"this JAX has no {platform.upper()}: {str(error).splitlines()[0]}") from error


def _measure(setup: TransferSetup, direction: Direction, arrays: dict[str, Arrays]) -> Measurement:
    chosen: dict[str, str] = {}
    name = choice("overlap")
    setup.prepare(direction)
    scenarios = {
        name: scenario_of(setup, direction, partial(time_engine, setup, direction, name, chosen, None, "overlap"))
    }
    scenarios |= {kind: each.scenario(direction) for kind, each in arrays.items()}
    scenarios[CONTIGUOUS_COPY] = setup.lab.contiguous.scenario(direction)
    return measurement_of(setup, direction, time_rounds(scenarios, setup.lab.repeats), chosen)


def _right(setup: TransferSetup) -> Elements:
    """What the blocks hold: (planes, blocks, elements)."""
    slots = np.stack(setup.expected()).view(np.uint16)
    return np.ascontiguousarray(slots.reshape(len(slots), setup.plane_count, -1).swapaxes(0, 1))


def _wrong(setup: TransferSetup, found: Elements, right: Elements) -> int:
    """Rows, which are as long as a block."""
    planes = zip(found.reshape(len(right), -1), right.reshape(len(right), -1), strict=True)
    return setup.lab.wrong_rows([(a.view(np.uint8), b.view(np.uint8)) for a, b in planes], setup.block_bytes)


class _Stream:
    """A stream as `__cuda_stream__` hands it over."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def _foreign_stream(cupy: Any, handle: int) -> Any:
    """A CuPy stream over a handle, by the constructor that this version of CuPy does not deprecate."""
    adopt = getattr(cupy.cuda.Stream, "from_external", None)
    return cupy.cuda.ExternalStream(handle) if adopt is None else adopt(_Stream(handle))


class CupyArrays:
    """Indexing and `get`; `set` and indexed assignment; pinned memory, everything queued on one stream."""

    def __init__(self, setup: TransferSetup) -> None:
        import cupy

        self._setup, self._cupy = setup, cupy
        self._right = _right(setup)
        with setup.lab.device.current():  # CuPy takes a stream for one of its current device
            self._stream = _foreign_stream(cupy, setup.lab.timer.stream)
        num_blocks = setup.groups[0].planes[0].num_blocks
        with setup.lab.device.current(), self._stream:
            self._ids = cupy.asarray(setup.groups[0].blocks)
            self._cache = cupy.empty((len(self._right), num_blocks, self._right.shape[2]), dtype=cupy.uint16)
            self._cache[:, self._ids] = cupy.asarray(self._right)
            self._poison = cupy.full(self._right.shape, _POISON_ELEMENT, dtype=cupy.uint16)
            pinned = cupy.cuda.alloc_pinned_memory(self._right.nbytes)
        elements = np.frombuffer(pinned, dtype=np.uint16, count=self._right.size)
        self._host: Elements = elements.reshape(self._right.shape)
        self._host[...] = self._right
        self._stream.synchronize()

    def scenario(self, direction: Direction) -> Scenario:
        work = self._store if direction is Direction.STORE else self._load
        poison = self._poison_host if direction is Direction.STORE else self._poison_cache
        found = self._found_host if direction is Direction.STORE else self._found_cache
        return Scenario(
            lambda: self._timed(work),
            lambda: self._run(poison),
            lambda: _wrong(self._setup, found(), self._right),
            self._right.nbytes,
        )

    def _timed(self, work: Callable[[], object]) -> float:
        with self._setup.lab.device.current(), self._stream:
            return self._setup.lab.timer.seconds(work)

    def _run(self, work: Callable[[], object]) -> None:
        self._timed(work)

    def _store(self) -> None:
        self._cache[:, self._ids].get(stream=self._stream, out=self._host, blocking=False)

    def _load(self) -> None:
        fresh = self._cupy.empty(self._right.shape, dtype=self._cupy.uint16)
        fresh.set(self._host, stream=self._stream)
        self._cache[:, self._ids] = fresh

    def _poison_host(self) -> None:
        self._poison.get(stream=self._stream, out=self._host, blocking=False)

    def _poison_cache(self) -> None:
        self._cache.fill(_POISON_ELEMENT)

    def _found_host(self) -> Elements:
        return self._host

    def _found_cache(self) -> Elements:
        with self._setup.lab.device.current(), self._stream:
            found: Elements = self._cache[:, self._ids].get()
        return found

    def close(self) -> None:
        del self._cache, self._poison, self._ids, self._host
        self._cupy.get_default_memory_pool().free_all_blocks()
        self._cupy.get_default_pinned_memory_pool().free_all_blocks()


class JaxArrays:
    """A jitted gather and `device_put` to pinned memory; `device_put` and a jitted scatter into a donated array."""

    def __init__(self, setup: TransferSetup) -> None:
        import jax
        import jax.numpy as jnp

        self._setup, self._jax = setup, jax
        self._right = _right(setup)
        gpu = jax.devices("gpu")[setup.lab.device.index]
        self._on_gpu = jax.sharding.SingleDeviceSharding(gpu, memory_kind="device")
        self._on_host = jax.sharding.SingleDeviceSharding(gpu, memory_kind="pinned_host")
        num_blocks = setup.groups[0].planes[0].num_blocks
        shape = (len(self._right), num_blocks, self._right.shape[2])
        self._gather = jax.jit(lambda cache, ids: cache[:, ids])
        self._scatter = jax.jit(lambda cache, ids, fresh: cache.at[:, ids].set(fresh), donate_argnums=0)
        self._fill_poison = jax.jit(lambda cache: jnp.full_like(cache, _POISON_ELEMENT), donate_argnums=0)
        self._ids = jax.device_put(setup.groups[0].blocks.astype(np.int32), self._on_gpu)
        self._poison = jax.device_put(np.full_like(self._right, _POISON_ELEMENT), self._on_gpu)
        self._host = jax.device_put(self._right, self._on_host)
        cache = jax.device_put(np.zeros(shape, dtype=np.uint16), self._on_gpu)
        self._cache = self._scatter(cache, self._ids, jax.device_put(self._right, self._on_gpu))
        self._jax.block_until_ready((self._cache, self._host, self._poison))
        self._stored: Any = None

    def scenario(self, direction: Direction) -> Scenario:
        nbytes = self._right.nbytes
        if direction is Direction.STORE:
            return Scenario(self._store, self._poison_host, lambda: self._wrong(self._stored), nbytes)
        return Scenario(
            self._load, self._poison_cache, lambda: self._wrong(self._gather(self._cache, self._ids)), nbytes
        )

    def _store(self) -> float:
        begin = time.perf_counter()
        self._stored = self._jax.device_put(self._gather(self._cache, self._ids), self._on_host)
        self._stored.block_until_ready()
        return time.perf_counter() - begin

    def _load(self) -> float:
        begin = time.perf_counter()
        self._cache = self._scatter(self._cache, self._ids, self._jax.device_put(self._host, self._on_gpu))
        self._cache.block_until_ready()
        return time.perf_counter() - begin

    def _poison_host(self) -> None:
        """JAX allocates what it stores to, and gives it the memory that was freed last: poison that."""
        self._stored = None
        poison = self._jax.device_put(self._poison, self._on_host)
        poison.block_until_ready()
        poison.delete()

    def _poison_cache(self) -> None:
        self._cache = self._fill_poison(self._cache)
        self._cache.block_until_ready()

    def _wrong(self, found: Any) -> int:
        return _wrong(self._setup, np.asarray(found), self._right)

    def close(self) -> None:
        for array in (self._cache, self._host, self._poison, self._ids, self._stored):
            if array is not None:
                array.delete()
