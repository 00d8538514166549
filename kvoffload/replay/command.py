"""`kvoffload replay`: a trace through the cache, every byte of every load verified, or without bytes."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvoffload.cache.policies import DEFAULT_POLICY, POLICIES
from kvoffload.device.device import Device
from kvoffload.layout.coding import CODECS
from kvoffload.layout.layout import KVLayout
from kvoffload.layout.planes import Plane
from kvoffload.replay import hitplot
from kvoffload.replay.hits import HINTS, WRITES
from kvoffload.replay.report import Rates, add_options, report
from kvoffload.replay.report import rates as rates_of
from kvoffload.replay.trace import Request, Trace, read_timed_trace, require_readable
from kvoffload.replay.verified import VerifiedCache
from kvoffload.replay.workloads import DEFAULT_REQUESTS, WORKLOADS, make_workload
from kvoffload.terminal.console import CommandError, Output, bandwidth, counted, mib, open_backend, verified_text
from kvoffload.terminal.options import (
    COMMON,
    add_command,
    add_common_options,
    add_seed,
    model,
    not_negative,
    numbers,
    positive,
    scale,
    whole,
)
from kvoffload.tiers import DiskTier
from kvoffload.tiers.format import HEADER_BYTES, TABLE_OFFSET

_MOST_IN_FLIGHT = 256  # an engine has room for so many with several groups, too
_NEED_A_DISK = ("disk_path", "disk_policy", "disk_gb_per_s", "write", "least_hits")
_WITHOUT_BYTES = ("least_hits", "disk_policy", "disk_gb_per_s")
_DRAIN_SECONDS = 60.0
_FILE_OVERHEAD = TABLE_OFFSET + 8192  # what rounding takes
_TEXT = """\
Serves the requests of a trace (JSON lines with "hash_ids"), and verifies every loaded byte. With --metadata-only \
nothing is copied: it counts hits."""


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
    add = parser.add_argument
    add_traffic(parser, "workload, bytes and places")
    add("--slots", type=numbers, default=[4096], metavar="N[,N...]", help="hash ids the cache holds (default 4096)")
    policies = (*sorted(POLICIES), "all")
    add("--policy", choices=policies, default=DEFAULT_POLICY, metavar="NAME", help=", ".join(policies))
    add("--metadata-only", action="store_true", help="count hits only: no bytes, no device")
    add("--codec", choices=CODECS, default="raw", metavar="NAME", help="also the slots of a codec in the same memory")
    hints = (*HINTS, "all")
    add("--hints", choices=hints, default="none", metavar="NAME", help=f"what sessions tell: {', '.join(hints)}")
    add("--plot", type=Path, metavar="FILE.png", help="hit rates, with --metadata-only")
    on_disk = parser.add_argument_group("a disk below the cache").add_argument  # None tells `_check` what was not given
    on_disk("--disk-slots", type=numbers, metavar="N[,N...]", help="hash ids the disk holds")
    on_disk("--disk-path", type=Path, metavar="FOLDER", help="where its file is made, with bytes; removed at the end")
    writes = (*WRITES, "all")
    on_disk("--write", choices=writes, metavar="NAME", help=f"{', '.join(writes)} (default: all; with bytes: admitted)")
    reads = "reads that a write must bring (default 0.22)"
    on_disk("--least-hits", type=not_negative, metavar="X", help=reads)
    on_disk("--disk-policy", choices=policies[:-1], metavar="NAME", help=", ".join(policies[:-1]))
    on_disk("--disk-gb-per-s", type=positive, metavar="X", help="its speed, to compute the time saved")
    add("--model", type=model, metavar="NAME", help="whose blocks move; an unknown name lists all")
    add("--scale", type=scale, default=1.0, metavar="X", help="shrink blocks to X of their bytes, 0 < X <= 1")
    add("--blocks-per-hash", type=whole(1), default=1, metavar="N", help="device blocks per hash id (default 1)")
    add("--in-flight", type=whole(1), default=1, metavar="N", help="unfinished requests at a time (default 1)")
    add_options(parser)
    add("--wide", action="store_true", help=argparse.SUPPRESS)
    add_common_options(parser)
    parser.set_defaults(run=run)


def add_traffic(parser: argparse.ArgumentParser, seeded: str) -> None:
    """Add the options for a trace or a workload, and `--seed` for the things that `seeded` names."""
    traffic = parser.add_mutually_exclusive_group()  # one is required: see `check_traffic`
    traffic.add_argument("trace", type=Path, nargs="?", metavar="TRACE", help=argparse.SUPPRESS)
    names = tuple(WORKLOADS)
    traffic.add_argument("--workload", choices=names, metavar="NAME", help="synthetic traffic; unknown: lists all")
    most = f"how many (default: all; {DEFAULT_REQUESTS} of a workload)"
    parser.add_argument("--requests", type=whole(1, 10_000_000), metavar="N", help=most)
    add_seed(parser, seeded)


def run(arguments: argparse.Namespace) -> int:
    output = Output(arguments.json, wide=arguments.wide)
    _check(arguments)
    rates = rates_of(arguments, measures=not arguments.metadata_only and arguments.backend != "simulated")
    trace, traffic = read_requests(arguments, output), traffic_of(arguments)
    if arguments.hints != "none" and (trace.seconds is None or trace.sessions is None):
        raise CommandError(
            f'--hints {arguments.hints} needs a trace whose lines all have a "session", and a "timestamp" in '
            "milliseconds that never falls: it counts hits at these times"
        )
    if arguments.metadata_only:
        coded = {} if arguments.codec == "raw" else coded_slots(arguments)
        arguments.slots = sorted({*arguments.slots, *coded.values()}) if coded else arguments.slots
        report(arguments, trace, rates, traffic, output)
        for raw, more in coded.items():
            output.line(f"codec {arguments.codec}: in the memory of {raw:,} slots there is room for {more:,}.")
        return 0
    with open_backend(arguments, arguments.seed) as device:
        rates = rates_of(arguments, measures=not device.simulated)
        if device.simulated and arguments.scale == 1:
            output.note("kvoffload: the simulated device copies with the CPU; --scale 0.01 makes it quick")
        with _disk(arguments) as make_tier:
            fields = traffic | _serve(arguments, trace.requests, device, output, make_tier)
        if rates is not None and not device.simulated:
            rates = replace(rates, load_gb_per_s=fields["load_gb_per_s"], measured=True)
        fields["saving"] = None if rates is None else rates.fields | rates.fields_of(fields["blocks_hit"])
    output.result(fields)
    _print(fields, rates, output)
    return 1 if fields["corrupt_blocks"] else 0


def coded_slots(arguments: argparse.Namespace) -> dict[int, int]:
    """Return, for each number of slots, how many with --codec lie in the same memory, padded to whole pages."""
    model, name = arguments.model, arguments.codec
    starts = range(1 << 20, (1 << 20) + model.planes_per_group[0] * model.block_bytes, model.block_bytes)
    planes = [Plane(start, block_bytes=model.block_bytes, num_blocks=1) for start in starts]
    raw, coded = (
        KVLayout([planes], blocks_per_slot=arguments.blocks_per_hash, codec=codec).slot_bytes for codec in ("raw", name)
    )
    return {slots: slots * raw // coded for slots in arguments.slots}


def check_traffic(arguments: argparse.Namespace, command: str) -> None:
    if arguments.trace is not None:
        require_readable(arguments.trace)
    elif arguments.workload is None:
        raise CommandError(f"{command} needs a TRACE, a file, or --workload, one of {', '.join(WORKLOADS)}")


def _check(arguments: argparse.Namespace) -> None:
    check_traffic(arguments, "replay")
    _check_disk(arguments)
    if arguments.hints != "none" and not arguments.metadata_only:
        raise CommandError(f"--hints {arguments.hints} needs --metadata-only: only hits are counted by session")
    if arguments.hints != "none" and arguments.disk_slots is not None:
        raise CommandError(f"--hints {arguments.hints} does not go with --disk-slots: it counts hits of one tier")
    if arguments.codec != "raw" and (not arguments.metadata_only or arguments.model is None):
        raise CommandError(f"--codec {arguments.codec} needs --metadata-only and --model: it counts hits of its slots")
    if arguments.metadata_only:
        if arguments.in_flight != 1:
            raise CommandError(f"--in-flight {arguments.in_flight} needs bytes: leave out --metadata-only")
        if arguments.plot is not None:
            hitplot.require(arguments.plot)
        return
    if arguments.model is None:
        raise CommandError("--model is needed: its blocks are copied (or use --metadata-only)")
    if len(arguments.slots) > 1 or arguments.policy == "all":
        given = "--policy all" if arguments.policy == "all" else f"--slots {','.join(map(str, arguments.slots))}"
        raise CommandError(f"{given} needs --metadata-only: one cache at a time is filled with bytes")
    if arguments.plot is not None:
        raise CommandError("--plot needs --metadata-only: it draws hits by policy and slots")
    if arguments.in_flight > _MOST_IN_FLIGHT:
        raise CommandError(f"--in-flight must be at most {_MOST_IN_FLIGHT}, got {arguments.in_flight}")


def _check_disk(arguments: argparse.Namespace) -> None:
    def refuse_any(names: Sequence[str], why: str) -> None:
        for name in names:
            if getattr(arguments, name) is not None:
                raise CommandError(f"--{name.replace('_', '-')} {why}")

    if arguments.disk_slots is None:
        refuse_any(_NEED_A_DISK, "is of no use without --disk-slots: give that, too")
        return
    if arguments.metadata_only:
        refuse_any(("disk_path",), "is of no use with --metadata-only: no bytes are written")
    else:
        folder = arguments.disk_path
        if folder is None:
            raise CommandError("--disk-slots needs --disk-path, the folder of its file, or --metadata-only")
        if not folder.is_dir():
            raise CommandError(f"--disk-path {folder}: there is no such folder; create it, or give another one")
        if len(arguments.disk_slots) > 1:
            given = ",".join(map(str, arguments.disk_slots))
            raise CommandError(f"--disk-slots {given} needs --metadata-only: one disk at a time is filled with bytes")
        if arguments.write in ("second", "random", "all"):
            raise CommandError(
                f"--write {arguments.write} needs --metadata-only: with bytes, admitted, through or none"
            )
        refuse_any(_WITHOUT_BYTES, "needs --metadata-only")
    if arguments.policy == "all":
        raise CommandError("--policy all does not go with --disk-slots: name one policy for the host")
    refuse_any(("plot",), "does not go with --disk-slots: it draws hits of one tier")
    if arguments.prefill_tokens_per_second is None:
        refuse_any(("disk_gb_per_s",), "is of no use without --prefill-tokens-per-second: give that, too")


def traffic_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of JSON that say where the requests come from."""
    trace = None if arguments.trace is None else str(arguments.trace)
    return {"trace": trace, "workload": arguments.workload, "seed": arguments.seed}


def read_requests(arguments: argparse.Namespace, output: Output) -> Trace:
    """Read the trace, or make the workload. CommandError if there is no request with a key."""
    with output.progress("reading requests"):
        if arguments.workload is not None:
            requests = make_workload(arguments.workload, arguments.requests or DEFAULT_REQUESTS, arguments.seed)
            return Trace(requests)
        trace = read_timed_trace(arguments.trace, arguments.requests)
    if not any(trace.requests):
        count = len(trace.requests)
        empty = f'has {count:,} requests, all with empty "hash_ids"' if count else "has no requests"
        raise CommandError(f'the trace {arguments.trace} {empty}: a request is a line such as {{"hash_ids": [1, 2]}}')
    return trace


# with bytes -----------------------------------------------------------------------------------------------------------


@contextmanager
def _disk(arguments: argparse.Namespace) -> Iterator[Callable[[int], DiskTier] | None]:
    """Makes a tier of --disk-slots records over a new file in --disk-path, removed at the end; None without them."""
    if arguments.disk_slots is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="kvoffload-replay-", dir=arguments.disk_path) as folder:

        def make(record_bytes: int) -> DiskTier:
            nbytes = arguments.disk_slots[0] * (record_bytes + HEADER_BYTES) + _FILE_OVERHEAD
            return DiskTier(Path(folder) / "records.kv", nbytes=nbytes, identity="kvoffload replay")

        yield make


def _serve(
    arguments: argparse.Namespace,
    requests: Sequence[Request],
    device: Device,
    output: Output,
    make_tier: Callable[[int], DiskTier] | None,
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
        counts = served.counts
        microseconds = 1e6 * np.array(counts.call_seconds or [0.0])
        fields = {
            "metadata_only": False,
            "simulated": device.simulated,
            "device": device.name,
            "model": arguments.model.name,
            "slots": arguments.slots[0],
            **{name: getattr(arguments, name) for name in ("policy", "scale", "blocks_per_hash", "in_flight")},
            "bytes_per_slot": served.bytes_per_key,
            "requests": counts.requests,
            "requests_refused": counts.requests_refused,
            **served.fields(),
            "sampled_blocks": counts.sampled_blocks,
            "hit_rate": counts.blocks_hit / max(1, counts.blocks_requested),
            "call_us_mean": round(float(microseconds.mean()), 1),
            "call_us_p99": round(float(np.percentile(microseconds, 99)), 1),
            "blocks_beyond_slots": sum(max(0, len(request) - arguments.slots[0]) for request in requests),
            "seconds": round(end - begin, 3),
            "serving_seconds": round(end - serving, 3),
        }
        if make_tier is not None:
            fields["disk"] = _disk_fields(served)
        if not device.simulated:  # by the time that passed, too: on the GPU's clock transfers that overlap all count
            for name, nbytes in (("store", counts.bytes_stored), ("load", counts.bytes_loaded)):
                fields[f"{name}_gb_per_wall_s"] = bandwidth(nbytes, end - serving)
        return fields


def _disk_fields(served: VerifiedCache) -> dict[str, Any]:
    served.cache.drain(_DRAIN_SECONDS)
    done = served.cache.tier_statistics()[0]
    return {
        "slots_below": done.tier.records,
        "blocks_promoted": served.counts.blocks_promoted,
        "promotion_seconds": round(served.counts.promotion_seconds, 3),
        "blocks_written": done.written,
        "blocks_not_written": done.not_written + done.dropped,
        "bytes_written": done.tier.bytes_written,
        "bytes_read": done.tier.bytes_read,
        "corrupt_records": done.tier.corrupt,
    }


def _print(fields: dict[str, Any], rates: Rates | None, output: Output) -> None:
    output.line(
        f"replay: {fields['blocks_hit']:,} of {fields['blocks_requested']:,} blocks found (hit rate "
        f"{fields['hit_rate']:.2%}); " + verified_text(fields["verified_blocks"], fields["corrupt_blocks"])
    )
    where = "simulated device" if fields["simulated"] else fields["device"]
    slots = f"{counted(fields['slots'], 'slot')} of {mib(fields['bytes_per_slot'])}"
    title = f"{fields['model']}, policy {fields['policy']}, {slots}, {where}"
    lines = [*_counts(fields), *_times(fields)]
    if rates is not None:
        hits = fields["blocks_hit"]
        seconds = rates.load_seconds(hits)
        lines += [
            ("prefill not computed again", f"{rates.prefill_seconds(hits):,.1f} s"),
            (f"loading it instead, {mib(rates.load_bytes(hits))}", "-" if seconds is None else f"{seconds:,.1f} s"),
        ]
    output.table(title, ("what", "how much"), lines)
    if fields["in_flight"] > 1:
        output.line("A block may also be stored for another request meanwhile, or be found, evicted and stored again.")
    if rates is not None:
        output.line(f"With {rates.tokens_per_hash} tokens a block: {rates.describe()}.")


def _counts(fields: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """With one request at a time, the indented lines add up to the blocks asked for."""
    beyond, disk = fields["blocks_beyond_slots"], fields.get("disk")
    yield "requests", f"{fields['requests']:,}, {fields['in_flight']} unfinished at a time"
    yield "requests not stored, or in part", f"{fields['requests_refused']:,}"
    yield "blocks asked for", f"{fields['blocks_requested']:,}"
    yield "  found and loaded", f"{fields['blocks_hit']:,} ({mib(fields['bytes_loaded'])})"
    if disk is not None:
        read = f"{mib(disk['bytes_read'])} read, {disk['promotion_seconds']:,.1f} s of promotions"
        yield "    from disk", f"{disk['blocks_promoted']:,} ({read})"
    yield "  not found: stored", f"{fields['blocks_stored']:,} ({mib(fields['bytes_stored'])})"
    yield "  not found: not worth storing", f"{fields['blocks_declined']:,}"
    if beyond:
        yield f"  beyond the first {fields['slots']:,} of a request", f"{beyond:,}"
    yield "stored blocks evicted for others", f"{fields['blocks_evicted']:,}"
    if disk is not None:
        yield "written to disk", f"{disk['blocks_written']:,} ({mib(disk['bytes_written'])})"
        yield "  worth it, and not written", f"{disk['blocks_not_written']:,}"
        yield "corrupt records on disk", f"{disk['corrupt_records']:,}"
    verified = f"{fields['verified_blocks']:,} ({fields['sampled_blocks']:,} also plane by plane)"
    yield "loaded blocks verified, every byte", verified
    yield "  with wrong bytes", f"{fields['corrupt_blocks']:,}"


def _times(fields: dict[str, Any]) -> Iterator[tuple[str, str]]:
    calls = f"mean {fields['call_us_mean']:,} us, p99 {fields['call_us_p99']:,} us"
    yield "inside cache calls, a request, host time", calls
    if fields["simulated"]:
        yield "host seconds, simulated device", f"{fields['seconds']:.1f}"
        return
    yield "wall seconds, verification included", f"{fields['seconds']:.1f}"
    for name in ("store", "load"):
        yield f"{name}s, GPU clock", f"{fields[f'{name}_gb_per_s']} GB/s"
        yield f"{name}s, wall clock, verification included", f"{fields[f'{name}_gb_per_wall_s']} GB/s"
