"""`kvoffload tune` and what it measures with, on the simulated device; and on a GPU what it must achieve there."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvoffload
from kvoffload.calibration import FULL, MINIATURE, Scale, tune
from kvoffload.calibration.compute import MATMUL, SKINNY, SMALL, Computation, kernel_spec
from kvoffload.calibration.measure import deviations
from kvoffload.calibration.schedule import (
    Trial,
    TrialSet,
    check_sets,
    flat_sets,
    restrict,
    same_trials,
    split_sets,
    strided_sets,
)
from kvoffload.calibration.trial_engine import TrialEngine, TrialMemory
from kvoffload.commands import main
from kvoffload.commands.tune import _require_kept, decisions
from kvoffload.copiers import NAMES
from kvoffload.engine.engine import OffloadEngine
from kvoffload.errors import KVOffloadWarning
from kvoffload.internal import cachefiles
from kvoffload.kernels import compile_kernel
from kvoffload.planning.transfer_plan import Direction
from kvoffload.terminal.console import CommandError
from kvoffload.testing import check_clean_close
from kvoffload.tuning import CopyMethod, ProfileKey, default_profile, key_of, load_profile, parse, profile_path, render
from kvoffload.tuning.fitting import Sample, fit

H200 = ProfileKey("NVIDIA H200", "13.0", 5, 16, "13.3")
TINY = MINIATURE._replace(
    copy_bytes=(64,), copies=(4,), loop_bytes=(64,), loop_copies=(4,), row_bytes=(64,), heights=(2, 4),
    operations=(2,), wide_bytes=(), split_bytes=(64,), split_blocks=(4,), gather_programs=(1,), split_programs=(1,),
)  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv(cachefiles.FOLDER_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(cachefiles, "_warned", set())
    return tmp_path / "cache"


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated devices are tuned in less than a second."""
    monkeypatch.setattr("kvoffload.calibration.measure.MINIATURE", TINY)


# what is timed --------------------------------------------------------------------------------------------------------


def all_sets(scale: Scale, missing: dict[str, str]) -> list[TrialSet]:
    scale = restrict(scale, missing)
    costs = default_profile(H200).costs
    timed = [*flat_sets(scale, missing), *strided_sets(scale), *split_sets(scale, costs)]
    return timed + list(check_sets(scale, missing, costs))


def test_the_schedule_covers_every_way_in_both_directions() -> None:
    for direction in Direction:
        labels = {trial.method.label for trial_set in all_sets(FULL, {}) for trial in trial_set.trials[direction]}
        gather = {f"gather {programs}" for programs in (1, 2, 3, 4, 8)}
        assert labels == {"strided", "batch", "loop", "split 1", "split 2"} | gather


def test_nothing_that_is_missing_is_timed() -> None:
    missing = {"gather": "no Triton", "split": "no Triton", "batch": "an old driver"}
    methods = {
        trial.method
        for trial_set in all_sets(FULL, missing)
        for trials in trial_set.trials.values()
        for trial in trials
    }
    assert methods == {CopyMethod("strided"), CopyMethod("loop")}


def test_the_schedule_stays_within_memory_and_splits_whole_blocks() -> None:
    for trial_set in all_sets(FULL, {}):
        limit = FULL.pitch if trial_set.folds else FULL.scattered_bytes
        if trial_set.planes > 1:
            assert trial_set.most_blocks * trial_set.block_bytes <= limit
        for direction, trials in trial_set.trials.items():
            for trial in trials:
                assert trial.blocks >= 1
                assert trial_set.shape(direction, trial.blocks).nbytes <= FULL.most_bytes
                if trial.method.copier == "split":
                    assert 0 < round(trial.method.share * trial.blocks) < trial.blocks


def test_heights_tell_the_price_of_an_operation_from_that_of_a_row() -> None:
    heights: dict[int, set[int]] = {}
    for trial_set in strided_sets(FULL):
        heights.setdefault(trial_set.block_bytes, set()).add(trial_set.planes)
    assert all(len(each) >= 2 for each in heights.values())


def test_checks_are_at_sizes_of_their_own() -> None:
    used = {*FULL.copy_bytes, *FULL.row_bytes, *FULL.split_bytes}
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
            for direction, trials in trial_set.trials.items():
                for trial in trials:
                    shape = trial_set.shape(direction, trial.blocks)
                    seconds = truth.seconds(trial.method, shape) * (1 + noise * random.standard_normal())
                    found[direction].append(Sample(trial.method, shape, seconds))
        return found

    samples = timed([*flat_sets(FULL, {}), *strided_sets(FULL)])
    link = {direction: truth.costs[direction].link for direction in Direction}
    costs = {direction: fit(link[direction], samples[direction]) for direction in Direction}
    splits = timed(split_sets(FULL, costs))
    costs = {direction: fit(link[direction], samples[direction] + splits[direction]) for direction in Direction}
    checks = timed(check_sets(FULL, {}, costs), 0.0)
    profile = replace(truth, costs=costs)
    for name, deviation in deviations(profile, [each for found in checks.values() for each in found]).items():
        print(name, deviation)
        assert deviation.median < 0.03
        assert deviation.worst < 0.15


# how it is timed ------------------------------------------------------------------------------------------------------


def test_trials_move_what_they_say(device: kvoffload.Device) -> None:
    """One timed transfer of each way, bytes compared."""
    methods = [
        CopyMethod("strided"),
        CopyMethod("batch"),
        CopyMethod("loop"),
        CopyMethod("gather", 2, 1.0),
        CopyMethod("split", 1, 0.5),
    ]
    trials = [Trial(method, 4) for method in methods]
    with TrialMemory(device, 4, 1 << 13, 1 << 14) as memory:
        for trial_set in (same_trials(False, 4, 256, trials[1:4]), same_trials(True, 4, 256, trials)):
            with TrialEngine(device, memory, trial_set) as trial_engine:
                engine = trial_engine.engine
                for trial in trial_set.trials[Direction.LOAD]:
                    engine.slots[:] = np.random.default_rng(1).integers(0, 256, engine.slots.shape, np.uint8)
                    before = engine.slots.copy()
                    assert trial_engine.submit(Direction.LOAD, trial).wait().copier == trial.method.copier
                    engine.slots[:] = 0
                    assert trial_engine.submit(Direction.STORE, trial).wait().nbytes == 4 * 4 * 256
                    moved = engine.slots.any(axis=1)
                    assert moved.sum() == 4
                    assert (engine.slots[moved, :1024] == before[moved, :1024]).all()


def test_rounds_are_interleaved_and_the_first_does_not_count(
    device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def seconds(self: TrialEngine, direction: Direction, trial: Trial) -> float:  # noqa: ARG001
        order.append(trial.method.copier)
        return 100.0 if len(order) <= 2 else float(len(order))

    monkeypatch.setattr(TrialEngine, "seconds", seconds)
    trial_set = same_trials(True, 2, 64, [Trial(CopyMethod("strided"), 1), Trial(CopyMethod("loop"), 1)])
    with TrialMemory(device, 4, 1 << 13, 1 << 14) as memory, TrialEngine(device, memory, trial_set) as trial_engine:
        samples = trial_engine.rounds(Direction.LOAD, trial_set.trials[Direction.LOAD], lambda: 3)
    assert order == ["strided", "loop"] * 4
    assert [each.seconds for each in samples] == [5.0, 6.0]
    assert trial_engine.counted == 6


def test_where_memory_is_short_large_transfers_are_left_out(device: kvoffload.Device) -> None:
    trials = [Trial(CopyMethod("strided"), 1), Trial(CopyMethod("strided"), 1000)]
    with TrialMemory(device, 4, 1 << 13, 1 << 14) as memory:
        trial_set = same_trials(True, 4, 1024, trials)
        with TrialEngine(device, memory, trial_set) as trial_engine:
            samples = trial_engine.rounds(Direction.STORE, trials, lambda: 1)
    assert [each.shape.blocks for each in samples] == [1]


def test_when_time_is_short_there_are_fewer_rounds(device: kvoffload.Device) -> None:
    scale = TINY._replace(repeats=2, split_programs=())  # shares depend on what was measured
    slow = tune(device, scale=scale._replace(seconds=0.0))
    fast = tune(device, scale=scale._replace(seconds=600.0))
    assert slow.transfers * 2 == fast.transfers
    assert slow.profile.costs.keys() == fast.profile.costs.keys() == set(Direction)


# the product ----------------------------------------------------------------------------------------------------------


def test_the_product_is_one(device: kvoffload.Device) -> None:
    with Computation(device, SMALL, seed=3) as computation:
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
        assert computation.operations == 2 * product.rows * product.columns * product.inner


def test_transfers_go_on_for_as_long_as_the_product_runs(device: kvoffload.Device) -> None:
    calls = []
    with Computation(device, SMALL) as computation:
        computation.seconds_each(2, lambda: calls.append(0))
    assert calls


@pytest.mark.parametrize("product", [MATMUL, SKINNY], ids=lambda product: product.name)
def test_the_product_compiles_to_tensor_cores_and_asynchronous_copies(product: Any) -> None:
    """For a Hopper GPU, without one; the first tiling fits its 227 KiB of shared memory, the last an Ampere's 99."""
    first = compile_kernel(kernel_spec(product, product.tiles[0], half=False), (9, 0))
    assert "wgmma" in first.ptx
    assert "cp.async" in first.ptx
    assert first.shared_bytes <= 227 << 10
    last = compile_kernel(kernel_spec(product, product.tiles[-1], half=False), (8, 0))
    assert last.shared_bytes <= 99 << 10


# the command ----------------------------------------------------------------------------------------------------------


def test_on_the_simulated_device_no_profile_is_kept_and_no_time_printed(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    assert main(["tune", "--backend", "simulated"]) == 0
    out = capsys.readouterr().out
    assert "SIMULATED" in out
    assert "no profile written" in out
    assert not any(unit in out for unit in ("GB/s", " s\n", "us", "%", "times"))
    assert not folder.exists()


@pytest.mark.usefixtures("tiny")
def test_a_simulated_profile_can_be_written_and_is_never_used_for_a_gpu(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, device: kvoffload.Device
) -> None:
    path = tmp_path / "profile.json"
    capsys.readouterr()
    assert main(["tune", "--backend", "simulated", "--output", str(path), "--json"]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert fields["written"] == str(path)
    assert fields["simulated"] is True
    assert fields.keys() == {
        "simulated", "device", "driver", "bindings", "link", "transfers", "missing", "written",
    }  # fmt: skip
    profile = parse(path.read_bytes())
    assert profile.simulated
    assert "SIMULATED" in profile.source
    for costs in profile.costs.values():
        assert costs.strided is not None
        assert (set(costs.flat), set(costs.gather), set(costs.split)) == ({"batch", "loop"}, {1}, {1})
    assert set(profile.slowdowns) == {"strided", "batch", "loop", "gather 1", "split 1"}
    assert set(profile.errors) == {"strided", "batch", "gather", "split"}
    kept = profile_path(key_of(device))
    kept.parent.mkdir(parents=True)
    kept.write_bytes(path.read_bytes())
    with pytest.warns(KVOffloadWarning, match="kvoffload tune"):
        assert load_profile(key_of(device)) is default_profile(None)


def test_an_engine_takes_the_profile_that_was_written(device: kvoffload.Device) -> None:
    profile = parse(render(tune(device, scale=TINY).profile))
    planes = device.allocate_planes(4, block_bytes=64, num_blocks=8)
    layout = kvoffload.KVLayout([planes])
    for prefer in ("overlap", "latency"):
        with OffloadEngine(layout, device=device, num_slots=8, profile=profile, prefer=prefer) as engine:
            assert engine.profile is profile
            assert " us expected" in engine.load([1], [2], after=kvoffload.NO_WAIT).reason


def test_an_output_that_cannot_be_written_is_said_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvoffload.commands.tune.tune", lambda *_, **__: pytest.fail("measured"))
    assert main(["tune", "--backend", "simulated", "--output", str(tmp_path / "no" / "where")]) == 2
    assert "--output" in capsys.readouterr().err


def test_an_output_keeps_what_it_holds_until_there_is_a_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "profile.json"
    path.write_text("older")

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvoffload.commands.tune.tune", interrupted)
    assert main(["tune", "--backend", "simulated", "--output", str(path)]) == 130
    assert path.read_text() == "older"
    assert list(tmp_path.iterdir()) == [path]


def test_a_cache_folder_that_cannot_be_written_is_said_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: kvoffload.Device
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(cachefiles.FOLDER_VARIABLE, str(tmp_path / "file" / "cache"))
    gpu: Any = SimpleNamespace(simulated=False)
    with pytest.raises(CommandError, match=f"{cachefiles.FOLDER_VARIABLE}.*--output"):
        _require_kept(gpu, None)
    _require_kept(gpu, tmp_path / "profile.json")
    _require_kept(device, None)
    assert not (tmp_path / "profile.json").exists()


def test_what_cannot_run_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    old = kvoffload.open_device(backend="simulated", seed=seed, driver_version=(12, 4), bindings_version=(13, 3))
    monkeypatch.setattr("kvoffload.kernels.loader.triton_version", lambda: None)
    monkeypatch.setitem(sys.modules, "triton", None)
    tuning = tune(old, scale=TINY)
    assert set(tuning.missing) == {"gather", "split", "batch", "slowdown"}
    for costs in tuning.profile.costs.values():
        assert (set(costs.flat), costs.gather, costs.split) == ({"loop"}, {}, {})
    assert tuning.profile.slowdowns == {}
    check_clean_close(old)


def test_a_kernel_that_cannot_be_loaded_is_left_out(monkeypatch: pytest.MonkeyPatch, device: kvoffload.Device) -> None:
    """Which only shows when one is."""
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.warns(KVOffloadWarning, match="no copy kernels"):
        tuning = tune(device, scale=TINY)
    assert set(tuning.missing) == {"gather", "split", "slowdown"}
    assert "Triton" in tuning.missing["gather"]
    assert all(set(costs.flat) == {"batch", "loop"} for costs in tuning.profile.costs.values())


def test_progress_ends_where_it_said(device: kvoffload.Device) -> None:
    steps: list[tuple[int, int]] = []
    tune(device, scale=TINY, progress=lambda done, total: steps.append((done, total)))
    assert [done for done, _ in steps] == list(range(1, len(steps) + 1))
    assert {total for _, total in steps} == {len(steps)}


def show(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["tune", "--show", "--backend", "simulated", "--json", *options]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert isinstance(fields, dict)
    return fields


def test_show_prints_every_decision_of_the_profile_in_force(capsys: pytest.CaptureFixture[str]) -> None:
    fields = show(capsys)
    assert fields["profile"].startswith("default for an unknown GPU")
    found = fields["decisions"]
    sizes = [each << 10 for each in (2, 4, 8, 16, 32, 64, 128, 256)]
    assert Counter((each["direction"], each["placement"], each["block_bytes"]) for each in found) == {
        (direction, placement, nbytes): 4
        for direction in ("store", "load")
        for placement in ("folded", "scattered")
        for nbytes in sizes
    }
    assert all(each["runner_up"] != each["method"] and each["gb_per_s"] > 0 and each["reason"] for each in found)


def test_show_follows_its_options_and_the_profile(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvoffload.commands.tune.profile_for", lambda _: default_profile(H200))
    kernels = {"gather 1", "gather 2", "gather 4", "split 1", "split 2"}
    assert {each.method for each in decisions(default_profile(H200), frozenset(NAMES), "latency", 4)} & kernels
    fields = show(capsys, "--prefer", "latency")
    assert fields["profile"] == default_profile(H200).source
    assert fields["not_offered"] == ["gather", "split"]
    assert fields["not_available"] == {}
    assert not {method for each in fields["decisions"] for method in (each["method"], each["runner_up"])} & kernels
    fields = show(capsys, "--sm-limit", "0")
    assert not {each["method"] for each in fields["decisions"]} & kernels
    assert fields["not_available"] == dict.fromkeys(("gather", "split"), "sm_limit=0 forbids kernels")
    capsys.readouterr()
    assert main(["tune", "--show", "--backend", "simulated"]) == 0
    out = capsys.readouterr().out
    assert f"expectations, from this profile: {default_profile(H200).source}" in " ".join(out.split())
    assert "strided " in out
    assert "gather and split are kernels: on the simulated device" in " ".join(out.split())


def test_show_leaves_out_a_kernel_that_cannot_be_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise kvoffload.CapabilityError("no room for it")

    monkeypatch.setattr("kvoffload.terminal.machine.load_kernel", refuse)
    assert show(capsys)["not_available"] == dict.fromkeys(("gather", "split"), "no room for it")


def test_show_has_nothing_to_write(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["tune", "--show", "--backend", "simulated", "--output", str(tmp_path / "x")]) == 2
    assert "--output" in capsys.readouterr().err


# on a GPU -------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_profile_is_measured_and_kept(gpu_device: kvoffload.Device, capsys: pytest.CaptureFixture[str]) -> None:
    """`kvoffload tune` prints how long that took and how far the profile is from the measured times."""
    assert main(["tune", "--json"]) == 0
    fields = json.loads(capsys.readouterr().out)
    profile = load_profile(key_of(gpu_device))
    assert profile.source.startswith("measured on")
    assert {"strided", "batch", "gather", "split"} <= set(fields["errors"])
    assert all(error["transfers"] > 0 for error in fields["errors"].values())
    assert {"strided", "batch", "loop"} <= set(fields["slowdowns"])
