"""RemoteTier: records in a store that other machines use, too, behind the blocking calls of its client.

A subclass carries *parts* under names, and knows nothing of keys, headers and checksums:

    a record    [header, range of device 0, range of device 1, ...]: uint8, one-dimensional
    its name    as `RecordFormat.name` forms it

It has no thread, retry or breaker of its own. Its calls end within the client's own timeout, and raise what the client
raises; the keys are FAILED then, and the breaker above the tier decides whether it is asked again.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from kvoffload.cache.tiering.job import Outcome, TierJob
from kvoffload.cache.tiering.tier import TierCapabilities
from kvoffload.internal.checks import shown
from kvoffload.internal.log import LOGGER
from kvoffload.internal.types import UInt8Array
from kvoffload.tiers.checksums import make_checksum
from kvoffload.tiers.format import check_identity
from kvoffload.tiers.questions import Questions
from kvoffload.tiers.remote_format import HEADER_BYTES, RecordFormat, check_prefix, make_format
from kvoffload.tiers.threaded import Origin, Rows, ThreadedTier

Parts = list[UInt8Array]
"""The ranges of one record: 192 bytes of header, then a row of each pool."""


class RemoteTier(ThreadedTier):
    """Records in a store that several machines share. Base class: a subclass has the calls of the store's client.

    A record is fetched as it was put, or is a miss: its header has the key, the layout, the identity and the checksum
    of its bytes, and is compared before the record is used. A record that differs is counted as corrupt, and deleted. A
    record's name contains digests of layout, identity and checksum key. So records of tiers with others are not
    found, stay where they are, and are not deleted by `clear`. A record that the store has evicted is a miss. While
    the store does not answer, keys are FAILED; when it answers again, they are found.

    A put that FAILED may have reached the store nevertheless, or may reach it later. So a record that is removed just
    after such a put may come back, with the bytes that were put.

    Args:
        identity: names what the bytes depend on besides tokens, salt and layout: model and revision, adapter,
            quantisation, positions, shard. Machines that share records have the same one.
        prefix: with which all names in the store begin, 1 to 100 characters, such as "kvoffload/production".
        key: 16 to 64 secret bytes, the same on all machines, for checksums by keyed BLAKE2b: records of programs that
            do not have the key are misses. None: xxh3_128, which finds accidents alone; see `DiskTier`.
        name: of the tier, in metrics, messages and what `BlockCache.locate` returns.
        durable: whether records outlive the store's processes.
        preferred_bytes: see `TierCapabilities`.
        threads, max_queued, bytes_per_call: see `ThreadedTier`.

    Attributes:
        format: forms names and headers; set by `attach`.

    Raises:
        CapabilityError: xxhash is missing, and there is no `key`.
        TypeError, ValueError: an argument.
    """

    format: RecordFormat
    asks_for_all_keys = True
    """Whether `have_names` is one call of the client for several names: then a put asks once, before it writes."""

    def __init__(
        self,
        *,
        identity: str,
        prefix: str = "kvoffload",
        key: bytes | None = None,
        name: str,
        durable: bool,
        preferred_bytes: int = 1 << 20,
        threads: int = 4,
        max_queued: int = 4096,
        bytes_per_call: int = 0,
    ) -> None:
        super().__init__(threads=threads, max_queued=max_queued, bytes_per_call=bytes_per_call)
        self.name = name
        self.identity = check_identity(identity)
        self.prefix = check_prefix(prefix)
        self.capabilities = TierCapabilities(
            durable=durable, shared=True, local_index=False, preferred_bytes=preferred_bytes
        )
        self._checksum = make_checksum(key)
        self._questions = Questions(self.have_records)

    # what a subclass does -----------------------------------------------------------------------------------------

    @abstractmethod
    def connect(self) -> None:
        """Make the client. `attach` calls it, with `self.pools` set. Does not raise if the store does not answer."""

    @abstractmethod
    def disconnect(self) -> None:
        """Close the client. All other calls have returned, and no more will be made."""

    @abstractmethod
    def fetch_parts(self, names: Sequence[str], parts: Sequence[Parts]) -> list[Outcome]:
        """Read records from the store into `parts`, as long as the call runs, not afterwards.

        Args:
            names: of the records.
            parts: of each record, uint8 arrays to be filled: of header and ranges. Their bytes are verified by the
                caller; they may be left half written unless the record is DONE.

        Returns:
            For each record DONE, MISSING or FAILED; if what is stored has other sizes, the result of `reject(name)`.
        """

    @abstractmethod
    def store_parts(self, names: Sequence[str], parts: Sequence[Parts]) -> list[Outcome]:
        """Write records to the store; `parts` may be read as long as the call runs, not afterwards.

        Args:
            names: of the records.
            parts: of each record, its header and ranges.

        Returns:
            For each record DONE, DECLINED (the store has no room) or FAILED. A record that is there already may be
            replaced or kept; both are DONE.
        """

    @abstractmethod
    def have_names(self, names: Sequence[str]) -> list[bool]:
        """Ask the store whether it has all parts of each record. A hint: they may be evicted a moment later."""

    @abstractmethod
    def delete_names(self, names: Sequence[str]) -> list[bool]:
        """Delete records. On return none of them is found.

        Returns:
            For each record whether it was there, or a part of it.
        """

    @abstractmethod
    def delete_folder(self, folder: str) -> None:
        """Delete all records whose names begin with `folder`, which ends with "/"."""

    def describe(self) -> dict[str, str | int]:
        """What `kvoffload doctor` shows of the store, such as `version`, `used_bytes`, `max_bytes`; may be empty."""
        return {}

    def new_headers(self, count: int) -> UInt8Array:
        """Memory for the headers of one call of `fetch_parts` or `store_parts`: (count, 192), uint8.

        To be overridden where the client needs registered memory. The same memory may be returned to the thread's next
        call, but not to another thread.
        """
        return np.empty((count, HEADER_BYTES), np.uint8)

    def reject(self, name: str) -> Outcome:
        """Count a record that is not what was put, delete it so that it can be put again, and return MISSING.

        Raises nothing: a record that cannot be deleted is logged, and stays a miss.
        """
        self.count_corrupt()
        LOGGER.warning("%r: the record %s is not what was put; it is deleted", self, name)
        try:
            self._delete_and_forget([name])
        except Exception as error:  # the store is read-only for this client, or gone: it stays a miss
            LOGGER.warning("%r: the record %s was not deleted: %s", self, name, shown(error))
        return Outcome.MISSING

    # for ThreadedTier ---------------------------------------------------------------------------------------------

    def start(self, layout: bytes | None) -> None:
        assert layout is not None, "a shared tier is given one"
        row_bytes = [pool.shape[1] for pool in self.pools]
        self.format = make_format(self.prefix, layout, self.identity, row_bytes, self._checksum)
        self.connect()

    def release(self) -> None:
        self.disconnect()

    def read_records(self, keys: Sequence[bytes], rows: Sequence[Rows]) -> list[Outcome]:
        headers = self.new_headers(len(keys))
        names = self._names(keys)
        parts = [[header, *ranges] for header, ranges in zip(headers, rows, strict=True)]
        outcomes = self.fetch_parts(names, parts)
        for at, (header, *ranges) in enumerate(parts):
            if outcomes[at] is Outcome.DONE and not self.format.is_record(keys[at], header.tobytes(), ranges):
                outcomes[at] = self.reject(names[at])
        return outcomes

    def write_records(self, keys: Sequence[bytes], rows: Sequence[Rows], origin: Origin) -> list[Outcome]:
        names = self._names(keys)
        outcomes = [Outcome.DONE] * len(keys)
        found = self._questions.has(keys, origin.job) if self.asks_for_all_keys else self.have_names(names)
        missing = [at for at, there in enumerate(found) if not there]
        if not missing:
            return outcomes
        headers = self.new_headers(len(missing))
        for header, at in zip(headers, missing, strict=True):
            header[:] = np.frombuffer(self.format.pack(keys[at], rows[at]), np.uint8)
        parts = [[header, *rows[at]] for header, at in zip(headers, missing, strict=True)]
        for at, outcome in zip(missing, self.store_parts([names[at] for at in missing], parts), strict=True):
            outcomes[at] = outcome
        return outcomes

    def have_records(self, keys: Sequence[bytes]) -> list[bool]:
        return self.have_names(self._names(keys))

    def remove_records(self, keys: Sequence[bytes]) -> list[bool]:
        return self._delete_and_forget(self._names(keys))

    def remove_all(self) -> None:
        try:
            self.delete_folder(self.format.folder)
        finally:
            self._questions.forget_all()

    def put_ended(self, job: TierJob) -> None:
        self._questions.forget(job)

    def _delete_and_forget(self, names: Sequence[str]) -> list[bool]:
        try:
            return self.delete_names(names)
        finally:
            self._questions.forget_all()

    def _names(self, keys: Sequence[bytes]) -> list[str]:
        return [self.format.name(key) for key in keys]
