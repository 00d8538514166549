"""The batch copier: its chunks, and what keeps loads of small rows off the driver's copying by CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import LEVELS, no_leaks, rig, simulated
from pack_moves import fill_slots, separate

import kvoffload
from kvoffload import NO_WAIT, KVLayout, OffloadEngine, TransferError
from kvoffload.copiers import batch
from kvoffload.copiers.batch import BatchCopier
from kvoffload.testing import Mirror, scramble

KIB = 1024
WITH_BATCH = [level for level in LEVELS if level != "no-batch"]


def calls(simulator: Any) -> list[tuple[str, int]]:
    """Copy calls since `faults.calls` was set, with the number of their copies."""
    positions = {"cuMemcpyBatchAsync": 3, "memcpy_batch_async_v2": 3, "cuMemcpy2DAsync": None}
    found = []
    for name, arguments in simulator.faults.calls:
        if name in positions:
            position = positions[name]
            found.append(("prelude", 1) if position is None else ("batch", int(arguments[position])))
    return found


def expected_chunks(copies: int) -> list[tuple[str, int]]:
    sizes = [64] + [128] * (copies // 128 + 1)
    found = []
    while copies > 0:
        found.append(("batch", min(copies, sizes.pop(0))))
        copies -= found[-1][1]
    return found


@pytest.mark.parametrize("level", WITH_BATCH)
@pytest.mark.parametrize("blocks", [1, 7, 8, 64, 65, 200, 500])
def test_loads_of_small_rows_begin_with_a_prelude_and_go_in_chunks(level: str, blocks: int) -> None:
    with simulated(1, level) as device:
        simulator: Any = device.simulator
        planes, buffers = separate(device, 1, 64, 500)
        scramble(buffers[0], 1)
        with OffloadEngine(KVLayout([planes]), device=device, num_slots=500, staging_bytes=0) as engine:
            fill_slots(engine, 2)
            mirror = Mirror(engine, buffers)
            rng = np.random.default_rng(blocks)
            ids, slots = rng.permutation(500)[:blocks], rng.permutation(500)[:blocks]
            simulator.faults.calls = []
            engine.load(slots, ids, after=NO_WAIT, copier="batch").wait(10)
            assert calls(simulator) == [("prelude", 1)] * (blocks >= 8) + expected_chunks(blocks)
            simulator.faults.calls = []
            engine.store(ids, slots[::-1], after=NO_WAIT, copier="batch").wait(10)
            assert calls(simulator) == expected_chunks(blocks), "never before a store"
            mirror.expect("load", ids.tolist(), slots.tolist())
            mirror.expect("store", ids.tolist(), slots[::-1].tolist())
            mirror.check()
    no_leaks(device.simulator)


@pytest.mark.parametrize(("block_bytes", "expected"), [(28 * KIB - 16, 1), (28 * KIB, 0), (64 * KIB, 0)])
def test_large_rows_need_no_prelude(device: kvoffload.Device, block_bytes: int, expected: int) -> None:
    planes, buffers = separate(device, 2, block_bytes, 8)
    with OffloadEngine(KVLayout([planes]), device=device, num_slots=8, staging_bytes=0) as engine:
        device.simulator.faults.calls = []
        engine.load(range(8), range(8), copier="batch").wait(10)
        assert calls(device.simulator).count(("prelude", 1)) == expected
    del buffers


def test_one_small_plane_among_large_ones_is_enough(device: kvoffload.Device) -> None:
    planes = [device.allocate_planes(1, block_bytes=size, num_blocks=8)[0] for size in (64 * KIB, 1024)]
    with OffloadEngine(KVLayout([planes]), device=device, num_slots=8, staging_bytes=0) as engine:
        device.simulator.faults.calls = []
        engine.load(range(4), range(4), copier="batch").wait(10)
        assert calls(device.simulator) == [("prelude", 1), ("batch", 8)]


def _copies_2d(device: kvoffload.Device) -> list[dict[str, int]]:
    """The fields of every cuMemcpy2DAsync from now on."""
    names = ("srcDevice", "dstDevice", "srcPitch", "dstPitch", "WidthInBytes", "Height")
    function = device.driver._functions["cuMemcpy2DAsync"]
    seen: list[dict[str, int]] = []

    def noting(copy: Any, stream: int) -> Any:
        seen.append({name: int(getattr(copy, name)) for name in names})
        return function(copy, stream)

    device.driver._functions["cuMemcpy2DAsync"] = noting
    return seen


@pytest.mark.parametrize(("copies", "rows"), [(8, 8 * 512), (64, 64 * 512), (300, 64 * 512)])
def test_the_prelude_copies_single_bytes_within_the_scratch_memory(
    device: kvoffload.Device, copies: int, rows: int
) -> None:
    """About as long as the driver needs to take in the first chunk; it touches neither planes nor slots."""
    simulator: Any = device.simulator
    planes = device.allocate_planes(1, block_bytes=64, num_blocks=300)
    with OffloadEngine(KVLayout([planes]), device=device, num_slots=300, staging_bytes=0) as engine:
        seen = _copies_2d(device)
        engine.load(range(copies), range(copies), copier="batch").wait(10)
        (copy,) = seen
        assert (copy["WidthInBytes"], copy["Height"]) == (1, rows)
        source, target = (simulator.memory.at(copy[name]) for name in ("srcDevice", "dstDevice"))
        assert source is target
        assert source.nbytes == 128 * KIB
        for name in ("src", "dst"):
            end = copy[f"{name}Device"] + (rows - 1) * copy[f"{name}Pitch"] + 1
            assert end <= source.end
        assert copy["srcDevice"] + rows * copy["srcPitch"] <= copy["dstDevice"], "the two do not overlap"


def test_the_scratch_memory_is_given_back(device: kvoffload.Device) -> None:
    before = device.simulator.leaks()["device_allocations"]
    with device.current():
        copier = BatchCopier(device.driver)
        copier.open()
        assert device.simulator.leaks()["device_allocations"] == before + 1
        copier.close()
        copier.close()
    assert device.simulator.leaks()["device_allocations"] == before


@pytest.mark.parametrize("call", ["cuMemcpy2DAsync", "cuMemcpyBatchAsync"])
def test_a_prelude_or_a_first_chunk_that_fails_fails_the_load(device: kvoffload.Device, call: str) -> None:
    with rig(device) as bench:
        device.simulator.faults.fail_call(call)
        with pytest.raises(TransferError, match=f"{call} returned CUDA_ERROR_UNKNOWN"):
            bench.engine.load(range(4), range(4), copier="batch").wait(10)
        assert set(bench.block(1).tolist()) <= {2, 101}
        bench.engine.load(range(4), range(4), copier="batch").wait(10)
        assert (bench.block(1) == 101).all()


def test_loads_of_several_segments_begin_each_with_a_prelude(
    device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them may find its stream idle."""
    monkeypatch.setattr(batch.BatchCopier, "segment_operations", 20)
    planes = device.allocate_planes(1, block_bytes=64, num_blocks=50)
    with OffloadEngine(KVLayout([planes]), device=device, num_slots=50, staging_bytes=0) as engine:
        engine.slots[:] = np.arange(50, dtype=np.uint8)[:, np.newaxis]
        device.simulator.faults.calls = []
        engine.load(range(50), range(49, -1, -1), copier="batch").wait(10)
        assert calls(device.simulator) == [("prelude", 1), ("batch", 20)] * 2 + [("prelude", 1), ("batch", 10)]
        image = planes[0].owner.to_numpy()  # type: ignore[attr-defined]
        assert (image.reshape(50, 64)[:, 0] == np.arange(49, -1, -1)).all()
