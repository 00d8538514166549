"""Interrupts in the caches for JAX: no array that the library holds is lost, no transfer is submitted too late."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from interrupts import Signals, interrupted_everywhere
from random_programs import jax_on

import kvoffload
from kvoffload import OffloadEngine
from kvoffload.jax import OwnedCache, StagedCache
from kvoffload.jax.callback import Ticket, called_back

PLANES, BLOCKS, WIDTH = 2, 6, 8


@pytest.fixture
def jax(device: kvoffload.Device) -> Iterator[Any]:
    with jax_on(device) as module:
        yield module


@pytest.fixture
def gpu_jax(gpu_device: kvoffload.Device) -> Iterator[Any]:
    with jax_on(gpu_device) as module:
        yield module


class InTheCaches(Signals):
    """The points of `kvoffload.jax` itself, and of its direct calls: those of the engine have tests of their own."""

    def kind_of(self, frame: FrameType, event: str, argument: Any) -> str | None:
        near = [frame, *([frame.f_back] if frame.f_back is not None else [])]
        inside = any("/kvoffload/jax/" in each.f_code.co_filename for each in near)
        return super().kind_of(frame, event, argument) if inside else None


def test_reading_an_owned_cache_after_a_load(jax: Any, device: kvoffload.Device) -> None:  # noqa: ARG001
    cache = OwnedCache(device, (PLANES, BLOCKS, WIDTH), "float32", plane_axis=0, block_axis=1)
    with OffloadEngine(cache.layout, device=device, num_slots=2, sm_limit=0) as engine:

        def read_after_load(value: int) -> Callable[[], object]:
            engine.slots[0].view(np.float32)[:] = value
            engine.load([0], [1], after=cache).wait()
            return lambda: cache.array

        for value, _ in interrupted_everywhere(read_after_load):
            before = cache.unordered
            assert (np.asarray(cache.array)[:, 1] == value).all()
            assert cache.array is cache.array
            assert before.is_deleted() or before is cache.array


def test_setting_an_owned_cache(jax: Any, device: kvoffload.Device) -> None:
    cache = OwnedCache(device, (PLANES, BLOCKS, WIDTH), "float32", plane_axis=0, block_axis=1)
    update = jax.jit(lambda array, value: array.at[:, 2].set(value), donate_argnums=0)
    with OffloadEngine(cache.layout, device=device, num_slots=2, sm_limit=0) as engine:

        def set_result(value: int) -> Callable[[], object]:
            result = update(cache.array, float(value))
            return lambda: setattr(cache, "array", result)

        for value, raised in interrupted_everywhere(set_result):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", kvoffload.KVOffloadWarning)
                found = set(np.asarray(cache.array)[:, 2].ravel().tolist())
            assert found <= {float(value - 1), float(value)}
            assert raised or found == {float(value)}
            cache.array = update(cache.array, float(value))
            engine.store([2], [0], after=cache)
            engine.load([0], [3], after=cache)
            assert (np.asarray(cache.array)[:, 2:4] == value).all()


def test_an_owned_cache_recovers_when_the_result_of_a_step_is_lost(jax: Any, device: kvoffload.Device) -> None:
    """As after an interrupt between a step and the assignment of its result."""
    cache = OwnedCache(device, (PLANES, BLOCKS, WIDTH), "float32", plane_axis=0, block_axis=1)
    update = jax.jit(lambda array: array.at[:, 2].set(5), donate_argnums=0)
    with OffloadEngine(cache.layout, device=device, num_slots=2, sm_limit=0) as engine:
        update(cache.array)
        assert cache.is_deleted()
        with pytest.raises(ValueError, match="after was deleted"):
            engine.store([0], [0], after=cache)
        with pytest.warns(kvoffload.KVOffloadWarning, match="array was donated and no result was set"):
            array = cache.array
        assert not array.is_deleted()
        cache.array = update(array)
        engine.store([2], [0], after=cache)
        engine.load([0], [3], after=cache)
        assert (np.asarray(cache.array)[:, 3] == 5).all()


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_what_a_lost_step_wrote_is_stored_on_a_gpu(gpu_jax: Any, gpu_device: kvoffload.Device) -> None:
    """The step still runs when its result is lost, so reading the array has to wait for it."""
    jax = gpu_jax
    slow = jax.jit(
        lambda c, a: c.at[:].set(jax.lax.fori_loop(0, 60, lambda _, x: x @ x * 1e-4, a)[0, 0] * 0 + 3), donate_argnums=0
    )
    burn = jax.numpy.ones((6144, 6144), jax.numpy.bfloat16)
    cache = OwnedCache(gpu_device, (PLANES, BLOCKS, WIDTH), "float32", plane_axis=0, block_axis=1)
    with OffloadEngine(cache.layout, device=gpu_device, num_slots=2) as engine:
        cache.array = slow(cache.array, burn)
        cache.array = jax.jit(lambda c: c * 0, donate_argnums=0)(cache.array)
        engine.slots[:] = 0
        slow(cache.array, burn)
        with pytest.warns(kvoffload.KVOffloadWarning, match="array was donated and no result was set"):
            array = cache.array
        assert array.unsafe_buffer_pointer() == cache.address
        engine.store([2], [0], after=cache).wait(30)
        assert (engine.slots[0].view(np.float32)[: PLANES * WIDTH] == 3).all()


@pytest.mark.parametrize("call", ["store", "load"])
def test_a_staged_cache(jax: Any, device: kvoffload.Device, call: str) -> None:
    """Transfers of two batches each. What an interrupted call has copied is not said; what comes after is right."""
    content = np.arange(PLANES * BLOCKS * WIDTH, dtype=np.float32).reshape(PLANES, BLOCKS, WIDTH)
    cache = StagedCache(device, jax.numpy.asarray(content), stage_blocks=2, plane_axis=0, block_axis=1)
    with OffloadEngine(cache.layout, device=device, num_slots=4, sm_limit=0) as engine:
        cache.store(engine, [0, 1, 2], [0, 1, 2])

        def transfer(_: int) -> Callable[[], object]:
            if call == "store":
                return lambda: cache.store(engine, [0, 1, 2], [0, 1, 2])
            return lambda: cache.load(engine, [0, 1, 2], [3, 4, 5])

        for _ in interrupted_everywhere(transfer, InTheCaches()):
            cache.store(engine, [2, 1, 0], [2, 1, 0])
            cache.load(engine, [2, 0, 1], [3, 4, 5])
            found = np.asarray(cache.array)
            assert (found[:, :3] == content[:, :3]).all()
            assert (found[:, 3:] == content[:, [2, 0, 1]]).all()


def test_a_callback_serves_the_transfer_that_it_was_dispatched_for() -> None:
    """A ticket for which an interrupted call never dispatched is dropped; one that was dispatched keeps its place."""
    submitted: list[str] = []

    def ticket(name: str, *, dispatched: bool) -> Ticket:
        def submit(stream: int) -> Any:
            submitted.append(f"{name} on {stream}")
            return SimpleNamespace(order_before=lambda _: None)

        made = Ticket(submit)
        made.dispatched = dispatched
        return made

    buffer = SimpleNamespace(__cuda_array_interface__={"data": (4096, False)})
    stale, late, newest = (
        ticket("stale", dispatched=False), ticket("late", dispatched=True), ticket("newest", dispatched=False)
    )  # fmt: skip
    tickets = deque([stale, late, newest])
    called_back(4096, tickets, SimpleNamespace(stream=7), buffer, None)
    called_back(4096, tickets, SimpleNamespace(stream=8), buffer, None)
    assert submitted == ["late on 7", "newest on 8"]
    assert not tickets
