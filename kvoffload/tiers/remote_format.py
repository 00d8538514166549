"""What a record is in a remote store: its name, and the header of 192 bytes before its payload; docs/remote-format.md.

A header is valid for one name only: it holds the key and the digest of the name space, and its checksum covers both.
The payload digest in it binds the payload to it. So a header and a payload of different puts are a miss.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

from kvoffload.internal.checks import shown
from kvoffload.internal.types import UInt8Array
from kvoffload.tiers.checksums import DIGEST_BYTES, Checksum
from kvoffload.tiers.format import NO_CODEC, identity_fields

VERSION = 1
MAGIC = b"\x89KVORMT\n"
HEADER_BYTES = 192
LONGEST_PREFIX = 100  # characters

_PREFIX = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")
_digest = partial(blake2b, digest_size=DIGEST_BYTES)

# magic, version, bytes of a header | payload bytes, ranges, algorithm, codec, key length
# layout digest, space digest, payload digest, key
_BODY = struct.Struct("<8sII QIBBBx 16s16s16s64s 32x")


def check_prefix(prefix: str) -> str:
    """The prefix, if every store can have it in names; ValueError if not."""
    if not isinstance(prefix, str) or len(prefix) > LONGEST_PREFIX or _PREFIX.fullmatch(prefix) is None:
        raise ValueError(
            f"prefix must be 1 to {LONGEST_PREFIX} letters, digits, '_', '-' and '.', in folders separated by '/' that "
            f"do not begin with '.', got {shown(prefix)}"
        )
    return prefix


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """Names and headers of the records of one layout, identity, shape and checksum key.

    Attributes:
        folder: what all of their names begin with, and no others: prefix, version, layout digest, space digest.
        layout: its digest, 16 bytes.
        space: 16 bytes that stand for identity, sizes of the ranges and checksum key.
        nbytes: of a payload.
        ranges: how many a payload consists of, one for each device.
        checksum: of headers and payloads.
    """

    folder: str
    layout: bytes
    space: bytes
    nbytes: int
    ranges: int
    checksum: Checksum

    def name(self, key: bytes) -> str:
        """Of a record: at most 300 characters: letters, digits and those of the prefix."""
        return self.folder + key.hex()

    def pack(self, key: bytes, rows: Sequence[UInt8Array]) -> bytes:
        """The header of a record whose payload these rows are, 192 bytes."""
        body = self._body(key, self.checksum.of([row.data for row in rows]))
        return self.checksum.of_bytes(body) + body

    def is_record(self, key: bytes, header: bytes, rows: Sequence[UInt8Array]) -> bool:
        """Whether this is the header of the key's record, and the rows are the payload that it was packed with."""
        return header == self.pack(key, rows)

    def _body(self, key: bytes, digest: bytes) -> bytes:
        return _BODY.pack(
            MAGIC, VERSION, HEADER_BYTES, self.nbytes, self.ranges, self.checksum.algorithm, NO_CODEC, len(key),
            self.layout, self.space, digest, key,
        )  # fmt: skip


def make_format(
    prefix: str, layout: bytes, identity: str, row_bytes: Sequence[int], checksum: Checksum
) -> RecordFormat:
    """The format of records with this layout digest and identity, one range of `row_bytes` for each device."""
    sizes = struct.pack(f"<I{len(row_bytes)}Q", len(row_bytes), *row_bytes)
    about = struct.pack("<IB", VERSION, checksum.algorithm) + checksum.key_check + identity_fields(identity)[0] + sizes
    space = _digest(about, person=b"kvoffload space").digest()
    folder = f"{check_prefix(prefix)}/{VERSION}/{layout.hex()}/{space.hex()}/"
    return RecordFormat(folder, layout, space, sum(row_bytes), len(row_bytes), checksum)
