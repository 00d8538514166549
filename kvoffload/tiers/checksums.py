"""Checksums of payloads and headers: 16 bytes, over several ranges of memory as if they were one.

xxh3_128 finds accidents. It is no signature: who can write the files can compute it. blake2b with a key of the user's
finds that, too. For 2 MiB it takes 15 times as long where they come from memory, and 55 times where they are in the
CPU's cache (xxhash 4.1 with AVX-512, one core, medians). Both release the GIL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import NamedTuple

from kvoffload.errors import CapabilityError
from kvoffload.tiers.files import Buffer

DIGEST_BYTES = 16
XXH3_128, BLAKE2B = 1, 2  # algorithm ids of the format
_KEY_BYTES = range(16, 65)  # 64: the longest key of BLAKE2b


class Checksum(NamedTuple):
    """A checksum algorithm with its key, if it has one.

    Attributes:
        algorithm: its id in the format.
        key_check: 16 bytes that tell keys apart and do not reveal them; zeros without a key.
        of: the digest of several ranges, 16 bytes. Releases the GIL for long ones.
        of_bytes: the digest of one range; the faster one for headers.
    """

    algorithm: int
    key_check: bytes
    of: Callable[[Sequence[Buffer]], bytes]
    of_bytes: Callable[[bytes], bytes]


def make_checksum(key: bytes | None = None) -> Checksum:
    """xxh3_128; with a key, blake2b.

    Args:
        key: 16 to 64 secret bytes, the same in every process that opens the files.

    Raises:
        CapabilityError: without a key, and xxhash cannot be imported.
        TypeError, ValueError: `key`. The message does not show it.
    """
    return _xxh3() if key is None else _keyed(key)


def _xxh3() -> Checksum:
    try:
        import xxhash
    except ImportError as error:
        raise CapabilityError(
            f"a durable or shared tier needs the package xxhash for its checksums, which cannot be imported ({error}); "
            "install it: pip install 'kvoffload[disk]'"
        ) from error

    def of(views: Sequence[Buffer]) -> bytes:
        if len(views) == 1:
            return xxhash.xxh3_128_digest(views[0])
        hasher = xxhash.xxh3_128()
        for view in views:
            hasher.update(view)
        return hasher.digest()

    return Checksum(XXH3_128, bytes(DIGEST_BYTES), of, xxhash.xxh3_128_digest)


def _keyed(key: bytes) -> Checksum:
    if not isinstance(key, bytes):
        raise TypeError(f"key must be bytes, or None for xxh3_128, got a value of type {type(key).__name__}")
    if len(key) not in _KEY_BYTES:
        raise ValueError(f"key must have {_KEY_BYTES[0]} to {_KEY_BYTES[-1]} bytes, got {len(key)}")
    begin = blake2b(key=key, digest_size=DIGEST_BYTES, person=b"kvoffload disk").copy

    def of(views: Sequence[Buffer]) -> bytes:
        hasher = begin()
        for view in views:
            hasher.update(view)
        return hasher.digest()

    def of_bytes(data: bytes) -> bytes:
        hasher = begin()
        hasher.update(data)
        return hasher.digest()

    check = blake2b(key=key, digest_size=DIGEST_BYTES, person=b"kvoffload key").digest()
    return Checksum(BLAKE2B, check, of, of_bytes)
