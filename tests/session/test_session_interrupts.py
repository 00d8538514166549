"""Interrupts at any point of save and restore, and calls inside other calls."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conversations import SMALL, World, talk, world
from interrupts import interrupt_at, trace_points
from seeds import rest_long
from tier_classes import DictTier
from tiering import until
from worlds import Fifo

from kvoffload import NO_WAIT

# an interrupt in a generator that is being closed is reported there, and goes no further
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
TOKENS, OTHER = talk(0), talk(1)
PARTS = 16


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("part", rest_long(range(PARTS), 1))
@pytest.mark.parametrize("what", ["save", "restore"])
def test_an_interrupt_anywhere_leaves_nothing(what: str, part: int, tmp_path: Path, seed: int) -> None:
    with world(SMALL, seed=seed) as each:
        each.store(OTHER)
        each.save(tmp_path / "good", OTHER)
        good = (tmp_path / "good").read_bytes()
        call: Callable[[], object] = lambda: each.save(tmp_path / "good", OTHER)  # noqa: E731
        if what == "restore":
            call = lambda: each.restore(tmp_path / "good")  # noqa: E731
            each.cache.clear()
        points = trace_points(call)
        chosen = set(range(1 + part, len(points) + 1, PARTS))  # all parts together: every point
        if not part and what == "save":  # all where a file or its name could be left
            chosen |= {at for at, point in enumerate(points, 1) if "session_file" in point.place}
        for number in chosen:
            if what == "restore":
                each.cache.clear()
            before = descriptors()
            outcome = interrupt_at(number, call)
            until(lambda: each.held() == (0, 0, 0), f"the end after {outcome}")
            assert descriptors() == before, outcome
            assert [one.name for one in tmp_path.iterdir()] == ["good"], outcome
            assert (tmp_path / "good").read_bytes() == good, outcome
            each.cache.check()
            found = each.cache.lookup(each.keys(OTHER))
            assert found == len(each.resident()), outcome
            if found:
                each.check_load(OTHER[: 4 * found], range(found))
        each.store(OTHER)
        assert each.save(tmp_path / "good", OTHER) == 32
        assert (tmp_path / "good").read_bytes() == good


def nested(each: World, path: Path, said: list[BaseException | object]) -> None:
    """Calls that may be made inside another one; what they raise."""
    for call in (lambda: each.save(path, TOKENS), lambda: each.restore(path.with_name("other"))):
        try:
            said.append(call())
        except BaseException as error:
            said.append(error)


def check_refused(each: World, path: Path, said: list[Any]) -> None:
    assert said
    assert all(type(one) is RuntimeError for one in said), said
    assert [one.name for one in path.parent.iterdir()] == ["other"]
    assert each.held() == (0, 0, 0)
    assert each.save(path, TOKENS) == 32


@pytest.fixture
def other(tmp_path: Path) -> Path:
    with world(SMALL) as each:
        each.store(OTHER)
        each.save(tmp_path / "other", OTHER)
    return tmp_path / "file"


def test_a_policy_is_refused(other: Path) -> None:
    said: list[Any] = []

    class Asking(Fifo):
        def touch(self, keys: Any) -> None:
            nested(each, other, said)
            super().touch(keys)

    with world(SMALL, policy=Asking) as each:
        each.store(TOKENS)
        each.cache.touch(each.keys(TOKENS))
        check_refused(each, other, said[:2])


def test_a_signal_handler_in_a_call_is_refused(other: Path) -> None:
    said: list[Any] = []
    with world(SMALL) as each:
        each.store(TOKENS)
        before = signal.signal(signal.SIGUSR1, lambda *_: nested(each, other, said))
        try:
            with each.cache._state.lock:
                os.kill(os.getpid(), signal.SIGUSR1)
        finally:
            signal.signal(signal.SIGUSR1, before)
        check_refused(each, other, said)


def test_an_event_in_the_thread_that_tiers_need_is_refused(other: Path) -> None:
    """Elsewhere a hook may save and restore: nothing there waits for it."""
    said: dict[bool, list[Any]] = {}

    def hook(event: Any) -> None:
        inside = threading.current_thread() is not threading.main_thread()
        if event.kind in ("stored", "promoted") and inside not in said:
            nested(each, other, said.setdefault(inside, []))

    with world(SMALL, capacity=16, tiers=[DictTier()], write="through", on_event=hook) as each:
        each.store(TOKENS)
        assert each.cache.drain(30)
        assert said.pop(False) == [32, (32, 32, "")]
        other.unlink()
        each.cache.clear(below=False)
        with each.cache.promote(each.keys(TOKENS)) as promotion:
            until(lambda: promotion._record.ended and said)
        check_refused(each, other, said[True])


def test_a_callback_of_a_job_may_save(other: Path) -> None:
    said: list[Any] = []
    with world(SMALL) as each:
        each.store(TOKENS)
        job = each.cache.load(each.keys(TOKENS), range(8), after=NO_WAIT)
        job.add_done_callback(lambda _: nested(each, other, said))
        job.wait(30)
        until(lambda: len(said) == 2)
        assert said == [32, (32, 32, "")]


def test_a_save_inside_the_progress_of_a_save(tmp_path: Path) -> None:
    with world(SMALL) as each:
        each.store(TOKENS)
        inner = [lambda: each.save(tmp_path / "inner", TOKENS)]
        assert each.save(tmp_path / "outer", TOKENS, progress=lambda *_: inner and inner.pop()()) == 32
        assert (tmp_path / "inner").read_bytes() == (tmp_path / "outer").read_bytes()
