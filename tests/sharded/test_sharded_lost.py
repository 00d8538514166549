"""The CUDA context of one device is lost: the job fails, the other device ends its own, and all can be closed."""

from __future__ import annotations

import numpy as np
import pytest
from sharding import Machine

from kvoffload import NO_WAIT, DriverError, TransferError

ILLEGAL_ADDRESS = 700


@pytest.mark.parametrize("lost", range(2))
def test_a_lost_context_on_one_device_fails_the_job(lost: int) -> None:
    made = Machine((2, 2))
    engine, other = made.engine, 1 - lost
    engine.store([5], [5]).wait(10)
    streams, mirrors = made.one_each(), made.mirrors()
    gate = made.hold(other, streams[other])
    job = engine.store([1], [1], after=streams)
    made.simulator.faults.sticky()  # the context of what runs next: the other device is held back
    made.settle()
    engine.advance()
    assert job.error is not None
    assert str(job.error).startswith(f"shard {lost} ")
    assert isinstance(job.error.__cause__, DriverError), "what CUDA said is kept"
    assert not job.finished, "the other device may still write its range of the slot"
    with pytest.raises(TransferError, match="context is lost"):
        engine.store([2], [2], after=NO_WAIT)
    gate.open()
    engine.drain(5)
    assert job.finished
    assert [result.error is None for result in engine.poll()] == [False]
    mirrors[other].expect("store", [1], [1])
    assert (engine.slots[other] == mirrors[other].pool).all()
    engine.close(5)
    with made.devices[other].current():
        made.devices[other].driver.api.cuCtxSynchronize()
        made.devices[other].driver.stream_destroy(streams[other])
    gate.close()
    for device in made.devices:
        device.close(5)
    assert made.simulator.violations == []


@pytest.mark.parametrize("nth", [1, 2])
def test_a_context_lost_while_arrays_are_followed_is_said_to_be_lost(nth: int) -> None:
    made = Machine((2, 2))
    host = np.zeros(4)
    made.simulator.faults._plan("cuStreamCreateWithPriority", nth, ILLEGAL_ADDRESS, sticky=True)
    with pytest.raises(TransferError, match="context is lost") as caught:
        made.engine.store([1], [1], after=[[host], [host]])
    assert caught.value.__notes__ == [f"on shard {nth - 1} (device {nth - 1})"]
    with pytest.raises(TransferError, match="context is lost") as caught:
        made.engine.store([1], [1], after=NO_WAIT)
    assert caught.value.__notes__ == [f"on shard {nth - 1} (device {nth - 1})"], "the device is named then, too"
    made.engine.close(5)
    for device in made.devices:
        device.close(5)
