"""`kvoffload bench fleet`: several hosts, each with a pool and a disk, over one shared store; no bytes.

What the network would have to carry is computed, not measured. A request's reads and writes count at its timestamp, in
one moment: how they are spread over its prefill and decoding is not known without a GPU. So peaks are means of ten
seconds.
"""

from __future__ import annotations

import argparse
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvoffload.cache.policies import DEFAULT_POLICY, POLICIES
from kvoffload.cache.tiering.admission import DEFAULT_LEAST_HITS
from kvoffload.internal.models import ModelGeometry
from kvoffload.replay import command as replay
from kvoffload.replay.hits import Below, Disk, HostPool, make_writes
from kvoffload.replay.report import add_tokens_per_hash
from kvoffload.replay.trace import Request
from kvoffload.terminal.console import Advance, CommandError, Output, counted
from kvoffload.terminal.options import add_command, model, numbers, positive, whole

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
        policy: of every host and disk.
        write: what hosts write to disk and store: "admitted", "through", "second" or "none".
        routing: one of `ROUTINGS`.
        seed: of "random" routing.
    """

    slots: int
    disk_slots: int
    store_slots: int
    policy: str
    write: str
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
        blocks_written, blocks_evicted: of the store.
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
    blocks_written: int
    blocks_evicted: int
    one_host_hit_rate: float
    without_store_hit_rate: float
    seconds: float
    flow: Flow

    @property
    def hits(self) -> int:
        return self.host_hits + self.disk_hits + self.store_hits


class SharedStore:
    """A store of all hosts, which evicts the record that was written or read longest ago, as Valkey and Mooncake do.

    A key that it holds is not written again; neither that nor a use that the host pool serves makes its record newer.

    Attributes:
        keys: that it holds, the next one to be evicted first.
        num_slots: keys that it can hold.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.keys: OrderedDict[bytes, None] = OrderedDict()

    def read(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.keys.move_to_end(key)

    def write(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        taken = [key for key in keys if key not in self.keys]
        for key in taken:
            if len(self.keys) >= self.num_slots:
                self.keys.popitem(last=False)
            self.keys[key] = None
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
        held = {host: self._leading(host, keys) for host, load in enumerate(loads) if load <= most}
        longest = max(held.values())
        chosen = min((host for host, length in held.items() if length == longest), key=loads.__getitem__)
        self._loads = [load * self._fading for load in loads]
        self._loads[chosen] += len(keys) - longest
        return chosen


# the replay -----------------------------------------------------------------------------------------------------------


class Hosts:
    """The hosts of a fleet, empty, and their store.

    Attributes:
        indexes: by host. The tiers of each are its disk, if it has one, and then the store, if there is one.
        store: what all of them share; None: nothing.
    """

    def __init__(self, fleet: Fleet, count: int) -> None:
        self.store = SharedStore(fleet.store_slots) if fleet.store_slots else None
        self.indexes: list[HostPool] = []
        for _ in range(count):
            tiers: list[Below] = [Disk(fleet.disk_slots, fleet.policy)] if fleet.disk_slots else []
            tiers += [] if self.store is None else [self.store]
            below = max(1, sum(tier.num_slots for tier in tiers))
            writes = make_writes(fleet.write if tiers else "none", below, least_hits=DEFAULT_LEAST_HITS)
            self.indexes.append(HostPool(fleet.slots, fleet.policy, tiers, writes))
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
    by_prefix = fleet.routing == "prefix"
    routing = PrefixRouting(count, hosts.leading) if by_prefix else RandomRouting(count, fleet.seed)
    host_hits = disk_hits = 0
    flow = Flow([], [], [])
    begin = time.perf_counter()
    for number, request in enumerate(requests, start=1):
        chosen = routing.choose(request)
        served = hosts.indexes[chosen].serve(request)
        host_hits += served.hits[0]
        disk_hits += served.hits[1] if fleet.disk_slots else 0
        flow.hosts.append(chosen)
        flow.read.append(served.hits[-1] if hosts.store is not None else 0)
        flow.written.append(served.written[-1] if hosts.store is not None else 0)
        progress(number, len(requests))
    seconds = round(time.perf_counter() - begin, 3)
    store_hits, written = sum(flow.read), sum(flow.written)
    rate = (host_hits + disk_hits + store_hits) / max(1, sum(map(len, requests)))
    evicted = written - len(hosts.store.keys) if hosts.store is not None else 0
    return FleetResult(count, host_hits, disk_hits, store_hits, rate, written, evicted, rate, rate, seconds, flow)


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
    mean_gb_per_s: float | None = None
    peak_gb_per_s: float | None = None
    host_mean_gb_per_s: float | None = None
    host_peak_gb_per_s: float | None = None


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
    load = Load(read, written, both / max(1, len(flow.hosts)), 1000 * both / max(1, tokens))
    if seconds is None:
        return load
    in_window, of_host, of_host_in_window = (defaultdict[Any, int](int) for _ in range(3))
    for host, reads, writes, second in zip(flow.hosts, flow.read, flow.written, seconds, strict=True):
        window = int(second / WINDOW_SECONDS)
        in_window[window] += reads + writes
        of_host[host] += reads + writes
        of_host_in_window[host, window] += reads + writes
    gigabytes = block_bytes / 1e9
    return load._replace(
        mean_gb_per_s=gigabytes * (sum(in_window.values()) / seconds[-1]),
        peak_gb_per_s=gigabytes * (max(in_window.values()) / WINDOW_SECONDS),
        host_mean_gb_per_s=gigabytes * (max(of_host.values()) / seconds[-1]),
        host_peak_gb_per_s=gigabytes * (max(of_host_in_window.values()) / WINDOW_SECONDS),
    )


def delay_of(flow: Flow, seconds: Sequence[float] | None, block_bytes: int, gb_per_s: float) -> Delay:
    """How long reads of a store of that speed would have taken; writes do not delay them."""
    free = 0.0  # when the store has served what came before
    waits = []
    for number, reads in enumerate(flow.read):
        if reads:
            came = seconds[number] if seconds is not None else 0.0
            free = (max(free, came) if seconds is not None else 0.0) + reads * block_bytes / (gb_per_s * 1e9)
            waits.append(free - came)
    return Delay(len(waits), sum(waits) / max(1, len(waits)), max(waits, default=0.0))


# the command ----------------------------------------------------------------------------------------------------------

WRITES = ("through", "admitted", "second", "none")  # "random" needs the share of another replay
_TEXT = """\
Serves the requests of a trace (JSON lines with "hash_ids") by several hosts over one shared store, without bytes: \
hits by tier, and what the network between them would carry."""


def add_parser(benches: Any) -> None:
    parser = add_command(
        benches, "fleet", "hits of several hosts over one shared store", _TEXT, common="--json",
        example="bench fleet --workload chat --hosts 1,4 --store-slots 9000",
        usage="(TRACE | --workload NAME) [options]",
    )  # fmt: skip
    replay.add_traffic(parser, "workload and random routing")
    add = parser.add_argument
    hosts = "each number of hosts on its own"
    add("--hosts", type=lambda text: numbers(text, 1024), required=True, metavar="N[,N...]", help=hosts)
    add("--store-slots", type=whole(1), required=True, metavar="N", help="hash ids the store holds")
    add("--slots", type=whole(1), default=4096, metavar="N", help="of a host (default 4096)")
    policies = tuple(sorted(POLICIES))
    add("--policy", choices=policies, default=DEFAULT_POLICY, metavar="NAME", help=", ".join(policies))
    add("--disk-slots", type=whole(1), default=0, metavar="N", help="hash ids a host's disk holds (default: no disk)")
    add("--write", choices=WRITES, default=WRITES[0], metavar="NAME", help=", ".join(WRITES))
    add("--routing", choices=ROUTINGS, default=ROUTINGS[0], metavar="NAME", help=" or ".join(ROUTINGS))
    add("--model", type=model, metavar="NAME", help="whose blocks move; an unknown name lists all")
    add_tokens_per_hash(parser)
    add("--store-gb-per-s", type=positive, metavar="X", help="its speed; needs --model")
    add("--json", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Replay with hosts, and print the result."""
    output = Output(arguments.json)
    replay.check_traffic(arguments, "bench fleet")
    if arguments.store_gb_per_s is not None and arguments.model is None:
        raise CommandError("--store-gb-per-s needs --model: the bytes to read are its blocks'")
    trace = replay.read_requests(arguments, output)
    fleet = Fleet(*(getattr(arguments, name) for name in Fleet._fields))
    requested = sum(map(len, trace.requests))
    records = []
    for result in survey(trace.requests, fleet, list(dict.fromkeys(arguments.hosts)), output):
        record = result._asdict() | {"blocks_hit": result.hits, "misses": requested - result.hits}
        flow, load, delay = record.pop("flow"), None, None
        if arguments.model is not None:
            nbytes = block_bytes(arguments.model, arguments.tokens_per_hash)
            load = load_of(flow, trace.seconds, nbytes, arguments.tokens_per_hash * requested)._asdict()
            if arguments.store_gb_per_s is not None:
                delay = delay_of(flow, trace.seconds, nbytes, arguments.store_gb_per_s)._asdict()
        records.append(record | {"network": load, "delay": delay})
    traffic = replay.traffic_of(arguments)
    fields = {
        "benchmark": "fleet",
        **traffic,
        "requests": len(trace.requests),
        "blocks_requested": requested,
        "compulsory_misses": len({key for request in trace.requests for key in request}),
        "seconds_of_trace": None if trace.seconds is None else trace.seconds[-1],
        **fleet._asdict(),
        "model": None if arguments.model is None else arguments.model.name,
        "tokens_per_hash": arguments.tokens_per_hash,
        "store_gb_per_s": arguments.store_gb_per_s,
        "records": records,
    }
    output.result(fields)
    _print(fields, traffic["workload"] or arguments.trace.name, output)
    return 0


def block_bytes(model: ModelGeometry, tokens_per_hash: int) -> int:
    """Bytes of a key's blocks in all planes."""
    return tokens_per_hash * model.bytes_per_block // model.tokens_per_block


def verdict(fields: dict[str, Any]) -> str:
    """The hit rate of the most hosts, and that of one host with as much memory."""
    shown = max(fields["records"], key=lambda record: int(record["hosts"]))
    found, one, alone = (shown[name] for name in ("hit_rate", "one_host_hit_rate", "without_store_hit_rate"))
    finds = "finds" if shown["hosts"] == 1 else "find"
    return (
        f"bench fleet: {counted(shown['hosts'], 'host')} over a store of {fields['store_slots']:,} slots, routing "
        f"{fields['routing']}, {finds} {found:.2%} of the blocks asked for; one host with all their memory {one:.2%}, "
        f"without the store {alone:.2%}"
    )


def _print(fields: dict[str, Any], traffic: str, output: Output) -> None:
    records = fields["records"]
    output.line(verdict(fields))
    counts = ["hosts", "host_hits", "disk_hits", "store_hits", "misses", "blocks_written", "blocks_evicted"]
    rates = ("hit_rate", "one_host_hit_rate", "without_store_hit_rate")
    disk = f" and {fields['disk_slots']:,} on a disk" if fields["disk_slots"] else ""
    title = (
        f"{traffic}, {fields['blocks_requested']:,} blocks in {fields['requests']:,} requests; a host: "
        f"{fields['slots']:,} slots{disk}, policy {fields['policy']}"
    )
    rows = [[*(f"{each[name]:,}" for name in counts[:5]), *(f"{each[name]:.2%}" for name in rates)] for each in records]
    output.table(title, ["hosts", "pools", "disks", "store", "misses", "hit rate", "one host", "no store"], rows)
    rows = [[f"{each[name]:,}" for name in ("hosts", *counts[5:])] for each in records]
    output.table(f"the store, written {fields['write']}", ("hosts", "written", "evicted"), rows)
    if fields["model"] is not None:
        _print_network(fields, output)
    output.line("")
    output.line(
        f"Compulsory misses: {fields['compulsory_misses']:,}, blocks that no request had asked for before. one host: "
        "the hit rate of one host with the pools and disks of all, over the same store. no store: of that host alone."
    )


def _print_network(fields: dict[str, Any], output: Output) -> None:
    rows, delays = [], []
    for record in fields["records"]:
        load, delay, hosts = record["network"], record["delay"], f"{record['hosts']:,}"
        row = [hosts, *(f"{load[name] / 1e12:.2f} TB" for name in ("bytes_read", "bytes_written"))]
        row += [f"{load[name] / 1e6:,.1f}" for name in ("bytes_per_request", "bytes_per_1000_tokens")]
        rows.append([*row, *("-" if rate is None else f"{rate:,.2f}" for rate in list(load.values())[4:])])
        if delay is not None:
            seconds = (f"{delay[name]:,.3f} s" for name in ("mean_seconds", "most_seconds"))
            delays.append([hosts, f"{delay['requests']:,}", *seconds])
    title = f"what the network would carry: {fields['model']}, {fields['tokens_per_hash']} tokens a block"
    headings = ["hosts", "read", "written", "MB/req.", "MB/1k t.", "mean", "peak", "host mean", "host peak"]
    output.table(title, headings, rows)
    if fields["seconds_of_trace"] is None:
        output.line("The requests have no timestamps: no GB/s.")
    else:
        when = f"peak: the busiest {WINDOW_SECONDS:g} seconds; host: the busiest"
        output.line(f"In GB/s, at the trace's timestamps; {when}.")
    if delays:
        one = "one after the other" if fields["seconds_of_trace"] is not None else "each alone"
        title = f"how long reads would take, at {fields['store_gb_per_s']:g} GB/s as given, {one}"
        output.table(title, ("hosts", "requests that read", "mean delay", "longest delay"), delays)
