"""Work that is queued without a pause while transfers are timed: always enough, and nothing of it is left."""

from __future__ import annotations

from typing import Any

import pytest

import kvoffload
from kvoffload.calibration.backdrops import opposite_copies, products
from kvoffload.calibration.compute import SMALL
from kvoffload.errors import DriverError
from kvoffload.planning.transfer_plan import Direction


@pytest.mark.parametrize("direction", Direction)
def test_copies_go_on_until_the_end_and_leave_nothing(device: kvoffload.Device, direction: Direction) -> None:
    simulator: Any = device.simulator
    copies = simulator.faults.call_count
    with opposite_copies(device, direction, 4096) as backdrop:
        backdrop.top_up()
        assert copies["cuMemcpyAsync"] == 3, "three chunks, and no more until one has ended"
        backdrop.drain()
        backdrop.top_up()
        assert copies["cuMemcpyAsync"] == 6
    assert simulator.pending_operations() == 0


def test_products_go_on_until_the_end(device: kvoffload.Device) -> None:
    simulator: Any = device.simulator
    with products(device, SMALL) as backdrop:
        launched = simulator.faults.call_count["cuLaunchKernel"]
        backdrop.top_up()
        assert simulator.faults.call_count["cuLaunchKernel"] == launched + 3
    assert simulator.pending_operations() == 0


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_an_event_that_cannot_be_made_leaves_nothing(device: kvoffload.Device, nth: int) -> None:
    simulator: Any = device.simulator
    simulator.faults.fail_call("cuEventCreate", nth=nth)
    with pytest.raises(DriverError), opposite_copies(device, Direction.LOAD, 4096):
        pass
