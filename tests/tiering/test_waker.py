"""Waker: what is urgent is looked at now, the rest together; and what needs no further look wakes it not at all."""

from __future__ import annotations

import threading

import pytest
from tiering import SECONDS, until

from kvoffload import CacheIndex
from kvoffload.cache.tiering import tier_manager as module
from kvoffload.cache.tiering.below import ComputeTime
from kvoffload.cache.tiering.promoter import Promoter
from kvoffload.cache.tiering.promotion import PromotionRecord
from kvoffload.cache.tiering.tier_manager import Waker
from kvoffload.cache.weights import UsedWeights


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


def test_a_look_after_which_no_promotion_waits_for_another_wakes_nothing() -> None:
    """Else the thread would look without end."""
    index, woken, weights = CacheIndex(4), list[bool](), UsedWeights()
    promoter = Promoter(index._records, [], ComputeTime(None), 4, lambda: woken.append(True))
    promoter.begin(PromotionRecord([b"k"], "", None, lambda _: None, weights, weights.now))
    assert [record.ready for record in promoter.advance()] == [0]
    assert woken == []
