"""`kvoffload bench remote`: tiers over stores of several machines, compared with bare calls of their own clients.

Needs no GPU: records are in ordinary memory that begins with a page. Only promotions use a device, real or simulated.
"""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvoffload.device.device import Device
from kvoffload.internal import hostinfo
from kvoffload.terminal.console import Advance, CommandError, Output, as_json, mib, open_backend
from kvoffload.terminal.files import require_writable, write_whole
from kvoffload.terminal.options import COMMON, add_command, add_common_options, add_wide, numbers, whole
from kvoffload.terminal.stores import KINDS, Store, add_store_option, store_of
from kvoffload.tiers.checksums import make_checksum
from kvoffload.tiers.files import PAGE
from kvoffload_bench.remote_costs import measure_calls, measure_promotion, promotion_bytes
from kvoffload_bench.remote_report import show
from kvoffload_bench.remote_rounds import measure_size, records_of_round
from kvoffload_bench.remote_servers import started
from kvoffload_bench.tier_calls import KEYS_OF_A_CALL, Verified

_SIZES = [256 << 10, 1 << 20, 2 << 20, 4 << 20]
_IN_FLIGHT = [1, 8, 32]
_MOST_IN_FLIGHT = 1024
_NBYTES = 32 << 20
_PROMOTED_BYTES = 2 << 20


def add_parser(benches: Any) -> None:
    parser = add_command(
        benches,
        "remote",
        "tiers over stores compared with their clients' bare calls",
        "Puts records into stores and gets them with a tier and with bare batch calls of the tier's client, in "
        "interleaved rounds; then times calls and promotions. Deletes its records.",
        example="bench remote --start --sizes 2097152 --in-flight 8",
        common=f"{COMMON}, --wide",
        usage="[--store KIND NAME=VALUE ...] [--start] [options]",
    )
    add_store_option(parser, "the tier's kind (valkey, objects, mooncake) and its arguments")
    parser.add_argument(
        "--start", nargs="*", choices=KINDS, metavar="KIND", help="start servers that are installed here"
    )
    parser.add_argument("--sizes", type=numbers, default=_SIZES, metavar="N,...", help="bytes of a record")
    parser.add_argument("--in-flight", type=numbers, default=_IN_FLIGHT, metavar="N,...", help="records (1,8,32)")
    parser.add_argument(
        "--nbytes", type=whole(PAGE, 1 << 40), default=_NBYTES, metavar="N", help=f"of a round ({_NBYTES})"
    )
    parser.add_argument("--repeats", type=whole(1, 1_000_000), default=5, metavar="N", help="timed rounds (default 5)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write all figures as JSON")
    add_wide(parser, "the bare bandwidth and the range of the rounds")
    add_common_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; 0 if every record was right, else 1. Servers and records go also when it is interrupted."""
    output = Output(arguments.json, wide=arguments.wide)
    if arguments.save is not None:
        require_writable("--save", arguments.save)
    _check(arguments)
    verified = Verified()
    with (
        _stores(arguments) as (stores, missing),
        open_backend(arguments, output, note=False) as device,
        output.progress("remote") as progress,
    ):
        fields = _measure(arguments, stores, device, verified, progress)
    fields |= {
        "not_run": missing,
        "verified_records": verified.records,
        "wrong_records": verified.wrong,
        "missing_records": verified.missing,
    }
    if arguments.save is not None:
        write_whole("--save", arguments.save, (as_json(fields) + "\n").encode())
    output.result(fields)
    show(fields, output)
    return 1 if verified.wrong or verified.missing else 0


def _measure(
    arguments: argparse.Namespace, stores: Sequence[Store], device: Device, verified: Verified, progress: Advance
) -> dict[str, Any]:
    found: dict[str, list[dict[str, Any]]] = {"cells": [], "calls": [], "promotions": []}
    steps = len(stores) * (len(arguments.sizes) + 2)
    for number, store in enumerate(stores):
        prefix = f"kvoffload-bench/{secrets.token_hex(8)}"
        try:
            for place, size in enumerate(arguments.sizes):
                progress(number * (len(arguments.sizes) + 2) + place, steps)
                found["cells"] += measure_size(
                    store,
                    prefix=prefix,
                    record_bytes=size,
                    in_flight=arguments.in_flight,
                    nbytes=arguments.nbytes,
                    repeats=arguments.repeats,
                    verified=verified,
                )
            found["calls"].append(
                measure_calls(store, prefix=prefix, record_bytes=min(arguments.sizes), verified=verified)
            )
            promotion = measure_promotion(
                store,
                device,
                prefix=prefix,
                record_bytes=_promoted_bytes(arguments.sizes),
                repeats=arguments.repeats,
                verified=verified,
            )
            found["promotions"].append(promotion)
        except CommandError:
            raise
        except Exception as error:  # of a client: each has exceptions of its own
            raise store.explained(error) from error
    return {
        "benchmark": "remote",
        "stores": [str(store) for store in stores],
        "started": arguments.start is not None,
        "usable_cpus": hostinfo.usable_cpus(),
        "simulated": device.simulated,
        "device": device.name,
        "nbytes": arguments.nbytes,
        "repeats": arguments.repeats,
        **found,
    }


def _promoted_bytes(sizes: Sequence[int]) -> int:
    """Of the sizes the one nearest to 2 MiB."""
    return min(sizes, key=lambda size: abs(size - _PROMOTED_BYTES))


@contextmanager
def _stores(arguments: argparse.Namespace) -> Iterator[tuple[list[Store], dict[str, str]]]:
    """Those that can be used: the user's, and servers that are started. And why others could not be."""
    given = [_store(words) for words in arguments.store]
    named = [store.kind for store in given]
    if len(set(named)) < len(named):
        raise CommandError(f"--store: one store of each kind can be measured at a time, got {', '.join(named)}")
    wanted = [] if arguments.start is None else [kind for kind in arguments.start or KINDS if kind not in named]
    if not given and not wanted:
        raise CommandError(
            "no store to measure: give --store KIND NAME=VALUE ..., such as --store valkey addresses=HOST:PORT; "
            "--start starts servers of installed packages on this machine"
        )
    for store in given:
        store.check()
    with started(wanted) as (own, missing):
        if not given and not own:
            raise CommandError("; ".join(f"--start {kind}: {reason}" for kind, reason in missing.items()))
        for store in own:
            store.check()
        yield [*given, *own], missing


def _store(words: Sequence[str]) -> Store:
    kind = words[0]
    if kind not in KINDS:
        raise CommandError(f"--store must be {', '.join(KINDS)} to be compared with its client, got {kind!r:.80}")
    try:
        return store_of(words)
    except ValueError as error:
        raise CommandError(f"--store {kind}: {error}") from error


def _check(arguments: argparse.Namespace) -> None:
    """Raise CommandError, or CapabilityError, for what could not be carried out."""
    make_checksum()
    for size in arguments.sizes:
        if size % PAGE:
            raise CommandError(f"--sizes must be multiples of {PAGE}, got {size}")
    if max(arguments.in_flight) > _MOST_IN_FLIGHT:
        raise CommandError(f"--in-flight must be at most {_MOST_IN_FLIGHT}, got {max(arguments.in_flight)}")
    rounds = max(
        2 * size * records_of_round(size, count, arguments.nbytes)
        for size in arguments.sizes
        for count in arguments.in_flight
    )
    needed = max(rounds, promotion_bytes(_promoted_bytes(arguments.sizes)), KEYS_OF_A_CALL * min(arguments.sizes))
    available = hostinfo.available_bytes()
    if available is not None and needed > available:
        raise CommandError(
            f"{mib(needed)} of host memory are needed, and {mib(available)} are available; lower --nbytes, --in-flight "
            "or --sizes"
        )
