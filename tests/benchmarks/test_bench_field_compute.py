"""The computation of `bench field` on the simulated device: it covers a series, and is freed after a failure too."""

from __future__ import annotations

from contextlib import closing

import pytest

import kvoffload
from kvoffload.errors import KVOffloadError
from kvoffload.internal.models import MODELS
from kvoffload.testing import SimulatedDriver, check_clean_close
from kvoffload_bench.field_compute import ConcurrentCompute, Situation
from kvoffload_bench.field_methods import ContiguousSeries, FieldMethods, FieldSetup, SeriesSize
from kvoffload_bench.harness import SMALL, Lab
from kvoffload_bench.series import SeriesRun
from kvoffload_bench.setup import Placement

MODEL = MODELS["qwen2.5-0.5b"].scaled(1 / 64)
SIZE = SeriesSize(2, 2, 1)


@pytest.mark.parametrize("situation", [Situation.LARGE, Situation.DECODE])
def test_the_window_goes_from_the_chunk_at_the_begin_to_the_chunk_at_the_end(lab: Lab, situation: Situation) -> None:
    with closing(ConcurrentCompute(lab, situation)) as compute, lab.device.current():
        for top_ups in (0, 3):  # a second series finds nothing of the first
            compute.begin()
            for _ in range(top_ups):
                compute.top_up()
            times = compute.end(1.0)
            assert times.running_at_begin
            assert times.products == len(times.spans) >= 1
            assert times.spans[0].start == 0
            assert all(each.start <= each.end for each in times.spans)
            starts = [each.start for each in times.spans]
            assert starts == sorted(starts)
        assert compute.seconds_alone() >= 0


def test_a_computation_that_is_not_topped_up_ends(lab: Lab) -> None:
    with closing(ConcurrentCompute(lab, Situation.SMALL)) as compute, lab.device.current():
        compute.begin()
        lab.driver.stream_synchronize(compute.stream)
        assert not compute.end(1.0).running_at_end


@pytest.mark.parametrize(
    ("call", "nth"),
    [
        ("cuMemcpyBatchAsync", 1),
        ("cuMemcpyBatchAsync", 4),
        ("cuMemcpyAsync", 9),
        ("cuLaunchKernel", 4),
        ("cuEventQuery", 9),
    ],
)
def test_after_a_failed_call_all_is_freed(seed: int, call: str, nth: int) -> None:
    device = kvoffload.open_device(backend=SimulatedDriver(seed=seed))
    assert device.simulator is not None
    with (
        Lab(device, SMALL, repeats=1, seed=seed) as lab,
        SeriesRun(
            lab, [Situation.SMALL], ["both"], groups=1, seconds=None, progress=lambda *_: None, spare=True
        ) as run,
        ContiguousSeries(lab, SIZE) as contiguous,
        FieldSetup(lab, MODEL, Placement.INTERLEAVED, SIZE) as setup,
        closing(FieldMethods(setup, contiguous)) as methods,
    ):
        device.simulator.faults.fail_call(call, nth)
        with pytest.raises(KVOffloadError):
            list(run.cells(methods.of, SIZE.transfers, {}))
    check_clean_close(device)
