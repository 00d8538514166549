"""`kvoffload bench fleet`: its options, and what it prints: hits by tier, and what the network carries."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from kvoffload.cache.policies import DEFAULT_POLICY, POLICIES
from kvoffload.cache.tiering.admission import DEFAULT_LEAST_HITS
from kvoffload.internal.models import ModelGeometry
from kvoffload.replay import command as replay
from kvoffload.replay import saving
from kvoffload.replay.hits import Policies
from kvoffload.replay.trace import Trace
from kvoffload.terminal.console import CommandError, Output, counted
from kvoffload.terminal.options import add_command, model, numbers, whole
from kvoffload_bench.fleet import ROUTINGS, WINDOW_SECONDS, Fleet, FleetResult, delay_of, load_of, survey

WRITES = ("through", "admitted", "second", "none")  # "random" needs the share of another replay
_MOST_HOSTS = 1024
_TEXT = """\
Serves the requests of a trace (JSON lines with "hash_ids") by several hosts over one shared store, without bytes: \
hits by tier, and what the network between them would carry."""


def add_parser(benches: Any) -> None:
    parser = add_command(
        benches,
        "fleet",
        "hits of several hosts over one shared store",
        _TEXT,
        example="bench fleet --workload chat --hosts 1,4 --store-slots 9000",
        common="--json",
        usage="(TRACE | --workload NAME) [options]",
    )
    replay.add_traffic(parser, "workload and random routing")
    parser.add_argument(
        "--hosts", type=_hosts, required=True, metavar="N[,N...]", help="each number of hosts on its own"
    )
    parser.add_argument("--store-slots", type=whole(1), required=True, metavar="N", help="hash ids the store holds")
    parser.add_argument("--slots", type=whole(1), default=4096, metavar="N", help="of a host (default 4096)")
    policies = tuple(sorted(POLICIES))
    parser.add_argument("--policy", choices=policies, default=DEFAULT_POLICY, metavar="NAME", help=", ".join(policies))
    parser.add_argument(
        "--disk-slots", type=whole(1), metavar="N", help="hash ids a host's disk holds (default: no disk)"
    )
    parser.add_argument(
        "--disk-policy", choices=policies, metavar="NAME", help=f"of the disks (default {DEFAULT_POLICY})"
    )
    parser.add_argument("--write", choices=WRITES, default=WRITES[0], metavar="NAME", help=", ".join(WRITES))
    parser.add_argument(
        "--least-hits",
        type=saving.not_negative,
        default=DEFAULT_LEAST_HITS,
        metavar="X",
        help=f"reads that a write has to bring, of admitted (default {DEFAULT_LEAST_HITS})",
    )
    parser.add_argument("--routing", choices=ROUTINGS, default=ROUTINGS[0], metavar="NAME", help=" or ".join(ROUTINGS))
    parser.add_argument("--model", type=model, metavar="NAME", help="whose blocks move; an unknown name lists all")
    saving.add_tokens_per_hash(parser)
    parser.add_argument("--store-gb-per-s", type=saving.positive, metavar="X", help="its speed; needs --model")
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def _hosts(text: str) -> list[int]:
    return numbers(text, _MOST_HOSTS)


def run(arguments: argparse.Namespace) -> int:
    """Replay with hosts, and print the result."""
    output = Output(arguments.json)
    replay.check_traffic(arguments, "bench fleet")
    if arguments.disk_policy is not None and arguments.disk_slots is None:
        raise CommandError("--disk-policy is of no use without --disk-slots: give that, too")
    if arguments.store_gb_per_s is not None and arguments.model is None:
        raise CommandError("--store-gb-per-s needs --model: the bytes to read are its blocks'")
    trace = replay.read_requests(arguments, output)
    fleet = Fleet(
        slots=arguments.slots,
        disk_slots=arguments.disk_slots or 0,
        store_slots=arguments.store_slots,
        policies=Policies(arguments.policy, arguments.disk_policy or DEFAULT_POLICY),
        write=arguments.write,
        least_hits=arguments.least_hits,
        routing=arguments.routing,
        seed=arguments.seed,
    )
    requested = sum(map(len, trace.requests))
    compulsory = len({key for request in trace.requests for key in request})
    results = survey(trace.requests, fleet, list(dict.fromkeys(arguments.hosts)), output)
    records = [_record(result, trace, arguments) | {"misses": requested - result.hits} for result in results]
    traffic = replay.traffic_of(arguments)
    fields = {
        "benchmark": "fleet",
        **traffic,
        "requests": len(trace.requests),
        "blocks_requested": requested,
        "compulsory_misses": compulsory,
        "seconds_of_trace": None if trace.seconds is None else trace.seconds[-1],
        **fleet._asdict(),
        "policies": None,
        "policy": fleet.policies.host,
        "disk_policy": fleet.policies.disk,
        "model": None if arguments.model is None else arguments.model.name,
        "tokens_per_hash": arguments.tokens_per_hash,
        "store_gb_per_s": arguments.store_gb_per_s,
        "records": records,
    }
    del fields["policies"]
    output.result(fields)
    name = traffic["workload"] or arguments.trace.name
    _print(fields, f"{name}, {requested:,} blocks in {len(trace.requests):,} requests", output)
    return 0


def _record(result: FleetResult, trace: Trace, arguments: argparse.Namespace) -> dict[str, Any]:
    """For JSON, of one number of hosts."""
    fields = result._asdict() | {"blocks_hit": result.hits, "blocks_read": result.store_hits}
    del fields["flow"]
    if arguments.model is None:
        return fields | {"network": None, "delay": None}
    tokens = arguments.tokens_per_hash * sum(map(len, trace.requests))
    nbytes = block_bytes(arguments.model, arguments.tokens_per_hash)
    delay = None
    if arguments.store_gb_per_s is not None:
        delay = delay_of(result.flow, trace.seconds, nbytes, arguments.store_gb_per_s)._asdict()
    return fields | {"network": load_of(result.flow, trace.seconds, nbytes, tokens)._asdict(), "delay": delay}


def block_bytes(model: ModelGeometry, tokens_per_hash: int) -> int:
    """Bytes of a key's blocks in all planes."""
    return tokens_per_hash * model.bytes_per_block // model.tokens_per_block


# printing -------------------------------------------------------------------------------------------------------------


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
    per_host = f"{fields['slots']:,} slots" + (
        f" and {fields['disk_slots']:,} on a disk" if fields["disk_slots"] else ""
    )
    _print_hits(records, f"{traffic}; a host: {per_host}, policy {fields['policy']}", output)
    _print_store(records, f"the store, written {fields['write']}", output)
    if fields["model"] is not None:
        _print_network(fields, output)
    output.line("")
    output.line(
        f"Compulsory misses: {fields['compulsory_misses']:,}, blocks that no request had asked for before. one host: "
        "the hit rate of one host with the pools and disks of all, over the same store. no store: of that host alone. "
        "from others: read, and written by another host. copies avoided: what hosts would have written to a store of "
        "their own, and another host has written. busiest: blocks asked of the busiest host, over the mean host's."
    )


def _print_hits(records: Sequence[dict[str, Any]], title: str, output: Output) -> None:
    names = ["hosts", "host_hits", "disk_hits", "store_hits", "misses"]
    headings = ["hosts", "pools", "disks", "store", "misses", "hit rate", "one host", "no store", "busiest"]
    rows = [
        [
            *(f"{record[name]:,}" for name in names),
            *(f"{record[name]:.2%}" for name in ("hit_rate", "one_host_hit_rate", "without_store_hit_rate")),
            f"{record['busiest_host']:.2f}",
        ]
        for record in records
    ]
    output.table(title, headings, rows)


def _print_store(records: Sequence[dict[str, Any]], title: str, output: Output) -> None:
    names = ("hosts", "blocks_read", "read_of_others", "copies_avoided", "blocks_written", "blocks_evicted")
    headings = ("hosts", "read", "from others", "copies avoided", "written", "evicted")
    output.table(title, headings, [[f"{record[name]:,}" for name in names] for record in records])


def _print_network(fields: dict[str, Any], output: Output) -> None:
    loads = [record["network"] for record in fields["records"]]
    headings = ["hosts", "read", "written", "MB/req.", "MB/1k t.", "mean", "peak", "host mean", "host peak"]
    rows = [
        [
            f"{record['hosts']:,}",
            *(f"{load[name] / 1e12:.2f} TB" for name in ("bytes_read", "bytes_written")),
            *(f"{load[name] / 1e6:,.1f}" for name in ("bytes_per_request", "bytes_per_1000_tokens")),
            *map(_rate, list(load.values())[4:]),
        ]
        for record, load in zip(fields["records"], loads, strict=True)
    ]
    title = f"what the network would carry: {fields['model']}, {fields['tokens_per_hash']} tokens a block"
    output.table(title, headings, rows)
    if fields["seconds_of_trace"] is None:
        output.line("The requests have no timestamps: no GB/s.")
    else:
        output.line(
            f"In GB/s, at the trace's timestamps; peak: the busiest {WINDOW_SECONDS:g} seconds; host: the busiest."
        )
    _print_delays(fields, output)


def _rate(gb_per_s: float | None) -> str:
    return "-" if gb_per_s is None else f"{gb_per_s:,.2f}"


def _print_delays(fields: dict[str, Any], output: Output) -> None:
    speed = fields["store_gb_per_s"]
    if speed is None:
        return
    rows = [
        [
            f"{record['hosts']:,}",
            f"{record['delay']['requests']:,}",
            f"{record['delay']['mean_seconds']:,.3f} s",
            f"{record['delay']['most_seconds']:,.3f} s",
        ]
        for record in fields["records"]
    ]
    one = "one after the other" if fields["seconds_of_trace"] is not None else "each alone"
    title = f"how long reads would take, at {speed:g} GB/s as given, {one}"
    output.table(title, ("hosts", "requests that read", "mean delay", "longest delay"), rows)
