"""`Device.stream` on a GPU: transfers follow its work, its work follows transfers, and CuPy takes it."""

from __future__ import annotations

from typing import Any

import pytest

import kvoffload
from kvoffload import KVLayout, OffloadEngine
from kvoffload.testing import leak_check

pytestmark = pytest.mark.gpu
BLOCK_BYTES = 1 << 20


def test_transfers_and_work_on_it_are_in_order(gpu_device: kvoffload.Device) -> None:
    buffer = gpu_device.allocate(8 * BLOCK_BYTES)
    planes = [kvoffload.Plane(buffer.address, block_bytes=BLOCK_BYTES, num_blocks=8, owner=buffer)]
    with OffloadEngine(KVLayout([planes]), device=gpu_device, num_slots=8) as engine, leak_check(gpu_device):
        for value in range(1, 20):
            with gpu_device.stream(priority=gpu_device.stream_priorities[0]) as stream:
                with gpu_device.current():
                    gpu_device.driver.fill(buffer.address, value, buffer.nbytes, stream.handle)
                engine.store(range(8), range(8), after=stream).order_before(stream)
                with gpu_device.current():
                    gpu_device.driver.fill(buffer.address, 255, buffer.nbytes, stream.handle)
                stream.synchronize(30)
                assert stream.done
            assert (engine.slots == value).all()
            assert (buffer.to_numpy() == 255).all()


def test_cupy_takes_it(cupy: Any, gpu_device: kvoffload.Device) -> None:
    with gpu_device.stream() as stream:
        adopt = getattr(cupy.cuda.Stream, "from_external", None)  # older CuPy: ExternalStream
        with adopt(stream) if adopt else cupy.cuda.ExternalStream(stream.handle):
            array = cupy.full(1 << 20, 3, dtype=cupy.uint8) + 4
        stream.synchronize(30)
        assert bool((array == 7).all())
