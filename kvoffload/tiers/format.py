"""The format of a disk set, byte by byte, little-endian; docs/disk-format.md specifies it for other programs.

    page 0, page 1       the superblock, twice: 512 bytes each, the rest of the page zeros
    from page 2 on       the header table: 192 bytes for each slot
    from `data_offset`   the payloads: `slot_bytes` for each slot, the beginning of a page

A header is valid in one place only: its checksum covers the number of its slot and the *member digest*, which covers
layout, identity, the set's id and the member's number. Its payload digest binds the payload to it.

xxh3_128 finds accidents. It is no signature: anybody who can write the files can compute it. blake2b with the user's
key finds that, too. For 2 MiB it takes 15 times as long if they come from memory, and 55 times if they are in the CPU's
cache (xxhash 4.1 with AVX-512, one core, medians). Both release the GIL.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffload.cache.weights import namespace_digest
from kvoffload.internal.types import Int64Array, UInt8Array, UInt64Array
from kvoffload.tiers.files import PAGE, Buffer

DIGEST_BYTES = 16
XXH3_128, BLAKE2B = 1, 2  # algorithm ids of the format
_KEY_BYTES = range(16, 65)  # 64: the longest key of BLAKE2b
VERSION = 1
MAGIC = b"\x89KVODSK\n"
UNFINISHED = (MAGIC + VERSION.to_bytes(4, "little")).ljust(PAGE, b"\0")  # while a set is formatted
SUPERBLOCK_BYTES = 512  # one sector: written whole or not at all
SUPERBLOCK_OFFSETS = (0, PAGE)
TABLE_OFFSET = 2 * PAGE
HEADER_BYTES = 192
MOST_KEY_BYTES = 64
NO_CODEC = 0  # of the payload: as it is in the slot
MOST_EPOCH = (1 << 64) - (1 << 32) - 1  # another one can follow it
MOST_SEQUENCE = (1 << 64) - 1

_MOST_TEXT = 256
_digest = partial(blake2b, digest_size=DIGEST_BYTES)

# magic, version, bytes of a header, slot bytes, slots, data offset, member, members | epoch | algorithm, 0, set id,
# layout digest, identity digest, key check | length and bytes of the identity's text
_SUPERBLOCK = struct.Struct("<8sIIQQQII Q II16s16s16s16s I4x256s 104x")
_FIXED = (slice(0, 48), slice(56, 128))  # all but epoch and text
_BODY = struct.Struct("<16s16s64s16s QQQQ IBBBx 24x")  # of a header: what is behind its checksum

HEADER_DTYPE = np.dtype(
    {
        "names": [
            "checksum", "body", "member", "digest", "key", "tenant", "nbytes", "epoch", "sequence", "slot", "position",
            "key_bytes", "algorithm", "codec",
        ],
        "formats": ["V16", "V176", "(2,)<u8", "(2,)<u8", "(64,)u1", "(2,)<u8", "<u8", "<u8", "<u8", "<u8", "<u4", "u1",
                    "u1", "u1"],
        "offsets": [0, 16, 16, 32, 48, 112, 128, 136, 144, 152, 160, 164, 165, 166],
        "itemsize": HEADER_BYTES,
    }
)  # fmt: skip

Pairs = npt.NDArray[np.uint64]  # (n, 2): n digests of 16 bytes


class Superblock(NamedTuple):
    """A member file's description of itself and its set; docs/disk-format.md has the fields."""

    slot_bytes: int
    slots: int
    member: int
    members: int
    epoch: int
    algorithm: int
    key_check: bytes
    set_id: bytes
    layout_digest: bytes
    identity_digest: bytes
    identity_text: bytes

    @property
    def data_offset(self) -> int:
        return -(-(TABLE_OFFSET + self.slots * HEADER_BYTES) // PAGE) * PAGE

    @property
    def file_bytes(self) -> int:
        return self.data_offset + self.slots * self.slot_bytes

    @property
    def set_bytes(self) -> int:
        """Bytes of all files together. A disk that is asked for of this size has as many slots."""
        return self.members * self.file_bytes

    def pack(self) -> bytes:
        text = self.identity_text
        body = _SUPERBLOCK.pack(
            MAGIC, VERSION, HEADER_BYTES, self.slot_bytes, self.slots, self.data_offset, self.member, self.members,
            self.epoch, self.algorithm, 0, self.set_id, self.layout_digest, self.identity_digest, self.key_check,
            len(text), text,
        )  # fmt: skip
        return body + _digest(body, person=b"kvoffload super").digest()

    def member_digest(self) -> bytes:
        """Return the 16 bytes that each header of the member contains: a digest of everything but epoch and text."""
        packed = self.pack()
        return _digest(b"".join(packed[part] for part in _FIXED), person=b"kvoffload member").digest()


def check_identity(identity: str) -> str:
    if not isinstance(identity, str):
        raise TypeError(f'identity must be a string such as "llama-3.1-8b@0e9e39f/bf16", got {identity!r:.80}')
    return identity


def identity_fields(identity: str) -> tuple[bytes, bytes]:
    """Return the digest of an identity, and its first 256 bytes for messages."""
    data = identity.encode("utf-8", "surrogatepass")
    return _digest(data, person=b"kvoffload ident").digest(), data[:_MOST_TEXT]


def tenant_digest(tenant: str) -> bytes:
    """Return the 16 bytes for a tenant in headers: a digest, so that names may have any length; zeros for ""."""
    if not tenant:
        return bytes(DIGEST_BYTES)
    if named := namespace_digest(tenant):
        return named.ljust(DIGEST_BYTES, b"\0")
    return _digest(tenant.encode("utf-8", "surrogatepass"), person=b"kvoffload tenant").digest()


def unpack_superblock(data: bytes) -> Superblock | None:
    """Return the superblock in these 512 bytes; None if they are damaged, or of another version."""
    body, checksum = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    if len(data) != SUPERBLOCK_BYTES or _digest(body, person=b"kvoffload super").digest() != checksum:
        return None
    fields = _SUPERBLOCK.unpack(body)
    if fields[:3] != (MAGIC, VERSION, HEADER_BYTES):
        return None
    slot_bytes, slots, offset, member, members, epoch, algorithm, _, set_id, layout, identity, key_check = fields[3:15]
    length, text = fields[15:]
    found = Superblock(
        slot_bytes, slots, member, members, epoch, algorithm, key_check, set_id, layout, identity, text[:length]
    )
    return found if found.data_offset == offset and found.epoch <= MOST_EPOCH else None


def pack_header(
    checksum: Checksum,
    member_digest: bytes,
    *,
    slot: int,
    key: bytes,
    tenant: bytes,
    digest: bytes,
    nbytes: int,
    epoch: int,
    sequence: int,
    position: int,
) -> bytes:
    """Return the 192 bytes of a header. `tenant` is its digest, `digest` the payload's."""
    body = _BODY.pack(
        member_digest, digest, key, tenant, nbytes, epoch, sequence, slot, position, len(key), checksum.algorithm,
        NO_CODEC,
    )  # fmt: skip
    return checksum.of_bytes(body) + body


def renewed(checksum: Checksum, header: bytes, epoch: int) -> bytes:
    """Return the same header for another epoch."""
    body = header[DIGEST_BYTES:136] + epoch.to_bytes(8, "little") + header[144:]
    return checksum.of_bytes(body) + body


class Headers(NamedTuple):
    """Valid headers, by column, n rows each.

    Attributes:
        keys, key_bytes: uint8, (n, longest key), padded with zeros; and the length of each.
        slots: int64, numbers in the member.
        digests, tenants: digests of payload and tenant, 16 bytes each.
        sequences, positions: number of the put call that wrote the record, and the key's place in that call.
    """

    keys: UInt8Array
    key_bytes: UInt8Array
    slots: Int64Array
    digests: Pairs
    tenants: Pairs
    sequences: UInt64Array
    positions: npt.NDArray[np.uint32]

    def key_list(self) -> list[bytes]:
        lengths = np.flatnonzero(np.bincount(self.key_bytes)).tolist()
        if len(lengths) == 1:
            return _objects(self.keys[:, : lengths[0]])
        keys: list[bytes] = [b""] * len(self.keys)
        for length in lengths:
            places = np.flatnonzero(self.key_bytes == length)
            for place, key in zip(places.tolist(), _objects(self.keys[places, :length]), strict=True):
                keys[place] = key
        return keys

    def take(self, places: Int64Array) -> Headers:
        columns: list[Any] = [column[places] for column in self]
        return Headers(*columns)


def parse_headers(data: memoryview, superblock: Superblock, first_slot: int, checksum: Checksum) -> Headers:
    """Parse consecutive headers from the member's slot `first_slot` on. Returns the valid ones."""
    table = np.frombuffer(data, dtype=HEADER_DTYPE)
    slots = np.arange(first_slot, first_slot + len(table), dtype=np.uint64)
    member = as_pairs(superblock.member_digest())[0]
    plausible = (table["member"] == member).all(axis=1)
    plausible &= table["epoch"] == np.uint64(superblock.epoch)
    plausible &= table["slot"] == slots
    plausible &= table["nbytes"] == superblock.slot_bytes
    plausible &= (table["algorithm"] == checksum.algorithm) & (table["codec"] == NO_CODEC)
    plausible &= (table["key_bytes"] > 0) & (table["key_bytes"] <= MOST_KEY_BYTES)
    if not plausible.all():
        table, slots = table[plausible], slots[plausible]
    sums = b"".join(map(checksum.of_bytes, table["body"].tolist()))
    valid = (as_pairs(sums) == as_pairs(table["checksum"].tobytes())).all(axis=1)
    if not valid.all():
        table, slots = table[valid], slots[valid]
    return Headers(
        table["key"][:, : table["key_bytes"].max(initial=0)].copy(),
        table["key_bytes"].copy(),
        slots.astype(np.int64),
        table["digest"].copy(),
        table["tenant"].copy(),
        table["sequence"].copy(),
        table["position"].copy(),
    )


def join_headers(segments: Sequence[Headers]) -> Headers:
    width = max((segment.keys.shape[1] for segment in segments), default=0)
    keys = [np.pad(each.keys, ((0, 0), (0, width - each.keys.shape[1]))) for each in segments]
    columns = [np.concatenate(column) for column in zip(*(segment[1:] for segment in segments), strict=True)]
    return Headers(np.concatenate(keys), *columns)


def as_pairs(digests: bytes) -> Pairs:
    """Return consecutive digests of 16 bytes as rows of two integers, which numpy compares quickly."""
    return np.frombuffer(digests, dtype="<u8").reshape(-1, 2)


def _objects(keys: UInt8Array) -> list[bytes]:
    rows: list[bytes] = np.ascontiguousarray(keys).view(f"V{keys.shape[1]}").ravel().tolist()
    return rows


# checksums ------------------------------------------------------------------------------------------------------------


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
    """Return xxh3_128, or blake2b if there is a key of 16 to 64 secret bytes.

    Raises:
        TypeError, ValueError: `key`. The message does not show it.
    """
    begin: Callable[[], Any]
    of_bytes: Callable[[Buffer | bytes], bytes]
    if key is None:
        import xxhash

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
