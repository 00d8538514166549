"""Checksums of payloads and headers: 16 bytes, over several ranges of memory as if they were one.

xxh3_128 finds accidents. It is no signature: anybody who can write the files can compute it. blake2b with the user's
key finds that, too. For 2 MiB it takes 15 times as long if they come from memory, and 55 times if they are in the CPU's
cache (xxhash 4.1 with AVX-512, one core, medians). Both release the GIL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from kvoffload.tiers.files import Buffer
from kvoffload.tiers.options import import_package

DIGEST_BYTES = 16
XXH3_128, BLAKE2B = 1, 2  # algorithm ids of the format
_KEY_BYTES = range(16, 65)  # 64: the longest key of BLAKE2b


class Checksum(NamedTuple):
    """A checksum algorithm, with its key if it has one.

    Attributes:
        algorithm: its id in the format.
        key_check: 16 bytes that tell keys apart without revealing them; zeros without a key.
        of: digest of several ranges, 16 bytes. Releases the GIL for long ones.
        of_bytes: digest of one range; faster for headers.
    """

    algorithm: int
    key_check: bytes
    of: Callable[[Sequence[Buffer]], bytes]
    of_bytes: Callable[[bytes], bytes]


def make_checksum(key: bytes | None = None) -> Checksum:
    """xxh3_128; with a key of 16 to 64 secret bytes, blake2b.

    Raises:
        CapabilityError: there is no key, and xxhash cannot be imported.
        TypeError, ValueError: `key`. The message does not show it.
    """
    begin: Callable[[], Any]
    of_bytes: Callable[[Buffer | bytes], bytes]
    if key is None:
        needs = "a durable or shared tier needs the package xxhash for its checksums"
        xxhash = import_package("xxhash", needs=needs, extra="disk")
        begin, of_bytes = xxhash.xxh3_128, xxhash.xxh3_128_digest
        algorithm, check = XXH3_128, bytes(DIGEST_BYTES)
    else:
        if not isinstance(key, bytes):
            raise TypeError(f"key must be bytes, or None for xxh3_128, got a value of type {type(key).__name__}")
        if len(key) not in _KEY_BYTES:
            raise ValueError(f"key must have {_KEY_BYTES[0]} to {_KEY_BYTES[-1]} bytes, got {len(key)}")
        begin = blake2b(key=key, digest_size=DIGEST_BYTES, person=b"kvoffload disk").copy
        algorithm, check = BLAKE2B, blake2b(key=key, digest_size=DIGEST_BYTES, person=b"kvoffload key").digest()

        def of_bytes(data: Buffer | bytes) -> bytes:
            hasher = begin()
            hasher.update(data)
            return bytes(hasher.digest())

    def of(views: Sequence[Buffer]) -> bytes:
        if len(views) == 1:
            return of_bytes(views[0])
        hasher = begin()
        for view in views:
            hasher.update(view)
        return bytes(hasher.digest())

    return Checksum(algorithm, check, of, of_bytes)
