"""`bench`: every case verified, the same addresses for all, ratios, and Python's share of a call."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvoffload
from kvoffload.cli import main
from kvoffload.cli.cases import SMALL, Bed, BigCopy, GpuTimer
from kvoffload.cli.marshal import idle_driver
from kvoffload.cli.transfer import Row, lowest_ratios, ratios_of
from kvoffload.driver import FlatTable, SourceOrder
from kvoffload.errors import DriverError
from kvoffload.models import MODELS
from kvoffload.plan import Direction
from kvoffload.testing import check_clean_close

MODEL = MODELS["gpt-oss-20b"].scaled(0.01)
SMALL_TRANSFER = ("bench", "transfer", "--model", "gpt-oss-20b", "--rows", "1,4", "--blocks", "8")


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*arguments, "--json"]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert isinstance(fields, dict)
    return fields


# bench transfer -------------------------------------------------------------------------------------------------------


def test_bench_transfer_verifies_every_case_of_every_geometry(capsys: pytest.CaptureFixture[str]) -> None:
    fields = run_json(capsys, "bench", "transfer", "--model", "all", "--rows", "1,8", "--backend", "simulated")
    rows = fields["transfers"]
    assert {(row["model"], row["row_blocks"], row["direction"]) for row in rows} == {
        (name, row_blocks, direction) for name in MODELS for row_blocks in (1, 8) for direction in ("store", "load")
    }
    cases = {"strided", "batch", "loop", "bare strided", "flat batch"}
    assert all(row["wrong"] == dict.fromkeys(cases, 0) for row in rows)
    assert all(row["gb_per_s"] == {} == row["ratios"] for row in rows)
    assert [row["descriptors"] for row in fields["descriptors"]] == [256] * 3
    assert all(each["call_seconds"] is None and each["wrong"] == 0 for each in fields["latencies"])
    assert fields["wrong_rows"] == 0


def test_bench_transfer_counts_wrong_bytes_and_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy_nothing(self: Bed, direction: Direction, copier: str) -> float:  # noqa: ARG001
        return 1.0

    monkeypatch.setattr(Bed, "engine_seconds", copy_nothing)
    assert main([*SMALL_TRANSFER, "--rows", "1", "--backend", "simulated", "--json"]) == 1
    fields = json.loads(capsys.readouterr().out)
    for row in fields["transfers"]:
        every_row = row["blocks"] * row["planes"]
        assert row["wrong"]["strided"] == row["wrong"]["loop"] == every_row
        assert row["wrong"]["bare strided"] == row["wrong"]["flat batch"] == 0


def test_bench_transfer_leaves_out_what_the_driver_lacks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = kvoffload.open_device(backend="simulated", driver_version=(12, 4), bindings_version=(13, 3))
    monkeypatch.setattr("kvoffload.cli.console.open_device", lambda *_, **__: old)
    assert main([*SMALL_TRANSFER, "--backend", "simulated"]) == 0
    out = capsys.readouterr().out
    assert "not run: batch: cuda-bindings 13.3 need a CUDA driver >= 13.0" in out


@pytest.mark.parametrize("options", [("--rows", "0"), ("--rows", "1,x"), ("--blocks", ""), ("--model", "nobody")])
def test_bench_transfer_refuses_bad_options(capsys: pytest.CaptureFixture[str], options: tuple[str, ...]) -> None:
    assert main(["bench", "transfer", "--backend", "simulated", *options]) == 2
    assert "usage" in capsys.readouterr().err


@pytest.mark.parametrize("row_blocks", [1, 4])
def test_every_way_of_copying_is_given_the_same_addresses(device: kvoffload.Device, seed: int, row_blocks: int) -> None:
    timer = GpuTimer(device)
    with Bed(device, timer, MODEL, row_blocks=row_blocks, count=12, size=SMALL, seed=seed) as bed:
        gaps = np.diff(np.sort(bed.starts))
        assert (gaps > row_blocks).all(), "no two runs are adjacent"
        assert len(set(bed.slots.tolist())) == len(bed.slots) == 12 // row_blocks
        for direction in Direction:
            ways: dict[str, Callable[[], object]] = {
                "bare strided": bed.bare_strided(direction),
                "flat": bed.bare_flat(direction),
                "strided": lambda: bed.engine_seconds(direction, "strided"),  # noqa: B023
            }
            bed.prepare(direction)
            for name, run in ways.items():
                bed.poison(direction)
                assert bed.wrong(direction) == len(bed.slots) * bed.plane_count, name
                run()
                assert bed.wrong(direction) == 0, name
    timer.close()


def test_the_big_copy_is_verified(device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    timer = GpuTimer(device)
    big = BigCopy(device, timer, 1 << 16, seed=1)
    assert big.wrong() == 0
    monkeypatch.setattr(BigCopy, "seconds", lambda *_: 1.0)
    assert big.wrong() > 60_000
    big.close()
    timer.close()


def test_a_bare_call_that_fails_raises(seed: int) -> None:
    device = kvoffload.open_device(backend="simulated", seed=seed)
    timer = GpuTimer(device)
    with Bed(device, timer, MODEL, row_blocks=1, count=2, size=SMALL, seed=seed) as bed:
        for name, make in (("cuMemcpy3DBatchAsync", bed.bare_strided), ("cuMemcpyBatchAsync", bed.bare_flat)):
            assert device.simulator is not None
            run = make(Direction.LOAD)
            device.simulator.faults.fail_call(name)
            with pytest.raises(DriverError, match="CUDA_ERROR"):
                run()
    timer.close()
    check_clean_close(device)


def test_ratios_and_where_they_are_lowest() -> None:
    rates = {"strided": 50.0, "bare strided": 40.0, "big copy": 100.0, "flat batch": 10.0, "batch": 30.0}
    ratios = ratios_of(rates)
    assert ratios == {
        "strided/bare": 1.25,
        "strided/big copy": 0.5,
        "strided/flat batch": 5.0,
        "batch/flat batch": 3.0,
    }
    assert ratios_of({"strided": 1.0}) == {}
    rows = [
        Row("a", Direction.LOAD, 64, 16, 1, 8, 4096, 100, ratios={"strided/bare": 0.9}),
        Row("b", Direction.LOAD, 64, 16, 8, 8, 4096, 100, ratios={"strided/bare": 0.8}),
        Row("c", Direction.STORE, 64, 16, 8, 8, 4096, 100, ratios={"strided/bare": 0.7}),
    ]
    store, load = lowest_ratios(rows)
    assert (store["direction"], store["lowest"]) == ("store", 0.7)
    assert (load["lowest"], load["lowest_at"]) == (0.8, "b, rows of 8")
    assert load["median"] == pytest.approx(0.85)


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu_device")
def test_bench_transfer_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    fields = run_json(capsys, "bench", "transfer", "--model", "qwen2.5-0.5b", "--repeats", "3", "--backend", "cuda")
    assert fields["simulated"] is False
    assert fields["wrong_rows"] == 0
    for row in fields["transfers"]:
        assert set(row["gb_per_s"]) >= {"strided", "loop", "big copy"}
        assert row["gb_per_s"]["big copy"] > 1
    assert all(each["wall_seconds"] > each["call_seconds"] > 0 for each in fields["latencies"])


# bench marshal --------------------------------------------------------------------------------------------------------


def test_bench_marshal_counts_nanoseconds_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    fields = run_json(capsys, "bench", "marshal", "--repeats", "5")
    assert fields["descriptors"] >= 1024
    assert fields["operations"] >= 128
    assert (fields["descriptor_bar_ns"], fields["operation_bar_ns"]) == (25.0, 50.0)
    for what in ("descriptor", "operation"):
        assert 0 < fields[f"{what}_best_ns"] <= fields[f"{what}_ns"] < 2000
    assert main(["bench", "marshal", "--repeats", "1"]) == 0
    assert "per descriptor" in capsys.readouterr().out


def test_the_idle_driver_is_given_every_descriptor() -> None:
    driver = idle_driver()
    seen: list[tuple[list[Any], list[Any], list[int], int]] = []

    def keep(*given: Any) -> tuple[int]:
        seen.append(given[:4])
        return (0,)

    driver._functions["cuMemcpyBatchAsync"] = keep
    table = FlatTable(8)
    targets, sources, sizes = np.arange(24, dtype=np.uint64).reshape(3, 8)
    table.fill(targets, sources, sizes)
    driver.copy_batch(table, 2, 7, SourceOrder.STREAM, 16)
    ((given_targets, given_sources, given_sizes, count),) = seen
    assert [int(each) for each in given_targets] == targets[2:7].tolist()
    assert [int(each) for each in given_sources] == sources[2:7].tolist()
    assert (given_sizes, count) == (sizes[2:7].tolist(), 5)
