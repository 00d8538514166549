"""What the leak tests on GPUs count is what the simulator knows to exist; and a leak of each kind is found."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import STAGING, rig
from leaks import PAIRS, count_held, leaked

import kvoffload


@pytest.mark.kernels
def test_what_is_counted_is_what_exists(device: kvoffload.Device) -> None:
    simulator: Any = device.simulator

    def held() -> dict[str, int]:
        return {kind: simulator.leaks()[kind] - before[kind] for kind in PAIRS}

    before, counted = simulator.leaks(), count_held(device)
    with rig(device, staging_bytes=STAGING) as bench:
        bench.engine.store([1, 2], [1, 2]).wait(10)
        bench.engine.store([1, 2], [1, 2], copier="pack").wait(10)
        assert {kind: counted[kind] for kind in PAIRS} == held()
        assert min(held()[kind] for kind in ("device_allocations", "registered_ranges", "streams", "events")) > 0
    device.reclaim()
    assert {kind: counted[kind] for kind in PAIRS} == held()


def test_engines_leak_nothing(device: kvoffload.Device) -> None:
    def use() -> None:
        with rig(device, staging_bytes=STAGING) as bench:
            bench.engine.store([1, 2], [1, 2]).wait(10)

    assert leaked(device, use) == set()


@pytest.mark.parametrize(
    ("kind", "create", "arguments"),
    [
        ("events", "cuEventCreate", (2,)),
        ("streams", "cuStreamCreateWithPriority", (1, 0)),
        ("device_allocations", "cuMemAlloc", (4096,)),
    ],
)
def test_a_leak_is_found(device: kvoffload.Device, kind: str, create: str, arguments: tuple[int, ...]) -> None:
    kept: list[Any] = []

    def use() -> None:
        with device.current():
            device.driver.create(create, kept, *arguments)

    assert leaked(device, use) == {kind}
    with device.current():
        device.driver.destroy(PAIRS[kind][1], kept)
