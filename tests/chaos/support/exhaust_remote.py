"""Break the servers and connections of remote tiers in every known manner, many times, and compare every byte.

    python tests/chaos/support/exhaust_remote.py                          everything: half an hour on two cores
    python tests/chaos/support/exhaust_remote.py --only valkey --operations 100000 --seed 7

    valkey      one Valkey server
    cluster     three Valkey servers that are a cluster
    s3          SeaweedFS's S3 gateway
    mooncake    a Mooncake master and two store processes; the proxy is before the master

Servers are killed, paused and started again; proxies before them delay, cut, half-open and corrupt. It prints counts of
each, calls that took longer than their timeout allows, and what was wrong. Exit status 1 if anything was.
"""

from __future__ import annotations

import argparse
import logging
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

import chaos_remote
from exhausting import held, report, too_many
from faulty_proxy import FaultyProxy
from mooncake_servers import MooncakeServers, Settled
from proxy_process import ProxyProcess
from servers import ValkeyCluster, s3_options, seaweed, valkey

from kvoffload.tiers import MooncakeTier, ObjectStoreTier, Outcome, RemoteTier, ValkeyTier

KINDS = ("valkey", "cluster", "s3", "mooncake")
PER_MACHINE = 5_000  # operations
MOST_GROWTH = 64 << 20  # bytes of resident memory, after the first machine


class Timed:
    """How long calls of clients took, for tiers whose calls of that kind make one request each.

    Attributes:
        longest: seconds. overdue: calls that took more than 1.2 timeouts and 20 ms.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout, self.longest, self.overdue = timeout, 0.0, 0

    def around(self, tier: RemoteTier) -> RemoteTier:
        fetch = tier.fetch_parts

        def timed(names: Sequence[str], parts: Sequence[Any]) -> list[Outcome]:
            begun = time.monotonic()
            try:
                return fetch(names, parts)
            finally:
                seconds = time.monotonic() - begun
                self.longest = max(self.longest, seconds)
                self.overdue += seconds > max(1.2 * self.timeout, self.timeout + 0.02) * len(names)

        tier.fetch_parts = timed  # type: ignore[method-assign]
        return tier


@contextmanager
def valkey_machine(folder: Path, timed: Timed, seed: int) -> Iterator[chaos_remote.RemoteMachine]:
    with valkey(folder) as server, FaultyProxy(server.port, seed) as proxy:

        def make() -> RemoteTier:
            return timed.around(ValkeyTier(proxy.address, identity="chaos", timeout=timed.timeout))

        yield chaos_remote.RemoteMachine(make, [server], [proxy], seed)


@contextmanager
def cluster_machine(folder: Path, timed: Timed, seed: int) -> Iterator[chaos_remote.RemoteMachine]:
    """The nodes announce the ports of proxies, so that clients connect to these."""
    with ValkeyCluster(folder, proxies_seed=seed) as cluster:
        addresses = [proxy.address for proxy in cluster.proxies]

        def make() -> RemoteTier:
            return timed.around(ValkeyTier(addresses, cluster=True, identity="chaos", timeout=timed.timeout))

        machine = chaos_remote.RemoteMachine(make, cluster.nodes, cluster.proxies, seed)
        machine.corrupt_from = 1024  # while glide connects to a cluster, it waits for minutes for a damaged answer
        yield machine


@contextmanager
def s3_machine(folder: Path, timed: Timed, seed: int) -> Iterator[chaos_remote.RemoteMachine]:
    with seaweed(folder) as server, FaultyProxy(server.port, seed) as proxy:

        def make() -> RemoteTier:
            return timed.around(ObjectStoreTier(**s3_options(proxy.port), identity="chaos", timeout=timed.timeout))

        yield chaos_remote.RemoteMachine(make, [server], [proxy], seed)


@contextmanager
def mooncake_machine(folder: Path, timed: Timed, seed: int) -> Iterator[chaos_remote.RemoteMachine]:
    """Any of three processes is killed or paused."""
    with (
        MooncakeServers(folder, stores=2, store_bytes=16 << 20, lease=0.5) as servers,
        ProxyProcess(servers.master.port, seed) as proxy,
    ):

        def make() -> RemoteTier:
            return timed.around(MooncakeTier(proxy.address, identity="chaos", timeout=timed.timeout))

        killable = [Settled(servers, process) for process in (servers.master, *servers.stores)]
        yield chaos_remote.RemoteMachine(make, killable, [proxy], seed)


Make = Callable[[Path, Timed, int], Any]
MACHINES: dict[str, tuple[Make, float]] = {
    "valkey": (valkey_machine, 0.2),
    "cluster": (cluster_machine, 0.5),
    "s3": (s3_machine, 0.3),
    "mooncake": (mooncake_machine, 0.3),
}


def exhaust(kind: str, operations: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Several machines, one after the other."""
    make, timeout = MACHINES[kind]
    timed = Timed(timeout)
    counts, wrong = Counter[str](), list[str]()
    before: Counter[str] | None = None
    while counts["operations"] < operations and not wrong:
        with tempfile.TemporaryDirectory(prefix="kvoffload-") as folder, make(Path(folder), timed, seed) as machine:
            try:
                counts.update(machine.run(min(PER_MACHINE, operations - counts["operations"])))
            except AssertionError as error:
                wrong.append(f"machine of seed {seed}: {error}")
        now = held()
        before = before or now  # the first machine loads the clients
        more = {f"{name} more": now[name] - before[name] for name in now}
        wrong += too_many(more, {"threads": 0, "descriptors": 0, "resident": MOST_GROWTH}, "more")
        seed += 1
    counts["calls overdue"] = timed.overdue
    counts["longest call, ms"] = round(1000 * timed.longest)
    counts["resident at most, MiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return counts, wrong


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=KINDS, help="may be repeated; all by default")
    parser.add_argument("--operations", type=int, default=20_000, help="of each, counted in keys")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    failed = False
    for kind in options.only or KINDS:
        begun = time.monotonic()
        counts, wrong = exhaust(kind, options.operations, options.seed)
        failed |= report(f"{kind}, {time.monotonic() - begun:.0f} s, timeout {MACHINES[kind][1]} s", counts, wrong)
    return int(failed)


if __name__ == "__main__":
    logging.getLogger("kvoffload").setLevel(logging.CRITICAL)  # of this process alone: tests call `main`, too
    sys.exit(main())
