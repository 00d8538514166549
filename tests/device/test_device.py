"""Opening, embedding, threads and contexts, allocations."""

from __future__ import annotations

import gc
import os
import pickle
import sys
from typing import Any, NoReturn

import numpy as np
import pytest
from cuda.bindings import driver as cuda
from helpers import in_threads
from strategies import engine_on

import kvoffload
from kvoffload import NO_WAIT, CapabilityError, DeviceBuffer, DriverError, KVLayout, LayoutError, OffloadEngine, Plane
from kvoffload.driver import address_of
from kvoffload.testing import SimulatedDriver, check_clean_close, leak_check

PACKAGE = os.path.join(os.path.dirname(kvoffload.__file__), "")
SIMULATOR = os.path.join(PACKAGE, "simulator", "")


def current_context(simulator: SimulatedDriver) -> int:
    return int(simulator.cuCtxGetCurrent()[1])


def new_context(simulator: SimulatedDriver, device: int = 0) -> int:
    """A context of the caller's own, current for this thread."""
    if simulator.bindings_version < (13, 0):
        return int(simulator.cuCtxCreate(0, device)[1])
    return int(simulator.cuCtxCreate(None, 0, device)[1])


# opening


def test_pitfall_21_no_context_before_a_device_is_opened_and_only_that_devices_then() -> None:
    simulator = SimulatedDriver(device_count=3)
    assert simulator.call_count == {}
    device = kvoffload.open_device(1, backend=simulator)
    assert simulator.leaks()["primary_retains"] == 1
    with device.current():
        assert int(simulator.cuCtxGetDevice()[1]) == 1
    assert current_context(simulator) == 0
    check_clean_close(device)


def test_two_devices_of_one_gpu_share_its_primary_context() -> None:
    simulator = SimulatedDriver()
    one, other = kvoffload.open_device(backend=simulator), kvoffload.open_device(backend=simulator)
    assert one.context == other.context
    buffer = other.allocate(64)
    one.close()
    assert buffer.to_numpy().shape == (64,)
    check_clean_close(other)


@pytest.mark.parametrize("index", [2, 99, np.uint8(2), 2**31, 2**70])
def test_an_index_without_a_gpu_is_refused(index: int) -> None:
    with pytest.raises(ValueError, match=f"index must name one of the 2 devices, 0 to 1, got {index}"):
        kvoffload.open_device(index, backend=SimulatedDriver(device_count=2))


@pytest.mark.parametrize("index", [-1, "0", None, 1.0, True, np.float32(1)])
def test_an_index_that_is_no_ordinal_is_refused(index: Any) -> None:
    simulator = SimulatedDriver(device_count=2)
    with pytest.raises(ValueError, match="index must be an integer of at least 0, got ") as refused:
        kvoffload.open_device(index, backend=simulator)
    assert repr(index) in str(refused.value)
    assert simulator.leaks()["primary_retains"] == 0


@pytest.mark.parametrize("context", ["5", b"5", True, 0, -1, 1.5j, [], object()])
def test_a_context_that_is_no_handle_is_refused_by_name(context: Any) -> None:
    simulator = SimulatedDriver()
    with pytest.raises(TypeError, match="context must be None or the handle of a CUDA context, got "):
        kvoffload.open_device(backend=simulator, context=context)
    assert simulator.leaks()["primary_retains"] == 0


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ({"seed": "x"}, "seed must be an integer, got 'x'"),
        ({"seed": 1.5}, "seed must be an integer, got 1.5"),
        ({"seed": True}, "seed must be an integer, got True"),
        ({"driver_version": 13}, r"driver_version must be two integers such as \(13, 0\), got 13"),
        ({"driver_version": "13.0"}, "driver_version must be two integers"),
        ({"bindings_version": (13,)}, "bindings_version must be two integers"),
        ({"bindings_version": (13, "3")}, "bindings_version must be two integers"),
    ],
)
def test_options_of_the_simulated_device_are_checked_by_name(option: dict[str, Any], problem: str) -> None:
    with pytest.raises(TypeError, match=problem):
        SimulatedDriver(**option)


@pytest.mark.parametrize("seed", [0, -3, 2**200, np.int64(7)])
def test_any_integer_is_a_seed(seed: Any) -> None:
    kvoffload.open_device(backend=SimulatedDriver(seed=seed)).close()


def loading(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Have the real driver fail with `error` when it is loaded."""

    def load() -> NoReturn:
        raise error

    monkeypatch.setattr("kvoffload.driver.cuda.load", load)


@pytest.mark.parametrize(
    "error",
    [CapabilityError("no driver library"), DriverError("cuInit", "CUDA_ERROR_NO_DEVICE", 100)],
    ids=["no library", "no device"],
)
def test_auto_is_the_simulated_device_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    loading(monkeypatch, error)
    with kvoffload.open_device(backend="auto") as device:
        assert device.simulated
    with pytest.raises(type(error)):
        kvoffload.open_device(backend="cuda")


def test_auto_does_not_hide_a_broken_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    loading(monkeypatch, DriverError("cuInit", "CUDA_ERROR_SYSTEM_NOT_READY", 802))
    with pytest.raises(DriverError, match=r"cuInit returned CUDA_ERROR_SYSTEM_NOT_READY \(802\)"):
        kvoffload.open_device(backend="auto")


def test_a_driver_error_survives_pickling_with_its_detail() -> None:
    error = DriverError("cuInit", "CUDA_ERROR_NO_DEVICE", 100, "install a driver")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) == "cuInit returned CUDA_ERROR_NO_DEVICE (100): install a driver"
    assert (type(again), again.call, again.name, again.code) == (DriverError, "cuInit", "CUDA_ERROR_NO_DEVICE", 100)


@pytest.mark.parametrize("backend", ["gpu", "", None, 5, object()])
def test_an_unknown_backend_is_refused(backend: Any) -> None:
    with pytest.raises(ValueError, match="backend must be 'cuda', 'simulated', 'auto' or a SimulatedDriver"):
        kvoffload.open_device(backend=backend)


def test_a_device_describes_itself(device: kvoffload.Device) -> None:
    assert (device.index, device.name, device.simulated, device.closed) == (0, "NVIDIA simulated GPU", True, False)
    assert (device.stream_priorities[0], device.stream_priorities[-1]) == (-5, 0)
    assert device.pci.address.startswith("0000:")
    assert repr(device) == "Device(0, 'NVIDIA simulated GPU', simulated, 0 engines)"
    with engine_on(device):
        assert repr(device).endswith("1 engines)")


def test_a_failure_while_opening_leaves_nothing() -> None:
    for name in ("cuCtxGetDevice", "cuDriverGetVersion", "cuDeviceGetName", "cuCtxGetStreamPriorityRange"):
        simulator = SimulatedDriver()
        simulator.faults.fail_call(name)
        with pytest.raises(kvoffload.DriverError, match=name):
            kvoffload.open_device(backend=simulator)
        assert simulator.leaks()["primary_retains"] == 0
        assert current_context(simulator) == 0


# embedding


def test_pitfall_36_a_callers_own_context_is_used_and_left_alone() -> None:
    simulator = SimulatedDriver()
    simulator.cuInit(0)
    mine = new_context(simulator)
    with kvoffload.open_device(backend=simulator, context=mine) as device:
        assert device.context == mine
        assert simulator.leaks()["primary_retains"] == 0
        with engine_on(device) as engine:
            engine.store([0], [0]).wait(10)
            assert current_context(simulator) == mine
    assert current_context(simulator) == mine
    assert simulator.leaks()["contexts"] == 1  # still the caller's
    simulator.cuCtxDestroy(mine)
    assert not any(simulator.leaks().values())


def test_a_context_may_be_any_kind_of_handle() -> None:
    simulator = SimulatedDriver()
    simulator.cuInit(0)
    context = simulator.cuCtxCreate(None, 0, 0)[1]
    with kvoffload.open_device(backend=simulator, context=context) as device:
        assert device.context == int(context)
    simulator.cuCtxDestroy(context)


def test_pitfall_21_a_context_of_another_gpu_is_refused() -> None:
    simulator = SimulatedDriver(device_count=2)
    simulator.cuInit(0)
    mine = new_context(simulator, device=1)
    with pytest.raises(ValueError, match="context belongs to device 1, but index is 0; pass index=1"):
        kvoffload.open_device(0, backend=simulator, context=mine)
    assert current_context(simulator) == mine
    with kvoffload.open_device(1, backend=simulator, context=mine) as device:
        assert device.index == 1
    simulator.cuCtxDestroy(mine)


def test_a_context_that_is_none_is_a_driver_error() -> None:
    simulator = SimulatedDriver()
    with pytest.raises(kvoffload.DriverError, match="cuCtxPushCurrent returned CUDA_ERROR_INVALID_CONTEXT"):
        kvoffload.open_device(backend=simulator, context=12345)


# threads and contexts


def whole_life(device: kvoffload.Device) -> None:
    """Everything that a program may call, once."""
    buffer = device.allocate(64)
    buffer.copy_from(np.arange(64, dtype=np.uint8))
    assert buffer.to_numpy()[5] == 5
    buffer.close()
    with engine_on(device) as engine:
        job = engine.store([1, 2], [1, 2])
        job.order_before(1)
        assert job.wait(10).error is None
        second = engine.load([1], [3])
        while not second.done:
            pass
        assert [result.job_id for result in engine.poll()] == [second.id]
        engine.load([1], [4])
        engine.drain(10)
        repr(engine)
        engine.statistics()


def test_pitfall_36_every_call_works_from_a_thread_without_a_context(any_device: kvoffload.Device) -> None:
    def life() -> None:
        assert current_context(any_device.simulator) == 0
        whole_life(any_device)
        assert current_context(any_device.simulator) == 0
        assert any_device.simulator.context_stack == []

    with leak_check(any_device):
        in_threads(life)  # a thread has no context


def test_pitfall_36_the_callers_other_context_is_current_again_after_every_call() -> None:
    simulator = SimulatedDriver(device_count=2)
    simulator.cuInit(0)
    other = new_context(simulator, device=1)
    stack = list(simulator.context_stack)
    device = kvoffload.open_device(0, backend=simulator)
    whole_life(device)
    assert current_context(simulator) == other
    assert simulator.context_stack == stack
    for wrong in (
        lambda: device.allocate(1 << 60),
        lambda: engine_on(device, stream_priority=7),
        lambda: OffloadEngine(KVLayout([[Plane(4096, block_bytes=1, num_blocks=1)]]), device=device, num_slots=1),
    ):
        with pytest.raises((kvoffload.KVOffloadError, ValueError)):
            wrong()
        assert simulator.context_stack == stack
    device.close()
    assert current_context(simulator) == other
    simulator.cuCtxDestroy(other)
    assert not any(simulator.leaks().values())


def test_pitfall_36_allocations_land_on_the_right_device() -> None:
    simulator = SimulatedDriver(device_count=2)
    simulator.cuInit(0)
    new_context(simulator, device=0)
    with kvoffload.open_device(1, backend=simulator) as device:
        buffer = device.allocate(4096)
        region = simulator.memory.at(buffer.address)
        assert region is not None
        assert region.context.device == 1
    simulator.cuCtxDestroy(current_context(simulator))


def test_current_is_reentrant_and_restores_after_an_exception(device: kvoffload.Device) -> None:
    def nested() -> None:
        with device.current(), device.current():
            assert current_context(device.simulator) == device.context
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        nested()
    assert current_context(device.simulator) == 0


@pytest.mark.parametrize(("pushed", "most"), [(False, 6), (True, 8)])
def test_making_the_context_current_costs_few_python_calls(device: kvoffload.Device, pushed: bool, most: int) -> None:
    """It is on the path of every transfer. The simulator is not counted, nor is `Driver.call`."""
    calls: list[str] = []

    def count(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        ours = code.co_filename.startswith(PACKAGE) and not code.co_filename.startswith(SIMULATOR)
        if event == "call" and ours and code.co_name != "call":
            calls.append(code.co_qualname)

    def enter() -> None:
        sys.setprofile(count)
        try:
            with device.current():
                pass
        finally:
            sys.setprofile(None)

    if pushed:
        in_threads(enter)
    else:
        with device.current():
            enter()
    assert calls[0] == "Device.current"
    assert len(calls) <= most, calls


# planes and allocations


def test_pitfall_09_a_plane_past_its_allocation_is_refused_and_nothing_breaks(any_device: kvoffload.Device) -> None:
    buffer = any_device.allocate(1000)
    inside = Plane(buffer.address, block_bytes=100, num_blocks=10)
    outside = Plane(buffer.address + 1, block_bytes=100, num_blocks=10)
    with (
        leak_check(any_device),
        pytest.raises(LayoutError, match=r"groups\[1\]\[0\].* 1 bytes past the end of its alloc"),
    ):
        OffloadEngine(KVLayout([[inside], [outside]]), device=any_device, num_slots=4)
    with OffloadEngine(KVLayout([[inside]]), device=any_device, num_slots=4) as engine:
        engine.store([9], [0]).wait(10)


@pytest.mark.parametrize("address", [4096, 1 << 40])
def test_an_address_that_is_no_gpu_memory_is_refused(device: kvoffload.Device, address: int) -> None:
    layout = KVLayout([[Plane(address, block_bytes=64, num_blocks=2)]])
    with leak_check(device), pytest.raises(LayoutError, match=r"groups\[0\]\[0\]: Plane\(.* is not memory of NVIDIA"):
        OffloadEngine(layout, device=device, num_slots=2)


def test_planes_cannot_be_found_in_a_lost_context() -> None:
    device = kvoffload.open_device(backend=SimulatedDriver())
    layout = KVLayout([device.allocate_planes(2, block_bytes=64, num_blocks=2)])
    assert device.simulator is not None
    with device.current():
        device.simulator.faults.sticky(at_call=1)
        device.driver.api.cuCtxSynchronize()
        with pytest.raises(DriverError) as caught:
            device.allocations(layout)
        assert caught.value.sticky
    device.close()


def test_pitfall_32_planes_on_the_wrong_device_are_refused() -> None:
    simulator = SimulatedDriver(device_count=2)
    with kvoffload.open_device(0, backend=simulator) as first, kvoffload.open_device(1, backend=simulator) as second:
        layout = KVLayout([second.allocate_planes(2, block_bytes=64, num_blocks=4)])
        with leak_check(first), pytest.raises(LayoutError, match=r"groups\[0\]\[0\].*device 1.*device 0"):
            OffloadEngine(layout, device=first, num_slots=2)
        with OffloadEngine(layout, device=second, num_slots=2) as engine:
            engine.store([0], [0]).wait(10)


def test_pitfall_32_host_memory_is_refused_as_a_plane(device: kvoffload.Device) -> None:
    with engine_on(device) as engine:
        pinned = Plane(address_of(engine.slots), block_bytes=64, num_blocks=2)
        with leak_check(device), pytest.raises(LayoutError, match=r"groups\[0\]\[0\].*host memory"):
            OffloadEngine(KVLayout([[pinned]]), device=device, num_slots=2)


def test_planes_of_a_slab_fold_and_keep_it_alive(device: kvoffload.Device) -> None:
    planes = device.allocate_planes(5, block_bytes=100, num_blocks=7, block_stride=112)
    owner = planes[0].owner
    assert isinstance(owner, DeviceBuffer)
    assert {plane.owner for plane in planes} == {owner}
    assert (planes[-1].end, planes[0].address) == (owner.address + owner.nbytes, owner.address)
    assert all(plane.address % 512 == 0 for plane in planes)
    with OffloadEngine(KVLayout([planes]), device=device, num_slots=2) as engine:
        assert "5 planes fold into 1 operation a block" in repr(engine)
    del owner, engine
    check_that_each_keeps_the_memory(device, planes)


def check_that_each_keeps_the_memory(device: kvoffload.Device, planes: list[Plane]) -> None:
    """The caller keeps no other reference to it."""
    last = planes[3]
    planes.clear()
    gc.collect()
    device.reclaim()
    assert device.simulator.leaks()["device_allocations"] == 1
    del last
    gc.collect()
    device.reclaim()
    assert device.simulator.leaks()["device_allocations"] == 0


def test_allocated_blocks_are_ranges_and_keep_their_memory_alive(device: kvoffload.Device) -> None:
    planes = device.allocate_blocks(7, planes=5, block_bytes=100)
    owner = planes[0].owner
    assert isinstance(owner, DeviceBuffer)
    assert owner.nbytes == 7 * 5 * 100
    assert [plane.address - owner.address for plane in planes] == [0, 100, 200, 300, 400]
    assert {(each.block_bytes, each.num_blocks, each.block_stride, each.owner) for each in planes} == {
        (100, 7, 500, owner)
    }
    assert planes[-1].end == owner.address + owner.nbytes
    for factor in (1, 4):
        with OffloadEngine(KVLayout([planes], blocks_per_slot=factor), device=device, num_slots=2) as engine:
            assert "5 planes fold into 1 operation a block" in repr(engine)
    del owner, engine
    check_that_each_keeps_the_memory(device, planes)


@pytest.mark.parametrize("name", ["num_blocks", "planes", "block_bytes"])
@pytest.mark.parametrize("count", [0, -1, 1.5, "2", True])
def test_blocks_are_allocated_by_positive_integers(device: kvoffload.Device, name: str, count: Any) -> None:
    sizes: dict[str, Any] = {"num_blocks": 2, "planes": 2, "block_bytes": 2, name: count}
    with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1, got {count!r}"):
        device.allocate_blocks(sizes.pop("num_blocks"), **sizes)


@pytest.mark.parametrize("count", [0, -1, 1.5, "2"])
def test_a_slab_needs_planes(device: kvoffload.Device, count: Any) -> None:
    with pytest.raises(ValueError, match=f"count must be an integer of at least 1, got {count!r}"):
        device.allocate_planes(count, block_bytes=16, num_blocks=4)


@pytest.mark.parametrize("nbytes", [1.5, "64", None, True, 0, -5])
def test_an_allocation_is_a_number_of_bytes(device: kvoffload.Device, nbytes: Any) -> None:
    with (
        leak_check(device),
        pytest.raises(ValueError, match=f"nbytes must be an integer of at least 1, got {nbytes!r}"),
    ):
        device.allocate(nbytes)


def test_numbers_may_be_numpy_integers() -> None:
    index: Any = np.int64(1)
    nbytes: Any = np.uint16(64)
    count: Any = np.int8(3)
    with kvoffload.open_device(index, backend=SimulatedDriver(device_count=2)) as device:
        assert (device.index, device.allocate(nbytes).nbytes) == (1, 64)
        planes = device.allocate_planes(count, block_bytes=64, num_blocks=8)
        options: dict[str, Any] = {"num_slots": np.int32(4), "max_in_flight": np.uint64(2), "staging_bytes": np.int8(0)}
        with OffloadEngine(KVLayout([planes]), device=device, **options) as engine:
            assert (engine.num_slots, engine.max_in_flight, engine.slots.shape[0]) == (4, 2, 4)
            engine.store(range(4), range(4)).wait(10)


@pytest.mark.parametrize(
    ("option", "least"),
    [
        ({"num_slots": -1}, 0),
        ({"num_slots": 4.0}, 0),
        ({"num_slots": True}, 0),
        ({"max_in_flight": "8"}, 1),
        ({"max_in_flight": np.int64(0)}, 1),
        ({"staging_bytes": -1}, 0),
        ({"staging_bytes": None}, 0),
    ],
)
def test_an_engines_numbers_are_checked_by_name(device: kvoffload.Device, option: dict[str, Any], least: int) -> None:
    layout = KVLayout([device.allocate_planes(1, block_bytes=64, num_blocks=8)])
    (name,) = option
    with leak_check(device), pytest.raises(ValueError, match=f"{name} must be an integer of at least {least}, got "):
        OffloadEngine(layout, device=device, **option)


def test_planes_in_the_place_of_a_layout_are_refused_by_name(device: kvoffload.Device) -> None:
    planes: Any = device.allocate_planes(1, block_bytes=64, num_blocks=8)
    with leak_check(device), pytest.raises(TypeError, match=r"layout must be a KVLayout, got \[Plane\("):
        OffloadEngine(planes, device=device)
    anything: Any = "cuda:0"
    with pytest.raises(TypeError, match=r"device must be a Device from open_device\(\), got 'cuda:0'"):
        OffloadEngine(KVLayout([planes]), device=anything)


def test_a_plane_takes_the_pointer_type_of_the_bindings(device: kvoffload.Device) -> None:
    buffer = device.allocate(512)
    plane = Plane(cuda.CUdeviceptr(buffer.address), block_bytes=64, num_blocks=8, owner=buffer)
    assert (plane.address, type(plane.address)) == (buffer.address, int)
    with OffloadEngine(KVLayout([[plane]]), device=device, num_slots=2) as engine:
        engine.store([7], [0]).wait(10)


def test_pitfall_37_separate_allocations_at_one_stride_do_not_fold_in_an_engine(any_device: kvoffload.Device) -> None:
    """Planes that a fold by address alone would take for runs."""
    buffers = [any_device.allocate(1 << 16) for _ in range(12)]
    addresses = sorted(buffer.address for buffer in buffers)
    planes = [Plane(address, block_bytes=64, num_blocks=4) for address in addresses]
    assert "do not fold" not in repr(KVLayout([planes]))  # any two rising addresses make a run
    with OffloadEngine(KVLayout([planes]), device=any_device, num_slots=4) as engine:
        assert "12 planes do not fold (12 operations a block)" in repr(engine)
        for copier in ("strided", "loop"):
            engine.store(range(4), range(4), after=NO_WAIT, copier=copier).wait(10)
