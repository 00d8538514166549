"""`after=object` of a ShardedEngine: an object that says itself what a transfer is to follow on each device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from sharding import Machine, machine

from kvoffload import NO_WAIT, BlockCache

COUNTS = (2, 3)
DEVICES = range(len(COUNTS))


@pytest.fixture
def two() -> Iterator[Machine]:
    with machine(COUNTS) as made:
        yield made


class Following:
    """Has something to follow on each device, and counts how often it was asked."""

    def __init__(self, *values: Any) -> None:
        self.values, self.asked = values, 0

    def after(self) -> Sequence[Any]:
        self.asked += 1
        return self.values


@pytest.mark.parametrize("held", DEVICES)
@pytest.mark.parametrize("name", ["store", "load", "submit"])
def test_each_device_follows_what_the_object_has_for_it(two: Machine, held: int, name: str) -> None:
    streams, mirrors = two.one_each(), two.mirrors()
    gate = two.hold(held, streams[held])
    following, direction = Following(*streams), "load" if name == "load" else "store"
    if name == "submit":
        job = two.engine.submit("store", [1], [2], after=following)
    else:
        job = getattr(two.engine, name)([1], [1], after=following)
    two.settle()
    assert not job.done
    assert following.asked == 1
    gate.open()
    job.wait(10)
    mirrors.expect(direction, [1], [2 if name == "submit" else 1])
    mirrors.check()


@pytest.mark.parametrize("held", DEVICES)
def test_a_cache_asks_the_object_once(held: int) -> None:
    with machine(COUNTS, groups=2) as made:
        cache, streams = BlockCache(made.engine, policy="lru"), made.one_each()
        gate = made.hold(held, streams[held])
        following = Following([streams[0]], streams[1])
        job = cache.store([b"one"], [[1], [2]], after=following)
        made.settle()
        assert (following.asked, job.done, cache.lookup([b"one"])) == (1, False, 0)
        gate.open()
        job.wait(10)
        cache.load([b"one"], [[3], [4]], after=following).wait(10)
        assert following.asked == 2


@pytest.mark.parametrize("wrong", [(), (NO_WAIT,), (NO_WAIT,) * 3, None, "both"])
def test_an_object_that_has_not_one_value_for_each_device_is_refused(two: Machine, wrong: Any) -> None:
    following = Following()
    following.values = wrong
    for call in (two.engine.store, two.engine.load):
        with pytest.raises(TypeError, match="after must be a list with one value for each of the 2 devices") as caught:
            call([1], [1], after=following)
        assert "from after() of the Following given" in str(caught.value)
    assert two.engine.submitted == 0


def test_an_object_whose_after_is_no_function_is_refused(two: Machine) -> None:
    following: Any = SimpleNamespace(after=5)
    with pytest.raises(TypeError, match="after must be a list with one value for each of the 2 devices"):
        two.engine.store([1], [1], after=following)


def test_what_the_object_raises_leaves_nothing_in_flight(two: Machine) -> None:
    class Failing:
        def after(self) -> Sequence[Any]:
            raise RuntimeError("the array is gone")

    failing = Failing()
    for call in (partial(two.engine.store, [1], [1], after=failing), partial(two.engine.resolve, failing)):
        with pytest.raises(RuntimeError, match="the array is gone"):
            call()
    assert two.engine.submitted == 0
    two.whole()
