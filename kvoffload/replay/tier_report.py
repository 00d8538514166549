"""The options of `kvoffload replay --disk-slots N`, and what it prints: hits against blocks written."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

from kvoffload.cache.policies import DEFAULT_POLICY, POLICIES
from kvoffload.cache.tiering.admission import DEFAULT_LEAST_HITS
from kvoffload.cache.tiering.attaching import WriteName
from kvoffload.replay.saving import Rates, positive
from kvoffload.replay.tiers import WRITES, Policies, Survey, TierResult
from kvoffload.replay.trace import Request
from kvoffload.replay.verified import VerifiedCache
from kvoffload.terminal.console import CommandError, Output, mib
from kvoffload.terminal.options import numbers
from kvoffload.tiers import DiskTier
from kvoffload.tiers.format import HEADER_BYTES, TABLE_OFFSET

_NEED_A_DISK = ("disk_path", "disk_policy", "disk_gb_per_s")
_NEED_A_TIER = ("write", "least_hits")  # a disk, or the store of --hosts
_DRAIN_SECONDS = 60.0
_FILE_OVERHEAD = TABLE_OFFSET + 8192  # what rounding takes
_WITHOUT_BYTES = ("least_hits", "disk_policy", "disk_gb_per_s")


def add_options(parser: argparse.ArgumentParser) -> None:
    """`--disk-slots`, and the options that need it, whose defaults are None so that `check` knows who gave them."""
    group = parser.add_argument_group("a disk below the cache")
    group.add_argument("--disk-slots", type=numbers, metavar="N[,N...]", help="hash ids the disk holds")
    group.add_argument("--disk-path", type=Path, metavar="FOLDER", help="of its file, with bytes; removed at the end")
    writes = (*WRITES, "all")
    group.add_argument("--write", choices=writes, metavar="NAME", help=f"{', '.join(writes)} (default all)")
    group.add_argument(
        "--least-hits", type=_not_negative, metavar="X", help="reads that a write has to bring (default 0.22)"
    )
    policies = tuple(sorted(POLICIES))
    group.add_argument("--disk-policy", choices=policies, metavar="NAME", help=", ".join(policies))
    group.add_argument("--disk-gb-per-s", type=positive, metavar="X", help="its speed, for the time that hits save")


def check(arguments: argparse.Namespace) -> None:
    """Refuse options that do not go together.

    Raises:
        CommandError: the message names them.
    """
    if arguments.disk_slots is None:
        for name in _NEED_A_DISK if arguments.hosts else (*_NEED_A_DISK, *_NEED_A_TIER):
            if getattr(arguments, name) is not None:
                raise CommandError(f"--{name.replace('_', '-')} is of no use without --disk-slots: give that, too")
        return
    if not arguments.metadata_only:
        _check_with_bytes(arguments)
    elif arguments.disk_path is not None:
        raise CommandError("--disk-path is of no use with --metadata-only: no bytes are written")
    if arguments.policy == "all":
        raise CommandError("--policy all does not go with --disk-slots: name one policy for the host")
    if arguments.plot is not None:
        raise CommandError("--plot does not go with --disk-slots: it draws hits of one tier")
    if arguments.disk_gb_per_s is not None and arguments.prefill_tokens_per_second is None:
        raise CommandError("--disk-gb-per-s is of no use without --prefill-tokens-per-second: give that, too")


def _check_with_bytes(arguments: argparse.Namespace) -> None:
    if arguments.disk_path is None:
        raise CommandError("--disk-slots needs --disk-path, the folder of its file, or --metadata-only")
    if not arguments.disk_path.is_dir():
        raise CommandError(
            f"--disk-path {arguments.disk_path}: there is no such folder; create it, or give another one"
        )
    if len(arguments.disk_slots) > 1:
        given = ",".join(map(str, arguments.disk_slots))
        raise CommandError(f"--disk-slots {given} needs --metadata-only: one disk at a time is filled with bytes")
    if arguments.write not in (None, *get_args(WriteName)):
        raise CommandError(f"--write {arguments.write} needs --metadata-only: a cache has {get_args(WriteName)}")
    for name in _WITHOUT_BYTES:
        if getattr(arguments, name) is not None:
            raise CommandError(f"--{name.replace('_', '-')} needs --metadata-only")


@contextmanager
def disk_below(arguments: argparse.Namespace) -> Iterator[Callable[[int], DiskTier] | None]:
    """Makes a tier of --disk-slots records over a new file in --disk-path, removed at the end; None without them."""
    if arguments.disk_slots is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="kvoffload-replay-", dir=arguments.disk_path) as folder:

        def make(record_bytes: int) -> DiskTier:
            nbytes = arguments.disk_slots[0] * (record_bytes + HEADER_BYTES) + _FILE_OVERHEAD
            return DiskTier(Path(folder) / "records.kv", nbytes=nbytes, identity="kvoffload replay")

        yield make


def run(
    arguments: argparse.Namespace,
    requests: Sequence[Request],
    rates: Rates | None,
    traffic: dict[str, Any],
    output: Output,
) -> None:
    """Replay with a disk, and print the result."""
    chosen = WRITES if arguments.write in (None, "all") else (arguments.write,)
    survey = Survey(
        tuple(dict.fromkeys(arguments.slots)),
        tuple(dict.fromkeys(arguments.disk_slots)),
        Policies(arguments.policy, arguments.disk_policy or DEFAULT_POLICY),
        chosen,
        DEFAULT_LEAST_HITS if arguments.least_hits is None else arguments.least_hits,
        arguments.seed,
    )
    results = survey.run(requests, output)
    blocks = sum(map(len, requests))
    disk_rate: float | None = arguments.disk_gb_per_s
    output.result(
        {
            "metadata_only": True,
            **traffic,
            "requests": len(requests),
            "blocks_requested": blocks,
            "policy": survey.policies.host,
            "disk_policy": survey.policies.disk,
            "least_hits": survey.least_hits,
            "saving": None if rates is None else rates.fields | {"disk_gb_per_s": disk_rate},
            "records": [_fields(result, rates, disk_rate) for result in results],
        }
    )
    name = traffic["workload"] or arguments.trace.name
    _print(results, f"replay with a disk: {name}, {blocks:,} blocks in {len(requests):,} requests", output)
    if rates is not None:
        _print_times(results, rates, disk_rate, output)


def verdict(results: Sequence[TierResult]) -> str:
    """The hit rate with the most host and disk slots, without the disk if that was replayed, and hits for writes."""
    most = max((result.slots, result.disk_slots) for result in results)
    of_them = {result.write: result for result in results if (result.slots, result.disk_slots) == most}
    shown = of_them.get("admitted") or next(iter(of_them.values()))
    without = of_them.get("none")
    return (
        f"replay: {shown.slots:,} slots and {shown.disk_slots:,} on a disk find {shown.hit_rate:.2%} of the blocks "
        f"asked for"
        + (f", {without.hit_rate:.2%} without the disk" if without is not None and without is not shown else "")
        + f"; {_ratio(shown)} disk hits for each of {shown.blocks_written:,} blocks written"
    )


def _print(results: Sequence[TierResult], title: str, output: Output) -> None:
    output.line(verdict(results))
    headings = ["write", "slots", "disk", "host hits", "disk hits", "hit rate", "written", "hits/w."]
    headings += ["evicted", "share", "seconds"] if output.wide else []
    rows = [_cells(result)[: len(headings)] for result in results]
    output.table(title, headings, rows)
    output.line("")
    output.line(
        "hits/w.: disk hits for each block written. "
        + " ".join(_MEANINGS[name] for name in dict.fromkeys(result.write for result in results))
    )


_MEANINGS = {
    "admitted": "admitted: what is worth its write.",
    "through": "through: all.",
    "second": "second: what is used a second time.",
    "random": "random: as large a share of the requests as admitted writes of what through does.",
    "none": "none: no disk.",
}


def _cells(result: TierResult) -> list[str]:
    return [
        result.write,
        f"{result.slots:,}",
        f"{result.disk_slots:,}",
        f"{result.host_hits:,}",
        f"{result.disk_hits:,}",
        f"{result.hit_rate:.2%}",
        f"{result.blocks_written:,}",
        _ratio(result),
        f"{result.blocks_evicted:,}",
        "-" if result.share is None else f"{result.share:.3f}",
        f"{result.seconds:.2f}",
    ]


def _ratio(result: TierResult) -> str:
    return "-" if result.hits_per_written is None else f"{result.hits_per_written:.2f}"


def _print_times(results: Sequence[TierResult], rates: Rates, disk_rate: float | None, output: Output) -> None:
    rows = []
    for result in results:
        times = _times(result, rates, disk_rate)
        shown = ["-" if seconds is None else f"{seconds:,.1f} s" for seconds in times.values()]
        rows.append((result.write, f"{result.slots:,}", f"{result.disk_slots:,}", *shown))
    headings = ("write", "slots", "disk", "prefill saved", "loading", "from disk", "saved in all")
    output.table("the time that hits save, and what they cost", headings, rows)
    disk = "reads of the disk not counted" if disk_rate is None else f"the disk read at {disk_rate:g} GB/s as given"
    output.line(f"Of {rates.tokens_per_hash} tokens a block, {rates.model.name}: {rates.describe()}, {disk}.")


def _times(result: TierResult, rates: Rates, disk_rate: float | None) -> dict[str, float | None]:
    """Seconds: computing what was found, loading it into the GPU, reading the disk's share of it before, the rest."""
    saved, load = rates.prefill_seconds(result.hits), rates.load_seconds(result.hits) or 0.0
    read = None if disk_rate is None else rates.load_bytes(result.disk_hits) / (disk_rate * 1e9)
    return {
        "prefill_seconds_saved": saved,
        "load_seconds": load,
        "disk_seconds": read,
        "seconds_saved": saved - load - (read or 0.0),
    }


def _fields(result: TierResult, rates: Rates | None, disk_rate: float | None) -> dict[str, Any]:
    """For JSON."""
    fields = result._asdict() | {"blocks_hit": result.hits}
    if rates is None:
        return fields
    return fields | {"load_bytes": rates.load_bytes(result.hits)} | _times(result, rates, disk_rate)


def _not_negative(text: str) -> float:
    """An argparse type: 0, or a finite number above it."""
    return 0.0 if text.strip() in ("0", "0.0") else positive(text)


def counts_with_bytes(served: VerifiedCache) -> dict[str, Any]:
    """For JSON: what the disk did; empty without one."""
    if not served.cache.tier_statistics():
        return {}
    served.cache.drain(_DRAIN_SECONDS)
    [done] = served.cache.tier_statistics()
    disk = {
        "slots_below": done.tier.records,
        "blocks_promoted": served.counts.blocks_promoted,
        "promotion_seconds": round(served.counts.promotion_seconds, 3),
        "blocks_written": done.written,
        "blocks_not_written": done.not_written + done.dropped,
        "bytes_written": done.tier.bytes_written,
        "bytes_read": done.tier.bytes_read,
        "corrupt_records": done.tier.corrupt,
    }
    return {"disk": disk}


def lines_with_bytes(fields: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows of the table; none without a disk."""
    disk = fields.get("disk")
    if disk is None:
        return []
    promoted, seconds = disk["blocks_promoted"], disk["promotion_seconds"]
    return [
        ("    of them from disk", f"{promoted:,} ({mib(disk['bytes_read'])} read, {seconds:,.1f} s of promotions)"),
        ("written to disk", f"{disk['blocks_written']:,} ({mib(disk['bytes_written'])})"),
        ("  worth it, and not written", f"{disk['blocks_not_written']:,}"),
        ("records that were not as written", f"{disk['corrupt_records']:,}"),
    ]
