"""Several GPUs: on which one a plane's memory is, although the bindings answer 0 to every question for its ordinal."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import kvoffload
from kvoffload import NO_WAIT, KVLayout, KVOffloadWarning, LayoutError, OffloadEngine, Plane
from kvoffload.driver.pointers import attribute
from kvoffload.testing import SimulatedDriver, check_clean_close

KNOWN = ["cuMemAlloc", "default pool", "own pool", "mapped"]


class Machine:
    """Two devices, and memory of them that several allocators made."""

    def __init__(self, api: Callable[..., SimulatedDriver] = SimulatedDriver) -> None:
        self.simulator = api(device_count=2)
        self.devices = [kvoffload.open_device(index, backend=self.simulator) for index in range(2)]
        self.outside: list[int] = []

    def layout(self, allocator: str, device: int, readers: tuple[int, ...] = ()) -> KVLayout:
        if allocator == "cuMemAlloc":
            return KVLayout([self.devices[device].allocate_planes(2, block_bytes=64, num_blocks=4)])
        addresses = [
            self.simulator.allocate_outside(256, device=device, allocator=allocator, readers=readers) for _ in range(2)
        ]
        self.outside += addresses
        return KVLayout([[Plane(address, block_bytes=64, num_blocks=4) for address in addresses]])

    def round_trip(self, layout: KVLayout, device: int) -> None:
        with OffloadEngine(layout, device=self.devices[device], num_slots=4, staging_bytes=0) as engine:
            engine.store([1], [2]).wait(10)
            engine.load([0], [2]).wait(10)
        planes = layout.groups[0].planes
        blocks = [self.simulator.view(plane.address, 128).reshape(2, 64) for plane in planes]
        assert all((first == second).all() for first, second in blocks)

    def close(self) -> None:
        for address in self.outside:
            self.simulator.free_outside(address)
        self.devices[1].close()
        check_clean_close(self.devices[0])


@pytest.fixture
def machine() -> Iterator[Machine]:
    opened = Machine()
    yield opened
    opened.close()


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("allocator", KNOWN)
@pytest.mark.parametrize(("ordinals", "pools"), [(False, True), (True, True), (False, False)])
def test_pitfall_42_memory_of_a_device_is_accepted_there_and_refused_on_the_other(
    machine: Machine, allocator: str, index: int, ordinals: bool, pools: bool
) -> None:
    """Whether or not the bindings answer rightly, and pools tell their device. (Else, who can access a pool does.)"""
    machine.simulator.device_ordinal_works = ordinals
    machine.simulator.pools_report_their_device = pools
    layout = machine.layout(allocator, index)
    machine.round_trip(layout, index)
    other = 1 - index
    with pytest.raises(LayoutError, match=rf"groups\[0\]\[0\]: .* memory of device {index}, but .* on device {other}"):
        OffloadEngine(layout, device=machine.devices[other], num_slots=4)


def test_pitfall_42_the_simulated_bindings_answer_as_the_real_ones(machine: Machine) -> None:
    """Else the tests above could not fail."""
    address = machine.devices[1].allocate(64).address
    with machine.devices[1].current():
        assert attribute(machine.devices[1].driver, "DEVICE_ORDINAL", address) == 0
        machine.simulator.device_ordinal_works = True
        assert attribute(machine.devices[1].driver, "DEVICE_ORDINAL", address) == 1


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(
    ("allocator", "readers", "reason"),
    [
        ("own pool", (0, 1), r"its memory pool may be on any of the devices \[0, 1\]"),
        ("unknown", (), "it belongs to no context, to no memory pool, and is not mapped virtual memory"),
    ],
)
def test_memory_whose_device_cannot_be_known_is_accepted_with_the_reason(
    machine: Machine, allocator: str, readers: tuple[int, ...], reason: str, index: int
) -> None:
    machine.simulator.pools_report_their_device = False
    layout = machine.layout(allocator, index, readers)
    text = rf"groups\[0\]\[0\]: the device of .* cannot be determined: {reason} \(2 such planes\)"
    with pytest.warns(KVOffloadWarning, match=text):
        machine.round_trip(layout, index)


@pytest.mark.parametrize(
    "missing", ["cuMemRetainAllocationHandle", "cuMemPoolGetAccess", "cuDeviceGetDefaultMemPool", "cuMemRelease"]
)
def test_bindings_without_a_call_leave_memory_accepted(missing: str) -> None:
    def absent(_: SimulatedDriver) -> None:
        raise AttributeError(missing)

    machine = Machine(type("Older", (SimulatedDriver,), {missing: property(absent)}))
    assert not machine.devices[0].driver.has(missing)
    machine.simulator.pools_report_their_device = False
    for allocator in KNOWN:
        layout = machine.layout(allocator, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", KVOffloadWarning)
            machine.round_trip(layout, 1)
    machine.close()


def test_memory_of_another_context_of_the_same_gpu_is_accepted() -> None:
    simulator = SimulatedDriver(device_count=2)
    with kvoffload.open_device(1, backend=simulator) as primary:
        mine = int(simulator.cuCtxCreate(None, 0, 1)[1])
        with kvoffload.open_device(1, backend=simulator, context=mine) as embedded:
            layout = KVLayout([primary.allocate_planes(1, block_bytes=64, num_blocks=4)])
            stack = list(simulator.context_stack)
            OffloadEngine(layout, device=embedded, num_slots=4, staging_bytes=0).close()
            assert simulator.context_stack == stack
        simulator.cuCtxDestroy(mine)


def test_where_there_is_one_gpu_an_allocation_is_asked_for_once_and_not_for_its_device(
    device: kvoffload.Device,
) -> None:
    planes = device.allocate_planes(3, block_bytes=64, num_blocks=4)
    device.simulator.faults.calls = []
    with device.current():
        device.allocations(KVLayout([planes]))
    asked = [name for name, _ in device.simulator.faults.calls if not name.startswith(("cuCtx", "cuThread"))]
    # the attribute is the kind of memory; the last call asks whether it is mapped virtual memory
    assert asked == ["cuMemGetAddressRange", "cuPointerGetAttribute", "cuMemRetainAllocationHandle"]


def test_a_lost_context_is_an_error_and_no_doubt(machine: Machine) -> None:
    layout = machine.layout("mapped", 1)
    machine.simulator.faults.fail_call("cuMemRetainAllocationHandle", error=700)
    with machine.devices[1].current(), pytest.raises(kvoffload.DriverError, match="cuMemRetainAllocationHandle"):
        machine.devices[1].allocations(layout)


def test_engines_of_another_device_object_of_the_same_gpu_are_known(machine: Machine) -> None:
    """A GPU may be opened twice: what is exported waits for transfers of either."""
    first, second = machine.devices[0], kvoffload.open_device(0, backend=machine.simulator)
    memory, other = (device.empty((8, 4, 16), "float32") for device in machine.devices)
    layout = KVLayout.from_stacked(memory, plane_axis=1, block_axis=0)
    with second, OffloadEngine(layout, device=second, num_slots=8) as engine:
        assert first.engines_over(memory.address, memory.nbytes) == second.engines() != []
        assert machine.devices[1].engines_over(other.address, other.nbytes) == []
        engine.slots[0] = 255
        engine.load([0], [3], after=NO_WAIT)
        assert np.isnan(np.from_dlpack(memory)[3]).all(), "the export waits for the load"
    apart = SimulatedDriver()
    with kvoffload.open_device(backend=apart) as elsewhere:
        assert elsewhere.engines_over(memory.address, memory.nbytes) == []
