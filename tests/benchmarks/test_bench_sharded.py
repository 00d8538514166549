"""`bench sharded`: bytes on several devices; wrong bytes are counted; no times here."""

from __future__ import annotations

import pytest
from benching import run_json, times_in

import kvoffload
from kvoffload.planning.transfer_plan import Direction
from kvoffload.testing import SimulatedDriver, check_clean_close
from kvoffload_bench.series import DIRECTIONS
from kvoffload_bench.sharded import ONE, SHARDED, Series, ShardSize

SIZE = ShardSize(3, 64, 2, 3)


def test_every_direction_is_verified_and_without_times(capsys: pytest.CaptureFixture[str]) -> None:
    fields = run_json(capsys, "bench", "sharded", "--backend", "simulated", "--gpus", "3")
    assert [each["direction"] for each in fields["series"]] == list(DIRECTIONS)
    assert all(each["wrong"] == {ONE: 0, SHARDED: 0} for each in fields["series"])
    assert (fields["gpus"], fields["wrong_rows"]) == (3, 0)
    assert times_in(fields) == []


@pytest.mark.parametrize("directions", DIRECTIONS.values(), ids=DIRECTIONS)
def test_what_is_not_copied_is_counted(directions: tuple[Direction, ...], seed: int) -> None:
    driver = SimulatedDriver(device_count=2, seed=seed)
    devices = [kvoffload.open_device(index, backend=driver) for index in range(2)]
    with Series(devices, SIZE, seed, sharded=True) as series:
        series.poison(directions)
        assert series.wrong(directions) == 2 * SIZE.in_series * len(directions)
        assert series.execute(directions) >= 0
        assert series.wrong(directions) == 0
    devices[1].close()
    check_clean_close(devices[0])
