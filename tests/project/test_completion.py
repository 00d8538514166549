"""What completion shows of each object: the names that are for users, all of them, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import kvoffload
from kvoffload import BlockCache, CacheIndex, KVLayout, OffloadEngine, ShardedEngine, SharedSlots
from kvoffload.observability.router_events import RouterEvents
from kvoffload.tiers import MemoryTier

JOB = (
    "add_done_callback copier direction done error finished id nbytes num_parts order_before outcome reason result "
    "unfit wait"
)
ENGINE = (
    "close closed drain growing layout load load_groups max_in_flight missing_copiers num_slots pinned_slots plan poll "
    "slots statistics "
    "store store_groups submit"
)
SHOWN = {
    "Device": (
        "allocate allocate_blocks allocate_planes capabilities close closed context current driver empty index name "
        "pci simulated simulator stream stream_priorities"
    ),
    "Stream": "close device done handle synchronize",
    "KVLayout": (
        "block_axes block_shapes blocks_per_slot codecs dtype fingerprint from_arrays from_stacked from_tree groups "
        "num_groups on_default_stream slot_bytes slots_for tokens_per_block with_codec"
    ),
    "OffloadEngine": f"{ENGINE} device prefer profile staging_bytes",
    "ShardedEngine": f"{ENGINE} devices",
    "Job": JOB,
    "TransferResult": "copier count direction error gb_per_s index job_id nbytes seconds unfit",
    "BlockCache": (
        "acquire capacity check clear close drain engine fetch hint keep keys load locate lookup lookup_many "
        "open_request promote remove reserve restore save statistics status status_of store tier_statistics touch "
        "use_weights"
    ),
    "CacheIndex": (
        "acquire capacity check clear close describe drain hint keys load locate lock lookup lookup_many "
        "max_load_blocks open_request promote records remove reserve restore statistics status status_below status_of "
        "tier_statistics touch use_weights"
    ),
    "SharedSlots": "array close host_memory note offer receive",
    "Promotion": "add_done_callback cancel done finished keys load ready release result wait",
    "ChainedLoad": "add_done_callback done error finished job result submitted wait",
    "FetchJob": "add_done_callback cancel done error finished hits keys order_before result submitted wait",
    "CacheRequest": "end ended keys tenant",
    "CacheJob": "add_done_callback done error finished jobs keys num_parts order_before outcome result unfit wait",
    "TierJob": "begin cancel cancelled deadline done entries keys outcomes settle settle_waiting wait",
    "MemoryTier": (
        "attach bytes_per_call capabilities clear close contains count_corrupt drain exists flush get get_ended "
        "has_record have_records keep_weights max_queued name nbytes num_records pools put put_ended read_record "
        "read_records record_bytes release remove remove_all remove_records start statistics threads warn write_record "
        "write_records"
    ),
    "RouterEvents": ("cleared describe form lost medium not_described rank removed since stored take tokens_per_key"),
    "OwnedCache": "after arrays devices is_deleted layout memories nbytes shapes sharding unordered",
}


@pytest.fixture(scope="module")
def objects() -> Iterator[dict[str, Any]]:
    """One of each, by the name of its class."""
    with kvoffload.open_device(backend="simulated") as device:
        layout = KVLayout([device.allocate_blocks(8, planes=2, block_bytes=64)])
        engine = OffloadEngine(layout, device=device, num_slots=4)
        sharded = ShardedEngine([layout], devices=[device], num_slots=4)
        cache = BlockCache(engine)
        stored = cache.store([b"a"], [0])
        lower = OffloadEngine(layout, device=device, num_slots=4)
        tiered = BlockCache(lower, tiers=[MemoryTier(1 << 16)])
        promotion = tiered.promote([b"a"])
        chained = promotion.load([0])
        fetched = cache.fetch([b"a"], [0])
        both = sharded.store([1], [0])
        shared = SharedSlots(1, 4096)
        index = CacheIndex(1, pools=[shared.array], tiers=[MemoryTier(1 << 16)], layout=None)
        with device.stream() as stream:
            tier = MemoryTier(1 << 16)
            tier.attach([engine.slots], None)
            found = (
                tier,
                tier.clear(),
                tiered,
                index,
                shared,
                promotion,
                chained,
                fetched,
                device,
                stream,
                layout,
                engine,
                sharded,
                cache,
                stored,
                cache.open_request(),
                stored.jobs[0],
                both,
            )
            result = kvoffload.TransferResult(*stored.jobs[0].wait(10))
            both.wait(10)
            tier.close()
            tiered.close()
            index.close()
            shared.close()
            yield {type(each).__name__: each for each in (*found, result, RouterEvents(16))}


@pytest.mark.parametrize("name", [name for name in SHOWN if name != "OwnedCache"])
def test_completion_shows_what_is_for_users(name: str, objects: dict[str, Any]) -> None:
    shown = [each for each in dir(objects[name]) if not each.startswith("_")]
    assert shown == sorted(SHOWN[name].split())


def test_completion_of_a_remote_tier() -> None:
    """The names of a ThreadedTier, and what a subclass of RemoteTier has."""
    pytest.importorskip("obstore", reason="obstore is not installed")
    from kvoffload.tiers import ObjectStoreTier, ThreadedTier

    tier = ObjectStoreTier("memory:///", identity="x")
    more = {each for each in dir(tier) if not each.startswith("_")} - set(dir(ThreadedTier))
    shown = (
        "asks_for_all_keys capabilities connect delete_folder delete_names describe disconnect fetch_parts have_names "
        "identity max_queued name new_headers pools prefix record_bytes reject store_parts"
    )
    assert more == set(shown.split())
    assert tier.close()


def test_completion_of_a_cache_of_jax(device: kvoffload.Device) -> None:
    pytest.importorskip("jax", reason="JAX is not installed")
    from kvoffload.jax import OwnedCache

    cache = OwnedCache(device, (8, 2, 64), "bfloat16", plane_axis=1, block_axis=0)
    assert [each for each in dir(cache) if not each.startswith("_")] == sorted(SHOWN["OwnedCache"].split())
