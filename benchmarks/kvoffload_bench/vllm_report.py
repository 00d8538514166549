"""What `bench vllm` prints: this library over the faster of vLLM's two classes, cell by cell."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvoffload.terminal.console import Output, counted
from kvoffload_bench.field_compute import Situation
from kvoffload_bench.report import Fields, number
from kvoffload_bench.vllm_methods import BACKEND, ENGINE, ENGINE_COPIES, OURS, THEIRS, WORKER
from kvoffload_bench.vllm_scheduler import CALLS

Record = Mapping[str, Any]
PLACE = ("allocator", "situation", "model", "blocks", "direction")  # what the records of one comparison have in common
_FEWEST_ROUNDS = 3  # of each method, to say of a cell whose computation loses more
_SHORT = {WORKER: "worker", BACKEND: "dma"}
_LEGEND = (
    "wall clock, from the call that submits a transfer until it is reported to have ended",
    "ours: GB/s of an engine with default options; sm 0: of one with sm_limit=0",
    "vLLM, by: GB/s of the faster of CPUOffloadingWorker (worker) and DmaCopyBackend (dma); x: ours over it",
    "us: median host time of the call that submits a transfer, ours / vLLM's (dma: a thread does the work)",
    "slow: time of a product during the transfers over its time alone, ours / vLLM's",
)


def compare(cells: Iterable[Record]) -> list[dict[str, Any]]:
    """For each place that this library and vLLM were measured at: bandwidths, ratios, calls and slow-downs.

    A method without a bandwidth, since the computation ended before its transfers, is left out.
    """
    places: dict[tuple[Any, ...], dict[str, Record]] = {}
    for cell in cells:
        if cell.get("gb_per_s") is not None:
            places.setdefault(tuple(cell[name] for name in PLACE), {})[cell["method"]] = cell
    found = []
    for place, methods in places.items():
        theirs = [methods[name] for name in THEIRS if name in methods]
        if not theirs or not any(name in methods for name in OURS):
            continue
        best = max(theirs, key=lambda each: each["gb_per_s"])
        record: dict[str, Any] = dict(zip(PLACE, place, strict=True)) | {"vllm": _figures(best)}
        for name in OURS:
            if name in methods:
                record[name] = _figures(methods[name]) | _over(methods[name], best)
        found.append(record)
    return found


def _figures(cell: Record) -> dict[str, Any]:
    return {
        "method": cell["method"],
        "gb_per_s": cell["gb_per_s"],
        "call_us": cell["call_median_us"],
        "slowdown": cell.get("compute_slowdown"),
        "lost_us_per_mib": _lost(cell),
    }


def _lost_by_round(cell: Record) -> list[float]:
    """Microseconds of computation lost for each MiB that is moved, in each round that counts; 0 where a product took
    less time than alone.
    """
    rounds = zip(cell.get("samples_compute_slowdown", ()), cell.get("samples_gb_per_s", ()), strict=False)
    return [max(0.0, 1 - 1 / slow) * (1 << 20) / (rate * 1e3) for slow, rate in rounds if slow is not None]


def _lost(cell: Record) -> float | None:
    """The median round; None on an idle GPU."""
    return statistics.median(rounds) if (rounds := _lost_by_round(cell)) else None


def _over(ours: Record, theirs: Record) -> dict[str, Any]:
    """`loses` "more" or "less": in every round than in any of the other's. The median of rounds differs by chance."""
    record: dict[str, Any] = {"ratio": ours["gb_per_s"] / theirs["gb_per_s"]}
    mine, others = _lost_by_round(ours), _lost_by_round(theirs)
    if min(len(mine), len(others)) >= _FEWEST_ROUNDS:
        record["loses"] = "more" if min(mine) > max(others) else "less" if max(mine) < min(others) else "alike"
    return record


def summarize(comparisons: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """For each engine of this library, over all comparisons that it is in."""
    found = {}
    for name in OURS:
        mine = [each for each in comparisons if name in each]
        if not mine:
            continue
        ratios = [each[name]["ratio"] for each in mine]
        busy = [each for each in mine if "loses" in each[name]]
        summary: dict[str, Any] = {
            "cells": len(mine),
            "at_least_1": sum(ratio >= 1 for ratio in ratios),
            "median": statistics.median(ratios),
            "lowest": min(mine, key=lambda each: each[name]["ratio"]),
            "highest": max(mine, key=lambda each: each[name]["ratio"]),
            "medians": _medians(mine, name),
            "busy_cells": len(busy),
        }
        if busy:
            lost = {each: [record[each]["lost_us_per_mib"] for record in busy] for each in (name, "vllm")}
            summary |= {
                "loses": Counter(each[name]["loses"] for each in busy),
                "lost_us_per_mib": {"ours": sum(lost[name]), "vllm": sum(lost["vllm"])},
                "most_lost": max(busy, key=lambda each: each[name]["lost_us_per_mib"]),
                "most_lost_vllm": max(busy, key=lambda each: each["vllm"]["lost_us_per_mib"]),
            }
        found[name] = summary
    return found


def _medians(comparisons: Iterable[Record], name: str) -> dict[str, dict[str, float]]:
    """Median ratios by situation and direction."""
    ratios: dict[str, dict[str, list[float]]] = {}
    for each in comparisons:
        by_direction = ratios.setdefault(each["situation"], {})
        by_direction.setdefault(each["direction"], []).append(each[name]["ratio"])
    return {
        situation: {direction: statistics.median(values) for direction, values in by_direction.items()}
        for situation, by_direction in ratios.items()
    }


def scheduler_ratios(records: Iterable[Record]) -> list[dict[str, Any]]:
    """For each number of keys and call: this library's microseconds by its default policy over those of vLLM's."""
    by_keys: dict[int, list[Record]] = {}
    for record in records:
        by_keys.setdefault(record["keys"], []).append(record)
    found = []
    for keys, (ours, *others) in by_keys.items():
        for call in CALLS:
            for theirs in (each for each in others if each["vllm"]):
                if ours["us"][call] is not None and theirs["us"][call] is not None:
                    ratio = ours["us"][call] / theirs["us"][call]
                    found.append({"keys": keys, "call": call, "over": theirs["name"], "ratio": ratio})
    return found


# tables ---------------------------------------------------------------------------------------------------------------


def show(fields: Fields, output: Output) -> None:
    summary = fields["summary"]
    output.line(_verdict(summary))
    for name, each in summary.items():
        for text in _summary_lines(name, each):
            output.line(text)
    if fields["comparisons"]:
        kernel = "used" if fields["triton"] else "not used: its Triton finds no GPU"
        output.line(
            f"vLLM {fields['vllm']}; swap_blocks_batch: {fields['batch_copy']}; Triton kernel for small loads: {kernel}"
        )
        for text in _LEGEND:
            output.line(text)
    for allocator in dict.fromkeys(each["allocator"] for each in fields["comparisons"]):
        for situation in dict.fromkeys(each["situation"] for each in fields["comparisons"]):
            _show_place(allocator, Situation(situation), fields["comparisons"], output)
    show_scheduler(fields, output)
    early = sum(cell["rounds_compute_ended"] for cell in fields["cells"])
    if early:
        output.line(f"not counted: {counted(early, 'series')}, during which the computation ended or paused")


def _verdict(summary: Mapping[str, Record]) -> str:
    if ENGINE not in summary:
        return "bench vllm: transfers were not measured"
    mine = summary[ENGINE]
    return (
        f"bench vllm: kvoffload is {mine['median']:.2f} times as fast as vLLM's best (median), at least as fast in "
        f"{mine['at_least_1']} of {mine['cells']} cells"
    )


def _summary_lines(name: str, each: Record) -> list[str]:
    label = {ENGINE: "default options", ENGINE_COPIES: "sm_limit=0"}[name]
    lines = [
        f"{label}: {each['at_least_1']} of {each['cells']} cells >= 1.0x, median {each['median']:.2f}, lowest "
        f"{each['lowest'][name]['ratio']:.2f} ({_at(each['lowest'])}), highest {each['highest'][name]['ratio']:.2f} "
        f"({_at(each['highest'])})"
    ]
    if each["busy_cells"]:
        places, lost = each["loses"], each["lost_us_per_mib"]
        most, most_vllm = each["most_lost"], each["most_lost_vllm"]
        lines.append(
            f"{label}: computation loses {lost['ours']:.1f} us for a MiB moved in each of {each['busy_cells']} cells, "
            f"with vLLM's {lost['vllm']:.1f}; in every round more in {places['more']} cells, less in {places['less']}; "
            f"most {most[name]['lost_us_per_mib']:.1f} us ({_at(most)}), with vLLM's "
            f"{most_vllm['vllm']['lost_us_per_mib']:.1f} us ({_at(most_vllm)})"
        )
    return lines


def _at(each: Record) -> str:
    return f"{each['blocks']}x{each['model']}, {each['direction']}, {each['situation']}, {each['allocator']}"


def _show_place(allocator: str, situation: Situation, comparisons: Iterable[Record], output: Output) -> None:
    columns = ("transfer", "moves", "ours", "sm 0", "vLLM", "by", "x", "us", "slow")
    lines = []
    for each in comparisons:
        if (each["allocator"], each["situation"]) != (allocator, situation):
            continue
        ours, copies, theirs = each.get(ENGINE, {}), each.get(ENGINE_COPIES, {}), each["vllm"]
        lines.append(
            (
                f"{each['blocks']}x{each['model']}",
                each["direction"],
                number(ours.get("gb_per_s")),
                number(copies.get("gb_per_s")),
                number(theirs["gb_per_s"]),
                _SHORT[theirs["method"]],
                number(ours.get("ratio"), 2),
                f"{number(ours.get('call_us'), 0)} / {theirs['call_us']:.0f}",
                f"{number(ours.get('slowdown'), 2)} / {number(theirs['slowdown'], 2)}",
            )
        )
    if lines:
        output.table(f"{situation.text}, {allocator} allocator", columns, lines)


def _microseconds(value: float | None) -> str:
    return number(value, 1 if value is not None and value < 100 else 0)


def show_scheduler(fields: Fields, output: Output) -> None:
    """Microseconds of the scheduler's calls; these are real on every machine."""
    records: Sequence[Record] = fields["scheduler"]
    if not records:
        return
    columns = ("keys", "cache", "lookup", "prep store", "compl store", "prep load", "compl load", "touch")
    lines = [(each["keys"], each["name"], *(_microseconds(each["us"][call]) for call in CALLS)) for each in records]
    title = f"host time of the scheduler's calls, {fields['scheduler_capacity']:,} keys held, microseconds, medians"
    output.table(title, columns, lines, left=("cache",))
    for name in dict.fromkeys(each["over"] for each in fields["scheduler_ratios"]):
        ratios = [each for each in fields["scheduler_ratios"] if each["over"] == name]
        slower = [f"{each['call']} of {each['keys']} ({each['ratio']:.1f})" for each in ratios if each["ratio"] > 1]
        output.line(
            f"{records[0]['name']} is slower than {name} in {len(slower)} of {len(ratios)}: {', '.join(slower)}"
        )
