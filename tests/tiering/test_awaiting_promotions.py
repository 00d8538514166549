"""`await cache.promote(...)` and `await promotion.load(...)`, and callbacks of both."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest
from tier_classes import DictTier, GatedTier
from tiering import SECONDS, keys, tiered, until

from kvoffload import NO_WAIT
from kvoffload.cache.tiering import ChainedLoad, Promotion
from kvoffload.cache.tiering.tier_manager import TierManager


async def within(what: Promotion) -> int:
    return await what


def test_a_promotion_and_a_load_behind_it_are_awaited() -> None:
    with tiered(DictTier()) as bench:
        bench.written(range(3))
        bench.write(0, 99)

        async def main() -> None:
            with bench.cache.promote(keys(range(4))) as promotion:
                assert await promotion == 3
            with bench.cache.promote(keys(range(4))) as again:
                assert await again.load(bench.blocks(range(4))) == tuple(keys(range(3)))

        asyncio.run(main())
        assert all(bench.holds(block, block) for block in range(3))


def test_the_loop_goes_on_and_a_timeout_leaves_the_promotion_alone() -> None:
    tier = GatedTier()
    with tiered(tier) as bench:
        tier.permit(1)
        bench.written([0])

        async def main() -> int:
            with bench.cache.promote(keys([0]), deadline=None) as promotion:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(within(promotion), 0.01)
                assert not promotion.finished
                tier.permit()
                return await promotion

        assert asyncio.run(main()) == 1


def test_one_that_is_cancelled_is_awaited_to_its_end() -> None:
    tier = GatedTier()
    with tiered(tier) as bench:
        tier.permit(1)
        bench.written([0])

        async def main() -> tuple[int, tuple[bytes, ...]]:
            with bench.cache.promote(keys([0]), deadline=None) as promotion:
                chained = promotion.load(bench.blocks([0]))
                until(lambda: len(tier.begun) == 2)
                asyncio.get_running_loop().call_later(0.01, promotion.cancel)
                return await promotion, await chained

        assert asyncio.run(main()) == (0, ())
        tier.permit()


def test_callbacks_come_from_one_thread_or_at_once() -> None:
    tier = GatedTier()
    with tiered(tier) as bench:
        tier.permit(1)
        bench.written([0])
        told: list[tuple[object, int]] = []
        promotion = bench.cache.promote(keys([0]), deadline=None)
        chained = promotion.load(bench.blocks([0]))
        for each in (promotion, chained):
            each.add_done_callback(lambda ended: told.append((ended, threading.get_ident())))
        assert told == []
        tier.permit()
        until(lambda: len(told) == 2)
        assert {id(each) for each, _ in told} == {id(promotion), id(chained)}
        (thread,) = {thread for _, thread in told}
        assert thread != threading.get_ident()
        assert (promotion.result(), chained.result()) == (1, tuple(keys([0])))
        now: list[ChainedLoad] = []
        chained.add_done_callback(now.append)
        assert now == [chained]
        promotion.release()


def test_a_load_that_an_interrupt_keeps_from_the_tiers_holds_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the garbage collector, which would break a cycle between the load and its promotion."""
    with tiered(DictTier()) as bench:
        bench.written(range(2))

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        gc.disable()
        try:
            with bench.cache.promote(keys(range(2))) as promotion:
                assert promotion.wait(SECONDS) == 2
                with monkeypatch.context() as patch:
                    patch.setattr(TierManager, "post", interrupted)
                    with pytest.raises(KeyboardInterrupt) as raised:
                        promotion.load([0, 1], after=NO_WAIT)
                del raised
            del promotion
            until(lambda: bench.cache.statistics().pinned == 0)
        finally:
            gc.enable()
