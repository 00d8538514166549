"""What `bench vllm` prints, and the calls of vLLM's scheduler: `CPUOffloadingManager` and `KVOffloadManager`.

Every cache is full. In each round a request of new keys comes: its first key is looked up (a miss), all are stored,
which evicts as many, looked up (a hit), loaded and touched. Keys are new objects each time, 36 bytes, as vLLM's are.
Times are of the calls alone, on this machine's CPU; a GPU takes no part.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any

from kvoffload.cache.policies import DEFAULT_POLICY
from kvoffload.terminal.console import Advance, Output, counted
from kvoffload_bench.field_compute import Situation
from kvoffload_bench.report import Fields, fixed
from kvoffload_bench.vllm_classes import ManagerClasses
from kvoffload_bench.vllm_methods import BACKEND, ENGINE, ENGINE_COPIES, OURS, THEIRS, WORKER

CAPACITY = 65_536
COUNTS = (1, 32, 512)
CALLS = ("lookup", "prepare_store", "complete_store", "prepare_load", "complete_load", "touch")
CACHES = ("CPUOffloadingManager, lru", "CPUOffloadingManager, arc")
_KEY_BYTES = 36  # a hash of 32 bytes and the number of the group
_FILL = 512


class ManagerCalls:
    """The calls of the scheduler to an offloading manager, for one request after another."""

    def __init__(self, base: Any, manager: Any) -> None:
        self._base, self._manager, self._number = base, manager, 0
        self.hit = base.LookupResult.HIT

    def begin(self, keys: Sequence[bytes]) -> None:
        self._number += 1
        self._request = self._base.ReqContext(str(self._number))
        self._manager.on_new_request(self._request)
        for position, key in enumerate(keys, start=1):
            self._request.set_offload_key_position(key, 16 * position)

    def call(self, name: str, argument: Any) -> Callable[[], Any]:
        """A function that makes a call of the interface, with a key or with keys."""
        return partial(getattr(self._manager, name), argument, self._request)

    def end(self) -> None:
        self._manager.on_request_finished(self._request)


def managers(classes: ManagerClasses, capacity: int) -> dict[str, ManagerCalls]:
    """By name; this library's by its default policy first."""
    ours: Any = importlib.import_module("kvoffload.vllm").KVOffloadManager
    theirs, found = classes.manager.CPUOffloadingManager, {}
    for policy in (DEFAULT_POLICY, "lru"):
        found[f"{ours.__name__}, {policy}"] = ManagerCalls(classes.base, ours(capacity, policy=policy))
    for name in CACHES:
        found[name] = ManagerCalls(classes.base, theirs(capacity, cache_policy=name[-3:]))
    return found


def measure(
    callers: Mapping[str, ManagerCalls], capacity: int, repeats: int, progress: Advance, counts: Sequence[int] = COUNTS
) -> list[dict[str, Any]]:
    """A record for each caller and number of keys: median microseconds by call, and how many keys were stored."""
    numbers = {name: _fill(each, capacity) for name, each in callers.items()}
    records = []
    for place, count in enumerate(counts):
        samples: dict[str, dict[str, list[float]]] = {name: {call: [] for call in CALLS} for name in callers}
        stored = dict.fromkeys(callers, 0)
        for number in range(repeats + 1):
            for name in Random(number).sample(list(callers), len(callers)):
                first = numbers[name]
                numbers[name] += count
                stored[name] += _round(callers[name], first, count, samples[name] if number else None)
        progress(place + 1, len(counts))
        for name, by_call in samples.items():
            medians = {call: statistics.median(values) if values else None for call, values in by_call.items()}
            records.append({"name": name, "vllm": name in CACHES, "keys": count, "stored": stored[name], "us": medians})
    return records


def _fill(calls: ManagerCalls, capacity: int) -> int:
    """Fill the cache with requests, every second of which comes twice. Returns the number of the next key."""
    for number, first in enumerate(range(0, capacity, _FILL)):
        _round(calls, first, min(_FILL, capacity - first), None)
        if number % 2:
            calls.call("touch", _keys(first - _FILL, _FILL))()
    return capacity


def _round(calls: ManagerCalls, first: int, count: int, samples: dict[str, list[float]] | None) -> int:
    """All calls of one request. Returns how many keys were stored."""

    def timed(name: str, argument: Any) -> Any:
        call = calls.call(name, argument)
        begin = time.perf_counter()
        result = call()
        if samples is not None:
            samples[name].append((time.perf_counter() - begin) * 1e6)
        return result

    calls.begin(_keys(first, count))
    assert calls.call("lookup", _keys(first, 1)[0])() is not calls.hit, "a new key is a miss"
    output = timed("prepare_store", _keys(first, count))
    stored = 0 if output is None else len(output.keys_to_store)
    timed("complete_store", _keys(first, count))
    if stored == count:
        assert timed("lookup", _keys(first, 1)[0]) is calls.hit, "a stored key is a hit"
        timed("prepare_load", _keys(first, count))
        timed("complete_load", _keys(first, count))
    timed("touch", _keys(first, count))
    calls.end()
    return stored


def _keys(first: int, count: int) -> list[bytes]:
    """New objects each time, as requests bring them."""
    return [number.to_bytes(_KEY_BYTES, "little") for number in range(first, first + count)]


Record = Mapping[str, Any]


# the report -----------------------------------------------------------------------------------------------------------

PLACE = ("allocator", "situation", "model", "blocks", "direction")  # what the records of one comparison have in common
_FEWEST_ROUNDS = 3  # of each method, to say of a cell whose computation loses more
_SHORT = {WORKER: "worker", BACKEND: "dma"}
_LEGEND = (
    "wall clock, from the call that submits a transfer until it is reported to have ended",
    "ours: GB/s of an engine with default options; copies: of one with staging_bytes=0",
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
    """`lost_us_per_mib`: of the median round; None on an idle GPU."""
    lost, found = _lost_by_round(cell), {"method": cell["method"], "gb_per_s": cell["gb_per_s"]}
    found |= {"call_us": cell["call_median_us"], "slowdown": cell.get("compute_slowdown")}
    return found | {"lost_us_per_mib": statistics.median(lost) if lost else None}


def _lost_by_round(cell: Record) -> list[float]:
    """Microseconds of computation lost for each MiB that is moved, in each round that counts; 0 where a product took
    less time than alone.
    """
    rounds = zip(cell.get("samples_compute_slowdown", ()), cell.get("samples_gb_per_s", ()), strict=False)
    return [max(0.0, 1 - 1 / slow) * (1 << 20) / (rate * 1e3) for slow, rate in rounds if slow is not None]


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


def _summary_lines(name: str, each: Record) -> Iterator[str]:
    label = {ENGINE: "default options", ENGINE_COPIES: "staging_bytes=0"}[name]
    yield (
        f"{label}: {each['at_least_1']} of {each['cells']} cells >= 1.0x, median {each['median']:.2f}, lowest "
        f"{each['lowest'][name]['ratio']:.2f} ({_at(each['lowest'])}), highest {each['highest'][name]['ratio']:.2f} "
        f"({_at(each['highest'])})"
    )
    if each["busy_cells"]:
        places, lost, most, theirs = (each[key] for key in ("loses", "lost_us_per_mib", "most_lost", "most_lost_vllm"))
        yield (
            f"{label}: computation loses {lost['ours']:.1f} us for a MiB moved in each of {each['busy_cells']} cells, "
            f"with vLLM's {lost['vllm']:.1f}; in every round more in {places['more']} cells, less in {places['less']}; "
            f"most {most[name]['lost_us_per_mib']:.1f} us ({_at(most)}), with vLLM's "
            f"{theirs['vllm']['lost_us_per_mib']:.1f} us ({_at(theirs)})"
        )


def _at(each: Record) -> str:
    return f"{each['blocks']}x{each['model']}, {each['direction']}, {each['situation']}, {each['allocator']}"


def _show_place(allocator: str, situation: Situation, comparisons: Iterable[Record], output: Output) -> None:
    columns = ("transfer", "moves", "ours", "copies", "vLLM", "by", "x", "us", "slow")
    lines = []
    for each in comparisons:
        if (each["allocator"], each["situation"]) != (allocator, situation):
            continue
        ours, copies, theirs = each.get(ENGINE, {}), each.get(ENGINE_COPIES, {}), each["vllm"]
        lines.append(
            (
                f"{each['blocks']}x{each['model']}",
                each["direction"],
                fixed(ours.get("gb_per_s")),
                fixed(copies.get("gb_per_s")),
                fixed(theirs["gb_per_s"]),
                _SHORT[theirs["method"]],
                fixed(ours.get("ratio"), 2),
                f"{fixed(ours.get('call_us'), 0)} / {theirs['call_us']:.0f}",
                f"{fixed(ours.get('slowdown'), 2)} / {fixed(theirs['slowdown'], 2)}",
            )
        )
    if lines:
        output.table(f"{situation.text}, {allocator} allocator", columns, lines)


def show_scheduler(fields: Fields, output: Output) -> None:
    """Microseconds of the scheduler's calls; these are real on every machine."""
    records: Sequence[Record] = fields["scheduler"]
    if not records:
        return
    columns = ("keys", "cache", "lookup", "prep store", "compl store", "prep load", "compl load", "touch")
    lines = [
        (
            each["keys"],
            each["name"],
            *(fixed(us, 1 if us is not None and us < 100 else 0) for us in map(each["us"].get, CALLS)),
        )
        for each in records
    ]
    title = f"host time of the scheduler's calls, {fields['scheduler_capacity']:,} keys held, microseconds, medians"
    output.table(title, columns, lines, left=("cache",))
    for name in dict.fromkeys(each["over"] for each in fields["scheduler_ratios"]):
        ratios = [each for each in fields["scheduler_ratios"] if each["over"] == name]
        slower = [f"{each['call']} of {each['keys']} ({each['ratio']:.1f})" for each in ratios if each["ratio"] > 1]
        output.line(
            f"{records[0]['name']} is slower than {name} in {len(slower)} of {len(ratios)}: {', '.join(slower)}"
        )
