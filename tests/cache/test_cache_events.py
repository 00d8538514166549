"""When events of a copy arrive: with the end of its job's `wait`, or once `done` is True; no other call is needed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from helpers import Rig, in_threads, keys, rig, simulated

from kvoffload import NO_WAIT, BlockCache, CacheEvent, CacheJob, TransferError
from kvoffload.cache.entries import Status


class Watched(NamedTuple):
    bench: Rig
    cache: BlockCache
    events: list[CacheEvent]

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]


@pytest.fixture
def watched() -> Iterator[Watched]:
    """A cache of four keys, and the events that its hook was called with."""
    events: list[CacheEvent] = []
    with simulated() as device, rig(device, num_blocks=32, num_slots=4) as bench:
        yield Watched(bench, BlockCache(bench.engine, on_event=events.append), events)


def test_stored_arrives_when_wait_has_returned(watched: Watched) -> None:
    job = watched.cache.store(keys(0, 1), [3, 4])
    assert watched.events == []
    job.wait(10)
    assert watched.events == [CacheEvent("stored", tuple(keys(0, 1)))]
    job.wait(10)
    assert job.done
    assert watched.kinds() == ["stored"], "once"


def test_stored_arrives_when_done_was_true(watched: Watched) -> None:
    job = watched.cache.store(keys(0), [3])
    watched.bench.engine.drain(10)
    assert watched.events == []
    assert job.done
    assert watched.kinds() == ["stored"]


def test_a_key_whose_copy_has_ended_is_stored_before_it_is_removed(watched: Watched) -> None:
    watched.cache.store(keys(0), [3])
    watched.bench.settle()
    assert watched.cache.remove(keys(0)) == 1
    assert watched.kinds() == ["stored", "removed"]


@pytest.mark.parametrize("call", ["remove", "clear"])
def test_a_key_that_goes_while_it_is_stored_was_never_announced(watched: Watched, call: str) -> None:
    cache, stream = watched.cache, watched.bench.stream()
    gate = watched.bench.gate(stream)
    job = cache.store(keys(0), [3], after=stream)
    assert (cache.remove(keys(0)) if call == "remove" else cache.clear()) == 1
    gate.open()
    job.wait(10)
    reservation = cache.reserve(keys(1))
    assert (cache.remove(keys(1)) if call == "remove" else cache.clear()) == 1
    reservation.abort()
    found = cache.statistics()
    assert (watched.events, found.stored, found.removed) == ([], 0, 0)


def test_done_calls_the_hook_in_the_thread_that_asks() -> None:
    threads: list[int] = []
    asking: list[int] = []
    with simulated() as device, rig(device, num_blocks=32, num_slots=4) as bench:
        cache = BlockCache(bench.engine, on_event=lambda _: threads.append(threading.get_ident()))
        job = cache.store(keys(0), [3])
        bench.engine.drain(10)
        assert threads == []

        def ask() -> None:
            asking.append(threading.get_ident())
            assert job.done

        in_threads(ask)
        assert threads == asking != [threading.get_ident()]


def test_nothing_arrives_before_the_end(watched: Watched) -> None:
    stream = watched.bench.stream()
    gate = watched.bench.gate(stream)
    job = watched.cache.store(keys(0), [3], after=stream)
    assert not job.done
    with pytest.raises(TimeoutError):
        job.wait(0.01)
    assert watched.events == []
    gate.open()
    job.wait(10)
    assert watched.kinds() == ["stored"]


def test_failed_arrives_when_wait_has_raised(watched: Watched) -> None:
    watched.bench.device.simulator.faults.fail_call("cuEventRecord", 2)
    job = watched.cache.store(keys(0), [3])
    with pytest.raises(TransferError):
        job.wait(10)
    assert watched.kinds() == ["failed"]
    watched.cache.check()


def test_loaded_blocks_are_counted_when_wait_has_returned(watched: Watched) -> None:
    watched.cache.store(keys(0), [3]).wait(10)
    load = watched.cache.load(keys(0), [5])
    recorder = watched.cache._state.recorder
    assert recorder.loaded == 0
    load.wait(10)
    assert recorder.loaded == 1


def test_a_job_that_copies_nothing_reports_nothing(watched: Watched) -> None:
    watched.cache.store(keys(0), [3]).wait(10)
    again = watched.cache.store(keys(0), [3])
    assert again.wait(10) == []
    assert again.done
    assert watched.kinds() == ["stored"]


def test_events_of_several_jobs_keep_their_order(watched: Watched) -> None:
    first = watched.cache.store(keys(0), [3], after=NO_WAIT)
    second = watched.cache.store(keys(1), [4], after=NO_WAIT)
    second.wait(10)
    assert [event.keys for event in watched.events] == [tuple(keys(0)), tuple(keys(1))], "in their order"
    first.wait(10)
    assert watched.kinds() == ["stored", "stored"]


def test_a_hook_may_wait_for_another_job() -> None:
    waiting: list[CacheJob] = []
    seen: list[tuple[bytes, ...]] = []
    with simulated() as device, rig(device, num_blocks=32, num_slots=4) as bench:

        def hook(event: CacheEvent) -> None:
            if waiting:
                waiting.pop().wait(10)
            seen.append(event.keys)

        cache = BlockCache(bench.engine, on_event=hook)
        first = cache.store(keys(0), [3], after=NO_WAIT)
        first.wait(10)
        waiting.append(cache.store(keys(1), [4], after=NO_WAIT))
        cache.remove(keys(0))
        assert seen == [tuple(keys(0)), tuple(keys(0)), tuple(keys(1))]
        assert cache.status(keys(0, 1)) == [Status.MISS, Status.HIT]


def test_a_hook_may_call_the_cache_and_its_events_come_after() -> None:
    kinds: list[str] = []

    def hook(event: CacheEvent) -> None:
        kinds.append(event.kind)
        if event.kind == "stored":
            assert cache.lookup(event.keys) == 1
            kinds.append("after the lookup")

    with simulated() as device, rig(device, num_slots=4) as bench:
        cache = BlockCache(bench.engine, on_event=hook)
        cache.store(keys(0), [0], after=NO_WAIT).wait(10)
    assert kinds == ["stored", "after the lookup", "hit"]
