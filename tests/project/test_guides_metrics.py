"""The flow of each page over a cache, as it stands there: what the cache's metrics say afterwards."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from documents import Snippet, snippets

import kvoffload
import kvoffload.door
from kvoffload.observability.prometheus import CacheCollector

CACHES = ((kvoffload, "BlockCache"), (kvoffload, "CacheIndex"), (kvoffload.door, "BlockCache"))
MAKERS = ("BlockCache(", "CacheIndex(", "open_cache(")
BLOCKS = {each.name: each for each in snippets()}
FLOWS: dict[str, list[tuple[int, dict[str, int]]]] = {
    # by the block's name, for each cache that it makes: keys asked for, and hits by where they were
    "cache": [(6, {"host": 3})],
    "one-call": [(12, {"host": 6})],
    "quantized": [(12, {"host": 6})],
    "server": [(12, {"host": 6})],
    "metrics": [(6, {"host": 4})],
    "pieces": [(21, {"host": 10})],
    "tenants": [(9, {"host": 7})],
    "tenants in one call": [(12, {"host": 8})],
    "ranks in processes": [(6, {"host": 6})],
    "interrupts": [(4, {"host": 4})],
    "jax keys": [(3, {"host": 3})],
    "jax decode loop": [(60, {"host": 30})],
    "two devices": [(3, {"host": 3})],
    "add a disk": [(6, {"host": 0}), (6, {"host": 0, "disk": 6})],
    "share a store": [(6, {"host": 0}), (6, {"host": 0, "objects": 6})],
    "tiers below ranks": [(2, {"host": 1})],
    "asyncio": [(18, {"host": 6})],
    "agents": [(83, {"host": 22})],
    "a third more memory": [(2, {"host": 2})],
    "weights": [(16, {"host": 8})],
    "keep a conversation": [(0, {"host": 0}), (6, {"host": 6})],
    "a folder of prompts": [(0, {"host": 0}), (6, {"host": 0, "sessions": 4})],
}
WITH_TIERS = [name for name in FLOWS if "tiers=" in BLOCKS[name].code]
NOTHING_IS_ASKED_FOR = {"events for routers"}
IN_A_SHARED_POOL = {"several engines"}  # statistics end with the membership


class Watch:
    """Keeps the caches that a block makes, and what a scrape says of one before it is closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.caches: list[Any] = []
        self.scrapes: list[dict[str, float]] = []
        for module, name in CACHES:
            monkeypatch.setattr(module, name, self._watched(getattr(module, name)))

    def _watched(self, base: Any) -> type:
        watch = self

        class Watched(base):  # type: ignore[misc]
            def __init__(self, *arguments: Any, **options: Any) -> None:
                super().__init__(*arguments, **options)
                watch.caches.append(self)

            def close(self, *arguments: Any, **options: Any) -> Any:
                watch.scrapes.append(scraped(self))
                return super().close(*arguments, **options)

        return Watched

    def run(self, snippet: Snippet) -> None:
        for package in sorted(snippet.imports()):
            if importlib.util.find_spec(package) is None:
                pytest.skip(f"{package} is not installed")
        exec(compile(snippet.code, snippet.document, "exec"), {"__name__": "__document__"})


def scraped(cache: Any) -> dict[str, float]:
    """Samples by name, and by tier where they have one."""
    pytest.importorskip("prometheus_client", reason="prometheus_client is not here")
    samples = [sample for family in CacheCollector(cache).collect() for sample in family.samples]
    return {sample.name + sample.labels.get("tier", ""): sample.value for sample in samples}


@pytest.mark.parametrize("name", FLOWS)
def test_the_hit_rate_of_a_page_is_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    watch.run(BLOCKS[name])
    found = [cache.statistics() for cache in watch.caches]
    assert [(each.lookups, dict(each.hits_from)) for each in found] == FLOWS[name]
    for each in found:
        assert not each.lookups or each.hit_rate == sum(hits for _, hits in each.hits_from) / each.lookups


@pytest.mark.parametrize("name", WITH_TIERS)
def test_the_panels_of_a_page_with_tiers_are_not_blank(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    watch.run(BLOCKS[name])
    assert len(watch.scrapes) == len(FLOWS[name])
    for scrape, (asked, hits) in zip(watch.scrapes, FLOWS[name], strict=True):
        assert scrape["kvoffload_cache_lookups_total"] == asked
        assert scrape["kvoffload_cache_hits_total"] == sum(hits.values())
        assert {place: scrape[f"kvoffload_cache_tier_hits_total{place}"] for place in hits} == hits


def test_every_page_with_a_cache_is_looked_at() -> None:
    made = {
        each.name
        for each in BLOCKS.values()
        if each.runs and not each.needs_gpu and any(name in each.code for name in MAKERS)
    }
    assert made == FLOWS.keys() | NOTHING_IS_ASKED_FOR | IN_A_SHARED_POOL
