"""`kvoffload replay`: a recorded trace through the cache, every byte of every load verified."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from kvoffload.cli.console import Output, add_common_options, mib, model, open_backend, scale, whole
from kvoffload.cli.trace import Request, read_trace
from kvoffload.cli.verified import VerifiedCache
from kvoffload.models import MODELS
from kvoffload.policies import POLICIES

_DESCRIPTION = """\
Serve the requests of a trace in file order, one at a time. Of each, the leading blocks that the cache holds are loaded
and their bytes verified; of the others, those that it does not hold are filled with bytes derived from their keys and
stored. A request longer than the cache uses its first keys. At its end all its keys are touched, from last to first;
eviction takes the least recently used key that is not in the request."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("replay", help="serve a recorded trace, verify every byte", description=_DESCRIPTION)
    parser.add_argument(
        "trace", type=Path, metavar="TRACE", help='JSON lines, each with "hash_ids": a list of integers'
    )
    parser.add_argument("--model", type=model, required=True, metavar="NAME", help=f"one of {', '.join(MODELS)}")
    parser.add_argument(
        "--slots",
        type=whole(1),
        default=4096,
        metavar="N",
        help="blocks that the cache holds, one per hash id (default 4096: 8 GiB of pinned memory for llama-3.1-8b)",
    )
    parser.add_argument("--requests", type=whole(1), metavar="N", help="stop after so many requests")
    parser.add_argument(
        "--policy", choices=sorted(POLICIES), default="lru", help="what the cache gives up (default lru)"
    )
    parser.add_argument(
        "--scale",
        type=scale,
        default=1.0,
        metavar="X",
        help="shrink a block's bytes to X times as many, rounded up to 16, for machines without a GPU; above 0, at "
        "most 1 (the default)",
    )
    parser.add_argument(
        "--blocks-per-hash",
        type=whole(1),
        default=1,
        metavar="N",
        help="device blocks that a hash id covers (default 1; 32 blocks of 16 tokens are the 512 tokens of an id)",
    )
    parser.add_argument("--seed", type=whole(0), default=0, help="of the bytes and of where blocks lie (default 0)")
    add_common_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Replay; 0 if every loaded byte was right, else 1."""
    output = Output(arguments.json)
    requests = read_trace(arguments.trace, arguments.requests)
    with open_backend(arguments, output, arguments.seed) as device:
        if device.simulated and arguments.scale == 1:
            output.note("kvoffload: the simulated device copies with the CPU; --scale 0.01 makes it quick")
        begin = time.perf_counter()
        with output.progress("pinning the pool") as progress:
            served = VerifiedCache(
                device,
                arguments.model.scaled(arguments.scale),
                capacity=arguments.slots,
                longest=max((len(request) for request in requests), default=0),
                blocks_per_key=arguments.blocks_per_hash,
                policy=arguments.policy,
                seed=arguments.seed,
                progress=progress,
            )
        with served:
            _serve(served, requests, output)
            fields = _fields(served, arguments, device.simulated, time.perf_counter() - begin)
        fields["device"] = device.name
    output.result(fields)
    _print(fields, output)
    return 1 if fields["corrupt_blocks"] else 0


def _serve(served: VerifiedCache, requests: list[Request], output: Output) -> None:
    with output.progress("requests") as progress:
        for number, request in enumerate(requests, start=1):
            served.serve(request)
            progress(number, len(requests))


def _fields(served: VerifiedCache, arguments: argparse.Namespace, simulated: bool, seconds: float) -> dict[str, Any]:
    counts = served.counts
    fields: dict[str, Any] = {
        "simulated": simulated,
        "model": arguments.model.name,
        "policy": arguments.policy,
        "slots": arguments.slots,
        "scale": arguments.scale,
        "blocks_per_hash": arguments.blocks_per_hash,
        "seed": arguments.seed,
        "bytes_per_slot": served.bytes_per_key,
        "requests": counts.requests,
        "blocks_requested": counts.blocks_requested,
        "blocks_hit": counts.blocks_hit,
        "hit_rate": counts.blocks_hit / counts.blocks_requested if counts.blocks_requested else 0.0,
        "blocks_stored": counts.blocks_stored,
        "blocks_evicted": served.blocks_evicted,
        "bytes_stored": counts.bytes_stored,
        "bytes_loaded": counts.bytes_loaded,
        "verified_blocks": counts.verified_blocks,
        "sampled_blocks": counts.sampled_blocks,
        "corrupt_blocks": counts.corrupt_blocks,
        "seconds": round(seconds, 3),
    }
    if not simulated:
        fields["store_gb_per_s"] = bandwidth(counts.bytes_stored, counts.store_seconds)
        fields["load_gb_per_s"] = bandwidth(counts.bytes_loaded, counts.load_seconds)
    return fields


def bandwidth(nbytes: int, seconds: float) -> float | None:
    """GB/s, or None where nothing was moved."""
    return round(nbytes / seconds / 1e9, 2) if seconds > 0 else None


def _print(fields: dict[str, Any], output: Output) -> None:
    simulated = fields["simulated"]
    rows = [
        ("requests", f"{fields['requests']:,}"),
        ("blocks requested", f"{fields['blocks_requested']:,}"),
        ("blocks hit", f"{fields['blocks_hit']:,} ({fields['hit_rate']:.2%})"),
        ("blocks stored", f"{fields['blocks_stored']:,} ({mib(fields['bytes_stored'])})"),
        ("blocks evicted", f"{fields['blocks_evicted']:,}"),
        ("bytes loaded", mib(fields["bytes_loaded"])),
        ("blocks verified", f"{fields['verified_blocks']:,} ({fields['sampled_blocks']:,} also plane by plane)"),
        ("blocks corrupt", f"{fields['corrupt_blocks']:,}"),
    ]
    if simulated:
        rows.append(("host seconds, simulated device", f"{fields['seconds']:.1f}"))
    else:
        rows.append(("wall seconds, verification included", f"{fields['seconds']:.1f}"))
        rows.append(("stores, GPU clock", f"{fields['store_gb_per_s']} GB/s"))
        rows.append(("loads, GPU clock", f"{fields['load_gb_per_s']} GB/s"))
    output.banner(simulated)
    where = "SIMULATED" if simulated else fields["device"]
    title = f"replay: {fields['model']}, {fields['slots']} slots of {mib(fields['bytes_per_slot'])}, {where}"
    output.table(title, ("what", "how much"), rows)
