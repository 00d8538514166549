"""Statistics as Prometheus metrics: their names and values, several caches, and caches that are gone."""

from __future__ import annotations

import dataclasses
import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from programs import run_program
from servers import Process, need_module
from tiering import SECONDS, keys, tiered

from kvoffload.cache.statistics import CacheStatistics, Histogram, TenantCounts
from kvoffload.cache.tiering.below import BreakerState, CacheTierStatistics
from kvoffload.engine.statistics import DirectionTotals, EngineStatistics
from kvoffload.errors import CapabilityError, ClosedError
from kvoffload.observability.prometheus import CacheCollector, register
from kvoffload.tiers import Outcome, TierStatistics, ValkeyTier


def cache_statistics(**changes: Any) -> CacheStatistics:
    numbers = ["capacity", "resident", "pending", "pinned", "lookups", "hits", "stored", "loaded", "evicted", "failed"]
    numbers += ["declined", "removed", "promoted"]
    counts: dict[str, Any] = {name: 100 + index for index, name in enumerate(numbers)}
    residency = Histogram(bounds=(0.5, 60.0), counts=(3, 0, 4), total=1000.5)
    reuse = Histogram(bounds=(1.0, 1048576.0), counts=(1, 2, 0), total=77.0)
    counts |= {"residency_seconds": residency, "reuse_distance_blocks": reuse}
    counts |= {"hits_from": (("host", 95), ("disk", 10)), "hints": (("retain accepted", 3),), "retained_hits": 40}
    return CacheStatistics(**counts | changes)


def engine_statistics(**changes: Any) -> EngineStatistics:
    numbers = {field.name: 0 for field in dataclasses.fields(EngineStatistics)}
    wanted: dict[str, Any] = {
        "simulated": False,
        "pinned_bytes": 1 << 30,
        "staging_bytes": 1 << 20,
        "in_flight": 5,
        "held": 2,
    }
    wanted["store"] = DirectionTotals(jobs=7, failed=1, nbytes=4096, seconds=0.25)
    wanted["load"] = DirectionTotals(jobs=9, failed=0, nbytes=1 << 20, seconds=1.5)
    return EngineStatistics(**numbers | wanted | changes)


class Stub:
    """Has statistics, or an error instead of them, as a cache and an engine have."""

    def __init__(self, statistics: Any, engine: Stub | None = None) -> None:
        self._statistics = statistics
        if engine is not None:
            self.engine = engine

    def statistics(self) -> Any:
        if isinstance(self._statistics, Exception):
            raise self._statistics
        return self._statistics


@pytest.fixture
def client() -> Any:
    return pytest.importorskip("prometheus_client", reason="prometheus_client is not here")


@pytest.fixture
def registry(client: Any) -> Any:
    return client.CollectorRegistry()


def lines(client: Any, registry: Any, *, comments: bool = False) -> list[str]:
    """What a scrape gets."""
    text = client.generate_latest(registry).decode()
    return [line for line in text.splitlines() if comments or not line.startswith("#")]


# A metric of each kind; that all are there with their values, the tests below and those of the dashboard see.
CACHE_TEXT = """\
# HELP kvoffload_cache_blocks Blocks in the cache; pinned ones are among the resident.
# TYPE kvoffload_cache_blocks gauge
kvoffload_cache_blocks{gpu="0",state="resident"} 101.0
kvoffload_cache_blocks{gpu="0",state="pending"} 102.0
kvoffload_cache_blocks{gpu="0",state="pinned"} 103.0
# HELP kvoffload_cache_capacity_blocks Blocks that fit into the cache.
# TYPE kvoffload_cache_capacity_blocks gauge
kvoffload_cache_capacity_blocks{gpu="0"} 100.0
# HELP kvoffload_cache_lookups_total Blocks that lookups and promotions asked for.
# TYPE kvoffload_cache_lookups_total counter
kvoffload_cache_lookups_total{gpu="0"} 104.0
# HELP kvoffload_cache_tier_hits_total The hits by where they were: host, or the name of a tier.
# TYPE kvoffload_cache_tier_hits_total counter
kvoffload_cache_tier_hits_total{gpu="0",tier="host"} 95.0
kvoffload_cache_tier_hits_total{gpu="0",tier="disk"} 10.0
# HELP kvoffload_cache_hints_total Hints, by action and answer.
# TYPE kvoffload_cache_hints_total counter
kvoffload_cache_hints_total{answer="retain accepted",gpu="0"} 3.0
# HELP kvoffload_cache_residency_seconds How long evicted blocks had been in the cache.
# TYPE kvoffload_cache_residency_seconds histogram
kvoffload_cache_residency_seconds_bucket{gpu="0",le="0.5"} 3.0
kvoffload_cache_residency_seconds_bucket{gpu="0",le="60.0"} 3.0
kvoffload_cache_residency_seconds_bucket{gpu="0",le="+Inf"} 7.0
kvoffload_cache_residency_seconds_count{gpu="0"} 7.0
kvoffload_cache_residency_seconds_sum{gpu="0"} 1000.5
"""

TRANSFER_LINES = [
    'kvoffload_transfer_bytes_total{direction="store"} 4096.0',
    'kvoffload_transfer_bytes_total{direction="load"} 1.048576e+06',
    'kvoffload_transfer_seconds_total{direction="store"} 0.25',
    'kvoffload_transfer_seconds_total{direction="load"} 1.5',
    'kvoffload_transfer_jobs_total{direction="store"} 7.0',
    'kvoffload_transfer_jobs_total{direction="load"} 9.0',
    'kvoffload_transfer_failed_jobs_total{direction="store"} 1.0',
    'kvoffload_transfer_failed_jobs_total{direction="load"} 0.0',
    "kvoffload_transfer_jobs_in_flight 5.0",
    "kvoffload_transfer_jobs_held 2.0",
    "kvoffload_slots 0.0",
    "kvoffload_pinned_slots 0.0",
    "kvoffload_pinned_bytes 1.073741824e+09",
    "kvoffload_staging_bytes 1.048576e+06",
]


# what a scrape gets


def test_statistics_of_a_cache_as_text(client: Any, registry: Any) -> None:
    cache = Stub(cache_statistics())
    register(cache, registry, gpu="0")
    expected = CACHE_TEXT.splitlines()
    assert [line for line in lines(client, registry, comments=True) if line in expected] == expected


def test_every_number_of_a_cache_is_there(client: Any, registry: Any) -> None:
    """A new field of the statistics needs its metric."""
    labelled = ("tenants", "hits_from", "hints", "weights")
    names = [field.name for field in dataclasses.fields(CacheStatistics) if field.name not in labelled]
    histograms = ("residency_seconds", "reuse_distance_blocks")
    counts = {name: 1000 + index for index, name in enumerate(names) if name not in histograms}
    by_tenant = {field.name: 2000 + index for index, field in enumerate(dataclasses.fields(TenantCounts))}
    by_place = {"host": 3000, "disk": 3001}
    counted = {"tenants": (("batch", TenantCounts(**by_tenant)),), "hits_from": tuple(by_place.items())}
    cache = Stub(cache_statistics(**counts, **counted))
    register(cache, registry)
    text = lines(client, registry)
    values = {float(line.split()[-1]) for line in text}
    assert {name for name, value in (counts | by_tenant | by_place).items() if value not in values} == set()
    assert all(any(f"kvoffload_cache_{name}_bucket" in line for line in text) for name in histograms)
    assert set(counts) | set(histograms) == set(names)


def test_tenants_are_a_label(client: Any, registry: Any) -> None:
    """The default tenant, whose name is "", included."""
    tenants = (("", TenantCounts(stored=1)), ('a "b"', TenantCounts(stored=2, failed=3, declined=4)))
    cache = Stub(cache_statistics(tenants=tenants))
    register(cache, registry, gpu="0")
    assert [line for line in lines(client, registry) if "tenant" in line] == [
        'kvoffload_cache_tenant_stored_total{gpu="0",tenant=""} 1.0',
        'kvoffload_cache_tenant_stored_total{gpu="0",tenant="a \\"b\\""} 2.0',
        'kvoffload_cache_tenant_failed_total{gpu="0",tenant=""} 0.0',
        'kvoffload_cache_tenant_failed_total{gpu="0",tenant="a \\"b\\""} 3.0',
        'kvoffload_cache_tenant_declined_total{gpu="0",tenant=""} 0.0',
        'kvoffload_cache_tenant_declined_total{gpu="0",tenant="a \\"b\\""} 4.0',
    ]


def test_a_cache_with_an_engine_shows_its_transfers(client: Any, registry: Any) -> None:
    cache = Stub(cache_statistics(), Stub(engine_statistics()))
    register(cache, registry)
    shown = [line for line in lines(client, registry) if not line.startswith("kvoffload_cache_")]
    assert shown == TRANSFER_LINES


def test_seconds_of_a_simulated_device_are_not_exported(client: Any, registry: Any) -> None:
    cache = Stub(cache_statistics(), Stub(engine_statistics(simulated=True)))
    register(cache, registry)
    shown = [line for line in lines(client, registry, comments=True) if "kvoffload_cache_" not in line]
    assert [line for line in shown if not line.startswith("#")] == [
        line for line in TRANSFER_LINES if "seconds" not in line
    ]
    assert not any("kvoffload_transfer_seconds" in line for line in shown)


def test_values_are_those_of_the_moment(client: Any, registry: Any) -> None:
    cache = Stub(cache_statistics(resident=1))
    register(cache, registry)
    assert 'kvoffload_cache_blocks{state="resident"} 1.0' in lines(client, registry)
    cache._statistics = cache_statistics(resident=2)
    assert 'kvoffload_cache_blocks{state="resident"} 2.0' in lines(client, registry)


def test_a_scrape_can_be_read_back(client: Any, registry: Any) -> None:
    """By the package's own parser, names and kinds and labels with odd values included."""
    from prometheus_client.parser import text_string_to_metric_families

    cache = Stub(cache_statistics(tenants=(("t", TenantCounts()),)), Stub(engine_statistics()))
    cache.tier_statistics = lambda: [tier_statistics(tier=TierStatistics(records=1), seconds_per_record=1)]  # type: ignore[attr-defined]
    register(cache, registry, model='a "b"\n\\c', gpu="é")
    families = list(text_string_to_metric_families(client.generate_latest(registry).decode()))
    described = CacheCollector(cache, model="", gpu="").describe()
    assert [(each.name, each.type) for each in families] == [(each.name, each.type) for each in described]
    labels = [sample.labels for family in families for sample in family.samples]
    assert all((each["model"], each["gpu"]) == ('a "b"\n\\c', "é") for each in labels)


# several caches, and those that are garbage


def test_one_collector_serves_several_caches(client: Any, registry: Any) -> None:
    first, second = Stub(cache_statistics(capacity=1)), Stub(cache_statistics(capacity=2), Stub(engine_statistics()))
    collector = register(first, registry, gpu="0", cache="a")
    collector.add(second, gpu="1", cache="a")
    text = lines(client, registry, comments=True)
    assert [line for line in text if line.startswith("kvoffload_cache_capacity_blocks")] == [
        'kvoffload_cache_capacity_blocks{cache="a",gpu="0"} 1.0',
        'kvoffload_cache_capacity_blocks{cache="a",gpu="1"} 2.0',
    ]
    assert [line for line in text if "in_flight{" in line] == [
        'kvoffload_transfer_jobs_in_flight{cache="a",gpu="1"} 5.0'
    ]
    types = [line for line in text if line.startswith("# TYPE")]
    assert len(types) == len(set(types))


def test_a_second_collector_in_a_registry_is_refused_with_the_remedy(client: Any, registry: Any) -> None:
    first, second = Stub(cache_statistics(capacity=1)), Stub(cache_statistics(capacity=2))
    collector = register(first, registry)
    with pytest.raises(ValueError, match=r"registry has a collector.*add\(\) the cache to that one, or unregister\(\)"):
        register(second, registry)
    assert "kvoffload_cache_capacity_blocks 1.0" in lines(client, registry)
    registry.unregister(collector)
    register(second, registry)
    assert "kvoffload_cache_capacity_blocks 2.0" in lines(client, registry)


@pytest.mark.usefixtures("client")
def test_added_caches_have_the_same_labels_with_other_values() -> None:
    first, second = Stub(cache_statistics()), Stub(cache_statistics())
    collector = CacheCollector(first, gpu="0")
    with pytest.raises(ValueError, match=r"labels must be \['gpu'\] as for the first cache, got \['gpu', 'model'\]"):
        collector.add(second, gpu="1", model="m")
    with pytest.raises(ValueError, match=r"\{'gpu': '0'\} belong to another cache; give each its own"):
        collector.add(second, gpu="0")
    del first
    gc.collect()
    collector.add(second, gpu="0")
    assert [sample.value for sample in next(iter(collector.collect())).samples] == [101, 102, 103]


def test_a_cache_that_is_garbage_has_no_metrics(client: Any, registry: Any) -> None:
    """The registry holds the collector, which must not hold the cache."""
    cache, other = Stub(cache_statistics()), Stub(cache_statistics(capacity=2))
    collector = register(cache, registry, gpu="0")
    collector.add(other, gpu="1")
    del cache
    gc.collect()
    assert 'kvoffload_cache_capacity_blocks{gpu="1"} 2.0' in lines(client, registry)
    assert not any('gpu="0"' in line for line in lines(client, registry))
    del other
    gc.collect()
    assert client.generate_latest(registry) == b""


@pytest.mark.parametrize("closed", ["cache", "engine"])
def test_a_cache_of_a_parent_process_does_not_stop_the_scrape(client: Any, registry: Any, closed: str) -> None:
    error = ClosedError("forked")
    cache = Stub(
        error if closed == "cache" else cache_statistics(), Stub(error if closed == "engine" else engine_statistics())
    )
    collector = register(cache, registry, gpu="0")
    other = Stub(cache_statistics())
    collector.add(other, gpu="1")
    text = lines(client, registry)
    assert 'kvoffload_cache_capacity_blocks{gpu="1"} 100.0' in text
    assert not any('gpu="0"' in line for line in text)


def test_another_error_is_not_hidden(client: Any, registry: Any) -> None:
    cache = Stub(RuntimeError("a defect"))
    register(cache, registry)  # asks for no statistics yet
    with pytest.raises(RuntimeError, match="a defect"):
        client.generate_latest(registry)


@pytest.fixture
def in_default(client: Any) -> Iterator[list[CacheCollector]]:
    """Collectors to take out of the process's own registry at the end."""
    collectors: list[CacheCollector] = []
    yield collectors
    for collector in collectors:
        client.REGISTRY.unregister(collector)


def test_the_default_registry_is_that_of_the_process(client: Any, in_default: list[CacheCollector]) -> None:
    cache = Stub(cache_statistics())
    in_default.append(register(cache))
    assert client.REGISTRY.get_sample_value("kvoffload_cache_capacity_blocks") == 100


# what is refused


@pytest.mark.usefixtures("client")
@pytest.mark.parametrize(
    "name", ["state", "direction", "le", "tenant", "answer", "a-b", "", "1st", "__hidden", "é", "a\n"]
)
def test_labels_that_cannot_be_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match="must be letters, digits and underscores") as caught:
        CacheCollector(Stub(cache_statistics()), **{name: "value"})
    assert f"label {name!r} " in str(caught.value)


@pytest.mark.usefixtures("client")
def test_values_of_labels_are_strings() -> None:
    gpu: Any = 0
    with pytest.raises(TypeError, match="label gpu must be a string, got 0"):
        CacheCollector(Stub(cache_statistics()), gpu=gpu)


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("prometheus_client", "prometheus_client.core", "prometheus_client.utils"):
        monkeypatch.setitem(sys.modules, name, None)
    cache = Stub(cache_statistics())
    for make in (CacheCollector, register):
        with pytest.raises(CapabilityError, match=r"need prometheus_client.*pip install 'kvoffload\[prometheus\]'"):
            make(cache)


def test_importing_the_module_does_not_import_the_package() -> None:
    program = "import sys, kvoffload.observability.prometheus; print('prometheus_client' in sys.modules)"
    assert run_program(program, dev_mode=False) == "False\n"


# tiers


def tier_statistics(**changed: Any) -> CacheTierStatistics:
    numbers = dict.fromkeys(("opened", "promoted", "not_found", "slower", "written", "not_written", "dropped"), 0)
    options = {"name": "disk", "state": BreakerState.CLOSED, "seconds_per_record": None, "tier": TierStatistics()}
    return CacheTierStatistics(**{**numbers, **options, **changed})


def test_every_count_of_a_tier_is_there(client: Any, registry: Any) -> None:
    wanted = ("opened", "promoted", "not_found", "slower", "written", "not_written", "dropped")
    counts = {name: 1000 + at for at, name in enumerate(wanted)}
    names = ("bytes_read", "bytes_written", "corrupt", "missing", "failed", "declined", "expired")
    inside = {name: 2000 + at for at, name in enumerate(names)}
    cache = Stub(cache_statistics())
    cache.tier_statistics = lambda: [tier_statistics(**counts, tier=TierStatistics(records=7, **inside))]  # type: ignore[attr-defined]
    register(cache, registry, gpu="0")
    found = {line.split("{")[0]: line for line in lines(client, registry) if 'tier="disk"' in line}
    for name, value in {**counts, **inside}.items():
        metric = "breaker_opened" if name == "opened" else name
        assert found[f"kvoffload_tier_{metric}_total"].endswith(f'{{gpu="0",tier="disk"}} {value}.0')
    assert found["kvoffload_tier_records"].endswith(" 7.0")
    assert found["kvoffload_tier_breaker"].endswith(" 0.0")


def test_what_waits_for_a_tier_is_there(client: Any, registry: Any) -> None:
    cache = Stub(cache_statistics())
    inside = TierStatistics(queued_reads=3, queued_writes=5, longest_call=0.25)
    cache.tier_statistics = lambda: [tier_statistics(tier=inside, seconds_per_record=0.125)]  # type: ignore[attr-defined]
    register(cache, registry)
    found = {line.split("{")[0]: line.split()[-1] for line in lines(client, registry) if 'tier="disk"' in line}
    values = {
        "queued_reads": "3.0",
        "queued_writes": "5.0",
        "longest_call_seconds": "0.25",
        "seconds_per_block": "0.125",
    }
    assert {name: found[f"kvoffload_tier_{name}"] for name in values} == values


@pytest.mark.servers
def test_a_tier_over_a_store_is_exported(client: Any, registry: Any, valkey_server: Process) -> None:
    need_module("glide_sync")
    tier = ValkeyTier(valkey_server.address, identity="metrics", name="valkey of rack 7")
    with tiered(tier) as bench:
        register(bench.cache, registry)
        bench.written(range(4))
        with bench.cache.promote(keys(range(4))) as promotion:
            assert promotion.wait(SECONDS) == 4
        assert tier.remove(keys([4])).wait(SECONDS) == [Outcome.MISSING]
        found = {line.split("{")[0]: line for line in lines(client, registry) if 'tier="valkey of rack 7"' in line}
        values = {name.removeprefix("kvoffload_tier_"): float(line.split()[-1]) for name, line in found.items()}
    assert values["seconds_per_block"] > 0
    assert values["bytes_read_total"] == values["bytes_written_total"] == 4 * tier.record_bytes
    expected = {"promoted_total": 4.0, "written_total": 4.0, "failed_total": 0.0, "corrupt_total": 0.0, "breaker": 0.0}
    assert {name: values[name] for name in expected} == expected
    assert "records" not in values, "the store does not say"


@pytest.mark.parametrize(
    ("state", "puts", "value"),
    [
        ("CLOSED", "CLOSED", 0),
        ("CLOSED", "TRYING", 0),
        ("CLOSED", "OPEN", 3),
        ("TRYING", "CLOSED", 1),
        ("TRYING", "OPEN", 1),
        ("OPEN", "CLOSED", 2),
        ("OPEN", "OPEN", 2),
    ],
)
def test_the_state_of_a_breaker(client: Any, registry: Any, state: str, puts: str, value: int) -> None:
    cache = Stub(cache_statistics())
    cache.tier_statistics = lambda: [tier_statistics(state=BreakerState[state], puts=BreakerState[puts])]  # type: ignore[attr-defined]
    register(cache, registry)
    assert f'kvoffload_tier_breaker{{tier="disk"}} {value}.0' in lines(client, registry)
    assert not [line for line in lines(client, registry) if "tier_records" in line], "unknown"
