"""What `bench remote` measures: a tier and bare batch calls of its client in turns, calls, and promotions."""

from __future__ import annotations

import statistics
import time
import tracemalloc
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np

from kvoffload.cache.block_cache import BlockCache
from kvoffload.device.device import Device
from kvoffload.driver import address_of
from kvoffload.engine.engine import OffloadEngine
from kvoffload.errors import TierError
from kvoffload.internal.types import UInt8Array
from kvoffload.layout.layout import KVLayout
from kvoffload.terminal.stores import Store
from kvoffload.tiers import RemoteTier
from kvoffload_bench import tier_calls
from kvoffload_bench.disk_measure import LAYOUT, pages
from kvoffload_bench.tier_calls import KEYS_OF_A_CALL, Verified, carry_out, measure_rounds, numbered_keys

Rows = Sequence[UInt8Array]


class BareLoop(ABC):
    """Threads with a client of one store. A context manager.

    Args:
        store: whose client is used.
        threads: that share a batch.
        prefix: of all names.
        pool: uint8, (rows, bytes): where all records come from and go to.
    """

    def __init__(self, store: Store, *, threads: int, prefix: str, pool: UInt8Array) -> None:
        self._threads, self._prefix = threads, prefix
        self._clients: list[Any] = []
        self._undo = ExitStack()
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="kvoffload-bench")
        try:
            for _ in range(threads if self.one_each else 1):
                client, close = store.client()
                self._undo.callback(close)
                self._clients.append(client)
            self.prepare(pool)
        except BaseException:
            self.__exit__()
            raise

    one_each = False  # whether each thread has a client of its own, as in the tier

    def prepare(self, pool: UInt8Array) -> None:  # noqa: B027
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

    def put(self, numbers: Sequence[int], rows: Rows) -> None:
        """Store a batch."""
        self._share(lambda client, part: self.put_batch(client, self._names(numbers[part]), rows[part]), len(rows))

    def get(self, numbers: Sequence[int], rows: Rows) -> list[UInt8Array]:
        """Fetch a batch; the arrays that hold it."""
        parts = self._share(
            lambda client, part: self.get_batch(client, self._names(numbers[part]), rows[part]), len(rows)
        )
        return [array for part in parts for array in part]

    def delete(self, numbers: Sequence[int]) -> None:
        self.delete_batch(self._clients[0], self._names(numbers))

    def _names(self, numbers: Sequence[int]) -> list[str]:
        return [f"{self._prefix}/{number}" for number in numbers]

    def _share(self, call: Callable[[Any, slice], Any], count: int) -> list[Any]:
        step = -(-count // self._threads)
        parts = [slice(at, at + step) for at in range(0, count, step)]
        clients = [self._clients[number % len(self._clients)] for number in range(len(parts))]
        if len(parts) == 1:
            return [call(clients[0], parts[0])]
        return list(self._executor.map(call, clients, parts))

    def __enter__(self) -> BareLoop:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
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


def bare_loop(store: Store, *, threads: int, prefix: str, pool: UInt8Array) -> BareLoop:
    """A bare loop over a store."""
    return _LOOPS[store.kind](store, threads=threads, prefix=prefix, pool=pool)


# rounds in turns ------------------------------------------------------------------------------------------------------

PUT, GET = "put", "get"
IDENTITY = "kvoffload bench remote"
_POISON = 0xA5


def records_of_round(record_bytes: int, in_flight: int, nbytes: int) -> int:
    """Whole batches, at least one, of `nbytes` together if that is more."""
    return max(1, nbytes // record_bytes // in_flight) * in_flight


def measure_size(
    store: Store,
    *,
    prefix: str,
    record_bytes: int,
    in_flight: Sequence[int],
    nbytes: int,
    repeats: int,
    verified: Verified,
) -> list[dict[str, Any]]:
    """Figures of one size of records, for each number in flight, put and get.

    Args:
        prefix: of all names in the store, which has no others of them.
        nbytes: of the records of a round, together.
        verified: is added to.
    """
    most = max(records_of_round(record_bytes, count, nbytes) for count in in_flight)
    pool = pages(2 * most, record_bytes)
    pool[:most] = np.random.default_rng(0).integers(0, 256, (most, record_bytes), np.uint8)
    tier = store.tier(identity=IDENTITY, prefix=f"{prefix}/tier")
    tier.attach([pool], LAYOUT)
    cells = []
    try:
        with bare_loop(store, threads=tier.threads, prefix=f"{prefix}/bare", pool=pool) as bare:
            rounds = _Rounds(tier, bare, pool, verified)
            for count in in_flight:
                records = records_of_round(record_bytes, count, nbytes)
                what = {"store": store.kind, "record_bytes": record_bytes, "in_flight": count, "records": records}
                execute = partial(rounds.execute, records, count)
                cells += measure_rounds(execute, (PUT, GET), repeats, what, records * record_bytes)
    finally:
        tier.close()
    return cells


class _Rounds:
    """The first half of the pool holds what is put, the second half gets what is read."""

    def __init__(self, tier: RemoteTier, bare: BareLoop, pool: UInt8Array, verified: Verified) -> None:
        self._tier, self._bare, self._pool, self._verified = tier, bare, pool, verified
        self._half = len(pool) // 2
        self._number = 0

    def execute(self, records: int, in_flight: int, bare_first: bool) -> dict[str, tuple[float, float]]:
        """Seconds of the tier and of the bare loop, for put and get."""
        self._number += 1
        self._pool[: self._half, :: 1 << 12] = self._number % 251  # other bytes than the round before put
        batches = [range(at, at + in_flight) for at in range(0, records, in_flight)]
        keys = numbered_keys(self._number << 32, records)
        numbers = [self._number << 32 | at for at in range(records)]
        turns: list[tuple[int, Callable[[range], None], Callable[[range], Sequence[UInt8Array]]]] = [
            (0, lambda part: self._put(keys, part), lambda part: self._get(keys, part)),
            (1, lambda part: self._bare_put(numbers, part), lambda part: self._bare_get(numbers, part)),
        ]
        seconds = {PUT: [0.0, 0.0], GET: [0.0, 0.0]}
        try:
            for at, put, _ in turns[:: -1 if bare_first else 1]:
                seconds[PUT][at] = _timed(put, batches)[0]
            for at, _, get in turns[:: -1 if bare_first else 1]:
                self._pool[self._half :].fill(_POISON)
                seconds[GET][at], found = _timed(get, batches)
                self._compare([row for batch in found for row in batch])
        finally:
            self._tier.clear().wait()
            for part in batches:
                self._bare.delete(numbers[part.start : part.stop])
        return {name: (each[0], each[1]) for name, each in seconds.items()}

    def _put(self, keys: Sequence[bytes], part: range) -> None:
        carry_out(self._tier.put, keys[part.start : part.stop], part, self._verified)

    def _get(self, keys: Sequence[bytes], part: range) -> Sequence[UInt8Array]:
        targets = range(self._half + part.start, self._half + part.stop)
        carry_out(self._tier.get, keys[part.start : part.stop], targets, self._verified)
        return list(self._pool[targets.start : targets.stop])

    def _bare_put(self, numbers: Sequence[int], part: range) -> None:
        self._bare.put(numbers[part.start : part.stop], list(self._pool[part.start : part.stop]))

    def _bare_get(self, numbers: Sequence[int], part: range) -> Sequence[UInt8Array]:
        rows = list(self._pool[self._half + part.start : self._half + part.stop])
        return self._bare.get(numbers[part.start : part.stop], rows)

    def _compare(self, found: Sequence[UInt8Array]) -> None:
        self._verified.records += len(found)
        self._verified.wrong += sum(
            not np.array_equal(*pair) for pair in zip(found, self._pool[: len(found)], strict=True)
        )


def _timed(call: Callable[[range], Any], batches: Sequence[range]) -> tuple[float, list[Any]]:
    """Seconds of a round, and what the calls have returned."""
    begin = time.perf_counter()
    found = [call(each) for each in batches]
    return time.perf_counter() - begin, found


# calls, and promotions ------------------------------------------------------------------------------------------------

_PLANES = 16
_PROMOTED = 64  # keys
_POLL_SECONDS = 5e-5
_MOST_SECONDS = 120.0  # that a promotion may take
_COUNTED = 8  # records, whose memory is counted


def measure_calls(store: Store, *, prefix: str, record_bytes: int, verified: Verified) -> dict[str, Any]:
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
    store: Store, device: Device, *, prefix: str, record_bytes: int, repeats: int, verified: Verified
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
                for number in range(-1, repeats):
                    cache.clear(below=False)
                    engine.slots[:] = 0
                    found, first, last = _promote(cache, keys)
                    if number >= 0:
                        times.append((first, last))
                    verified.records += found
                    verified.missing += _PROMOTED - found
                    with cache.acquire(keys[:found]) as lease:
                        rows = engine.slots[lease.slots()]
                        verified.wrong += sum(not np.array_equal(*pair) for pair in zip(rows, content, strict=False))
            finally:
                with suppress(TierError):  # it failed before
                    cache.clear()
    first, last = (statistics.median(each) for each in zip(*times, strict=True))
    return {
        "store": store.kind,
        "record_bytes": record_bytes,
        "keys": _PROMOTED,
        "first_ms": 1e3 * first,
        "all_ms": 1e3 * last,
    }


def promotion_bytes(record_bytes: int) -> int:
    """Host memory that `measure_promotion` takes: slots, and their content."""
    return 3 * _PROMOTED * record_bytes


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
