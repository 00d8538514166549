"""The transfers that `kvoffload tune` times, the engines that it times them on, and the matrix product."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

import kvoffload
from kvoffload.calibration import FULL, MINIATURE, Scale, tune
from kvoffload.calibration.compute import LARGE, SMALL, Computation, kernel_spec
from kvoffload.calibration.measure import deviations
from kvoffload.calibration.schedule import TrialSet, check_sets, flat_sets, strided_sets
from kvoffload.calibration.trial_engine import TrialEngine, TrialMemory
from kvoffload.kernels import compile_kernel
from kvoffload.layout.coding import CODECS
from kvoffload.planning.transfer_plan import Direction
from kvoffload.tuning import CopierName, ProfileKey, default_profile
from kvoffload.tuning.fitting import Sample, fit

H200 = ProfileKey("NVIDIA H200", "13.0", 5, 16, "13.3")
TINY = MINIATURE._replace(
    copy_bytes=(64,), copies=(4,), loop_bytes=(64,), loop_copies=(4,), row_bytes=(64,), heights=(2, 4),
    operations=(2,), wide_bytes=(),
)  # fmt: skip


# which transfers ------------------------------------------------------------------------------------------------------


def all_sets(scale: Scale, missing: dict[str, str]) -> list[TrialSet]:
    return [*flat_sets(scale, missing), *strided_sets(scale), *check_sets(scale, missing)]


def test_the_schedule_covers_the_copy_engine() -> None:
    assert {each.copier for each in all_sets(FULL, {}) if each.blocks} == {"strided", "batch", "loop"}


def test_nothing_that_is_missing_is_timed() -> None:
    missing = {"pack": "no Triton", "batch": "an old driver"}
    assert {each.copier for each in all_sets(FULL, missing)} == {"strided", "loop"}


def test_the_schedule_stays_within_memory() -> None:
    for trial_set in all_sets(FULL, {}):
        limit = FULL.pitch if trial_set.folds else FULL.scattered_bytes
        if trial_set.planes > 1:
            assert trial_set.most_blocks * trial_set.block_bytes <= limit
        for blocks in trial_set.blocks:
            assert blocks >= 1
            assert trial_set.shape(Direction.STORE, blocks).nbytes <= FULL.most_bytes


def test_heights_tell_the_price_of_an_operation_from_that_of_a_row() -> None:
    heights: dict[int, set[int]] = {}
    for trial_set in strided_sets(FULL):
        heights.setdefault(trial_set.block_bytes, set()).add(trial_set.planes)
    assert all(len(each) >= 2 for each in heights.values())


def test_checks_are_at_sizes_of_their_own() -> None:
    used = {*FULL.copy_bytes, *FULL.row_bytes}
    assert not used & set(FULL.check_bytes)
    assert min(used) < min(FULL.check_bytes)
    assert max(FULL.check_bytes) < max(used)


def test_what_the_schedule_times_is_enough_to_expect_the_rest(seed: int) -> None:
    """On a machine whose costs are those of the default, and every median 2% off."""
    random = np.random.default_rng(seed)
    truth = default_profile(H200)

    def timed(trial_sets: Iterable[TrialSet], noise: float = 0.02) -> dict[Direction, list[Sample]]:
        found: dict[Direction, list[Sample]] = {direction: [] for direction in Direction}
        for trial_set in trial_sets:
            for direction, blocks in product(Direction, trial_set.blocks):
                shape = trial_set.shape(direction, blocks)
                seconds = truth.seconds(trial_set.copier, shape) * (1 + noise * random.standard_normal())
                found[direction].append(Sample(trial_set.copier, shape, seconds))
        return found

    samples = timed([*flat_sets(FULL, {}), *strided_sets(FULL)])
    link = {direction: truth.costs[direction].link for direction in Direction}
    costs = {direction: fit(link[direction], samples[direction]) for direction in Direction}
    checks = timed(check_sets(FULL, {}), 0.0)
    profile = replace(truth, costs=costs)
    for name, deviation in deviations(profile, [each for found in checks.values() for each in found]).items():
        print(name, deviation)
        assert deviation.median < 0.03
        assert deviation.worst < 0.15


# timing ---------------------------------------------------------------------------------------------------------------


def test_trials_move_what_they_say(device: kvoffload.Device) -> None:
    """One timed transfer of each copy method, bytes compared."""
    copiers: tuple[CopierName, ...] = ("strided", "batch", "loop")
    with TrialMemory(device, 4, 1 << 13, 1 << 14) as memory:
        for copier in copiers:
            with TrialEngine(device, memory, TrialSet(copier, 4, 256, [4])) as trial_engine:
                engine = trial_engine.engine
                engine.slots[:] = np.random.default_rng(1).integers(0, 256, engine.slots.shape, np.uint8)
                before = engine.slots.copy()
                assert trial_engine.submit(Direction.LOAD, 4).wait().copier == copier
                engine.slots[:] = 0
                assert trial_engine.submit(Direction.STORE, 4).wait().nbytes == 4 * 4 * 256
                moved = engine.slots.any(axis=1)
                assert moved.sum() == 4
                assert (engine.slots[moved, :1024] == before[moved, :1024]).all()


def test_rounds_are_interleaved_and_the_first_does_not_count(
    device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[int] = []

    def seconds(self: TrialEngine, direction: Direction, count: int) -> float:  # noqa: ARG001
        order.append(count)
        return 100.0 if len(order) <= 2 else float(len(order))

    monkeypatch.setattr(TrialEngine, "seconds", seconds)
    trial_set = TrialSet("strided", 2, 64, [1, 2])
    with TrialMemory(device, 4, 1 << 13, 1 << 14) as memory, TrialEngine(device, memory, trial_set) as trial_engine:
        samples = trial_engine.rounds(Direction.LOAD, trial_set.blocks, lambda: 3)
    assert order == [1, 2] * 4
    assert [each.seconds for each in samples] == [5.0, 6.0]
    assert trial_engine.counted == 6


def test_where_memory_is_short_large_transfers_are_left_out(device: kvoffload.Device) -> None:
    trial_set = TrialSet("strided", 4, 1024, [1, 1000])
    with TrialMemory(device, 4, 1 << 13, 1 << 14) as memory, TrialEngine(device, memory, trial_set) as trial_engine:
        samples = trial_engine.rounds(Direction.STORE, trial_set.blocks, lambda: 1)
    assert [each.shape.blocks for each in samples] == [1]


@pytest.mark.long
def test_when_time_is_short_there_are_fewer_rounds(device: kvoffload.Device) -> None:
    field = TINY.field._replace(copy_bytes=(), row_bytes=())  # the contiguous copy and pack alone, in three situations
    scale = TINY._replace(repeats=2, field=field, few_bytes=())
    slow = tune(device, scale=scale._replace(seconds=0.0))
    fast = tune(device, scale=scale._replace(seconds=600.0))
    in_field = 3 * len(Direction) * field.repeats * (1 + len(CODECS))
    assert (slow.transfers - in_field) * 2 == fast.transfers - in_field
    assert slow.profile.costs.keys() == fast.profile.costs.keys() == set(Direction)


# the product ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiles", [1, 2])
def test_the_product_is_one(device: kvoffload.Device, tiles: int) -> None:
    """Of one tile; and of two in each dimension."""
    sizes = {name: getattr(SMALL, name) * tiles for name in ("rows", "columns", "inner")}
    with Computation(device, SMALL._replace(**sizes)) as computation:
        assert len(computation.seconds_each(2)) == 2
        product = computation.product
        shapes = {"left": (product.rows, product.inner), "right": (product.inner, product.columns)}
        shapes["result"] = (product.rows, product.columns)
        left, right, result = (
            getattr(computation, name).to_numpy().view(np.float16).reshape(size).astype(np.float32)
            for name, size in shapes.items()
        )
        assert np.abs(left).max() > 1
        np.testing.assert_allclose(result, left @ right, rtol=2e-3, atol=2e-2)


def test_the_product_compiles_to_tensor_cores_and_asynchronous_copies() -> None:
    """For a Hopper GPU, without one; the first tiling fits its 227 KiB of shared memory, the last an Ampere's 99."""
    first = compile_kernel(kernel_spec(LARGE, LARGE.tiles[0], half=False), (9, 0))
    assert "wgmma" in first.ptx
    assert "cp.async" in first.ptx
    assert first.shared_bytes <= 227 << 10
    last = compile_kernel(kernel_spec(LARGE, LARGE.tiles[-1], half=False), (8, 0))
    assert last.shared_bytes <= 99 << 10
