"""`kvoffload doctor --valkey ... --s3 ... --mooncake ...`: what stores offer, tried with records that it deletes."""

from __future__ import annotations

import mmap
import secrets
import time
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import metadata
from typing import Any

import numpy as np

from kvoffload.internal.types import UInt8Array
from kvoffload.terminal.console import bandwidth
from kvoffload.terminal.stores import Kind, Store, StoreError
from kvoffload.tiers import Outcome, TierJob

_RECORDS = 16
_RECORD_BYTES = 1 << 20
_METRICS_PORT = "9003"  # of a Mooncake master, unless it is told another one
_METRICS_SECONDS = 3.0
_LAYOUT = bytes(16)


def probe(store: Store) -> dict[str, Any]:
    """Findings on a store; `problem` says why a tier cannot use it, `remedy` what to do about that, or both are None.

    What a store does not say of itself is None.
    """
    fields: dict[str, Any] = {
        "store": store.kind, "address": store.address, "problem": None, "remedy": None, "package": store.package,
        "client": None, "version": None, "used_bytes": None, "max_bytes": None, "eviction_policy": None,
        "keeps_first": None, "probe_bytes": 0, "put_gb_per_s": None, "get_gb_per_s": None,
    }  # fmt: skip
    try:
        fields["client"] = metadata.version(store.package)
    except metadata.PackageNotFoundError:
        fields["client"] = None  # built by the user, perhaps: making a client decides
    try:
        client = store.client()
        try:
            store.check(client)
            fields |= _FACTS[store.kind](store, client)
        finally:
            store.disconnect(client)
        fields |= _try_records(store)
    except Exception as error:  # of a client: each has exceptions of its own
        explained = store.explained(error)
        fields |= {"problem": explained.problem, "remedy": explained.remedy}
    return fields


# what a store says of itself ------------------------------------------------------------------------------------------


def _of_valkey(_store: Store, client: Any) -> dict[str, Any]:
    """By INFO; of a cluster sums over its nodes."""
    answer = client.info()
    nodes = [_lines(each) for each in (answer.values() if isinstance(answer, dict) else [answer])]
    first = nodes[0]
    name = "Valkey" if "valkey_version" in first else "Redis"
    limits = [int(node.get("maxmemory", 0)) for node in nodes]
    return {
        "version": f"{name} {first.get('valkey_version') or first.get('redis_version', 'of unknown version')}",
        "used_bytes": sum(int(node.get("used_memory", 0)) for node in nodes),
        "max_bytes": sum(limits) if all(limits) else 0,
        "eviction_policy": ", ".join(dict.fromkeys(node.get("maxmemory_policy", "unknown") for node in nodes)),
    }


def _lines(info: bytes) -> dict[str, str]:
    pairs = (line.partition(":") for line in info.decode().splitlines())
    return {name: text.strip() for name, colon, text in pairs if colon}


def _of_objects(_store: Store, client: Any) -> dict[str, Any]:
    """S3 and its like say nothing of themselves; whether an object is kept if another is to be created can be tried."""
    import obstore

    name = f"kvoffload-doctor/{secrets.token_hex(8)}"
    obstore.put(client, name, b"first", mode="create", use_multipart=False)
    try:
        obstore.put(client, name, b"second", mode="create", use_multipart=False)
        kept = bytes(obstore.get(client, name).bytes()) == b"first"
    except obstore.exceptions.AlreadyExistsError:
        kept = True
    except obstore.exceptions.BaseError:  # the store does not know conditions
        kept = False
    finally:
        obstore.delete(client, name)
    return {"keeps_first": kept}


def _of_mooncake(store: Store, _client: Any) -> dict[str, Any]:
    """By the master's metrics, which are on a port of their own."""
    host = store.address.rpartition("://")[2].split(";")[0].rpartition(":")[0]
    found: dict[str, float] = {}
    with suppress(OSError, ValueError):
        url = f"http://{host}:{store.option('metrics_port', _METRICS_PORT)}/metrics"
        with urllib.request.urlopen(url, timeout=_METRICS_SECONDS) as answer:
            for line in answer.read().decode().splitlines():
                name, _, value = line.rpartition(" ")
                if name.startswith("master_"):
                    found[name] = float(value)
    if "master_total_capacity_bytes" not in found:
        return {}
    return {
        "used_bytes": int(found.get("master_allocated_bytes", 0)),
        "max_bytes": int(found["master_total_capacity_bytes"]),
    }


_FACTS: Mapping[Kind, Callable[[Store, Any], dict[str, Any]]] = {
    "valkey": _of_valkey,
    "s3": _of_objects,
    "mooncake": _of_mooncake,
}


# speed ----------------------------------------------------------------------------------------------------------------


def _try_records(store: Store) -> dict[str, Any]:
    """Put records with a tier, and get them; StoreError if one is not what was put."""
    memory = mmap.mmap(-1, 2 * _RECORDS * _RECORD_BYTES)
    pool: UInt8Array = np.frombuffer(memory, np.uint8).reshape(2 * _RECORDS, _RECORD_BYTES)
    pool[:_RECORDS] = np.random.default_rng(0).integers(0, 256, (_RECORDS, _RECORD_BYTES), np.uint8)
    tier = store.tier(identity="kvoffload doctor", prefix=f"kvoffload-doctor/{secrets.token_hex(8)}")
    tier.attach([pool], _LAYOUT)
    keys = [number.to_bytes(16, "little") for number in range(1, _RECORDS + 1)]
    try:
        _carried_out(store, "put", tier.put(keys[:1], [0]))  # connects
        put = _timed(lambda: _carried_out(store, "put", tier.put(keys, range(_RECORDS))))
        get = _timed(lambda: _carried_out(store, "get", tier.get(keys, range(_RECORDS, 2 * _RECORDS))))
        if not np.array_equal(pool[:_RECORDS], pool[_RECORDS:]):
            raise StoreError(store, "records had wrong bytes", "do not use it, and report this")
        _carried_out(store, "delete", tier.clear())
    finally:
        tier.close()
    nbytes = _RECORDS * _RECORD_BYTES
    return {
        "probe_bytes": nbytes,
        "put_gb_per_s": bandwidth(nbytes - _RECORD_BYTES, put),
        "get_gb_per_s": bandwidth(nbytes, get),
    }


def _timed(call: Callable[[], None]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _carried_out(store: Store, what: str, job: TierJob) -> None:
    """StoreError if a key of a job is not DONE."""
    job.wait()
    wrong = [outcome for outcome in job.outcomes if outcome is not Outcome.DONE]
    if wrong:
        declined = Outcome.DECLINED in wrong
        raise StoreError(
            store,
            f"{len(wrong)} of {len(job.outcomes)} records could not be {what} ({wrong[0]})",
            "the store has no room: let it evict, or give it more memory"
            if declined
            else "see that this user may read, write, list and delete, and what the store's log says",
        )
