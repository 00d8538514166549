"""Which copiers an engine has, why not the others, and what it chooses."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as cuda
from helpers import STAGING, all_are, leaks_of, no_leaks, rig
from strategies import slab_of

import kvoffload
from kvoffload import (
    NO_WAIT,
    CapabilityError,
    Direction,
    KVLayout,
    OffloadEngine,
)
from kvoffload.copiers import StridedCopier, check_copier, why_not
from kvoffload.driver import Driver, SourceOrder
from kvoffload.errors import KVOffloadWarning
from kvoffload.planning.transfer_plan import TransferPlan
from kvoffload.testing import Mirror, SimulatedDriver, scramble
from kvoffload.tuning import COPIERS, CopierName, default_profile

A = cuda.CUdevice_attribute
THREADS = int(A.CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK)
SHARED = int(A.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
MAJOR = int(A.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
OUT_OF_MEMORY = cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY


@contextmanager
def device_with(attributes: dict[int, int]) -> Iterator[kvoffload.Device]:
    """A simulated device with other attributes."""
    simulator = SimulatedDriver(seed=1)
    simulator.attributes |= attributes
    with kvoffload.open_device(backend=simulator) as device:
        yield device
    no_leaks(simulator)


def use_every_copier(engine: OffloadEngine, planes: list[kvoffload.Plane]) -> None:
    """Store and load by each copier of an engine, and by its choice; compare every byte."""
    scramble(slab_of(planes), 1)
    mirror = Mirror(engine, [slab_of(planes)])
    copiers: list[CopierName | None] = [*(name for name in COPIERS if name not in engine.missing_copiers), None]
    for copier in copiers:
        ids = np.random.default_rng(2).permutation(engine.num_slots)
        engine.store(ids, ids[::-1], after=NO_WAIT, copier=copier).wait(10)
        mirror.expect("store", ids.tolist(), ids[::-1].tolist())
        engine.load(ids, ids, after=NO_WAIT, copier=copier).wait(10)
        mirror.expect("load", ids.tolist(), ids.tolist())
        mirror.check()


def check_no_kernels(device: kvoffload.Device, reason: str, *, warned: bool) -> None:
    """An engine without kernels says why, warns once in a process, and works."""
    planes = device.allocate_planes(3, block_bytes=100, num_blocks=8)
    for number in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine = OffloadEngine(KVLayout([planes]), device=device, num_slots=8, staging_bytes=STAGING)
        told = [str(each.message) for each in caught if each.category is KVOffloadWarning]
        assert len(told) == (warned and number == 0)
        assert all(reason in text and "staging_bytes=0 says that this is meant" in text for text in told)
        with engine:
            missing = engine.missing_copiers
            assert set(missing) == {"pack"}
            assert reason in missing["pack"]
            with pytest.raises(CapabilityError) as refused:
                engine.store([1], [1], copier="pack")
            assert "copier='pack' cannot run here" in str(refused.value)
            assert reason in str(refused.value)
            use_every_copier(engine, planes)
    assert device.simulator.faults.call_count["cuLaunchKernel"] == 0
    assert device.simulator.leaks()["modules"] == 0


# what the GPU lacks


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({THREADS: 64}, "needs 128 threads in a block, and this GPU launches at most 64"),
        ({SHARED: 48 << 10}, "needs 65536 bytes of shared memory in a block, and this GPU has 49152"),
        ({MAJOR: 7}, "kernels need compute capability >= 8.0, this GPU has 7.0"),
    ],
    ids=["threads", "shared memory", "compute capability"],
)
def test_pitfall_34_a_gpu_that_cannot_run_the_kernel_gets_none(attributes: dict[int, int], reason: str) -> None:
    with device_with(attributes) as device:
        check_no_kernels(device, reason, warned=True)


# no Triton


def test_without_triton_everything_else_works(device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    check_no_kernels(device, "kernels need Triton, which cannot be imported", warned=True)


def test_a_triton_that_is_not_installed_is_named_before_anything_is_loaded(
    device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    reason = "kernels need Triton, which is not installed; install it: pip install 'triton>=3.3'"
    assert why_not(device.capabilities)["pack"] == reason
    assert why_not(device.capabilities)["strided"] is None
    check_no_kernels(device, reason, warned=False)  # an extra that is left out is meant so


# no memory for a ring


def test_pitfall_35_staging_bytes_0_compiles_loads_and_launches_nothing(
    device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvoffload.kernels, "load_kernel", None)
    monkeypatch.setitem(sys.modules, "triton", None)
    simulator: Any = device.simulator
    simulator.faults.calls = []
    planes = device.allocate_planes(3, block_bytes=100, num_blocks=8)
    for prefer in ("overlap", "latency"):
        with OffloadEngine(KVLayout([planes]), device=device, num_slots=8, staging_bytes=0, prefer=prefer) as engine:
            assert engine.missing_copiers == {"pack": "staging_bytes=0 forbids kernels"}
            use_every_copier(engine, planes)
            with pytest.raises(CapabilityError, match="cannot run here: staging_bytes=0 forbids kernels"):
                engine.store([1], [1], copier="pack")
    called = {name for name, _ in simulator.faults.calls}
    assert not called & {"cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel", "cuFuncSetAttribute"}
    assert "cuMemcpy3DBatchAsync" in called


@pytest.mark.kernels
def test_a_ring_has_room_for_a_block(device: kvoffload.Device) -> None:
    """Of the largest group; a ring of the least size carries any number of them."""
    planes = [device.allocate_planes(3, block_bytes=nbytes, num_blocks=8) for nbytes in (100, 1000)]
    least = 256 + 3072
    with pytest.raises(ValueError, match=rf"staging_bytes={least - 1} has no room for a block of 3000 bytes"):
        OffloadEngine(KVLayout(planes), device=device, num_slots=8, staging_bytes=least - 1)
    with OffloadEngine(KVLayout([planes[1]]), device=device, num_slots=8, staging_bytes=least) as engine:
        scramble(slab_of(planes[1]), 1)
        mirror = Mirror(engine, [slab_of(planes[1])])
        for _ in range(2):
            engine.store(range(8), range(8), after=NO_WAIT, copier="pack")
            mirror.expect("store", list(range(8)), list(range(8)))
            engine.load(range(8), range(7, -1, -1), after=NO_WAIT, copier="pack")
            mirror.expect("load", list(range(7, -1, -1)), list(range(8)))
        engine.drain(10)
        mirror.check()


@pytest.mark.kernels
def test_memory_of_the_rings_is_taken_when_they_are_used_and_counted(device: kvoffload.Device) -> None:
    with rig(device, staging_bytes=4096) as bench:
        engine, free = bench.engine, leaks_of(device)["device_allocations"]
        engine.plan("store", [1], [1], copier="pack")
        assert engine.statistics().staging_bytes == 0
        for number, direction in enumerate(Direction, start=1):
            for _ in range(2):
                engine.submit(direction, [1], [1], copier="pack").wait(10)
                assert engine.statistics().staging_bytes == number * 4096
                assert leaks_of(device)["device_allocations"] == free + number
        engine.close()
        assert engine.statistics().staging_bytes == 0


@pytest.mark.kernels
def test_the_default_refuses_no_layout(device: kvoffload.Device) -> None:
    """Blocks that its ring has no room for are carried by the copy engine."""
    planes = device.allocate_planes(2, block_bytes=70 << 20, num_blocks=1)
    with OffloadEngine(KVLayout([planes]), device=device, num_slots=1) as engine:
        assert "too many for a ring of 135266304" in engine.missing_copiers["pack"]
        assert engine.plan("store", [0], [0]).copier != "pack"


# names


def test_names_of_copiers_are_checked() -> None:
    missing: dict[str, str | None] = {**dict.fromkeys(COPIERS), "batch": "no such call"}
    for right in (None, *COPIERS[:2], "loop"):
        check_copier(right, missing)
    for wrong in ("Strided", "", 3, b"loop", "gather", ("pack",)):
        with pytest.raises(ValueError, match=r"copier must be one of strided, pack, batch, loop or None, got"):
            check_copier(wrong, missing)
    with pytest.raises(CapabilityError, match=r"copier='batch' cannot run here: no such call; the loop copier works"):
        check_copier("batch", missing)


# the engine's choice


def test_prefer_is_checked(device: kvoffload.Device) -> None:
    layout = KVLayout([device.allocate_planes(2, block_bytes=64, num_blocks=4)])
    before = leaks_of(device)
    for wrong in ("fast", None, 1):
        with pytest.raises(ValueError, match=r"prefer must be 'overlap' .* or 'latency' .*, got"):
            OffloadEngine(layout, device=device, num_slots=4, prefer=wrong)  # type: ignore[arg-type]
    assert leaks_of(device) == before


@pytest.mark.kernels
def test_a_job_says_what_carries_it_and_why(device: kvoffload.Device) -> None:
    with rig(device, staging_bytes=STAGING, prefer="latency") as bench:
        engine = bench.engine
        assert (engine.prefer, engine.staging_bytes, engine.missing_copiers) == ("latency", STAGING, {})
        chosen = engine.store([1, 2], [1, 2])
        assert chosen.copier == chosen.wait(10).copier
        assert "expected, the fastest" in chosen.reason
        named = engine.load([1, 2], [3, 4], copier="pack")
        assert (named.copier, named.reason) == ("pack", "asked for by name")
        nothing = engine.store([], [])
        assert (nothing.copier, nothing.reason) == ("none", "nothing to copy")
        engine.store([5], [5], copier="pack")
        engine.drain(10)
        assert all_are(bench.slot(5), 6)


def test_a_profile_given_is_used(device: kvoffload.Device) -> None:
    layout = KVLayout([device.allocate_planes(2, block_bytes=64, num_blocks=4)])
    profile = default_profile(None)
    with OffloadEngine(layout, device=device, num_slots=4, staging_bytes=0, profile=profile) as engine:
        assert engine.profile is profile


# memory and failures while an engine is made


def failing_allocation(device: kvoffload.Device, nth: int, *, groups: int = 1) -> Callable[[], OffloadEngine]:
    """Makes an engine; its nth allocation on the device is refused."""
    layout = KVLayout([device.allocate_planes(3, block_bytes=100, num_blocks=8) for _ in range(groups)])

    def make() -> OffloadEngine:
        device.simulator.faults.fail_call("cuMemAlloc", nth=nth, error=OUT_OF_MEMORY)
        return OffloadEngine(layout, device=device, num_slots=8, staging_bytes=STAGING)

    return make


@pytest.mark.parametrize(("nth", "groups"), [(2, 1), (2, 2), (3, 2)])
def test_a_gpu_without_room_for_the_rows_gets_no_kernel(device: kvoffload.Device, nth: int, groups: int) -> None:
    make = failing_allocation(device, nth, groups=groups)
    before = leaks_of(device)
    with pytest.warns(KVOffloadWarning, match=r"no copy kernels: cuMemAlloc returned CUDA_ERROR_OUT_OF_MEMORY"):
        engine = make()
    with engine:
        assert device.simulator.faults.pending == 0
        assert "CUDA_ERROR_OUT_OF_MEMORY" in engine.missing_copiers["pack"]
        leaks = leaks_of(device)
        assert "modules" not in leaks
        assert leaks["device_allocations"] == before["device_allocations"] + 1, "the scratch buffers of batch"
        assert leaks["registered_ranges"] == 1
        use_every_copier(engine, list(engine.layout.groups[0].planes))


@pytest.mark.kernels
def test_a_gpu_without_room_for_the_prelude_copies_without(device: kvoffload.Device) -> None:
    engine = failing_allocation(device, 1)()
    simulator: Any = device.simulator
    simulator.faults.calls = []
    with engine:
        assert engine.missing_copiers == {}
        use_every_copier(engine, list(engine.layout.groups[0].planes))
    assert "cuMemcpy2DAsync" not in {name for name, _ in simulator.faults.calls}


@pytest.mark.parametrize("direction", Direction)
def test_columns_that_stay_are_written_once_for_as_many_rows_as_were_filled(direction: Direction) -> None:
    """A transfer of few blocks comes first; the next one has the same arrays, and more rows than have their values."""
    copier, address = StridedCopier(Driver, batched=True), np.arange(8, dtype=np.uint64)  # type: ignore[arg-type]
    column = {value: np.array([value], np.uint64) for value in (300, 400, 100, 200, 7, 9)}
    other = Direction.LOAD if direction is Direction.STORE else Direction.STORE
    ends = ("source", "target") if direction is Direction.STORE else ("target", "source")
    given = [
        *((2, 1, 300, 400, 100, 7), (5, 1, 300, 400, 100, 7), (3, 3, 300, 400, 100, 7), (4, 3, 400, 400, 100, 7)),
        *((1, 3, 400, 300, 100, 7), (2, 3, 400, 300, 200, 7), (3, 3, 400, 300, 200, 9), (2, 3, 400, 300, 200, 9)),
    ]
    for count, order, device_pitch, host_pitch, width, height in given:
        device, host = address[:count] + np.uint64(count), address[:count]
        columns = [column[each] for each in (width, height, device_pitch, host_pitch)]
        submit: Any = copier.stage(TransferPlan(direction, device, host, *columns), SourceOrder(order))
        table = submit.args[0]
        copier.stage(TransferPlan(other, host, device, *reversed(columns)), SourceOrder.STREAM)
        rows = table.rows[:count]
        assert [rows[end].tolist() for end in ends] == [device.tolist(), host.tolist()]
        names = [*(f"{end}_pitch" for end in ends), "width", "height", "order"]
        for name, value in zip(names, (device_pitch, host_pitch, width, height, order), strict=True):
            assert rows[name].tolist() == [value] * count
