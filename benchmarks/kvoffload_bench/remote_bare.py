"""What `bench remote` compares tiers with: batch calls of their own clients, without headers, checksums and questions.

As many threads as the tier has share the records of a batch, each with one call, and wait for each other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import numpy as np

from kvoffload.driver import address_of
from kvoffload.internal.types import UInt8Array
from kvoffload.terminal.stores import Store

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
