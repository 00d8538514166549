"""Resources: registered before they are made, freed once, and freed to the end although a release was interrupted."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import pytest
from helpers import in_threads

import kvoffload
from kvoffload import ClosedError, DriverError
from kvoffload.device.pinned import PAGE_BYTES, PinnedMemory


class Owner:
    """Streams that a resource frees; `interrupt` is raised before the release of the stream at that position."""

    def __init__(self, device: kvoffload.Device, count: int, interrupt: BaseException | None = None) -> None:
        streams: list[int] = []
        pending = [interrupt] if interrupt is not None else []

        def release() -> None:
            while streams:
                if pending and len(streams) == 1:
                    raise pending.pop()
                device.driver.stream_destroy(streams[-1])
                del streams[-1]

        self.resource = device.adopt(self, release, "an Owner")
        with device.current():
            streams.extend(device.driver.stream_create(0) for _ in range(count))


def streams(device: kvoffload.Device) -> int:
    return int(device.simulator.leaks()["streams"])


def test_a_resource_is_freed_once(device: kvoffload.Device) -> None:
    owner = Owner(device, 2)
    assert (owner.resource.alive, device.owned, streams(device)) == (True, 1, 2)
    with device.current():
        owner.resource.free()
        assert (owner.resource.alive, device.owned, streams(device)) == (False, 0, 0)
        owner.resource.free()


def test_an_interrupted_release_goes_on_with_the_rest(device: kvoffload.Device) -> None:
    owner = Owner(device, 3, KeyboardInterrupt())
    with device.current(), pytest.raises(KeyboardInterrupt):
        owner.resource.free()
    assert (owner.resource.alive, streams(device)) == (True, 1)
    with device.current():
        owner.resource.free()
    assert (owner.resource.alive, streams(device)) == (False, 0)


def test_garbage_is_freed_by_the_next_call_with_a_warning(device: kvoffload.Device) -> None:
    owner = Owner(device, 2)
    calls = device.simulator.faults.total_calls
    del owner
    gc.collect()
    assert (device.simulator.faults.total_calls, streams(device)) == (calls, 2)  # a weakref callback calls no driver
    with pytest.warns(ResourceWarning, match="an Owner was never closed"):
        device.reclaim()
    assert (device.owned, streams(device)) == (0, 0)


def test_an_interrupted_collection_is_taken_up_again(device: kvoffload.Device) -> None:
    owner = Owner(device, 2, KeyboardInterrupt())
    del owner
    gc.collect()
    with pytest.raises(KeyboardInterrupt):
        device.reclaim()
    assert streams(device) == 1
    with pytest.warns(ResourceWarning, match="an Owner was never closed"):
        device.reclaim()
    assert (device.owned, streams(device)) == (0, 0)


def test_garbage_that_cannot_be_freed_is_tried_again_when_the_device_closes(device: kvoffload.Device) -> None:
    owner = Owner(device, 1, DriverError("cuStreamDestroy", "CUDA_ERROR_UNKNOWN", 999))
    owner.resource.what = None
    del owner
    gc.collect()
    with pytest.warns(ResourceWarning, match=r"owner is garbage could not be freed: cuStreamDestroy returned"):
        device.reclaim()
    assert (device.owned, streams(device)) == (1, 1)
    device.close()
    assert (device.owned, streams(device)) == (0, 0)


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), RuntimeError("a hook"), DriverError("cuStreamDestroy", "CUDA_ERROR_UNKNOWN", 999)]
)
def test_pitfall_41_an_interrupted_close_can_be_called_again_and_ends(error: BaseException) -> None:
    device = kvoffload.open_device(backend="simulated")
    simulator = device.simulator
    buffer = device.allocate(64)
    owner = Owner(device, 2, error)
    with pytest.raises(type(error)):
        device.close()
    with pytest.raises(ClosedError):
        device.allocate(64)
    assert (owner.resource.alive, simulator.leaks()["primary_retains"]) == (True, 1)
    device.close()
    device.close()
    assert not any(simulator.leaks().values())
    assert simulator.call_count["cuDevicePrimaryCtxRelease"] == 1
    assert repr(buffer).endswith("closed)")


def test_several_threads_free_a_resource_once(device: kvoffload.Device) -> None:
    buffers = [device.allocate(64) for _ in range(50)]
    start = threading.Barrier(4)

    def close() -> None:
        start.wait(30)
        for buffer in buffers:
            buffer.close()

    in_threads(*[close] * 4)
    assert device.simulator.call_count["cuMemFree"] == 50


# pinned memory


@pytest.mark.parametrize("point", ["before", "after"])
def test_pinned_memory_is_in_its_holder_before_anything_is_registered(
    device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    holder: list[PinnedMemory] = []
    register = device.driver.host_register

    def interrupted(address: int, nbytes: int) -> None:
        assert len(holder) == 1
        if point == "after":
            register(address, nbytes)
        raise KeyboardInterrupt

    monkeypatch.setattr(device.driver, "host_register", interrupted)
    with device.current(), pytest.raises(KeyboardInterrupt):
        PinnedMemory(device.driver, PAGE_BYTES, holder=holder)
    assert device.simulator.leaks()["registered_ranges"] == 0


def test_memory_whose_release_was_interrupted_stays_mapped_until_it_is_unregistered(
    device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    with device.current():
        pinned = PinnedMemory(device.driver, PAGE_BYTES)
    address, unregister = pinned.address, device.driver.host_unregister

    def interrupted(address: int) -> None:
        unregister(address)
        raise KeyboardInterrupt

    monkeypatch.setattr(device.driver, "host_unregister", interrupted)
    with device.current(), pytest.raises(KeyboardInterrupt):
        pinned.release()
    monkeypatch.undo()
    with device.current():
        pinned.release()  # NOT_REGISTERED the second time: no error
        again = PinnedMemory(device.driver, PAGE_BYTES)
        assert again.address != address  # still mapped: `pinned` is alive
        again.release()


@pytest.mark.parametrize("error", [KeyboardInterrupt, DriverError], ids=lambda error: error.__name__)
def test_memory_that_is_still_registered_stays_mapped_also_as_garbage(
    device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """What is mapped at its address next could not be registered."""
    with device.current():
        pinned = PinnedMemory(device.driver, 16 * PAGE_BYTES)
    address, alive = pinned.address, weakref.ref(pinned)
    unregister = device.driver.host_unregister

    def failing(_: int) -> None:
        raise DriverError("cuMemHostUnregister", "CUDA_ERROR_UNKNOWN", 999) if error is DriverError else error

    monkeypatch.setattr(device.driver, "host_unregister", failing)
    with device.current(), pytest.raises(error):
        pinned.release()
    monkeypatch.setattr(device.driver, "host_unregister", unregister)
    del pinned
    gc.collect()
    with device.current():
        again = PinnedMemory(device.driver, 16 * PAGE_BYTES)
        assert again.address != address
        again.release()
        kept = alive()
        assert kept is not None
        kept.release()
    del kept
    gc.collect()
    assert alive() is None


# current


def test_a_context_that_is_current_already_is_neither_pushed_nor_popped(device: kvoffload.Device) -> None:
    with device.current():
        device.simulator.faults.calls = []
        with device.current():
            pass
        names = [name for name, _ in device.simulator.faults.calls]
    assert names == ["cuCtxGetCurrent", *["cuThreadExchangeStreamCaptureMode"] * 2]


def test_the_lifecycle_lock_is_waited_for_with_a_limit(device: kvoffload.Device) -> None:
    taken, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with device.lifecycle:
            taken.set()
            leave.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait(30)
    with pytest.raises(TimeoutError, match=r"another thread opens or closes an engine of Device\(0"):
        device.wait_lifecycle(0.01)
    with pytest.raises(TimeoutError):
        device.close(timeout=0.01)
    assert not device.closed
    leave.set()
    thread.join(30)
    for timeout in (None, 0, -1, 1e30):
        device.wait_lifecycle(timeout)
        with device.lifecycle:
            device.wait_lifecycle(timeout)  # this thread's own hold is no reason to wait
    taken.clear()
    again = threading.Thread(target=hold)  # ends, since the lock was left free
    again.start()
    assert taken.wait(30)
    again.join(30)


class BindingPartial(partial[Any]):
    """A `functools.partial` as Python 3.14 has it: an attribute of a class is bound to the instance."""

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)


def test_the_lifecycle_lock_is_waited_for_on_every_python(
    device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.13 warns where a `partial` is called as a method; from 3.14 on it gets the instance."""
    monkeypatch.setattr("kvoffload.device.device.partial", BindingPartial)
    device.wait_lifecycle(0.01)
    with device.lifecycle:
        device.wait_lifecycle(0.01)
    device.close(timeout=5.0)
    assert device.closed


# use after free


def test_an_array_made_from_simulated_memory_keeps_it() -> None:
    device = kvoffload.open_device(backend="simulated")
    array = device.empty((1 << 12,), "uint8")
    array.buffer.copy_from(np.full(1 << 12, 7, np.uint8))
    exporters: list[Any] = [array, array.buffer, array.view("int8")]
    taken = [np.from_dlpack(each)[:4] for each in exporters]
    del array, exporters
    gc.collect()
    device.allocate(64).close()  # frees what is garbage
    assert device.simulator.leaks()["device_allocations"] == 1
    assert all((each == 7).all() for each in taken)
    last = taken.pop()
    taken.clear()
    gc.collect()
    device.reclaim()
    assert device.simulator.leaks()["device_allocations"] == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        device.close()
    assert (last.view(np.uint8) == 0xDE).all()  # freed with the device, and still memory
    if last.flags.writeable:  # numpy before 2 imports read-only
        last[:] = 1
