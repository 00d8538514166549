"""What may go by position: the obvious data of a call, at most three arguments. The rest goes by name alone.

An argument that a caller may leave out goes by name: nobody should have to look up what `engine.store([1], [0], 1)`
does. POSITIONAL has the calls that take two arguments or more by position, and the few that take one that may be left
out: a new one is argued for and added there, or gets its `*`.
"""

from __future__ import annotations

import enum
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers import rig
from sharding import Machine

import kvoffload
from kvoffload import BlockCache
from kvoffload.cache.policies import Policy
from kvoffload.testing import SimulatedDriver
from kvoffload.tiers import RemoteTier, ThreadedTier, Tier

MODULES = (
    "kvoffload",
    "kvoffload.cache.policies",
    "kvoffload.jax",
    "kvoffload.observability.prometheus",
    "kvoffload.observability.router_events",
    "kvoffload.testing",
    "kvoffload.tiering",
    "kvoffload.tiers",
    "kvoffload.tuning",
)

POSITIONAL = {
    # the data of a transfer, in the direction in which it moves
    "BlockCache.load": "keys blocks",
    "BlockCache.store": "keys blocks",
    "TieredCache.store": "keys blocks",
    "CacheIndex.restore": "keys entries requests",
    "CallbackCache.load": "engine slots blocks",
    "CallbackCache.store": "engine blocks slots",
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
    "StagedCache.load": "engine slots blocks",
    "StagedCache.store": "engine blocks slots",
    "naive_transfer": "layout direction",
    # arrays and memory
    "AdoptedCache": "device array",
    "CallbackCache": "device array",
    "Device.empty": "shape dtype",
    "Device.engines_over": "address nbytes",
    "OffloadEngine.touches": "address nbytes",
    "OwnedCache": "device shape dtype",
    "ShardedOwnedCache": "devices shape dtype",
    "SharedSlots": "num_slots slot_bytes",
    "StagedCache": "device array",
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
    # what it is for, and that
    "CopyMethod": "copier programs share",
    "FaultyTier": "faults",
    "Mirror": "engine buffers",
    "Profile.host_seconds": "method shape",
    "Profile.limited_to": "link source",
    "Profile.seconds": "method shape situation",
    "Profile.seconds_around": "method shape",
    "Profile.split_share": "shape programs",
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
    "CacheIndex.abort_after": "record jobs",
    "CacheIndex.commit_after": "record jobs",
    "Device.adopt": "owner release what",
    "Device.check_stream_priority": "priority name",
    "Faults.next_call": "name args",
    "OffloadEngine.order_job_before": "transfer stream part",
    "OffloadEngine.when_done": "job callback",
    "ShardedEngine.order_job_before": "record streams part",
    "ShardedEngine.when_done": "job callback",
}

USERS_IMPLEMENT = (Policy, RemoteTier, ThreadedTier, Tier)
"""A user's subclass has their methods with the same arguments, so these are exempt; so are Protocols. (`kvoffload.vllm`
is not among the modules: vLLM prescribes its signatures.)"""

ONLY_THE_LIBRARY_MAKES = {
    *("Batch", "CacheEvent", "CacheJob", "CacheRequest", "CacheStatistics", "CacheTierStatistics", "ChainedLoad"),
    *("ConformanceCase", "Deviation", "Device", "DeviceArray", "DeviceBuffer", "FuzzReport", "HostCosts"),
    *("IndexPromotion", "Job", "Lease", "Origin", "PlanReport", "Profile", "ProfileKey", "Promotion", "Reservation"),
    *("Room", "Shape", "ShardedJob", "Stream", "TransferResult"),
}
"""Handles and records whose constructors are no calls of a user's."""


def public_calls() -> Iterator[tuple[str, list[inspect.Parameter]]]:
    """Functions, constructors and methods, each once, with the parameters that may go by position."""
    public: dict[type, str] = {}
    for module in map(importlib.import_module, MODULES):
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        for name in getattr(module, "__all__", own):
            found = getattr(module, name)
            if inspect.isfunction(found) and not name.startswith("_"):
                yield name, by_position(found)
            elif (
                inspect.isclass(found)
                and not name.startswith("_")
                and not issubclass(found, BaseException | enum.Enum | SimulatedDriver)
            ):
                public.setdefault(found, name)
    for found, name in public.items():
        if getattr(found, "_is_protocol", False):
            continue
        if name not in ONLY_THE_LIBRARY_MAKES:
            yield name, by_position(found)
        yield from methods_of(found, name, public)


def methods_of(found: type, name: str, public: dict[type, str]) -> Iterator[tuple[str, list[inspect.Parameter]]]:
    """Those that are not inherited from another public class, nor for users to implement."""
    for method in dir(found):
        origin = next(each for each in found.__mro__ if method in vars(each))
        inherited = origin.__module__ == "builtins" or (origin is not found and origin in public)
        implemented = any(hasattr(each, method) for each in USERS_IMPLEMENT if each in found.__mro__)
        if method.startswith("_") or inherited or implemented:
            continue
        function = inspect.getattr_static(found, method)
        if inspect.isfunction(function):
            yield f"{name}.{method}", by_position(function)[1:]
        elif isinstance(function, classmethod | staticmethod):
            yield f"{name}.{method}", by_position(getattr(found, method))


def by_position(function: Callable[..., Any]) -> list[inspect.Parameter]:
    parameters = inspect.signature(function).parameters.values()
    return [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]


def test_only_obvious_data_goes_by_position() -> None:
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    calls = dict(public_calls())
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
