"""`kvoffload bench remote`: tiers over stores, compared with the best batch calls of their own clients."""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from kvoffload.device.device import Device
from kvoffload.internal import hostinfo
from kvoffload.terminal.console import Advance, CommandError, Output, mib, open_backend
from kvoffload.terminal.options import COMMON, add_command, numbers
from kvoffload.terminal.stores import KINDS, Store, add_store_option, store_of
from kvoffload_bench.remote_measure import (
    GET,
    PUT,
    measure_calls,
    measure_promotion,
    measure_size,
    promotion_bytes,
    records_of_round,
)
from kvoffload_bench.remote_servers import started
from kvoffload_bench.report import fixed
from kvoffload_bench.tier_calls import (
    KEYS_OF_A_CALL,
    Verified,
    add_tier_options,
    check_options,
    conclude,
    ratios_text,
    require_memory,
    show_cells,
    verified_text,
)

Fields = Mapping[str, Any]
_BAR, _CALL_BAR_US = 0.85, 40
_BAR_BYTES, _BAR_IN_FLIGHT = 2 << 20, 8
_BARE = {
    "valkey": "glide's pipelined SET and MGET into buffers",
    "objects": "obstore's put and get",
    "mooncake": "batch_put_from and batch_get_into",
}


class _Bar(NamedTuple):
    what: str
    measured: Sequence[str]
    bar: str


def show(fields: Fields, output: Output) -> None:
    """Print the verdict, then a table for each store, and one of all bars."""
    output.line(verdict(fields))
    kinds = [each["store"] for each in fields["calls"]]
    for kind in kinds:
        cells = [each for each in fields["cells"] if each["store"] == kind]
        title = f"{kind}: bandwidth over that of {_BARE[kind]}, and GB/s"
        show_cells(title, cells, "in flight", (PUT, GET), 2, output)
    lines = [(each.what, *each.measured, each.bar) for each in _bars(fields, kinds)]
    output.table("what this library aims at", ("", *kinds, "bar"), lines)
    output.line("")
    for kind, reason in fields["not_run"].items():
        output.line(f"not run: {kind}: {reason}")
    output.line(verified_text(fields))
    where = "in processes of their own on this machine" if fields["started"] else f"{', '.join(fields['stores'])}"
    output.line(f"stores: {where}; {fields['usable_cpus']} usable CPUs; promotions on {fields['device']}")


def verdict(fields: Fields) -> str:
    kinds = dict.fromkeys(each["store"] for each in fields["cells"])
    found = [ratios_text(kind, [each for each in fields["cells"] if each["store"] == kind]) for kind in kinds]
    return f"bench remote: {', '.join(found)}, times the bandwidth of bare calls"


def _bars(fields: Fields, kinds: Sequence[str]) -> Iterator[_Bar]:
    """A line for each figure, with a value for each store."""
    cells = {(each["store"], each["record_bytes"], each["in_flight"], each["operation"]): each["ratio"]
             for each in fields["cells"]}  # fmt: skip
    for name in (PUT, GET):
        ratios = [fixed(cells.get((kind, _BAR_BYTES, _BAR_IN_FLIGHT, name)), 2) for kind in kinds]
        yield _Bar(f"ratio, {name}, {mib(_BAR_BYTES)}, {_BAR_IN_FLIGHT} in flight", ratios, f"{_BAR:.2f}")
    of_keys = fields["calls"][0]["keys"]
    for name in (PUT, GET):
        times = [fixed(each[f"{name}_us"]) for each in fields["calls"]]
        yield _Bar(f"host time of {name}() of {of_keys} keys, us a key", times, str(_CALL_BAR_US))
    allocated = [fixed(each["python_bytes_a_record"] / 1024) for each in fields["calls"]]
    size = fields["calls"][0]["record_bytes"]
    yield _Bar(f"Python memory of a record of {mib(size)}, put and got, KiB", allocated, "-")
    promotions = fields["promotions"]
    size, count = promotions[0]["record_bytes"], promotions[0]["keys"]
    for place, what in (("first", "first of"), ("all", "all")):
        times = [fixed(each[f"{place}_ms"]) for each in promotions]
        yield _Bar(f"promote(): {what} {count} keys of {mib(size)} ready after ms", times, "-")


# the command ----------------------------------------------------------------------------------------------------------

_IN_FLIGHT = [1, 8, 32]
_MOST_IN_FLIGHT = 1024
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
    parser.add_argument("--in-flight", type=numbers, default=_IN_FLIGHT, metavar="N,...", help="records (1,8,32)")
    add_tier_options(parser, "the bare bandwidth and the range of the rounds", 32 << 20, 1 << 40)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; 0 if every record was right, else 1. Servers and records go also when it is interrupted."""
    output = Output(arguments.json, wide=arguments.wide)
    _check(arguments)
    verified = Verified()
    with (
        _stores(arguments) as (stores, missing),
        open_backend(arguments, output, note=False) as device,
        output.progress("remote") as progress,
    ):
        fields = _measure(arguments, stores, device, verified, progress)
    fields["not_run"] = missing
    return conclude(arguments, fields, verified, show, output)


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
    check_options(arguments, "--in-flight", arguments.in_flight, _MOST_IN_FLIGHT)
    rounds = max(
        2 * size * records_of_round(size, count, arguments.nbytes)
        for size in arguments.sizes
        for count in arguments.in_flight
    )
    needed = max(rounds, promotion_bytes(_promoted_bytes(arguments.sizes)), KEYS_OF_A_CALL * min(arguments.sizes))
    require_memory(needed, "lower --nbytes, --in-flight or --sizes")
