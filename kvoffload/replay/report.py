"""The output of `kvoffload replay --metadata-only`: hits by policy, or with a disk, and the time that they save."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvoffload.cache.policies import DEFAULT_POLICY, POLICIES
from kvoffload.cache.tiering.admission import DEFAULT_LEAST_HITS
from kvoffload.internal.models import ModelGeometry
from kvoffload.replay import hitplot
from kvoffload.replay.hits import HINTS, OPTIMUM, WRITES, Policies, PolicyResult, Survey, TierResult, hits_of_policies
from kvoffload.replay.trace import Trace
from kvoffload.terminal.console import CommandError, Output, counted
from kvoffload.terminal.options import positive, whole

_MEANINGS = {
    "admitted": "admitted: blocks worth their write.",
    "through": "through: all.",
    "second": "second: blocks used a second time.",
    "random": "random: all blocks of some requests, about as many as admitted writes.",
    "none": "none: no disk.",
}
_TOLD = "names: requests name their sessions. release: these also say when they end. due: and when they come back."


def report(
    arguments: argparse.Namespace,
    trace: Trace,
    rates: Rates | None,
    traffic: dict[str, Any],
    output: Output,
) -> None:
    """Replay without bytes, and print the result."""
    requests = trace.requests
    blocks = sum(map(len, requests))
    size = f"{counted(blocks, 'block')} in {counted(len(requests), 'request')}"
    title = f"{arguments.workload or arguments.trace.name}, {size}"
    fields = {"metadata_only": True, **traffic, "requests": len(requests), "blocks_requested": blocks}
    slots, saving = tuple(dict.fromkeys(arguments.slots)), None if rates is None else rates.fields
    if arguments.disk_slots is None:
        policies = sorted(POLICIES) if arguments.policy == "all" else [arguments.policy]
        hints = HINTS if arguments.hints == "all" else (arguments.hints,)
        results = hits_of_policies(trace, slots, policies, output, hints)
        saved = [{} if rates is None else rates.fields_of(each.blocks_hit) for each in results]
        records = [each._asdict() | worth for each, worth in zip(results, saved, strict=True)]
        output.result(fields | {"saving": saving, "records": records})
        print_policies(results, f"replay without bytes: {title}", rates, output)
        if arguments.plot is not None:
            with output.progress("drawing"):
                hitplot.draw(results, requests, f"Prefix-cache hits: {title}", arguments.plot)
            output.path(arguments.plot)
        return
    survey = Survey(
        slots,
        tuple(dict.fromkeys(arguments.disk_slots)),
        Policies(arguments.policy, arguments.disk_policy or DEFAULT_POLICY),
        WRITES if arguments.write in (None, "all") else (arguments.write,),
        DEFAULT_LEAST_HITS if arguments.least_hits is None else arguments.least_hits,
        arguments.seed,
    )
    found = survey.run(requests, output)
    disk_rate: float | None = arguments.disk_gb_per_s
    worth = [{} if rates is None else _worth(each, rates, disk_rate) for each in found]
    fields |= {"policy": survey.policies.host, "disk_policy": survey.policies.disk, "least_hits": survey.least_hits}
    fields["saving"] = None if saving is None else saving | {"disk_gb_per_s": disk_rate}
    fields["records"] = [
        each._asdict() | {"blocks_hit": each.hits} | more for each, more in zip(found, worth, strict=True)
    ]
    output.result(fields)
    _print_disk(found, f"replay with a disk: {title}", output)
    if rates is not None:
        rows = []
        for each, more in zip(found, worth, strict=True):
            times = ["-" if seconds is None else f"{seconds:,.1f} s" for seconds in list(more.values())[1:]]
            rows.append((each.write, f"{each.slots:,}", f"{each.disk_slots:,}", *times))
        headings = ("write", "slots", "disk", "prefill saved", "loading", "from disk", "saved in all")
        output.table("the time that hits save, and what they cost", headings, rows)
        disk = "reads of the disk not counted" if disk_rate is None else f"the disk read at {disk_rate:g} GB/s as given"
        output.line(f"With {rates.tokens_per_hash} tokens a block, {rates.model.name}: {rates.describe()}, {disk}.")


def _table(title: str, cells: Mapping[str, Callable[[Any], str]], results: Sequence[Any], output: Output) -> None:
    """Print a table of results.

    Args:
        cells: by heading, the function that makes a result's cell.
    """
    output.table(title, list(cells), [[show(each) for show in cells.values()] for each in results])


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


# policies -------------------------------------------------------------------------------------------------------------


def print_policies(results: Sequence[PolicyResult], title: str, rates: Rates | None, output: Output) -> None:
    *most, best = [result for result in results if result.slots == max(each.slots for each in results)]
    shown = ([each for each in most if each.policy == DEFAULT_POLICY] or most)[-1]
    output.line(
        f"replay: with {shown.slots:,} slots, {shown.name} finds {shown.hit_rate:.2%} of the blocks asked for; at "
        f"most {best.hit_rate:.2%} are possible"
    )
    with_share = any(each.share_of_optimum is not None for each in results)
    cells: dict[str, Callable[[PolicyResult], str]] = {
        "policy": lambda each: each.name,
        "slots": lambda each: f"{each.slots:,}",
        "hits": lambda each: f"{each.blocks_hit:,}",
        "hit rate": lambda each: f"{each.hit_rate:.2%}",
        "stored": lambda each: _count(each.blocks_stored),
        "declined": lambda each: _count(each.blocks_declined),
    }
    if output.wide:
        cells |= {"evicted": lambda each: _count(each.blocks_evicted), "seconds": lambda each: f"{each.seconds:.2f}"}
    if with_share:
        cells["LRU to optimum"] = lambda each: "-" if each.share_of_optimum is None else f"{each.share_of_optimum:.1%}"
    if any(each.requests_refused for each in results):
        cells["refused"] = lambda each: f"{each.requests_refused:,}"
    _table(title, cells, results, output)
    if rates is not None:
        rows = []
        for each in results:
            saved, load = rates.prefill_seconds(each.blocks_hit), rates.load_seconds(each.blocks_hit) or 0.0
            rows.append((each.name, f"{each.slots:,}", f"{saved:,.1f} s", f"{load:,.1f} s"))
        output.table("the time that hits save", ("policy", "slots", "prefill saved", "loading"), rows)
        output.line(f"With {rates.tokens_per_hash} tokens a block, {rates.model.name}: {rates.describe()}.")
    output.line("")
    for slots, beyond in dict.fromkeys((each.slots, each.blocks_beyond_slots) for each in results):
        if beyond:
            output.line(f"not tried with {slots:,} slots: {beyond:,} blocks beyond the first {slots:,} of a request.")
    if any(result.blocks_declined for result in results):
        output.line("declined: not stored, since the policy rates the blocks that they would displace higher.")
    if with_share:
        output.line(f"LRU to optimum: 0% is as many hits as lru, 100% as many as {OPTIMUM}.")
    output.line(f"{OPTIMUM}: the most hits possible; it knows the future.")
    if any(each.hints != "none" for each in results):
        output.line(_TOLD)


# a disk below ---------------------------------------------------------------------------------------------------------


def _worth(result: TierResult, rates: Rates, disk_rate: float | None) -> dict[str, Any]:
    """Return bytes to load, and the seconds that hits save: of prefill, less loading, less reading the disk before."""
    saved, load = rates.prefill_seconds(result.hits), rates.load_seconds(result.hits) or 0.0
    read = None if disk_rate is None else rates.load_bytes(result.disk_hits) / (disk_rate * 1e9)
    worth = {"load_bytes": rates.load_bytes(result.hits)} | rates.fields_of(result.hits)
    return worth | {"disk_seconds": read, "seconds_saved": saved - load - (read or 0.0)}


def _print_disk(results: Sequence[TierResult], title: str, output: Output) -> None:
    """Print a verdict and a table. The verdict takes the most host and disk slots, and compares with the host alone if
    that was replayed.
    """

    def ratio(result: TierResult) -> str:
        return "-" if result.hits_per_written is None else f"{result.hits_per_written:.2f}"

    sizes = max((result.slots, result.disk_slots) for result in results)
    most = {result.write: result for result in results if (result.slots, result.disk_slots) == sizes}
    shown, without = most.get("admitted") or next(iter(most.values())), most.get("none")
    alone = "" if without in (None, shown) else f", {without.hit_rate:.2%} without the disk"
    output.line(
        f"replay: {shown.slots:,} slots and {shown.disk_slots:,} on a disk find {shown.hit_rate:.2%} of the blocks "
        f"asked for{alone}; {ratio(shown)} disk hits for each of {shown.blocks_written:,} blocks written"
    )
    cells: dict[str, Callable[[TierResult], str]] = {
        "write": lambda each: each.write,
        "slots": lambda each: f"{each.slots:,}",
        "disk": lambda each: f"{each.disk_slots:,}",
        "host hits": lambda each: f"{each.host_hits:,}",
        "disk hits": lambda each: f"{each.disk_hits:,}",
        "hit rate": lambda each: f"{each.hit_rate:.2%}",
        "written": lambda each: f"{each.blocks_written:,}",
        "hits/w.": ratio,
    }
    if output.wide:
        cells |= {
            "evicted": lambda each: f"{each.blocks_evicted:,}",
            "share": lambda each: "-" if each.share is None else f"{each.share:.3f}",
            "seconds": lambda each: f"{each.seconds:.2f}",
        }
    _table(title, cells, results, output)
    output.line("")
    names = dict.fromkeys(result.write for result in results)
    output.line("hits/w.: disk hits for each block written. " + " ".join(_MEANINGS[name] for name in names))


# the time that hits save ----------------------------------------------------------------------------------------------


_TOKENS_PER_HASH = 512  # of the published traces


@dataclass(frozen=True)
class Rates:
    """Rates that turn hits into seconds.

    Attributes:
        model: its blocks are loaded, at full size.
        load_gb_per_s: host to GPU; None while it is not known.
        measured: whether `load_gb_per_s` was measured in this replay, on the GPU's clock; else it was given.
    """

    model: ModelGeometry
    tokens_per_hash: int
    prefill_tokens_per_second: float
    load_gb_per_s: float | None
    measured: bool = False

    def prefill_seconds(self, hits: int) -> float:
        """Return the seconds of computing the tokens of `hits` hits."""
        return hits * self.tokens_per_hash / self.prefill_tokens_per_second

    def load_bytes(self, hits: int) -> int:
        """Return the bytes of the blocks that hold the tokens of `hits` hits, in all planes."""
        return hits * self.tokens_per_hash * self.model.bytes_per_block // self.model.tokens_per_block

    def load_seconds(self, hits: int) -> float | None:
        """Return the seconds of loading those bytes; None if the bandwidth is not known."""
        if hits == 0:
            return 0.0
        return None if self.load_gb_per_s is None else self.load_bytes(hits) / (self.load_gb_per_s * 1e9)

    @property
    def fields(self) -> dict[str, object]:
        names = ("tokens_per_hash", "prefill_tokens_per_second", "load_gb_per_s")
        known = {name: getattr(self, name) for name in names}
        return {"model": self.model.name, **known, "load_gb_per_s_measured": self.measured}

    def fields_of(self, hits: int) -> dict[str, object]:
        return {
            "prefill_seconds_saved": self.prefill_seconds(hits),
            "load_bytes": self.load_bytes(hits),
            "load_seconds": self.load_seconds(hits),
        }

    def describe(self) -> str:
        """Return the assumptions behind a table's figures."""
        source = "measured in this replay" if self.measured else "as given"
        loads = (
            "loads not measured" if self.load_gb_per_s is None else f"loads at {self.load_gb_per_s:g} GB/s, {source}"
        )
        return f"prefill at {self.prefill_tokens_per_second:,g} tokens/s as given, {loads}"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prefill-tokens-per-second", type=positive, metavar="X", help="print the time that hits save, at this rate"
    )
    parser.add_argument("--load-gb-per-s", type=positive, metavar="X", help="speed of loads, if no GPU measures it")
    add_tokens_per_hash(parser)


def add_tokens_per_hash(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokens-per-hash",
        type=whole(1),
        default=_TOKENS_PER_HASH,
        metavar="N",
        help=f"tokens per hash id (default {_TOKENS_PER_HASH})",
    )


def rates(arguments: argparse.Namespace, *, measures: bool) -> Rates | None:
    """Return the values of the options of `add_options`; None without --prefill-tokens-per-second."""
    if arguments.prefill_tokens_per_second is None:
        if arguments.load_gb_per_s is not None:
            raise CommandError("--load-gb-per-s is of no use without --prefill-tokens-per-second: give that, too")
        return None
    if arguments.model is None:
        raise CommandError("--prefill-tokens-per-second needs --model: its blocks are the bytes to load")
    if arguments.load_gb_per_s is None and not measures:
        raise CommandError(
            "--prefill-tokens-per-second needs --load-gb-per-s here: loads are timed only when bytes move on a GPU"
        )
    given = None if measures else arguments.load_gb_per_s
    return Rates(arguments.model, arguments.tokens_per_hash, arguments.prefill_tokens_per_second, given)
