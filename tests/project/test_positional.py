"""What may go by position: the obvious data of a call, at most three arguments. The rest goes by name alone.

An argument that a caller may leave out goes by name: nobody should have to look up what `engine.store([1], [0], 1)`
does. POSITIONAL has the calls that take two arguments or more by position, and the few that take one that may be left
out: a new one is argued for and added there, or gets its `*`.
"""

from __future__ import annotations

from typing import Any

import pytest
from helpers import rig
from public_calls import public_calls
from sharding import Machine

import kvoffload
from kvoffload import BlockCache

POSITIONAL = {
    # the data of a transfer, in the direction in which it moves
    "BlockCache.fetch": "keys blocks",
    "BlockCache.keep": "keys blocks",
    "BlockCache.load": "keys blocks",
    "BlockCache.save": "path token_ids",
    "BlockCache.store": "keys blocks",
    "CacheIndex.restore": "keys entries requests",
    "GroupTransfer": "group blocks slots",
    "Mirror.expect": "direction blocks slots",
    "OffloadEngine.load": "slots blocks",
    "OffloadEngine.plan": "direction blocks slots",
    "OffloadEngine.store": "blocks slots",
    "OffloadEngine.submit": "direction blocks slots",
    "ShardedEngine.load": "slots blocks",
    "ShardedEngine.plan": "direction blocks slots",
    "ShardedEngine.store": "blocks slots",
    "ShardedEngine.submit": "direction blocks slots",
    "naive_transfer": "layout direction",
    # arrays and memory
    "Device.empty": "shape dtype",
    "Device.engines_over": "address nbytes",
    "OwnedCache": "devices shapes dtype",
    "SharedSlots": "num_slots slot_bytes",
    "pattern": "key nbytes",
    "scramble": "buffer seed",
    # one argument whose meaning the call says
    "Lease.slots": "group",
    "Reservation.slots": "group",
    "LRU": "capacity",
    "make_policy": "policy capacity",
    "MooncakeTier": "master",
    "ValkeyTier": "addresses",
    "nvtx_tracer": "domain",
    "open_device": "index",
    "SharedPool.attach": "path layout",
    "SharedPool.beside": "path engine processes",
    # what it is for, and that
    "FaultyTier": "faults",
    "Mirror": "engine buffers",
    "Profile.host_seconds": "copier shape",
    "Profile.limited_to": "link source",
    "Profile.seconds": "copier shape situation",
    "Profile.seconds_around": "copier shape",
    "RouterEvents.describe": "keys token_ids",
    "RouterEvents.removed": "keys medium",
    "RouterEvents.stored": "keys medium",
    "TierJob": "keys entries",
    "TierJob.settle": "positions outcomes",
    "TierJob.settle_waiting": "outcome positions",
    "check_copier_conformance": "device copiers",
    "register": "cache registry",
    # faults of the simulated driver
    "Faults.delay": "name seconds",
    "Faults.fail_call": "name nth",
    "Faults.fail_operation": "nth",
    "Faults.sticky": "at_call",
    # between the library's own classes
    "Device.adopt": "owner release what",
    "Device.check_stream_priority": "priority name",
    "Faults.next_call": "name args",
    "OffloadEngine.order_job_before": "record streams part",
    "OffloadEngine.submit_locked": "direction blocks slots",
    "OffloadEngine.when_done": "job callback",
    "ShardedEngine.order_job_before": "record streams part",
    "ShardedEngine.submit_locked": "direction blocks slots",
    "ShardedEngine.when_done": "job callback",
    "SharedPool.ask": "operation payload",
    "SharedPool.ask_slowly": "operation payload wait",
    "SharedPool.open": "engine recorder weights",
    "SharedPool.tell": "operation payload",
}


def test_only_obvious_data_goes_by_position() -> None:
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    calls = {
        name: [each for each in given if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
        for name, (_, given) in public_calls().items()
    }
    assert len(calls) > 250
    assert not {name for name, parameters in calls.items() if len(parameters) > 3}
    found = {
        name: " ".join(each.name for each in parameters)
        for name, parameters in calls.items()
        if len(parameters) > 1 or any(each.default is not each.empty for each in parameters)
    }
    waits = {name for name, given in found.items() if given == "timeout"}
    assert {name.partition(".")[2] for name in waits} == {"close", "drain", "synchronize", "wait"}
    assert {name: given for name, given in found.items() if name not in waits} == POSITIONAL


def test_a_group_by_position_is_refused_and_nothing_has_happened(device: kvoffload.Device) -> None:
    with rig(device) as bench:
        unchecked: Any = bench.engine
        before, slots = bench.engine.statistics(), bench.engine.slots.copy()
        for call in (unchecked.store, unchecked.load):
            with pytest.raises(TypeError, match="positional"):
                call([1], [0], 1)
        with pytest.raises(TypeError, match="positional"):
            unchecked.submit("store", [1], [0], 1)
        cache: Any = BlockCache(bench.engine)
        with pytest.raises(TypeError, match="positional"):
            cache.store([b"a"], [1], 1)
        assert bench.engine.statistics() == before
        assert bench.engine.submitted == len(cache) == 0
        assert (bench.engine.slots == slots).all()


def test_a_group_by_position_is_refused_on_several_devices() -> None:
    machine = Machine(groups=2, num_slots=4)
    unchecked: Any = machine.engine
    for call in (unchecked.store, unchecked.load):
        with pytest.raises(TypeError, match="positional"):
            call([1], [0], 1)
    assert machine.engine.submitted == 0
    machine.close()
