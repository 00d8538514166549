"""What results and statistics say in short: rates, and one line each."""

from __future__ import annotations

import math
from typing import Any

import pytest

import kvoffload
from kvoffload import Direction, TransferError, TransferResult
from kvoffload.cache.statistics import CacheStatistics, Histogram
from kvoffload.engine.job import SimulatedTransferResult
from kvoffload.engine.statistics import DirectionTotals, EngineStatistics

NO_VALUES = Histogram((), (0,), 0.0)


def result(nbytes: int, seconds: float, *, error: TransferError | None = None) -> TransferResult:
    return TransferResult(1, Direction.STORE, nbytes, seconds, "batch", error)


def cache_statistics(**counts: Any) -> CacheStatistics:
    names = ("pending", "pinned", "lookups", "hits", "stored", "loaded", "evicted", "failed", "declined", "removed")
    none = dict.fromkeys(names, 0)
    values: dict[str, Any] = {"capacity": 8, "resident": 3, **none, **counts}
    return CacheStatistics(**values, residency_seconds=NO_VALUES, reuse_distance_blocks=NO_VALUES)


def test_gb_per_s_is_payload_over_gpu_seconds() -> None:
    assert result(50_000_000_000, 2.0).gb_per_s == 25.0


@pytest.mark.parametrize(("nbytes", "seconds"), [(64, math.nan), (64, 0.0), (0, 0.0), (0, math.nan)])
def test_gb_per_s_is_nan_where_the_seconds_are_unknown(nbytes: int, seconds: float) -> None:
    assert math.isnan(result(nbytes, seconds).gb_per_s)


def test_gb_per_s_of_a_simulated_transfer_is_nan(device: kvoffload.Device) -> None:
    layout = kvoffload.KVLayout([device.allocate_planes(2, block_bytes=64, num_blocks=4)])
    with kvoffload.OffloadEngine(layout, device=device, num_slots=4) as engine:
        stored = engine.store([0], [0]).wait(10)
    assert isinstance(stored, SimulatedTransferResult)
    assert stored.seconds >= 0
    assert math.isnan(stored.gb_per_s)
    assert math.isnan(SimulatedTransferResult(*result(64, 1.0)).gb_per_s)


def test_hit_rate() -> None:
    assert cache_statistics(lookups=8, hits=6).hit_rate == 0.75
    assert cache_statistics(lookups=8).hit_rate == 0.0
    assert cache_statistics(lookups=8, hits=8).hit_rate == 1.0


def test_hit_rate_is_nan_where_nothing_was_looked_up() -> None:
    assert math.isnan(cache_statistics().hit_rate)


def test_cache_statistics_are_shown_in_one_short_line() -> None:
    shown = repr(cache_statistics(lookups=8, hits=6, stored=5, evicted=2))
    assert shown == "CacheStatistics(capacity=8, resident=3, hit_rate=0.750, stored=5, evicted=2)"
    assert repr(cache_statistics()) == "CacheStatistics(capacity=8, resident=3, no lookups)"


def test_engine_statistics_are_shown_in_one_short_line() -> None:
    zero = dict.fromkeys(("unreported", "streams", "streams_in_use", "events", "events_in_use"), 0)
    statistics = EngineStatistics(
        simulated=True,
        num_slots=4,
        pinned_slots=4,
        pinned_bytes=16384,
        pinning_error=None,
        staging_bytes=0,
        in_flight=1,
        held=0,
        dropped_reports=2,
        store=DirectionTotals(3, 1, 128),
        load=DirectionTotals(),
        **zero,
    )
    assert repr(statistics) == (
        "EngineStatistics(simulated, num_slots=4, pinned_bytes=16384, in_flight=1, dropped_reports=2, "
        "store: 3 jobs, 1 failed, 128 bytes, load: 0 jobs, 0 bytes)"
    )
