"""Waker: what is urgent is looked at now, the rest together."""

from __future__ import annotations

import threading

import pytest
from tiering import SECONDS, until

from kvoffload.cache.tiering import manager as module
from kvoffload.cache.tiering.manager import Waker


def waits(waker: Waker, seconds: float) -> threading.Thread:
    thread = threading.Thread(target=waker.wait, args=(seconds,))
    thread.start()
    return thread


def ends(thread: threading.Thread) -> bool:
    thread.join(SECONDS)
    return not thread.is_alive()


def test_what_is_urgent_wakes_it() -> None:
    waker = Waker()
    thread = waits(waker, 60.0)
    waker.now()
    assert ends(thread)


def test_what_is_not_urgent_waits_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SOON", 60.0)
    waker = Waker()
    thread = waits(waker, 60.0)
    waker.soon()
    until(lambda: waker._lingers)
    waker.soon()
    assert waker._woken.empty(), "the thread is about to look anyway"
    waker.now()
    assert ends(thread)


def test_what_is_urgent_is_not_lost_behind_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SOON", 60.0)
    waker = Waker()
    for _ in range(3):
        waker.soon()
        waker.now()
    assert ends(waits(waker, 60.0))
    waker.begin()
    assert waker._woken.empty()


@pytest.mark.parametrize("soon", [False, True])
def test_it_sleeps_no_longer_than_it_was_asked_to(monkeypatch: pytest.MonkeyPatch, soon: bool) -> None:
    monkeypatch.setattr(module, "SOON", 60.0)
    waker = Waker()
    if soon:
        waker.soon()
    assert ends(waits(waker, 0.01))
