"""`Device.stream`: a stream of the library's for callers, the same on a GPU and on the simulated device."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
from helpers import COPY_ENGINE_ONLY, LEGACY, Gate, no_leaks, simulated

import kvoffload
from kvoffload import ClosedError, DriverError, KVLayout, OffloadEngine, Stream
from kvoffload.testing import leak_check


@pytest.fixture
def engine(device: kvoffload.Device) -> Iterator[OffloadEngine]:
    layout = KVLayout([device.allocate_blocks(8, planes=2, block_bytes=64)])
    with OffloadEngine(layout, device=device, num_slots=8, **COPY_ENGINE_ONLY) as made:
        yield made


def test_it_is_a_stream_for_the_library_and_for_others(device: kvoffload.Device) -> None:
    with device.stream() as stream:
        assert isinstance(stream, Stream)
        assert stream.device is device
        assert stream.__cuda_stream__() == (0, stream.handle)
        assert stream.handle > 2, "not a default stream"
        assert stream.done
        stream.synchronize()
        assert repr(stream) == f"Stream({stream.handle:#x}, device 0)"


def test_transfers_follow_it_and_it_follows_transfers(each_device: kvoffload.Device) -> None:
    device, block_bytes = each_device, 64 if each_device.simulated else 1 << 20
    buffer = device.allocate(8 * block_bytes)
    plane = kvoffload.Plane(buffer.address, block_bytes=block_bytes, num_blocks=8, owner=buffer)
    with OffloadEngine(KVLayout([[plane]]), device=device, num_slots=8, **COPY_ENGINE_ONLY) as engine:

        def overwrite(value: int) -> None:
            with device.stream(priority=device.stream_priorities[0]) as stream:
                with device.current():
                    device.driver.fill(buffer.address, value, buffer.nbytes, stream.handle)
                engine.store(range(8), range(8), after=stream).order_before(stream)
                with device.current():
                    device.driver.fill(buffer.address, 255, buffer.nbytes, stream.handle)
                stream.synchronize(30)
                assert stream.done
            assert (engine.slots[:, :block_bytes] == value).all()
            assert (buffer.to_numpy() == 255).all()

        overwrite(0)  # makes the engine's events
        with leak_check(device):
            for value in range(1, 20):
                overwrite(value)


def test_work_that_has_not_ended_is_not_done(device: kvoffload.Device) -> None:
    with device.stream() as stream:
        gate = Gate(device)
        gate.hold(stream.handle)
        assert not stream.done
        with pytest.raises(TimeoutError, match=r"^Stream\(0x[0-9a-f]+, device 0\): not done within 0.01 seconds"):
            stream.synchronize(0.01)
        gate.open()
        stream.synchronize()
        assert stream.done
        gate.close()


def test_the_end_of_the_block_waits_for_the_work(device: kvoffload.Device) -> None:
    gate = Gate(device)
    opened: list[bool] = []

    def open_gate() -> None:
        opened.append(True)
        gate.open()

    with device.stream() as stream:
        gate.hold(stream.handle)
        threading.Timer(0.05, open_gate).start()
    assert opened == [True], "the work was held until then"
    gate.close()


def test_it_waits_for_nothing_on_the_legacy_stream(device: kvoffload.Device) -> None:
    gate = Gate(device)
    gate.hold(LEGACY)
    with device.stream() as stream:
        stream.synchronize(10)
    gate.open()
    with device.current():
        device.driver.stream_synchronize(LEGACY)
    gate.close()


def test_after_the_block_it_is_destroyed_and_refused(device: kvoffload.Device, engine: OffloadEngine) -> None:
    with device.stream() as stream:
        handle = stream.handle
    assert repr(stream) == f"Stream({handle:#x}, device 0, destroyed)"
    stream.close()  # idempotent
    for use in (
        lambda: stream.handle,
        lambda: stream.done,
        stream.synchronize,
        lambda: engine.store([0], [0], after=stream),
        lambda: engine.load([0], [0], after=[stream]),
        lambda: engine.store([0], [0]).order_before(stream),
    ):
        with pytest.raises(ClosedError, match="is destroyed: its with block has ended"):
            use()


def test_a_closed_device_has_none() -> None:
    device = simulated()
    stream = device.stream()
    device.close()
    no_leaks(device.simulator)
    for use in (device.stream, lambda: stream.handle, lambda: stream.done):
        with pytest.raises(ClosedError, match="is closed and its memory is freed"):
            use()
    stream.close()


def test_a_forgotten_stream_is_destroyed_with_a_warning(device: kvoffload.Device) -> None:
    device.stream()
    gc.collect()
    with pytest.warns(ResourceWarning, match="a Stream was never closed"):
        device.allocate(64)


@pytest.mark.parametrize("priority", [5, -100])
def test_a_priority_that_the_device_has_not_is_refused(device: kvoffload.Device, priority: int) -> None:
    with pytest.raises(ValueError, match=rf"^priority must be in .* got {priority}$"):
        device.stream(priority=priority)


def test_priorities_reach_the_driver(device: kvoffload.Device) -> None:
    device.simulator.faults.calls = []
    lowest = device.stream_priorities[0]
    with device.stream(priority=lowest):
        pass
    created = [args for name, args in device.simulator.faults.calls if name == "cuStreamCreateWithPriority"]
    assert [args[1] for args in created] == [lowest]


def test_a_stream_that_cannot_be_made_leaves_nothing(device: kvoffload.Device) -> None:
    before = device.owned
    device.simulator.faults.fail_call("cuStreamCreateWithPriority")
    with pytest.raises(DriverError):
        device.stream()
    assert device.owned == before


def test_a_lost_context_has_taken_it_along() -> None:
    device = simulated()
    buffer = device.allocate(64)
    with device.stream() as stream:
        with device.current():
            device.driver.fill(buffer.address, 5, buffer.nbytes, stream.handle)
        device.simulator.faults.sticky()
        with pytest.raises(DriverError) as caught:
            stream.synchronize()
        assert caught.value.sticky
    with pytest.raises(ClosedError):
        stream.synchronize()
    device.close()
