"""`BlockCache.fetch` and `keep`: one job for what slots and tiers have."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from helpers import Gate
from seeds import rest_long, seeds
from tier_classes import DictTier, GatedTier
from tiering import DESCRIBED, SECONDS, Bench, key, keys, tiered, until

from kvoffload import (
    NO_WAIT,
    BlockCache,
    CacheEvent,
    CapacityError,
    ClosedError,
    LayoutError,
    OffloadEngine,
    Tenant,
    TransferError,
    chain_keys,
)
from kvoffload.cache.tiering import FetchJob
from kvoffload.engine.wait_streams import MOST_WAIT_STREAMS
from kvoffload.testing import FaultyTier, TierFaults

UNDEFINED = 16_777_213


def fetch(bench: Bench, numbers: Any, **options: Any) -> FetchJob:
    """Fetch keys into blocks from 0 on, whose bytes are others."""
    wanted = list(numbers)
    for block in range(len(wanted)):
        bench.write(block, UNDEFINED)
    return bench.cache.fetch(keys(wanted), bench.blocks(range(len(wanted))), after=NO_WAIT, **options)


@contextmanager
def another(max_in_flight: int = 64, **options: Any) -> Iterator[Bench]:
    """A cache of four keys over an engine of its own, without tiers if `options` name none."""
    with tiered() as other:
        layout, device = other.engine.layout, other.device
        given: dict[str, Any] = {"num_slots": 4, "staging_bytes": 0, "max_in_flight": max_in_flight}
        with OffloadEngine(layout, device=device, **given) as engine, BlockCache(engine, **options) as cache:
            yield Bench(device, other.planes, engine, cache)


def check(bench: Bench, job: FetchJob, numbers: Any, hits: int) -> None:
    assert (job.wait(SECONDS), job.hits, job.done, job.finished, job.error) == (hits, hits, True, True, None)
    assert all(bench.holds(block, number) for block, number in enumerate(list(numbers)[:hits]))
    assert nothing_held(bench)


def nothing_held(bench: Bench) -> bool:
    until(lambda: bench.cache.statistics().pinned == bench.cache.statistics().pending == 0, "the end of holds")
    bench.cache.check()
    return True


def counts(bench: Bench) -> tuple[int, int, int]:
    found = bench.cache.statistics()
    return found.lookups, found.hits, found.loaded


@pytest.mark.parametrize("groups", [1, 3])
def test_from_slots_and_tiers_in_one_job_counted_once(groups: int) -> None:
    events: list[CacheEvent] = []
    with tiered(DictTier(), groups=groups, on_event=events.append) as bench:
        bench.written(range(4))
        bench.store([0, 1])
        events.clear()
        before = counts(bench)
        job = fetch(bench, [0, 1, 2, 3, 9, 10])
        check(bench, job, range(4), 4)
        assert tuple(job.keys) == tuple(keys([0, 1, 2, 3, 9, 10]))
        assert (counts(bench)[0] - before[0], counts(bench)[1] - before[1]) == (6, 4)
        told = {kind: [key for each in events if each.kind == kind for key in each.keys] for kind in ("hit", "miss")}
        assert told == {"hit": keys(range(4)), "miss": keys([9, 10])}
        check(bench, fetch(bench, range(4)), range(4), 4)  # promoted ones stay
        assert "4 keys, done" in repr(job) or "6 keys, done" in repr(job)


def test_what_is_in_slots_is_submitted_by_the_call_itself() -> None:
    tier = GatedTier()
    with tiered(tier, write="none") as bench:
        bench.store(range(3))
        job = fetch(bench, range(3))
        assert job.submitted
        assert job.hits == 3
        check(bench, job, range(3), 3)
        assert tier.begun == []


def test_drain_waits_for_a_fetch_whose_job_was_lost() -> None:
    """An interrupt may lose it between the call and the assignment. Then the blocks are the caller's after `drain`."""
    tier = GatedTier(threads=2)  # a flush does not wait for the read
    with tiered(tier) as bench:
        tier.permit(2)
        bench.written(range(2))
        fetch(bench, range(2), deadline=None)
        until(lambda: ("read", key(0)) in tier.begun, "the read")
        assert not bench.cache.drain(0.05), "the tier brings the keys"
        tier.permit()
        assert bench.cache.drain(SECONDS)
        assert bench.engine.in_flight == 0, "and they are loaded"
        assert all(bench.holds(block, block) for block in range(2))


def test_drain_waits_for_transfers_whose_jobs_were_lost() -> None:
    with another() as bench:
        bench.store([1])
        for call in (bench.cache.keep, bench.cache.fetch):
            with bench.device.stream() as stream:
                gate = Gate(bench.device)
                gate.hold(stream.handle)
                call(keys([1 if call == bench.cache.fetch else 2]), bench.blocks([1]), after=stream)
                drained = bench.cache.drain(0.02)
                gate.open()
                assert not drained, "the blocks are in use"
                assert bench.cache.drain(SECONDS)
                assert bench.engine.in_flight == 0
                gate.close()


def test_without_tiers() -> None:
    with another() as bench:
        bench.store(range(3))
        check(bench, fetch(bench, range(5)), range(3), 3)
        assert counts(bench) == (5, 3, 3)
        check(bench, fetch(bench, [7, 8]), [], 0)
        check(bench, fetch(bench, []), [], 0)
        threads = threading.active_count()

        async def main() -> list[int]:
            return await asyncio.gather(*(within(fetch(bench, range(3))) for _ in range(20)))

        assert asyncio.run(main()) == [3] * 20
        assert threading.active_count() <= threads + 1, "one thread waits for all"


async def within(job: FetchJob) -> int:
    return await job


def test_a_stream_follows_the_load_and_waits_for_no_tier() -> None:
    tier = GatedTier()
    with tiered(tier) as bench:
        tier.permit(1)
        bench.written([0])
        job = fetch(bench, [0], deadline=None)
        assert not job.submitted
        threading.Timer(0.02, tier.permit).start()
        with bench.device.stream() as stream:
            job.order_before(stream)
            assert job.submitted
            assert job.hits == 1
        assert bench.holds(0, 0)
        check(bench, job, [0], 1)


def test_parts() -> None:
    with tiered(DictTier()) as bench:
        bench.written(range(3))
        job = fetch(bench, range(3), parts=2)
        with bench.device.stream() as stream:
            job.order_before(stream, part=0)
            job.order_before(stream, part=1)
        check(bench, job, range(3), 3)


# deadlines, failures --------------------------------------------------------------------------------------------------


def test_a_deadline_that_passes_leaves_what_came() -> None:
    tier = GatedTier()
    with tiered(tier) as bench:
        tier.permit(3)
        bench.written(range(3))
        tier.hold()
        bench.store([0])
        job = fetch(bench, range(3), deadline=0.05)
        assert job.hits == 1
        assert job.wait(SECONDS) == 1
        tier.permit()
        check(bench, job, [0], 1)
        assert not bench.holds(1, 1), "nothing writes blocks after the end"


def test_no_key_is_waited_for_longer_than_computing_it() -> None:
    """Neither where no deadline is given."""
    tier = GatedTier()
    with tiered(tier, prefill_tokens_per_second=4 * 2 / 0.1) as bench:  # two keys of 4 tokens in 0.1 s
        tier.permit(2)
        bench.written(range(2))
        for deadline in (None, 30.0):
            begin = time.monotonic()
            assert fetch(bench, range(2), deadline=deadline).wait(SECONDS) == 0, "while the tier's call goes on"
            assert time.monotonic() - begin >= 0.1
            tier.permit(10)
            until(lambda: tier.statistics().longest_call == 0)
            tier.hold()
            bench.cache.clear(below=False)
        tier.permit()


def test_a_shorter_deadline_holds_with_a_known_speed() -> None:
    tier = GatedTier()
    with tiered(tier, prefill_tokens_per_second=1e-3) as bench:
        tier.permit(1)
        bench.written([0])
        assert fetch(bench, [0], deadline=0.05).hits == 0
        tier.permit()


def test_a_failed_load_raises_and_the_keys_stay() -> None:
    with tiered(DictTier()) as bench:
        bench.written(range(2))
        with bench.cache.promote(keys(range(2))) as promotion:
            promotion.wait(SECONDS)
        for call in ("cuMemcpyAsync", "cuMemcpy2DAsync", "cuMemcpy3DAsync"):
            bench.device.simulator.faults.fail_call(call)
        job = fetch(bench, range(2))
        with pytest.raises(TransferError):
            job.wait(SECONDS)
        assert isinstance(job.error, TransferError)
        with pytest.raises(TransferError):
            job.hits  # noqa: B018
        bench.device.simulator.faults.clear()
        bench.engine.drain(SECONDS)
        check(bench, fetch(bench, range(2)), range(2), 2)


def test_a_load_that_the_thread_cannot_submit_raises_from_the_job() -> None:
    tier = GatedTier()
    with another(max_in_flight=1, policy="lru", tiers=[tier], write="through") as bench:
        tier.permit(1)
        bench.written([0])
        gate = Gate(bench.device)
        with bench.device.stream() as stream:
            job = fetch(bench, [0], deadline=None)
            gate.hold(stream.handle)
            first = bench.cache.keep(keys([1]), [5], after=stream)
            tier.permit()
            for call in (job.wait, lambda: job.hits, lambda: job.order_before(stream)):
                with pytest.raises(CapacityError, match="max_in_flight"):
                    call()
            assert job.done
            assert isinstance(job.error, CapacityError)
            gate.open()
            first.wait(SECONDS)
        gate.close()
        assert nothing_held(bench)
        check(bench, fetch(bench, [0]), [0], 1)


def test_a_key_that_is_removed_between_its_promotion_and_its_load_gives_no_hits() -> None:
    def lose(event: CacheEvent) -> None:
        if event.kind == "hit":
            bench.cache.remove(keys([1]), below=False)

    with tiered(DictTier(), on_event=lose) as bench:
        bench.store(range(2))
        check(bench, fetch(bench, range(2)), [], 0)


# cancelled, dropped, closed -------------------------------------------------------------------------------------------


def test_cancelled_before_anything_came() -> None:
    tier = GatedTier()
    with tiered(tier) as bench:
        tier.permit(2)
        bench.written([1])
        bench.store([0])
        assert bench.cache.drain(SECONDS), "no write keeps the tier busy"
        job = fetch(bench, [0, 1], deadline=None)
        until(lambda: tier.begun[-1][0] == "read")
        job.cancel()
        assert job.wait(SECONDS) == 0
        assert job.hits == 0
        assert not bench.holds(0, 0), "what is in slots is not loaded either"
        for block in range(2):
            bench.write(block, 77)
        tier.permit()
        assert nothing_held(bench)
        assert all(bench.holds(block, 77) for block in range(2)), "what the tier brings late goes to no block"


def test_cancelled_while_it_is_being_loaded_and_after() -> None:
    with tiered(DictTier()) as bench:
        bench.store(range(2))
        job = fetch(bench, range(2))
        job.cancel()
        check(bench, job, range(2), 2)
        job.cancel()
        assert job.wait() == 2


@pytest.mark.parametrize("seed", seeds(8))
def test_cancelled_at_any_time(seed: int) -> None:
    with tiered(DictTier(), seed=seed) as bench:
        bench.written(range(4))
        for turn in range(12):
            if turn % 3 == 0:
                bench.cache.clear(below=False)
            job = fetch(bench, range(4))
            time.sleep(2e-4 * ((seed + turn) % 6))
            job.cancel()
            hits = job.wait(SECONDS)
            assert all(bench.holds(block, block) for block in range(hits))
            assert job.done
            left = [bench.holds(block, block) for block in range(4)]
            time.sleep(1e-3)
            assert left == [bench.holds(block, block) for block in range(4)], "nothing writes blocks after the end"
        assert nothing_held(bench)


def test_dropped() -> None:
    with tiered(DictTier()) as bench:
        bench.written(range(4))
        for _ in range(3):
            fetch(bench, range(4))
            gc.collect()
            bench.cache.clear(below=False)
        assert nothing_held(bench)


def test_closed_with_fetches_in_flight() -> None:
    tier = GatedTier()
    with tiered(tier) as bench:
        tier.permit(2)
        bench.written([1])
        bench.store([0])
        assert bench.cache.drain(SECONDS), "no write keeps the tier busy"
        before = counts(bench)
        jobs = [fetch(bench, wanted, deadline=None) for wanted in ([0, 1], [1], [0])]
        threading.Timer(0.05, tier.permit).start()
        assert bench.cache.close(SECONDS)
        hits = [job.wait(SECONDS) for job in jobs]
        assert hits[2] == 1
        assert all(job.done for job in jobs)
        assert (counts(bench)[0] - before[0], counts(bench)[1] - before[1]) == (4, sum(hits))
        with pytest.raises(ClosedError, match="closed"):
            fetch(bench, [0])


# refused --------------------------------------------------------------------------------------------------------------


def ended(bench: Bench) -> Any:
    with bench.cache.open_request() as request:
        return request


REFUSED: dict[str, tuple[type[Exception], str, Callable[[Bench], object]]] = {
    "blocks twice": (LayoutError, "blocks repeats", lambda b: b.cache.fetch(keys([0, 1]), [3, 3], after=NO_WAIT)),
    "keys twice": (LayoutError, r"keys.*repeat", lambda b: b.cache.fetch(keys([0, 0]), [3, 4], after=NO_WAIT)),
    "too few blocks": (LayoutError, "blocks must hold", lambda b: b.cache.fetch(keys([0, 1]), [3], after=NO_WAIT)),
    "no block": (LayoutError, "blocks", lambda b: b.cache.fetch(keys([0]), [99], after=NO_WAIT)),
    "no bytes": (LayoutError, "keys", lambda b: b.cache.fetch([3], [0], after=NO_WAIT)),  # type: ignore[list-item]
    "endless time": (ValueError, "deadline", lambda b: b.cache.fetch(keys([0]), [3], deadline=float("nan"))),
    "no request": (TypeError, "request must be what", lambda b: b.cache.fetch(keys([0]), [3], request=3)),  # type: ignore[arg-type]
    "an ended request": (
        ClosedError,
        "request .* has ended",
        lambda b: b.cache.fetch(keys([0]), [3], request=ended(b)),
    ),
    "another tenant": (
        ValueError,
        "tenant must be the request's",
        lambda b: b.cache.fetch(keys([0]), [3], request=b.cache.open_request(), tenant="x"),
    ),
    "kept in an ended request": (
        ClosedError,
        "request .* has ended",
        lambda b: b.cache.keep(keys([1]), [3], after=NO_WAIT, request=ended(b)),
    ),
    "counted, perhaps": (ValueError, "counted", lambda b: b.cache.fetch(keys([0]), [3], counted=1)),  # type: ignore[arg-type]
    "no time": (ValueError, "deadline .* 0", lambda b: b.cache.fetch(keys([0]), [3], after=NO_WAIT, deadline=0)),
    "no tenant": (ValueError, "tenant", lambda b: b.cache.fetch(keys([0]), [3], after=NO_WAIT, tenant="x")),
    "no parts": (LayoutError, "parts", lambda b: b.cache.fetch(keys([0]), [3], after=NO_WAIT, parts=0)),
    "no stream": (TypeError, "after", lambda b: b.cache.fetch(keys([0]), [3], after="x")),  # type: ignore[arg-type]
    "kept for no tenant": (
        ValueError,
        r"tenant must be one of '', got \[\]",
        lambda b: b.cache.keep(keys([0]), [3], after=NO_WAIT, tenant=[]),  # type: ignore[arg-type]
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_changes_nothing(case: str) -> None:
    kind, text, call = REFUSED[case]
    with tiered(DictTier()) as bench:
        bench.store([0])
        before = counts(bench)
        with pytest.raises(kind, match=text):
            call(bench)
        assert counts(bench) == before
        assert nothing_held(bench)


def test_without_room_in_the_engine_it_raises() -> None:
    with another(max_in_flight=1) as bench:
        bench.store([0])
        gate = Gate(bench.device)
        with bench.device.stream() as stream:
            gate.hold(stream.handle)
            first = bench.cache.fetch(keys([0]), [5], after=stream)
            with pytest.raises(CapacityError, match="max_in_flight"):
                bench.cache.fetch(keys([0]), [6], after=NO_WAIT)
            gate.open()
            check(bench, first, [], 1)
        gate.close()


def test_inside_another_call_it_is_refused() -> None:
    with tiered(DictTier()) as bench:
        bench.store([0])
        with bench.engine.lock:
            for call in (bench.cache.fetch, bench.cache.keep):
                with pytest.raises(RuntimeError, match="in the middle of another call"):
                    call(keys([0]), [1], after=NO_WAIT)
        check(bench, fetch(bench, [0]), [0], 1)


# counted ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", rest_long(seeds(12), 4))
def test_each_key_is_counted_once_whatever_becomes_of_it(seed: int) -> None:
    """Random fetches above a tier that fails, hangs, declines and takes long, and below requests that are cancelled."""
    chance = random.Random(seed)
    tier = FaultyTier(TierFaults(fail=0.2, error=0.05, delay=0.2, longest_delay=2e-3, hang=0.05), seed=seed)
    lookups = hits = 0
    with tiered(tier, capacity=6, seed=seed, groups=1 + seed % 2) as bench:
        told: Counter[str] = Counter()
        for number in range(0, 12, 4):
            bench.store(range(number, number + 4))
        start, sent = bench.cache.statistics(), list[FetchJob]()
        for _ in range(60):
            wanted = chance.sample(range(14), chance.randrange(7))
            options: dict[str, Any] = {"deadline": chance.choice([0.003, 0.02])}
            act = chance.randrange(8)
            try:
                job = fetch(bench, wanted, counted=act != 0, **options)
            except CapacityError:
                pytest.fail("there is room for all")
            if act == 1:
                job.cancel()
            elif act == 2:
                bench.cache.remove(keys(wanted[:1]), below=False)
            elif act == 3:
                bench.device.simulator.faults.fail_call("cuMemcpyAsync")
            try:
                found = job.wait(SECONDS)
            except TransferError:
                found = job._promotion.ready
            bench.device.simulator.faults.clear()
            bench.engine.drain(SECONDS)
            assert found in (job._promotion.ready, 0)
            assert found == job._promotion.ready or act in (1, 2), "those that were found, unless the caller took them"
            if act != 0:
                lookups, hits = lookups + len(wanted), hits + job._promotion.ready
            sent.append(job)
            if chance.random() < 0.3:
                tier.heal()
                new = chance.sample(range(14), 3)
                bench.cache.keep(keys(new), bench.blocks(range(3)), after=NO_WAIT).wait(SECONDS)
            now = bench.cache.statistics()
            assert (now.lookups - start.lookups, now.hits - start.hits) == (lookups, hits)
        now = bench.cache.statistics()
        told.update(dict(now.hits_from))
        assert told.total() == now.hits
        assert all(job.done for job in sent)
        tier.heal()


# requests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["slots", "tier", "nowhere"])
def test_a_request_has_the_keys_that_it_fetched_and_kept(where: str) -> None:
    with tiered(DictTier(), tenants={"a": Tenant(max_blocks=6)}) as bench:
        for block in range(4):
            bench.write(block, block)
        bench.cache.store(keys(range(2)), bench.blocks(range(2)), after=NO_WAIT, tenant="a").wait(SECONDS)
        if where != "slots":
            assert bench.cache.drain(SECONDS)
            bench.cache.clear(below=where == "nowhere")
        request = bench.cache.open_request(tenant="a")
        job = bench.cache.fetch(keys(range(4)), bench.blocks(range(4)), after=NO_WAIT, request=request)
        hits = job.wait(SECONDS)
        assert hits == (0 if where == "nowhere" else 2)
        assert request.keys == tuple(keys(range(hits)))
        for block in range(4):
            bench.write(block, block)
        kept = bench.cache.keep(keys(range(4)), bench.blocks(range(4)), after=NO_WAIT, request=request)
        kept.wait(SECONDS)
        assert kept.keys == tuple(keys(range(hits, 4)))
        assert request.ended
        assert request.keys == tuple(keys(range(4)))
        assert dict(bench.cache.statistics().tenants)["a"].stored >= 4
        assert nothing_held(bench)


def test_a_request_that_ends_before_its_load_is_an_error_of_the_job() -> None:
    tier = GatedTier()
    with tiered(tier) as bench:
        tier.permit(1)
        bench.written([0])
        request = bench.cache.open_request()
        job = fetch(bench, [0], deadline=None, request=request)
        request.end()
        tier.permit()
        with pytest.raises(ClosedError, match="has ended"):
            job.wait(SECONDS)
        check(bench, fetch(bench, [0]), [0], 1)


# a tier that hangs --------------------------------------------------------------------------------------------------


@contextmanager
def hanging(**options: Any) -> Iterator[tuple[Bench, FaultyTier]]:
    """A cache whose tier has keys 0 and 1, and hangs from now on."""
    tier = FaultyTier()
    with tiered(tier, **options) as bench:
        bench.written(range(2))
        tier.hang_all()
        yield bench, tier


def test_waiting_for_it_ends_at_the_timeout_and_the_fetch_goes_on() -> None:
    with hanging() as (bench, tier):
        job = fetch(bench, range(2), deadline=None)
        for _ in range(2):
            with pytest.raises(TimeoutError):
                job.wait(0.02)
            with pytest.raises(TimeoutError):
                job.wait(0)
        assert not job.submitted
        assert not job.done
        assert job.error is None
        assert "0 ready" in repr(job)
        tier.heal()
        check(bench, job, range(2), 2)


def test_hits_and_order_wait_until_the_deadline_at_most() -> None:
    for ask in (lambda job, _: job.hits == 0, lambda job, stream: job.order_before(stream) is None):
        with hanging() as (bench, _), bench.device.stream() as stream:
            begin = time.monotonic()
            job = fetch(bench, range(2), deadline=0.1)
            assert ask(job, stream)
            assert time.monotonic() - begin >= 0.1
            assert job.done


def test_awaiting_it() -> None:
    """`asyncio.wait_for` and a task that is cancelled end the waiting, and not the fetch."""

    async def main(bench: Bench, tier: FaultyTier) -> None:
        late = fetch(bench, range(2), deadline=0.05)
        assert await within(late) == 0
        until(lambda: tier.hung)
        tier.heal()
        await asyncio.sleep(0.05)
        tier.hang_all()
        job = fetch(bench, range(2), deadline=None)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(within(job), 0.05)
        task = asyncio.create_task(within(job))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not job.done
        tier.heal()
        assert await within(job) == 2
        assert all(bench.holds(block, block) for block in range(2))

    with hanging() as (bench, tier):
        asyncio.run(main(bench, tier))
        assert nothing_held(bench)


# keep, keys -----------------------------------------------------------------------------------------------------------


def test_keep_stores_and_ends_the_request() -> None:
    with tiered(DictTier(), write="admitted", policy="lru") as bench:
        for block in range(3):
            bench.write(block, block)
        job = bench.cache.keep(keys(range(3)), [0, 1, 2], after=NO_WAIT)
        job.wait(SECONDS)
        assert job.keys == tuple(keys(range(3)))
        assert bench.cache.drain(SECONDS)
        assert bench.cache.locate(keys([0, 3])) == ["host", "missing"]
        bench.cache.clear(below=False)
        check(bench, fetch(bench, range(3)), range(3), 3)
        assert bench.cache.keep(keys(range(3)), [0, 1, 2], after=NO_WAIT).keys == ()


def test_keys_are_those_of_chain_keys() -> None:
    with tiered(DictTier()) as bench:
        tokens = list(range(17))
        mine = bench.cache.keys(tokens, salt="a", extra=b"b")
        assert mine == chain_keys(tokens, layout=bench.engine.layout, salt="a", extra=b"b")
        assert len(mine) == 17 // DESCRIBED["tokens_per_block"]
        more = bench.cache.keys(tokens[4:], salt="a", extra=b"b", parent=mine[0])
        assert more == mine[1:]


# interrupts -----------------------------------------------------------------------------------------------------------


def test_more_fetches_than_wait_streams_may_wait_for_a_tier() -> None:
    """Each follows an array; those whose load is not submitted yet share streams that have nothing to wait for."""
    tier = FaultyTier()
    with tiered(tier, blocks=2 * MOST_WAIT_STREAMS + 40) as bench:
        bench.written(range(2))
        tier.hang_all()
        array = np.zeros(3)
        jobs = [
            bench.cache.fetch(keys(range(2)), [2 * number, 2 * number + 1], after=array, deadline=None)
            for number in range(MOST_WAIT_STREAMS + 20)
        ]
        tier.heal()
        assert {job.wait(SECONDS) for job in jobs} == {2}
        assert bench.holds(2 * MOST_WAIT_STREAMS, 0)
        assert bench.holds(2 * MOST_WAIT_STREAMS + 39, 1)
