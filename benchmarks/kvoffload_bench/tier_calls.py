"""What benchmarks of tiers share: jobs that are timed as caches wait for them, host time of calls, and ratios."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvoffload.tiers import Outcome, Tier, TierJob

KEYS_OF_A_CALL = 64
_CALLS = 30
_KEY_BYTES = 16


@dataclass
class Verified:
    """Records that were read and compared, and those of them that had wrong bytes or were missing."""

    records: int = 0
    wrong: int = 0
    missing: int = 0

    def note(self, job: TierJob) -> None:
        """Count keys that are not DONE."""
        self.missing += sum(outcome is not Outcome.DONE for outcome in job.outcomes)


@dataclass
class Times:
    """Seconds of each counted round: of the tier, and of the bare loop."""

    tier: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)

    def figures(self, nbytes: int) -> dict[str, Any]:
        """For JSON: bandwidths of rounds that move so many bytes, and the tier's over the bare loop's."""
        tier, bare = statistics.median(self.tier), statistics.median(self.bare)
        rounds = [of_bare / of_tier for of_tier, of_bare in zip(self.tier, self.bare, strict=True)]
        return {
            "ratio": bare / tier,
            "ratio_lowest_round": min(rounds),
            "ratio_highest_round": max(rounds),
            "tier_gb_per_s": nbytes / tier / 1e9,
            "bare_gb_per_s": nbytes / bare / 1e9,
        }


def numbered_keys(start: int, count: int) -> list[bytes]:
    """Keys of 16 bytes; new objects each time, as requests bring them."""
    return [number.to_bytes(_KEY_BYTES, "little") for number in range(start + 1, start + count + 1)]


def carry_out(call: Callable[..., TierJob], keys: Sequence[bytes], entries: Sequence[int], verified: Verified) -> None:
    """`put` or `get`, and wait for the last outcome without polling, as caches do."""
    jobs: list[TierJob] = []
    ended = threading.Event()

    def notify() -> None:
        if jobs and jobs[0].done:
            ended.set()

    jobs.append(call(keys, entries, notify=notify))
    notify()
    ended.wait()
    verified.note(jobs[0])


def measure_calls(tier: Tier, verified: Verified, between: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """Host time of `put` and `get` a key, until the call returns: wall clock and CPU of the calling thread.

    The threads of the tier begin while the call is still going on.

    Args:
        tier: with a pool of 64 entries or more.
        verified: is added to.
        between: called after each put and get.
    """
    count = KEYS_OF_A_CALL
    times: dict[str, list[tuple[float, float]]] = {"put": [], "get": []}
    for number in range(_CALLS):
        keys = numbered_keys(number * count, count)
        for name, call in (("put", tier.put), ("get", tier.get)):
            wall, cpu = time.perf_counter(), time.thread_time()
            job = call(keys, range(count))
            times[name].append((time.perf_counter() - wall, time.thread_time() - cpu))
            job.wait()
            verified.note(job)
        between()
    fields: dict[str, Any] = {"keys": count}
    for name, calls in times.items():
        wall_times, cpu_times = zip(*calls, strict=True)
        fields[f"{name}_us"] = statistics.median(wall_times) / count * 1e6
        fields[f"{name}_cpu_us"] = statistics.median(cpu_times) / count * 1e6
    return fields
