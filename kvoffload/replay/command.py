"""`kvoffload replay`: a trace through the cache, every byte of every load verified, or without bytes."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvoffload.cache.policies import DEFAULT_POLICY, POLICIES
from kvoffload.device.device import Device
from kvoffload.replay import hitplot, metadata, saving, tier_report
from kvoffload.replay.trace import Request, Trace, read_timed_trace, require_readable
from kvoffload.replay.verified import Counts, VerifiedCache
from kvoffload.replay.workloads import DEFAULT_REQUESTS, WORKLOADS, make_workload
from kvoffload.terminal.console import CommandError, Output, bandwidth, counted, mib, open_backend, verified_text
from kvoffload.terminal.options import COMMON, add_command, add_common_options, add_seed, model, numbers, scale, whole
from kvoffload.tiers import Tier

_MOST_IN_FLIGHT = 256  # an engine has room for so many with several groups, too
_TEXT = """\
Serves the requests of a trace (JSON lines with "hash_ids"), and verifies every loaded byte. With --metadata-only no \
bytes move: hit rates alone."""


def add_parser(commands: Any) -> None:
    parser = add_command(
        commands,
        "replay",
        "hit rates of a trace, every byte verified",
        _TEXT,
        example="replay trace.jsonl --metadata-only --policy all --slots 2048",
        common=f"--wide, {COMMON}",
        usage="(TRACE | --workload NAME) [options]",
    )
    add_traffic(parser, "workload, bytes and places")
    _add_cache(parser)
    _add_bytes(parser)
    saving.add_options(parser)
    parser.add_argument("--wide", action="store_true", help=argparse.SUPPRESS)
    add_common_options(parser)
    parser.set_defaults(run=run)


def add_traffic(parser: argparse.ArgumentParser, seeded: str) -> None:
    """The options for a trace or a workload, and for the seed of what `seeded` names."""
    traffic = parser.add_mutually_exclusive_group()  # one is required: see check_traffic
    traffic.add_argument("trace", type=Path, nargs="?", metavar="TRACE", help=argparse.SUPPRESS)
    traffic.add_argument(
        "--workload", choices=tuple(WORKLOADS), metavar="NAME", help="synthetic traffic; unknown: lists all"
    )
    parser.add_argument(
        "--requests",
        type=whole(1, 10_000_000),
        metavar="N",
        help=f"at most (default: all, of a workload {DEFAULT_REQUESTS})",
    )
    add_seed(parser, seeded)


def _add_cache(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--slots", type=numbers, default=[4096], metavar="N[,N...]", help="hash ids the cache holds (default 4096)"
    )
    policies = (*sorted(POLICIES), "all")
    parser.add_argument("--policy", choices=policies, default=DEFAULT_POLICY, metavar="NAME", help=", ".join(policies))
    parser.add_argument("--metadata-only", action="store_true", help="count hits only: no bytes, no device")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="hit rates, with --metadata-only")
    tier_report.add_options(parser)


def _add_bytes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=model, metavar="NAME", help="whose blocks move; an unknown name lists all")
    parser.add_argument(
        "--scale", type=scale, default=1.0, metavar="X", help="shrink blocks to X of their bytes, 0 < X <= 1"
    )
    parser.add_argument(
        "--blocks-per-hash", type=whole(1), default=1, metavar="N", help="device blocks of a hash id (default 1)"
    )
    parser.add_argument("--in-flight", type=whole(1), default=1, metavar="N", help="requests at a time (default 1)")


def run(arguments: argparse.Namespace) -> int:
    """Replay; 0 if every loaded byte was right, else 1."""
    output = Output(arguments.json, wide=arguments.wide)
    _check(arguments)
    if arguments.metadata_only:
        return _without_bytes(arguments, output)
    saving.rates(arguments, measures=arguments.backend != "simulated")  # before the trace is read
    requests = read_requests(arguments, output).requests
    with open_backend(arguments, output, arguments.seed) as device:
        rates = saving.rates(arguments, measures=not device.simulated)
        if device.simulated and arguments.scale == 1:
            output.note("kvoffload: the simulated device copies with the CPU; --scale 0.01 makes it quick")
        fields = _with_bytes(arguments, requests, device, output)
        if rates is not None and not device.simulated:
            rates = replace(rates, load_gb_per_s=fields["load_gb_per_s"], measured=True)
        fields["saving"] = None if rates is None else rates.fields | rates.fields_of(fields["blocks_hit"])
    output.result(fields)
    _print(fields, rates, output)
    return 1 if fields["corrupt_blocks"] else 0


def check_traffic(arguments: argparse.Namespace, command: str) -> None:
    """Refuse a command without a trace or a workload, and a trace that cannot be read."""
    if arguments.trace is not None:
        require_readable(arguments.trace)
    elif arguments.workload is None:
        raise CommandError(f"{command} needs a TRACE, a file, or --workload, one of {', '.join(WORKLOADS)}")


def _check(arguments: argparse.Namespace) -> None:
    """Refuse a trace that cannot be read, and options that do not go together, or are missing."""
    check_traffic(arguments, "replay")
    tier_report.check(arguments)
    if arguments.metadata_only:
        if arguments.in_flight != 1:
            raise CommandError(f"--in-flight {arguments.in_flight} needs bytes: leave out --metadata-only")
        if arguments.plot is not None:
            hitplot.require(arguments.plot)
        return
    if arguments.model is None:
        raise CommandError("--model is needed: its blocks are what moves (or use --metadata-only)")
    if len(arguments.slots) > 1 or arguments.policy == "all":
        given = "--policy all" if arguments.policy == "all" else f"--slots {','.join(map(str, arguments.slots))}"
        raise CommandError(f"{given} needs --metadata-only: one cache at a time is filled with bytes")
    if arguments.plot is not None:
        raise CommandError("--plot needs --metadata-only: it draws hits by policy and slots")
    if arguments.in_flight > _MOST_IN_FLIGHT:
        raise CommandError(f"--in-flight must be at most {_MOST_IN_FLIGHT}, got {arguments.in_flight}")


def read_requests(arguments: argparse.Namespace, output: Output) -> Trace:
    """At least one request, with at least one key.

    Raises:
        CommandError: the trace cannot be read, or its requests name no blocks.
    """
    with output.progress("reading requests"):
        if arguments.workload is not None:
            requests = make_workload(arguments.workload, arguments.requests or DEFAULT_REQUESTS, arguments.seed)
            return Trace(requests, None)
        trace = read_timed_trace(arguments.trace, arguments.requests)
    if not any(trace.requests):
        count = len(trace.requests)
        empty = f'has {count:,} requests with empty "hash_ids" alone' if count else "has no requests"
        raise CommandError(f'the trace {arguments.trace} {empty}: a request is a line such as {{"hash_ids": [1, 2]}}')
    return trace


def traffic_of(arguments: argparse.Namespace) -> dict[str, Any]:
    trace = None if arguments.trace is None else str(arguments.trace)
    return {"trace": trace, "workload": arguments.workload, "seed": arguments.seed}


# without bytes --------------------------------------------------------------------------------------------------------


def _without_bytes(arguments: argparse.Namespace, output: Output) -> int:
    rates = saving.rates(arguments, measures=False)
    trace = read_requests(arguments, output)
    requests = trace.requests
    if arguments.disk_slots is not None:
        tier_report.run(arguments, requests, rates, traffic_of(arguments), output)
        return 0
    blocks = sum(map(len, requests))
    policies = sorted(POLICIES) if arguments.policy == "all" else [arguments.policy]
    results = metadata.survey(requests, list(dict.fromkeys(arguments.slots)), policies, output)
    traffic = arguments.workload or arguments.trace.name
    output.result(
        {
            "metadata_only": True,
            **traffic_of(arguments),
            "requests": len(requests),
            "blocks_requested": blocks,
            "saving": None if rates is None else rates.fields,
            "records": metadata.as_fields(results, rates),
        }
    )
    size = f"{counted(blocks, 'block')} in {counted(len(requests), 'request')}"
    title = f"replay without bytes: {traffic}, {size}"
    metadata.print_results(results, title, rates, output)
    if arguments.plot is not None:
        title = f"Prefix-cache hits: {traffic}, {size}"
        with output.progress("drawing"):
            hitplot.draw(results, requests, title, arguments.plot)
        output.path(arguments.plot)
    return 0


# with bytes -----------------------------------------------------------------------------------------------------------


def _with_bytes(
    arguments: argparse.Namespace, requests: Sequence[Request], device: Device, output: Output
) -> dict[str, Any]:
    """Serve all requests; the fields of the result."""
    with tier_report.disk_below(arguments) as make_tier:
        return _serve(arguments, requests, device, output, make_tier)


def _serve(
    arguments: argparse.Namespace,
    requests: Sequence[Request],
    device: Device,
    output: Output,
    make_tier: Callable[[int], Tier] | None,
) -> dict[str, Any]:
    begin = time.perf_counter()
    with output.progress("pinning the pool") as progress:
        served = VerifiedCache(
            device,
            arguments.model.scaled(arguments.scale),
            capacity=arguments.slots[0],
            longest=max((len(request) for request in requests), default=0),
            blocks_per_key=arguments.blocks_per_hash,
            policy=arguments.policy,
            in_flight=arguments.in_flight,
            seed=arguments.seed,
            make_tier=make_tier,
            write=arguments.write or "admitted",
            progress=progress,
        )
    with served:
        serving = time.perf_counter()
        with output.progress("requests") as progress:
            served.serve_all(requests, progress)
        end = time.perf_counter()
        served.cache.check()
        fields = {
            "metadata_only": False,
            "simulated": device.simulated,
            "device": device.name,
            **traffic_of(arguments),
            "model": arguments.model.name,
            "policy": arguments.policy,
            "slots": arguments.slots[0],
            "scale": arguments.scale,
            "blocks_per_hash": arguments.blocks_per_hash,
            "in_flight": arguments.in_flight,
            "bytes_per_slot": served.bytes_per_key,
            **_counted(served),
            **tier_report.counts_with_bytes(served),
            "blocks_beyond_slots": sum(max(0, len(request) - arguments.slots[0]) for request in requests),
            "seconds": round(end - begin, 3),
            "serving_seconds": round(end - serving, 3),
        }
        if not device.simulated:
            fields |= _bandwidths(served.counts, end - serving)
        return fields


def _counted(served: VerifiedCache) -> dict[str, Any]:
    counts = served.counts
    microseconds = 1e6 * np.array(counts.call_seconds or [0.0])
    return {
        "requests": counts.requests,
        "requests_refused": counts.requests_refused,
        "blocks_requested": counts.blocks_requested,
        "blocks_hit": counts.blocks_hit,
        "hit_rate": counts.blocks_hit / counts.blocks_requested if counts.blocks_requested else 0.0,
        "blocks_stored": counts.blocks_stored,
        "blocks_evicted": served.blocks_evicted,
        "blocks_declined": served.blocks_declined,
        "bytes_stored": counts.bytes_stored,
        "bytes_loaded": counts.bytes_loaded,
        "verified_blocks": counts.verified_blocks,
        "sampled_blocks": counts.sampled_blocks,
        "corrupt_blocks": counts.corrupt_blocks,
        "call_us_mean": round(float(microseconds.mean()), 1),
        "call_us_p99": round(float(np.percentile(microseconds, 99)), 1),
    }


def _bandwidths(counts: Counts, wall_seconds: float) -> dict[str, Any]:
    """On the GPU's clock, where transfers that overlap count as long as each, and by the time that passed."""
    return {
        "store_gb_per_s": bandwidth(counts.bytes_stored, counts.store_seconds),
        "load_gb_per_s": bandwidth(counts.bytes_loaded, counts.load_seconds),
        "store_gb_per_wall_s": bandwidth(counts.bytes_stored, wall_seconds),
        "load_gb_per_wall_s": bandwidth(counts.bytes_loaded, wall_seconds),
    }


def _print(fields: dict[str, Any], rates: saving.Rates | None, output: Output) -> None:
    output.line(
        f"replay: {fields['blocks_hit']:,} of {fields['blocks_requested']:,} blocks found (hit rate "
        f"{fields['hit_rate']:.2%}); " + verified_text(fields["verified_blocks"], fields["corrupt_blocks"])
    )
    where = "simulated device" if fields["simulated"] else fields["device"]
    slots = f"{counted(fields['slots'], 'slot')} of {mib(fields['bytes_per_slot'])}"
    title = f"{fields['model']}, policy {fields['policy']}, {slots}, {where}"
    lines = [*_counts(fields), *_times(fields)]
    lines += [] if rates is None else _saved(rates, fields["blocks_hit"])
    output.table(title, ("what", "how much"), lines)
    if fields["in_flight"] > 1:
        output.line("A block may also be stored for another request meanwhile, or be found, evicted and stored again.")
    if rates is not None:
        output.line(f"Of {rates.tokens_per_hash} tokens a block: {rates.describe()}.")


def _counts(fields: dict[str, Any]) -> list[tuple[str, str]]:
    """With one request at a time, the indented lines add up to the blocks asked for."""
    beyond = fields["blocks_beyond_slots"]
    return [
        ("requests", f"{fields['requests']:,}, {fields['in_flight']} unfinished at a time"),
        ("requests not stored, or in part", f"{fields['requests_refused']:,}"),
        ("blocks asked for", f"{fields['blocks_requested']:,}"),
        ("  found and loaded", f"{fields['blocks_hit']:,} ({mib(fields['bytes_loaded'])})"),
        *tier_report.lines_with_bytes(fields)[:1],
        ("  not found: stored", f"{fields['blocks_stored']:,} ({mib(fields['bytes_stored'])})"),
        ("  not found: not worth storing", f"{fields['blocks_declined']:,}"),
        *([(f"  beyond the first {fields['slots']:,} of a request", f"{beyond:,}")] if beyond else []),
        ("stored blocks evicted for others", f"{fields['blocks_evicted']:,}"),
        *tier_report.lines_with_bytes(fields)[1:],
        (
            "loaded blocks verified, every byte",
            f"{fields['verified_blocks']:,} ({fields['sampled_blocks']:,} also plane by plane)",
        ),
        ("  of them corrupt", f"{fields['corrupt_blocks']:,}"),
    ]


def _times(fields: dict[str, Any]) -> list[tuple[str, str]]:
    calls = f"mean {fields['call_us_mean']:,} us, p99 {fields['call_us_p99']:,} us"
    if fields["simulated"]:
        return [
            ("inside cache calls, a request, host time", calls),
            ("host seconds, simulated device", f"{fields['seconds']:.1f}"),
        ]
    lines = [
        ("inside cache calls, a request, host time", calls),
        ("wall seconds, verification included", f"{fields['seconds']:.1f}"),
    ]
    for name in ("store", "load"):
        lines.append((f"{name}s, GPU clock", f"{fields[f'{name}_gb_per_s']} GB/s"))
        lines.append((f"{name}s, wall clock, verification included", f"{fields[f'{name}_gb_per_wall_s']} GB/s"))
    return lines


def _saved(rates: saving.Rates, hits: int) -> list[tuple[str, str]]:
    seconds = rates.load_seconds(hits)
    return [
        ("prefill not computed again", f"{rates.prefill_seconds(hits):,.1f} s"),
        (f"loading it instead, {mib(rates.load_bytes(hits))}", "-" if seconds is None else f"{seconds:,.1f} s"),
    ]
