"""How a BlockCache ends: closed, garbage, engine or device closed first, forked, at interpreter exit."""

from __future__ import annotations

import dataclasses
import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
from helpers import COPY_ENGINE_ONLY, simulated
from tier_classes import DictTier, GatedTier
from tiering import DESCRIBED, SECONDS, keys, tiered, until

import kvoffload
from kvoffload import NO_WAIT, BlockCache, CacheEvent, ClosedError, KVLayout, OffloadEngine
from kvoffload.cache.tiering.promotion import PromotionRecord
from kvoffload.cache.tiering.tier_manager import TierManager
from kvoffload.testing import FaultyTier


def tier_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kvoffload-")]


def test_after_close_the_slots_work_and_tiers_do_not() -> None:
    with tiered() as bench:
        bench.written([1])
        assert bench.cache.close(SECONDS)
        assert bench.cache.close(SECONDS)
        bench.store([2])
        bench.check_loaded([2])
        bench.cache.touch(keys([2]))
        assert bench.cache.locate(keys([1, 2])) == ["missing", "host"]
        for call in (bench.cache.promote, bench.cache.remove):
            with pytest.raises(ClosedError, match="the cache is closed"):
                call(keys([1]))
        with pytest.raises(ClosedError):
            bench.cache.clear()
        with pytest.raises(ClosedError):
            bench.cache.drain()
        assert not bench.manager._messages, "nothing collects what happens"
        assert "kvoffload-tiers" not in tier_threads()


def test_close_ends_promotions_and_what_waits_for_them() -> None:
    tier = FaultyTier()
    with tiered(tier) as bench:
        bench.written(range(4))
        tier.hang_all()
        promotion = bench.cache.promote(keys(range(2)), deadline=None)
        chained = promotion.load([0, 1], after=NO_WAIT)
        until(lambda: tier.hung)
        assert not bench.cache.close(0.05)
        assert promotion.wait(SECONDS) == 0
        assert chained.wait(SECONDS) == ()
        assert bench.cache.statistics().pending == 0
        tier.heal()
        assert bench.cache.close(SECONDS)


def test_close_while_a_write_hangs_frees_its_entries_when_it_returns() -> None:
    tier = FaultyTier()
    with tiered(tier, capacity=4) as bench:
        tier.hang_all()
        bench.store([0])
        until(lambda: tier.hung)
        assert not bench.cache.close(0.05)
        assert bench.cache.statistics().pinned == 1
        tier.heal()
        until(lambda: bench.cache.statistics().pinned == 0)


@pytest.mark.parametrize("_", range(5))
def test_promotions_told_while_the_cache_is_closed_end(_: int) -> None:
    with tiered() as bench:
        bench.written(range(4))
        promotions: list[Any] = []

        def promote() -> None:
            try:
                for _ in range(10_000):
                    time.sleep(1e-4)
                    promotion = bench.cache.promote(keys(range(4)), deadline=None)
                    promotions.append((promotion, promotion.load(range(4), after=NO_WAIT)))
            except ClosedError:
                pass

        threads = [threading.Thread(target=promote) for _ in range(2)]
        for thread in threads:
            thread.start()
        until(lambda: len(promotions) > 3)
        assert bench.cache.close(SECONDS)
        for thread in threads:
            thread.join(SECONDS)
        for promotion, chained in promotions:
            promotion.wait(SECONDS)
            assert len(chained.wait(SECONDS)) <= 4


def test_a_cache_may_be_closed_in_its_hook() -> None:
    def hook(event: kvoffload.CacheEvent) -> None:
        if event.kind == "promoted":
            closed.append(bench.cache.close(SECONDS))

    closed: list[bool] = []
    with tiered(on_event=hook) as bench:
        bench.written([1])
        assert bench.cache.promote(keys([1])).wait(SECONDS) == 1
        until(lambda: closed)


@pytest.mark.parametrize("going_on", ["nothing", "promotion", "write", "chained"])
def test_the_engine_closed_first(going_on: str) -> None:
    tier = GatedTier()
    with tiered(tier) as bench:
        tier.permit()
        bench.written(range(3))
        tier.hold()
        promotion = bench.cache.promote(keys([0, 1])) if going_on in ("promotion", "chained") else None
        chained = promotion.load([0, 1], after=NO_WAIT) if promotion is not None and going_on == "chained" else None
        if going_on == "write":
            bench.store([5])
        if going_on != "nothing":
            until(lambda: tier.begun[-1][1] in keys([0, 1, 5]) and len(tier.begun) > 3)
        bench.engine.close(SECONDS)
        tier.permit()
        if promotion is not None:
            promotion.wait(SECONDS)
        if chained is not None:
            with pytest.raises(ClosedError):
                chained.wait(SECONDS)
        with pytest.raises(ClosedError, match="engine of the cache"):
            bench.cache.promote(keys([0]))
        with pytest.raises(ClosedError):
            bench.cache.lookup(keys([0]))
        assert bench.cache.close(SECONDS)


def test_the_device_closed_first() -> None:
    device = simulated(0, "no-batch")
    layout = KVLayout([device.allocate_planes(2, block_bytes=64, num_blocks=8)], **DESCRIBED)
    engine = OffloadEngine(layout, device=device, num_slots=4, **COPY_ENGINE_ONLY)
    cache = BlockCache(engine, tiers=[DictTier()], write="through")
    cache.store(keys([1]), [1], after=NO_WAIT).wait(SECONDS)
    cache.drain(SECONDS)
    promotion = cache.promote(keys([1, 2]))
    engine.close(SECONDS)
    device.close()
    promotion.wait(SECONDS)
    assert cache.close(SECONDS)


def test_a_cache_that_is_garbage_leaves_nothing() -> None:
    tier = DictTier()
    with tiered() as bench:
        layout, device = bench.engine.layout, bench.device
        before = len(tier_threads())
        with OffloadEngine(layout, device=device, num_slots=4, **COPY_ENGINE_ONLY) as engine:
            cache = BlockCache(engine, tiers=[tier], write="through")
            cache.store(keys([1]), [1], after=NO_WAIT).wait(SECONDS)
            promotion = cache.promote(keys([1, 2]))
            promotion.wait(SECONDS)
            assert len(tier_threads()) == before + 3
            watched = [weakref.ref(each) for each in (cache, cache._tiers, cache._records, promotion._record)]
            del cache, promotion
            until(lambda: gc.collect() >= 0 and len(tier_threads()) == before, "the end of the threads")
            gc.collect()
            assert [reference() for reference in watched] == [None] * 4
            assert tier.released == 1
            BlockCache(engine)


def test_closed_caches_leave_no_threads_and_no_memory() -> None:
    before = len(tier_threads())
    watched = []
    for _ in range(20):
        with tiered() as bench:
            bench.written(range(3))
            bench.cache.promote(keys(range(3))).wait(SECONDS)
            watched += [weakref.ref(each) for each in (bench.cache, bench.manager)]
        del bench
    gc.collect()
    assert len(tier_threads()) == before
    assert [reference() for reference in watched] == [None] * 40


PROGRAM = """
    import os, sys, threading, time
    sys.path.insert(0, {support!r})
    from tiering import *
    from kvoffload.testing import FaultyTier
    from kvoffload import BlockCache, ClosedError
    from helpers import simulated

    device = simulated(0, "no-batch")
    layout = KVLayout([device.allocate_planes(2, block_bytes=64, num_blocks=8)], **DESCRIBED)
    engine = OffloadEngine(layout, device=device, num_slots=8, staging_bytes=0)
    tier = FaultyTier()
    cache = BlockCache(engine, policy="lru", tiers=[tier], write="through")
    cache.store(keys(range(4)), range(4), after=NO_WAIT).wait(10)
    assert cache.drain(10)
    cache.clear(below=False)
    print("ready", flush=True)
"""


def run(program: str, status: int = 0) -> str:
    text = textwrap.dedent(PROGRAM).format(support=str(Path(__file__).parents[1] / "support")) + textwrap.dedent(
        program
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(kvoffload.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def test_the_interpreter_ends_with_calls_in_flight() -> None:
    run(
        """
        tier.hang_all()
        promotion = cache.promote(keys(range(4)), deadline=None)
        cache.store([b"another"], [0], after=NO_WAIT).wait(10)
        until(lambda: tier.hung)
        """
    )


def test_a_killed_process_leaves_no_memory_and_no_files_but_the_disks(tmp_path: Path) -> None:
    """Shared memory with a name would outlive it: no mapping and no descriptor has one."""
    out = run(
        f"""
        from kvoffload.tiers import DiskTier

        lower = OffloadEngine(layout, device=device, num_slots=8, staging_bytes=0)
        disk = DiskTier({str(tmp_path / "disk")!r}, nbytes=1 << 20, identity="test")
        other = BlockCache(lower, policy="lru", tiers=[disk], write="through")
        other.store(keys(range(4)), range(4), after=NO_WAIT).wait(10)
        assert other.promote(keys(range(4))).wait(10) == 4
        shared = [line.split(maxsplit=5)[5:] for line in open("/proc/self/maps") if line.split()[1].endswith("s")]
        named = [name[0].strip() for name in shared if name and "(deleted)" not in name[0]]
        named += [os.path.realpath("/proc/self/fd/" + number) for number in os.listdir("/proc/self/fd")]
        print("named", [name for name in named if name.startswith("/dev/shm")], flush=True)
        os.kill(os.getpid(), 9)
        """,
        status=-9,
    )
    assert "named []" in out
    assert [each.name for each in tmp_path.iterdir()] == ["disk"]


def test_a_forked_child_is_refused_and_hangs_nowhere() -> None:
    out = run(
        """
        tier.hang_all()
        promotion = cache.promote(keys(range(4)), deadline=None)
        fetch = cache.fetch(keys(range(4)), range(4), after=NO_WAIT, deadline=None)
        chained = promotion.load(range(4, 8), after=NO_WAIT)
        child = os.fork()
        if child == 0:
            refused = 0
            for call in (
                lambda: cache.promote(keys([1])), lambda: cache.remove(keys([1])), cache.clear,
                lambda: cache.drain(1), cache.tier_statistics, lambda: cache.locate(keys([1])),
                lambda: cache.touch(keys([1])), lambda: cache.lookup(keys([1])),
                lambda: promotion.wait(5), lambda: fetch.wait(5), lambda: fetch.hits, lambda: chained.wait(5),
            ):
                try:
                    call()
                except ClosedError:
                    refused += 1
            assert cache.close()
            print("refused", refused, flush=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        tier.heal()
        assert promotion.wait(10) == fetch.wait(10) == len(chained.wait(10)) == 4
        promotion.release()
        cache.close()
        engine.close()
        device.close()
        """
    )
    assert "refused 12" in out


def test_a_load_behind_a_promotion_that_nothing_takes_up_any_more_ends_without_keys() -> None:
    """The thread of the tiers is in the caller's hook while the cache is closed."""
    in_hook, permitted = threading.Event(), threading.Event()

    def hook(event: CacheEvent) -> None:
        if event.kind == "promoted":
            in_hook.set()
            assert permitted.wait(SECONDS)

    with tiered(on_event=hook) as bench:
        bench.written([0])
        promotion = bench.cache.promote(keys([0]))
        assert in_hook.wait(SECONDS)
        load = promotion.load([0], after=NO_WAIT)
        bench.cache.close(0.05)
        try:
            assert load.wait(5) == ()
            bench.manager.post(load)  # as if an interrupt had kept the message
            assert load.wait(5) == ()
        finally:
            permitted.set()


def test_a_promotion_that_is_told_to_a_closed_cache_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was closed after it had been looked whether it was."""
    promote = TierManager.promote
    tier = DictTier()
    tier.capabilities = dataclasses.replace(tier.capabilities, local_index=False)
    with tiered(tier) as bench:
        bench.written([0])

        def close_and_promote(manager: TierManager, record: PromotionRecord) -> None:
            assert bench.cache.close(SECONDS)
            promote(manager, record)

        monkeypatch.setattr(TierManager, "promote", close_and_promote)
        assert bench.cache.promote(keys([0]), deadline=None).wait(5) == 0
