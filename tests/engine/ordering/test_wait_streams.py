"""What `after` may be besides a stream: an array whose producer is followed, and lists of streams and arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import Rig, all_are, in_threads, release
from layerwise import Produced as OfStream

import kvoffload
from kvoffload import NO_WAIT, CapacityError, KVLayout, OffloadEngine
from kvoffload.engine import wait_streams
from kvoffload.engine.wait_streams import MOST_WAIT_STREAMS, Array, as_sources
from kvoffload.internal.types import GpuArray, StreamLike
from kvoffload.testing import leak_check


class Produced:
    """An array on the GPU that a stream computes: has any stream that it is given wait for that one."""

    def __init__(self, bench: Rig, stream: int, kind: int = 2) -> None:
        self._bench, self._stream, self._kind = bench, stream, kind
        self.asked: list[int | None] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._kind, 0

    def __dlpack__(self, *, stream: int | None = None) -> object:
        self.asked.append(stream)
        driver = self._bench.device.driver
        if stream is not None:
            event = driver.event_create(timing=False)
            driver.event_record(event, self._stream)
            driver.stream_wait_event(stream, event)
            driver.event_destroy(event)
        return object()


class Stream:
    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


@pytest.fixture
def as_on_a_gpu(bench: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays are asked as they are on a GPU; on a simulated device those in GPU memory are refused."""
    monkeypatch.setattr(bench.device.driver, "simulated", False)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_store_follows_the_producer_of_an_array(bench: Rig) -> None:
    stream = bench.stream()
    bench.gate(stream)
    bench.fill(stream, 77)
    array = Produced(bench, stream)
    job = bench.engine.store([3], [0], after=array)
    release(bench, job)
    assert all_are(bench.slot(0), 77)
    assert len(array.asked) == 1
    assert array.asked[0] is not None
    assert array.asked[0] > 2, "a stream of our own, not a default one"


@pytest.mark.parametrize("stream", [None, 0])
def test_an_array_interface_without_a_stream_has_nothing_to_wait_for(bench: Rig, stream: int | None) -> None:
    blocked = bench.stream()
    bench.gate(blocked)
    bench.engine.store([3], [0], after=OfStream(stream)).wait(10)
    assert all_are(bench.slot(0), 4)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_load_follows_all_of_a_list(bench: Rig) -> None:
    streams = [bench.stream() for _ in range(4)]
    scratch = [bench.device.allocate(4 * 64) for _ in streams]
    for stream, target in zip(streams, scratch, strict=True):
        bench.gate(stream)
        bench.copy_block(stream, target.address, 5)
    after: list[StreamLike | GpuArray] = [
        streams[0],
        Stream(streams[1]),
        Produced(bench, streams[2]),
        OfStream(streams[3]),
    ]
    job = bench.engine.load([2], [5], after=after)
    release(bench, job)
    for stream, target in zip(streams, scratch, strict=True):
        bench.synchronize(stream)
        assert all_are(target.to_numpy(), 6), "the reader saw the block before the load"
    assert all_are(bench.block(5), 102)


def test_an_empty_list_is_nothing_to_wait_for(bench: Rig) -> None:
    bench.gate(1)
    bench.engine.store([3], [0], after=[]).wait(10)
    bench.gates[-1].open()


@pytest.mark.usefixtures("as_on_a_gpu")
def test_transfers_that_follow_arrays_do_not_wait_for_each_other(bench: Rig) -> None:
    """While the array of one is not computed, any number of others follow arrays of theirs."""
    held, free = bench.stream(), bench.stream()
    bench.gate(held)
    blocked = bench.engine.store([3], [0], after=Produced(bench, held))
    arrays = [Produced(bench, free) for _ in range(6)]
    for index, array in enumerate(arrays):
        job = bench.engine.load([2 + index], [8 + index], after=array)
        assert array.asked[0] not in (None, held, free)
        bench.settle()
        assert job.done
    release(bench, blocked)


def test_unrelated_transfers_do_not_wait_for_each_other(bench: Rig) -> None:
    """A list of streams makes no stream wait for what another list names."""
    gated, second, third = (bench.stream() for _ in range(3))
    bench.gate(gated)
    store = bench.engine.store([0], [0], after=[gated, second])
    for index in range(1, 4):
        load = bench.engine.load([index], [index], after=[second, third])
        bench.settle()
        assert load.done, "neither the store nor its stream has anything to do with it"
    release(bench, store)
    assert all_are(bench.slot(0), 1)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_arrays_of_transfers_in_flight_have_a_wait_stream_each(bench: Rig) -> None:
    streams = [bench.stream() for _ in range(5)]
    gates = [bench.gate(stream) for stream in streams]
    arrays = [Produced(bench, stream) for stream in streams]
    for index, stream in enumerate(streams):
        bench.fill(stream, 50 + index, block=index)
    jobs = [bench.engine.store([index], [index], after=array) for index, array in enumerate(arrays)]
    assert len({array.asked[0] for array in arrays}) == 5
    for index, gate in enumerate(gates):
        bench.settle()
        assert [job.done for job in jobs] == [number < index for number in range(5)], "stores end in order"
        gate.open()
    bench.engine.drain(10)
    assert [int(bench.slot(index)[0]) for index in range(5)] == list(range(50, 55))
    again = [Produced(bench, streams[0]) for _ in range(5)]
    for array in again:
        bench.engine.store([0], [0], after=array).wait(10)
    assert {array.asked[0] for array in again} <= {array.asked[0] for array in arrays}, "idle streams are used again"


@pytest.mark.usefixtures("as_on_a_gpu")
def test_more_unresolved_arrays_than_wait_streams_are_refused_and_nothing_happens(
    bench: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait_streams, "WAIT_SECONDS", 0.01)
    held = bench.stream()
    gate = bench.gate(held)
    jobs = [bench.engine.store([3], [0], after=Produced(bench, held)) for _ in range(MOST_WAIT_STREAMS)]
    before, one_more = bench.engine.statistics(), Produced(bench, held)
    with pytest.raises(CapacityError, match="64 transfers follow arrays that are not computed yet: wait until some"):
        bench.engine.load([3], [5], after=one_more)
    assert one_more.asked == []
    assert (bench.engine.statistics(), bench.engine.submitted) == (before, MOST_WAIT_STREAMS)
    bench.engine.load([3], [5], after=NO_WAIT).wait(10)
    assert all_are(bench.block(5), 103)
    gate.open()
    bench.engine.drain(10)
    assert [job.error for job in jobs] == [None] * MOST_WAIT_STREAMS
    bench.engine.load([3], [6], after=one_more).wait(10)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_arrays_that_are_asked_at_the_same_time_have_a_wait_stream_each(bench: Rig) -> None:
    """Also the ones that nothing waits on yet: one array's producer is asked in the middle of asking another one's."""
    held = bench.stream()
    bench.gate(held)
    inner: list[kvoffload.Job] = []
    free = Produced(bench, bench.stream())

    class Asking(Produced):
        def __dlpack__(self, *, stream: int | None = None) -> object:
            inner.append(bench.engine.load([8], [8], after=free))
            return super().__dlpack__(stream=stream)

    outer = Asking(bench, held)
    store = bench.engine.store([3], [0], after=outer)
    assert outer.asked != free.asked
    bench.settle()
    assert inner[0].done
    release(bench, store)


# on a simulated device as it is


def test_host_arrays_are_asked_without_a_stream(bench: Rig) -> None:
    array = Produced(bench, 0, kind=1)
    bench.engine.store([3], [0], after=array).wait(10)
    assert array.asked == [None]
    bench.engine.store([3], [1], after=np.zeros(3)).wait(10)


def test_arrays_of_a_gpu_are_refused_and_never_asked(bench: Rig) -> None:
    array = Produced(bench, 0, kind=2)
    with pytest.raises(TypeError, match="after: the Produced given is in a GPU's memory, but the device is simulated"):
        bench.engine.store([3], [0], after=array)
    assert array.asked == []
    assert bench.engine.submitted == 0


@pytest.mark.usefixtures("as_on_a_gpu")
def test_host_arrays_are_refused_on_a_gpu(bench: Rig) -> None:
    with pytest.raises(TypeError, match="after: the ndarray given is in host memory, where no stream produces it"):
        bench.engine.store([3], [0], after=np.zeros(3))


# what is refused


@pytest.mark.parametrize(
    ("after", "error", "words"),
    [
        ("stream", TypeError, "after must be a stream handle"),
        ([1, "stream"], TypeError, r"after\[1\] must be a stream handle"),
        ([1, None], TypeError, r"after\[1\] must be a stream or an array, got None; leave it out"),
        ([NO_WAIT], TypeError, r"after\[0\] must be a stream or an array, got NO_WAIT; leave it out"),
        ([[1]], TypeError, r"after\[0\] must be a stream handle"),
        (True, TypeError, "after must be a stream handle"),
    ],
)
def test_what_is_neither_a_stream_nor_an_array_is_refused(bench: Rig, after: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        bench.engine.store([3], [0], after=after)
    assert bench.engine.submitted == 0


def test_a_deleted_array_is_refused(bench: Rig) -> None:
    array: Any = Produced(bench, 0, kind=1)
    array.is_deleted = lambda: True
    with pytest.raises(
        ValueError, match="after was deleted, or donated to a computation: pass the array that took its place"
    ):
        bench.engine.store([3], [0], after=array)
    assert array.asked == []


def test_an_array_whose_interface_raises_is_no_array() -> None:
    class Reluctant:
        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            raise RuntimeError("needs a gradient")

    with pytest.raises(TypeError, match="after must be a stream handle"):
        as_sources(Reluctant())


def test_sources() -> None:
    array = np.zeros(2)
    assert as_sources(None) == as_sources(0) == (1,)
    assert as_sources(NO_WAIT) == as_sources([]) == ()
    found = as_sources([7, array, Stream(9)])
    assert (found[0], found[2]) == (7, 9)
    assert isinstance(found[1], Array)
    assert found[1].given is array


def test_planes_that_the_default_stream_does_not_order_refuse_after_none(device: kvoffload.Device) -> None:
    layout = KVLayout([device.allocate_planes(2, block_bytes=64, num_blocks=4)], on_default_stream=False)
    with OffloadEngine(layout, device=device, num_slots=2, staging_bytes=0) as engine:
        cache = kvoffload.BlockCache(engine)
        for call in (
            lambda: engine.store([0], [0]),
            lambda: engine.load([0], [0]),
            lambda: cache.store([b"key"], [0]),
        ):
            with pytest.raises(
                ValueError, match=r"after=None stands for the legacy default.*after=cache, or after=array"
            ):
                call()
        assert (engine.submitted, len(cache)) == (0, 0)
        engine.load([0], [0], after=NO_WAIT).wait(10)


# closing


def test_wait_streams_leave_nothing_behind(device: kvoffload.Device) -> None:
    layout = KVLayout([device.allocate_planes(2, block_bytes=64, num_blocks=4)])
    with leak_check(device), OffloadEngine(layout, device=device, num_slots=2, staging_bytes=0) as engine:
        for _ in range(50):
            engine.store([0], [0], after=[1, np.zeros(2)])
        engine.drain(10)


def test_an_array_may_submit_transfers_when_it_is_asked(bench: Rig) -> None:
    """Its code runs outside the engine's lock."""

    class Busy(Produced):
        def __dlpack__(self, *, stream: int | None = None) -> object:
            in_threads(lambda: bench.engine.store([5], [5], after=NO_WAIT).wait(10))
            return super().__dlpack__(stream=stream)

    bench.engine.store([3], [0], after=Busy(bench, 0, kind=1)).wait(10)
    assert all_are(bench.slot(5), 6)


def test_a_cache_asks_an_array_once_and_without_a_lock(bench: Rig) -> None:
    class Busy(Produced):
        def __dlpack__(self, *, stream: int | None = None) -> object:
            in_threads(lambda: bench.engine.load([5], [15], after=NO_WAIT).wait(10))
            return super().__dlpack__(stream=stream)

    cache = kvoffload.BlockCache(bench.engine)
    array = Busy(bench, 0, kind=1)
    cache.store([b"a", b"b"], [3, 4], after=array).wait(10)
    assert array.asked == [None]
    cache.load([b"a"], [9], after=array).wait(10)
    assert array.asked == [None, None]
    assert all_are(bench.block(9), 4)


def test_an_engine_closes_when_no_array_is_being_asked(device: kvoffload.Device) -> None:
    layout = KVLayout([device.allocate_planes(2, block_bytes=64, num_blocks=4)])
    engine = OffloadEngine(layout, device=device, num_slots=2, staging_bytes=0)

    class Closing:
        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

        def __dlpack__(self) -> object:
            with pytest.raises(TimeoutError):
                engine.close(timeout=0.05)
            return object()

    engine.store([0], [0], after=Closing()).wait(10)
    engine.close(10)
    with pytest.raises(kvoffload.ClosedError):
        engine.store([0], [0], after=np.zeros(2))
