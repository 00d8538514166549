"""How often the thread of a member wakes up."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pooling import SECONDS, Member, descriptors, eventually, held, member, serve

from kvoffload.pool import watching

LOOKS = 9  # after the one that finds that nothing is in flight any more


@pytest.fixture
def waits() -> Iterator[list[float]]:
    """How long the threads of members that begin now sleep at most, each time."""
    found: list[float] = []

    def profile(frame: Any, event: str, called: Any) -> None:
        sleeps = event == "c_call" and called.__name__ == "poll" and not isinstance(called.__self__, ModuleType)
        if sleeps and frame.f_code is watching.watch.__code__:
            found.append(frame.f_locals["wait"])

    threading.setprofile(profile)
    yield found
    threading.setprofile(None)


def test_a_member_looks_often_while_copies_are_in_flight_and_soon_sleeps_again(
    tmp_path: Path, waits: list[float]
) -> None:
    """Then only the end of its owner wakes it, for which it seeks another one now and then."""
    settle, linger, retry = watching.SETTLE_SECONDS, watching.LINGER_SECONDS, watching.RETRY_SECONDS
    with serve(tmp_path, 8) as owner, member(owner.path) as one:
        eventually(lambda: waits[-1:] == [10 * retry], "it sleeps")
        waits.clear()
        with held(one) as (stream, gate):
            job = one.store(1, 2, wait=False, after=stream)
            eventually(lambda: waits.count(settle) > 2 * LOOKS, "it looks often")
            gate.open()
            job.wait(SECONDS)
        eventually(lambda: waits[-1] == 10 * retry, "it sleeps again")
        end = len(waits) - waits[::-1].index(settle)  # before, it may look while the store is being submitted
        assert waits[end:][: LOOKS + 1] == [*[linger] * LOOKS, 10 * retry]
        waits.clear()
        owner.close()
        eventually(lambda: waits[-1:] == [retry], "it looks for another owner")
        assert {retry, 10 * retry} >= set(waits)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_the_thread_of_a_forgotten_membership_is_woken(
    tmp_path: Path, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would sleep for longer than anything may take. Nothing of the membership is left."""
    monkeypatch.setattr(watching, "RETRY_SECONDS", 10.0 * SECONDS)
    with serve(tmp_path, 8) as owner, member(owner.path), ExitStack() as stack:
        eventually(lambda: waits[-1:] == [100.0 * SECONDS], "the other member sleeps")
        waits.clear()
        before, running = descriptors(), set(threading.enumerate())
        one = Member(owner.path, stack)
        (thread,) = (each for each in set(threading.enumerate()) - running if each.name == "kvoffload-pool")
        stack.pop_all()
        one.engine.close()
        one.device.close()
        eventually(lambda: waits[-1:] == [100.0 * SECONDS], "it sleeps")
        gone = weakref.ref(one.pool)
        del one
        gc.collect()
        eventually(lambda: gone() is None, "it is garbage")
        thread.join(SECONDS)
        assert not thread.is_alive()
        eventually(lambda: owner.statistics()[0]["members"] == 1, "the owner has seen it leave")
        eventually(lambda: descriptors() == before, "its files are closed")
