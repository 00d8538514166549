"""`kvoffload bench pool`: a pool that engines share, beside one of an engine's own. Owner and members are processes.

Look-ups need no GPU, and are timed on any machine. Transfers are timed on a GPU, and verified everywhere.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kvoffload.device.device import open_device
from kvoffload.errors import CapabilityError
from kvoffload.internal import hostinfo
from kvoffload.terminal.console import Advance, Output, as_json, open_backend, require_writable, write_whole
from kvoffload.terminal.machine import describe_device
from kvoffload.terminal.options import COMMON, add_command, add_common_options
from kvoffload_bench.pool_processes import (
    ENTRY_BYTES,
    LOAD,
    OWN,
    POOL,
    STORE,
    TABLE,
    Asker,
    Mover,
    Moves,
    Owner,
    Process,
)
from kvoffload_bench.report import Fields, fixed
from kvoffload_bench.tier_calls import require_memory

_COUNTS = (1, 32, 512)  # keys of a look-up
_MEMBERS, _KEYS_OF_MEMBERS = 8, 32
_BLOCKS = (8, 32)  # of a call
_SMALL = Moves(planes=2, block_bytes=2048, blocks=32, transfers=2, calls=2)  # on the simulated device
_LARGE = Moves(planes=64, block_bytes=32 << 10, blocks=64, transfers=32, calls=60)
_SPREAD = 0.05  # seconds until processes begin something together
_HOW = {OWN: "an index of its own", POOL: "the pool's owner", TABLE: "a shared table"}


def add_parser(benches: Any) -> None:
    parser = add_command(
        benches, "pool", "a pool that engines share, beside pools of their own",
        "Times look-ups through a pool's owner, beside an index of one's own and a read-only table in shared memory. "
        "On a GPU it also times stores and loads, beside pools of one's own. Every byte is verified.",
        example="bench pool --quick", common=COMMON,
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="fewer rounds: half a minute")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write all figures as JSON")
    add_common_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    output = Output(arguments.json)
    if arguments.save is not None:
        require_writable("--save", arguments.save)
    with open_backend(arguments, note=False) as device:
        fields: Fields = {"benchmark": "pool", **describe_device(device), "usable_cpus": hostinfo.usable_cpus()}
    first = None if fields["simulated"] else arguments.device
    with tempfile.TemporaryDirectory(prefix="kvoffload-bench-") as folder, output.progress("pools") as progress:
        fields |= _look_ups(f"{folder}/pool", arguments.quick, progress)
        fields |= _transfers(f"{folder}/pool", first, arguments.quick, progress)
    found = [each["wrong"] for name in ("lookups", "calls", "transfers") for each in fields[name]]
    fields["wrong"] = sum(found) + fields["members"]["wrong"]
    if arguments.save is not None:
        write_whole("--save", arguments.save, (as_json(fields) + "\n").encode())
    output.result(fields)
    show(fields, output)
    return 1 if fields["wrong"] else 0


# measuring ------------------------------------------------------------------------------------------------------------


@contextmanager
def _processes(*made: tuple[Any, ...]) -> Iterator[list[Process]]:
    """They are made at the same time; an owner comes first, and is waited for."""
    with ExitStack() as undo:
        processes = list[Process]()
        for number, each in enumerate(made):
            processes.append(undo.enter_context(Process(*each)))
            if number == 0:
                processes[0].result()
        for process in processes[1:]:
            process.result()
        yield processes


def _look_ups(path: str, quick: bool, progress: Advance) -> Fields:
    keys, repeats, seconds = (4096, 200, 0.5) if quick else (65_536, 2000, 2.0)
    nbytes = keys * (ENTRY_BYTES + 256) + (1 << 16)
    require_memory(2 * nbytes, "free some")
    with _processes((Owner, path, nbytes, keys)) as (owner,):
        table = owner.call("table")
        lookups = list[Fields]()
        with _processes((Asker, path, table, keys, True)) as (asker,):
            for count in _COUNTS:
                for how in _HOW:
                    progress(len(lookups), 3 * len(_COUNTS))
                    found, wrong = asker.call("look_up", how, count, repeats)
                    lookups.append({"how": how, "keys": count, "lookups": len(found), "wrong": wrong} | _spread(found))
            stored, evicted = owner.call("upkeep", repeats)
        with ExitStack() as undo:
            askers = [undo.enter_context(Process(Asker, path, table, keys, False)) for _ in range(_MEMBERS)]
            for each in askers:
                each.result()
            start = time.monotonic() + 0.5
            for each in askers:
                each.begin("look_up_for", _KEYS_OF_MEMBERS, start, seconds)
            answers = [each.result() for each in askers]
    together = [time_us for found, _ in answers for time_us in found]
    members = {"members": _MEMBERS, "keys": _KEYS_OF_MEMBERS, "lookups": len(together)} | _spread(together)
    members |= {"wrong": sum(wrong for _, wrong in answers), "lookups_per_second": len(together) / seconds}
    table_us = {"stored_us": stored, "evicted_us": evicted}
    return {"resident": keys, "lookups": lookups, "members": members, "table_upkeep": table_us}


def _spread(found: Sequence[float]) -> dict[str, float]:
    ordered = sorted(found)
    return {"median_us": statistics.median(ordered), "p99_us": ordered[min(len(ordered) * 99 // 100, len(ordered) - 1)]}


def _transfers(path: str, first: int | None, quick: bool, progress: Advance) -> Fields:
    """Of one process its calls; of two processes, on one GPU and on two, their bandwidth."""
    moves, repeats = (_SMALL, 1) if first is None else (_LARGE, 3 if quick else 7)
    moves = moves._replace(calls=20) if quick and first is not None else moves
    calls, transfers = list[Fields](), list[Fields]()
    nbytes = (2 * moves.slots + 2 * moves.blocks) * (moves.key_bytes + 256) + (1 << 16)
    require_memory(3 * nbytes, "free some, or choose a machine with more")
    for devices in _pairs(first):
        with _processes((Owner, path, nbytes, 1024)), ExitStack() as undo:
            movers = [undo.enter_context(Process(Mover, path, 1 + at, each, moves)) for at, each in enumerate(devices)]
            for each in movers:
                each.result()
            if not calls:
                calls = [call for blocks in _BLOCKS for call in _calls(movers[0], blocks, first is None)]
            progress(1, 2)
            transfers += _bandwidths(movers, devices, moves, repeats)
    return {"blocks": moves._asdict(), "calls": calls, "transfers": transfers}


def _pairs(first: int | None) -> list[tuple[int | None, int | None]]:
    """The devices of two processes: the same one, and two if there are."""
    if first is None:
        return [(None, None)]
    try:
        open_device(1 if first == 0 else 0, backend="cuda").close()
    except (CapabilityError, ValueError):
        return [(first, first)]
    return [(first, first), (first, 1 if first == 0 else 0)]


def _calls(mover: Process, blocks: int, simulated: bool) -> list[Fields]:
    medians, wrong = mover.call("calls", blocks)
    found = []
    for direction in (STORE, LOAD):
        record: Fields = {"blocks": blocks, "direction": direction, "wrong": wrong if direction == LOAD else 0}
        if not simulated:
            for which, name in enumerate(("call", "end")):
                own, pool = (medians[how][direction][which] for how in (OWN, POOL))
                record |= {f"own_{name}_us": own, f"pool_{name}_us": pool, f"more_{name}_us": pool - own}
        found.append(record)
    return found


def _bandwidths(
    movers: Sequence[Process], devices: Sequence[int | None], moves: Moves, repeats: int
) -> Iterator[Fields]:
    """Each process alone and both together, over pools of their own and over the shared one, in turns."""
    numbers = range(1, 1 + len(movers))
    rates: dict[tuple[str, str, str], list[float]] = {}
    wrong = {STORE: 0, LOAD: 0}

    def series(how: str, direction: str, chosen: Sequence[int]) -> float:
        start = time.monotonic() + _SPREAD
        for number in chosen:
            movers[number - 1].begin("series", how, direction, number, start)
        answers = [movers[number - 1].result() for number in chosen]
        wrong[direction] += sum(moves.slots - moved for _, _, moved in answers)
        seconds: float = max(end for _, end, _ in answers) - min(begin for begin, _, _ in answers)
        return len(chosen) * moves.slots * moves.key_bytes / seconds / 1e9

    for repeat in range(repeats + 1):
        for how in (OWN, POOL) if repeat % 2 else (POOL, OWN):
            for chosen in ([1], [2], [1, 2]):
                for direction in (STORE, LOAD):
                    if direction == LOAD:
                        _all(movers, chosen, "poison")
                    rate = series(how, direction, chosen)
                    if repeat:  # the first round warms up
                        rates.setdefault((how, direction, " ".join(map(str, chosen))), []).append(rate)
                wrong[LOAD] += sum(movers[number - 1].call("wrong", number, moves.blocks) for number in chosen)
                if how == POOL and chosen == [1, 2]:
                    wrong[LOAD] += _of_each_other(movers, moves)
                _all(movers, chosen, "remove", how)
    for direction in (STORE, LOAD):
        record: Fields = {"devices": list(devices), "direction": direction, "wrong": wrong[direction]}
        if devices[0] is not None:
            for how in (OWN, POOL):
                alone = [statistics.median(rates[how, direction, str(number)]) for number in numbers]
                together = statistics.median(rates[how, direction, "1 2"])
                record |= {f"{how}_alone_gb_per_s": alone, f"{how}_together_gb_per_s": together}
        yield record


def _of_each_other(movers: Sequence[Process], moves: Moves) -> int:
    """Each loads what the other one has stored. Returns the keys that are missing, or have wrong bytes."""
    wrong = 0
    for mover, other in zip(movers, (2, 1), strict=True):
        wrong += moves.slots - int(mover.call("hits", other))
        mover.call("poison")
        mover.call("series", POOL, LOAD, other, 0.0)
        wrong += int(mover.call("wrong", other, moves.blocks))
    return wrong


def _all(movers: Sequence[Process], chosen: Sequence[int], name: str, *arguments: Any) -> None:
    for number in chosen:
        movers[number - 1].call(name, *arguments)


# what is printed ------------------------------------------------------------------------------------------------------


def show(fields: Fields, output: Output) -> None:
    """A verdict first, then tables."""
    members, lookups = fields["members"], fields["lookups"]
    of_32 = next(each for each in lookups if (each["how"], each["keys"]) == (POOL, 32))
    wrong = (
        f"{fields['wrong']:,} answers or blocks WRONG" if fields["wrong"] else "all answers and bytes verified, 0 wrong"
    )
    output.line(
        f"bench pool: a look-up of 32 keys through the owner takes {of_32['median_us']:.0f} us (99th percentile "
        f"{of_32['p99_us']:.0f}); {wrong}"
    )
    lines = [
        [_HOW[each["how"]], each["keys"], fixed(each["median_us"]), fixed(each["p99_us"])]
        for each in [*lookups, members | {"how": POOL}]
    ]
    lines[-1][0] = f"the owner, {members['members']} members at once"
    title = f"microseconds of a look-up, {fields['resident']:,} keys in the pool"
    output.table(title, ("answered by", "keys", "median", "99%"), lines)
    upkeep = fields["table_upkeep"]
    output.line(
        f"the table would cost the owner {upkeep['stored_us']:.2f} us a stored key, {upkeep['evicted_us']:.2f} us an "
        f"evicted one; {members['members']} members asked {members['lookups_per_second']:,.0f} times a second; "
        f"{fields['usable_cpus']} CPUs"
    )
    if fields["simulated"]:
        output.line("transfers were verified on the simulated device; their times need a GPU")
        return
    lines = [
        [each["blocks"], each["direction"], *(fixed(each[f"{what}_{name}_us"]) for name in ("call", "end")
                                              for what in (OWN, POOL, "more"))]
        for each in fields["calls"]
    ]  # fmt: skip
    columns = ("blocks", "direction", "call, own", "pool", "more", "end seen, own", "pool", "more")
    output.table("microseconds of a call, and from the call until its end is seen", columns, lines)
    lines = []
    for each in fields["transfers"]:
        for how in (OWN, POOL):
            first, second = each[f"{how}_alone_gb_per_s"]
            where = " and ".join(map(str, dict.fromkeys(each["devices"])))
            rates = [fixed(rate) for rate in (first, second, each[f"{how}_together_gb_per_s"])]
            lines.append(
                [f"GPU {where}", each["direction"], "pools of their own" if how == OWN else "one pool", *rates]
            )
    output.table("GB/s of two processes", ("on", "direction", "over", "first", "second", "together"), lines)
    output.line(f"{fields['device']}, driver {fields['driver']}, bindings {fields['bindings']}, {fields['link']}")
