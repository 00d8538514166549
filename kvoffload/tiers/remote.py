"""RemoteTier: records in a store that several machines share, behind the blocking calls of its client.

A subclass moves *parts* under names, and knows nothing of keys, headers and checksums:

    a record    [header, range of device 0, range of device 1, ...]: uint8, one-dimensional
    its name    from `RecordFormat.name`

docs/remote-format.md specifies the header of 192 bytes. Its checksum covers the key and the digest of the name space,
so it is valid for one name only. It also holds the payload's digest: header and payload of different puts are a miss.

A remote tier has no retries and no breaker. Its calls end within the client's own timeout. If the client raises, keys
are FAILED, and the breaker above the tier decides whether to ask it again.
"""

from __future__ import annotations

import re
import struct
from abc import abstractmethod
from collections.abc import Callable, Sequence
from hashlib import blake2b

import numpy as np

from kvoffload.cache.tiering.tier import Outcome, TierCapabilities, TierJob
from kvoffload.internal.checks import shown
from kvoffload.internal.log import LOGGER
from kvoffload.internal.nesting import new_lock
from kvoffload.internal.types import UInt8Array
from kvoffload.tiers.format import DIGEST_BYTES, NO_CODEC, Checksum, check_identity, identity_fields, make_checksum
from kvoffload.tiers.options import Limits
from kvoffload.tiers.threaded import Origin, Rows, ThreadedTier

VERSION = 1
MAGIC = b"\x89KVORMT\n"
HEADER_BYTES = 192
LONGEST_PREFIX = 100  # characters

_PREFIX = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")

# magic, version, bytes of a header | payload bytes, ranges, algorithm, codec, key length
# layout digest, space digest, payload digest, key
_BODY = struct.Struct("<8sII QIBBBx 16s16s16s64s 32x")

Parts = list[UInt8Array]
"""The ranges of one record: 192 bytes of header, then a row of each pool."""


class RecordFormat:
    """Names and headers of the records of one layout, identity, shape and checksum key.

    Args:
        prefix, identity: see `RemoteTier`.
        layout: 16 bytes, as for `Tier.attach`.
        row_bytes: bytes of a record on each device.
        checksum: for headers and payloads.

    Attributes:
        folder: all names begin so, and no others: prefix, version, layout, and a digest of identity, `row_bytes` and
            checksum key.
    """

    def __init__(self, prefix: str, layout: bytes, identity: str, row_bytes: Sequence[int], checksum: Checksum) -> None:
        sizes = struct.pack(f"<I{len(row_bytes)}Q", len(row_bytes), *row_bytes)
        algorithm = struct.pack("<IB", VERSION, checksum.algorithm)
        about = algorithm + checksum.key_check + identity_fields(identity)[0] + sizes
        self._space = blake2b(about, digest_size=DIGEST_BYTES, person=b"kvoffload space").digest()
        self._layout, self._checksum = layout, checksum
        self._nbytes, self._ranges = sum(row_bytes), len(row_bytes)
        self.folder = f"{prefix}/{VERSION}/{layout.hex()}/{self._space.hex()}/"

    def name(self, key: bytes) -> str:
        """Return the name of a key's record, at most 300 characters: the folder, then the key's hex digits."""
        return self.folder + key.hex()

    def pack(self, key: bytes, rows: Sequence[UInt8Array]) -> bytes:
        """Return the 192 bytes of the header for a record with these rows as its payload."""
        digest = self._checksum.of([row.data for row in rows])
        body = _BODY.pack(
            MAGIC, VERSION, HEADER_BYTES, self._nbytes, self._ranges, self._checksum.algorithm, NO_CODEC, len(key),
            self._layout, self._space, digest, key,
        )  # fmt: skip
        return self._checksum.of_bytes(body) + body


class _Question:
    """The question for one job. `asking` is held while it is asked; then `found` has the keys that the store has."""

    def __init__(self) -> None:
        self.asking = new_lock()
        self.found: frozenset[bytes] | None = None
        self.error: BaseException | None = None


class Questions:
    """Asks once for each put which of its keys the store has. Usable from any thread.

    The question comes before any bytes: a store with one thread, such as Valkey, would answer a later one behind the
    values that it is receiving.

    Args:
        ask: asks the store for these keys; may raise.
    """

    def __init__(self, ask: Callable[[Sequence[bytes]], Sequence[bool]]) -> None:
        self._ask = ask
        self._lock = new_lock()
        self._of: dict[TierJob, _Question] = {}

    def has(self, keys: Sequence[bytes], job: TierJob) -> list[bool]:
        """Return whether the store has each of these keys. The first call for a job asks for all keys of the job.

        Calls at the same time wait for its answer. If `ask` raises, they raise ConnectionError, so that no call lasts
        longer than one question; the next call asks again.
        """
        with self._lock:
            question = self._of.setdefault(job, _Question())
        with question.asking:
            if question.error is not None:
                raise ConnectionError("the store did not say which records it has") from question.error
            if question.found is None:
                try:
                    there = self._ask(job.keys)
                except BaseException as error:
                    question.error = error
                    self.forget(job)
                    raise
                question.found = frozenset(key for key, known in zip(job.keys, there, strict=True) if known)
        return [key in question.found for key in keys]

    def forget(self, job: TierJob) -> None:
        """Drop the answer for a job that has ended."""
        with self._lock:
            self._of.pop(job, None)

    def forget_all(self) -> None:
        """Drop all answers, since records were deleted. Puts under way ask again."""
        with self._lock:
            self._of.clear()


class RemoteTier(ThreadedTier):
    """Base class for records in a store that several machines share. A subclass has the calls of the store's client.

    You get the bytes that were put, or a miss. Every fetch compares key, layout, identity and checksum in the record's
    header; a record that differs counts as corrupt and is deleted. Names contain digests of layout, identity and
    checksum key, so tiers that differ in one of these, or in `prefix`, do not see each other's records, and `clear`
    deletes only its own. While the store does not answer, keys are FAILED; later its records are found again.

    A FAILED put may still reach the store later. So if you remove a key just after such a put, its record may come back
    with the bytes that were put.

    Threads of the tier call a subclass's methods, several at a time; only `connect` runs in the thread of `attach`, and
    `describe` in its caller's. No two calls of one tier write one record at a time, nor does one write a record that
    `remove` or `clear` is deleting. But a fetch, which deletes a record that it rejects, may run beside either, and
    other tiers, in this process or elsewhere, may do anything at any time. If a method that gets names raises, all keys
    of its call are FAILED, or DECLINED if the error of a write says that there is no room, see `ThreadedTier`.

    Args:
        identity: a text for everything but tokens, salt and layout that the bytes depend on: model and revision,
            adapter, quantisation, positions, shard. Give machines that share records the same one.
        prefix: begins all names in the store, such as "kvoffload/production": 1 to 100 letters, digits, "_", "-" and
            ".", in folders separated by "/" that do not begin with ".".
        key: 16 to 64 secret bytes, the same on all machines. Keyed BLAKE2b then makes records of programs without the
            key misses. None: xxh3_128, which finds only accidents; see `DiskTier`.
        name: for metrics, messages and the answers of `BlockCache.locate`.
        durable: see `TierCapabilities`.
        limits: threads and queue; None: `Limits()`.

    Attributes:
        format: makes names and headers; set by `attach`, before it calls `connect`.

    Raises:
        TypeError, ValueError: an argument.
    """

    format: RecordFormat
    asks_for_all_keys = True
    """True: `have_names` is one call of the client, however many names; a put asks once, for all its keys. A class
    that needs a call for each name sets False.
    """

    def __init__(
        self,
        *,
        identity: str,
        prefix: str = "kvoffload",
        key: bytes | None = None,
        name: str,
        durable: bool,
        limits: Limits | None = None,
    ) -> None:
        super().__init__(limits=limits)
        self.name = name
        self.identity = check_identity(identity)
        if not isinstance(prefix, str) or len(prefix) > LONGEST_PREFIX or _PREFIX.fullmatch(prefix) is None:
            raise ValueError(
                f"prefix must be 1 to {LONGEST_PREFIX} letters, digits, '_', '-' and '.', in folders separated by '/' "
                f"that do not begin with '.', got {shown(prefix)}"
            )
        self.prefix = prefix
        self.capabilities = TierCapabilities(durable=durable, shared=True, local_index=False)
        self._checksum = make_checksum(key)
        self._questions = Questions(self.have_records)

    # what a subclass does -----------------------------------------------------------------------------------------

    @abstractmethod
    def connect(self) -> None:
        """Make the client. `attach` calls this once, in its caller's thread, with `self.pools` and `self.format` set.
        May block. Do not raise if the store does not answer: nothing calls this again, so the later calls then connect
        (several threads at a time), or raise.

        What it raises, `attach` raises. `disconnect` is then not called, and `attach` may be called again.
        """

    @abstractmethod
    def disconnect(self) -> None:
        """Close the client. Called once, after a `connect` that returned; all other calls have returned, and none will
        follow. May block. An exception from it is logged.
        """

    @abstractmethod
    def fetch_parts(self, names: Sequence[str], parts: Sequence[Parts]) -> list[Outcome]:
        """Read records from the store into `parts`. Do not touch `parts` after returning.

        Args:
            names: of the records.
            parts: for each record the uint8 arrays to fill, one-dimensional: the header of 192 bytes, then a range for
                each device. The caller verifies them, so a record that is being written meanwhile does no harm. They
                may be left half written unless the record is DONE.

        Returns:
            A list with DONE, MISSING or FAILED for each record, in order. If the stored bytes have another size, call
            `reject(name)`: what it returns is the outcome. If you raise, all are FAILED.
        """

    @abstractmethod
    def store_parts(self, names: Sequence[str], parts: Sequence[Parts]) -> list[Outcome]:
        """Write records to the store. Do not write to `parts`, nor read them after returning.

        Args:
            names: of the records.
            parts: for each record uint8 arrays, one-dimensional: its header and its ranges.

        Returns:
            A list with DONE, DECLINED (the store has no room) or FAILED for each record, in order. If the store already
            has the record, keep or replace it; both are DONE. If you raise, all are FAILED, or DECLINED if the error
            says that there is no room. If a part is missing, the record is a miss when it is read.
        """

    @abstractmethod
    def have_names(self, names: Sequence[str]) -> list[bool]:
        """Ask the store. Return for each record, in order, whether all of its parts are there, as a hint: the store may
        evict them a moment later. Called for `exists`, and before records are put.

        Raise if the store does not answer: False means that it has answered. The keys are then FAILED.
        """

    @abstractmethod
    def delete_names(self, names: Sequence[str]) -> list[bool]:
        """Delete records, so that none is found when you return. Return for each, in order, whether it, or a part, was
        there. Some may be missing, or another call may delete them meanwhile: that is no error.

        Raise if one may still be there: the keys are then FAILED. `reject` calls this, too.
        """

    @abstractmethod
    def delete_folder(self, folder: str) -> None:
        """Delete all records whose names begin with `folder`, which ends with "/", and no others: none is left when you
        return. No write of this tier runs meanwhile; fetches and deletions may.

        No match is fine. Raise if one may be left: `clear` then reports FAILED; else it reports DONE.
        """

    def describe(self) -> dict[str, str | int]:
        """Return facts about the store for `kvoffload doctor`: `version`, `used_bytes`, `max_bytes`; {} by default,
        and so of an `ObjectStoreTier`.

        Called between `connect` and `disconnect`. It may ask the store, and raise.
        """
        return {}

    def new_headers(self, count: int) -> UInt8Array:
        """Return memory for the headers of one call of `fetch_parts` or `store_parts`: (count, 192), uint8,
        C-contiguous, with any content.

        Override it if the client needs registered memory. A thread of the tier calls it before each such call, several
        threads at a time. The same thread's next call may get the same memory again. If you raise, the keys are FAILED.
        """
        return np.empty((count, HEADER_BYTES), np.uint8)

    def reject(self, name: str) -> Outcome:
        """Count a record as corrupt, delete it so that it can be put again, and return MISSING.

        Never raises: if deleting fails, that is logged; each `get` of it misses and tries again.
        """
        self.count_corrupt()
        LOGGER.warning("%r: the record %s is not what was put; it is deleted", self, name)
        try:
            self._delete_and_forget([name])
        except Exception as error:  # noqa: BLE001  # the store is read-only for this client, or gone: it stays a miss
            LOGGER.warning("%r: the record %s was not deleted: %s", self, name, shown(error))
        return Outcome.MISSING

    # for ThreadedTier ---------------------------------------------------------------------------------------------

    def start(self, layout: bytes | None) -> None:
        assert layout is not None, "a shared tier is given one"
        row_bytes = [pool.shape[1] for pool in self.pools]
        self.format = RecordFormat(self.prefix, layout, self.identity, row_bytes, self._checksum)
        self.connect()

    def release(self) -> None:
        self.disconnect()

    def read_records(self, keys: Sequence[bytes], rows: Sequence[Rows]) -> list[Outcome]:
        headers = self.new_headers(len(keys))
        names = self._names(keys)
        parts = [[header, *ranges] for header, ranges in zip(headers, rows, strict=True)]
        outcomes = self.fetch_parts(names, parts)
        for at, (header, *ranges) in enumerate(parts):
            if outcomes[at] is Outcome.DONE and header.tobytes() != self.format.pack(keys[at], ranges):
                outcomes[at] = self.reject(names[at])
        return outcomes

    def write_records(self, keys: Sequence[bytes], rows: Sequence[Rows], origin: Origin) -> list[Outcome]:
        names = self._names(keys)
        outcomes = [Outcome.DONE] * len(keys)
        found = self._questions.has(keys, origin.job) if self.asks_for_all_keys else self.have_names(names)
        missing = [at for at, there in zip(range(len(keys)), found, strict=True) if not there]
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
