"""Runs the same public calls with two versions of the package and says where they first differ.

    python tests/support/compare_versions.py OLD NEW --rounds 200 --seed 7

OLD and NEW are folders with a `kvoffload` in them, such as two git worktrees. Each side runs in a process of its own
and prints a line for every call: its arguments, and what came of it (hits, digests of slots and device memory,
statistics, events, the type of an error). The lines are compared. A round is one engine, cache or index under random
calls, and depends on `--seed` and its number alone: `--only 17` repeats one. Nothing that depends on time is printed.

`--reseed 1` has the simulated GPUs of NEW execute in another order. With OLD on both sides, a difference is then a
mistake of this program: it has printed something that depends on the order.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import hashlib
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from helpers import STAGING

# What may have another name or place in one of the versions -----------------------------------------------------------


def either(*places: str) -> Any:
    """The first of "module:name" that this version has."""
    for place in places:
        module, name = place.split(":")
        try:
            return getattr(__import__(module, fromlist=[name]), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"none of {places}: say in the adapters where it is now")


def make_engine(layouts: list[Any], devices: list[Any], **options: Any) -> Any:
    if len(layouts) == 1:
        return either("kvoffload:OffloadEngine")(layouts[0], device=devices[0], **options)
    return either("kvoffload:ShardedEngine", "kvoffload:OffloadEngine")(layouts, devices=devices, **options)


def make_tiered_cache(engine: Any, tiers: list[Any], **options: Any) -> Any:
    return either("kvoffload:TieredCache", "kvoffload:BlockCache")(engine, tiers=tiers, **options)


def make_tiered_index(pools: list[Any], tiers: list[Any], **options: Any) -> Any:
    options |= {"tiers": tiers, "layout": bytes(16)}
    try:
        return either("kvoffload.tiering:TieredIndex")(pools, **options)
    except ImportError:
        return either("kvoffload:CacheIndex")(len(pools[0]), pools=pools, **options)


def make_tiers(chance: random.Random, folder: str, record: int) -> list[Any]:
    disk, memory = either("kvoffload.tiers:DiskTier"), either("kvoffload.tiers:MemoryTier")
    size, path = record * 40 + (1 << 20), Path(folder) / "records"
    try:
        one_thread = {"limits": either("kvoffload.tiers:Limits")(threads=1)}
    except ImportError:
        one_thread = {"threads": 1}
    makers: list[Callable[[], Any]] = [lambda: memory(record * 30, **one_thread)]
    makers += [lambda: disk(path, nbytes=size, identity="compare", direct=False, **one_thread)]
    return [make() for make in chance.choice([makers, makers[:1], makers[1:]])]


def make_requests(chance: random.Random) -> tuple[str, list[tuple[bytes, ...]]]:
    name = chance.choice(["agents", "change", "chat", "documents", "evaluation", "one-off"])
    return name, either("kvoffload.replay.workloads:make_workload")(name, 150, chance.randrange(1000))


RENAMED: dict[str, str] = {}  # fields of statistics and reports, and errors: OLD's name to NEW's
LEFT_OUT = {  # they depend on time, or on how often the driver was asked
    *("seconds", "residency_seconds", "seconds_per_record", "longest_call", "bounds", "held", "job_id", "copier"),
    *("streams", "streams_in_use", "events", "events_in_use"),
}

# What is printed ------------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """As JSON has it; the same for equal values in every process."""
    if isinstance(value, BaseException):
        return RENAMED.get(type(value).__name__, type(value).__name__)
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, dict):
        return {RENAMED.get(str(name), str(name)): plain(each) for name, each in value.items() if name not in LEFT_OUT}
    if isinstance(value, bytes | bytearray):
        return value.decode(errors="replace")
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float | str) else "object"


def digest(*arrays: Any) -> str:
    together = hashlib.blake2b(digest_size=8)
    for each in arrays:
        together.update(np.ascontiguousarray(each).tobytes())
    return together.hexdigest()


class Log:
    """Prints the steps of a round. Caches append to `events`; a step prints those that have come since the last."""

    def __init__(self, name: str, *, messages: bool) -> None:
        self._name, self._messages, self._numbers = name, messages, itertools.count()
        self._ordered = "tiered" not in name  # else the tiers' thread reports, at any time before a drain has returned
        self.events: list[Any] = []

    def note(self, call: Any, outcome: Any) -> None:
        line = {"round": self._name, "step": next(self._numbers), "call": plain(call), "outcome": plain(outcome)}
        if self._ordered or call == ["drain", (30,)]:
            events = [[each.kind, plain(each.keys), each.tenant] for each in self.events]
            self.events.clear()
            line |= {"events": events if self._ordered else sorted(events)} if events else {}
        print(json.dumps(line), flush=True)

    def do(self, call: Callable[..., Any], *arguments: Any, see: Any = (), **options: Any) -> Any:
        """Call it, print what came of it, and return that; None after an error. `see`: attributes, or a function."""
        said = [call.__name__, arguments, *([options] if options else [])]
        try:
            result = call(*arguments, **options)
        except Exception as error:
            self.note(said, [error, str(error)] if self._messages else error)
            return None
        self.note(said, see(result) if callable(see) else [getattr(result, each) for each in see] if see else result)
        return result


# Engines --------------------------------------------------------------------------------------------------------------


class Machine:
    """Simulated devices, planes of a random kind on each, an engine over them, and a stream of the caller's on each."""

    def __init__(self, chance: random.Random, seed: int, devices: int, *, groups: int, keys: int | None = None) -> None:
        import kvoffload
        from kvoffload.testing import SimulatedDriver

        levels: Any = [((13, 0), (13, 3)), ((12, 8), (12, 9)), ((12, 4), (13, 3)), ((13, 0), (13, 5))]
        driver, bindings = chance.choice(levels)
        self.simulator: Any = SimulatedDriver(
            seed=seed, device_count=devices, driver_version=driver, bindings_version=bindings
        )
        self.devices = [kvoffload.open_device(number, backend=self.simulator) for number in range(devices)]
        self.groups, self.factor, self.blocks = groups, chance.choice([1, 1, 2, 3]), chance.randint(21, 30)
        self.slots = chance.randint(4, 12) if keys is None else keys * groups
        block_major, same = chance.random() < 0.5, groups > 1 and chance.random() < 0.25
        self.planes, nbytes = chance.randint(1, 5), 16 * chance.randint(1, 9)
        described: Any = {"dtype": "uint8", "tokens_per_block": 4, "block_axes": ("tokens",)}
        described |= {"slot_order": chance.choice([None, None, "plane-major"]), "blocks_per_slot": self.factor}
        self.buffers: list[Any] = []
        layouts: list[Any] = []
        for device in self.devices:
            made = [
                device.allocate_blocks(self.blocks, planes=self.planes, block_bytes=nbytes * size)
                if block_major
                else device.allocate_planes(self.planes, block_bytes=nbytes * size, num_blocks=self.blocks)
                for size in range(1, 2 if same else groups + 1)
            ]
            self.buffers += [each[0].owner for each in made]
            layouts.append(kvoffload.KVLayout(made * (groups // len(made)), **described))
        self.kernels = chance.random() < 0.3
        limits: list[dict[str, Any]] = [{}, {"prefer": "latency"}, {"most_queued_bytes": 4096}, {"max_in_flight": 6}]
        options = chance.choice(limits)
        options |= {"num_slots": self.slots, "staging_bytes": STAGING if self.kernels else 0}
        self.engine = make_engine(layouts, self.devices, **options)
        self.pools = [self.engine.slots] if devices == 1 else list(self.engine.slots)
        memories: list[Any] = [*self.buffers, *self.pools]
        for number, memory in enumerate(memories):
            content = np.random.default_rng(number).integers(0, 256, memory.nbytes, dtype=np.uint8)
            if isinstance(memory, np.ndarray):
                memory[:] = content.reshape(memory.shape)
            else:
                memory.copy_from(content)
        self.streams = [device.stream() for device in self.devices]
        self.after = self.streams if devices > 1 else self.streams[0]
        self._word = make_engine(layouts[:1], self.devices[:1], num_slots=1)  # pinned memory that streams wait for
        self.gated = False

    def bytes(self) -> list[str]:
        return [digest(*self.pools), digest(*(buffer.to_numpy() for buffer in self.buffers))]

    def fill(self, value: int, following: Sequence[Any]) -> None:
        """Queue the writing of 16 bytes of the first device, after these jobs."""
        for job in following:
            job.order_before(self.after)
        with self.devices[0].current():
            start = value * 16 % (self.buffers[0].nbytes - 15)
            self.simulator.cuMemsetD8Async(self.buffers[0].address + start, value, 16, self.streams[0].handle)

    def close_gate(self) -> None:
        """Hold what is queued on the caller's streams from now on, until `open_gate`."""
        self.gated, self._word.slots[:4] = True, 0
        for device, stream in zip(self.devices, self.streams, strict=True):
            with device.current():
                self.simulator.cuStreamWaitValue32(stream.handle, self._word.slots.ctypes.data, 1, 0)

    def settle(self) -> None:
        """Open the gate, and wait until everything has ended."""
        self._word.slots[0, :4].view(np.uint32)[0] = 1
        self.gated = False
        self.simulator.run_all()
        for stream in self.streams:
            stream.synchronize(30)
        self.engine.drain(30)

    def end(self) -> None:
        self.settle()
        self.engine.close(30)
        self._word.close(30)
        for device in reversed(self.devices):
            device.close(30)


BAD_IDS: list[Any] = [[-1], [10**6], [0, 0], [1.5], "ab", None, [[0]], [True], [2**70], [0, 1, 2, 3]]
BAD: list[dict[str, Any]] = [
    *({name: each} for name in ("blocks", "slots") for each in BAD_IDS),
    *({"group": each} for each in (-1, 99, "a", 1.5)),
    *({"first_sub_block": each} for each in (-1, 3, "a")),
    *({"copier": each} for each in ("unknown", 3, "pack")),
    *({"after": each} for each in ("stream", -5, object(), [None, None, None])),
    *({"parts": each} for each in (0, -1, 10**6, [[0], [0]], "a")),
    *({"source_order": "never"}, {"urgent": 1}, {"direction": "up"}),
]


def engine_round(log: Log, chance: random.Random, seed: int, devices: int = 1) -> None:
    """Transfers and the caller's own work in bursts; bytes, results and statistics after each."""
    from kvoffload import GroupTransfer

    machine = Machine(chance, seed, devices, groups=chance.choice([1, 1, 2, 3]))
    engine, factor = machine.engine, machine.factor
    copiers = ["strided", "batch", "loop", None, *(["pack"] if machine.kernels else [])]

    def some(taken: Sequence[int] = ()) -> dict[str, Any]:
        free = [slot for slot in range(machine.slots) if slot not in taken]
        first = chance.randrange(factor)
        count = chance.randint(0, max(0, min(machine.blocks, len(free) * factor - first)))
        slots = chance.sample(free, -(-(first + count) // factor) if count else 0)
        return {"blocks": chance.sample(range(machine.blocks), count), "slots": slots, "first_sub_block": first}

    for _ in range(6):
        jobs: list[Any] = []
        for _ in range(chance.randint(1, 5)):
            ids, group, copier = some(), chance.randrange(machine.groups), chance.choice(copiers)
            options: dict[str, Any] = {"copier": copier, "after": machine.after}
            see = ["direction", "nbytes", "num_parts"]
            if copier is not None or not jobs:  # else it depends on what is still in flight
                see.append("copier")
            kind = chance.choice(["store", "load", "submit", "groups", "plan", "fill", "bad"])
            if kind in ("load", "submit"):
                options["source_order"] = chance.choice(["auto", "auto", "stream"])
                options["parts"] = None if copier == "pack" else chance.choice([None, None, 1, machine.planes])
            if kind in ("store", "load"):
                jobs.append(log.do(getattr(engine, kind), **ids, group=group, **options, see=see))
            elif kind == "submit":
                urgent = not jobs and chance.random() < 0.5
                jobs.append(log.do(engine.submit, "load", **ids, group=group, urgent=urgent, **options, see=see))
            elif kind == "groups":
                moved = [GroupTransfer(group, **ids), GroupTransfer((group + 1) % machine.groups, **some(ids["slots"]))]
                name = chance.choice(["store_groups", "load_groups"])
                jobs.append(log.do(getattr(engine, name), moved, **options, see=see))
            elif kind == "plan":
                direction = chance.choice(["store", "load"])
                log.do(engine.plan, direction, **ids, group=group, copier=copier, see=planned)
            elif kind == "fill":
                machine.fill(chance.randrange(256), [job for job in jobs if job is not None])
            else:
                good: dict[str, Any] = {"direction": "load", "blocks": [0], "slots": [0], "after": machine.after}
                log.do(engine.submit, **good | chance.choice(BAD), see=see[:3])
            jobs = [job for job in jobs if job is not None]
        for job in jobs[-1:] if chance.random() < 0.3 else []:
            log.do(job.wait, see=["direction", "nbytes", "error"])
        machine.settle()
        log.note("bytes", machine.bytes())
        log.do(
            engine.poll, see=lambda results: sorted([each.direction, each.nbytes, str(each.error)] for each in results)
        )
        log.do(engine.statistics)
    engine.close(30)
    log.do(engine.store, [0], [0])
    machine.end()


def planned(report: Any) -> Any:
    """A report, or one for each device; with its seconds, which are computed."""
    reports = [report] if hasattr(report, "seconds") else report
    return [[each, each.method and each.method.copier, f"{each.seconds:.9e}"] for each in reports]


# Caches ---------------------------------------------------------------------------------------------------------------

POLICIES = ["prefix", "lru", "arc", "s3fifo"]
RESERVED = ["keys", "positions", "indices", "evicted", "declined", "present", "short", "tenant", "stage"]
BAD_KEYS: list[Any] = ["abc", [1], None, [b"a", b"a"], ["a"], b"abc", [b""], [bytearray(b"a")]]


class Traffic:
    """Options of a cache, and requests to it: such that many share leading keys, as conversations do."""

    def __init__(self, chance: random.Random, log: Log) -> None:
        tenant, self.chance, self._tenants = either("kvoffload:Tenant"), chance, [""]
        self.options: dict[str, Any] = {"policy": chance.choice(POLICIES), "on_event": log.events.append}
        self.options |= chance.choice([{}, {}, {}, {"store_after": 1}, {"max_load_blocks": 4}])
        if chance.random() < 0.4:
            self._tenants += "abc"
            chosen = {"a": tenant(max_blocks=3), "b": tenant(priority=1), "c": tenant(priority=-1)}
            self.options["tenants"] = chosen

    def keys(self) -> list[bytes]:
        talk, length = self.chance.randrange(8), self.chance.randint(1, 7)
        return [b"%d-%d" % (talk if place > 1 else talk % 3, place) for place in range(length)]

    def tenant(self) -> str:
        return self.chance.choice(self._tenants)


def bookkeeping(log: Log, traffic: Traffic, cache: Any, opened: list[Any]) -> None:
    """One call that copies nothing. `opened`: reservations, leases and requests, which later calls end."""
    chance, keys, tenant = traffic.chance, traffic.keys(), traffic.tenant()
    kind = chance.choice(
        ["lookup", "lookup_many", "status", "touch", "reserve", "acquire", "open", "end", "end", "remove"]
    )
    if kind in ("lookup", "touch", "status"):
        log.do(getattr(cache, kind), keys)
    elif kind == "lookup_many":
        log.do(cache.lookup_many, [keys, traffic.keys()])
        log.do(cache.status_of, keys[-1])
    elif kind == "reserve":
        options = {"tenant": tenant, "all_or_nothing": chance.random() < 0.2}
        opened.append(log.do(cache.reserve, keys, **options, see=RESERVED))
    elif kind == "acquire":
        some = keys[: chance.randint(0, len(keys))]
        opened.append(log.do(cache.acquire, some, pending=chance.random() < 0.3, see=["indices", "pending"]))
    elif kind == "open":
        opened.append(log.do(cache.open_request, tenant=tenant, see=["keys", "ended"]))
    elif kind == "remove" and chance.random() < 0.5:
        log.do(cache.remove, keys[1:])
    elif kind == "end":
        each = chance.choice([*opened, None])
        for name in chance.sample(
            [name for name in ("commit", "abort", "release", "end") if hasattr(each, name)], 1 if each else 0
        ):
            log.do(getattr(each, name))
    below: list[Any] = getattr(
        cache, "tier_statistics", list
    )()  # of each tier; a cache without tiers has none, or no such call
    if below:  # `drain` waits for requests that have pending keys
        for each in [each for each in opened if hasattr(each, "abort")]:
            log.do(each.commit)
            opened.remove(each)
    if chance.random() < 0.1:
        call = getattr(cache, chance.choice(["lookup", "reserve", "acquire", "touch", "remove", "status"]))
        log.do(call, chance.choice(BAD_KEYS), see=bool)
        log.do(cache.reserve, [b"new"], tenant="nobody")
        log.do(cache.statistics)
        if chance.random() < 0.3 and not below:  # what is being written may be dropped, or not
            log.do(cache.clear)


def index_round(log: Log, chance: random.Random, _: int) -> None:
    """Bookkeeping alone."""
    traffic, opened, make = Traffic(chance, log), list[Any](), either("kvoffload:CacheIndex")
    index = make(chance.randint(0, 24), **traffic.options)
    for _ in range(40):
        keys = traffic.keys()
        if chance.random() < 0.4:
            hits = log.do(index.lookup, keys)
            log.do(index.load, keys[:hits])
            kept = log.do(index.reserve, keys, tenant=traffic.tenant(), see=RESERVED)
            if kept is not None:
                log.do(kept.commit)
            log.do(index.touch, keys)
        else:
            bookkeeping(log, traffic, index, opened)
    index.check()
    log.note("keys", sorted(index.keys))
    for wrong in ({"policy": "best"}, {"store_after": -1}, {"tenants": {"a": 3}}, {"max_load_blocks": 0}):
        log.do(make, 4, **wrong)


def drained(cache: Any) -> None:
    """Wait until tiers have what they are to have: until then entries are held for them."""
    if hasattr(cache, "drain"):
        cache.drain(30)


def copies(log: Log, machine: Machine, traffic: Traffic, cache: Any, *, steps: int) -> None:
    """Stores and loads. Behind a gate they are held, so that keys are pending, and slots in use, for several steps."""
    chance, opened, jobs = traffic.chance, list[Any](), list[Any]()

    def blocks(count: int) -> Any:
        lists = [chance.sample(range(machine.blocks), count * machine.factor) for _ in range(machine.groups)]
        return lists[0] if machine.groups == 1 else lists

    for _ in range(steps):
        kind, keys, job = (
            chance.choice(["store", "store", "load", "load", "gate", "fill", "self", "other", "other"]),
            traffic.keys(),
            None,
        )
        requests = [each for each in opened if hasattr(each, "ended")]
        options: dict[str, Any] = {"after": machine.after, "request": chance.choice([None, None, *requests])}
        if kind == "store":
            options |= {"tenant": traffic.tenant(), "all_or_nothing": chance.random() < 0.1}
            job = log.do(cache.store, keys, blocks(len(keys)), **options, see=["keys"])
        elif kind == "load":
            some = keys[: chance.choice([log.do(cache.lookup, keys) or 0, len(keys)])]
            options |= {"pending": chance.random() < 0.3, "parts": chance.choice([None, None, 1])}
            job = log.do(cache.load, some, blocks(len(some)), **options, see=["keys", "num_parts"])
        elif kind == "gate" and not machine.gated:
            machine.close_gate()
        elif kind == "gate":
            machine.settle()
            log.note("gate opened", [each.done for each in jobs])
        elif kind == "self" and not machine.gated:
            kept = log.do(cache.reserve, keys, see=RESERVED)
            if kept is not None and kept.keys:
                ids = list(range(machine.factor * len(kept.keys)))
                stored = [
                    machine.engine.store(ids, kept.slots(group), group=group, after=machine.after)
                    for group in range(machine.groups)
                ]
                log.do(kept.commit, *stored)
        elif kind == "fill":
            machine.fill(chance.randrange(256), jobs)
        elif kind == "other":
            bookkeeping(log, traffic, cache, opened)
        jobs += [] if job is None else [job]
        if not machine.gated:
            if job is not None:
                log.do(job.wait, 30, see=lambda results: [each.nbytes for each in results])
            machine.settle()
            drained(cache)
            log.note("bytes", machine.bytes())
    machine.settle()
    opened.clear()
    drained(cache)
    cache.check()
    log.note("at the end", [cache.statistics(), len(cache), machine.engine.statistics(), machine.bytes()])


def cache_round(log: Log, chance: random.Random, seed: int, devices: int = 1) -> None:
    """A BlockCache."""
    traffic, make = Traffic(chance, log), either("kvoffload:BlockCache")
    machine = Machine(chance, seed, devices, groups=chance.choice([1, 1, 2]), keys=chance.randint(0, 8))
    cache = make(machine.engine, **traffic.options)
    copies(log, machine, traffic, cache, steps=30)
    log.do(make, machine.engine)
    machine.engine.close(30)
    log.do(cache.lookup, [b"a"])
    log.do(cache.status, [b"a"])
    machine.end()


# Tiers ----------------------------------------------------------------------------------------------------------------


def tier_calls(log: Log, traffic: Traffic, cache: Any) -> None:
    """A call about the tiers, with everything that it has their thread do."""
    keys, kind = traffic.keys(), traffic.chance.choice(["promote", "promote", "promote", "locate", "remove", "bad"])
    if kind == "promote":
        promotion = log.do(cache.promote, keys, deadline=None, see=["keys"])
        log.do(promotion.wait, 30)
        log.do(cache.status, keys)
        promotion.release()
    elif kind == "bad":
        log.do(cache.promote, traffic.chance.choice(BAD_KEYS), see=bool)
        log.do(cache.promote, [b"a"], deadline=-1.0)
        log.do(cache.promote, [b"a"], tenant="nobody")
        log.do(cache.clear)
    else:
        log.do(getattr(cache, kind), keys)
    log.do(cache.drain, 30)
    log.do(cache.tier_statistics)


def tiered_round(log: Log, chance: random.Random, seed: int) -> None:
    """A cache over slots, with tiers below."""
    traffic, write = Traffic(chance, log), chance.choice(["through", "through", "none"])
    machine = Machine(chance, seed, chance.choice([1, 1, 2]), groups=chance.choice([1, 2]), keys=chance.randint(2, 8))
    record = sum(pool.shape[1] for pool in machine.pools) * machine.groups
    with tempfile.TemporaryDirectory() as folder:
        cache = make_tiered_cache(machine.engine, make_tiers(chance, folder, record), write=write, **traffic.options)
        for _ in range(8):
            copies(log, machine, traffic, cache, steps=2)
            tier_calls(log, traffic, cache)
        log.do(cache.close, 30)
        log.do(cache.promote, [b"a"])
        machine.end()


def tiered_index_round(log: Log, chance: random.Random, _: int) -> None:
    """An index over plain memory, with tiers below."""
    traffic, opened, write = Traffic(chance, log), list[Any](), chance.choice(["through", "through", "none"])
    raw = np.zeros(9 * 4096, np.uint8)
    pool = raw[-raw.ctypes.data % 4096 :][: 8 * 4096].reshape(8, 4096)
    with tempfile.TemporaryDirectory() as folder:
        index = make_tiered_index([pool], make_tiers(chance, folder, 4096), write=write, **traffic.options)
        for number in range(15):
            kept = log.do(index.reserve, traffic.keys(), see=RESERVED)
            if kept is not None:
                pool[list(kept.indices)] = number
                log.do(kept.commit)
            drained(index)
            bookkeeping(log, traffic, index, opened)
            drained(index)
            tier_calls(log, traffic, index)
            log.note("bytes", digest(pool))
        log.do(index.close, 30)


def replay_round(log: Log, chance: random.Random, _: int) -> None:
    """The hits of a synthetic workload with each policy."""
    (name, requests), capacity = make_requests(chance), chance.choice([100, 500, 2000])
    for policy in POLICIES:
        index, hits = either("kvoffload:CacheIndex")(capacity, policy=policy), list[int]()
        for request in requests:
            keys = list(dict.fromkeys(request[:capacity]))
            hits.append(index.lookup(keys))
            index.load(keys[: hits[-1]])
            index.reserve(keys).commit()
            index.touch(keys)
        log.note([name, policy, capacity], [sum(hits), digest(np.array(hits)), index.statistics()])


# Running and comparing ------------------------------------------------------------------------------------------------

KINDS: dict[str, Callable[[Log, random.Random, int], None]] = {
    "engine": engine_round,
    "index": index_round,
    "cache": cache_round,
    "sharded": lambda log, chance, seed: engine_round(log, chance, seed, devices=2),
    "tiered": tiered_round,
    "sharded cache": lambda log, chance, seed: cache_round(log, chance, seed, devices=2),
    "tiered index": tiered_index_round,
    "replay": replay_round,
}


def run(options: argparse.Namespace) -> None:
    """All rounds, with the version that this process imports."""
    for number in range(options.rounds) if options.only is None else [options.only]:
        kind, seed = list(KINDS)[number % len(KINDS)], options.seed * 1_000_003 + number
        log = Log(f"{number} {kind}", messages=options.messages)
        try:
            KINDS[kind](log, random.Random(seed), seed + options.reseed)
        except Exception as error:
            log.note("the round has broken off", [error, str(error)])


def start(root: Path, reseed: int, options: argparse.Namespace) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-W", "ignore", __file__, "-", "-", "--rounds", options.rounds]
    command += ["--seed", options.seed, "--reseed", reseed, *(["--messages"] if options.messages else [])]
    command += [] if options.only is None else ["--only", options.only]
    environment = {**os.environ, "PYTHONPATH": str(root.resolve())}
    return subprocess.Popen(list(map(str, command)), env=environment, stdout=subprocess.PIPE, text=True, cwd="/")


def by_round(lines: IO[str] | None) -> Iterator[tuple[str, list[str]]]:
    for name, each in itertools.groupby(lines or [], key=lambda line: json.loads(line)["round"]):
        yield name, list(each)


def compare(options: argparse.Namespace) -> int:
    rounds, steps, differ = Counter[str](), Counter[str](), Counter[str]()
    with start(options.old, 0, options) as old, start(options.new, options.reseed, options) as new:
        nothing: tuple[str, list[str]] = ("nothing", [])
        pairs = itertools.zip_longest(by_round(old.stdout), by_round(new.stdout), fillvalue=nothing)
        for (name, before), (_, after) in pairs:
            kind = name.partition(" ")[2]
            rounds[kind] += 1
            steps[kind] += len(before)
            if before != after:
                differ[kind] += 1
                if options.all or differ.total() == 1:
                    show(name, before, after)
    for kind in rounds:
        print(f"{kind:14} {rounds[kind]:5} rounds {steps[kind]:7} steps {differ[kind]:5} rounds that differ")
    print(f"exit codes: {old.returncode}, {new.returncode}")
    return int(bool(differ or old.returncode or new.returncode or not rounds))


def show(name: str, before: list[str], after: list[str]) -> None:
    pairs: list[tuple[str, str]] = list(itertools.zip_longest(before, after, fillvalue="nothing\n"))
    place = next(place for place, (one, other) in enumerate(pairs) if one != other)
    print(f"round {name} differs at step {place}; --only {name.split()[0]} repeats it")
    for line in before[max(0, place - 3) : place]:
        print("   both", line[:300].rstrip())
    print("   OLD ", pairs[place][0] + "   NEW ", pairs[place][1], end="")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help='"-": run the rounds in this process, and print their lines')
    parser.add_argument("new", type=Path)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="this round alone")
    parser.add_argument("--all", action="store_true", help="show the first difference of each round")
    parser.add_argument("--messages", action="store_true", help="compare the texts of errors, too")
    parser.add_argument("--reseed", type=int, default=0, help="is added to the seeds of NEW's simulated GPUs")
    options = parser.parse_args()
    if str(options.old) == "-":
        run(options)
        return 0
    return compare(options)


if __name__ == "__main__":
    sys.exit(main())
