"""`bench disk --failing`: requests over a disk that fails, hangs or reads wrong bytes, against a cache without a disk.

For each fault a `BlockCache` with a disk below and one without serve the same requests. There are four phases:

1. *Warm-up*: the disk works, and takes all that is stored.
2. *Fault*: rounds of as many requests each. Ten requests go through one cache and then through the other, which take
   turns in being first, so that one slow second of the machine hits both. The fault begins with the first round.
3. *Return*: the disk works again; requests follow until a record has been read from it.
4. *After*: one more round, to see that the disk is used.

A request's time is what its caller spends in calls of the cache and waiting for them: `lookup`, `promote`, `load`,
`store`, `touch`. Nothing is computed, which would bring the ratios nearer to 1. Bytes are written before stores and
compared after loads outside of these times, where a server would compute.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvoffload.bench.disk_faults import Fault, FaultyFiles
from kvoffload.bench.disk_files import tier_bytes
from kvoffload.cache.tiering.below import CacheTierStatistics
from kvoffload.device.device import Device
from kvoffload.internal.models import ModelGeometry
from kvoffload.replay.trace import Request
from kvoffload.replay.verified import VerifiedCache
from kvoffload.terminal.console import Advance
from kvoffload.tiers import DiskTier, Tier

DEADLINE = 0.2  # seconds of a promotion
DISK_SLOTS_PER_SLOT = 4
_POLICY = "lru"  # of both caches, so that their hits can be compared: "prefix" declines nothing above a disk
_TURN = 10  # requests
_DRAIN_SECONDS = 60.0
_RETURN_SECONDS = 150.0  # for which a record is waited after the disk's return; a breaker pauses for 60 at most


class Traffic(NamedTuple):
    """What is replayed, and over what.

    Attributes:
        geometry: of the blocks.
        slots: keys that the host holds; the disk holds four times as many.
        requests: their keys, in order.
        round_requests: of each of the rounds.
        repeats: rounds.
        seed: of the bytes.
    """

    geometry: ModelGeometry
    slots: int
    requests: Sequence[Request]
    round_requests: int
    repeats: int
    seed: int

    @property
    def warm_up(self) -> Sequence[Request]:
        """Those that no round has: at least a round's."""
        return self.requests[: -self.repeats * self.round_requests]

    @property
    def rounds(self) -> list[Sequence[Request]]:
        rest = self.requests[-self.repeats * self.round_requests :]
        return [rest[at : at + self.round_requests] for at in range(0, len(rest), self.round_requests)]


@dataclass
class _Served:
    """Seconds of each request, round after round, and its hits."""

    rounds: list[list[float]] = field(default_factory=list)
    hits: int = 0

    def add(self, cache: VerifiedCache, requests: Sequence[Request]) -> None:
        """Serve requests of the latest round."""
        for keys in requests:
            seconds, hits = _serve(cache, keys)
            self.rounds[-1].append(seconds)
            self.hits += hits


def measure(device: Device, file: Path, traffic: Traffic, progress: Advance) -> dict[str, Any]:
    """Figures of every fault.

    Args:
        file: for the tier; lost afterwards.
        progress: called with the rounds that have ended, and all.

    Returns:
        For JSON. All times are the caller's, by wall clock.
    """
    done = itertools.count()
    rounds = len(Fault) * traffic.repeats
    records = [_measure(device, file, traffic, fault, lambda: progress(next(done), rounds)) for fault in Fault]
    return {
        "simulated": device.simulated,
        "device": device.name,
        "model": traffic.geometry.name,
        "bytes_per_block": traffic.geometry.bytes_per_block,
        "slots": traffic.slots,
        "requests_a_round": traffic.round_requests,
        "repeats": traffic.repeats,
        "deadline_seconds": DEADLINE,
        "faults": records,
    }


def _measure(
    device: Device, file: Path, traffic: Traffic, fault: Fault, progress: Callable[[], None]
) -> dict[str, Any]:
    files, order = FaultyFiles(), ("without", "failing")
    with ExitStack() as undo:
        undo.callback(file.unlink, missing_ok=True)
        caches = {
            "without": undo.enter_context(_make_cache(device, traffic, None)),
            "failing": undo.enter_context(_make_cache(device, traffic, _tier_maker(file, traffic.slots, files))),
        }
        undo.callback(files.end)
        failing = caches["failing"]
        for each in caches.values():
            for keys in traffic.warm_up:
                _serve(each, keys)
        failing.cache.drain(_DRAIN_SECONDS)
        found = {name: _Served() for name in order}
        before = _below(failing)
        begun = time.monotonic()
        files.begin(fault)
        for requests in traffic.rounds:
            progress()
            for served in found.values():
                served.rounds.append([])
            for turn, at in enumerate(range(0, len(requests), _TURN)):
                for name in order if turn % 2 else reversed(order):
                    found[name].add(caches[name], requests[at : at + _TURN])
        during, lasted = _below(failing), time.monotonic() - begun
        files.end()
        returned = _return_seconds(failing, traffic.requests)
        for each in caches.values():
            each.cache.check()
        return {
            "fault": str(fault),
            **_figures(found["without"], found["failing"]),
            "fault_seconds": lasted,
            "disturbed_calls": files.disturbed,
            "breaker_opened": during.opened - before.opened,
            "breaker": during.state.value,
            "read_before_fault": before.promoted,
            "read_during_fault": during.promoted - before.promoted,
            "return_seconds": returned,
            "verified_blocks": sum(each.counts.verified_blocks for each in caches.values()),
            "wrong_blocks": sum(each.counts.corrupt_blocks for each in caches.values()),
        }


def _make_cache(device: Device, traffic: Traffic, make_tier: Callable[[int], Tier] | None) -> VerifiedCache:
    return VerifiedCache(
        device,
        traffic.geometry,
        capacity=traffic.slots,
        longest=max(map(len, traffic.requests)),
        policy=_POLICY,
        seed=traffic.seed,
        make_tier=make_tier,
        write="through",
        deadline=DEADLINE,
    )


def _tier_maker(file: Path, slots: int, files: FaultyFiles) -> Callable[[int], Tier]:
    def make(record_bytes: int) -> Tier:
        nbytes = tier_bytes(DISK_SLOTS_PER_SLOT * slots, record_bytes, 1)
        return DiskTier(file, nbytes=nbytes, identity="kvoffload bench disk", operations=files)

    return make


def _below(served: VerifiedCache) -> CacheTierStatistics:
    [found] = served.cache.tier_statistics()
    return found


def _serve(served: VerifiedCache, keys: Request) -> tuple[float, int]:
    """One request: the seconds that its caller spends in the cache, and its hits."""
    waited, hits = 0.0, served.counts.blocks_hit
    for job in served.steps(keys):
        begin = time.perf_counter()
        job.wait()
        waited += time.perf_counter() - begin
    return waited + served.counts.call_seconds[-1], served.counts.blocks_hit - hits


def _return_seconds(served: VerifiedCache, requests: Sequence[Request]) -> float | None:
    """Serve requests until a record has been read from the disk; seconds from now, None: none was."""
    begun, before = time.monotonic(), _below(served).promoted
    for keys in itertools.cycle(requests):
        _serve(served, keys)
        seconds = time.monotonic() - begun
        if _below(served).promoted > before:
            return seconds
        if seconds > _RETURN_SECONDS:
            break
    return None


# figures --------------------------------------------------------------------------------------------------------------


def _figures(without: _Served, failing: _Served) -> dict[str, Any]:
    """Ratios of rounds: below 1, the cache over the failing disk is slower, or its requests take less time."""
    speeds = [sum(bare) / sum(mine) for bare, mine in _pairs(without, failing)]
    whole = sum(map(sum, without.rounds)) / sum(map(sum, failing.rounds))
    medians = [_quantile(mine, 50) / _quantile(bare, 50) for bare, mine in _pairs(without, failing)]
    slowest = [_quantile(mine, 99) / _quantile(bare, 99) for bare, mine in _pairs(without, failing)]
    count = sum(map(len, without.rounds))
    return {
        "requests_ratio": float(np.median(speeds)),
        "requests_ratio_lowest_round": min(speeds),
        "requests_ratio_highest_round": max(speeds),
        "requests_ratio_all_rounds": whole,
        "median_ratio": [min(medians), max(medians)],
        "p99_ratio": [min(slowest), max(slowest)],
        "request_us": 1e6 * sum(map(sum, failing.rounds)) / count,
        "request_without_us": 1e6 * sum(map(sum, without.rounds)) / count,
        "longest_request_seconds": max(map(max, failing.rounds)),
        "longest_request_without_seconds": max(map(max, without.rounds)),
        "hits": failing.hits,
        "hits_without": without.hits,
    }


def _pairs(without: _Served, failing: _Served) -> Iterator[tuple[list[float], list[float]]]:
    return zip(without.rounds, failing.rounds, strict=True)


def _quantile(seconds: list[float], percent: float) -> float:
    return float(np.percentile(seconds, percent))
