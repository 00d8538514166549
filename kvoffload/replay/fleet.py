"""`kvoffload replay --hosts N`: several hosts, each with a pool and a disk, over one shared store; no bytes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from kvoffload.replay.below import Below, Disk, SharedStore, StoreOfHost
from kvoffload.replay.routing import make_routing
from kvoffload.replay.tier_writes import make_writes
from kvoffload.replay.tiers import HostPool, Policies
from kvoffload.replay.trace import Request
from kvoffload.terminal.console import Advance, Output


class Fleet(NamedTuple):
    """What is replayed.

    Attributes:
        slots, disk_slots: keys that each host's pool and disk hold; 0: no disk.
        store_slots: keys that the shared store holds; 0: no store.
        policies: of every host and disk.
        write: what hosts write to what lies below them: "admitted", "through", "second" or "none".
        least_hits: of "admitted".
        routing: one of `ROUTINGS`.
        seed: of "random" routing.
    """

    slots: int
    disk_slots: int
    store_slots: int
    policies: Policies
    write: str
    least_hits: float
    routing: str
    seed: int


class Flow(NamedTuple):
    """What the network between hosts and store carried, by request, in the order of the requests.

    Attributes:
        hosts: which host served it.
        read, written: keys that it read from the store, and wrote to it.
    """

    hosts: list[int]
    read: list[int]
    written: list[int]


class FleetResult(NamedTuple):
    """What a fleet did with all the requests. Blocks are the cache's, one per key.

    Attributes:
        hosts: how many.
        host_hits, disk_hits, store_hits: leading blocks that were found, by where they were: in the pool of the host
            that served the request, on its disk, in the store.
        hit_rate: all three, of all blocks that were requested.
        read_of_others: blocks read from the store that another host had written.
        blocks_written, blocks_evicted: of the store.
        copies_avoided: blocks of hosts, each counted once a host, that a host would have written to a store of its own,
            and that another host had written to the shared one.
        disk_blocks_written: of all disks together.
        busiest_host: blocks requested of the host that was asked for most, over those of the mean host.
        one_host_hit_rate: of one host with the sum of the pools and of the disks, over the same store.
        without_store_hit_rate: of that host without a store.
        seconds: host time of this machine for all requests.
        flow: between hosts and store.
    """

    hosts: int
    host_hits: int
    disk_hits: int
    store_hits: int
    hit_rate: float
    read_of_others: int
    blocks_written: int
    blocks_evicted: int
    copies_avoided: int
    disk_blocks_written: int
    busiest_host: float
    one_host_hit_rate: float
    without_store_hit_rate: float
    seconds: float
    flow: Flow

    @property
    def hits(self) -> int:
        return self.host_hits + self.disk_hits + self.store_hits


class Hosts:
    """The hosts of a fleet, empty, and their store.

    Attributes:
        indexes: by host. The tiers of each are its disk, if it has one, and then the store, if there is one.
        store: what all of them share; None: nothing.
        clients: the store as each host sees it.
    """

    def __init__(self, fleet: Fleet, count: int) -> None:
        self.store = SharedStore(fleet.store_slots) if fleet.store_slots else None
        self.clients = [] if self.store is None else [StoreOfHost(self.store, number) for number in range(count)]
        self.indexes: list[HostPool] = []
        for number in range(count):
            tiers: list[Below] = [Disk(fleet.disk_slots, fleet.policies.disk)] if fleet.disk_slots else []
            tiers += self.clients[number : number + 1]
            below = max(1, sum(tier.num_slots for tier in tiers))
            writes = make_writes(fleet.write if tiers else "none", below, least_hits=fleet.least_hits)
            self.indexes.append(HostPool(fleet.slots, fleet.policies.host, tiers, writes))
        self._with_disk = bool(fleet.disk_slots)

    def leading(self, number: int, keys: Request) -> int:
        """How many leading keys a host holds, in its pool or on its disk."""
        index = self.indexes[number]
        own = (index.keys, index.tiers[0].keys) if self._with_disk else (index.keys,)
        for length, key in enumerate(keys):
            if not any(key in held for held in own):
                return length
        return len(keys)


def drive(requests: Sequence[Request], fleet: Fleet, count: int, progress: Advance) -> FleetResult:
    """All requests through an empty fleet. Rates of one host are the caller's."""
    hosts = Hosts(fleet, count)
    routing = make_routing(fleet.routing, count, fleet.seed, hosts.leading)
    host_hits = disk_hits = disk_written = 0
    flow = Flow([], [], [])
    asked = [0] * count
    with_store = hosts.store is not None
    begin = time.perf_counter()
    for number, request in enumerate(requests, start=1):
        chosen = routing.choose(request)
        served = hosts.indexes[chosen].serve(request)
        host_hits += served.hits[0]
        disk_hits += served.hits[1] if fleet.disk_slots else 0
        disk_written += served.written[0] if fleet.disk_slots else 0
        asked[chosen] += len(request)
        flow.hosts.append(chosen)
        flow.read.append(served.hits[-1] if with_store else 0)
        flow.written.append(served.written[-1] if with_store else 0)
        progress(number, len(requests))
    seconds = round(time.perf_counter() - begin, 3)
    store_hits, requested = sum(flow.read), max(1, sum(asked))
    rate = (host_hits + disk_hits + store_hits) / requested
    return FleetResult(
        hosts=count,
        host_hits=host_hits,
        disk_hits=disk_hits,
        store_hits=store_hits,
        hit_rate=rate,
        read_of_others=sum(each.read_of_others for each in hosts.clients),
        blocks_written=sum(flow.written),
        blocks_evicted=0 if hosts.store is None else hosts.store.evicted,
        copies_avoided=sum(len(each.not_copied) for each in hosts.clients),
        disk_blocks_written=disk_written,
        busiest_host=max(asked) * count / requested,
        one_host_hit_rate=rate,
        without_store_hit_rate=rate,
        seconds=seconds,
        flow=flow,
    )


def survey(requests: Sequence[Request], fleet: Fleet, counts: Sequence[int], output: Output) -> list[FleetResult]:
    """A result for each number of hosts, compared with one host that has the sum of the pools and disks."""
    results = []
    for count in counts:
        with output.progress(f"{count} hosts") as progress:
            found = drive(requests, fleet, count, progress)
        one = fleet._replace(slots=count * fleet.slots, disk_slots=count * fleet.disk_slots)
        if count > 1:
            with output.progress(f"one host with the pools of {count}") as progress:
                found = found._replace(one_host_hit_rate=drive(requests, one, 1, progress).hit_rate)
        with output.progress(f"one host with the pools of {count}, no store") as progress:
            alone = drive(requests, one._replace(store_slots=0), 1, progress)
        results.append(found._replace(without_store_hit_rate=alone.hit_rate))
    return results
