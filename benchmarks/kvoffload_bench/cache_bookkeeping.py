"""`kvoffload bench cache`: host time and memory of the prefix cache's bookkeeping, compared with an OrderedDict.

Needs no GPU: `CacheIndex` has no device. Figures are of whole requests.
"""

from __future__ import annotations

import argparse
import mmap
import statistics
import tempfile
import time
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from random import Random
from typing import Any, NamedTuple

import numpy as np

from kvoffload.cache.index import CacheIndex
from kvoffload.cache.policies import DEFAULT_POLICY, POLICIES, PolicyName
from kvoffload.pool import PoolOwner, SharedPool
from kvoffload.pool.pool_memory import Meaning
from kvoffload.terminal.console import Output
from kvoffload.terminal.options import add_command, whole
from kvoffload.tiers import DiskTier
from kvoffload_bench.tier_calls import numbered_keys

_COLUMNS = ("lookup_us", "reserve_commit_us", "touch_us")
_FEW_BLOCKS = 1_000
_PLACES = ("index_us", "above_a_disk_us", "shared_pool_us")
_ROW_BYTES = 4096


def add_parser(benches: Any) -> None:
    parser = add_command(
        benches, "cache", "host time and memory of the prefix cache's bookkeeping",
        "Times lookups, reserve and commit, and touch of requests in a full cache, and counts Python memory, "
        "compared with a collections.OrderedDict; and changes of weights with 1000 blocks and with all, also above a "
        "disk and over a shared pool, which takes 4 KiB of memory a block. Medians; uses no GPU.",
        example="bench cache --blocks 100000 --policy prefix", common="--json",
    )  # fmt: skip
    add, policies = parser.add_argument, [*sorted(POLICIES), "all"]
    add("--blocks", type=whole(1024, 1 << 28), default=1_000_000, metavar="N", help="default 1000000")
    add("--keys", type=whole(1), default=512, metavar="N", help="of a request (default 512)")
    add("--policy", choices=policies, default="all", metavar="NAME", help=", ".join(policies))
    add("--repeats", type=whole(1, 1_000_000), default=300, metavar="N", help="timed requests (default 300)")
    add("--json", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    output = Output(arguments.json)
    policies = sorted(POLICIES) if arguments.policy == "all" else [arguments.policy]
    blocks, keys, repeats = arguments.blocks, min(arguments.keys, arguments.blocks), arguments.repeats
    with output.progress("caches") as progress:
        records = [_measure("OrderedDict", partial(_Dictionary, blocks), blocks, keys, repeats)]
        for number, name in enumerate(policies, start=1):
            progress(number, 1 + len(policies))
            records.append(_measure(name, partial(_Cache, blocks, name), blocks, keys, repeats))
    sizes = sorted({min(blocks, _FEW_BLOCKS), blocks})
    changes = [_changes_of_weights(each, min(keys, each), repeats) for each in sizes]
    output.result(
        {"benchmark": "cache", "blocks": blocks, "keys": keys, "repeats": repeats, "records": records}
        | {"changes_of_weights": changes}
    )
    default = next((record for record in records if record["name"] == DEFAULT_POLICY), records[1])
    output.line(
        f"bench cache: {default['name']} finds {keys} keys in {default['lookup_us']:.0f} us and stores them "
        f"in {default['reserve_commit_us']:.0f} us, with {default['bytes_per_block']:.0f} bytes of memory a block"
    )
    lines = []
    for record in records:
        compared = (f"{record[what]:.0f} ({record[what] / records[0][what]:.1f}x)" for what in _COLUMNS)
        lines.append((record["name"], *compared, f"{record['bytes_per_block']:.0f}"))
    title = f"{blocks:,} blocks, requests of {keys} keys: median microseconds of a request (times an OrderedDict's)"
    output.table(title, ("policy", "lookup", "reserve + commit", "touch", "bytes a block"), lines)
    title = "`use_weights` in a full cache: median microseconds"
    lines = [(f"{each['blocks']:,}", *(f"{each[where]:.0f}" for where in _PLACES)) for each in changes]
    output.table(title, ("blocks", "index", "above a disk", "shared pool"), lines)
    return 0


class _Dictionary:
    """The least that a cache does: find keys, drop the oldest, insert new ones."""

    def __init__(self, capacity: int) -> None:
        self._entries: OrderedDict[bytes, int] = OrderedDict()
        self._capacity = capacity
        self.evicted = 0

    def lookup(self, keys: list[bytes]) -> int:
        found = 0
        for key in keys:
            if key not in self._entries:
                break
            found += 1
        return found

    def store(self, keys: list[bytes]) -> None:
        entries = self._entries
        self.evicted += max(0, len(entries) + len(keys) - self._capacity)
        for key in keys:
            entry = len(entries) if len(entries) < self._capacity else entries.popitem(last=False)[1]
            entries[key] = entry

    def touch(self, keys: list[bytes]) -> None:
        for key in reversed(keys):
            self._entries.move_to_end(key)


class _Cache:
    def __init__(self, capacity: int, policy: PolicyName) -> None:
        self._index = CacheIndex(capacity, policy=policy)
        self.lookup = self._index.lookup
        self.touch = self._index.touch

    def store(self, keys: list[bytes]) -> None:
        self._index.reserve(keys).commit()

    @property
    def evicted(self) -> int:
        return self._index.statistics().evicted


def _measure(name: str, make: Callable[[], Any], blocks: int, keys: int, repeats: int) -> dict[str, Any]:
    cache, random = make(), Random(0)
    _fill(cache, blocks, keys)
    before = cache.evicted
    lookups = [
        _timed(cache.lookup, numbered_keys(random.randrange(blocks // keys) * keys, keys)) for _ in range(repeats)
    ]
    stores, touches = [], []
    for number in range(repeats):
        request = numbered_keys(blocks + number * keys, keys)
        stores.append(_timed(cache.store, request))
        touches.append(_timed(cache.touch, request))
    assert cache.evicted - before == repeats * keys, "every new block displaces one"
    fields: dict[str, Any] = {"name": name}
    fields |= zip(_COLUMNS, map(statistics.median, (lookups, stores, touches)), strict=True)
    tracemalloc.start()
    try:
        begin = tracemalloc.get_traced_memory()[0]
        cache = make()
        _fill(cache, blocks, keys)
        return fields | {"bytes_per_block": (tracemalloc.get_traced_memory()[0] - begin) / blocks}
    finally:
        tracemalloc.stop()


def _changes_of_weights(blocks: int, keys: int, repeats: int) -> dict[str, Any]:
    """The time of a call that changes the weights of a full cache: to a name that has no keys, and back."""

    def measured(cache: CacheIndex) -> float:
        for start in range(0, blocks, keys):
            cache.reserve(numbered_keys(start, min(keys, blocks - start))).commit()
        return statistics.median(_timed(cache.use_weights, name) for _ in range(repeats) for name in ("other", ""))

    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        index = measured(CacheIndex(blocks))
        rows = np.frombuffer(mmap.mmap(-1, blocks * _ROW_BYTES), np.uint8).reshape(blocks, _ROW_BYTES)
        disk = DiskTier(f"{folder}/records", nbytes=64 << 20, identity="bench")
        tiers: dict[str, Any] = {"tiers": [disk], "pools": [rows], "layout": bytes(16), "write": "none"}
        above = measured(stack.enter_context(CacheIndex(blocks, **tiers)))
        meaning = Meaning(blocks, _ROW_BYTES, bytes(16), bytes(16))
        owner = stack.enter_context(PoolOwner(f"{folder}/pool", nbytes=meaning.nbytes))
        pool = SharedPool.attach(owner.path, _Rows(), identity="bench", answer_seconds=10.0)
        shared = measured(CacheIndex(stack.enter_context(pool)))
    return {"blocks": blocks} | dict(zip(_PLACES, (index, above, shared), strict=True))


class _Rows(NamedTuple):
    """What a shared pool asks of a layout."""

    fingerprint: bytes = bytes(16)
    slot_bytes: int = _ROW_BYTES
    num_groups: int = 1


def _timed(call: Callable[[Any], object], argument: Any) -> float:
    begin = time.perf_counter()
    call(argument)
    return (time.perf_counter() - begin) * 1e6


def _fill(cache: Any, blocks: int, keys: int) -> None:
    """Store all blocks; every second request comes once again, soon: new blocks are worth having."""
    for number, start in enumerate(range(0, blocks, keys)):
        request = numbered_keys(start, min(keys, blocks - start))
        cache.store(request)
        cache.touch(request)
        if number % 2:
            cache.touch(numbered_keys(start - keys, keys))
