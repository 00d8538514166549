"""`bench transfer`: every transfer verified, the same addresses for all copy methods, ratios."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from itertools import product
from typing import Any

import numpy as np
import pytest
from benching import run_json

import kvoffload
from kvoffload.commands import main
from kvoffload.errors import DriverError
from kvoffload.internal.models import MODELS
from kvoffload.planning.transfer_plan import Direction
from kvoffload.testing import SimulatedDriver, check_clean_close
from kvoffload.tuning import COPIERS, ProfileKey, default_profile
from kvoffload_bench.copy_methods import GridStride, bare_calls, bare_strided, flat_batch, time_engine
from kvoffload_bench.harness import SMALL, WARM_UP, ContiguousCopy, Lab, Scenario, time_rounds
from kvoffload_bench.setup import Placement, TransferSetup, geometry_of
from kvoffload_bench.transfer import ratios

MODEL = MODELS["gpt-oss-20b"].scaled(0.01)  # two groups of 24 planes
SMALL_OPTIONS = ("--model", "gpt-oss-20b", "--blocks", "4", "--blocks-per-slot", "1", "--planes", "folded")
SMALL_TRANSFER = ("bench", "transfer", *SMALL_OPTIONS)
BARE = {"flat batch", "copy loop", "grid-stride 12", "contiguous copy"}
CHOICES = {"choice, overlap", "choice, latency"}


# bench transfer -------------------------------------------------------------------------------------------------------


def test_bench_transfer_verifies_every_scenario_of_every_placement(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--model", "gpt-oss-120b-tp4", "--blocks-per-slot", "1,2", "--blocks", "4", "--backend", "simulated")
    fields = run_json(capsys, "bench", "transfer", *options)
    rows = fields["transfers"]
    assert {row["model"] for row in rows} == {"gpt-oss-120b-tp4"}
    places = {(row["placement"], row["blocks_per_slot"], row["direction"]) for row in rows}
    assert places == set(product(("folded", "scattered", "interleaved"), (1, 2), ("store", "load")))
    for row in rows:
        scenarios = CHOICES | BARE | {"strided", "batch", "loop"}
        scenarios |= {"bare strided"} if row["placement"] == "folded" else set()
        scenarios |= {"pack"} if row["placement"] == "interleaved" or row["blocks_per_slot"] == 1 else set()
        assert set(row["wrong"]) == scenarios
        assert set(row["wrong"].values()) == {0}
        assert set(row["chosen"]) == CHOICES
        assert row["gb_per_s"] == {} == row["samples_us"]
    assert (fields["benchmark"], fields["wrong_rows"], fields["ratios"]) == ("transfer", 0, [])


def test_bench_transfer_counts_wrong_bytes_of_every_round_and_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvoffload_bench.copy_methods.time_engine", lambda *_: 1.0)
    fields = run_json(capsys, *SMALL_TRANSFER, "--repeats", "2", "--backend", "simulated", code=1)
    for row in fields["transfers"]:
        every_row = row["blocks"] * row["planes"] * (WARM_UP + 2)
        assert {row["wrong"][name] for name in ("choice, overlap", "strided", "loop")} == {every_row}
        assert {row["wrong"][name] for name in (*BARE, "bare strided")} == {0}


def test_one_bad_transfer_among_good_ones_is_seen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []

    def copy_nothing_once(
        setup: TransferSetup, direction: Direction, name: str, chosen: dict[str, str], *rest: Any
    ) -> float:
        calls.append(name)
        if calls.count("batch") == 2 and name == "batch":
            return 1.0
        return time_engine(setup, direction, name, chosen, *rest)

    monkeypatch.setattr("kvoffload_bench.copy_methods.time_engine", copy_nothing_once)
    fields = run_json(capsys, *SMALL_TRANSFER, "--repeats", "3", "--backend", "simulated", code=1)
    assert fields["transfers"][0]["wrong"]["batch"] == 4 * 24
    assert fields["wrong_rows"] == 4 * 24


def test_bench_transfer_leaves_out_what_the_driver_lacks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = kvoffload.open_device(backend=SimulatedDriver(driver_version=(12, 4), bindings_version=(13, 3)))
    monkeypatch.setattr("kvoffload.terminal.console.open_device", lambda *_, **__: old)
    assert main([*SMALL_TRANSFER, "--backend", "simulated"]) == 0
    out = capsys.readouterr().out
    assert "not run: batch: cuda-bindings 13.3 need a CUDA driver >= 13.0" in out
    assert "flat batch" not in out


def test_bench_transfer_without_kernels_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvoffload.kernels.why_not", lambda _: "kernels need Triton, which is not installed")
    fields = run_json(capsys, *SMALL_TRANSFER, "--backend", "simulated")
    assert set(fields["not_run"]) == {"pack", "grid-stride 12"}
    assert {reason.split(",")[0] for reason in fields["not_run"].values()} == {"kernels need Triton"}
    assert all(not name.startswith(("pack", "grid")) for row in fields["transfers"] for name in row["wrong"])


@pytest.mark.gpu
def test_bench_transfer_on_a_gpu(capsys: pytest.CaptureFixture[str], on_gpu: tuple[str, ...]) -> None:
    options = ("--model", "qwen2.5-0.5b", "gpt-oss-120b-tp4", "--repeats", "3", *on_gpu)
    fields = run_json(capsys, "bench", "transfer", *options)
    assert fields["simulated"] is False
    assert fields["wrong_rows"] == 0
    for row in fields["transfers"]:
        assert set(row["gb_per_s"]) >= CHOICES | BARE | {"strided", "loop", "pack"}
        assert all(rate > 0 for rate in row["gb_per_s"].values())
        assert {len(samples) for samples in row["samples_us"].values()} == {3}
    assert {each["ratio"] for each in fields["ratios"]} >= {"pack / contiguous copy, folded, from 32 MiB, 4 KiB, load"}


# what the benchmarks are made of --------------------------------------------------------------------------------------


def methods_of(setup: TransferSetup, direction: Direction, grid: GridStride) -> dict[str, Callable[[], object]]:
    methods: dict[str, Callable[[], object]] = {
        **bare_calls(setup, direction),
        "grid": grid.timed(setup, direction, 12),
    }
    for copier in COPIERS:
        if setup.missing[copier] is not None:
            continue
        methods[str(copier)] = lambda copier=copier: setup.seconds(setup.submit(direction, copier))  # type: ignore[misc]
    return methods


@pytest.mark.parametrize(
    ("placement", "blocks_per_slot"),
    [
        (Placement.FOLDED, 1),
        (Placement.FOLDED, 3),
        (Placement.SCATTERED, 2),
        (Placement.INTERLEAVED, 1),
        (Placement.INTERLEAVED, 3),
    ],
)
def test_every_copy_method_is_given_the_same_addresses(lab: Lab, placement: Placement, blocks_per_slot: int) -> None:
    with (
        TransferSetup(lab, MODEL, placement=placement, blocks_per_slot=blocks_per_slot, count=12) as setup,
        closing(GridStride(lab, setup.row_bytes, setup.copies)) as grid,
    ):
        for part in setup.groups:
            assert (np.diff(np.sort(part.starts)) > blocks_per_slot).all(), "no two runs are adjacent"
        slots = np.concatenate([part.slots for part in setup.groups])
        assert len(set(slots.tolist())) == len(slots) == setup.slot_count == 12 // blocks_per_slot
        assert setup.copies == setup.slot_count * (1 if placement is Placement.INTERLEAVED else 24)
        assert setup.nbytes == 12 * 24 * setup.block_bytes
        for direction in Direction:
            setup.prepare(direction)
            for name, run in methods_of(setup, direction, grid).items():
                setup.poison(direction)
                assert setup.wrong(direction) == setup.copies, name
                run()
                assert setup.wrong(direction) == 0, name


def test_where_planes_lie_decides_what_folds(lab: Lab) -> None:
    folds = {}
    for placement in Placement:
        with TransferSetup(lab, MODEL, placement=placement, count=2) as setup:
            folds[placement] = [(group.folds, group.planes) for group in setup.engine._shard.folds.groups]
            report = setup.engine.plan("load", setup.groups[0].blocks, setup.groups[0].slots)
            assert (report.blocks, report.nbytes) == (1, setup.nbytes // 2)
            assert (report.operations, report.rows) == {
                Placement.FOLDED: (1, 24),
                Placement.SCATTERED: (24, 24),
                Placement.INTERLEAVED: (1, 1),
            }[placement]
    assert folds == {
        Placement.FOLDED: [(1, 24)] * 2,
        Placement.SCATTERED: [(24, 24)] * 2,
        Placement.INTERLEAVED: [(1, 24)] * 2,
    }


def test_a_shorter_transfer_moves_the_first_slots_alone(lab: Lab) -> None:
    with TransferSetup(lab, MODEL, count=12) as setup:
        before = [part.slots.tolist() for part in setup.groups]
        for direction in Direction:
            setup.take(6)
            setup.prepare(direction)
            setup.poison(direction)
            setup.take(2)
            setup.seconds(setup.submit(direction, "loop"))
            assert setup.wrong(direction) == 0
            setup.take(6)
            assert setup.wrong(direction) == 2 * 4 * 24
        assert [part.slots.tolist() for part in setup.groups] == before


def test_the_engine_chooses_by_the_preference_it_is_given(lab: Lab) -> None:
    """For 16 blocks of 32 planes x 64 KiB an H200's profile has another copier for each."""
    profile = default_profile(ProfileKey("NVIDIA H200", "13.0", 5, 16, "13.3"))
    with TransferSetup(lab, geometry_of(32, 64 << 10, 1.0), count=16, profile=profile) as setup:
        setup.prepare(Direction.STORE)
        for prefer, copier in (("latency", "batch"), ("overlap", "strided")) * 2:
            setup.poison(Direction.STORE)
            jobs = setup.submit(Direction.STORE, prefer=prefer)
            setup.seconds(jobs)
            assert [jobs[0].copier, setup.chosen_copier(Direction.STORE, prefer)] == [copier] * 2
            assert setup.wrong(Direction.STORE) == 0


@pytest.mark.parametrize("nbytes", [1 << 16, 9 << 20])
def test_the_contiguous_copy_is_verified(lab: Lab, monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    with closing(ContiguousCopy(lab, nbytes)) as contiguous:
        for direction in (*Direction, *Direction):
            scenario = contiguous.scenario(direction)
            scenario.poison()
            assert scenario.wrong() == nbytes // 4096
            scenario.execute()
            assert scenario.wrong() == 0
        monkeypatch.setattr(lab.driver, "copy", lambda *_: None)
        scenario = contiguous.scenario(Direction.LOAD)
        scenario.poison()
        scenario.execute()
        monkeypatch.undo()
        assert scenario.wrong() == nbytes // 4096


@pytest.mark.parametrize("nbytes", [64, 4 << 20])
def test_wrong_rows_are_counted_exactly(lab: Lab, nbytes: int) -> None:
    right = np.arange(nbytes, dtype=np.uint64).astype(np.uint8)
    wrong = right.copy()
    wrong[[0, 15, 17, nbytes - 1]] ^= 1
    assert lab.wrong_rows([(right, right)], 16) == 0
    assert lab.wrong_rows([(right, right), (wrong, right)], 16) == 3
    assert lab.wrong_rows([(wrong, right)], 64) == (1 if nbytes == 64 else 2)


def test_rounds_begin_with_another_scenario_each_and_leave_the_first_out() -> None:
    order: list[str] = []

    def scenario(name: str) -> Scenario:
        def run() -> float:
            order.append(name)
            return float(len(order))

        return Scenario(run, lambda: order.append("poison"), lambda: 1, 1000)

    timings = time_rounds({"a": scenario("a"), "b": scenario("b")}, 2)
    assert [name for name in order if name != "poison"] == ["a", "b", "b", "a", "a", "b"]
    assert order[::2] == ["poison"] * 6
    assert timings["a"].seconds == [8.0, 10.0]
    assert timings["a"].wrong == 3
    assert timings["b"].gb_per_s == pytest.approx(1000 / 9 / 1e9)


def test_a_bare_call_that_fails_raises(seed: int) -> None:
    device = kvoffload.open_device(backend=SimulatedDriver(seed=seed))
    with Lab(device, SMALL, repeats=1, seed=seed) as lab, TransferSetup(lab, MODEL, count=2) as setup:
        for name, make in (("cuMemcpy3DBatchAsync", bare_strided), ("cuMemcpyBatchAsync", flat_batch)):
            assert device.simulator is not None
            run = make(setup, Direction.LOAD)
            device.simulator.faults.fail_call(name)
            with pytest.raises(DriverError, match="CUDA_ERROR"):
                run()
    check_clean_close(device)


def row(direction: Direction, placement: Placement, row_bytes: int, copies: int, **rates: float) -> dict[str, Any]:
    names = {name.replace("_", " ").replace("choice ", "choice, "): rate for name, rate in rates.items()}
    names = {name.replace("grid ", "grid-stride "): rate for name, rate in names.items()}
    where = {"model": "64 planes", "placement": placement, "direction": direction, "blocks_per_slot": 1, "groups": 1}
    sizes = {"block_bytes": row_bytes, "row_bytes": row_bytes, "copies": copies, "nbytes": row_bytes * copies}
    return where | sizes | {"gb_per_s": names}


def test_ratios_and_where_they_are_worst() -> None:
    store, scattered, folded = Direction.STORE, Placement.SCATTERED, Placement.FOLDED
    rows = [
        row(store, scattered, 4096, 8192, pack=45.0, contiguous_copy=50.0, strided=5.0, choice_latency=40.0),
        row(store, scattered, 65536, 8192, pack=49.0, contiguous_copy=50.0, batch=50.0, choice_latency=50.0),
        row(store, scattered, 8192, 128, pack=30.0, contiguous_copy=50.0, grid_12=12.0, choice_latency=30.0),
        row(Direction.LOAD, scattered, 8192, 4096, batch=12.0, flat_batch=3.0, choice_latency=12.0),
        row(store, folded, 4096, 8192, pack=44.0, choice_overlap=42.0, contiguous_copy=50.0),
        row(store, folded, 8192, 1024, pack=10.0, choice_overlap=10.0, contiguous_copy=50.0),  # less than 32 MiB
        row(store, folded, 2048, 65536, pack=1.0, contiguous_copy=50.0),
    ]
    found = ratios(rows)
    assert {each["which"] for each in found} == {"lowest"}
    assert {(each["ratio"], each["at"].partition(", ")[2]): each["value"] for each in found} == {
        ("pack / contiguous copy, scattered, 4 to 64 KiB, from 32 MiB, store", "4 KiB, n = 8192, scattered"): 0.9,
        ("pack / grid-stride 12, scattered, n = 128, 8 KiB, store", "8 KiB, n = 128, scattered"): 2.5,
        ("pack / contiguous copy, folded, from 32 MiB, 4 KiB, store", "4 KiB, n = 8192, folded"): 0.88,
        ("batch / flat batch, scattered, n = 4096, 8 KiB, load", "8 KiB, n = 4096, scattered"): 4.0,
    }
