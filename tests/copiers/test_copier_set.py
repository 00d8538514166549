"""Which copiers an engine has, why not the others, how many multiprocessors it takes, and what it chooses."""

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
from gathering import record_launches, separate
from helpers import all_are, leaks_of, make_and_close, no_leaks, rig, simulated
from strategies import slab_of

import kvoffload
from kvoffload import (
    NO_WAIT,
    CapabilityError,
    Direction,
    KVLayout,
    OffloadEngine,
)
from kvoffload.copiers import check_copier, why_not
from kvoffload.errors import KVOffloadWarning
from kvoffload.testing import Mirror, SimulatedDriver, scramble
from kvoffload.tuning import CopierName, CopyMethod, default_profile

A = cuda.CUdevice_attribute
THREADS = int(A.CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK)
SHARED = int(A.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
MAJOR = int(A.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
OUT_OF_MEMORY = cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY
NAMES: list[CopierName] = ["strided", "gather", "split", "batch", "loop", "pack"]


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
    copiers: list[CopierName | None] = [*(name for name in NAMES if name not in engine.missing_copiers), None]
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
            engine = OffloadEngine(KVLayout([planes]), device=device, num_slots=8, sm_limit=4)
        told = [str(each.message) for each in caught if each.category is KVOffloadWarning]
        assert len(told) == (warned and number == 0)
        assert all(reason in text and "sm_limit=0 says that this is meant" in text for text in told)
        with engine:
            missing = engine.missing_copiers
            assert {name for name in missing if name in ("gather", "split")} == {"gather", "split"}
            assert reason in missing["gather"]
            assert reason in missing["split"]
            for copier in ("gather", "split"):
                with pytest.raises(CapabilityError) as refused:
                    engine.store([1], [1], copier=copier)
                assert f"copier={copier!r} cannot run here" in str(refused.value)
                assert reason in str(refused.value)
            use_every_copier(engine, planes)
    assert device.simulator.faults.call_count["cuLaunchKernel"] == 0
    assert device.simulator.leaks()["modules"] == 0


# what the GPU lacks


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({THREADS: 512}, "needs 1024 threads in a block, and this GPU launches at most 512"),
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
    reason = "kernels need Triton, which is not installed; install it: pip install 'triton>=3.2'"
    assert why_not(device.capabilities)["gather"] == why_not(device.capabilities)["split"] == reason
    assert why_not(device.capabilities)["strided"] is None


# how many multiprocessors


def grids(simulator: Any) -> list[int]:
    """Programs of every launch since `faults.calls` was set."""
    return [arguments[1] for name, arguments in simulator.faults.calls if name == "cuLaunchKernel"]


@pytest.mark.parametrize("sm_limit", [1, 3, 100])
def test_pitfall_35_never_more_programs_than_asked_for(device: kvoffload.Device, sm_limit: int) -> None:
    """By every way, forced and chosen, for few blocks and many."""
    simulator: Any = device.simulator
    planes, buffers = separate(device, 3, 2048, 24)
    for prefer in ("overlap", "latency"):
        simulator.faults.calls = []
        with OffloadEngine(KVLayout([planes]), device=device, num_slots=24, sm_limit=sm_limit, prefer=prefer) as engine:
            for method in ("gather", "split", None):
                for count in (1, 24):
                    engine.store(range(count), range(count), copier=method, after=NO_WAIT)
                    job = engine.load(range(count), range(count), copier=method, after=NO_WAIT)
                    assert job.method is not None
                    assert job.method.programs <= sm_limit
            chosen = grids(simulator)
            assert len(chosen) >= 6
            assert max(chosen) <= min(sm_limit, 8)
            for programs in (1, 2, 4, 8):
                simulator.faults.calls = []
                for asked in (CopyMethod("gather", programs, 1.0), CopyMethod("split", programs, 0.5)):
                    engine.submit(Direction.STORE, range(24), range(24), copier=asked).wait(30)
                assert len(grids(simulator)) == 2
                assert max(grids(simulator)) == min(programs, sm_limit)
    threads = [arguments[4:7] for name, arguments in simulator.faults.calls if name == "cuLaunchKernel"]
    assert all(x <= 1024 and (y, z) == (1, 1) for x, y, z in threads), "one program fits a multiprocessor once"
    del buffers


def test_pitfall_35_no_more_programs_than_tiles(device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_launches(monkeypatch)
    with rig(device, planes=2, block_bytes=2048, sm_limit=8) as bench:
        for blocks in (1, 4, 9, 16):
            bench.engine.submit(
                Direction.STORE, range(blocks), range(blocks), copier=CopyMethod("gather", 8, 1.0)
            ).wait(10)
    narrow = 256 * 64  # bytes that the 256 threads of each of several storing programs have under way
    assert [launch.grid for launch in launches] == [-(-blocks * 4096 // narrow) for blocks in (1, 4, 9, 16)]


def test_pitfall_35_sm_limit_0_compiles_loads_and_launches_nothing(
    device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvoffload.kernels, "load_kernel", None)
    monkeypatch.setitem(sys.modules, "triton", None)
    simulator: Any = device.simulator
    simulator.faults.calls = []
    planes = device.allocate_planes(3, block_bytes=100, num_blocks=8)
    for prefer in ("overlap", "latency"):
        with OffloadEngine(KVLayout([planes]), device=device, num_slots=8, sm_limit=0, prefer=prefer) as engine:
            assert engine.missing_copiers == dict.fromkeys(["gather", "split", "pack"], "sm_limit=0 forbids kernels")
            use_every_copier(engine, planes)
            for copier in ("gather", "split", "pack", CopyMethod("gather", 1, 1.0), CopyMethod("split", 1, 0.5)):
                with pytest.raises(CapabilityError, match="cannot run here: sm_limit=0 forbids kernels"):
                    engine.submit(Direction.STORE, [1], [1], copier=copier)
    called = {name for name, _ in simulator.faults.calls}
    assert not called & {"cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel", "cuFuncSetAttribute"}
    assert "cuMemcpy3DBatchAsync" in called


@pytest.mark.parametrize("wrong", [-1, 1.5, "4", None, True])
def test_sm_limit_is_a_number_of_multiprocessors(device: kvoffload.Device, wrong: Any) -> None:
    layout = KVLayout([device.allocate_planes(2, block_bytes=64, num_blocks=4)])
    with pytest.raises((ValueError, TypeError), match="sm_limit"):
        OffloadEngine(layout, device=device, num_slots=4, sm_limit=wrong)


# names


def test_names_of_copiers_are_checked() -> None:
    missing: dict[str, str | None] = {**dict.fromkeys(NAMES), "batch": "no such call"}
    for right in (None, "strided", "loop", CopyMethod("gather", 2, 1.0)):
        check_copier(right, missing)
    for wrong in ("Strided", "", 3, b"loop", CopyMethod("none")):  # type: ignore[arg-type]
        with pytest.raises(
            ValueError, match=r"copier must be one of strided, gather, split, batch, loop, pack or None, got"
        ):
            check_copier(wrong, missing)
    for unable in ("batch", CopyMethod("batch")):
        with pytest.raises(
            CapabilityError, match=r"copier='batch' cannot run here: no such call; the loop copier works"
        ):
            check_copier(unable, missing)


# the engine's choice


def test_prefer_is_checked(device: kvoffload.Device) -> None:
    layout = KVLayout([device.allocate_planes(2, block_bytes=64, num_blocks=4)])
    before = leaks_of(device)
    for wrong in ("fast", None, 1):
        with pytest.raises(ValueError, match=r"prefer must be 'overlap' .* or 'latency' .*, got"):
            OffloadEngine(layout, device=device, num_slots=4, prefer=wrong)  # type: ignore[arg-type]
    assert leaks_of(device) == before


def test_a_job_says_what_carries_it_and_why(device: kvoffload.Device) -> None:
    with rig(device, sm_limit=4, prefer="latency") as bench:
        engine = bench.engine
        assert (engine.prefer, engine.sm_limit, engine.missing_copiers) == ("latency", 4, {})
        chosen = engine.store([1, 2], [1, 2])
        assert chosen.method is not None
        assert chosen.copier == chosen.method.copier == chosen.wait(10).copier
        assert "expected, the fastest" in chosen.reason
        named = engine.load([1, 2], [3, 4], copier="gather")
        assert named.method is not None
        assert (named.copier, named.reason) == ("gather", "asked for by name")
        assert 1 <= named.method.programs <= 4
        forced = engine.submit(Direction.STORE, [5], [5], copier=CopyMethod("gather", 3, 1.0))
        assert (forced.method, forced.reason) == (CopyMethod("gather", 3, 1.0), "asked for")
        shared = engine.submit(Direction.STORE, range(16), range(16), copier=CopyMethod("split", 1))
        assert shared.method is not None
        assert 0 <= shared.method.share < 1, "what the profile says"
        nothing = engine.store([], [])
        assert (nothing.method, nothing.copier, nothing.reason) == (None, "none", "nothing to copy")
        engine.drain(10)
        assert all_are(bench.slot(5), 6)


def test_a_method_is_completed_once_for_transfers_of_one_shape(device: kvoffload.Device) -> None:
    asked = CopyMethod("gather")
    with rig(device, sm_limit=4) as bench:
        first, second = (bench.engine.store(ids, ids, copier=asked).method for ids in ([1, 2], [4, 3]))
        assert first != asked
        assert first is second, "the answer is remembered"


def test_a_profile_given_is_used(device: kvoffload.Device) -> None:
    layout = KVLayout([device.allocate_planes(2, block_bytes=64, num_blocks=4)])
    profile = default_profile(None)
    with OffloadEngine(layout, device=device, num_slots=4, sm_limit=0, profile=profile) as engine:
        assert engine.profile is profile


# memory and failures while an engine is made


def failing_allocation(device: kvoffload.Device, nth: int, *, groups: int = 1) -> Callable[[], OffloadEngine]:
    """Makes an engine; its nth allocation on the device is refused."""
    layout = KVLayout([device.allocate_planes(3, block_bytes=100, num_blocks=8) for _ in range(groups)])

    def make() -> OffloadEngine:
        device.simulator.faults.fail_call("cuMemAlloc", nth=nth, error=OUT_OF_MEMORY)
        return OffloadEngine(layout, device=device, num_slots=8, sm_limit=4)

    return make


@pytest.mark.parametrize(("nth", "groups"), [(2, 1), (2, 2), (3, 2)])
def test_a_gpu_without_room_for_the_rows_gets_no_kernel(device: kvoffload.Device, nth: int, groups: int) -> None:
    make = failing_allocation(device, nth, groups=groups)
    before = leaks_of(device)
    with pytest.warns(KVOffloadWarning, match=r"no copy kernels: cuMemAlloc returned CUDA_ERROR_OUT_OF_MEMORY"):
        engine = make()
    with engine:
        assert device.simulator.faults.pending == 0
        assert "CUDA_ERROR_OUT_OF_MEMORY" in engine.missing_copiers["gather"]
        leaks = leaks_of(device)
        assert "modules" not in leaks
        assert leaks["device_allocations"] == before["device_allocations"] + 1, "the scratch buffers of batch"
        assert leaks["registered_ranges"] == 1
        use_every_copier(engine, list(engine.layout.groups[0].planes))


def test_a_gpu_without_room_for_the_prelude_copies_without(device: kvoffload.Device) -> None:
    engine = failing_allocation(device, 1)()
    simulator: Any = device.simulator
    simulator.faults.calls = []
    with engine:
        assert engine.missing_copiers == {}
        use_every_copier(engine, list(engine.layout.groups[0].planes))
    assert "cuMemcpy2DAsync" not in {name for name, _ in simulator.faults.calls}


@pytest.mark.filterwarnings("ignore:no copy kernels")
def test_every_call_of_making_and_closing_an_engine_with_kernels_fails_once() -> None:
    with simulated(2) as device:
        simulator: Any = device.simulator
        layout = KVLayout([device.allocate_planes(2, block_bytes=48 + 16 * index, num_blocks=4) for index in range(2)])
        before = simulator.leaks()
        simulator.faults.calls = []
        OffloadEngine(layout, device=device, num_slots=2, sm_limit=4).close()
        names = [name for name, _ in simulator.faults.calls]
        assert names.count("cuModuleLoadData") == names.count("cuModuleUnload") >= 2
        for nth, name in enumerate(names, start=1):
            simulator.faults.fail_nth(nth)
            make_and_close(device, layout, num_slots=2, sm_limit=4)
            left = sum(simulator.leaks().values()) - sum(before.values())
            letting_go = name in ("cuStreamDestroy", "cuEventDestroy", "cuMemFree", "cuModuleUnload")
            assert left == letting_go, (name, nth, simulator.leaks())
            before = simulator.leaks()
        assert simulator.violations == []
