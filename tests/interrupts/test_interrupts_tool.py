"""The injector itself: it raises where CPython can, once, and leaves no profile function behind."""

from __future__ import annotations

import contextlib
import dis
import gc
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import interrupts
import pytest
from interrupts import Methods, Outcome, Signals, count_points, interrupt_at, trace_points
from scenarios import SCENARIOS, Row, Scenario
from trials import Unit, attempt
from worlds import CacheWorld, IndexWorld, World, keys

import kvoffload


class Thing:
    """Stands for code of the package: this file is given to `Signals` as one of its files."""

    def __init__(self) -> None:
        self.log: list[str] = []

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        self.log.append("enter")
        try:
            yield
        finally:
            self.log += ("exit",)

    def work(self) -> None:
        with self.guarded():
            self.log += ("body",)

    def method(self) -> None:
        self.log += ("method",)


HERE = Signals(__file__)


def outcomes(thing_of: type[Thing]) -> Iterator[tuple[Outcome, list[str]]]:
    number = 1
    while True:
        thing = thing_of()
        outcome = interrupt_at(number, thing.work, points=HERE)
        yield outcome, thing.log
        if outcome.point is None:
            return
        number += 1


def test_every_point_raises_once_and_the_last_try_ends_normally() -> None:
    found = list(outcomes(Thing))
    assert [outcome.raised for outcome, _ in found] == [True] * (len(found) - 1) + [False]
    assert found[-1][1] == ["enter", "body", "exit"]
    assert len(found) - 1 == count_points(Thing().work, HERE)
    assert sys.getprofile() is None


def test_a_generator_that_is_resumed_runs_its_handlers() -> None:
    """As with a signal: the exception is raised within the generator, whose `finally` follows."""
    resumed = [log for outcome, log in outcomes(Thing) if outcome.point and outcome.point.what == "Thing.guarded"]
    assert resumed[0] == [], "its start"
    assert resumed[-1] == ["enter", "body", "exit"], "its resumption"


def test_a_generator_is_not_interrupted_where_throw_enters_it() -> None:
    class Failing(Thing):
        def work(self) -> None:
            with self.guarded():
                raise ValueError

    entered = [point.what for point in seen_until_it_raises(Failing())]
    assert entered.count("Thing.guarded") == 1


def seen_until_it_raises(thing: Thing) -> list[interrupts.Point]:
    profile = interrupts._Profile(0, KeyboardInterrupt, HERE, keep=True)
    assert isinstance(profile.run(thing.work), ValueError)
    return profile.seen


def test_methods_raise_before_and_after_their_work() -> None:
    for after, log in ((False, []), (True, ["method"])):
        thing = Thing()
        points = Methods(Thing.method, after=after)
        outcome = interrupt_at(1, thing.method, RuntimeError, points)
        assert outcome.raised
        assert thing.log == log
        assert count_points(thing.method, points) == 1


def test_a_finalizer_is_no_point() -> None:
    class Owner:
        pass

    def drop() -> None:
        owner = Owner()
        weakref.finalize(owner, Thing().method)
        del owner

    names = [point.what for point in trace_points(drop, HERE)]
    assert "Thing.method" not in names
    assert gc.isenabled()


def test_the_simulator_has_no_points_but_the_return_of_its_driver_functions() -> None:
    with kvoffload.open_device(backend="simulated") as device:
        points = trace_points(lambda: device.allocate(64).close())
    assert not [point for point in points if point.place.startswith("simulator/")]
    assert {"cuMemAlloc", "cuMemFree"} <= {point.what for point in points if point.kind == "driver"}


@pytest.mark.parametrize("exception", [KeyboardInterrupt, RuntimeError])
def test_the_exception_comes_out_of_a_call_of_the_library(exception: type[BaseException]) -> None:
    with kvoffload.open_device(backend="simulated") as device:
        outcome = interrupt_at(1, lambda: device.allocate(64), exception)
    assert (outcome.raised, outcome.in_finalizer) == (True, False)
    assert outcome.point == ("call", outcome.point and outcome.point.place, "Device.allocate")


def forget_a_stream(world: World) -> None:
    world.stream()
    world.streams.clear()


def hit_without_bytes(world: CacheWorld) -> None:
    world.cache.reserve(keys([4])).commit()


LEFT: list[Any] = []  # handles that nothing settles


@pytest.fixture(autouse=True)
def _settle_what_is_left() -> Iterator[None]:
    yield
    LEFT.clear()


@pytest.mark.parametrize(
    ("world", "call", "leaves", "kind"),
    [
        (World, forget_a_stream, "open", "leak"),
        (CacheWorld, hit_without_bytes, "open", "wrong hit: key 4"),
        (CacheWorld, lambda world: LEFT.append(world.cache.reserve(keys([4]))), "open", "lost: keys [4] stay pending"),
        (World, lambda world: world.engine.close(), "open", "broken: ClosedError"),
        (IndexWorld, hit_without_bytes, "open", "wrong hit: key 4"),
    ],
)
def test_what_is_verified_after_an_interrupt_can_fail(
    world: Any, call: Any, leaves: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that leaves something wrong, interrupted nowhere."""
    monkeypatch.setitem(SCENARIOS, "planted", Scenario(Row("planted", "", None, call, leaves), world, ("lru",)))
    trial = attempt(Unit("planted", "lru", "signal"), 0, HERE)
    assert [each for each in trial.problems if each.startswith(kind)], trial


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="there it is a call: see Python 3.14 in docs/limits.md")
def test_a_lock_is_taken_and_its_body_entered_in_one_instruction() -> None:
    """An instruction that looks for no signals. So a handler that raises cannot leave the lock taken."""
    names = [each.opname for each in dis.get_instructions(compile("with lock: ...", "", "exec"))]
    assert names[names.index("BEFORE_WITH") + 1] == "POP_TOP", "with which the exception table begins"
