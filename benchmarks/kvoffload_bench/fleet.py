"""`kvoffload bench fleet`: several hosts, each with a pool and a disk, over one shared store; no bytes.

What the network would have to carry is computed, not measured. A request's reads and writes count at its timestamp, in
one moment: how they are spread over its prefill and decoding is not known without a GPU. So peaks are means of ten
seconds.
"""

from __future__ import annotations

import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kvoffload.replay.hits import Below, Disk, HostPool, Policies, make_writes
from kvoffload.replay.trace import Request
from kvoffload.terminal.console import Advance, Output

ROUTINGS = ("random", "prefix")
WINDOW_SECONDS = 10.0
_BOUND = 1.25  # times the mean load: more than that, and a host gets no request
_REQUESTS_A_HOST = 32  # after so many the load of a request counts 1/e

Leading = Callable[[int, Request], int]
"""How many leading keys of a request a host holds, by its number."""


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


# the store ------------------------------------------------------------------------------------------------------------


class SharedStore:
    """A store of all hosts, which evicts the record that was written or read longest ago, as Valkey and Mooncake do.

    A key that it holds is not written again; neither that nor a use that the host pool serves makes its record newer.

    Attributes:
        writers: the keys that it holds, the next one to be evicted first, and the number of the host that wrote each.
        num_slots: keys that it can hold.
        evicted: records that it has evicted.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.writers: OrderedDict[bytes, int] = OrderedDict()
        self.evicted = 0


class StoreOfHost:
    """The shared store as one host sees it.

    Attributes:
        read_of_others: keys that this host has read and another host had written.
        not_copied: different keys that this host has read, or chosen to write, and another host had written: in a store
            of its own it would have written each.
    """

    def __init__(self, store: SharedStore, host: int) -> None:
        self._store, self._host = store, host
        self.num_slots = store.num_slots
        self.keys = store.writers
        self.read_of_others = 0
        self.not_copied: set[bytes] = set()

    def read(self, keys: Sequence[bytes]) -> None:
        foreign = [key for key in keys if self.keys[key] != self._host]
        self.read_of_others += len(foreign)
        self.not_copied.update(foreign)
        for key in keys:
            self.keys.move_to_end(key)

    def write(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        writers, store = self.keys, self._store
        taken = [key for key in keys if key not in writers]
        self.not_copied.update(key for key in keys if writers.get(key, self._host) != self._host)
        for key in taken:
            if len(writers) >= store.num_slots:
                writers.popitem(last=False)
                store.evicted += 1
            writers[key] = self._host
        return taken

    def touch(self, keys: Sequence[bytes]) -> None: ...


# which host serves a request ------------------------------------------------------------------------------------------


class RandomRouting:
    """Every host is equally likely."""

    def __init__(self, hosts: int, seed: int) -> None:
        self._hosts = hosts
        self._random = np.random.default_rng(seed)

    def choose(self, keys: Request) -> int:  # noqa: ARG002
        """The number of the host that serves the request."""
        return int(self._random.integers(self._hosts))


class PrefixRouting:
    """The host that holds the longest leading part of the request, of those that are not overloaded.

    The router knows at once what pools and disks of all hosts hold, as a router does that follows their events. The
    load of a host is the blocks that its latest requests asked for and that it did not hold, those of older requests
    counting less. A host whose load is above 1.25 times the mean gets no request ("Consistent Hashing with Bounded
    Loads", Mirrokni, Thorup and Zadimoghaddam, SODA 2018): else the host that is first to hold what all requests begin
    with would get them all. Of hosts that hold as much, the one with the least load is chosen.
    """

    def __init__(self, hosts: int, leading: Leading) -> None:
        self._leading = leading
        self._loads = [0.0] * hosts
        self._fading = 1 - 1 / (_REQUESTS_A_HOST * hosts)

    def choose(self, keys: Request) -> int:
        """The number of the host that serves the request."""
        loads = self._loads
        most = _BOUND * sum(loads) / len(loads)
        free = [host for host, load in enumerate(loads) if load <= most]
        held = [self._leading(host, keys) for host in free]
        longest = max(held)
        chosen = min(
            (host for host, length in zip(free, held, strict=True) if length == longest), key=loads.__getitem__
        )
        self._loads = [load * self._fading for load in loads]
        self._loads[chosen] += len(keys) - longest
        return chosen


def make_routing(name: str, hosts: int, seed: int, leading: Leading) -> RandomRouting | PrefixRouting:
    """What `--routing` names."""
    return RandomRouting(hosts, seed) if name == "random" else PrefixRouting(hosts, leading)


# the replay -----------------------------------------------------------------------------------------------------------


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


# the network ----------------------------------------------------------------------------------------------------------


class Load(NamedTuple):
    """Bytes between hosts and store, and how fast they would have to move.

    Attributes:
        bytes_read, bytes_written: from the store, and to it.
        bytes_per_request: both, of the mean request.
        bytes_per_1000_tokens: both, for 1,000 tokens of prompts.
        mean_gb_per_s, peak_gb_per_s: both, of all hosts, over the whole trace and in the busiest ten seconds. None, as
            the next two, without timestamps.
        host_mean_gb_per_s, host_peak_gb_per_s: of the host that has moved most over the whole trace, and of the
            busiest host and ten seconds.
    """

    bytes_read: int
    bytes_written: int
    bytes_per_request: float
    bytes_per_1000_tokens: float
    mean_gb_per_s: float | None
    peak_gb_per_s: float | None
    host_mean_gb_per_s: float | None
    host_peak_gb_per_s: float | None


class Delay(NamedTuple):
    """How long requests would have waited for their reads, at a store's speed.

    Attributes:
        requests: that read from the store.
        mean_seconds, most_seconds: from a request's timestamp until its last byte is there, the store serving reads one
            after the other at its full speed; without timestamps each alone.
    """

    requests: int
    mean_seconds: float
    most_seconds: float


def load_of(flow: Flow, seconds: Sequence[float] | None, block_bytes: int, tokens: int) -> Load:
    """What the network carries.

    Args:
        flow: of a fleet, in blocks.
        seconds: when each request came; None: not known.
        block_bytes: of a key.
        tokens: of all prompts.
    """
    read, written = block_bytes * sum(flow.read), block_bytes * sum(flow.written)
    both = read + written
    means = (both / max(1, len(flow.hosts)), 1000 * both / max(1, tokens))
    if seconds is None:
        return Load(read, written, *means, None, None, None, None)
    in_window: dict[int, int] = defaultdict(int)
    of_host: dict[int, int] = defaultdict(int)
    of_host_in_window: dict[tuple[int, int], int] = defaultdict(int)
    for host, reads, writes, second in zip(flow.hosts, flow.read, flow.written, seconds, strict=True):
        window = int(second / WINDOW_SECONDS)
        in_window[window] += reads + writes
        of_host[host] += reads + writes
        of_host_in_window[host, window] += reads + writes
    rates = (
        sum(in_window.values()) / seconds[-1],
        max(in_window.values()) / WINDOW_SECONDS,
        max(of_host.values()) / seconds[-1],
        max(of_host_in_window.values()) / WINDOW_SECONDS,
    )
    return Load(read, written, *means, *(block_bytes * rate / 1e9 for rate in rates))


def delay_of(flow: Flow, seconds: Sequence[float] | None, block_bytes: int, gb_per_s: float) -> Delay:
    """How long reads of a store of that speed would have taken; writes do not delay them."""
    free = 0.0  # when the store has served what came before
    waits = []
    for number, reads in enumerate(flow.read):
        if not reads:
            continue
        begin = max(free, seconds[number]) if seconds is not None else 0.0
        free = begin + reads * block_bytes / (gb_per_s * 1e9)
        waits.append(free - (seconds[number] if seconds is not None else 0.0))
    return Delay(len(waits), sum(waits) / max(1, len(waits)), max(waits, default=0.0))
