"""Tenants with quotas share a prefix cache; Prometheus scrapes it over HTTP, and a hook sees each of its events."""

from __future__ import annotations

import http.client
from collections.abc import Generator
from contextlib import contextmanager

import prometheus_client

import kvoffload
from kvoffload.observability import prometheus

TOKENS = 16  # of a block
TENANTS = {"chat": kvoffload.Tenant(priority=1), "batch": kvoffload.Tenant(max_blocks=4, priority=-1)}


@contextmanager
def exported(cache: kvoffload.BlockCache[kvoffload.OffloadEngine]) -> Generator[int, None, None]:
    """Serve the cache's metrics; the port."""
    registry = prometheus_client.CollectorRegistry()
    prometheus.register(cache, registry, gpu="0")
    server, thread = prometheus_client.start_http_server(0, addr="127.0.0.1", registry=registry)  # 0: any free port
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def scrape(port: int) -> list[str]:
    """What Prometheus does."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode().splitlines()
    finally:
        connection.close()


def serve(
    cache: kvoffload.BlockCache[kvoffload.OffloadEngine], tenant: str, first_token: int, blocks: list[int]
) -> int:
    """A request of a tenant; how many of its blocks are in the cache afterwards."""
    tokens = range(first_token, first_token + len(blocks) * TOKENS)
    keys = kvoffload.chain_keys(tokens, layout=cache.engine.layout, salt=f"my-model@1/{tenant}")
    found = cache.lookup(keys)
    cache.load(keys[:found], blocks[:found]).wait(timeout=60)
    cache.store(keys, blocks, tenant=tenant).wait(timeout=60)
    cache.touch(keys)
    return sum(status is kvoffload.Status.HIT for status in cache.status(keys))


def main(device: kvoffload.Device) -> tuple[list[kvoffload.CacheEvent], list[str]]:
    """The events, and the lines of a scrape."""
    events: list[kvoffload.CacheEvent] = []
    planes = device.allocate_blocks(64, planes=8, block_bytes=4096)
    axes = ("tokens", "heads", "dim")
    layout = kvoffload.KVLayout([planes], dtype="bfloat16", tokens_per_block=TOKENS, block_axes=axes)
    with kvoffload.OffloadEngine(layout, device=device, num_slots=16) as engine:
        cache = kvoffload.BlockCache(engine, tenants=TENANTS, on_event=events.append)
        with exported(cache) as port:
            assert serve(cache, "batch", 0, [0, 1, 2, 3, 4, 5]) == 4  # the quota
            assert serve(cache, "chat", 0, [6, 7, 8]) == 3
            assert serve(cache, "chat", 0, [9, 10, 11]) == 3  # loaded
            lines = scrape(port)
        counts: dict[str, int] = {name: each.declined for name, each in cache.statistics().tenants}
        assert counts == {"batch": 2, "chat": 0}
    return events, lines


if __name__ == "__main__":
    with kvoffload.open_device(backend="auto") as chosen:
        seen, text = main(chosen)
    print(*((event.kind, len(event.keys), event.tenant) for event in seen), sep="\n")
    print(*(line for line in text if line.startswith("kvoffload_cache_tenant")), sep="\n")
