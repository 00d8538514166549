"""The Grafana dashboard and the alerting rules ask for metrics and labels that the exporter has."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import kvoffload
from kvoffload.observability.prometheus import register
from kvoffload.tiers import MemoryTier

FOLDER = Path(__file__).parent.parent.parent / "docs" / "monitoring"
ALERTS = (FOLDER / "alerts.yml").read_text()
DASHBOARD = json.loads((FOLDER / "grafana.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
RULES = re.split(r"^ {6}- alert: ", ALERTS, flags=re.MULTILINE)[1:]
SCRAPED_LABELS = {"instance"}  # Prometheus adds it


@pytest.fixture
def exposed(device: kvoffload.Device) -> dict[str, set[str]]:
    """Names of the samples in a scrape of a cache with traffic, parsed as Prometheus does, and their labels."""
    client = pytest.importorskip("prometheus_client", reason="prometheus_client is not here")
    from prometheus_client.parser import text_string_to_metric_families

    planes = device.allocate_blocks(16, planes=2, block_bytes=64)
    layout = kvoffload.KVLayout([planes], dtype="uint8", tokens_per_block=16, block_axes=("tokens", "dim"))
    registry = client.CollectorRegistry()
    with kvoffload.OffloadEngine(layout, device=device, num_slots=2) as engine:
        tiers = [MemoryTier(1 << 20)]
        cache = kvoffload.BlockCache(engine, tiers=tiers, write="through", tenants={"a": kvoffload.Tenant()})
        register(cache, registry=registry)
        keys = kvoffload.chain_keys(range(64), layout=layout, salt="a")
        for key in keys:  # the later ones evict the earlier ones
            cache.store([key], blocks=[1], tenant="a").wait()
            cache.lookup([key])
            cache.touch([key])
            cache.hint("release", session="a session that nobody has named")
            assert cache.drain(10)  # before another key evicts it
        engine.drain()
        engine.poll()
        with cache.promote(keys[:1]) as promotion:
            assert promotion.wait(10) == 1
        found: dict[str, set[str]] = {}
        for family in text_string_to_metric_families(client.generate_latest(registry).decode()):
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
        cache.close()
    return found


def expressions() -> list[str]:
    targets = [target["expr"] for panel in PANELS for target in panel["targets"]]
    rules = [re.search(r"expr:(.*?)\n {8}(?:for|labels):", rule, re.DOTALL) for rule in RULES]
    return targets + [found.group(1) for found in rules if found is not None]


def test_every_metric_and_label_is_exported(exposed: dict[str, set[str]]) -> None:
    simulated_lacks = {"kvoffload_transfer_seconds_total"}  # no GPU has taken the time
    asked = {name for text in expressions() for name in re.findall(r"kvoffload_\w+", text)}
    assert asked - simulated_lacks <= set(exposed)
    for text in expressions():
        known = set.union(*(exposed.get(name, {"direction"}) for name in re.findall(r"kvoffload_\w+", text)))
        grouped = {label for group in re.findall(r"\bby \(([^)]*)\)", text) for label in re.split(r",\s*", group)}
        assert grouped <= known | SCRAPED_LABELS, text


def test_every_metric_is_looked_at(exposed: dict[str, set[str]]) -> None:
    asked = {name for text in expressions() for name in re.findall(r"kvoffload_\w+", text)}
    unseen = {name for name in exposed if not re.search(r"_(sum|count|created)$", name)} - asked
    assert unseen == {"kvoffload_cache_tenant_failed_total"}


def test_the_dashboard_can_be_loaded() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(PANELS))) - {"__rate_interval"}
    assert used == variables
    assert all(panel["description"] and panel["fieldConfig"]["defaults"]["unit"] for panel in PANELS)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.split("\n", 1)[0])
def test_an_alert_says_where_and_what_to_do(rule: str) -> None:
    named = set(re.findall(r"\$labels\.(\w+)", rule))
    grouped = {label for group in re.findall(r"\bby \(([^)]*)\)", rule) for label in re.split(r",\s*", group)}
    assert named <= grouped
    for field in ("expr", "severity", "summary", "description"):
        assert re.search(rf"^ +{field}:", rule, re.MULTILINE), field
