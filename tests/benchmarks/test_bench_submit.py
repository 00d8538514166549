"""`bench submit`: bare calls and the engine move the right bytes, in turn; no times without a GPU."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
from benching import run_json, times_in

import kvoffload
from kvoffload.errors import DriverError
from kvoffload.planning.transfer_plan import Direction
from kvoffload.testing import SimulatedDriver, check_clean_close
from kvoffload_bench.harness import SMALL, Lab
from kvoffload_bench.setup import Placement, TransferSetup, geometry_of
from kvoffload_bench.submit import UNFINISHED, BareBatch, BarePack, BareStrided, BareSubmission

SIMULATED = ("bench", "submit", "--backend", "simulated")
KINDS = [
    (Placement.INTERLEAVED, BareBatch, "cuMemcpyBatchAsync"),
    (Placement.FOLDED, BareStrided, "cuMemcpy3DBatchAsync"),
    (Placement.SCATTERED, BarePack, "cuLaunchKernel"),
]
LAYOUTS = {"block-major": "batch", "plane-major": "strided", "separate allocations": "pack"}


def test_bench_submit_shows_every_line_verified_and_without_times(capsys: pytest.CaptureFixture[str]) -> None:
    fields = run_json(capsys, *SIMULATED)
    lines = [
        (each["layout"], each["copier"], each["direction"], each["blocks"], each["cold"])
        for each in fields["submissions"]
    ]
    assert lines == [
        (layout, copier, direction, blocks, cold)
        for layout, copier in LAYOUTS.items()
        for direction in ("store", "load")
        for blocks in (2, 8, 32)
        for cold in (False, True)
    ]
    assert [(each["layout"], each["blocks"], each["cold"]) for each in fields["loads"]] == [
        (layout, 2, cold) for layout in ("block-major", "plane-major") for cold in (False, True)
    ]
    assert {each["wrong"] for each in (*fields["submissions"], *fields["loads"])} == {0}
    assert (fields["benchmark"], fields["wrong_rows"]) == ("submit", 0)
    assert times_in(fields) == []


@pytest.mark.parametrize("kind", [BareBatch, BareStrided, BarePack])
def test_wrong_bytes_of_the_bare_calls_are_counted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: type[BareSubmission]
) -> None:
    submit = BareSubmission.submit
    monkeypatch.setattr(BareSubmission, "submit", lambda bare, *ids: None if type(bare) is kind else submit(bare, *ids))
    fields = run_json(capsys, *SIMULATED, code=1)
    (copier,) = {each["copier"] for each in fields["submissions"] if each["wrong"]}
    rows = 1 if copier == "batch" else 4
    for each in fields["submissions"]:
        pairs = min(64, 4 * each["blocks"])
        assert each["wrong"] == (rows * pairs if each["copier"] == copier else 0)


@pytest.mark.parametrize(("placement", "kind", "call"), KINDS)
@pytest.mark.parametrize("direction", list(Direction))
def test_bare_submissions_make_few_calls_and_move_the_blocks(
    lab: Lab, placement: Placement, kind: type[BareSubmission], call: str, direction: Direction
) -> None:
    with TransferSetup(lab, geometry_of(4, 512, 1.0), placement=placement, count=12) as setup:
        setup.prepare(direction)
        setup.poison(direction)
        group = setup.groups[0]
        simulator = lab.device.simulator
        assert simulator is not None
        with closing(kind(setup, direction, 6)) as bare:
            for start in (0, 6):
                before = dict(simulator.call_count)
                bare.submit(group.blocks[start : start + 6], group.slots[start : start + 6])
                counted = {name: count - before.get(name, 0) for name, count in simulator.call_count.items()}
                copies = {"cuLaunchKernel": 2, "cuMemcpyBatchAsync": 1} if kind is BarePack else {call: 1}
                assert {name: count for name, count in counted.items() if count} == {
                    "cuCtxPushCurrent": 1,
                    "cuEventRecord": 3,
                    "cuStreamWaitEvent": 1,
                    **copies,
                    "cuCtxPopCurrent": 1,
                }
                bare.check()
            bare.wait()
        assert setup.wrong(direction) == 0


@pytest.mark.parametrize(("placement", "kind", "call"), KINDS)
def test_as_many_bare_submissions_as_may_be_unfinished_keep_their_addresses(
    lab: Lab, placement: Placement, kind: type[BareSubmission], call: str
) -> None:
    assert call
    with TransferSetup(lab, geometry_of(2, 512, 1.0), placement=placement, count=UNFINISHED) as setup:
        setup.prepare(Direction.LOAD)
        setup.poison(Direction.LOAD)
        group = setup.groups[0]
        assert lab.device.simulator is not None
        lab.device.simulator.scheduler.drift_probability = 0  # nothing executes before it is waited for
        with closing(kind(setup, Direction.LOAD, 1)) as bare:
            for index in np.arange(UNFINISHED):
                bare.submit(group.blocks[index : index + 1], group.slots[index : index + 1])
            bare.wait()
        assert setup.wrong(Direction.LOAD) == 0


@pytest.mark.parametrize(("placement", "kind", "call"), KINDS)
def test_a_bare_call_that_fails_is_told_by_check(
    seed: int, placement: Placement, kind: type[BareSubmission], call: str
) -> None:
    device = kvoffload.open_device(backend=SimulatedDriver(seed=seed))
    assert device.simulator is not None
    with (
        Lab(device, SMALL, repeats=1, seed=seed) as lab,
        TransferSetup(lab, geometry_of(2, 512, 1.0), placement=placement, count=2) as setup,
        closing(kind(setup, Direction.STORE, 2)) as bare,
    ):
        device.simulator.faults.fail_call(call)
        bare.submit(setup.groups[0].blocks, setup.groups[0].slots)
        with pytest.raises(DriverError, match="CUDA_ERROR"):
            bare.check()
        bare.wait()
    check_clean_close(device)


def test_what_the_driver_lacks_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    old = kvoffload.open_device(backend=SimulatedDriver(driver_version=(12, 4), bindings_version=(13, 3)))
    monkeypatch.setattr("kvoffload.terminal.console.open_device", lambda *_, **__: old)
    fields = run_json(capsys, *SIMULATED)
    assert set(fields["not_run"]) == {f"{layout} by {copier}" for layout, copier in LAYOUTS.items()}
    assert fields["submissions"] == []
    assert fields["wrong_rows"] == 0


@pytest.mark.gpu
def test_bench_submit_on_a_gpu(capsys: pytest.CaptureFixture[str], on_gpu: tuple[str, ...]) -> None:
    fields = run_json(capsys, "bench", "submit", "--repeats", "20", *on_gpu)
    assert fields["wrong_rows"] == 0
    assert len(fields["submissions"]) == 36
    for each in fields["submissions"]:
        assert (each["planes"], each["block_bytes"]) == (64, 32 << 10)
        assert each["ratio"] == each["ours_us"] / each["bare_us"]
    assert all(each["beyond_link_us"] == each["wall_us"] - each["link_us"] for each in fields["loads"])
