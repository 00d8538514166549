"""What a user's policy or hook raises in the thread of the tiers leaves no request waiting, and no slot lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tier_classes import DictTier, GatedTier
from tiering import SECONDS, Bench, aligned, keys, tiered, until

from kvoffload import NO_WAIT, CacheEvent, CacheIndex, Status
from kvoffload.cache.policies import LRU


class Raising(LRU):
    """Its `remove` raises for keys that are not evicted, after the removal, once for each element of `errors`."""

    def __init__(self, errors: list[int]) -> None:
        super().__init__()
        self.errors = errors

    def remove(self, keys: Sequence[bytes], evicted: bool) -> None:
        super().remove(keys, evicted=evicted)
        if self.errors and not evicted:
            self.errors.pop()
            raise SystemExit("a policy")


class Boastful(DictTier):
    """Says that it has every key."""

    def has_record(self, key: bytes) -> bool:
        del key
        return True


def test_keys_that_a_tier_has_brought_come_when_another_reservation_cannot_be_aborted_well() -> None:
    tier, errors, pool = GatedTier(), list[int](), aligned(8)
    options: Any = {"write": "through", "policy": lambda _: Raising(errors)}
    tier.permit()
    with CacheIndex(8, pools=[pool], tiers=[tier], layout=b"d" * 16, **options) as index:
        reservation = index.reserve(keys([0, 1]))
        for number, entry in enumerate(reservation.indices):
            pool[entry] = 1 + number
        reservation.commit()
        assert index.drain(SECONDS)
        index.clear(below=False)
        tier.hold()
        promotion = index.promote(keys([0, 1]), deadline=None)
        until(lambda: [kind for kind, _ in tier.begun if kind == "read"], "a read")
        errors.append(1)
        index.reserve(keys([5]))  # garbage at once: the next call of the index aborts it
        tier.permit()
        assert promotion.wait(SECONDS) == 2
        with index.acquire(keys([0, 1])) as lease:
            assert [pool[entry].tolist() for entry in lease.indices] == [[1] * 4096, [2] * 4096]
        promotion.release()
        assert index.statistics().pending == index.statistics().pinned == 0
        index.check()


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_fetch_of_keys_that_no_tier_brings_ends_although_their_slots_are_not_freed_well(times: int) -> None:
    errors = list[int]()
    with tiered(Boastful(), policy=lambda _: Raising(errors)) as bench:
        errors += range(times)
        job = bench.cache.fetch(keys(range(3)), [5, 6, 7], after=NO_WAIT, deadline=None)
        assert job.wait(SECONDS) == 0
        until(lambda: bench.cache.statistics().pending == 0, "the end of reservations")
        bench.store(range(8))
        bench.check_loaded(range(8))


def test_a_fetch_is_submitted_although_the_hook_raises() -> None:
    heard = list[str]()

    def hear(event: CacheEvent) -> None:
        heard.append(event.kind)
        if event.kind == "promoted" and threading.current_thread().name == "kvoffload-tiers":
            raise SystemExit("a hook")

    with tiered(on_event=hear) as bench:
        bench.written(range(3))
        job = bench.cache.fetch(keys(range(3)), [5, 6, 7], after=NO_WAIT, deadline=None)
        assert job.wait(SECONDS) == 3
        assert [bench.holds(block, number) for number, block in enumerate([5, 6, 7])] == [True] * 3
        until(lambda: "promoted" in heard)


def test_a_demotion_that_a_policy_breaks_is_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    errors = list[int]()
    with tiered(policy=lambda _: Raising(errors)) as bench:
        with bench.cache.open_request(session="a") as request:
            bench.cache.store(keys([0, 1]), [0, 1], after=NO_WAIT, request=request).wait(SECONDS)
        assert bench.cache.drain(SECONDS)
        errors += range(5)
        assert bench.cache.hint("demote", session="a").outcome == "accepted"
        until(lambda: "it goes on" in caplog.text, "an error")
        for number in range(10, 14):
            bench.store([number])
            assert bench.cache.drain(SECONDS)
        assert len(errors) == 4
        assert bench.cache.status(keys([0, 13])) == [Status.HIT] * 2
        errors.clear()


IN_THE_HOOK: dict[str, Callable[[Bench], object]] = {
    "fetch": lambda bench: bench.cache.fetch(keys([1]), [5], after=NO_WAIT).wait(SECONDS),
    "hits": lambda bench: bench.cache.fetch(keys([1]), [5], after=NO_WAIT).hits,
    "promote": lambda bench: bench.cache.promote(keys([1])).wait(SECONDS),
    "load": lambda bench: bench.cache.promote(keys([1])).load([5], after=NO_WAIT).wait(SECONDS),
    "drain": lambda bench: bench.cache.drain(SECONDS),
    "what is in slots": lambda bench: bench.cache.fetch(keys([0]), [6], after=NO_WAIT).wait(SECONDS),
}


@pytest.mark.parametrize("call", IN_THE_HOOK)
def test_a_hook_in_the_thread_of_the_tiers_is_refused_what_would_wait_for_that_thread(call: str) -> None:
    answers = list[object]()

    def hear(event: CacheEvent) -> None:
        if event.kind == "promoted" and threading.current_thread().name == "kvoffload-tiers":
            try:
                answers.append(IN_THE_HOOK[call](bench))
            except RuntimeError as error:
                answers.append(str(error).partition(" was called by ")[0])

    with tiered(on_event=hear) as bench:
        bench.written(range(2))
        job = bench.cache.fetch(keys([0]), [4], after=NO_WAIT)  # a call of this thread would bring the event here
        until(lambda: answers)
        assert job.wait(SECONDS) == 1
        refused = {"fetch": "wait", "hits": "hits", "promote": "wait", "load": "wait", "drain": "drain"}
        assert answers[0] == refused.get(call, 1)
        bench.cache.clear(below=False)
        assert bench.cache.fetch(keys([1]), [4], after=NO_WAIT).wait(SECONDS) == 1
