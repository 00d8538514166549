"""A cache whose engine is closed has nothing to load, no pinned memory and no metrics."""

from __future__ import annotations

from typing import Any

import pytest

import kvoffload
from kvoffload import BlockCache, KVLayout, OffloadEngine, ShardedEngine
from kvoffload.observability.prometheus import register


@pytest.mark.parametrize("kind", ["one", "sharded"])
def test_there_are_no_hits_in_a_closed_engine(device: kvoffload.Device, kind: str) -> None:
    layout = KVLayout([device.allocate_blocks(8, planes=2, block_bytes=64)])
    engine: Any
    if kind == "one":
        engine = OffloadEngine(layout, device=device, num_slots=4)
    else:
        engine = ShardedEngine([layout], devices=[device], num_slots=4)
    cache: Any = BlockCache(engine)
    cache.store([b"a", b"b"], [0, 1]).wait(10)
    assert (engine.closed, cache.lookup([b"a", b"b"])) == (False, 2)
    assert engine.statistics().pinned_bytes > 0
    engine.close()
    assert engine.closed
    for look in (cache.lookup, lambda keys: cache.lookup_many([keys])):
        with pytest.raises(kvoffload.ClosedError, match="nothing can be loaded"):
            look([b"a"])
    assert engine.statistics().pinned_bytes == 0
    assert cache.statistics().lookups == 2, "counts can still be read"


def test_a_closed_engine_has_no_metrics(device: kvoffload.Device) -> None:
    client = pytest.importorskip("prometheus_client", reason="prometheus_client is not here")
    registry = client.CollectorRegistry()
    layout = KVLayout([device.allocate_blocks(8, planes=2, block_bytes=64)])
    engine = OffloadEngine(layout, device=device, num_slots=4)
    cache = BlockCache(engine)
    register(cache, registry=registry)
    assert b"kvoffload_pinned_bytes" in client.generate_latest(registry)
    engine.close()
    assert client.generate_latest(registry) == b""
