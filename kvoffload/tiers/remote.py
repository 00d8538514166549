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

from kvoffload.internal.checks import shown
from kvoffload.internal.log import LOGGER
from kvoffload.internal.types import UInt8Array
from kvoffload.tiers.checksums import make_checksum
from kvoffload.tiers.format import check_identity
from kvoffload.tiers.job import Outcome
from kvoffload.tiers.remote_format import HEADER_BYTES, RecordFormat, check_prefix, make_format
from kvoffload.tiers.threaded import Origin, Rows, ThreadedTier
from kvoffload.tiers.tier import TierCapabilities

Parts = list[UInt8Array]
"""The ranges of one record: 192 bytes of header, then a row of each pool."""


class RemoteTier(ThreadedTier):
    """Records in a remote store: named after what they depend on, and verified before a byte of them is used.

    A record is what was put, or a miss: its header has the key, the layout, the identity and the checksum of its bytes.
    One that differs is counted as corrupt, and deleted. Records of other layouts, identities and checksum keys have
    other names: they stay where they are, and `clear` does not delete them. What the store evicts is a miss. A store
    that does not answer makes keys FAILED; when it answers again, they are found.

    A put that FAILED may have reached the store nevertheless, or reach it later: so a record that is removed just after
    such a put may come back, with the bytes that were put.

    Args:
        identity: what the bytes depend on besides the layout: model and revision, adapter, quantisation, positions,
            shard.
        prefix: of all names in the store, 1 to 100 characters, such as "kvoffload/production".
        key: 16 to 64 secret bytes, as for `DiskTier`: who can write the store but has not the key cannot write records.
        name: for metrics and messages.
        durable: whether records outlive the store's processes.
        preferred_bytes: see `TierCapabilities`.
        threads, max_queued, bytes_per_call: see `ThreadedTier`.

    Attributes:
        format: names and headers; set when the tier has a pool.

    Raises:
        CapabilityError: xxhash is missing, and there is no `key`.
        TypeError, ValueError: an argument.
    """

    format: RecordFormat

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

    # what a subclass does -----------------------------------------------------------------------------------------

    @abstractmethod
    def connect(self) -> None:
        """Make the client. The pools are known: `self.pools`. The store need not be reachable yet."""

    @abstractmethod
    def disconnect(self) -> None:
        """Close the client. No other method is being called, or will be."""

    @abstractmethod
    def fetch_parts(self, names: Sequence[str], parts: Sequence[Parts]) -> list[Outcome]:
        """Fill the parts of each record: DONE, MISSING, FAILED. For one of other sizes: what `reject` returns."""

    @abstractmethod
    def store_parts(self, names: Sequence[str], parts: Sequence[Parts]) -> list[Outcome]:
        """Store the parts of each record under its name, instead of what is there: DONE, DECLINED, FAILED.

        If there is one already, a store that can keep it may do so, and return DONE.
        """

    @abstractmethod
    def have_names(self, names: Sequence[str]) -> list[bool]:
        """Of each name whether the store has all parts of its record, as far as it says."""

    @abstractmethod
    def delete_names(self, names: Sequence[str]) -> list[bool]:
        """Delete records; of each whether there was one, or a part of one. On return none of them is found."""

    @abstractmethod
    def delete_folder(self, folder: str) -> None:
        """Delete all records whose names begin with this, which ends with "/"."""

    def describe(self) -> dict[str, str | int]:
        """What the store says of itself, such as `version`, `used_bytes`, `max_bytes`; empty if it says nothing."""
        return {}

    def new_headers(self, count: int) -> UInt8Array:
        """(count, 192), uint8: for the headers of one call of `fetch_parts` or `store_parts`, by the calling thread.

        For clients that need registered memory: it may be returned again by the thread's next call.
        """
        return np.empty((count, HEADER_BYTES), np.uint8)

    def reject(self, name: str) -> Outcome:
        """A record has other bytes than were put: count it, and delete it, so that it can be put again. MISSING."""
        self.count_corrupt()
        LOGGER.warning("%r: the record %s is not what was put; it is deleted", self, name)
        try:
            self.delete_names([name])
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

    def write_records(self, keys: Sequence[bytes], rows: Sequence[Rows], origin: Origin) -> list[Outcome]:  # noqa: ARG002
        names = self._names(keys)
        outcomes = [Outcome.DONE] * len(keys)
        missing = [at for at, there in enumerate(self.have_names(names)) if not there]
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
        return self.delete_names(self._names(keys))

    def remove_all(self) -> None:
        self.delete_folder(self.format.folder)

    def _names(self, keys: Sequence[bytes]) -> list[str]:
        return [self.format.name(key) for key in keys]
