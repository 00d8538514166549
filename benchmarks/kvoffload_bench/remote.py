"""`kvoffload bench remote`: tiers over stores, compared with the best batch calls of their own clients."""

from __future__ import annotations

import argparse
import secrets
import statistics
import time
import tracemalloc
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from typing import Any

import numpy as np

from kvoffload.cache.block_cache import BlockCache
from kvoffload.device.device import Device
from kvoffload.driver import address_of
from kvoffload.engine.engine import OffloadEngine
from kvoffload.errors import TierError
from kvoffload.internal import hostinfo
from kvoffload.internal.types import UInt8Array
from kvoffload.layout.layout import KVLayout
from kvoffload.terminal.console import Advance, CommandError, Output, mib, open_backend
from kvoffload.terminal.options import COMMON, add_command, numbers
from kvoffload.terminal.store_option import KINDS, Store, add_store_option, store_of
from kvoffload.tiers import RemoteTier
from kvoffload_bench import tier_calls
from kvoffload_bench.report import fixed
from kvoffload_bench.tier_calls import KEYS_OF_A_CALL, LAYOUT, BareCalls, Rounds, Rows, Verified, numbered_keys, pages

Fields = Mapping[str, Any]
PUT, GET = "put", "get"
IDENTITY = "kvoffload bench remote"


class BareLoop(BareCalls, ABC):
    """Threads with a client of one store. A context manager.

    Args:
        store: whose client is used.
        tier: whose records the same rounds write and read; each of its rounds ends with all of them deleted.
        prefix: of all names.
        pool: uint8, (rows, bytes): where all records come from and go to.
    """

    one_each = False  # whether each thread has a client of its own, as in the tier

    def __init__(self, store: Store, tier: RemoteTier, *, prefix: str, pool: UInt8Array) -> None:
        self._tier, self._prefix, self._threads = tier, prefix, tier.threads
        self._clients: list[Any] = []
        self._undo = ExitStack()
        self._executor = ThreadPoolExecutor(self._threads, thread_name_prefix="kvoffload-bench")
        try:
            for _ in range(self._threads if self.one_each else 1):
                client, close = store.client()
                self._undo.callback(close)
                self._clients.append(client)
            self.prepare(pool)
        except BaseException:
            self.close()
            raise

    def prepare(self, pool: UInt8Array) -> None:
        """For clients that need registered memory."""

    @abstractmethod
    def put_batch(self, client: Any, names: list[str], rows: Rows) -> None:
        """Store rows under names, by one call if there is one for several."""

    @abstractmethod
    def get_batch(self, client: Any, names: list[str], rows: Rows) -> list[UInt8Array]:
        """Fetch records; the arrays that hold them: the rows, if the client can read into the caller's memory."""

    @abstractmethod
    def delete_batch(self, client: Any, names: list[str]) -> None:
        """Delete records."""

    def put(self, keys: Sequence[bytes], rows: Rows) -> None:
        self._share(self.put_batch, keys, rows)

    def get(self, keys: Sequence[bytes], rows: Rows) -> Rows:
        return [array for part in self._share(self.get_batch, keys, rows) for array in part]

    def end(self, keys: Sequence[bytes]) -> None:
        """Delete the records of the tier, and these."""
        self._tier.clear().wait()
        self.delete_batch(self._clients[0], self._names(keys))

    def _names(self, keys: Sequence[bytes]) -> list[str]:
        return [f"{self._prefix}/{key.hex()}" for key in keys]

    def _share(self, call: Callable[[Any, list[str], Rows], Any], keys: Sequence[bytes], rows: Rows) -> list[Any]:
        """Call with equal parts of a batch, each in a thread; the results."""
        step = -(-len(rows) // self._threads)
        parts = [slice(at, at + step) for at in range(0, len(rows), step)]
        clients = [self._clients[number % len(self._clients)] for number in range(len(parts))]

        def work(client: Any, part: slice) -> Any:
            return call(client, self._names(keys[part]), rows[part])

        if len(parts) == 1:
            return [work(clients[0], parts[0])]
        return list(self._executor.map(work, clients, parts))

    def close(self) -> None:
        self._executor.shutdown()
        self._undo.close()


class _Valkey(BareLoop):
    """SET in pipelines, and MGET into the caller's memory; in a cluster one record a call."""

    one_each = True

    def put_batch(self, client: Any, names: list[str], rows: Rows) -> None:
        import glide_sync

        cluster = isinstance(client, glide_sync.GlideClusterClient)
        batch: Any = (glide_sync.ClusterBatch if cluster else glide_sync.Batch)(False)
        for name, row in zip(names, rows, strict=True):
            batch.set(name, row.data)
        client.exec(batch, True)

    def get_batch(self, client: Any, names: list[str], rows: Rows) -> list[UInt8Array]:
        client.mget(names, buffers=[row.data for row in rows])
        return list(rows)

    def delete_batch(self, client: Any, names: list[str]) -> None:
        client.unlink(names)


class _Objects(BareLoop):
    """A request for each record; obstore has none for several, and returns memory of its own."""

    def put_batch(self, client: Any, names: list[str], rows: Rows) -> None:
        import obstore

        for name, row in zip(names, rows, strict=True):
            obstore.put(client, name, row.data, use_multipart=False)

    def get_batch(self, client: Any, names: list[str], rows: Rows) -> list[UInt8Array]:  # noqa: ARG002
        import obstore

        return [np.frombuffer(memoryview(obstore.get(client, name).bytes()), np.uint8) for name in names]

    def delete_batch(self, client: Any, names: list[str]) -> None:
        import obstore

        obstore.delete(client, names)


class _Mooncake(BareLoop):
    """Batches from and into registered memory."""

    def prepare(self, pool: UInt8Array) -> None:
        code = self._clients[0].register_buffer(address_of(pool), pool.nbytes)
        if code != 0:
            raise ConnectionError(f"register_buffer of {pool.nbytes} bytes returned {code}")

    def put_batch(self, client: Any, names: list[str], rows: Rows) -> None:
        codes = client.batch_put_from(names, [address_of(row) for row in rows], [row.nbytes for row in rows])
        if any(codes):
            raise ConnectionError(f"batch_put_from returned {codes}")

    def get_batch(self, client: Any, names: list[str], rows: Rows) -> list[UInt8Array]:
        codes = client.batch_get_into(names, [address_of(row) for row in rows], [row.nbytes for row in rows])
        if min(codes) < 0:
            raise ConnectionError(f"batch_get_into returned {codes}")
        return list(rows)

    def delete_batch(self, client: Any, names: list[str]) -> None:
        client.batch_remove(names, True)


_LOOPS: dict[str, type[BareLoop]] = {"valkey": _Valkey, "objects": _Objects, "mooncake": _Mooncake}


# what is measured -----------------------------------------------------------------------------------------------------

_PLANES = 16
_PROMOTED = 64  # keys
_PROMOTED_BYTES = 2 << 20
_POLL_SECONDS = 5e-5
_MOST_SECONDS = 120.0  # that a promotion may take
_COUNTED = 8  # records, whose memory is counted


def records_of_round(record_bytes: int, in_flight: int, nbytes: int) -> int:
    """Whole batches, at least one, of `nbytes` together if that is more."""
    return max(1, nbytes // record_bytes // in_flight) * in_flight


def measure_size(
    store: Store, prefix: str, record_bytes: int, arguments: argparse.Namespace, verified: Verified
) -> list[dict[str, Any]]:
    """Figures of one size of records, for each number in flight, put and get. Names in the store begin with `prefix`,
    and no others do.
    """
    planned = {count: records_of_round(record_bytes, count, arguments.nbytes) for count in arguments.in_flight}
    pool = pages(2 * max(planned.values()), record_bytes)
    cells = []
    with closing(store.tier(identity=IDENTITY, prefix=f"{prefix}/tier")) as tier:
        tier.attach([pool], LAYOUT)
        with _LOOPS[store.kind](store, tier, prefix=f"{prefix}/bare", pool=pool) as bare:
            rounds = Rounds(tier, bare, pool, (PUT, GET), verified)
            for count, records in planned.items():
                what = {"store": store.kind, "record_bytes": record_bytes, "in_flight": count}
                cells += rounds.measure(records, count, arguments.repeats, what)
    return cells


def measure_calls(store: Store, prefix: str, record_bytes: int, verified: Verified) -> dict[str, Any]:
    """Host time of `put` and `get`, as for a disk; and the Python memory that a job of 8 records takes."""
    pool = pages(KEYS_OF_A_CALL, record_bytes)
    pool.fill(1)
    tier = store.tier(identity=IDENTITY, prefix=f"{prefix}/calls")
    tier.attach([pool], LAYOUT)
    try:
        calls = tier_calls.measure_calls(tier, verified, lambda: tier.clear().wait())
        keys = numbered_keys(1 << 40, _COUNTED)
        tracemalloc.start()
        try:
            for call in (tier.put, tier.get):
                job = call(keys, range(_COUNTED))
                job.wait()
                verified.note(job)
            allocated = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    finally:
        tier.clear().wait()
        tier.close()
    what = {"store": store.kind, "record_bytes": record_bytes, "threads": tier.threads}
    return what | calls | {"python_bytes_a_record": allocated / _COUNTED}


def measure_promotion(
    store: Store, device: Device, prefix: str, *, record_bytes: int, repeats: int, verified: Verified
) -> dict[str, Any]:
    """Milliseconds from `promote` of 64 keys that only the store has, until the first and the last can be loaded."""
    planes = device.allocate_blocks(1, planes=_PLANES, block_bytes=record_bytes // _PLANES)
    layout = KVLayout([planes], blocks_per_slot=1, dtype="uint8", tokens_per_block=1, block_axes=("tokens",))
    keys = numbered_keys(0, _PROMOTED)
    times: list[tuple[float, float]] = []
    with OffloadEngine(layout, device=device, num_slots=2 * _PROMOTED) as engine:
        tier = store.tier(identity=IDENTITY, prefix=f"{prefix}/promote")
        with closing(BlockCache(engine, policy="lru", tiers=[tier], write="through")) as cache:
            try:
                with cache.reserve(keys) as reserved:
                    slots = reserved.slots()
                    content = np.random.default_rng(1).integers(0, 256, (_PROMOTED, record_bytes), np.uint8)
                    engine.slots[slots] = content
                    reserved.commit()
                cache.drain(_MOST_SECONDS)
                for _ in range(1 + repeats):
                    cache.clear(below=False)
                    engine.slots[:] = 0
                    found, first, last = _promote(cache, keys)
                    times.append((first, last))
                    verified.missing += _PROMOTED - found
                    with cache.acquire(keys[:found]) as lease:
                        verified.compare(engine.slots[lease.slots()], content)
            finally:
                with suppress(TierError):  # it failed before
                    cache.clear()
    first, last = (1e3 * statistics.median(each) for each in zip(*times[1:], strict=True))
    what = {"store": store.kind, "record_bytes": record_bytes, "keys": _PROMOTED}
    return what | {"first_ms": first, "all_ms": last}


def _promote(cache: BlockCache[OffloadEngine], keys: list[bytes]) -> tuple[int, float, float]:
    """How many keys have come, and seconds until the first one and the last one."""
    begin = time.perf_counter()
    first = 0.0
    with cache.promote(keys, deadline=_MOST_SECONDS) as promotion:
        while not promotion.done:
            if not first and promotion.ready:
                first = time.perf_counter() - begin
            time.sleep(_POLL_SECONDS)
        last = time.perf_counter() - begin
        return promotion.ready, first or last, last


# the command ----------------------------------------------------------------------------------------------------------


def add_parser(benches: Any) -> None:
    parser = add_command(
        benches, "remote", "tiers over stores compared with their clients' bare calls",
        "Puts records into stores and gets them with a tier and with bare batch calls of the tier's client, in "
        "interleaved rounds; then times calls and promotions. Deletes its records.",
        example="bench remote --store valkey addresses=HOST:PORT --in-flight 8", common=COMMON,
        usage="--store KIND NAME=VALUE ... [options]",
    )  # fmt: skip
    add_store_option(parser, "the tier's kind (valkey, objects, mooncake) and its arguments")
    parser.add_argument("--in-flight", type=numbers, default=[1, 8, 32], metavar="N,...", help="records (1,8,32)")
    tier_calls.add_tier_options(parser, 32 << 20, 1 << 40)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; 0 if every record was right, else 1. Its records are deleted, after Ctrl-C as well."""
    output = Output(arguments.json)
    tier_calls.check_options(arguments, "--in-flight", arguments.in_flight, 1024)
    sizes, flights = arguments.sizes, arguments.in_flight
    rounds = max(2 * size * records_of_round(size, count, arguments.nbytes) for size in sizes for count in flights)
    promotion = 3 * _PROMOTED * _promoted_bytes(sizes)  # slots, and their content
    needed = max(rounds, promotion, KEYS_OF_A_CALL * min(sizes))
    tier_calls.require_memory(needed, "lower --nbytes, --in-flight or --sizes")
    verified, stores = Verified(), _stores(arguments)
    with open_backend(arguments, note=False) as device, output.progress("remote") as progress:
        fields = _measure(arguments, stores, device, verified, progress)
    return tier_calls.conclude(arguments, fields, verified, show, output)


def _promoted_bytes(sizes: Sequence[int]) -> int:
    """The size that is nearest to 2 MiB."""
    return min(sizes, key=lambda size: abs(size - _PROMOTED_BYTES))


def _measure(
    arguments: argparse.Namespace, stores: Sequence[Store], device: Device, verified: Verified, progress: Advance
) -> dict[str, Any]:
    cells: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    promotions: list[dict[str, Any]] = []
    sizes, repeats = arguments.sizes, arguments.repeats
    for number, store in enumerate(stores):
        prefix = f"kvoffload-bench/{secrets.token_hex(8)}"
        try:
            for place, size in enumerate(sizes):
                progress(number * len(sizes) + place, len(stores) * len(sizes))
                cells += measure_size(store, prefix, size, arguments, verified)
            calls.append(measure_calls(store, prefix, min(sizes), verified))
            size = _promoted_bytes(sizes)
            promotions.append(
                measure_promotion(store, device, prefix, record_bytes=size, repeats=repeats, verified=verified)
            )
        except CommandError:
            raise
        except Exception as error:  # of a client: each has exceptions of its own
            raise store.explained(error) from error
    return {
        "benchmark": "remote",
        "stores": [str(store) for store in stores],
        "usable_cpus": hostinfo.usable_cpus(),
        "simulated": device.simulated,
        "device": device.name,
        "nbytes": arguments.nbytes,
        "repeats": repeats,
        "cells": cells,
        "calls": calls,
        "promotions": promotions,
    }


def _stores(arguments: argparse.Namespace) -> list[Store]:
    """The stores of all `--store`, each of which has answered."""
    given: list[Store] = []
    for words in arguments.store:
        kind = words[0]
        if kind not in KINDS:
            raise CommandError(f"--store must be {', '.join(KINDS)} to be compared with its client, got {kind!r:.80}")
        try:
            given.append(store_of(words))
        except ValueError as error:
            raise CommandError(f"--store {kind}: {error}") from error
    named = [store.kind for store in given]
    if len(set(named)) < len(named):
        raise CommandError(f"--store: one store of each kind can be measured at a time, got {', '.join(named)}")
    if not given:
        raise CommandError(
            "no store to measure: give --store KIND NAME=VALUE ..., such as --store valkey addresses=HOST:PORT"
        )
    for store in given:
        store.check()
    return given


_BARE = {
    "valkey": "glide's pipelined SET and MGET into buffers",
    "objects": "obstore's put and get",
    "mooncake": "batch_put_from and batch_get_into",
}


def show(fields: Fields, output: Output) -> None:
    """Print the verdict, then a table for each store, and one of calls and promotions."""
    calls, promotions = fields["calls"], fields["promotions"]
    kinds = [each["store"] for each in calls]
    of_kind = {kind: [each for each in fields["cells"] if each["store"] == kind] for kind in kinds}
    found = ", ".join(f"{kind} {tier_calls.ratios_text(cells)}" for kind, cells in of_kind.items())
    output.line(f"bench remote: {found}, times the bandwidth of bare calls")
    for kind, cells in of_kind.items():
        title = f"{kind}: bandwidth over that of {_BARE[kind]}, and GB/s"
        tier_calls.show_cells(title, cells, "in flight", (PUT, GET), output)
    lines = [
        (f"host time of {name}() of {calls[0]['keys']} keys, us a key", *(fixed(each[f"{name}_us"]) for each in calls))
        for name in (PUT, GET)
    ]
    what = f"Python memory of a record of {mib(calls[0]['record_bytes'])}, put and got, KiB"
    lines.append((what, *(fixed(each["python_bytes_a_record"] / 1024) for each in calls)))
    for name, text in (("first_ms", "first of"), ("all_ms", "all")):
        keys = f"{text} {promotions[0]['keys']} keys of {mib(promotions[0]['record_bytes'])}"
        lines.append((f"promote(): {keys} ready after ms", *(fixed(each[name]) for each in promotions)))
    output.table("calls and promotions", ("", *kinds), lines)
    output.line("")
    output.line(tier_calls.verified_text(fields))
    stores = ", ".join(fields["stores"])
    output.line(f"stores: {stores}; {fields['usable_cpus']} usable CPUs; promotions on {fields['device']}")
