"""`kvoffload doctor --store`: tries a remote store with a few records, and measures its speed."""

from __future__ import annotations

import mmap
import os
import secrets
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvoffload.terminal.console import bandwidth
from kvoffload.terminal.store_option import Store, StoreError, store_of
from kvoffload.tiers import Outcome, TierJob

_RECORDS = 32
_RECORD_BYTES = 1 << 20
_SECONDS = 30.0  # limit of a job
_OWN = {"identity": "kvoffload doctor", "prefix": "kvoffload-doctor"}


def probe(words: Sequence[str]) -> dict[str, Any]:
    """Try a store with a few records. Returns the findings; `problem` and `remedy` say why a tier cannot use it and
    what helps, or are None.

    Args:
        words: the tier's kind, as for `load_tier`, and "name=value" for each of its arguments.
    """
    fields: dict[str, Any] = {
        "store": words[0], "problem": None, "remedy": None, "says": {}, "ask_seconds": None, "probe_bytes": 0,
        "write_gb_per_s": None, "read_gb_per_s": None,
    }  # fmt: skip
    store = Store(words[0], {})
    try:
        store = store_of(words)
        memory = np.frombuffer(mmap.mmap(-1, 2 * _RECORDS * _RECORD_BYTES), np.uint8).reshape(-1, _RECORD_BYTES)
        memory[:_RECORDS] = np.frombuffer(os.urandom(_RECORD_BYTES), np.uint8)
        keys = [b"%d %d" % (os.getpid(), number) for number in range(_RECORDS)]
        tier = store.tier(**_OWN)
        tier.attach([memory], bytes(16))
        try:
            tier.have_records(keys[:1])  # connects; what it raises says more than an outcome
            begin = time.perf_counter()
            tier.have_records(keys[:1])
            fields["ask_seconds"] = round(time.perf_counter() - begin, 6)
            fields["says"] = tier.describe() | _creates(store)
            write = _seconds(store, tier.put(keys, range(_RECORDS)), "written")
            read = _seconds(store, tier.get(keys, range(_RECORDS, 2 * _RECORDS)), "read")
            if not np.array_equal(memory[:_RECORDS], memory[_RECORDS:]):
                raise StoreError(store, "it returned other bytes than were written", "do not use it")
            nbytes = _RECORDS * _RECORD_BYTES
            fields |= {"probe_bytes": nbytes, "write_gb_per_s": bandwidth(nbytes, write)}
            fields["read_gb_per_s"] = bandwidth(nbytes, read)
        finally:
            tier.remove(keys).wait(_SECONDS)
            tier.close()
    except Exception as error:  # noqa: BLE001  # of any client
        explained = store.explained(error)
        fields |= {"problem": explained.problem, "remedy": explained.remedy}
    return fields


def _creates(store: Store) -> dict[str, str]:
    """Say how this store handles creating an object that already exists; {} if it refuses, or is no object store."""
    if store.kind != "objects":
        return {}
    import obstore

    client, close = store.client()
    name = f"{_OWN['prefix']}/{secrets.token_hex(8)}"
    try:
        obstore.put(client, name, b"first", mode="create", use_multipart=False)
        try:
            obstore.put(client, name, b"second", mode="create", use_multipart=False)
        except obstore.exceptions.AlreadyExistsError:
            return {}
        return {"conditional_puts": "no"}
    finally:
        obstore.delete(client, name)
        close()


def _seconds(store: Store, job: TierJob, done: str) -> float:
    begin = time.perf_counter()
    outcomes = job.wait(_SECONDS)
    if set(outcomes) != {Outcome.DONE}:
        kinds = ", ".join(sorted({each.value for each in outcomes}))
        remedy = "let this user read, write and delete, and look into the store's log"
        if Outcome.DECLINED in outcomes:
            remedy = "it has no room: let it evict, or give it more memory"
        elif Outcome.MISSING in outcomes:
            remedy = "it has evicted them already: give it more memory"
        text = f"{outcomes.count(Outcome.DONE)} of {len(outcomes)} records were {done}; outcomes: {kinds}"
        raise StoreError(store, text, remedy)
    return time.perf_counter() - begin
