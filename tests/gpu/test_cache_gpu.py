"""The block cache on a GPU: what is pending, reserved and leased, with real streams; made traffic with overlap."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from helpers import STAGING, Rig, all_are, in_threads, keys, release, rig, warm_up, whole

import kvoffload
from kvoffload import NO_WAIT, BlockCache, Status
from kvoffload.cache.policies import POLICIES, PolicyName
from kvoffload.commands import main

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.fixture
def bench(gpu_device: kvoffload.Device) -> Iterator[Rig]:
    """Blocks of 16 planes of 64 KiB; block `b` holds `b + 1`, slot `s` holds `100 + s`."""
    with rig(gpu_device, planes=16, block_bytes=64 << 10, num_blocks=32, num_slots=8, staging_bytes=STAGING) as made:
        warm_up(made)
        yield made
        made.engine.drain(30)
        whole(made.engine)


def test_a_block_whose_store_is_under_way_is_loaded_behind_it(bench: Rig) -> None:
    cache = BlockCache(bench.engine)
    writer = bench.stream()
    bench.gate(writer)
    bench.fill(writer, 77, block=3)
    stored = cache.store(keys(1, 2), [3, 4], after=writer)
    assert cache.status(keys(1, 2, 5)) == [Status.PENDING, Status.PENDING, Status.MISS]
    loaded = cache.load(keys(1, 2), [20, 21], after=NO_WAIT, pending=True)
    release(bench, *stored.jobs, *loaded.jobs)
    loaded.wait(30)
    assert all_are(bench.block(20), 77)
    assert all_are(bench.block(21), 5)
    assert cache.lookup(keys(1, 2)) == 2
    cache.check()


def test_a_reader_of_pending_slots_is_ordered_on_the_gpu(bench: Rig) -> None:
    cache = BlockCache(bench.engine)
    writer, reader = bench.stream(), bench.stream()
    bench.gate(writer)
    bench.fill(writer, 77, block=3)
    reservation = cache.reserve(keys(1))
    reservation.commit(bench.engine.store([3], reservation.slots(), after=writer))
    with cache.acquire(keys(1), pending=True) as lease:
        lease.order_before(reader)
        job = bench.engine.load(lease.slots(), [9], after=reader)
        release(bench, job)
        lease.wait(30)
        job.wait(30)
    assert all_are(bench.block(9), 77)
    assert cache.lookup(keys(1)) == 1
    cache.check()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_threads_share_a_cache(bench: Rig, policy: PolicyName) -> None:
    cache = BlockCache(bench.engine, policy=policy)

    def work(number: int) -> None:
        """A block of key k always holds k + 1; each thread has a block of its own to load to."""
        for turn in range(150):
            chosen = sorted({(turn * 7 + number * 3 + step) % 24 for step in range(3)})
            try:
                stored = cache.store(keys(*chosen), chosen, after=NO_WAIT)
                cache.load(keys(chosen[0]), [24 + number], after=NO_WAIT, pending=True).wait(30)
                stored.wait(30)
            except (kvoffload.CapacityError, kvoffload.MissingKeyError):
                continue  # what others use, or was declined
            finally:
                cache.touch(keys(*chosen))
            assert all_are(bench.block(24 + number), chosen[0] + 1)
            cache.check()

    in_threads(*(lambda number=number: work(number) for number in range(4)))
    bench.engine.drain(30)
    cache.check()


def test_overlapping_requests_of_made_traffic_are_right(
    capsys: pytest.CaptureFixture[str], on_gpu: tuple[str, ...]
) -> None:
    options = ("--model", "qwen2.5-7b", "--slots", "2000", "--requests", "300", "--in-flight", "8", *on_gpu, "--json")
    assert main(["replay", "--workload", "documents", *options]) == 0
    fields = json.loads(capsys.readouterr().out)
    print(fields)
    assert (fields["simulated"], fields["corrupt_blocks"]) == (False, 0)
    assert fields["verified_blocks"] == fields["blocks_hit"] > 0
