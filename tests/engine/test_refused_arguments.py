"""Arguments of engines and transfers that are refused: the message names the argument and the value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from helpers import Rig, settled

import kvoffload
from kvoffload import CapacityError, KVLayout, OffloadEngine


@pytest.fixture
def bench(device: kvoffload.Device) -> Iterator[Rig]:
    yield from settled(device)


class Malformed:
    def __init__(self, given: Any) -> None:
        self._given = given

    def __cuda_stream__(self) -> Any:
        return self._given


@pytest.mark.parametrize("given", [(), (0,), (0, 1, 2), 7, None, "ab", [0]], ids=repr)
def test_a_malformed_cuda_stream_is_named(bench: Rig, given: Any) -> None:
    with pytest.raises(TypeError, match=r"after: __cuda_stream__ of .* must give \(version, handle\), got "):
        bench.engine.store([1], [1], after=Malformed(given))
    job = bench.engine.store([1], [1])
    with pytest.raises(TypeError, match=r"stream: __cuda_stream__ of "):
        job.order_before(Malformed(given))
    job.wait(10)
    assert bench.engine.submitted == 1


@pytest.mark.parametrize("handle", [(0, "x"), (0, -1), (0, None), (0, True), (0, 1 << 64)], ids=repr)
def test_a_cuda_stream_without_a_handle_is_named(bench: Rig, handle: Any) -> None:
    with pytest.raises(TypeError, match="after must be a stream handle"):
        bench.engine.store([1], [1], after=Malformed(handle))
    assert bench.engine.submitted == 0


@pytest.mark.parametrize("direction", ["x", "STORE", None, 1], ids=repr)
def test_what_is_no_direction_is_named(bench: Rig, direction: Any) -> None:
    for call in (bench.engine.submit, bench.engine.plan):
        with pytest.raises(ValueError, match=f'^direction must be "store" or "load", got {direction!r}'):
            call(direction, [1], [1])
    assert bench.engine.submitted == 0


@pytest.mark.parametrize("profile", ["x", 3, {}, object()], ids=["str", "int", "dict", "object"])
def test_what_is_no_profile_is_named(device: kvoffload.Device, profile: Any) -> None:
    layout = KVLayout([device.allocate_planes(1, block_bytes=64, num_blocks=4)])
    with pytest.raises(TypeError, match=r"profile must be a kvoffload\.tuning\.Profile or None, got "):
        OffloadEngine(layout, device=device, num_slots=2, staging_bytes=0, profile=profile)


@pytest.mark.parametrize("num_slots", [1 << 44, 2**62, 2**64, 10**30])
def test_a_huge_pool_is_a_capacity_error_before_anything_is_pinned(device: kvoffload.Device, num_slots: int) -> None:
    layout = KVLayout([device.allocate_planes(1, block_bytes=64, num_blocks=4)])
    with pytest.raises(CapacityError, match=rf"num_slots={num_slots} of .* ask for at most "):
        OffloadEngine(layout, device=device, num_slots=num_slots, staging_bytes=0)
    assert device.simulator.faults.call_count["cuMemHostRegister"] == 0
