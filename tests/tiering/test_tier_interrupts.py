"""KeyboardInterrupt at every point of a call of a BlockCache: afterwards everything works, and nothing is held."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from interrupts import interrupt_at, interrupt_in_line
from seeds import rest_long
from tier_classes import DictTier
from tiering import SECONDS, Bench, key, keys, tiered, until

from kvoffload import NO_WAIT
from kvoffload.cache.tiering import FetchJob

_MOST = 400  # points of a call that polls

Call = Callable[[Bench, list[Any]], Callable[[], object]]


def _of_promotion(use: Callable[[Any], object]) -> Call:
    def make(bench: Bench, kept: list[Any]) -> Callable[[], object]:
        promotion = bench.cache.promote(keys([0, 1]))
        kept.append(promotion)
        promotion.wait(SECONDS)
        return lambda: use(promotion)

    return make


def fetch(bench: Bench) -> FetchJob:
    return bench.cache.fetch(keys([0, 1]), [6, 7], after=NO_WAIT)


def fetch_from_slots(bench: Bench, _: list[Any]) -> Callable[[], object]:
    bench.store([0, 1])
    return lambda: fetch(bench)


CALLS: dict[str, Call] = {
    "promote": lambda bench, kept: lambda: kept.append(bench.cache.promote(keys([0, 1]))),
    "store": lambda bench, _: lambda: bench.cache.store(keys([20]), [0], after=NO_WAIT),
    "fetch": lambda bench, kept: lambda: kept.append(fetch(bench)),
    "fetch from slots": fetch_from_slots,
    "hits": lambda bench, _: lambda: fetch(bench).hits,
    "cancel a fetch": lambda bench, _: lambda: fetch(bench).cancel(),
    "keep": lambda bench, _: lambda: bench.cache.keep(keys([20]), [0], after=NO_WAIT),
    "touch": lambda bench, _: lambda: bench.cache.touch(keys([0, 1])),
    "remove": lambda bench, _: lambda: bench.cache.remove(keys([30, 31])),
    "remove nothing": lambda bench, _: lambda: bench.cache.remove([]),
    "locate": lambda bench, _: lambda: bench.cache.locate(keys([0, 1])),
    "statistics": lambda bench, _: bench.cache.tier_statistics,
    "cancel": _of_promotion(lambda promotion: promotion.cancel()),
    "release": _of_promotion(lambda promotion: promotion.release()),
    "load": _of_promotion(lambda promotion: promotion.load([6, 7], after=NO_WAIT)),
}


@pytest.mark.parametrize("first", rest_long(range(1, 4), 1))  # every third point at once, the others in long runs
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupted_call_leaves_everything_working(name: str, first: int) -> None:
    tier = DictTier()
    with tiered(tier, capacity=8) as bench:
        bench.written(range(2))
        for number in range(first, _MOST, 3):
            kept: list[Any] = []
            outcome = interrupt_at(number, CALLS[name](bench, kept))
            kept.clear()
            works(bench, tier, 100 + number)
            if outcome.point is None:
                assert number > 3, "there are points"
                break
        else:
            assert name in ("remove", "hits"), "other calls do not poll"


def works(bench: Bench, tier: DictTier, number: int) -> None:
    bench.engine.drain(SECONDS)
    assert bench.cache.drain(SECONDS)
    bench.store([number])
    assert bench.cache.drain(SECONDS)
    assert key(number) in tier.store, "it is written: no removal goes on"
    bench.cache.clear(below=False)
    with bench.cache.promote(keys([1, number])) as promotion:
        assert promotion.wait(SECONDS) == 2
        bench.check_loaded([1, number])
    del promotion
    bench.cache.remove(keys([number]))
    bench.cache.check()
    bench.cache.clear(below=False)
    until(lambda: bench.cache.statistics().pinned == 0 or gc.collect() < 0, "the end of holds")


@pytest.mark.parametrize("start", [1, 2, 3])
def test_an_interrupted_close_can_be_called_again(start: int) -> None:
    for number in range(start, 60, 3):
        tier = DictTier()
        with tiered(tier, capacity=2, blocks=4) as bench:
            bench.store([0])
            promotion = bench.cache.promote(keys([0, 1]))
            interrupt_at(number, partial(bench.cache.close, SECONDS))
            assert bench.cache.close(SECONDS)
            promotion.wait(SECONDS)
            assert tier.released == 1
            assert key(0) in tier.store, "what was to be written is"


@pytest.mark.parametrize("line", range(1, 6))
def test_an_interrupt_while_python_looks_at_the_thread_does_not_end_it(line: int) -> None:
    """CPython before 3.13 then takes a thread that goes on for one that has ended."""
    with tiered(DictTier()) as bench:
        bench.written(range(2))
        interrupt_in_line("_wait_for_tstate_lock", line, lambda: bench.cache.drain(SECONDS))
        assert bench.cache.promote(keys([0, 1])).wait(SECONDS) == 2
