"""What `kvoffload doctor` says of stores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvoffload.commands.findings import Finding
from kvoffload.terminal.console import mib

_DECLINES = "set maxmemory-policy to allkeys-lru or allkeys-lfu, so that the server evicts old records for new ones"


def groups(fields: Mapping[str, Any]) -> dict[str, list[Finding]]:
    """All findings on stores, by the heading that they are printed under; empty if none was asked for."""
    return {"stores": list(of_stores(fields))} if fields["stores"] else {}


def of_stores(fields: Mapping[str, Any]) -> Iterator[Finding]:
    """Findings on all stores: one if it cannot be used; else one, one for its capacity, and one for each drawback."""
    for each in fields["stores"]:
        yield from _of_store(each)
    if fields["stores"] and fields["extras"]["xxhash"] is None:
        yield Finding("fail", "xxhash", "a tier over a store needs it", "pip install 'kvoffload[disk]'")


def _of_store(each: Mapping[str, Any]) -> Iterator[Finding]:
    name = f"{each['store']} {each['address']}"
    client = f"{each['package']} {each['client'] or 'not installed by pip'}"
    if each["problem"] is not None:
        yield Finding("fail", name, f"cannot be used: {each['problem']}", each["remedy"])
        return
    speed = (
        f"{mib(each['probe_bytes'])} of 1 MiB each: put {each['put_gb_per_s']} GB/s, get {each['get_gb_per_s']} GB/s"
    )
    yield Finding("ok", name, f"{each['version'] or 'it does not say its version'}; client {client}; {speed}")
    yield from _capacity(name, each)
    if each["keeps_first"] is False:
        text = "it overwrites where it is asked to create: machines that put one record at the same time send it twice"
        yield Finding("warn", name, text, "use a store with conditional puts, if several machines write")


def _capacity(name: str, each: Mapping[str, Any]) -> Iterator[Finding]:
    used, most, policy = each["used_bytes"], each["max_bytes"], each["eviction_policy"]
    if used is None:
        remedy = "give metrics_port=PORT, the --metrics_port of the master" if each["store"] == "mooncake" else ""
        yield Finding("warn" if remedy else "ok", name, "it does not say how much it holds", remedy)
        return
    evicts = f"; eviction policy {policy}" if policy else ""
    yield Finding("ok", name, f"{mib(used)} used of {mib(most) if most else 'no limit'}{evicts}")
    if each["store"] == "mooncake" and not most:
        remedy = "start mooncake_client processes, or give tiers segment_bytes"
        yield Finding("warn", name, "no process lends it memory", remedy)
    elif not most:
        yield Finding("warn", name, "no limit: it takes memory until the machine has none", "set maxmemory")
    if policy and "noeviction" in policy:
        yield Finding("warn", name, "eviction policy noeviction: when it is full, it takes no more records", _DECLINES)
    elif policy and "volatile" in policy:
        text = f"eviction policy {policy}: it evicts only records that expire"
        yield Finding("warn", name, text, f"give the tier an expiry, or {_DECLINES}")
